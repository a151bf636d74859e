#!/usr/bin/env python3
"""Compares Quadrille's training step of Gemma 2 models with PyTorch's on one GPU: the same models and
batches, one after another in one run.

  python3 bench/gpu_gemma/compare.py [CASE ...] [--python VENV/bin/python3]
      [--quadrille build/release/bin/quadrille] [--ours-only] [--json FILE]

Prints tokens per second, model TFLOP/s, MFU, peak memory and the ratio; then a breakdown of our
time by op. PyTorch is compiled, block by block and as a whole, with flex_attention for windows and
soft-caps of scores; the faster one counts.
"""
import os
import sys

from gemma_cases import CASES, flops_per_token

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_step"))
from compare import arguments, fastest_way, last_json, print_breakdown, row_of, run  # noqa: E402


def ours(o, name):
    c = CASES[name]
    keys = {"model.preset": "gemma2-2b", "model.layers": c.layers, "data.seq": c.seq, "train.global_batch": c.batch,
            "train.micro_batch": c.batch, "train.precision": "bf16", "train.clip": 1, "train.lr": 1e-4, "run.device": "cuda"}
    return last_json([o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)] +
                     [f"{key}={value}" for key, value in keys.items()] + o.set, "quadrille")


def compare(o, name):
    c = CASES[name]
    mine = ours(o, name)
    step = None if o.ours_only else fastest_way(o, os.path.join(HERE, "torch_gemma.py"), name)
    return row_of(name, c.batch, c.seq, flops_per_token(c), mine, step)


def main():
    a = arguments(__doc__, CASES)
    a.add_argument("--ways", nargs="+", default=["blocks", "whole"], help="PyTorch: what is compiled, each block or the whole model")
    a.add_argument("--limit", type=float, metavar="SECONDS", help="PyTorch: stop after this time")
    return run(a, CASES, compare, print_breakdown)


if __name__ == "__main__":
    sys.exit(main())
