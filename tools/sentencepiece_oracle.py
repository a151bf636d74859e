#!/usr/bin/env python3
"""Compares .model files with the Python package sentencepiece: every token of every text, and the
decoded text, must be equal.

    python3 -m venv venv && venv/bin/pip install sentencepiece
    venv/bin/python tools/sentencepiece_oracle.py --library build/release/lib/libquadrille.so

Trains small Unigram and BPE models with different settings on generated text and the documentation,
changes some in ways that published models are changed (pieces added, scores equal), and encodes
--strings hostile strings with each. --fixtures FOLDER writes small models with texts and their tokens
for the tests. The exit status is 1 if anything differs.
"""
import argparse
import ctypes
import glob
import io
import json
import os
import random
import sys

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto

from tokenizer_structs import EncodeOptions, Strbuf, Tokens

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
USER = ["<user>", "ab", "abc", "foo bar", "<|x|>", "▁q", "é", "1"]


class Ours:
    """A tokenizer of the library."""

    def __init__(self, library, data):
        self.c = library
        self.handle, self.encoder = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(library.qd_tokenizer_load_text(b"model", data, ctypes.c_size_t(len(data)), None, ctypes.byref(self.handle)))
        self.check(library.qd_encoder_create(self.handle, ctypes.byref(self.encoder)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.c.qd_error_message().decode(errors="replace"))

    def encode(self, data):
        options = EncodeOptions(size=ctypes.sizeof(EncodeOptions))
        tokens = Tokens()
        self.check(self.c.qd_encoder_encode(self.encoder, data, ctypes.c_size_t(len(data)), ctypes.byref(options), ctypes.byref(tokens)))
        ids = tokens.ids[:tokens.count]
        self.c.qd_tokens_free(ctypes.byref(tokens))
        return ids

    def decode(self, ids):
        text = Strbuf()
        array = (ctypes.c_int32 * len(ids))(*ids)
        self.check(self.c.qd_tokenizer_decode(self.handle, array, ctypes.c_size_t(len(ids)), ctypes.c_bool(True), ctypes.byref(text)))
        data = ctypes.string_at(text.data, text.length) if text.length else b""
        self.c.qd_strbuf_free(ctypes.byref(text))
        return data


def corpus():
    lines = []
    for path in sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")) + glob.glob(os.path.join(ROOT, "examples", "data", "*.txt"))):
        with open(path, encoding="utf-8") as file:
            lines += [line.strip() for line in file if line.strip()][:1500]
    rng = random.Random(1)
    words = ["naïve", "Straße", "日本語", "テスト", "привет", "мир", "ﬁne", "①②③", "Ⅷ", "café", "e\u0301te\u0301", "ﷺ", "foo bar", "abcab", "1234"]
    lines += [" ".join(rng.choice(words) for _ in range(8)) for _ in range(800)]
    return lines


def train(lines, **settings):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, minloglevel=2, hard_vocab_limit=False,
                                             num_threads=1, **settings)
    return out.getvalue()


def changed(data, change):
    model = proto.ModelProto()
    model.ParseFromString(data)
    change(model)
    return model.SerializeToString()


def equal_scores(model):
    for piece in model.pieces:
        if piece.type == 1:
            piece.score = round(piece.score / 8) * 8


def drop_characters(model):
    """Tokens whose characters are not tokens."""
    single = [i for i, p in enumerate(model.pieces) if p.type == 1 and len(p.piece) == 1]
    for index in reversed(single[::3]):
        del model.pieces[index]


def odd_scores(model):
    rng = random.Random(5)
    for piece in model.pieces:
        if piece.type == 1:
            piece.score = rng.choice([0.0, -0.1, 3.5, -20.25, rng.uniform(-9, 9)])


def unused(model):
    for piece in model.pieces[300:330]:
        piece.type = 5


