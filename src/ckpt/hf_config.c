/* config.json of GPT-2, Llama, Mixtral and Qwen3 models, both ways. */
#include "ckpt/huggingface_impl.h"

#include <quadrille/json_writer.h>

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* Collects the first failure, so that the members below read as a list. */
typedef struct reader {
    const qd_json *document;
    const qd_json_node *root;
    qd_status status;
} reader;

static const qd_json_node *member(const reader *r, const char *key)
{
    const qd_json_node *node = qd_json_member(r->root, key);
    return node && qd_json_kind_of(node) != QD_JSON_NULL ? node : NULL;
}

static int64_t size_of(reader *r, const char *key, int64_t otherwise, int64_t most)
{
    int64_t value = otherwise;
    if (r->status == QD_OK && (member(r, key) || otherwise < 0))
        r->status = qd_json_get_int(r->document, r->root, key, &value);
    if (r->status == QD_OK && (value < 0 || value > most))
        r->status = QD_FAIL(QD_USAGE, "%s: '%s' is %lld: it must be at most %lld and not negative", qd_json_name(r->document), key,
                            (long long)value, (long long)most);
    return value;
}

static double number(reader *r, const char *key, double otherwise)
{
    double value = otherwise;
    if (r->status == QD_OK && member(r, key))
        r->status = qd_json_get_double(r->document, r->root, key, &value);
    return value;
}

static bool flag(reader *r, const char *key, bool otherwise)
{
    bool value = otherwise;
    if (r->status == QD_OK && member(r, key))
        r->status = qd_json_get_bool(r->document, r->root, key, &value);
    return value;
}

static const char *text(reader *r, const char *key, const char *otherwise)
{
    const char *value = otherwise;
    if (r->status == QD_OK && member(r, key))
        r->status = qd_json_get_string(r->document, r->root, key, &value);
    return value;
}

/* A switch that must be as our models are. */
static void must_be(reader *r, const char *key, bool ours)
{
    if (flag(r, key, ours) != ours && r->status == QD_OK)
        r->status = QD_FAIL(QD_UNSUPPORTED, "%s: '%s' is %s: such models cannot be taken over", qd_json_name(r->document), key,
                            ours ? "false" : "true");
}

static void read_gpt2(reader *r, qd_strbuf *notes, qd_hf_config *c)
{
    qd_model *m = &c->model;
    m->layers = (int)size_of(r, "n_layer", 12, INT_MAX);
    m->hidden = size_of(r, "n_embd", 768, INT_MAX);
    m->heads = (int)size_of(r, "n_head", 12, INT_MAX);
    m->kv_heads = m->heads;
    m->ffn = size_of(r, "n_inner", 4 * m->hidden, INT_MAX);
    m->max_seq = c->positions = size_of(r, "n_positions", 1024, INT_MAX);
    m->norm_eps = number(r, "layer_norm_epsilon", 1e-5);
    m->tied = flag(r, "tie_word_embeddings", true);
    if (r->status == QD_OK && (m->heads < 1 || m->hidden % m->heads != 0))
        r->status = QD_FAIL(QD_USAGE, "%s: 'n_embd' (%lld) is not a multiple of 'n_head' (%d)", qd_json_name(r->document),
                            (long long)m->hidden, m->heads);
    m->head_dim = r->status == QD_OK ? (int)(m->hidden / m->heads) : 0;
    must_be(r, "scale_attn_weights", true);
    must_be(r, "scale_attn_by_inverse_layer_idx", false);
    must_be(r, "add_cross_attention", false);
    const char *activation = text(r, "activation_function", "gelu_new");
    if (strcmp(activation, "gelu") == 0)
        m->activation = QD_ACT_GELU;
    else if (strcmp(activation, "gelu_new") != 0 && strcmp(activation, "gelu_pytorch_tanh") != 0 && r->status == QD_OK)
        r->status = QD_FAIL(QD_UNSUPPORTED, "%s: 'activation_function' is '%s': only gelu_new, gelu_pytorch_tanh and gelu can be "
                                            "taken over", qd_json_name(r->document), activation);
    double residual = number(r, "resid_pdrop", 0.1), embedding = number(r, "embd_pdrop", 0.1), attention = number(r, "attn_pdrop", 0.1);
    m->dropout = residual;
    if (r->status == QD_OK && embedding != residual)
        qd_strbuf_printf(notes, "model.dropout is resid_pdrop (%g); embd_pdrop was %g\n", residual, embedding);
    if (r->status == QD_OK && attention != 0.0)
        qd_strbuf_printf(notes, "attn_pdrop was %g: attention has no dropout here, which matters to further training alone\n", attention);
}

