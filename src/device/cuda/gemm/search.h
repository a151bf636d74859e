/* Reports what a search for the fastest GEMM algorithm measured, for benchmarks. */
#ifndef QD_DEVICE_CUDA_GEMM_SEARCH_H
#define QD_DEVICE_CUDA_GEMM_SEARCH_H

#include "device/device.h"

enum { QD_SEARCH_WAYS = 4 };

/* One split between epilogue and separate kernels. Seconds include those kernels. */
typedef struct qd_search_way {
    char fused[24];      /* "bias+gelu", "none"; "converted": through fp32 copies */
    int candidates;      /* algorithms that ran */
    /* Rank of the best one in the library's order. From 100 on it is not the library's proposal for
     * this size: 1xx: proposed for another size, 2xx: a combination of proposals, 3xx and 4xx: one
     * setting of the best changed, 5xx: the choice of another GEMM. */
    int chosen;
    int algorithm, tile; /* of the best one, with the library's numbers */
    int stages, split;
    double first, best, worst; /* the library's first proposal, the fastest (a median under load), the slowest */
} qd_search_way;

typedef struct qd_search_report {
    qd_search_way ways[QD_SEARCH_WAYS];
    int way_count, chosen; /* chosen: the way used from now on */
    double seconds;        /* of the chosen way: the median of repeated runs */
} qd_search_report;

/* Searches for one GEMM on a CUDA device, even if it has been tuned before, and keeps the result.
 * Addresses are ignored, but a member that is not NULL counts as requested. */
qd_status qd_cuda_search(qd_device *device, const qd_matmul_args *call, qd_search_report *report);

/* Builds and finalizes cuDNN's operation graph for an attention call; needs no GPU. QD_OK if the
 * library accepts it. */
qd_status qd_cuda_attention_graph_check(const qd_attention_args *a, bool backward, bool deterministic);

/* Attention with our own kernels (attention*.cu): everything that the CPU device supports. */
qd_status qd_cuda_attention_forward_own(qd_stream *stream, const qd_attention_args *a);
qd_status qd_cuda_attention_backward_own(qd_stream *stream, const qd_attention_args *a);

#endif
