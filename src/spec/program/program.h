/* The step program: what one rank does in one training step, as a list of actions. Built once from
 * (model, mesh, strategy); executed by the trainer, added up by the accountant, checked across
 * ranks by the checker, named by the tracer. Ranks that do the same share one program. */
#ifndef QD_SPEC_PROGRAM_PROGRAM_H
#define QD_SPEC_PROGRAM_PROGRAM_H

#include "base/text/json_writer.h"
#include "spec/ops/ops.h"
#include "spec/schedule/schedule.h"
#include "spec/layout/storage.h"

#include <stdio.h>

#define QD_RESHARD_NEVER 0
#define QD_RESHARD_ALL 1

/* How the step is carried out; with the model and the mesh it determines the program. */
typedef struct qd_strategy {
    int64_t seq, micro_batch; /* rows of a micro-batch: micro_batch sequences of seq tokens */
    int micro_batches;        /* per rank and step */
    qd_dtype activation, param, grad;
    bool split_master;    /* beside bf16 parameters there is what they lack of their fp32 values (base/half.h) instead of those */
    qd_optim_kind optimizer;
    bool momentum;        /* SGD keeps a momentum buffer */
    int muon_steps;       /* Muon: Newton-Schulz steps */
    bool overlap;         /* reductions start during the backward pass, on the communication stream */
    int tensor_pieces;    /* products next to an exchange over tp are cut into so many, to overlap with it */
    bool split_backward;  /* backward_input and backward_weight are separate actions */
    int64_t bucket_bytes; /* gradients are reduced in ranges of about this size */
    int zero;             /* sharded over ranks of the data axes: 1: optimizer state, 2: gradients too, 3: parameters too */
    int shard;            /* how many ranks hold one sharded copy together, a divisor of the data axes; 0: all */
    int prefetch;         /* zero 3: modules whose parameters are in memory at once; 1, 2: that are gathered at once */
    int reshard;          /* zero 3, after the forward pass: QD_RESHARD_NEVER, QD_RESHARD_ALL, or kept by groups of so many */
    bool sync_each;       /* gradients are summed over ranks after each micro-batch, not once per step */
    qd_recompute recompute; /* of the first recompute_layers blocks, whose activations live longest; the others keep all */
    int recompute_layers;   /* -1: all */
    qd_swiglu swiglu;
    const qd_device_traits *traits; /* of the device it will run on */
    double expert_rows;   /* ep: room for so many times the rows of a mean load */
    bool offload;         /* optimizer state lies in host memory and passes through the device in chunks; see spec/program/offload.h */
    int64_t chunk_bytes;  /* of about this size */
    bool training;        /* false: forward only (evaluation) */
    qd_cp_mode cp_mode;   /* with cp above 1: how queries meet the keys of other ranks */
    int64_t context;      /* > 0: generation; a step adds seq tokens to one sequence of at most this length */
    const qd_schedule *schedule; /* order of the passes; its stages are the ledger's. NULL: one stage, a micro-batch after the other */
} qd_strategy;

bool qd_master_is_split(const qd_strategy *s); /* QD_BUFFER_MASTER has what the bf16 parameters lack */
int qd_master_bytes(const qd_strategy *s);     /* of an element of QD_BUFFER_MASTER: fp32 values, what is split off them, or none */
double qd_update_bytes(const qd_strategy *s); /* that an update moves per element: gradient, values, the optimizer's state */

/* Copies from and to host memory have streams of their own. */
typedef enum qd_stream_id { QD_STREAM_COMPUTE, QD_STREAM_COMM, QD_STREAM_IN, QD_STREAM_OUT, QD_STREAM_COUNT } qd_stream_id;

