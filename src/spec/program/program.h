/* The step program: what one rank does in one training step, as a list of actions. Built once from
 * (model, mesh, strategy); executed by the trainer, sized by the memory plan, checked across ranks
 * by the checker, labelled by the tracer. Ranks that do the same share one program. */
#ifndef QD_SPEC_PROGRAM_PROGRAM_H
#define QD_SPEC_PROGRAM_PROGRAM_H

#include "base/head_rows.h"
#include "base/optim_config.h"
#include "base/preference.h"
#include "base/text/json_writer.h"
#include "spec/ops/ops.h"
#include "spec/schedule/schedule.h"
#include "spec/layout/storage.h"

#include <stdio.h>

#define QD_RESHARD_NEVER 0
#define QD_RESHARD_ALL 1

/* How the step is executed; together with the model and the mesh it determines the program. */
typedef struct qd_strategy {
    int64_t seq, micro_batch; /* a micro-batch has micro_batch sequences of seq tokens */
    int micro_batches;        /* per rank and step */
    qd_dtype activation, param, grad;
    /* bf16 parameters are kept with the low 16 bits of their fp32 master weights (base/half.h)
     * instead of whole master weights */
    bool split_master;
    qd_optim_kind optimizer;
    bool momentum;        /* SGD keeps a momentum buffer */
    int muon_steps;       /* Muon: Newton-Schulz iterations */
    bool qk_clip;         /* heads whose scores exceed a threshold are rescaled after the update */
    bool overlap;         /* reductions start during the backward pass, on the communication stream */
    int tensor_pieces;    /* GEMMs next to a tp collective are cut into this many pieces, to overlap with it */
    bool split_backward;  /* backward_input and backward_weight are separate actions */
    int64_t bucket_bytes; /* gradients are reduced in ranges of about this size */
    int zero;             /* sharded over the data axes: 1: optimizer state, 2: gradients too, 3: parameters too */
    int shard;            /* number of ranks that share one sharded copy, a divisor of the data axes; 0: all */
    int prefetch;         /* zero 3: modules whose parameters are in memory at once; 1, 2: that are gathered ahead at once */
    int reshard;          /* zero 3, after the forward pass: QD_RESHARD_NEVER, QD_RESHARD_ALL, or the size of the groups that keep a copy */
    bool sync_each;       /* gradients are reduced after each micro-batch, not once per step */
    qd_recompute recompute; /* of the first recompute_layers blocks, whose activations live longest; the others keep everything */
    int recompute_layers;   /* -1: all */
    qd_swiglu swiglu;
    qd_fp8 fp8;
    const qd_device_traits *traits; /* of the device that the program will run on */
    double expert_rows;   /* ep: buffer capacity for rows of experts, as a multiple of the balanced load */
    bool offload;         /* optimizer state is in host memory and moves through the device in chunks; see spec/program/offload.h */
    int64_t chunk_bytes;  /* approximate size of a chunk */
    bool training;        /* false: forward only (evaluation) */
    qd_cp_mode cp_mode;   /* with cp above 1: how queries reach the keys of other ranks */
    int64_t context;      /* > 0: generation; a step appends seq tokens to one sequence of at most this length */
    qd_preference preference; /* training on pairs of completions */
    /* order of the passes; its stages are those of the ledger. NULL: one stage, micro-batches one
     * after another */
    const qd_schedule *schedule;
} qd_strategy;

bool qd_master_is_split(const qd_strategy *s); /* QD_BUFFER_MASTER has the low 16 bits of the master weights */
int qd_master_bytes(const qd_strategy *s);     /* bytes per element of QD_BUFFER_MASTER: fp32 values, their low 16 bits, or none */
double qd_update_bytes(const qd_strategy *s); /* bytes that an update moves per element: gradient, values, optimizer state */

/* Copies from and to host memory have their own streams. */
typedef enum qd_stream_id { QD_STREAM_COMPUTE, QD_STREAM_COMM, QD_STREAM_IN, QD_STREAM_OUT, QD_STREAM_COUNT } qd_stream_id;

