#!/usr/bin/env python3
"""Trains a small model with each recipe of fp8, and in bf16, on the same text and from the same
initial weights, and compares the losses on held-out text.

  python3 bench/fp8/quality.py [--quadrille build/release/bin/quadrille] [--steps 500] [--seeds 1] [--dir runs/fp8_quality]

A run that was stopped (SIGTERM) resumes when the script is called again with the same --dir. Fails
if a recipe is more than 0.5 % from bf16.
"""
import argparse
import json
import os
import signal
import subprocess
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
WORDS = ["model.layers=2", "model.hidden=256", "model.heads=8", "model.kv_heads=4", "model.ffn=704", "data.tokenizer=bytes", "data.seq=64",
         "data.validation=0.02", "train.global_batch=8", "train.lr=5e-4", "train.warmup=20"]
BF16 = "train.precision=bf16"
RECIPES = [BF16, *(f"train.precision=fp8 fp8.recipe={recipe} fp8.grad={grad}" for recipe in ("tensor", "row", "block")
                   for grad in ("e5m2", "e4m3"))]
MOST = 0.005


def read_lines(log):
    if not os.path.exists(log):
        return []
    with open(log, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def held_out_loss(o, recipe, seed):
    """The loss on held-out text after the last step, and the mean training loss of the last 50 steps."""
    run = os.path.join(o.dir, f"{recipe.replace('train.precision=', '').replace('fp8.', '').replace(' ', ',')},seed={seed}")
    log = os.path.join(run, "metrics.jsonl")
    lines = read_lines(log)
    if not lines or lines[-1]["step"] < o.steps:
        done = subprocess.run([o.quadrille, "train", *WORDS, f"data.path={o.text}", *recipe.split(), f"train.steps={o.steps}",
                               f"train.eval_every={o.steps}", f"train.seed={seed}", f"run.threads={o.threads}", f"run.dir={run}",
                               f"run.resume={'true' if lines else 'false'}"], stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        lines = read_lines(log)
    losses = [line["loss"] for line in lines if "loss" in line]
    return [line["validation_loss"] for line in lines if "validation_loss" in line][-1], sum(losses[-50:]) / 50


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--text", default=os.path.join(ROOT, "examples", "data", "king-james.txt"))
    a.add_argument("--dir", default=os.path.join("runs", "fp8_quality"))
    a.add_argument("--steps", type=int, default=500)
    a.add_argument("--seeds", type=int, default=1)
    a.add_argument("--threads", type=int, default=1)
    o = a.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: None)  # the run stops with a checkpoint
    good = True
    print(f"{'recipe':54} {'held-out':>9} {'bf16':>8} {'training':>9}")
    for seed in range(1, o.seeds + 1):
        for recipe in RECIPES:
            loss, training = held_out_loss(o, recipe, seed)
            bf16 = loss if recipe == BF16 else bf16
            good &= abs(loss / bf16 - 1) <= MOST
            print(f"{recipe:54} {loss:9.5f} {loss / bf16 - 1:+8.3%} {training:9.5f}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
