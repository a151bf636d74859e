#!/usr/bin/env python3
"""Compares predictions with measurements on this machine: step time and memory of ten layouts of a
GPT-2-like model on 1, 2 and 4 ranks.

  python3 bench/this_machine/compare.py [--quadrille build/release/bin/quadrille] [--rounds 3]
      [--before "chrt -f 20"]

In each round the machine is measured (`bench machine`), then each layout is predicted from these
figures (`simulate`) and measured (`bench step`, ranks as threads).

A shared machine becomes faster and slower within seconds, by a third and more. So the steps of a
layout alternate with steps of a reference (`bench step --in-turn`): the same model with one rank
per core, the step that `bench machine` breaks down. The measured time of a layout is its ratio to
the reference, times the seconds of the reference in `bench machine`: its time on a machine as fast
as that one was. The raw seconds are printed too, with the error of the prediction relative to them.

On two cores the layout `dp 2` is the reference itself: its error only shows whether the parts of a
step add up to the whole. The error of a layout is the median over the rounds; all rounds are printed
too. --ops compares op by op.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
EXPERTS = ["model.experts=4", "model.experts_per_token=4", "model.expert_ffn=384", "model.activation=swiglu", "model.out_bias=false",
           "model.mlp_bias=false"]
LAYOUTS = {
    "one rank": ["parallel.ranks=1"],
    "dp 2": ["parallel.ranks=2"],
    "dp 4, zero 1": ["parallel.ranks=4", "parallel.zero=1"],
    "dp 2, zero 3": ["parallel.ranks=2", "parallel.zero=3"],
    "tp 2": ["parallel.ranks=2", "parallel.tp=2"],
    "dp 2 x tp 2, sp": ["parallel.ranks=4", "parallel.tp=2", "parallel.sp=true"],
    "pp 2": ["parallel.ranks=2", "parallel.pp=2"],
    "dp 2 x pp 2": ["parallel.ranks=4", "parallel.pp=2"],
    "cp 2": ["parallel.ranks=2", "parallel.cp=2"],
    "ep 2": ["parallel.ranks=2", "parallel.ep=2", *EXPERTS],
}


def model(o):
    return ["model.arch=gpt2", f"model.layers={o.layers}", f"model.hidden={o.hidden}", f"model.heads={o.hidden // 64}", f"model.vocab={o.vocab}",
            f"data.seq={o.seq}", f"train.global_batch={o.batch}", f"train.micro_batch={o.micro_batch}", *o.set]


def call(o, *words, timed=True):
    command = [*(o.before.split() if timed else []), o.quadrille, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def write_reference(o, path):
    """The step that `bench machine` breaks down: one single-threaded rank per core."""
    sections = {}
    for word in [*model(o), f"parallel.ranks={len(os.sched_getaffinity(0))}"]:
        key, value = word.split("=", 1)
        sections.setdefault(key.split(".")[0], []).append(f"  {key.split('.', 1)[1]}: {value}\n")
    with open(path, "w", encoding="utf-8") as f:
        f.write("".join(f"{section}:\n{''.join(lines)}" for section, lines in sections.items()))


def one_round(o, folder):
    cluster, reference, rows = os.path.join(folder, "machine.yaml"), os.path.join(folder, "reference.yaml"), {}
    write_reference(o, reference)
    call(o, "bench", "machine", *model(o), "--write", cluster, "--warm-up", str(o.warm_up), "--repeat", str(o.machine_steps))
    with open(cluster, encoding="utf-8") as f:
        machine = f.read()
    for name, words in LAYOUTS.items():
        if o.only and name not in o.only:
            continue
        steps, words = ["--warm-up", str(o.warm_up), "--repeat", str(o.steps)], [*model(o), *words]
        predicted = json.loads(call(o, "simulate", *words, "--cluster", cluster, "--json", timed=False))
        measured = json.loads(call(o, "bench", "step", *words, "--in-turn", reference, "--json", *steps))
        reference_seconds = float(re.search(r"a training step of (\S+) s", machine).group(1))
        in_turn = measured["over_other"] * reference_seconds
        row = rows[name] = {"predicted": predicted["step_seconds"], "measured": in_turn, "as_it_was": measured["step_seconds"],
                            "predicted_bytes": predicted["memory_bytes"], "planned_bytes": measured["planned_bytes"],
                            "allocated_bytes": measured["allocated_bytes"], "predicted_ops": predicted["ops"],
                            "measured_ops": {op["name"]: op["seconds"] * in_turn / measured["step_seconds"] for op in measured["rows"]}, "machine": machine}
        row["error"], row["error_as_it_was"] = row["predicted"] / in_turn - 1, row["predicted"] / row["as_it_was"] - 1
        print(f"  {name:16} predicted {1e3 * row['predicted']:7.1f} ms, measured {1e3 * in_turn:7.1f} ms alternating ({100 * row['error']:+.1f} %), "
              f"{1e3 * row['as_it_was']:7.1f} ms raw ({100 * row['error_as_it_was']:+.1f} %)", flush=True)
    return rows


def show_ops(rows):
    """Seconds of rank 0 by op, predicted and measured, in one round."""
    for name, row in rows.items():
        print(f"\n{name}")
        for op in [*row["measured_ops"], *(op for op in row["predicted_ops"] if op not in row["measured_ops"])]:
            predicted, measured = row["predicted_ops"].get(op, 0.0), row["measured_ops"].get(op, 0.0)
            if max(predicted, measured) > 0.002 * row["measured"]:
                print(f"  {op:26} predicted {1e3 * predicted:8.2f} ms, measured {1e3 * measured:8.2f} ms")


def show(o, rounds):
    print(f"\n{'layout':16} {'predicted':>10} {'measured':>10} {'error':>8}   {'rounds':18} {'raw':>9}   {'rounds':18} memory predicted, allocated")
    good = True
    for name in rounds[0]:
        rows = [r[name] for r in rounds]
        predicted, measured, error = (statistics.median(row[what] for row in rows) for what in ("predicted", "measured", "error"))
        exact = all(row["predicted_bytes"] == row["planned_bytes"] == row["allocated_bytes"] for row in rows)
        good = good and exact and abs(error) <= o.within
        as_it_was = statistics.median(row["error_as_it_was"] for row in rows)
        single, single_was = (", ".join(f"{100 * row[what]:+.0f}" for row in rows) for what in ("error", "error_as_it_was"))
        print(f"{name:16} {1e3 * predicted:7.1f} ms {1e3 * measured:7.1f} ms {100 * error:+6.1f} %   {single:18} "
              f"{100 * as_it_was:+7.1f} %   {single_was:18} {rows[0]['predicted_bytes']}, "
              f"{rows[0]['allocated_bytes']} bytes{'' if exact else ': differ'}")
    if o.ops:
        show_ops(rounds[0])
    print(f"\n{'all' if good else 'not all'} within {100 * o.within:.0f} % in time and exact in memory")
    return good


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    a.add_argument("--before", default="", help="a command prefix for timed programs, such as 'nice -n -20' or 'chrt -f 20'")
    a.add_argument("--layers", type=int, default=4)
    a.add_argument("--hidden", type=int, default=384)
    a.add_argument("--vocab", type=int, default=4096)
    a.add_argument("--seq", type=int, default=256)
    a.add_argument("--batch", type=int, default=8)
    a.add_argument("--micro-batch", type=int, default=1)
    a.add_argument("--steps", type=int, default=10)
    a.add_argument("--machine-steps", type=int, default=11)
    a.add_argument("--warm-up", type=int, default=1)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--within", type=float, default=0.15)
    a.add_argument("--only", action="append", choices=list(LAYOUTS))
    a.add_argument("--ops", action="store_true", help="also print seconds by op")
    a.add_argument("--set", action="append", default=[], metavar="key=value", help="another option, may be repeated")
    a.add_argument("--json", metavar="FILE", help="write all measurements")
    o = a.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(o.rounds):
            print(f"round {number + 1}", flush=True)
            rounds.append(one_round(o, folder))
    if o.json:
        with open(o.json, "w", encoding="utf-8") as f:
            json.dump(rounds, f, indent=1)
    return 0 if show(o, rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