/* X(kind, name) */
#define QD_ACTION_TABLE(X)                                                                                     \
    X(ALLOC, "alloc")                     /* starts the lifetime of a dynamic buffer */                        \
    X(FREE, "free")                       /* ends it */                                                        \
    X(LOAD, "load")                       /* tokens, targets and document starts of a micro-batch */           \
    X(ZERO, "zero")                       /* zeroes a range of a buffer */                                     \
    X(CAST_WEIGHTS, "cast_weights")       /* fp8: scales and copies of a module's weights, for the whole step */ \
    X(FORWARD, "forward")                 /* phase F of a module for a micro-batch */                          \
    X(RECOMPUTE, "recompute")             /* ops of phase F whose results the backward pass needs */           \
    X(BACKWARD, "backward")               /* phases I and W */                                                 \
    X(BACKWARD_INPUT, "backward_input")   /* phase I */                                                        \
    X(BACKWARD_WEIGHT, "backward_weight") /* phase W */                                                        \
    X(ADD_TIED, "add_tied")               /* adds the second gradient of a tied parameter to the first */      \
    X(REDUCE, "reduce")                   /* all-reduces a range of a buffer over the group */                 \
    X(REDUCE_SCATTER, "reduce_scatter")   /* reduce-scatters a run of parameters by parts */                   \
    X(GATHER, "gather")                   /* all-gathers parts of a run of parameters, or norm sums */         \
    X(SEND, "send")                       /* sends a range of a buffer to another pipeline rank */             \
    X(RECV, "recv")                       /* receives it */                                                    \
    X(PACK, "pack")                       /* copies this rank's part of a run out of whole tensors */          \
    X(UNPACK, "unpack")                   /* copies it back into them */                                       \
    X(ADD, "add")                         /* adds a range of one buffer to another */                          \
    X(SQUARES, "squares")                 /* row sums of squares of a module's gradients, unless ops did */    \
    X(SUMS, "sums")                       /* sums of each parameter's rows; 0 if another rank counts it */     \
    X(NORM, "norm")                       /* the gradient norm and the clipping factor */                      \
    X(FETCH, "fetch")                     /* copies a chunk of optimizer state from host memory */             \
    X(STORE, "store")                     /* copies it back */                                                 \
    X(UPDATE, "update")                   /* optimizer step of a module's parameters; Muon: except matrices */ \
    X(MOMENTUM, "momentum")               /* Muon: momentum of a run of matrices, input of ORTHOGONALIZE */    \
    X(COLLECT, "collect")                 /* sends the boxes of each matrix to its owner */                    \
    X(ORTHOGONALIZE, "orthogonalize")     /* orthogonalizes the matrix that this rank owns */                  \
    X(HAND_BACK, "hand_back")             /* returns boxes of the result to the ranks that hold them */        \
    X(SHARE, "share")                     /* broadcasts the result to all ranks of the group */                \
    X(UPDATE_MATRICES, "update_matrices") /* applies the result */                                            \
    X(MAXIMA, "maxima")                   /* the largest attention scores of all heads, over all ranks */      \
    X(CLIP, "clip_heads")                 /* rescales queries and keys of heads with too large scores */

typedef enum qd_action_kind {
#define QD_ACTION_ENUM(kind, name) QD_ACTION_##kind,
    QD_ACTION_TABLE(QD_ACTION_ENUM)
#undef QD_ACTION_ENUM
    QD_ACTION_KIND_COUNT
} qd_action_kind;

/* The purpose of a buffer; also the lines of the memory report. */
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
    X(CAST, "weights in fp8")                                                                               \
    X(GRAD_BLOCK, "gradients before their reduction")                                                       \
    X(PART, "parts of tensors in flight")                                                                   \
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
    X(MAXIMA, "largest scores of heads")                                                                    \
    X(CACHE, "keys and values of earlier tokens")                                                           \
    X(LOGITS, "logits")                                                                                     \
    X(SCORES, "log-probabilities of pairs")                                                                 \
    X(EVALUATION, "evaluation, beyond a step")                                                              \
    X(SAMPLES, "sample texts, beyond a step")                                                               \
    X(LOSS, "loss and gradient norm")

