/* Closed formulas for the traffic of tensor and context parallelism, independent of the op
 * lists. */
#include "spec/config/formulas.h"

#include "base/text/text.h"

#include <stdio.h>

/* How often the ranks of tp exchange all rows of a micro-batch in a module. */
typedef struct exchanges {
    int reduces, gathers, scatters;
} exchanges;

/* Forward: rows are gathered before GEMMs sharded by columns, and summed after GEMMs sharded by
 * rows. Backward: the same for the gradients; in addition, rows that were gathered for a GEMM are
 * gathered again for its weight gradient. */
static exchanges block_exchanges(const qd_model *m, bool sp, bool training, qd_recompute recompute)
{
    /* Up to the last GEMM, whose sum the backward pass reads only if there is a norm behind it. */
    bool again = training && recompute == QD_RECOMPUTE_FULL;
    int sums = again * (qd_model_norms_behind(m) ? 2 : 1);
    if (!sp)
        return (exchanges){.reduces = 2 + 2 * training + sums};
    return (exchanges){.gathers = 2 + 4 * training + 2 * again, .scatters = 2 + 2 * training + sums};
}

/* Norms over the queries and keys of all ranks sum two numbers per row in each pass. */
static int64_t qk_norm_bytes(const qd_model *m, int64_t rows, bool training, qd_recompute recompute, int tp)
{
    int passes = 1 + training + (training && recompute == QD_RECOMPUTE_FULL);
    return m->qk_norm && m->qk_over == QD_QK_WIDTH ? passes * qd_coll_bytes(QD_COLL_ALL_REDUCE, 2 * rows, QD_F32, tp) : 0;
}

static exchanges end_exchanges(qd_module_kind kind, bool sp, bool training)
{
    if (kind == QD_MODULE_EMBED)
        return sp ? (exchanges){.scatters = 1, .gathers = training} : (exchanges){.reduces = 1};
    return sp ? (exchanges){.gathers = 1, .scatters = training} : (exchanges){.reduces = training};
}

/* Bytes to all-reduce rows × cols elements in pieces of rows. The algorithm depends on the size of
 * a piece. */
static int64_t reduce_bytes(int64_t rows, int64_t cols, int pieces, qd_dtype dtype, int tp)
{
    int64_t bytes = 0;
    for (int p = 0; p < pieces; p++) {
        int64_t first, count;
        qd_slice(rows, pieces, p, &first, &count);
        bytes += qd_coll_bytes(QD_COLL_ALL_REDUCE, count * cols, dtype, tp);
    }
    return bytes;
}

/* The row maximum, the sum of exponentials and the logit of the target, chunk by chunk. */
static int64_t loss_bytes(const qd_program *p, int64_t rows, int tp)
{
    int64_t chunk = qd_head_chunk_rows(p->strategy.traits, p->ledger->model.vocab), bytes = 0;
    for (int64_t first = 0; first < rows; first += chunk) {
        int64_t count = rows - first < chunk ? rows - first : chunk;
        bytes += qd_coll_bytes(QD_COLL_ALL_REDUCE, count, QD_F32, tp) + qd_coll_bytes(QD_COLL_ALL_REDUCE, 2 * count, QD_F32, tp);
    }
    return bytes;
}

static bool runs_module(const qd_program *p, int module)
{
    for (int i = 0; i < p->action_count; i++)
        if (p->actions[i].kind == QD_ACTION_FORWARD && p->actions[i].module == module)
            return true;
    return false;
}

/* The program's bytes for exchanges inside modules over an axis. */
static int64_t planned_over(const qd_program *p, qd_axis axis)
{
    int64_t bytes = 0;
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        unsigned phases = qd_action_phases(a);
        const qd_module_class *c = phases ? qd_program_class(p, a->module) : NULL;
        for (int k = 0; c && k < c->op_count; k++)
            if (qd_op_runs(&c->ops[k], phases) && c->ops[k].exchange.group.axes == QD_AXIS_BIT(axis))
                /* counted as if all pipeline ranks did the same as this one */
                bytes += c->ops[k].exchange.bytes / p->ledger->mesh.degree[QD_AXIS_PP];
    }
    return bytes;
}

