/* Follows the op list of a class of modules: forward, recompute, backward. The rule of each op
 * computes the placements of its results; ports must be placed as in the ledger. */
#include "spec/proof/proof_impl.h"

#include <stdlib.h>
#include <string.h>

/* A switch, so that the compiler reports kinds of ops without a rule. */
proof_rule qd_proof_rule_of(qd_op_kind kind)
{
    switch (kind) {
    case QD_OP_EMBED:
        return qd_proof_rule_embed;
    case QD_OP_EMBED_GRAD:
        return qd_proof_rule_embed_grad;
    case QD_OP_NORM:
        return qd_proof_rule_norm;
    case QD_OP_NORM_GRAD:
        return qd_proof_rule_norm_grad;
    case QD_OP_LINEAR:
    case QD_OP_LINEAR_ADD:
    case QD_OP_LINEAR_GELU:
        return qd_proof_rule_linear;
    case QD_OP_LINEAR_DX:
    case QD_OP_LINEAR_DX_GELU:
        return qd_proof_rule_linear_dx;
    case QD_OP_LINEAR_DW:
        return qd_proof_rule_linear_dw;
    case QD_OP_AMAX:
        return qd_proof_rule_amax;
    case QD_OP_CAST:
        return qd_proof_rule_cast;
    case QD_OP_ACTIVATION_AMAX:
    case QD_OP_ACTIVATION_CAST:
    case QD_OP_ACTIVATION_GRAD_AMAX:
    case QD_OP_ACTIVATION_GRAD_CAST:
        return qd_proof_rule_activation_fp8;
    case QD_OP_ADAPT:
        return qd_proof_rule_adapt;
    case QD_OP_ADAPT_DX:
        return qd_proof_rule_adapt_dx;
    case QD_OP_ADAPT_DW:
        return qd_proof_rule_adapt_dw;
    case QD_OP_BIAS_GRAD:
        return qd_proof_rule_bias_grad;
    case QD_OP_ROPE:
    case QD_OP_ROPE_INVERSE:
        return qd_proof_rule_rope;
    case QD_OP_LATENT_QKV:
        return qd_proof_rule_latent_qkv;
    case QD_OP_LATENT_QKV_GRAD:
        return qd_proof_rule_latent_qkv_grad;
    case QD_OP_ATTENTION:
        return qd_proof_rule_attention;
    case QD_OP_ATTENTION_LATENT:
        return qd_proof_rule_attention_latent;
    case QD_OP_ATTENTION_CACHED:
        return qd_proof_rule_attention_cached;
    case QD_OP_ATTENTION_GRAD:
        return qd_proof_rule_attention_grad;
    case QD_OP_ACTIVATION:
        return qd_proof_rule_activation;
    case QD_OP_ACTIVATION_GRAD:
    case QD_OP_ACTIVATION_GRAD_Y:
        return qd_proof_rule_activation_grad;
    case QD_OP_CLIP:
        return qd_proof_rule_activation;
    case QD_OP_CLIP_GRAD:
        return qd_proof_rule_clip_grad;
    case QD_OP_ADD:
        return qd_proof_rule_add;
    case QD_OP_GATE:
        return qd_proof_rule_gate;
    case QD_OP_GATE_GRAD:
        return qd_proof_rule_gate_grad;
    case QD_OP_SCALE:
    case QD_OP_DROPOUT:
        return qd_proof_rule_dropout;
    case QD_OP_HEAD_LOSS:
        return qd_proof_rule_head_loss;
    case QD_OP_HEAD_LOGITS:
        return qd_proof_rule_head_logits;
    case QD_OP_HEAD_NORM:
        return qd_proof_rule_head_norm;
    case QD_OP_HEAD_NORM_GRAD:
        return qd_proof_rule_head_norm_grad;
    case QD_OP_QK_SQUARES:
        return qd_proof_rule_qk_squares;
    case QD_OP_QK_NORM:
        return qd_proof_rule_qk_norm;
    case QD_OP_QK_DOTS:
        return qd_proof_rule_qk_dots;
    case QD_OP_QK_NORM_GRAD:
        return qd_proof_rule_qk_norm_grad;
    case QD_OP_ROUTE:
        return qd_proof_rule_route;
    case QD_OP_ROUTE_PLAN:
        return qd_proof_rule_route_plan;
    case QD_OP_ROUTE_GRAD:
        return qd_proof_rule_route_grad;
    case QD_OP_ROUTE_LOAD:
        return qd_proof_rule_route_load;
    case QD_OP_PERMUTE:
        return qd_proof_rule_permute;
    case QD_OP_COMBINE:
        return qd_proof_rule_combine;
    case QD_OP_COMBINE_GRAD:
        return qd_proof_rule_combine_grad;
    case QD_OP_EXPERTS:
    case QD_OP_EXPERTS_SWIGLU:
    case QD_OP_EXPERTS_DX:
    case QD_OP_EXPERTS_DX_SWIGLU:
        return qd_proof_rule_experts;
    case QD_OP_EXPERTS_DW:
        return qd_proof_rule_experts_dw;
    case QD_OP_EXPERTS_BIAS:
        return qd_proof_rule_experts_bias;
    case QD_OP_EXPERTS_BIAS_GRAD:
        return qd_proof_rule_experts_bias_grad;
    case QD_OP_EXPERT_ACTIVATION:
    case QD_OP_EXPERT_ACTIVATION_GRAD:
        return qd_proof_rule_expert_activation;
    case QD_OP_DISPATCH:
        return qd_proof_rule_dispatch;
    case QD_OP_RETURN:
        return qd_proof_rule_return;
    case QD_OP_EXPERT_ROUNDS:
    case QD_OP_RELAY_ROUNDS:
        return qd_proof_rule_rounds;
    case QD_OP_EXPERT_ROUNDS_GRAD:
    case QD_OP_RELAY_ROUNDS_GRAD:
        return qd_proof_rule_rounds_grad;
    case QD_OP_NODE_PLAN:
        return qd_proof_rule_node_plan;
    case QD_OP_NODE_DISPATCH:
        return qd_proof_rule_node_dispatch;
    case QD_OP_NODE_RETURN:
        return qd_proof_rule_node_return;
    case QD_OP_NODE_WEIGHTS:
        return qd_proof_rule_node_weights;
    case QD_OP_NODE_RESEND:
        return qd_proof_rule_node_resend;
    case QD_OP_RELAY_PLAN:
        return qd_proof_rule_relay_plan;
    case QD_OP_LOSS_MAX:
        return qd_proof_rule_loss_max;
    case QD_OP_LOSS_PART:
        return qd_proof_rule_loss_part;
    case QD_OP_LOSS_GRAD:
        return qd_proof_rule_loss_grad;
    case QD_OP_LOSS_SUM:
        return qd_proof_rule_loss_sum;
    case QD_OP_LOSS_ROWS:
        return qd_proof_rule_loss_rows;
    case QD_OP_PAIR_SUMS:
        return qd_proof_rule_pair_sums;
    case QD_OP_PAIR_LOSS:
        return qd_proof_rule_pair_loss;
    case QD_OP_ALL_REDUCE:
        return qd_proof_rule_all_reduce;
    case QD_OP_ALL_GATHER:
        return qd_proof_rule_all_gather;
    case QD_OP_REDUCE_SCATTER:
        return qd_proof_rule_reduce_scatter;
    case QD_OP_ZERO:
        return qd_proof_rule_zero;
    case QD_OP_COLUMNS:
        return qd_proof_rule_columns;
    case QD_OP_ATTENTION_PART:
        return qd_proof_rule_attention_part;
    case QD_OP_ATTENTION_SINK:
        return qd_proof_rule_attention_sink;
    case QD_OP_ATTENTION_SINK_GRAD:
        return qd_proof_rule_attention_sink_grad;
    case QD_OP_ATTENTION_DELTA:
        return qd_proof_rule_attention_delta;
    case QD_OP_ATTENTION_PART_GRAD:
        return qd_proof_rule_attention_part_grad;
    case QD_OP_HEADS_SPLIT:
    case QD_OP_HEADS_JOIN:
    case QD_OP_ROWS_SPLIT:
    case QD_OP_ROWS_JOIN:
        return qd_proof_rule_cut;
    case QD_OP_CONTEXT_SHIFT:
        return qd_proof_rule_context_shift;
    case QD_OP_CONTEXT_GATHER:
        return qd_proof_rule_context_gather;
    case QD_OP_CONTEXT_SCATTER:
        return qd_proof_rule_context_scatter;
    case QD_OP_CONTEXT_SWAP:
        return qd_proof_rule_context_swap;
    case QD_OP_KIND_COUNT:
        break;
    }
    return NULL;
}