/* Newer folders keep the base and the scaling in rope_parameters, older ones in rope_theta and rope_scaling. */
static void read_rope(reader *r, qd_rope *rope)
{
    const qd_json_node *parameters = member(r, "rope_parameters"), *scaling = parameters ? parameters : member(r, "rope_scaling");
    rope->base = number(r, "rope_theta", 10000.0);
    if (!scaling || r->status != QD_OK)
        return;
    reader s = {r->document, scaling, QD_OK};
    if (parameters)
        rope->base = number(&s, "rope_theta", rope->base);
    const char *kind = text(&s, "rope_type", text(&s, "type", "default"));
    double part = number(&s, "partial_rotary_factor", 1.0);
    rope->scaled = strcmp(kind, "llama3") == 0;
    if (s.status == QD_OK && ((!rope->scaled && strcmp(kind, "default") != 0) || part != 1.0))
        s.status = QD_FAIL(QD_UNSUPPORTED, "%s: rotary embeddings of the kind '%s'%s cannot be taken over: only 'default' and 'llama3'",
                           qd_json_name(r->document), kind, part != 1.0 ? " on a part of each head" : "");
    if (rope->scaled) {
        rope->factor = number(&s, "factor", rope->factor);
        rope->low_factor = number(&s, "low_freq_factor", rope->low_factor);
        rope->high_factor = number(&s, "high_freq_factor", rope->high_factor);
        rope->original_seq = size_of(&s, "original_max_position_embeddings", rope->original_seq, INT_MAX);
    }
    r->status = s.status;
}

static void read_llama(reader *r, qd_hf_config *c)
{
    qd_model *m = &c->model;
    m->layers = (int)size_of(r, "num_hidden_layers", 32, INT_MAX);
    m->hidden = size_of(r, "hidden_size", 4096, INT_MAX);
    m->heads = (int)size_of(r, "num_attention_heads", 32, INT_MAX);
    m->kv_heads = (int)size_of(r, "num_key_value_heads", m->heads, INT_MAX);
    m->ffn = size_of(r, "intermediate_size", 11008, INT_MAX);
    c->positions = size_of(r, "max_position_embeddings", 2048, INT_MAX);
    m->max_seq = c->positions;
    m->norm_eps = number(r, "rms_norm_eps", 1e-6);
    m->tied = flag(r, "tie_word_embeddings", false);
    if (r->status == QD_OK && m->heads < 1)
        r->status = QD_FAIL(QD_USAGE, "%s: 'num_attention_heads' must be at least 1", qd_json_name(r->document));
    m->head_dim = (int)size_of(r, "head_dim", m->heads > 0 ? m->hidden / m->heads : 0, INT_MAX);
    c->attention_bias = flag(r, "attention_bias", false);
    c->mlp_bias = flag(r, "mlp_bias", false);
    const char *activation = text(r, "hidden_act", "silu");
    if (r->status == QD_OK && strcmp(activation, "silu") != 0)
        r->status = QD_FAIL(QD_UNSUPPORTED, "%s: 'hidden_act' is '%s': only silu can be taken over", qd_json_name(r->document), activation);
    read_rope(r, &m->rope);
}

