/* The model types of transformers that convert supports, one row each. The defaults are those of
 * the configuration classes of transformers 5.22 and 5.23 (LlamaConfig and so on);
 * tests/golden/test_hf_config.c compares them with the values printed by that version. */
#include "ckpt/huggingface_impl.h"

#include <stdio.h>
#include <string.h>

static const qd_hf_key gpt2_keys[] = {
    {"layers", "n_layer", "num_hidden_layers"},
    {"hidden", "n_embd", "hidden_size"},
    {"heads", "n_head", "num_attention_heads"},
    {"kv_heads", NULL, NULL},
    {"head_dim", NULL, NULL},
    {"ffn", "n_inner", NULL},
    {"max_seq", "n_positions", "max_position_embeddings"},
    {"norm_eps", "layer_norm_epsilon", NULL},
    {"dropout", "resid_pdrop", NULL},
    {0},
};
static const qd_hf_key llama_keys[] = {{0}};
static const qd_hf_key olmo_keys[] = {{"norm_eps", NULL, NULL}, {0}}; /* always 1e-5 */
static const qd_hf_key mixtral_keys[] = {{"experts", "num_local_experts", "num_experts"}, {0}};
static const qd_hf_key olmoe_keys[] = {
    {"experts", "num_experts", "num_local_experts"},
    {"router_normalised", "norm_topk_prob", NULL},
    {0},
};
static const qd_hf_key qwen2_moe_keys[] = {
    {"experts", "num_experts", NULL},
    {"expert_ffn", "moe_intermediate_size", NULL},
    {"shared_ffn", "shared_expert_intermediate_size", NULL},
    {"router_normalised", "norm_topk_prob", NULL},
    {"qkv_bias", "qkv_bias", NULL},
    {0},
};
static const qd_hf_key qwen3_moe_keys[] = {
    {"experts", "num_experts", "num_local_experts"},
    {"expert_ffn", "moe_intermediate_size", NULL},
    {"router_normalised", "norm_topk_prob", NULL},
    {0},
};

static const qd_hf_key gpt_oss_keys[] = {{"experts", "num_local_experts", "num_experts"}, {0}};
static const qd_hf_key deepseek_keys[] = {
    {"head_dim", NULL, NULL}, /* theirs is the rotary part */
    {"experts", "n_routed_experts", "num_local_experts"},
    {"expert_ffn", "moe_intermediate_size", NULL},
    {"shared_experts", "n_shared_experts", NULL},
    {"first_dense", "first_k_dense_replace", NULL},
    {"router_normalised", "norm_topk_prob", NULL},
    {"router_scale", "routed_scaling_factor", NULL},
    {"router_groups", "n_group", NULL},
    {"router_top_groups", "topk_group", NULL},
    {"rope_interleave", "rope_interleave", NULL},
    {0},
};

static const qd_hf_key deepseek_v2_keys[] = {
    {"head_dim", NULL, NULL},
    {"experts", "n_routed_experts", "num_experts"},
    {"expert_ffn", "moe_intermediate_size", NULL},
    {"shared_experts", "n_shared_experts", NULL},
    {"first_dense", "first_k_dense_replace", NULL},
    {"router_scale", "routed_scaling_factor", NULL},
    {"router_groups", "n_group", NULL},
    {"router_top_groups", "topk_group", NULL},
    {0},
};

