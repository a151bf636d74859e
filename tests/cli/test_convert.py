"""quadrille convert: a trained model exported and imported again, memory, and what is refused."""
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


def sparse_model(folder, layers, hidden, ffn):
    """Writes a Llama folder whose weights are sparse zeros. Returns the bytes of its tensors."""
    os.makedirs(folder)
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
              "num_attention_heads": 8, "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": True}
    shapes = {"model.embed_tokens.weight": [256, hidden], "model.norm.weight": [hidden]}
    for i in range(layers):
        for name, shape in (("input_layernorm", [hidden]), ("post_attention_layernorm", [hidden]), ("self_attn.q_proj", [hidden, hidden]),
                            ("self_attn.k_proj", [hidden, hidden]), ("self_attn.v_proj", [hidden, hidden]),
                            ("self_attn.o_proj", [hidden, hidden]), ("mlp.gate_proj", [ffn, hidden]), ("mlp.up_proj", [ffn, hidden]),
                            ("mlp.down_proj", [hidden, ffn])):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        json.dump(config, file)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at


def read_tensors(path):
    """The header of a safetensors file, and the bytes after it."""
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def add_tensor(path, name, values):
    header, data = read_tensors(path)
    header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + 4 * len(values)]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data + struct.pack(f"<{len(values)}f", *values))


