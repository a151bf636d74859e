"""Whole runs with random models, features and layouts, which save, evaluate and check themselves:
losses and norms agree with one rank's, and the run resumes in the middle on another random layout.
4 by default; QUADRILLE_RUNS=300 for the long form (QUADRILLE_FIRST=100: from this one on).
ctest: timeout 240
ctest: processors 2
"""
import os
import random
import shutil
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

COUNT = int(os.environ.get("QUADRILLE_RUNS", "4"))
FIRST = int(os.environ.get("QUADRILLE_FIRST", "0"))
STEPS, SAVED = 4, 2
# Relative difference of losses by precision; norms, which are sums of squares, ten times as much.
TOLERANCE = {"fp32": 2e-4, "bf16": 2e-2, "fp8": 8e-2}
ARCHITECTURES = ["llama"] * 4 + ["deepseek"] * 3 + ["gpt2", "gemma2", "gemma3", "olmo2"]

# (chance, key, values) of keys that are drawn independently.
MODEL = [(0.5, "model.ffn", [32, 48, 96, 100, 160, 224]), (0.3, "model.window", [5, 17, 32, 40]), (0.2, "model.score_softcap", [20]),
         (0.2, "model.logit_softcap", [15]), (0.4, "model.tied", ["true"]), (0.15, "model.qkv_bias", ["true"])]
EXPERTS = [(0.4, "model.shared_experts", [1]), (0.3, "model.aux_loss", [0.01]), (0.3, "model.first_dense", [1])]
FP8 = [(1, "fp8.recipe", ["tensor", "row", "block"]), (0.3, "fp8.grad", ["e4m3"]), (0.3, "fp8.keep", ["attn", "mlp", "attn.q", "mlp.down"]),
       (0.3, "fp8.weights", ["use"])]
NARROW = [(0.2, "train.master", ["split"]), (0.2, "train.grad_dtype", ["fp32"]),
          (1, "run.kernels", ["auto", "auto", "amx_emulated", "avx512bf16_emulated"])]
TRAINING = [(0.25, "train.optimizer", ["muon", "sgd"]), (0.25, "data.document_mask", ["true"]), (0.2, "lora.rank", [1, 4, 7]),
            (0.2, "train.qk_clip", [0.05, 0.2]), (1, "data.seq", [16, 32, 33, 48, 64, 80]), (1, "train.global_batch", [4, 6, 8, 12])]
LAYOUT = [(0.5, "parallel.zero", [1, 2, 3]), (0.4, "train.recompute", ["selective", "full"]), (0.3, "train.micro_batch", [1, 2]),
          (0.25, "run.check_gradients", [1, 2]), (0.3, "run.check_replicas", [1, 2]), (0.25, "run.check_messages", ["true"]),
          (0.25, "train.offload", ["optimizer"]), (0.3, "run.ranks_as", ["threads"]), (0.2, "parallel.split_backward", ["true"]),
          (0.1, "run.async_save", ["false"]), (0.15, "parallel.bucket_mb", [0.01]), (0.3, "train.grad_sync", ["per_step", "per_microbatch"]),
          (0.2, "train.swiglu", ["keep", "again"]), (0.2, "parallel.dp_shard", [2, 3]), (0.2, "parallel.overlap", ["false"]),
          (0.2, "parallel.reshard_after_forward", ["false", 2]), (0.2, "train.recompute_layers", [1]), (1, "run.threads", [1, 1, 2])]
SPARSE = [(0.3, "parallel.ep", [2, 3, 4]), (0.2, "parallel.etp", [2]), (0.3, "parallel.expert_rows", [0.1, 0.5, 1])]


def some(chance, table):
    return [f"{key}={chance.choice(values)}" for share, key, values in table if chance.random() < share]


def draw_model(chance):
    arch, heads = chance.choice(ARCHITECTURES), chance.choice([1, 2, 3, 4, 6, 8])
    words = [f"model.arch={arch}", f"model.layers={chance.choice([1, 2, 3])}", f"model.hidden={chance.choice([32, 48, 96, 112])}",
             f"model.heads={heads}", *some(chance, MODEL)]
    if arch == "deepseek":
        words += some(chance, [(1, "model.qk_nope_head_dim", [16, 24]), (1, "model.qk_rope_head_dim", [8, 16]),
                               (1, "model.v_head_dim", [16, 24]), (0.4, "model.mtp_modules", [1, 2])])
    else:
        divisors = [kv for kv in range(1, heads + 1) if heads % kv == 0]
        words += some(chance, [(1, "model.head_dim", [8, 16, 18, 32, 40, 72, 80]), (1, "model.kv_heads", divisors)])
    if arch in ("llama", "deepseek") and chance.random() < 0.6:
        words += some(chance, [(1, "model.experts", [3, 4, 6, 8]), (1, "model.experts_per_token", [1, 2, 3]), *EXPERTS])
        if chance.random() < 0.4:
            words += ["model.router=sigmoid", "model.router_bias_rate=0.01"]
    return words


