"""Calls on files fail, each of them in turn: EIO, a full disk, a stale network file, a short read or
write, in data, metrics, saves and loads. Training continues where it can, what it has saved stays
intact, and an error names the file. Or a process is killed at the call, and the run resumes
bit-identically. A sample of the calls by default; QUADRILLE_IO=all for each.
ctest: timeout 200
ctest: processors 2
"""
import concurrent.futures
import os
import random
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import inject  # noqa: E402
import program  # noqa: E402

ALL = os.environ.get("QUADRILLE_IO") == "all"
SAMPLE = 1  # calls per kind of failure
KINDS = ["EIO", "ENOSPC", "gone", "short"]
STEPS = 6


@unittest.skipUnless(inject.POSSIBLE, inject.MISSING)
class Files(inject.InjectTest):
    def arguments(self, folder, *more, data=None, steps=STEPS):
        return ["train", f"data.path={data or self.corpus}", *program.SMALL, "model.vocab=300", f"train.steps={steps}", "--ranks", "2",
                "run.save_every=2", "train.schedule=constant", f"run.dir={folder}", "run.deadline=10", *more]

    def cases(self, arguments, path, kinds, only=True, calls=""):
        """(kind, rank, n) of the calls to fail, for the arguments of a run in a folder."""
        chance, found = random.Random(3), []
        for rank in ("launcher", 0, 1) if ALL else (0,):
            result, total = self.inject(arguments(f"count-{rank}"), kinds[0], rank=rank, path=path.format(rank=rank), calls=calls)
            self.ok(result)
            shutil.rmtree(self.path(f"count-{rank}"), ignore_errors=True)
            every = range(1, total + 1)
            found += [(kind, rank, n) for kind in kinds for n in (every if ALL else sorted(chance.sample(every, min(SAMPLE, total))))]
        return found

    def each(self, what, cases, trial):
        def attempt(number, kind, rank, n):
            folder = f"{what}-{number}"
            try:
                return trial(folder, kind, rank, n)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                return f"{what}: {kind}, {rank}, call {n}: {error}"
            finally:
                shutil.rmtree(self.path(folder), ignore_errors=True)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            failed = [text for text in (job.result() for job in [pool.submit(attempt, number, *case) for number, case in enumerate(cases)])
                      if text]
        print(f"{what}: {len(cases)} failing calls, {len(failed)} failed", *(failed if ALL else []), sep="\n", flush=True)
        self.assertEqual(failed, [], "\n\n".join(failed))

    def failing(self, folder, arguments, kind, rank, n, path, only=True, calls=""):
        return self.inject(arguments, kind, rank=rank, at=n, only=only, path=path, calls=calls, count=f"count-{folder}")[0]

    def whole(self):
        if not os.path.exists(self.path("whole")):
            self.ok(self.run_program(*self.arguments("whole", steps=STEPS + 2)))
            shutil.copytree(self.path("whole"), self.path("part"), symlinks=True)
        return self.numbers("whole")

    def copy_part(self, folder):
        """A run that has done STEPS of its steps."""
        self.whole()
        shutil.rmtree(self.path(folder), ignore_errors=True)
        shutil.copytree(self.path("part"), self.path(folder), symlinks=True)
        os.remove(self.path(f"{folder}/checkpoints/latest"))
        os.symlink(f"step-{STEPS:012d}", self.path(f"{folder}/checkpoints/latest"))
        for name in os.listdir(self.path(f"{folder}/checkpoints")):
            if name.startswith("step-") and int(name[5:]) > STEPS:
                shutil.rmtree(self.path(f"{folder}/checkpoints/{name}"))

    def test_data(self):
        """Text, and shards that are mapped: an error names the file, or the result is the same."""
        whole = self.whole()[:STEPS]
        self.ok(self.run_program("tokenize", self.corpus, "--output", "shards", "--train", "300"))
        for data, name in ((self.corpus, "corpus.txt"), ("shards", "shards/")):
            def arguments(folder, data=data):
                return self.arguments(folder, data=data)

            def trial(folder, kind, rank, n, arguments=arguments, name=name):
                result = self.failing(folder, arguments(folder), kind, rank, n, name)
                if result.returncode == 0:
                    self.assertEqual(self.numbers(folder), whole)
                else:
                    self.assertNotEqual(kind, "short", result.stderr)
                    self.one_line(result, result.returncode, name.rstrip("/"))
            self.each(f"data, {os.path.basename(data)}", self.cases(arguments, name, ["EIO", "gone", "short"]), trial)

    def test_metrics(self):
        """A line that is not written is reported, and training continues."""
        whole = self.whole()[:STEPS]

        def trial(folder, kind, rank, n):
            result = self.failing(folder, self.arguments(folder), kind, rank, n, "metrics.jsonl", calls="ws")
            self.ok(result)
            if kind == "short":
                self.assertEqual(self.numbers(folder), whole)
        self.each("metrics", self.cases(self.arguments, "metrics.jsonl", KINDS, calls="ws"), trial)

    def test_saves(self):
        """A save that fails is reported; training continues; what is found afterwards is sound."""
        whole = self.whole()

        def trial(folder, kind, rank, n):
            result = self.failing(folder, self.arguments(folder), kind, rank, n, "checkpoints", calls="owsnm")
            if result.returncode != 0:
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertRegex(result.stderr, f"no checkpoint after step {STEPS}|checkpoints")
            self.assertNotEqual((kind, result.returncode), ("short", 1), result.stderr)
            if not os.path.exists(self.path(f"{folder}/checkpoints/latest")):
                return
            self.ok(self.run_program(*self.arguments(folder, "--resume", steps=STEPS + 2)))
            self.assertEqual(self.numbers(folder), whole)
        self.each("saves", self.cases(self.arguments, "checkpoints", KINDS, calls="owsnm"), trial)

    def test_loads(self):
        """A checkpoint that cannot be read: an older one is used, or an error names it."""
        whole = self.whole()

        def arguments(folder):
            self.copy_part(folder)
            return self.arguments(folder, "--resume", "run.save=false", steps=STEPS + 2)

        def trial(folder, kind, rank, n):
            result = self.failing(folder, arguments(folder), kind, rank, n, "checkpoints", calls="orm")
            if result.returncode == 0:
                self.assertEqual(self.numbers(folder), whole)
            else:
                self.assertNotEqual(kind, "short", result.stderr)
                self.one_line(result, result.returncode, "checkpoints")
        self.each("loads", self.cases(arguments, "checkpoints", ["EIO", "gone", "short"], calls="orm"), trial)

    def test_kills(self):
        """A process is killed at a call on the run folder: of a run that saves and removes earlier
        checkpoints, and of one that resumes. It resumes without a manual step."""
        whole = self.whole()

        def first(folder):
            return self.arguments(folder, "run.keep=1")

        def resumed(folder):
            self.copy_part(folder)
            return self.arguments(folder, "run.keep=1", "--resume", steps=STEPS + 2)

        for what, arguments in (("killed in saves", first), ("killed in resumed runs", resumed)):
            def trial(folder, kind, rank, n, arguments=arguments):
                result = self.failing(folder, arguments(folder), kind, rank, n, f"/{folder}/", calls="orwsnmu")
                self.assertEqual(result.returncode, -9 if rank == "launcher" else 1, result.stderr)
                how = "--resume" if os.path.exists(self.path(f"{folder}/checkpoints/latest")) else "--overwrite"
                again = self.run_program(*self.arguments(folder, "run.keep=1", how, steps=STEPS + 2))
                done = f"has done all of its {STEPS + 2} steps" in again.stderr  # earlier checkpoints may be left
                if not done:
                    self.ok(again)
                self.assertEqual(self.numbers(folder), whole)
                kept = [name for name in os.listdir(self.path(f"{folder}/checkpoints")) if name.startswith("step-")]
                self.assertIn(f"step-{STEPS + 2:012d}", kept)
                self.assertTrue(done or len(kept) == 1, kept)
            self.each(what, self.cases(arguments, "/count-{rank}/", ["kill"], calls="orwsnmu"), trial)


if __name__ == "__main__":
    unittest.main()
