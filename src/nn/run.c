/* Runs op lists: resolves the addresses of operands, calls the runner of each op, waits for
 * asynchronous exchanges. */
#include "nn/nn_impl.h"

typedef qd_status (*op_runner)(const qd_op_call *call);

static qd_status run_exchange(const qd_op_call *c)
{
    const qd_exchange *e = c->frame->exchange;
    if (!e)
        return QD_FAIL(QD_SYSTEM, "no ranks to communicate with");
    return e->start(e->context, c->index, c->op, c->slots, c->at);
}

static const op_runner runners[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = qd_run_embed,
    [QD_OP_EMBED_GRAD] = qd_run_embed_grad,
    [QD_OP_NORM] = qd_run_norm,
    [QD_OP_NORM_GRAD] = qd_run_norm_grad,
    [QD_OP_LINEAR] = qd_run_linear,
    [QD_OP_LINEAR_ADD] = qd_run_linear,
    [QD_OP_LINEAR_GELU] = qd_run_linear,
    [QD_OP_LINEAR_DX] = qd_run_linear,
    [QD_OP_LINEAR_DX_GELU] = qd_run_linear,
    [QD_OP_LINEAR_DW] = qd_run_linear,
    [QD_OP_BIAS_GRAD] = qd_run_bias_grad,
    [QD_OP_AMAX] = qd_run_amax,
    [QD_OP_CAST] = qd_run_cast,
    [QD_OP_ACTIVATION_AMAX] = qd_run_activation_amax,
    [QD_OP_ACTIVATION_CAST] = qd_run_activation_cast,
    [QD_OP_ACTIVATION_GRAD_AMAX] = qd_run_activation_grad_amax,
    [QD_OP_ACTIVATION_GRAD_CAST] = qd_run_activation_grad_cast,
    [QD_OP_ADAPT] = qd_run_adapt,
    [QD_OP_ADAPT_DX] = qd_run_adapt,
    [QD_OP_ADAPT_DW] = qd_run_adapt,
    [QD_OP_ROPE] = qd_run_rope,
    [QD_OP_ROPE_INVERSE] = qd_run_rope_inverse,
    [QD_OP_LATENT_QKV] = qd_run_latent_qkv,
    [QD_OP_LATENT_QKV_GRAD] = qd_run_latent_qkv_grad,
    [QD_OP_ATTENTION] = qd_run_attention,
    [QD_OP_ATTENTION_CACHED] = qd_run_attention_cached,
    [QD_OP_ATTENTION_LATENT] = qd_run_attention_latent,
    [QD_OP_ATTENTION_GRAD] = qd_run_attention_grad,
    [QD_OP_ATTENTION_SINK] = qd_run_attention_sink,
    [QD_OP_ATTENTION_SINK_GRAD] = qd_run_attention_sink_grad,
    [QD_OP_ACTIVATION] = qd_run_activation,
    [QD_OP_ACTIVATION_GRAD] = qd_run_activation_grad,
    [QD_OP_ACTIVATION_GRAD_Y] = qd_run_activation_grad_y,
    [QD_OP_CLIP] = qd_run_clip,
    [QD_OP_CLIP_GRAD] = qd_run_clip_grad,
    [QD_OP_ADD] = qd_run_add,
    [QD_OP_SCALE] = qd_run_scale,
    [QD_OP_GATE] = qd_run_gate,
    [QD_OP_GATE_GRAD] = qd_run_gate_grad,
    [QD_OP_DROPOUT] = qd_run_dropout,
    [QD_OP_HEAD_LOSS] = qd_run_head_loss,
    [QD_OP_HEAD_LOGITS] = qd_run_head_logits,
    [QD_OP_HEAD_NORM] = qd_run_head_norm,
    [QD_OP_HEAD_NORM_GRAD] = qd_run_head_norm_grad,
    [QD_OP_QK_SQUARES] = qd_run_qk_squares,
    [QD_OP_QK_NORM] = qd_run_qk_norm,
    [QD_OP_QK_DOTS] = qd_run_qk_dots,
    [QD_OP_QK_NORM_GRAD] = qd_run_qk_norm_grad,
    [QD_OP_ROUTE] = qd_run_route,
    [QD_OP_ROUTE_PLAN] = qd_run_route_plan,
    [QD_OP_ROUTE_GRAD] = qd_run_route_grad,
    [QD_OP_ROUTE_LOAD] = qd_run_route_load,
    [QD_OP_PERMUTE] = qd_run_permute,
    [QD_OP_COMBINE] = qd_run_combine,
    [QD_OP_COMBINE_GRAD] = qd_run_combine_grad,
    [QD_OP_EXPERTS] = qd_run_experts,
    [QD_OP_EXPERTS_DX] = qd_run_experts_dx,
    [QD_OP_EXPERTS_DW] = qd_run_experts_dw,
    [QD_OP_EXPERTS_SWIGLU] = qd_run_experts_swiglu,
    [QD_OP_EXPERTS_DX_SWIGLU] = qd_run_experts_dx_swiglu,
    [QD_OP_EXPERTS_BIAS] = qd_run_experts_bias,
    [QD_OP_EXPERTS_BIAS_GRAD] = qd_run_experts_bias_grad,
    [QD_OP_EXPERT_ACTIVATION] = qd_run_expert_activation,
    [QD_OP_EXPERT_ACTIVATION_GRAD] = qd_run_expert_activation_grad,
    [QD_OP_LOSS_MAX] = qd_run_loss_max,
    [QD_OP_LOSS_PART] = qd_run_loss_part,
    [QD_OP_LOSS_GRAD] = qd_run_loss_grad,
    [QD_OP_LOSS_SUM] = qd_run_loss_sum,
    [QD_OP_LOSS_ROWS] = qd_run_loss_rows,
    [QD_OP_PAIR_SUMS] = qd_run_pair_sums,
    [QD_OP_PAIR_LOSS] = qd_run_pair_loss,
    [QD_OP_ALL_REDUCE] = run_exchange,
    [QD_OP_ALL_GATHER] = run_exchange,
    [QD_OP_REDUCE_SCATTER] = run_exchange,
    [QD_OP_DISPATCH] = run_exchange,
    [QD_OP_RETURN] = run_exchange,
    [QD_OP_EXPERT_ROUNDS] = qd_run_expert_rounds,
    [QD_OP_EXPERT_ROUNDS_GRAD] = qd_run_expert_rounds_grad,
    [QD_OP_NODE_PLAN] = qd_run_node_plan,
    [QD_OP_NODE_DISPATCH] = run_exchange,
    [QD_OP_NODE_RETURN] = run_exchange,
    [QD_OP_NODE_WEIGHTS] = qd_run_node_weights,
    [QD_OP_NODE_RESEND] = qd_run_node_resend,
    [QD_OP_RELAY_PLAN] = qd_run_relay_plan,
    [QD_OP_RELAY_ROUNDS] = qd_run_relay_rounds,
    [QD_OP_RELAY_ROUNDS_GRAD] = qd_run_relay_rounds_grad,
    [QD_OP_ZERO] = qd_run_zero,
    [QD_OP_COLUMNS] = qd_run_columns,
    [QD_OP_ATTENTION_PART] = qd_run_attention_part,
    [QD_OP_ATTENTION_DELTA] = qd_run_attention_delta,
    [QD_OP_ATTENTION_PART_GRAD] = qd_run_attention_part_grad,
    [QD_OP_HEADS_SPLIT] = qd_run_heads_split,
    [QD_OP_HEADS_JOIN] = qd_run_heads_join,
    [QD_OP_ROWS_SPLIT] = qd_run_rows_split,
    [QD_OP_ROWS_JOIN] = qd_run_rows_join,
    [QD_OP_CONTEXT_SHIFT] = run_exchange,
    [QD_OP_CONTEXT_GATHER] = run_exchange,
    [QD_OP_CONTEXT_SCATTER] = run_exchange,
    [QD_OP_CONTEXT_SWAP] = run_exchange,
};

