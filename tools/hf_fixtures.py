#!/usr/bin/env python3
"""Writes tests/golden/huggingface/: tiny models saved by `transformers`, with tokens and the logits it
computes.

Needs torch, transformers and tokenizers; the test that reads the fixtures does not. Each folder is the
output of save_pretrained() plus expected.safetensors: tokens (I32) and logits (F32, one row per token).
"""
import os
import shutil
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, Gemma2Config, Gemma2ForCausalLM,
                          Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM, GPT2Config,
                          GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          MixtralConfig, MixtralForCausalLM, OlmoConfig, OlmoForCausalLM, OlmoeConfig, OlmoeForCausalLM, Olmo2Config,
                          Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM,
                          Phi3Config, Phi3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

ROOT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "golden", "huggingface")
TOKENS = 24

GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
LLAMA = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
SCALING = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}
ONE_KEY = {**LLAMA, "vocab_size": 307, "num_key_value_heads": 1}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
        "beta_slow": 0.25, "mscale": 2.0, "mscale_all_dim": 0.5}
GEMMA = {**LLAMA, "vocab_size": 307, "head_dim": 6, "pad_token_id": None}
GPT_OSS = {**LLAMA, "intermediate_size": 12, "head_dim": 6, "num_local_experts": 5, "num_experts_per_tok": 3}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
BY_TYPE = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
OLMO_YARN = {key: value for key, value in YARN.items() if not key.startswith("mscale")}

DEEPSEEK = {**LLAMA, "hidden_size": 24, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 12, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "pad_token_id": None}

DEEPSEEK_V2 = {**DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "rope_parameters": YARN}

