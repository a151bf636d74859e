"""kill -9 of a random rank at random moments of a run that saves every other step: the rank is named
with its operation and place, the run loses at most one interval, resumes and ends bit-identically.
QUADRILLE_KILLS=1000 for the long form: over all layouts, with local ranks and under mpirun
(QUADRILLE_FIRST=8: from the eighth of these combinations on).
ctest: timeout 240
ctest: processors 2
"""
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import layouts  # noqa: E402
import program  # noqa: E402

STEPS, SAVE_EVERY = 60, 2
KILLS = int(os.environ.get("QUADRILLE_KILLS", "10"))
FIRST = int(os.environ.get("QUADRILLE_FIRST", "0"))
OF_EACH = 25  # kills of a combination of layout and backend
BACKENDS = ["local", "mpi"] if program.MPIRUN else ["local"]
RUN = [f"train.steps={STEPS}", f"run.save_every={SAVE_EVERY}", "run.deadline=30"]
KILLED = r"rank \d was (killed by signal 9 \(Killed\)|killed or crashed)"
WHERE = r" at 'step \d+, [^']+', (in|after) [a-z-]+.*, (operation|message) \d+ of group "


class Kill(program.ProgramTest):
    layout, backend = "dp3", "local"

    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments

    def arguments(self, folder, *more):
        ranks, options = layouts.arguments(self.layout)
        arguments = [program.PROGRAM, "train", f"data.path={self.corpus}", *options, *RUN, f"run.dir={folder}", *more]
        if self.backend == "mpi":
            return [program.MPIRUN, "--oversubscribe", "-n", str(ranks), *arguments]
        return [*arguments, f"parallel.ranks={ranks}"]

    def start(self, *more):
        return subprocess.Popen(self.arguments("run", *more), cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def kill_one(self, chance):
        """Whether a rank was killed; some may have exited."""
        ranks = [pid for pid in program.processes(self.corpus) if program.rank_of(pid) is not None or program.is_mpi_rank(pid)]
        if ranks:
            try:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                return True
            except ProcessLookupError:
                pass
        return False

    def kill_and_resume(self, kills, chance):
        """Kills, of which so many hit a run that had taken a step: those must be explained."""
        shutil.rmtree(self.path("whole"), ignore_errors=True)
        begin = time.monotonic()
        self.ok(subprocess.run(self.arguments("whole"), cwd=self.folder, capture_output=True, text=True, timeout=100, check=False))
        length = time.monotonic() - begin
        done = resumed = explained = 0
        while done < kills:
            # A new run now and then, so that its start is hit too; else the one that was
            # killed.
            fresh = not os.path.exists(self.path("run/checkpoints/latest"))
            before = self.last_step()
            run = self.start("--overwrite" if fresh else "--resume")
            resumed += not fresh
            time.sleep(chance.random() * length)
            stepped = self.last_step() > before and not fresh
            killed = run.poll() is None and self.kill_one(chance)
            _, errors = run.communicate(timeout=60)
            done += killed
            if self.finished(run, errors):
                self.check()
                continue
            self.assertNotEqual(run.returncode, 0, errors)
            if self.backend == "local":
                self.assertEqual(run.returncode, 1, errors)
                self.assertIn("killed by signal 9", errors)
            if stepped and self.last_step() < STEPS:  # not while it ended
                self.assertRegex(errors, KILLED + WHERE, f"{self.layout}, {self.backend}")
                explained += 1
            self.assertLessEqual(self.lost(), SAVE_EVERY)
            self.assertEqual(program.wait_until(lambda: not program.processes(self.corpus), 5), True)
        if os.path.exists(self.path("run/checkpoints/latest")):
            run = self.start("--resume")
            _, errors = run.communicate(timeout=60)
            self.assertTrue(self.finished(run, errors), errors)
            self.check()
        return resumed, explained

    def test_same_bits(self):
        if KILLS <= 20:
            resumed, _ = self.kill_and_resume(KILLS, random.Random(11))
            self.assertGreater(resumed, KILLS // 4)
            return
        every = [(layout, backend) for layout in layouts.LAYOUTS for backend in BACKENDS]
        for number in range(FIRST, FIRST + KILLS // OF_EACH):
            self.layout, self.backend = every[number % len(every)]
            resumed, explained = self.kill_and_resume(OF_EACH, random.Random(number))
            print(f"{number}: {self.layout}, {self.backend}: {OF_EACH} kills, resumed {resumed} times, {explained} hit a step", flush=True)

    def last_step(self):
        path = self.path("run/metrics.jsonl")
        return max((line["step"] for line in self.metrics("run")), default=0) if os.path.exists(path) else 0

    def lost(self):
        """Steps that were done and are not in a checkpoint."""
        folder = self.path("run/checkpoints")
        saved = [int(name[5:]) for name in os.listdir(folder) if name[5:].isdigit()] if os.path.exists(folder) else []
        return self.last_step() - max(saved, default=0)

    def finished(self, run, errors):
        """It ended normally, or was killed when everything was done."""
        return run.returncode == 0 or (run.returncode == 2 and f"has done all of its {STEPS} steps" in errors)

    def check(self):
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))
        self.assertEqual([name for name in os.listdir(self.path("run/checkpoints")) if name.endswith(".part")], [])
        shutil.rmtree(self.path("run"))


if __name__ == "__main__":
    unittest.main()
