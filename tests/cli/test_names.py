"""Names that a new user tries: commands of other programs and slips, each with the call that does
what was meant. Keys, values and presets: tests/unit/spec/test_spec_names.c."""
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


if __name__ == "__main__":
    unittest.main()
