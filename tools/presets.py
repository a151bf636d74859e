#!/usr/bin/env python3
"""Writes data/models.json, the presets of `model.preset`.

    presets.py make  SOURCE OUTPUT   from a list of published architectures (JSON), plus our own small models
    presets.py check FILE            recompute the parameter counts and check the rules of FILE

Only `make` needs the source; the repository contains the result, and `check` runs without it.
data/README.md explains the fields.
"""
import argparse
import json
import sys

LLAMA3_SCALING = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_seq": 8192}

# Values that are not in the source but in the models' public configurations: (norm eps, rope base)
# by name, else by family.
PUBLIC = {
    "gpt2": (1e-5, None), "gpt3": (1e-5, None), "mpt": (1e-5, None), "bloom": (1e-5, None),
    "llama": (1e-5, 10000.0), "llama2": (1e-5, 10000.0), "llama3": (1e-5, 500000.0), "llama4": (1e-5, 500000.0),
    "yi": (1e-5, 5000000.0), "olmo": (1e-5, 10000.0), "internlm": (1e-5, 10000.0), "gemma2": (1e-6, 10000.0),
    "mixtral": (1e-5, 1000000.0), "qwen2": (1e-6, 1000000.0), "qwen3": (1e-6, 1000000.0),
    "deepseek": (1e-6, 10000.0), "kimi-k2": (1e-6, 50000.0), "nemotron4": (1e-5, 10000.0),
    "gpt-oss": (1e-5, 150000.0), "grok": (1e-5, 10000.0),
}
ROPE_SCALING = {
    "llama3.1-8b": LLAMA3_SCALING, "llama3.1-70b": LLAMA3_SCALING, "llama3.1-405b": LLAMA3_SCALING,
    "llama3.2-1b": {**LLAMA3_SCALING, "factor": 32.0},
}
SCALED = "The scaling is that of the released weights; pre-training at 8,192 tokens had none."
NOTES = {
    **{name: SCALED for name in ROPE_SCALING},
    "gpt3-175b": "Dense attention in every layer; the original alternates with sparse ones.",
    "deepseek-v3": "Positions as in pre-training; the released weights add YaRN with a factor of 40.",
    "kimi-k2": "Positions as in pre-training; the released weights add YaRN with a factor of 32.",
    "internlm-7b": "The released weights also have a bias on the attention output, which is left out here.",
}
NORMS = {"layernorm_bias": "layernorm", "layernorm": "layernorm_no_bias", "rmsnorm": "rmsnorm",
         "none_affine": "layernorm_plain"}
# GPT-2 and its descendants use the tanh approximation; MPT uses torch.nn.GELU, the exact form.
GELU = {"mpt": "gelu"}
QK_NORM = ("qwen3",)
# Activation -> number of (hidden, ffn) matrices in the MLP.
ACTIVATIONS = {"gelu_tanh": 2, "gelu": 2, "relu2": 2, "swiglu": 3, "geglu": 3, "swiglu_clamped": 3}
# Routers other than plain softmax over all experts. DeepSeek-V3's bias changes by 0.001 per step,
# and its sequence-wise loss has the coefficient 0.0001.
DEEPSEEK_V3 = {"router": "sigmoid", "router_scale": 2.5, "router_groups": 8, "router_top_groups": 4, "router_bias_rate": 0.001,
               "aux_loss": 0.0001, "balance": "sequence"}
ROUTERS = {"mixtral-8x7b": {"aux_loss": 0.02, "balance": "batch"}, "mixtral-8x22b": {"aux_loss": 0.02, "balance": "batch"},
           "deepseek-v2-lite": {"router_normalised": False, "aux_loss": 0.001, "balance": "sequence"}, "deepseek-v3": DEEPSEEK_V3,
           "kimi-k2": {"router": "sigmoid", "router_scale": 2.827, "router_bias_rate": 0.001},
           "qwen3-30b-a3b": {"aux_loss": 0.001, "balance": "batch"}, "qwen3-235b-a22b": {"aux_loss": 0.001, "balance": "batch"}}
# The source describes windows in words.
WINDOWS = {"alternating local 4096 / global": {"window": 4096, "full_every": 2},
           "alternating 128-token sliding / full": {"window": 128, "full_every": 2},
           "chunked 8192 on 3 of 4 layers": {"chunked_attention": 8192}}
