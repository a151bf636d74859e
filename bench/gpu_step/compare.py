#!/usr/bin/env python3
"""Compares Quadrille's training step with PyTorch's on one GPU: the same models and batches, one after
another in one run.

  python3 bench/gpu_step/compare.py [CASE ...] [--python VENV/bin/python3]
      [--quadrille build/release/bin/quadrille] [--ours-only] [--no-floor] [--json FILE]

Without cases: all six, about 8 minutes including PyTorch's compilation. Prints a table (tokens per
second, model TFLOP/s, MFU relative to 989.5 TFLOP/s, peak memory, ratio, share of the floor) and a
breakdown of our time by op for each case. The floor is the time of the same GEMMs and attention,
each timed alone, plus the least traffic of everything else (torch_step.py floor).
"""
import argparse
import json
import os
import subprocess
import sys
import time

from cases import CASES, PEAK_FLOPS, flops_per_token

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def last_json(command, what):
    """The last line of a command's output as JSON; None if it fails, with the reason on standard error."""
    begin = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"  {what}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    errors = done.stderr.strip().splitlines()
    print(f"  {what} failed: {errors[-1] if errors else f'exit status {done.returncode}'}", file=sys.stderr, flush=True)
    return None


def ours(o, name):
    layers, hidden, heads, kv, ffn, vocab, llama, batch, seq = CASES[name]
    keys = {"model.arch": "llama" if llama else "gpt2", "model.layers": layers, "model.hidden": hidden, "model.heads": heads,
            "model.kv_heads": kv, "model.ffn": ffn, "model.vocab": vocab, "data.seq": seq,
            "train.global_batch": batch, "train.micro_batch": batch, "train.precision": "bf16", "train.clip": 1,
            "train.lr": 1e-4, "run.device": "cuda"}
    if llama:
        keys["model.rope_base"] = 500000
    return last_json([o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)] +
                     [f"{key}={value}" for key, value in keys.items()] + o.set, "quadrille")


def theirs(o, what, name):
    return last_json([o.python, os.path.join(HERE, "torch_step.py"), what, name, "--warm-up", str(o.warm_up), "--repeat",
                      str(o.repeat)], "PyTorch" if what == "step" else "floor")


def fastest_way(o, script, name):
    """Runs the ways of o.ways, each of which is a line of output, and returns the fastest that ended before o.limit seconds."""
    command = [o.python, script, name, "--warm-up", str(o.warm_up), "--repeat", str(o.repeat), "--ways", *o.ways]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=o.limit)
        text, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        text, errors = late.stdout or b"", b"stopped at the limit"
    runs = [json.loads(line) for line in text.decode().splitlines() if line.startswith("{")]
    for r in runs:
        print(f"  PyTorch, {r['way']}: {r['milliseconds']:.2f} ms, loss {r['loss']:.4f}", file=sys.stderr, flush=True)
    if len(runs) < len(o.ways):
        print("  PyTorch: " + "; ".join(errors.decode().strip().splitlines()[-1:]), file=sys.stderr, flush=True)
    return min(runs, key=lambda r: r["milliseconds"]) if runs else None


def compare(o, name):
    case = CASES[name]
    mine = ours(o, name)
    step = None if o.ours_only else theirs(o, "step", name)
    floor = None if o.ours_only or o.no_floor else theirs(o, "floor", name)
    return row_of(name, case[7], case[8], flops_per_token(case), mine, step, floor)


def row_of(name, batch, seq, flops, mine, step, floor=None):
    """One row of the table. Our peak is the planned device memory plus workspaces; PyTorch's is its allocator's."""
    tokens = batch * seq
    row = {"case": name, "batch": batch, "seq": seq, "flops_per_token": flops, "quadrille": mine, "torch": step, "floor": floor}
    if mine:
        row["tokens_per_second"] = mine["tokens_per_second"]
        row["peak_bytes"] = mine["allocated_bytes"] + mine["workspace_bytes"]
    if step:
        row["torch_tokens_per_second"] = tokens / step["milliseconds"] * 1e3
    if mine and step:
        row["ratio"] = row["tokens_per_second"] / row["torch_tokens_per_second"]
    if mine and floor:
        row["floor_tokens_per_second"] = tokens / floor["milliseconds"] * 1e3
        row["floor_share"] = row["tokens_per_second"] / row["floor_tokens_per_second"]
    return row


