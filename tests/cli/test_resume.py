#!/usr/bin/env python3
"""Checkpoints of `quadrille train`: a run that was stopped or killed goes on with the same bits, on this or another layout."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

QUADRILLE = os.environ["QUADRILLE"]
SOURCE = os.environ["QUADRILLE_SOURCE"]
BASE = ["train", "model.preset=llama-tiny", "model.layers=2", "model.hidden=64", "model.vocab=300", "data.seq=32",
        f"data.path={SOURCE}/README.md", "train.global_batch=8", "train.steps=30", "run.threads=1", "data.validation=0.1"]


def run(*words, check=True):
    result = subprocess.run([QUADRILLE, *BASE, *words], capture_output=True, text=True, timeout=100)
    if check and result.returncode != 0:
        raise AssertionError(f"{words}: {result.stderr}")
    return result


def lines(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return f.readlines()


def losses(folder):
    return [(m["step"], m["loss"], m["grad_norm"]) for m in map(json.loads, lines(folder))]


class Resume(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp()
        self.whole = os.path.join(self.root, "whole")
        run("parallel.ranks=2", f"run.dir={self.whole}")

    def tearDown(self):
        shutil.rmtree(self.root)

    def test_goes_on_with_the_same_bits(self):
        part = os.path.join(self.root, "part")
        run("parallel.ranks=2", f"run.dir={part}", "run.save_every=7", "run.keep=0")
        # as if it had been stopped after step 23: later checkpoints are gone, later metrics are of steps that are repeated
        for step in (28, 30):
            shutil.rmtree(os.path.join(part, "checkpoints", f"step-{step:012d}"))
        kept = lines(part)[:23]
        with open(os.path.join(part, "metrics.jsonl"), "w") as f:
            f.writelines(kept)
        result = run("parallel.ranks=2", f"run.dir={part}", "--resume")
        self.assertIn("goes on after step 21", result.stdout)
        self.assertEqual(losses(part), losses(self.whole))

    def test_keys_need_not_be_repeated_and_may_not_change(self):
        part = os.path.join(self.root, "part")
        run("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "run.keep=0", "train.seed=7", "train.lr=3e-3")
        first = losses(part)
        shutil.rmtree(os.path.join(part, "checkpoints", f"step-{30:012d}"))
        resumed = subprocess.run([QUADRILLE, "train", f"run.dir={part}", "--resume"], capture_output=True, text=True, timeout=100)
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        self.assertEqual(losses(part), first)
        shutil.rmtree(os.path.join(part, "checkpoints", f"step-{30:012d}"))
        for words, text in [(["train.seed=8"], "train.seed"), (["model.rope_base=5000"], "the model"), (["data.seq=16"], "data.seq"),
                            (["train.optimizer=sgd"], "train.optimizer")]:
            result = run(f"run.dir={part}", "--resume", *words, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(text, result.stderr)

    def test_damaged_checkpoints_do_not_push_out_good_ones(self):
        part = os.path.join(self.root, "part")
        run("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "run.keep=0")
        for step in (30, 20, 10):
            with open(os.path.join(part, "checkpoints", f"step-{step:012d}", "model-00000.safetensors"), "r+b") as f:
                f.truncate(5000)
            if step > 10:
                result = run("parallel.ranks=2", f"run.dir={part}", "run.save_every=100", "run.keep=1", f"train.steps={step - 5}",
                             "--resume")
                self.assertIn("passed over", result.stdout)
                self.assertTrue(os.path.exists(os.path.join(part, "checkpoints", f"step-{step - 5:012d}", "manifest.json")))
                break
        for name in os.listdir(os.path.join(part, "checkpoints")):
            with open(os.path.join(part, "checkpoints", name, "manifest.json"), "r+b") as f:
                f.truncate(100)
        result = run("parallel.ranks=2", f"run.dir={part}", "--resume", check=False)
        self.assertEqual(result.returncode, 2, result.stderr)

    def test_overwrite_that_cannot_start_takes_nothing_away(self):
        part = os.path.join(self.root, "part")
        run("parallel.ranks=2", f"run.dir={part}", "run.save_every=10")
        result = run(f"run.dir={part}", "--overwrite", "data.path=/nonexistent", check=False)
        self.assertEqual(result.returncode, 2)
        self.assertEqual(len(losses(part)), 30)
        self.assertTrue(os.listdir(os.path.join(part, "checkpoints")))

    def test_configuration_from_a_pipe_reaches_the_ranks(self):
        part = os.path.join(self.root, "part")
        result = subprocess.run([QUADRILLE, BASE[0], "/dev/stdin", *[w for w in BASE[1:] if "steps" not in w], "parallel.ranks=2",
                                 f"run.dir={part}"], input="train: {steps: 3, lr: 0.5}", capture_output=True, text=True, timeout=100)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(losses(part)), 3)

    def test_killed_rank(self):
        part = os.path.join(self.root, "part")
        words = ["parallel.ranks=2", f"run.dir={part}", "run.save_every=3", "run.keep=3", "train.steps=30"]
        process = subprocess.Popen([QUADRILLE, *BASE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.time() + 60
        while time.time() < deadline and process.poll() is None:
            done = os.path.exists(os.path.join(part, "metrics.jsonl")) and len(lines(part)) >= 5
            if done:
                break
            time.sleep(0.01)
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        self.assertTrue(process.poll() is None and ranks, "the run ended before a rank could be killed")
        os.kill(int(ranks[-1]), signal.SIGKILL)
        self.assertEqual(process.wait(60), 1)
        run(*words, "--resume")
        process.stderr.close()
        process.wait()
        self.assertEqual(losses(part), losses(self.whole))

    def test_other_layout_sees_each_sample_once(self):
        part = os.path.join(self.root, "part")
        run("parallel.ranks=4", f"run.dir={part}", "train.steps=30", "run.save_every=10", "run.keep=0")
        for step in (20, 30):
            shutil.rmtree(os.path.join(part, "checkpoints", f"step-{step:012d}"))
        run("parallel.ranks=1", f"run.dir={part}", "run.save_every=10", "--resume")
        for (step, loss, _), (other, expected, _) in zip(losses(part), losses(self.whole)):
            self.assertEqual(step, other)
            self.assertLess(abs(loss - expected), 1e-4 * expected)

    def test_bad_requests(self):
        for words, text in [
            ([f"run.dir={self.whole}"], "--resume"),
            ([f"run.dir={self.whole}", "--resume", "--overwrite"], "both set"),
            ([f"run.dir={self.root}/none", "--resume"], "holds no run"),
            (["run.save_every=3"], "needs run.dir"),
            ([f"run.dir={self.whole}", "--resume"], "holds no checkpoint"),
        ]:
            result = run("parallel.ranks=2", *words, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
            self.assertIn(text, result.stderr)
        self.assertEqual(len(losses(self.whole)), 30)

    def test_damage_is_told_and_passed_over(self):
        part = os.path.join(self.root, "part")
        run("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "run.keep=0")
        with open(os.path.join(part, "checkpoints", "step-000000000030", "model-00000.safetensors"), "r+b") as f:
            f.seek(5000)
            byte = f.read(1)
            f.seek(5000)
            f.write(bytes([byte[0] ^ 4]))
        result = run("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "--resume")
        self.assertIn("passed over", result.stdout)
        self.assertIn("step-000000000030", result.stdout)
        self.assertEqual(losses(part), losses(self.whole))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