/* Blocks without experts can only be the first ones here. */
static void read_dense_blocks(reader *r, qd_moe *e)
{
    const qd_json_node *list = member(r, "mlp_only_layers");
    if (size_of(r, "decoder_sparse_step", 1, INT_MAX) != 1 && r->status == QD_OK)
        r->status =
            QD_FAIL(QD_UNSUPPORTED, "%s: 'decoder_sparse_step' is not 1: such models cannot be taken over", qd_json_name(r->document));
    for (size_t i = 0; r->status == QD_OK && list && i < qd_json_count(list); i++) {
        int64_t layer = -1;
        if (!qd_json_as_int(qd_json_item(list, i), &layer) || layer != (int64_t)i)
            r->status = QD_FAIL(QD_UNSUPPORTED, "%s: 'mlp_only_layers' does not list the first layers: such models cannot be taken over",
                                qd_json_name(r->document));
        e->first_dense++;
    }
}

static void read_experts(reader *r, bool qwen3, qd_model *m)
{
    qd_moe *e = &m->moe;
    e->experts = (int)size_of(r, member(r, "num_experts") ? "num_experts" : "num_local_experts", qwen3 ? 128 : 8, 65536);
    e->per_token = (int)size_of(r, "num_experts_per_tok", qwen3 ? 8 : 2, 65536);
    e->ffn = qwen3 ? size_of(r, "moe_intermediate_size", 768, INT_MAX) : m->ffn;
    e->normalised = qwen3 ? flag(r, "norm_topk_prob", false) : true;
    e->aux_loss = number(r, "router_aux_loss_coef", 0.001);
    e->balance = QD_BALANCE_BATCH;
    if (qwen3)
        read_dense_blocks(r, e);
    if (number(r, "router_jitter_noise", 0.0) != 0.0 && r->status == QD_OK)
        r->status =
            QD_FAIL(QD_UNSUPPORTED, "%s: 'router_jitter_noise' is not 0: such models cannot be taken over", qd_json_name(r->document));
    if (e->experts < 1 && r->status == QD_OK)
        r->status = QD_FAIL(QD_USAGE, "%s: there must be at least one expert", qd_json_name(r->document));
}

/* The kinds of models that are Llama's blocks with something more. */
static void read_kin(reader *r, const char *kind, qd_hf_config *c)
{
    bool mixtral = strcmp(kind, "mixtral") == 0, moe = mixtral || strcmp(kind, "qwen3_moe") == 0;
    if (strcmp(kind, "llama") == 0)
        return;
    c->model.qk_norm = !mixtral;
    if (mixtral && member(r, "sliding_window") && r->status == QD_OK)
        r->status = QD_FAIL(QD_UNSUPPORTED, "%s: 'sliding_window' is set: such models cannot be taken over", qd_json_name(r->document));
    must_be(r, "use_sliding_window", false);
    if (moe)
        read_experts(r, !mixtral, &c->model);
}

static qd_status read_model(const qd_json *document, qd_strbuf *notes, qd_hf_config *c)
{
    reader r = {document, qd_json_root(document), QD_OK};
    const char *kind;
    QD_TRY(qd_json_get_string(document, r.root, "model_type", &kind));
    static const char *const kinds[] = {"gpt2", "llama", "mixtral", "qwen3", "qwen3_moe"};
    bool gpt2 = strcmp(kind, "gpt2") == 0, known = false;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        known = known || strcmp(kind, kinds[i]) == 0;
    if (!known)
        return QD_FAIL(QD_UNSUPPORTED, "%s: 'model_type' is '%s': only gpt2, llama, mixtral, qwen3 and qwen3_moe can be taken over",
                       qd_json_name(document), kind);
    c->model = qd_model_default(gpt2 ? QD_ARCH_GPT2 : QD_ARCH_LLAMA);
    snprintf(c->model.name, sizeof c->model.name, "%s", kind);
    c->model.vocab = size_of(&r, "vocab_size", gpt2 ? 50257 : 32000, INT_MAX);
    c->model.init_std = number(&r, "initializer_range", c->model.init_std);
    if (gpt2)
        read_gpt2(&r, notes, c);
    else
        read_llama(&r, c);
    if (!gpt2)
        read_kin(&r, kind, c);
    QD_TRY(r.status);
    if (member(&r, "quantization_config"))
        return QD_FAIL(QD_UNSUPPORTED, "%s: the model is quantized: take the original weights", qd_json_name(document));
    qd_status status = qd_model_validate(&c->model);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "%s: ", qd_json_name(document));
}

