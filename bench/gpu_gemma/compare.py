#!/usr/bin/env python3
"""Compares Quadrille's training step of Gemma 2 models with PyTorch's on one GPU: the same models and
batches, one after another in one run.

  python3 bench/gpu_gemma/compare.py [CASE ...] [--python VENV/bin/python3]
      [--quadrille build/release/bin/quadrille] [--ours-only] [--json FILE]

Prints tokens per second, model TFLOP/s, MFU, peak memory and the ratio; then a breakdown of our
time by op. PyTorch is compiled, with flex_attention for windows and soft-caps of scores.
"""
import os
import sys

from gemma_cases import CASES, flops_per_token

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_step"))
from compare import arguments, last_json, print_breakdown, run  # noqa: E402


def ours(o, name):
    c = CASES[name]
    keys = {"model.preset": "gemma2-2b", "model.layers": c.layers, "data.seq": c.seq, "train.global_batch": c.batch,
            "train.micro_batch": c.batch, "train.precision": "bf16", "train.clip": 1, "train.lr": 1e-4, "run.device": "cuda"}
    return last_json([o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)] +
                     [f"{key}={value}" for key, value in keys.items()] + o.set, "quadrille")


def compare(o, name):
    c = CASES[name]
    mine = ours(o, name)
    step = None if o.ours_only else last_json([o.python, os.path.join(HERE, "torch_gemma.py"), name, "--warm-up", str(o.warm_up),
                                               "--repeat", str(o.repeat)], "PyTorch")
    row = {"case": name, "batch": c.batch, "seq": c.seq, "flops_per_token": flops_per_token(c), "quadrille": mine, "torch": step, "floor": None}
    if mine:
        row["tokens_per_second"] = mine["tokens_per_second"]
        row["peak_bytes"] = mine["allocated_bytes"] + mine["workspace_bytes"]
    if step:
        row["torch_tokens_per_second"] = c.batch * c.seq / step["milliseconds"] * 1e3
    if mine and step:
        row["ratio"] = row["tokens_per_second"] / row["torch_tokens_per_second"]
    return row


def main():
    return run(arguments(__doc__, CASES), CASES, compare, print_breakdown)


if __name__ == "__main__":
    sys.exit(main())
