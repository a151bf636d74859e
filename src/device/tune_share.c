/* Shares out the time for autotuning among the GEMMs of a step; see tune_share.h. */
#include "device/tune_share.h"

#include <math.h>
#include <stdlib.h>

static const double least_share = 0.004;

double qd_tune_cost(const qd_matmul_args *a)
{
    const double flops_per_second = 7e14, bytes_per_second = 4e12;
    double m = (double)a->m, n = (double)a->n, k = (double)a->k;
    double bytes = m * k * (double)qd_dtype_size(a->a_dtype) + n * k * (double)qd_dtype_size(a->b_dtype) +
                   m * n * (double)qd_dtype_size(a->c_dtype) * (a->accumulate || a->residual ? 2 : 1);
    return 2 * m * n * k / flops_per_second + bytes / bytes_per_second;
}

static int by_cost(const void *x, const void *y)
{
    const qd_tune_item *a = x, *b = y;
    return (a->cost > b->cost) - (a->cost < b->cost);
}

int qd_tune_share(qd_tune_item *items, int count, double seconds)
{
    double cost = 0, weight = 0;
    int missing = 0;
    for (int i = 0; i < count; i++)
        cost += items[i].cost;
    for (int i = 0; i < count; i++)
        weight += items[i].cost >= least_share * cost ? sqrt(items[i].cost) : 0;
    for (int i = 0; i < count; i++) {
        qd_tune_item *item = &items[i];
        bool matters = isinf(seconds) || item->cost >= least_share * cost;
        item->seconds = item->known || !matters ? 0 : isinf(seconds) ? seconds : seconds * sqrt(item->cost) / weight;
        missing += item->seconds > 0;
    }
    qsort(items, (size_t)count, sizeof *items, by_cost);
    return missing;
}
