"""Text in, text out: eval, generate, tokenize, and training on token shards.
ctest: timeout 300
"""
import base64
import bz2
import ctypes
import gzip
import io
import json
import lzma
import math
import os
import shutil
import struct
import sys
import tempfile
import unittest
import zipfile

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

KING_JAMES = os.path.join(program.SOURCE, "examples", "data", "king-james.txt")
MODEL = ["model.layers=2", "model.hidden=32", "model.heads=2", "data.seq=32", "train.global_batch=8", "train.lr=1e-2",
         "run.threads=1", "run.save_every=1k"]


def with_token(shard, index, token):
    """A shard of two-byte tokens and one chunk with one token changed and all checksums right
    (docs/formats.md)."""
    xxh3 = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    xxh3.restype = ctypes.c_uint64

    def hash_of(data):
        return struct.pack("<Q", xxh3(bytes(data), ctypes.c_size_t(len(data))))

    data = bytearray(shard)
    (table,) = struct.unpack_from("<Q", data, 64)
    struct.pack_into("<H", data, 128 + 2 * index, token)
    data[table:table + 8] = hash_of(data[128:table])
    data[80:88] = hash_of(data[table:])
    data[120:128] = hash_of(data[:120])
    return bytes(data)


class Text(program.ProgramTest):
    """Two runs, trained once: bytes (with a held-out part) and a tokenizer of its own."""

    @classmethod
    def setUpClass(cls):
        cls.runs = tempfile.mkdtemp(prefix="quadrille-test-text-")
        cls.addClassCleanup(shutil.rmtree, cls.runs, ignore_errors=True)
        cls.text = os.path.join(cls.runs, "verses.txt")
        with open(KING_JAMES, "rb") as source, open(cls.text, "wb") as out:
            out.write(source.read(60_000))
        cls.bytes_run = os.path.join(cls.runs, "bytes")
        cls.bpe_run = os.path.join(cls.runs, "bpe")
        for folder, more in ((cls.bytes_run, ["train.steps=30"]), (cls.bpe_run, ["model.vocab=300", "train.steps=5"])):
            result = program.subprocess.run(
                [program.PROGRAM, "train", f"data.path={cls.text}", "data.validation=0.1", *MODEL, f"run.dir={folder}", *more],
                capture_output=True, text=True, timeout=200, check=False)
            assert result.returncode == 0, result.stdout + result.stderr

    def json_of(self, *arguments):
        result = self.ok(self.run_program(*arguments, "--json"))
        self.assertEqual(result.stderr, "")
        return json.loads(result.stdout)

    # ---- eval ----

    def test_a_window_is_no_longer_than_the_text(self):
        self.write("short.txt", "In the beginning God created")
        as_long = self.json_of("eval", self.bytes_run, "short.txt", "--seq", "27")
        longer = self.json_of("eval", self.bytes_run, "short.txt", "--seq", "100000000")
        for key in ("seq", "windows", "tokens", "loss"):
            self.assertEqual(longer[key], as_long[key])
        self.assertEqual((longer["seq"], longer["windows"], longer["tokens"]), (27, 1, 27))

    def test_a_hugging_face_folder_is_converted_first(self):
        folder = os.path.join(program.SOURCE, "tests/golden/huggingface/qwen3")
        self.one_line(self.run_program("generate", folder), 2, folder, "quadrille convert")

    def test_held_out_part_however_many_windows_at_once(self):
        for run in (self.bytes_run, self.bpe_run):
            one = self.json_of("eval", run, "--per-pass", "1", "--baseline")
            self.assertEqual(one["tokens"], one["windows"] * one["seq"])
            self.assertEqual(one["trigram"]["tokens"], one["tokens"])
            self.assertGreater(one["trigram"]["trained_tokens"], 5 * one["tokens"])
            self.assertAlmostEqual(one["perplexity"], math.exp(one["loss"]), delta=1e-9 * one["perplexity"])
            self.assertAlmostEqual(one["bits_per_byte"] * one["bytes"] * math.log(2), one["loss"] * one["tokens"], delta=1e-6)
            for several in ("7", "0"):
                many = self.json_of("eval", run, "--per-pass", several, "--threads", "2")
                self.assertEqual(many["tokens"], one["tokens"])
                self.assertEqual(many["bytes"], one["bytes"])
                self.assertAlmostEqual(many["loss"], one["loss"], delta=2e-6)

    def test_held_out_part_is_the_end_of_the_text(self):
        """A file with the held-out bytes has the same loss, and another cut has the same tokens."""
        held = self.json_of("eval", self.bytes_run)
        with open(self.text, "rb") as file:
            text = file.read()
        windows = (len(text) - 1) // 32
        first = (windows - held["windows"]) * 32
        with open(self.path("held.txt"), "wb") as file:
            file.write(text[first:first + held["windows"] * 32 + 1])
        self.assertEqual(self.json_of("eval", self.bytes_run, "held.txt")["loss"], held["loss"])
        self.assertEqual(held["bytes"], held["tokens"])
        other = self.json_of("eval", self.bytes_run, "--seq", "50")
        self.assertEqual(other["tokens"], held["tokens"])
        self.assertNotEqual(other["loss"], held["loss"])

    def test_text_of_any_length(self):
        for length in (2, 31, 32, 33, 34, 1000):
            self.write("some.txt", "and God said " * 100)
            with open(self.path("some.txt"), "r+", encoding="ascii") as file:
                file.truncate(length)
            report = self.json_of("eval", self.bytes_run, "some.txt")
            self.assertEqual(report["tokens"], length - 1)
            self.assertFalse(report["held_out"])
        with open(self.path("some.txt"), encoding="ascii") as file:
            bytes_of_text = len(file.read())
        report = self.json_of("eval", self.bpe_run, "some.txt")
        self.assertLess(report["tokens"], bytes_of_text)
        self.assertLessEqual(report["bytes"], bytes_of_text)
        self.assertGreater(report["bytes"], bytes_of_text - 20)

    def test_checkpoint_instead_of_the_folder(self):
        inner = os.path.join(self.bpe_run, "checkpoints", "step-000000000005")
        whole, part = self.json_of("eval", self.bpe_run), self.json_of("eval", inner)
        self.assertEqual((whole["loss"], whole["step"]), (part["loss"], 5))
        self.assertIn("loss", self.ok(self.run_program("eval", inner)).stdout)

    def test_eval_writes_nothing(self):
        def listing():
            return sorted(os.path.join(base, name) for base, _, names in os.walk(self.runs) for name in names)
        before = listing()
        self.json_of("eval", self.bpe_run, "--baseline")
        self.json_of("eval", self.bpe_run, self.text)
        self.json_of("generate", self.bpe_run, "--tokens", "3")
        self.assertEqual(listing(), before)

    def test_eval_errors(self):
        self.ok(self.run_program(*self.small("train.steps=1", "run.dir=plain", "run.save_every=1")))
        self.ok(self.run_program(*self.small("train.steps=1", "run.dir=unsaved", "run.save=false")))
        self.write("empty.txt", "")
        self.write("one.txt", "x")
        os.mkdir(self.path("nothing"))
        for arguments, parts in (([], ["MODEL"]), (["nowhere"], ["nowhere"]), (["unsaved"], ["unsaved", "checkpoint"]),
                                 (["plain"], ["data.validation"]), (["plain", "--baseline"], ["data.validation"]),
                                 (["plain", "empty.txt"], ["empty.txt"]), (["plain", "one.txt"], ["one.txt"]),
                                 (["plain", "nothing"], ["nothing"]), (["plain", "absent.txt"], ["absent.txt"]),
                                 (["plain", "corpus.txt", "--baseline"], ["corpus.txt"]), (["plain", "a", "b"], ["TEXT"]),
                                 (["plain", "--sq", "3"], ["--seq"]), (["corpus.txt"], ["corpus.txt"])):
            self.one_line(self.run_program("eval", *arguments), 2, *parts)

    def test_another_vocabulary(self):
        self.ok(self.run_program("tokenize", self.text, "--output", "shards", "--train", "400"))
        self.one_line(self.run_program("eval", self.bpe_run, "shards"), 2, "shard-00000.qds", "tokenizer")
        shutil.copytree(self.bpe_run, self.path("run"))
        shutil.copy(self.path("shards/tokenizer.json"), self.path("run"))
        self.one_line(self.run_program("eval", "run", self.text), 2, "400", "300")
        self.one_line(self.run_program("generate", "run"), 2, "400", "300")
        os.unlink(self.path("run/tokenizer.json"))
        self.one_line(self.run_program("generate", "run"), 2, "tokenizer.json")
        self.one_line(self.run_program("eval", "run", self.text), 2, "tokenizer.json")

    # ---- generate ----

    def test_likeliest_text_is_always_the_same(self):
        arguments = ["generate", self.bytes_run, "--prompt", "And God said", "--tokens", "60"]
        first = self.ok(self.run_program(*arguments, "--temperature", "0")).stdout
        self.assertTrue(first.startswith("And God said"))
        for more in (["--threads", "2"], ["--seed", "9"], ["--top-k", "5"]):
            self.assertEqual(self.ok(self.run_program(*arguments, "--temperature", "0", *more)).stdout, first)

    def test_equal_seeds_equal_text(self):
        arguments = ["generate", self.bytes_run, "--prompt", "the ", "--tokens", "80", "--seed"]
        texts = [self.json_of(*arguments, seed)["text"] for seed in ("1", "1", "2")]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_beyond_the_context(self):
        report = self.json_of("generate", self.bytes_run, "--prompt", "the ", "--tokens", "100")
        self.assertEqual((report["tokens"], report["context"], report["prompt_tokens"]), (100, 32, 4))
        self.assertEqual(report["end"], "tokens")
        # 28 fit, then 16 more each time; the last token is not read.
        self.assertEqual(report["slides"], math.ceil((99 - 28) / 16))
        said = self.ok(self.run_program("generate", self.bytes_run, "--prompt", "the ", "--tokens", "100", "--temperature", "0"))
        self.assertIn("full", said.stderr)
        long = self.json_of("generate", self.bytes_run, "--prompt", "x" * 33, "--tokens", "2")
        self.assertTrue(long["prompt_cut"])
        self.assertEqual(self.json_of("generate", self.bytes_run, "--context", "1", "--tokens", "5")["tokens"], 5)

    def test_empty_prompt_says_where_it_starts(self):
        self.assertIn("line end", self.ok(self.run_program("generate", self.bytes_run, "--tokens", "1")).stderr)
        self.assertIn("<|endoftext|>", self.ok(self.run_program("generate", self.bpe_run, "--tokens", "1")).stderr)
        self.assertEqual(self.json_of("generate", self.bpe_run, "--tokens", "1")["start"], "<|endoftext|>")

    def test_prompt_from_a_file(self):
        self.write("prompt.txt", "In the beginning\n")
        arguments = ["generate", self.bpe_run, "--tokens", "10", "--temperature", "0"]
        self.assertEqual(self.ok(self.run_program(*arguments, "--prompt-file", "prompt.txt")).stdout,
                         self.ok(self.run_program(*arguments, "--prompt", "In the beginning\n")).stdout)

    def test_json_holds_every_byte(self):
        self.write("prompt.txt", "In\0the")
        # A temperature so high that bytes are uniform: 2,000 draws of 256 contain a NUL.
        report = self.json_of("generate", self.bytes_run, "--prompt-file", "prompt.txt", "--tokens", "2000", "--temperature", "1000")
        self.assertEqual(report["prompt"], "In\0the")
        self.assertIn("\0", report["text"])
        self.assertGreater(len(report["text"]), 1000)

    def test_what_is_printed_is_utf8(self):
        """Into a pipe as well, whatever bytes the model produces and wherever it stops."""
        for tokens in ("1", "2", "1500"):
            arguments = ["generate", self.bytes_run, "--prompt", "In the", "--tokens", tokens, "--temperature", "1000", "--seed", "4"]
            result = program.subprocess.run([program.PROGRAM, *arguments], capture_output=True, timeout=100, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            text = result.stdout.decode("utf-8")  # strictly
            report = self.json_of(*arguments)
            self.assertEqual(text.rstrip("\n"), ("In the" + report["text"]).rstrip("\n"))
        self.assertIn("\ufffd", text)

    def test_what_is_not_text(self):
        """Compressed and binary files are named, with a remedy, by all commands that read text."""
        with open(self.text, "rb") as file:
            text = file.read(20000)
        zipped = io.BytesIO()
        with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("verses.txt", text)
        for name, data, part in (("a.txt", gzip.compress(text), "gunzip"), ("b.bz2", bz2.compress(text), "bunzip2"),
                                 ("c.xz", lzma.compress(text), "unxz"), ("d.zip", zipped.getvalue(), "unzip"),
                                 ("e.txt", text.decode().encode("utf-16"), "iconv -f UTF-16"), ("f.txt", text + b"\0", "NUL"),
                                 ("h.txt", text.decode().encode("utf-32"), "iconv -f UTF-32"),
                                 ("g.txt", "\u0412\u043d\u0430\u0447\u0430\u043b\u0435 ".encode("koi8-r") * 2000, "iconv")):
            with open(self.path(name), "wb") as file:
                file.write(data)
            for arguments in (["train", f"data.path={name}", *MODEL, "train.steps=1", "run.save_every=0"],
                              ["train", f"data.path={name}", *MODEL, "train.steps=1", "model.vocab=300", "run.dir=own"],
                              ["eval", self.bytes_run, name], ["tokenize", name, "--output", "out", "--train", "300"]):
                self.one_line(self.run_program(*arguments), 2, name, part)
            self.ok(self.run_program("train", f"data.path={name}", *MODEL, "train.steps=1", "run.save_every=0", "data.tokenizer=bytes"))
        # text that only begins like one of them, or is not quite UTF-8
        for begin in (b"BZh is no archive. ", b"PAR1 ", "\u00e9t\u00e9 ".encode("latin-1")):
            with open(self.path("fine.txt"), "wb") as file:
                file.write(begin + text)
            self.ok(self.run_program("eval", self.bytes_run, "fine.txt"))

    def test_generate_errors(self):
        for arguments, part in (([], "MODEL"), (["nowhere"], "nowhere"), ([self.bytes_run, "--top-p", "0"], "top-p"),
                                ([self.bytes_run, "--tokens", "0"], "tokens"), ([self.bytes_run, "--temperature", "-1"], "temperature"),
                                ([self.bytes_run, "--prompt-file", "absent"], "absent"),
                                ([self.bytes_run, "--prompt", "a", "--prompt-file", "corpus.txt"], "--prompt-file")):
            self.one_line(self.run_program("generate", *arguments), 2, part)

    def test_a_model_that_is_not_finite_says_nothing(self):
        self.ok(self.run_program("convert", self.bytes_run, "exported"))
        with open(self.path("exported/model.safetensors"), "r+b") as file:
            (header,) = struct.unpack("<Q", file.read(8))
            begin, end = json.loads(file.read(header))["model.norm.weight"]["data_offsets"]
            for value in (math.nan, math.inf, 3e38):
                file.seek(8 + header + begin)
                file.write(struct.pack("<f", value) * ((end - begin) // 4))
                file.flush()
                result = self.run_program("convert", "exported", f"broken-{value}")
                if not math.isfinite(value):
                    self.one_line(result, 2, "exported", "head.norm.weight", "[0, 0]", f"is {value}")
                    continue
                self.ok(result)  # finite, and still too large to compute with
                for sampling in (["--temperature", "0"], ["--top-k", "5"], ["--json"]):
                    result = self.run_program("generate", f"broken-{value}", "--prompt", "And God said", *sampling)
                    self.one_line(result, 1, "are not finite", "a weight of the model", "older checkpoint")
                    self.assertEqual(result.stdout, "")
                self.one_line(self.run_program("eval", f"broken-{value}", "corpus.txt"), 1, "the loss is not a finite number")

    # ---- tokenize ----

    def test_special_tokens_in_text(self):
        with open(self.path("special.txt"), "w", encoding="utf-8") as text:
            text.write("one<|endoftext|>two\n")
        own = os.path.join(self.bpe_run, "tokenizer.json")

        def tokens(name, *arguments):
            return self.json_of("tokenize", "special.txt", "--output", name, "--tokenizer", own, *arguments)["tokens"]

        plain, parsed = tokens("plain"), tokens("parsed", "--special", "parse")
        self.assertEqual(plain, tokens("again", "--special", "plain"))
        self.assertGreater(plain, parsed + 4)
        self.one_line(self.run_program("tokenize", "special.txt", "--output", "none", "--tokenizer", own, "--special", "refuse"), 2,
                      "<|endoftext|>")
        small = ["data.path=special.txt", f"data.tokenizer={own}", *MODEL, "model.vocab=400", "data.seq=4", "train.steps=1", "run.save_every=0"]
        self.one_line(self.run_program("train", *small, "data.special=refuse"), 2, "<|endoftext|>")
        # tokens in the cache are those of the same setting
        self.ok(self.run_program("train", *small, "data.cache=cache"))
        self.ok(self.run_program("train", *small, "data.cache=cache", "data.special=parse"))
        self.assertEqual(sum(os.path.isdir(self.path(f"cache/{name}")) for name in os.listdir(self.path("cache"))), 2)
        # the prompt of generate
        for policy, wanted in (("plain", plain - 2), ("parse", parsed - 2)):
            shown = self.json_of("generate", self.bpe_run, "--prompt", "one<|endoftext|>two", "--tokens", "1", "--special", policy)
            self.assertEqual(shown["prompt_tokens"], wanted)
        self.one_line(self.run_program("generate", self.bpe_run, "--prompt", "<|endoftext|>", "--special", "refuse"), 2, "<|endoftext|>")

    def test_encoding_of_a_tiktoken_file(self):
        with open(self.path("ranks.tiktoken"), "w", encoding="ascii") as ranks:
            for byte in range(256):
                ranks.write(base64.b64encode(bytes([byte])).decode() + f" {byte}\n")
        with open(self.path("few.txt"), "w", encoding="utf-8") as text:
            text.write("abc")
        arguments = ["tokenize", "few.txt", "--tokenizer", "ranks.tiktoken"]
        self.one_line(self.run_program(*arguments, "--output", "unnamed"), 2, "ranks.tiktoken", "set the encoding")
        self.assertEqual(self.json_of(*arguments, "--output", "named", "--encoding", "llama3")["vocab"], 512)
        self.assertEqual(self.json_of(*arguments, "--output", "other", "--encoding", "kimi")["vocab"], 512)
        with open(self.path("other/tokenizer.json"), encoding="utf-8") as saved:
            self.assertIn("<|reserved_token_300|>", saved.read())
        self.one_line(self.run_program(*arguments, "--output", "wrong", "--encoding", "gpt5"), 2, "gpt5")
        self.one_line(self.run_program("tokenize", "few.txt", "--output", "wrong", "--train", "300", "--encoding", "gpt2"), 2, "--encoding")

    def test_shards_train_like_the_text(self):
        made = self.json_of("tokenize", self.text, "--output", "shards", "--train", "300", "--save", "own.json", "--shard-tokens", "5k")
        self.assertGreater(made["shards"], 2)
        self.assertEqual(made["vocab"], 300)
        self.assertEqual(made["documents"], 1)
        # The tokenizer that `train` made for its own run is the same.
        with open(self.path("own.json"), encoding="utf-8") as ours, \
                open(os.path.join(self.bpe_run, "tokenizer.json"), encoding="utf-8") as theirs:
            self.assertEqual(ours.read(), theirs.read())
        for name, path in (("from-text", self.text), ("from-shards", "shards")):
            self.ok(self.run_program("train", f"data.path={path}", "data.validation=0.1", *MODEL, "model.vocab=300", "train.steps=5",
                                     "data.tokenizer=own.json", f"run.dir={name}", "parallel.ranks=2"))
        self.assertEqual(self.numbers("from-text"), self.numbers("from-shards"))
        self.assertEqual(self.json_of("eval", "from-text")["loss"], self.json_of("eval", "from-shards")["loss"])
        self.assertEqual(self.json_of("generate", "from-shards", "--tokens", "20")["text"],
                         self.json_of("generate", "from-text", "--tokens", "20")["text"])

    def test_tokenize_bytes_and_documents(self):
        self.write("a.txt", "one\n---\ntwo\n")
        self.write("b.jsonl", '{"body": "three"}\n{"body": "four"}\n')
        made = self.json_of("tokenize", "a.txt", "b.jsonl", "--output", "out", "--tokenizer", "bytes", "--separator", "---",
                            "--field", "body")
        self.assertEqual(made["documents"], 4)
        self.assertEqual(made["tokens"], len("one\n" + "two\n" + "three" + "four"))
        self.assertIn("tokens", self.ok(self.run_program("tokenize", "a.txt", "--output", "again", "--tokenizer", "bytes")).stdout)

    def test_tokenize_errors(self):
        self.write("empty.txt", "")
        os.mkdir(self.path("full"))
        self.write("full/file", "x")
        fine = ["corpus.txt", "--output", "out"]
        for arguments, part in ((["--output", "out", "--train", "300"], "give at least one"), (["corpus.txt", "--train", "300"], "--output"),
                                (fine, "--train"), ([*fine, "--train", "100"], "256"), ([*fine, "--tokenizer", "absent.json"], "absent.json"),
                                ([*fine, "--tokenizer", "bytes", "--train", "300"], "two"), ([*fine, "--tokenizer", "corpus.txt"], "corpus.txt"),
                                (["absent.txt", "--output", "out", "--tokenizer", "bytes"], "absent.txt"),
                                (["empty.txt", "--output", "out", "--tokenizer", "bytes"], "empty.txt"),
                                (["corpus.txt", "--output", "full", "--tokenizer", "bytes"], "full"),
                                ([*fine, "--tokenizer", "bytes", "--save", "x.json"], "--save")):
            self.one_line(self.run_program("tokenize", *arguments), 2, part)
            self.assertFalse(os.path.exists(self.path("out")))

    def test_missing_shards(self):
        shards = self.json_of("tokenize", "corpus.txt", "--output", "shards", "--tokenizer", "bytes", "--shard-tokens", "1000")["shards"]
        self.assertGreater(shards, 2)
        train = ["train", "data.path=shards", *program.SMALL, "train.steps=1"]
        self.ok(self.run_program(*train))
        last = self.path(f"shards/shard-{shards - 1:05}.qds")
        os.rename(last, self.path("away"))
        self.one_line(self.run_program(*train), 2, f"shards.json lists {shards} shards, but the folder has {shards - 1}")
        os.rename(self.path("away"), last)
        self.ok(self.run_program(*train))
        os.remove(self.path("shards/shard-00001.qds"))
        self.one_line(self.run_program(*train), 2, "shard-00002.qds exists", "shard-00001.qds is missing")
        self.ok(self.run_program("train", "data.path=shards/shard-00002.qds", *program.SMALL, "train.steps=1"))

    def test_damaged_shards(self):
        """Each way of being wrong is named with the file, by train and eval, and exits with 2."""
        self.json_of("tokenize", "corpus.txt", "--output", "shards", "--tokenizer", "bytes")
        shard = self.path("shards/shard-00000.qds")
        with open(shard, "rb") as file:
            sound = file.read()

        def changed(at, value):
            return sound[:at] + value + sound[at + len(value):]

        flipped = changed(len(sound) - 100, bytes([sound[len(sound) - 100] ^ 1]))
        for damaged, parts in ((flipped, ["checksum"]), (changed(16, b"\0\1\1"), ["header"]), (changed(0, b"X"), []),
                               (sound[:-8], []), (sound[:100], []), (sound[:-8] + bytes(8), []), (b"", ["empty"]),
                               (with_token(sound, 1000, 256), ["token 1000 is 256", "256"])):
            with open(shard, "wb") as file:
                file.write(damaged)
            for command in (["train", "data.path=shards", *program.SMALL, "train.steps=1"],
                            ["train", "data.path=shards/shard-00000.qds", *program.SMALL, "train.steps=1", "parallel.ranks=2"],
                            ["eval", self.bytes_run, "shards"]):
                self.one_line(self.run_program(*command), 2, "shard-00000.qds", *parts)
        # Without the checks at the start a wrong token is still detected before it is used.
        with open(shard, "wb") as file:
            for index in range(0, 4000, 7):
                sound = with_token(sound, index, 300)
            file.write(sound)
        self.one_line(self.run_program("train", "data.path=shards", *program.SMALL, "train.steps=1", "data.verify=false"), 2,
                      "shard-00000.qds", "is 300")


if __name__ == "__main__":
    unittest.main()
