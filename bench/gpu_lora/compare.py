#!/usr/bin/env python3
"""Compares LoRA on 8 layers of Llama 3 8B (all linear targets, 4 x 4096 tokens) on one GPU with
compiled PyTorch and `peft`.

  python3 bench/gpu_lora/compare.py [--python VENV/bin/python3] [--quadrille build/release/bin/quadrille]
      [--rank 16] [--peft FOLDER] [--timeout 200] [--ours-only]

Prints tokens per second, peak memory, the ratio, and the share of the floor: the time of the GEMMs and
of causal attention that the step needs at 790 TFLOP/s, without weight gradients of frozen layers.
`peft` need not be installed: --peft names a folder or a wheel to import it from.
"""
import argparse
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, BATCH, SEQ = 8, 4096, 32, 8, 14336, 128256, 4, 4096
PEAK = 790e12


def floor_seconds():
    tokens = BATCH * SEQ
    block = HIDDEN * (HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN
    gemms = 4.0 * tokens * (LAYERS * block + VOCAB * HIDDEN)  # forward and input gradients
    attention = LAYERS * BATCH * (4.0 + 10.0) * SEQ * SEQ / 2 * HIDDEN  # two GEMMs forward, five backward, half of the pairs
    return (gemms + attention) / PEAK


def ours(o):
    keys = {"model.preset": "llama-3-8b", "model.layers": LAYERS, "data.seq": SEQ, "train.global_batch": BATCH, "train.micro_batch": BATCH,
            "train.precision": "bf16", "train.lr": 1e-4, "run.device": "cuda", "lora.rank": o.rank, "lora.alpha": o.rank}
    command = [o.quadrille, "bench", "step", "--json", "--warm-up", "5", "--repeat", "20"] + [f"{k}={v}" for k, v in keys.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit("quadrille: " + done.stderr.strip())
    return json.loads(done.stdout.strip().splitlines()[-1])


def theirs(o):
    command = [o.python, os.path.join(HERE, "torch_lora.py"), "--rank", str(o.rank)] + (["--peft", o.peft] if o.peft else [])
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=o.timeout)
    except subprocess.TimeoutExpired:
        sys.exit(f"PyTorch: not done after {o.timeout} s (--timeout)")
    if done.returncode != 0:
        sys.exit("PyTorch: " + done.stderr.strip()[-2000:])
    print("PyTorch    " + next((line for line in done.stderr.splitlines() if line.startswith("compiled in")), ""))
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--python", default=sys.executable)
    a.add_argument("--quadrille", default="build/release/bin/quadrille")
    a.add_argument("--rank", type=int, default=16)
    a.add_argument("--peft", default="")
    a.add_argument("--timeout", type=float, default=200.0, help="seconds for the side of PyTorch")
    a.add_argument("--ours-only", action="store_true")
    o = a.parse_args()
    mine, floor = ours(o), floor_seconds()
    seconds = BATCH * SEQ / mine["tokens_per_second"]
    memory = mine["allocated_bytes"] + mine["workspace_bytes"]
    print(f"quadrille  {mine['tokens_per_second']:10.0f} tokens/s  {memory / 2**30:6.2f} GiB  floor {floor * 1e3:.1f} ms, "
          f"{floor / seconds:.0%} of it in {seconds * 1e3:.1f} ms")
    if o.ours_only:
        return
    other = theirs(o)
    rate = BATCH * SEQ / other["seconds"]
    print(f"PyTorch    {rate:10.0f} tokens/s  {other['peak_bytes'] / 2**30:6.2f} GiB  compiled, peft {other['peft']}")
    print(f"ratio      {mine['tokens_per_second'] / rate:.2f} times as fast, {memory / other['peak_bytes']:.2f} times the memory")


if __name__ == "__main__":
    main()