bool qd_nn_has_runner(qd_op_kind kind)
{
    return runners[kind] != NULL;
}

/* Address of a parameter's value or gradient. A tied parameter reads the values of the one it is
 * tied to, but has a gradient buffer of its own. */
static char *param_address(const qd_frame *f, const qd_slot *slot, bool grad)
{
    const qd_program *p = f->program;
    int index = p->ledger->modules[f->module].param_begin + slot->param;
    int tied_to = p->ledger->params[index].tied_to;
    qd_use use = grad ? (tied_to >= 0 ? QD_USE_TIED_GRAD : QD_USE_GRAD) : tied_to >= 0 ? QD_USE_TIED_PARAM : QD_USE_PARAM;
    int64_t offset = (grad ? p->storage.offset : p->storage.value)[index] - f->first[use];
    return f->use[use] ? f->use[use] + offset * (int64_t)qd_dtype_size(slot->dtype) : NULL;
}

static char *local_address(const qd_frame *f, const qd_slot *slot)
{
    char *base = NULL;
    switch (slot->region) {
    case QD_REGION_SCRATCH: base = f->scratch; break;
    case QD_REGION_STASH_I: base = f->use[QD_USE_STASH_I]; break;
    case QD_REGION_STASH_W: base = f->use[QD_USE_STASH_W]; break;
    case QD_REGION_MID: base = f->use[QD_USE_MID]; break;
    case QD_REGION_WEIGHTS: base = f->use[QD_USE_CAST]; break;
    default: break;
    }
    return base ? base + slot->offset : NULL;
}

