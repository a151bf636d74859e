"""Checkpoints of `quadrille train`: a run that was stopped or killed resumes bit-identically, on
this or another layout.
"""
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

BASE = ["train", "model.preset=llama-tiny", "model.layers=2", "model.hidden=64", "model.vocab=300", "data.seq=32",
        f"data.path={program.SOURCE}/README.md", "train.global_batch=8", "train.steps=30", "run.threads=1", "data.validation=0.1"]


def lines(folder):
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as f:
        return f.readlines()


def losses(folder):
    return [(m["step"], m["loss"], m["grad_norm"]) for m in map(json.loads, lines(folder))]


class Resume(program.ProgramTest):
    """The run that was never stopped is trained once, for all tests."""

    @classmethod
    def setUpClass(cls):
        cls.whole = os.path.join(tempfile.mkdtemp(prefix="quadrille-test-resume-"), "whole")
        cls.addClassCleanup(shutil.rmtree, os.path.dirname(cls.whole), ignore_errors=True)
        result = subprocess.run([program.PROGRAM, *BASE, "parallel.ranks=2", f"run.dir={cls.whole}"], capture_output=True,
                                text=True, timeout=100, check=False)
        assert result.returncode == 0, result.stderr

    def train(self, *words, check=True, launcher=()):
        result = self.run_program(*BASE, *words, launcher=launcher)
        return self.ok(result) if check else result

    def text(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def test_resumes_bit_identically(self):
        part = self.path("part")
        self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=7", "run.keep=0")
        # as if it had been stopped after step 23: later checkpoints are missing, and later metrics
        # belong to steps that are repeated
        for step in (28, 30):
            shutil.rmtree(os.path.join(part, "checkpoints", f"step-{step:012d}"))
        kept = lines(part)[:23]
        with open(os.path.join(part, "metrics.jsonl"), "w") as f:
            f.writelines(kept)
        result = self.train("parallel.ranks=2", f"run.dir={part}", "--resume")
        self.assertIn("resumes after step 21", result.stdout)
        self.assertEqual(losses(part), losses(self.whole))

    def test_what_was_derived_is_derived_again(self):
        part = self.path("part")
        self.train(f"run.dir={part}", "train.steps=10", "train.schedule=wsd", "train.warmup=0", "run.save_every=10")
        # Not BASE: only these settings are new. The decay is a fifth of all steps, and the
        # micro-batch belonged to another batch size.
        self.ok(self.run_program("train", f"run.dir={part}", "--resume", "train.steps=20", "train.global_batch=6"))
        rates = [json.loads(line)["lr"] for line in lines(part)]
        self.assertEqual(len(rates), 20)
        self.assertEqual(len(set(rates[10:16])), 1)
        self.assertEqual(len(set(rates[16:])), 4)
        self.assertEqual(max(rates), rates[15])

    def test_keys_need_not_be_repeated_and_may_not_change(self):
        part = self.path("part")
        self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "run.keep=0", "train.seed=7", "train.lr=3e-3")
        first = losses(part)
        shutil.rmtree(os.path.join(part, "checkpoints", f"step-{30:012d}"))
        self.ok(self.run_program("train", f"run.dir={part}", "--resume"))
        self.assertEqual(losses(part), first)
        shutil.rmtree(os.path.join(part, "checkpoints", f"step-{30:012d}"))
        for words, text in [(["train.seed=8"], "train.seed"), (["model.hidden=32"], "the model"), (["model.norm_eps=1e-6"], "the model"),
                            (["train.optimizer=sgd"], "train.optimizer"), (["model.preset=qwen3-tiny"], "the model")]:
            result = self.train(f"run.dir={part}", "--resume", *words, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(text, result.stderr)
            self.assertEqual(result.stdout, "")  # before the plan
        self.one_line(self.run_program("train", f"{part}/config.yaml", "--model", "qwen3-tiny", "--dir", "other"), 2, "model.preset",
                      "config.yaml:", "remove one of them")

    def test_layout_is_kept_as_far_as_it_fits(self):
        """The same number of ranks keeps the layout; with another number, degrees that still fit
        are kept and the rest is dropped."""
        part = self.path("part")
        self.train("parallel.ranks=2", "parallel.pp=2", "parallel.layers=2,0", "parallel.schedule=gpipe", "train.micro_batch=2",
                   "train.steps=1", f"run.dir={part}", "run.save_every=1")

        def layout(*words, launcher=()):
            self.ok(self.run_program("train", f"run.dir={part}", "--resume", *words, launcher=launcher))
            with open(os.path.join(part, "effective.yaml"), encoding="utf-8") as file:
                pairs = [line.strip().split(": ") for line in file]
            found = {pair[0]: pair[1].strip('"') for pair in pairs if len(pair) == 2}
            return [found[key] for key in ("ranks", "pp", "dp", "layers", "micro_batch")]

        self.assertEqual(layout("train.steps=2", "--ranks", "2"), ["2", "2", "1", "2,0", "2"])
        self.assertEqual(layout("train.steps=3", "--ranks", "2", "--dp", "2"), ["2", "1", "2", "", "2"])
        self.assertEqual(layout("train.steps=4", "--ranks", "1"), ["1", "1", "1", "", "2"])
        self.assertEqual(layout("train.steps=5", "--ranks", "8"), ["8", "1", "8", "", "1"])
        if program.MPIRUN:  # its world decides, not the number of ranks that the run had
            launcher = [program.MPIRUN, "--oversubscribe", "-n", "2"]
            self.assertEqual(layout("train.steps=6", launcher=launcher), ["2", "1", "2", "", "4"])

    def test_groups_of_another_layout_are_dropped(self):
        """Experts on three ranks do not fit two ranks of tp, nor groups of three a copy on four."""
        self.train("run.dir=run", "model.experts=3", "model.experts_per_token=1", "parallel.ranks=3", "parallel.ep=3", "parallel.zero=3",
                   "parallel.reshard_after_forward=3", "train.global_batch=12", "train.steps=1")
        for words, layout in ((["--ranks", "6", "--tp", "2"], "dp 3 × tp 2, zero 3 over 3: 6"), (["--ranks", "4"], "dp 4, zero 3 over 4: 4")):
            shutil.copytree(self.path("run"), self.path("other"), symlinks=True)
            result = self.ok(self.run_program("train", "--dir", "other", "--resume", "train.steps=2", *words))
            self.assertIn(f"\nlayout   {layout} ranks\n", result.stdout)
            shutil.rmtree(self.path("other"))

    def test_a_rank_without_state_saves_like_the_others(self):
        """The last rank has a share of the head, which is the table of the first stage, and nothing
        else: it writes no tensor, and goes on while the others write."""
        self.train("run.dir=run", "model.layers=1", "model.tied=true", "parallel.ranks=4", "parallel.tp=2", "parallel.pp=2",
                   "train.steps=4", "run.save_every=1", "run.deadline=10")
        self.assertEqual(len(losses(self.path("run"))), 4)

    def test_latest_of_a_finished_run(self):
        """Killed between the last checkpoint and the link to it: a resume that has nothing to do repairs the link."""
        self.train("run.dir=run", "train.steps=4", "run.save_every=2")
        latest = self.path("run/checkpoints/latest")
        newest = os.readlink(latest)
        os.unlink(latest)
        os.symlink(newest.replace("4", "2"), latest)
        self.one_line(self.run_program("train", "--dir", "run", "--resume"), 2, "has done all of its 4 steps")
        self.assertEqual(os.readlink(latest), newest)

    def test_what_was_left_open_stays_open(self):
        """The saved configuration holds the settings as given, so another start may use another
        layout. Degrees that were given, or filled in by an earlier version, yield to one that is
        given now."""
        self.train("--ranks", "4", "--dir", "run", "train.steps=1")
        step = 1
        for more, layout in ((["--tp", "2"], "dp 2 × tp 2: 4"), (["--pp", "2"], "pp 2 × tp 2: 4"), (["--dp", "4"], "dp 4: 4"),
                             (["--ranks", "2"], "dp 2: 2"), (["--cp", "2"], "cp 2: 2")):
            step += 1
            result = self.ok(self.run_program("train", "--dir", "run", "--resume", f"train.steps={step}", *more))
            self.assertIn(f"\nlayout   {layout} ranks\n", result.stdout)
        self.train("--ranks", "4", "--dir", "open", "train.steps=1")
        self.assertEqual(json.loads(self.ok(self.run_program("check", "open/config.yaml", "--ranks", "8", "--json")).stdout)["ranks"], 8)
        shutil.copytree(self.path("open"), self.path("old"))  # earlier versions had one file, with everything filled in
        os.replace(self.path("old/effective.yaml"), self.path("old/config.yaml"))
        self.assertIn("\n  dp: 4\n", self.text("old/config.yaml"))
        self.ok(self.run_program("train", "--dir", "old", "--resume", "train.steps=2", "--tp", "2"))
        if program.MPIRUN:
            self.train("--dir", "mpi", "train.steps=1", launcher=[program.MPIRUN, "--oversubscribe", "-n", "2"])
            self.assertNotIn("\n  ranks:", self.text("mpi/config.yaml"))
            self.ok(self.run_program("train", "mpi/config.yaml", "--dir", "again",
                                     launcher=[program.MPIRUN, "--oversubscribe", "-n", "4"]))
            self.ok(self.run_program("report", "mpi", "-o", "mpi.html"))
            self.assertIn("2 ranks", self.text("mpi.html"))

    def test_longer_context(self):
        """Another sequence length, rotary base and batch from a checkpoint on, as in a long-context
        phase."""
        part = self.path("part")
        self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=15", "run.keep=0", "train.global_batch=8")
        result = self.ok(self.run_program("train", f"run.dir={part}", "--resume", "train.steps=36", "data.seq=96", "train.global_batch=4",
                                          "model.rope_base=500000", "--ranks", "4"))
        for text in ("data.seq was 32 and is 96", "train.global_batch was 8 and is 4", "model.rope_base was 10000 and is 500000"):
            self.assertIn(text, result.stdout)
        with open(os.path.join(part, "metrics.jsonl"), encoding="utf-8") as file:
            tokens = [json.loads(line)["tokens"] for line in file]
        self.assertEqual(tokens, [8 * 32] * 30 + [4 * 96] * 6)
        with open(os.path.join(part, "checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            # 30 steps of 8 windows of 32 tokens are 80 windows of 96.
            self.assertEqual(json.load(file)["next_sample"], 80 + 6 * 4)

    def test_what_changes_is_reported(self):
        """Settings and data that have changed, wherever the change comes from: one line each, with
        both values."""
        text = self.write("text.txt", "the quick brown fox jumps over the lazy dog\n" * 400)
        self.train("--dir", "run", f"data.path={text}", "train.steps=4", "parallel.ranks=2", "data.tokenizer=bytes")

        def notes(*words):
            step = len(lines(self.path("run"))) + 1
            result = self.ok(self.run_program("train", "--dir", "run", "--resume", f"train.steps={step}", *words))
            return re.findall(r"(?m)^note     (.*(?:\n {9}.*)*)", result.stdout)

        self.assertEqual(notes("train.schedule=constant"), [
            "train.steps was 4 and is 5", 'train.schedule was cosine and is constant', mock.ANY, "resumes after step 4"])
        self.assertEqual(notes(), ["train.steps was 5 and is 6", "resumes after step 5"])
        with open(self.path("run/config.yaml"), "r+", encoding="utf-8") as file:  # an edit, or a flipped bit
            saved = file.read()
            file.seek(0)
            file.write(saved.replace("\n  lr: 0.001\n", "\n  lr: 0.041\n").replace("\n  beta2: 0.95\n", "\n  beta2: 0.75\n"))
        self.assertEqual(notes(), ["train.steps was 6 and is 7", "train.lr was 0.001 and is 0.041", "train.beta2 was 0.95 and is 0.75",
                                   "the learning rate jumps from 0.001 in step 6 to 0.041 in step 7", "resumes after step 6"])
        self.write("text.txt", "the quick brown fox jumps over the crazy cat\n"[:44] * 400)  # as many bytes
        self.assertRegex(" ".join(notes()), "text.txt has [0-9]+ tokens as before, but its content has changed")
        self.assertEqual(len(notes()), 2)
        other = self.write("other.txt", "the quick brown fox jumps over the lazy dog\n" * 500)
        self.assertRegex(" ".join(notes(f"data.path={other}")), r"data.path was \S*text.txt\S* and is \S*other.txt\S*: samples differ")
        slow = "neon" if platform.machine() in ("aarch64", "arm64") else "generic"
        self.assertRegex(" ".join(notes(f"run.kernels={slow}")), f"run.kernels was auto and is {slow}")
        self.assertRegex(" ".join(notes("model.dropout=0.1", "train.precision=bf16")),
                         "model.dropout was 0 and is 0.1 .*train.precision was fp32 and is bf16 .*train.grad_dtype was fp32 and is bf16")
        self.assertRegex(" ".join(notes("train.precision=fp8", "fp8.recipe=row", "fp8.keep=attn")),
                         'train.precision was bf16 and is fp8 fp8.recipe was tensor and is row fp8.keep was "" and is attn ')

    def test_a_learning_rate_that_stays_does_not_jump(self):
        """The last step of two, and the third of four, have half of the rate."""
        self.train("--dir", "run", "train.steps=2", "train.min_lr=0", "train.warmup=0")
        result = self.ok(self.run_program("train", "--dir", "run", "--resume", "train.steps=4"))
        self.assertIn("train.steps was 2 and is 4", result.stdout)
        self.assertNotIn("jumps", result.stdout)

    def test_every_source_is_compared(self):
        """Also by number of tokens, and where the file that says what they were is gone."""
        paths = [self.write(f"{i}.txt", "the quick brown fox\n" * 400) for i in range(3)]
        self.train("--dir", "run", f"data.path={','.join(path + ':1' for path in paths)}", "train.steps=2", "data.tokenizer=bytes")
        self.write("0.txt", "the quick crown fox\n" * 400)
        self.write("2.txt", "the quick brown fox\n" * 500)
        result = self.ok(self.run_program("train", "--dir", "run", "--resume", "train.steps=3"))
        text = re.sub(r"\s+", " ", result.stdout)
        self.assertRegex(text, "0.txt has 8000 tokens as before, but its content has changed")
        self.assertRegex(text, "2.txt had 8000 tokens and has 10000")
        self.assertNotIn("1.txt ha", text)
        os.remove(self.path("run/data.json"))
        result = self.ok(self.run_program("train", "--dir", "run", "--resume", "train.steps=4"))
        self.assertRegex(re.sub(r"\s+", " ", result.stdout), "run/data.json is missing: whether the data is what it was is not known")
        self.assertTrue(os.path.exists(self.path("run/data.json")))

    def test_metrics_that_are_gone(self):
        """Checkpoints are a run, too."""
        self.train("--dir", "run", "train.steps=3")
        os.remove(self.path("run/metrics.jsonl"))
        self.one_line(self.train("--dir", "run", "train.steps=5", check=False), 2, "holds another run")
        result = self.train("--dir", "run", "--resume", "train.steps=5")
        self.assertIn("metrics.jsonl is missing", result.stdout)
        self.assertEqual([step for step, _, _ in losses(self.path("run"))], [4, 5])

    def test_damaged_checkpoints_do_not_push_out_good_ones(self):
        part = self.path("part")
        self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "run.keep=0")
        for step in (30, 20, 10):
            with open(os.path.join(part, "checkpoints", f"step-{step:012d}", "model-00000.safetensors"), "r+b") as f:
                f.truncate(5000)
            if step > 10:
                result = self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=100", "run.keep=1", f"train.steps={step - 5}",
                             "--resume")
                self.assertIn("a checkpoint was skipped: ", result.stdout)
                self.assertTrue(os.path.exists(os.path.join(part, "checkpoints", f"step-{step - 5:012d}", "manifest.json")))
                break
        for name in filter(lambda name: name.startswith("step-"), os.listdir(os.path.join(part, "checkpoints"))):
            with open(os.path.join(part, "checkpoints", name, "manifest.json"), "r+b") as f:
                f.truncate(100)
        result = self.train("parallel.ranks=2", f"run.dir={part}", "--resume", check=False)
        self.assertEqual(result.returncode, 2, result.stderr)

    def test_overwrite_that_cannot_start_takes_nothing_away(self):
        part = self.path("part")
        self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=10")
        result = self.train(f"run.dir={part}", "--overwrite", "data.path=/nonexistent", check=False)
        self.assertEqual(result.returncode, 2)
        self.assertEqual(len(losses(part)), 30)
        self.assertTrue(os.listdir(os.path.join(part, "checkpoints")))

    def test_configuration_from_a_pipe_reaches_the_ranks(self):
        part = self.path("part")
        result = subprocess.run([program.PROGRAM, BASE[0], "/dev/stdin", *[w for w in BASE[1:] if "steps" not in w], "parallel.ranks=2",
                                 f"run.dir={part}"], input="train: {steps: 3, lr: 0.5}", capture_output=True, text=True, timeout=100)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(losses(part)), 3)

    def test_a_folder_keeps_checkpoints_by_default(self):
        """At the end, and by time; without a folder, or with run.save=false, the run prints that
        none is kept."""
        def steps(folder):
            return sorted(int(n[5:]) for n in os.listdir(os.path.join(folder, "checkpoints")) if n.startswith("step-"))

        self.assertEqual(steps(self.whole), [30])
        result = self.train("parallel.ranks=2", "--dir", "timed", "train.steps=5", "run.save_minutes=1e-6", "run.keep=0")
        self.assertEqual(steps(self.path("timed")), [1, 2, 3, 4, 5])
        self.assertIn("saved    timed/checkpoints, the newest after step 5", result.stdout)
        result = self.train("--dir", "none", "train.steps=2", "run.save=false", "run.save_every=1")
        self.assertFalse(os.path.exists(self.path("none/checkpoints")))
        self.assertIn("\nfolder   none, without checkpoints (run.save=false)\n", result.stdout)
        result = self.ok(self.run_program(*self.small("train.steps=1")))
        self.assertRegex(result.stdout, r"\nfolder   none: nothing of this run is kept; --dir FOLDER keeps checkpoints")
        first, *middle, end = self.ok(self.run_program(*self.small("train.steps=2", "--json"))).stdout.splitlines()
        self.assertRegex(json.loads(first)["note"], "nothing of this run is kept; --dir FOLDER keeps checkpoints")
        self.assertEqual([json.loads(line)["step"] for line in middle], [1, 2])
        self.assertIsNone(json.loads(end)["saved"])

    def test_a_run_that_is_not_finite_keeps_its_last_state(self):
        result = self.run_program(*self.small("train.steps=9", "train.lr=1e3", "train.clip=0", "train.weight_decay=100", "--dir", "far"))
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("the weights are those of step", result.stderr)
        kept = os.listdir(self.path("far/checkpoints"))
        self.assertIn(f"step-{len(self.metrics('far')):012d}", kept)

    def test_a_checkpoint_of_another_run_is_not_used(self):
        """The folder's name, the step in the manifest and the run's identity must agree, on all
        ranks."""
        words = ["parallel.ranks=2", "train.steps=12", "run.save_every=4", "run.keep=0"]
        for folder, lr in (("a", 1e-3), ("b", 3e-3)):
            self.train(*words, "--dir", folder, f"train.lr={lr}", "train.schedule=constant")
        first = losses(self.path("a"))
        one, other = self.path("a/checkpoints"), self.path("b/checkpoints")
        for name, why in (("step-000000000012", "its manifest is for step 8"), ("step-000000000008", "is a checkpoint of another run")):
            for step in (8, 12):
                shutil.rmtree(f"{one}/step-{step:012d}", ignore_errors=True)
            shutil.copytree(f"{other}/step-000000000008", f"{one}/{name}")
            result = self.ok(self.run_program("train", "--dir", "a", "--resume"))
            self.assertRegex(result.stdout, f"a checkpoint was skipped: .*{name}: {why}")
            self.assertIn("after step 4\n", result.stdout)
            self.assertEqual(losses(self.path("a")), first)
        # The identity of the run may be lost or damaged: then its checkpoints provide it.
        ids = []
        for text in (None, "0123456789abcdef 0123456789abcdef\n"):
            with open(f"{one}/run-id", encoding="ascii") as file:
                ids.append(file.read())
            os.remove(f"{one}/run-id")
            if text:
                self.write("a/checkpoints/run-id", text)
            shutil.rmtree(f"{one}/step-000000000012")
            self.assertNotIn("skipped", self.ok(self.run_program("train", "--dir", "a", "--resume")).stdout)
        with open(f"{one}/run-id", encoding="ascii") as file:
            self.assertEqual({*ids, file.read()}, {ids[0]})

    def test_evaluation_says_that_it_uses_an_older_checkpoint(self):
        self.train("--dir", "run", "train.steps=4", "run.save_every=2")
        commands = (["eval", "run"], ["generate", "run", "--prompt", "the", "--tokens", "2", "--json"])
        for command in commands:
            self.assertEqual(self.ok(self.run_program(*command)).stderr, "")
        with open(self.path("run/checkpoints/step-000000000004/model-00000.safetensors"), "r+b") as f:
            f.truncate(5000)
        for command in commands:
            result = self.ok(self.run_program(*command))
            self.assertRegex(result.stderr, r"^quadrille: warning: an older checkpoint is used, run/checkpoints/step-0*2, .*step-0*4/.*\n$")
        self.assertIn("an older checkpoint is used", self.ok(self.run_program("convert", "run", "hf")).stdout)
        result = self.train("--dir", "next", "train.steps=1", "run.weights=run", "data.tokenizer=run/tokenizer.json")
        self.assertIn("an older checkpoint is used", result.stdout)

    def test_killed_rank(self):
        part = self.path("part")
        words = ["parallel.ranks=2", f"run.dir={part}", "run.save_every=3", "run.keep=3", "train.steps=30"]
        process = subprocess.Popen([program.PROGRAM, *BASE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        saved = os.path.join(part, "checkpoints", "latest")  # written next to the steps: may be late on a busy machine
        program.wait_until(lambda: process.poll() is not None or (os.path.exists(saved) and len(lines(part)) >= 5), 60)
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        self.assertTrue(process.poll() is None and ranks, "the run ended before a rank could be killed")
        os.kill(int(ranks[-1]), signal.SIGKILL)
        self.assertEqual(process.wait(60), 1)
        self.train(*words, "--resume")
        process.stderr.close()
        process.wait()
        self.assertEqual(losses(part), losses(self.whole))

    def test_other_layout_sees_each_sample_once(self):
        part = self.path("part")
        self.train("parallel.ranks=4", f"run.dir={part}", "train.steps=30", "run.save_every=10", "run.keep=0")
        for step in (20, 30):
            shutil.rmtree(os.path.join(part, "checkpoints", f"step-{step:012d}"))
        self.train("parallel.ranks=1", f"run.dir={part}", "run.save_every=10", "--resume")
        for (step, loss, _), (other, expected, _) in zip(losses(part), losses(self.whole)):
            self.assertEqual(step, other)
            self.assertLess(abs(loss - expected), 1e-4 * expected)

    def test_begins_with_the_weights_of_another_run(self):
        self.train("parallel.ranks=2", "run.dir=first", "run.save_every=10", "train.steps=10")
        tokenizer = f"data.tokenizer={self.path('first')}/tokenizer.json"
        still = ["train.steps=1", "train.lr=0", "train.weight_decay=0", "run.save_every=1", tokenizer]
        for name, layout in (("one", []), ("sharded", ["parallel.ranks=4", "parallel.zero=3"])):
            self.train("run.weights=first", f"run.dir={name}", *layout, *still)
            values = [json.loads(self.ok(self.run_program("eval", folder, "--json")).stdout)["loss"] for folder in ("first", name)]
            self.assertEqual(*values)
        self.assertLess(losses(self.path("one"))[0][1], losses(self.path("first"))[0][1] - 0.2)
        self.one_line(self.run_program(*BASE, "run.weights=nowhere", tokenizer), 2, "run.weights: nowhere", "a run folder or a checkpoint")
        self.one_line(self.run_program(*BASE, "run.weights=first", "model.hidden=32", tokenizer), 2, "run.weights: ")

    def test_bad_requests(self):
        for words, text in [
            ([f"run.dir={self.whole}"], "--resume"),
            ([f"run.dir={self.whole}", "--resume", "--overwrite"], "both set"),
            ([f"run.dir={self.folder}/none", "--resume"], "holds no run"),
            (["run.save_every=3"], "needs run.dir"),
            ([f"run.dir={self.whole}", "--resume"], "has done all of its 30 steps"),
        ]:
            result = self.train("parallel.ranks=2", *words, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
            self.assertIn(text, result.stderr)
        self.assertEqual(len(losses(self.whole)), 30)

    def test_of_a_schedule_and_a_file_the_command_line_decides(self):
        part, turns = self.path("part"), self.write("turns.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
        self.train("parallel.ranks=2", "--pp", "2", "train.micro_batch=4", f"run.dir={part}", f"parallel.schedule_file={turns}",
                   "run.save_every=1", "train.steps=1")
        for step, words, saved in [(2, [], ("file", turns)), (3, ["parallel.schedule=gpipe"], ("gpipe", '""')),
                                   (4, [f"parallel.schedule_file={turns}"], ("file", turns)), (5, ["--ranks", "1"], ('"1f1b"', '""'))]:
            self.ok(self.run_program("train", f"run.dir={part}", "--resume", f"train.steps={step}", *words))
            with open(os.path.join(part, "config.yaml"), encoding="utf-8") as f:
                text = f.read()
            self.assertIn(f"  schedule: {saved[0]}\n", text)
            self.assertIn(f"  schedule_file: {saved[1]}\n", text)

    def test_damage_is_reported_and_skipped(self):
        part = self.path("part")
        self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "run.keep=0")
        with open(os.path.join(part, "checkpoints", "step-000000000030", "model-00000.safetensors"), "r+b") as f:
            f.seek(5000)
            byte = f.read(1)
            f.seek(5000)
            f.write(bytes([byte[0] ^ 4]))
        result = self.train("parallel.ranks=2", f"run.dir={part}", "run.save_every=10", "--resume")
        self.assertIn("a checkpoint was skipped: ", result.stdout)
        self.assertIn("step-000000000030", result.stdout)
        self.assertEqual(losses(part), losses(self.whole))


if __name__ == "__main__":
    unittest.main()
