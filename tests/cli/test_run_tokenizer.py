"""The tokenizer belongs to the run: a resumed run, or one that starts from its weights, cannot
silently use another.
"""
import json
import os
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


class RunTokenizer(program.ProgramTest):
    """Two tokenizers of the same size for the same text; each test has a copy of a run that trained
    the first."""

    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.mkdtemp(prefix="quadrille-test-tokenizer-")
        cls.addClassCleanup(shutil.rmtree, cls.made, ignore_errors=True)
        cls.text = os.path.join(program.SOURCE, "LICENSE")
        for arguments in (["train", f"data.path={cls.text}", *program.SMALL, "model.vocab=300", "train.steps=2", "run.save_every=1k",
                           "data.validation=0.1", "run.dir=run"],
                          ["tokenize", os.path.join(program.SOURCE, "docs", "formats.md"), "--output", "unused", "--train", "300",
                           "--save", "other.json"],
                          ["tokenize", cls.text, "--output", "shards", "--tokenizer", "run/tokenizer.json"],
                          ["tokenize", cls.text, "--output", "other-shards", "--tokenizer", "other.json"]):
            result = program.subprocess.run([program.PROGRAM, *arguments], cwd=cls.made, capture_output=True, text=True, timeout=100,
                                            check=False)
            assert result.returncode == 0, result.stdout + result.stderr

    def setUp(self):
        super().setUp()
        shutil.copytree(self.made, self.folder, symlinks=True, dirs_exist_ok=True)
        self.kept = self.tokenizer("run")

    def tokenizer(self, folder):
        with open(self.path(f"{folder}/tokenizer.json"), "rb") as file:
            return file.read()

    def resume(self, *words):
        return self.run_program("train", "--dir", "run", "--resume", *words)

    def refused(self, words, *parts):
        """Nothing of the run changes."""
        steps = len(self.metrics("run"))
        self.one_line(self.resume(*words), 2, *parts)
        self.assertEqual(self.tokenizer("run"), self.kept)
        self.assertEqual(len(self.metrics("run")), steps)

    def test_shards_leave_the_tokenizer_of_the_run(self):
        for step, layout in ((3, []), (4, ["--ranks", "2"])):
            self.ok(self.resume("data.path=shards", f"train.steps={step}", *layout))
            self.assertEqual(self.tokenizer("run"), self.kept)
            self.ok(self.run_program("generate", "run", "--tokens", "3", "--json"))
        self.ok(self.run_program("eval", "run", "--json"))

    def test_a_run_that_is_replaced_keeps_its_tokenizer_until_then(self):
        other = os.path.join(program.SOURCE, "docs", "formats.md")
        new = ["train", f"data.path={other}", *program.SMALL, "model.vocab=300", "train.steps=1", "run.dir=run", "--overwrite"]
        self.assertNotEqual(self.run_program(*new, "run.weights=absent").returncode, 0)
        self.assertEqual(self.tokenizer("run"), self.kept)
        self.ok(self.run_program("generate", "run", "--tokens", "3", "--json"))
        self.ok(self.run_program(*new, "--ranks", "2"))
        self.assertNotEqual(self.tokenizer("run"), self.kept)
        self.assertEqual([name for name in os.listdir(self.path("run")) if ".new." in name], [])
        # The file there now belongs to another text, or to another program: it is not used as the
        # run's own.
        own = ["train", f"data.path={self.text}", *program.SMALL, "model.vocab=300", "train.steps=1", "run.dir=run", "--overwrite"]
        self.ok(self.run_program(*own))
        self.assertEqual(self.tokenizer("run"), self.kept)
        self.ok(self.run_program(*own, "data.tokenizer=other.json"))
        self.ok(self.run_program(*own))
        self.assertEqual(self.tokenizer("run"), self.kept)

    def test_a_run_on_shards_knows_their_tokenizer_and_their_number(self):
        self.ok(self.run_program("train", "data.path=shards", *program.SMALL, "model.vocab=300", "train.steps=2", "run.save_every=1k",
                                 "run.dir=bare"))
        go_on = ["train", "--dir", "bare", "--resume", "train.steps=3"]
        self.one_line(self.run_program(*go_on, "data.path=other-shards"), 2, "tokens of another tokenizer", "bare/data.json")
        shutil.rmtree(self.path("shards"))
        with open(self.path("half.txt"), "wb") as half, open(self.text, "rb") as whole:
            half.write(whole.read()[:4000])
        self.ok(self.run_program("tokenize", "half.txt", "--output", "shards", "--tokenizer", "run/tokenizer.json"))
        result = self.ok(self.run_program(*go_on, "--ranks", "2"))
        self.assertIn("samples, including held-out ones, differ", result.stdout + result.stderr)

    def test_shards_of_another_tokenizer_are_refused(self):
        self.refused(["data.path=other-shards", "train.steps=3"], "other-shards/shard-00000.qds was made with another tokenizer (",
                     "than run/tokenizer.json (", "quadrille tokenize --tokenizer")

    def test_a_tokenizer_that_is_missing_is_not_trained_again(self):
        os.remove(self.path("run/tokenizer.json"))
        self.one_line(self.resume("train.steps=3"), 2, "run/tokenizer.json", "data.tokenizer")
        self.assertFalse(os.path.exists(self.path("run/tokenizer.json")))
        shutil.copy(os.path.join(self.made, "run", "tokenizer.json"), self.path("again.json"))
        self.ok(self.resume("train.steps=3", "data.tokenizer=again.json"))
        self.assertEqual(self.tokenizer("run"), self.kept)

    def test_a_file_that_was_replaced_is_refused_one_that_is_gone_is_not_needed(self):
        shutil.copy(self.path("run/tokenizer.json"), self.path("named.json"))
        self.ok(self.resume("train.steps=3", "data.tokenizer=named.json"))
        shutil.copy(self.path("other.json"), self.path("named.json"))
        for layout in ([], ["--ranks", "2"]):
            self.refused(["train.steps=4", *layout], "data.tokenizer is named.json (", "trained with run/tokenizer.json (",
                         "data.tokenizer=run/tokenizer.json")
        os.remove(self.path("named.json"))
        self.ok(self.resume("train.steps=4"))
        self.assertEqual(self.tokenizer("run"), self.kept)
        shutil.copy(self.path("other.json"), self.path("named.json"))
        self.ok(self.resume("train.steps=5", "data.tokenizer=run/tokenizer.json"))
        # The result equals that of a run that was never stopped and never named a file.
        shutil.copytree(os.path.join(self.made, "run"), self.path("straight"), symlinks=True)
        for step in (3, 4, 5):
            self.ok(self.run_program("train", "--dir", "straight", "--resume", f"train.steps={step}"))
        self.assertEqual(self.numbers("run"), self.numbers("straight"))

    def test_a_tokenizer_that_is_named_again_must_be_that_of_the_run(self):
        self.refused(["data.tokenizer=other.json", "train.steps=3"], "other.json (", "run/tokenizer.json (", "another run")
        self.refused(["data.tokenizer=bytes", "train.steps=3"], "bytes (6279746573323536)", "run/tokenizer.json (")
        self.refused(["data.tokenizer=nowhere.json", "train.steps=3"], "nowhere.json", "omit it")

    def test_a_run_on_bytes_stays_on_bytes(self):
        run = ["train", f"data.path={self.text}", *program.SMALL, "model.vocab=300", "run.save_every=1k", "run.dir=bytes"]
        self.ok(self.run_program(*run, "data.tokenizer=bytes", "train.steps=1"))
        self.one_line(self.run_program("train", "--dir", "bytes", "--resume", "train.steps=2", "data.tokenizer=other.json"), 2,
                      "data.tokenizer has changed")
        self.assertFalse(os.path.exists(self.path("bytes/tokenizer.json")))

    def test_texts_end_with_the_token_that_the_folder_names(self):
        """Also after a resume without the folder: the run keeps its settings."""
        os.mkdir(self.path("hf"))
        with open(self.path("run/tokenizer.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "<|done|>"})
        self.write("hf/tokenizer.json", json.dumps(tokenizer))
        self.write("hf/tokenizer_config.json", json.dumps({"eos_token": "<|done|>"}))
        self.write("examples.jsonl", "".join(json.dumps({"prompt": f"say {i}: ", "completion": "done"}) + "\n" for i in range(20)))
        self.ok(self.run_program("train", "data.path=examples.jsonl", "data.format=examples", "data.tokenizer=hf/tokenizer.json", *program.SMALL,
                                 "train.lr=0.02", "model.vocab=301", "train.steps=30", "train.schedule=constant", "run.save_every=30",
                                 "run.dir=end"))
        shutil.rmtree(self.path("hf"))
        self.ok(self.run_program("train", "--dir", "end", "--resume", "train.steps=31"))
        generate = ["generate", "end", "--prompt", "say 3: ", "--tokens", "40", "--temperature", "0", "--json"]
        texts = [json.loads(self.ok(self.run_program(*generate, *words)).stdout)["text"] for words in ([], ["--ignore-end"])]
        self.assertTrue(texts[1].startswith(texts[0] + "<|done|>"), texts)

    def test_weights_with_another_tokenizer_cause_a_warning(self):
        begin = ["train", f"data.path={self.text}", *program.SMALL, "model.vocab=300", "train.steps=1", "run.weights=run"]
        for layout in ([], ["--ranks", "2"]):
            result = self.ok(self.run_program(*begin, "data.tokenizer=other.json", *layout))
            self.assertEqual(result.stdout.count("another tokenizer, run/tokenizer.json ("), 1, result.stdout)
            result = self.ok(self.run_program(*begin, "data.tokenizer=run/tokenizer.json", *layout))
            self.assertNotIn("another tokenizer", result.stdout)


if __name__ == "__main__":
    unittest.main()
