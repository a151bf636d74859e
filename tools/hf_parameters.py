#!/usr/bin/env python3
"""Compares the parameter counts of the presets with those of `transformers`.

Usage: hf_parameters.py [--write] [NAME ...]. Needs torch and transformers. Builds every preset of
data/models.json that can be trained and exported as a model of `transformers`, on the meta device, so
without its memory. --write adds the counts to tests/golden/parameters.json, which the tests compare.
"""
import json
import os
import sys

import torch
import transformers
from golden import hf_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATH = os.path.join(ROOT, "data", "models.json")
FIXTURE = os.path.join(ROOT, "tests", "golden", "parameters.json")


def their_model(m):
    """The same model in `transformers`; None if it has none."""
    if m["name"] == "deepseek-v2-lite":
        m["mla"].setdefault("q_lora_rank", None)
        kind = dict(n_group=1, topk_group=1, num_experts_per_tok=m["topk"], n_routed_experts=m["experts"], intermediate_size=m["ffn"],
                    moe_intermediate_size=m["moe_ffn"], n_shared_experts=m["shared_experts"], first_k_dense_replace=m["dense_layers"])
        return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(
            vocab_size=m["vocab"], hidden_size=m["hidden"], num_hidden_layers=m["layers"], num_attention_heads=m["heads"],
            num_key_value_heads=m["kv_heads"], **m["mla"], **kind))
    if not m.get("experts") or m.get("mla"):
        return hf_model({"router_groups": 1, "router_top_groups": 1, **m, "family": m["arch"]})
    if (m.get("shared_experts") and not m.get("shared_gate")) or m.get("router") or m["dense_layers"]:
        return None
    if m.get("sinks"):
        return hf_model({**m, "family": m["arch"]})
    kind = "Qwen2Moe" if m.get("shared_gate") else "Olmoe" if m.get("qk_norm_over") == "width" else "Qwen3Moe" if m.get("qk_norm") else "Mixtral"
    options = dict(
        vocab_size=m["vocab"], hidden_size=m["hidden"], intermediate_size=m["moe_ffn"], num_hidden_layers=m["layers"],
        num_attention_heads=m["heads"], num_key_value_heads=m["kv_heads"], head_dim=m["head_dim"], tie_word_embeddings=m["tied"],
        num_experts_per_tok=m["topk"])
    options.update({"num_local_experts": m["experts"]} if kind == "Mixtral" else
                   {"num_experts": m["experts"], "moe_intermediate_size": m["moe_ffn"]})
    if kind == "Qwen2Moe":
        options.update(shared_expert_intermediate_size=m["shared_expert_ffn"], qkv_bias=m["qkv_bias"])
    return getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**options))


def main():
    names = [name for name in sys.argv[1:] if name != "--write"]
    with open(PATH, encoding="utf-8") as file:
        presets = [m for m in json.load(file) if m["supported"] and (not names or m["name"] in names)]
    bad, counts = 0, {}
    for m in presets:
        with torch.device("meta"):
            model = their_model(m)
        if model is None:
            print(f"--  {m['name']:22} transformers has no such model")
            continue
        count = sum(p.numel() for p in model.parameters())
        count += sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))  # parameters here
        bad += count != m["params"]
        counts[m["name"]] = count
        print(f"{'ok ' if count == m['params'] else 'BAD'} {m['name']:22} {type(model).__name__:22} {m['params']:16,d} {count:16,d}", flush=True)
    if "--write" in sys.argv:
        known = {}
        if os.path.exists(FIXTURE):
            with open(FIXTURE, encoding="utf-8") as file:
                known = json.load(file)
        with open(FIXTURE, "w", encoding="utf-8") as file:
            file.write("{\n" + ",\n".join(f'"{name}": {count}' for name, count in sorted({**known, **counts}.items())) + "\n}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
