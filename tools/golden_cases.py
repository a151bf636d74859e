"""The models of the golden fixtures (golden.py): sizes, optimizers and what each of them exercises; the format of their files."""
import json
import struct

import numpy as np

STEPS, BATCH = 20, 4
AFTER = 5  # steps after which weights are saved
OPTIMIZER = {"name": "adamw", "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
MUON = {**OPTIMIZER, "name": "muon", "muon_momentum": 0.95, "muon_nesterov": True, "muon_steps": 5, "muon_lr": 5e-3, "lr": 3e-3,
        "muon_scale": "match_rms_adamw"}

GPT2 = {"family": "gpt2", "norm": "layernorm", "norm_eps": 1e-5, "position": "learned", "rope_base": None,
        "rope_scaling": None, "activation": "gelu_tanh", "qkv_bias": True, "out_bias": True,
        "mlp_bias": True, "packed": False}
LLAMA = {"family": "llama", "norm": "rmsnorm", "norm_eps": 1e-5, "position": "rope", "rope_base": 10000.0,
         "rope_scaling": None, "activation": "swiglu", "qkv_bias": False, "out_bias": False,
         "mlp_bias": False, "packed": False}

OLMO2 = {**LLAMA, "family": "olmo2", "norm_eps": 1e-6, "rope_base": 500000.0, "qk_norm": True, "qk_norm_over": "width"}
GEMMA2 = {**LLAMA, "family": "gemma2", "norm": "rmsnorm_plus_one", "norm_eps": 1e-6, "activation": "geglu", "embed_scaled": True,
          "score_softcap": 2.0, "logit_softcap": 9.0, "window": 5, "full_every": 2}
GEMMA3 = {**LLAMA, "family": "gemma3", "norm": "rmsnorm_plus_one", "norm_eps": 1e-6, "activation": "geglu", "embed_scaled": True,
          "qk_norm": True, "rope_base": 1000.0, "rope_local_base": 30.0, "window": 4, "full_every": 6}
OLMO3 = {**OLMO2, "window": 5, "full_every": 4}
GEMMAS = ("gemma2", "gemma3")
EXPERTS = {**OPTIMIZER, "eps": 1e-3, "lr": 4e-3}  # a smaller one magnifies the rounding of gradients of experts with few tokens
OLMO = {**LLAMA, "family": "olmo", "norm": "layernorm_plain", "clip_qkv": 0.0}
DEEPSEEK = {**LLAMA, "family": "deepseek", "norm_eps": 1e-4}
LATENT_EPS = 1e-6  # of the norms of compressed queries and keys
QWEN2 = {**LLAMA, "norm_eps": 1e-6, "qkv_bias": True}
GPT_OSS = {**LLAMA, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "sinks": True, "activation": "swiglu_clamped",
           "swiglu_alpha": 1.702, "swiglu_limit": 1.0, "router_logit_bias": True}
LINEAR = {"type": "linear", "factor": 2.5}
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25, "truncate": True, "original_max_seq": 18}


def dims(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq, max_seq):
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "ffn": ffn,
            "vocab": vocab, "max_seq": max_seq, "seq": seq, "batch": BATCH, "steps": STEPS, "optimizer": OPTIMIZER}


def experts(count, topk, ffn, shared=0, dense=0, normalised=True):
    """The fields of experts; shared: width of a shared expert with a gate."""
    more = {"shared_experts": 1, "shared_expert_ffn": shared, "shared_gate": True} if shared else {}
    return {"experts": count, "topk": topk, "moe_ffn": ffn, "dense_layers": dense, "router_normalised": normalised, "optimizer": EXPERTS, **more}


