/* Writes config.json for transformers. A model that none of its classes implements is refused;
 * training settings that config.json cannot express become notes. */
#include "ckpt/huggingface_impl.h"

#include <quadrille/json_writer.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qd_status cannot(const char *what)
{
    return QD_FAIL(QD_UNSUPPORTED, "transformers has no such model: %s", what);
}

static qd_status check_gpt2(const qd_model *m)
{
    if (m->norm != QD_NORM_LAYER || m->position != QD_POSITION_LEARNED)
        return cannot("its GPT-2 has layer norms and learned positions");
    if (m->activation == QD_ACT_SWIGLU)
        return cannot("its GPT-2 has no gated MLP (model.activation)");
    if (!m->qkv_bias || !m->out_bias || !m->mlp_bias)
        return cannot("its GPT-2 has all biases (model.qkv_bias, out_bias, mlp_bias)");
    if (m->qk_norm || m->clip_qkv > 0.0)
        return cannot("its GPT-2 neither norms nor clips queries and keys (model.qk_norm, clip_qkv)");
    if (m->kv_heads != m->heads || (int64_t)m->heads * m->head_dim != m->hidden)
        return cannot("in its GPT-2 every head has its own keys and values, and head_dim is hidden / heads");
    return QD_OK;
}

static qd_status check_gpt_oss(const qd_model *m)
{
    const qd_moe *e = &m->moe;
    if (m->activation != QD_ACT_SWIGLU_CLAMPED || !m->mlp_bias || !e->logit_bias)
        return cannot("the experts of its GPT-OSS have a clamped SwiGLU and biases, as its router has (model.activation, mlp_bias, "
                      "router_logit_bias)");
    if (e->router != QD_ROUTER_SOFTMAX || !e->normalised || e->groups > 1 || e->shared > 0 || e->scale != 1.0 || e->first_dense > 0)
        return cannot("its GPT-OSS has experts in every block, and routers with normalized softmax weights over all experts "
                      "(model.first_dense, router, router_normalised, router_groups, router_scale)");
    return QD_OK;
}

static qd_status check_llama(const qd_hf_family *f, const qd_model *m)
{
    const bool olmo = m->arch == QD_ARCH_OLMO, gemma = qd_model_is_gemma(m);
    if (m->position != QD_POSITION_ROPE || m->norm != (olmo ? QD_NORM_PLAIN : gemma ? QD_NORM_RMS_ONE : QD_NORM_RMS))
        return cannot("its Llama has RMS norms and rotary positions, its OLMo LayerNorms without weights");
    if (m->embed_scaled != gemma || (m->logit_softcap > 0.0 && !gemma))
        return cannot("its Gemma 2 and 3 scale embeddings and may cap logits, others do not (model.embed_scaled, logit_softcap)");
    if (gemma && (m->qk_norm != f->defaults.qk_norm || m->mlp_bias || !qd_activation_is_gated(m->activation) ||
                  m->activation == QD_ACT_SWIGLU))
        return cannot("its Gemma 2 and 3 have an MLP gated by GELU without biases, and of these Gemma 3 norms queries and keys "
                      "(model.activation, mlp_bias, qk_norm)");
    if ((gemma || strcmp(f->kind, "llama") == 0) && m->hidden % m->heads != 0)
        return cannot("in its Llama, Gemma 2 and Gemma 3, model.hidden is a multiple of model.heads");
    if (m->clip_qkv > 0.0 && !f->clips)
        return cannot("only its OLMo and OLMoE clip queries, keys and values (model.clip_qkv)");
    if (olmo && (m->norm_eps != 1e-5 || m->qk_norm || m->mlp_bias || m->moe.experts > 0))
        return cannot("its OLMo has norms with an epsilon of 1e-5, and neither norms of queries and keys, biases of the MLP nor experts "
                      "(model.norm_eps, qk_norm, mlp_bias, experts)");
    const qd_moe *e = &m->moe;
    if (f->stacked)
        return check_gpt_oss(m);
    if (!gemma && m->activation != QD_ACT_SWIGLU)
        return cannot("the MLP of its Llama is gated by SiLU (model.activation)");
    if (e->experts > 0 && (m->mlp_bias || e->logit_bias))
        return cannot("the experts and routers of its Mixtral, Qwen3 and OLMoE have no biases (model.mlp_bias, router_logit_bias)");
    if (m->arch == QD_ARCH_OLMO2 && (!m->qk_norm || m->qk_over != QD_QK_WIDTH || m->mlp_bias || e->experts > 0))
        return cannot("its OLMo 2 norms all queries together and all keys, and has neither biases of the MLP nor experts "
                      "(model.qk_norm, qk_norm_over, mlp_bias, experts)");
    if (e->experts == 0)
        return QD_OK;
    const bool gated = f->defaults.moe.shared_gate;
    if (e->router != QD_ROUTER_SOFTMAX || e->bias || e->groups > 1 || (e->shared > 0 && !gated) || e->scale != 1.0)
        return cannot(
            "the routers of its Mixtral, Qwen and OLMoE are softmax over all experts, and shared experts have a gate (model.router, "
            "router_bias, router_groups, router_scale, shared_gate)");
    if (!f->dense_layers && e->first_dense > 0)
        return cannot("only its Qwen has dense blocks before those with experts (model.first_dense)");
    if (gated && m->out_bias)
        return cannot("its Qwen2-MoE has no bias of the attention output (model.out_bias)");
    if (!m->qk_norm && !gated && (!e->normalised || e->first_dense > 0 || m->qkv_bias || m->out_bias))
        return cannot("its Mixtral has normalized weights, experts in every block and no biases (model.router_normalised, first_dense, "
                      "qkv_bias, out_bias)");
    return QD_OK;
}

