#!/usr/bin/env python3
"""Compares the tokenizer with the Python packages tiktoken and tokenizers: every token of every text
must be equal.

    python3 -m venv venv && venv/bin/pip install tiktoken tokenizers
    venv/bin/python tools/tokenizer_oracle.py --library build/release/lib/libquadrille.so --fetch

Checks character classes, encoding on a corpus of at least --megabytes (text and code of this machine,
generated Unicode, invalid UTF-8, random bytes), trained merges, files both ways, and measures speed.
The vocabularies of gpt2, cl100k and o200k come from packages of the Python index (--fetch downloads
them into --vocabularies) and are never stored in the repository. --only selects some of: classes
encode train files speed. The exit status is 1 if anything differs.
"""
import argparse
import base64
import ctypes
import glob
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile

import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tokenizer_structs import EncodeOptions, Strbuf, Tokens

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
KEEP, REPLACE, TIKTOKEN = 0, 1, 2
TEXT, ALLOW, REFUSE = 0, 1, 2


PROGRESS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)


class Training(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("paths", ctypes.POINTER(ctypes.c_char_p)), ("path_count", ctypes.c_size_t), ("vocab", ctypes.c_int32),
                ("min_frequency", ctypes.c_int64), ("max_token", ctypes.c_int32), ("pattern", ctypes.c_char_p),
                ("all_bytes", ctypes.c_bool), ("whole_files", ctypes.c_bool), ("field", ctypes.c_char_p),
                ("separator", ctypes.c_char_p), ("broken", ctypes.c_int),
                ("special", ctypes.POINTER(ctypes.c_char_p)), ("special_count", ctypes.c_size_t),
                ("threads", ctypes.c_int), ("progress", PROGRESS), ("progress_context", ctypes.c_void_p)]


class Library:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.qd_error_message.restype = ctypes.c_char_p

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.c.qd_error_message().decode(errors="replace"))


class Ours:
    """A tokenizer of the library with one encoder."""

    def __init__(self, library, handle):
        self.library, self.handle = library, handle
        self.encoder = ctypes.c_void_p()
        library.check(library.c.qd_encoder_create(handle, ctypes.byref(self.encoder)))

    @classmethod
    def load(cls, library, path, encoding=None):
        handle = ctypes.c_void_p()
        library.check(library.c.qd_tokenizer_load(path.encode(), encoding and encoding.encode(), ctypes.byref(handle)))
        return cls(library, handle)

    @classmethod
    def train(cls, library, paths, **settings):
        training = Training()
        library.c.qd_tokenizer_training_init(ctypes.byref(training), ctypes.c_size_t(ctypes.sizeof(training)))
        strings = lambda items: (ctypes.c_char_p * len(items))(*[item.encode() for item in items])
        training.paths, training.path_count = strings(paths), len(paths)
        special = settings.pop("special", [])
        training.special, training.special_count = strings(special), len(special)
        for name, value in settings.items():
            setattr(training, name, value.encode() if isinstance(value, str) else value)
        handle = ctypes.c_void_p()
        library.check(library.c.qd_tokenizer_train(ctypes.byref(training), ctypes.byref(handle)))
        return cls(library, handle)

    def another(self):
        return Ours(self.library, self.handle)

    def encode_raw(self, data, special=TEXT, broken=KEEP, frame=False, allowed=()):
        names = (ctypes.c_char_p * len(allowed))(*[name.encode() for name in allowed])
        options = EncodeOptions(ctypes.sizeof(EncodeOptions), special, names, len(allowed), broken, frame)
        tokens = Tokens()
        self.library.check(self.library.c.qd_encoder_encode(self.encoder, data, ctypes.c_size_t(len(data)),
                                                            ctypes.byref(options), ctypes.byref(tokens)))
        return tokens

    def encode(self, data, **options):
        tokens = self.encode_raw(data, **options)
        ids = tokens.ids[:tokens.count]
        self.library.c.qd_tokens_free(ctypes.byref(tokens))
        return ids

    def decode(self, ids):
        array, text = (ctypes.c_int32 * len(ids))(*ids), Strbuf()
        self.library.check(self.library.c.qd_tokenizer_decode(self.handle, array, ctypes.c_size_t(len(ids)), False,
                                                              ctypes.byref(text)))
        data = text.data[:text.length] if text.length else b""
        self.library.c.qd_strbuf_free(ctypes.byref(text))
        return data

    def save(self, path):
        self.library.check(self.library.c.qd_tokenizer_save(self.handle, path.encode()))