/* X(kind, name) */
#define QD_ACTION_TABLE(X)                                                                                  \
    X(ALLOC, "alloc")                     /* a buffer's planned place is taken */                           \
    X(FREE, "free")                       /* and given back */                                              \
    X(LOAD, "load")                       /* tokens, targets and document starts of a micro-batch */        \
    X(ZERO, "zero")                       /* a range of a buffer becomes 0 */                               \
    X(FORWARD, "forward")                 /* phase F of a module for a micro-batch */                       \
    X(RECOMPUTE, "recompute")             /* the ops of phase F whose results the backward pass needs */    \
    X(BACKWARD, "backward")               /* phases I and W */                                              \
    X(BACKWARD_INPUT, "backward_input")   /* phase I */                                                     \
    X(BACKWARD_WEIGHT, "backward_weight") /* phase W */                                                     \
    X(ADD_TIED, "add_tied")               /* the second gradient of a tied parameter joins the first */     \
    X(REDUCE, "reduce")                   /* sum of a range of a buffer over the group (all-reduce) */      \
    X(REDUCE_SCATTER, "reduce_scatter")   /* sums of a run of parameters, each rank getting its part */     \
    X(GATHER, "gather")                   /* all parts of a run of parameters, or of the norm's sums */     \
    X(SEND, "send")                       /* a range of a buffer goes to another rank of the pipeline */    \
    X(RECV, "recv")                       /* and arrives there */                                           \
    X(PACK, "pack")                       /* this rank's part of a run of parameters, out of whole tensors */ \
    X(UNPACK, "unpack")                   /* and back into them */                                          \
    X(ADD, "add")                         /* a range of one buffer joins that of another */                 \
    X(SQUARES, "squares")                 /* row sums of squares of a module's gradients, where no op gave them */ \
    X(SUMS, "sums")                       /* the rows' sums of each parameter; of those others count, 0 */  \
    X(NORM, "norm")                       /* the gradient norm and the factor that clips it */              \
    X(FETCH, "fetch")                     /* a chunk of the optimizer's state comes from host memory */     \
    X(STORE, "store")                     /* and goes back */                                               \
    X(UPDATE, "update")                   /* the optimizer on a module's parameters; Muon: on those that are no matrices */ \
    X(MOMENTUM, "momentum")               /* Muon: momentum of a run of matrices, and what is to be orthogonalized */ \
    X(COLLECT, "collect")                 /* rows of each of them to the rank that orthogonalizes it */     \
    X(ORTHOGONALIZE, "orthogonalize")     /* the one of them that is this rank's */                         \
    X(HAND_BACK, "hand_back")             /* rows of the result to the ranks that have those rows */        \
    X(SHARE, "share")                     /* the whole result to all ranks (broadcast) */                   \
    X(UPDATE_MATRICES, "update_matrices") /* the result is applied */

typedef enum qd_action_kind {
#define QD_ACTION_ENUM(kind, name) QD_ACTION_##kind,
    QD_ACTION_TABLE(QD_ACTION_ENUM)
#undef QD_ACTION_ENUM
    QD_ACTION_KIND_COUNT
} qd_action_kind;

/* What a buffer is for; the accountant's lines. */
#define QD_BUFFER_TABLE(X)                                                                                  \
    X(PARAM, "parameters")                                                                                  \
    X(GRAD, "gradients")                                                                                    \
    X(TIED_GRAD, "tied gradients")                                                                          \
    X(MASTER, "master weights")                                                                             \
    X(MOMENT1, "first moment")                                                                              \
    X(MOMENT2, "second moment")                                                                             \
    X(CHUNK, "chunks of optimizer state")                                                                   \
    X(UNIT, "gathered parameters")                                                                          \
    X(KEPT, "parameters kept by groups")                                                                    \
    X(GRAD_BLOCK, "gradients before their reduction")                                                       \
    X(PART, "parts of tensors on their way")                                                                \
    X(MATRIX, "matrices that Muon orthogonalizes")                                                          \
    X(MATRIX_SCRATCH, "scratch of Muon")                                                                    \
    X(INPUT, "input")                                                                                       \
    X(PORT, "activations between modules")                                                                  \
    X(STASH_I, "activations until backward of inputs")                                                      \
    X(STASH_W, "activations until backward of weights")                                                     \
    X(MID, "gradients until backward of weights")                                                           \
    X(PORT_GRAD, "gradients between modules")                                                               \
    X(SCRATCH, "scratch")                                                                                   \
    X(TABLE, "rotary table")                                                                                \
    X(SQUARES, "sums for the gradient norm")                                                                \
    X(SUMS, "sums of each parameter")                                                                       \
    X(CACHE, "keys and values of earlier tokens")                                                           \
    X(LOGITS, "logits")                                                                                     \
    X(LOSS, "loss and gradient norm")

typedef enum qd_buffer_kind {
#define QD_BUFFER_ENUM(kind, name) QD_BUFFER_##kind,
    QD_BUFFER_TABLE(QD_BUFFER_ENUM)
#undef QD_BUFFER_ENUM
    QD_BUFFER_KIND_COUNT
} qd_buffer_kind;

