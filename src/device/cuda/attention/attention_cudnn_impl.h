/* Attention through cuDNN's graph API: what the attention_cudnn*.c files share.
 *
 *   attention_cudnn_graph.c  writes the forward and the backward pass as operation graphs
 *   attention_cudnn_plan.c   asks cuDNN for engines that can run a graph and builds plans
 *   attention_cudnn.c        keeps one plan per shape, chosen by timing, and runs it */
#ifndef QD_DEVICE_CUDA_ATTENTION_ATTENTION_CUDNN_IMPL_H
#define QD_DEVICE_CUDA_ATTENTION_ATTENTION_CUDNN_IMPL_H

#include "device/device.h"

#include <cudnn.h>

/* What a plan depends on; addresses and scale are passed when it runs. Strides are in elements. */
typedef struct qd_attention_shape {
    int64_t batch, seq, heads, kv_heads, head_dim, v_dim;
    int64_t q_stride, k_stride, v_stride, o_stride;
    int64_t window; /* 0: none */
    bool capped;    /* scores have a soft-cap */
    bool backward;
    bool deterministic; /* backward: dq without atomics, in a workspace of (batch, heads, seq, seq) */
    bool maxima;        /* forward: the largest score and the sum of exponentials of each row, instead of lse */
} qd_attention_shape;

/* Tensors that get an address when a plan runs, by their cuDNN uid. Uids from QD_CUDNN_VIRTUAL on
 * are virtual tensors, which exist only inside a kernel. */
enum {
    QD_CUDNN_Q = 1,
    QD_CUDNN_K,
    QD_CUDNN_V,
    QD_CUDNN_O,
    QD_CUDNN_LSE,
    QD_CUDNN_SCALE,    /* host scalars from here … */
    QD_CUDNN_MASKED,   /* value of masked scores: -infinity */
    QD_CUDNN_WINDOW,
    QD_CUDNN_CAP,
    QD_CUDNN_ONE,      /* … to here */
    QD_CUDNN_D_O,
    QD_CUDNN_DELTA,    /* (batch, heads, seq): row sums of d_o * o */
    QD_CUDNN_DQ_SUM,   /* (batch, heads, seq, head_dim) fp32, unless deterministic */
    QD_CUDNN_DQ,
    QD_CUDNN_DK,
    QD_CUDNN_DV,
    QD_CUDNN_MOST,     /* (batch, heads, seq): the largest score of each row */
    QD_CUDNN_SUM,      /* likewise: the sum of exponentials relative to it */
    QD_CUDNN_VIRTUAL,
};

enum { QD_CUDNN_DESCRIPTORS = 160, QD_CUDNN_OPERATIONS = 48, QD_CUDNN_CANDIDATES = 8 };

/* An operation graph and all its descriptors. */
typedef struct qd_cudnn_graph {
    cudnnBackendDescriptor_t made[QD_CUDNN_DESCRIPTORS];
    int made_count;
    cudnnBackendDescriptor_t operations[QD_CUDNN_OPERATIONS];
    int operation_count;
    int64_t next_virtual;
    cudnnBackendDescriptor_t graph;
    qd_status status; /* of the first call that failed; later calls do nothing */
} qd_cudnn_graph;

/* Makes and finalizes the graph of a shape. handle may be NULL: then plans can be made for
 * described devices only. On failure nothing is left to destroy. */
qd_status qd_cudnn_graph_create(cudnnHandle_t handle, const qd_attention_shape *shape, qd_cudnn_graph *graph);
void qd_cudnn_graph_destroy(qd_cudnn_graph *graph);

/* One way to run a graph. name: "engine 5 knobs 2=1 13=0", a stable name for this library
 * version. */
typedef struct qd_cudnn_plan {
    cudnnBackendDescriptor_t plan, config;
    int64_t workspace_bytes;
    char name[192];
} qd_cudnn_plan;

/* Up to QD_CUDNN_CANDIDATES plans, in the order of cuDNN's heuristics; *count may be 0. If `wanted`
 * is not NULL, only the plan of that name, if it is among them. device: a finalized DEVICEPROP
 * descriptor, or NULL for the handle's device. The graph must outlive its plans. */
qd_status qd_cudnn_plans_create(cudnnHandle_t handle, cudnnBackendDescriptor_t device, const qd_cudnn_graph *graph,
                                const char *wanted, qd_cudnn_plan plans[QD_CUDNN_CANDIDATES], int *count);
void qd_cudnn_plan_destroy(qd_cudnn_plan *plan);

/* Records the failure of a cuDNN call with the library's own message. */
qd_status qd_cudnn_fail_at(const char *file, int line, const char *function, const char *call, cudnnStatus_t error);
#define QD_CUDNN_TRY(call)                                                                                  \
    do {                                                                                                    \
        cudnnStatus_t qd_cudnn_error = (call);                                                              \
        if (qd_cudnn_error != CUDNN_STATUS_SUCCESS)                                                         \
            return qd_cudnn_fail_at(__FILE__, __LINE__, __func__, #call, qd_cudnn_error);                   \
    } while (0)

#endif
