"""Models with experts on a GPU: against the CPU, and distributed over ranks. Skipped without a CUDA
device.
ctest: timeout 900
ctest: processors 8
"""
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import gpu  # noqa: E402

SHAPE = ["model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=16", "model.ffn=96",
         "model.expert_ffn=48", "data.seq=48", "train.global_batch=8", "train.micro_batch=4"]
MODELS = {
    "mixtral": ["model.preset=mixtral-tiny", *SHAPE],
    "qwen3": ["model.preset=qwen3-moe-tiny", *SHAPE],
    # Sigmoid scores, biases, groups, a shared expert; experts with a capacity limit.
    "deepseek": ["model.preset=deepseek-tiny", *SHAPE],
    "deepseek-last": ["model.preset=deepseek-tiny", *SHAPE, "model.expert_capacity=1.2"],
    "deepseek-least": ["model.preset=deepseek-tiny", *SHAPE, "model.expert_capacity=1.2", "model.drop=least"],
}
LAYOUTS = {
    "ep2": ["parallel.ranks=2", "parallel.ep=2"],
    "ep4": ["parallel.ranks=4", "parallel.ep=4"],
    "ep2 of 4": ["parallel.ranks=4", "parallel.ep=2"],
    "etp2": ["parallel.ranks=4", "parallel.ep=2", "parallel.etp=2"],
    "tp2 ep2": ["parallel.ranks=2", "parallel.tp=2", "parallel.ep=2"],
    "zero1": ["parallel.ranks=4", "parallel.ep=2", "parallel.zero=1"],
    "zero3": ["parallel.ranks=4", "parallel.ep=2", "parallel.zero=3"],
    "in rounds": ["parallel.ranks=4", "parallel.ep=4", "parallel.expert_rows=0.5"],
    "recompute": ["parallel.ranks=2", "parallel.ep=2", "train.recompute=full"],
    "results of SwiGLU kept": ["parallel.ranks=2", "parallel.ep=2", "train.swiglu=keep"],
}
# SGD does not magnify rounding as AdamW does.
SGD = ["train.optimizer=sgd", "train.lr=0.05", "train.steps=20"]


