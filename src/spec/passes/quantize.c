/* Pass 6: the GEMMs of linear layers in fp8 (train.precision=fp8).
 *
 * Their operands become fp8 copies, which CAST writes with one scale, which AMAX finds, or with
 * scales of rows or blocks (fp8.recipe), which it finds itself; results, sums and everything else
 * stay in bf16. GEMM engines read fp8 operands along the dimension that
 * they sum over only. So the input gradient needs the weight transposed, and the weight gradient
 * needs both of its operands transposed (qd_slot.transposed).
 *
 * A copy is made right before its first reader, in all the forms that later GEMMs read, unless the
 * backward pass keeps the source anyway: then it casts it again, with the same scale, which takes
 * no memory. Otherwise the backward pass keeps the fp8 copy instead of the source.
 *
 * The scale of a weight may be found once for all passes of a step, by an action of its own, which
 * may also cast it, in all forms (qd_op.once).
 *
 * Casts are bound by memory, so ops that produce values help them: norms and their gradients find
 * the largest magnitude of what they write, activations and their gradients are cast without being
 * stored, where only GEMMs read them, and a cast sums the rows of a gradient for the bias.
 *
 * Scales are those of the rank's own part of a tensor. They are powers of two, so parts with
 * different scales are rounded alike (base/fp8.h), and nothing is exchanged. */
#include "base/fp8.h"
#include "spec/passes/passes.h"

#include <string.h>

/* How a GEMM reads an operand. */
typedef struct gemm_operand {
    int place;
    bool transposed, gradient;
} gemm_operand;
enum { OPERANDS = 2 };

/* The weight comes first: its cast does not wait for an exchange of the other operand. */
static const struct {
    bool gemm;
    gemm_operand operands[OPERANDS];
} gemms[QD_OP_KIND_COUNT] = {
    [QD_OP_LINEAR] = {true, {{QD_LINEAR_WEIGHT, false, false}, {QD_LINEAR_X, false, false}}},
    [QD_OP_LINEAR_ADD] = {true, {{QD_LINEAR_ADD_WEIGHT, false, false}, {QD_LINEAR_ADD_X, false, false}}},
    [QD_OP_LINEAR_DX] = {true, {{QD_LINEAR_DX_WEIGHT, true, false}, {QD_LINEAR_DX_DY, false, true}}},
    [QD_OP_LINEAR_DW] = {true, {{QD_LINEAR_DW_X, true, false}, {QD_LINEAR_DW_DY, true, true}}},
};

/* Layers that are never computed in fp8: they are small, and routing depends on them. */
static const char *const small[] = {"mlp.router", "mlp.shared_gate"};

typedef struct quantizing {
    qd_class_writer *w;
    qd_old_list old;
    int at;       /* index of the current op in it */
    int slots;    /* of the old list */
    int *amax;    /* per slot: where its largest magnitude is; -1: not known, or overwritten since */
    int *copy[2]; /* per slot: its copy, and its transposed copy; -1: none */
} quantizing;

/* Whether `name` is `prefix` or continues it after a dot. */
static bool begins(const char *name, const char *prefix, size_t length)
{
    return strncmp(name, prefix, length) == 0 && (name[length] == '\0' || name[length] == '.');
}

bool qd_fp8_names(const char *list, const char *name)
{
    for (const char *at = list; *at;) {
        size_t length = strcspn(at, ", ");
        if (length > 0 && begins(name, at, length))
            return true;
        at += length;
        at += strspn(at, ", ");
    }
    return false;
}

/* Whether a layer stays in bf16. */
static bool keeps(const char *list, const char *name)
{
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        if (begins(name, small[i], strlen(small[i])))
            return true;
    return strstr(name, ".lora_") != NULL || qd_fp8_names(list, name);
}

/* The slot of the weight of a GEMM, or of its gradient; -1: another kind of op. */
static int weight_of(const qd_op *op)
{
    if (!gemms[op->kind].gemm)
        return -1;
    return op->slot[op->kind == QD_OP_LINEAR_DW ? QD_LINEAR_DW_WEIGHT_GRAD : gemms[op->kind].operands[0].place];
}