bool qd_formula_tensor(const qd_program *p, qd_check_formula *f)
{
    const qd_strategy *s = &p->strategy;
    const qd_mesh *mesh = &p->ledger->mesh;
    int tp = mesh->degree[QD_AXIS_TP], pieces = s->overlap && s->tensor_pieces > 1 ? s->tensor_pieces : 1;
    int pp = mesh->degree[QD_AXIS_PP];
    int64_t rows = qd_program_rows(p), hidden = p->ledger->model.hidden, groups = mesh->world / tp / pp;
    if (tp == 1 || p->ledger->model.moe.experts > 0)
        return false;
    *f = (qd_check_formula){.bytes = 0};
    for (int module = 0; module < p->ledger->module_count; module++) {
        const qd_module *m = &p->ledger->modules[module];
        bool block = m->layer >= 0;
        if (!runs_module(p, module))
            continue;
        const qd_model *model = &p->ledger->model;
        qd_recompute recompute = qd_strategy_recompute(s, p->ledger, module);
        exchanges e = block ? block_exchanges(model, mesh->sp, s->training, recompute) : end_exchanges(m->kind, mesh->sp, s->training);
        int64_t bytes = e.reduces * reduce_bytes(rows, hidden, block ? pieces : 1, s->activation, tp) +
                        e.gathers * qd_coll_bytes(QD_COLL_ALL_GATHER, rows * hidden, s->activation, tp) +
                        e.scatters * qd_coll_bytes(QD_COLL_REDUCE_SCATTER, rows * hidden, s->activation, tp);
        if (block && f->text[0] == '\0') {
            char amount[32];
            qd_text_bytes(bytes, amount, sizeof amount);
            if (mesh->sp)
                snprintf(f->text, sizeof f->text,
                         "tp with sp: %d all-gathers and %d reduce-scatters of b·s·h, %d(t-1)bsh = %s, per block and micro-batch",
                         e.gathers, e.scatters, e.gathers + e.scatters, amount);
            else
                snprintf(f->text, sizeof f->text, "tp: %d all-reduces of b·s·h, %d(t-1)bsh = %s, per block and micro-batch", e.reduces,
                         2 * e.reduces, amount);
        }
        bytes += block ? qk_norm_bytes(model, rows, s->training, recompute, tp) : 0;
        f->bytes += (bytes + (m->kind == QD_MODULE_HEAD ? loss_bytes(p, rows, tp) : 0)) * groups * s->micro_batches;
    }
    f->planned = planned_over(p, QD_AXIS_TP);
    return true;
}

bool qd_formula_context(const qd_program *p, qd_check_formula *f)
{
    const qd_strategy *s = &p->strategy;
    const qd_model *m = &p->ledger->model;
    const qd_mesh *mesh = &p->ledger->mesh;
    int n = mesh->degree[QD_AXIS_CP], tp = mesh->degree[QD_AXIS_TP];
    if (n == 1)
        return false;
    /* With fewer kv heads than ranks of tp, several ranks hold the same head. */
    int64_t dims = m->head_dim + qd_model_v_dim(m), q = m->heads / tp * dims;
    *f = (qd_check_formula){.planned = planned_over(p, QD_AXIS_CP)};
    qd_context_theory t = {.text = ""};
    for (int i = 0; i < p->action_count; i++) {
        unsigned phases = qd_action_phases(&p->actions[i]);
        const qd_module *module = phases ? &p->ledger->modules[p->actions[i].module] : NULL;
        if (!phases || module->layer < 0)
            continue;
        int64_t window = qd_window_within(qd_layer_window(&p->ledger->decls[module->decl]), s->seq);
        t = qd_context_bytes(s->cp_mode, n, qd_context_rounds(s->seq, n, window, n), s->micro_batch * s->seq, q,
                             m->kv_heads > tp ? m->kv_heads / tp : 1, dims, (int64_t)qd_dtype_size(s->activation));
        f->bytes += phases == QD_PHASES_AGAIN || (phases & 1u << QD_PHASE_FORWARD) ? t.forward : 0;
        f->bytes += phases & 1u << QD_PHASE_INPUT ? t.backward : 0;
    }
    f->bytes *= mesh->world / n / mesh->degree[QD_AXIS_PP];
    snprintf(f->text, sizeof f->text, "cp: %s, per block and micro-batch", t.text);
    return true;
}