static qd_status check_deepseek(const qd_model *m)
{
    const qd_moe *e = &m->moe;
    if (m->activation != QD_ACT_SWIGLU || m->mlp_bias || m->embed_scaled || m->logit_softcap > 0.0 || m->score_scale > 0.0 ||
        m->score_softcap > 0.0)
        return cannot("its DeepSeek has SwiGLU without biases, scores scaled by sqrt(head_dim) and rope_mscale_all_dim, and no "
                      "soft-caps (model.activation, mlp_bias, embed_scaled, logit_softcap, score_scale, score_softcap)");
    if (m->latent_norm_eps != 1e-6)
        return cannot("the norms of compressed queries and keys of its DeepSeek have an epsilon of 1e-6 (model.latent_norm_eps)");
    if (e->experts == 0 || e->shared < 1 || e->shared_gate || e->logit_bias ||
        qd_moe_shared_width(e) != e->shared * e->ffn)
        return cannot("its DeepSeek V2 and V3 have experts, and shared ones of the same width without a gate (model.experts, "
                      "shared_experts, shared_ffn, shared_gate, router_logit_bias)");
    if (e->router == QD_ROUTER_SOFTMAX && (e->normalised || e->bias || qd_moe_group_best(e) != 1 || !m->rope_interleave ||
                                           m->hidden % m->heads != 0))
        return cannot("in its DeepSeek V2, weights of experts are not normalized, groups are ranked by their best expert, neighbours are "
                      "rotated together, and model.hidden is a multiple of model.heads (model.router_normalised, router_bias, "
                      "router_group_best, rope_interleave)");
    if (e->router == QD_ROUTER_SIGMOID && e->groups > 1 && (qd_moe_group_best(e) != 2 || e->experts / e->groups < 2))
        return cannot("its DeepSeek V3 ranks groups of experts by their two best (model.router_group_best, router_groups)");
    return QD_OK;
}

/* query_pre_attn_scalar of Gemma, an integer. */
static double their_scalar(const qd_model *m)
{
    return m->score_scale > 0.0 ? round(1.0 / (m->score_scale * m->score_scale)) : (double)m->head_dim;
}

