#!/usr/bin/env python3
"""Compares plain and sharded data parallelism with PyTorch's DDP and FSDP2 (gloo) on this machine's
cores: tokens per second and resident memory of the same GPT-2-like model, in one run.

  python3 bench/zero/compare.py --torch VENV/bin/python3
      [--quadrille build/release/bin/quadrille] [--ranks 2 4] [--rounds 2]

VENV is a virtual environment with PyTorch from the Python index. Each round runs all of them one
after another; a figure is the best of the rounds' medians, to reduce the effect of other programs.
Memory is the highest resident size of any rank's process, PyTorch's from the first step on; in
brackets the increase since the start (libraries loaded, no model created).
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
STAGES = {"zero 0": 0, "zero 1": 1, "zero 2": 2, "zero 3": 3}
PEERS = {"DDP": [], "FSDP2": ["--sharded"]}


def model(o):
    """The model as our options, and as an entry of data/models.json."""
    keys = {"layers": o.layers, "hidden": o.hidden, "heads": o.hidden // 64, "vocab": o.vocab, "ffn": 4 * o.hidden}
    entry = dict(keys, name="bench", arch="gpt2", head_dim=64, kv_heads=keys["heads"], max_seq=o.seq, norm_eps=1e-5, qkv_bias=True,
                 out_bias=True, mlp_bias=True, position="learned", tied=True, rope_base=None)
    return ["model.arch=gpt2"] + [f"model.{key}={value}" for key, value in keys.items()], entry


def status(pid, what):
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as f:
            return next((int(line.split()[1]) * 1024 for line in f if line.startswith(what + ":")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as f:
            return [int(child) for child in f.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def ours(o, words, ranks, stage, folder, text):
    run = tempfile.mkdtemp(dir=folder)
    process = subprocess.Popen([o.quadrille, "train", *words, f"data.path={text}", "data.tokenizer=bytes", f"data.seq={o.seq}",
                                f"train.global_batch={o.batch}", f"train.micro_batch={o.batch // ranks}",
                                f"train.steps={o.warm_up + o.steps}", f"parallel.ranks={ranks}", f"parallel.zero={stage}",
                                f"run.threads={o.threads}", f"run.dir={run}"] + o.set, stdout=subprocess.DEVNULL)
    peak, start = {}, {}
    while process.poll() is None:
        for child in children(process.pid):
            high = status(child, "VmHWM")
            start.setdefault(child, high)
            peak[child] = max(peak.get(child, 0), high)
        time.sleep(0.01)
    if process.returncode or not peak:
        return None
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    return {"seconds": statistics.median(line["step_seconds"] for line in lines[o.warm_up:]), "peak_bytes": max(peak.values()),
            "start_bytes": min(start.values())}


def theirs(o, models, ranks, options, port):
    command = [o.torch, os.path.join(ROOT, "bench", "step_vs_torch", "torch_step.py"), "--models", models, "--model", "bench", "--seq",
               str(o.seq), "--batch", str(o.batch // ranks), "--steps", str(o.steps), "--warm-up", str(o.warm_up), "--threads", str(o.threads),
               "--ranks", str(ranks), "--port", str(port), *options]
    env = dict(os.environ, OMP_NUM_THREADS=str(o.threads))
    processes = [subprocess.Popen(command + ["--rank", str(r)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
                 for r in range(ranks)]
    outputs = [p.communicate() for p in processes]
    for p, (_, errors) in zip(processes, outputs):
        if p.returncode:
            print(errors.strip().splitlines()[-1:], file=sys.stderr)
            return None
    results = [json.loads(text) for text, _ in outputs]
    return {"seconds": statistics.median(results[0]["seconds"]), "peak_bytes": max(r["peak_bytes"] for r in results),
            "start_bytes": min(r["start_bytes"] for r in results), "torch": results[0]["torch"]}


def measure(o, ranks, folder, text, models, words, port):
    found = {}
    for _ in range(o.rounds):
        for name in [*STAGES, *PEERS]:
            if o.only and name not in o.only:
                continue
            port += 1
            got = (ours(o, words, ranks, STAGES[name], folder, text) if name in STAGES else
                   theirs(o, models, ranks, PEERS[name], port))
            if not got:
                print(f"{name} on {ranks} ranks failed", file=sys.stderr)
            elif name not in found or got["seconds"] < found[name]["seconds"]:
                found[name] = dict(got, peak_bytes=max(got["peak_bytes"], found.get(name, got)["peak_bytes"]))
    return found


def show(o, ranks, found):
    tokens = o.batch * o.seq
    print(f"\n{ranks} ranks x {o.threads} threads, {o.batch} x {o.seq} tokens a step")
    for name, got in found.items():
        notes = [f"{found[of]['seconds'] / got['seconds']:.2f} of {of}'s speed" for of in ("zero 0", "DDP", "FSDP2")
                 if of in found and of != name and (name in STAGES or of == "DDP")]
        print(f"  {name:7} {tokens / got['seconds']:9.1f} tokens/s {got['peak_bytes'] / 2**20:7.0f} MiB "
              f"({(got['peak_bytes'] - got['start_bytes']) / 2**20:.0f})  {', '.join(notes)}", flush=True)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--torch", required=True, help="python3 of a virtual environment with PyTorch")
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    a.add_argument("--threads", type=int, default=1, help="threads per rank")
    a.add_argument("--layers", type=int, default=6)
    a.add_argument("--hidden", type=int, default=512)
    a.add_argument("--vocab", type=int, default=8192)
    a.add_argument("--seq", type=int, default=256)
    a.add_argument("--batch", type=int, default=4, help="sequences per step, a multiple of the ranks")
    a.add_argument("--steps", type=int, default=6)
    a.add_argument("--warm-up", type=int, default=2)
    a.add_argument("--rounds", type=int, default=2)
    a.add_argument("--only", action="append", choices=[*STAGES, *PEERS])
    a.add_argument("--set", action="append", default=[], metavar="key=value", help="another option for quadrille, may be repeated")
    a.add_argument("--json", metavar="FILE", help="write all measurements")
    o = a.parse_args()
    words, entry = model(o)
    everything = {}
    with tempfile.TemporaryDirectory() as folder:
        text, models = os.path.join(folder, "text"), os.path.join(folder, "models.json")
        with open(text, "wb") as f:
            f.write(random.Random(1).randbytes(1 << 20))
        with open(models, "w", encoding="utf-8") as f:
            json.dump([entry], f)
        for ranks in o.ranks:
            everything[ranks] = measure(o, ranks, folder, text, models, words, random.randint(20000, 40000))
            show(o, ranks, everything[ranks])
    if o.json:
        with open(o.json, "w", encoding="utf-8") as f:
            json.dump(everything, f, indent=1)
    return 0 if all(found for found in everything.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
