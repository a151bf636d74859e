"""train.precision=fp8 as a user runs it: the loss of a small model next to bf16, what check prints, a
killed run that resumes, numbers that are not finite, and one line for what is not supported. All
recipes for 500 steps of a wider model, some minutes each (bench/fp8/quality.py has held-out text):

  QUADRILLE_FP8_STEPS=500 ctest --test-dir build/release -R cli/fp8 --timeout 3600

ctest: timeout 200
ctest: processors 2
"""
import json
import os
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

MODEL = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128", "data.seq=32"]
STEPS = int(os.environ.get("QUADRILLE_FP8_STEPS", 300))
SHARED = ["model.kv_heads=2", "--ranks", "4", "--tp", "4"]  # ranks share key heads
RECIPES = ["fp8.recipe=tensor", "fp8.grad=e4m3"]
if "QUADRILLE_FP8_STEPS" in os.environ:
    MODEL = [*MODEL[:1], "model.hidden=128", *MODEL[2:4], "model.ffn=384", MODEL[5]]
    RECIPES += ["fp8.recipe=row", "fp8.recipe=block", "fp8.recipe=block fp8.grad=e4m3"]
RUN = [f"data.path={os.path.join(program.SOURCE, 'LICENSE')}", "data.tokenizer=bytes", *MODEL, "train.global_batch=16",
       f"train.steps={STEPS}", "train.lr=1e-3", "train.warmup=10", "run.threads=2"]


