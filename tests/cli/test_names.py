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


if __name__ == "__main__":
    unittest.main()
