#!/usr/bin/env python3
"""Runs the libFuzzer targets and prints executions, speed and peak memory of each.

  tools/fuzz.py --build build/fuzz --runs 1000000 [--only NAME …]

Each target starts from tests/fuzz/seeds/NAME and the corpus of earlier runs (BUILD/corpus/NAME), with
the dictionary tests/fuzz/NAME.dict. --runs 0 only replays the seeds and that corpus. A target fails
if it crashes, takes more than --timeout seconds for an input, or more than 1 GiB of memory; the input
is then saved in BUILD and named. The exit status is 1 if one failed.
"""
import argparse
import concurrent.futures
import os
import re
import subprocess
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
# Short allocation histories and a small quarantine: more runs per second. To investigate a failure,
# run the target by hand.
SANITIZERS = {"ASAN_OPTIONS": "malloc_context_size=3:quarantine_size_mb=32", "UBSAN_OPTIONS": "print_stacktrace=1"}
LIMITS = ["-max_len=8192", "-rss_limit_mb=1024", "-verbosity=0", "-print_final_stats=1"]


def run(build, name, runs, timeout):
    """(executions, CPU seconds, peak MiB, output, exit status)"""
    corpus = os.path.join(build, "corpus", name)
    seeds = os.path.join(ROOT, "tests", "fuzz", "seeds", name)
    words = os.path.join(ROOT, "tests", "fuzz", name + ".dict")
    os.makedirs(corpus, exist_ok=True)
    command = [os.path.join(build, "fuzz", name), f"-runs={runs}", f"-timeout={timeout}", *LIMITS, f"-artifact_prefix={build}/{name}-",
               *([f"-dict={words}"] if os.path.exists(words) else []), corpus, *([seeds] if os.path.isdir(seeds) else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               env={**os.environ, **SANITIZERS})
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    stat = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", output)}
    return (stat.get("number_of_executed_units", 0), usage.ru_utime + usage.ru_stime, stat.get("peak_rss_mb", 0), output,
            process.returncode)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build/fuzz")
    parser.add_argument("--runs", type=int, default=1000000)
    parser.add_argument("--timeout", type=int, default=10, help="seconds for one input; raise it on a busy machine")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of targets to run concurrently")
    parser.add_argument("--only", nargs="+", help="names of targets")
    options = parser.parse_args()
    known = sorted(os.listdir(os.path.join(options.build, "fuzz")))
    for name in options.only or []:
        if name not in known:
            sys.exit(f"there is no target {name}; the targets are {', '.join(known)}")
    failed = []
    print(f"{'target':<26}{'executions':>12}{'CPU s':>9}{'per CPU s':>12}{'peak MiB':>10}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(run, options.build, name, options.runs, options.timeout): name for name in options.only or known}
        for job in concurrent.futures.as_completed(jobs):
            executions, seconds, memory, output, status = job.result()
            name = jobs[job]
            print(f"{name:<26}{executions:>12}{seconds:>9.1f}{executions / seconds:>12.0f}{memory:>10}"
                  + ("" if status == 0 else "  FAILED"), flush=True)
            if status != 0:
                failed.append(name)
                print(output[-6000:], flush=True)
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