static void *address(const qd_frame *f, const qd_slot *slot)
{
    const qd_program *p = f->program;
    switch (slot->kind) {
    case QD_SLOT_PARAM: return param_address(f, slot, false);
    case QD_SLOT_GRAD: return param_address(f, slot, true);
    case QD_SLOT_IN: return f->use[QD_USE_IN];
    case QD_SLOT_OUT: return f->use[QD_USE_OUT];
    case QD_SLOT_GRAD_IN: return f->use[QD_USE_GRAD_IN];
    case QD_SLOT_GRAD_OUT: return f->use[QD_USE_GRAD_OUT];
    case QD_SLOT_INPUT: return f->use[QD_USE_INPUT];
    case QD_SLOT_ROPE: return (void *)((uintptr_t)f->rope + (uintptr_t)(slot->param * qd_slot_bytes(slot)));
    case QD_SLOT_LOSS: return f->loss;
    case QD_SLOT_SCORES: return f->scores;
    case QD_SLOT_CACHE: return f->cache ? f->cache + qd_program_cache_offset(p, p->ledger->modules[f->module].layer) : NULL;
    case QD_SLOT_LOGITS: return f->logits;
    case QD_SLOT_LOCAL: return local_address(f, slot);
    }
    return NULL;
}

/* Waits for the asynchronous ops of these phases among ops [*from, index) that must be complete
 * before op `index`. They complete in list order, so *from, the first that may still be in flight,
 * only grows. */
static qd_status wait_exchanges(const qd_frame *frame, const qd_module_class *class_, unsigned phases, int index, int *from)
{
    for (; *from < index; ++*from) {
        const qd_op *op = &class_->ops[*from];
        if (!op->exchange.async || !qd_op_runs(op, phases))
            continue;
        if (op->exchange.until > index)
            return QD_OK;
        QD_TRY(frame->exchange->wait(frame->exchange->context, *from));
    }
    return QD_OK;
}

/* Resolves the addresses of the operands of op `index`. */
static qd_status bind_call(const qd_frame *frame, const qd_module_class *class_, int index, qd_op_call *call)
{
    const qd_op *op = &class_->ops[index];
    *call = (qd_op_call){
        .frame = frame, .op = op, .index = index, .accumulate = !(frame->overwrite && op->overwrites), .slots = class_->slots};
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        if (op->slot[j] < 0)
            continue;
        const qd_slot *slot = &class_->slots[op->slot[j]];
        call->at[j] = address(frame, slot);
        if (!call->at[j])
            return QD_FAIL(QD_SYSTEM, "step program: %s of %s needs '%s' (its operand %s), which no buffer of the action provides",
                           qd_op_name(op->kind), frame->program->ledger->modules[frame->module].name, slot->name,
                           qd_op_operand_name(op->kind, j));
    }
    return QD_OK;
}