# name: class, configuration, dtype on disk, file size, whether a tokenizer is included
MODELS = {
    "gpt2-tied": (GPT2LMHeadModel, GPT2Config(**GPT2, activation_function="gelu_new"), torch.float32, None, False),
    "gpt2-untied-sharded": (GPT2LMHeadModel, GPT2Config(**{**GPT2, "n_inner": 24}, activation_function="gelu", layer_norm_epsilon=1e-6,
                                                        tie_word_embeddings=False), torch.bfloat16, 6000, False),
    "llama-untied-scaled": (LlamaForCausalLM, LlamaConfig(**LLAMA, rms_norm_eps=1e-5, rope_parameters=SCALING,
                                                          tie_word_embeddings=False), torch.float32, None, False),
    "llama-tied-half": (LlamaForCausalLM, LlamaConfig(**{**LLAMA, "vocab_size": 259, "num_key_value_heads": 4}, head_dim=6,
                                                      tie_word_embeddings=True), torch.float16, 9000, True),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
                     torch.float32, None, False),
    "llama-attention-bias": (LlamaForCausalLM, LlamaConfig(**LLAMA, attention_bias=True, tie_word_embeddings=True),
                             torch.bfloat16, None, False),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2), torch.float32, None, False),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=6), torch.float32, None, False),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**LLAMA, head_dim=6, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12,
                                                      norm_topk_prob=True), torch.float32, None, False),
    "qwen3-moe-mixed": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**LLAMA, "num_hidden_layers": 3}, head_dim=8, num_experts=4, num_experts_per_tok=2,
                                                            moe_intermediate_size=12, norm_topk_prob=False, mlp_only_layers=[0],
                                                            tie_word_embeddings=True), torch.float32, None, False),
    # With one layer of experts the load-balancing losses of both sides are the same function.
    "qwen3-moe-balanced": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**LLAMA, head_dim=8, num_experts=6, num_experts_per_tok=3,
                                                               moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[0],
                                                               router_aux_loss_coef=0.75, output_router_logits=True),
                           torch.float32, None, False),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**LLAMA, rope_parameters=LINEAR), torch.float32, None, False),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**ONE_KEY, head_dim=6, tie_word_embeddings=True), torch.float32, None, False),
    "mistral": (MistralForCausalLM, MistralConfig(**{**ONE_KEY, "hidden_size": 12}, head_dim=6, sliding_window=None), torch.float32, None,
                False),
    # The window of the first is as long as the sequences, so it has no effect.
    "mistral-window": (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=64, tie_word_embeddings=True, rope_parameters=LINEAR),
                       torch.float32, None, False),
    "qwen3-attention-bias": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=6, attention_bias=True, tie_word_embeddings=True,
                                                           rope_parameters=LINEAR), torch.float32, None, False),
    "qwen3-moe-attention-bias": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**LLAMA, head_dim=6, num_experts=4, num_experts_per_tok=2,
                                                                     moe_intermediate_size=12, attention_bias=True),
                                 torch.float32, None, False),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**LLAMA, attention_bias=True, rope_parameters=LINEAR), torch.float32, None, False),
    "qwen2-yarn": (Qwen2ForCausalLM, Qwen2Config(**{**LLAMA, "hidden_size": 32, "intermediate_size": 24}, tie_word_embeddings=True,
                                                 rope_parameters=YARN), torch.float32, None, False),
    "mistral-short-window": (MistralForCausalLM, MistralConfig(**ONE_KEY, head_dim=6, sliding_window=5, tie_word_embeddings=True),
                             torch.float32, None, False),
    "mixtral-window": (MixtralForCausalLM, MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
                       torch.float32, None, False),
    "qwen2-windows": (Qwen2ForCausalLM, Qwen2Config(**{**LLAMA, "num_hidden_layers": 3}, use_sliding_window=True, sliding_window=4,
                                                    max_window_layers=1), torch.float32, None, False),
    "qwen3-windows": (Qwen3ForCausalLM, Qwen3Config(**{**LLAMA, "num_hidden_layers": 4}, head_dim=6, use_sliding_window=True,
                                                    sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2,
                                                    tie_word_embeddings=True), torch.float32, None, False),
    "llama-mlp-bias": (LlamaForCausalLM, LlamaConfig(**LLAMA, mlp_bias=True, tie_word_embeddings=True), torch.float32, None, False),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**{**LLAMA, "intermediate_size": 12}, num_experts=6, num_experts_per_tok=3, clip_qkv=0.9),
              torch.float32, None, False),
    "olmoe-one-key": (OlmoeForCausalLM, OlmoeConfig(**{**ONE_KEY, "hidden_size": 24, "intermediate_size": 12}, num_experts=4,
                                                    num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True,
                                                    attention_bias=True), torch.float32, None, False),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig(**LLAMA, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12,
                                                      shared_expert_intermediate_size=20), torch.float32, None, False),
    "qwen2-moe-windows": (Qwen2MoeForCausalLM, Qwen2MoeConfig(**{**ONE_KEY, "num_hidden_layers": 3}, head_dim=6, num_experts=4,
                                                              num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[0],
                                                              shared_expert_intermediate_size=12, norm_topk_prob=True, qkv_bias=False,
                                                              use_sliding_window=True, sliding_window=5, tie_word_embeddings=True),
                          torch.float32, None, False),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**{**LLAMA, "num_hidden_layers": 4}, pad_token_id=None, rope_parameters=LINEAR),
                torch.float32, None, False),
    "smollm3-windows": (SmolLM3ForCausalLM, SmolLM3Config(**{**ONE_KEY, "num_hidden_layers": 3}, head_dim=6, pad_token_id=None,
                                                          no_rope_layers=[1, 1, 0], use_sliding_window=True, sliding_window=5,
                                                          layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                                                          mlp_bias=True, tie_word_embeddings=False),
                        torch.float32, None, False),
    "phi3": (Phi3ForCausalLM, Phi3Config(**LLAMA, pad_token_id=None, tie_word_embeddings=True, sliding_window=6), torch.float32, None,
             False),
    "phi3-partial": (Phi3ForCausalLM, Phi3Config(**{**ONE_KEY, "hidden_size": 32}, pad_token_id=None, partial_rotary_factor=0.75),
                     torch.float32, None, False),
    "phi3-longrope": (Phi3ForCausalLM, Phi3Config(**{**ONE_KEY, "hidden_size": 32, "max_position_embeddings": 64}, pad_token_id=None,
                                                  original_max_position_embeddings=9, partial_rotary_factor=0.75, rope_parameters={
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.05, 1.9, 4.2]}),
                      torch.float32, None, False),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**{**GEMMA, "num_hidden_layers": 3}, query_pre_attn_scalar=9, sliding_window=5,
                                               attn_logit_softcapping=1.5, final_logit_softcapping=2.0), torch.float32, None, False),
    "gemma2-full": (Gemma2ForCausalLM, Gemma2Config(**{**GEMMA, "num_key_value_heads": 1}, query_pre_attn_scalar=6, attention_bias=True,
                                                    layer_types=["full_attention"] * 2, attn_logit_softcapping=None,
                                                    final_logit_softcapping=None, hidden_activation="gelu",
                                                    tie_word_embeddings=False), torch.float32, None, False),
    "olmo": (OlmoForCausalLM, OlmoConfig(**LLAMA, pad_token_id=None, tie_word_embeddings=True, attention_bias=True), torch.float32, None,
             False),
    "olmo-clipped": (OlmoForCausalLM, OlmoConfig(**{**ONE_KEY, "hidden_size": 24}, pad_token_id=None, clip_qkv=0.5), torch.float32, None,
                     False),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(**{**GPT_OSS, "num_hidden_layers": 3}, sliding_window=5, swiglu_limit=0.7,
                                                rope_parameters={**YARN, "truncate": False, "mscale": None, "mscale_all_dim": None}),
                torch.float32, None, False),
    "gpt-oss-odd": (GptOssForCausalLM, GptOssConfig(**{**GPT_OSS, "vocab_size": 307, "num_key_value_heads": 1, "hidden_size": 14,
                                                       "intermediate_size": 9, "num_experts_per_tok": 1},
                                                    layer_types=["full_attention"] * 2, attention_bias=False, tie_word_embeddings=True,
                                                    swiglu_alpha=1.1, swiglu_limit=0.4, rope_parameters=LINEAR),
                    torch.float32, None, False),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**LLAMA, pad_token_id=None, tie_word_embeddings=True, attention_bias=True), torch.float32, None, False),
    "olmo2-one-key": (Olmo2ForCausalLM, Olmo2Config(**{**ONE_KEY, "hidden_size": 24}, pad_token_id=None, rms_norm_eps=1e-6), torch.float32, None, False),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 6, "intermediate_size": 16, "num_key_value_heads": 1},
                                                   query_pre_attn_scalar=9, sliding_window=5, rope_parameters=BY_TYPE), torch.float32, None,
               False),
    "gemma3-capped": (Gemma3ForCausalLM, Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 3}, query_pre_attn_scalar=6, sliding_window=4,
                                                          layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                                          attention_bias=True, final_logit_softcapping=2.0, hidden_activation="gelu",
                                                          tie_word_embeddings=False), torch.float32, None, False),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config(**{**LLAMA, "num_hidden_layers": 4}, pad_token_id=None, sliding_window=5,
                                            rope_parameters={**BY_TYPE, "full_attention": OLMO_YARN}), torch.float32, None, False),
    "olmo3-one-key": (Olmo3ForCausalLM, Olmo3Config(**{**ONE_KEY, "hidden_size": 24, "num_hidden_layers": 3}, pad_token_id=None,
                                                    tie_word_embeddings=True, attention_bias=True, sliding_window=7), torch.float32, None,
                      False),
    # rms_norm_eps is not that of compressed queries and keys. Groups are ranked by two experts,
    # which is not 3 of 2 groups.
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**DEEPSEEK, rms_norm_eps=1e-3, rope_parameters={**YARN, "mscale_all_dim": 0.7}),
                    torch.float32, None, False),
    "deepseek-v3-whole-queries": (DeepseekV3ForCausalLM, DeepseekV3Config(**{**DEEPSEEK, "q_lora_rank": None, "v_head_dim": 14, "n_group": 1,
                                                                            "topk_group": 1, "n_shared_experts": 2, "vocab_size": 307},
                                                                         norm_topk_prob=False, rope_interleave=False,
                                                                         routed_scaling_factor=1.7, tie_word_embeddings=True,
                                                                         num_mtp_layers=0), torch.float32, None, False),
    "deepseek-v2": (DeepseekV2ForCausalLM, DeepseekV2Config(**DEEPSEEK_V2), torch.float32, None, False),
    "deepseek-v2-whole-queries": (DeepseekV2ForCausalLM, DeepseekV2Config(**{**DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy",
                                                                            "n_group": None, "topk_group": None, "v_head_dim": 4,
                                                                            "n_shared_experts": 2}, tie_word_embeddings=True),
                                  torch.float32, None, False),
}
DENSE = ("mistral-short-window", "qwen2-windows", "qwen3-windows", "qwen2", "qwen2-tied", "qwen2-yarn", "mistral", "mistral-window",
         "qwen3-attention-bias", "llama-linear", "llama-mlp-bias", "gemma2", "gemma2-full", "olmo", "olmo-clipped", "olmo2", "olmo2-one-key",
         "gemma3", "gemma3-capped", "olmo3", "olmo3-one-key", "smollm3", "smollm3-windows", "phi3",
         "phi3-partial", "phi3-longrope")
