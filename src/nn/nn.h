/* Executes the op lists that spec wrote, with a device's kernels. Sees local shapes and addresses only. */
#ifndef QD_NN_NN_H
#define QD_NN_NN_H

#include "device/device.h"
#include "spec/program.h"

/* Where the time goes, by kind of op; filled when a frame carries one (devices that compute at once only). */
typedef struct qd_op_profile {
    double seconds[QD_OP_KIND_COUNT], flops[QD_OP_KIND_COUNT];
    int64_t bytes[QD_OP_KIND_COUNT], calls[QD_OP_KIND_COUNT];
} qd_op_profile;

/* What one module action works on. */
typedef struct qd_frame {
    qd_stream *stream;
    const qd_kernels *kernels;
    const qd_program *program;
    int module;
    char *param, *grad, *tied_grad; /* bases of the persistent buffers; gradients may be NULL when not training */
    char *use[QD_USE_COUNT];        /* addresses of the action's buffers, NULL: none */
    char *scratch;
    const float *rope;
    char *cache;   /* generation: keys and values of all blocks */
    float *logits; /* generation: (vocab) */
    int64_t past;  /* generation: tokens that are in the cache */
    double *loss;
    uint64_t seed, step; /* of the dropout masks */
    int64_t first_row;   /* index in the global batch of the micro-batch's first row */
    float loss_scale;    /* what the gradient of each token's loss is multiplied with: 1 / tokens of the global batch */
    bool documents;      /* attention stays inside documents */
    qd_op_profile *profile; /* NULL: not wanted */
} qd_frame;

/* Runs the ops of the given phases in list order. phases: bits 1 << qd_phase, or QD_NN_AGAIN: those of phase F that the
 * backward pass needs once more. Gradients of parameters are accumulated,
 * all other outputs overwritten. */
#define QD_NN_AGAIN (1u << QD_PHASE_COUNT)
qd_status qd_nn_run(const qd_frame *frame, unsigned phases);

#endif
