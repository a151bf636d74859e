"""Latent attention on a GPU (DeepSeek V2 and V3, Kimi K2): against the CPU, distributed over ranks,
and generation from cached latents. Skipped without a CUDA device.
ctest: timeout 900
ctest: processors 8
"""
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import gpu  # noqa: E402

SHAPE = ["model.preset=mla-tiny", "model.layers=3", "data.seq=48", "train.global_batch=8", "train.micro_batch=4"]
YARN = ["model.rope_scaling=yarn", "model.rope_original_seq=16", "model.rope_factor=4", "model.rope_mscale=1", "model.rope_mscale_all_dim=0.8"]
MODELS = {
    "preset": SHAPE,
    "odd": [*SHAPE, "model.qk_nope_head_dim=10", "model.qk_rope_head_dim=6", "model.v_head_dim=7", "model.kv_lora_rank=20", "data.seq=49"],
    "yarn": [*SHAPE, "model.q_lora_rank=0", "model.rope_interleave=false", *YARN],
    "documents": [*SHAPE, "data.document_mask=true", "data.separator=\n"],
    "heads of 192 and 128": [*SHAPE, "model.qk_nope_head_dim=128", "model.qk_rope_head_dim=64", "model.v_head_dim=128"],
    "selective recompute": [*SHAPE, "train.recompute=selective"],
}
LAYOUTS = {
    "tp2 sp": ["parallel.ranks=2", "parallel.tp=2", "parallel.sp=true"],
    "cp2-ring": ["parallel.ranks=2", "parallel.cp=2"],
    "cp2-gather": ["parallel.ranks=2", "parallel.cp=2", "parallel.cp_mode=gather"],
    "cp2-ulysses": ["parallel.ranks=2", "parallel.cp=2", "parallel.cp_mode=ulysses"],
    "ep2 zero3": ["parallel.ranks=2", "parallel.ep=2", "parallel.zero=3"],
    "pp2 recompute": ["parallel.ranks=2", "parallel.pp=2", "train.recompute=selective"],
}
# SGD does not magnify rounding as AdamW does.
SGD = ["train.optimizer=sgd", "train.lr=0.05", "train.steps=12"]


class CudaLatent(gpu.GpuTest):
    def test_models_follow_the_cpu(self):
        for name, model in MODELS.items():
            run = [*model, "train.steps=12", "train.eps=1e-3"]
            with self.subTest(model=name):
                cpu = self.train(f"cpu-{name}", *run, "--device", "cpu")
                self.close(self.train(f"cuda-{name}", *run, "--device", "cuda"), cpu, 1e-4)

    def test_layouts_follow_one_rank(self):
        checks = {"fp32": lambda a, b: self.close(a, b, 1e-5), "bf16": self.near}
        for model, precision in (("preset", "fp32"), ("preset", "bf16"), ("heads of 192 and 128", "bf16")):
            run = [*MODELS[model], *SGD, "train.micro_batch=1", "train.grad_dtype=fp32", f"train.precision={precision}", "--device", "cuda",
                   "run.gpu=0"]
            one = self.train(f"{model}-one-{precision}", *run)
            for name, layout in LAYOUTS.items():
                with self.subTest(model=model, layout=name, precision=precision):
                    checks[precision](self.train(f"{model}-{name}-{precision}", *run, *layout), one)

    def test_repeats_have_the_same_bits(self):
        run = [*MODELS["heads of 192 and 128"], "train.steps=8", "train.deterministic=true", "train.precision=bf16", "--device", "cuda"]
        self.assertEqual(self.train("one", *run), self.train("two", *run))

    def test_generates_what_the_cpu_does(self):
        for name in ("preset", "odd", "yarn"):
            self.train(name, *MODELS[name], "train.steps=12", "run.save_every=12", "--device", "cuda")
            texts = [self.ok(self.run_program("generate", name, "--prompt", "In the", "--tokens", "30", "--temperature", "0",
                                              "--device", device)).stdout for device in ("cpu", "cuda")]
            with self.subTest(model=name):
                self.assertEqual(*texts)


if __name__ == "__main__":
    gpu.main()
