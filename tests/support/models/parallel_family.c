/* The parallel block of GPT-J, PaLM and Falcon: attention and MLP read the same normed input, and
 * both results are added to the residual stream. The worked example of docs/adding-a-model.md. */
#include "support/models/parallel_family.h"

/* The defaults of GPT-J. */
static void defaults(qd_model *m)
{
    m->norm = QD_NORM_LAYER;
    m->position = QD_POSITION_ROPE;
    m->activation = QD_ACT_GELU_TANH;
    m->out_bias = m->mlp_bias = true;
}

static void embed(qd_layer *b)
{
    qd_output(b, qd_embedding(b));
}

static int variant(const qd_model *m, int layer)
{
    (void)m;
    (void)layer;
    return 0; /* all layers are alike */
}

static void block(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_val normed = qd_norm(b, x, "norm", "normed");
    qd_val attention = qd_attention_gqa(b, normed);
    qd_val mlp = qd_mlp(b, normed);
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_output(b, qd_residual(b, x, mlp, "mlp_dropped", "out"));
}

static void head(qd_layer *b)
{
    qd_head_loss(b, qd_norm(b, qd_input(b), "norm", "normed"));
}

const qd_family parallel_family = {.name = "parallel",
                                   .defaults = defaults,
                                   .embed = embed,
                                   .variants = 1,
                                   .variant = variant,
                                   .layer = block,
                                   .head = head};
