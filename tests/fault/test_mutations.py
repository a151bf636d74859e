"""Files of every format with their structure changed (tools/mutate.py): refused in one line or used,
without a crash and without much time or memory. QUADRILLE_MUTATIONS=1000 for the long form.
ctest: timeout 200
ctest: processors 2
"""
import json
import os
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RUNS = int(os.environ.get("QUADRILLE_MUTATIONS", "6"))
# Beyond that of the unchanged file. The bar is 0.1 s; a busy machine and short tests need slack.
SECONDS, MEMORY = ("0.2", "16") if RUNS > 10 else ("2", "100")
SEEDS = os.path.join(program.SOURCE, "tests", "fuzz", "seeds")
MODEL = ["model.layers=1", "model.hidden=16", "model.heads=2", "data.seq=8", "train.global_batch=1", "train.steps=1", "run.threads=1"]


@unittest.skipIf(program.SANITIZED, "measures time and memory")
class Mutations(program.ProgramTest):
    def mutate(self, seed, *command, folder=False):
        """The file is used as it is; none of its mutations makes the program fail. The model that a
        folder describes is allocated before the shapes of its weights are compared."""
        result = subprocess.run([sys.executable, os.path.join(program.SOURCE, "tools", "mutate.py"), seed, "--runs", str(RUNS), "--seconds",
                                 SECONDS, "--memory", "100" if folder else MEMORY, "--keep", self.path("kept"), *(["--folder"] if folder else []), "--",
                                 program.PROGRAM, *command], capture_output=True, text=True, cwd=self.folder, check=False)
        self.assertIn("unchanged: status 0", result.stdout)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        if RUNS > 10:
            print(os.path.basename(seed), result.stdout.splitlines()[-1], flush=True)

    def test_configurations(self):
        self.mutate(self.write("run.yaml", "model: {layers: 2, hidden: 32, heads: 2}\ndata:\n  seq: 16\ntrain:\n  global_batch: 4\n  lr: 1e-3\n"),
                    "check", "@@")
        self.mutate(os.path.join(program.SOURCE, "data", "clusters", "h100.yaml"), "simulate", "model.preset=llama-tiny", "--cluster", "@@",
                    "--ranks", "2", "train.global_batch=8", "data.seq=64")
        self.mutate(self.write("1f1b.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), "check", *MODEL[1:], "model.layers=2", "parallel.pp=2",
                    "parallel.ranks=2", "train.global_batch=2", "train.micro_batch=1", "parallel.schedule=file", "parallel.schedule_file=@@")

    def test_data(self):
        lines = [{"prompt": "a b", "completion": "c d e"}, {"prompt": "x", "completion": "y"}]
        self.mutate(self.write("examples.jsonl", "\n".join(map(json.dumps, lines))), "train", "data.path=@@", "data.format=examples", *MODEL)
        lines = [{"prompt": "a b", "chosen": "c d e", "rejected": "f"}, {"prompt": "x", "chosen": "y", "rejected": "z"}]
        self.mutate(self.write("pairs.jsonl", "\n".join(map(json.dumps, lines))), "train", "data.path=@@", "data.format=preferences", *MODEL[:3],
                    "data.seq=16", "train.global_batch=2", "train.steps=1", "run.threads=1")

    def test_folders(self):
        self.ok(self.run_program("train", f"data.path={self.corpus}", *MODEL, "model.vocab=300", "run.dir=run"))
        self.ok(self.run_program("convert", "run", "hf"))
        use = ["train", "run.from=@@", f"data.path={self.corpus}", *MODEL[3:]]
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            self.mutate(self.path(f"hf/{name}"), *use, folder=True)
        shutil.rmtree(self.path("hf"))


if __name__ == "__main__":
    unittest.main()