static qd_status check_scores(const qd_hf_family *f, const qd_model *m)
{
    const bool gemma = qd_model_is_gemma(m);
    if (gemma && m->score_scale > 0.0 && fabs(m->score_scale * sqrt(their_scalar(m)) - 1.0) > 1e-6)
        return cannot("the scale of scores of its Gemma 2 and 3 is the inverse root of an integer (model.score_scale)");
    if (!gemma && (m->score_scale > 0.0 || m->score_softcap > 0.0))
        return cannot("its Llama and GPT-2 divide scores by sqrt(head_dim), without a soft-cap (model.score_scale, score_softcap)");
    if (m->arch == QD_ARCH_GEMMA3 && m->score_softcap > 0.0)
        return cannot("its Gemma 3 does not cap scores (model.score_softcap)");
    const bool by_type = f->defaults.rope.local_base > 0.0;
    const bool unlike = (m->rope.fraction != 1.0 && !f->partial) || (m->rope.nope_every > 0 && f->defaults.rope.nope_every == 0) ||
                        (qd_rope_is_local(m) && !by_type);
    if (m->position == QD_POSITION_ROPE && unlike)
        return cannot("its Llama, Mistral and Qwen rotate whole heads, alike in all layers (model.rope_fraction, nope_every, "
                      "rope_local_base)");
    if (f->partial && m->rope.scaling != QD_ROPE_NONE && m->rope.scaling != QD_ROPE_LONG)
        return cannot("rotary embeddings of its Phi-3 are not scaled, or by longrope (model.rope_scaling)");
    if (f->partial && m->rope.scaling == QD_ROPE_LONG && (int64_t)m->heads * m->head_dim != m->hidden)
        return cannot("with longrope, heads of its Phi-3 have hidden / heads elements (model.head_dim)");
    if (m->window > 0 && f->window == QD_HF_WINDOW_NONE)
        return QD_FAIL(QD_UNSUPPORTED, "transformers has no such model: its %s has no windows (model.window)%s", f->kind,
                       m->arch == QD_ARCH_LLAMA ? "; model.hf_type=mistral has them in all layers" : "");
    if (m->window > 0 && !qd_hf_lists_windows(f) && (m->window_from > 0 || m->full_every > 0))
        return QD_FAIL(QD_UNSUPPORTED, "transformers has no such model: its %s has windows in all layers or in none (model.window_from, "
                                       "full_every)", f->kind);
    return QD_OK;
}

static void put_windows(qd_json_writer *w, const qd_hf_family *f, const qd_model *m)
{
    bool switched = qd_hf_switches_windows(f);
    if (f->window == QD_HF_WINDOW_SIZE && m->window == 0)
        qd_json_put_null(w, "sliding_window");
    if (m->window == 0 && f->window != QD_HF_WINDOW_TYPES)
        return;
    if (switched)
        qd_json_put_bool(w, "use_sliding_window", true);
    qd_json_put_int(w, "sliding_window", m->window > 0 ? m->window : f->window_default);
    if (!qd_hf_lists_windows(f))
        return;
    if (switched)
        qd_json_put_int(w, "max_window_layers", f->window == QD_HF_WINDOW_SWITCH ? m->window_from : m->layers);
    qd_json_list_begin(w, "layer_types");
    for (int layer = 0; layer < m->layers; layer++)
        qd_json_put_string(w, NULL, qd_model_has_window(m, layer) ? "sliding_attention" : "full_attention");
    qd_json_end(w);
}

/* Fields that map one to one (the table of model fields). */
static void put_fields(qd_json_writer *w, const qd_hf_family *family, const qd_model *m)
{
    int count;
    const qd_model_field *fields = qd_model_fields(&count);
    for (const qd_model_field *f = fields; f < fields + count; f++) {
        const char *key = qd_hf_key_of(family, f).name;
        if (!key)
            continue;
        if (f->kind == QD_FIELD_REAL)
            qd_json_put_real(w, key, qd_field_real(f, m));
        else if (f->kind == QD_FIELD_FLAG)
            qd_json_put_bool(w, key, qd_field_whole(f, m) != 0);
        else
            qd_json_put_int(w, key, qd_field_whole(f, m));
    }
}

static void put_gpt2(qd_json_writer *w, const qd_model *m)
{
    qd_json_put_string(w, "activation_function", m->activation == QD_ACT_GELU ? "gelu" : "gelu_new");
    qd_json_put_real(w, "embd_pdrop", m->dropout);
    qd_json_put_real(w, "attn_pdrop", 0.0);
}

