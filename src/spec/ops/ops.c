/* Traits of the devices, and names, roles and totals of ops, all derived from op_table.h. */
#include "base/fp8.h"
#include "spec/ops/ops.h"

#include <string.h>

static const qd_device_traits traits_table[] = {
    /* 128 MiB of fp32 logits: with half of that, the GEMMs of a GPT-2 head are up to a sixth
     * slower. */
    {.device = "cpu", .narrow_logits = true, .head_rows = 1024, .head_logits = 32 * 1024 * 1024},
    /* About 1 GiB of bf16 logits: GEMMs with many rows, and few roundings of the head's weight
     * gradient. */
    {.device = "cuda",
     .fused_residual = true,
     .fused_gelu = true,
     .fused_bias_grad = true,
     .sums_in_norm = true,
     .ranks_as_threads = true,
     .remade_activation = true,
     .squares_in_products = true,
     .narrow_logits = true,
     .head_rows = 16384,
     .head_logits = 544 * 1024 * 1024},
};

const qd_device_traits *qd_device_traits_find(const char *device)
{
    for (size_t i = 0; i < sizeof traits_table / sizeof *traits_table; i++)
        if (strcmp(traits_table[i].device, device) == 0)
            return &traits_table[i];
    return NULL;
}

static const struct {
    const char *name, *roles, *needs; /* one letter per operand: n required, o optional */
    const char *operands[QD_OP_SLOTS];
} op_table[QD_OP_KIND_COUNT] = {
#define ROLE(kind, operand) QD_OPERAND_ROLE(operand)
#define NEED(kind, operand) QD_OPERAND_NEED(operand)
#define TEXT(name) #name
#define NAME_TEXT(name) TEXT(name)
#define NAME(kind, operand) NAME_TEXT(QD_OPERAND_NAME(operand)),
#define ROW(kind, name, ...)                                                                                                  \
    [QD_OP_##kind] = {name, QD_EACH(ROLE, kind, __VA_ARGS__), QD_EACH(NEED, kind, __VA_ARGS__), {QD_EACH(NAME, kind, __VA_ARGS__)}},
    QD_OP_TABLE(ROW)
#undef ROLE
#undef NEED
#undef TEXT
#undef NAME_TEXT
#undef NAME
#undef ROW
};

const char *qd_op_name(qd_op_kind kind)
{
    return op_table[kind].name;
}

const char *qd_op_roles(qd_op_kind kind)
{
    return op_table[kind].roles;
}

const char *qd_op_operand_name(qd_op_kind kind, int place)
{
    return op_table[kind].operands[place];
}

bool qd_op_operand_needed(qd_op_kind kind, int place)
{
    return op_table[kind].needs[place] == 'n';
}

int64_t qd_slot_bytes(const qd_slot *slot)
{
    if (!qd_dtype_is_fp8(slot->dtype))
        return slot->rows * slot->cols * (int64_t)qd_dtype_size(slot->dtype);
    return slot->transposed ? qd_fp8_scaled_bytes(slot->scaling, slot->cols, slot->rows)
                            : qd_fp8_scaled_bytes(slot->scaling, slot->rows, slot->cols);
}

qd_fp8_scaling qd_fp8_scaling_of(qd_fp8_recipe recipe, bool weight)
{
    switch (recipe) {
    case QD_FP8_RECIPE_TENSOR: return QD_FP8_TENSOR;
    case QD_FP8_RECIPE_ROW: return QD_FP8_ROWS;
    case QD_FP8_RECIPE_BLOCK: return weight ? QD_FP8_BLOCKS : QD_FP8_VECTORS;
    }
    return QD_FP8_TENSOR;
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

qd_op qd_op_as_run(const qd_module_class *class_, int index, bool overwrite)
{
    qd_op op = class_->ops[index];
    op.overwrites = op.overwrites && overwrite;
    for (int j = 0; j < QD_OP_SLOTS && op.overwrites; j++)
        if (op.slot[j] >= 0 && qd_op_roles(op.kind)[j] == 'g')
            op.bytes -= qd_slot_bytes(&class_->slots[op.slot[j]]);
    return op;
}

qd_coll_kind qd_op_collective(qd_op_kind kind)
{
    switch (kind) {
    case QD_OP_ALL_GATHER: return QD_COLL_ALL_GATHER;
    case QD_OP_REDUCE_SCATTER: return QD_COLL_REDUCE_SCATTER;
    case QD_OP_DISPATCH:
    case QD_OP_RETURN:
    case QD_OP_NODE_DISPATCH:
    case QD_OP_NODE_RESEND:
    case QD_OP_NODE_RETURN: return QD_COLL_ALL_TO_ALL;
    case QD_OP_CONTEXT_GATHER: return QD_COLL_ALL_GATHER;
    case QD_OP_CONTEXT_SCATTER: return QD_COLL_REDUCE_SCATTER;
    case QD_OP_CONTEXT_SHIFT: return QD_COLL_RECV; /* point-to-point bytes are counted at the receiver */
    case QD_OP_CONTEXT_SWAP: return QD_COLL_ALL_TO_ALL;
    default: return QD_COLL_ALL_REDUCE;
    }
}

int64_t qd_class_exchanged(const qd_module_class *class_, unsigned phases)
{
    int64_t bytes = 0;
    for (int i = 0; i < class_->op_count; i++)
        if (qd_op_runs(&class_->ops[i], phases))
            bytes += class_->ops[i].exchange.bytes;
    return bytes;
}

int64_t qd_head_chunk_rows(const qd_device_traits *traits, int64_t vocab)
{
    int64_t rows = traits->head_rows;
    while (rows > 64 && rows * vocab > traits->head_logits)
        rows /= 2;
    return rows;
}
