/* What the files of the proof share. `frame.c` describes the mesh, `operands.c` maps operands of
 * ops, `value.c` keeps what is known of slots, `rules_*.c` compute the placements of results,
 * `sizes.c` checks the shapes of operands, `walk.c` follows an op list, `derivative*.c` compare its
 * backward with its forward pass, `gradients.c` keeps what is known of gradient memory, `step.c`
 * follows the actions of a program, `norm.c` counts elements of the norm, `prove.c` runs it all. */
#ifndef QD_SPEC_PROOF_IMPL_H
#define QD_SPEC_PROOF_IMPL_H

#include "spec/proof/proof.h"

/* Placements. The ranks of tp, cp and dp are numbered, tp fastest. A digit is a factor of that
 * number, and a communication group is a set of digits. Dense values and experts fold the same
 * ranks in two ways, so there are two frames of digits. */
enum { PROOF_DIGITS = 12 };
typedef enum proof_fold { FOLD_DENSE, FOLD_EXPERTS, FOLD_COUNT } proof_fold;

typedef struct proof_frame {
    int count;                 /* number of digits */
    int cut[PROOF_DIGITS + 1]; /* digit i spans cut[i] .. cut[i + 1]; cuts run from 1 to the number of ranks */
} proof_frame;

/* How a value differs between ranks that differ in one digit. Dimension 0 is rows (tokens, or
 * outputs of a matrix), 1 is columns. */
typedef enum proof_code {
    CODE_SAME,    /* replicated */
    CODE_ROWS,    /* different rows */
    CODE_COLS,    /* different columns */
    CODE_EXPERTS, /* different experts, or rows of different experts */
    CODE_SUM,     /* terms of a sum */
    CODE_MAX,     /* candidates of a maximum */
    CODE_PART,    /* gradients after a reduce-scatter: shards of ZeRO */
} proof_code;

typedef struct proof_place {
    uint8_t fold;
    uint8_t code[PROOF_DIGITS];
} proof_place;

/* Where rows are between routing and combine, or heads between the ranks of cp. */
typedef enum proof_stage {
    AT_HOME,
    BY_EXPERT,       /* sorted by expert, on the rank that routed them */
    BY_NODE,         /* one copy per node */
    RELAYED,         /* on the rank that relays them */
    RELAY_BY_EXPERT, /* on that rank, sorted by expert */
    AT_EXPERTS,      /* on the ranks of the experts */
    HEADS_CUT,
    HEADS_SWAPPED,
    ROWS_CUT,
    ROWS_SWAPPED /* ulysses */
} proof_stage;

typedef enum proof_kind { UNWRITTEN, ZEROES, KNOWN } proof_kind;

/* What is known of a slot, or of some of its rows. Part 1 is the columns of keys and values in a
 * slot that also has those of queries. */
typedef struct proof_value {
    uint8_t kind;
    uint8_t parts;         /* 1 or 2 */
    uint8_t missing;       /* bits of parts that no op has written yet */
    bool gradient;         /* gradient of the loss with respect to some value, not a value of the forward pass */
    bool rotated;          /* queries and keys: rotary positions are applied */
    bool weighted;         /* rows of experts: the router's weights are applied */
    bool overflow;         /* rows of experts that exceed the buffer space are missing */
    uint8_t stage, origin; /* proof_stage; AT_EXPERTS: the stage they came from. Of places and lists: the stage they lead to */
    int copies;            /* rows returned by etp ranks: number of terms that COMBINE adds */
    int shift, seen;       /* Ring: how many ranks of cp it has been passed on, and how many ranks' terms it has; seen 0: all. */
    int weight;            /* logits: slot of the matrix that produced them, or -1 */
    int by, until;         /* the op that wrote it; asynchronous: the first op that may read it */
    int64_t split;         /* columns of part 0 */
    proof_place place[2];
} proof_value;

typedef struct proof_segment {
    int64_t begin, end; /* rows */
    proof_value value;
} proof_segment;

typedef struct proof_slot {
    proof_segment *segments; /* ascending, without gaps */
    int count, capacity;
} proof_slot;