def rate_columns(rate, flops, peak):
    if not rate:
        return f"{'failed':>10} {'':>7} {'':>6} {'':>9}"
    return f"{rate:10,.0f} {rate * flops / 1e12:7.1f} {rate * flops / PEAK_FLOPS:6.1%} {peak / 2**30:5.1f} GiB"


def print_table(rows, ours_only):
    head = f"{'tokens/s':>10} {'TFLOP/s':>7} {'MFU':>6} {'peak':>9}"
    print(f"\n{'case':13} {'batch':>11} | {'quadrille ' + head:>35}" + ("" if ours_only else f" | {'PyTorch ' + head:>35} | {'ratio':>6} {'of the floor':>12}"))
    for r in rows:
        line = f"{r['case']:13} {r['batch']:4} x {r['seq']:4} | " + rate_columns(r.get("tokens_per_second"), r["flops_per_token"], r.get("peak_bytes"))
        if not ours_only:
            torch_peak = r["torch"]["peak_bytes"] if r["torch"] else 0
            line += " | " + rate_columns(r.get("torch_tokens_per_second"), r["flops_per_token"], torch_peak)
            line += f" | {r['ratio']:5.3f}x" if "ratio" in r else f" | {'':6}"
            line += f" {r['floor_share']:12.1%}" if "floor_share" in r else ""
        print(line)


def print_shares(row, shares, parameters):
    """Which part of the ops' time each group of ops takes."""
    if not row["quadrille"]:
        return
    rows = row["quadrille"].get("table", row["quadrille"]).get("rows", [])
    total = sum(r["seconds"] for r in rows)
    if total <= 0:
        return
    shares = {what: sum(r["seconds"] for r in rows if r["name"] in names) / total for what, names in shares.items()}
    print(f"\n{row['case']}: {parameters / 1e9:.2f} billion parameters; " + ", ".join(f"{what} {share:.1%}" for what, share in shares.items()) +
          f", the rest {1 - sum(shares.values()):.1%}")


def print_breakdown(row):
    mine = row["quadrille"]
    if not mine:
        return
    table = mine.get("table", mine)
    print(f"\n{row['case']}: {mine['step_seconds'] * 1e3:.2f} ms a step, by op ({table.get('device', '')}; ceilings "
          f"{table.get('fma_flops', 0) / 1e12:.0f} TFLOP/s, {table.get('copy_bytes_per_second', 0) / 1e12:.2f} TB/s)")
    if row["floor"]:
        print("  floor " + ", ".join(f"{key[:-3]} {row['floor'][key]:.1f} ms" for key in ("products_ms", "attention_ms", "bytes_ms")))
    for r in sorted(table.get("rows", []), key=lambda r: -r["seconds"]):
        rate = f"{r['flops'] / 1e12:8.1f} TFLOP/s" if r["flops"] else f"{r['bytes_per_second'] / 1e12:8.2f} TB/s   " if r["bytes_per_second"] else " " * 16
        ceiling = f"{r['ceiling_share']:6.1%} of the ceiling" if r["ceiling_share"] else ""
        print(f"  {r['name']:28} {r['seconds'] * 1e3:9.3f} ms {r['share']:6.1%} {rate} {ceiling}")


def arguments(text, cases):
    """The command-line options that all comparisons share."""
    a = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--python", default=sys.executable, help="python3 that has PyTorch")
    a.add_argument("--ours-only", action="store_true")
    a.add_argument("--warm-up", type=int, default=5)
    a.add_argument("--repeat", type=int, default=20)
    a.add_argument("--set", action="append", default=[], metavar="key=value", help="another option for quadrille, may be repeated")
    a.add_argument("--json", metavar="FILE", help="write all measurements")
    return a


def run(a, cases, compare_case, print_case):
    """Compares the requested cases one after another and prints the table."""
    o = a.parse_args()
    wrong = [name for name in o.cases if name not in cases]
    if wrong:
        a.error(f"there is no case {wrong[0]}; there are: {', '.join(cases)}")
    rows = []
    for name in o.cases or cases:
        print(name, file=sys.stderr, flush=True)
        rows.append(compare_case(o, name))
        if o.json:
            with open(o.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
    print_table(rows, o.ours_only)
    for row in rows:
        print_case(row)
    return 0 if all(row["quadrille"] for row in rows) else 1


def main():
    a = arguments(__doc__, CASES)
    a.add_argument("--no-floor", action="store_true", help="do not measure the floor")
    return run(a, CASES, compare, print_breakdown)


if __name__ == "__main__":
    sys.exit(main())