FAILURES = []


def report(what, differences, detail=""):
    print(f"{'ok  ' if not differences else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
    if differences:
        FAILURES.append(what)
        for line in differences[:5]:
            print("     " + line)


# The corpus.

def local_documents(random_source, size):
    """Documents of text and code found on this machine, about `size` bytes."""
    roots = ["/usr/share/doc", "/usr/include", "/usr/share/perl", "/usr/lib/python3", "/usr/share/common-licenses",
             os.path.dirname(os.__file__), "/usr/share/i18n/locales", "/usr/share/zoneinfo"]
    paths = []
    for root in roots:
        for folder, _, names in os.walk(root):
            paths += [os.path.join(folder, name) for name in names
                      if name.endswith((".h", ".py", ".pl", ".pm", ".txt", ".md", ".html", ".c", "copyright", ".tab", ".json"))
                      or root.endswith(("locales", "licenses"))]
    paths.sort()
    random_source.shuffle(paths)
    total = 0
    for path in paths:
        try:
            data = open(path, "rb").read(1 << 18)
        except OSError:
            continue
        if b"\0" in data[:4096]:
            continue
        yield data
        total += len(data)
        if total >= size:
            return


TRICKY = ["", " ", "\n", "  ", " \n ", "\r\n\r\n", "a  \n  ", "a  \n  b", "\t\t x", "don't DON'T we'Ve 'ſ 'S 're'LL", "' s", "''s",
          "Ⅷ½²३४५६७", "1234567 12 3", " 1 22 333", "\u180e\u180ea", "\u00a0a\u3000\u2028b", "é e\u0301 \u0301\u0301a \u0301A",
          "中文 字A b中Ab", "ǅǆǄ ʰaB", "A\u0301B\u0301c!", "//\n//\r\n/x", "!!a ??\n\n", "🏳️‍🌈👩‍👩‍👧‍👦👍🏽", "x" * 3000, "ab" * 2000, " " * 3000,
          "\n" * 700 + "x", "a" + "\u0300" * 500, "<|endoftext|>", "a<|endoftext|>b <|fim_prefix|>", "\ufffd\ufffd", "\U0010ffff\U000e0100",
          "\x00\x01\x7f\x80", "'", "it's'", "I'm'm", "\u2019s", "\U0001e900\U0001e922", "\U00010d4a\U00010d70\u1c89\ua7cb\u08c8",
          "   leading", "trailing   ", " \t\n\x0b\x0c\r\x85 mix", "a\u200bb\u200dc\ufeffd", "№①⑩", "٣٤٥ ۱۲۳", "ſ 'ſ S"]


def generated_documents(random_source, size):
    """Unicode of all kinds, emoji, CJK, invalid UTF-8 and random bytes: about `size` bytes."""
    for text in TRICKY:
        yield text.encode("utf-8", "surrogatepass")
    assigned = [chr(c) for c in range(0x20, 0x20000) if not 0xD800 <= c < 0xE000]
    emoji = [chr(c) for c in list(range(0x1F300, 0x1FAFF)) + list(range(0x2600, 0x27BF))] + ["\u200d", "\ufe0f", "\U0001f3fd"]
    cjk = [chr(c) for c in list(range(0x4E00, 0x9FFF)) + list(range(0x3040, 0x30FF)) + list(range(0xAC00, 0xD7A3))]
    spaces = [" ", " ", "\n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000", "\u0085", "\u1680", "\u180e", "\u200b", "  ", "\n\n"]
    letters = "etaoinshrdluETAOINé'.,;/!?0123456789-_#@<|>"
    kinds = [lambda: random_source.choice(assigned), lambda: random_source.choice(emoji), lambda: random_source.choice(cjk),
             lambda: random_source.choice(spaces), lambda: random_source.choice(letters),
             lambda: chr(random_source.choice([*range(0xD800), *range(0xE000, 0x110000)][::97]))]
    total = 0
    while total < size:
        count = random_source.choice([3, 40, 1000, 12000])
        shape = random_source.randrange(8)
        if shape == 0:
            data = random_source.randbytes(count)
        else:
            weights = [random_source.random() ** 2 for _ in kinds[:5]] + [0.02]
            data = "".join(kind() for kind in random_source.choices(kinds[:5], weights[:5], k=count)).encode()
            if shape <= 3:  # invalid: bytes changed, removed and duplicated
                data = bytearray(data)
                for _ in range(1 + len(data) // random_source.choice([20, 500])):
                    place = random_source.randrange(len(data))
                    action = random_source.randrange(3)
                    if action == 0:
                        data[place] = random_source.randrange(256)
                    elif action == 1 and len(data) > 1:
                        del data[place]
                    else:
                        data[place:place] = random_source.choice([b"\xc3", b"\xf0\x9f", b"\xed\xa0\x80", b"\xff", b"\x80\x80", b"\xf4\x90"])
                data = bytes(data)
        yield data
        total += len(data)


def corpus(megabytes, seed):
    source = random.Random(seed)
    documents = list(local_documents(source, megabytes * 700_000)) + list(generated_documents(source, megabytes * 450_000))
    source.shuffle(documents)
    return documents


# Vocabularies.

def fetch(folder):
    """gpt2 from the package openai-whisper, the others from litellm: only their data files are extracted."""
    os.makedirs(folder, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "-d", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "wheel", "setuptools"], check=True)
    for package in ("openai-whisper", "litellm"):
        if not glob.glob(os.path.join(folder, package.replace("-", "_") + "-*")):
            subprocess.run(pip + [package], check=True)
    for path in glob.glob(os.path.join(folder, "openai_whisper-*.tar.gz")):
        with tarfile.open(path) as archive:
            for name in archive.getnames():
                if name.endswith("/gpt2.tiktoken"):
                    with open(os.path.join(folder, "gpt2.tiktoken"), "wb") as out:
                        out.write(archive.extractfile(name).read())
    for path in glob.glob(os.path.join(folder, "litellm-*.whl")):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                data = archive.read(name) if "/tokenizers/" in name else b""
                known = {100256: "cl100k_base", 199998: "o200k_base"}.get(data.count(b"\n")) if data[:4] == b"IQ==" else None
                if known:
                    with open(os.path.join(folder, known + ".tiktoken"), "wb") as out:
                        out.write(data)


def tiktoken_of(name, path):
    from tiktoken_ext import openai_public
    specials = {"gpt2": {"<|endoftext|>": 50256},
                "cl100k_base": {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259,
                                "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276},
                "o200k_base": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}}[name]
    ranks = {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in open(path, "rb") if line.strip())}
    patterns = {"gpt2": openai_public.r50k_pat_str, "o200k_base": O200K,
                "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                               r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"}
    return tiktoken.Encoding(name, pat_str=patterns[name], mergeable_ranks=ranks, special_tokens=specials)


