"""What the commands print and write matches the documentation.
ctest: timeout 240
"""
import json
import os
import re
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

KEYS = ["step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second", "mfu", "memory_peak_bytes"]


class Outputs(program.ProgramTest):
    def json_of(self, *arguments):
        result = self.ok(self.run_program(*arguments))
        self.assertEqual(result.stderr, "")
        return json.loads(result.stdout)

    def test_help(self):
        text = self.ok(self.run_program("help")).stdout
        for command in ("train", "check", "verify", "bench", "doctor", "version"):
            self.assertIn(f"quadrille {command}", text)
            self.assertIn(f"quadrille {command}", self.ok(self.run_program("help", command)).stdout)
            self.assertEqual(self.ok(self.run_program(command, "--help", "--nonsense")).stdout,
                             self.ok(self.run_program("help", command)).stdout)
        self.assertIn("train.global_batch", self.ok(self.run_program("train", "--help")).stdout)
        models = self.ok(self.run_program("help", "models")).stdout
        self.assertRegex(models, r"\n  llama3.1-8b +8\.03 B  32 blocks of 4096, 32 heads, 8 of keys and values\n")
        self.assertRegex(models, r"\n  mixtral-8x7b +46\.7 B  32 blocks of 4096, .*, 2 of 8 experts\n")
        self.assertIn("[key=value ...]", self.ok(self.run_program("help", "train", environment={"LC_ALL": "C"})).stdout)
        self.assertIn("  -o TEXT, --output  ", self.ok(self.run_program("help", "report")).stdout)
        self.assertRegex(models.split("plan and simulate only")[0], r"\n  kimi-k2 +1\.03 T")
        self.assertIn("nemotron4-15b", models.split("plan and simulate only")[1])
        usage = self.ok(self.run_program("help", "generate")).stdout.split("\n\n")[0].splitlines()
        self.assertTrue(all(line.startswith(" " * len("quadrille generate ")) for line in usage[1:]), usage)
        markdown = self.ok(self.run_program("help", "--markdown")).stdout
        self.assertIn("train.global_batch", markdown)
        self.assertRegex(markdown, r"(?m)^\|")
        self.assertRegex(self.ok(self.run_program("--version")).stdout, r"^quadrille \d+\.\d+\.\d+\n$")

    def test_check_names_experts_once_and_memory_in_one_unit(self):
        experts = ["check", "model.preset=mixtral-tiny", "data.seq=32", "train.global_batch=4", "parallel.ranks=4", "parallel.ep=4"]
        text = self.ok(self.run_program(*experts)).stdout
        layout = re.search(r"(?m)^layout   (.*): 4 ranks$", text)[1]
        self.assertEqual(layout.count("experts"), 1, layout)
        self.assertEqual(json.loads(self.ok(self.run_program(*experts, "--json")).stdout)["layout"], layout)
        self.assertRegex(text, r"\n {9}of which \d[\d.]+ [KM]iB are parameters")

    def test_metrics(self):
        result = self.ok(self.run_program(*self.small("train.steps=5", "parallel.ranks=2", "run.dir=a/b")))
        self.assertEqual(result.stderr, "")
        lines = self.metrics("a/b")
        self.assertEqual([line["step"] for line in lines], [1, 2, 3, 4, 5])
        for line in lines:
            self.assertEqual(list(line), KEYS)
            self.assertEqual(line["tokens"], 8 * 32)
            self.assertGreater(line["loss"], 0)
            self.assertGreater(line["step_seconds"], 0)
        with open(self.path("a/b/metrics.jsonl"), encoding="utf-8") as file:
            digits = file.readline().split('"loss":')[1].split(",")[0]
        self.assertEqual(float(digits), float(f"{float(digits):.17g}"))
        self.assertIn("step 5/5", result.stdout)
        self.assertIn("resident", result.stdout)
        self.assertEqual(sorted(os.listdir(self.path("a/b"))), ["checkpoints", "config.yaml", "data.json", "effective.yaml",
                                                                "memory.json", "metrics.jsonl", "starts.jsonl"])

    def test_memory_is_what_check_said(self):
        plan = self.json_of("check", *program.SMALL, "parallel.ranks=2", "--json")
        self.ok(self.run_program(*self.small("train.steps=1", "parallel.ranks=2", "run.dir=run")))
        self.assertEqual(self.metrics("run")[0]["memory_peak_bytes"], plan["memory_bytes_per_rank"])
        self.assertEqual(sum(plan["memory"].values()), plan["memory_bytes_per_rank"])
        self.assertEqual(plan["ranks"], 2)

    def test_check_prints_the_program(self):
        text = self.ok(self.run_program("check", *program.SMALL, "parallel.ranks=2", "--print", "1")).stdout
        for word in ("forward", "backward", "reduce", "update"):
            self.assertIn(word, text)
        table = self.ok(self.run_program("check", *program.SMALL, "parallel.ranks=2")).stdout
        self.assertIn("gradients", table)
        self.assertIn("2 ranks", table)

    def test_saved_configuration_is_the_same_run(self):
        for name, more in (("preset", ["--model", "llama-tiny", "parallel.ranks=2"]),
                           ("plain", ["model.arch=gpt2", "train.optimizer=sgd", "train.momentum=0.9", "train.schedule=wsd"])):
            arguments = ["train", f"data.path={self.corpus}", "data.seq=32", "train.global_batch=8", "train.steps=4", *more]
            self.ok(self.run_program(*arguments, f"run.dir={name}"))
            for file in ("config", "effective"):
                self.ok(self.run_program("train", f"{name}/{file}.yaml", f"run.dir={name}-{file}"))
                self.assertEqual(self.numbers(name), self.numbers(f"{name}-{file}"))
        with open(self.path("preset/effective.yaml"), encoding="utf-8") as file:
            text = file.read()
        self.assertIn("dp: 2\n", text)
        self.assertNotRegex(text, r"\n  (dp|tp|pp|cp): -1\n")  # degrees are resolved

    def test_trace(self):
        self.ok(self.run_program(*self.small("train.steps=3", "train.micro_batch=2", "parallel.ranks=2", "run.dir=run", "--trace")))
        with open(self.path("run/trace.json"), encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        names = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
        for rank in (0, 1):
            self.assertIn((rank, f"rank {rank}"), names)
            self.assertIn((rank, "compute"), names)
            self.assertIn((rank, "communication"), names)
            mine = [event for event in spans if event["pid"] == rank]
            self.assertEqual({event["args"]["step"] for event in mine}, {1, 2, 3})
            self.assertEqual({event["tid"] for event in mine}, {0, 1})
            self.assertTrue(all(event["tid"] == 1 for event in mine if event["cat"] == "reduce"))
            forward = [event for event in mine if event["name"] == "forward block.1"]
            self.assertEqual(sorted((e["args"]["step"], e["args"]["microbatch"]) for e in forward),
                             [(step, batch) for step in (1, 2, 3) for batch in (0, 1)])
            self.assertTrue(all(event["args"]["flops"] > 0 for event in forward))
        self.assertTrue(all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans))
        self.assertTrue(any(event["args"].get("bytes", 0) > 0 for event in spans if event["cat"] == "reduce"))

    def test_verify(self):
        arguments = ["verify", f"data.path={self.corpus}", *program.SMALL, "parallel.ranks=2", "--json"]
        report = self.json_of(*arguments, "--against", "ranks=1 dp=1", "--steps", "3")
        self.assertEqual(report["steps"], 3)
        self.assertTrue(report["equal_within_tolerance"])
        self.assertFalse(report["bit_equal"])
        self.assertTrue(self.json_of(*arguments, "--against", "parallel.overlap=false")["bit_equal"])
        report = self.json_of(*arguments, "parallel.tp=2", "--against", "parallel.tp=1", "--steps", "2")
        self.assertTrue(report["equal_within_tolerance"])
        self.assertEqual(report["eps"], 1e-3)
        # Experts under AdamW: with the usual eps it magnifies what layouts round differently
        # (tests/equiv/test_adamw_rounding.c).
        experts = [*arguments, "model.experts=4", "model.experts_per_token=2", "model.expert_ffn=32", "parallel.ranks=4", "parallel.tp=2", "parallel.ep=2"]
        one = ["--against", "parallel.ranks=1 parallel.tp=1 parallel.ep=1"]
        report = self.json_of(*experts, *one)
        self.assertTrue(report["equal_within_tolerance"], report)
        usual = self.json_of(*experts, *one, "--eps", "0", "--tolerance", "1", "--steps", "1")
        self.assertGreater(usual["worst_weight"], 2 * report["worst_weight"])
        self.assertNotIn("eps", usual)
        self.assertTrue(self.json_of(*experts, *one, "train.optimizer=muon", "--steps", "3")["equal_within_tolerance"])
        other = self.run_program(*arguments, "--against", "train.lr=0.1")
        self.assertEqual(other.returncode, 1)
        self.assertFalse(json.loads(other.stdout)["equal_within_tolerance"])
        self.assertEqual(other.stderr.count("\n"), 1, other.stderr)

    def test_doctor(self):
        report = self.json_of("doctor", "--json")
        self.assertGreaterEqual(report["cores"], report["cores_allowed"])
        self.assertGreater(report["memory_bytes"], 0)
        self.assertGreater(report["product_flops"], 0)
        self.assertIsInstance(report["advice"], list)
        self.assertIn("CPU", self.ok(self.run_program("doctor")).stdout)
        # Either GPUs with their memory and libraries, or why there is none.
        self.assertNotEqual(bool(report["gpus"]), bool(report["gpu_reason"]))
        for gpu in report["gpus"]:
            self.assertGreater(gpu["memory_bytes"], 0)

    def test_bench_collectives(self):
        report = self.json_of("bench", "collectives", "--json", "--ranks", "2", "--smallest", "1024", "--largest", "4096",
                              "--seconds", "0.01")
        self.assertEqual({row["ranks"] for row in report["rows"]}, {2})
        self.assertIn("all-reduce", {row["operation"] for row in report["rows"]})
        self.assertTrue(all(row["seconds"] > 0 for row in report["rows"]))

    def test_bench_tables(self):
        kernels = self.json_of("bench", "kernels", *program.SMALL, "--seconds", "0.001", "--json")
        for row in kernels["rows"]:
            self.assertGreaterEqual(row["runs"], 5, row)
            self.assertGreaterEqual(row["runs"], row["quiet_runs"])
            self.assertEqual(row["quiet_runs"] >= 5, row["quiet_share"] > 0, row)
        step = self.json_of("bench", "step", *program.SMALL, "--warm-up", "1", "--repeat", "2", "--json")
        self.assertGreater(step["tokens_per_second"], 0)
        for report in (kernels, step):
            self.assertGreater(report["fma_flops"], 0)
            self.assertTrue(report["rows"])
            self.assertTrue(all(row["seconds"] >= 0 for row in report["rows"]))
        shares = sum(row["share"] for row in step["rows"])
        self.assertGreater(shares, 0.5)
        self.assertLess(shares, 1.5)

    def test_kernels(self):
        """run.kernels decides what computes; doctor and bench name it and the ceilings of its instructions."""
        machine = self.json_of("doctor", "--json")
        self.assertGreater(machine["bf16_product_flops"], 0)
        self.assertEqual(machine["dot_flops"] > 0, machine["isa"] in ("avx512bf16", "amx"))
        self.assertEqual(machine["amx_flops"] > 0, machine["isa"] == "amx")
        for kernels in dict.fromkeys((machine["isa"], "neon" if machine["isa"] == "neon" else "generic")):
            pinned = (*program.SMALL, "train.precision=bf16", f"run.kernels={kernels}", "--json")
            for report in (self.json_of("bench", "kernels", *pinned, "--seconds", "0.001"),
                           self.json_of("bench", "step", *pinned, "--warm-up", "1", "--repeat", "1")):
                self.assertTrue(report["device"].startswith(f"cpu {kernels},"), report["device"])
                self.assertEqual(report["dot_flops"] > 0, kernels in ("avx512bf16", "amx"))
                self.assertEqual(report["amx_flops"] > 0, kernels == "amx")

    def test_the_end_at_80_columns(self):
        """Nothing is wider than the terminal, and the next commands can be pasted."""
        text = self.on_terminal(*self.small("train.steps=6", "run.dir=it's my run", "run.sample_every=6", "run.sample_tokens=40"))
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        self.assertEqual([line for line in re.split(r"[\r\n]", plain) if len(line) > 80], [])
        self.assertIn("next     quadrille report 'it'\\''s my run'\n", plain)
        self.assertIn("per rank as planned", plain)
        listed = self.ok(self.run_program("runs", ".")).stdout.splitlines()
        self.assertEqual(listed[0].index("state"), listed[1].index("done"))

    def test_plain_characters(self):
        arguments = self.small("train.steps=6", "run.log_every=2")
        plain = self.ok(self.run_program(*arguments, environment={"LC_ALL": "C"})).stdout
        self.assertTrue(plain.isascii())
        self.assertEqual([line.split()[1] for line in plain.splitlines() if line.startswith("step ") and "loss" in line],
                         ["1/6", "2/6", "4/6", "6/6"])
        self.assertNotIn("\r", plain)
        self.assertFalse(self.ok(self.run_program(*arguments, environment={"LC_ALL": "C.UTF-8"})).stdout.isascii())

    def test_interruption(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            for name, ranks in (("one", "1"), ("three", "3")):
                folder = f"{name}-{number}"
                with subprocess.Popen([program.PROGRAM, *self.small("train.steps=1M", "train.global_batch=6", "parallel.ranks=" + ranks,
                                                                    f"run.dir={folder}", "--trace")],
                                      cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
                    for line in run.stdout:
                        if line.startswith("step "):
                            break
                    run.send_signal(number)
                    _, errors = run.communicate(timeout=60)
                self.assertEqual(run.returncode, 1 if number == signal.SIGINT else 75, errors)
                self.assertRegex(errors, r"^quadrille: (interrupted|SIGTERM: stopped) after step \d+ of 1000000( with a checkpoint: .*)?\n$")
                self.assertEqual(len(self.metrics(folder)), int(errors.split("after step ")[1].split()[0]))
                with open(self.path(f"{folder}/trace.json"), encoding="utf-8") as file:
                    json.load(file)
                self.assertEqual(program.processes(self.folder), [])


if __name__ == "__main__":
    unittest.main()
