"""Bad input: exit status 2, exactly one line that names what is wrong, nothing written.
ctest: timeout 240
"""
import os
import platform
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


class Errors(program.ProgramTest):
    def refuse(self, arguments, *parts, status=2):
        result = self.run_program(*arguments)
        self.one_line(result, status, *parts)
        self.assertEqual(result.stdout, "")
        self.assertEqual(sorted(os.listdir(self.folder)), self.before)
        return result

    def setUp(self):
        super().setUp()
        self.write("empty.txt", "")
        self.write("short.txt", "abc")
        self.write("unknown.yaml", "train:\n  lerning_rate: 1\n")
        self.write("type.yaml", "train:\n  steps: many\n")
        self.write("broken.yaml", "train: {steps: 3\n")
        self.write("binary.yaml", "\x01\x02")
        os.mkdir(self.path("bare"))
        self.before = sorted(os.listdir(self.folder))

    def test_command(self):
        self.refuse([], "command")
        self.refuse(["trian"], "trian")
        self.refuse(["help", "trian"], "trian")
        self.refuse(["bench", "nothing"], "nothing")
        self.refuse(["bench"], "collectives")

    def test_keys(self):
        self.refuse(self.small("parallel.ransk=2"), "parallel.ransk", "parallel.ranks")
        self.refuse(self.small("--rank", "2"), "--rank", "ranks")
        self.refuse(self.small("--frobnicate"), "--frobnicate", "--help")
        self.refuse(self.small("train.lr"), "train.lr", "train.lr=VALUE")
        self.refuse(self.small(""), "empty")
        self.refuse(["train", "unknown.yaml"], "unknown.yaml:2", "lerning_rate")
        self.refuse(self.small("train.steps=many"), "train.steps", "many")
        self.refuse(["train", "type.yaml"], "type.yaml:2", "train.steps", "many")
        self.refuse(self.small("train.lr=-1"), "train.lr")
        self.refuse(self.small("train.optimizer=adam"), "train.optimizer", "adamw")
        self.refuse(self.small("--steps"), "steps")
        self.refuse(self.small("--dir", "--overwrite"), "option '--dir' needs a value")
        self.refuse(["train", "a.yaml", "b.yaml"], "a.yaml")

    def test_files(self):
        self.refuse(["train", "missing.yaml"], "missing.yaml")
        self.refuse(["train", "broken.yaml"], "broken.yaml")
        self.refuse(["train", "binary.yaml"], "binary.yaml")
        self.refuse(["train", *program.SMALL], "data.path")
        self.refuse(["train", *program.SMALL, "data.path=nowhere.txt"], "nowhere.txt")
        self.refuse(["train", *program.SMALL, "data.path=empty.txt"], "empty.txt", "empty")
        self.refuse(["train", *program.SMALL, "data.path=short.txt"], "short.txt", "33")
        self.refuse(["train", *program.SMALL, "data.path=bare"], "bare")

    def test_sizes(self):
        self.refuse(self.small("train.global_batch=9", "parallel.ranks=2"), "train.global_batch", "8", "10")
        self.refuse(self.small("train.micro_batch=3"), "train.micro_batch")
        self.refuse(self.small("train.global_batch=1G"), "train.micro_batch", "train.global_batch, which counts sequences, not tokens")
        for command in ("train", "check", "schedule"):
            # The step program of 1,000,000,000 micro-batches would not fit; with 1 layer (3
            # modules) 133,333 do.
            more = ["train.micro_batch=1", "model.layers=1"]
            self.refuse([command, *self.small("train.global_batch=1G", *more)[1:]], "train.global_batch=1000000000",
                        "1000000000 micro-batches", "at most 133333", "train.micro_batch to 8000,", "sequences, not tokens")
        self.refuse(self.small("train.global_batch=133334", *more), "train.micro_batch to 2,")
        self.refuse(self.small("parallel.ranks=3", "parallel.dp=2"),
                    "dp 2 is a layout of 2 ranks, but there are 3: start 2 (parallel.ranks, mpirun -n), or set parallel.dp to -1")
        self.refuse(self.small("--tp", "2"), "tp 2 needs 2 ranks", "there is 1: start 2 (parallel.ranks, mpirun -n)\n")
        self.refuse(self.small("--tp", "2", "--pp", "2", "--ranks", "6"), "pp 2 × tp 2 needs 4 ranks",
                    "there are 6: start 4 or 8 (parallel.ranks, mpirun -n)\n")
        self.refuse(self.small("--dp", "65536", "--tp", "65536", "--pp", "65536", "--cp", "65536"), "2^31")
        self.refuse(self.small("--ranks", "16"), "train.global_batch (8) is less", "multiple of 16")
        self.refuse(self.small("model.hidden=33"), "model.hidden")
        # Refused before lists of tensors are built, which took 31 s and 7 GB.
        self.refuse(self.small("model.layers=100", "model.experts=65536"), "model.experts=65536", "1.97e+07 tensors", "at most 1000000")
        self.refuse(self.small("model.layers=100000"), "model.layers=100000", "tensors")
        # The proof took time in the square of the layers: 13 s for these.
        self.ok(self.run_program("check", *self.small("model.layers=5000")[1:], timeout=30))
        self.refuse(self.small("model.vocab=100"), "model.vocab", "256")
        self.refuse(self.small("--model", "llama-tinny"), "llama-tiny")
        self.assertNotIn("did you mean", self.refuse(self.small("--model", "nope"), "'nope'", "help models").stderr)
        self.refuse(self.small("train.steps=0"), "train.steps")
        self.refuse(self.small("run.trace=true"), "run.dir")

    def test_the_same_with_local_ranks_is_reported_once(self):
        self.refuse(self.small("parallel.ranks=4", "train.global_batch=6"), "train.global_batch")
        self.refuse(["train", *program.SMALL, "parallel.ranks=4", "data.path=nowhere.txt"], "nowhere.txt")

    def test_run_folder(self):
        self.refuse(self.small("run.dir=corpus.txt"), "corpus.txt")
        self.refuse(self.small("run.dir=corpus.txt/run", "parallel.ranks=2"), "corpus.txt")
        self.ok(self.run_program(*self.small("train.steps=1", "run.dir=one")))
        self.before = sorted(os.listdir(self.folder))
        first = self.numbers("one")
        self.refuse(self.small("train.steps=2", "run.dir=one"), "one", "--overwrite")
        self.assertEqual(self.numbers("one"), first)
        self.ok(self.run_program(*self.small("train.steps=2", "run.dir=one", "--overwrite")))
        self.assertEqual(len(self.numbers("one")), 2)

    def test_other_commands(self):
        self.refuse(["check", *program.SMALL, "--print", "1"], "--print", "0 to 0")
        self.refuse(["verify", f"data.path={self.corpus}", *program.SMALL], "--against")
        self.refuse(["verify", f"data.path={self.corpus}", *program.SMALL, "--against", "rnks=1"], "rnks")
        self.refuse(["doctor", "me"], "me")

    def test_backend_without_its_launcher(self):
        self.refuse(self.small("run.backend=mpi", "parallel.ranks=2"), "2")

    def test_kernels_of_another_machine(self):
        other = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon"
        self.refuse(self.small(f"run.kernels={other}"), "run.kernels", other, "auto")
        self.refuse(self.small("run.device=cuda", "run.kernels=generic"), "run.kernels=generic", "run.device=cpu")

    def test_debug_shows_the_place(self):
        result = self.run_program(*self.small("train.global_batch=9", "parallel.ranks=2", "--debug"))
        self.assertEqual(result.returncode, 2)
        self.assertIn("config/build.c", result.stderr)

    @unittest.skipUnless(program.MPIRUN, "needs mpirun")
    def test_mpi_tells_once(self):
        launcher = [program.MPIRUN, "--oversubscribe", "-n", "2"]
        for arguments, part in ((self.small("train.global_batch=7"), "train.global_batch"),
                                (self.small("train.stps=1"), "train.stps"),
                                (["train", *program.SMALL, "data.path=nowhere.txt"], "nowhere.txt")):
            result = self.run_program(*arguments, launcher=launcher)
            self.assertEqual(result.returncode, 2, result.stderr)
            ours = [line for line in result.stderr.splitlines() if line.startswith("quadrille: ")]
            self.assertEqual(len(ours), 1, result.stderr)
            self.assertIn(part, ours[0])


if __name__ == "__main__":
    unittest.main()