/* The inverse of read_balance() in hf_config.c, rounded to drop noise digits. */
static double their_balance(const qd_model *m)
{
    char text[32];
    int layers = qd_hf_expert_layers(m);
    snprintf(text, sizeof text, "%.15g", layers > 0 ? m->moe.aux_loss * layers / m->moe.per_token : 0.0);
    return strtod(text, NULL);
}

static void put_experts(qd_json_writer *w, const qd_hf_family *f, const qd_model *m)
{
    const qd_moe *e = &m->moe;
    qd_json_put_real(w, "router_aux_loss_coef", their_balance(m));
    qd_json_put_bool(w, "output_router_logits", e->aux_loss > 0.0);
    if (!f->dense_layers)
        return;
    qd_json_put_int(w, "decoder_sparse_step", 1);
    qd_json_list_begin(w, "mlp_only_layers");
    for (int layer = 0; layer < e->first_dense; layer++)
        qd_json_put_int(w, NULL, layer);
    qd_json_end(w);
}

static void put_deepseek(qd_json_writer *w, const qd_model *m)
{
    if (m->q_lora_rank > 0)
        qd_json_put_int(w, "q_lora_rank", m->q_lora_rank);
    else
        qd_json_put_null(w, "q_lora_rank");
    qd_json_put_bool(w, "attention_bias", false);
    const bool sigmoid = m->moe.router == QD_ROUTER_SIGMOID;
    qd_json_put_string(w, "scoring_func", sigmoid ? "sigmoid" : "softmax");
    qd_json_put_string(w, "topk_method", sigmoid ? "noaux_tc" : m->moe.groups > 1 ? "group_limited_greedy" : "greedy");
    if (sigmoid)
        qd_json_put_int(w, "num_nextn_predict_layers", m->mtp_modules);
    else
        qd_json_put_bool(w, "norm_topk_prob", false);
}

static void put_softcap(qd_json_writer *w, const char *key, double cap)
{
    if (cap > 0.0)
        qd_json_put_real(w, key, cap);
    else
        qd_json_put_null(w, key);
}

static void put_gemma(qd_json_writer *w, const qd_model *m)
{
    qd_json_put_string(w, "hidden_activation", m->activation == QD_ACT_GEGLU ? "gelu" : "gelu_pytorch_tanh");
    qd_json_put_int(w, "query_pre_attn_scalar", (int64_t)their_scalar(m));
    if (m->arch == QD_ARCH_GEMMA2)
        put_softcap(w, "attn_logit_softcapping", m->score_softcap);
    put_softcap(w, "final_logit_softcapping", m->logit_softcap);
}

static void put_numbers(qd_json_writer *w, const char *key, const qd_number_list *list)
{
    qd_json_list_begin(w, key);
    for (int64_t i = 0; i < list->count; i++)
        qd_json_put_real(w, NULL, list->at[i]);
    qd_json_end(w);
}

/* Kind and scaling, into an object that has been begun. */
static void put_scaling(qd_json_writer *w, const qd_rope *rope)
{
    static const char *const types[] = {[QD_ROPE_NONE] = "default", [QD_ROPE_LLAMA3] = "llama3", [QD_ROPE_LINEAR] = "linear",
                                        [QD_ROPE_YARN] = "yarn", [QD_ROPE_DYNAMIC] = "dynamic", [QD_ROPE_LONG] = "longrope"};
    qd_json_put_string(w, "rope_type", types[rope->scaling]);
    if (rope->scaling == QD_ROPE_NONE)
        return;
    qd_json_put_real(w, "factor", rope->factor);
    if (rope->scaling == QD_ROPE_LLAMA3) {
        qd_json_put_real(w, "low_freq_factor", rope->low_factor);
        qd_json_put_real(w, "high_freq_factor", rope->high_factor);
    } else if (rope->scaling == QD_ROPE_YARN) {
        qd_json_put_real(w, "beta_fast", rope->beta_fast);
        qd_json_put_real(w, "beta_slow", rope->beta_slow);
        qd_json_put_bool(w, "truncate", rope->truncate);
        if (rope->mscale > 0.0)
            qd_json_put_real(w, "mscale", rope->mscale);
        if (rope->mscale_all_dim > 0.0)
            qd_json_put_real(w, "mscale_all_dim", rope->mscale_all_dim);
    }
    if (rope->scaling == QD_ROPE_LONG) {
        put_numbers(w, "short_factor", &rope->short_factor);
        put_numbers(w, "long_factor", &rope->long_factor);
    }
    if ((rope->scaling == QD_ROPE_YARN || rope->scaling == QD_ROPE_LONG) && rope->attention_factor > 0.0)
        qd_json_put_real(w, "attention_factor", rope->attention_factor);
    if (rope->scaling == QD_ROPE_LLAMA3 || rope->scaling == QD_ROPE_YARN || rope->scaling == QD_ROPE_LONG)
        qd_json_put_int(w, "original_max_position_embeddings", rope->original_seq);
}