# The comparisons.

def check_classes(library):
    characters = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    table = open(os.path.join(os.path.dirname(__file__), "../src/data/tokenizer/split/unicode_table.c")).read()
    def array(name):
        body = table.split(f" {name}[")[1].split("{")[1].split("}")[0]
        return [int(word, 0) for word in body.replace(",", " ").split()]
    bits, index, kinds = array("qd_unicode_bits"), array("qd_unicode_index"), array("qd_unicode_kinds")
    def class_of(c):
        return bits[kinds[index[c >> 7] * 8 + (c >> 4 & 7)] >> 4 * (c & 15) & 15] if c >> 7 < len(index) else 0
    ours = [class_of(c) for c in characters]
    text = "".join(map(chr, characters))
    for bit, pattern in enumerate([r"\p{L}", r"\p{N}", r"\s", r"[\r\n]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"]):
        mine = {c for c, value in zip(characters, ours) if value >> bit & 1}
        one_byte = {bytes([i]): i for i in range(256)}
        matcher = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=one_byte, special_tokens={})
        theirs = set(map(ord, bytes(matcher.encode_ordinary(text)).decode()))
        split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
        others = set()
        for at in range(0, len(text), 50000):
            for piece, _ in split.pre_tokenize_str(text[at:at + 50000]):
                others.update(map(ord, piece))
        report(f"class {pattern}", [hex(c) for c in sorted((mine ^ theirs) | (mine ^ others))], f"{len(mine)} characters")


