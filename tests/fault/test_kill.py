"""kill -9 at random moments of a run that saves every other step, of a rank, rank 0, the launcher or
all of them: a killed rank is named with its operation and place, no process or shared memory stays,
the run loses at most one interval, resumes and ends bit-identically. QUADRILLE_KILLS=1000 for the
long form: in all layouts, with local ranks, under mpirun and over UCX
(QUADRILLE_BACKENDS=mpi,ucx: only those; QUADRILLE_FIRST=8: from combination 8 of both on).
ctest: timeout 240
ctest: processors 2
"""
import collections
import os
import random
import shutil
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import layouts  # noqa: E402
import program  # noqa: E402
import worlds  # noqa: E402

STEPS = {"local": 24, "mpi": 12, "ucx": 24}  # ranks under mpirun poll: slow on few cores
SAVE_EVERY = 2
SHARED = {"local": "quadrille", "mpi": ("vader_segment.", "sm_segment."), "ucx": "ucx_"}  # starts of names in /dev/shm
KILLS = int(os.environ.get("QUADRILLE_KILLS", "0"))
FIRST = int(os.environ.get("QUADRILLE_FIRST", "0"))
BACKENDS = os.environ.get("QUADRILLE_BACKENDS", "").split(",")
OF_EACH = 5  # kills of a combination of layout and backend
RUN = [f"run.save_every={SAVE_EVERY}", "run.deadline=30"]
VICTIMS = 7 * ["rank"] + ["rank 0", "launcher", "all"]
NAMED = (r"rank {0} (was killed by signal 9 \(Killed\)|was killed or crashed|failed: its process has ended).*"
         r" at 'step \d+, [^']+', (in|after) [a-z-]+.*, (operation|message) \d+ of group ")