/* One object for all layers, or one for each type of layers. */
static void put_rope(qd_json_writer *w, const qd_hf_family *f, const qd_model *m)
{
    if (f->defaults.rope.local_base > 0.0) {
        qd_rope local = m->rope;
        if (qd_rope_is_local(m)) {
            local.base = m->rope.local_base;
            local.scaling = QD_ROPE_NONE;
        }
        qd_json_object_begin(w, "rope_parameters");
        for (int sliding = 0; sliding < 2; sliding++) {
            const qd_rope *rope = sliding ? &local : &m->rope;
            qd_json_object_begin(w, sliding ? "sliding_attention" : "full_attention");
            qd_json_put_real(w, "rope_theta", rope->base);
            put_scaling(w, rope);
            qd_json_end(w);
        }
        qd_json_end(w);
        return;
    }
    qd_json_put_real(w, "rope_theta", m->rope.base);
    if (f->partial)
        qd_json_put_real(w, "partial_rotary_factor", m->rope.fraction);
    if (m->rope.scaling == QD_ROPE_NONE && f->defaults.rope.scaling != QD_ROPE_NONE) { /* GPT-OSS would scale without the key */
        qd_json_object_begin(w, "rope_scaling");
        qd_json_put_string(w, "rope_type", "default");
        qd_json_end(w);
    }
    if (m->rope.scaling == QD_ROPE_NONE)
        return;
    if (f->partial) /* Phi-3 reads it here only, as 4096 if it is missing */
        qd_json_put_int(w, "original_max_position_embeddings", m->rope.original_seq);
    qd_json_object_begin(w, "rope_scaling");
    put_scaling(w, &m->rope);
    qd_json_end(w);
}

static void put_llama(qd_json_writer *w, const qd_hf_family *f, const qd_model *m)
{
    if (qd_model_is_gemma(m))
        put_gemma(w, m);
    else
        qd_json_put_string(w, "hidden_act", "silu");
    if (f->attention_bias)
        qd_json_put_bool(w, "attention_bias", m->qkv_bias || m->out_bias);
    if (f->mlp_bias)
        qd_json_put_bool(w, "mlp_bias", m->mlp_bias);
    if (f->clips && m->clip_qkv > 0.0)
        qd_json_put_real(w, "clip_qkv", m->clip_qkv);
    else if (f->clips)
        qd_json_put_null(w, "clip_qkv");
    put_windows(w, f, m);
    if (m->rope.nope_every > 0) {
        qd_json_put_int(w, "no_rope_layer_interval", m->rope.nope_every);
        qd_json_list_begin(w, "no_rope_layers"); /* 1: has positions */
        for (int layer = 0; layer < m->layers; layer++)
            qd_json_put_int(w, NULL, qd_model_has_rope(m, layer));
        qd_json_end(w);
    }
    put_rope(w, f, m);
}

static void put_token(qd_json_writer *w, const char *key, int32_t token)
{
    if (token >= 0)
        qd_json_put_int(w, key, token);
    else
        qd_json_put_null(w, key);
}

/* Notes biases that transformers' model has in addition to ours. */
static void note_biases(const qd_hf_family *f, const qd_model *m, qd_strbuf *notes)
{
    if (f->attention_bias && m->qkv_bias != m->out_bias)
        qd_strbuf_printf(notes, "biases of 0 are added to %s: attention_bias stands for those of q, k, v and the output\n",
                         m->qkv_bias ? "the attention output (model.out_bias)" : "q, k and v (model.qkv_bias)");
}