/* A write of parameter gradients by an op of a class. */
typedef struct proof_write {
    int op;
    int param, params; /* relative to the first parameter of the module */
    qd_phase phase;
    bool overwrites, squares;
    bool overflow;        /* extra dispatch rounds must follow */
    proof_place place[2]; /* of the first parameter; of the others */
} proof_write;

/* A class of modules of a program. */
typedef struct proof_class {
    const qd_program *program;
    const qd_module_class *ops;
    int module; /* any module of the class */
    proof_write *writes;
    int write_count, write_capacity;
    uint8_t *reads;  /* per slot: bits of the phases (and QD_PHASES_AGAIN) that read it */
    unsigned phases; /* phases that have ops */
    int losses, embeds; /* losses that it adds up, embeddings that it looks up */
    proof_place loss; /* placement of what it adds to the loss */
} proof_class;

/* Gradients in memory. */
typedef struct proof_gradient {
    uint8_t kind;
    int16_t op;    /* kind of the op that wrote it last */
    int32_t count; /* number of op writes that it contains */
    proof_place place;
} proof_gradient;

/* Elements [first, end) of a buffer, all of one parameter. */
typedef struct proof_piece {
    int64_t first, end;
    int param;
    int by; /* the last action that accessed it; -1: none */
    proof_gradient gradient;
} proof_piece;

typedef struct proof_memory {
    proof_piece *pieces; /* ascending; padding between parameters has none */
    int count, capacity;
} proof_memory;

typedef struct proof_program {
    const qd_program *program;
    proof_class classes[QD_DECLARATIONS_MOST][QD_RECOMPUTE_COUNT]; /* indexed as in the program */
    uint64_t reduced[QD_GROUP_LIMIT];                              /* per group: hash of what it reduces, in order */
    proof_gradient *sent; /* gradients of tied parameters that it sends to another stage, in order */
    int sent_count, sent_capacity;
} proof_program;

typedef struct qd_proof {
    const qd_mesh *mesh;
    const qd_program *const *programs;
    proof_frame frames[FOLD_COUNT];
    proof_program *list; /* one per distinct program */
    int count;
    int *index;   /* per rank: index in the list */
    int *writers; /* per parameter: number of writes of its gradient per micro-batch */
    qd_proof_report report;
} qd_proof;

/* frame.c */
qd_status qd_proof_frames_create(qd_proof *proof);
/* bits of digits; 0: the digits cannot express the group */
unsigned qd_proof_group_digits(const qd_proof *proof, int fold, qd_group group);
bool qd_proof_place_convert(const qd_proof *proof, proof_place *place, int fold); /* false: not expressible */
void qd_proof_digit_name(const qd_proof *proof, int fold, int digit, char *text, size_t size);
int qd_proof_digit_size(const qd_proof *proof, int fold, int digit);
qd_axis qd_proof_digit_axis(const qd_proof *proof, int digit); /* in the dense fold */
bool qd_proof_place_equal(const qd_proof *proof, const proof_place *a, const proof_place *b);
proof_place qd_proof_param_place(const qd_proof *proof, const qd_ledger *ledger, int param);
/* Reduces, or reduce-scatters (to CODE_PART or CODE_ROWS), over a group: each digit of the group
 * must be `from` and becomes `to`. Returns the first digit that is not `from`, -1: all match, -2:
 * the group is not a set of digits. */
int qd_proof_place_exchange(const qd_proof *proof, proof_place *place, qd_group group, proof_code from, proof_code to);
const char *qd_proof_code_text(proof_code code);