class Convert(program.ProgramTest):
    def fixture(self, name, to, **changes):
        """A copy of a folder that transformers wrote, with other members in config.json."""
        shutil.copytree(os.path.join(program.SOURCE, "tests/golden/huggingface", name), self.path(to))
        with open(self.path(f"{to}/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with open(self.path(f"{to}/config.json"), "w", encoding="utf-8") as file:
            json.dump({**config, **changes}, file)

    def evaluate(self, model):
        return json.loads(self.ok(self.run_program("eval", model, self.corpus, "--json")).stdout)

    def test_out_and_back(self):
        for arch, more in (("llama", ["model.kv_heads=1"]), ("gpt2", ["model.vocab=300"])):
            self.ok(self.run_program(*self.small(f"model.arch={arch}", *more, "train.steps=3", "--save-every", "3", "--dir", arch)))
            out = json.loads(self.ok(self.run_program("convert", arch, f"{arch}-hf", "--json")).stdout)
            self.assertEqual((out["direction"], out["model"], out["step"], out["files"]), ("export", arch, 3, 1))
            self.assertEqual(out["tokenizer"], arch == "gpt2")
            self.assertEqual(out["bytes"], 4 * out["parameters"])
            back = json.loads(self.ok(self.run_program("convert", f"{arch}-hf", f"{arch}-back", "--json")).stdout)
            self.assertEqual((back["direction"], back["tokenizer"]), ("import", out["tokenizer"]))
            self.assertEqual(self.evaluate(arch)["loss"], self.evaluate(f"{arch}-back")["loss"])
            self.ok(self.run_program("generate", f"{arch}-back", "--prompt", "the quick", "--tokens", "4", "--json"))
            self.ok(self.run_program("check", f"{arch}-back/config.yaml", "--ranks", "4", "--zero", "3"))  # the layout is left open
            self.assertFalse([name for name in os.listdir(self.folder) if name.endswith(".part")])

    def test_sentencepiece(self):
        """A SentencePiece model is exported as it is, with a class that adds its prefix, and a note that
        transformers may encode differently."""
        model = os.path.join(program.SOURCE, "tests/unit/data/sentencepiece/bpe-bytes.model")
        self.ok(self.run_program(*self.small("model.vocab=512", f"data.tokenizer={model}", "train.steps=2", "--dir", "run")))
        out = json.loads(self.ok(self.run_program("convert", "run", "hf", "--json")).stdout)
        self.assertTrue([note for note in out["notes"] if "SentencePiece" in note], out)
        with open(self.path("hf/tokenizer_config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["tokenizer_class"], "LlamaTokenizer")
        with open(model, "rb") as wanted, open(self.path("hf/tokenizer.model"), "rb") as file:
            self.assertEqual(file.read(), wanted.read())
        self.ok(self.run_program("convert", "hf", "back"))
        self.assertEqual(self.evaluate("run")["loss"], self.evaluate("back")["loss"])

    def test_texts_begin_as_the_tokenizer_says(self):
        self.ok(self.run_program(*self.small("model.arch=llama", "model.vocab=300", "train.steps=3", "--save-every", "3", "--dir", "run")))
        self.ok(self.run_program("convert", "run", "hf"))
        with open(self.path("hf/tokenizer.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        last = max(token["id"] for token in tokenizer["added_tokens"])
        begin = {"id": last, "content": next(t["content"] for t in tokenizer["added_tokens"] if t["id"] == last)}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin["content"]: {"id": begin["content"], "ids": [last], "tokens": [begin["content"]]}}}
        plain = json.loads(self.ok(self.run_program("generate", "run", "--prompt", "the", "--tokens", "1", "--json")).stdout)
        with open(self.path("hf/tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump(tokenizer, file)
        self.ok(self.run_program("convert", "hf", "framed"))
        framed = json.loads(self.ok(self.run_program("generate", "framed", "--prompt", "the", "--tokens", "1", "--json")).stdout)
        self.assertEqual(framed["prompt_tokens"], plain["prompt_tokens"] + 1)
        self.ok(self.run_program("convert", "framed", "again"))
        with open(self.path("again/config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["bos_token_id"], last)
        with open(self.path("again/tokenizer_config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["bos_token"], begin["content"])

    def test_masks_are_passed_over(self):
        sparse_model(self.path("model"), 1, 64, 96)
        path = self.path("model/model.safetensors")
        with open(path, "rb") as file:
            length, = struct.unpack("<Q", file.read(8))
            header, data = json.loads(file.read(length)), file.read()
        header["model.layers.0.attn.bias"] = {"dtype": "BOOL", "shape": [8, 8], "data_offsets": [len(data), len(data) + 64]}
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data + bytes(64))
        self.ok(self.run_program("convert", "model", "new"))

    def test_refused(self):
        self.one_line(self.run_program("convert", "nothing", "new"), 2, "nothing")
        self.one_line(self.run_program("convert", "nothing"), 2, "FROM TO")
        self.ok(self.run_program(*self.small("model.activation=gelu", "train.steps=1", "--save-every", "1", "--dir", "odd")))
        self.one_line(self.run_program("convert", "odd", "new"), 2, "model.activation")
        self.one_line(self.run_program("convert", "odd", "odd"), 2, "exists already")
        self.assertFalse(os.path.exists(self.path("new")) or os.path.exists(self.path("new.part")))

    def test_what_the_target_cannot_hold_is_refused(self):
        self.ok(self.run_program(*self.small("model.preset=qwen3-tiny", "model.mlp_bias=true", "model.vocab=256", "train.steps=1",
                                             "--save-every", "1", "--dir", "run")))
        self.one_line(self.run_program("convert", "run", "new"), 2, "model.mlp_bias", "model.layers.0.mlp.gate_proj.bias")
        self.assertFalse(os.path.exists(self.path("new")) or os.path.exists(self.path("new.part")))

    def biases_in_attention(self, fixture, folder, value):
        self.fixture(fixture, folder, attention_bias=True)
        header, _ = read_tensors(self.path(f"{folder}/model.safetensors"))
        for layer in range(2):
            for matrix in "qkvo":
                name = f"model.layers.{layer}.self_attn.{matrix}_proj"
                add_tensor(self.path(f"{folder}/model.safetensors"), name + ".bias",
                           [value * i for i in range(header[name + ".weight"]["shape"][0])])

    def test_biases_in_attention(self):
        """attention_bias is q, k, v and the output, 0 or not, and the MLP gets none. The model goes back as it was."""
        for fixture, value in (("qwen3", 0.01), ("qwen3", 0.0), ("qwen3-moe", 0.01), ("llama-untied-scaled", 0.0)):
            with self.subTest(fixture=fixture, value=value):
                name = f"{fixture}-{value}"
                self.biases_in_attention(fixture, name, value)
                self.assertNotIn("bias", self.ok(self.run_program("convert", name, name + "-run")).stdout)
                with open(self.path(name + "-run/config.yaml"), encoding="utf-8") as file:
                    text = file.read()
                for line in ('qkv_bias: "true"', 'out_bias: "true"', 'mlp_bias: "false"'):
                    self.assertIn(line, text)
                self.ok(self.run_program("convert", name + "-run", name + "-again"))
                before, _ = read_tensors(self.path(name + "/model.safetensors"))
                after, _ = read_tensors(self.path(name + "-again/model.safetensors"))
                self.assertEqual({key: entry["shape"] for key, entry in before.items() if key != "__metadata__"},
                                 {key: entry["shape"] for key, entry in after.items() if key != "__metadata__"})
                with open(self.path(name + "-again/config.json"), encoding="utf-8") as file:
                    config = json.load(file)
                self.assertTrue(config["attention_bias"])
                self.assertFalse(config.get("mlp_bias", False))

    def test_zero_biases_are_noted(self):
        """Qwen3 has one key for all biases of attention. The missing ones are written as 0, with a note."""
        self.ok(self.run_program(*self.small("model.preset=qwen3-tiny", "model.qkv_bias=true", "model.vocab=256", "train.steps=1",
                                             "--save-every", "1", "--dir", "run")))
        self.assertIn("model.out_bias", self.ok(self.run_program("convert", "run", "hf")).stdout)
        self.assertIn("model.layers.0.self_attn.o_proj.bias", read_tensors(self.path("hf/model.safetensors"))[0])

    def test_experts_are_exported_as_transformers_reads_them(self):
        """Its configuration classes check types: 0 is not a float."""
        for preset in ("mixtral-tiny", "qwen3-moe-tiny"):
            for more, coefficient in ((["model.aux_loss=0"], 0.0), (["model.aux_loss=0.01", "model.balance=batch"], None)):
                run = f"{preset}-{len(more)}"
                self.ok(self.run_program(*self.small(f"model.preset={preset}", "model.vocab=256", *more, "train.steps=1", "--save-every",
                                                     "1", "--dir", run)))
                self.ok(self.run_program("convert", run, f"{run}-hf"))
                with open(self.path(f"{run}-hf/config.json"), encoding="utf-8") as file:
                    config = json.load(file)
                for key in ("router_aux_loss_coef", "rms_norm_eps", "initializer_range", "rope_theta"):
                    self.assertIsInstance(config[key], float, key)
                self.assertEqual(config["output_router_logits"], coefficient is None)
                layers = config["num_hidden_layers"] - len(config.get("mlp_only_layers", []))
                expected = 0.01 * layers / config["num_experts_per_tok"] if coefficient is None else coefficient
                self.assertAlmostEqual(config["router_aux_loss_coef"], expected, delta=1e-12)
                self.ok(self.run_program("convert", f"{run}-hf", f"{run}-back"))
                with open(self.path(f"{run}-back/config.yaml"), encoding="utf-8") as file:
                    self.assertIn(f"aux_loss: {0.01 if coefficient is None else 0}", file.read())

    def test_absurd_sizes(self):
        """Refused before anything is built from them, and no file is left."""
        for i, (name, changes, part) in enumerate((
                ("llama-untied-scaled", {"num_hidden_layers": 1000000}, "num_hidden_layers"),
                ("llama-untied-scaled", {"num_hidden_layers": 100000}, "at most 1000000 are supported"),
                ("llama-untied-scaled", {"num_hidden_layers": 50000}, "model.layers.2."),
                ("llama-untied-scaled", {"rope_scaling": {"rope_type": 1}, "rope_parameters": None}, "rope_type"),
                ("qwen3-moe", {"num_local_experts": 60000}, "model.layers.0.mlp.experts.6."),
                ("gpt2-tied", {"n_embd": 1 << 62}, "n_embd"), ("gpt2-tied", {"n_layer": 10 ** 30}, "too big integer"))):
            self.fixture(name, f"absurd-{i}", **changes)
            begin = time.monotonic()
            self.one_line(self.run_program("convert", f"absurd-{i}", "new"), 2, f"absurd-{i}", part)
            self.assertLess(time.monotonic() - begin, 5.0)
            self.assertFalse(os.path.exists(self.path("new")) or os.path.exists(self.path("new.part")))

    def test_memory(self):
        """Both directions take the memory of one tensor, not of the model."""
        def peak(*arguments):
            process = subprocess.Popen([program.PROGRAM, *arguments], cwd=self.folder, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0)
            return usage.ru_maxrss * 1024

        small = sparse_model(self.path("small"), 1, 64, 192)
        large = sparse_model(self.path("large"), 8, 512, 1536)
        tensor = 4 * 512 * 1536
        self.assertGreater(large, 24 * tensor)
        self.assertLess(small, tensor)
        for way, source in (("run", ""), ("hf", "-run")):
            base = peak("convert", f"small{source}", f"small-{way}")
            self.assertLess(peak("convert", f"large{source}", f"large-{way}") - base, 5 * tensor, way)


if __name__ == "__main__":
    # The memory of sanitizers grows with that of the program.
    if program.SANITIZED:
        del Convert.test_memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unittest.main()