/* Notes settings with which further training in transformers would differ from training here. */
static void note_training(const qd_model *m, qd_strbuf *notes)
{
    const qd_moe *e = &m->moe;
    const struct {
        const char *key;
        bool lost;
    } keys[] = {{"model.dropout", m->arch != QD_ARCH_GPT2 && m->dropout > 0.0},
                {"model.z_loss", e->experts > 0 && e->z_loss > 0.0},
                {"model.expert_capacity", e->experts > 0 && e->capacity > 0.0},
                {"model.router_bias_rate", qd_model_is_latent(m) && e->bias_rate > 0.0},
                {"model.aux_loss", qd_model_is_latent(m) && e->aux_loss > 0.0}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (keys[i].lost)
            qd_strbuf_printf(notes, "config.json has no key for %s, which only affects further training\n", keys[i].key);
    if (e->experts == 0 || e->aux_loss == 0.0 || qd_model_is_latent(m))
        return;
    qd_strbuf_printf(notes, "router_aux_loss_coef is %.6g: model.aux_loss (%.6g) x %d layers with experts / %d experts per token; "
                            "transformers balances %s\n", their_balance(m), e->aux_loss, qd_hf_expert_layers(m), e->per_token,
                     e->balance == QD_BALANCE_SEQUENCE ? "batches, not sequences, and the sum of layers, not each"
                                                       : "the sum of layers, not each");
}

qd_status qd_hf_config_text(const qd_model *m, const qd_hf_export *o, qd_strbuf *notes, qd_strbuf *out)
{
    const qd_hf_family *f = qd_hf_family_of(m);
    bool gpt2 = m->arch == QD_ARCH_GPT2;
    if (!f && m->qk_norm && m->qk_over == QD_QK_WIDTH)
        return cannot("only its OLMo 2 and OLMoE norm all queries together and all keys (model.qk_norm_over)");
    if (!f && m->moe.experts > 0 && m->moe.shared_gate)
        return cannot("only its Qwen2-MoE has a gate on the shared expert, without norms of queries and keys (model.shared_gate, qk_norm)");
    if (!f && m->sinks)
        return cannot("only its GPT-OSS has attention sinks, and experts with them (model.sinks, experts)");
    QD_TRY(!f ? cannot(qd_arch_name(m->arch)) : gpt2 ? check_gpt2(m) : qd_model_is_latent(m) ? check_deepseek(m) : check_llama(f, m));
    if (!qd_model_is_latent(m))
        QD_TRY(check_scores(f, m));
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_object_begin(&w, NULL);
    qd_json_list_begin(&w, "architectures");
    qd_json_put_string(&w, NULL, f->class_);
    qd_json_end(&w);
    qd_json_put_string(&w, "model_type", f->kind);
    qd_model theirs = *m;
    if (theirs.max_seq == 0)
        theirs.max_seq = o->positions;
    if (m->rope.scaling == QD_ROPE_DYNAMIC)
        theirs.max_seq = m->rope.original_seq; /* from there on it scales */
    if (qd_hf_has_experts(f) && f->defaults.moe.ffn == 0)
        theirs.ffn = m->moe.ffn; /* Mixtral has one width for both */
    theirs.moe.shared_ffn = qd_moe_shared_width(&m->moe);
    put_fields(&w, f, &theirs);
    if (gpt2)
        put_gpt2(&w, m);
    else
        put_llama(&w, f, m);
    if (qd_model_is_latent(m))
        put_deepseek(&w, m);
    else if (qd_hf_has_experts(f))
        put_experts(&w, f, m);
    qd_json_put_string(&w, "torch_dtype", qd_hf_dtype_name(o->dtype));
    put_token(&w, "bos_token_id", o->begin_token);
    put_token(&w, "eos_token_id", o->end_token);
    qd_json_put_null(&w, "pad_token_id"); /* defaults of some classes are beyond small vocabularies */
    qd_json_end(&w);
    qd_strbuf_puts(out, "\n");
    note_biases(f, m, notes);
    note_training(m, notes);
    return QD_OK;
}
