/* The pre-norm decoder: GPT-2, Llama, Yi, Mistral, Qwen2, Qwen3 and OLMo; with experts Mixtral,
 * Qwen2-MoE, Qwen3-MoE and models like DeepSeek V3.
 *
 * They differ in fields, not in structure: kind of norm, learned or rotary positions, biases, norms
 * of queries and keys, plain or gated MLP. The layers of a model differ in what variants are made
 * of. */
#include "model/family.h"

/* A variant is one of attention, and whether the MLP consists of experts. */
enum { EXPERTS = QD_ATTENTION_VARIANTS, VARIANTS = 2 * QD_ATTENTION_VARIANTS };

static void defaults(qd_model *m)
{
    const bool gpt2 = m->arch == QD_ARCH_GPT2;
    m->norm = gpt2 ? QD_NORM_LAYER : m->arch == QD_ARCH_OLMO ? QD_NORM_PLAIN : QD_NORM_RMS;
    m->position = gpt2 ? QD_POSITION_LEARNED : QD_POSITION_ROPE;
    m->activation = gpt2 ? QD_ACT_GELU_TANH : QD_ACT_SWIGLU;
    m->qkv_bias = m->out_bias = m->mlp_bias = m->tied = gpt2;
}

static void embed(qd_layer *b)
{
    qd_output(b, qd_embedding(b));
}

static int variant(const qd_model *m, int layer)
{
    return qd_attention_variant(m, layer) | (qd_model_has_experts(m, layer) ? EXPERTS : 0);
}

static void block(qd_layer *b, int which)
{
    qd_val x = qd_input(b);
    qd_val attention = qd_attention_as(b, qd_norm(b, x, "attn_norm", "attn_normed"), which & (EXPERTS - 1));
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_val normed = qd_norm(b, x, "mlp_norm", "mlp_normed");
    qd_val mlp = which & EXPERTS ? qd_mlp_experts(b, normed) : qd_mlp(b, normed);
    qd_output(b, qd_residual(b, x, mlp, "mlp_dropped", "out"));
}

static void head(qd_layer *b)
{
    qd_head_loss(b, qd_norm(b, qd_input(b), "norm", "normed"));
}

const qd_family qd_family_prenorm = {"prenorm", defaults, embed, VARIANTS, variant, block, head};
