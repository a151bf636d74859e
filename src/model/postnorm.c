/* The decoder that norms what a branch adds instead of what it reads: OLMo 2. The residual stream
 * itself enters attention and MLP; queries and keys are normed over all heads. */
#include "model/family.h"

static void defaults(qd_model *m)
{
    m->norm = QD_NORM_RMS;
    m->position = QD_POSITION_ROPE;
    m->activation = QD_ACT_SWIGLU;
    m->qk_norm = true;
    m->qk_over = QD_QK_WIDTH;
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
    qd_val x = qd_input(b);
    qd_val attention = qd_norm(b, qd_attention_as(b, x, which), "attn_norm", "attn_normed");
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_val mlp = qd_norm(b, qd_mlp(b, x), "mlp_norm", "mlp_normed");
    qd_output(b, qd_residual(b, x, mlp, "mlp_dropped", "out"));
}

static void head(qd_layer *b)
{
    qd_head_loss(b, qd_norm(b, qd_input(b), "norm", "normed"));
}

const qd_family qd_family_postnorm = {.name = "postnorm",
                                      .defaults = defaults,
                                      .embed = embed,
                                      .variants = QD_ATTENTION_VARIANTS,
                                      .variant = variant,
                                      .layer = block,
                                      .head = head};
