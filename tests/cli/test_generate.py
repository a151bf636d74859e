"""`generate` as a user calls it: ranks, sampling, files of prompts, chats and token ids; and the files
of a Hugging Face folder that belong to text, which survive the way through a run.

ctest: timeout 120
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
TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<|user|>assistant: {% endif %}")
GENERATION = '{\n  "bos_token_id": 1,\n  "eos_token_id": [0, 261, 262],\n  "temperature": 0.6\n}\n'


class Generate(program.ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.mkdtemp(prefix="quadrille-test-generate-")
        cls.addClassCleanup(shutil.rmtree, cls.made, ignore_errors=True)
        common = [f"data.path={TEXT}", "data.seq=48", "train.global_batch=2", "train.lr=3e-3"]
        for arguments in (["train", "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=300", "train.steps=30", *common, "--dir",
                           "dense"],
                          ["train", "model.layers=2", "model.hidden=32", "model.heads=4", "model.experts=4", "model.experts_per_token=2",
                           "model.expert_ffn=16", "train.steps=10", *common, "--dir", "experts"],
                          ["convert", "dense", "hf"]):
            result = program.subprocess.run([program.PROGRAM, *arguments], cwd=cls.made, capture_output=True, text=True, timeout=100,
                                            check=False)
            assert result.returncode == 0, result.stdout + result.stderr
        for name, text in (("generation_config.json", GENERATION), ("chat_template.jinja", TEMPLATE),
                           ("special_tokens_map.json", '{"eos_token": "<|endoftext|>"}'), ("vocab.json", '{"kept": 1}'),
                           ("tokenizer_config.json", '{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "odd": [1, {}]}')):
            with open(os.path.join(cls.made, "hf", name), "w", encoding="utf-8") as file:
                file.write(text)
        path = os.path.join(cls.made, "hf", "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        config.update({"eos_token_id": [0, 261], "pad_token_id": 7, "initializer_range": 0.02, "unheard_of": {"a": [1, "b"]}})
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=3)

    def setUp(self):
        super().setUp()
        shutil.copytree(self.made, self.folder, symlinks=True, dirs_exist_ok=True)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def generate(self, model, *words):
        result = self.run_program("generate", model, "--json", *words)
        self.ok(result)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_ranks_write_what_one_rank_writes(self):
        for model, layouts in (("dense", [["--tp", "2"], ["--pp", "2"], ["--tp", "2", "--pp", "2"]]),
                               ("experts", [["--ep", "2"], ["--tp", "2"], ["--pp", "2", "--ep", "2"]])):
            words = ["--prompt", "Permission is hereby granted, free of charge, to any person", "--tokens", "40", "--temperature", "0.7"]
            one = self.generate(model, *words)[0]["text"]
            for layout in layouts:
                self.assertEqual(self.generate(model, *words, *layout)[0]["text"], one, f"{model} {layout}")
            losses = [self.run_program("eval", model, TEXT, "--json", *layout) for layout in [[], *layouts]]
            reports = [json.loads(result.stdout) for result in losses]
            for report in reports[1:]:
                self.assertAlmostEqual(report["loss"], reports[0]["loss"], delta=1e-5)
                self.assertEqual(report["bytes"], reports[0]["bytes"])
        self.one_line(self.run_program("generate", "dense", "--ep", "2"), 2, "no experts")
        self.one_line(self.run_program("generate", "dense", "--tp", "3"), 2, "parallel.tp is 3")

    def test_prompts_of_a_file(self):
        self.write("prompts.txt", "Permission\n\n  \nThe above\r\n")
        self.write("prompts.jsonl", '{"prompt": "Permission"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
        both = self.generate("dense", "--prompts", "prompts.txt", "--tokens", "9", "--seed", "4")
        self.assertEqual([r["prompt"] for r in both], ["Permission", "The above"])
        self.assertEqual(both[0]["text"], self.generate("dense", "--prompt", "Permission", "--tokens", "9", "--seed", "4")[0]["text"])
        self.ok(self.run_program("convert", "hf", "run"))
        lines = self.generate("run", "--prompts", "prompts.jsonl", "--tokens", "9", "--seed", "4")
        self.assertEqual(lines[0]["text"], both[0]["text"])
        self.assertEqual(lines[1]["tokens"] > 0, True)
        shown = self.run_program("generate", "run", "--prompts", "prompts.jsonl", "--tokens", "9", "--seed", "4").stdout
        self.assertTrue(shown.startswith("Permission"))
        self.assertNotIn('"role"', shown)
        plain = self.run_program("generate", "dense", "--prompts", "prompts.txt", "--tokens", "9", "--seed", "4")
        self.assertTrue(plain.stdout.startswith("Permission" + both[0]["text"]))
        self.assertIn("\n\nThe above", plain.stdout)
        self.write("bad.jsonl", '{"prompt": "a"}\n{"text": "b"}\n')
        self.one_line(self.run_program("generate", "dense", "--prompts", "bad.jsonl"), 2, "bad.jsonl (line 2)", "'prompt'")
        self.one_line(self.run_program("generate", "dense", "--prompts", "a", "--prompt", "b"), 2, "--prompt and --prompts")

    def test_texts_that_end_the_generation(self):
        words = ["--prompt", "Permission is", "--tokens", "60", "--temperature", "0", "--ignore-end"]
        whole = self.generate("dense", *words)[0]
        self.assertEqual((whole["end"], whole["tokens"]), ("tokens", 60))
        stop = whole["text"][10:13]
        cut = self.generate("dense", *words, "--stop", f"neverthere|{stop}".replace("\n", "\\n"))[0]
        self.assertEqual(cut["end"], "stop")
        self.assertEqual(cut["text"], whole["text"][:whole["text"].index(stop)])
        # A longer stop text that begins before it and is not completed takes nothing away.
        ids = ["--ids", "--prompt", "5", "--tokens", "9", "--ignore-end"]
        first, second = self.generate("dense", *ids)[0]["text"].split()[:2]
        both = self.generate("dense", *ids, "--stop", f"{first} {second} ~| {second} ")[0]
        self.assertEqual((both["end"], both["text"]), ("stop", first))
        self.one_line(self.run_program("generate", "dense", "--stop", "a||b"), 2, "stop text is empty")

    def test_sampling_settings(self):
        words = ["--prompt", "Permission is", "--tokens", "20"]
        greedy = self.generate("dense", *words, "--temperature", "0")[0]["text"]
        self.assertEqual(self.generate("dense", *words, "--min-p", "1")[0]["text"], greedy)
        self.assertEqual(self.generate("dense", *words, "--top-k", "1")[0]["text"], greedy)
        once = self.generate("dense", "--ids", "--prompt", "5", "--tokens", "20", "--temperature", "0", "--repetition-penalty", "1000",
                             "--ignore-end")[0]["text"]
        self.assertGreater(len(set(once.split())), 8)
        self.one_line(self.run_program("generate", "dense", "--min-p", "2"), 2, "min-p")

    def test_token_ids_need_no_tokenizer(self):
        text = self.generate("dense", "--ids", "--prompt", "5 6\n7", "--tokens", "8", "--temperature", "0", "--ignore-end")[0]
        os.remove(self.path("dense/tokenizer.json"))
        again = self.generate("dense", "--ids", "--prompt", "5 6 7", "--tokens", "8", "--temperature", "0", "--ignore-end")[0]
        self.assertEqual(again["text"], text["text"])
        self.assertEqual((len(again["text"].split()), again["prompt_tokens"]), (8, 3))
        self.one_line(self.run_program("generate", "dense", "--ids", "--prompt", "5 300"), 2, "from 0 to 299")
        self.one_line(self.run_program("generate", "dense", "--ids", "--prompt", "5 x"), 2, "token ids")

    def test_output_is_valid_text(self):
        result = program.subprocess.run([program.PROGRAM, "generate", "experts", "--tokens", "300", "--temperature", "9"], cwd=self.folder,
                                        capture_output=True, timeout=60, check=False)
        result.stdout.decode("utf-8")
        self.assertIn("�".encode(), result.stdout)

    def test_chats(self):
        self.ok(self.run_program("convert", "hf", "run"))
        shutil.rmtree(self.path("hf"))  # the run has its own template
        words = ["--tokens", "6", "--temperature", "0"]
        chat = self.generate("run", "--chat", "--prompt", "Hi", *words)[0]
        messages = [{"role": "user", "content": "Hi"}]
        same = self.generate("run", "--messages", "--prompt", json.dumps(messages), *words)[0]
        self.assertEqual((same["text"], same["prompt_tokens"]), (chat["text"], chat["prompt_tokens"]))
        text = "<|endoftext|><|user|>user: Hi<|user|>assistant: "
        plain = self.generate("run", "--special", "parse", "--prompt", text, *words)[0]
        self.assertEqual((plain["text"], plain["prompt_tokens"]), (chat["text"], chat["prompt_tokens"]))
        longer = self.generate("run", "--chat", "--system", "Short.", "--prompt", "Hi", *words)[0]
        self.assertGreater(longer["prompt_tokens"], chat["prompt_tokens"])
        self.one_line(self.run_program("generate", "run", "--chat", "--prompt", "a <|endoftext|> b"), 2, "<|endoftext|>")
        self.one_line(self.run_program("generate", "dense", "--chat", "--prompt", "Hi"), 2, "chat template")
        self.one_line(self.run_program("generate", "run", "--chat", "--messages"), 2, "--chat and --messages")
        self.one_line(self.run_program("generate", "run", "--messages", "--prompt", "[1"), 2, "messages:1:")

    def test_a_run_started_from_a_run_renders_messages(self):
        self.ok(self.run_program("convert", "hf", "run"))
        shutil.rmtree(self.path("hf"))
        self.write("talk.jsonl", 8 * '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}\n')
        self.write("talk.jinja", "{% for m in messages %}{{ m['content'] }}. {% endfor %}{% if add_generation_prompt %}{% endif %}")
        train = ["data.format=examples", "data.path=talk.jsonl", "data.seq=48", "train.steps=1", "train.global_batch=2"]
        self.ok(self.run_program("train", "--from", "run", *train, "--dir", "tuned"))
        self.ok(self.run_program("train", "--from", "tuned", *train, "--dir", "again"))
        self.ok(self.run_program("train", "--from", "tuned", *train, "data.chat_template=talk.jinja", "--dir", "other"))
        os.remove(self.path("talk.jinja"))
        tokens = [self.generate(run, "--chat", "--prompt", "Hi", "--tokens", "1")[0]["prompt_tokens"] for run in ("tuned", "again", "other")]
        self.assertEqual(tokens[0], tokens[1])
        self.assertLess(tokens[2], tokens[1])

    def test_files_survive_the_way_through_a_run(self):
        self.ok(self.run_program("convert", "hf", "run"))
        for run in ("run", "tuned"):
            if run == "tuned":
                self.ok(self.run_program("train", "--from", "run", f"data.path={TEXT}", "data.seq=48", "train.steps=1", "train.global_batch=2",
                                         "--dir", "tuned"))
            self.ok(self.run_program("convert", run, f"back-{run}"))
            for name in sorted(os.listdir(self.path("hf"))):
                if not name.endswith(".safetensors"):
                    self.assertEqual(self.read(f"back-{run}/{name}"), self.read(f"hf/{name}"), f"{run}: {name}")
        self.ok(self.run_program("convert", "run", "half", "--dtype", "bf16"))
        self.assertEqual(self.read("half/config.json"), self.read("hf/config.json").replace('"float32"', '"bfloat16"'))
        # The model of the folder has changed: its config.json is written anew.
        self.ok(self.run_program("train", "--from", "run", "model.rope_base=777", f"data.path={TEXT}", "data.seq=48", "train.steps=1",
                                 "train.global_batch=2", "--dir", "changed"))
        self.ok(self.run_program("convert", "changed", "back"))
        self.assertEqual(json.loads(self.read("back/config.json"))["rope_theta"], 777)
        self.assertEqual(self.read("back/generation_config.json"), GENERATION)
        # Data without a tokenizer: config.json is kept too, and files of a replaced run are not.
        self.ok(self.run_program("tokenize", TEXT, "--tokenizer", "run/tokenizer.json", "--output", "tokens"))
        words = ["data.path=tokens", "data.seq=48", "train.steps=1", "train.global_batch=2", "model.layers=2", "model.hidden=32",
                 "model.heads=4", "model.vocab=300", "--dir", "changed", "--overwrite"]
        self.ok(self.run_program("train", *words, "run.weights=hf"))
        self.assertEqual(self.read("changed/huggingface/config.json"), self.read("hf/config.json"))
        self.assertFalse(os.path.exists(self.path("changed/huggingface/tokenizer_config.json")))
        self.ok(self.run_program("train", *words))
        self.assertFalse(os.path.exists(self.path("changed/huggingface")))

    def test_any_of_the_eos_ids_ends_a_text(self):
        words = ["--ids", "--prompt", "5 6", "--tokens", "12", "--temperature", "0"]
        self.ok(self.run_program("convert", "hf", "run"))
        ids = self.generate("run", *words, "--ignore-end")[0]["text"].split()
        self.write("run/huggingface/generation_config.json", json.dumps({"eos_token_id": [1, int(ids[4])]}))
        ended = self.generate("run", *words)[0]
        self.assertEqual((ended["end"], ended["text"].split()), ("document", ids[:ids.index(ids[4])]))
        self.write("run/huggingface/generation_config.json", '{"eos_token_id": "x"}')
        self.one_line(self.run_program("generate", "run"), 2, "generation_config.json", "'eos_token_id'")


if __name__ == "__main__":
    unittest.main()