bool qd_proof_knows(qd_op_kind kind)
{
    return qd_proof_rule_of(kind) != NULL && qd_proof_operand_known(kind) && qd_proof_sizes_known(kind);
}

/* Tokens of the input: different on each rank of dp and cp, replicated over tp. */
static proof_place input_place(const qd_proof *proof)
{
    proof_place place = {.fold = FOLD_DENSE};
    for (int d = 0; d < proof->frames[FOLD_DENSE].count; d++)
        place.code[d] = qd_proof_digit_axis(proof, d) == QD_AXIS_TP ? CODE_SAME : CODE_ROWS;
    return place;
}

static proof_place port_place(const qd_proof *proof, const qd_port *port)
{
    proof_place place = {.fold = FOLD_DENSE};
    for (int d = 0; d < proof->frames[FOLD_DENSE].count; d++) {
        const qd_place *p = &port->place[qd_proof_digit_axis(proof, d)];
        place.code[d] = p->kind == QD_PARTIAL ? CODE_SUM : p->kind == QD_REPLICATE ? CODE_SAME : p->dim == 0 ? CODE_ROWS : CODE_COLS;
    }
    return place;
}

static qd_status provide(proof_walk *w, int slot, const proof_place *place, bool gradient)
{
    proof_slot *s = &w->slots[slot];
    if (s->count == 0) {
        s->segments = malloc(sizeof *s->segments);
        if (!s->segments)
            return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
        s->capacity = 1;
    }
    int64_t rows = w->ops->slots[slot].rows;
    s->segments[0] = (proof_segment){0, rows > 0 ? rows : 1, qd_proof_value_of(w, place, gradient)};
    s->count = 1;
    return QD_OK;
}