qd_status qd_hf_config_read(const char *path, qd_strbuf *notes, qd_hf_config *config)
{
    qd_json *document = NULL;
    memset(config, 0, sizeof *config);
    QD_TRY(qd_json_load(path, &document));
    qd_status status = read_model(document, notes, config);
    qd_json_destroy(document);
    return status;
}

/* ---- writing ---- */

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
    if (!m->qkv_bias || !m->linear_bias)
        return cannot("its GPT-2 has all biases (model.qkv_bias, model.linear_bias)");
    if (m->kv_heads != m->heads || (int64_t)m->heads * m->head_dim != m->hidden)
        return cannot("in its GPT-2 every head has its own keys and values, and head_dim is hidden / heads");
    return QD_OK;
}

static void put_gpt2(qd_json_writer *w, const qd_model *m)
{
    qd_json_put_int(w, "n_layer", m->layers);
    qd_json_put_int(w, "n_embd", m->hidden);
    qd_json_put_int(w, "n_head", m->heads);
    qd_json_put_int(w, "n_inner", m->ffn);
    qd_json_put_int(w, "n_positions", m->max_seq);
    qd_json_put_double(w, "layer_norm_epsilon", m->norm_eps);
    qd_json_put_string(w, "activation_function", m->activation == QD_ACT_GELU ? "gelu" : "gelu_new");
    qd_json_put_double(w, "resid_pdrop", m->dropout);
    qd_json_put_double(w, "embd_pdrop", m->dropout);
    qd_json_put_double(w, "attn_pdrop", 0.0);
}

static qd_status check_llama(const qd_model *m)
{
    if (m->norm != QD_NORM_RMS || m->position != QD_POSITION_ROPE)
        return cannot("its Llama has RMS norms and rotary positions");
    if (m->activation != QD_ACT_SWIGLU)
        return cannot("the MLP of its Llama is gated (model.activation)");
    const qd_moe *e = &m->moe;
    if (e->experts == 0)
        return QD_OK;
    if (e->router != QD_ROUTER_SOFTMAX || e->bias || e->groups > 1 || e->shared > 0 || e->scale != 1.0)
        return cannot(
            "the routers of its Mixtral and Qwen3 are softmax over all experts, without shared experts (model.router, router_bias, "
            "router_groups, router_scale, shared_experts)");
    if (!m->qk_norm && (!e->normalised || e->first_dense > 0 || m->qkv_bias))
        return cannot("its Mixtral has normalised weights, experts in every block and no biases");
    return QD_OK;
}

static const char *kind_of(const qd_model *m)
{
    if (m->arch == QD_ARCH_GPT2)
        return "gpt2";
    return m->moe.experts > 0 ? (m->qk_norm ? "qwen3_moe" : "mixtral") : m->qk_norm ? "qwen3" : "llama";
}

static void put_experts(qd_json_writer *w, const qd_model *m)
{
    const qd_moe *e = &m->moe;
    qd_json_put_int(w, m->qk_norm ? "num_experts" : "num_local_experts", e->experts);
    qd_json_put_int(w, "num_experts_per_tok", e->per_token);
    qd_json_put_double(w, "router_aux_loss_coef", e->aux_loss);
    if (!m->qk_norm)
        return;
    qd_json_put_int(w, "moe_intermediate_size", e->ffn);
    qd_json_put_bool(w, "norm_topk_prob", e->normalised);
    qd_json_put_int(w, "decoder_sparse_step", 1);
    qd_json_list_begin(w, "mlp_only_layers");
    for (int layer = 0; layer < e->first_dense; layer++)
        qd_json_put_int(w, NULL, layer);
    qd_json_end(w);
}

