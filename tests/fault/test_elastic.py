"""run.elastic and run.recover: surviving ranks keep their processes and their state when a rank is
lost, and the number of ranks changes while a run continues. QUADRILLE_ELASTIC=30 for the long form.
ctest: timeout 240
ctest: processors 2
"""
import json
import os
import random
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

LONG = int(os.environ.get("QUADRILLE_ELASTIC", "0"))
BATCH = "train.global_batch=40"  # sequences: divisible by 8 and by 5


class Elastic(program.ProgramTest):
    def journal(self, folder="run"):
        try:
            with open(self.path(f"{folder}/restarts.jsonl"), encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except OSError:
            return []

    def events(self, kind, folder="run"):
        return [line for line in self.journal(folder) if line["event"] == kind]

    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments

    def children(self, run):
        with open(f"/proc/{run.pid}/task/{run.pid}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]

    def steps_done(self, folder="run"):
        try:
            with open(self.path(f"{folder}/metrics.jsonl"), "rb") as file:
                return file.read().count(b"\n")
        except OSError:
            return 0

    def start(self, *arguments):
        output = open(self.path("output"), "w", encoding="utf-8")  # noqa: SIM115
        self.addCleanup(output.close)
        run = subprocess.Popen([program.PROGRAM, *self.small(*arguments)], cwd=self.folder, stdout=output, stderr=subprocess.PIPE, text=True)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def wait(self, run, condition, seconds=60):
        self.assertTrue(program.wait_until(lambda: condition() or run.poll() is not None, seconds), self.journal())
        self.assertIsNone(run.poll(), run.stderr.read() if run.poll() is not None else "")

    def finish(self, run, status=0):
        errors = run.communicate(timeout=200)[1]
        with open(self.path("output"), encoding="utf-8") as file:
            self.output = file.read()
        self.assertEqual(run.returncode, status, f"{errors}\n{self.journal()}\n{self.output[-3000:]}")
        self.assertEqual(program.processes(self.corpus), [])
        return errors

    def resize(self, ranks):
        self.ok(subprocess.run([program.PROGRAM, "resize", self.path("run"), str(ranks)], capture_output=True, text=True, check=False))

    def same_samples(self, folder="run", whole="whole", tolerance=1e-5):
        """Each step once, with the same samples: the losses agree as far as sums of another order do."""
        a, b = self.metrics(folder), self.metrics(whole)
        self.assertEqual([line["step"] for line in a], [line["step"] for line in b])
        self.assertEqual([line["tokens"] for line in a], [line["tokens"] for line in b])
        worst = max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in zip(a, b))
        self.assertLess(worst, tolerance)
        return worst

    def test_shrinks_and_grows(self):
        """8 to 5 to 8 ranks: each sample once, losses as if nothing had happened; survivors stay the same processes."""
        steps = 300 if LONG else 60
        arguments = [BATCH, f"train.steps={steps}", "run.save_every=20", "--ranks", "8"]
        self.ok(self.run_program(*self.small(*arguments, "run.dir=whole")))
        run = self.start(*arguments, "run.dir=run", "--restarts", "5", "run.elastic=5..8")
        self.wait(run, lambda: self.steps_done() >= steps // 6)
        before = set(self.children(run))
        self.assertEqual(len(before), 8)
        self.resize(5)
        self.wait(run, lambda: len(self.events("resize")) == 1)
        program.wait_until(lambda: len(self.children(run)) == 5, 10)
        self.assertEqual(len(self.children(run)), 5)
        self.assertLessEqual(set(self.children(run)), before)
        done = self.steps_done()
        self.wait(run, lambda: self.steps_done() >= done + steps // 6)
        self.resize(8)
        self.wait(run, lambda: len(self.events("resize")) == 2)
        self.finish(run)
        worst = self.same_samples()
        shapes = [(line["from"], line["ranks"], line["in_memory"]) for line in self.events("resize")]
        self.assertEqual(shapes, [(8, 5, True), (5, 8, True)])
        self.assertIn("5 ranks are available: the run continues with 5 ranks instead of 8", self.output)
        if LONG:
            print(f"8 to 5 to 8 ranks: largest relative difference of losses {worst:.2e}, seconds "
                  f"{[round(line['seconds'], 3) for line in self.events('resize')]}")

    def kill_one(self, run, chance):
        pids = {program.rank_of(pid): pid for pid in self.children(run)}
        if victims := [pid for pid in pids.values() if pid]:
            os.kill(chance.choice(victims), signal.SIGKILL)

    def test_survivors_continue(self):
        """A lost rank costs no step where replicas have its state; the result is bit-identical."""
        failures = LONG or 3
        steps = 40 * failures
        arguments = [BATCH, f"train.steps={steps}", "--ranks", "4", "run.save_every=0"]
        self.ok(self.run_program(*self.small(*arguments, "run.dir=whole")))
        run = self.start(*arguments, "run.dir=run", "--restarts", str(2 * failures))
        chance = random.Random(5)
        for i in range(failures):
            self.wait(run, lambda n=40 * i + chance.randrange(30): self.steps_done() >= n)
            before = set(self.children(run))
            self.kill_one(run, chance)
            self.wait(run, lambda n=i: len(self.events("recovered")) > n)
            self.assertGreaterEqual(len(before & set(self.children(run))), 2)
        self.finish(run)
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))
        restarts = self.events("restart")
        self.assertTrue(all(line["in_memory"] for line in restarts[1:]), restarts)
        # No step is repeated: the next one to be done is the first that was not.
        pairs = list(zip(self.events("failure"), self.events("recovered")))
        self.assertTrue(all(after["step"] <= (before["step"] or 0) + 2 for before, after in pairs), pairs)
        if LONG:
            lost = [line["seconds"] for line in self.events("recovered")]
            print(f"{len(lost)} failures with survivors: {sum(lost) / len(lost):.3f} s lost per failure, at most {max(lost):.3f} s")


if __name__ == "__main__":
    unittest.main()
