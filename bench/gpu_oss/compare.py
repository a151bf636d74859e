#!/usr/bin/env python3
"""Compares Quadrille's training step of GPT-OSS-shaped models with PyTorch's on one GPU: the same
models and batches, one after another in one run.

  python3 bench/gpu_oss/compare.py [CASE ...] [--python VENV/bin/python3]
      [--quadrille build/release/bin/quadrille] [--ours-only] [--json FILE]

Prints tokens per second, model TFLOP/s, MFU, peak memory and the ratio; then a breakdown of our
time: attention, routing, permutation, experts with biases and activation, and by op. PyTorch is
compiled block by block, with flex_attention for windows and sinks and grouped GEMMs, rows packed and
rows padded; the faster one counts.
"""
import os
import sys

from oss_cases import ALPHA, AUX_LOSS, CASES, LIMIT, ROPE_BASE, flops_per_token, parameters

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_step"))
from compare import arguments, fastest_way, last_json, print_breakdown, print_shares, row_of, run  # noqa: E402

SHARES = {
    "attention and sinks": ("attention", "attention.grad", "attention.sink", "attention.sink.grad"),
    "routing": ("route", "route.plan", "route.grad", "route.load"),
    "permutation": ("permute", "combine", "combine.grad"),
    "grouped GEMMs, biases and SwiGLU": ("experts", "experts.dx", "experts.dw", "experts.swiglu", "experts.dx.swiglu", "experts.bias",
                                         "experts.bias.grad", "experts.activation", "experts.activation.grad"),
}


def ours(o, name):
    c = CASES[name]
    keys = {"model.arch": "llama", "model.layers": c.layers, "model.hidden": c.hidden, "model.heads": c.heads, "model.kv_heads": c.kv_heads,
            "model.head_dim": c.head_dim, "model.ffn": c.expert_ffn, "model.vocab": c.vocab, "model.rope_base": ROPE_BASE,
            "model.qkv_bias": "true", "model.out_bias": "true", "model.mlp_bias": "true", "model.sinks": "true", "model.window": c.window,
            "model.full_every": 2, "model.activation": "swiglu_clamped", "model.swiglu_alpha": ALPHA, "model.swiglu_limit": LIMIT,
            "model.experts": c.experts, "model.experts_per_token": c.per_token, "model.expert_ffn": c.expert_ffn,
            "model.router_logit_bias": "true", "model.router_normalised": "true", "model.aux_loss": AUX_LOSS, "model.balance": "batch",
            "data.seq": c.seq, "train.global_batch": c.batch, "train.micro_batch": c.batch, "train.precision": "bf16",
            "train.master": "split", "train.clip": 1, "train.lr": 1e-4, "run.device": "cuda"}
    return last_json([o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)] +
                     [f"{key}={value}" for key, value in keys.items()] + o.set, "quadrille")


def compare(o, name):
    c = CASES[name]
    mine = ours(o, name)
    step = None if o.ours_only else fastest_way(o, os.path.join(HERE, "torch_oss.py"), name)
    return row_of(name, c.batch, c.seq, flops_per_token(c), mine, step)


def print_case(row):
    print_shares(row, SHARES, parameters(CASES[row["case"]]))
    print_breakdown(row)


def main():
    a = arguments(__doc__, CASES)
    a.add_argument("--ways", nargs="+", default=["packed", "padded"], help="PyTorch: rows of experts packed, or padded to multiples of 16")
    a.add_argument("--limit", type=float, metavar="SECONDS", help="PyTorch: stop after this time")
    return run(a, CASES, compare, print_case)


if __name__ == "__main__":
    sys.exit(main())
