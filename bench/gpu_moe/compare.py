#!/usr/bin/env python3
"""Compares Quadrille's training step of MoE models with PyTorch's on one GPU: the same models and
batches, one after another in one run.

  python3 bench/gpu_moe/compare.py [CASE ...] [--python VENV/bin/python3]
      [--quadrille build/release/bin/quadrille] [--ours-only] [--json FILE]

Prints tokens per second, model TFLOP/s, MFU, peak memory and the ratio; then a breakdown of our
time: routing, permutation, grouped GEMMs with SwiGLU, everything else, and by op. PyTorch uses
grouped GEMMs, compiled, with rows packed and with rows padded; the faster one counts.
"""
import os
import sys

from moe_cases import AUX_LOSS, CASES, flops_per_token, parameters

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_step"))
from compare import arguments, last_json, print_breakdown, print_shares, row_of, run  # noqa: E402

SHARES = {
    "routing": ("route", "route.plan", "route.grad", "route.load"),
    "permutation": ("permute", "combine", "combine.grad"),
    # SwiGLU may be fused into the GEMMs, so they are reported together
    "grouped GEMMs and SwiGLU": ("experts", "experts.dx", "experts.dw", "experts.activation", "experts.activation.grad"),
}


def ours(o, name):
    c = CASES[name]
    keys = {"model.arch": "llama", "model.layers": c.layers, "model.hidden": c.hidden, "model.heads": c.heads, "model.kv_heads": c.kv_heads,
            "model.ffn": c.ffn, "model.vocab": c.vocab, "model.rope_base": 500000, "model.experts": c.experts,
            "model.experts_per_token": c.per_token, "model.expert_ffn": c.expert_ffn, "model.shared_experts": c.shared, "model.first_dense": c.dense,
            "model.router_normalised": "true", "model.aux_loss": AUX_LOSS, "model.balance": "batch", "data.seq": c.seq, "train.global_batch": c.batch,
            "train.micro_batch": c.batch, "train.precision": "bf16", "train.master": "split", "train.clip": 1, "train.lr": 1e-4, "run.device": "cuda"}
    return last_json([o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)] +
                     [f"{key}={value}" for key, value in keys.items()] + o.set, "quadrille")


def theirs(o, name):
    runs = [last_json([o.python, os.path.join(HERE, "torch_moe.py"), name, "--pad", str(pad), "--warm-up", str(o.warm_up), "--repeat",
                       str(o.repeat)], f"PyTorch, rows padded to {pad}") for pad in o.pads]
    runs = [run for run in runs if run]
    for run in runs:
        print(f"  padded to {run['pad']}: {run['milliseconds']:.2f} ms, loss {run['loss']:.4f}", file=sys.stderr, flush=True)
    return min(runs, key=lambda run: run["milliseconds"]) if runs else None


def compare(o, name):
    c = CASES[name]
    mine = ours(o, name)
    step = None if o.ours_only else theirs(o, name)
    return row_of(name, c.batch, c.seq, flops_per_token(c), mine, step)


def print_case(row):
    print_shares(row, SHARES, parameters(CASES[row["case"]]))
    print_breakdown(row)


def main():
    a = arguments(__doc__, CASES)
    a.add_argument("--pads", type=int, nargs="+", default=[1, 16], metavar="N", help="PyTorch: align the rows of an expert to multiples of N")
    return run(a, CASES, compare, print_case)


if __name__ == "__main__":
    sys.exit(main())
