/* The op list of a block. */
#include "spec/ops_impl.h"

/* x → norm → qkv → rope → attention → out → + x → norm → up (gate) → activation → down → + . */
void qd_write_block(qd_class_writer *w)
{
    const qd_model *m = w->model;
    int up_parts = m->activation == QD_ACT_SWIGLU ? 2 : 1;

    int x = qd_class_slot(w, "in", QD_SLOT_IN, w->config->activation, w->port_rows, m->hidden);
    int input = qd_class_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    int table = m->position == QD_POSITION_ROPE
                    ? qd_class_slot(w, "rope_table", QD_SLOT_ROPE, QD_F32, qd_positions(w->config->seq, w->config->context), m->head_dim)
                    : -1;
    qd_class_norm_state n1 = qd_class_norm_slots(w, "attn_norm.weight", "attn_norm.bias", "attn_mean", "attn_rstd");
    qd_class_weight qkv_w = qd_class_weights(w, "attn.q.weight", 3), qkv_b = qd_class_weights(w, "attn.q.bias", 3);
    qd_class_weight out_w = qd_class_weights(w, "attn.out.weight", 1), out_b = qd_class_weights(w, "attn.out.bias", 1);
    qd_class_norm_state n2 = qd_class_norm_slots(w, "mlp_norm.weight", "mlp_norm.bias", "mlp_mean", "mlp_rstd");
    const char *up_name = up_parts == 2 ? "mlp.gate.weight" : "mlp.up.weight";
    const char *up_bias = up_parts == 2 ? "mlp.gate.bias" : "mlp.up.bias";
    qd_class_weight up_w = qd_class_weights(w, up_name, up_parts), up_b = qd_class_weights(w, up_bias, up_parts);
    qd_class_weight down_w = qd_class_weights(w, "mlp.down.weight", 1), down_b = qd_class_weights(w, "mlp.down.bias", 1);
    /* Of this rank: query heads and the kv heads they read, and the columns of the MLP. */
    int64_t q = out_w.in, kv = (qkv_w.out - q) / 2, ffn = down_w.in;
    int heads = (int)(q / m->head_dim), kv_heads = (int)(kv / m->head_dim), pending;
    int normed1 = qd_class_port(w, "attn_normed", m->hidden);
    int qkv = qd_class_local(w, "qkv", q + 2 * kv);
    bool experts = w->module->kind == QD_MODULE_MOE;
    qd_class_experts moe;
    qd_class_weight q_norm = qd_class_weights(w, "attn.q_norm.weight", 1), k_norm = qd_class_weights(w, "attn.k_norm.weight", 1);
    int qkv_before = m->qk_norm ? qd_class_local(w, "qkv_before_norm", q + 2 * kv) : qkv;
    int head_rstd = m->qk_norm ? qd_class_local_f32(w, "head_rstd", w->rows, (q + kv) / m->head_dim) : -1;
    int o = qd_class_local(w, "attended", q);
    int branch1 = qd_class_local(w, "attn_branch", m->hidden);
    int middle = qd_class_port(w, "residual", m->hidden);
    int normed2 = qd_class_port(w, "mlp_normed", m->hidden);
    int up = qd_class_local(w, "up", up_w.out);
    int active = qd_class_local(w, "active", ffn);
    int branch2 = qd_class_local(w, "mlp_branch", m->hidden);
    int out = qd_class_slot(w, "out", QD_SLOT_OUT, w->config->activation, w->port_rows, m->hidden);

    w->phase = QD_PHASE_FORWARD;
    qd_class_norm(w, x, -1, n1, -1, normed1);
    int all1 = qd_class_enter(w, "attn_normed of all ranks", normed1, &pending);
    qd_class_linear(w, all1, qkv_w, qkv_b, qkv_before);
    qd_class_await(w, pending);
    int positions = w->config->context > 0 || w->seq < w->config->seq ? input : -1;
    qd_class_attention_state attention = {-1, -1, -1};
    if (m->qk_norm)
        qd_op_heads(QD_CLASS_OP(w, HEAD_NORM, qkv_before, q_norm.value, k_norm.value, qkv, head_rstd), w->rows, q + 2 * kv, heads,
                    kv_heads);
    if (table >= 0)
        qd_op_heads(QD_CLASS_OP(w, ROPE, qkv, table, positions), w->rows, q + kv, heads, kv_heads);
    if (w->config->context > 0) {
        int cache = qd_class_slot(w, "cache", QD_SLOT_CACHE, w->config->activation, 2 * w->config->context, kv);
        qd_op *op = qd_op_heads(QD_CLASS_OP(w, ATTENTION_CACHED, qkv, cache, o), w->rows, q, heads, kv_heads);
        op->k = w->config->context;
    } else {
        attention = qd_class_attention(w, qkv, input, o, heads, kv_heads);
    }
    const qd_device_traits *traits = w->config->traits;
    bool drops = m->dropout > 0.0 && w->config->training;
    bool fuse_residual = traits->fused_residual && !drops && w->tensor.size == 1; /* else the sum over tp comes between */
    /* Computing the GELU again needs it as an op of its own. */
    bool fuse_gelu = traits->fused_gelu && m->activation == QD_ACT_GELU_TANH && w->config->recompute != QD_RECOMPUTE_SELECTIVE;
    if (fuse_residual) {
        qd_class_linear_add(w, o, out_w, out_b, x, middle);
        qd_class_norm(w, middle, -1, n2, -1, normed2);
    } else {
        qd_class_linear(w, o, out_w, qd_class_bias_once(w, out_b), branch1);
        branch1 = qd_class_leave(w, "attn_branch of the port", branch1, &pending);
        branch1 = qd_class_dropout(w, "attn_dropped", branch1, 1);
        if (drops)
            qd_class_await(w, pending);
        qd_class_norm(w, x, branch1, n2, middle, normed2);
        qd_class_await(w, pending);
    }
    int all2 = experts ? normed2 : qd_class_enter(w, "mlp_normed of all ranks", normed2, &pending);
    if (experts) {
        qd_write_experts(w, &moe, normed2, middle, out);
    } else if (fuse_gelu) {
        qd_class_linear_gelu(w, all2, up_w, up_b, up, active);
        qd_class_await(w, pending);
    } else {
        qd_class_linear(w, all2, up_w, up_b, up);
        qd_class_await(w, pending);
        qd_op_sizes(QD_CLASS_OP(w, ACTIVATION, up, active), w->rows, ffn, 0, 0.0);
    }
    if (fuse_residual && !experts) {
        qd_class_linear_add(w, active, down_w, down_b, middle, out);
    } else if (!experts) {
        qd_class_linear(w, active, down_w, qd_class_bias_once(w, down_b), branch2);
        branch2 = qd_class_leave(w, "mlp_branch of the port", branch2, &pending);
        branch2 = qd_class_dropout(w, "mlp_dropped", branch2, 2);
        if (drops)
            qd_class_await(w, pending);
        qd_op_sizes(QD_CLASS_OP(w, ADD, middle, branch2, out), w->port_rows, m->hidden, 0, 0.0);
        qd_class_await(w, pending);
    }
    if (!w->config->training)
        return;

    int dy = qd_class_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, w->port_rows, m->hidden);
    int dx = qd_class_slot(w, "grad_in", QD_SLOT_GRAD_IN, w->config->activation, w->port_rows, m->hidden);
    int d_active = qd_class_local(w, "d_active", ffn);
    int d_up = qd_class_local(w, "d_up", up_w.out);
    int d_normed2 = qd_class_local(w, "d_mlp_normed", m->hidden);
    int d_middle = qd_class_port(w, "d_residual", m->hidden);
    int d_o = qd_class_local(w, "d_attended", q);
    int d_qkv = qd_class_local(w, "d_qkv", q + 2 * kv);
    int d_normed1 = qd_class_local(w, "d_attn_normed", m->hidden);

    /* dy and d_middle are what reached the biases of `down` and `out`, and the second norm's gradient passes over both:
     * it sums them, unless something comes between the biases and the residual stream. */
    int down_sums = -1, out_sums = -1;
    if (traits->sums_in_norm && fuse_residual) {
        down_sums = experts ? -1 : down_b.grad;
        out_sums = out_b.grad;
        down_b = out_b = (qd_class_weight){-1, -1, 0, 0};
    }

    w->phase = QD_PHASE_INPUT;
    int d_branch2 = qd_class_dropout(w, "d_mlp_branch", dy, 2), gathered, d_port2;
    if (!experts)
        d_branch2 = qd_class_enter(w, "d_mlp_branch of all ranks", d_branch2, &gathered);
    if (experts) {
        d_normed2 = qd_write_experts_grad(w, &moe, d_branch2, normed2);
    } else if (fuse_gelu) {
        qd_class_linear_input_grad(w, d_branch2, down_w, up, d_up);
        qd_class_await(w, gathered);
        qd_class_linear_weight_grad(w, d_branch2, active, down_w, down_b);
    } else if (m->activation == QD_ACT_SWIGLU && qd_class_swiglu_again(w, traits->remade_activation)) {
        /* The pass over gate and up that gives their gradients gives their product again: it need not be kept. */
        int again = qd_class_local(w, "active_again", ffn);
        qd_class_linear_input_grad(w, d_branch2, down_w, -1, d_active);
        qd_class_await(w, gathered);
        qd_op_sizes(QD_CLASS_OP(w, ACTIVATION_GRAD_Y, up, d_active, d_up, again), w->rows, ffn, 0, 0.0);
        qd_class_linear_weight_grad(w, d_branch2, again, down_w, down_b);
    } else {
        qd_class_linear_input_grad(w, d_branch2, down_w, -1, d_active);
        qd_class_await(w, gathered);
        qd_class_linear_weight_grad(w, d_branch2, active, down_w, down_b);
        qd_op_sizes(QD_CLASS_OP(w, ACTIVATION_GRAD, up, d_active, d_up), w->rows, ffn, 0, 0.0);
    }
    d_port2 = d_normed2;
    pending = -1;
    if (!experts)
        d_port2 = qd_class_enter_grad(w, "d_mlp_normed of the port", d_up, normed2, up_w, up_b, d_normed2, &pending);
    qd_class_norm_grad(w, d_port2, middle, n2, dy, d_middle, down_sums, out_sums);
    qd_class_await(w, pending);
    int d_branch1 = qd_class_dropout(w, "d_attn_branch", d_middle, 1);
    d_branch1 = qd_class_enter(w, "d_attn_branch of all ranks", d_branch1, &gathered);
    qd_class_linear_input_grad(w, d_branch1, out_w, -1, d_o);
    qd_class_await(w, gathered);
    qd_class_linear_weight_grad(w, d_branch1, o, out_w, out_b);
    qd_class_attention_grad(w, attention, input, d_o, d_qkv, heads, kv_heads);
    if (table >= 0)
        qd_op_heads(QD_CLASS_OP(w, ROPE_INVERSE, d_qkv, table, positions), w->rows, q + kv, heads, kv_heads);
    if (m->qk_norm)
        qd_op_heads(QD_CLASS_OP(w, HEAD_NORM_GRAD, d_qkv, qkv_before, q_norm.value, k_norm.value, head_rstd, q_norm.grad, k_norm.grad),
                    w->rows, q + 2 * kv, heads, kv_heads);
    int d_port1 = qd_class_enter_grad(w, "d_attn_normed of the port", d_qkv, normed1, qkv_w, qkv_b, d_normed1, &pending);
    qd_class_norm_grad(w, d_port1, x, n1, d_middle, dx, -1, -1);
    qd_class_await(w, pending);
}
