/* Sequences of ops as tables: for placement rules that emit several ops (dispatch to experts,
 * attention over context parallelism, the loss over a sharded vocabulary).
 *
 * A rule declares three tables: the values it works on, with names and shapes; the numbers that
 * shapes and sizes are given in; and the steps, each an op with its operands and the conditions
 * under which it is emitted. The engine runs the steps of a stage and makes each value when a step
 * first names it. */
#ifndef QD_SPEC_PASSES_SEQUENCE_H
#define QD_SPEC_PASSES_SEQUENCE_H

#include "spec/passes/passes.h"

#define QD_SEQUENCE_NUMBERS 32
#define QD_SEQUENCE_VALUES 64

/* Without a name: a slot that the rule gives. */
typedef struct qd_sequence_value {
    const char *name;
    enum { QD_VALUE_ACTIVATION, QD_VALUE_F32, QD_VALUE_F64, QD_VALUE_I32 } type;
    int rows, cols;  /* numbers */
    bool buffer;     /* made anew each time a stage is emitted */
    qd_slot_kind kind; /* 0: a local value */
} qd_sequence_value;

struct qd_sequence;

typedef struct qd_step {
    int stage;
    unsigned when, unless; /* facts that must hold, and facts that must not */
    qd_op_kind op;
    int how;               /* what the rule's `finish` does with the op */
    int m, n, k;           /* numbers */
    qd_operands operands;  /* values */
} qd_step;
#define QD_STEP(stage, when, unless, kind, how, m, n, k, ...) \
    {stage, when, unless, QD_OP_##kind, how, m, n, k, QD_OPERAND_TABLE(kind, __VA_ARGS__)}

/* Sets what the table does not express: communication, FLOPs, windows of rows. */
typedef void (*qd_step_finish)(struct qd_sequence *s, const qd_step *step, qd_op *op);

typedef struct qd_sequence {
    qd_class_writer *w;
    const qd_sequence_value *values;
    const qd_step *steps;
    int value_count, step_count;
    qd_step_finish finish;
    unsigned facts;
    int64_t number[QD_SEQUENCE_NUMBERS]; /* number 0 is 0 */
    int slot[QD_SEQUENCE_VALUES];        /* per value, -1: not made, or absent */
} qd_sequence;
#define QD_SEQUENCE_TABLES(values, steps) values, steps, sizeof(values) / sizeof *(values), sizeof(steps) / sizeof *(steps)

/* All values are absent. */
void qd_sequence_begin(qd_sequence *s);
/* Values that are operands of an op: QD_SEQUENCE_TAKE(s, op, COMBINE, (ADD, ADD), (Y, Y)). */
void qd_sequence_take(qd_sequence *s, const qd_op *op, qd_operands values);
#define QD_SEQUENCE_TAKE(s, op, kind, ...) qd_sequence_take(s, op, QD_OPERANDS(kind, __VA_ARGS__))
int qd_sequence_slot(qd_sequence *s, int value);
void qd_sequence_emit(qd_sequence *s, int stage);
#endif