MOE_FIELDS = ("topk", "moe_ffn", "shared_experts", "shared_expert_ffn", "dense_layers", "moe_layer_pattern")


def own(name, arch, notes, **fields):
    gpt2 = arch == "gpt2"
    return {
        "name": name, "arch": arch, "family": arch, **fields, "max_seq": 1024,
        "activation": "gelu_tanh" if gpt2 else "swiglu", "norm": {"gpt2": "layernorm", "olmo": "layernorm_plain"}.get(arch, "rmsnorm"),
        "norm_eps": 1e-5,
        "position": "learned" if gpt2 else "rope", "rope_base": None if gpt2 else 10000.0, "rope_scaling": None,
        "tied": gpt2, "qkv_bias": gpt2, "out_bias": gpt2, "mlp_bias": gpt2, "sources": [], "added": [], "notes": notes,
        **({"qk_norm": True, "qk_norm_over": "width"} if arch == "olmo2" else {}),
    }


def experts(count, topk, ffn, shared=0, dense=0, shared_ffn=None, **router):
    return {"experts": count, "topk": topk, "moe_ffn": ffn, "shared_experts": shared or None,
            "shared_expert_ffn": shared_ffn or shared * ffn or None, "dense_layers": dense, "moe_layer_pattern": None, **router}


