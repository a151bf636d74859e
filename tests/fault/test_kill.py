"""kill -9 of a random rank at random moments of a run that saves every other step: it loses at most
one interval, resumes and ends bit-identically. QUADRILLE_KILLS=100 for the long form.
ctest: timeout 240
ctest: processors 2
"""
import os
import random
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RANKS, STEPS, SAVE_EVERY = 3, 60, 2
KILLS = int(os.environ.get("QUADRILLE_KILLS", "10"))
RUN = ["train.global_batch=6", f"train.steps={STEPS}", f"parallel.ranks={RANKS}", f"run.save_every={SAVE_EVERY}", "run.deadline=30"]


class Kill(program.ProgramTest):
    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments

    def start(self, *more):
        return subprocess.Popen([program.PROGRAM, *self.small(*RUN, "run.dir=run", *more)], cwd=self.folder,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def test_same_bits(self):
        chance = random.Random(11)
        begin = time.monotonic()
        self.ok(self.run_program(*self.small(*RUN, "run.dir=whole")))
        length = time.monotonic() - begin
        kills = resumed = 0
        while kills < KILLS:
            # A new run now and then, so that its start is hit too; else the one that was
            # killed.
            fresh = not os.path.exists(self.path("run/checkpoints/latest"))
            run = self.start("--overwrite" if fresh else "--resume")
            resumed += not fresh
            time.sleep(chance.random() * length)
            ranks = [pid for pid in program.processes(self.folder) if pid != run.pid] if run.poll() is None else []
            ranks = [pid for pid in program.processes(self.corpus) if program.rank_of(pid) is not None] or ranks
            if ranks:
                try:
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    pass
            _, errors = run.communicate(timeout=60)
            if self.finished(run, errors):
                self.check()
                continue
            self.assertEqual(run.returncode, 1, errors)
            self.assertIn("killed by signal 9", errors)
            self.assertLessEqual(self.lost(), SAVE_EVERY)
        if os.path.exists(self.path("run/checkpoints/latest")):
            run = self.start("--resume")
            _, errors = run.communicate(timeout=60)
            self.assertTrue(self.finished(run, errors), errors)
            self.check()
        self.assertGreater(resumed, KILLS // 4)

    def lost(self):
        """Steps that were done and are not in a checkpoint."""
        folder = self.path("run/checkpoints")
        saved = [int(name[5:]) for name in os.listdir(folder) if name[5:].isdigit()] if os.path.exists(folder) else []
        done = [line["step"] for line in self.metrics("run")] if os.path.exists(self.path("run/metrics.jsonl")) else []
        return max(done, default=0) - max(saved, default=0)

    def finished(self, run, errors):
        """It ended normally, or was killed when everything was done."""
        return run.returncode == 0 or (run.returncode == 2 and f"has done all of its {STEPS} steps" in errors)

    def check(self):
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))
        self.assertEqual([name for name in os.listdir(self.path("run/checkpoints")) if name.endswith(".part")], [])
        for root, folders, files in os.walk(self.path("run"), topdown=False):
            for name in files + [folder for folder in folders if os.path.islink(os.path.join(root, folder))]:
                os.remove(os.path.join(root, name))
            os.rmdir(root)


if __name__ == "__main__":
    unittest.main()