/* Doubles of LOSS: sum of losses, tokens counted; NORM: the gradient norm, the factor that updates
 * multiply gradients with (not finite: no update), the first parameter whose gradient is not finite
 * or -1. */
enum { QD_LOSS_SUM, QD_LOSS_TOKENS, QD_LOSS_NORM, QD_LOSS_FACTOR, QD_LOSS_BAD, QD_LOSS_COUNT };

typedef struct qd_buffer {
    qd_buffer_kind kind;
    int module, microbatch; /* -1: of all */
    int64_t bytes;
    bool persistent; /* lives as long as the run; others between their ALLOC and FREE */
    bool sharded;    /* holds parts of tensors, as storage.h says; else whole ones */
    bool host;       /* lies in host memory; persistent */
    int64_t first;   /* element of the whole or sharded storage at which it begins */
    int64_t offset;  /* of the others: in the dynamic area, planned by qd_memory_plan */
} qd_buffer;

/* The buffers a module action works on. */
typedef enum qd_use {
    QD_USE_PARAM,      /* values of the module's own parameters */
    QD_USE_TIED_PARAM, /* values of those it shares with another module */
    QD_USE_GRAD,
    QD_USE_TIED_GRAD,
    QD_USE_IN,
    QD_USE_OUT,
    QD_USE_GRAD_IN,
    QD_USE_GRAD_OUT,
    QD_USE_INPUT,
    QD_USE_STASH_I,
    QD_USE_STASH_W,
    QD_USE_MID,
    QD_USE_COUNT
} qd_use;

typedef struct qd_action {
    uint8_t kind;   /* qd_action_kind */
    uint8_t stream; /* qd_stream_id */
    bool overwrite; /* module actions: the first to write these gradients, nothing is there to be added to; ADD: likewise the sum */
    bool squares;   /* module actions: the last to write these gradients; ops that can (qd_op.squares) sum their squares */
    uint8_t states; /* with a chunk: which kinds of optimizer state it has, see spec/program/offload.h */
    int32_t module; /* -1: none */
    int32_t microbatch;
    int32_t buffer;              /* ALLOC, FREE, LOAD, ZERO, REDUCE; ADD: the sum; others below: the one of whole tensors */
    int32_t part;                /* REDUCE_SCATTER, GATHER, PACK, UNPACK: the buffer of this rank's parts; ADD: what is added */
    int32_t chunk;               /* FETCH, STORE, and updates of state in host memory: the buffer that has it on the device; else -1 */
    int32_t param, params;       /* of those: the run of parameters [param, param + params) */
    int32_t parts;               /* of those: into how many parts tensors are cut */
                                 /* MOMENTUM .. UPDATE_MATRICES: see spec/program/muon.h */
    int32_t use[QD_USE_COUNT];   /* FORWARD, BACKWARD…: buffer indices, -1: none */
    /* ZERO, REDUCE, ADD: elements, counted as the buffer's `first`; collectives: count in all; with
     * a chunk: of the state; NORM: the tokens of the global batch, by which the ops have divided
     * (qd_op.scale) */
    int64_t first, count;
    qd_dtype dtype;              /* of those elements */
    int32_t group;               /* collectives, SEND, RECV: in the program's groups; -1: none */
    int32_t peer;                /* SEND, RECV: how far behind this rank in the group, round and round */
    /* what all ranks of the world together send, if all do as this one does: of a collective, a
     * SEND, or the ops of a module action */
    int64_t bytes;
    double flops;
    int32_t dep_first, dep_count; /* in the program's deps: actions of other streams that must have ended */
} qd_action;

/* A matrix that Muon orthogonalizes, and the places in the two groups of the rank that does; see
 * spec/program/muon.h. */
typedef struct qd_matrix {
    int param, round;
    int owner;  /* in the matrix_group of its family */
    int sharer; /* in the share_group */
    int64_t part; /* element of a round's parts at which this rank's box of it lies */
} qd_matrix;

/* Which ranks of the norm's group (qd_norm_group) count a parameter's squares: those whose place in
 * the group is below `holders` and a multiple of `repeat`. Each element is then counted once.
 * holders 0: no rank does, it is no part of the norm. */
