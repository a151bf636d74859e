/* What the runners of ops share: an op with the addresses of its operands, and access to them. */
#ifndef QD_NN_NN_IMPL_H
#define QD_NN_NN_IMPL_H

#include "nn/nn.h"

/* One op with its addresses resolved: at[i] is the address of operand i (QD_LINEAR_X, …), NULL if
 * absent. In the functions below, i is the place of an operand. */
typedef struct qd_op_call {
    const qd_frame *frame;
    const qd_op *op;
    int index; /* of the op in its list */
    bool accumulate; /* gradients with role g are accumulated; otherwise the op overwrites them */
    const qd_slot *slots;
    void *at[QD_OP_SLOTS];
} qd_op_call;

static inline const qd_model *call_model(const qd_op_call *c)
{
    return &c->frame->program->ledger->model;
}

static inline qd_dtype call_dtype(const qd_op_call *c, int i)
{
    return c->slots[c->op->slot[i]].dtype;
}

/* The model's activation function, over rows of `cols` results. */
static inline qd_activation_args call_activation(const qd_op_call *c, int64_t rows, int64_t cols, qd_dtype dtype)
{
    const qd_model *m = call_model(c);
    return (qd_activation_args){.kind = m->activation, .rows = rows, .cols = cols, .alpha = (float)m->swiglu_alpha,
                                .limit = (float)m->swiglu_limit, .dtype = dtype};
}

/* Row stride of operand i, in elements. */
static inline int64_t call_stride(const qd_op_call *c, int i)
{
    return c->slots[c->op->slot[i]].cols;
}

/* Address of a row of operand i. */
static inline char *call_row(const qd_op_call *c, int i, int64_t row)
{
    const qd_slot *slot = &c->slots[c->op->slot[i]];
    return (char *)c->at[i] + row * slot->cols * (int64_t)qd_dtype_size(slot->dtype);
}

static inline int64_t call_rows(const qd_op_call *c)
{
    return qd_program_rows(c->frame->program);
}

/* Where attention notes the largest scores of its heads; NULL: nowhere. Each prediction module has
 * those of all heads of the model. */
static inline float *call_maxima(const qd_op_call *c)
{
    float *maxima = c->frame->maxima;
    return maxima && c->op->ahead > 0 ? maxima + (int64_t)(c->op->ahead - 1) * c->frame->program->ledger->model.heads : maxima;
}

/* Parts of the INPUT operand, in the layout of qd_context_select. First those of module op->ahead,
 * which predicts further tokens: 0: its tokens, 1: its targets. */
static inline const int32_t *input_ahead(const qd_op_call *c, int i, int part)
{
    return (const int32_t *)c->at[i] + qd_program_input_ahead(c->frame->program) + (2 * (c->op->ahead - 1) + part) * call_rows(c);
}
static inline const int32_t *input_tokens(const qd_op_call *c, int i)
{
    return c->op->ahead > 0 ? input_ahead(c, i, 0) : c->at[i];
}
static inline const int32_t *input_targets(const qd_op_call *c, int i)
{
    return c->op->ahead > 0 ? input_ahead(c, i, 1) : (const int32_t *)c->at[i] + call_rows(c);
}
/* Where the loss of an op is summed: a sum, and a number of tokens. */
static inline double *loss_sums(const qd_op_call *c, int i)
{
    return (double *)c->at[i] + (c->op->ahead > 0 ? QD_LOSS_AHEAD : QD_LOSS_SUM);
}
/* The second row holds positions in generation, the fourth under cp; otherwise they count from 0 in
 * each sequence. */
static inline const int32_t *input_positions(const qd_op_call *c, int i)
{
    if (c->frame->program->strategy.context > 0)
        return input_targets(c, i);
    return c->frame->program->ledger->mesh.degree[QD_AXIS_CP] > 1 ? (const int32_t *)c->at[i] + 3 * call_rows(c) : NULL;
}
static inline const int32_t *input_documents(const qd_op_call *c, int i)
{
    return c->frame->documents ? (const int32_t *)c->at[i] + 2 * call_rows(c) : NULL;
}

/* Document starts of whole sequences, if the rank holds only part of their rows. */
static inline const int32_t *input_whole_documents(const qd_op_call *c, int i)
{
    if (c->frame->program->ledger->mesh.degree[QD_AXIS_CP] == 1)
        return input_documents(c, i);
    return c->frame->documents ? (const int32_t *)c->at[i] + 4 * call_rows(c) : NULL;
}

/* What the rows of pairs have in addition (base/preference.h), (QD_PAIR_PARTS, rows). */
static inline const int32_t *input_pairs(const qd_op_call *c, int i)
{
    return (const int32_t *)c->at[i] + qd_program_pairs(c->frame->program);
}

/* The counts of all ranks in operand i, which an ALL_GATHER wrote, in host memory. */
qd_status qd_host_counts(const qd_op_call *c, int i, const int32_t **counts);

/* Extra dispatch rounds: adds the biases in operand `bias` to rows of experts, or with `grad` the
 * sums of these rows to it. `rows` describes the rows: x, width, dtype, counts of this rank's
 * experts, count_stride, begin, sources. Without the operand there is nothing to do. */
qd_status qd_round_bias(const qd_op_call *c, qd_grouped_bias_args rows, int bias, bool grad);

