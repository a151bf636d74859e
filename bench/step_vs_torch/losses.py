#!/usr/bin/env python3
"""Compares losses of a small model trained in bf16 by Quadrille and by PyTorch (autocast): same text,
model, initial distribution and optimizer, several seeds each.

  python3 bench/step_vs_torch/losses.py --torch VENV/bin/python3
      [--quadrille build/release/bin/quadrille] [--kernels amx_emulated] [--seeds 4] [--steps 200]

Seeds decide initial weights and the order of the text, so single runs differ. The table has the mean
and the standard deviation over seeds of the loss around a few steps. The script fails where the
means differ by more than the larger of the two deviations, or two of its standard errors.
"""
import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
MODEL, SEQ, BATCH, AROUND = "llama-tiny", 128, 16, 10


def ours(o, seed, text, folder):
    run = os.path.join(folder, f"seed{seed}")
    subprocess.run([o.quadrille, "train", f"model.preset={MODEL}", f"data.path={text}", "data.tokenizer=bytes", f"data.seq={SEQ}",
                    f"train.global_batch={BATCH}", f"train.steps={o.steps}", "train.schedule=constant", f"train.precision={o.precision}",
                    f"train.seed={seed}", f"run.kernels={o.kernels}", f"run.threads={o.threads}", f"run.dir={run}"],
                   check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in open(os.path.join(run, "metrics.jsonl"))]


def theirs(o, seed, text):
    out = subprocess.run([o.torch, os.path.join(ROOT, "bench", "step_vs_torch", "torch_step.py"), "--models",
                          os.path.join(ROOT, "data", "models.json"), "--model", MODEL, "--seq", str(SEQ), "--batch", str(BATCH), "--steps",
                          str(o.steps), "--warm-up", "0", "--threads", str(o.threads), "--seed", str(seed), "--text", text, "--precision",
                          o.precision], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)["losses"]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--torch", required=True, help="python3 of a virtual environment with PyTorch")
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--kernels", default="auto", help="run.kernels")
    a.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    a.add_argument("--seeds", type=int, default=4)
    a.add_argument("--steps", type=int, default=200)
    a.add_argument("--threads", type=int, default=2)
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text")
        with open(text, "wb") as to:
            for page in sorted(glob.glob(os.path.join(ROOT, "docs", "**", "*.md"), recursive=True)):
                to.write(open(page, "rb").read())
        runs = [[ours(o, seed, text, folder) for seed in range(1, o.seeds + 1)], [theirs(o, seed, text) for seed in range(1, o.seeds + 1)]]
    print(f"{'steps':>9}  {'Quadrille':>16}  {'PyTorch':>16}  difference")
    good = True
    for quarter in range(1, 5):
        end = o.steps * quarter // 4
        means = [[statistics.mean(run[max(end - 2 * AROUND, 0):end]) for run in side] for side in runs]
        (x, dx), (y, dy) = [(statistics.mean(side), statistics.stdev(side)) for side in means]
        within = abs(x - y) <= max(dx, dy, 2 * ((dx * dx + dy * dy) / o.seeds) ** 0.5)
        good &= within
        print(f"{max(end - 2 * AROUND, 0) + 1:4}-{end:<4}  {x:.4f} +- {dx:.4f}  {y:.4f} +- {dy:.4f}  {x - y:+.4f}{'' if within else '  TOO LARGE'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