typedef struct qd_norm_rule {
    int32_t holders, repeat;
} qd_norm_rule;

#define QD_GROUP_LIMIT 24
typedef struct qd_program {
    const qd_ledger *ledger;
    qd_strategy strategy;
    int rank; /* a rank that runs it: all with the same local shapes and actions share it */
    qd_storage storage;
    qd_module_class classes[QD_DECLARATIONS_MOST][QD_RECOMPUTE_COUNT]; /* by declaration; those that some module has */
    qd_buffer *buffers;
    int buffer_count;
    qd_action *actions;
    int action_count;
    int32_t *deps;
    int dep_count;
    int persistent[QD_BUFFER_KIND_COUNT]; /* buffer index of each persistent kind, -1: none */
    qd_group groups[QD_GROUP_LIMIT];      /* that its collectives use, each with more than one rank */
    int group_count;
    qd_matrix *matrices;                  /* Muon: by family, by round, then by owner; NULL: another optimizer */
    int matrix_count;
    int matrix_groups[QD_FAMILY_COUNT];   /* of the ranks that have parts of a matrix, -1: one rank has all of it */
    int share_groups[QD_FAMILY_COUNT];    /* of the ranks that have the same parts and share the work, -1: one rank */
    int64_t *moment2;                     /* Muon: where the second moments of a parameter lie; NULL: as all else */
    qd_norm_rule *norm;                   /* per parameter; NULL: not a training step */
    bool *squared;                        /* parameters of whose gradients ops give the sums of squares; NULL: none */
    int64_t dynamic_bytes;                /* size of the dynamic area */
    int64_t persistent_bytes;             /* on the device */
    int64_t host_bytes;                   /* of the buffers in host memory */
} qd_program;

/* Rows of a micro-batch on the program's rank. */
static inline int64_t qd_program_rows(const qd_program *p)
{
    return p->strategy.micro_batch * qd_ledger_rows(p->ledger, p->rank, p->strategy.seq);
}

/* Tokens of the global batch. */
static inline int64_t qd_program_tokens(const qd_program *p)
{
    return p->strategy.micro_batch * p->strategy.micro_batches * p->ledger->mesh.degree[QD_AXIS_DP] * p->strategy.seq;
}

/* Where the program's rank stands in cp, and of how many. */
static inline int qd_program_cp(const qd_program *p, int *coord)
{
    *coord = qd_mesh_group_coord(&p->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP), p->rank);
    return p->ledger->mesh.degree[QD_AXIS_CP];
}

/* int32 of an INPUT buffer. */
static inline int64_t qd_program_input(const qd_program *p)
{
    int coord, cp = qd_program_cp(p, &coord);
    return qd_context_input(p->strategy.micro_batch, p->strategy.seq, cp, coord, cp > 1 && p->strategy.cp_mode == QD_CP_ULYSSES);
}

const char *qd_action_name(qd_action_kind kind);
/* Beside ops, some of which have the name of an action. */
const char *qd_action_row_name(qd_action_kind kind);
const char *qd_buffer_kind_name(qd_buffer_kind kind);

/* Builds the program of `rank`, memory planned. Lives in `arena`. */
qd_status qd_program_create(const qd_ledger *ledger, const qd_strategy *strategy, int rank, qd_arena *arena,
                            qd_program **program);

/* How a module recomputes. */
static inline qd_recompute qd_strategy_recompute(const qd_strategy *s, const qd_ledger *ledger, int module)
{
    int layer = ledger->modules[module].layer;
    bool chosen = layer >= 0 && s->training && (s->recompute_layers < 0 || layer < s->recompute_layers);
    return chosen ? s->recompute : QD_RECOMPUTE_NONE;
}

static inline const qd_module_class *qd_program_class(const qd_program *program, int module)
{
    return &program->classes[program->ledger->modules[module].decl][qd_strategy_recompute(&program->strategy, program->ledger, module)];
}

/* What this rank answers for of a parameter in a persistent kind of buffer: a box of the logical
 * tensor, whose elements lie one after another from `offset` on. Ranks that hold the same box hold
 * the same bits; elements outside it may be out of date between steps. */
typedef struct qd_holding {
    qd_atom box;
    int64_t offset, count;
} qd_holding;
qd_holding qd_program_holding(const qd_program *program, qd_buffer_kind kind, int param);
/* Whether any rank holds such a thing of the parameter: matrices of Muon have no second moment. */
bool qd_program_keeps(const qd_program *program, qd_buffer_kind kind, int param);

