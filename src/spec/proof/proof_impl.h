/* What the files of the proof share. `frame.c` describes the mesh, `operands.c` names the slots of
 * ops, `value.c` keeps what is known of slots, `rules_*.c` say what each op does to placements,
 * `sizes.c` how much of its operands each works on, `walk.c` follows an op list, `derivative*.c`
 * compare its backward with its forward pass, `gradients.c` keeps what is known of memory that
 * holds gradients, `step.c` follows the actions of a program, `norm.c` counts elements, `prove.c`
 * puts it together. */
#ifndef QD_SPEC_PROOF_IMPL_H
#define QD_SPEC_PROOF_IMPL_H

#include "spec/proof/proof.h"

/* ---- placements ----
 * The ranks of tp, cp and dp are numbered tp fastest; a digit is a factor of that number, and a
 * group of ranks that communicates is a set of digits. Dense values and experts fold the same ranks
 * in two ways, so there are two frames of digits. */
enum { PROOF_DIGITS = 12 };
typedef enum proof_fold { FOLD_DENSE, FOLD_EXPERTS, FOLD_COUNT } proof_fold;

typedef struct proof_frame {
    int count;                 /* of digits */
    int cut[PROOF_DIGITS + 1]; /* digit i is cut[i] .. cut[i + 1], from 1 to the number of ranks */
} proof_frame;

/* What ranks that differ in one digit have of a value, of which dimension 0 is rows (tokens, or
 * outputs of a matrix), 1 columns. */
typedef enum proof_code {
    CODE_SAME,    /* the same */
    CODE_ROWS,    /* other rows */
    CODE_COLS,    /* other columns */
    CODE_EXPERTS, /* other experts, or the rows of other experts */
    CODE_SUM,     /* terms of a sum */
    CODE_MAX,     /* candidates of a maximum */
    CODE_PART,    /* gradients after a reduce-scatter: ZeRO's parts */
} proof_code;

typedef struct proof_place {
    uint8_t fold;
    uint8_t code[PROOF_DIGITS];
} proof_place;

/* Where rows are on their way to experts and back, or heads on their way to ranks of cp. */
typedef enum proof_stage {
    AT_HOME,
    BY_EXPERT,       /* sorted by expert, on the rank that routed them */
    BY_NODE,         /* copies by node */
    RELAYED,         /* on the rank that relays them */
    RELAY_BY_EXPERT, /* there sorted by expert */
    AT_EXPERTS,      /* on the ranks of the experts */
    HEADS_CUT,
    HEADS_SWAPPED,
    ROWS_CUT,
    ROWS_SWAPPED /* ulysses */
} proof_stage;

typedef enum proof_kind { UNWRITTEN, ZEROES, KNOWN } proof_kind;

/* What is known of a slot, or of some rows of it. Part 1 is the keys' and values' columns of a slot
 * that also has the queries'. */
typedef struct proof_value {
    uint8_t kind;
    uint8_t parts;         /* 1 or 2 */
    uint8_t missing;       /* bits of parts that nothing has written yet */
    bool gradient;         /* of the loss with respect to something, not a value of the forward pass */
    bool rotated;          /* queries and keys: with their positions in */
    bool weighted;         /* rows of experts: the router's weights are in */
    bool overflow;         /* of experts' rows, those beyond the buffer space are missing */
    uint8_t stage, origin; /* proof_stage; AT_EXPERTS: where they came from. Of places and lists: what they lead to */
    int copies;            /* rows back from etp ranks: terms that COMBINE adds */
    int shift, seen;       /* ring: how many ranks of cp it has been passed on, and from how many it is complete; seen 0: from all */
    int weight;            /* logits: slot of the matrix they came from, -1 */
    int by, until;         /* the op that wrote it; asynchronous: the first op that may read it */
    int64_t split;         /* columns of part 0 */
    proof_place place[2];
} proof_value;

typedef struct proof_segment {
    int64_t begin, end; /* rows */
    proof_value value;
} proof_segment;

typedef struct proof_slot {
    proof_segment *segments; /* in order, without gaps */
    int count, capacity;
} proof_slot;

/* A write of parameters' gradients by an op of a class. */
typedef struct proof_write {
    int op;
    int param, params; /* relative to the module's first */
    qd_phase phase;
    bool overwrites, squares;
    bool overflow;        /* extra dispatch rounds must follow */
    proof_place place[2]; /* of the first parameter; of the others */
} proof_write;