/* Whether an op is a GEMM in fp8: of a block, and of a layer that is not kept in bf16. A weight of
 * several parts is in bf16 if one of them is. */
static bool is_quantized(const qd_class_writer *w, const qd_op *op)
{
    int slot = w->module->layer >= 0 ? weight_of(op) : -1;
    for (int i = 0; slot >= 0 && i < w->slots[slot].param_count; i++)
        if (keeps(w->config->fp8.keep, w->decl->params[w->slots[slot].param + i].suffix))
            return false;
    return slot >= 0;
}

/* Gradients of key heads that ranks of tp share are partial sums, each with a scale of its own. */
static void check_shared(qd_class_writer *w, const qd_op *op)
{
    const qd_slot *weight = &w->slots[weight_of(op)];
    const int tp = w->ledger->mesh.degree[QD_AXIS_TP];
    for (int i = 0; i < weight->param_count && tp > w->model->kv_heads; i++)
        if (w->decl->params[weight->param + i].split == QD_SPLIT_KV)
            QD_CLASS_FAIL(w, QD_UNSUPPORTED,
                          "train.precision=fp8: parallel.tp=%d is more than model.kv_heads=%d, so ranks share key heads, whose gradients "
                          "are not computed in fp8: set fp8.keep=attn.k, which keeps queries, keys and values in bf16, or a smaller "
                          "parallel.tp",
                          tp, w->model->kv_heads);
}

static void check_sizes(qd_class_writer *w, const qd_op *op)
{
    enum { STEP = 16 };
    int slot = weight_of(op);
    const char *name = w->decl->params[w->slots[slot].param].suffix;
    int64_t out = w->slots[slot].rows, in = w->slots[slot].cols, rows = op->kind == QD_OP_LINEAR_DW ? op->k : op->m;
    if (out % STEP != 0 || in % STEP != 0)
        QD_CLASS_FAIL(w, QD_UNSUPPORTED,
                      "train.precision=fp8: %s has %lld outputs and %lld inputs on a rank; GEMMs in fp8 need multiples of "
                      "%d: name it in fp8.keep, and it stays in bf16",
                      name, (long long)out, (long long)in, STEP);
    else if (rows % STEP != 0)
        QD_CLASS_FAIL(w, QD_UNSUPPORTED,
                      "train.precision=fp8: a micro-batch has %lld tokens on a rank; GEMMs in fp8 need a multiple of %d: "
                      "change data.seq or train.micro_batch",
                      (long long)rows, STEP);
}

/* Whether all passes of a step share the scale, or the copies, of a slot. */
static bool is_once(const qd_class_writer *w, int slot, qd_fp8_once what)
{
    return w->slots[slot].kind == QD_SLOT_PARAM && w->config->weights_once >= what;
}

/* Whether an op of the backward pass that is not a GEMM in fp8 reads the slot, or it is kept for
 * another reason. */
static bool is_kept(const quantizing *q, int slot)
{
    const qd_class_writer *w = q->w;
    if (w->slots[slot].kind != QD_SLOT_LOCAL)
        return !is_once(w, slot, QD_FP8_ONCE_COPIES);
    for (int i = 0; i < q->old.count; i++) {
        const qd_op *op = &q->old.ops[i];
        for (int j = 0; j < QD_OP_SLOTS && op->phase != QD_PHASE_FORWARD && !is_quantized(w, op); j++)
            if (op->slot[j] == slot && qd_op_reads(op, j))
                return true;
    }
    return false;
}

/* The forms in which GEMMs from op `from` on read the present value of a slot: [0] as it is, [1]
 * transposed; and the earliest phase of these readers. `backward`: those of the backward pass count
 * for a value of the forward pass. */
