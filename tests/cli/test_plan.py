"""plan, simulate and check as seen by a new user: wording, widths, contradictions, impossible
requests.
ctest: timeout 120
"""
import json
import os
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RUN = ["--model", "llama3.1-8b", "--seq", "8192", "train.global_batch=128", "train.precision=bf16", "--cluster", "h100"]
QUICK = ["plan", *RUN, "--gpus", "64", "--tp", "1", "--pp", "1"]
STEP = ["simulate", *RUN, "--ranks", "64", "--zero", "1", "train.micro_batch=1"]
UTF8 = {"LC_ALL": "C.UTF-8"}


class Plan(program.ProgramTest):
    def lines(self, *arguments):
        return self.ok(self.run_program(*arguments, environment=UTF8)).stdout.splitlines()

    def test_short_sequences_in_small_batches(self):
        """Fewer than 512 tokens per sequence, and fewer sequences than tensor-parallel ranks."""
        for gpus in (1, 4):
            result = self.run_program("plan", "--cluster", "h100", "--gpus", str(gpus), "data.seq=64", "train.global_batch=4")
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_words_of_a_plan(self):
        lines = self.lines(*QUICK)
        self.assertRegex(lines[0], r"^llama3\.1-8b, 8\.03 B parameters, on 64 x NVIDIA H100 SXM 80 GB: \d+ layouts fit, \d+ do not, "
                                   r"\d+ cannot be built \(\d+\.\d s\)$")
        self.assertRegex(lines[1], r"^     layout +step +MFU +memory  compared with the first it$")
        self.assertRegex(lines[2], r"^  1  dp 64, zero 1, micro-batch 1 +1\.\d{3} s +\d\d\.\d % +\d\d\.\d GiB$")
        self.assertRegex(lines[3], r"^  2  dp 64, zero 3, .* GiB  \w.*$")
        self.assertEqual(len({line.index(" GiB") for line in lines[2:6]}), 1)  # columns stay columns
        why = lines.index("why  the model fits without splitting it: data parallelism alone has the least communication")
        self.assertEqual(lines[why + 1], "     zero 1 shards the optimizer state and moves no more bytes than plain data parallelism")
        self.assertRegex(lines[why + 2], r"^     zero 3 \(dp 64, zero 3, micro-batch 2\): (is equally fast|\d+\.\d % slower; it .+)$")
        self.assertRegex(lines[-2], r"^next GEMMs and attention take \d\d % of the time: the layout is close to what the accelerators "
                                    r"can do$")
        self.assertEqual(lines[-1], "keys train.micro_batch=1 parallel.ranks=64 parallel.zero=1 parallel.bucket_mb=100")

    def test_keys_are_the_plan(self):
        """The printed keys, passed as they are, simulate to the same step."""
        planned = json.loads(self.ok(self.run_program(*QUICK, "--json")).stdout)["choices"][0]
        keys = self.lines(*QUICK)[-1].split()[1:]
        step = json.loads(self.ok(self.run_program("simulate", *RUN, *keys, "--json")).stdout)
        self.assertAlmostEqual(planned["step_seconds"], step["step_seconds"], delta=1e-6)

    def test_reasons_are_true(self):
        """Within a node nothing crosses slow links; settings that were given are not explained; a
        small model is not near the peak."""
        inside = "\n".join(self.lines("plan", *RUN, "--gpus", "8", "--pp", "2", "--tp", "4", "train.recompute=full"))
        self.assertIn("why  tp 4 stays inside the node", inside)
        self.assertNotIn("slow links", inside)
        self.assertNotIn("do not fit without it", inside)
        self.assertIn("cross", "\n".join(self.lines("plan", *RUN, "--gpus", "32", "--pp", "1", "--tp", "16")))
        small = self.lines("plan", "--gpus", "1")
        self.assertNotIn("close to what the accelerators can do", "\n".join(small))
        self.assertIn("dp 8, ", self.lines("plan", *RUN, "--gpus", "64", "--dp", "8", "--pp", "1")[2])

    def test_what_cannot_be(self):
        cases = [
            (["--gpus", "7"], 2, ["no layout of 7 accelerators", "train.global_batch (128)", "multiple of 7"]),
            (["--gpus", "64", "--tp", "3"], 2, ["tp 3 needs 3 ranks"]),
            (["--gpus", "64", "--model", "mixtral-8x7b", "--ep", "3"], 2, ["ep 3 does not divide"]),
            (["--tokens", "1e12", "--days", "30", "--ranks", "64"], 2, ["leave parallel.ranks out"]),
            (["--gpus", "64", "--tp", "8", "--pp", "16"], 2, ["needs 128 ranks"]),
            (["--gpus", "64", "--dp", "7"], 2, ["dp 7 is a layout of 7 ranks"]),
            (["--gpus", "64", "train.micro_batch=3"], 2, ["micro-batches of train.micro_batch (3)"]),
            (["--gpus", "1", "train.offload=none"], 1, ["no layout fits on 1 accelerator;", "alone fill at least 2"]),
            (["--gpus", "8", "--model", "llama3.1-405b"], 1, ["756.0 of 80.0 GiB", "alone fill at least 79", "train.offload"]),
            (["--gpus", "64", "--ranks", "32"], 2, ["--gpus is 64 and parallel.ranks 32"]),
            (["--gpus", "99999999999999999999"], 2, ["gpus"]),
            (["--gpus", "8", "--cluster", "nothing"], 2, ["there is no cluster 'nothing'", "h100"]),
            (["--gpus", "8", "--tokens", "1e12", "--days", "3"], 2, ["--tokens and --gpus do not go together"]),
            (["--largest", "--against", "tp=2"], 2, ["--largest and --against"]),
            (["--most", "8"], 2, ["--most has no effect without --tokens"]),
            (["--tokens", "1e12", "--days", "1", "--most", "3"], 2, ["--most is 3"]),
            (["--tokens", "1e12", "--days", "1", "--most", "8", "--tp", "1", "--pp", "1"], 2, ["8 of them come closest, with "]),
        ]
        for more, status, parts in cases:
            with self.subTest(more):
                self.one_line(self.run_program("plan", *RUN, *more), status, *parts)
        for more, part in [(["--scaling", "64", "--draw"], "--scaling and --draw"),
                           (["--strong"], "--strong has no effect without --scaling"),
                           (["--scaling", "4", "--tp", "8"], "at least 8"), (["--json", "--draw"], "--draw and --json")]:
            with self.subTest(more):
                self.one_line(self.run_program(*STEP, *more), 2, part)

    def test_a_plan_for_this_machine_can_be_trained(self):
        """Keys of the cluster are not written into the run."""
        cluster = self.write("cluster.yaml", "accelerator: {preset: h100}\nprocessor: {cores: 0}\nnode: {size: 8, bandwidth_gbs: 450}\n"
                                             "network: {bandwidth_gbs: 50}\n")
        self.ok(self.run_program("plan", *program.SMALL, "--cluster", cluster, "--gpus", "2", "--write", "run.yaml"))
        with open(self.path("run.yaml"), encoding="utf-8") as file:
            self.assertEqual([line for line in file if line[0] != " "], ["model:\n", "data:\n", "train:\n", "parallel:\n", "run:\n"])
        self.ok(self.run_program("train", "run.yaml", f"data.path={self.corpus}", "train.steps=1"))

    def test_words_of_a_step(self):
        text = "\n".join(self.lines(*STEP, "--tp", "8"))
        self.assertIn("\nlayout   dp 8 × tp 8, zero 1 over 8 on 64 x NVIDIA H100 SXM 80 GB, software native\n", text)
        self.assertRegex(text, r"\nstep     \d\.\d{3} s: \d+ k tokens/s, ")
        self.assertRegex(text, r"\nenergy   \d+\.\d+ kJ per step \(\d+\.\d+ kW\)")
        shares = [float(line.split()[-2]) for line in text.split("\nstep ")[1].split("\nmemory ")[0].splitlines()[1:] if line.endswith("%")]
        self.assertAlmostEqual(sum(shares), 100.0, delta=1.0)
        plain = self.ok(self.run_program(*STEP, "--tp", "8", "--draw", environment={"LC_ALL": "C"})).stdout
        self.assertTrue(plain.isascii(), plain)
        self.assertIn("dp 8 x tp 8", plain)

    def test_sizes_that_cannot_run_are_named(self):
        lines = self.lines(*STEP, "--scaling", "256", "--strong")
        self.assertRegex(lines[-2], r"^     128 +\d+\.\d ms +")
        self.assertRegex(lines[-1], r"^     256  train.global_batch \(128\) is less than")

    def test_terminals(self):
        """Lines never exceed the terminal, and a file gets whole lines."""
        for columns in (60, 80, 200):
            for arguments in (QUICK, [*QUICK, "--against", "tp=8"], STEP, [*STEP, "--pp", "4", "--draw"]):
                with self.subTest(columns=columns, arguments=arguments):
                    text = self.on_terminal(*arguments, columns=columns, TERM="xterm", **UTF8)
                    widest = max(text.splitlines(), key=len)
                    self.assertLessEqual(len(widest), max(columns, 64), widest)
        layout = ["--model", "llama-tiny", "--seq", "64", "train.global_batch=8", "train.micro_batch=2", "--ranks", "4", "--tp", "2"]
        for arguments in (["check", *layout, "--zero", "3"], ["check", *layout, "--pp", "2"], ["schedule", *layout, "--pp", "2"],
                          ["help", "models"]):
            with self.subTest(arguments=arguments):
                text = self.on_terminal(*arguments, columns=80, TERM="xterm", **UTF8)
                widest = max(text.splitlines(), key=len)
                self.assertLessEqual(len(widest), 80, widest)
                self.assertTrue(self.ok(self.run_program(*arguments, environment={"LC_ALL": "C"})).stdout.isascii())
        narrow = self.on_terminal(*QUICK, columns=60, TERM="xterm", **UTF8)
        self.assertRegex(narrow, r"\n  2  dp 64, zero 3, micro-batch 2\n     1\.\d+ s in .*compared\s+with\s+the\s+first it")
        self.assertEqual(self.on_terminal(*STEP, TERM="dumb", **UTF8), self.ok(self.run_program(*STEP, environment=UTF8)).stdout)

    def test_clusters_by_name(self):
        lines = self.lines("help", "clusters")
        self.assertIn("h100          NVIDIA H100 SXM 80 GB               989    80   8 x 450        50", lines)
        self.assertLessEqual(max(map(len, lines[4:])), 80)
        self.assertIn("help clusters", " ".join(" ".join(self.lines("help")).split()))

    def test_a_reader_that_leaves(self):
        for arguments in (QUICK, STEP, ["help", "plan"]):
            ours, theirs = os.pipe()
            os.close(ours)
            result = subprocess.run([program.PROGRAM, *arguments], stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False)
            os.close(theirs)
            self.assertEqual((result.returncode, result.stderr), (-13, b""))


if __name__ == "__main__":
    unittest.main()