WITH_GRADIENTS = ("mixtral", "mixtral-window", "qwen3", "qwen3-moe", "qwen3-moe-mixed", "qwen3-moe-balanced",
                  "qwen3-moe-attention-bias", "olmoe", "olmoe-one-key", "qwen2-moe", "qwen2-moe-windows", "gpt-oss", "gpt-oss-odd",
                  "deepseek-v3", "deepseek-v3-whole-queries", "deepseek-v2", "deepseek-v2-whole-queries", *DENSE)
PREDICTORS = ("deepseek-v3",)  # gets a module for multi-token prediction, which transformers ignores


def byte_tokenizer():
    """Bytes, two merges and a special token: 259 entries."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab["th"], vocab["the"] = 256, 257
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def their_names(kind, name, gradient):
    """A gradient under the names in the files: separate experts, separate gate and up."""
    mixtral = kind is MixtralForCausalLM
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." not in name or kind is GptOssForCausalLM:
        return {name: gradient}
    base, out = name[:name.index(".experts.")] + ".experts.", {}
    for e in range(gradient.shape[0]):
        if name.endswith("gate_up_proj"):
            gate, up = gradient[e].chunk(2)
            out[f"{base}{e}.{'w1' if mixtral else 'gate_proj'}.weight"] = gate
            out[f"{base}{e}.{'w3' if mixtral else 'up_proj'}.weight"] = up
        else:
            out[f"{base}{e}.{'w2' if mixtral else 'down_proj'}.weight"] = gradient[e]
    return out


def choice_margin(config, logits, bias):
    """The smallest difference in a router's choices. DeepSeek ranks groups by their best (V2) or two best, then experts."""
    if not getattr(config, "n_group", None):
        top = logits.softmax(-1).topk(config.num_experts_per_tok + 1).values
        return (top[:, -2] - top[:, -1]).min().item()
    scores, margin = logits.softmax(-1) if bias is None else logits.sigmoid() + bias, 1.0
    groups = scores.view(len(scores), config.n_group, -1)
    best = groups.topk(1 if bias is None else 2).values.sum(-1).sort(descending=True)
    if config.topk_group < config.n_group:
        margin = (best.values[:, config.topk_group - 1] - best.values[:, config.topk_group]).min().item()
    chosen = groups.gather(1, best.indices[:, :config.topk_group, None].expand(-1, -1, groups.shape[2])).flatten(1)
    top = chosen.topk(config.num_experts_per_tok + 1).values
    return min(margin, (top[:, -2] - top[:, -1]).min().item())