static const qd_hf_family families[] = {
    {.kind = "gpt2", .class_ = "GPT2LMHeadModel", .arch = QD_ARCH_GPT2, .keys = gpt2_keys,
     .defaults = {.layers = 12, .heads = 12, .hidden = 768, .vocab = 50257, .max_seq = 1024, .norm_eps = 1e-5, .init_std = 0.02,
                  .tied = true, .dropout = 0.1}},
    {.kind = "llama", .class_ = "LlamaForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .mlp_bias = true, .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .hidden = 4096, .ffn = 11008, .vocab = 32000, .max_seq = 2048, .norm_eps = 1e-6,
                  .init_std = 0.02, .rope.base = 1e4}},
    {.kind = "smollm3", .class_ = "SmolLM3ForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .mlp_bias = true,
     .window = QD_HF_WINDOW_SWITCH_LISTED, .keys = llama_keys,
     .defaults = {.layers = 36, .heads = 16, .kv_heads = 4, .hidden = 2048, .ffn = 11008, .vocab = 128256, .max_seq = 32768,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope = {.base = 2e6, .nope_every = 4}, .tied = true}},
    {.kind = "mistral", .class_ = "MistralForCausalLM", .arch = QD_ARCH_LLAMA, .window = QD_HF_WINDOW_SIZE, .window_default = 4096,
     .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .kv_heads = 8, .hidden = 4096, .ffn = 14336, .vocab = 32000, .max_seq = 131072,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .hf_type = QD_HF_MISTRAL}},
    {.kind = "phi3", .class_ = "Phi3ForCausalLM", .arch = QD_ARCH_LLAMA, .partial = true, .window = QD_HF_WINDOW_SIZE, .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .hidden = 3072, .ffn = 8192, .vocab = 32064, .max_seq = 4096, .norm_eps = 1e-5,
                  .init_std = 0.02, .rope.base = 1e4, .hf_type = QD_HF_PHI3}},
    {.kind = "mixtral", .class_ = "MixtralForCausalLM", .arch = QD_ARCH_LLAMA, .window = QD_HF_WINDOW_SIZE, .keys = mixtral_keys,
     .defaults = {.layers = 32, .heads = 32, .kv_heads = 8, .hidden = 4096, .ffn = 14336, .vocab = 32000, .max_seq = 131072,
                  .norm_eps = 1e-5, .init_std = 0.02, .rope.base = 1e6, .moe = {.experts = 8, .per_token = 2}}},
    {.kind = "qwen2", .class_ = "Qwen2ForCausalLM", .arch = QD_ARCH_LLAMA, .window = QD_HF_WINDOW_SWITCH, .window_default = 4096,
     .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .kv_heads = 32, .hidden = 4096, .ffn = 22016, .vocab = 151936, .max_seq = 32768,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .qkv_bias = true}},
    {.kind = "qwen3", .class_ = "Qwen3ForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .window = QD_HF_WINDOW_SWITCH,
     .window_default = 4096, .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .kv_heads = 32, .head_dim = 128, .hidden = 4096, .ffn = 22016, .vocab = 151936,
                  .max_seq = 32768, .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .qk_norm = true}},
    {.kind = "qwen2_moe", .class_ = "Qwen2MoeForCausalLM", .arch = QD_ARCH_LLAMA, .dense_layers = true, .window = QD_HF_WINDOW_SWITCH_EVEN,
     .window_default = 4096, .keys = qwen2_moe_keys,
     .defaults = {.layers = 24, .heads = 16, .kv_heads = 16, .hidden = 2048, .ffn = 5632, .vocab = 151936, .max_seq = 32768,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .qkv_bias = true,
                  .moe = {.experts = 60, .per_token = 4, .ffn = 1408, .shared = 1, .shared_ffn = 5632, .shared_gate = true}}},
    {.kind = "qwen3_moe", .class_ = "Qwen3MoeForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .dense_layers = true,
     .window = QD_HF_WINDOW_SWITCH_ALL, .window_default = 4096, .keys = qwen3_moe_keys,
     .defaults = {.layers = 24, .heads = 32, .kv_heads = 4, .hidden = 2048, .ffn = 6144, .vocab = 151936, .max_seq = 32768,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .qk_norm = true,
                  .moe = {.experts = 128, .per_token = 8, .ffn = 768}}},
    {.kind = "olmoe", .class_ = "OlmoeForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .clips = true, .balance_default = 0.01,
     .keys = olmoe_keys,
     .defaults = {.layers = 16, .heads = 16, .hidden = 2048, .ffn = 2048, .vocab = 50304, .max_seq = 4096, .norm_eps = 1e-5,
                  .init_std = 0.02, .rope.base = 1e4, .qk_norm = true, .qk_over = QD_QK_WIDTH, .moe = {.experts = 64, .per_token = 8}}},
    {.kind = "olmo", .class_ = "OlmoForCausalLM", .arch = QD_ARCH_OLMO, .attention_bias = true, .clips = true, .keys = olmo_keys,
     .defaults = {.layers = 32, .heads = 32, .hidden = 4096, .ffn = 11008, .vocab = 50304, .max_seq = 2048, .norm_eps = 1e-5,
                  .init_std = 0.02, .rope.base = 1e4}},
    {.kind = "gemma2", .class_ = "Gemma2ForCausalLM", .arch = QD_ARCH_GEMMA2, .attention_bias = true, .window = QD_HF_WINDOW_TYPES,
     .window_default = 4096, .keys = llama_keys,
     .defaults = {.layers = 26, .heads = 8, .kv_heads = 4, .head_dim = 256, .hidden = 2304, .ffn = 9216, .vocab = 256000, .max_seq = 8192,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .tied = true, .full_every = 2}},
    {.kind = "gemma3_text", .class_ = "Gemma3ForCausalLM", .arch = QD_ARCH_GEMMA3, .attention_bias = true, .window = QD_HF_WINDOW_TYPES,
     .window_default = 4096, .keys = llama_keys,
     .defaults = {.layers = 26, .heads = 8, .kv_heads = 4, .head_dim = 256, .hidden = 2304, .ffn = 9216, .vocab = 262208,
                  .max_seq = 131072, .norm_eps = 1e-6, .init_std = 0.02, .rope = {.base = 1e6, .local_base = 1e4}, .tied = true,
                  .full_every = 6, .qk_norm = true}},
    {.kind = "olmo2", .class_ = "Olmo2ForCausalLM", .arch = QD_ARCH_OLMO2, .attention_bias = true, .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .hidden = 4096, .ffn = 11008, .vocab = 50304, .max_seq = 2048, .norm_eps = 1e-5,
                  .init_std = 0.02, .rope.base = 1e4, .qk_norm = true, .qk_over = QD_QK_WIDTH}},
    {.kind = "olmo3", .class_ = "Olmo3ForCausalLM", .arch = QD_ARCH_OLMO2, .attention_bias = true, .window = QD_HF_WINDOW_TYPES,
     .window_default = 4096, .keys = llama_keys,
     .defaults = {.layers = 32, .heads = 32, .hidden = 4096, .ffn = 11008, .vocab = 50304, .max_seq = 2048, .norm_eps = 1e-5,
                  .init_std = 0.02, .rope = {.base = 5e5, .local_base = 5e5}, .full_every = 4, .qk_norm = true, .qk_over = QD_QK_WIDTH}},
    {.kind = "gpt_oss", .class_ = "GptOssForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .stacked = true,
     .window = QD_HF_WINDOW_TYPES, .window_default = 128, .keys = gpt_oss_keys,
     .defaults = {.layers = 36, .heads = 64, .kv_heads = 8, .head_dim = 64, .hidden = 2880, .ffn = 2880, .vocab = 201088,
                  .max_seq = 131072, .norm_eps = 1e-5, .init_std = 0.02, .full_every = 2, .sinks = true, .out_bias = true,
                  .activation = QD_ACT_SWIGLU_CLAMPED, .swiglu_alpha = 1.702, .swiglu_limit = 7.0,
                  .rope = {.base = 150000, .scaling = QD_ROPE_YARN, .factor = 32, .beta_fast = 32, .beta_slow = 1, .original_seq = 4096},
                  .moe = {.experts = 128, .per_token = 4}}},
    {.kind = "deepseek_v2", .class_ = "DeepseekV2ForCausalLM", .arch = QD_ARCH_DEEPSEEK, .keys = deepseek_v2_keys,
     .defaults = {.arch = QD_ARCH_DEEPSEEK, .layers = 32, .heads = 32, .hidden = 4096, .ffn = 11008, .vocab = 102400, .max_seq = 2048,
                  .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .kv_lora_rank = 512, .q_lora_rank = 1536,
                  .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128, .rope_interleave = true, .latent_norm_eps = 1e-6,
                  .moe = {.experts = 64, .ffn = 1407, .shared = 2, .scale = 1.0}}},
    {.kind = "deepseek_v3", .class_ = "DeepseekV3ForCausalLM", .arch = QD_ARCH_DEEPSEEK, .keys = deepseek_keys,
     .defaults = {.arch = QD_ARCH_DEEPSEEK, .layers = 61, .heads = 128, .kv_heads = 128, .hidden = 7168, .ffn = 18432, .vocab = 129280,
                  .max_seq = 4096, .norm_eps = 1e-6, .init_std = 0.02, .rope.base = 1e4, .kv_lora_rank = 512, .q_lora_rank = 1536,
                  .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128, .rope_interleave = true, .latent_norm_eps = 1e-6,
                  .moe = {.experts = 256, .per_token = 8, .ffn = 2048, .shared = 1, .first_dense = 3, .router = QD_ROUTER_SIGMOID,
                          .normalised = true, .scale = 2.5, .groups = 8, .top_groups = 4, .bias = true}}},
};
enum { FAMILIES = sizeof families / sizeof *families };