def draw_training(chance):
    precision = chance.choice(["fp32", "bf16", "bf16", "fp8"])
    return [f"train.precision={precision}", f"train.steps={STEPS}", "data.validation=0.02", "train.eval_every=2", *some(chance, TRAINING),
            *(some(chance, NARROW) if precision != "fp32" else []), *(some(chance, FP8) if precision == "fp8" else [])], precision


def draw_layout(chance, sparse):
    ranks = left = chance.choice([2, 3, 4, 6])
    words = [f"parallel.ranks={ranks}"]
    for axis, degrees in (("tp", [1, 1, 2, 3, 4]), ("pp", [1, 1, 2, 3]), ("cp", [1, 1, 1, 2, 3])):
        degree = chance.choice([d for d in degrees if left % d == 0])
        left //= degree
        words.append(f"parallel.{axis}={degree}")
        if axis == "pp" and degree > 1:
            words += some(chance, [(1, "parallel.schedule", ["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])])
        elif axis == "cp" and degree > 1:
            words += some(chance, [(1, "parallel.cp_mode", ["ring", "gather", "ulysses"])])
    return words + some(chance, LAYOUT) + (some(chance, SPARSE) if sparse else [])


@unittest.skipIf(program.SANITIZED, "equiv has the same layouts under sanitizers")
class RandomRuns(program.ProgramTest):
    def holds(self, words):
        return self.run_program("check", *words).returncode == 0

    def draw(self, number):
        """(keys, precision, two layouts) of a run that `check` accepts."""
        chance = random.Random(number)
        while True:
            training, precision = draw_training(chance)
            words = [*draw_model(chance), *training, f"data.path={self.corpus}"]
            if not self.holds([*words, "parallel.ranks=1"]):
                continue
            sparse = any(word.startswith("model.experts=") for word in words)
            layouts = []
            for _ in range(40):
                layout = draw_layout(chance, sparse)
                if len(layouts) < 2 and self.holds([*words, *layout]):
                    layouts.append(layout)
            if len(layouts) == 2:
                return words, precision, layouts

    def train(self, folder, *words):
        result = self.run_program("train", *words, f"run.dir={folder}", "run.deadline=60", timeout=200)
        self.assertEqual(result.returncode, 0, f"{' '.join(words)}: {result.stderr}")
        return {line["step"]: line for line in self.metrics(folder)}

    def compare(self, what, found, expected, tolerance):
        for step, line in found.items():
            for key, factor in (("loss", 1), ("grad_norm", 10), ("validation_loss", 1)):
                values = line.get(key), expected[step].get(key)
                if values != (None, None):
                    self.assertNotIn(None, values, f"{what}: {key} of step {step}")
                    self.assertLessEqual(abs(values[0] - values[1]), factor * tolerance * max(abs(values[1]), 1), f"{what}: {key}, step {step}")

    def check(self, number):
        words, precision, (first, second) = self.draw(number)
        what = " ".join([*words, *first])
        many = self.train("many", *words, *first, f"run.save_every={SAVED}", "run.keep=0")
        self.compare(what, many, self.train("one", *words, "parallel.ranks=1", "run.save=false"), TOLERANCE[precision])
        for name in os.listdir(self.path("many/checkpoints")):
            path = self.path(f"many/checkpoints/{name}")
            if name in ("latest", "best"):
                os.unlink(path)
            elif name.startswith("step-") and int(name[5:]) > SAVED:
                shutil.rmtree(path)
        resumed = self.train("many", *words, *second, "run.resume=true")
        self.compare(f"{what}, resumed with {' '.join(second)}", {step: resumed[step] for step in range(SAVED + 1, STEPS + 1)}, many,
                     TOLERANCE[precision])
        for folder in ("many", "one"):
            shutil.rmtree(self.path(folder))

    def test_runs(self):
        for number in range(FIRST, FIRST + COUNT):
            self.check(number)
            if COUNT > 4:
                print(number, flush=True)


if __name__ == "__main__":
    unittest.main()
