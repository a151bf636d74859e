"""train.on_spike: steps on a few garbled sequences of a regular text are skipped, or undone with the
steps since the last checkpoint; the same ones in every layout, and after a resume.
ctest: timeout 120
"""
import json
import os
import random
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RUN = ["train.global_batch=2", "train.steps=120", "train.lr=0.01", "train.warmup=5", "train.spike_window=20", "run.save_every=10"]
BACK = ["train.on_spike=rollback", "train.spike_norm=0"]


class Spikes(program.ProgramTest):
    def setUp(self):
        super().setUp()
        noise = random.Random(5)
        text = list("quadrille " * 1200)
        for place in (2100, 5300, 8800):
            text[place:place + 40] = noise.choices("!#$%&*+/<=>?@^_{|}~", k=40)
        with open(self.corpus, "w", encoding="ascii") as file:
            file.write("".join(text))

    def journal(self, folder):
        with open(self.path(f"{folder}/spikes.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def run_it(self, folder, *more):
        return self.ok(self.run_program(*self.small(*RUN, f"run.dir={folder}", *more)))

    def test_skipped(self):
        output = self.run_it("whole", "train.on_spike=skip").stdout
        lines = self.journal("whole")
        self.assertGreaterEqual(len(lines), 2)
        skipped = [line for line in self.metrics("whole") if line.get("skipped")]
        self.assertEqual([line["step"] for line in skipped], [line["step"] for line in lines])
        for line in lines:
            self.assertEqual(line["action"], "skip")
            self.assertEqual(line["first_sample"], 2 * (line["step"] - 1))
            self.assertTrue(line["loss"] > line["most_loss"] or line["grad_norm"] > line["most_grad_norm"], line)
            self.assertIn(f"step {line['step']} was skipped: its ", output)
        # Judged by the medians of the 20 steps before that were no spikes.
        first = lines[0]["step"]
        before = [line for line in self.metrics("whole") if line["step"] < first][-20:]
        self.assertEqual(lines[0]["most_loss"], 1 + sorted(line["loss"] for line in before)[10])
        self.assertEqual(lines[0]["most_grad_norm"], 10 * sorted(line["grad_norm"] for line in before)[10])
        # The same after an interruption between two of them, and on two ranks with another layout.
        self.ok(self.run_program(*self.small(*RUN, "train.on_spike=skip", "run.dir=parts", "run.save_minutes=0", f"train.steps={first}",
                                             "train.schedule=constant")))
        self.run_it("constant", "train.on_spike=skip", "train.schedule=constant")
        self.ok(self.run_program(*self.small(*RUN, "train.on_spike=skip", "train.schedule=constant", "run.dir=parts", "run.resume=true",
                                             "parallel.ranks=2", "parallel.zero=2")))
        self.assertEqual([line["step"] for line in self.journal("parts")], [line["step"] for line in self.journal("constant")])
        for ours, theirs in zip(self.metrics("parts"), self.metrics("constant"), strict=True):
            self.assertAlmostEqual(ours["loss"], theirs["loss"], delta=1e-5)

    def test_skipped_steps_change_nothing(self):
        # A step that is skipped leaves weights and moments as they are: the next loss is that of a
        # run that has never seen the batch, which train.spike_norm=1e9 cannot show, but a learning
        # rate of 0 for all steps can: every loss is the one of the initial weights.
        self.run_it("still", "train.on_spike=skip", "train.lr=0", "train.spike_loss=0", "train.spike_norm=1")
        self.run_it("plain", "train.lr=0")
        self.assertTrue(any(line.get("skipped") for line in self.metrics("still")))
        self.assertEqual(self.numbers("still"), self.numbers("plain"))

    def test_rolled_back(self):
        output = self.run_it("back", *BACK).stdout
        lines = self.journal("back")
        self.assertGreaterEqual(len(lines), 2)
        first = lines[0]
        kept = (first["step"] - 1) // 10 * 10
        self.assertEqual((first["action"], first["continues_after"]), ("rollback", kept))
        self.assertIn(f"continues after step {kept}", output)
        metrics = self.metrics("back")
        self.assertEqual([line["step"] for line in metrics], list(range(1, 121)))
        # No step that remains has been a spike, and the samples in between are left out.
        self.assertFalse(any(line.get("skipped") for line in metrics))
        with open(self.path("back/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            left_out = sum(line["step"] - line["continues_after"] for line in lines)
            self.assertEqual(json.load(file)["next_sample"], 2 * (120 + left_out))
        # The same run, interrupted after it has gone back once and resumed.
        stop = kept + 5
        self.ok(self.run_program(*self.small(*RUN, *BACK, "train.schedule=constant", "run.dir=one")))
        self.ok(self.run_program(*self.small(*RUN, *BACK, "train.schedule=constant", "run.dir=two",
                                             f"train.steps={max(stop, first['step'] + 3)}")))
        self.ok(self.run_program(*self.small(*RUN, *BACK, "train.schedule=constant", "run.dir=two", "run.resume=true")))
        self.assertEqual(self.numbers("one"), self.numbers("two"))

    def test_stopped(self):
        result = self.run_program(*self.small(*RUN, "train.on_spike=stop", "run.dir=stop"))
        self.one_line(result, 1, "the median of 20 steps before", "the weights are those of step")
        step = self.journal("stop")[0]["step"]
        self.assertIn(f"after step {step - 1}", self.ok(self.run_program(*self.small(
            *RUN, "train.on_spike=skip", "run.dir=stop", "run.resume=true"))).stdout)
        self.assertEqual(len(self.metrics("stop")), 120)

    def test_a_run_that_skips_every_step_ends(self):
        result = self.run_program(*self.small(*RUN, "run.dir=all", "train.on_spike=skip", "train.spike_norm=1.0001",
                                              "train.spike_window=5", "train.lr=1e-6"))
        self.one_line(result, 1, "20 consecutive steps were skipped; of the last, ", ": its gradient norm ", "; the weights are those of step")

    def test_refused(self):
        for more, *parts in ((["train.on_spike=rollback"], "train.on_spike=rollback", "run.dir"),
                             (["train.on_spike=skip", "train.spike_norm=0", "train.spike_loss=0"], "train.spike_norm", "train.spike_loss"),
                             (["train.spike_norm=0.5"], "train.spike_norm is 0.5"),
                             (["train.on_spike=rollback", "run.dir=x", "train.epochs=1"], "train.epochs", "train.steps")):
            self.one_line(self.run_program(*self.small("train.steps=5", *more)), 2, *parts)


if __name__ == "__main__":
    unittest.main()
