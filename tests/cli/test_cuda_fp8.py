"""fp8 on a GPU: each recipe follows the CPU, which emulates it; layouts follow one rank; repeated
runs are bit-identical. Skipped without a CUDA device.
ctest: timeout 300
ctest: processors 2
"""
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import gpu  # noqa: E402

# Small, for the CPU's sake.
RUN = ["model.preset=llama-tiny", "data.tokenizer=bytes", "data.seq=64", "train.global_batch=8", "train.lr=1e-4", "train.steps=8",
       "train.precision=fp8", "train.deterministic=true"]
CUDA = ["--device", "cuda", "run.gpu=0"]
RECIPES = [f"fp8.recipe={recipe}" for recipe in ("tensor", "row", "block")]
# A GPU adds in another order, with fewer bits in the forward pass, before both round to fp8.
MOST = 0.005


class Fp8(gpu.GpuTest):
    def test_follows_the_cpu(self):
        for recipe in (*RECIPES, "fp8.recipe=block fp8.grad=e4m3"):
            run = [*RUN, *recipe.split()]
            with self.subTest(recipe):
                self.near(self.train(f"cuda-{recipe}", *run, *CUDA), self.train(f"cpu-{recipe}", *run), MOST)

    def test_gelu_follows_the_cpu(self):
        for recipe in RECIPES:
            run = [*RUN[1:], "model.preset=gpt2-tiny", recipe]
            with self.subTest(recipe):
                self.near(self.train(f"gelu-cuda-{recipe}", *run, *CUDA), self.train(f"gelu-cpu-{recipe}", *run), MOST)

    def test_layouts_follow_one_rank(self):
        for recipe in RECIPES:
            run = [*RUN, recipe, *CUDA]
            one = self.train(f"one-{recipe}", *run)
            self.assertEqual(one, self.train(f"again-{recipe}", *run))
            for layout in ("parallel.tp=2", "parallel.zero=3 train.recompute=full"):
                with self.subTest(f"{recipe} {layout}"):
                    self.near(self.train(f"{layout}-{recipe}", *run, "parallel.ranks=2", *layout.split()), one, MOST)


if __name__ == "__main__":
    gpu.main()
