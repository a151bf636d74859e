/* The decoder with a norm before and one behind each branch: Gemma 2 and 3. Norms scale by 1 +
 * weight, the MLP is gated by GELU, embeddings are multiplied by sqrt(hidden), and logits and
 * attention scores may be soft-capped. Gemma 3 norms queries and keys instead of capping scores. */
#include "model/family.h"

static void defaults(qd_model *m)
{
    m->norm = QD_NORM_RMS_ONE;
    m->position = QD_POSITION_ROPE;
    m->activation = QD_ACT_GEGLU_TANH;
    m->tied = m->embed_scaled = true;
    m->qk_norm = m->arch == QD_ARCH_GEMMA3;
}

static void embed(qd_layer *b)
{
    qd_output(b, qd_embedding(b));
}

static int variant(const qd_model *m, int layer)
{
    return qd_attention_variant(m, layer);
}

static void block(qd_layer *b, int which)
{
    qd_val x = qd_input(b), normed = qd_norm(b, x, "attn_norm", "attn_normed");
    qd_val attention = qd_attention_as(b, normed, which);
    x = qd_residual(b, x, qd_norm(b, attention, "attn_post_norm", "attn_post_normed"), "attn_dropped", "residual");
    qd_val mlp = qd_mlp(b, qd_norm(b, x, "mlp_norm", "mlp_normed"));
    qd_output(b, qd_residual(b, x, qd_norm(b, mlp, "mlp_post_norm", "mlp_post_normed"), "mlp_dropped", "out"));
}

static void head(qd_layer *b)
{
    qd_head_loss(b, qd_norm(b, qd_input(b), "norm", "normed"));
}

const qd_family qd_family_sandwich = {.name = "sandwich",
                                      .defaults = defaults,
                                      .embed = embed,
                                      .variants = QD_ATTENTION_VARIANTS,
                                      .variant = variant,
                                      .layer = block,
                                      .head = head};