static qd_status provide_all(proof_walk *w)
{
    const proof_place input = input_place(w->proof), same = {.fold = FOLD_DENSE};
    int module = w->class_->module;
    for (int i = 0; i < w->ops->slot_count; i++) {
        qd_slot_kind kind = w->ops->slots[i].kind;
        if (kind == QD_SLOT_INPUT)
            QD_TRY(provide(w, i, &input, false));
        else if (kind == QD_SLOT_ROPE || kind == QD_SLOT_CACHE)
            QD_TRY(provide(w, i, &same, false));
        else if (kind == QD_SLOT_IN || kind == QD_SLOT_GRAD_OUT) {
            bool in = kind == QD_SLOT_IN;
            if ((in && module == 0) || (!in && module == w->ledger->module_count - 1))
                continue; /* absent; reading it fails */
            proof_place place = port_place(w->proof, &w->ledger->ports[in ? module - 1 : module]);
            QD_TRY(provide(w, i, &place, !in));
        }
    }
    return QD_OK;
}

/* The output of a module must be placed as the next one expects it. */
static qd_status check_ports(proof_walk *w)
{
    int module = w->class_->module;
    for (int i = 0; i < w->ops->slot_count; i++) {
        const qd_slot *slot = &w->ops->slots[i];
        bool out = slot->kind == QD_SLOT_OUT;
        if ((!out && slot->kind != QD_SLOT_GRAD_IN) || (out ? module == w->ledger->module_count - 1 : module == 0))
            continue;
        proof_place wanted = port_place(w->proof, &w->ledger->ports[out ? module : module - 1]);
        const char *name = w->ledger->modules[module].name;
        for (int k = 0; k < (w->slots[i].count > 0 ? w->slots[i].count : 1); k++) {
            const proof_value *v = w->slots[i].count > 0 ? &w->slots[i].segments[k].value : NULL;
            char axis[32];
            if (!v || v->kind != KNOWN || v->gradient == out)
                return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s, value '%s': no op has written %s", w->program->rank, name, slot->name,
                               v && v->kind == KNOWN ? (out ? "a value of the forward pass to it" : "a gradient to it") : "all of it");
            for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
                qd_proof_digit_name(w->proof, FOLD_DENSE, d, axis, sizeof axis);
                if (v->place[0].fold != FOLD_DENSE || v->place[0].code[d] != wanted.code[d])
                    return QD_FAIL(QD_MISMATCH,
                                   "gradients: rank %d, %s, op %d (%s), value '%s', axis %s: it leaves the module %s, but the port is %s",
                                   w->program->rank, name, v->by, qd_op_name(w->ops->ops[v->by].kind), slot->name, axis,
                                   qd_proof_code_text((proof_code)v->place[0].code[d]), qd_proof_code_text((proof_code)wanted.code[d]));
            }
        }
    }
    return QD_OK;
}