static qd_phase find_forms(const quantizing *q, int slot, int from, bool backward, bool forms[2])
{
    const qd_phase now = q->old.ops[q->at].phase;
    qd_phase earliest = now;
    forms[0] = forms[1] = false;
    for (int i = from; i < q->old.count; i++) {
        const qd_op *op = &q->old.ops[i];
        bool counts = backward || now != QD_PHASE_FORWARD || op->phase == QD_PHASE_FORWARD;
        for (int r = 0; r < OPERANDS && is_quantized(q->w, op) && counts; r++) {
            const gemm_operand *as = &gemms[op->kind].operands[r];
            if (op->slot[as->place] != slot)
                continue;
            forms[as->transposed] = true;
            earliest = op->phase < earliest ? op->phase : earliest;
        }
        if (qd_op_access(op, slot) & QD_WRITES)
            break;
    }
    return earliest;
}

static int new_copy(quantizing *q, int slot, bool transposed, qd_dtype dtype)
{
    qd_class_writer *w = q->w;
    int copy = qd_class_slot(w, qd_class_name(w, "", slot, transposed ? " fp8 transposed" : " fp8"), QD_SLOT_LOCAL, dtype,
                             w->slots[slot].rows, w->slots[slot].cols);
    w->slots[copy].layout = w->slots[slot].layout;
    w->slots[copy].transposed = transposed;
    w->slots[copy].scaling = qd_fp8_scaling_of(w->config->fp8.recipe, w->slots[slot].kind == QD_SLOT_PARAM);
    return q->copy[transposed][slot] = copy;
}

/* Scales of rows and blocks are found by the cast. */
static bool finds_amax(const qd_class_writer *w)
{
    return w->config->fp8.recipe == QD_FP8_RECIPE_TENSOR;
}

static int new_amax(quantizing *q, int slot)
{
    return q->amax[slot] = qd_class_f32(q->w, qd_class_name(q->w, "amax of ", slot, ""), 1, 1);
}

/* Whether a cast computes this bias gradient: it reads what a GEMM in fp8 reads, too, and nothing
 * overwrites that. */
static bool is_in_cast(const quantizing *q, const qd_op *op)
{
    if (op->kind != QD_OP_BIAS_GRAD || !q->w->config->traits->fused_bias_grad)
        return false;
    int writers = 0, readers = 0;
    for (int i = 0; i < q->old.count; i++) {
        const qd_op *other = &q->old.ops[i];
        int dy = other->kind == QD_OP_LINEAR_DX ? QD_LINEAR_DX_DY : QD_LINEAR_DW_DY;
        writers += (qd_op_access(other, op->slot[QD_BIAS_GRAD_DY]) & QD_WRITES) != 0;
        readers += (other->kind == QD_OP_LINEAR_DX || other->kind == QD_OP_LINEAR_DW) && is_quantized(q->w, other) &&
                   other->slot[dy] == op->slot[QD_BIAS_GRAD_DY];
    }
    return writers <= 1 && readers > 0;
}

/* The gradient of the bias that a cast of the slot sums; -1: none. */
static int sums_of(const quantizing *q, int slot)
{
    for (int i = 0; i < q->old.count; i++)
        if (q->old.ops[i].slot[QD_BIAS_GRAD_DY] == slot && is_in_cast(q, &q->old.ops[i]))
            return q->old.ops[i].slot[QD_BIAS_GRAD_GRAD];
    return -1;
}

/* Whether op i uses a slot as an operand of a GEMM in fp8, and in no other way. */
static bool is_operand(const quantizing *q, int i, int slot)
{
    const qd_op *op = &q->old.ops[i];
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (op->slot[j] == slot && (!is_quantized(q->w, op) || (j != gemms[op->kind].operands[0].place &&
                                                                j != gemms[op->kind].operands[1].place)))
            return false;
    return true;
}

/* Whether only GEMMs in fp8 read the result of the current op, besides a bias gradient that the
 * cast computes; -1, no result: yes. */
