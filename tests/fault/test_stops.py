"""Ranks that a signal stops: the run ends in time and names rank, operation and place, under our
launcher, under mpirun and over UCX. Ranks that are stopped for a short time, and jobs that are suspended as a
whole, continue. QUADRILLE_STOPS=300 for the long form, over all layouts (QUADRILLE_BACKENDS=mpi,ucx: only
those; QUADRILLE_FIRST=100: from trial 100 on).
ctest: timeout 120
ctest: processors 2
"""
import concurrent.futures
import os
import random
import re
import signal
import statistics
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import layouts  # noqa: E402
import program  # noqa: E402
import worlds  # noqa: E402

STOPS = int(os.environ.get("QUADRILLE_STOPS", "3"))
FIRST = int(os.environ.get("QUADRILLE_FIRST", "0"))
BACKENDS = os.environ.get("QUADRILLE_BACKENDS", "mpi,ucx,local").split(",")
SHORT = STOPS <= 3
SUSPENDED = 4.5  # seconds: a rank may be stopped for 4
SUSPENSIONS = 1 if SHORT else 5  # of one run
AT_ONCE = 4  # trials: most of the time they wait
SECONDS = 7.0 if SHORT else 6.0  # 5, and slack for a machine with other work; 3 steps if those are longer
STOPPED = (r"rank {} has been stopped by a signal for \d+\.\d s at 'step \d+, [^']+', "
           r"(in|after) [a-z-]+.*, (operation|message) \d+ of group \S+; kill -CONT \d+ would have continued it\n")


class Stops(program.ProgramTest):
    def start(self, trial, layout, backend):
        """A run that would take hours, some steps after its start, and its ranks."""
        ranks, options = layouts.arguments(layout)
        folder = self.path(trial)
        world = worlds.World(backend, ranks, ["train", f"data.path={self.corpus}", *options, "train.steps=100M", f"run.dir={folder}"],
                             folder, self.path(f"errors-{trial}"))
        self.addCleanup(world.kill)
        metrics = os.path.join(folder, "metrics.jsonl")
        self.assertTrue(program.wait_until(lambda: os.path.exists(metrics) and os.path.getsize(metrics) > 600, 60), world.errors())
        pids = world.pids()
        self.assertEqual(sorted(pids), list(range(ranks)))
        return world, pids

    def stop_one(self, trial, layout, backend, chance):
        """Seconds until the stopped rank was named."""
        world, pids = self.start(trial, layout, backend)
        victim = chance.choice(sorted(pids))
        time.sleep(chance.random())
        begin = time.monotonic()
        os.kill(pids[victim], signal.SIGSTOP)
        steps = [line["step_seconds"] for line in self.metrics(trial)][-15:]
        most = max(SECONDS, 3 * statistics.median_high(steps))
        if not program.wait_until(lambda: re.search(STOPPED.format(victim), world.errors()), 30 + most):
            self.fail(f"rank {victim} is not named; steps of {steps} s\n{world.where()}")
        seconds = time.monotonic() - begin
        self.assertLess(seconds, most, f"{layout}, {backend}, steps of {steps} s")
        if world.launcher() is None:  # nothing kills the stopped rank, which ends when it continues
            self.assertTrue(program.wait_until(lambda: list(world.pids()) == [victim], 30), world.pids())
            os.kill(pids[victim], signal.SIGCONT)
        self.assertNotIn(0, world.wait(30), world.errors())
        left = program.wait_until(lambda: not program.processes(world.mark), 5)
        self.assertTrue(left, f"{layout}, {backend}: processes are left")
        return seconds

    @staticmethod
    def signal_all(world, pids, number):
        try:
            for pid in pids:
                os.kill(pid, number)
        except ProcessLookupError as error:
            world.wait(30)
            raise AssertionError(f"{number!r}: a process has ended: {world.errors()}") from error

    def suspend(self, trial, layout, backend, chance):
        """A whole job for longer than a rank may be stopped, then a rank for a moment."""
        world, pids = self.start(trial, layout, backend)
        every = [*pids.values(), *([world.launcher()] if world.launcher() else [])]
        for number in range(SUSPENSIONS):
            chosen = [chance.choice(list(pids.values()))] if number % 2 == 1 else chance.sample(every, len(every))
            self.signal_all(world, chosen, signal.SIGSTOP)
            time.sleep(3 * chance.random() if number % 2 == 1 else SUSPENDED + (0 if SHORT else 4) * chance.random())
            self.signal_all(world, chance.sample(chosen, len(chosen)), signal.SIGCONT)
            time.sleep(0.2 + chance.random())
            self.assertTrue(world.runs(), f"suspension {number}: {world.errors()}")
        ended = signal.SIGTERM if backend == "local" else signal.SIGUSR1
        self.signal_all(world, [world.launcher()] if backend == "local" else pids.values(), ended)
        self.assertIn(75, world.wait(60), world.errors())
        self.assertRegex(world.errors(), "SIG(TERM|USR1): stopped after step")

    def test_stopped_ranks_and_suspensions(self):
        names, backends = list(layouts.LAYOUTS), [backend for backend in BACKENDS if backend in worlds.backends()]
        runs = -(-STOPS // (3 * SUSPENSIONS)) if not SHORT else len(backends)
        results = []

        def trial(job, number):
            layout, backend = names[number // len(backends) % len(names)], backends[number % len(backends)]
            try:
                seconds = job(f"{job.__name__}{number}", layout, backend, random.Random(number))
                results.append((job.__name__, seconds, None))
            except (AssertionError, OSError, ValueError) as error:
                results.append((job.__name__, None, f"{job.__name__} {number}, {layout}, {backend}: {error}"))
                print("FAILED", results[-1][2], flush=True)
            if not SHORT:
                print(f"{job.__name__} {number}: {layout}, {backend}, {results[-1][1]} s", flush=True)

        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            for number in range(FIRST, FIRST + STOPS):
                pool.submit(trial, self.stop_one, number)
                if number < FIRST + runs:
                    pool.submit(trial, self.suspend, number)
        seconds = [seconds for name, seconds, failure in results if name == "stop_one" and not failure]
        failed = [failure for _, _, failure in results if failure]
        print(f"{STOPS} stopped ranks, named after {min(seconds):.1f} to {max(seconds):.1f} s; {runs * SUSPENSIONS} suspensions; "
              f"{len(failed)} failed", flush=True)
        self.assertEqual(len(results), STOPS + runs)
        self.assertEqual(failed, [], "\n\n".join(failed))


if __name__ == "__main__":
    unittest.main()
