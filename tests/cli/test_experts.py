"""Models with experts on eight local ranks: a small DeepSeek-V3-shaped one with the recipe of its
paper, and a Mixtral-shaped one.
ctest: timeout 240
ctest: processors 2
"""
import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


class Experts(program.ProgramTest):
    def losses(self, folder):
        return [float(loss) for _, loss, *_ in self.numbers(folder)]

    def train(self, folder, preset, *more):
        shape = ["model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.head_dim=16", "model.ffn=96", "model.expert_ffn=32"]
        self.ok(self.run_program("train", f"data.path={self.corpus}", f"model.preset={preset}", *shape, "data.seq=32",
                                 "train.global_batch=16", "train.micro_batch=1", "train.steps=16", "train.lr=3e-3", "train.warmup=4",
                                 "train.schedule=constant", "parallel.ranks=8", "run.threads=1", f"run.dir={folder}", *more))
        return self.losses(folder)

    def test_deepseek(self):
        """AdamW, biases instead of a large loss, groups of experts; pipeline, experts over the
        ranks of a stage, ZeRO-1."""
        losses = self.train("deepseek", "deepseek-tiny", "parallel.pp=2", "parallel.ep=4", "parallel.zero=1",
                            "parallel.schedule=dualpipe_v", "run.save_every=16")
        self.assertLess(losses[-1], 0.7 * losses[0])
        # One rank evaluates what eight have trained, and continues a text.
        self.ok(self.run_program("eval", "deepseek", self.corpus))
        self.ok(self.run_program("generate", "deepseek", "--prompt", "the quick", "--tokens", "8", "--json"))
        # The run resumes with the same losses on other ranks.
        ends = []
        for layout in (("parallel.ranks=1",), ("parallel.ranks=4", "parallel.ep=2", "parallel.tp=2", "parallel.zero=3")):
            plain = ["parallel.pp=1", "parallel.ep=1", "parallel.zero=0", "parallel.dp=-1", "parallel.schedule=1f1b"]
            changed = [word.split("=")[0] for word in layout]
            self.ok(self.run_program("train", "--resume", "--dir", "deepseek", "train.steps=18", "run.save=false",
                                     *(word for word in plain if word.split("=")[0] not in changed), *layout))
            ends.append(self.losses("deepseek")[16:])
        self.assertEqual([len(end) for end in ends], [2, 2])
        for one, other in zip(*ends):
            self.assertAlmostEqual(one, other, delta=1e-4 * one)

    def test_mixtral(self):
        losses = self.train("mixtral", "mixtral-tiny", "parallel.tp=2", "parallel.ep=4")
        self.assertLess(losses[-1], 0.7 * losses[0])

    def test_prediction(self):
        """Multi-token prediction on two stages; Hugging Face folders keep its weights."""
        self.train("mtp", "mla-tiny", "model.mtp_modules=1", "model.layers=2", "model.head_dim=48", "parallel.ranks=4", "parallel.pp=2",
                   "parallel.ep=2", "train.steps=6", "run.save_every=6")
        lines = self.metrics("mtp")
        self.assertLess(lines[-1]["mtp_loss"], lines[0]["mtp_loss"])
        self.assertIn("loss", self.run_program("eval", "mtp", self.corpus).stdout)
        for source, folder in (("mtp", "hf"), ("hf", "back"), ("back", "again")):
            self.ok(self.run_program("convert", source, folder))
        tensors = []
        for folder in ("hf", "again"):
            with open(os.path.join(self.folder, folder, "model.safetensors"), "rb") as f:
                data = f.read()
            header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
            begin = 8 + int.from_bytes(data[:8], "little")
            tensors.append({name: (t["shape"], data[begin + t["data_offsets"][0]:begin + t["data_offsets"][1]])
                            for name, t in header.items() if name != "__metadata__"})
        self.assertEqual(tensors[0], tensors[1])
        module = {name.removeprefix("model.layers.2."): t for name, t in tensors[0].items() if name.startswith("model.layers.2.")}
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens", "self_attn.kv_b_proj",
                     "mlp.experts.15.down_proj"):
            self.assertIn(name + ".weight", module)
        self.assertEqual(module["eh_proj.weight"][0], [64, 128])
        self.assertEqual(module["embed_tokens.weight"], tensors[0]["model.embed_tokens.weight"])
        self.assertEqual(module["shared_head.head.weight"], tensors[0]["lm_head.weight"])
        # Tables of its own would be another model.
        with open(os.path.join(self.folder, "again", "model.safetensors"), "r+b") as f:
            f.seek(begin + header["model.layers.2.embed_tokens.weight"]["data_offsets"][0])
            f.write(b"\x00\x01\x02\x3d")
        self.one_line(self.run_program("convert", "again", "other"), 2, "'model.layers.2.embed_tokens.weight' differs from")
        # Its weights must be where config.json says.
        with open(os.path.join(self.folder, "hf", "model.safetensors"), "r+b") as f:
            text = f.read(begin).replace(b"model.layers.2.", b"model.layers.3.")
            f.seek(0)
            f.write(text)
        self.one_line(self.run_program("convert", "hf", "third"), 2, "do not belong to the model", "model.layers.3.")

    def test_nodes(self):
        """Dispatch by node: the losses of flat dispatch, fewer bytes between the nodes, as many as
        reported."""
        figures = []
        for dispatch in ("flat", "node"):
            losses = self.train(dispatch, "deepseek-tiny", "parallel.ep=8", "parallel.nodes=2",
                                f"parallel.dispatch={dispatch}", "train.steps=3", "train.warmup=0")
            figures.append((losses, self.metrics(dispatch)))
        (flat_losses, flat), (node_losses, node) = figures
        for one, other in zip(flat_losses, node_losses):
            self.assertAlmostEqual(one, other, delta=1e-4 * one)
        self.assertEqual(flat[0]["dispatch_across_nodes_bytes"], node[0]["dispatch_across_nodes_flat_bytes"])
        self.assertLess(1.5 * node[0]["dispatch_across_nodes_bytes"], flat[0]["dispatch_across_nodes_bytes"])


if __name__ == "__main__":
    unittest.main()
