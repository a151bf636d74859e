#!/usr/bin/env python3
"""Compares Quadrille's training step with PyTorch's on this machine's cores: same models, same batch,
one run.

  python3 bench/step_vs_torch/compare.py --torch VENV/bin/python3
      [--quadrille build/release/bin/quadrille] [--case gpt2:1x2] [--kind eager]

VENV is a virtual environment with PyTorch from the Python index. Each case runs ours, theirs (eager
and compiled) and ours again; times are medians of the timed steps, and the better of PyTorch's two
counts. A case is a model, ranks and threads per rank; without --case, two models on two cores. For
many cores: --case gpt2-long:1x16 --case gpt2-long:4x4.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
CASES = {  # name, preset, vocabulary, seq, global batch
    "gpt2": ("GPT-2 124M", "gpt2-124M", 50257, 256, 4),
    "llama": ("small Llama", "llama-small", 8192, 256, 8),
    "gpt2-long": ("GPT-2 124M", "gpt2-124M", 50257, 1024, 16),
    "llama-long": ("small Llama", "llama-small", 8192, 1024, 16),
}
USUAL = ["gpt2:1x2", "gpt2:2x1", "llama:1x2", "llama:2x1"]


def ours(o, case, ranks, threads, folder, text):
    run = tempfile.mkdtemp(dir=folder)
    name, preset, vocab, seq, batch = case
    subprocess.run([o.quadrille, "train", f"model.preset={preset}", f"model.vocab={vocab}", f"data.path={text}", "data.tokenizer=bytes", f"data.seq={seq}",
                    f"train.global_batch={batch}", f"train.steps={o.warm_up + o.steps}", f"parallel.ranks={ranks}", f"train.precision={o.precision}",
                    f"run.threads={threads}", f"run.dir={run}"], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(os.path.join(run, "metrics.jsonl"))]
    return statistics.median(line["step_seconds"] for line in lines[o.warm_up:])


def theirs(o, case, ranks, threads, compiled, port):
    name, preset, vocab, seq, batch = case
    command = [o.torch, os.path.join(ROOT, "bench", "step_vs_torch", "torch_step.py"), "--models",
               os.path.join(ROOT, "data", "models.json"), "--model", preset, "--vocab", str(vocab), "--seq", str(seq), "--batch",
               str(batch // ranks), "--steps", str(o.steps), "--warm-up", str(o.warm_up), "--threads", str(threads), "--ranks",
               str(ranks), "--port", str(port), "--precision", o.precision] + (["--compile"] if compiled else [])
    env = dict(os.environ, OMP_NUM_THREADS=str(threads))
    procs = [subprocess.Popen(command + ["--rank", str(r)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
             for r in range(ranks)]
    outputs = [p.communicate()[0] for p in procs]
    if any(p.returncode for p in procs):
        return None
    return statistics.median(json.loads(outputs[0])["seconds"])


def parse_case(text):
    """"gpt2:1x2" as key, ranks, threads per rank."""
    key, _, layout = text.partition(":")
    ranks, _, threads = layout.partition("x")
    if key not in CASES or not ranks.isdigit() or not threads.isdigit() or int(ranks) < 1 or CASES[key][4] % int(ranks):
        raise argparse.ArgumentTypeError(f"'{text}': MODEL:RANKSxTHREADS, where MODEL is one of {', '.join(CASES)} and RANKS divides its batch")
    return key, int(ranks), int(threads)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--torch", required=True, help="python3 of a virtual environment with PyTorch")
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--steps", type=int, default=5)
    a.add_argument("--warm-up", type=int, default=2)
    a.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: train.precision=bf16 against autocast")
    a.add_argument("--json", action="store_true")
    a.add_argument("--case", type=parse_case, action="append", help="MODEL:RANKSxTHREADS instead of the usual four; may be repeated")
    a.add_argument("--kind", choices=("eager", "compiled"), action="append", help="of PyTorch, instead of both")
    o = a.parse_args()
    rows, port = [], random.randint(20000, 40000)
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text")
        with open(text, "wb") as f:
            f.write(random.Random(1).randbytes(1 << 20))
        for key, ranks, threads in o.case or [parse_case(text) for text in USUAL]:
            case = CASES[key]
            before = ours(o, case, ranks, threads, folder, text)
            peers = {}
            for kind in o.kind or ("eager", "compiled"):
                port += 1
                peers[kind] = theirs(o, case, ranks, threads, kind == "compiled", port)
            after = ours(o, case, ranks, threads, folder, text)
            tokens = case[3] * case[4]
            best = min((t for t in peers.values() if t), default=float("nan"))
            row = {"model": case[0], "batch": case[4], "seq": case[3], "ranks": ranks, "threads": threads, "tokens": tokens,
                   "quadrille_tokens_per_second": tokens / min(before, after), "torch_tokens_per_second": tokens / best,
                   "torch": {k: t and tokens / t for k, t in peers.items()}, "ratio": best / min(before, after),
                   "quadrille_seconds": [before, after]}
            rows.append(row)
            print(f"{case[0]:12} {case[4]} x {case[3]}, {ranks} x {threads}: quadrille {row['quadrille_tokens_per_second']:8.1f} tokens/s, "
                  f"PyTorch {row['torch_tokens_per_second']:8.1f} ({', '.join(f'{k} {t:.1f}' for k, t in row['torch'].items() if t)}), "
                  f"ratio {row['ratio']:.2f}", file=sys.stderr, flush=True)
    if o.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
