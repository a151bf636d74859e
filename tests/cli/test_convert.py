"""quadrille convert: a trained model out and back, memory, and what is refused."""
import json
import os
import resource
import struct
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


def sparse_model(folder, layers, hidden, ffn):
    """A Llama folder whose weights are all zero and take no room on the disk. Returns the bytes of its tensors."""
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


class Convert(program.ProgramTest):
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
            self.assertFalse([name for name in os.listdir(self.folder) if name.endswith(".part")])

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
        self.one_line(self.run_program("convert", "odd", "odd"), 2, "is there already")
        self.assertFalse(os.path.exists(self.path("new")) or os.path.exists(self.path("new.part")))

    def test_memory(self):
        """Both ways take one tensor, not the model."""
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
    # The sanitizers' own memory grows with what is used.
    if program.SANITIZED:
        del Convert.test_memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unittest.main()