/* Rules only check operands whose placement matters; all operands must have been written. */
static qd_status operands_written(const proof_walk *w)
{
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        int slot = w->op->slot[j];
        if (slot < 0 || qd_op_roles(w->op->kind)[j] != 'r' || w->ops->slots[slot].kind == QD_SLOT_PARAM)
            continue;
        bool written = false;
        for (int i = 0; i < w->slots[slot].count && !written; i++)
            written = w->slots[slot].segments[i].value.kind != UNWRITTEN;
        if (!written)
            return qd_proof_fail_slot(w, slot, "it is read, but no op has written it");
    }
    return QD_OK;
}

static qd_status follow(proof_walk *w, unsigned phases)
{
    for (int i = 0; i < w->ops->op_count; i++) {
        w->op = &w->ops->ops[i];
        w->index = i;
        if (!qd_op_runs(w->op, phases))
            continue;
        proof_rule rule = qd_proof_rule_of(w->op->kind);
        if (!rule || !qd_proof_operand_known(w->op->kind))
            return qd_proof_fail(w, NO_OPERAND, 0, -1, "the proof has no rule for it");
        QD_TRY(operands_written(w));
        QD_TRY(qd_proof_formats(w));
        QD_TRY(rule(w));
        QD_TRY(qd_proof_sizes(w));
        w->proof->report.ops++;
    }
    return QD_OK;
}

/* Full recompute: a block keeps only its ports, and weights in fp8 or their scales. Gradient
 * writes are those of the first run. */
static qd_status forget(proof_walk *w)
{
    for (int i = 0; i < w->ops->slot_count; i++)
        if (w->ops->slots[i].kind == QD_SLOT_LOCAL && w->ops->slots[i].region != QD_REGION_WEIGHTS)
            w->slots[i].count = 0;
    int writes = w->class_->write_count;
    QD_TRY(follow(w, QD_PHASES_AGAIN));
    return w->class_->write_count == writes
               ? QD_OK
               : qd_proof_fail(w, NO_OPERAND, 0, -1, "a recomputed op writes gradients of parameters a second time");
}

/* Marks the GEMMs from op `i` on that add to its gradient, if their windows follow each other and
 * cover all rows: the usual case, with tens of thousands of windows for a long sequence. */
