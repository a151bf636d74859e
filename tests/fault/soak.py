#!/usr/bin/env python3
"""A soak: a supervised run that saves often and is checked in every way, for some minutes. Memory,
open files and shared memory of the launcher and of all ranks must stay flat, and nothing may be
reported.

  QUADRILLE=build/release/bin/quadrille tests/fault/soak.py [--minutes 120] [--ranks 3]

Sampled once per second: private memory, descriptors and threads of each process, and the shared
memory that all of them hold together. After a tenth of the time everything has been allocated; from then on the slope of a line
through the samples must be below 1 KiB per minute and process (or, for a short soak, the growth below
64 KiB), and the number of descriptors constant.
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

RUN = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=300", "data.seq=32", "train.global_batch=12", "run.threads=1",
       "train.steps=100M", "run.save_every=20", "run.keep=2", "run.check_replicas=10", "run.check_gradients=50", "run.check_messages=true",
       "train.schedule=constant", "--restarts", "3"]


def mapped(pid, *kinds):
    """Bytes of the process's memory of these kinds (names of lines of smaps_rollup)."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(kinds))


def private(pid):
    return mapped(pid, "Private_Clean:", "Private_Dirty:")


def shared_memory(pids):
    """Bytes of shared memory of these processes; each page counts once."""
    return sum(mapped(pid, "Pss_Shmem:") for pid in pids)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def slope(samples):
    """Bytes per minute of the line through (seconds, bytes)."""
    n = len(samples)
    x, y = sum(s for s, _ in samples) / n, sum(b for _, b in samples) / n
    spread = sum((s - x) ** 2 for s, _ in samples)
    return 60 * sum((s - x) * (b - y) for s, b in samples) / spread if spread else 0.0


def sample(names, begin, samples):
    for name, pid in names.items():
        samples.setdefault(name, []).append((time.monotonic() - begin, private(pid), len(os.listdir(f"/proc/{pid}/fd")),
                                             len(os.listdir(f"/proc/{pid}/task"))))


def watch(run, minutes, folder):
    """The samples of each process, and of their shared memory."""
    begin, samples, shared = time.monotonic(), {}, []
    while not os.path.exists(os.path.join(folder, "metrics.jsonl")):
        time.sleep(0.2)
        if run.poll() is not None:
            sys.exit("the run ended early")
    names = {"launcher": run.pid, **{f"rank {n}": pid for n, pid in enumerate(children(run.pid))}}
    while time.monotonic() - begin < 60 * minutes:
        if run.poll() is not None or children(run.pid) != list(names.values())[1:]:
            sys.exit("the run ended early, or a rank was started again")
        sample(names, begin, samples)
        shared.append((time.monotonic() - begin, shared_memory(names.values())))
        time.sleep(1)
    return samples, shared


def judge(samples):
    """Prints a line per process; whether all are flat."""
    good = True
    print(f"{'process':<10}{'samples':>9}{'KiB, first':>12}{'KiB, last':>12}{'KiB/min':>10}{'files':>8}{'threads':>9}")
    for name, lines in samples.items():
        settled = lines[len(lines) // 10:]
        growth = slope([(at, size) for at, size, _, _ in settled]) / 1024
        total = (settled[-1][1] - settled[0][1]) / 1024
        files, threads = {line[2] for line in settled}, {line[3] for line in settled}
        flat = (growth < 1 or total < 64) and max(files) - min(files) <= 3  # a checkpoint that is being written
        good = good and flat
        print(f"{name:<10}{len(lines):>9}{settled[0][1] / 1024:>12.0f}{settled[-1][1] / 1024:>12.0f}{growth:>10.2f}"
              f"{min(files):>5}-{max(files)}{min(threads):>6}-{max(threads)}" + ("" if flat else "  GROWS"))
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="quadrille-test-soak-")
    corpus = os.path.join(folder, "corpus.txt")
    with open(corpus, "w", encoding="ascii") as file:
        file.write("".join(chr(97 + i * i % 23 % 26) + (" " if i % 5 == 0 else "") for i in range(30000)))
    run_folder = os.path.join(folder, "run")
    with open(os.path.join(folder, "errors"), "wb") as errors, open(os.path.join(folder, "output"), "wb") as output:
        run = subprocess.Popen([os.environ["QUADRILLE"], "train", f"data.path={corpus}", *RUN, f"parallel.ranks={options.ranks}",
                                f"run.dir={run_folder}"], stdout=output, stderr=errors)
    try:
        samples, shared = watch(run, options.minutes, run_folder)
        run.send_signal(signal.SIGTERM)
        status = run.wait(timeout=60)
        with open(os.path.join(folder, "errors"), encoding="utf-8") as file:
            errors = file.read()
        with open(os.path.join(run_folder, "metrics.jsonl"), "rb") as file:
            steps = file.read().count(b"\n")
    finally:
        run.kill()
        run.wait()
        shutil.rmtree(folder, ignore_errors=True)
    flat = judge(samples)
    settled = shared[len(shared) // 10:]
    growth, total = slope(settled) / 1024, (settled[-1][1] - settled[0][1]) / 1024
    print(f"{steps} steps, {steps // 20} checkpoints in {options.minutes:g} minutes; shared memory: {settled[0][1] / 1024:.0f} KiB "
          f"first, {settled[-1][1] / 1024:.0f} last, {growth:.2f} KiB/min; status {status}")
    flat = flat and (growth < 1 or total < 64)
    if not flat or status != 75 or errors.count("\n") > 1:
        sys.exit(f"failed: status {status}, {errors}")


if __name__ == "__main__":
    main()
