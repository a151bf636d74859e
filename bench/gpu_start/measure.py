#!/usr/bin/env python3
"""Measures what the six models of gpu_step do not cover on one GPU: vocabularies of odd size, and the
time of the first start.

  python3 bench/gpu_start/measure.py [tests] [vocabulary] [start] [wide] [--quadrille PROGRAM]
      [--tests FOLDER] [--cases CASE ...] [--json FILE]

tests       kernels and runs against references: GEMMs cut in two, tuning within its time limit,
            coefficients, cross-entropy (--tests: the build's folder of test programs), and the
            tests of tests/cli/test_cuda.py for them
vocabulary  GPT-2 124M, 64 x 1024, with 50,257 tokens and with 50,304, alternating steps in one
            process. Bar: within 1 %
start       wall time of `quadrille train` with one step, for each case: with an empty tuning file,
            and with the file of the first run. Bar: 10 s
wide        speed with the algorithms of a `train` that begins with the search of `start` and has
            continued it between steps, compared with those of a search without limit before the
            first step: alternating steps (one after another where two copies of the model do not
            fit). Bar: within 1 %

Without arguments: all except `wide`, which takes about a minute and a half per case. The table comes
last. pack.sh packs the programs for a machine that has a GPU but not the libraries that they are
built with.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_step"))
from cases import CASES  # noqa: E402

TEXT = os.path.join(ROOT, "examples", "data", "king-james.txt")
PROGRAMS = ("test_cuda_matmul", "test_matmul", "test_cross_entropy", "test_optimizer")
RUNS = ("test_a_vocabulary_of_odd_size", "test_deterministic_runs_have_the_same_bits", "test_a_model_that_does_not_fit_says_what_would",
        "test_checkpoint_goes_from_gpu_to_cpu_and_back", "test_tiny_models_follow_the_cpu")


def say(text):
    print(text, file=sys.stderr, flush=True)


def keys_of(name, **more):
    layers, hidden, heads, kv, ffn, vocab, llama, batch, seq = CASES[name]
    keys = {"model.arch": "llama" if llama else "gpt2", "model.layers": layers, "model.hidden": hidden, "model.heads": heads,
            "model.kv_heads": kv, "model.ffn": ffn, "model.vocab": vocab, "data.seq": seq, "train.global_batch": batch,
            "train.micro_batch": batch, "train.precision": "bf16", "train.clip": 1, "train.lr": 1e-4, "run.device": "cuda"}
    if llama:
        keys["model.rope_base"] = 500000
    keys.update({key.replace("__", "."): value for key, value in more.items()})
    return keys


def words_of(keys):
    return [f"{key}={value}" for key, value in keys.items()]


def write_yaml(path, keys):
    groups = {}
    for key, value in keys.items():
        group, name = key.split(".", 1)
        groups.setdefault(group, []).append(f"  {name}: {value}\n")
    with open(path, "w", encoding="utf-8") as file:
        for group, lines in groups.items():
            file.write(f"{group}:\n{''.join(lines)}")


def call(command, what, **environment):
    """Seconds, output and errors of a command; output is None if it fails."""
    begin = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, check=False)
    seconds = time.monotonic() - begin
    say(f"  {what}: {seconds:.1f} s")
    if done.returncode == 0:
        return seconds, done.stdout, done.stderr
    if done.returncode == 77:  # a test that found no GPU
        return seconds, None, "skipped"
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
    say(f"  {what} ended with status {done.returncode}:\n    " + "\n    ".join(last))
    return seconds, None, done.stderr


def bench_step(o, keys, what, in_turn=None):
    """The JSON of `bench step`, alternating with steps of another configuration if one is given; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)]
        if in_turn:
            write_yaml(os.path.join(folder, "other.yaml"), in_turn)
            command += ["--in-turn", os.path.join(folder, "other.yaml")]
        _, output, _ = call(command + words_of(keys), what)
    lines = [line for line in (output or "").splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def rows_of(result):
    return {row["name"]: row["seconds"] * 1e3 for row in result.get("table", result).get("rows", [])}


def outcome(output, errors):
    return "passed" if output is not None else "skipped" if errors == "skipped" else "FAILED"


def tests(o):
    lines = []
    for program in PROGRAMS:
        path = os.path.join(o.tests, "ops", program)
        if not os.path.exists(path):
            lines.append(f"  {program:48} missing: {path}")
            continue
        seconds, output, errors = call([path], program)
        lines.append(f"  {program:48} {outcome(output, errors)} in {seconds:.1f} s")
        lines += ["    " + line for line in ((output or "") + errors).splitlines() if "searches for" in line or "skipped" in line]
    for run in RUNS:
        seconds, output, errors = call([sys.executable, os.path.join(ROOT, "tests", "cli", "test_cuda.py"), f"Cuda.{run}"], run,
                                       QUADRILLE=os.path.abspath(o.quadrille), QUADRILLE_SOURCE=ROOT)
        lines.append(f"  {run:48} {outcome(output, errors)} in {seconds:.1f} s")
    return {"tests": lines}, ["tests"] + lines


def vocabulary(o):
    """In both orders, which gives a breakdown by op for each side and shows drift."""
    with tempfile.TemporaryDirectory() as folder:
        tuning = os.path.join(folder, "products")
        odd, even = (keys_of("gpt2-124m", model__vocab=size, run__tuning=tuning) for size in (50257, 50304))
        first = bench_step(o, odd, "50,257 alternating with 50,304", even)
        second = bench_step(o, even, "50,304 alternating with 50,257", odd)
    if not first or not second:
        return {}, ["vocabulary: FAILED"]
    lines = ["vocabulary, GPT-2 124M, 64 x 1024 (bar: 1.01)"]
    for name, result in (("50,257", first), ("50,304", second)):
        rows = rows_of(result)
        lines.append(f"  {name}: {result['step_seconds'] * 1e3:7.2f} ms, {result['tokens_per_second']:9,.0f} tokens/s, "
                     f"head.loss {rows.get('head.loss', 0):6.2f} ms")
    lines.append(f"  ratio of alternating steps, 50,257 over 50,304: {first['over_other']:.4f} and {1 / second['over_other']:.4f}")
    return {"vocabulary": {"odd": first, "even": second}}, lines


def train_once(o, name, cache, what, *more):
    keys = keys_of(name, train__steps=1, data__path=TEXT, data__tokenizer="bytes")
    seconds, output, errors = call([o.quadrille, "train"] + words_of(keys) + list(more), f"{name}, {what}", XDG_CACHE_HOME=cache)
    told = [line for line in errors.splitlines() if "algorithms" in line]
    return seconds if output is not None else None, told


def train_until_tuned(o, name, path):
    """Trains until the searches between steps have ended. Seconds until the first step was done, until all were tuned, and
    the line that says so; None if the run ends before."""
    keys = keys_of(name, train__steps=1000000, data__path=TEXT, data__tokenizer="bytes", run__tuning=path)
    begin, first, told = time.monotonic(), None, None
    run = subprocess.Popen([o.quadrille, "train", "--json"] + words_of(keys), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in run.stdout:
        if first is None and '"step":1,' in line:
            first = time.monotonic() - begin
        if "all GEMMs are tuned" in line:
            told = line.strip()
            break
    seconds = time.monotonic() - begin
    run.send_signal(signal.SIGINT)
    run.stdout.read()
    run.wait()
    say(f"  {name}, trained until tuned: {seconds:.1f} s, first step after {first or 0:.1f} s: {told}")
    return (first, seconds, told) if told else None


def show(seconds):
    return f"{seconds:6.1f} s" if seconds else "  FAILED"


def start(o):
    found, lines = {}, ["start of `train` up to its first step and the end (bar: 10 s)",
                        f"  {'case':13} {'empty file':>10} {'kept':>9} {'no search':>9}"]
    for name in o.cases:
        cache = os.path.join(o.caches, name)
        os.makedirs(cache, exist_ok=True)
        cold, told = train_once(o, name, cache, "empty tuning file")
        warm, _ = train_once(o, name, cache, "kept tuning file")
        none, _ = train_once(o, name, cache, "no search", "run.tuning=none", "run.tuning_seconds=0")
        found[name] = {"cold": cold, "warm": warm, "none": none, "told": told}
        lines.append(f"  {name:13} {show(cold):>10} {show(warm):>9} {show(none):>9}  {told[0] if told else ''}")
    return {"start": found}, lines


def wide(o):
    found, lines = {}, ["steps with the algorithms of a short search continued between steps, and of one without limit (bar: 1.01)",
                        f"  {'case':13} {'between':>10} {'no limit':>10} {'ratio':>7} {'first step':>11} {'all tuned':>10} {'long start':>11}"]
    for name in o.cases:
        short, long = (os.path.join(o.caches, f"{name}-{kind}") for kind in ("short", "long"))
        tuned = train_until_tuned(o, name, short)
        cold = train_once(o, name, o.caches, "search without limit", f"run.tuning={long}", "run.tuning_seconds=3600")[0]
        found[name] = {"tuned": tuned, "cold": cold}
        if not tuned or not cold:
            lines.append(f"  {name:13} FAILED")
            continue
        mine, other = keys_of(name, run__tuning=short), keys_of(name, run__tuning=long)
        result = bench_step(o, mine, f"{name}, alternating", other)
        if result:
            left, right, ratio = result["step_seconds"], result["other_seconds"], result["over_other"]
        else:
            both = [bench_step(o, keys, f"{name}, {what}") for keys, what in ((mine, "between"), (other, "no limit"), (other, "no limit"), (mine, "between"))]
            if not all(both):
                lines.append(f"  {name:13} FAILED")
                continue
            left, right = (sum(both[i]["step_seconds"] for i in pair) / 2 for pair in ((0, 3), (1, 2)))
            ratio = left / right
        found[name].update(short=left, long=right, ratio=ratio)
        lines.append(f"  {name:13} {left * 1e3:7.2f} ms {right * 1e3:7.2f} ms {ratio:7.4f} {show(tuned[0]):>11} {show(tuned[1]):>10} {show(cold):>11}")
    return {"wide": found}, lines


def main():
    parts = {"tests": tests, "vocabulary": vocabulary, "start": start, "wide": wide}
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--tests", default=os.path.join(ROOT, "build", "release", "tests"))
    a.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    a.add_argument("--warm-up", type=int, default=4)
    a.add_argument("--repeat", type=int, default=16)
    a.add_argument("--json", metavar="FILE", help="write all measurements")
    o = a.parse_args()
    for name, known, what in [(part, parts, "part") for part in o.parts] + [(case, CASES, "case") for case in o.cases]:
        if name not in known:
            a.error(f"there is no {what} {name}; there are: {', '.join(known)}")
    found, lines = {}, []
    with tempfile.TemporaryDirectory() as o.caches:
        for part in o.parts or ["tests", "vocabulary", "start"]:
            say(part)
            more, text = parts[part](o)
            found.update(more)
            lines += text
            if o.json:
                with open(o.json, "w", encoding="utf-8") as file:
                    json.dump(found, file, indent=1)
    print("\n".join(lines))
    return 1 if re.search("FAILED|not there", "\n".join(lines)) else 0


if __name__ == "__main__":
    sys.exit(main())
