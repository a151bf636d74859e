#include "nn/nn_impl.h"

#include "base/clock.h"

typedef qd_status (*op_runner)(const qd_op_call *call);

static const op_runner runners[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = qd_run_embed,
    [QD_OP_EMBED_GRAD] = qd_run_embed_grad,
    [QD_OP_NORM] = qd_run_norm,
    [QD_OP_NORM_GRAD] = qd_run_norm_grad,
    [QD_OP_LINEAR] = qd_run_linear,
    [QD_OP_LINEAR_DX] = qd_run_linear_dx,
    [QD_OP_LINEAR_DW] = qd_run_linear_dw,
    [QD_OP_ROPE] = qd_run_rope,
    [QD_OP_ROPE_INVERSE] = qd_run_rope_inverse,
    [QD_OP_ATTENTION] = qd_run_attention,
    [QD_OP_ATTENTION_CACHED] = qd_run_attention_cached,
    [QD_OP_ATTENTION_GRAD] = qd_run_attention_grad,
    [QD_OP_ACTIVATION] = qd_run_activation,
    [QD_OP_ACTIVATION_GRAD] = qd_run_activation_grad,
    [QD_OP_ADD] = qd_run_add,
    [QD_OP_DROPOUT] = qd_run_dropout,
    [QD_OP_HEAD_LOSS] = qd_run_head_loss,
    [QD_OP_HEAD_LOGITS] = qd_run_head_logits,
};

/* Address of a parameter's value or gradient. A tied parameter reads the values of the one it is tied to and collects
 * its gradient in a buffer of its own. */
static char *param_address(const qd_frame *f, const qd_slot *slot, bool grad)
{
    const qd_program *p = f->program;
    int index = p->ledger->modules[f->module].param_begin + slot->param;
    int tied_to = p->ledger->params[index].tied_to;
    char *base = !grad ? f->param : tied_to >= 0 ? f->tied_grad : f->grad;
    int64_t offset = p->storage.offset[!grad && tied_to >= 0 ? tied_to : index];
    return base ? base + offset * (int64_t)qd_dtype_size(slot->dtype) : NULL;
}

static char *local_address(const qd_frame *f, const qd_slot *slot)
{
    char *base = NULL;
    switch (slot->region) {
    case QD_REGION_SCRATCH: base = f->scratch; break;
    case QD_REGION_STASH_I: base = f->use[QD_USE_STASH_I]; break;
    case QD_REGION_STASH_W: base = f->use[QD_USE_STASH_W]; break;
    case QD_REGION_MID: base = f->use[QD_USE_MID]; break;
    default: break;
    }
    return base ? base + slot->offset : NULL;
}

static void *address(const qd_frame *f, const qd_slot *slot)
{
    switch (slot->kind) {
    case QD_SLOT_PARAM: return param_address(f, slot, false);
    case QD_SLOT_GRAD: return param_address(f, slot, true);
    case QD_SLOT_IN: return f->use[QD_USE_IN];
    case QD_SLOT_OUT: return f->use[QD_USE_OUT];
    case QD_SLOT_GRAD_IN: return f->use[QD_USE_GRAD_IN];
    case QD_SLOT_GRAD_OUT: return f->use[QD_USE_GRAD_OUT];
    case QD_SLOT_INPUT: return f->use[QD_USE_INPUT];
    case QD_SLOT_ROPE: return (void *)(uintptr_t)f->rope;
    case QD_SLOT_LOSS: return f->loss;
    case QD_SLOT_CACHE: return f->cache ? f->cache + f->program->ledger->modules[f->module].layer * qd_slot_bytes(slot) : NULL;
    case QD_SLOT_LOGITS: return f->logits;
    case QD_SLOT_LOCAL: return local_address(f, slot);
    }
    return NULL;
}

qd_status qd_nn_run(const qd_frame *frame, unsigned phases)
{
    const qd_module_class *class_ = qd_program_class(frame->program, frame->module);
    const char *module = frame->program->ledger->modules[frame->module].name;
    for (int i = 0; i < class_->op_count; i++) {
        const qd_op *op = &class_->ops[i];
        bool again = phases == QD_NN_AGAIN && op->phase == QD_PHASE_FORWARD && op->again;
        if (!again && !(phases & (1u << op->phase)))
            continue;
        qd_op_call call = {.frame = frame, .op = op, .slots = class_->slots};
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            if (op->slot[j] < 0)
                continue;
            const qd_slot *slot = &class_->slots[op->slot[j]];
            call.at[j] = address(frame, slot);
            if (!call.at[j])
                return QD_FAIL(QD_SYSTEM, "step program: %s of %s needs '%s', which no buffer of the action provides",
                               qd_op_name(op->kind), module, slot->name);
        }
        double begin = frame->profile ? qd_clock_now() : 0.0;
        qd_status status = runners[op->kind](&call);
        if (frame->profile) {
            frame->profile->seconds[op->kind] += qd_clock_now() - begin;
            frame->profile->flops[op->kind] += op->flops;
            frame->profile->bytes[op->kind] += op->bytes;
            frame->profile->calls[op->kind]++;
        }
        if (status != QD_OK)
            return qd_error_prefix(status, "%s of %s: ", qd_op_name(op->kind), module);
    }
    return QD_OK;
}
