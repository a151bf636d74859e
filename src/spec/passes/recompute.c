/* Which ops of a block run again in its backward pass, derived from the lists alone. Running an op
 * again on the same inputs is bit-identical, so no choice made here changes a result. */
#include "spec/passes/passes.h"

/* The first op of the backward pass that reads a slot, -1: none. */
static int first_backward_read(const qd_class_writer *w, int slot)
{
    for (int i = 0; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS && w->ops[i].phase != QD_PHASE_FORWARD; j++)
            if (w->ops[i].slot[j] == slot && qd_op_reads(&w->ops[i], j))
                return i;
    return -1;
}

/* Number of ops from `first` on that write a slot. */
static int writer_count(const qd_class_writer *w, int slot, int first)
{
    int count = 0;
    for (int i = first; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            count += w->ops[i].slot[j] == slot && qd_op_writes(&w->ops[i], j);
    return count;
}

/* Whether recomputing op `index` frees more bytes than keeping its inputs takes. No other op may
 * write its results. */
static bool pays(const qd_class_writer *w, int index)
{
    const qd_op *op = &w->ops[index];
    int64_t saved = 0, cost = 0;
    if (op->phase != QD_PHASE_FORWARD || op->flops > 0.0 || qd_op_communicates(op)) /* never cheap */
        return false;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        if (op->slot[j] < 0)
            continue;
        const qd_slot *slot = &w->slots[op->slot[j]];
        bool kept = first_backward_read(w, op->slot[j]) >= 0;
        if (qd_op_writes(op, j)) {
            if (slot->kind != QD_SLOT_LOCAL || qd_op_reads(op, j) || writer_count(w, op->slot[j], 0) > 1)
                return false;
            saved += kept ? qd_slot_bytes(slot) : 0;
        } else if (slot->kind == QD_SLOT_LOCAL) {
            if (writer_count(w, op->slot[j], index) > 0) /* overwritten since */
                return false;
            cost += kept ? 0 : qd_slot_bytes(slot);
        }
    }
    return saved > cost;
}

/* Runs op `index` again right before the first reader of its results. The results of the second run
 * get their own slots, which the backward pass reads instead; those of phase F then end with phase
 * F, and lifetimes follow as for any other slot. */
static qd_status run_again(qd_class_writer *w, int index)
{
    qd_op copy = w->ops[index];
    copy.phase = QD_PHASE_INPUT;
    copy.again = true;
    int at = w->op_count;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        if (!qd_op_writes(&copy, j))
            continue;
        int slot = copy.slot[j], reader = first_backward_read(w, slot);
        if (!qd_class_reserve_slot(w))
            return QD_NO_MEMORY;
        at = reader >= 0 && reader < at ? reader : at;
        w->slots[w->slot_count] = w->slots[slot];
        copy.slot[j] = (int16_t)w->slot_count++;
        qd_class_replace(w, slot, copy.slot[j], true);
    }
    return qd_class_insert(w, at, &copy) ? QD_OK : QD_NO_MEMORY;
}

/* Keys and values of latent attention are expanded from far fewer numbers: the GEMMs that do so,
 * and the op that joins their results, run again, as DeepSeek V3 was trained. Not where heads were
 * exchanged for rows in between (ulysses). */
static qd_status expand_again(qd_class_writer *w)
{
    for (int i = 0; i < w->op_count; i++) {
        const qd_op join = w->ops[i];
        if (join.kind != QD_OP_LATENT_QKV || join.phase != QD_PHASE_FORWARD || first_backward_read(w, join.slot[QD_LATENT_QKV_QKV]) < 0)
            continue;
        const int parts[] = {join.slot[QD_LATENT_QKV_Q], join.slot[QD_LATENT_QKV_KV]};
        QD_TRY(run_again(w, i));
        for (int k = 0; k < 2; k++) {
            int gemm = qd_class_definition(w, parts[k], i);
            if (gemm >= 0 && w->ops[gemm].kind == QD_OP_LINEAR && writer_count(w, parts[k], 0) == 1)
                QD_TRY(run_again(w, gemm));
        }
    }
    return QD_OK;
}

/* Backwards through phase F: an op is recomputed if the backward pass, or another recomputed op,
 * reads its results. */
static qd_status mark_needed(qd_class_writer *w)
{
    bool *needed = QD_ARENA_NEW(w->arena, bool, w->slot_count);
    if (!needed)
        return QD_NO_MEMORY;
    for (int s = 0; s < w->slot_count; s++)
        needed[s] = first_backward_read(w, s) >= 0;
    for (int i = w->op_count - 1; i >= 0; i--) {
        qd_op *op = &w->ops[i];
        if (op->phase != QD_PHASE_FORWARD)
            continue;
        for (int j = 0; j < QD_OP_SLOTS; j++)
            op->again = op->again || (qd_op_writes(op, j) && needed[op->slot[j]]);
        for (int j = 0; j < QD_OP_SLOTS && op->again; j++) {
            if (qd_op_writes(op, j) && w->slots[op->slot[j]].kind != QD_SLOT_LOCAL)
                return QD_FAIL(QD_SYSTEM, "%s cannot be run again: it writes '%s'", qd_op_name(op->kind), w->slots[op->slot[j]].name);
            if (qd_op_reads(op, j))
                needed[op->slot[j]] = true;
        }
    }
    return QD_OK;
}

qd_status qd_pass_recompute(qd_class_writer *w, qd_recompute mode)
{
    if (mode == QD_RECOMPUTE_FULL)
        return mark_needed(w);
    if (mode == QD_RECOMPUTE_SELECTIVE)
        QD_TRY(expand_again(w));
    for (int i = 0; i < w->op_count && mode == QD_RECOMPUTE_SELECTIVE; i++)
        if (pays(w, i))
            QD_TRY(run_again(w, i));
    return QD_OK;
}
