/* The model types of transformers that convert knows: one row each. The defaults are those of the configuration classes of
 * transformers 5.22 (LlamaConfig and so on); tests/golden/test_hf_config.c has them a second time, as that version prints them. */
#include "ckpt/huggingface_impl.h"

#include <stdio.h>
#include <string.h>

static const qd_hf_family families[] = {
    {.kind = "gpt2", .class_ = "GPT2LMHeadModel", .arch = QD_ARCH_GPT2,
     .layers = 12, .heads = 12, .hidden = 768, .vocab = 50257, .positions = 1024, .norm_eps = 1e-5},
    {.kind = "llama", .class_ = "LlamaForCausalLM", .arch = QD_ARCH_LLAMA, .attention_bias = true, .mlp_bias = true,
     .layers = 32, .heads = 32, .hidden = 4096, .ffn = 11008, .vocab = 32000, .positions = 2048, .norm_eps = 1e-6,
     .rope_theta = 1e4},
    {.kind = "mixtral", .class_ = "MixtralForCausalLM", .arch = QD_ARCH_LLAMA, .experts = true,
     .layers = 32, .heads = 32, .kv_heads = 8, .hidden = 4096, .ffn = 14336, .vocab = 32000, .positions = 131072, .norm_eps = 1e-5,
     .rope_theta = 1e6, .expert_count = 8, .per_token = 2},
    {.kind = "qwen3", .class_ = "Qwen3ForCausalLM", .arch = QD_ARCH_LLAMA, .qk_norm = true, .attention_bias = true,
     .layers = 32, .heads = 32, .kv_heads = 32, .head_dim = 128, .hidden = 4096, .ffn = 22016, .vocab = 151936, .positions = 32768,
     .norm_eps = 1e-6, .rope_theta = 1e4},
    {.kind = "qwen3_moe", .class_ = "Qwen3MoeForCausalLM", .arch = QD_ARCH_LLAMA, .qk_norm = true, .experts = true,
     .attention_bias = true, .layers = 24, .heads = 32, .kv_heads = 4, .hidden = 2048, .ffn = 6144, .vocab = 151936,
     .positions = 32768, .norm_eps = 1e-6, .rope_theta = 1e4, .expert_count = 128, .per_token = 8, .expert_ffn = 768},
};
enum { FAMILIES = sizeof families / sizeof *families };

const qd_hf_family *qd_hf_family_by_kind(const char *kind)
{
    for (int i = 0; i < FAMILIES; i++)
        if (strcmp(families[i].kind, kind) == 0)
            return &families[i];
    return NULL;
}

const qd_hf_family *qd_hf_family_of(const qd_model *m)
{
    const bool llama = m->arch == QD_ARCH_LLAMA; /* GPT-2 has one row; what it cannot hold is refused on export */
    for (int i = 0; i < FAMILIES; i++)
        if (families[i].arch == m->arch && (!llama || (families[i].qk_norm == m->qk_norm && families[i].experts == (m->moe.experts > 0))))
            return &families[i];
    return NULL;
}

void qd_hf_family_kinds(char *text, size_t size)
{
    size_t used = 0;
    for (int i = 0; i < FAMILIES && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i == 0 ? "" : i + 1 < FAMILIES ? ", " : " and ", families[i].kind);
}
