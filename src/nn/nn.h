/* Executes the op lists that `spec` built, with the kernels of a device. Works on local shapes and
 * addresses only. */
#ifndef QD_NN_NN_H
#define QD_NN_NN_H

#include "device/timeline.h"
#include "spec/program/program.h"

/* Time by kind of op. A frame with a profile counts calls, FLOPs and bytes in it and records the
 * ops on its timeline with ids op_id + kind; the caller adds the seconds when it collects the
 * timeline. */
typedef struct qd_op_profile {
    double seconds[QD_OP_KIND_COUNT], flops[QD_OP_KIND_COUNT];
    int64_t bytes[QD_OP_KIND_COUNT], calls[QD_OP_KIND_COUNT];
    qd_status (*after_op)(void *context, qd_stream *stream); /* called after each op, outside its timed interval; NULL: none */
    void *context;
} qd_op_profile;

/* Executes the ops that communicate; nn itself has no communicators. `index`: position of the op in
 * its list. start returns when the op is complete, unless it is asynchronous; then wait is called
 * once. */
typedef struct qd_exchange {
    void *context;
    qd_status (*start)(void *context, int index, const qd_op *op, const qd_slot *slots, void *const *at);
    qd_status (*wait)(void *context, int index);
    /* One dispatch round of rows to experts, or back: see spec/layout/experts.h. `table`: in host
     * memory. Returns when the round is complete. */
    qd_status (*round)(void *context, const qd_op *op, int64_t round, bool back, const int32_t *table, const void *from, void *to);
    /* If the host cannot access device memory: a host copy of the table of counts that an
     * ALL_GATHER, or tell, last wrote to this address. The host waits for the copy, not for what
     * was enqueued after it. */
    qd_status (*counts)(void *context, const int32_t *table, const int32_t **host);
    /* A table that the host computes. compose: the host side of `count` numbers at this device
     * address, to be modified; it holds the previous contents. tell: enqueues their copy to the
     * device. If the host can access device memory, both sides are the same memory. */
    qd_status (*compose)(void *context, int32_t *table, int64_t count, int32_t **host);
    qd_status (*tell)(void *context, int32_t *table);
} qd_exchange;

/* The data that one module action works on. */
typedef struct qd_frame {
    qd_stream *stream;
    const qd_kernels *kernels;
    const qd_program *program;
    int module;
    char *use[QD_USE_COUNT];     /* addresses of the action's buffers, NULL: none */
    int64_t first[QD_USE_COUNT]; /* index in the storage of the first element of parameter and gradient buffers */
    char *scratch;
    const float *rope;
    float *maxima; /* largest scores of this rank's heads of the module, or of its first prediction module; NULL: not wanted */
    char *cache;   /* generation: KV cache of all blocks */
    float *logits; /* generation: (vocab) */
    int64_t past;  /* generation: number of tokens in the cache */
    double *loss;
    double *scores; /* of the micro-batch (QD_SLOT_SCORES) */
    uint64_t seed, step; /* of the dropout masks */
    int64_t first_row;   /* index in the global batch of the first row of the micro-batch */
    const qd_exchange *exchange; /* NULL: no op of the program communicates */
    bool overwrite;      /* parameter gradients are undefined: ops that can overwrite them do (qd_op.overwrites) */
    /* Sums of squares of the rows of this rank's gradients; NULL: not computed in this action
     * (qd_op.squares). */
    double *squares[QD_FAMILY_COUNT];
    bool documents;      /* attention is limited to documents */
    qd_op_profile *profile; /* NULL: no profile */
    qd_timeline *timeline;
    int op_id;
} qd_frame;

/* Runs the ops of the given phases (see qd_op_runs) in list order. Parameter gradients are
 * accumulated unless frame->overwrite is set; all other outputs are overwritten. On QD_OK all
 * asynchronous ops are complete; after a failure, those that were started are left to the
 * exchange. */
qd_status qd_nn_run(const qd_frame *frame, unsigned phases);

/* Every kind of op needs a runner. */
bool qd_nn_has_runner(qd_op_kind kind);

/* Calls `visit` for each GEMM of the program's ops, for qd_device_tune; the same GEMM is visited
 * once per op. Its addresses only tell which operands are NULL. */
typedef qd_status (*qd_product_visitor)(void *context, const qd_matmul_args *product);
qd_status qd_nn_products(const qd_program *program, qd_product_visitor visit, void *context);

#endif
