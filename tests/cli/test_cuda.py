"""Training on a GPU against the CPU, repeated, and with several ranks. Skipped without a CUDA
device.
ctest: timeout 900
ctest: processors 2
"""
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
from gpu import SMALL, TEXT, GpuTest, main  # noqa: E402

TINY = {
    "llama": ["model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "data.seq=48"],
    "gpt2": ["model.arch=gpt2", "model.layers=3", "model.hidden=64", "model.heads=4", "data.seq=33"],
}
class Cuda(GpuTest):
    def test_tiny_models_follow_the_cpu(self):
        for name, model in TINY.items():
            for extra in ([], ["data.document_mask=true", "data.separator=\n"], ["model.dropout=0.1"], ["train.recompute=full"]):
                run = [*model, "train.steps=50", "train.global_batch=8", "train.micro_batch=4", *extra]
                cpu = self.train(f"cpu-{name}-{len(extra)}-{extra[:1]}", *run, "--device", "cpu")
                cuda = self.train(f"cuda-{name}-{len(extra)}-{extra[:1]}", *run, "--device", "cuda")
                with self.subTest(model=name, extra=extra):
                    self.close(cuda, cpu, 1e-4)

    def test_gpt2_follows_the_cpu(self):
        run = ["model.preset=gpt2-124M", "data.tokenizer=bytes", "data.seq=128", "train.global_batch=4", "train.steps=5"]
        self.close(self.train("cuda", *run, "--device", "cuda"), self.train("cpu", *run, "--device", "cpu"), 1e-4)

    def test_bf16_stays_near_fp32(self):
        run = [*SMALL, "train.steps=200", "--device", "cuda"]
        full = self.losses(self.train("fp32", *run))
        for name, extra in {"bf16": [], "bf16-wide": ["train.grad_dtype=fp32"]}.items():
            half = self.losses(self.train(name, *run, "train.precision=bf16", *extra))
            for first in range(0, 200, 20):
                a, b = (sum(x[first:first + 20]) / 20 for x in (full, half))
                self.assertLessEqual(abs(a - b), 0.02, f"{name}, steps {first + 1} to {first + 20}: {a} and {b}")
        self.assertLess(full[-1], full[0] - 1)

    def test_a_vocabulary_of_odd_size(self):
        """GPT-2's 50,257 tokens: rows of logits are padded, and bf16 GEMMs are split into an
        aligned part and the rest; fp32 GEMMs are not split. With tp 2 a rank has 25,129 tokens or
        25,128."""
        run = [*SMALL, "model.layers=2", "model.vocab=50257", "train.steps=10", "--device", "cuda", "run.gpu=0"]
        full = self.train("fp32", *run)
        self.close(self.train("fp32-tp", *run, "parallel.ranks=2", "parallel.tp=2"), full, 1e-5)
        half = self.train("bf16", *run, "train.precision=bf16")
        self.near(half, full, 0.02)
        self.near(self.train("bf16-tp", *run, "train.precision=bf16", "parallel.ranks=2", "parallel.tp=2"), half, 0.01)

    def test_deterministic_runs_have_the_same_bits(self):
        for precision in ("fp32", "bf16"):
            run = [*SMALL, "train.steps=20", f"train.precision={precision}", "train.deterministic=true", "--device", "cuda"]
            self.assertEqual(self.train(f"one-{precision}", *run), self.train(f"two-{precision}", *run))

    def test_ranks_that_share_a_gpu(self):
        for precision, limit in (("fp32", 1e-5), ("bf16", None)):
            run = [*SMALL, "train.steps=20", f"train.precision={precision}", "--device", "cuda", "run.gpu=0"]
            one = self.train(f"one-{precision}", *run)
            for ranks in (2, 4):
                many = self.train(f"{ranks}-{precision}", *run, f"parallel.ranks={ranks}")
                if limit:
                    self.close(many, one, limit)
                else:
                    self.near(many, one)

    def test_a_model_that_does_not_fit_says_what_would(self):
        result = self.run_program("train", f"data.path={TEXT}", *SMALL, "model.layers=200", "model.hidden=8192", "model.head_dim=128",
                                  "train.precision=bf16", "--device", "cuda")
        self.one_line(result, 1, "does not fit on its GPU", "the plan needs", "GiB are available")

    def test_checkpoint_goes_from_gpu_to_cpu_and_back(self):
        run = [*TINY["llama"], "train.global_batch=8", "train.steps=10", "run.save_every=5"]
        self.train("gpu", *run, "--device", "cuda")
        for device in ("cpu", "cuda"):
            self.ok(self.run_program("eval", "gpu", TEXT, "--device", device, "--per-pass", "16", timeout=300))
        texts = [self.ok(self.run_program("generate", "gpu", "--prompt", "In the", "--tokens", "30", "--temperature", "0",
                                          "--device", device)).stdout for device in ("cpu", "cuda")]
        self.assertEqual(*texts)


if __name__ == "__main__":
    main()