def compare(what, documents, ours, theirs):
    differences, tokens = [], 0
    for number, data in enumerate(documents):
        a, b = ours(data), theirs(data)
        tokens += len(b)
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            differences.append(f"document {number} ({len(data)} bytes) from token {at}: {a[at:at + 6]} instead of {b[at:at + 6]}"
                               + (f": {data!r}" if len(data) < 200 else ""))
    size = sum(map(len, documents))
    report(what, differences, f"{size / 1e6:.1f} MB, {tokens} tokens, {len(differences)} of {len(documents)} texts differ")


def check_round_trip(what, documents, ours):
    report(f"{what}: decode(encode(bytes)) == bytes", [f"{data[:80]!r}" for data in documents if ours.decode(ours.encode(data)) != data])


def check_tiktoken(library, documents, folder):
    for name in ("gpt2", "cl100k_base", "o200k_base"):
        path = os.path.join(folder, name + ".tiktoken")
        if not os.path.exists(path):
            report(f"tiktoken {name}", ["no vocabulary: run with --fetch"])
            continue
        reference, ours = tiktoken_of(name, path), Ours.load(library, path)
        decoded = lambda data: data.decode("utf-8", "replace")
        compare(f"tiktoken {name}: encode_ordinary", documents, lambda d: ours.encode(d, broken=REPLACE),
                lambda d: reference.encode_ordinary(decoded(d)))
        some = documents[::4] + [text.encode() for text in TRICKY]
        compare(f"tiktoken {name}: special tokens allowed", some, lambda d: ours.encode(d, broken=REPLACE, special=ALLOW),
                lambda d: reference.encode(decoded(d), allowed_special="all"))
        compare(f"tiktoken {name}: one special token allowed", some,
                lambda d: ours.encode(d, broken=REPLACE, allowed=["<|endoftext|>"]),
                lambda d: reference.encode(decoded(d), allowed_special={"<|endoftext|>"}, disallowed_special=()))
        compare(f"tiktoken {name}: raw bytes (_encode_bytes)", [d for d in documents if len(d) < 40000],
                lambda d: ours.encode(d, broken=TIKTOKEN), reference._encode_bytes)
        check_round_trip(f"tiktoken {name}", documents, ours)