/* The GEMMs of an op: fills the arguments of GEMM `number`; false: the op has fewer. */
bool qd_linear_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args);
bool qd_adapt_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args);
bool qd_head_loss_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args);
bool qd_head_logits_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args);

qd_status qd_run_embed(const qd_op_call *c);
qd_status qd_run_embed_grad(const qd_op_call *c);
qd_status qd_run_norm(const qd_op_call *c);
qd_status qd_run_norm_grad(const qd_op_call *c);
qd_status qd_run_linear(const qd_op_call *c); /* also its fused forms and gradients */
qd_status qd_run_bias_grad(const qd_op_call *c);
qd_status qd_run_amax(const qd_op_call *c);
qd_status qd_run_cast(const qd_op_call *c);
qd_status qd_run_activation_amax(const qd_op_call *c);
qd_status qd_run_activation_cast(const qd_op_call *c);
qd_status qd_run_activation_grad_amax(const qd_op_call *c);
qd_status qd_run_activation_grad_cast(const qd_op_call *c);
qd_status qd_run_adapt(const qd_op_call *c); /* also its gradients */
qd_status qd_run_rope(const qd_op_call *c);
qd_status qd_run_rope_inverse(const qd_op_call *c);
qd_status qd_run_latent_qkv(const qd_op_call *c);
qd_status qd_run_latent_qkv_grad(const qd_op_call *c);
qd_status qd_run_attention(const qd_op_call *c);
qd_status qd_run_attention_cached(const qd_op_call *c);
qd_status qd_run_attention_latent(const qd_op_call *c);
qd_status qd_run_attention_grad(const qd_op_call *c);
qd_status qd_run_attention_sink(const qd_op_call *c);
qd_status qd_run_attention_sink_grad(const qd_op_call *c);
qd_status qd_run_activation(const qd_op_call *c);
qd_status qd_run_activation_grad(const qd_op_call *c);
qd_status qd_run_activation_grad_y(const qd_op_call *c);
qd_status qd_run_clip(const qd_op_call *c);
qd_status qd_run_clip_grad(const qd_op_call *c);
qd_status qd_run_add(const qd_op_call *c);
qd_status qd_run_scale(const qd_op_call *c);
qd_status qd_run_dropout(const qd_op_call *c);
qd_status qd_run_head_loss(const qd_op_call *c);
qd_status qd_run_head_logits(const qd_op_call *c);
qd_status qd_run_head_norm(const qd_op_call *c);
qd_status qd_run_head_norm_grad(const qd_op_call *c);
qd_status qd_run_qk_squares(const qd_op_call *c);
qd_status qd_run_qk_norm(const qd_op_call *c);
qd_status qd_run_qk_dots(const qd_op_call *c);
qd_status qd_run_qk_norm_grad(const qd_op_call *c);
qd_status qd_run_route(const qd_op_call *c);
qd_status qd_run_route_plan(const qd_op_call *c);
qd_status qd_run_route_grad(const qd_op_call *c);
qd_status qd_run_route_load(const qd_op_call *c);
qd_status qd_run_permute(const qd_op_call *c);
qd_status qd_run_combine(const qd_op_call *c);
qd_status qd_run_gate(const qd_op_call *c);
qd_status qd_run_gate_grad(const qd_op_call *c);
qd_status qd_run_combine_grad(const qd_op_call *c);
qd_status qd_run_experts(const qd_op_call *c);
qd_status qd_run_experts_dx(const qd_op_call *c);
qd_status qd_run_experts_dw(const qd_op_call *c);
qd_status qd_run_experts_swiglu(const qd_op_call *c);
qd_status qd_run_experts_dx_swiglu(const qd_op_call *c);
qd_status qd_run_expert_activation(const qd_op_call *c);
qd_status qd_run_experts_bias(const qd_op_call *c);
qd_status qd_run_experts_bias_grad(const qd_op_call *c);
qd_status qd_run_expert_rounds(const qd_op_call *c);
qd_status qd_run_expert_rounds_grad(const qd_op_call *c);
qd_status qd_run_node_plan(const qd_op_call *c);
qd_status qd_run_node_weights(const qd_op_call *c);
qd_status qd_run_node_resend(const qd_op_call *c);
qd_status qd_run_relay_plan(const qd_op_call *c);
qd_status qd_run_relay_rounds(const qd_op_call *c);
qd_status qd_run_relay_rounds_grad(const qd_op_call *c);
qd_status qd_run_expert_activation_grad(const qd_op_call *c);
qd_status qd_run_zero(const qd_op_call *c);
qd_status qd_run_columns(const qd_op_call *c);
qd_status qd_run_attention_part(const qd_op_call *c);
qd_status qd_run_attention_delta(const qd_op_call *c);
qd_status qd_run_attention_part_grad(const qd_op_call *c);
qd_status qd_run_heads_split(const qd_op_call *c);
qd_status qd_run_heads_join(const qd_op_call *c);
qd_status qd_run_rows_split(const qd_op_call *c);
qd_status qd_run_rows_join(const qd_op_call *c);
qd_status qd_run_loss_max(const qd_op_call *c);
qd_status qd_run_loss_part(const qd_op_call *c);
qd_status qd_run_loss_grad(const qd_op_call *c);
qd_status qd_run_loss_sum(const qd_op_call *c);
qd_status qd_run_loss_rows(const qd_op_call *c);
qd_status qd_run_pair_sums(const qd_op_call *c);
qd_status qd_run_pair_loss(const qd_op_call *c);

#endif
