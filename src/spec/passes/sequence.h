/* Sequences of ops as tables: for placement rules that emit several ops (dispatch to experts,
 * attention over context parallelism, the loss over a sharded vocabulary).
 *
 * A rule declares four tables: the values it works on, with names and shapes; the numbers that
 * shapes and sizes are given in; the steps, each an op with its operands and the conditions under
 * which it is emitted; and what else ops state, such as heads and communication. The engine runs
 * the steps of a stage and makes each value when a step first names it. */
#ifndef QD_SPEC_PASSES_SEQUENCE_H
#define QD_SPEC_PASSES_SEQUENCE_H

#include "spec/passes/passes.h"

#define QD_SEQUENCE_NUMBERS 56
#define QD_SEQUENCE_VALUES 64

/* Without a name: a slot that the rule gives. */
typedef struct qd_sequence_value {
    const char *name; /* of > 0: after `before` and the name of value `of` - 1 */
    enum { QD_VALUE_ACTIVATION, QD_VALUE_F32, QD_VALUE_F64, QD_VALUE_I32 } type;
    int rows, cols;  /* numbers */
    bool buffer;     /* made anew each time a stage is emitted */
    qd_slot_kind kind; /* 0: a local value */
    int param;         /* of a table: which one */
    int of;
    const char *before;
    /* same > 0: value `same` - 1, unless one of these facts holds. */
    int same;
    unsigned unless;
} qd_sequence_value;

/* What an op states beyond its operands and sizes: numbers, unless noted. */
typedef struct qd_manner {
    int first, to, heads, kv_heads, experts, expert, window, round, hop, chunk, ahead;
    bool capped; /* logits: with the model's soft-cap */
    enum { QD_WORK_NONE, QD_WORK_GEMM, QD_WORK_GIVEN } work; /* its FLOPs: 0, 2 m n k, or those of the sequence */
    int part;            /* QD_WORK_GIVEN: which of them */
    int over;            /* 1 + the group it communicates with; 0: it does not */
    bool uneven, async;
    int count;           /* elements it communicates if uneven; else m × n, times this number unless it is 0 */
    qd_reduce_op reduce;
} qd_manner;

typedef struct qd_step {
    int stage;
    unsigned when, unless; /* facts that must hold, and facts that must not */
    qd_op_kind op;
    int how;               /* manner */
    int m, n, k;           /* numbers; m 0: the shape of the first operand */
    qd_operands operands;  /* values */
} qd_step;
#define QD_STEP(stage, when, unless, kind, how, m, n, k, ...) \
    {stage, when, unless, QD_OP_##kind, how, m, n, k, QD_OPERAND_TABLE(kind, __VA_ARGS__)}

typedef struct qd_sequence {
    qd_class_writer *w;
    const qd_sequence_value *values;
    const qd_step *steps;
    int value_count, step_count;
    const qd_manner *manners; /* NULL: ops state nothing else */
    unsigned facts;
    qd_group group[3];
    double flops[2];
    int64_t number[QD_SEQUENCE_NUMBERS]; /* those of the class, then its own */
    int slot[QD_SEQUENCE_VALUES];        /* per value, -1: not made, or absent */
} qd_sequence;
#define QD_SEQUENCE_TABLES(values, steps) values, steps, sizeof(values) / sizeof *(values), sizeof(steps) / sizeof *(steps)

/* All values are absent, and the numbers of the class are set. */
void qd_sequence_begin(qd_sequence *s);
/* Values that are operands of an op: QD_SEQUENCE_TAKE(s, op, COMBINE, (ADD, ADD), (Y, Y)). */
void qd_sequence_take(qd_sequence *s, const qd_op *op, qd_operands values);
#define QD_SEQUENCE_TAKE(s, op, kind, ...) qd_sequence_take(s, op, QD_OPERANDS(kind, __VA_ARGS__))
int qd_sequence_slot(qd_sequence *s, int value);
void qd_sequence_emit(qd_sequence *s, int stage);
#endif