def add_predictor(folder, config):
    """One tensor of a block behind the last, as released weights have them."""
    from safetensors.torch import load_file
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    tensors[f"model.layers.{config.num_hidden_layers}.eh_proj.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size)
    save_file(tensors, path, metadata={"format": "pt"})


def gradients(model, kind, tokens):
    """Gradients of the mean next-token loss, in float64, and the smallest margin of an expert choice. With
    output_router_logits in the configuration they include the load-balancing loss; "loss" does not."""
    model = model.to(torch.float64)
    model.config._experts_implementation = "eager"  # PyTorch's grouped GEMM does not support float64
    balanced = getattr(model.config, "output_router_logits", False)
    output = model(tokens[None, :-1], **({"output_router_logits": True} if hasattr(model.config, "num_experts_per_tok") else {}))
    loss = torch.nn.functional.cross_entropy(output.logits[0], tokens[1:])
    (loss + model.config.router_aux_loss_coef * output.aux_loss if balanced else loss).backward()
    margin = 1.0
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for i, logits in enumerate(getattr(output, "router_logits", None) or ()):
        margin = min(margin, choice_margin(model.config, logits, biases[i] if biases else None))
    out = {"loss": loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            out.update({"grad." + n: g.float().contiguous() for n, g in their_names(kind, name, parameter.grad).items()})
    return out, margin


def make(name, kind, config, dtype, shard, with_tokenizer):
    torch.manual_seed(sum(map(ord, name)))
    folder = os.path.join(ROOT, name)
    shutil.rmtree(folder, ignore_errors=True)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initial values are too uniform: norms are 1, biases 0
            parameter.add_(0.2 * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model = model.to(dtype)
    options = {"max_shard_size": shard} if shard else {}
    model.save_pretrained(folder, **options)
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        os.remove(os.path.join(folder, "generation_config.json"))
    if name in PREDICTORS:
        add_predictor(folder, config)
    if with_tokenizer:
        byte_tokenizer().save(os.path.join(folder, "tokenizer.json"))
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()  # the weights on disk, computed in fp32
    model.config._experts_implementation = "eager"  # PyTorch's grouped GEMM needs aligned widths
    tokens = torch.randint(0, config.vocab_size, (TOKENS,))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    expected = {"tokens": tokens.to(torch.int32), "logits": logits.float().contiguous()}
    if name in WITH_GRADIENTS:
        more, margin = gradients(model, kind, tokens)
        expected.update(more)
        print(f"{name}: the smallest margin of an expert choice is {margin:.1e}")
        assert margin > 1e-4
    save_file(expected, os.path.join(folder, "expected.safetensors"))
    size = sum(os.path.getsize(os.path.join(folder, file)) for file in os.listdir(folder))
    print(f"{name}: {len(os.listdir(folder))} files, {size} bytes, logits up to {logits.abs().max():.2f}")


def main():
    wanted = sys.argv[1:] or list(MODELS)
    for name in wanted:
        make(name, *MODELS[name])


if __name__ == "__main__":
    main()