class CudaExperts(gpu.GpuTest):
    def test_models_follow_the_cpu(self):
        for name, model in MODELS.items():
            # With its usual epsilon AdamW turns rounding of gradients near zero into full steps; a
            # few later a token may choose another expert.
            run = [*model, "train.steps=20", "train.eps=1e-3"]
            cpu = self.train(f"cpu-{name}", *run, "--device", "cpu")
            with self.subTest(model=name):
                self.close(self.train(f"cuda-{name}", *run, "--device", "cuda"), cpu, 1e-4)

    def test_norms_in_bf16_follow_one_another(self):
        """Grouped GEMMs sum the squares of bf16 gradients where a rank has all experts; over ranks,
        and in fp32, SQUARES sums them."""
        run = [*MODELS["mixtral"], *SGD, "train.micro_batch=1", "train.clip=0.1", "train.precision=bf16", "--device", "cuda", "run.gpu=0"]
        ways = {"one": [], "stages": ["parallel.ranks=2", "parallel.pp=2", "parallel.schedule=zb_h1"], "apart": ["parallel.ranks=2", "parallel.ep=2"],
                "fp32": ["train.grad_dtype=fp32"]}
        norms = {}
        for name, layout in ways.items():
            self.train(f"norms-{name}", *run, *layout)
            norms[name] = [row["grad_norm"] for row in self.metrics(f"norms-{name}")]
        for name in ("stages", "apart", "fp32"):
            with self.subTest(way=name):
                self.assertLess(max(abs(a - b) / b for a, b in zip(norms[name], norms["one"])), 0.01)
                self.assertLess(abs(norms[name][0] - norms["one"][0]) / norms["one"][0], 0.002)

    def test_layouts_follow_one_rank(self):
        run = [*MODELS["deepseek"], *SGD, "train.micro_batch=1", "--device", "cuda", "run.gpu=0"]
        for precision, check in (("fp32", lambda a, b: self.close(a, b, 1e-5)), ("bf16", self.near)):
            more = [f"train.precision={precision}", "train.grad_dtype=fp32"]
            one = self.train(f"one-{precision}", *run, *more)
            for name, layout in LAYOUTS.items():
                with self.subTest(layout=name, precision=precision):
                    check(self.train(f"{name}-{precision}", *run, *more, *layout), one)

    def test_dispatch_by_node_follows_flat_dispatch(self):
        """Two "nodes" of two ranks, four of one, experts shared by two ranks; with buffer space for
        all rows and in extra dispatch rounds."""
        roomy = ["parallel.expert_rows=8"]
        layouts = {"2x2": ["parallel.ep=4", "parallel.nodes=2", *roomy], "4x1": ["parallel.ep=4", "parallel.nodes=4", *roomy],
                   "etp2": ["parallel.ep=2", "parallel.etp=2", "parallel.nodes=2", *roomy],
                   "in rounds": ["parallel.ep=4", "parallel.nodes=2", "parallel.expert_rows=0.5"],
                   "recompute": ["parallel.ep=4", "parallel.nodes=2", "train.recompute=full", "parallel.zero=3", *roomy]}
        run = [*MODELS["deepseek"], *SGD, "train.steps=10", "train.micro_batch=1", "--device", "cuda", "run.gpu=0", "parallel.ranks=4"]
        across = "dispatch_across_nodes_flat_bytes"
        for precision, check in (("fp32", lambda a, b: self.close(a, b, 1e-5)), ("bf16", self.near)):
            for name, layout in layouts.items():
                more = [*run, *layout, f"train.precision={precision}", "train.grad_dtype=fp32"]
                with self.subTest(layout=name, precision=precision):
                    check(self.train("node", *more, "parallel.dispatch=node", "--overwrite"), self.train("flat", *more, "--overwrite"))
                    first = [self.metrics(way)[0] for way in ("node", "flat")]
                    self.assertLess(first[0]["dispatch_across_nodes_bytes"], first[1]["dispatch_across_nodes_bytes"])
                    if precision == "fp32" and name != "in rounds":
                        # The same choices, so the same number of rows for other nodes, except
                        # for a token or two with equal scores, because the two dispatches add a
                        # token's results in different orders.
                        self.assertLessEqual(abs(first[0][across] - first[1][across]), 0.002 * first[1][across])

    def test_muon_and_replicas_follow_one_rank(self):
        """Expert matrices under Muon, whole and sharded by etp; replicas of sharded copies; groups
        that keep parameters between the passes."""
        muon = ["train.optimizer=muon", "train.lr=2e-3", "train.eps=1e-3"]
        layouts = {"ep2": [*muon, "parallel.ep=2"], "ep2 zero1": [*muon, "parallel.ep=2", "parallel.zero=1"],
                   "etp2 zero3": [*muon, "parallel.ep=2", "parallel.etp=2", "parallel.zero=3"],
                   "replicas": [*SGD, "parallel.ep=2", "parallel.zero=2", "parallel.dp_shard=2"],
                   "kept": [*SGD, "parallel.ep=2", "parallel.zero=3", "parallel.reshard_after_forward=2"],
                   "tp2 zero1": [*muon, "parallel.zero=1", "parallel.tp=2"]}
        run = [*MODELS["deepseek"], "train.micro_batch=1", "--device", "cuda", "run.gpu=0"]
        for name, layout in layouts.items():
            with self.subTest(layout=name):
                one = self.train("one", *run, *layout[:3], "train.steps=10", "--overwrite")
                self.close(self.train("many", *run, *layout, "train.steps=10", "parallel.ranks=4", "--overwrite"), one, 1e-4)

    def test_all_tokens_choose_one_expert(self):
        """A text of one letter: one rank receives all rows, in extra dispatch rounds, the others
        none."""
        text = self.write("a.txt", "a" * 20000)
        run = [*MODELS["mixtral"], "model.experts_per_token=1", *SGD, "train.steps=5", f"data.path={text}"]
        cpu = self.train("cpu", *run, "--device", "cpu")
        for ranks in (1, 2, 4):
            with self.subTest(ranks=ranks):
                self.close(self.train(f"cuda-{ranks}", *run, "--device", "cuda", "run.gpu=0", f"parallel.ranks={ranks}",
                                      f"parallel.ep={ranks}", "parallel.expert_rows=1", "train.micro_batch=1"), cpu, 1e-4)

    def test_experts_times_etp(self):
        """The largest number of experts that the kernels support, and one more."""
        many = [*MODELS["mixtral"], "model.experts=512", "model.expert_ffn=16", "train.steps=3", "--device", "cuda", "run.gpu=0"]
        one = self.train("one", *many)
        self.close(self.train("most", *many, "parallel.ranks=2", "parallel.etp=2"), one, 1e-4)
        beyond = self.run_program("train", f"data.path={gpu.TEXT}", "run.dir=beyond", *many, "parallel.ranks=4", "parallel.etp=4")
        self.assertNotEqual(beyond.returncode, 0)
        self.assertIn("model.experts times parallel.etp may be at most 1024", beyond.stderr)

    def test_repeats_have_the_same_bits(self):
        run = [*MODELS["deepseek-least"], "train.steps=10", "train.deterministic=true", "train.precision=bf16", "train.grad_dtype=fp32",
               "--device", "cuda"]
        self.assertEqual(self.train("one", *run), self.train("two", *run))

    def test_checkpoint_goes_to_the_cpu_and_back(self):
        run = [*MODELS["mixtral"], "train.steps=10", "run.save_every=10", "--device", "cuda", "run.gpu=0", "parallel.ranks=2", "parallel.ep=2",
               "train.micro_batch=2"]
        self.train("gpu", *run)
        with open(gpu.TEXT, encoding="utf-8") as text:
            part = self.write("part.txt", text.read(30000))
        for device in ("cpu", "cuda"):
            self.ok(self.run_program("eval", "gpu", part, "--device", device, "--per-pass", "16"))
        texts = [self.ok(self.run_program("generate", "gpu", "--prompt", "In the", "--tokens", "30", "--temperature", "0",
                                          "--device", device)).stdout for device in ("cpu", "cuda")]
        self.assertEqual(*texts)


if __name__ == "__main__":
    gpu.main()