/* A class of modules of a program. */
typedef struct proof_class {
    const qd_program *program;
    const qd_module_class *ops;
    int module; /* one of the class */
    proof_write *writes;
    int write_count, write_capacity;
    uint8_t *reads;  /* per slot: bits of the phases (and QD_PHASES_AGAIN) that read it */
    unsigned phases; /* that it has ops of */
    bool has_loss;
    proof_place loss; /* of what it adds to the loss */
} proof_class;

/* ---- gradients in memory ---- */
typedef struct proof_gradient {
    uint8_t kind;
    int16_t op;    /* kind of the op that wrote it last */
    int32_t count; /* writes of ops that it contains */
    proof_place place;
} proof_gradient;

/* Elements [first, end) of a buffer, all of one parameter. */
typedef struct proof_piece {
    int64_t first, end;
    int param;
    int by; /* the last action that touched it; -1: none */
    proof_gradient gradient;
} proof_piece;

typedef struct proof_memory {
    proof_piece *pieces; /* in order; what lies between parameters has none */
    int count, capacity;
} proof_memory;

/* ---- one program ---- */
typedef struct proof_program {
    const qd_program *program;
    proof_class classes[QD_DECLARATIONS_MOST][QD_RECOMPUTE_COUNT]; /* as the program's */
    uint64_t reduced[QD_GROUP_LIMIT];                              /* per group: what it sums, in order, as a number */
    proof_gradient *sent; /* gradients of tied parameters that it sends to another stage, in order */
    int sent_count, sent_capacity;
} proof_program;

typedef struct qd_proof {
    const qd_mesh *mesh;
    const qd_program *const *programs;
    proof_frame frames[FOLD_COUNT];
    proof_program *list; /* one for each different program */
    int count;
    int *index;   /* per rank: in the list */
    int *writers; /* per parameter: writes of its gradient per micro-batch */
    qd_proof_report report;
} qd_proof;

/* frame.c */
qd_status qd_proof_frames_create(qd_proof *proof);
unsigned qd_proof_group_digits(const qd_proof *proof, int fold, qd_group group);  /* bits of digits; 0: they do not make up the group */
bool qd_proof_place_convert(const qd_proof *proof, proof_place *place, int fold); /* false: not expressible */
void qd_proof_digit_name(const qd_proof *proof, int fold, int digit, char *text, size_t size);
int qd_proof_digit_size(const qd_proof *proof, int fold, int digit);
qd_axis qd_proof_digit_axis(const qd_proof *proof, int digit); /* of the dense fold */
bool qd_proof_place_equal(const qd_proof *proof, const proof_place *a, const proof_place *b);
proof_place qd_proof_param_place(const qd_proof *proof, const qd_ledger *ledger, int param);
/* Sums, or scatters (to CODE_PART or CODE_ROWS), over the ranks of a group: each digit must be
 * `from` and becomes `to`. Returns the digit that is not, -1: none is wrong, -2: the group is no
 * set of digits. */
int qd_proof_place_exchange(const qd_proof *proof, proof_place *place, qd_group group, proof_code from, proof_code to);
const char *qd_proof_code_text(proof_code code);

/* operands.c: which slot of an op is what. */
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
    TAKEN
} proof_operand;
int qd_proof_slot_of(const qd_op *op, proof_operand operand); /* index into the class's slots; -1: absent */
bool qd_proof_operand_known(qd_op_kind kind);

/* walk.c: an op list as it is followed. */
typedef struct proof_walk {
    qd_proof *proof;
    proof_class *class_;
    const qd_program *program;
    const qd_module_class *ops;
    const qd_ledger *ledger;
    proof_slot *slots;
    const qd_op *op; /* that is being followed, and its number */
    int index;
    bool apart; /* the halves of the backward pass are actions of their own */
} proof_walk;
qd_status qd_proof_walk_class(qd_proof *proof, proof_class *class_);
qd_status qd_proof_derivative(proof_walk *walk); /* derivative.c: whether the backward pass is that of the forward pass */

/* value.c. Operands that are absent are UNWRITTEN and are no error; rules ask qd_proof_has. */
bool qd_proof_has(const proof_walk *w, proof_operand operand);
/* The value of all rows, or of a window. Refuses what is unwritten, differs between rows, or is not
 * complete. */