static bool is_for_gemms(const quantizing *q, int slot, bool sums)
{
    if (slot >= 0 && (q->w->slots[slot].kind != QD_SLOT_LOCAL || (sums_of(q, slot) >= 0 && !sums)))
        return false;
    for (int i = 0; i < q->old.count && slot >= 0; i++)
        if (i != q->at && qd_op_access(&q->old.ops[i], slot) && !is_operand(q, i, slot) && !is_in_cast(q, &q->old.ops[i]))
            return false;
    return true;
}

/* The copies that later GEMMs need of a slot, and the phase that makes them. */
typedef struct copies {
    int of[2];
    qd_phase phase;
} copies;

static copies new_copies(quantizing *q, int slot, int from, qd_dtype dtype)
{
    bool forms[2];
    copies c = {{-1, -1}, find_forms(q, slot, from, !is_kept(q, slot), forms)};
    for (int transposed = 0; transposed < 2; transposed++)
        if (forms[transposed])
            c.of[transposed] = new_copy(q, slot, transposed, dtype);
    return c;
}

/* Writes the casts that the current op needs of a slot. */
static void cast(quantizing *q, int slot, const gemm_operand *as)
{
    qd_class_writer *w = q->w;
    const int first = w->op_count;
    copies c = new_copies(q, slot, q->at, as->gradient ? w->config->fp8.grad : QD_F8E4M3);
    w->phase = c.phase;
    if (q->amax[slot] < 0 && finds_amax(w))
        qd_class_measure(w, QD_CLASS_OP(w, AMAX, (X, slot), (AMAX, new_amax(q, slot))));
    qd_class_measure(w, QD_CLASS_OP(w, CAST, (X, slot), (AMAX, q->amax[slot]), (Y, c.of[0]), (YT, c.of[1]),
                                    (SUMS, as->gradient ? sums_of(q, slot) : -1)));
    for (int i = first; i < w->op_count; i++)
        w->ops[i].once = is_once(w, slot, w->ops[i].kind == QD_OP_AMAX ? QD_FP8_ONCE_SCALES : QD_FP8_ONCE_COPIES);
}

/* Sizes of an op that replaces another one. */
static void measure_as(qd_class_writer *w, qd_op *op, const qd_op *like)
{
    op->m = like->m;
    op->n = like->n;
    qd_class_count_bytes(w, op);
}

/* An activation that only GEMMs in fp8 read is not stored. */
static bool cast_activation(quantizing *q, const qd_op *op)
{
    qd_class_writer *w = q->w;
    int x = op->slot[QD_ACTIVATION_X], y = op->slot[QD_ACTIVATION_Y];
    if (op->kind != QD_OP_ACTIVATION || !finds_amax(w) || !is_for_gemms(q, y, false))
        return false;
    w->phase = op->phase;
    measure_as(w, QD_CLASS_OP(w, ACTIVATION_AMAX, (X, x), (AMAX, new_amax(q, y))), op);
    copies c = new_copies(q, y, q->at + 1, QD_F8E4M3);
    measure_as(w, QD_CLASS_OP(w, ACTIVATION_CAST, (X, x), (AMAX, q->amax[y]), (Y, c.of[0]), (YT, c.of[1])), op);
    return true;
}

/* The largest magnitude of the activation of a slot in the forward pass; -1: not known. */
static int amax_of_result(const quantizing *q, int x)
{
    for (int i = 0; i < q->at; i++)
        if (q->old.ops[i].kind == QD_OP_ACTIVATION && q->old.ops[i].slot[QD_ACTIVATION_X] == x)
            return q->amax[q->old.ops[i].slot[QD_ACTIVATION_Y]];
    return -1;
}