/* operands.c: the meaning of each operand of an op. */
typedef enum proof_operand {
    NO_OPERAND,
    X,
    Y,
    ADD,
    SUMS,
    WEIGHT,
    BIAS,
    GAMMA,
    BETA,
    STATE,
    STATE2,
    AMAX,
    DX,
    DY,
    DX_AGAIN,
    WEIGHT_GRAD,
    BIAS_GRAD,
    GAMMA_GRAD,
    BETA_GRAD,
    ADD_SUMS,
    DX_SUMS,
    TABLE,
    INPUT,
    POSITIONS,
    POSITIONS_GRAD,
    LOSS,
    LOGITS,
    LOSSES,
    SCORES,
    FACTORS,
    TOP,
    QKV,
    KV,
    O,
    D_O,
    LSE,
    DELTA,
    D_QKV,
    D_Q,
    D_KV,
    CACHE,
    K_GAMMA,
    K_GAMMA_GRAD,
    CHOICE,
    COMBINE_WEIGHT,
    D_COMBINE_WEIGHT,
    LOAD,
    PLACE,
    FROM,
    COUNTS,
    ROWS,
    D_ROWS,
    UP,
    DOWN,
    UP_GRAD,
    DOWN_GRAD,
    ROOM,
    LISTS,
    CHOSEN,
    RELAY,
    RELAY_CHOSEN,
    NODE_PLACE,
    NODE_COUNTS,
    TAKEN,
    SINK,
    SINK_GRAD,
    UP_BIAS,
    DOWN_BIAS,
    UP_BIAS_GRAD,
    DOWN_BIAS_GRAD
} proof_operand;
int qd_proof_slot_of(const qd_op *op, proof_operand operand); /* index into the class's slots; -1: absent */
bool qd_proof_operand_known(qd_op_kind kind);

/* walk.c: the state while an op list is followed. */
typedef struct proof_walk {
    qd_proof *proof;
    proof_class *class_;
    const qd_program *program;
    const qd_module_class *ops;
    const qd_ledger *ledger;
    proof_slot *slots;
    const qd_op *op; /* the current op, and its index */
    int index;
    bool apart; /* the halves of the backward pass are separate actions */
} proof_walk;
qd_status qd_proof_walk_class(qd_proof *proof, proof_class *class_);
qd_status qd_proof_derivative(proof_walk *walk); /* derivative.c: whether the backward pass is the derivative of the forward pass */

/* value.c. Absent operands are UNWRITTEN, which is not an error; rules check with qd_proof_has. */
bool qd_proof_has(const proof_walk *w, proof_operand operand);
/* The value of all rows, or of a window. Fails if it is unwritten, differs between rows, or is
 * incomplete. */
qd_status qd_proof_read(proof_walk *w, proof_operand operand, proof_value *value);
qd_status qd_proof_read_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, proof_value *value);
/* The same, but accepts incomplete values of a ring. */
qd_status qd_proof_read_any(proof_walk *w, proof_operand operand, proof_value *value);
qd_status qd_proof_write(proof_walk *w, proof_operand operand, const proof_value *value); /* absent operand: no effect */
qd_status qd_proof_write_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, const proof_value *value);
qd_status qd_proof_write_param_grad(proof_walk *w, proof_operand operand, const proof_place place[2]);
void qd_proof_note_overflow(proof_walk *w); /* marks the newest write */
proof_value qd_proof_value_of(const proof_walk *w, const proof_place *place, bool gradient);
void qd_proof_slots_destroy(proof_slot *slots, int count);
/* The placement of a parameter slot; parts is 2 if the first parameter is placed differently from
 * the others. */
qd_status qd_proof_param(proof_walk *w, proof_operand operand, proof_value *value);

/* "rank 0, block.0, op 12 (norm): 'attn_branch' on tp: …". Without operand: NO_OPERAND; without
 * digit: -1. */
