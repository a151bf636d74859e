"""LoRA as a user runs it: small checkpoints that name their base, resume on another layout, eval and
generate, PEFT folders both ways, and the merged export.

ctest: timeout 200
"""
import json
import os
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

TEXT = os.path.join(program.SOURCE, "LICENSE")
RUN = [f"data.path={TEXT}", "data.tokenizer=bytes", "data.seq=32", "train.global_batch=4", "train.lr=2e-3", "train.schedule=constant",
       "train.warmup=0", "run.threads=1", "lora.rank=4", "lora.alpha=8"]
LATENT = ["model.arch=deepseek", "model.layers=2", "model.hidden=32", "model.heads=4", "model.q_lora_rank=16", "model.kv_lora_rank=8",
          "model.qk_nope_head_dim=8", "model.qk_rope_head_dim=8", "model.v_head_dim=8", "model.ffn=48"]
EXPERTS = ["model.experts=4", "model.experts_per_token=2", "model.expert_ffn=16", "model.shared_experts=1", "model.first_dense=1",
           "model.router=sigmoid", "model.router_bias=true", "model.rope_interleave=true", "model.aux_loss=0"]


class Lora(program.ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.mkdtemp(prefix="quadrille-test-lora-")
        cls.addClassCleanup(shutil.rmtree, cls.made, ignore_errors=True)
        for arguments in (["train", "model.preset=qwen3-tiny", "model.layers=2", f"data.path={TEXT}", "data.tokenizer=bytes",
                           "data.seq=32", "train.steps=3", "train.global_batch=4", "--dir", "base"], ["convert", "base", "hf"]):
            result = program.subprocess.run([program.PROGRAM, *arguments], cwd=cls.made, capture_output=True, text=True, timeout=100,
                                            check=False)
            assert result.returncode == 0, result.stdout + result.stderr

    def setUp(self):
        super().setUp()
        shutil.copytree(self.made, self.folder, symlinks=True, dirs_exist_ok=True)

    def train(self, *words):
        result = self.run_program("train", "--json", *words)
        self.ok(result)
        return [json.loads(line)["loss"] for line in result.stdout.splitlines() if '"step"' in line]

    def loss(self, run):
        result = self.run_program("eval", run, TEXT, "--json")
        self.ok(result)
        return json.loads(result.stdout)["loss"]

    def test_checkpoints_resume_on_another_layout(self):
        whole = self.train("--from", "hf", *RUN, "train.steps=6", "--dir", "whole")
        self.train("--from", "hf", *RUN, "train.steps=3", "--dir", "run", "--ranks", "2", "--zero", "3")
        size = sum(os.path.getsize(os.path.join(self.path("run/checkpoints/latest"), name))
                   for name in os.listdir(self.path("run/checkpoints/latest")))
        self.assertLess(size, os.path.getsize(self.path("hf/model.safetensors")))
        with open(self.path("run/checkpoints/latest/manifest.json")) as file:
            manifest = json.load(file)
        self.assertEqual(manifest["base"], os.path.realpath(self.path("hf")))
        self.assertTrue(all(".lora_" in tensor["name"] for tensor in manifest["tensors"]))
        rest = self.train("--resume", "run.dir=run", "train.steps=6", "--ranks", "2", "--tp", "2", "parallel.zero=0")
        for mine, theirs in zip(rest, whole[3:]):
            self.assertAlmostEqual(mine, theirs, delta=1e-5)
        self.assertNotEqual(self.loss("whole"), self.loss("base"))
        self.assertAlmostEqual(self.loss("run"), self.loss("whole"), delta=1e-5)
        self.ok(self.run_program("generate", "run", "--prompt", "The", "--tokens", "4"))

    def test_the_base_stays_the_one_of_the_checkpoint(self):
        """A resumed run finds its base from any folder, and refuses other weights."""
        self.train("run.weights=hf", "model.preset=qwen3-tiny", "model.layers=2", *RUN, "train.steps=1", "--dir", "run")
        self.ok(self.run_program("train", "model.preset=qwen3-tiny", "model.layers=2", f"data.path={TEXT}", "data.tokenizer=bytes",
                                 "data.seq=32", "train.steps=1", "train.seed=5", "--dir", "other"))
        self.refused(self.run_program("train", "--resume", "run.dir=run", "train.steps=2", "run.weights=other"), "are not the weights")
        os.mkdir(self.path("elsewhere"))
        result = self.run_program("train", "--resume", "run.dir=../run", "train.steps=2", "lora.dropout=0.25",
                                  launcher=("env", "-C", "elsewhere"))
        self.ok(result)
        self.assertIn("lora.dropout was 0 and is 0.25", result.stdout + result.stderr)
        with open(self.path("run/checkpoints/latest/manifest.json")) as file:
            self.assertEqual(json.load(file)["base"], os.path.realpath(self.path("hf")))

    def test_adapters_without_a_base_are_not_dropped(self):
        model = ["model.preset=qwen3-tiny", "model.layers=2", "train.steps=1"]
        self.train(*model, *RUN, "--dir", "whole")
        self.refused(self.run_program("train", *model, *RUN[:-2], "run.weights=whole", "--dir", "plain"), "merge them first")
        self.refused(self.run_program("train", "--resume", *model, "train.steps=2", *RUN, "run.weights=hf", "--dir", "whole"),
                     "run.weights has changed")

    def test_gate_of_shared_experts(self):
        model = ["model.layers=1", "model.hidden=32", "model.heads=4", "model.experts=4", "model.expert_ffn=16", "model.shared_experts=1",
                 "model.shared_gate=true", "model.qkv_bias=true", "train.steps=1"]
        plain = [word for word in RUN if not word.startswith("lora")]
        self.ok(self.run_program("train", *model, *plain, "--dir", "moe"))
        self.ok(self.run_program("convert", "moe", "moe-hf"))
        self.train("--from", "moe-hf", *RUN, "train.steps=2", "--dir", "run")
        for arguments in (["convert", "run", "peft", "--adapter"], ["convert", "peft", "again", "--seq", "32"]):
            self.ok(self.run_program(*arguments))
        self.assertAlmostEqual(self.loss("again"), self.loss("run"), delta=1e-6)

    def test_tensors_of_several_layers(self):
        """DeepSeek has one tensor for two of our layers, which have adapters each."""
        plain = [word for word in RUN if not word.startswith("lora")]
        self.ok(self.run_program("train", *LATENT, *EXPERTS, *plain, "train.steps=1", "--dir", "latent"))
        self.ok(self.run_program("convert", "latent", "latent-hf"))
        self.train("--from", "latent-hf", *RUN, "train.steps=2", "--dir", "run")
        self.assertNotAlmostEqual(self.loss("run"), self.loss("latent"), delta=1e-4)
        self.ok(self.run_program("convert", "run", "merged"))
        self.ok(self.run_program("convert", "merged", "again", "--seq", "32"))
        self.assertAlmostEqual(self.loss("again"), self.loss("run"), delta=1e-5)

    def test_a_folder_with_prediction_modules(self):
        """Adapters are trained without them, and the folder's other weights are those of the model."""
        plain = [word for word in RUN if not word.startswith("lora")]
        self.ok(self.run_program("train", *LATENT, *EXPERTS, "model.mtp_modules=1", *plain, "train.steps=1", "--dir", "ahead"))
        self.ok(self.run_program("convert", "ahead", "ahead-hf"))
        start = ["train", "--from", "ahead-hf", *RUN, "train.steps=1", "--dir", "run"]
        self.refused(self.run_program(*start), "set model.mtp_modules=0")
        start.append("model.mtp_modules=0")
        self.refused(self.run_program(*start, "run.sample_every=1"), "run.sample_every: block.0: generation from compressed keys")
        self.assertFalse(os.path.exists(self.path("run")))
        self.ok(self.run_program(*start, "train.lr=1e-9"))
        self.assertAlmostEqual(self.loss("run"), self.loss("ahead"), delta=1e-5)

    def test_settings_of_peft_that_change_the_result(self):
        self.train("--from", "hf", *RUN, "train.steps=1", "--dir", "run")
        self.ok(self.run_program("convert", "run", "peft", "--adapter"))
        with open(self.path("peft/adapter_config.json")) as file:
            config = json.load(file)
        for key, value in (("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"), ("alora_invocation_tokens", [5]),
                           ("layer_replication", [[0, 1], [0, 1]]), ("lora_alpha", 0)):
            self.write("peft/adapter_config.json", json.dumps({**config, key: value}))
            self.refused(self.run_program("convert", "peft", "again"), key)
        self.write("peft/adapter_config.json", json.dumps({**config, "init_lora_weights": True, "layer_replication": None}))
        self.ok(self.run_program("convert", "peft", "again"))

    def test_adapters_go_out_and_come_back(self):
        self.train("--from", "hf", *RUN, "train.steps=4", "--dir", "run")
        loss = self.loss("run")
        for arguments in (["convert", "run", "peft", "--adapter"], ["convert", "peft", "again", "--seq", "32"],
                          ["convert", "run", "merged"], ["convert", "merged", "plain", "--seq", "32"]):
            self.ok(self.run_program(*arguments))
        self.assertNotAlmostEqual(loss, self.loss("base"), delta=1e-5)
        self.assertAlmostEqual(self.loss("again"), loss, delta=1e-6)
        self.assertAlmostEqual(self.loss("plain"), loss, delta=1e-5)
        with open(self.path("peft/adapter_config.json")) as file:
            config = json.load(file)
        self.assertEqual((config["r"], config["lora_alpha"], config["peft_type"]), (4, 8, "LORA"))
        self.assertIn("down_proj", config["target_modules"])
        self.train("run.weights=base", "model.preset=qwen3-tiny", "model.layers=2", *RUN, "train.steps=1", "--dir", "from-run")
        self.assertIn("which PEFT cannot load", self.ok(self.run_program("convert", "from-run", "peft-of-run", "--adapter")).stdout)
        self.assertNotIn("cannot load", self.ok(self.run_program("convert", "run", "peft-again", "--adapter")).stdout)

    def test_frozen_parameters_cost_no_update(self):
        """Two layouts can be compared; the simulator has no update of frozen parameters, and no FLOPs
        of their gradients."""
        small = [f"data.path={TEXT}", "data.tokenizer=bytes", "model.preset=qwen3-tiny", "model.layers=2", "data.seq=32", "train.global_batch=4", "lora.rank=4"]
        result = self.ok(self.run_program("verify", *small, "--against", "parallel.ranks=2 parallel.tp=2", "--steps", "2"))
        self.assertIn("equal within the tolerance", result.stdout)
        large = ["simulate", "--model", "llama-3.1-8b", "--cluster", "h100", "parallel.ranks=8", "parallel.tp=8", "--json"]
        full = json.loads(self.ok(self.run_program(*large)).stdout)
        lora = json.loads(self.ok(self.run_program(*large, "lora.rank=16")).stdout)
        self.assertLess(lora["optimizer_seconds"], 0.05 * full["optimizer_seconds"])
        self.assertLess(lora["mfu"], 1.01 * lora["hfu"])

    def test_base_that_trains_on(self):
        """The base is the checkpoint, not the run: a later one of the same run changes nothing."""
        self.train("--from", "base", *RUN, "train.steps=2", "--dir", "run")
        loss = self.loss("run")
        self.train("--resume", "run.dir=base", "train.steps=5")
        self.assertEqual(self.loss("run"), loss)
        whole = self.train("--from", "hf", *RUN, "train.steps=3", "--dir", "whole")
        self.assertAlmostEqual(self.train("--resume", "run.dir=run", "train.steps=3")[0], whole[2], delta=1e-5)
        self.assertAlmostEqual(self.loss("run"), self.loss("whole"), delta=1e-5)

    def test_base_that_moves(self):
        """--resume takes run.weights if it has the same weights, and refuses others."""
        self.train("--from", "hf", *RUN, "train.steps=2", "--dir", "run")
        self.train("--resume", "run.dir=base", "train.steps=4")
        self.ok(self.run_program("convert", "base", "other"))
        self.refused(self.run_program("train", "--resume", "run.dir=run", "train.steps=3", "run.weights=other"), "not the weights that the adapters")
        shutil.move(self.path("hf"), self.path("moved"))
        self.train("--resume", "run.dir=run", "train.steps=3", "run.weights=moved")
        with open(self.path("run/checkpoints/latest/manifest.json")) as file:
            self.assertEqual(json.load(file)["base"], os.path.realpath(self.path("moved")))
        self.loss("run")

    def test_configs_of_peft_that_compute_something_else(self):
        self.train("--from", "hf", *RUN, "train.steps=1", "--dir", "run")
        self.ok(self.run_program("convert", "run", "peft", "--adapter"))
        with open(self.path("peft/adapter_config.json")) as file:
            config = json.load(file)
        for change, wanted in (({"lora_alpha": 0}, "lora_alpha is 0"), ({"lora_alpha": "8"}, "lora_alpha must be a number"),
                               ({"lora_alpha": None}, "lora_alpha must be a number"), ({"r": 4.5}, "r must be the rank"),
                               ({"use_rslora": "yes"}, "use_rslora must be true or false"),
                               ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4"),
                               ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication is not supported")):
            with self.subTest(change), open(self.path("peft/adapter_config.json"), "w") as file:
                json.dump({**config, **change}, file)
                file.flush()
                self.refused(self.run_program("convert", "peft", "again", "--seq", "32"), wanted)
        with open(self.path("peft/adapter_config.json"), "w") as file:
            json.dump({**config, "init_lora_weights": True, "layer_replication": None}, file)
        self.ok(self.run_program("convert", "peft", "again", "--seq", "32"))
        self.refused(self.run_program("train", "--resume", "run.dir=again", "train.steps=1"), "holds converted adapters")

    def test_folders_and_options_that_do_not_apply(self):
        self.train("--from", "hf", *RUN, "train.steps=1", "--dir", "run")
        self.ok(self.run_program("convert", "run", "peft", "--adapter"))
        for words, wanted in ((["convert", "hf", "to", "--adapter"], "is not a run"), (["convert", "hf", "to", "--base", "hf"], "--base is for"),
                              (["convert", "run", "to", "--base", "hf"], "--base is for"),
                              (["convert", "run", "to", "--adapter", "--dtype", "bf16"], "--adapter writes fp32"),
                              (["eval", "peft", TEXT], "convert peft RUN"), (["generate", "peft"], "convert peft RUN"),
                              (["train", "--from", "peft", *RUN, "train.steps=1"], "convert peft RUN"),
                              (["train", "--from", "run", RUN[0], "train.steps=1"], "merge them first")):
            with self.subTest(words):
                self.refused(self.run_program(*words), wanted)

    def test_what_does_not_fit_is_refused(self):
        self.train("--from", "hf", *RUN, "train.steps=1", "--dir", "run")
        for words, wanted in ((["lora.alpha=4"], "lora.alpha has no effect without lora.rank"),
                              (["lora.rank=2", "lora.targets=q_prj"], "'q_prj' is none of"),
                              (["lora.rank=2", "lora.alpha=1e-300"], "lora.alpha is 1e-300"),
                              (["lora.rank=2", "lora.targets=router"], "has no router"),
                              ([*LATENT, "lora.rank=2", "lora.targets=o_proj,q_proj"], "latent attention has no q_proj"),
                              (["lora.rank=2", "lora.targets=shared_expert_gate"], "has no shared_expert_gate"),
                              (["model.preset=mixtral-tiny", "lora.rank=2", "lora.dropout=0.1"], "does not reach the adapters of routed"),
                              (["model.preset=mixtral-tiny", "lora.rank=2", "parallel.etp=2", "--ranks", "2"], "parallel.etp=2")):
            self.refused(self.run_program("check", *words), wanted)
        self.refused(self.run_program("train", "--resume", "run.dir=run", "train.steps=2", "lora.rank=2"), "lora.rank has changed")
        self.refused(self.run_program("convert", "base", "peft", "--adapter"), "has no adapters to export")
        self.refused(self.run_program("train", "--from", "run", *RUN, "train.steps=1", "--dir", "other"), "merge them first")
        with open(self.path("hf/config.json"), "a") as file:
            file.write("\n")
        self.refused(self.run_program("eval", "run", TEXT), "the weights have changed")
        shutil.move(self.path("hf"), self.path("gone"))
        self.refused(self.run_program("eval", "run", TEXT), "put the folder back")

    def refused(self, result, wanted):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn(wanted, result.stderr)
        self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)


if __name__ == "__main__":
    unittest.main()