qd_status qd_proof_read(proof_walk *w, proof_operand operand, proof_value *value);
qd_status qd_proof_read_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, proof_value *value);
/* The same without the refusal of incomplete values of a ring. */
qd_status qd_proof_read_any(proof_walk *w, proof_operand operand, proof_value *value);
qd_status qd_proof_write(proof_walk *w, proof_operand operand, const proof_value *value); /* absent: nothing to do */
qd_status qd_proof_write_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, const proof_value *value);
qd_status qd_proof_write_param_grad(proof_walk *w, proof_operand operand, const proof_place place[2]);
void qd_proof_note_overflow(proof_walk *w); /* of the newest write */
proof_value qd_proof_value_of(const proof_walk *w, const proof_place *place, bool gradient);
void qd_proof_slots_destroy(proof_slot *slots, int count);
/* The placement of a parameter's slot: parts 2 if the first parameter's differs from that of the
 * others. */
qd_status qd_proof_param(proof_walk *w, proof_operand operand, proof_value *value);

/* "rank 0, block.0, op 12 (norm): 'attn_branch' on tp: …". operand NO_OPERAND: none; digit -1:
 * none. */
qd_status qd_proof_fail(const proof_walk *w, proof_operand operand, int fold, int digit, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
qd_status qd_proof_fail_slot(const proof_walk *w, int slot, const char *text);
/* Refuses sums and maxima that are not complete: `why` says what for. */
qd_status qd_proof_no_sum(const proof_walk *w, proof_operand operand, const proof_value *value);
qd_status qd_proof_same_place(const proof_walk *w, proof_operand operand, const proof_value *value, proof_operand other,
                              const proof_value *than);
qd_status qd_proof_is_gradient(const proof_walk *w, proof_operand operand, const proof_value *value, bool gradient);
qd_status qd_proof_in_fold(const proof_walk *w, proof_operand operand, proof_value *value, int fold);
/* Number of ranks, of those that differ from the program's in the digits of `place` with CODE_SUM
 * (all of tp where none has), whose op has the operand. */
int qd_proof_present(const proof_walk *w, const proof_place *place, proof_operand operand, int *ranks);

/* sizes.c: an op works on all of its operands, the slots of parameters and ports are those of this
 * rank. */
qd_status qd_proof_sizes(const proof_walk *w);
qd_status qd_proof_slot_sizes(const proof_walk *w);
bool qd_proof_sizes_known(qd_op_kind kind);

/* rules_*.c: what an op reads and what becomes of it. */
typedef qd_status (*proof_rule)(proof_walk *w);
proof_rule qd_proof_rule_of(qd_op_kind kind);
/* The placements that matrix multiplications give, digit by digit; CODE_PART: none. */
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
qd_status qd_proof_rule_activation(proof_walk *w);
qd_status qd_proof_rule_activation_grad(proof_walk *w);
qd_status qd_proof_rule_add(proof_walk *w);
qd_status qd_proof_rule_dropout(proof_walk *w);
qd_status qd_proof_rule_head_loss(proof_walk *w);
qd_status qd_proof_rule_head_logits(proof_walk *w);
qd_status qd_proof_rule_loss_max(proof_walk *w);
qd_status qd_proof_rule_loss_part(proof_walk *w);
qd_status qd_proof_rule_loss_grad(proof_walk *w);
qd_status qd_proof_rule_loss_sum(proof_walk *w);
qd_status qd_proof_rule_all_reduce(proof_walk *w);
qd_status qd_proof_rule_all_gather(proof_walk *w);
qd_status qd_proof_rule_reduce_scatter(proof_walk *w);
qd_status qd_proof_rule_zero(proof_walk *w);

qd_status qd_proof_rule_rope(proof_walk *w);
qd_status qd_proof_rule_head_norm(proof_walk *w);
qd_status qd_proof_rule_head_norm_grad(proof_walk *w);
qd_status qd_proof_rule_attention(proof_walk *w);
qd_status qd_proof_rule_attention_cached(proof_walk *w);
qd_status qd_proof_rule_attention_grad(proof_walk *w);
qd_status qd_proof_rule_attention_part(proof_walk *w);
qd_status qd_proof_rule_attention_delta(proof_walk *w);
qd_status qd_proof_rule_attention_part_grad(proof_walk *w);
qd_status qd_proof_rule_columns(proof_walk *w);
qd_status qd_proof_rule_cut(proof_walk *w);
qd_status qd_proof_rule_context_shift(proof_walk *w);
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
/* Pieces that make up [first, end), cut where they must be: *count from the returned index on. -1:
 * no memory. */
int qd_proof_memory_range(proof_memory *memory, int64_t first, int64_t end, int *count);

/* step.c, norm.c */
qd_status qd_proof_step(qd_proof *proof, proof_program *p);
/* The groups over which SUMS is summed. */
qd_status qd_proof_norm(qd_proof *proof, const qd_program *p, int action, const qd_group *groups, int count);
#endif
