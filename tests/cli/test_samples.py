"""Sample texts while training: the same bits with and without, on any layout; files, report and refusals.

ctest: timeout 200
ctest: processors 2
"""
import glob
import json
import os
import shutil
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

PROMPTS = "the quick\nfox"
LAYOUTS = {"one": [], "zero": ["parallel.ranks=2", "parallel.zero=3", "model.dropout=0.1"], "cp": ["parallel.ranks=2", "parallel.cp=2", "train.precision=bf16"],
           "mesh": ["parallel.ranks=4", "parallel.tp=2", "parallel.pp=2", "parallel.schedule=zb_h1", "train.micro_batch=1", "run.ranks_as=threads"],
           "experts": ["parallel.ranks=2", "parallel.ep=2", "model.experts=4"]}


class Samples(program.ProgramTest):
    def train(self, *more, sampled=True):
        samples = ["run.sample_every=3", f"run.sample_prompts={PROMPTS}", "run.sample_tokens=12", "run.sample_temperature=0"] if sampled else []
        return self.run_program(*self.small("train.steps=7", "train.warmup=1", *samples, *more))

    def samples(self, run):
        with open(self.path(f"{run}/samples.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def state(self, run):
        """Losses, norms and checkpoint of a run."""
        weights = {}
        for path in sorted(glob.glob(self.path(f"{run}/checkpoints/step-*/*.safetensors"))):
            with open(path, "rb") as file:
                weights[os.path.basename(path)] = file.read()
        return [(line["loss"], line["grad_norm"], line.get("dispatch_bytes")) for line in self.metrics(run)], weights

    def test_training_is_the_same(self):
        """Losses, norms and checkpoints are bit-identical with samples; the texts are those of
        `generate` on the checkpoint."""
        for name, layout in LAYOUTS.items():
            with self.subTest(name):
                self.ok(self.train(*layout, f"run.dir={name}", sampled=False))
                result = self.ok(self.train(*layout, f"run.dir={name}-sampled"))
                self.assertIn("sample after step 7: the quick", result.stdout + result.stderr)
                plain, sampled = self.state(name), self.state(f"{name}-sampled")
                self.assertEqual(plain[0], sampled[0])
                self.assertTrue(plain[1])
                self.assertTrue(plain[1] == sampled[1], "the checkpoints differ")
                self.planned(name, layout)
                lines = self.samples(f"{name}-sampled")
                self.assertEqual([(line["step"], line["prompt"]) for line in lines],
                                 [(step, prompt) for step in (3, 6, 7) for prompt in PROMPTS.split("\n")])
                self.assertFalse(os.path.exists(self.path(f"{name}/samples.jsonl")))
                for line in lines[-2:]:
                    told = self.ok(self.run_program("generate", f"{name}-sampled", "--prompt", line["prompt"], "--tokens", "12", "--temperature", "0"))
                    self.assertEqual(told.stdout.rstrip("\n"), (line["prompt"] + line["text"]).rstrip("\n"))

    def planned(self, name, layout):
        """What the ranks have allocated is what `check` plans, with and without samples."""
        for run, more in ((name, []), (f"{name}-sampled", ["run.sample_every=3"])):
            with open(self.path(f"{run}/memory.json"), encoding="utf-8") as file:
                allocated = max(rank["allocated_bytes"] for rank in json.load(file)["ranks"])
            plan = json.loads(self.ok(self.run_program("check", *self.small(*layout, *more, f"run.dir={run}")[1:], "--json")).stdout)
            self.assertEqual(allocated, plan["memory_bytes_per_rank"], run)
            self.assertEqual("sample texts, beyond a step" in plan["memory"], bool(more), run)
            self.assertEqual(sum(plan["memory"].values()), plan["memory_bytes_per_rank"], run)

    def test_short_windows(self):
        """A context shorter than the pieces that prompts are fed in is planned too."""
        self.ok(self.train("data.seq=16", "run.dir=short-sampled"))
        self.ok(self.train("data.seq=16", "run.dir=short", sampled=False))
        self.planned("short", ["data.seq=16"])

    def test_resumed_and_replaced(self):
        """A resumed run continues the file from its step, an overwritten one starts a new one; the
        report shows the newest texts first."""
        self.ok(self.train("run.dir=runs/a", "train.steps=6", "run.save_every=3", "run.keep=0"))
        self.assertEqual([line["step"] for line in self.samples("runs/a")], [3, 3, 6, 6])
        with open(self.path("runs/a/samples.jsonl"), "a", encoding="utf-8") as file:
            file.write('{"step":9,"prompt":"later","text":"lost"}\n{"step":9,"pro')
        self.ok(self.train("run.dir=runs/a", "train.steps=9", "--resume"))
        self.assertEqual([line["step"] for line in self.samples("runs/a")], [3, 3, 6, 6, 9, 9])
        self.ok(self.run_program("report", "runs/a"))
        with open(self.path("runs/a/report.html"), encoding="utf-8") as file:
            data = json.loads(file.read().split('id="data">')[1].split("</script>")[0])
        rows = data["tables"][0]["rows"]
        newest = self.samples("runs/a")[-1]
        self.assertEqual((rows[0], rows[1], len(rows)), (["step", "prompt", "text"], ["9", newest["prompt"], newest["text"]], 7))
        for step in (6, 9):
            shutil.rmtree(self.path(f"runs/a/checkpoints/step-{step:012}"))
        self.ok(self.run_program("train", "run.dir=runs/a", "--resume", "train.steps=4", "run.sample_every=0", "run.sample_prompts=",
                                 "run.sample_tokens=64", "run.sample_temperature=0.8"))
        self.assertEqual([line["step"] for line in self.samples("runs/a")], [3, 3])
        self.ok(self.train("run.dir=runs/a", "--overwrite", sampled=False))
        self.assertFalse(os.path.exists(self.path("runs/a/samples.jsonl")))

    def test_without_prompt(self):
        self.ok(self.run_program(*self.small("train.steps=2", "run.sample_every=2", "run.dir=run")))
        lines = self.samples("run")
        self.assertEqual([(line["step"], line["prompt"], line["tokens"]) for line in lines], [(2, "", 64)])

    def test_refused(self):
        self.one_line(self.run_program(*self.small("run.sample_every=2")), 2, "run.sample_every", "run.dir")
        self.one_line(self.run_program(*self.small("run.dir=run", "run.sample_prompts=fox")), 2, "run.sample_prompts", "run.sample_every")
        self.one_line(self.run_program(*self.small("run.dir=run", "run.sample_every=2", "run.sample_tokens=0")), 2, "run.sample_tokens")
        self.one_line(self.run_program(*self.small("run.dir=run", "sample_interval=2")), 2, "run.sample_every")

    def test_data_without_tokenizer_is_refused_before_a_run_is_replaced(self):
        self.ok(self.run_program(*self.small("train.steps=2", "run.dir=run")))
        self.ok(self.run_program("tokenize", self.corpus, "--train", "300", "--output", "tokens"))
        again = self.small("train.steps=2", "model.vocab=300", "run.dir=run", "run.sample_every=1", "--overwrite", "data.path=tokens")
        self.one_line(self.run_program(*again), 2, "run.sample_every", "data.tokenizer")
        self.assertEqual(len(self.metrics("run")), 2)


if __name__ == "__main__":
    unittest.main()