static void mark_windows(const proof_walk *w, int i, bool *marked)
{
    const qd_op *op = &w->ops->ops[i];
    const int grad = qd_proof_slot_of(op, WEIGHT_GRAD), x = qd_proof_slot_of(op, X);
    for (int pass = 0; pass < 2; pass++) {
        int64_t rows = 0;
        for (int k = i; k < w->ops->op_count; k++) {
            const qd_op *other = &w->ops->ops[k];
            if (other->kind != QD_OP_LINEAR_DW || qd_proof_slot_of(other, WEIGHT_GRAD) != grad || qd_proof_slot_of(other, X) != x)
                continue;
            if (other->first != rows)
                return;
            rows += other->k;
            marked[k] = pass == 1;
        }
        if (rows != w->ops->slots[x].rows)
            return;
    }
}

/* Windows of rows that contribute to one gradient must cover all rows, each once. */
static qd_status check_windows(proof_walk *w)
{
    bool *marked = calloc((size_t)w->ops->op_count + 1, sizeof *marked);
    qd_status status = marked ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    for (int i = 0; i < w->ops->op_count && status == QD_OK; i++) {
        const qd_op *op = &w->ops->ops[i];
        if (op->kind != QD_OP_LINEAR_DW || marked[i])
            continue;
        mark_windows(w, i, marked);
        if (marked[i])
            continue;
        int grad = qd_proof_slot_of(op, WEIGHT_GRAD), x = qd_proof_slot_of(op, X);
        int64_t rows = 0;
        bool again = false;
        for (int k = 0; k < w->ops->op_count; k++) {
            const qd_op *other = &w->ops->ops[k];
            /* A weight that several GEMMs read has a gradient of the rows of each. */
            if (other->kind != QD_OP_LINEAR_DW || qd_proof_slot_of(other, WEIGHT_GRAD) != grad || qd_proof_slot_of(other, X) != x)
                continue;
            rows += other->k;
            again = again || (k != i && other->first < op->first + op->k && op->first < other->first + other->k);
        }
        w->op = op;
        w->index = i;
        if (again || rows != w->ops->slots[x].rows)
            status = qd_proof_fail(w, X, 0, -1,
                                   again ? "some of its %lld rows count twice in a gradient (%lld in all)"
                                         : "of its %lld rows %lld count in the gradient",
                                   (long long)w->ops->slots[x].rows, (long long)rows);
    }
    free(marked);
    return status;
}

static bool reads_param(const qd_module_class *c, int param)
{
    for (int i = 0; i < c->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS && c->ops[i].phase == QD_PHASE_FORWARD; j++) {
            const qd_slot *slot = c->ops[i].slot[j] >= 0 ? &c->slots[c->ops[i].slot[j]] : NULL;
            if (slot && slot->kind == QD_SLOT_PARAM && param >= slot->param && param < slot->param + slot->param_count)
                return true;
        }
    return false;
}

/* A parameter with a gradient must be used in the forward pass, here or (biases of partial sums) on
 * another rank of tp. One without a gradient must not be, or it would not be trained. */
static qd_status check_params(proof_walk *w)
{
    const qd_module *module = &w->ledger->modules[w->class_->module];
    const qd_mesh *mesh = w->proof->mesh;
    for (int i = 0; i < module->param_count; i++) {
        const qd_param *p = &w->ledger->params[module->param_begin + i];
        bool written = false, read = reads_param(w->ops, i);
        for (int k = 0; k < w->class_->write_count; k++)
            written = written || (i >= w->class_->writes[k].param && i < w->class_->writes[k].param + w->class_->writes[k].params);
        for (int t = 0; t < mesh->degree[QD_AXIS_TP] && !read; t++)
            read = reads_param(qd_program_class(w->proof->programs[qd_mesh_group_rank(mesh, QD_AXIS_BIT(QD_AXIS_TP), w->program->rank, t)],
                                                w->class_->module),
                               i);
        if (p->counts)
            read = w->ledger->model.moe.bias_rate > 0.0; /* the gradient is a count that the update reads */
        if (p->expert > 0)                               /* experts are read together */
            continue;
        if (p->frozen && written)
            return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s: the parameter %s is frozen, but an op computes its gradient",
                           w->program->rank, module->name, p->name);
        if (p->frozen)
            continue;
        if (written != read)
            return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s: the parameter %s %s", w->program->rank, module->name, p->name,
                           written ? "has a gradient, but no rank uses it in the forward pass"
                                   : "is used in the forward pass, but no op computes its gradient");
    }
    for (int k = 0; k < w->class_->write_count; k++) {
        const proof_write *write = &w->class_->writes[k];
        bool rounds = !write->overflow;
        for (int j = 0; j < w->class_->write_count && !rounds; j++) {
            qd_op_kind kind = w->ops->ops[w->class_->writes[j].op].kind;
            rounds = w->class_->writes[j].param == write->param && (kind == QD_OP_EXPERT_ROUNDS_GRAD || kind == QD_OP_RELAY_ROUNDS_GRAD);
        }
        w->op = &w->ops->ops[write->op];
        w->index = write->op;
        if (!rounds)
            return qd_proof_fail(w, WEIGHT_GRAD, 0, -1, "rows beyond the buffer space of experts are missing from the gradient");
    }
    return QD_OK;
}

