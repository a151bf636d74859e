"""Fine-tuning: `train --from` starts from a Hugging Face folder or a run, on any layout, and
`data.format=examples` trains on prompts with completions.

ctest: timeout 240
"""
import json
import os
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402
import quantize  # noqa: E402

PRESETS = ["gpt2-tiny", "qwen3-tiny", "mixtral-tiny"]
TEXT = os.path.join(program.SOURCE, "LICENSE")


class From(program.ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.mkdtemp(prefix="quadrille-test-from-")
        cls.addClassCleanup(shutil.rmtree, cls.made, ignore_errors=True)
        for preset in [*PRESETS, "mla-tiny"]:
            for arguments in (["train", f"model.preset={preset}", "model.vocab=300", "model.layers=2", f"data.path={TEXT}", "data.seq=48",
                               "train.steps=2", "train.global_batch=2", "--dir", preset],
                              ["convert", preset, f"hf-{preset}"]):
                result = program.subprocess.run([program.PROGRAM, *arguments], cwd=cls.made, capture_output=True, text=True, timeout=100,
                                                check=False)
                assert result.returncode == 0, result.stdout + result.stderr

    def setUp(self):
        super().setUp()
        shutil.copytree(self.made, self.folder, symlinks=True, dirs_exist_ok=True)

    def losses(self, *words):
        """Of two steps."""
        result = self.run_program("train", f"data.path={TEXT}", "data.seq=48", "train.steps=2", "train.global_batch=4", "--json", *words)
        self.ok(result)
        return [json.loads(line)["loss"] for line in result.stdout.splitlines() if '"step"' in line]

    def test_a_folder_and_the_run_it_was_made_of_start_alike(self):
        for preset in PRESETS:
            run = self.losses("--from", preset)
            self.assertEqual(self.losses("--from", f"hf-{preset}"), run)
            for layout in (["--ranks", "2", "--tp", "2"], ["--ranks", "2", "--pp", "2"], ["--ranks", "2", "--zero", "3"]):
                for mine, theirs in zip(self.losses("--from", f"hf-{preset}", *layout), run):
                    self.assertAlmostEqual(mine, theirs, delta=1e-5, msg=f"{preset} {layout}")

    def test_other_commands_use_the_model_of_the_folder(self):
        """They ignored --from, and showed figures of the default model."""
        for words in (["check"], ["simulate", "--cluster", "h100"], ["verify", f"data.path={TEXT}", "--against", "dp=1", "--steps", "1"],
                      ["plan", "--cluster", "h100", "--gpus", "1"], ["bench", "step", "--repeat", "1"], ["schedule"]):
            with self.subTest(words):
                same = ["--from", "missing", "data.seq=16", "train.global_batch=8"]
                result = self.run_program(*words, *same)
                self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
                self.assertIn("run.from: missing", result.stderr)
                self.ok(self.run_program(*words, "--from", f"hf-{PRESETS[0]}", *same[2:]))
        models = [json.loads(self.ok(self.run_program(*words, "--from", f"hf-{PRESETS[0]}", "data.seq=16", "train.global_batch=8", "--json")).stdout)
                  for words in (["check"], ["simulate", "--cluster", "h100"])]
        self.assertEqual(models[0]["parameters"], models[1]["parameters"])
        self.assertIn("needs no file", self.run_program("init", "--from", f"hf-{PRESETS[0]}").stderr)

    def test_keys_that_are_given_count(self):
        result = self.run_program("train", "--from", "hf-qwen3-tiny", "model.rope_base=5000", f"data.path={TEXT}", "data.seq=48",
                                  "train.steps=1", "train.global_batch=2", "--dir", "run")
        self.ok(result)
        self.assertIn("model.rope_base is 5000 here and 10000 there", result.stdout)
        with open(self.path("run/config.yaml")) as file:
            config = file.read()
        self.assertIn("weights: hf-qwen3-tiny", config)
        self.assertIn('qk_norm: "true"', config)
        # The run does not need the folder any more.
        shutil.rmtree(self.path("hf-qwen3-tiny"))
        self.ok(self.run_program("train", "--dir", "run", "--resume", "train.steps=2"))

    def test_what_cannot_start_a_run_is_named(self):
        words = ["train", f"data.path={TEXT}", "train.steps=1"]
        self.one_line(self.run_program(*words, "--from", "absent"), 2, "run.from: absent")
        self.one_line(self.run_program(*words, "--from", "hf-gpt2-tiny", "model.preset=gpt2-tiny"), 2, "model.preset is set too")
        self.one_line(self.run_program(*words, "--from", "hf-gpt2-tiny", "--weights", "gpt2-tiny"), 2, "run.weights is set too")
        self.one_line(self.run_program(*words, "--weights", "hf-gpt2-tiny", "model.preset=llama-tiny", "model.vocab=300",
                                       f"data.tokenizer={self.path('gpt2-tiny/tokenizer.json')}"), 2, "run.weights: ", "tensor")
        self.ok(self.run_program("check", "--from", "hf-mixtral-tiny"))
        # A run does not replace what it starts from.
        for source in ("gpt2-tiny", "gpt2-tiny/checkpoints/latest"):
            result = self.run_program(*words, "--from", source, "--dir", "./gpt2-tiny", "--overwrite")
            self.one_line(result, 2, "run.weights: ", "name another run.dir")
        self.ok(self.run_program("eval", "gpt2-tiny", TEXT))

    def test_examples_are_fine_tuned_and_resumed_on_another_layout(self):
        with open(self.path("sums.jsonl"), "w") as file:
            for i in range(120):
                file.write(json.dumps({"prompt": f"{i} + 1 = ", "completion": f"{i + 1}", "id": i}) + "\n")
        words = ["train", "--from", "hf-qwen3-tiny", "data.path=sums.jsonl", "data.format=examples", "data.seq=64", "train.global_batch=4",
                 "train.lr=1e-3", "train.schedule=constant", "data.validation=0.1"]
        whole = self.run_program(*words, "train.steps=6", "--dir", "whole")
        self.ok(whole)
        self.assertRegex(whole.stdout, r"120 examples fill \d+ sequences to 9\d\.\d %")
        self.ok(self.run_program(*words, "train.steps=3", "--dir", "parts", "--ranks", "2"))
        self.ok(self.run_program("train", "--dir", "parts", "--resume", "train.steps=6", "--ranks", "2", "--tp", "2"))
        for mine, theirs in zip(self.metrics("parts"), self.metrics("whole")):
            self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
        self.one_line(self.run_program("train", "--dir", "parts", "--resume", "train.steps=7", "data.seq=32"), 2, "data.seq has changed")
        with open(self.path("broken.jinja"), "w") as file:
            file.write("{% for")
        for template, message in (("absent.jinja", "data.chat_template: absent.jinja"), ("broken.jinja", "broken.jinja:1:")):
            self.one_line(self.run_program(*words, "train.steps=1", f"data.chat_template={template}"), 2, message)
        self.one_line(self.run_program(*words, "train.steps=1", "data.tokenizer=", "model.vocab=999"), 2, "data.format=examples",
                      "data.tokenizer")

    def test_held_out_conversations_are_evaluated(self):
        os.mkdir(self.path("words"))
        shutil.copy(self.path("hf-qwen3-tiny/tokenizer.json"), self.path("words"))
        with open(self.path("words/tokenizer_config.json"), "w") as file:
            json.dump({"chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
                                        "{% if add_generation_prompt %}[assistant] {% endif %}"}, file)
        with open(self.path("chat.jsonl"), "w") as file:
            for i in range(20):
                file.write(json.dumps({"messages": [{"role": "user", "content": f"{i} + 1?"},
                                                    {"role": "assistant", "content": f"{i + 1}"}]}) + "\n")
        self.ok(self.run_program("train", "--from", "hf-qwen3-tiny", "data.tokenizer=words/tokenizer.json", "data.path=chat.jsonl",
                                 "data.format=examples", "data.seq=64", "train.global_batch=2", "train.steps=1", "data.validation=0.2",
                                 "--dir", "chat"))
        self.ok(self.run_program("eval", "chat"))

    def test_weights_in_fp8_blocks_are_imported_exactly(self):
        for preset, rows, cols in (("qwen3-tiny", 40, 24), ("mixtral-tiny", 128, 128), ("mla-tiny", 40, 24)):
            folder = f"fp8-{preset}-{rows}"
            meant = quantize.quantize(self.path(f"hf-{preset}"), self.path(folder), rows, cols)
            self.ok(self.run_program("convert", folder, f"run-{folder}"))
            self.ok(self.run_program("convert", f"run-{folder}", f"back-{folder}"))
            back = quantize.read_tensors(self.path(f"back-{folder}/model.safetensors"))
            self.assertEqual(set(back), set(meant))
            for name, values in meant.items():
                self.assertEqual(back[name][1], values, f"{folder}: {name}")
            # Every rank reads its own part of the blocks.
            one = self.losses("--from", folder)
            for mine, theirs in zip(self.losses("--from", folder, "--ranks", "2", "--tp", "2"), one):
                self.assertAlmostEqual(mine, theirs, delta=1e-5)

    def test_experts_in_mxfp4_are_imported_exactly(self):
        self.ok(self.run_program("train", "model.preset=gpt-oss-tiny", "model.vocab=300", "model.layers=2", "model.experts=4",
                                 "model.expert_ffn=64", f"data.path={TEXT}", "data.seq=48", "train.steps=2", "train.global_batch=2", "--dir",
                                 "gpt-oss"))
        self.ok(self.run_program("convert", "gpt-oss", "hf-gpt-oss"))
        meant = quantize.quantize_fp4(self.path("hf-gpt-oss"), self.path("fp4"))
        self.ok(self.run_program("convert", "fp4", "run-fp4"))
        self.ok(self.run_program("convert", "run-fp4", "back-fp4"))
        back = quantize.read_tensors(self.path("back-fp4/model.safetensors"))
        self.assertEqual(set(back), set(meant))
        for name, values in meant.items():
            self.assertEqual(back[name][1], values, name)
        # Every rank reads its own part of the blocks.
        one = self.losses("--from", "fp4")
        for mine, theirs in zip(self.losses("--from", "fp4", "--ranks", "4", "parallel.ep=2", "parallel.etp=2"), one):
            self.assertAlmostEqual(mine, theirs, delta=1e-5)
        # Damaged folders are named.
        tensors = self.stored("fp4")
        name = "model.layers.1.mlp.experts.down_proj"
        for changes, parts in (({name + "_scales": None}, ("down_proj_scales", "missing")),
                               ({name + "_blocks": None}, ("down_proj", "missing")),
                               ({name + "_scales": ("U8", [4, 128, 1], bytes(512))}, ("down_proj_scales", "4 x 128 x 2")),
                               ({name + "_blocks": ("F32", [4, 128, 2, 4], bytes(16384))}, ("down_proj_blocks", "uint8"))):
            changed = {key: value for key, value in {**tensors, **changes}.items() if value}
            quantize.write_tensors(self.path("fp4/model.safetensors"), changed)
            self.one_line(self.run_program("convert", "fp4", "unused"), 2, *parts)

    def stored(self, folder):
        """name: (dtype, shape, bytes)"""
        with open(self.path(f"{folder}/model.safetensors"), "rb") as file:
            length, = struct.unpack("<Q", file.read(8))
            header, data = json.loads(file.read(length)), file.read()
        header.pop("__metadata__", None)
        return {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}

    def test_quantized_folders_that_cannot_be_read_are_named(self):
        quantize.quantize(self.path("hf-qwen3-tiny"), self.path("fp8"), 128, 128)
        file = self.path("fp8/model.safetensors")
        with open(self.path("fp8/config.json")) as config:
            settings = json.load(config)

        def refused(changes, *parts):
            changed = {**settings, "quantization_config": {**settings["quantization_config"], **changes}}
            with open(self.path("fp8/config.json"), "w") as config:
                json.dump({k: v for k, v in changed.items() if v}, config)
            self.one_line(self.run_program("convert", "fp8", "unused"), 2, *parts)
            self.assertFalse(os.path.exists(self.path("unused")))

        refused({"quant_method": "gptq"}, "quant_method 'gptq'")
        refused({"fmt": "e5m2"}, "'fmt'", "e5m2")
        refused({"weight_block_size": None}, "weight_block_size")
        refused({"weight_block_size": [64, 128]}, "weight_scale_inv", "one scale per block of 64 x 128")
        settings["quantization_config"] = {}
        with open(self.path("fp8/config.json"), "w") as config:
            json.dump({k: v for k, v in settings.items() if v != {}}, config)
        self.one_line(self.run_program("convert", "fp8", "unused"), 2, "no quantization_config")
        self.assertTrue(os.path.exists(file))


if __name__ == "__main__":
    unittest.main()