static qd_status run_op(const qd_frame *frame, const qd_module_class *class_, int index)
{
    const qd_op_kind kind = class_->ops[index].kind;
    qd_op_call call;
    int piece = 0;
    QD_TRY(bind_call(frame, class_, index, &call));
    if (frame->profile)
        QD_TRY(qd_timeline_begin(frame->timeline, frame->op_id + (int)kind, &piece));
    qd_status status = runners[kind](&call);
    if (frame->profile) {
        QD_TRY(qd_timeline_end(frame->timeline, piece));
        frame->profile->flops[kind] += class_->ops[index].flops;
        frame->profile->bytes[kind] += qd_op_as_run(class_, index, frame->overwrite).bytes;
        frame->profile->calls[kind]++;
    }
    if (status != QD_OK)
        return qd_error_prefix(status, "%s of %s: ", qd_op_name(kind), frame->program->ledger->modules[frame->module].name);
    if (frame->profile && frame->profile->after_op)
        QD_TRY(frame->profile->after_op(frame->profile->context, frame->stream));
    return QD_OK;
}

qd_status qd_nn_run(const qd_frame *frame, unsigned phases)
{
    const qd_module_class *class_ = qd_program_class(frame->program, frame->module);
    int awaited = 0;
    for (int i = 0; i < class_->op_count; i++) {
        QD_TRY(wait_exchanges(frame, class_, phases, i, &awaited));
        if (qd_op_runs(&class_->ops[i], phases))
            QD_TRY(run_op(frame, class_, i));
    }
    return wait_exchanges(frame, class_, phases, class_->op_count, &awaited);
}

/* The GEMMs of a program. */

typedef bool (*op_gemm)(const qd_op_call *call, int64_t number, qd_matmul_args *args);

/* Ops that call the kernel `matmul`. */
static const op_gemm gemms[QD_OP_KIND_COUNT] = {
    [QD_OP_LINEAR] = qd_linear_gemm,
    [QD_OP_LINEAR_ADD] = qd_linear_gemm,
    [QD_OP_LINEAR_GELU] = qd_linear_gemm,
    [QD_OP_LINEAR_DX] = qd_linear_gemm,
    [QD_OP_LINEAR_DX_GELU] = qd_linear_gemm,
    [QD_OP_LINEAR_DW] = qd_linear_gemm,
    [QD_OP_ADAPT] = qd_adapt_gemm,
    [QD_OP_ADAPT_DX] = qd_adapt_gemm,
    [QD_OP_ADAPT_DW] = qd_adapt_gemm,
    [QD_OP_HEAD_LOSS] = qd_head_loss_gemm,
    [QD_OP_HEAD_LOGITS] = qd_head_logits_gemm,
};

static qd_status visit_gemms(const qd_op_call *call, qd_product_visitor visit, void *context)
{
    qd_matmul_args args;
    for (int64_t number = 0; gemms[call->op->kind](call, number, &args); number++)
        QD_TRY(visit(context, &args));
    return QD_OK;
}

qd_status qd_nn_products(const qd_program *program, qd_product_visitor visit, void *context)
{
    const qd_frame frame = {.program = program};
    const bool again = program->strategy.micro_batches > 1 && !program->strategy.sync_each; /* gradients are also accumulated */
    static char here[1]; /* address for operands that exist; never read or written */
    for (int module = 0; module < program->ledger->module_count; module++) {
        const qd_module_class *class_ = qd_program_class(program, module);
        for (int i = 0; i < class_->op_count; i++) {
            const qd_op *op = &class_->ops[i];
            if (!gemms[op->kind])
                continue;
            qd_op_call call = {.frame = &frame, .op = op, .slots = class_->slots, .accumulate = !op->overwrites};
            for (int j = 0; j < QD_OP_SLOTS; j++)
                call.at[j] = op->slot[j] >= 0 ? here : NULL;
            QD_TRY(visit_gemms(&call, visit, context));
            call.accumulate = true;
            if (op->overwrites && again)
                QD_TRY(visit_gemms(&call, visit, context));
        }
    }
    return QD_OK;
}