static qd_status note_reads(proof_class *c)
{
    c->reads = calloc((size_t)c->ops->slot_count + 1, 1);
    if (!c->reads)
        return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    for (int i = 0; i < c->ops->op_count; i++) {
        const qd_op *op = &c->ops->ops[i];
        unsigned phases = op->once ? QD_PHASES_ONCE : 1u << op->phase | (op->phase == QD_PHASE_FORWARD && op->again ? QD_PHASES_AGAIN : 0);
        c->phases |= phases;
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (op->slot[j] >= 0 && qd_op_roles(op->kind)[j] != 'w')
                c->reads[op->slot[j]] |= (uint8_t)phases;
    }
    return QD_OK;
}

/* Follows the passes in the order of the actions that run them. */
static qd_status follow_all(proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    w->slots = calloc((size_t)w->ops->slot_count + 1, sizeof *w->slots);
    qd_status status = w->slots ? provide_all(w) : QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    if (status == QD_OK)
        status = follow(w, QD_PHASES_ONCE);
    if (status == QD_OK)
        status = follow(w, 1u << QD_PHASE_FORWARD);
    if (status == QD_OK && s->training && w->ops->recompute == QD_RECOMPUTE_FULL)
        status = forget(w);
    if (status == QD_OK && w->apart)
        status = follow(w, 1u << QD_PHASE_INPUT);
    if (status == QD_OK)
        status = follow(w, w->apart ? 1u << QD_PHASE_WEIGHT : 1u << QD_PHASE_INPUT | 1u << QD_PHASE_WEIGHT);
    if (status == QD_OK)
        status = check_ports(w);
    if (status == QD_OK && w->class_->module == w->ledger->module_count - 1 && s->context == 0 &&
        w->class_->losses != 1 + qd_program_ahead(w->program))
        status = QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s: %s", w->program->rank, w->ledger->modules[w->class_->module].name,
                         w->class_->losses == 0 ? "no op sums the losses" : "no op sums the losses of further tokens");
    qd_proof_slots_destroy(w->slots, w->ops->slot_count);
    w->slots = NULL;
    return status;
}

qd_status qd_proof_walk_class(qd_proof *proof, proof_class *class_)
{
    proof_walk w = {.proof = proof, .class_ = class_, .program = class_->program, .ops = class_->ops, .ledger = class_->program->ledger};
    QD_TRY(note_reads(class_));
    if (w.program->strategy.split_backward) { /* a schedule may split some backward passes and run others whole */
        w.apart = true;
        QD_TRY(follow_all(&w));
        class_->write_count = 0;
        class_->losses = class_->embeds = 0;
        w.apart = false;
    }
    QD_TRY(follow_all(&w));
    QD_TRY(qd_proof_slot_sizes(&w));
    if (!w.program->strategy.training)
        return QD_OK;
    QD_TRY(check_windows(&w));
    QD_TRY(check_params(&w));
    return qd_proof_derivative(&w);
}