def hugging_face(pattern, vocab, texts, specials, alphabet=True, min_frequency=0, max_token=None, ignore_merges=False, files=False,
                 prefix=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    tokenizer.pre_tokenizer = byte_level if pattern is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, min_frequency=min_frequency, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
                                  max_token_length=max_token)
    if files:
        tokenizer.train(texts, trainer)
    else:
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_tokenizers(library, documents, work):
    texts = [d.decode("utf-8", "replace") for d in documents[::3]]
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    for name, pattern in (("llama3", LLAMA3), ("gpt2", None), ("o200k", O200K), ("qwen2", QWEN2)):
        reference = hugging_face(pattern, 6000, texts[:400], [begin, end, "<|pad|>"], ignore_merges=name == "llama3")
        reference.add_tokens([AddedToken("quux", normalized=True), AddedToken("  wide ", lstrip=True, rstrip=True, normalized=False),
                              AddedToken("the", single_word=True), AddedToken("<é中>", special=True)])
        if name == "llama3":
            reference.post_processor = processors.Sequence([
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{begin} $A {end}", pair=f"{begin} $A {begin} $B",
                                              special_tokens=[(begin, 0), (end, 1)])])
        path = os.path.join(work, name + ".json")
        reference.save(path)
        ours = Ours.load(library, path)
        extra = [t.encode() for t in (" the then the, bathe", "x\n  wide \n y", "aquuxb <|pad|>quux", "<é中> é", f"{begin}a{end}", "the")]
        sample = extra + (documents if name == "llama3" else documents[::4])
        compare(f"tokenizers {name}", sample, lambda d: ours.encode(d, broken=REPLACE, special=ALLOW, frame=True),
                lambda d: reference.encode(d.decode("utf-8", "replace")).ids)
        # `tokenizers` reads what we write and encodes the same.
        again = os.path.join(work, name + "-again.json")
        ours.save(again)
        rewritten = Tokenizer.from_file(again)
        compare(f"tokenizers reads our {name}", sample[::5], lambda d: rewritten.encode(d.decode("utf-8", "replace")).ids,
                lambda d: reference.encode(d.decode("utf-8", "replace")).ids)
        reference.encode_special_tokens = True
        compare(f"tokenizers {name}, special tokens as text", sample[::5], lambda d: ours.encode(d, broken=REPLACE),
                lambda d: reference.encode(d.decode("utf-8", "replace"), add_special_tokens=False).ids)
        if name != "llama3":
            # the added token "  wide " includes the spaces around it
            check_round_trip(f"tokenizers {name}", [d for d in documents[::4] if b"  wide " not in d], ours)
    # Incomplete alphabet, so bytes are lost or unknown; a space prefix; custom patterns.
    small = hugging_face(None, 800, ["only a few letters here"] * 3, [], alphabet=False, prefix=True)
    small.save(os.path.join(work, "small.json"))
    ours_small = Ours.load(library, os.path.join(work, "small.json"))
    compare("tokenizers with lost bytes and a space before", documents[::8], lambda d: ours_small.encode(d, broken=REPLACE),
            lambda d: small.encode(d.decode("utf-8", "replace")).ids)
    custom = Tokenizer(models.BPE())
    custom.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[0-9]{1,2}"), "isolated"), pre_tokenizers.Split(Regex(r"[a-zA-Z]+|\s"), "removed", invert=True),
        pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    custom.decoder = decoders.ByteLevel()
    custom.train_from_iterator(texts[:100], trainers.BpeTrainer(vocab_size=1000, show_progress=False))
    custom.save(os.path.join(work, "custom.json"))
    ours_custom = Ours.load(library, os.path.join(work, "custom.json"))
    compare("tokenizers with several Splits", documents[::8], lambda d: ours_custom.encode(d, broken=REPLACE),
            lambda d: custom.encode(d.decode("utf-8", "replace")).ids)