class Kill(program.ProgramTest):
    layout, backend = "dp3", "local"

    def setUp(self):
        super().setUp()
        self.counts = collections.Counter()
        self.failed = []
        self.world = None

    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments

    def start(self, folder, *more):
        ranks, options = layouts.arguments(self.layout)
        arguments = ["train", f"data.path={self.corpus}", *options, *RUN, f"train.steps={STEPS[self.backend]}",
                     f"run.join_deadline={6 + ranks}", f"run.dir={folder}", *more]
        self.world = worlds.World(self.backend, ranks, arguments, self.corpus, self.path("errors"),
                                  mixed=self.counts["kills"] % 2 == 1)
        return self.world

    @staticmethod
    def kill(world, victim, chance):
        """Ranks that were killed, with the launcher as None; some may have exited."""
        pids = {**world.pids(), **({None: world.launcher()} if world.launcher() else {})}
        ranks = [rank for rank in pids if rank is not None]
        if victim == "all":
            chosen = chance.sample(list(pids), len(pids))
        elif victim == "launcher":
            chosen = [None]
        elif victim == "rank 0":
            chosen = [0]
        else:
            chosen = [chance.choice(ranks)] if ranks else []
        killed = []
        for rank in chosen:
            try:
                os.kill(pids[rank], signal.SIGKILL)
                killed.append(rank)
            except (KeyError, ProcessLookupError):
                pass
        return killed

    def trial(self, length, chance):
        """Starts or resumes the run and kills a part of it; returns whether it had finished."""
        # A new run now and then, so that its start is hit too; else the one that was killed.
        fresh = not os.path.exists(self.path("run/checkpoints/latest"))
        before, victim = self.last_step(), chance.choice(VICTIMS)
        if victim == "launcher" and self.backend == "ucx":
            victim = "rank"
        world = self.start("run", "--overwrite" if fresh else "--resume")
        time.sleep(chance.random() * length)
        stepped = self.last_step() > before and not fresh
        killed = self.kill(world, victim, chance) if world.runs() else []
        if killed:
            self.counts.update(kills=1, resumed=not fresh, **{victim: 1})
        statuses, errors = world.wait(120), world.errors()
        if self.finished(world, statuses, killed):
            self.check()
            return True
        self.assertTrue(killed, f"{statuses}: {errors}")
        self.assertTrue(program.wait_until(lambda: not program.processes(self.corpus), 5), "processes are left")
        self.assertLessEqual(self.lost(), SAVE_EVERY, errors)
        for rank, status in enumerate(statuses):
            self.assertNotEqual(status, 0, f"{statuses}: {errors}")
            if world.launcher() is None and rank not in killed:
                self.assertEqual(status, 1, f"{statuses}: {errors}")
        if len(killed) == 1 and killed != [None]:
            if self.backend != "mpi":  # where mpirun may end all before they have met
                self.assertRegex(errors, f"rank {killed[0]}\\b")
            elif f"rank {killed[0]}" not in errors:
                self.counts["not named"] += 1
            if self.backend == "local":
                self.assertEqual(statuses, [1])
                self.assertIn("killed by signal 9", errors)
            if stepped and self.last_step() < STEPS[self.backend]:  # not while it ended
                self.assertRegex(errors, NAMED.format(killed[0]))
                self.counts["named with a place"] += 1
        return False

    def attempt(self, job, *arguments):
        """A trial that fails is counted, and the next one begins with a new run."""
        try:
            job(*arguments)
        except (AssertionError, OSError, ValueError) as error:
            self.failed.append(f"{self.layout}, {self.backend}, {job.__name__} {self.counts['kills']}: {error}")
            print("FAILED", self.failed[-1], flush=True)
            self.world.kill()
            shutil.rmtree(self.path("run"), ignore_errors=True)

    def kill_and_resume(self, kills, resumed, chance):
        """So many kills, at least so many of them of resumed runs."""
        shutil.rmtree(self.path("whole"), ignore_errors=True)
        begin, unused, most = time.monotonic(), program.unused_shared_memory(), self.counts["kills"] + kills
        world = self.start("whole")
        self.assertEqual(set(world.wait(300)), {0}, world.errors())
        length = time.monotonic() - begin
        resumed += self.counts["resumed"]
        while self.counts["kills"] < most or self.counts["resumed"] < resumed:
            self.attempt(self.trial, length, chance)
            self.assertLess(len(self.failed), 20, "\n\n".join(self.failed))
        self.attempt(self.rest)
        left = {name for name in program.unused_shared_memory() - unused if name.startswith(SHARED[self.backend])}
        # Libraries may be killed before they can remove it (docs/notes/reliability.md), also those
        # of other tests.
        if KILLS and not program.wait_until(lambda: not left & program.unused_shared_memory(), 20):
            self.failed.append(f"{self.layout}, {self.backend}: shared memory is left: {left}")
            print("FAILED", self.failed[-1], flush=True)

    def rest(self):
        """Steps that are missing after the last kill."""
        if os.path.exists(self.path("run")):
            world = self.start("run", "--resume" if os.path.exists(self.path("run/checkpoints/latest")) else "--overwrite")
            self.assertTrue(self.finished(world, world.wait(120), []), world.errors())
            self.check()

    def test_same_bits(self):
        backends = [backend for backend in worlds.backends() if backend in BACKENDS or BACKENDS == [""]]
        every = [(layout, backend) for layout in layouts.LAYOUTS for backend in backends]
        if KILLS == 0:
            every = [("dp3", backend) for backend in backends]
        for number in range(FIRST, FIRST + KILLS // OF_EACH) if KILLS else range(len(every)):
            before = self.counts.copy()
            self.layout, self.backend = every[number % len(every)]
            begin = time.monotonic()
            kills = OF_EACH if KILLS else 10 if self.backend == "local" else 2
            self.kill_and_resume(kills, 0 if KILLS else kills // 3, random.Random(number if KILLS else 11))
            print(f"{number}: {self.layout}, {self.backend}:", self.told(self.counts - before), f"in {time.monotonic() - begin:.0f} s",
                  flush=True)
        print("all:", self.told(self.counts), f"{len(self.failed)} failed")
        self.assertEqual(self.failed, [], "\n\n".join(self.failed))

    @staticmethod
    def told(counts):
        return ", ".join(f"{name} {counts[name]}" for name in sorted(counts))

    def last_step(self):
        path = self.path("run/metrics.jsonl")
        return max((line["step"] for line in self.metrics("run")), default=0) if os.path.exists(path) else 0

    def lost(self):
        """Steps that were done and are not in a checkpoint."""
        folder = self.path("run/checkpoints")
        saved = [int(name[5:]) for name in os.listdir(folder) if name[5:].isdigit()] if os.path.exists(folder) else []
        return self.last_step() - max(saved, default=0)

    @staticmethod
    def finished(world, statuses, killed):
        """It ended normally, or was killed when everything was done."""
        kept = [status for rank, status in enumerate(statuses) if (rank if world.launcher() is None else None) not in killed]
        return set(kept) == {0} or (2 in kept and f"has done all of its {STEPS[world.backend]} steps" in world.errors())

    def check(self):
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))
        self.assertEqual([name for name in os.listdir(self.path("run/checkpoints")) if name.endswith(".part")], [])
        shutil.rmtree(self.path("run"))


if __name__ == "__main__":
    unittest.main()
