/* Scaling curves: the same layout on increasing numbers of accelerators. */
#include "sim/simulate_impl.h"

#include <stdlib.h>

/* The smallest number of accelerators: one set of model-parallel ranks. */
static int smallest(const qd_options *options)
{
    static const char *const axes[] = {"parallel.tp", "parallel.cp", "parallel.pp"};
    int ranks = 1;
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        ranks *= (int)qd_options_int(options, axes[i]) > 0 ? (int)qd_options_int(options, axes[i]) : 1;
    return ranks;
}

static qd_status set_number(qd_options *options, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return qd_options_set(options, key, text);
}

static void fill_point(const qd_sim_report *r, qd_scaling_point *p)
{
    p->possible = true;
    p->fits = r->fits;
    p->step_seconds = r->step_seconds;
    p->tokens_per_second = r->tokens_per_second;
    p->compute_seconds = r->compute_seconds;
    for (int i = 0; i < r->exposed_count; i++)
        p->communication_seconds += r->exposed[i].value;
}

qd_status qd_simulate_scaling(const qd_options *options, int most, bool strong, qd_scaling_point *points, int capacity, int *count)
{
    int least = smallest(options), ranks = (int)qd_options_int(options, "parallel.ranks");
    int64_t batch = qd_options_int(options, "train.global_batch");
    ranks = ranks > least ? ranks : least;
    *count = 0;
    if (least > most)
        return QD_FAIL(QD_USAGE, "scaling up to %d accelerators: the layout needs at least %d", most, least);
    for (int gpus = least; gpus <= most && *count < capacity; gpus *= 2) {
        qd_scaling_point *p = &points[(*count)++];
        qd_options *own = NULL;
        qd_simulation *simulation = NULL;
        *p = (qd_scaling_point){.gpus = gpus};
        QD_TRY(qd_options_copy(options, &own));
        qd_status status = set_number(own, "parallel.ranks", gpus);
        if (status == QD_OK)
            status = set_number(own, "parallel.dp", -1);
        int64_t grown = batch * gpus / ranks;
        if (status == QD_OK && !strong)
            status = set_number(own, "train.global_batch", grown > 0 ? grown : 1);
        if (status == QD_OK)
            status = qd_simulate(own, &simulation);
        if (status == QD_OK)
            fill_point(qd_simulation_report(simulation), p);
        else if (status == QD_USAGE) { /* the batch does not divide here: a point that cannot run */
            snprintf(p->refusal, sizeof p->refusal, "%s", qd_error_message());
            qd_error_clear();
        }
        qd_simulation_destroy(simulation);
        qd_options_destroy(own);
        if (status != QD_OK && status != QD_USAGE)
            return status;
    }
    return QD_OK;
}
