#!/usr/bin/env python3
"""Measures what a run loses while `quadrille serve` follows it.

  python3 bench/serve/watched.py [--quadrille PROGRAM] [--blocks 24] [--seconds 3] [--browser] [--shared]

One run trains on all cores but one or, on a machine of two, on one of them; the server and its client
have the others. Blocks of --seconds alternate between watched (a client asks for the list, the curves
and the report as the page does, every second; --browser: the page itself in Chromium) and not watched
(the server is stopped with SIGSTOP). Compared are the median step times of neighbouring blocks, so
that slow changes of the machine cancel, and the processor time per step. Bar: 1 %.

--shared: the run has all cores, and shares them with the server.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def processor_seconds(pid):
    """Of a process and its threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def follow(server, stop, pause):
    """Asks as the page does: the list every other second, the new rows every second."""
    epoch, row, turn, version = "", 0, 0, None
    while not stop.is_set():
        if not pause.is_set():
            try:
                if turn % 2 == 0:
                    server.get("/api/runs", timeout=5)
                answer = server.get(f"/api/progress?run=1&epoch={epoch}&row={row}", timeout=5)
                if answer["version"] != version:
                    server.get("/api/report?run=1", timeout=5)
                epoch, row, version = answer["epoch"], answer["rows"], answer["version"]
            except (OSError, RuntimeError, ValueError):
                pass
            turn += 1
        stop.wait(1.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--shared", action="store_true")
    given = parser.parse_args()
    given.quadrille = os.path.abspath(given.quadrille)
    os.environ.update(QUADRILLE=given.quadrille, QUADRILLE_SOURCE=ROOT)
    sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
    import browser  # pylint: disable=import-outside-toplevel
    import server  # pylint: disable=import-outside-toplevel
    cores = sorted(os.sched_getaffinity(0))
    mine = cores if given.shared else cores[:max(1, len(cores) - 1)]
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(ROOT, "examples", "data", "king-james.txt")
        command = ["taskset", "-c", ",".join(map(str, mine)), given.quadrille, "train", f"data.path={text}", "model.layers=2", "model.hidden=64",
                   "model.heads=2", "data.seq=64", "train.global_batch=8", "train.steps=1000000", f"run.threads={len(mine)}", "run.dir=runs/watched",
                   "run.save=false"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            metrics = os.path.join(folder, "runs", "watched", "metrics.jsonl")
            while not os.path.exists(metrics) and run.poll() is None:
                time.sleep(0.1)
            if not given.shared and len(cores) > 1:
                os.sched_setaffinity(0, set(cores) - set(mine))
            watched, plain, used, spent = [], [], 0.0, {True: [0.0, 0], False: [0.0, 0]}
            with server.Server(folder) as s:
                stop, pause = threading.Event(), threading.Event()
                chrome = browser.Browser(width=1280, height=900).__enter__() if given.browser else None
                if chrome:
                    chrome.visit(s.url)
                else:
                    threading.Thread(target=follow, args=(s, stop, pause), daemon=True).start()
                time.sleep(2)
                for block in range(given.blocks):
                    on = block % 2 == 0
                    if on:
                        pause.clear()
                        os.kill(s.process.pid, signal.SIGCONT)
                    else:
                        pause.set()
                        os.kill(s.process.pid, signal.SIGSTOP)
                    time.sleep(0.2)
                    before, busy, worked = os.path.getsize(metrics), processor_seconds(s.process.pid), processor_seconds(run.pid)
                    time.sleep(given.seconds)
                    used += processor_seconds(s.process.pid) - busy
                    with open(metrics, encoding="utf-8") as file:
                        file.seek(before)
                        lines = file.read().split("\n")[1:-1]
                    spent[on][0] += processor_seconds(run.pid) - worked
                    spent[on][1] += len(lines)
                    (watched if on else plain).append(statistics.median(json.loads(line)["step_seconds"] for line in lines))
                os.kill(s.process.pid, signal.SIGCONT)
                stop.set()
                if chrome:
                    chrome.__exit__(None, None, None)
            alive = run.poll() is None
            run.send_signal(signal.SIGINT)
            run.wait(timeout=60)
    # A watched block against the mean of its neighbours.
    ratios = [watched[i] / (0.5 * (plain[i - 1] + plain[i])) for i in range(1, len(plain))]
    per_step = [spent[on][0] / spent[on][1] for on in (True, False)]
    low, _, high = statistics.quantiles(ratios)
    print(f"step: watched {1e3 * statistics.median(watched):.3f} ms, not watched {1e3 * statistics.median(plain):.3f} ms; "
          f"ratio of neighbours: median {statistics.median(ratios):.4f}, quartiles {low:.4f} and {high:.4f}\n"
          f"processor time per step, which depends less on other work on the machine: ratio {per_step[0] / per_step[1]:.4f}\n"
          f"server: {100 * used / (given.seconds * len(watched)):.2f} % of one core while it is asked\n"
          f"the run {'is still running' if alive else 'HAS ENDED'}")


if __name__ == "__main__":
    main()
