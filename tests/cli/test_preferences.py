"""DPO as a user runs it: preferences from .jsonl, reference log-probabilities that are computed once,
resume after a kill on other ranks, adapters, and bad lines.

ctest: timeout 200
"""
import json
import os
import random
import shutil
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RUN = ["data.path=pairs.jsonl", "data.format=preferences", "data.tokenizer=bytes", "data.seq=96", "train.global_batch=4", "train.lr=1e-3",
       "train.eps=1e-3", "train.schedule=constant", "train.warmup=0", "run.threads=1"]
MODEL = ["model.preset=llama-tiny", "model.layers=2", "model.vocab=256"]


class Preferences(program.ProgramTest):
    def setUp(self):
        super().setUp()
        draw = random.Random(1)
        self.write("pairs.jsonl", [{"prompt": f"Add {a} and {b}: ", "chosen": f"it is {a + b}", "rejected": "no idea" * draw.randrange(1, 3)}
                                   for a, b in ((draw.randrange(99), draw.randrange(99)) for _ in range(24))])

    def write(self, name, lines):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)

    def train(self, *words):
        return self.ok(self.run_program("train", *RUN, *words))

    def figures(self, run):
        with open(os.path.join(self.folder, run, "metrics.jsonl"), encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def test_layouts_resume_and_the_cache(self):
        result = self.train(*MODEL, "train.steps=6", "data.validation=0.1", "train.eval_every=3", "--dir", "whole")
        self.assertIn("24 pairs fill", result.stdout + result.stderr)
        self.assertIn("margin", result.stdout)
        self.assertNotIn("quadrille eval", result.stdout)  # which refuses preferences
        whole = self.figures("whole")
        self.assertAlmostEqual(whole[0]["loss"], 0.6931471805599453, places=12)  # the model is its own reference
        self.assertEqual((whole[0]["reward_margin"], whole[0]["reward_accuracy"]), (0, 0))
        self.assertLess(whole[-1]["loss"], 0.5)
        self.assertGreater(whole[-1]["reward_margin"], 0.3)
        self.assertIn("validation_reward_margin", whole[-1])
        # in two parts, on other ranks; the reference is that of the first part
        self.train(*MODEL, "train.steps=6", "data.validation=0.1", "train.eval_every=3", "run.save_every=3", "--dir", "parts", "--ranks", "2",
                   "--tp", "2")
        os.remove(os.path.join(self.folder, "parts", "metrics.jsonl"))
        self.remove_checkpoint("parts", 6)
        result = self.ok(self.run_program("train", "--dir", "parts", "--resume", "--ranks", "4"))
        self.assertIn("read for 24 pairs", result.stdout + result.stderr)
        for line in self.figures("parts"):
            self.assertAlmostEqual(line["loss"], whole[line["step"] - 1]["loss"], places=5)
        # without it, or with other pairs, the run cannot be resumed
        self.remove_checkpoint("parts", 6)
        kept = os.path.join(self.folder, "parts", "reference.safetensors")
        os.rename(kept, kept + ".away")
        self.one_line(self.run_program("train", "--dir", "parts", "--resume"), 2, "reference.safetensors", "pairs.jsonl")
        os.rename(kept + ".away", kept)
        with open(kept, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"abc")
        self.one_line(self.run_program("train", "--dir", "parts", "--resume"), 2, "reference.safetensors", "checksum")
        self.ok(self.run_program("report", "whole"))
        self.one_line(self.run_program("eval", "whole"), 2, "preferences", "train.eval_every")

    def remove_checkpoint(self, run, step):
        folder = os.path.join(self.folder, run, "checkpoints")
        for name in os.listdir(folder):
            if name.endswith(str(step)):
                shutil.rmtree(os.path.join(folder, name))

    def test_adapters(self):
        self.ok(self.run_program("train", *MODEL, "data.path=pairs.jsonl", "data.tokenizer=bytes", "data.field=prompt", "data.seq=32",
                                 "train.steps=2", "train.global_batch=4", "--dir", "base"))
        losses = []
        for number, layout in enumerate(([], ["--ranks", "2", "--cp", "2"])):
            self.train("--from", "base", "train.steps=3", "lora.rank=4", "--dir", f"lora{number}", *layout)
            losses.append([line["loss"] for line in self.figures(f"lora{number}")])
        self.assertAlmostEqual(losses[0][0], 0.6931471805599453, places=12)
        self.assertLess(losses[0][2], losses[0][0])
        for one, two in zip(*losses):
            self.assertAlmostEqual(one, two, places=5)

    def test_bad_lines_and_settings(self):
        good = {"prompt": "a", "chosen": "b", "rejected": "c"}
        for lines, words in (([good, {"prompt": "a", "chosen": "b"}], ["bad.jsonl (line 2)", "'chosen' and 'rejected'"]),
                             ([{"prompt": "a", "completion": "b"}], ["data.format=examples"]),
                             ([good, dict(good, chosen=["b"])], ["(line 2)", "all be strings"]),
                             ([good, dict(good, chosen="b" * 200)], ["(line 2)", "201 and 2 tokens", "raise it to 201", "data.overlong=skip"]),
                             ([dict(good, prompt=[], chosen=[{"role": "user", "content": "x"}], rejected=[])], ["chat template"])):
            self.write("bad.jsonl", lines)
            self.one_line(self.run_program("train", *MODEL, *RUN, "data.path=bad.jsonl", "train.steps=1"), 2, *words)
        self.write("bad.jsonl", [good, dict(good, chosen="b" * 200)])
        result = self.train(*MODEL, "data.path=bad.jsonl", "data.overlong=skip", "train.steps=1", "train.global_batch=1")
        self.assertIn("1 pairs fill", result.stdout + result.stderr)
        for words, parts in ((["dpo.loss=kto"], ["dpo.loss", "sigmoid"]), (["dpo.beta=0"], ["dpo.beta"]),
                             (["dpo.loss=hinge", "dpo.label_smoothing=0.1"], ["dpo.label_smoothing", "hinge"]),
                             (["data.format=examples", "dpo.beta=0.2"], ["dpo.beta", "data.format=preferences"])):
            self.one_line(self.run_program("train", *MODEL, *RUN, *words, "train.steps=1"), 2, *parts)
        self.one_line(self.run_program("train", "model.arch=gpt2", "model.hidden=32", "model.heads=4", "model.vocab=256", *RUN), 2,
                      "data.format=preferences", "learned positions")
        # What is a mean over tokens would count as often as a pair has tokens.
        experts = ["model.preset=mixtral-tiny", "model.layers=1", *RUN, "train.steps=1"]
        self.one_line(self.run_program("train", *experts), 2, "data.format=preferences", "model.aux_loss", "set it to 0")
        self.one_line(self.run_program("train", *experts, "model.aux_loss=0", "model.z_loss=0.1"), 2, "model.z_loss", "set it to 0")
        self.ok(self.run_program("train", *experts, "model.aux_loss=0"))


if __name__ == "__main__":
    unittest.main()
