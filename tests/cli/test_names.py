"""Names that a new user tries: commands of other programs and slips, each with the call that does
what was meant. Keys, values and presets: tests/unit/spec/test_spec_names.c."""
import json
import math
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

COMMANDS = {
    "pretrain": "train", "run": "train", "resume": "train --resume --dir FOLDER", "evaluate": "eval", "sample": "generate",
    "chat": "generate", "preprocess": "tokenize", "export": "convert", "estimate": "check", "search": "plan", "benchmark": "bench",
    "plot": "report", "info": "doctor", "models": "help models", "presets": "help models", "clusters": "help clusters",
    "trian": "train", "genrate": "generate", "tokenzie": "tokenize", "simulte": "simulate", "run.yaml": "train run.yaml",
    "train.lr=3e-4": "train train.lr=3e-4",
}


class Names(program.ProgramTest):
    def test_commands(self):
        for name, meant in COMMANDS.items():
            self.one_line(self.run_program(name), 2, f"'{name}'", f"did you mean 'quadrille {meant}'?")
        self.one_line(self.run_program("frobnicate"), 2, "'frobnicate'", "quadrille help lists them")
        self.one_line(self.run_program("help", "pretrain"), 2, "did you mean 'quadrille train'?")

    def test_keys_of_commands(self):
        self.one_line(self.run_program("generate", "runs/none", "--max-new-tokens", "20"), 2, "did you mean '--tokens 20'?")
        self.one_line(self.run_program("plan", "--num-gpus", "8"), 2, "did you mean '--gpus 8'?")
        self.one_line(self.run_program("train", "--learning-rate", "3e-4"), 2, "did you mean '--lr 3e-4'?")
        self.one_line(self.run_program("train", "--config", "run.yaml"), 2, "quadrille train run.yaml")

    def test_presets(self):
        words = ["train.global_batch=1", "train.micro_batch=1", "data.seq=128"]
        for name in ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"):
            said = self.ok(self.run_program("check", f"model.preset={name}", *words)).stdout
            self.assertIn("llama3-8b", said)
        self.one_line(self.run_program("check", "model.preset=llama3-9b", *words), 2, "did you mean 'llama3-8b'?")

    def help(self, *words):
        return self.ok(self.run_program("help", *words)).stdout

    def test_help_is_short_first(self):
        self.assertLess(self.help().count("\n"), 30)
        short, whole = self.help("train"), self.help("train", "--all")
        self.assertLess(short.count("\n"), 130)
        self.assertIn("--lr X, train.lr", short)
        self.assertNotIn("train.muon_steps", short)
        self.assertIn("train.muon_steps", whole)
        self.assertEqual(whole, self.ok(self.run_program("train", "--help", "--all")).stdout)
        everything = self.help("--all")
        for part in ("train.muon_steps", "accelerator.memory_gib", "--temperature", "quadrille doctor"):
            self.assertIn(part, everything)

    def test_help_of_a_key_and_a_section(self):
        for name in ("train.lr", "lr"):
            said = self.help(name)
            self.assertTrue(said.startswith("train.lr\n"), said)
            for part in ("peak learning rate", "number, 0 to 1000", "1e-3", "train.lr=1e-3 or --lr 1e-3", "train: {lr: 1e-3}"):
                self.assertIn(part, said)
        self.assertIn("one of: none, selective, full", self.help("train.recompute"))
        self.assertIn("quadrille generate --temperature", self.help("temperature"))
        self.assertIn("quadrille report --output", self.help("output"))
        self.assertIn("accelerator.memory_gib", self.help("accelerator.memory_gib"))
        section = self.help("parallel")
        self.assertIn("parallel.zero", section)
        self.assertNotIn("train.lr", section)
        self.assertIn("train.lr", self.help("train."))  # the section; without the dot it is the command
        self.assertNotIn("quadrille train", self.help("train."))
        self.assertIn("node.size", self.help("node"))
        self.one_line(self.run_program("help", "n_layer"), 2, "did you mean 'model.layers'?")
        self.one_line(self.run_program("help", "train.lrr"), 2, "did you mean 'train.lr'?")
        self.one_line(self.run_program("help", "zzzzzzzz"), 2, "zzzzzzzz", "the sections are model, data, train")

    def test_width(self):
        """No line is wider than the terminal; 100 columns in a pipe."""
        commands = [line.split()[1] for line in self.help().splitlines() if line.startswith("  quadrille ")]
        self.assertGreater(len(commands), 12)
        calls = [["help"], ["help", "parallel"], ["help", "train.muon_scale"], ["help", "train", "--all"]]
        for call in calls + [["help", command] for command in commands]:
            for line in self.on_terminal(*call, columns=80).splitlines():
                self.assertLessEqual(len(line), 80, (call, line))
            for line in self.ok(self.run_program(*call)).stdout.splitlines():
                self.assertLessEqual(len(line), 100, (call, line))
        for line in self.on_terminal("help", "models", columns=80).splitlines():  # in a pipe one line each, for grep
            self.assertLessEqual(len(line), 80, line)
        self.assertIn(" \\\n", self.on_terminal("help", "plan", columns=80))  # an example that a shell still understands

    def test_epochs(self):
        """Steps follow from the data, on ranks of every kind, and when a run resumes."""
        with open(self.corpus, "rb") as file:
            windows = (len(file.read()) - 1) // 32

        def steps(epochs):
            return math.ceil(epochs * windows / 8)
        for ranks in ([], ["--ranks", "2"], ["--ranks", "2", "run.ranks_as=threads"]):
            self.ok(self.run_program(*self.small("--epochs", "0.05", *ranks, "--dir", "run", "--overwrite")))
            self.assertEqual(len(self.metrics("run")), steps(0.05))
        if program.MPIRUN:
            self.ok(self.run_program(*self.small("--epochs", "0.05", "--dir", "mpi"), launcher=[program.MPIRUN, "--oversubscribe", "-n", "2"]))
            self.assertEqual(len(self.metrics("mpi")), steps(0.05))
        # The same losses as with the number of steps: the learning rate follows the length.
        self.ok(self.run_program(*self.small("--steps", str(steps(0.05)), "--dir", "same", "--ranks", "2", "run.ranks_as=threads")))
        self.assertEqual(self.numbers("run"), self.numbers("same"))
        self.ok(self.run_program("train", "--resume", "--dir", "run", "--epochs", "0.1"))
        self.assertEqual(len(self.metrics("run")), steps(0.1))
        self.ok(self.run_program("train", "--resume", "--dir", "run", "--steps", str(steps(0.1) + 1)))  # instead of the epochs of the file
        self.assertEqual(len(self.metrics("run")), steps(0.1) + 1)
        # The steps before were of another size: their number would be that of another length.
        self.one_line(self.run_program("train", "--resume", "--dir", "run", "--epochs", "0.2", "train.global_batch=16"), 2, "train.epochs=0.2",
                      "train.global_batch")
        self.assertEqual(len(self.metrics("run")), steps(0.1) + 1)
        self.one_line(self.run_program(*self.small("--epochs", "1", "--steps", "3")), 2, "train.steps (3)", "train.epochs (1)")
        self.one_line(self.run_program(*self.small("--epochs", "0.01", "train.warmup=1000")), 2, "train.epochs=0.01", "train.warmup=")

    def test_init(self):
        """The file is complete, commented and loads; train, check and others find it."""
        said = self.ok(self.run_program("init", "llama-tiny", f"data.path={self.corpus}", "--steps", "3", "data.seq=32",
                                        "train.global_batch=8")).stdout
        self.assertIn("next     quadrille train\n", said)
        with open(self.path("run.yaml"), encoding="utf-8") as file:
            text = file.read()
        for line in text.splitlines():
            self.assertLessEqual(len(line), 100 + len(self.corpus), line)
        for part in ("preset: llama-tiny", "# peak learning rate", "steps: 3 ", "ranks: 1", "device: cpu", "dir: runs/llama-tiny"):
            self.assertIn(part, text)
        self.one_line(self.run_program("init"), 2, "run.yaml exists", "--force", "-o FILE")
        result = self.ok(self.run_program("train"))
        self.assertEqual(result.stderr, "quadrille: using run.yaml of this folder\n")
        self.assertEqual(len(self.metrics("runs/llama-tiny")), 3)
        with_config = self.ok(self.run_program("check", "run.yaml", "--json")).stdout
        self.assertEqual(self.ok(self.run_program("check", "--json")).stdout, with_config)
        self.ok(self.run_program("train", "--ranks", "2", "--overwrite", "run.threads=1", "train.micro_batch=4"))  # processes find it too
        # Complete without it: a model is named, or a run resumes with its own configuration.
        self.assertEqual(self.ok(self.run_program("check", "--model", "gpt2-tiny")).stderr, "")
        resumed = self.ok(self.run_program("train", "--resume", "--dir", "runs/llama-tiny", "--steps", "4"))
        self.assertEqual((resumed.stderr, len(self.metrics("runs/llama-tiny"))), ("", 4))

    def test_init_for_a_cluster(self):
        self.ok(self.run_program("init", "Llama-3.1-8B", "--cluster", "h100", "--gpus", "16", "train.global_batch=64", "-o", "big.yaml"))
        report = json.loads(self.ok(self.run_program("check", "big.yaml", "--json")).stdout)
        self.assertEqual(report["ranks"], 16)
        self.assertLess(report["memory_bytes_per_rank"], 80 * 2**30)
        self.one_line(self.run_program("init", "llama3-8b", "accelerator.memory_gib=8"), 1, "llama3-8b on", "no layout fits")
        self.one_line(self.run_program("init", "llama3-9b"), 2, "did you mean 'llama3-8b'?")
        self.one_line(self.run_program("init", "a", "b"), 2, "'b'")
        self.one_line(self.run_program("init", "--gpus", "4"), 2, "--gpus", "--cluster")
        self.one_line(self.run_program("init", "gpt2", "--model", "gpt2"), 2, "twice")
        self.assertEqual(os.listdir(self.folder).count("run.yaml"), 0)


if __name__ == "__main__":
    unittest.main()
