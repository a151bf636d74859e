"""The nth allocation of a command fails, in the launcher or in one rank: the command ends with an
error that names memory, on all ranks, and without a crash; or it succeeds without that memory.
A sample of n by default; QUADRILLE_ALLOCATIONS=all for every n, =50 for every 50th, =stacks for the
first of each call stack that allocates, once alone and once with all later ones
(QUADRILLE_COMMAND=plan: only this command).
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

EVERY = os.environ.get("QUADRILLE_ALLOCATIONS", "")
ONLY = os.environ.get("QUADRILLE_COMMAND", "")
SAMPLE = 2  # n per command and process
SMALL = [*program.SMALL, "train.steps=3", "model.vocab=300"]


@unittest.skipUnless(inject.POSSIBLE, inject.MISSING)
class Allocations(inject.InjectTest):
    def prepare(self):
        """What the commands read: a run with checkpoints, and its weights as a Hugging Face folder."""
        self.ok(self.run_program("train", f"data.path={self.corpus}", *SMALL, "run.dir=run", "run.save_every=1"))
        self.ok(self.run_program("convert", "run", "hf"))

    def commands(self):
        train = ["train", f"data.path={self.corpus}", *SMALL, "run.save_every=1", "run.dir=new{n}", "run.deadline=5"]
        cluster = ["--cluster", "h100", "--gpus", "8", "--model", "llama-tiny", "train.global_batch=8"]
        return {
            "check": (["check", *SMALL, "--ranks", "2"], ["launcher"]),
            "train": ([*train, "--ranks", "2"], ["launcher", 0, 1]),
            "train as threads": ([*train, "--ranks", "2", "--ranks-as", "threads"], ["launcher"]),
            "resume": (["train", f"data.path={self.corpus}", *SMALL, "--resume", "train.steps=5", "run.dir=old{n}", "run.deadline=5", "--ranks", "2"],
                       ["launcher", 0, 1]),
            "weights": ([*train, "run.weights=hf", "--ranks", "2"], ["launcher", 0, 1]),
            "eval": (["eval", "run", self.corpus], ["launcher"]),
            "generate": (["generate", "run", "--prompt", "the", "--tokens", "5"], ["launcher"]),
            "convert": (["convert", "run", "out{n}"], ["launcher"]),
            "tokenize": (["tokenize", self.corpus, "--output", "shards{n}", "--train", "300"], ["launcher"]),
            "plan": (["plan", *cluster], ["launcher"]),
        }

    def start(self, arguments, number, rank, **more):
        """The command, with folders of its own that exist during the call only."""
        try:
            if "--resume" in arguments:
                shutil.copytree(self.path("run"), self.path(f"old{number}"), symlinks=True)
            return self.inject([part.format(n=number) for part in arguments], "memory", rank=rank, count=f"count{number}", **more)
        finally:
            for name in ("old", "new", "out", "shards"):
                shutil.rmtree(self.path(name + number), ignore_errors=True)

    def attempt(self, name, arguments, rank, n, only):
        told = f"{name}, {rank}, allocation {n}{', only this one' if only else ''}"
        number = f"{name}-{rank}-{n}-{only}".replace(" ", "-")
        try:
            result = self.start(arguments, number, rank, at=n, only=only)[0]
        except subprocess.TimeoutExpired:
            return f"{told}: hangs"
        if result.returncode == 0:
            return None
        if result.returncode not in (1, 2):
            return f"{told}: status {result.returncode}: {result.stderr[-300:]}"
        if "memory" not in result.stderr and "emory" not in result.stdout:
            return f"{told}: memory is not named: {result.stderr[-300:]}"
        return None

    @staticmethod
    def chosen(total, chance, stacks):
        """The allocations that fail."""
        if stacks:
            with open(stacks, encoding="ascii") as file:
                return sorted({int(line) for line in file})
        if EVERY == "all":
            return range(1, total + 1)
        if EVERY:
            return range(chance.randrange(1, int(EVERY) + 1), total + 1, int(EVERY))
        return sorted(chance.sample(range(1, total + 1), SAMPLE))

    def test_every_allocation(self):
        self.prepare()
        chance = random.Random(5)
        failed, summary = [], []
        for name, (arguments, ranks) in self.commands().items():
            if ONLY and name != ONLY:
                continue
            for rank in ranks:
                number = f"{name}-{rank}-0".replace(" ", "-")
                stacks = self.path(f"stacks-{number}") if EVERY == "stacks" else None
                result, total = self.start(arguments, number, rank, stacks=stacks)
                self.ok(result)
                self.assertGreater(total, 20, name)
                chosen = [(n, only) for n in self.chosen(total, chance, stacks) for only in ((False, True) if EVERY == "stacks" else (n % 2 == 0,))]
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    jobs = [pool.submit(self.attempt, name, arguments, rank, *one) for one in chosen]
                    found = [text for text in (job.result() for job in jobs) if text]
                summary.append(f"{name}, {rank}: {len(chosen)} trials of {total} allocations, {len(found)} failed")
                if EVERY:
                    print("\n".join([summary[-1], *found]), flush=True)
                failed += found
        self.assertEqual(failed, [], "\n".join(summary))


if __name__ == "__main__":
    unittest.main()
