#include "spec/ops.h"

static const struct {
    const char *name, *roles;
} op_table[QD_OP_KIND_COUNT] = {
#define QD_OP_ROW(kind, name, roles) [QD_OP_##kind] = {name, roles},
    QD_OP_TABLE(QD_OP_ROW)
#undef QD_OP_ROW
};

const char *qd_op_name(qd_op_kind kind)
{
    return op_table[kind].name;
}

const char *qd_op_roles(qd_op_kind kind)
{
    return op_table[kind].roles;
}

int64_t qd_slot_bytes(const qd_slot *slot)
{
    return slot->rows * slot->cols * (int64_t)qd_dtype_size(slot->dtype);
}

double qd_class_flops(const qd_module_class *class_, qd_phase phase)
{
    double flops = 0.0;
    for (int i = 0; i < class_->op_count; i++)
        if (class_->ops[i].phase == phase && (phase == QD_PHASE_FORWARD || !class_->ops[i].again))
            flops += class_->ops[i].flops;
    return flops;
}

double qd_class_recompute_flops(const qd_module_class *class_)
{
    double flops = 0.0;
    for (int i = 0; i < class_->op_count; i++)
        if (class_->ops[i].again)
            flops += class_->ops[i].flops;
    return flops;
}

int64_t qd_head_chunk_rows(int64_t vocab)
{
    const int64_t most_logits = 16 * 1024 * 1024; /* 64 MiB of fp32 */
    int64_t rows = 1024;
    while (rows > 64 && rows * vocab > most_logits)
        rows /= 2;
    return rows;
}
