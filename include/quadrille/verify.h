/* Verification: runs two layouts of one configuration and finds the first difference between
 * them. */
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
    bool bit_equal;            /* losses, gradients and weights of all steps are bit-identical */
    double eps;                /* eps of AdamW in both runs, if it replaces train.eps; else 0 */
    double worst_loss, worst_gradient, worst_weight; /* relative differences */
    char worst_gradient_name[128], worst_weight_name[128];
    /* the first step with a difference above the tolerance; 0: none */
    int64_t first_step;
    char first_what[192]; /* "gradient of block.0.attn.q.weight: relative difference 3.2e-03" */
} qd_verify_report;
QD_SIZED_DEFAULT(qd_verify_report)

/* Trains both layouts for `steps` steps and compares losses, gradients and weights. Ranks are
 * threads of this process; not collective. QD_DIFFERENT, with first_what as message, if a relative
 * difference exceeds `tolerance`; QD_USAGE and others if a layout cannot run.
 *
 * AdamW, also for parameters that Muon leaves to it, divides a gradient by its magnitude. With the
 * usual train.eps, a gradient that is only rounding error would cause a full step. Both runs
 * therefore use at least `eps`. */
QD_API qd_status qd_verify(const qd_options *layout, const qd_options *against, int64_t steps, double tolerance, double eps,
                           qd_verify_report *report);

#ifdef __cplusplus
}
#endif
#endif