static inline bool qd_action_transfers(const qd_action *a) /* between two ranks */
{
    return a->kind == QD_ACTION_SEND || a->kind == QD_ACTION_RECV;
}

static inline bool qd_action_copies(const qd_action *a) /* between host memory and the device */
{
    return a->kind == QD_ACTION_FETCH || a->kind == QD_ACTION_STORE;
}

/* What a communicating action is carried out by; QD_COLL_KIND_COUNT for the others. */
qd_coll_kind qd_action_collective(qd_action_kind kind);
static inline bool qd_action_communicates(const qd_action *a)
{
    return qd_action_collective((qd_action_kind)a->kind) != QD_COLL_KIND_COUNT;
}

/* The phases whose ops an action runs, for qd_op_runs; 0: it runs none. */
unsigned qd_action_phases(const qd_action *action);

/* Whether an op gives the sums of squares of a parameter's gradient. */
static inline bool qd_program_squared(const qd_program *p, int param)
{
    return p->squared && p->squared[param];
}

/* First row of a rank's part of a family in SQUARES: families follow each other, and in each the
 * parts by rank, so that one piece of each rank is gathered. */
int64_t qd_program_square_base(const qd_program *program, int family, int part);
int64_t qd_program_square_rows(const qd_program *program); /* of all families, all parts */

/* The peak of each kind of buffer at the moment of the largest total, and the total. */
typedef struct qd_memory_report {
    int64_t at_peak[QD_BUFFER_KIND_COUNT]; /* on the device */
    int64_t host[QD_BUFFER_KIND_COUNT];    /* in host memory, at all times */
    int64_t host_total;
    int64_t chunks;         /* of optimizer state that take turns on the device during the update: at the peak or not */
    int64_t total;          /* persistent + dynamic area: what the trainer allocates */
    int64_t live_peak;      /* most bytes alive at once; the rest of the dynamic area is lost to its packing */
    int peak_action;        /* where that is */
} qd_memory_report;

/* Gives each dynamic buffer its offset from the order of ALLOC and FREE, and sets dynamic_bytes.
 * QD_USAGE when the program uses a buffer that is not allocated, or allocates or frees one
 * twice. */
qd_status qd_memory_plan(qd_program *program);
qd_status qd_memory_account(const qd_program *program, qd_memory_report *report);

/* Bytes sent by all ranks of the world in one step, if all do what this one does. */
int64_t qd_program_comm_bytes(const qd_program *program);
int64_t qd_program_uneven_bytes(const qd_program *program); /* of these: what depends on the data, as planned for an even load */
double qd_program_flops(const qd_program *program);           /* of the model; what is computed again is not in it */
double qd_program_recompute_flops(const qd_program *program);

/* One line per action: "reduce   grad[0, 4096)  dp  1.2 MiB  comm  after backward block.3 mb 1". */
void qd_action_describe(const qd_program *program, int action, char *text, size_t size);
void qd_program_print(const qd_program *program, FILE *out);

/* Traces in Perfetto's format: what the trainer's and simulated ones share.
 * The name of a process (a rank) or of one of its tracks; what: "process_name" or "thread_name". */
void qd_trace_put_name(qd_json_writer *writer, const char *what, int rank, int track, const char *name);
/* The names of the tracks that a program's streams are. */
void qd_trace_put_tracks(qd_json_writer *writer, const qd_program *program, int rank);
/* One event, begin and end in seconds. */
void qd_action_trace_event(qd_json_writer *writer, const qd_program *program, int rank, int action, int64_t step, double begin, double end);
/* The same for an exchange inside a module, op `op` of its list: "all_reduce block.3". waited: from
 * when on the rank waited for it. */
void qd_exchange_trace_event(qd_json_writer *writer, const qd_program *program, int rank, int action, int op, int64_t step, double begin,
                             double end, double waited);

/* Proves that the communication of all ranks matches: programs[rank] for each rank of the mesh (the
 * same pointer where shared). Every collective must be met by all ranks of its group in the same
 * order with the same kind, count and type. QD_MISMATCH with the first two actions that disagree,
 * or the ranks that wait for each other. */
qd_status qd_check_programs(const qd_mesh *mesh, const qd_program *const *programs);
#endif