typedef enum qd_buffer_kind {
#define QD_BUFFER_ENUM(kind, name) QD_BUFFER_##kind,
    QD_BUFFER_TABLE(QD_BUFFER_ENUM)
#undef QD_BUFFER_ENUM
    QD_BUFFER_KIND_COUNT
} qd_buffer_kind;

/* Doubles of LOSS: sum of losses, number of tokens counted (or of pairs), and both of the modules
 * that predict further tokens; for pairs instead the sums of reward margins and of rewards of
 * chosen completions, and the number of positive margins. NORM: the gradient norm, the factor that
 * updates multiply gradients by (not finite: no update), the first parameter whose gradient is not
 * finite or -1. */
enum {
    QD_LOSS_SUM, QD_LOSS_TOKENS, QD_LOSS_AHEAD, QD_LOSS_AHEAD_TOKENS, QD_LOSS_RIGHT, QD_LOSS_NORM, QD_LOSS_FACTOR, QD_LOSS_BAD,
    QD_LOSS_COUNT, QD_LOSS_MARGIN = QD_LOSS_AHEAD, QD_LOSS_CHOSEN = QD_LOSS_AHEAD_TOKENS
};

typedef struct qd_buffer {
    qd_buffer_kind kind;
    int module, microbatch; /* -1: not specific */
    int64_t bytes;
    bool persistent; /* lives as long as the run; others from their ALLOC to their FREE */
    bool sharded;    /* holds parts of tensors (storage.h); otherwise whole ones */
    bool host;       /* in host memory; persistent */
    int64_t first;   /* index in the whole or sharded storage of its first element */
    int64_t offset;  /* dynamic buffers: offset in the dynamic area, planned by qd_memory_plan */
} qd_buffer;

/* The buffers that a module action uses. */
typedef enum qd_use {
    QD_USE_PARAM,      /* values of the module's own parameters */
    QD_USE_TIED_PARAM, /* values of parameters that it shares with another module */
    QD_USE_CAST,       /* copies of its weights in fp8 */
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
    /* Module actions: the first to write these gradients, which it overwrites instead of
     * accumulating. ADD: overwrites the sum. */
    bool overwrite;
    bool squares;   /* module actions: the last to write these gradients; ops that can (qd_op.squares) sum their squares */
    uint8_t states; /* with a chunk: the kinds of optimizer state in it, see spec/program/offload.h */
    int32_t module; /* -1: none */
    int32_t microbatch;
    int32_t buffer;              /* ALLOC, FREE, LOAD, ZERO, REDUCE; ADD: the sum; others below: the buffer of whole tensors */
    int32_t part;                /* REDUCE_SCATTER, GATHER, PACK, UNPACK: the buffer of this rank's parts; ADD: the addend */
    int32_t chunk;               /* FETCH, STORE, and updates of offloaded state: the buffer that has it on the device; otherwise -1 */
    int32_t param, params;       /* of those: the run of parameters [param, param + params) */
    /* Of those: number of parts that tensors are cut into. MOMENTUM .. UPDATE_MATRICES: see
     * spec/program/muon.h. */
    int32_t parts;
    int32_t use[QD_USE_COUNT];   /* FORWARD, BACKWARD…: buffer indices, -1: none */
    /* ZERO, REDUCE, ADD: elements, counted as the buffer's `first`. Collectives: total count. With
     * a chunk: elements of the state. NORM: the number of tokens of the global batch that the ops
     * have divided by (qd_op.scale). */
    int64_t first, count;
    qd_dtype dtype;              /* of those elements */
    int32_t group;               /* collectives, SEND, RECV: index in the program's groups; -1: none */
    int32_t peer;                /* SEND, RECV: distance of the peer from this rank in the group, modulo its size */
    /* Bytes sent by all ranks of the world together, if all do the same as this one: for a
     * collective, a SEND, or the ops of a module action. */
    int64_t bytes;
    double flops;
    int32_t dep_first, dep_count; /* in the program's deps: actions of other streams that must be complete */
} qd_action;

