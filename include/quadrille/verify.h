/* Runs two layouts of one configuration side by side and finds the first place where they
 * differ. */
#ifndef QUADRILLE_VERIFY_H
#define QUADRILLE_VERIFY_H

#include <quadrille/export.h>
#include <quadrille/options.h>
#include <quadrille/sized.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_verify_report {
    size_t size;
    int64_t steps;             /* compared */
    bool bit_equal;            /* losses, gradients and weights of all steps */
    double eps;                /* of AdamW in both runs, where it is not the configurations' own; else 0 */
    double worst_loss, worst_gradient, worst_weight; /* relative differences */
    char worst_gradient_name[128], worst_weight_name[128];
    /* the first step at which something is off by more than the tolerance; 0: none */
    int64_t first_step;
    char first_what[192]; /* "gradient of block.0.attn.q.weight: relative difference 3.2e-03" */
} qd_verify_report;
QD_SIZED_DEFAULT(qd_verify_report)

/* Ranks are threads of this process. Returns QD_DIFFERENT (with first_what as message) when a
 * difference exceeds `tolerance`; other codes when a layout cannot run. AdamW (also of what Muon
 * leaves to it) divides each gradient by its own size: with the usual train.eps it makes full steps
 * of gradients that are rounding alone. Both runs take at least `eps` instead. */
QD_API qd_status qd_verify(const qd_options *layout, const qd_options *against, int64_t steps, double tolerance, double eps,
                           qd_verify_report *report);

#ifdef __cplusplus
}
#endif
#endif
