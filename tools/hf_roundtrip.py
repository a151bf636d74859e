#!/usr/bin/env python3
"""Exports models that this program trained and compares their logits with those of `transformers`.

Usage: hf_roundtrip.py PROGRAM [NAME ...], names or their beginnings. Needs torch, transformers and safetensors.
Prints a table and fails above 1e-4.
For each model: a few steps of training, `quadrille convert` to fp32,
AutoModelForCausalLM.from_pretrained, and both programs' logits on the same tokens (`quadrille eval
--logits`). If there is a tokenizer, AutoTokenizer must give the same tokens; if the tokens are bytes,
both must continue a text with the same 50 likeliest ones. The folder is then imported and exported
again: type and tensors must stay the same, bit by bit.
"""
import json
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
    "Llama, linear rotary": ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=1", "model.rope_scaling=linear",
                             "model.rope_factor=2.5"],
    "Mistral": ["model.preset=mistral-tiny", "model.vocab=256"],
    "Mistral, linear rotary": ["model.preset=mistral-tiny", "model.vocab=256", "model.head_dim=24", "model.kv_heads=1",
                               "model.rope_scaling=linear", "model.rope_factor=4", "model.tied=true"],
    "Mistral, window": ["model.preset=mistral-window-tiny", "model.vocab=256", "model.window=13", "model.kv_heads=1"],
    "Mixtral, window": ["model.preset=mixtral-tiny", "model.vocab=256", "model.window=21"],
    "Qwen2, windows": ["model.preset=qwen2-tiny", "model.vocab=256", "model.window=9", "model.window_from=2"],
    "Qwen3, windows": ["model.preset=qwen3-tiny", "model.vocab=256", "model.window=17", "model.full_every=2"],
    "Qwen2, tied": ["model.preset=qwen2-tiny", "model.vocab=256"],
    "Qwen2, untied, tokenizer, linear": ["model.preset=qwen2-tiny", "model.tied=false", "model.vocab=400", "model.head_dim=24",
                                         "model.rope_scaling=linear", "model.rope_factor=2.5"],
    "Qwen2, YaRN": ["model.preset=qwen2-tiny", "model.vocab=256", "model.rope_scaling=yarn", "model.rope_factor=4",
                    "model.rope_original_seq=24"],
    "Llama, YaRN": ["model.layers=2", "model.hidden=64", "model.heads=4", "model.rope_scaling=yarn", "model.rope_factor=4",
                    "model.rope_original_seq=24", "model.rope_beta_fast=4", "model.rope_beta_slow=0.5", "model.rope_truncate=false",
                    "model.rope_attention_factor=1.25"],
    "Qwen2, from Llama's biases": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.qkv_bias=true"],
    "Llama, biases of output and MLP": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.out_bias=true",
                                        "model.mlp_bias=true"],
    "Llama, biases of the MLP": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.mlp_bias=true"],
    "Llama, biases of attention": ["model.layers=2", "model.hidden=48", "model.heads=4", "model.qkv_bias=true", "model.out_bias=true"],
    "Qwen3, biases of q, k, v": ["model.preset=qwen3-tiny", "model.vocab=256", "model.qkv_bias=true"],
    "Qwen3, biases of attention": ["model.preset=qwen3-tiny", "model.vocab=256", "model.qkv_bias=true", "model.out_bias=true",
                                   "model.rope_scaling=linear"],
    "Qwen3-MoE, biases of attention": ["model.preset=qwen3-moe-tiny", "model.vocab=256", "model.qkv_bias=true", "model.out_bias=true"],
    "OLMo": ["model.preset=olmo-tiny", "model.clip_qkv=0.3"],
    "OLMo, tied, biases, two kv heads": ["model.preset=olmo-tiny", "model.tied=true", "model.qkv_bias=true", "model.out_bias=true",
                                         "model.kv_heads=2", "model.clip_qkv=0", "model.vocab=400"],
    "Gemma 2": ["model.preset=gemma2-tiny"],
    "Gemma 2, untied, no caps, full": ["model.preset=gemma2-tiny", "model.tied=false", "model.window=0", "model.score_softcap=0",
                                       "model.logit_softcap=0", "model.activation=geglu_exact", "model.vocab=400"],
    "SmolLM3": ["model.preset=smollm3-tiny"],
    "SmolLM3, untied, biases, windows": ["model.preset=smollm3-tiny", "model.tied=false", "model.qkv_bias=true", "model.nope_every=3",
                                         "model.window=9", "model.window_from=1", "model.kv_heads=1", "model.vocab=400"],
    "Phi-3": ["model.preset=phi3-tiny"],
    "Phi-3, tied, partial, window": ["model.preset=phi3-tiny", "model.tied=true", "model.rope_fraction=0.75", "model.window=9",
                                     "model.kv_heads=1", "model.vocab=400"],
    # Prompt and continuation are shorter and longer than the original sequences.
    "Phi-3, longrope": ["model.preset=phi3-tiny", "model.hidden=24", "model.head_dim=6", "model.rope_scaling=longrope", "model.rope_factor=4",
                        "model.rope_original_seq=24", "model.rope_short_factor=1,1.2,1.5", "model.rope_long_factor=1.1,2.5,4"],
    "Llama, longrope, short": ["model.layers=2", "model.hidden=24", "model.heads=4", "model.rope_scaling=longrope",
                               "model.rope_attention_factor=1.2", "model.rope_original_seq=96", "model.rope_short_factor=1,1.2,1.5",
                               "model.rope_long_factor=1.1,2.5,4"],
    "Qwen2-MoE": ["model.preset=qwen2-moe-tiny"],
    "Qwen2-MoE, tied, dense first, windows": ["model.preset=qwen2-moe-tiny", "model.tied=true", "model.first_dense=1", "model.window=9",
                                              "model.full_every=2", "model.kv_heads=1", "model.qkv_bias=false",
                                              "model.router_normalised=true", "model.vocab=400"],
    "Gemma 3": ["model.preset=gemma3-tiny"],
    "Gemma 3, untied, biases, linear, caps": ["model.preset=gemma3-tiny", "model.tied=false", "model.qkv_bias=true", "model.out_bias=true",
                                              "model.rope_scaling=linear", "model.logit_softcap=4", "model.score_scale=0.25",
                                              "model.vocab=400"],
    "Gemma 3, full": ["model.preset=gemma3-tiny", "model.window=0", "model.kv_heads=1"],
    "OLMo 3": ["model.preset=olmo3-tiny"],
    "OLMo 3, tied, biases, one base": ["model.preset=olmo3-tiny", "model.tied=true", "model.qkv_bias=true", "model.out_bias=true",
                                       "model.kv_heads=1", "model.rope_local_base=0", "model.full_every=2", "model.vocab=400"],
    "OLMoE": ["model.preset=olmoe-tiny", "model.clip_qkv=0.7"],
    "OLMoE, tied, one kv head": ["model.preset=olmoe-tiny", "model.tied=true", "model.kv_heads=1", "model.router_normalised=true",
                                 "model.aux_loss=0", "model.vocab=400"],
    "GPT-OSS": ["model.preset=gpt-oss-tiny"],
    "GPT-OSS, tied, no attention biases, one kv head": ["model.preset=gpt-oss-tiny", "model.tied=true", "model.qkv_bias=false",
                                                        "model.out_bias=false", "model.kv_heads=1", "model.window=0",
                                                        "model.swiglu_limit=0.5", "model.rope_scaling=none", "model.experts_per_token=1"],
    "OLMo 2": ["model.preset=olmo2-tiny"],
    "OLMo 2, tied, biases, one kv head": ["model.preset=olmo2-tiny", "model.tied=true", "model.qkv_bias=true", "model.out_bias=true",
                                          "model.kv_heads=1", "model.rope_scaling=linear", "model.vocab=400"],
    "Mixtral, no balance": ["model.preset=mixtral-tiny", "model.vocab=256", "model.aux_loss=0"],
    "Qwen3-MoE, balanced": ["model.preset=qwen3-moe-tiny", "model.vocab=256", "model.aux_loss=0.01", "model.balance=batch"],
}


