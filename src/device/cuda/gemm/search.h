/* What a search for the fastest way to compute a product saw; for programs that measure. */
#ifndef QD_DEVICE_CUDA_GEMM_SEARCH_H
#define QD_DEVICE_CUDA_GEMM_SEARCH_H

#include "device/device.h"

enum { QD_SEARCH_WAYS = 4 };

/* One split between the product's epilogue and kernels of their own. Seconds include those
 * kernels. */
typedef struct qd_search_way {
    char fused[24];      /* "bias+gelu", "none"; "converted": through fp32 copies */
    int candidates;      /* algorithms that ran */
    int chosen;          /* place of the best one in the library's order; from 100 on: not its proposal for this
                          * size; 1xx: for another size, 2xx: a mixture of proposals, 3xx and 4xx: one
                          * setting of the best changed, 5xx: the choice of another product */
    int algorithm, tile; /* of the chosen way's best one, as the library numbers them */
    int stages, split;
    double first, best, worst; /* the library's favourite, the fastest (a median under load), the slowest */
} qd_search_way;

typedef struct qd_search_report {
    qd_search_way ways[QD_SEARCH_WAYS];
    int way_count, chosen; /* chosen: the way that runs from now on */
    double seconds;        /* of it: the median of repeats */
} qd_search_report;

/* Searches for one product on a CUDA device, also if it has been tuned before, and keeps the
 * result. Addresses are ignored, but what is not NULL is taken as asked for. */
qd_status qd_cuda_search(qd_device *device, const qd_matmul_args *call, qd_search_report *report);

/* Builds and finalises cuDNN's operation graph for an attention call; needs no GPU. QD_OK: the
 * library accepts it. */
qd_status qd_cuda_attention_graph_check(const qd_attention_args *a, bool backward, bool deterministic);

#endif
