#!/usr/bin/env python3
"""Exports models that this program trained and compares their logits with those of `transformers`.

Usage: hf_roundtrip.py PROGRAM. Needs torch, transformers and safetensors. Prints a table and fails above 1e-4.
For each model: a few steps of training, `quadrille convert` to fp32,
AutoModelForCausalLM.from_pretrained, and both programs' logits on the same tokens (`quadrille eval
--logits`). If there is a tokenizer, AutoTokenizer must give the same tokens.
"""
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

TEXT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples", "data", "king-james.txt")
COMMON = ["data.seq=96", "train.global_batch=8", "train.steps=20", "train.lr=5e-3", "--save-every", "20"]
MODELS = {
    "GPT-2, tied": ["model.arch=gpt2", "model.layers=3", "model.hidden=64", "model.heads=4", "model.dropout=0.1"],
    "GPT-2, untied, exact GELU": ["model.arch=gpt2", "model.layers=2", "model.hidden=48", "model.heads=3", "model.ffn=80",
                                  "model.activation=gelu", "model.tied=false", "model.max_seq=128"],
    "Llama, untied, grouped heads": ["model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=2"],
    "Llama, tied, tokenizer": ["model.layers=2", "model.hidden=64", "model.heads=4", "model.tied=true", "model.vocab=400",
                               "model.norm_eps=1e-6", "model.head_dim=24"],
    "Llama, scaled rotary": ["model.layers=2", "model.hidden=64", "model.heads=2", "model.rope_base=500000",
                             "model.rope_scaling=llama3", "model.rope_original_seq=32"],
    "Llama, biases of q, k, v": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.qkv_bias=true"],
    "Llama, biases of output and MLP": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.out_bias=true",
                                        "model.mlp_bias=true"],
    "Llama, biases of the MLP": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.mlp_bias=true"],
    "Llama, biases of attention": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.qkv_bias=true", "model.out_bias=true"],
    "Qwen3, biases of q, k, v": ["model.preset=qwen3-tiny", "model.vocab=256", "model.qkv_bias=true"],
    "Qwen3, biases of attention": ["model.preset=qwen3-tiny", "model.vocab=256", "model.qkv_bias=true", "model.out_bias=true"],
    "Qwen3-MoE, biases of attention": ["model.preset=qwen3-moe-tiny", "model.vocab=256", "model.qkv_bias=true", "model.out_bias=true"],
    "Mixtral, no balance": ["model.preset=mixtral-tiny", "model.vocab=256", "model.aux_loss=0"],
    "Qwen3-MoE, balanced": ["model.preset=qwen3-moe-tiny", "model.vocab=256", "model.aux_loss=0.01", "model.balance=batch"],
}


def call(*arguments):
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(arguments)}\n{result.stdout}{result.stderr}")


def difference(program, folder, keys, shard_mb):
    run, exported, logits = (os.path.join(folder, name) for name in ("run", "hf", "logits.safetensors"))
    call(program, "train", f"data.path={TEXT}", *COMMON, *keys, "--dir", run)
    call(program, "convert", run, exported, "--shard-mb", shard_mb)
    call(program, "eval", run, TEXT, "--seq", "96", "--logits", logits)
    ours = load_file(logits)
    model, info = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            sys.exit(f"transformers: {kind}: {info[kind]}")
    with torch.no_grad():
        theirs = model.eval()(ours["tokens"].long()[None]).logits[0]
    if os.path.exists(os.path.join(exported, "tokenizer.json")):
        with open(TEXT, encoding="utf-8") as file:
            text = file.read(4000)
        tokens = AutoTokenizer.from_pretrained(exported)(text)["input_ids"][:len(ours["tokens"])]
        if tokens != ours["tokens"].tolist():
            sys.exit("transformers: the tokenizer gives different tokens")
    files = len([name for name in os.listdir(exported) if name.endswith(".safetensors")])
    return (theirs - ours["logits"]).abs().max().item(), ours["logits"].abs().max().item(), files


def main():
    program, worst = sys.argv[1], 0.0
    logging.set_verbosity_error()
    for i, (name, keys) in enumerate(MODELS.items()):
        with tempfile.TemporaryDirectory(prefix="quadrille-hf-") as folder:
            far, largest, files = difference(program, folder, keys, "0.1" if i % 2 else "0")
        worst = max(worst, far)
        print(f"{name:34} largest logit {largest:6.2f}  largest difference {far:.2e}  files {files}", flush=True)
    sys.exit(f"above 1e-4: {worst}" if worst > 1e-4 else 0)


if __name__ == "__main__":
    main()