class Fp8(program.ProgramTest):
    def losses(self, *words):
        result = self.run_program("train", "--json", *RUN, *words)
        self.ok(result)
        return [json.loads(line)["loss"] for line in result.stdout.splitlines() if '"step"' in line]

    def test_trains_as_well_as_bf16(self):
        """The mean of the last 100 steps is within 0.5 %."""
        mean = {}
        for words in ("train.precision=bf16", *(f"train.precision=fp8 {recipe}" for recipe in RECIPES)):
            losses = self.losses(*words.split())
            self.assertEqual(len(losses), STEPS)
            mean[words] = sum(losses[-100:]) / 100
            if STEPS != 300:
                print(f"{words}: {mean[words]:.5f}", flush=True)
        bf16 = mean.pop("train.precision=bf16")
        self.assertLess(bf16, 3.0)
        for words, loss in mean.items():
            self.assertLess(abs(loss / bf16 - 1), 0.005, f"{words}: {loss} against {bf16}")

    def test_killed_run_resumes_bit_identically(self):
        """kill -9 of all ranks after the first checkpoint, for each recipe on another layout."""
        def losses(folder):
            with open(self.path(f"{folder}/metrics.jsonl"), encoding="utf-8") as file:
                return [(m["step"], m["loss"], m["grad_norm"]) for m in map(json.loads, file)]
        for recipe, layout in (("tensor", "parallel.tp=2 parallel.sp=true"), ("row", "parallel.zero=3"), ("block", "parallel.zero=1")):
            words = ["train", *RUN, "train.precision=fp8", f"fp8.recipe={recipe}", *layout.split(), "parallel.ranks=2", "run.threads=1",
                     "train.steps=40", "train.deterministic=true", "run.save_every=4", "run.async_save=false"]
            self.ok(self.run_program(*words, f"run.dir=whole-{recipe}"))
            part = f"part-{recipe}"
            run = subprocess.Popen([program.PROGRAM, *words, f"run.dir={part}"], cwd=self.folder, stdout=subprocess.DEVNULL,
                                   start_new_session=True)
            saved, log = self.path(f"{part}/checkpoints/latest"), self.path(f"{part}/metrics.jsonl")
            program.wait_until(lambda: run.poll() is not None or (os.path.exists(saved) and os.path.getsize(log) > 6 * 100), 60)
            self.assertIsNone(run.poll(), "the run ended before it could be killed")
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            self.ok(self.run_program(*words, f"run.dir={part}", "--resume"))
            self.assertEqual(losses(part), losses(f"whole-{recipe}"))

    def test_weights_cast_once_give_the_same_run(self):
        """With validation and sample texts between steps, which compute in bf16, and a resume that changes the key."""
        def run(folder, weights, *words):
            self.ok(self.run_program("train", *RUN, "train.precision=fp8", f"fp8.weights={weights}", "train.micro_batch=2", "run.threads=1",
                                     "parallel.ranks=2", "parallel.zero=1", "train.deterministic=true", "data.validation=0.05",
                                     "train.eval_every=5", "run.sample_every=4", "run.sample_tokens=8",
                                     "train.schedule=constant", "train.warmup=0", f"run.dir={folder}", *words))
        def figures(folder):
            with open(self.path(f"{folder}/metrics.jsonl"), encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
            return [(m["step"], *(m.get(key) for key in ("loss", "grad_norm", "validation_loss"))) for m in lines]
        run("once", "step", "train.steps=10")
        run("each", "use", "train.steps=5")
        run("each", "auto", "train.steps=10", "--resume")
        self.assertEqual(figures("once"), figures("each"))
        self.assertEqual(figures("once")[-1][0], 10)

    def test_overflow_is_reported_and_skipped(self):
        """Huge steps make gradients overflow: their scales are not finite, and the step names what was lost."""
        for recipe in ("tensor", "row", "block"):
            words = ["train", *RUN, "train.precision=fp8", f"fp8.recipe={recipe}", "train.steps=6", "train.warmup=0", "train.lr=1000",
                     "train.schedule=constant", "train.clip=0", "train.optimizer=sgd", "run.save=false"]
            result = self.run_program(*words)
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertRegex(result.stderr, r"step [0-9]+: rank 0: .* is not (a )?finite( number)?; the weights are those of step [0-9]+\n$")
            self.ok(self.run_program(*words, "train.on_nonfinite=skip"))

    def test_check_proves_gradients(self):
        result = self.run_program("check", *MODEL, "train.precision=fp8", "train.global_batch=4", "--ranks", "2", "--tp", "2")
        self.ok(result)
        self.assertIn("gradients: proved", result.stdout)

    def test_simulated_steps_are_faster(self):
        """GEMMs of blocks take about half the time; casts take some of it back."""
        def step(precision):
            result = self.run_program("simulate", "--model", "llama3.1-8b", "--seq", "4096", "--cluster", "h100", "--ranks", "8", "--zero",
                                      "3", "train.global_batch=8", "train.micro_batch=1", f"train.precision={precision}", "--json")
            self.ok(result)
            return json.loads(result.stdout)["step_seconds"]
        self.assertTrue(1.1 < step("bf16") / step("fp8") < 1.9)
        result = self.run_program("simulate", "--model", "llama3.1-8b", "--cluster", "a100", "--ranks", "8", "train.precision=fp8")
        self.assertEqual(result.returncode, 2)
        self.assertIn("has no fp8", result.stderr)

    def test_what_is_not_supported(self):
        base = ["check", *MODEL, "train.global_batch=4"]
        fp8 = [*base, "train.precision=fp8"]
        # The configuration of a run states all keys, with their defaults.
        self.ok(self.run_program(*base, "fp8.grad=e5m2", "fp8.keep=", "fp8.recipe=tensor"))
        for words, text in (
                ([*base, "fp8.grad=e4m3"], "fp8.grad has no effect without train.precision=fp8: set that, or fp8.grad=e5m2"),
                ([*base, "train.precision=bf16", "fp8.keep=attn"], "fp8.keep has no effect without train.precision=fp8: set that, or fp8.keep="),
                ([*base, "fp8.weights=use"], "fp8.weights has no effect without train.precision=fp8: set that, or fp8.weights=auto"),
                ([*fp8, "--ranks", "2", "--zero", "3", "fp8.weights=step"], "set parallel.reshard_after_forward=false"),
                ([*base, "fp8.recipe=row"], "fp8.recipe has no effect without train.precision=fp8: set that, or fp8.recipe=tensor"),
                ([*fp8, "fp8.keep=attention"], "no linear layer of the model's blocks is named 'attention'"),
                ([*fp8, "--ranks", "2", "--tp", "2", "parallel.tp_overlap=2"], "remove parallel.tp_overlap"),
                ([*fp8, "data.format=preferences"], "data.format=preferences"),
                ([*fp8, "model.ffn=120"], "block.0: train.precision=fp8: mlp.down.weight has 64 outputs and 120 inputs"),
                ([*fp8, "data.seq=30", "train.micro_batch=1"], "30 tokens on a rank"),
                ([*fp8, *SHARED], "parallel.tp=4 is more than model.kv_heads=2")):
            result = self.run_program(*words)
            self.assertEqual(result.returncode, 2, words)
            self.assertIn(text, result.stderr)
            self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
        self.ok(self.run_program(*fp8, "model.ffn=120", "fp8.keep=mlp"))
        self.ok(self.run_program(*fp8, "fp8.recipe=block", "run.device=cuda"))
        self.ok(self.run_program(*fp8, *SHARED, "fp8.keep=attn.k"))


if __name__ == "__main__":
    unittest.main()