def released(name, family, notes="", **fields):
    """Released weights that the list of published architectures lacks, from their config.json."""
    source = {"qwen2": "https://huggingface.co/Qwen/Q" + name[1:].replace("b", "B"),
              "mistral": "https://huggingface.co/mistralai/M" + name[1:].replace("-7b", "-7B")}[family]
    m = own(name, "llama", notes, **{key: fields[key] for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")})
    return {**m, "family": family, "rope_base": 1e6, "sources": [source + "/blob/main/config.json"], **fields}


def qwen2(name, layers, hidden, heads, kv_heads, ffn, vocab, **fields):
    return released(name, "qwen2", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn,
                    vocab=vocab, **{"max_seq": 131072, "norm_eps": 1e-6, "qkv_bias": True, **fields})


def qwen2_moe(name, path, layers, hidden, heads, kv_heads, ffn, max_seq, count, topk, moe_ffn, shared_ffn):
    m = own(name, "llama", "", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn, vocab=151936,
            **experts(count, topk, moe_ffn, shared=1, shared_ffn=shared_ffn, **QWEN2_MOE))
    return {**m, "family": "qwen2-moe", "rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "max_seq": max_seq,
            "sources": [f"https://huggingface.co/Qwen/{path}/blob/main/config.json"]}


QWEN2_MOE = {"shared_gate": True, "router_normalised": False, "aux_loss": 0.001, "balance": "batch"}
GEMMA2 = {"arch": "gemma2", "norm": "rmsnorm_plus_one", "norm_eps": 1e-6, "activation": "geglu", "tied": True, "sandwich_norm": True,
          "embed_scaled": True, "score_softcap": 50.0, "logit_softcap": 30.0, "window": 4096, "full_every": 2}


GEMMA3 = {**{key: GEMMA2[key] for key in ("norm", "norm_eps", "activation", "tied", "sandwich_norm", "embed_scaled")},
          "arch": "gemma3", "family": "gemma3", "qk_norm": True, "rope_base": 1e6, "rope_local_base": 1e4, "full_every": 6}


def gemma3(name, path, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, window, max_seq, **fields):
    """The text part of a released model."""
    m = own(name, "gemma3", "", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab)
    return {**m, **GEMMA3, "window": window, "max_seq": max_seq, **fields,
            "sources": [f"https://huggingface.co/google/{path}/blob/main/config.json"]}


LINEAR8 = {"type": "linear", "factor": 8.0}


def olmo2(name, path, layers, hidden, heads, kv_heads, ffn):
    m = own(name, "olmo2", "", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn, vocab=100352)
    return {**m, "max_seq": 4096, "norm_eps": 1e-6, "rope_base": 500000.0,
            "sources": [f"https://huggingface.co/allenai/{path}/blob/main/config.json"]}


# YaRN in layers without windows only, which therefore have a base of their own.
OLMO3 = {"window": 4096, "full_every": 4, "rope_local_base": 500000.0,
         "rope_scaling": {"type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq": 8192}}


def olmo3(name, path, *sizes):
    return {**olmo2(name, path, *sizes), "family": "olmo3", "vocab": 100278, "max_seq": 65536, **OLMO3}


GPT_OSS = {"activation": "swiglu_clamped", "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "sinks": True, "qkv_bias": True, "out_bias": True,
           "mlp_bias": True, "router_logit_bias": True, "window": 128, "full_every": 2, "rope_base": 150000.0, "max_seq": 131072,
           "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_seq": 4096}}

# Sequences of up to 4,096 tokens are not scaled.
PHI4_LONGROPE = {"type": "longrope", "factor": 32.0, "original_max_seq": 4096, "short_factor": [1.0] * 48, "long_factor": [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826,
    3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318,
    9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418,
    28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]}

# The vocabulary is raw bytes; a tokenizer has its own.
OWN = [
    own("llama-tiny", "llama", "For tests and first steps: seconds on a laptop.", layers=4, hidden=128, heads=4,
        kv_heads=2, head_dim=32, ffn=352, vocab=256),
    own("llama-small", "llama", "For a first real text on a few cores.", layers=12, hidden=384, heads=6, kv_heads=2,
        head_dim=64, ffn=1024, vocab=256),
    own("gpt2-tiny", "gpt2", "For tests and first steps, GPT-2 style.", layers=4, hidden=128, heads=4, kv_heads=4,
        head_dim=32, ffn=512, vocab=256),
    own("qwen3-tiny", "llama", "For tests: Qwen3 style, with norms of queries and keys.", layers=4, hidden=128, heads=4, kv_heads=2,
        head_dim=32, ffn=352, vocab=256, qk_norm=True),
    {**own("qwen2-tiny", "llama", "For tests: Qwen2 style, with biases of q, k and v and a tied head.", layers=4, hidden=128, heads=4,
           kv_heads=2, head_dim=32, ffn=352, vocab=256), "qkv_bias": True, "tied": True},
    {**own("mistral-tiny", "llama", "For tests: a Llama that is exported as Mistral.", layers=4, hidden=128, heads=4, kv_heads=2,
           head_dim=32, ffn=352, vocab=256), "hf_type": "mistral"},
    {**own("mistral-window-tiny", "llama", "For tests: Mistral with a window, in all layers.", layers=4, hidden=128, heads=4, kv_heads=2,
           head_dim=32, ffn=352, vocab=256), "hf_type": "mistral", "window": 32},
    own("mixtral-tiny", "llama", "For tests and first steps with experts.", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32,
        ffn=352, vocab=256, **experts(8, 2, 192, aux_loss=0.01, balance="batch")),
    own("qwen3-moe-tiny", "llama", "For tests: many small experts, Qwen3 style.", layers=4, hidden=128, heads=4, kv_heads=2,
        head_dim=32, ffn=352, vocab=256, qk_norm=True, **experts(16, 4, 64, aux_loss=0.001, balance="batch")),
    own("deepseek-tiny", "llama", "For tests: experts as in DeepSeek-V3, on standard attention.", layers=4, hidden=128, heads=4,
        kv_heads=4, head_dim=32, ffn=352, vocab=256, **experts(16, 4, 64, shared=1, dense=1, **{**DEEPSEEK_V3, "router_groups": 4, "router_top_groups": 2})),
    {**own("mla-tiny", "deepseek", "For tests: DeepSeek V3 style, with latent attention and experts.", layers=4, hidden=128, heads=4,
           kv_heads=4, head_dim=48, ffn=352, vocab=256, **experts(16, 4, 64, shared=1, dense=1, **{**DEEPSEEK_V3, "router_groups": 4, "router_top_groups": 2})),
     "norm_eps": 1e-6, "mla": {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}},
    own("deepseek-v3-gqa", "llama", "DeepSeek-V3's blocks on grouped-query attention, without its latent attention and its prediction of several tokens.",
        layers=61, hidden=7168, heads=128, kv_heads=8, head_dim=128, ffn=18432, vocab=129280,
        **experts(256, 8, 2048, shared=1, dense=3, **DEEPSEEK_V3)),
    released("mistral-7b-v0.3", "mistral", "Without a window, unlike version 0.1.", layers=32, hidden=4096, heads=32, kv_heads=8,
             head_dim=128, ffn=14336, vocab=32768, max_seq=32768, norm_eps=1e-5, hf_type="mistral"),
    released("mistral-7b-v0.1", "mistral", "With a window of 4,096 tokens in all layers.", layers=32, hidden=4096, heads=32, kv_heads=8,
             head_dim=128, ffn=14336, vocab=32000, max_seq=32768, norm_eps=1e-5, rope_base=1e4, hf_type="mistral", window=4096),
    qwen2("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True, max_seq=32768),
    qwen2("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, tied=True),
    qwen2("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
    qwen2("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, norm_eps=1e-5),
    {**own("olmo-tiny", "olmo", "For tests: OLMo style, norms without weights and clipped queries, keys and values.", layers=4,
           hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=352, vocab=256), "clip_qkv": 8.0},
    {**own("olmo-1b", "olmo", "", layers=16, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, vocab=50304), "max_seq": 2048,
     "tied": True, "sources": ["https://huggingface.co/allenai/OLMo-1B-hf/blob/main/config.json"]},
    {**own("olmoe-tiny", "llama", "For tests: OLMoE style, experts and norms over all queries and keys.", layers=4, hidden=128, heads=4,
           kv_heads=4, head_dim=32, ffn=64, vocab=256, qk_norm=True, qk_norm_over="width",
           **experts(16, 4, 64, router_normalised=False, aux_loss=0.01, balance="batch"))},
    {**own("olmoe-1b-7b", "llama", "", layers=16, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=1024, vocab=50304, qk_norm=True,
           qk_norm_over="width", **experts(64, 8, 1024, router_normalised=False, aux_loss=0.01, balance="batch")),
     "family": "olmoe", "max_seq": 4096, "sources": ["https://huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json"]},
    {**own("gemma2-tiny", "gemma2", "For tests: Gemma 2 style.", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=352, vocab=256),
     **GEMMA2, "window": 32},
    own("olmo2-tiny", "olmo2", "For tests: OLMo 2 style, with norms behind the branches.", layers=4, hidden=128, heads=4, kv_heads=2,
        head_dim=32, ffn=352, vocab=256),
    olmo2("olmo2-1b", "OLMo-2-0425-1B", 16, 2048, 16, 16, 8192),
    olmo2("olmo2-7b", "OLMo-2-1124-7B", 32, 4096, 32, 32, 11008),
    olmo2("olmo2-13b", "OLMo-2-1124-13B", 40, 5120, 40, 40, 13824),
    olmo2("olmo2-32b", "OLMo-2-0325-32B", 64, 5120, 40, 8, 27648),
    {**own("qwen2-moe-tiny", "llama", "For tests: Qwen2-MoE style, with a gated shared expert.", layers=4, hidden=128, heads=4, kv_heads=2,
           head_dim=32, ffn=352, vocab=256, **experts(16, 4, 64, shared=1, shared_ffn=160, **QWEN2_MOE)), "qkv_bias": True},
    qwen2_moe("qwen1.5-moe-a2.7b", "Qwen1.5-MoE-A2.7B", 24, 2048, 16, 16, 5632, 8192, 60, 4, 1408, 5632),
    {**own("smollm3-tiny", "llama", "For tests: SmolLM3 style, every fourth layer without positions.", layers=4, hidden=128, heads=4, kv_heads=2,
           head_dim=32, ffn=352, vocab=256), "nope_every": 4, "tied": True},
    {**own("smollm3-3b", "llama", "", layers=36, hidden=2048, heads=16, kv_heads=4, head_dim=128, ffn=11008, vocab=128256),
     "family": "smollm3", "nope_every": 4, "tied": True, "norm_eps": 1e-6, "rope_base": 5e6, "max_seq": 65536,
     "sources": ["https://huggingface.co/HuggingFaceTB/SmolLM3-3B/blob/main/config.json"]},
    {**own("phi3-tiny", "llama", "For tests: a Llama that is exported as Phi-3.", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32,
           ffn=352, vocab=256), "hf_type": "phi3"},
    {**own("phi3-mini-4k", "llama", "", layers=32, hidden=3072, heads=32, kv_heads=32, head_dim=96, ffn=8192, vocab=32064),
     "family": "phi3", "hf_type": "phi3", "max_seq": 4096, "window": 2047,
     "sources": ["https://huggingface.co/microsoft/Phi-3-mini-4k-instruct/blob/main/config.json"]},
    {**own("phi4-14b", "llama", "", layers=40, hidden=5120, heads=40, kv_heads=10, head_dim=128, ffn=17920, vocab=100352),
     "family": "phi3", "hf_type": "phi3", "max_seq": 16384, "rope_base": 250000.0,
     "sources": ["https://huggingface.co/microsoft/phi-4/blob/main/config.json"]},
    {**own("phi4-mini", "llama", "", layers=32, hidden=3072, heads=24, kv_heads=8, head_dim=128, ffn=8192, vocab=200064),
     "family": "phi3", "hf_type": "phi3", "max_seq": 131072, "window": 262144, "rope_fraction": 0.75, "rope_scaling": PHI4_LONGROPE,
     "tied": True, "sources": ["https://huggingface.co/microsoft/Phi-4-mini-instruct/blob/main/config.json"]},
    {**own("gemma3-tiny", "gemma3", "For tests: Gemma 3 style, with two rotary bases.", layers=6, hidden=128, heads=4, kv_heads=2, head_dim=32,
           ffn=352, vocab=256), **GEMMA3, "window": 32, "rope_scaling": {"type": "linear", "factor": 2.0}},
    gemma3("gemma3-270m", "gemma-3-270m", 18, 640, 4, 1, 256, 2048, 262144, 512, 32768),
    gemma3("gemma3-1b", "gemma-3-1b-pt", 26, 1152, 4, 1, 256, 6912, 262144, 512, 32768),
    gemma3("gemma3-4b", "gemma-3-4b-pt", 34, 2560, 8, 4, 256, 10240, 262208, 1024, 131072, rope_scaling=LINEAR8,
           notes="The text part, without the vision encoder."),
    gemma3("gemma3-12b", "gemma-3-12b-pt", 48, 3840, 16, 8, 256, 15360, 262208, 1024, 131072, rope_scaling=LINEAR8,
           notes="The text part, without the vision encoder."),
    gemma3("gemma3-27b", "gemma-3-27b-pt", 62, 5376, 32, 16, 128, 21504, 262208, 1024, 131072, rope_scaling=LINEAR8,
           score_scale=168 ** -0.5, notes="The text part, without the vision encoder."),
    {**own("olmo3-tiny", "olmo2", "For tests: OLMo 3 style, OLMo 2 with windows in three of four layers.", layers=4, hidden=128, heads=4,
           kv_heads=2, head_dim=32, ffn=352, vocab=256), **OLMO3, "window": 32, "rope_local_base": 10000.0,
     "rope_scaling": {**OLMO3["rope_scaling"], "original_max_seq": 128}},
    olmo3("olmo3-7b", "Olmo-3-1025-7B", 32, 4096, 32, 32, 11008),
    olmo3("olmo3-32b", "Olmo-3-1125-32B", 64, 5120, 40, 8, 27648),
    {**own("gpt-oss-tiny", "llama", "For tests: GPT-OSS style, with sinks, windows in every second layer and biases of experts.", layers=4,
           hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=256, **experts(8, 2, 96)), **GPT_OSS, "window": 32, "max_seq": 1024,
     "rope_scaling": {**GPT_OSS["rope_scaling"], "factor": 8.0, "original_max_seq": 128}},
    {**own("gpt-oss-20b", "llama", "", layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088,
           **experts(32, 4, 2880)), **GPT_OSS, "family": "gpt-oss",
     "sources": ["https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json"]},
]


def parameter_count(m):
    """(total, active per token): every weight matrix, bias and norm; a tied head once; experts with their router."""
    h, kv = m["hidden"], m["kv_heads"]
    norm = {"rmsnorm": h, "rmsnorm_plus_one": h, "layernorm": 2 * h, "layernorm_no_bias": h, "layernorm_plain": 0}[m["norm"]]
    mlp = lambda ffn: ACTIVATIONS[m["activation"]] * h * ffn
    mla = m.get("mla")
    if mla:
        heads, rope, nope, value = m["heads"], mla["qk_rope_head_dim"], mla["qk_nope_head_dim"], mla["v_head_dim"]
        rank, q_rank = mla["kv_lora_rank"], mla["q_lora_rank"]
        q = heads * (nope + rope)
        attention = h * q if q_rank is None else h * q_rank + q_rank + q_rank * q
        attention += h * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * h
    else:
        q, kv = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
        attention = h * (q + 2 * kv) + q * h
        attention += (q + 2 * kv if m["qkv_bias"] else 0) + (0 if not m.get("qk_norm") else q + kv if m.get("qk_norm_over") == "width" else 2 * m["head_dim"])
    attention += m["heads"] if m.get("sinks") else 0
    mlp_biases = lambda ffn: (ACTIVATIONS[m["activation"]] - 1) * ffn + h if m["mlp_bias"] else 0
    block = attention + (h if m["out_bias"] else 0) + norm * (4 if m.get("sandwich_norm") else 2)
    embeddings = m["vocab"] * h * (1 if m["tied"] else 2) + (m["max_seq"] * h if m["position"] == "learned" else 0)
    outside = embeddings + norm
    layers = m["layers"]
    if not m.get("experts"):
        total = outside + layers * (block + mlp(m["ffn"]) + mlp_biases(m["ffn"]))
        return total, total
    dense = m["dense_layers"] or 0
    router = h * m["experts"] + (m["experts"] if m.get("router_bias_rate") or m.get("router_logit_bias") else 0)
    shared = (mlp(m["shared_expert_ffn"]) if m["shared_expert_ffn"] else 0) + (h if m.get("shared_gate") else 0)
    layered = lambda experts: (outside + layers * block + dense * (mlp(m["ffn"]) + mlp_biases(m["ffn"]))
                               + (layers - dense) * (router + shared + experts * (mlp(m["moe_ffn"]) + mlp_biases(m["moe_ffn"]))))
    return layered(m["experts"]), layered(m["topk"])


def obstacle(m):
    """The first reason why the trainer cannot run this model, or None."""
    reasons = [
        (m.get("moe_layer_pattern"), "experts in some of the blocks"),
        (m.get("shared_experts") and m["shared_expert_ffn"] != m["shared_experts"] * m["moe_ffn"] and not m.get("shared_gate"),
         "a gate on the shared expert"),
        (m.get("parallel_block"), "attention and MLP side by side"),
        (m.get("sandwich_norm") and not m["arch"].startswith("gemma"), "norms after attention and MLP"),
        (m.get("chunked_attention"), "attention in chunks"),
        (m["position"] not in ("learned", "rope"), f"positions by {m['position']}"),
        (m["norm"] == "layernorm_no_bias", "LayerNorm without bias"),
        (m.get("experts") and m["activation"] == "geglu", "experts gated by GELU"),
        (m["activation"] not in ("gelu_tanh", "gelu", "swiglu", "geglu", "swiglu_clamped"), f"activation {m['activation']}"),
        (m["norm_eps"] is None or (m["position"] == "rope" and m["rope_base"] is None), "constants that were not published"),
    ]
    return next((text for applies, text in reasons if applies), None)


def convert(s):
    """Converts an architecture of the source to a preset."""
    family, added = s["family"], ["norm_eps"]
    eps, base = PUBLIC.get(s["name"], PUBLIC.get(family, (None, None)))
    activation = s["mlp"]
    if activation == "gelu":
        activation = GELU.get(family, "gelu_tanh")
        added.append("activation")
    m = {
        "name": s["name"], "arch": "olmo" if family == "olmo" else "llama" if s["pos"] == "rope" else "gpt2", "family": family,
        "layers": s["layers"], "hidden": s["hidden"], "heads": s["heads"], "kv_heads": s["kv_heads"],
        "head_dim": s["head_dim"], "ffn": s["ffn"], "vocab": s["vocab"], "max_seq": s["max_seq_pretrain"],
        "activation": activation, "norm": NORMS[s["norm"]], "norm_eps": eps,
        "position": s["pos"], "rope_base": base if s["pos"] == "rope" else None,
        "rope_scaling": ROPE_SCALING.get(s["name"]), "tied": bool(s["tied_embeddings"]),
        # In the source linear_bias includes q, k and v, the output and the MLP.
        "qkv_bias": s["qkv_bias"] or s["linear_bias"], "out_bias": s["linear_bias"], "mlp_bias": s["linear_bias"],
        "sources": s["sources"], "notes": " ".join(filter(None, (s["notes"], NOTES.get(s["name"])))),
    }
    if m["rope_base"]:
        added.append("rope_base")
    if m["rope_scaling"]:
        added.append("rope_scaling")
    if s["tied_embeddings"] is None:
        added.append("tied")
    if family in QK_NORM:
        m["qk_norm"] = True
    if family == "palm":
        m["parallel_block"] = True
    for field in ("sandwich_norm", "mla"):
        if s.get(field):
            m[field] = s[field]
    if s.get("window"):
        m.update(WINDOWS[s["window"]])
    if s["experts"]:
        m["experts"] = s["experts"]
        m.update({field: s[field] for field in MOE_FIELDS})
        m.update(ROUTERS.get(s["name"], {}))
    for field in ("params_total_published", "params_active_published"):
        if s[field]:
            m[field] = int(s[field])
    m["added"] = added if eps else [a for a in added if a != "norm_eps"]
    return m


def adapt(m):
    """What the source does not say about an architecture."""
    if m["family"] == "gemma2":
        m = {**m, **GEMMA2, **({"score_scale": 144 ** -0.5} if m["name"] == "gemma2-27b" else {})}
    if m["name"] == "qwen2-57b-a14b":
        m = {**m, **QWEN2_MOE}
    if m["family"] == "gpt-oss":
        m = {**m, **GPT_OSS, "notes": ""}
        m["sources"] = m["sources"] + ["https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json"]
        m["added"] = m["added"] + ["rope_scaling", "max_seq", "biases", "sinks", "swiglu_limit"]
    if m.get("mla"):
        m = {**m, "arch": "deepseek", "head_dim": m["mla"]["qk_nope_head_dim"] + m["mla"]["qk_rope_head_dim"]}
    return {**m, "arch": "olmo"} if m["family"] == "olmo" else m


def finish(m):
    m["params"], m["params_active"] = parameter_count(m)
    why = obstacle(m)
    m["supported"] = why is None
    if why:
        m["unsupported"] = why
    return m


def make(source, output):
    with open(source, encoding="utf-8") as f:
        published = json.load(f)
    presets = [finish(m) for m in OWN]
    for s in published:
        m = finish(adapt(convert(s)))
        presets.append(m)
        for ours, theirs in (("params", "derived_params_total"), ("params_active", "derived_params_active")):
            if m[ours] != s[theirs]:
                print(f"{m['name']}: {ours} {m[ours]}, source {s[theirs]} ({m[ours] - s[theirs]:+d})")
    with open(output, "w", encoding="utf-8") as f:
        # One preset per line: diffs are readable, and the file stays short.
        f.write("[\n" + ",\n".join(json.dumps(m, ensure_ascii=False) for m in presets) + "\n]\n")
    return check(output)


def check(path):
    with open(path, encoding="utf-8") as f:
        presets = json.load(f)
    problems = []
    names = [m["name"] for m in presets]
    problems += [f"{n}: twice" for n in set(names) if names.count(n) > 1]
    for m in presets:
        fail = lambda text: problems.append(f"{m['name']}: {text}")
        if (m["params"], m["params_active"]) != parameter_count(m):
            fail(f"params {m['params']}, {m['params_active']} should be {parameter_count(m)}")
        if m["supported"] != (obstacle(m) is None) or m.get("unsupported") != obstacle(m):
            fail(f"supported should say: {obstacle(m) or 'true'}")
        if m["heads"] % m["kv_heads"]:
            fail("kv_heads does not divide heads")
        if m["supported"]:
            if m["norm_eps"] is None or (m["position"] == "rope" and m["rope_base"] is None):
                fail("a supported preset needs norm_eps and, with rotary positions, rope_base")
            if (m["arch"] == "gpt2") != (m["norm"] == "layernorm") or m["qkv_bias"] < m["mlp_bias"]:
                fail("its parts do not belong to one architecture")
            if m["head_dim"] % 2:
                fail("head_dim must be even")
        published = m.get("params_total_published")
        if published and abs(m["params"] / published - 1) > 0.05:
            fail(f"params {m['params']} are far from the published {published}")
    for text in problems:
        print(text, file=sys.stderr)
    print(f"{len(presets)} presets, {sum(m['supported'] for m in presets)} supported, {len(problems)} problems")
    return 1 if problems else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make")
    command.add_argument("source")
    command.add_argument("output")
    command = commands.add_parser("check")
    command.add_argument("file")
    args = parser.parse_args()
    return make(args.source, args.output) if args.command == "make" else check(args.file)


if __name__ == "__main__":
    sys.exit(main())