def model_of(tokenizer):
    model = json.loads(tokenizer if isinstance(tokenizer, str) else tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def differences_of(mine, theirs):
    """Differences of two (vocabulary, merges)."""
    differences = []
    if mine[1] != theirs[1]:
        at = next((i for i, (x, y) in enumerate(zip(mine[1], theirs[1])) if x != y), min(len(mine[1]), len(theirs[1])))
        differences.append(f"merge {at}: {mine[1][at:at + 3]} instead of {theirs[1][at:at + 3]}")
    if mine[0] != theirs[0]:
        differences.append(f"vocabularies of {len(mine[0])} and {len(theirs[0])} differ")
    return differences


def cjk_text(random_source, size):
    """Chinese, Japanese and Korean characters in words with Zipf-like frequencies, so that there is something to merge."""
    ranges = [range(0x4E00, 0x5500), range(0x3041, 0x3094), range(0x30A1, 0x30F7), range(0xAC00, 0xAD00)]
    words = ["".join(chr(random_source.choice(kind)) for _ in range(random_source.choice([1, 2, 2, 3, 4])))
             for kind in random_source.choices(ranges, [8, 3, 1, 2], k=20000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    ends = ["", "", "", "，", "。", "、", " ", "\n", "！"]
    parts, total = [], 0
    while total < size:
        part = "".join(word + random_source.choice(ends) for word in random_source.choices(words, weights, k=1000))
        parts.append(part)
        total += len(part.encode())
    return "".join(parts)


def large_text(seed):
    """More than 10 MB: a book, code and text of this machine, CJK."""
    source = random.Random(seed)
    with open(os.path.join(os.path.dirname(__file__), "../examples/data/king-james.txt"), encoding="utf-8", newline="") as book:
        parts = [book.read()]
    parts += [d.decode("utf-8", "replace") for d in local_documents(source, 7_000_000)]
    return "\n".join(parts + [cjk_text(source, 4_000_000)])


def check_large_training(library, work):
    path, text = os.path.join(work, "large.txt"), large_text(3)
    with open(path, "w", encoding="utf-8", newline="") as out:
        out.write(text)
    saved = os.path.join(work, "large.json")
    for name, pattern, vocab, whole in (("gpt2", None, 8000, False), ("gpt2", None, 32000, True), ("llama3", LLAMA3, 8000, True),
                                        ("llama3", LLAMA3, 32000, False)):
        reference = hugging_face(pattern, vocab, [text] if whole else [path], ["<|endoftext|>"], min_frequency=2, files=not whole)
        ours = Ours.train(library, [path], pattern=name, vocab=vocab, special=["<|endoftext|>"], min_frequency=2, whole_files=whole)
        ours.save(saved)
        theirs = model_of(reference)
        report(f"training on a book, code and CJK, {name} {vocab} {'whole' if whole else 'lines'}",
               differences_of(model_of(open(saved, encoding="utf-8").read()), theirs),
               f"{len(text.encode()) / 1e6:.1f} MB, {len(theirs[1])} merges")


def check_training(library, documents, work):
    check_large_training(library, work)
    texts = [d.decode("utf-8", "replace") for d in documents]
    corpora = {"code and text": texts[:300], "unicode": [t for t in texts if len(t.encode()) > 1.3 * len(t)][:200] or texts[:50],
               "repetitive": ["ab" * 300 + " aaa aaaa aaaaa " * 50 + "\n\n x  y\n" * 20] * 3 + texts[300:310]}
    cases = [("gpt2", None, dict(vocab=1000)), ("gpt2", None, dict(vocab=8000, min_frequency=2)),
             ("gpt2", None, dict(vocab=3000, alphabet=False, specials=["<|endoftext|>", "<pad>", "a", "ab"])),
             ("llama3", LLAMA3, dict(vocab=5000)), ("cl100k", None, None), ("o200k", O200K, dict(vocab=4000, min_frequency=3)),
             ("gpt2", None, dict(vocab=2000, max_token=6)), ("qwen2", QWEN2, dict(vocab=2000, specials=["<s>", "</s>"])),
             ("[a-z]+|[^a-z]", "[a-z]+|[^a-z]", dict(vocab=600))]
    for title, corpus_texts in corpora.items():
        path = os.path.join(work, "train.txt")
        joined = "\n".join(corpus_texts)
        with open(path, "w", encoding="utf-8", newline="") as out:
            out.write(joined)
        for name, pattern, settings in cases:
            if settings is None:
                continue
            settings = dict(settings)
            specials = settings.pop("specials", [])
            vocab, alphabet = settings.pop("vocab"), settings.pop("alphabet", True)
            for files in (True, False):
                reference = hugging_face(pattern, vocab, [path] if files else [joined], specials, alphabet=alphabet, files=files,
                                         **settings)
                ours = Ours.train(library, [path], pattern=name, vocab=vocab, all_bytes=alphabet, special=specials,
                                  whole_files=not files, min_frequency=settings.get("min_frequency", 0),
                                  max_token=settings.get("max_token") or 0)
                saved = os.path.join(work, "trained.json")
                ours.save(saved)
                theirs = model_of(reference)
                report(f"training on {title}, {name} {vocab} {settings or ''} {'lines' if files else 'whole'}",
                       differences_of(model_of(open(saved, encoding="utf-8").read()), theirs),
                       f"{len(joined.encode()) / 1e6:.1f} MB, {len(theirs[1])} merges")


def check_files(library, documents, folder, work):
    """A tiktoken file saved as tokenizer.json encodes the same in `tokenizers`."""
    for name in ("gpt2", "cl100k_base", "o200k_base"):
        path = os.path.join(folder, name + ".tiktoken")
        if not os.path.exists(path):
            report(f"file {name}", ["no vocabulary: run with --fetch"])
            continue
        ours, saved = Ours.load(library, path), os.path.join(work, name + ".json")
        ours.save(saved)
        theirs, back = Tokenizer.from_file(saved), Ours.load(library, saved)
        sample = documents[::6]
        compare(f"{name} written as tokenizer.json, read by tokenizers", sample, lambda d: theirs.encode(d.decode("utf-8", "replace")).ids,
                lambda d: ours.encode(d, broken=REPLACE, special=ALLOW))
        compare(f"{name} written as tokenizer.json, read by us", sample, lambda d: back.encode(d), lambda d: ours.encode(d))


def best_seconds(function, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def check_speed(library, work, repeats, megabytes):
    source = random.Random(5)
    documents = [d for d in local_documents(source, megabytes * 1_000_000)]
    texts = [d.decode("utf-8", "replace") for d in documents]
    data = [text.encode() for text in texts]
    size = sum(map(len, data)) / 1e6
    for name, pattern in (("gpt2", None), ("llama3", LLAMA3)):
        path = os.path.join(work, "speed.json")
        training = os.path.join(work, "speed.txt")
        with open(training, "w", encoding="utf-8", newline="") as out:
            out.write("\n".join(texts))
        start = time.perf_counter()
        reference = hugging_face(pattern, 32000, [training], ["<|endoftext|>"], files=True, ignore_merges=name == "llama3")
        their_training = time.perf_counter() - start
        start = time.perf_counter()
        trained = Ours.train(library, [training], pattern=name, vocab=32000, special=["<|endoftext|>"])
        our_training = time.perf_counter() - start
        trained.save(path)
        report(f"speed train  {name}, the same merges", differences_of(model_of(open(path, encoding="utf-8").read()), model_of(reference)),
               f"{size:.0f} MB, 32000 tokens: ours {our_training:.2f} s, tokenizers {their_training:.2f} s, "
               f"ratio {their_training / our_training:.2f}")
        reference.save(path)
        ours = Ours.load(library, path)
        workers = max(1, min(os.cpu_count(), len(os.sched_getaffinity(0))))

        def run(encoder, part):
            for item in part:
                tokens = encoder.encode_raw(item)
                library.c.qd_tokens_free(ctypes.byref(tokens))

        def run_parallel():
            threads = [threading.Thread(target=run, args=(ours.another(), data[i::workers])) for i in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        rates = {}
        for threads in (1, workers):
            # its fastest call, on one core or on all; ours right after it
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
            theirs = best_seconds(lambda: reference.encode_batch_fast(texts, add_special_tokens=False), repeats)
            mine = best_seconds(run_parallel if threads > 1 else lambda: run(ours.another(), data), repeats)
            rates[f"{threads} thread{'s' if threads > 1 else ''}"] = (mine, theirs)
        for what, (mine, theirs) in rates.items():
            report(f"speed encode {name}, {what}", [] if mine <= theirs else ["slower than tokenizers"],
                   f"ours {size / mine:.1f} MB/s, tokenizers {size / theirs:.1f} MB/s, ratio {theirs / mine:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="build/release/lib/libquadrille.so")
    parser.add_argument("--vocabularies", default=os.path.join(tempfile.gettempdir(), "quadrille-vocabularies"))
    parser.add_argument("--fetch", action="store_true", help="download the vocabularies from the Python index")
    parser.add_argument("--megabytes", type=int, default=21)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["classes", "encode", "train", "files", "speed"])
    arguments = parser.parse_args()
    print(f"tiktoken {tiktoken.__version__}, tokenizers {tokenizers.__version__}")
    if arguments.fetch:
        fetch(arguments.vocabularies)
    library = Library(arguments.library)
    documents = corpus(arguments.megabytes, arguments.seed)
    print(f"corpus: {len(documents)} texts, {sum(map(len, documents)) / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as work:
        if "classes" in arguments.only:
            check_classes(library)
        if "encode" in arguments.only:
            check_tiktoken(library, documents, arguments.vocabularies)
            check_tokenizers(library, documents, work)
        if "train" in arguments.only:
            check_training(library, documents, work)
        if "files" in arguments.only:
            check_files(library, documents, arguments.vocabularies, work)
        if "speed" in arguments.only:
            check_speed(library, work, arguments.repeats, arguments.megabytes)
    print(f"{len(FAILURES)} failures")
    sys.exit(1 if FAILURES else 0)


if __name__ == "__main__":
    main()