qd_status qd_proof_fail(const proof_walk *w, proof_operand operand, int fold, int digit, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
qd_status qd_proof_fail_slot(const proof_walk *w, int slot, const char *text);
/* Fails on sums and maxima that are not reduced yet. */
qd_status qd_proof_no_sum(const proof_walk *w, proof_operand operand, const proof_value *value);
qd_status qd_proof_same_place(const proof_walk *w, proof_operand operand, const proof_value *value, proof_operand other,
                              const proof_value *than);
qd_status qd_proof_is_gradient(const proof_walk *w, proof_operand operand, const proof_value *value, bool gradient);
qd_status qd_proof_in_fold(const proof_walk *w, proof_operand operand, proof_value *value, int fold);
/* Number of ranks whose op has the operand, out of *ranks: those that differ from the program's
 * rank in the digits of `place` with CODE_SUM, or in all digits of tp if there are none.
 * NO_OPERAND: whose op counts keys (qd_op.k). */
int qd_proof_present(const proof_walk *w, const proof_place *place, proof_operand operand, int *ranks);

/* sizes.c: an op works on all of its operands; slots of parameters and ports have this rank's
 * shapes. */
qd_status qd_proof_sizes(const proof_walk *w);
qd_status qd_proof_slot_sizes(const proof_walk *w);
bool qd_proof_sizes_known(qd_op_kind kind);

/* rules_*.c: check what an op reads and compute the placements of its results. */
typedef qd_status (*proof_rule)(proof_walk *w);
proof_rule qd_proof_rule_of(qd_op_kind kind);
/* The placement of GEMM results, digit by digit; CODE_PART: not valid. */
proof_code qd_proof_code_linear(proof_code x, proof_code weight);
proof_code qd_proof_code_linear_dx(proof_code dy, proof_code weight);
proof_code qd_proof_code_linear_dw(proof_code dy, proof_code x);
proof_code qd_proof_code_row_sum(proof_code dy);

qd_status qd_proof_rule_embed(proof_walk *w);
qd_status qd_proof_rule_embed_grad(proof_walk *w);
qd_status qd_proof_rule_norm(proof_walk *w);
qd_status qd_proof_rule_norm_grad(proof_walk *w);
qd_status qd_proof_rule_linear(proof_walk *w);
qd_status qd_proof_rule_linear_dx(proof_walk *w);
qd_status qd_proof_rule_linear_dw(proof_walk *w);
qd_status qd_proof_rule_bias_grad(proof_walk *w);
/* BIAS_GRAD, if the op has it: the sums of the rows of `dy`. */
qd_status qd_proof_bias_sums(proof_walk *w, proof_operand operand, const proof_value *dy);
/* rules_fp8.c. The slot that an fp8 copy was cast from; other slots: themselves. */
int qd_proof_source(const qd_module_class *ops, int slot);
qd_status qd_proof_rule_amax(proof_walk *w);
qd_status qd_proof_rule_cast(proof_walk *w);
qd_status qd_proof_rule_activation_fp8(proof_walk *w);
/* Operands in fp8 are those of GEMMs, in the form that they need. */
qd_status qd_proof_formats(const proof_walk *w);
/* Requires rows to be with their experts. Without expert parallelism rows sorted by expert are. */
qd_status qd_proof_with_experts(const proof_walk *w, proof_operand operand, proof_value *v);
qd_status qd_proof_rule_adapt(proof_walk *w);
qd_status qd_proof_rule_adapt_dx(proof_walk *w);
qd_status qd_proof_rule_adapt_dw(proof_walk *w);
qd_status qd_proof_rule_activation(proof_walk *w);
qd_status qd_proof_rule_activation_grad(proof_walk *w);
qd_status qd_proof_rule_add(proof_walk *w);
qd_status qd_proof_rule_dropout(proof_walk *w);
qd_status qd_proof_rule_gate(proof_walk *w);
qd_status qd_proof_rule_gate_grad(proof_walk *w);
qd_status qd_proof_rule_head_loss(proof_walk *w);
qd_status qd_proof_rule_head_logits(proof_walk *w);
qd_status qd_proof_rule_loss_max(proof_walk *w);
qd_status qd_proof_rule_loss_part(proof_walk *w);
qd_status qd_proof_rule_loss_grad(proof_walk *w);
qd_status qd_proof_rule_loss_rows(proof_walk *w);
qd_status qd_proof_rule_pair_sums(proof_walk *w);
qd_status qd_proof_rule_pair_loss(proof_walk *w);
qd_status qd_proof_rule_loss_sum(proof_walk *w);
qd_status qd_proof_rule_all_reduce(proof_walk *w);
qd_status qd_proof_rule_all_gather(proof_walk *w);
qd_status qd_proof_rule_reduce_scatter(proof_walk *w);
qd_status qd_proof_rule_zero(proof_walk *w);

qd_status qd_proof_rule_rope(proof_walk *w);
qd_status qd_proof_rule_head_norm(proof_walk *w);
qd_status qd_proof_rule_head_norm_grad(proof_walk *w);
qd_status qd_proof_rule_qk_squares(proof_walk *w);
qd_status qd_proof_rule_qk_norm(proof_walk *w);
qd_status qd_proof_rule_qk_dots(proof_walk *w);
qd_status qd_proof_rule_qk_norm_grad(proof_walk *w);
qd_status qd_proof_rule_clip_grad(proof_walk *w);
qd_status qd_proof_rule_latent_qkv(proof_walk *w);
qd_status qd_proof_rule_latent_qkv_grad(proof_walk *w);
qd_status qd_proof_rule_attention_latent(proof_walk *w);
qd_status qd_proof_rule_attention(proof_walk *w);
qd_status qd_proof_rule_attention_cached(proof_walk *w);
qd_status qd_proof_rule_attention_grad(proof_walk *w);
qd_status qd_proof_rule_attention_sink(proof_walk *w);
qd_status qd_proof_rule_attention_sink_grad(proof_walk *w);
qd_status qd_proof_rule_attention_part(proof_walk *w);
qd_status qd_proof_rule_attention_delta(proof_walk *w);
qd_status qd_proof_rule_attention_part_grad(proof_walk *w);
qd_status qd_proof_rule_columns(proof_walk *w);
qd_status qd_proof_rule_cut(proof_walk *w);
qd_status qd_proof_rule_context_shift(proof_walk *w);
/* How many rounds of the layer's ring there are before `round`. */
int qd_proof_rounds(const proof_walk *w, int round);
qd_status qd_proof_rule_context_gather(proof_walk *w);
qd_status qd_proof_rule_context_scatter(proof_walk *w);
qd_status qd_proof_rule_context_swap(proof_walk *w);

qd_status qd_proof_rule_route(proof_walk *w);
qd_status qd_proof_rule_route_plan(proof_walk *w);
qd_status qd_proof_rule_route_grad(proof_walk *w);
qd_status qd_proof_rule_route_load(proof_walk *w);
qd_status qd_proof_rule_permute(proof_walk *w);
qd_status qd_proof_rule_combine(proof_walk *w);
qd_status qd_proof_rule_combine_grad(proof_walk *w);
qd_status qd_proof_rule_experts(proof_walk *w);
qd_status qd_proof_rule_experts_dw(proof_walk *w);
qd_status qd_proof_rule_experts_bias(proof_walk *w);
qd_status qd_proof_rule_experts_bias_grad(proof_walk *w);
qd_status qd_proof_rule_expert_activation(proof_walk *w);
qd_status qd_proof_rule_dispatch(proof_walk *w);
qd_status qd_proof_rule_return(proof_walk *w);
qd_status qd_proof_rule_rounds(proof_walk *w);
qd_status qd_proof_rule_rounds_grad(proof_walk *w);
qd_status qd_proof_rule_node_plan(proof_walk *w);
qd_status qd_proof_rule_node_dispatch(proof_walk *w);
qd_status qd_proof_rule_node_return(proof_walk *w);
qd_status qd_proof_rule_node_weights(proof_walk *w);
qd_status qd_proof_rule_node_resend(proof_walk *w);
qd_status qd_proof_rule_relay_plan(proof_walk *w);

/* gradients.c */
void qd_proof_memory_clear(proof_memory *memory);
qd_status qd_proof_memory_add(proof_memory *memory, int64_t first, int64_t end, int param); /* in ascending order */
/* The pieces that make up [first, end), split where needed: *count pieces, starting at the returned
 * index. -1: out of memory. */
int qd_proof_memory_range(proof_memory *memory, int64_t first, int64_t end, int *count);

/* step.c, norm.c */
qd_status qd_proof_step(qd_proof *proof, proof_program *p);
/* groups: those over which SUMS is reduced. */
qd_status qd_proof_norm(qd_proof *proof, const qd_program *p, int action, const qd_group *groups, int count);
#endif
