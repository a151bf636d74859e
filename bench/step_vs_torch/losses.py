#!/usr/bin/env python3
"""Compares losses of a small model trained in bf16 by Quadrille and by PyTorch (autocast): same text,
model, initial distribution and optimizer, several seeds each, and each seed in fp32 too.

  python3 bench/step_vs_torch/losses.py --torch VENV/bin/python3
      [--quadrille build/release/bin/quadrille] [--kernels amx_emulated] [--seeds 8] [--steps 200] [--folder FOLDER]

Seeds decide initial weights and the order of the text, so single runs differ. The table has the mean
and the standard deviation over seeds of the loss in a few steps, and how much the loss of a seed
rises from fp32 to bf16: the second hardly depends on the seeds, so it shows small errors. The script
fails where the means in bf16 differ by more than the larger of the two deviations, or two of its
standard errors. With --folder, losses of finished runs are kept there, and a later call does only
the missing runs.
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
SIDES, PRECISIONS = ("Quadrille", "PyTorch"), ("bf16", "fp32")


def ours(o, precision, seed, text):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([o.quadrille, "train", f"model.preset={MODEL}", f"data.path={text}", "data.tokenizer=bytes", f"data.seq={SEQ}",
                        f"train.global_batch={BATCH}", f"train.steps={o.steps}", "train.schedule=constant", f"train.precision={precision}",
                        f"train.seed={seed}", f"run.kernels={o.kernels}", f"run.threads={o.threads}", "run.save=false",
                        f"run.dir={folder}/run"], check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(folder, "run", "metrics.jsonl"), encoding="utf-8") as lines:
            return [json.loads(line)["loss"] for line in lines]


def theirs(o, precision, seed, text):
    out = subprocess.run([o.torch, os.path.join(ROOT, "bench", "step_vs_torch", "torch_step.py"), "--models",
                          os.path.join(ROOT, "data", "models.json"), "--model", MODEL, "--seq", str(SEQ), "--batch", str(BATCH), "--steps",
                          str(o.steps), "--warm-up", "0", "--threads", str(o.threads), "--seed", str(seed), "--text", text, "--precision",
                          precision], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)["losses"]


def losses(o, side, precision, seed, text, folder):
    """Of one run, from a file of an earlier call if there is one."""
    kept = os.path.join(folder, f"{side}-{precision}-{o.steps}-{o.kernels if side == 'Quadrille' else 'torch'}-{seed}.json")
    if not os.path.exists(kept):
        values = (ours if side == "Quadrille" else theirs)(o, precision, seed, text)
        with open(kept + ".part", "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(kept + ".part", kept)
    with open(kept, encoding="utf-8") as file:
        return json.load(file)


def write_text(text):
    if os.path.exists(text):
        return
    with open(text, "wb") as to:
        for page in sorted(glob.glob(os.path.join(ROOT, "docs", "**", "*.md"), recursive=True)):
            with open(page, "rb") as file:
                to.write(file.read())


def compare(o, runs):
    """Prints the table; returns whether the losses in bf16 agree."""
    good = True
    print(f"{'steps':>9}  {'Quadrille, bf16':>17}  {'PyTorch, bf16':>17}  {'difference':>10}  {'in fp32':>7}   bf16 over fp32: "
          f"{'Quadrille':>18}  {'PyTorch':>18}")
    for quarter in range(1, 5):
        end = o.steps * quarter // 4
        first = max(end - 2 * AROUND, 0)
        means = {key: [statistics.mean(run[first:end]) for run in of] for key, of in runs.items()}
        (x, dx), (y, dy) = [(statistics.mean(means[side, "bf16"]), statistics.stdev(means[side, "bf16"])) for side in SIDES]
        within = abs(x - y) <= max(dx, dy, 2 * ((dx * dx + dy * dy) / o.seeds) ** 0.5)
        good &= within
        fp32 = [statistics.mean(means[side, "fp32"]) for side in SIDES]
        rises = [[b - f for b, f in zip(means[side, "bf16"], means[side, "fp32"])] for side in SIDES]
        rise = [f"{statistics.mean(r):+.5f} +- {statistics.stdev(r):.5f}" for r in rises]
        print(f"{first + 1:4}-{end:<4}  {x:.4f} +- {dx:.4f}  {y:.4f} +- {dy:.4f}  {x - y:+10.4f}  {fp32[0] - fp32[1]:+.4f}   "
              f"{'':16}{rise[0]:>19}  {rise[1]:>18}{'' if within else '  TOO LARGE'}")
    return good


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--torch", required=True, help="python3 of a virtual environment with PyTorch")
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--kernels", default="auto", help="run.kernels")
    a.add_argument("--seeds", type=int, default=8, help="at least 2")
    a.add_argument("--steps", type=int, default=200)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--folder", help="keep the text and the losses of finished runs here")
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = o.folder or temporary
        os.makedirs(folder, exist_ok=True)
        text = os.path.join(folder, "text")
        write_text(text)
        runs = {(side, precision): [] for side in SIDES for precision in PRECISIONS}
        for seed in range(1, o.seeds + 1):
            for side, precision in runs:
                runs[side, precision].append(losses(o, side, precision, seed, text, folder))
    return 0 if compare(o, runs) else 1


if __name__ == "__main__":
    sys.exit(main())