/* A matrix that Muon orthogonalizes, and the position of the rank that does it in the two groups;
 * see spec/program/muon.h. */
typedef struct qd_matrix {
    int param, round;
    int owner;  /* position in the matrix_group of its family */
    int sharer; /* position in the share_group */
    int64_t part; /* offset of this rank's box among the parts of a round, in elements */
} qd_matrix;

/* Which ranks of the norm's group (qd_norm_group) count the squares of a parameter: those whose
 * position in the group is below `holders` and a multiple of `repeat`. So each element is counted
 * once. holders 0: not part of the norm. */
typedef struct qd_norm_rule {
    int32_t holders, repeat;
} qd_norm_rule;

#define QD_GROUP_LIMIT 24
typedef struct qd_program {
    const qd_ledger *ledger;
    qd_strategy strategy;
    int rank; /* one of the ranks that run it: all with the same local shapes and actions share it */
    qd_storage storage;
    qd_module_class classes[QD_DECLARATIONS_MOST][QD_RECOMPUTE_COUNT]; /* by declaration; only those that some module uses */
    qd_buffer *buffers;
    int buffer_count;
    qd_action *actions;
    int action_count;
    int32_t *deps;
    int dep_count;
    int persistent[QD_BUFFER_KIND_COUNT]; /* buffer index of each persistent kind, -1: none */
    qd_group groups[QD_GROUP_LIMIT];      /* groups of its collectives, each with more than one rank */
    int group_count;
    qd_matrix *matrices;                  /* Muon: by family, by round, then by owner; NULL: another optimizer */
    int matrix_count;
    int matrix_groups[QD_FAMILY_COUNT];   /* ranks that hold parts of a matrix, -1: one rank holds all of it */
    int share_groups[QD_FAMILY_COUNT];    /* ranks that hold the same parts and share the work, -1: one rank */
    int64_t *moment2;                     /* Muon: offsets of the second moments of each parameter; NULL: as the other state */
    qd_norm_rule *norm;                   /* per parameter; NULL: not a training step */
    bool *squared;                        /* per parameter: ops compute the sums of squares of its gradient; NULL: none */
    int64_t dynamic_bytes;                /* size of the dynamic area */
    int64_t persistent_bytes;             /* on the device */
    int64_t host_bytes;                   /* in host memory */
    /* Validation while training: forward passes with the same parameters, in the dynamic area and
     * scratch of this program, whose sizes include what they need. NULL: none. */
    const struct qd_program *evaluation;
    int64_t evaluation_scratch;           /* bytes of scratch, */
    int64_t evaluation_dynamic;           /* and of the dynamic area, that only evaluation needs */
    int64_t sample_bytes;                 /* of the programs of sample texts, in addition to the above; 0: none */
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

/* Coordinate of the program's rank in cp; returns the degree of cp. */
static inline int qd_program_cp(const qd_program *p, int *coord)
{
    *coord = qd_mesh_group_coord(&p->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP), p->rank);
    return p->ledger->mesh.degree[QD_AXIS_CP];
}

/* Doubles of LOSS that are summed over ranks. */
static inline int64_t qd_program_losses(const qd_program *p)
{
    return p->strategy.preference.kind ? QD_LOSS_NORM : qd_model_ahead(&p->ledger->model) > 0 ? QD_LOSS_RIGHT : QD_LOSS_AHEAD;
}

/* Floats of MAXIMA: one per head of each layer, then of each prediction module. */
static inline int64_t qd_program_maxima(const qd_model *m)
{
    return (int64_t)(m->layers + qd_model_ahead(m)) * m->heads;
}

/* What QK-Clip rescales in a parameter, by its name. */
qd_head_rows qd_clip_rows(const qd_model *model, const char *param);

/* Modules that predict further tokens and that the program runs. */
static inline int qd_program_ahead(const qd_program *p)
{
    return p->strategy.training ? qd_model_ahead(&p->ledger->model) : 0;
}

/* Size of an INPUT buffer in int32 elements; `ahead` is where the part of prediction modules
 * begins. */
