"""simulate, plan and bench simulator as commands: figures, files, and the names of the trainer's
trace."""
import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RUN = ["--model", "llama3.1-8b", "--seq", "8192", "train.global_batch=128", "train.precision=bf16"]


def events_of(path, rank):
    with open(path, encoding="utf-8") as file:
        return [e for e in json.load(file)["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]


def names(path, rank):
    """Names of a rank's actions, in the order of its program, each followed by the exchanges inside
    it."""
    return [e["name"] for e in sorted(events_of(path, rank), key=lambda e: (e["args"]["action"], e["args"].get("op", -1)))]


class Simulate(program.ProgramTest):
    def answer(self, *arguments):
        result = self.run_program(*arguments, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_report(self):
        run = ["simulate", *RUN, "--cluster", "h100", "--ranks", "64", "--zero", "1", "train.micro_batch=1"]
        r = self.answer(*run)
        self.assertTrue(r["fits"])
        self.assertGreater(r["mfu"], r["mfu_causal"])
        self.assertAlmostEqual(r["tokens_per_second"] * r["step_seconds"], r["tokens_per_step"], delta=1)
        self.assertEqual(len(r["losses"]), 3)
        slow = self.answer(*run, "network.bandwidth_gbs=1")
        self.assertGreater(slow["exposed_seconds"]["dp"], 5 * r["exposed_seconds"]["dp"])
        page = self.path("page.html")
        self.assertEqual(self.run_program(*run, "--report", page, "--draw").returncode, 0)
        with open(page, encoding="utf-8") as file:
            self.assertIn("forward block.3", file.read())

    def test_why_it_does_not_fit(self):
        """In words: model state, or activations."""
        run = ["simulate", "--cluster", "h100", "--model", "llama3-8b", "train.precision=bf16", "train.micro_batch=1"]
        said = " ".join(self.ok(self.run_program(*run, "--ranks", "1", "train.global_batch=1", "data.seq=1024")).stdout.split())
        self.assertIn("activations in bf16 take", said)
        self.assertIn("the state alone exceeds the device: parallel.zero", said)
        said = " ".join(self.ok(self.run_program(*run, "--ranks", "64", "--zero", "3", "train.global_batch=64", "data.seq=65536")).stdout.split())
        self.assertIn("activations alone exceed the device: train.recompute keeps fewer", said)

    def test_same_names_as_the_trainer(self):
        """Actions, and the exchanges of tp, cp and ep inside modules."""
        run = ["--seq", "16", "train.global_batch=8", "train.micro_batch=2"]
        layouts = {
            "zero": ["--model", "llama-tiny", "--ranks", "2", "--zero", "3"],
            "tp": ["--model", "llama-tiny", "--ranks", "2", "--tp", "2", "train.recompute=full"],
            "pieces": ["--model", "llama-tiny", "--ranks", "2", "--tp", "2", "parallel.tp_overlap=2"],
            "cp": ["--model", "llama-tiny", "--ranks", "2", "--cp", "2"],
            "ep": ["--model", "mixtral-tiny", "--ranks", "2", "--ep", "2"],
            # Buffer space for less than the worst load: extra dispatch rounds are in the op list,
            # and are not exchanges of either trace.
            "rounds": ["--model", "mixtral-tiny", "--ranks", "4", "--ep", "4"],
            "nodes": ["--model", "mixtral-tiny", "--ranks", "4", "--ep", "4", "parallel.nodes=2", "parallel.dispatch=node"],
        }
        for name, layout in layouts.items():
            with self.subTest(name):
                trained = self.run_program("train", *layout, *run, "--data", self.corpus, "--steps", "1", "--trace", "--dir", self.path(name))
                self.assertEqual(trained.returncode, 0, trained.stderr)
                path = self.path(name + ".json")
                simulated = self.run_program("simulate", *layout, *run, "--cluster", "h100", "--timeline", path)
                self.assertEqual(simulated.returncode, 0, simulated.stderr)
                self.assertEqual(names(self.path(name + "/trace.json"), 0), names(path, 0))
                self.assertEqual(name != "zero", any("op" in e["args"] for e in events_of(path, 0)))

    def test_exchanges_inside_modules(self):
        """They are within their action, and the time computation waits for them is reported as
        exposed."""
        run = ["simulate", *RUN, "--cluster", "h100", "--ranks", "8", "--tp", "8", "train.micro_batch=1", "train.global_batch=2", "--zero", "1"]
        shares = []
        for more in ([], ["parallel.tp_overlap=4"]):
            path = self.path("tp.json")
            r = self.answer(*run, *more, "--timeline", path)
            actions = {e["args"]["action"]: e for e in events_of(path, 0) if "op" not in e["args"]}
            exchanges = [e for e in events_of(path, 0) if "op" in e["args"]]
            self.assertGreater(len(exchanges), 100)
            for e in exchanges:
                a = actions[e["args"]["action"]]
                self.assertGreaterEqual(e["ts"], a["ts"] - 0.01)
                self.assertLessEqual(e["ts"] + e["dur"], a["ts"] + a["dur"] + 0.01)
            waited = sum(e["args"]["waited"] for e in exchanges) * 1e-6
            self.assertAlmostEqual(waited / r["exposed_seconds"]["tp"], 1.0, delta=0.05)
            shares.append(waited * 1e6 / sum(e["dur"] for e in exchanges))
        self.assertLess(shares[1], 0.8 * shares[0])

    def test_ops_add_up(self):
        """Seconds by op are those of the step: slowed down by overlapping exchanges, and including
        the memsets of libraries."""
        run = ["simulate", *RUN, "--ranks", "8", "--tp", "8", "parallel.tp_overlap=4", "train.micro_batch=1", "train.global_batch=2"]
        for profile in ("native", "fused", "modern"):
            r = self.answer(*run, "--cluster", "h100", f"software.profile={profile}")
            moves = {"reduce", "gradient reduce_scatter", "gather", "send", "recv"}
            ops = sum(seconds for name, seconds in r["ops"].items() if name not in moves)
            parts = sum(r[key] for key in ("product_seconds", "attention_seconds", "memory_bound_seconds", "optimizer_seconds", "launch_seconds"))
            self.assertAlmostEqual(ops / parts, 1.0, delta=1e-6)

    def test_this_machine(self):
        """simulate reads what bench machine writes; memory is that of the run, ops have the names
        of bench step."""
        model = ["model.arch=gpt2", "model.layers=2", "model.hidden=64", "model.heads=2", "model.vocab=64", "data.seq=32",
                 f"train.global_batch={2 * os.cpu_count()}", "train.micro_batch=1"]
        path = self.path("machine.yaml")
        measured = self.run_program("bench", "machine", *model, "--write", path, "--warm-up", "1", "--repeat", "1")
        self.assertEqual(measured.returncode, 0, measured.stderr)
        for layout in (["parallel.ranks=1"], ["parallel.ranks=2", "parallel.tp=2"], ["parallel.ranks=2", "parallel.pp=2"]):
            predicted = self.answer("simulate", *model, *layout, "--cluster", path)
            run = self.answer("bench", "step", *model, *layout, "--warm-up", "0", "--repeat", "1")
            self.assertGreater(predicted["step_seconds"], 0)
            self.assertEqual(predicted["memory_bytes"], run["allocated_bytes"])
            self.assertIn("linear.dw", predicted["ops"])
            self.assertEqual(len(run["rows"]), len({row["name"] for row in run["rows"]}))
            self.assertLessEqual({"linear", "attention.grad", "update"}, {row["name"] for row in run["rows"]} & set(predicted["ops"]))
        other = self.path("other.yaml")
        with open(other, "w", encoding="utf-8") as f:
            f.write("model: {arch: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 64}\ndata: {seq: 32}\ntrain: {global_batch: 64, micro_batch: 1}\n")
        run = self.answer("bench", "step", *model, "--in-turn", other, "--warm-up", "1", "--repeat", "3")
        self.assertLess(run["over_other"], 0.9)  # the other one has a multiple of the sequences
        self.assertGreater(run["other_seconds"], run["step_seconds"])
        self.one_line(self.run_program("bench", "step", *model, "--in-turn", self.path("none.yaml")), 2, "none.yaml")

    def test_any_configuration_of_this_machine(self):
        """Parallelism is omitted, the batch is divisible by the ranks, and GEMM shapes cover narrow
        models; not for accelerators."""
        run = ["bench", "machine", "model.arch=llama", "model.layers=2", "model.hidden=256", "model.heads=2", "model.ffn=32", "model.vocab=64",
               "data.seq=16", "train.micro_batch=2", f"train.global_batch={2 * os.cpu_count() + 1}", "parallel.pp=2", "parallel.layers=1,1",
               "parallel.schedule_file=schedule.txt", "parallel.virtual_stages=2", "parallel.etp=2", "parallel.nodes=3", "parallel.dispatch=node",
               "parallel.dp_shard=4", "--warm-up", "0", "--repeat", "1"]
        path = self.path("machine.yaml")
        self.ok(self.run_program(*run, "--write", path))
        self.one_line(self.run_program(*run, "run.device=cuda"), 2, "run.device=cpu")
        self.ok(self.run_program("simulate", *run[2:9], "--cluster", path, "train.global_batch=2"))
        self.one_line(self.run_program("simulate", *run[2:9], "--cluster", path, "software.attention=plain"), 2, "processor.attention")

    def test_machine_of_one_core(self):
        """Its ranks still exchange, two on the core."""
        model = ["model.arch=gpt2", "model.layers=2", "model.hidden=64", "model.heads=2", "model.vocab=64", "data.seq=32", "train.global_batch=2"]
        path, cores = self.path("machine.yaml"), os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            self.ok(self.run_program("bench", "machine", *model, "--write", path, "--warm-up", "0", "--repeat", "1"))
        finally:
            os.sched_setaffinity(0, cores)
        self.assertGreater(self.answer("simulate", *model, "--cluster", path, "--ranks", "2", "--tp", "2")["exposed_seconds"]["tp"], 0)

    def test_plan_writes_what_runs(self):
        path = self.path("run.yaml")
        plan = self.answer("plan", *RUN, "--cluster", "h100", "--gpus", "64", "--pp", "1", "--write", path)
        simulated = self.answer("simulate", path, "--cluster", "h100")
        self.assertAlmostEqual(simulated["step_seconds"] / plan["choices"][0]["step_seconds"], 1.0, delta=0.01)
        self.assertEqual(self.answer("check", path)["ranks"], 64)
        self.assertTrue(plan["reasons"] and plan["next"])

    def test_questions(self):
        result = self.run_program("plan", *RUN, "--cluster", "h100", "--tokens", "1e12", "--days", "30", "--pp", "1", "--tp", "1")
        self.assertIn("GPUs train 1e+12 tokens in", result.stdout, result.stderr)
        self.assertEqual(self.run_program("plan", *RUN, "--cluster", "h100", "--tokens", "1e12").returncode, 2)

    def test_scaling(self):
        points = self.answer("simulate", *RUN, "--cluster", "h100", "--ranks", "8", "--zero", "3", "train.micro_batch=1", "--scaling", "512")
        self.assertEqual([p["gpus"] for p in points], [2**i for i in range(10)])
        possible = [p for p in points if p["possible"]]
        self.assertGreater(possible[-1]["tokens_per_second"], 10 * possible[0]["tokens_per_second"])

    def test_what_is_not_known(self):
        result = self.run_program("simulate", *RUN, "--cluster", "ascend-910b")
        self.assertEqual(result.returncode, 2)
        self.assertIn("accelerator.peak_tflops", result.stderr)
        self.assertIn("built-in clusters: a100", self.run_program("simulate", *RUN, "--cluster", "nowhere").stderr)

    def test_formats_of_gemms(self):
        """A format that the accelerator does not have is refused by name."""
        for cluster, value, said in (("a100", "fp8", "has no fp8 (accelerator.fp8_tflops): use program"),
                                     ("h100", "nvfp4", "has no scales of blocks (accelerator.fp4_tflops): use program or fp8"),
                                     ("h100", "mxfp8", "has no scales of blocks")):
            result = self.run_program("simulate", *RUN, "train.precision=bf16", "--cluster", cluster, f"software.gemms={value}")
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(f"software.gemms={value}: accelerator", result.stderr)
            self.assertIn(said, result.stderr)
        for precision in ("fp8", "fp32"):
            result = self.run_program("simulate", *RUN, f"train.precision={precision}", "--cluster", "b200", "software.gemms=fp8")
            self.assertEqual(result.returncode, 2)
            self.assertIn("set train.precision=bf16", result.stderr)

    def test_published_in_fp8(self):
        """Runs in fp8, MXFP8 and NVFP4, as docs/simulator.md states; a precision that is not stated
        is a reason to skip a row."""
        with open(os.path.join(program.SOURCE, "data/published/runs.json"), encoding="utf-8") as file:
            rows = [r for r in json.load(file) if r["id"].startswith(("nemo2407-fp8-llama", "mbridge-25.11-llama3_8b", "mbridge-25.11-llama3_70b",
                                                                      "titan-8b-h200-float8"))]
        rows[0]["config"]["precision"] = None
        r = self.answer("bench", "simulator", "--against", self.write("fp8.json", json.dumps(rows)))
        skipped = [row for row in r["rows"] if "reason" in row]
        self.assertEqual([row["reason"] for row in skipped], ["precision: not stated"])
        errors = sorted(abs(row["error"]) for row in r["rows"] if "reason" not in row)
        self.assertGreater(len(errors), 12)
        self.assertLess(errors[len(errors) // 2], 0.08)

    def test_published(self):
        """Rows that cannot be expressed are listed with a reason; a file that is not a list of runs
        is refused."""
        with open(os.path.join(program.SOURCE, "data/published/runs.json"), encoding="utf-8") as file:
            rows = [r for r in json.load(file) if r["id"].startswith(("foundry-mpt-7b", "llmc", "dgxc-maxtext"))]
        rows[0]["cluster"]["gpu"] = "abacus"
        path = self.write("rows.json", json.dumps(rows))
        r = self.answer("bench", "simulator", "--against", path)
        self.assertEqual(len(r["rows"]), len(rows))
        self.assertEqual(r["rows_scored"] + r["rows_skipped"], len(rows))
        self.assertIn("abacus", r["rows"][0]["reason"])
        for key in ("median_abs_error", "p90_abs_error", "memory_median_abs_error", "oom_accuracy"):
            self.assertIn(key, r)
        self.assertEqual(self.run_program("bench", "simulator", "--against", self.write("bad.json", "{}")).returncode, 2)

    def test_published_counts(self):
        """Impossible counts are named, not divided by; names are printed in full."""
        with open(os.path.join(program.SOURCE, "data/published/runs.json"), encoding="utf-8") as file:
            row = next(r for r in json.load(file) if r["id"] == "sc21-t1-18b")
        cases = [("config", "tp", 0), ("config", "tp", 0.5), ("config", "pp", 0), ("config", "vpp", -1), ("config", "cp", 1e300),
                 ("config", "ep", 0), ("config", "micro_batch", 0.25), ("cluster", "n_gpus", 0), ("model", "layers", 0),
                 ("model", "kv_heads", 0), ("model", "vocab", -5), ("model", "heads", 0)]
        rows = []
        for part, key, value in cases:
            bad = json.loads(json.dumps(row))
            bad[part][key] = value
            bad["id"] = f"{part}-{key}-{value}"
            rows.append(bad)
        row["id"] = "a-name-of-a-run-" * 7 + "that-is-longer-than-any-column"
        row["source"]["title"] = "A title of a paper " * 7 + "that goes on"
        path = self.write("counts.json", json.dumps([*rows, row]))
        found = self.answer("bench", "simulator", "--against", path)["rows"]
        for (part, key, value), answer in zip(cases, found):
            self.assertIn(f"{part}.{key} is {value:g}: it must be a whole number, at least 1", answer["reason"])
        self.assertEqual((found[-1]["id"], found[-1]["source"]), (row["id"], row["source"]["title"]))
        text = self.ok(self.run_program("bench", "simulator", "--against", path)).stdout
        self.assertIn(row["id"] + " ", text)
        self.assertIn(row["source"]["title"] + "\n", text)

    def test_axes_by_name(self):
        """With one rank of tp nothing is sent over tp, also by experts."""
        r = self.answer("simulate", "--cluster", "h100", "--model", "mixtral-8x7b", "--ranks", "16", "--ep", "8", "--seq", "4096", "--zero",
                        "1", "train.global_batch=32", "train.micro_batch=1", "train.precision=bf16")
        self.assertEqual(set(r["exposed_seconds"]) | set(r["hidden_seconds"]), {"dp", "ep"})

    def test_accuracy(self):
        """Core rows with short steps (the others take too long for a test): the errors that
        docs/simulator.md states for all."""
        def is_short(row):
            c = row["config"]
            return row["core"] and (c["pp"] or 1) * (c["num_microbatches"] or c.get("derived_num_microbatches") or 1) <= 300
        with open(os.path.join(program.SOURCE, "data/published/runs.json"), encoding="utf-8") as file:
            rows = [row for row in json.load(file) if is_short(row)]
        r = self.answer("bench", "simulator", "--against", self.write("short.json", json.dumps(rows)))
        self.assertGreater(r["rows_scored"], 80)
        self.assertLess(r["median_abs_error"], 0.06)
        self.assertLess(r["median_abs_error_held_out"], 0.06)
        self.assertLess(r["p90_abs_error"], 0.2)
        self.assertLess(r["p90_abs_error_held_out"], 0.2)
        self.assertGreater(r["oom_accuracy"], 0.8)

    def test_tables(self):
        """Table 1 of SC21 and table 5 of Korthikanti et al., those with short steps, row by row."""
        ids = {"sc21-t1-1.7b", "sc21-t1-3.6b", "sc21-t1-18b", "sc21-t1-39b", "korth22-t5-22b-fullrecompute", "korth22-t5-22b-seqsel"}
        with open(os.path.join(program.SOURCE, "data/published/runs.json"), encoding="utf-8") as file:
            rows = [row for row in json.load(file) if row["id"] in ids]
        for row in self.answer("bench", "simulator", "--against", self.write("tables.json", json.dumps(rows)))["rows"]:
            self.assertLess(abs(row["error"]), 0.08, row["id"])


if __name__ == "__main__":
    unittest.main()
