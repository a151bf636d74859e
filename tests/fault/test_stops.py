"""Ranks that a signal stops: the run ends in time and names rank, operation and place, under our
launcher and under mpirun. Ranks that are stopped for a short time, and jobs that are suspended as a
whole, continue. QUADRILLE_STOPS=300 for the long form, over all layouts (QUADRILLE_FIRST=100: from
trial 100 on).
ctest: timeout 120
ctest: processors 2
"""
import concurrent.futures
import os
import random
import re
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import layouts  # noqa: E402
import program  # noqa: E402

STOPS = int(os.environ.get("QUADRILLE_STOPS", "1"))
FIRST = int(os.environ.get("QUADRILLE_FIRST", "0"))
SHORT = STOPS <= 2
SUSPENDED = 4.5  # seconds: a rank may be stopped for 4
SUSPENSIONS = 1 if SHORT else 5  # of one run
AT_ONCE = 4  # trials: most of the time they wait
SECONDS = 7.0 if SHORT else 6.0  # 5, and slack for a machine with other work
STOPPED = (r"rank {} has been stopped by a signal for \d+\.\d s at 'step \d+, [^']+', "
           r"(in|after) [a-z-]+.*, (operation|message) \d+ of group \S+; kill -CONT \d+ would have continued it\n")
BACKENDS = ["mpi", "local"] if program.MPIRUN else ["local"]


class Stops(program.ProgramTest):
    def start(self, trial, layout, backend):
        """A run that would take hours, some steps after its start, and its ranks."""
        ranks, options = layouts.arguments(layout)
        folder = self.path(f"run{trial}")
        launcher = [] if backend == "local" else [program.MPIRUN, "--oversubscribe", "-n", str(ranks)]
        with open(self.path(f"errors{trial}"), "wb") as errors:
            run = subprocess.Popen([*launcher, program.PROGRAM, "train", f"data.path={self.corpus}", *options, "train.steps=100M",
                                    f"run.dir={folder}", *([f"parallel.ranks={ranks}"] if backend == "local" else [])],
                                   cwd=self.folder, stdout=subprocess.DEVNULL, stderr=errors)
        self.addCleanup(run.kill)
        metrics = os.path.join(folder, "metrics.jsonl")
        self.assertTrue(program.wait_until(lambda: os.path.exists(metrics) and os.path.getsize(metrics) > 600, 60), self.errors(trial))
        name = "QUADRILLE_RANK" if backend == "local" else "OMPI_COMM_WORLD_RANK"
        found = {pid: program.variable_of(pid, name) for pid in program.processes(folder)}
        pids = {int(rank): pid for pid, rank in found.items() if rank is not None}
        self.assertEqual(sorted(pids), list(range(ranks)))
        return run, pids

    def errors(self, trial):
        with open(self.path(f"errors{trial}"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def stop_one(self, trial, layout, backend, chance):
        """Seconds until the stopped rank was named."""
        run, pids = self.start(trial, layout, backend)
        victim = chance.choice(sorted(pids))
        time.sleep(chance.random())
        begin = time.monotonic()
        os.kill(pids[victim], signal.SIGSTOP)
        self.assertTrue(program.wait_until(lambda: re.search(STOPPED.format(victim), self.errors(trial)), 30), self.errors(trial))
        seconds = time.monotonic() - begin
        self.assertNotEqual(run.wait(timeout=30), 0)
        left = program.wait_until(lambda: not program.processes(self.path(f"run{trial}")), 5)
        self.assertTrue(left, f"{layout}, {backend}: processes are left")
        return seconds

    def suspend(self, trial, layout, backend, chance):
        """A whole job for longer than a rank may be stopped, then a rank for a moment."""
        run, pids = self.start(trial, layout, backend)
        every = [*pids.values(), run.pid]
        for number in range(SUSPENSIONS):
            chosen = [chance.choice(list(pids.values()))] if number % 2 == 1 else chance.sample(every, len(every))
            for pid in chosen:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(3 * chance.random() if number % 2 == 1 else SUSPENDED + (0 if SHORT else 4) * chance.random())
            for pid in chance.sample(chosen, len(chosen)):
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.2 + chance.random())
            self.assertIsNone(run.poll(), f"{layout}, {backend}, suspension {number}: " + self.errors(trial))
        if backend == "local":
            run.send_signal(signal.SIGTERM)
        else:
            for pid in pids.values():
                os.kill(pid, signal.SIGUSR1)
        run.wait(timeout=60)
        self.assertRegex(self.errors(trial), "SIG(TERM|USR1): stopped after step")

    def test_stopped_ranks_and_suspensions(self):
        names = list(layouts.LAYOUTS)
        runs = -(-STOPS // (3 * SUSPENSIONS))
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            def submit(job, number):
                layout, backend = names[number // len(BACKENDS) % len(names)], BACKENDS[number % len(BACKENDS)]
                return pool.submit(job, f"{job.__name__}{number}", layout, backend, random.Random(number))
            suspended = [submit(self.suspend, number) for number in range(FIRST, FIRST + runs)]
            seconds = [job.result() for job in [submit(self.stop_one, number) for number in range(FIRST, FIRST + STOPS)]]
            for job in suspended:
                job.result()
        print(f"{STOPS} stopped ranks, named after {min(seconds):.1f} to {max(seconds):.1f} s; {runs * SUSPENSIONS} suspensions", flush=True)
        self.assertLess(max(seconds), SECONDS)


if __name__ == "__main__":
    unittest.main()
