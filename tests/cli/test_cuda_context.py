"""Context parallelism in every mode, with ranks that share a GPU, against one rank; norms of
queries and keys against the CPU. Skipped without a CUDA device.
ctest: timeout 900
ctest: processors 8
"""
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
from gpu import SMALL, GpuTest, main  # noqa: E402

LAYOUTS = {
    "cp2-ring": ["parallel.ranks=2", "parallel.cp=2"],
    "cp2-gather": ["parallel.ranks=2", "parallel.cp=2", "parallel.cp_mode=gather"],
    "cp2-ulysses": ["parallel.ranks=2", "parallel.cp=2", "parallel.cp_mode=ulysses"],
    "cp4-ring": ["parallel.ranks=4", "parallel.cp=4"],
    "cp2-dp2": ["parallel.ranks=4", "parallel.cp=2", "parallel.dp=2"],
    "cp2-dp2-zero3": ["parallel.ranks=4", "parallel.cp=2", "parallel.dp=2", "parallel.zero=3"],
    "cp2-tp2-pp2": ["parallel.ranks=8", "parallel.cp=2", "parallel.tp=2", "parallel.pp=2"],
}
RUN = [*SMALL, "train.micro_batch=2", "train.steps=12", "--device", "cuda", "run.gpu=0", "train.deterministic=true"]
DOCUMENTS = ["data.document_mask=true", "data.separator=\n"]
TINY = ["model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "data.seq=49", "train.global_batch=8", "train.micro_batch=4",
        "train.steps=20"]


class Context(GpuTest):
    def follow_one_rank(self, name, run, layouts):
        for precision in ("fp32", "bf16"):
            one = self.train(f"one-{name}-{precision}", *run, f"train.precision={precision}")
            for layout in layouts:
                with self.subTest(layout=layout, run=name, precision=precision):
                    many = self.train(f"{layout}-{name}-{precision}", *run, f"train.precision={precision}", *LAYOUTS[layout])
                    if precision == "fp32":
                        self.close(many, one, 1e-5)
                    else:
                        self.near(many, one)

    def test_whole_sequences(self):
        self.follow_one_rank("plain", RUN, LAYOUTS)

    def test_packed_documents(self):
        self.follow_one_rank("documents", [*RUN, *DOCUMENTS], ["cp2-ring", "cp2-gather", "cp2-ulysses", "cp4-ring"])

    def test_odd_sizes_follow_the_cpu(self):
        """Positions that no tile divides, learned positions, dropout, against one CPU rank."""
        for name, extra in {"odd": [], "learned": ["model.arch=gpt2", "model.kv_heads=4"], "dropout": ["model.dropout=0.1"],
                            "recompute": ["train.recompute=full"]}.items():
            run = [*TINY, *extra]
            cpu = self.train(f"{name}-cpu", *run, "--device", "cpu")
            for layout in ("cp2-ring", "cp2-ulysses", "cp4-ring"):
                with self.subTest(run=name, layout=layout):
                    gpu = self.train(f"{name}-{layout}", *run, "--device", "cuda", "run.gpu=0", *LAYOUTS[layout])
                    self.close(gpu, cpu, 1e-4)

    def test_repeated_runs_are_bit_identical(self):
        for precision in ("fp32", "bf16"):
            for layout in ("cp2-ring", "cp2-gather"):
                run = [*RUN, *LAYOUTS[layout], f"train.precision={precision}"]
                self.assertEqual(self.train(f"{layout}-{precision}-first", *run), self.train(f"{layout}-{precision}-second", *run))

    def test_norms_of_queries_and_keys_follow_the_cpu(self):
        run = [*TINY, "model.qk_norm=true"]
        cpu = self.train("cpu", *run, "--device", "cpu")
        self.close(self.train("cuda", *run, "--device", "cuda"), cpu, 1e-4)
        self.close(self.train("cp2", *run, "--device", "cuda", "run.gpu=0", *LAYOUTS["cp2-ring"]), cpu, 1e-4)
        wide = [*RUN, "model.qk_norm=true", "train.lr=3e-4"]
        means = [sum(self.losses(self.train(precision, *wide, f"train.precision={precision}"))) / 12 for precision in ("fp32", "bf16")]
        self.assertLessEqual(abs(means[0] - means[1]), 0.02)


if __name__ == "__main__":
    main()
