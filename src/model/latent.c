/* Multi-head latent attention and multi-token prediction: DeepSeek V2 and V3, Kimi K2.
 *
 * Keys and values are expanded from one compressed vector per token, and queries may be as well.
 * The compressed projections are replicated on tp and process the rows of a norm; what expands them
 * is sharded by heads. Under sp the ranks therefore gather compressed rows, which are narrower than
 * the residual stream. The rotary part of the key is one vector that all heads share, so each rank
 * has a partial sum of its gradient, over its heads. Norms, MLPs and experts are those of
 * prenorm.c. */
#include "model/family.h"

enum { EXPERTS = 1, VARIANTS = 2 };

static void defaults(qd_model *m)
{
    m->norm = QD_NORM_RMS;
    m->position = QD_POSITION_ROPE;
    m->activation = QD_ACT_SWIGLU;
    m->qkv_bias = m->out_bias = m->mlp_bias = m->tied = false;
}

/* The norm of a compressed vector. */
static qd_val latent_norm(qd_layer *b, qd_val x, const char *name, const char *out)
{
    x = qd_norm(b, x, name, out);
    if (!b->no_memory)
        b->ops[b->op_count - 1].factor = b->model->latent_norm_eps;
    return x;
}

qd_val qd_attention_latent(qd_layer *b, qd_val x)
{
    const qd_model *m = b->model;
    int64_t heads = m->heads, q = heads * m->head_dim, v = heads * m->v_head_dim;
    qd_val queries = x;
    if (m->q_lora_rank > 0) {
        queries = qd_linear(b, x, &(qd_linear_part){"attn.q_a", m->q_lora_rank, QD_SPLIT_NORM}, 1, false, m->init_std, "q_latent");
        queries = latent_norm(b, queries, "attn.q_a_norm", "q_latent_normed");
    }
    queries = qd_linear(b, queries, &(qd_linear_part){m->q_lora_rank > 0 ? "attn.q_b" : "attn.q", q, QD_SPLIT_ROWS}, 1, false, m->init_std,
                        "q");
    qd_val latent = qd_linear(b, x, &(qd_linear_part){"attn.kv_a", m->kv_lora_rank, QD_SPLIT_NORM}, 1, false, m->init_std, "kv_latent");
    qd_val k_rope = qd_linear(b, x, &(qd_linear_part){"attn.k_rope", m->qk_rope_head_dim, QD_SPLIT_NORM}, 1, false, m->init_std, "k_rope");
    latent = latent_norm(b, latent, "attn.kv_a_norm", "kv_latent_normed");
    qd_val kv = qd_linear(b, latent, &(qd_linear_part){"attn.kv_b", heads * m->qk_nope_head_dim + v, QD_SPLIT_ROWS}, 1, false, m->init_std,
                          "kv");
    x = qd_declare_op(b, (qd_decl_op){QD_DECL_LATENT_QKV, .x = queries, .y = kv, .z = k_rope}, "qkv", 2 * q + v);
    x = qd_declare_op(b, (qd_decl_op){QD_DECL_ATTENTION, .x = x, .y = -1}, "attended", v);
    return qd_linear(b, x, &(qd_linear_part){"attn.out", m->hidden, QD_SPLIT_COLS}, 1, m->out_bias, qd_residual_std(m), "attn_branch");
}

static void embed(qd_layer *b)
{
    qd_output(b, qd_embedding(b));
}

static int variant(const qd_model *m, int layer)
{
    return qd_model_has_experts(m, layer) ? EXPERTS : 0;
}

static qd_val layer(qd_layer *b, qd_val x, bool experts)
{
    qd_val attention = qd_attention_latent(b, qd_norm(b, x, "attn_norm", "attn_normed"));
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_val normed = qd_norm(b, x, "mlp_norm", "mlp_normed");
    qd_val mlp = experts ? qd_mlp_experts(b, normed) : qd_mlp(b, normed);
    return qd_residual(b, x, mlp, "mlp_dropped", "out");
}

static void block(qd_layer *b, int which)
{
    qd_output(b, layer(b, qd_input(b), which & EXPERTS));
}

/* Prediction modules are part of the head, whose stage has the head's matrix and a copy of the
 * token table. Their layers are those of the last block. */
static void head(qd_layer *b)
{
    const qd_model *m = b->model;
    qd_val x = qd_norm(b, qd_input(b), "norm", "normed");
    qd_weight matrix = qd_head_loss(b, x);
    for (int k = 1; k <= m->mtp_modules; k++)
        x = qd_ahead_end(b, layer(b, qd_ahead_begin(b, x, matrix, k), qd_model_has_experts(m, m->layers - 1)), matrix);
}

const qd_family qd_family_latent = {"latent", defaults, embed, VARIANTS, variant, block, head};
