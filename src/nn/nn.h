/* Executes the op lists that spec wrote, with a device's kernels. Sees local shapes and addresses
 * only. */
#ifndef QD_NN_NN_H
#define QD_NN_NN_H

#include "device/timeline.h"
#include "spec/program/program.h"

/* Where the time goes, by kind of op. A frame that carries one counts calls, FLOPs and bytes in it
 * and puts the ops on its timeline as pieces op_id + kind; who collects the timeline adds the
 * seconds. */
typedef struct qd_op_profile {
    double seconds[QD_OP_KIND_COUNT], flops[QD_OP_KIND_COUNT];
    int64_t bytes[QD_OP_KIND_COUNT], calls[QD_OP_KIND_COUNT];
    qd_status (*after_op)(void *context, qd_stream *stream); /* called after each op, outside its time; NULL: none */
    void *context;
} qd_op_profile;

/* How ops that communicate are carried out; nn itself knows no communicators. `index`: of the op in
 * its list. start returns when the op has ended, unless it is asynchronous; wait is then called
 * once. */
typedef struct qd_exchange {
    void *context;
    qd_status (*start)(void *context, int index, const qd_op *op, const qd_slot *slots, void *const *at);
    qd_status (*wait)(void *context, int index);
    /* One round of rows on their way to experts, or back: see spec/layout/experts.h. `table`: as
     * the host can read it. Returns when it has ended. */
    qd_status (*round)(void *context, const qd_op *op, int64_t round, bool back, const int32_t *table, const void *from, void *to);
    /* Where device memory is not the host's: a copy of the table of counts that an ALL_GATHER, or
     * tell, has last put at this address. The host waits for the copy, not for what was enqueued
     * after it. */
    qd_status (*counts)(void *context, const int32_t *table, const int32_t **host);
    /* A table that the host works out. compose: the host's side of `count` numbers at this address
     * of the device, to be written: it holds what it held before. tell: enqueues their copy to the
     * device. Elsewhere the two sides are one. */
    qd_status (*compose)(void *context, int32_t *table, int64_t count, int32_t **host);
    qd_status (*tell)(void *context, int32_t *table);
} qd_exchange;

/* What one module action works on. */
typedef struct qd_frame {
    qd_stream *stream;
    const qd_kernels *kernels;
    const qd_program *program;
    int module;
    char *use[QD_USE_COUNT];     /* addresses of the action's buffers, NULL: none */
    int64_t first[QD_USE_COUNT]; /* element of the storage at which those of parameters and gradients begin */
    char *scratch;
    const float *rope;
    char *cache;   /* generation: keys and values of all blocks */
    float *logits; /* generation: (vocab) */
    int64_t past;  /* generation: tokens that are in the cache */
    double *loss;
    uint64_t seed, step; /* of the dropout masks */
    int64_t first_row;   /* index in the global batch of the micro-batch's first row */
    const qd_exchange *exchange; /* NULL: no op of the program communicates */
    bool overwrite;      /* gradients of parameters are not there yet: ops that can, overwrite them (qd_op.overwrites) */
    double *squares[QD_FAMILY_COUNT]; /* sums of squares of the rows of this rank's gradients; NULL: not from this action (qd_op.squares) */
    bool documents;      /* attention stays inside documents */
    qd_op_profile *profile; /* NULL: not wanted */
    qd_timeline *timeline;
    int op_id;
} qd_frame;

/* Runs the ops of the given phases (see qd_op_runs) in list order. Gradients of parameters are
 * accumulated, unless the frame says otherwise; all other outputs are overwritten. Asynchronous ops
 * have ended when it returns QD_OK; after a failure those that were started are left to the
 * exchange. */
qd_status qd_nn_run(const qd_frame *frame, unsigned phases);

/* Every kind of op needs one. */
bool qd_nn_has_runner(qd_op_kind kind);

/* The GEMMs that the program's ops make, for qd_device_tune. Calls `visit` for each, the same one
 * several times where several ops make it. Of their addresses only whether they are NULL means
 * anything. */
typedef qd_status (*qd_product_visitor)(void *context, const qd_matmul_args *product);
qd_status qd_nn_products(const qd_program *program, qd_product_visitor visit, void *context);

#endif