static inline int64_t qd_program_input_ahead(const qd_program *p)
{
    int coord, cp = qd_program_cp(p, &coord);
    return qd_context_input(p->strategy.micro_batch, p->strategy.seq, cp, coord, cp > 1 && p->strategy.cp_mode == QD_CP_ULYSSES);
}
static inline int64_t qd_program_input(const qd_program *p)
{
    int coord, cp = qd_program_cp(p, &coord);
    int parts = 2 * qd_program_ahead(p) + (p->strategy.preference.kind ? QD_PAIR_PARTS : 0);
    return qd_program_input_ahead(p) + parts * p->strategy.micro_batch * qd_context_rows(p->strategy.seq, cp, coord);
}

/* Where the values of pairs begin in it. Pairs exclude modules that predict further tokens. */
static inline int64_t qd_program_pairs(const qd_program *p)
{
    return qd_program_input_ahead(p);
}

/* Scores of a micro-batch, in doubles. */
static inline int64_t qd_program_scores(const qd_program *p)
{
    return p->strategy.preference.kind ? p->strategy.micro_batch * p->strategy.seq : 0;
}

const char *qd_action_name(qd_action_kind kind);
/* A name that does not collide with those of ops. */
const char *qd_action_row_name(qd_action_kind kind);
const char *qd_buffer_kind_name(qd_buffer_kind kind);

/* Builds the program of `rank` including its memory plan. Allocated in `arena`. */
qd_status qd_program_create(const qd_ledger *ledger, const qd_strategy *strategy, int rank, qd_arena *arena,
                            qd_program **program);

/* The recompute mode of a module. */
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

/* What this rank owns of a parameter in a persistent kind of buffer: a box of the logical tensor,
 * contiguous from `offset` on. Ranks that hold the same box are bit-identical; elements outside of
 * it may be out of date between steps. */
typedef struct qd_holding {
    qd_atom box;
    int64_t offset, count;
} qd_holding;
/* The number of parts, and the part of this rank. Frozen values are whole on every rank unless the
 * buffer is sharded: nothing is gathered after an update. */
qd_share qd_program_share(const qd_program *program, qd_buffer_kind kind, int param);
qd_holding qd_program_holding(const qd_program *program, qd_buffer_kind kind, int param);
/* Whether any rank holds such state of the parameter: Muon keeps no second moment for matrices. */
bool qd_program_keeps(const qd_program *program, qd_buffer_kind kind, int param);

static inline bool qd_action_transfers(const qd_action *a) /* between two ranks */
{
    return a->kind == QD_ACTION_SEND || a->kind == QD_ACTION_RECV;
}

static inline bool qd_action_copies(const qd_action *a) /* between host memory and the device */
{
    return a->kind == QD_ACTION_FETCH || a->kind == QD_ACTION_STORE;
}

/* The collective that a communicating action executes; QD_COLL_KIND_COUNT for other actions. */
qd_coll_kind qd_action_collective(qd_action_kind kind);
static inline bool qd_action_communicates(const qd_action *a)
{
    return qd_action_collective((qd_action_kind)a->kind) != QD_COLL_KIND_COUNT;
}

/* The phases whose ops an action runs, for qd_op_runs; 0: none. */
unsigned qd_action_phases(const qd_action *action);

/* Whether an op computes the sums of squares of a parameter's gradient. */
static inline bool qd_program_squared(const qd_program *p, int param)
{
    return p->squared && p->squared[param];
}

/* First row of a rank's part of a family in SQUARES. Families follow each other; within each, parts
 * are sorted by rank, so that one piece of each rank is gathered. */
int64_t qd_program_square_base(const qd_program *program, int family, int part);
/* Generation: bytes of the KV caches of the layers before `layer`; of all layers for their
 * number. */
int64_t qd_program_cache_offset(const qd_program *program, int layer);
int64_t qd_program_square_rows(const qd_program *program); /* over all families and parts */