PROMPT, GREEDY = "And the LORD said", 50


def call(*arguments):
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(arguments)}\n{result.stdout}{result.stderr}")
    return result.stdout


def type_of(folder):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return json.load(file)["model_type"]


def tensors_of(folder):
    return {key: value for name in os.listdir(folder) if name.endswith(".safetensors")
            for key, value in load_file(os.path.join(folder, name)).items()}


def check_again(program, folder, exported):
    """Import and export again: the same type, the same tensors."""
    run, again = os.path.join(folder, "imported"), os.path.join(folder, "again")
    call(program, "convert", exported, run)
    call(program, "convert", run, again)
    ours, theirs = tensors_of(again), tensors_of(exported)
    if type_of(again) != type_of(exported):
        sys.exit(f"{type_of(exported)} came back as {type_of(again)}")
    if set(ours) != set(theirs) or any(not torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32)) for key in ours):
        sys.exit("tensors changed on import and export")


def check_greedy(program, run, model):
    text = json.loads(call(program, "generate", run, "--prompt", PROMPT, "--tokens", str(GREEDY), "--temperature", "0", "--json"))["text"]
    tokens = model.generate(torch.tensor([list(PROMPT.encode())]), max_new_tokens=GREEDY, min_new_tokens=GREEDY, do_sample=False)
    theirs = bytes(tokens[0, len(PROMPT):].tolist()).decode("utf-8", "replace")
    if text != theirs:
        sys.exit(f"the likeliest {GREEDY} tokens differ: {text!r}, {theirs!r}")


def difference(program, folder, keys, shard_mb):
    run, exported, logits = (os.path.join(folder, name) for name in ("run", "hf", "logits.safetensors"))
    call(program, "train", f"data.path={TEXT}", *COMMON, *keys, "--dir", run)
    call(program, "convert", run, exported, "--shard-mb", shard_mb)
    with open(TEXT, encoding="utf-8") as file, open(os.path.join(folder, "part.txt"), "w", encoding="utf-8") as part:
        part.write(file.read(8000))
    call(program, "eval", run, part.name, "--seq", "96", "--logits", logits)
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
    else:
        check_greedy(program, run, model)
    check_again(program, folder, exported)
    files = len([name for name in os.listdir(exported) if name.endswith(".safetensors")])
    return (theirs - ours["logits"]).abs().max().item(), ours["logits"].abs().max().item(), files, type_of(exported)


def main():
    program, wanted, worst = sys.argv[1], sys.argv[2:], 0.0
    logging.set_verbosity_error()
    for i, (name, keys) in enumerate(MODELS.items()):
        if wanted and not name.startswith(tuple(wanted)):
            continue
        with tempfile.TemporaryDirectory(prefix="quadrille-hf-") as folder:
            far, largest, files, kind = difference(program, folder, keys, "0.1" if i % 2 else "0")
        worst = max(worst, far)
        print(f"{name:34} {kind:9} largest logit {largest:6.2f}  largest difference {far:.2e}  files {files}", flush=True)
    sys.exit(f"above 1e-4: {worst}" if worst > 1e-4 else 0)


if __name__ == "__main__":
    main()