def models(lines, size=1200):
    base = {"vocab_size": size}
    unigram = train(lines, model_type="unigram", **base)
    bpe = train(lines, model_type="bpe", **base)
    return {
        "unigram": unigram,
        "unigram-bytes": train(lines, model_type="unigram", byte_fallback=True, character_coverage=0.99, **base),
        "unigram-nfkc-cf": train(lines, model_type="unigram", normalization_rule_name="nmt_nfkc_cf", **base),
        "unigram-identity": train(lines, model_type="unigram", normalization_rule_name="identity", remove_extra_whitespaces=False, **base),
        "unigram-user": train(lines, model_type="unigram", user_defined_symbols=USER, control_symbols=["<ctl>"], **base),
        "unigram-suffix": train(lines, model_type="unigram", treat_whitespace_as_suffix=True, **base),
        "unigram-no-prefix": train(lines, model_type="unigram", add_dummy_prefix=False, split_digits=True, **base),
        "unigram-equal": changed(unigram, equal_scores),
        "unigram-odd": changed(unigram, odd_scores),
        "unigram-unused": changed(unigram, unused),
        "bpe": bpe,
        "bpe-bytes": train(lines, model_type="bpe", byte_fallback=True, character_coverage=0.99, split_digits=True,
                           normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, **base),
        "bpe-user": train(lines, model_type="bpe", user_defined_symbols=USER, control_symbols=["<ctl>"], **base),
        "bpe-user-bytes": train(lines, model_type="bpe", user_defined_symbols=USER, byte_fallback=True, add_dummy_prefix=False, **base),
        "bpe-suffix": train(lines, model_type="bpe", treat_whitespace_as_suffix=True, **base),
        "bpe-equal": changed(bpe, equal_scores),
        "bpe-odd": changed(bpe, odd_scores),
        "bpe-characters": changed(bpe, drop_characters),
        "bpe-words": train(lines, model_type="bpe", split_by_whitespace=False, split_by_unicode_script=False, **base),
    }


def hostile(rng, lines):
    """A string that mixes words, spaces of all kinds, symbols, marks and rare characters; sometimes invalid."""
    parts = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(10)
        if kind < 4:
            line = rng.choice(lines)
            start = rng.randrange(len(line))
            parts.append(line[start:start + rng.randrange(1, 30)])
        elif kind == 4:
            parts.append(rng.choice([" ", "  ", "   ", "\t", "\n", "\u3000", "\u00a0", "▁", "▁▁", "\u200b", "\r\n", ""]))
        elif kind == 5:
            parts.append(rng.choice(USER + ["<s>", "</s>", "<unk>", "<ctl>", "<0x41>", "<0x", "abcabc", "aab", "foo  bar"]))
        elif kind == 6:
            parts.append("".join(chr(rng.randrange(0x20, 0x250)) for _ in range(rng.randrange(1, 6))))
        elif kind == 7:
            parts.append("".join(chr(rng.choice([0x300, 0x301, 0xfb01, 0x1f600, 0x1f468, 0x200d, 0xac00, 0x1100, 0x1161, 0xfdfa, 0x2460, 0xff21,
                                                 0xffff, 0xe000, 0x10ffff, 0, 1])) for _ in range(rng.randrange(1, 5))))
        elif kind == 8:
            parts.append(chr(rng.choice([rng.randrange(0x3040, 0x9fff), rng.randrange(0x10000, 0x2ffff), rng.randrange(0x400, 0x500)])))
        else:
            parts.append(rng.choice("aeiouéßñ日本1.,!?") * rng.randrange(1, 9))
    data = "".join(parts).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + bytes(rng.randrange(128, 256) for _ in range(rng.randrange(1, 4))) + data[at:]
    return data


def compare(name, data, library, texts):
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=data), Ours(library, data)
    wrong = 0
    for text in texts:
        expected = theirs.encode(text)
        got = ours.encode(text)
        decoded = theirs.decode(expected).encode("utf-8", "surrogatepass")
        if got != expected or ours.decode(expected) != decoded:
            wrong += 1
            if wrong <= 3:
                at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
                print(f"{name}: {text[:200]!r}: token {at}\n  expected {expected[at:at + 9]} {decoded[:99]!r}\n"
                      f"  got      {got[at:at + 9]} {ours.decode(expected)[:99]!r}")
    print(f"{name}: {len(texts)} strings, {wrong} differ", flush=True)
    return wrong


def write_fixtures(folder, made, lines):
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(9)
    for name, data in made.items():
        theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
        with open(os.path.join(folder, name + ".model"), "wb") as file:
            file.write(data)
        cases = []
        for _ in range(150):
            text = hostile(rng, lines)
            ids = theirs.encode(text)
            cases.append({"text": text.hex(), "ids": ids, "decoded": theirs.decode(ids).encode("utf-8", "surrogatepass").hex()})
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
            json.dump(cases, file, separators=(",", ":"))
            file.write("\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library")
    parser.add_argument("--strings", type=int, default=20000)
    parser.add_argument("--fixtures")
    given = parser.parse_args()
    lines = corpus()
    if given.fixtures:
        small = models(lines, 420)
        chosen = ["bpe-bytes", "bpe-user", "unigram-identity"]
        write_fixtures(given.fixtures, {name: small[name] for name in chosen}, lines)
        return 0
    library = ctypes.CDLL(given.library)
    library.qd_error_message.restype = ctypes.c_char_p
    rng = random.Random(2)
    texts = [hostile(rng, lines) for _ in range(given.strings)] + ["\n".join(lines).encode(), b"", b" ", b"   \n", " ".join(lines).encode()]
    return 1 if sum(compare(name, data, library, texts) for name, data in models(lines).items()) else 0


if __name__ == "__main__":
    sys.exit(main())
