/* The lists of a class while they are written. */
#ifndef QD_SPEC_OPS_IMPL_H
#define QD_SPEC_OPS_IMPL_H

#include "spec/ops.h"

#define QD_CLASS_SLOTS 80
#define QD_CLASS_OPS 64

typedef struct qd_class_writer {
    const qd_ledger *ledger;
    const qd_model *model;
    const qd_class_config *config;
    const qd_module *module; /* any module of the class: names and shapes are the same in all */
    int64_t rows;
    qd_slot slots[QD_CLASS_SLOTS];
    qd_op ops[QD_CLASS_OPS];
    int slot_count, op_count;
    qd_phase phase;
    bool overflow;
} qd_class_writer;

/* Marks or copies the ops that are run again, before places are given to local values. */
qd_status qd_recompute_apply(qd_class_writer *writer, qd_recompute mode);
#endif