const qd_hf_family *qd_hf_family_by_kind(const char *kind)
{
    if (strcmp(kind, "kimi_k2") == 0) /* the same model */
        kind = "deepseek_v3";
    for (int i = 0; i < FAMILIES; i++)
        if (strcmp(families[i].kind, kind) == 0)
            return &families[i];
    return NULL;
}

/* Whether a model is of the family. Features that no family has are refused on export. */
static bool holds(const qd_hf_family *f, const qd_model *m)
{
    if (f->arch == QD_ARCH_OLMO2 && m->arch == QD_ARCH_OLMO2) /* OLMo 3 is OLMo 2 with windows */
        return (f->window != QD_HF_WINDOW_NONE) == (m->window > 0);
    if (f->arch == QD_ARCH_DEEPSEEK && m->arch == QD_ARCH_DEEPSEEK)
        return f->defaults.moe.router == m->moe.router;
    if (f->arch != m->arch || m->arch != QD_ARCH_LLAMA) /* the others have one row each */
        return f->arch == m->arch;
    const bool dense = m->moe.experts == 0, smollm3 = dense && !m->qk_norm && m->rope.nope_every > 0 && m->hf_type == QD_HF_DERIVED;
    const bool qwen2 = dense && !smollm3 && !m->qk_norm && m->qkv_bias && !m->out_bias && !m->mlp_bias;
    const bool norms = f->defaults.qk_norm == m->qk_norm && (!m->qk_norm || f->defaults.qk_over == m->qk_over);
    const bool gated = !dense && m->moe.shared > 0 && m->moe.shared_gate;
    return norms && f->defaults.sinks == m->sinks && qd_hf_has_experts(f) == !dense && f->defaults.hf_type == m->hf_type &&
           f->defaults.moe.shared_gate == gated && (f->defaults.rope.nope_every > 0) == smollm3 &&
           (gated || f->defaults.qkv_bias == qwen2);
}

const qd_hf_family *qd_hf_family_of(const qd_model *m)
{
    for (const qd_hf_family *f = families; f < families + FAMILIES; f++)
        if (holds(f, m))
            return f;
    return NULL;
}

qd_hf_key qd_hf_key_of(const qd_hf_family *family, const qd_model_field *field)
{
    const char *key = qd_field_key(field);
    if (!key || !qd_field_counts(field, &family->defaults))
        return (qd_hf_key){0};
    for (const qd_hf_key *k = family->keys; k->field; k++)
        if (strcmp(k->field, key) == 0)
            return *k;
    return (qd_hf_key){key, field->hf, NULL};
}

bool qd_hf_has_key(const qd_hf_family *family, const char *field)
{
    const qd_hf_key *k = family->keys;
    while (k->field && strcmp(k->field, field) != 0)
        k++;
    return k->name != NULL;
}

void qd_hf_family_kinds(char *text, size_t size)
{
    size_t used = 0;
    for (int i = 0; i < FAMILIES && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i == 0 ? "" : i + 1 < FAMILIES ? ", " : " and ", families[i].kind);
}