/* So is the gradient of its input, and the result that is recomputed along with it. */
static bool cast_activation_grad(quantizing *q, const qd_op *op)
{
    qd_class_writer *w = q->w;
    if ((op->kind != QD_OP_ACTIVATION_GRAD && op->kind != QD_OP_ACTIVATION_GRAD_Y) || !finds_amax(w))
        return false;
    int x = op->slot[QD_ACTIVATION_GRAD_X], dy = op->slot[QD_ACTIVATION_GRAD_DY], dx = op->slot[QD_ACTIVATION_GRAD_DX];
    int y = op->kind == QD_OP_ACTIVATION_GRAD_Y ? op->slot[QD_ACTIVATION_GRAD_Y_Y] : -1, again = -1, y_amax = -1;
    if (!is_for_gemms(q, dx, !qd_activation_is_gated(w->model->activation)) || !is_for_gemms(q, y, false))
        return false;
    if (y >= 0) {
        y_amax = amax_of_result(q, x);
        bool forms[2];
        find_forms(q, y, q->at + 1, true, forms);
        if (y_amax < 0 || forms[0])
            return false;
        again = new_copy(q, y, true, QD_F8E4M3);
    }
    w->phase = op->phase;
    measure_as(w, QD_CLASS_OP(w, ACTIVATION_GRAD_AMAX, (X, x), (DY, dy), (AMAX, new_amax(q, dx))), op);
    copies c = new_copies(q, dx, q->at + 1, w->config->fp8.grad);
    measure_as(w, QD_CLASS_OP(w, ACTIVATION_GRAD_CAST, (X, x), (DY, dy), (AMAX, q->amax[dx]), (Y_AMAX, y_amax), (DX, c.of[0]),
                              (DXT, c.of[1]), (YT, again), (SUMS, sums_of(q, dx))), op);
    return true;
}

/* Norms find the largest magnitude of what GEMMs in fp8 read. */
static void find_in_norm(quantizing *q, const qd_op *op)
{
    qd_op now = *op;
    int result = op->kind == QD_OP_NORM ? QD_NORM_Y : QD_NORM_GRAD_DX;
    bool forms[2];
    find_forms(q, op->slot[result], q->at + 1, true, forms);
    if (finds_amax(q->w) && (forms[0] || forms[1]))
        now.slot[op->kind == QD_OP_NORM ? QD_NORM_AMAX : QD_NORM_GRAD_AMAX] = (int16_t)new_amax(q, op->slot[result]);
    qd_class_count_bytes(q->w, qd_class_keep(q->w, &now));
}

/* Copies of a value that an op overwrites hold no longer. */
static void forget_written(quantizing *q, const qd_op *op)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (op->slot[j] >= 0 && op->slot[j] < q->slots && qd_op_writes(op, j))
            q->amax[op->slot[j]] = q->copy[0][op->slot[j]] = q->copy[1][op->slot[j]] = -1;
}

static void quantize(quantizing *q, const qd_op *op)
{
    qd_class_writer *w = q->w;
    qd_op now = *op;
    check_shared(w, op);
    check_sizes(w, op);
    for (int i = 0; i < OPERANDS && !w->wrong; i++) {
        const gemm_operand *as = &gemms[op->kind].operands[i];
        int slot = op->slot[as->place];
        if (q->copy[as->transposed][slot] < 0)
            cast(q, slot, as);
        now.slot[as->place] = (int16_t)q->copy[as->transposed][slot];
    }
    if (!w->wrong)
        qd_class_count_bytes(w, qd_class_keep(w, &now));
}

void qd_pass_quantize(qd_class_writer *w)
{
    if (!w->config->fp8.on || !w->config->training)
        return;
    quantizing q = {.w = w, .slots = w->slot_count};
    int *table = qd_class_table(w, 3 * w->slot_count);
    if (!table)
        return;
    q.amax = table;
    q.copy[0] = table + w->slot_count;
    q.copy[1] = table + 2 * w->slot_count;
    q.old = qd_class_restart(w);
    for (q.at = 0; q.at < q.old.count && !w->wrong; q.at++) {
        const qd_op *op = &q.old.ops[q.at];
        forget_written(&q, op);
        if (is_quantized(w, op))
            quantize(&q, op);
        else if (op->kind == QD_OP_NORM || op->kind == QD_OP_NORM_GRAD)
            find_in_norm(&q, op);
        else if (!is_in_cast(&q, op) && !cast_activation(&q, op) && !cast_activation_grad(&q, op))
            qd_class_keep(w, op);
    }
}