/* Memory by kind of buffer at the time of the largest total, and the total. */
typedef struct qd_memory_report {
    int64_t at_peak[QD_BUFFER_KIND_COUNT]; /* on the device */
    int64_t host[QD_BUFFER_KIND_COUNT];    /* in host memory, at all times */
    int64_t host_total;
    int64_t chunks;         /* device buffers for chunks of optimizer state during the update, whether at the peak or not */
    int64_t total;          /* persistent buffers + dynamic area: what the trainer allocates */
    int64_t live_peak;      /* most bytes live at once; the rest of the dynamic area is lost to fragmentation */
    int peak_action;        /* the action at that time */
} qd_memory_report;

/* Assigns each dynamic buffer an offset from the order of ALLOC and FREE, and sets dynamic_bytes.
 * QD_USAGE when the program uses a buffer that is not allocated, or allocates or frees one
 * twice. */
qd_status qd_memory_plan(qd_program *program);
qd_status qd_memory_account(const qd_program *program, qd_memory_report *report);
/* Sets program->evaluation and enlarges the memory of `program` where evaluation needs more. */
qd_status qd_memory_attach(qd_program *program, const qd_program *evaluation);

/* The persistent buffer of `share` that serves as `buffer` of a second program; -1: none does. */
int qd_memory_shared(const qd_program *share, const qd_program *program, const qd_buffer *buffer);
/* Bytes on the device that `program` needs if it is bound next to `share`, whose persistent buffers
 * and dynamic area it uses where they serve. */
int64_t qd_memory_beside(const qd_program *program, const qd_program *share);

/* Bytes sent by all ranks of the world in one step, if all do the same as this one. */
int64_t qd_program_comm_bytes(const qd_program *program);
int64_t qd_program_uneven_bytes(const qd_program *program); /* of these: what depends on the data, for a balanced load */
double qd_program_flops(const qd_program *program);           /* of the model, without recompute */
double qd_program_recompute_flops(const qd_program *program);

/* One line per action: "reduce   grad[0, 4096)  dp  1.2 MiB  comm  after backward block.3 mb 1". */
void qd_action_describe(const qd_program *program, int action, char *text, size_t size);
void qd_program_print(const qd_program *program, FILE *out);

/* What a trace, measured or simulated, shows of an action, or of an exchange inside it. */
typedef struct qd_trace_event {
    const char *what, *of; /* kind and object, both in its name: "forward", "block.3"; of: "" if there is none */
    const char *module;    /* NULL: none */
    const qd_group *group; /* of communication; NULL: it computes */
    int track;             /* a stream */
    int microbatch;        /* -1: none */
    int64_t elements, bytes;
    double flops;
} qd_trace_event;
/* op: of an exchange, in the list of the action's module; -1: the action itself. */
qd_trace_event qd_trace_describe(const qd_program *program, int action, int op);
/* The number of tracks of a program, and their names. Static. */
int qd_trace_tracks(const qd_program *program, const char *const **names);
/* Seconds at the end of an exchange in which the computation waited. waited: when it started to. */
static inline double qd_trace_waited(double begin, double end, double waited)
{
    double from = begin > waited ? begin : waited;
    return end > from ? end - from : 0.0;
}

/* Traces in Perfetto's format. The name of a process (a rank) or of one of its tracks; what:
 * "process_name" or "thread_name". */
void qd_trace_put_name(qd_json_writer *writer, const char *what, int rank, int track, const char *name);
/* The names of a program's tracks. */
void qd_trace_put_tracks(qd_json_writer *writer, const qd_program *program, int rank);
/* One event, times in seconds; `waited` is read for exchanges only. */
void qd_trace_put_event(qd_json_writer *writer, const qd_program *program, int rank, int action, int op, int64_t step, double begin,
                        double end, double waited);

/* Proves that the communication of all ranks matches: programs[rank] for each rank of the mesh (the
 * same pointer if shared). Every collective must be reached by all ranks of its group in the same
 * order with the same kind, count and type. QD_MISMATCH with the first two actions that disagree,
 * or with the ranks that deadlock. */
qd_status qd_check_programs(const qd_mesh *mesh, const qd_program *const *programs);
#endif