static void put_llama(qd_json_writer *w, const qd_model *m, int64_t positions)
{
    qd_json_put_int(w, "num_hidden_layers", m->layers);
    qd_json_put_int(w, "hidden_size", m->hidden);
    qd_json_put_int(w, "intermediate_size", m->moe.experts > 0 && !m->qk_norm ? m->moe.ffn : m->ffn);
    qd_json_put_int(w, "num_attention_heads", m->heads);
    qd_json_put_int(w, "num_key_value_heads", m->kv_heads);
    qd_json_put_int(w, "head_dim", m->head_dim);
    qd_json_put_int(w, "max_position_embeddings", m->max_seq > 0 ? m->max_seq : positions);
    qd_json_put_double(w, "rms_norm_eps", m->norm_eps);
    qd_json_put_string(w, "hidden_act", "silu");
    qd_json_put_bool(w, "attention_bias", m->qkv_bias || m->linear_bias);
    qd_json_put_bool(w, "mlp_bias", m->linear_bias);
    qd_json_put_double(w, "rope_theta", m->rope.base);
    if (m->rope.scaled) {
        qd_json_object_begin(w, "rope_scaling");
        qd_json_put_string(w, "rope_type", "llama3");
        qd_json_put_double(w, "factor", m->rope.factor);
        qd_json_put_double(w, "low_freq_factor", m->rope.low_factor);
        qd_json_put_double(w, "high_freq_factor", m->rope.high_factor);
        qd_json_put_int(w, "original_max_position_embeddings", m->rope.original_seq);
        qd_json_end(w);
    }
}

static void put_token(qd_json_writer *w, const char *key, int32_t token)
{
    if (token >= 0)
        qd_json_put_int(w, key, token);
    else
        qd_json_put_null(w, key);
}

qd_status qd_hf_config_text(const qd_model *m, const qd_hf_export *o, qd_strbuf *out)
{
    bool gpt2 = m->arch == QD_ARCH_GPT2;
    QD_TRY(gpt2 ? check_gpt2(m) : check_llama(m));
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_object_begin(&w, NULL);
    qd_json_list_begin(&w, "architectures");
    static const struct {
        const char *kind, *class_;
    } classes[] = {{"gpt2", "GPT2LMHeadModel"}, {"llama", "LlamaForCausalLM"}, {"mixtral", "MixtralForCausalLM"},
                   {"qwen3", "Qwen3ForCausalLM"}, {"qwen3_moe", "Qwen3MoeForCausalLM"}};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        if (strcmp(classes[i].kind, kind_of(m)) == 0)
            qd_json_put_string(&w, NULL, classes[i].class_);
    qd_json_end(&w);
    qd_json_put_string(&w, "model_type", kind_of(m));
    qd_json_put_int(&w, "vocab_size", m->vocab);
    if (gpt2)
        put_gpt2(&w, m);
    else
        put_llama(&w, m, o->positions);
    if (m->moe.experts > 0)
        put_experts(&w, m);
    qd_json_put_double(&w, "initializer_range", m->init_std);
    qd_json_put_bool(&w, "tie_word_embeddings", m->tied);
    qd_json_put_string(&w, "torch_dtype", o->dtype == QD_F32 ? "float32" : o->dtype == QD_BF16 ? "bfloat16" : "float16");
    put_token(&w, "bos_token_id", o->begin_token);
    put_token(&w, "eos_token_id", o->end_token);
    qd_json_end(&w);
    qd_strbuf_puts(out, "\n");
    return QD_OK;
}