# Odd vocabularies and sequence lengths on purpose; some heads * head_dim differ from hidden;
# max_seq may exceed seq. The base and original length of the scaled case put its frequencies in all
# three regimes (kept, blended, divided). Adam is insensitive to gradients that are all clipped
# alike: one case has a limit that only some of its steps exceed. Muon's GPT-2 has no bias on q, k
# and v: the key's gradient would be rounding noise, which Adam turns into weights.
CASES = {
    "gpt2-tied": {**GPT2, **dims(2, 32, 4, 4, 8, 128, 61, 16, 24), "tied": True},
    "gpt2-untied-gelu": {**GPT2, **dims(3, 32, 2, 2, 16, 96, 97, 17, 17), "tied": False, "activation": "gelu"},
    "llama-mha": {**LLAMA, **dims(2, 48, 3, 3, 16, 80, 73, 20, 20), "tied": False,
                  "optimizer": {**OPTIMIZER, "clip": 3.1}},
    "llama-gqa-scaled": {**LLAMA, **dims(3, 40, 4, 2, 8, 64, 89, 24, 32), "tied": False, "rope_base": 100.0,
                         "rope_scaling": {"type": "llama3", "factor": 4.0, "low_freq_factor": 0.5,
                                          "high_freq_factor": 2.0, "original_max_seq": 16}},
    "llama-tied": {**LLAMA, **dims(2, 32, 4, 1, 8, 88, 67, 19, 32), "tied": True},
    "llama-packed": {**LLAMA, **dims(2, 32, 4, 2, 16, 64, 83, 24, 24), "tied": False, "packed": True},
    "llama-qkv-bias": {**LLAMA, **dims(2, 32, 4, 2, 8, 64, 71, 18, 18), "tied": False, "qkv_bias": True},
    "llama-muon": {**LLAMA, **dims(2, 32, 4, 2, 8, 48, 61, 16, 16), "tied": False, "optimizer": MUON},
    "gpt2-muon": {**GPT2, **dims(2, 24, 2, 2, 8, 64, 53, 17, 17), "tied": True, "qkv_bias": False,
                  "optimizer": {**MUON, "muon_nesterov": False, "muon_lr": 0.02, "muon_scale": "original", "clip": 3.0}},
    "qwen2-tied-linear": {**QWEN2, **dims(2, 32, 4, 1, 8, 56, 307, 18, 18), "tied": True, "rope_scaling": LINEAR},
    "qwen2-untied": {**QWEN2, **dims(2, 40, 4, 2, 12, 48, 307, 17, 24), "tied": False},
    "mistral-linear": {**LLAMA, **dims(2, 32, 4, 2, 12, 56, 307, 17, 17), "tied": False, "hf_type": "mistral", "rope_scaling": LINEAR},
    "mistral-tied": {**LLAMA, **dims(2, 24, 3, 1, 8, 40, 307, 19, 32), "tied": True, "hf_type": "mistral"},
    "llama-attention-bias": {**LLAMA, **dims(2, 32, 4, 1, 8, 48, 307, 16, 16), "tied": True, "qkv_bias": True, "out_bias": True,
                             "rope_scaling": LINEAR},
    "llama-mlp-bias": {**LLAMA, **dims(2, 32, 4, 2, 8, 40, 307, 16, 16), "tied": True, "mlp_bias": True},
    "llama-biases": {**LLAMA, **dims(2, 24, 2, 2, 10, 40, 307, 16, 16), "tied": True, "qkv_bias": True, "out_bias": True,
                     "mlp_bias": True},
    "qwen2-yarn": {**QWEN2, **dims(2, 32, 2, 1, 16, 40, 307, 18, 72), "tied": True, "rope_base": 100.0, "rope_scaling": YARN},
    "llama-yarn": {**LLAMA, **dims(2, 32, 2, 1, 12, 48, 307, 18, 72), "tied": True, "rope_base": 100.0,
                   "rope_scaling": {**YARN, "truncate": False, "attention_factor": 1.25, "beta_fast": 3.0, "beta_slow": 0.5}},
    "mistral-window": {**LLAMA, **dims(2, 24, 4, 1, 6, 32, 307, 29, 32), "tied": False, "hf_type": "mistral", "window": 5},
    "mistral-window-packed": {**LLAMA, **dims(2, 24, 4, 2, 8, 32, 307, 30, 30), "tied": True, "hf_type": "mistral", "window": 7,
                              "packed": True},
    "qwen2-windows": {**QWEN2, **dims(5, 16, 2, 2, 10, 24, 307, 23, 23), "tied": True, "window": 4, "window_from": 1, "full_every": 3},
    "llama-dynamic": {**LLAMA, **dims(2, 24, 4, 1, 10, 32, 307, 22, 13), "tied": True, "rope_base": 100.0,
                      "rope_scaling": {"type": "dynamic", "factor": 3.0, "original_max_seq": 13}},
    # Every third layer without positions; the transformers counterpart is SmolLM3.
    "llama-nope": {**LLAMA, **dims(3, 24, 4, 1, 10, 24, 307, 22, 22), "tied": True, "nope_every": 3, "window": 6, "window_from": 1},
    "llama-local-base": {**LLAMA, **dims(3, 24, 4, 2, 12, 32, 307, 22, 22), "tied": True, "window": 6, "full_every": 2,
                         "rope_local_base": 30.0, "rope_fraction": 0.5, "rope_scaling": LINEAR},
    "llama-softcap": {**LLAMA, **dims(2, 24, 4, 2, 6, 32, 307, 21, 21), "tied": True, "window": 6, "full_every": 2, "score_softcap": 0.8,
                      "score_scale": 0.9},
    "olmo2-untied": {**OLMO2, **dims(2, 32, 4, 2, 10, 56, 307, 18, 18), "tied": False},
    "olmo2-tied-bias": {**OLMO2, **dims(2, 30, 3, 1, 10, 40, 307, 17, 24), "tied": True, "qkv_bias": True, "out_bias": True},
    "olmo-clipped": {**OLMO, **dims(2, 32, 4, 2, 10, 56, 307, 18, 18), "tied": False, "clip_qkv": 0.6},
    "olmo-tied-bias": {**OLMO, **dims(2, 30, 3, 1, 10, 40, 307, 17, 24), "tied": True, "qkv_bias": True, "out_bias": True},
    "gemma2-tied": {**GEMMA2, **dims(3, 32, 4, 2, 10, 48, 307, 18, 24), "tied": True, "score_scale": 0.25,
                    "optimizer": {**OPTIMIZER, "lr": 4e-3}},
    "gemma2-untied": {**GEMMA2, **dims(2, 24, 4, 1, 6, 32, 307, 17, 17), "tied": False, "activation": "geglu_exact", "window": 0,
                      "full_every": 0, "score_softcap": 0.0, "logit_softcap": 0.0},
    "gemma3-tied": {**GEMMA3, **dims(6, 24, 4, 1, 6, 24, 307, 19, 24), "tied": True, "score_scale": 0.25, "rope_scaling": LINEAR,
                    "optimizer": {**OPTIMIZER, "lr": 4e-4}},
    "gemma3-untied-bias": {**GEMMA3, **dims(3, 32, 4, 2, 10, 32, 307, 17, 17), "tied": False, "qkv_bias": True, "out_bias": True,
                           "activation": "geglu_exact", "logit_softcap": 6.0, "window": 5, "full_every": 2},
    "olmo3-untied": {**OLMO3, **dims(4, 24, 4, 2, 12, 32, 307, 18, 72), "tied": False, "rope_base": 100.0, "rope_local_base": 100.0,
                     "rope_scaling": YARN},
    "olmo3-tied-bias": {**OLMO3, **dims(3, 30, 3, 1, 10, 40, 307, 17, 24), "tied": True, "qkv_bias": True, "out_bias": True, "window": 7,
                        "full_every": 2},
    "mixtral-window": {**LLAMA, **dims(2, 16, 4, 1, 6, 24, 307, 17, 17), "tied": True, **experts(4, 2, 20), "window": 6},
    "qwen3-moe-mixed": {**LLAMA, **dims(3, 16, 2, 2, 10, 24, 307, 15, 24), "tied": True, "qk_norm": True, **experts(6, 3, 12, dense=1)},
    "olmoe-clipped": {**LLAMA, **dims(2, 24, 4, 2, 6, 12, 307, 16, 16), "tied": True, "qk_norm": True, "qk_norm_over": "width",
                      "clip_qkv": 0.9, **experts(5, 2, 12, normalised=False)},
    "qwen2-moe-untied": {**QWEN2, **dims(2, 16, 4, 2, 6, 24, 307, 17, 17), "tied": False, **experts(6, 2, 12, shared=20, normalised=False)},
    "qwen2-moe-windows": {**QWEN2, **dims(3, 16, 2, 1, 10, 24, 307, 19, 24), "tied": True, "window": 5, "full_every": 2,
                          **experts(4, 2, 12, shared=12, dense=1)},
    "phi3-partial": {**LLAMA, **dims(2, 24, 3, 1, 8, 32, 307, 17, 17), "tied": True, "hf_type": "phi3", "rope_fraction": 0.75, "window": 5},
    # Sequences longer than the original ones, and as long.
    "phi3-longrope": {**LLAMA, **dims(2, 24, 3, 1, 8, 32, 307, 17, 33), "tied": True, "hf_type": "phi3", "rope_fraction": 0.75,
                      "rope_base": 100.0, "rope_scaling": {"type": "longrope", "factor": 3.0, "original_max_seq": 11,
                                                           "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.05, 1.9, 4.2]}},
    "llama-longrope": {**LLAMA, **dims(2, 24, 4, 2, 10, 32, 307, 17, 17), "tied": False, "rope_base": 100.0, "window": 0,
                       "rope_scaling": {"type": "longrope", "factor": 2.0, "original_max_seq": 17, "attention_factor": 1.3,
                                        "short_factor": [1.0, 1.2, 0.9, 1.6, 2.5], "long_factor": [3.0, 1.0, 2.0, 5.0, 7.0]}},
    # Limits that many gates exceed.
    "gpt-oss": {**GPT_OSS, **dims(3, 22, 4, 2, 10, 12, 307, 22, 72), "tied": False, **experts(5, 3, 12), "window": 5, "full_every": 2,
                "rope_base": 100.0, "rope_scaling": {**YARN, "truncate": False, "beta_fast": 3.0, "beta_slow": 0.5},
                "optimizer": {**EXPERTS, "lr": 6e-3}},
    "gpt-oss-tied": {**GPT_OSS, **dims(2, 22, 3, 1, 12, 14, 307, 18, 18), "tied": True, **experts(4, 1, 14), "qkv_bias": False,
                     "out_bias": False, "swiglu_limit": 0.6, "swiglu_alpha": 1.1, "optimizer": {**EXPERTS, "lr": 1e-2}},
    "deepseek-dense": {**DEEPSEEK, **dims(2, 32, 4, 4, 10, 48, 307, 18, 72), "tied": False, "rope_base": 100.0,
                       "rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.8},
                       "mla": {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 7}},
    # Experts amplify rounding: a larger epsilon keeps Adam from turning it into weights.
    "deepseek-experts": {**DEEPSEEK, **dims(3, 24, 3, 3, 12, 32, 307, 17, 24), "tied": True,
                         "mla": {"kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 14, "rope_interleave": False},
                         "experts": 8, "topk": 3, "moe_ffn": 10, "shared_experts": 2, "dense_layers": 1, "router": "sigmoid",
                         "router_scale": 1.7, "router_groups": 4, "router_top_groups": 2, "router_group_best": 2,
                         "optimizer": {**OPTIMIZER, "eps": 1e-3}},
    "deepseek-mtp": {**DEEPSEEK, **dims(2, 20, 3, 3, 12, 32, 307, 17, 24), "tied": False, "mtp_modules": 1, "mtp_weight": 0.7,
                     "mla": {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
                     "experts": 4, "topk": 2, "moe_ffn": 10, "shared_experts": 1, "dense_layers": 1, "router": "sigmoid",
                     "router_scale": 1.7, "router_groups": 2, "router_top_groups": 2, "router_group_best": 1,
                     "optimizer": {**OPTIMIZER, "eps": 1e-3, "lr": 7e-3}},
    "deepseek-mtp-packed": {**DEEPSEEK, **dims(2, 20, 2, 2, 10, 24, 307, 18, 24), "tied": True, "packed": True, "mtp_modules": 2,
                            "mtp_weight": 0.5, "optimizer": {**OPTIMIZER, "eps": 1e-3, "lr": 7e-3},
                            "mla": {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}},
    "llama-qk-clip": {**LLAMA, **dims(2, 24, 4, 2, 6, 32, 307, 17, 17), "tied": True, "qkv_bias": True,
                      "optimizer": {**OPTIMIZER, "qk_clip": 3.0}},
    "deepseek-muon-qk-clip": {**DEEPSEEK, **dims(2, 24, 3, 3, 10, 32, 61, 18, 24), "tied": False,
                              "mla": {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
                              "optimizer": {**MUON, "qk_clip": 3.0}},
    "deepseek-mtp-qk-clip": {**DEEPSEEK, **dims(2, 20, 3, 3, 12, 24, 61, 18, 24), "tied": False, "mtp_modules": 2, "mtp_weight": 0.5,
                             "mla": {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
                             "optimizer": {**OPTIMIZER, "eps": 1e-3, "lr": 7e-3, "qk_clip": 3.0}},
}


# Safetensors.

DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "I32": np.dtype("<i4")}


def save(path, tensors, metadata):
    # Wide types first, header padded to 8 bytes: every tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header, offset = {"__metadata__": metadata}, 0
    for name in order:
        t = tensors[name]
        dtype = next(k for k, v in DTYPES.items() if v == t.dtype)
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            f.write(np.ascontiguousarray(tensors[name]).tobytes())


def load(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + length])
    metadata = header.pop("__metadata__")
    body = raw[8 + length:]
    return metadata, {name: np.frombuffer(body[t["data_offsets"][0]:t["data_offsets"][1]], DTYPES[t["dtype"]])
                      .reshape(t["shape"]) for name, t in header.items()}
