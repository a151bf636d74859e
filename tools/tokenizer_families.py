#!/usr/bin/env python3
"""Compares tokenizers modelled on published families with the packages tokenizers and tiktoken.

    python3 -m venv venv && venv/bin/pip install tiktoken tokenizers sentencepiece
    venv/bin/python tools/tokenizer_families.py --library build/release/lib/libquadrille.so

Trains each configuration (no vocabulary is downloaded), saves it, loads it with both sides and compares
the tokens of hostile strings (--strings of them), of documents of several MB, and decoded text. Also
compares the normalizers and pre-tokenizers on every character of Unicode, since `tokenizers` has tables of
its own versions, and prints the speed on one core. --only selects families by name. The exit status is 1
if anything differs.
"""
import argparse
import ctypes
import io
import json
import os
import random
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenizer_structs import EncodeOptions, Strbuf, Tokens

TEXT, ALLOW = 0, 1
REPLACE = 1
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+")
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Ours:
    """A tokenizer of the library, with one encoder."""

    def __init__(self, library, path, encoding=None):
        self.c, self.handle, self.encoder = library, ctypes.c_void_p(), ctypes.c_void_p()
        self.check(library.qd_tokenizer_load(path.encode(), encoding, ctypes.byref(self.handle)))
        self.check(library.qd_encoder_create(self.handle, ctypes.byref(self.encoder)))

    def __del__(self):
        self.c.qd_encoder_destroy(self.encoder)
        self.c.qd_tokenizer_destroy(self.handle)

    def check(self, status):
        if status != 0:
            self.c.qd_error_message.restype = ctypes.c_char_p
            raise ValueError(self.c.qd_error_message().decode())

    def encode_raw(self, text, special=ALLOW, frame=True):
        options = EncodeOptions(ctypes.sizeof(EncodeOptions), special, None, 0, REPLACE, frame)
        tokens = Tokens()
        self.check(self.c.qd_encoder_encode(self.encoder, text, ctypes.c_size_t(len(text)), ctypes.byref(options), ctypes.byref(tokens)))
        return tokens

    def encode(self, text, special=ALLOW, frame=True):
        tokens = self.encode_raw(text.encode(), special, frame)
        ids = tokens.ids[:tokens.count]
        self.c.qd_tokens_free(ctypes.byref(tokens))
        return ids

    def decode(self, ids, skip):
        text = Strbuf()
        array = (ctypes.c_int32 * len(ids))(*ids)
        self.check(self.c.qd_tokenizer_decode(self.handle, array, ctypes.c_size_t(len(ids)), skip, ctypes.byref(text)))
        out = ctypes.string_at(text.data, text.length) if text.length else b""
        self.c.qd_strbuf_free(ctypes.byref(text))
        return out.decode("utf-8", "replace")


def corpus():
    """About 4 MB of text: a book, sources of this repository, and generated scripts."""
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    with open(os.path.join(root, "examples/data/king-james.txt"), encoding="utf-8", newline="") as book:
        parts = [book.read()[:2_500_000]]
    for folder, _, names in sorted(os.walk(os.path.join(root, "src/data"))):
        for name in sorted(names):
            if name.endswith((".c", ".h", ".md")) and "table" not in name:
                with open(os.path.join(folder, name), encoding="utf-8", newline="") as source:
                    parts.append(source.read())
    source = random.Random(7)
    words = ["".join(chr(source.choice(kind)) for _ in range(source.choice([1, 2, 2, 3, 5])))
             for kind in source.choices([range(0x4E00, 0x4F00), range(0x3041, 0x3094), range(0xAC00, 0xAC80), range(0x430, 0x450),
                                         range(0x5D0, 0x5EB), range(0x627, 0x64B), range(0x905, 0x94E), range(0xE0, 0x17F)], k=4000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    for _ in range(60):
        parts.append(" ".join(source.choices(words, weights, k=1500)) + source.choice(["\n", ". ", "！", "\r\n\t"]))
    return parts


PIECES = ["", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\u0085", "\x00", "\x01", "\x7f",
          "a", "A", "b", "the", " the", "The", "'s", "'S", "n't", "don't", "1", "12", "123", "1234", "٣", "½", "Ⅷ", "²", "é", "e\u0301",
          "\u0301", "\u0323\u0301", "\u0301\u0323", "Å", "e\u0301x", "éx", "\u212b", "ﬁ", "ﬀ", "ß", "ẞ", "İ", "ı", "ǅ", "Σ", "ς", "한", "\u1112\u1161\u11ab",
          "\u1100", "\u1161", "\u11a8", "中", "中文", "漢字", "の", "ア", "ｱ", "Ａ", "①", "㍿", "😀", "👨\u200d👩\u200d👧", "🇩🇪", "🏽", "\ufffd",
          "▁", "▁▁", "Ġ", "Ċ", "<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<0x0A>", "[CLS]", "[MASK]", "<extra>", "<n>", "<w>",
          ".", ",", "...", "!?", "()", "[", "]", "{", "}", "#", "##", "$", "+", "=", "_", "__", "-", "–", "—", "“", "”", "¿", "।", "،",
          "/", "\\", "http://a.b/c?d=e&f", "\u0488", "\u0903", "\u0e33", "กำ", "נְ", "لله", "क्ष", "\u0600", "\u1100\u1161\u11a8\u11a8",
          "\u0344", "\u0958", "\u2126", "\u1e9b\u0323", "\U0001d400", "\U00011938", "\u32ff", "\U00010d50", "\u1c89", "\U00031350", "ab" * 20,
          "=" * 70, " " * 40, "x\u0301" * 9, "\u0301" * 40, "aaaa", "zzzzzzzz", "\u180e", "\u2028", "\u2029", "\u202f", "\u00ad"]


def hostile(count, seed):
    source = random.Random(seed)
    strings = ["", " ", "  ", "\n", "\u0301", "<s>", " <s> "] + PIECES
    while len(strings) < count:
        kind = source.random()
        if kind < 0.7:
            strings.append("".join(source.choice(PIECES) for _ in range(source.randint(1, 14))))
        elif kind < 0.85:
            strings.append("".join(chr(source.choice([source.randrange(0x20, 0x7F), source.randrange(0xA0, 0x800), source.randrange(0x800, 0xD800),
                                                      source.randrange(0xE000, 0x30000), source.randrange(0x110000 - 0x20000, 0x110000)]))
                                   for _ in range(source.randint(1, 20))))
        else:
            strings.append(source.choice(["the", "And God", "int main", "中文", "שלום"]) + source.choice(PIECES) * source.randint(1, 60))
    return strings[:count]


def byte_bpe(texts, split=None, normalizer=None, specials=("<|endoftext|>",), prefix=False, vocab=2000, ignore=False, splits=(), words=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore))
    stages = [pre_tokenizers.Split(Regex(pattern), behavior, invert) for pattern, behavior, invert in splits]
    if split:
        stages.append(pre_tokenizers.Split(Regex(split), "isolated"))
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=words or not stages))
    tokenizer.pre_tokenizer = stages[0] if len(stages) == 1 else pre_tokenizers.Sequence(stages)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, show_progress=False, special_tokens=list(specials),
                                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def sentence_bpe(texts, normalizer=None, pre=None, decoder=None, fallback=True, vocab=2000, fuse=True, missing=(), ignore=False):
    """BPE of characters as converted from SentencePiece: learned on words, used without them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, show_progress=False, limit_alphabet=400))
    model = json.loads(tokenizer.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + ([f"<0x{byte:02X}>" for byte in range(256) if byte not in missing] if fallback else [])
    runs = ["▁" * n for n in (2, 4, 8)]
    merges = [tuple(merge) for merge in model["merges"]] + [("▁", "▁"), ("▁▁", "▁▁"), ("▁" * 4, "▁" * 4)]
    vocabulary = {}
    for name in names + sorted(model["vocab"], key=model["vocab"].get) + runs:
        vocabulary.setdefault(name, len(vocabulary))
    out = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=fuse, byte_fallback=fallback, ignore_merges=ignore))
    if normalizer:
        out.normalizer = normalizer
    if pre:
        out.pre_tokenizer = pre
    out.decoder = decoder or decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                                decoders.Strip(" ", 1, 0)])
    out.add_special_tokens([AddedToken("<unk>", special=True, normalized=False), AddedToken("<s>", special=True, normalized=False),
                            AddedToken("</s>", special=True, normalized=False)])
    out.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return out


def unigram(texts, normalizer=None, pre=None, fallback=False, vocab=1500, decoder=None):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre or pre_tokenizers.Metaspace()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([line for text in texts[:12] for line in text[:200000].split("\n")],
                                  trainers.UnigramTrainer(vocab_size=vocab, show_progress=False, unk_token="<unk>",
                                                          special_tokens=["<pad>", "</s>", "<unk>"]))
    tokenizer.decoder = decoder or decoders.Metaspace()
    if fallback:
        state = json.loads(tokenizer.to_str())
        state["model"]["vocab"] += [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
        state["model"]["byte_fallback"] = True
        tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def character_map(texts):
    """SentencePiece's map nmt_nfkc_cf: field 2 of field 3 of the model file."""
    import sentencepiece

    def fields(data):
        at = 0

        def number():
            nonlocal at
            value = shift = 0
            while True:
                byte = data[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while at < len(data):
            key = number()
            length = number() if key & 7 in (0, 2) else {1: 8, 5: 4}[key & 7]
            if key & 7:
                yield key >> 3, data[at:at + length]
                at += length

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts[0][:100000].split("\n")), model_writer=model, vocab_size=300,
                                             normalization_rule_name="nmt_nfkc_cf", minloglevel=2)
    return dict(fields(dict(fields(model.getvalue()))[3]))[2]


def xlm_roberta(texts):
    normalizer = normalizers.Sequence([normalizers.Precompiled(character_map(texts)), normalizers.Replace(Regex(" {2,}"), " ")])
    return with_added(unigram(texts, normalizer, pre_tokenizers.Metaspace(prepend_scheme="always")))


def word_piece(texts, normalizer, pre=None, vocab=2000):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre or pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=vocab, show_progress=False, limit_alphabet=500,
                                                                   special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def with_added(tokenizer):
    tokenizer.add_tokens([AddedToken("<n>", normalized=True), AddedToken("<w>", single_word=True), AddedToken("the", single_word=True),
                          AddedToken("e\u0301x", normalized=True), AddedToken("zz", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True), AddedToken("<extra>", rstrip=True), AddedToken("<pad>", lstrip=True, rstrip=True)])
    return tokenizer


def gpt_neox(texts):
    return with_added(byte_bpe(texts, normalizer=normalizers.NFC()))


def clip(texts):
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CLIP), "removed", True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, show_progress=False, end_of_word_suffix="</w>",
                                                             special_tokens=["<|startoftext|>", "<|endoftext|>"],
                                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = processors.RobertaProcessing(("<|endoftext|>", 1), ("<|startoftext|>", 0))
    return tokenizer


def behaviors(texts, behavior):
    return byte_bpe(texts, splits=[(r"\p{N}", behavior, False), (r"[aeiou ]+", behavior, True), (",", behavior, False)])


def several(texts):
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKD(), normalizers.StripAccents(),
                                                 normalizers.Replace("ab", "b")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous"),
                                                       pre_tokenizers.Digits(False), pre_tokenizers.CharDelimiterSplit("x")])
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, show_progress=False, limit_alphabet=200, special_tokens=["?"]))
    return with_added(tokenizer)


FIRST = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BERT = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True)

FAMILIES = {
    "gpt2": lambda t: byte_bpe(t),
    "roberta": lambda t: with_added(byte_bpe(t, prefix=True)),
    "gpt-neox": gpt_neox,
    "llama2": lambda t: sentence_bpe(t, LEGACY),
    "llama2-new": lambda t: with_added(sentence_bpe(t, None, FIRST)),
    "llama3": lambda t: byte_bpe(t, LLAMA3, ignore=True, specials=("<|begin_of_text|>", "<|endoftext|>")),
    "mistral": lambda t: sentence_bpe(t, None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "mistral-tekken": lambda t: byte_bpe(t, O200K, specials=("<unk>", "<s>", "</s>")),
    "qwen2": lambda t: byte_bpe(t, QWEN2, normalizers.NFC()),
    "qwen3": lambda t: with_added(byte_bpe(t, QWEN2, normalizers.NFC())),
    "gemma": lambda t: sentence_bpe(t, normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"),
                                    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "gemma-without-fallback": lambda t: with_added(sentence_bpe(t, normalizers.Replace(" ", "▁"), None, fallback=False, fuse=False)),
    "partial-fallback": lambda t: sentence_bpe(t, LEGACY, missing=range(0xE0, 0xF0)),
    "deepseek-v3": lambda t: byte_bpe(t, DEEPSEEK, splits=[(r"\p{N}{1,3}", "isolated", False), ("[一-龥぀-ゟ゠-ヿ]+", "isolated", False)]),
    "kimi": lambda t: byte_bpe(t, KIMI),
    "o200k": lambda t: byte_bpe(t, O200K),
    "olmo": lambda t: byte_bpe(t, LLAMA3, normalizers.NFC()),
    "falcon": lambda t: byte_bpe(t, splits=[(r"[0-9][0-9][0-9]", "isolated", False)], words=True),
    "starcoder": lambda t: byte_bpe(t, splits=[(r"\p{Nd}", "isolated", False)], words=True),
    "t5": lambda t: unigram(t, None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])),
    "xlm-roberta": xlm_roberta,
    "xlnet-like": lambda t: unigram(t, normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])),
    "unigram-fallback": lambda t: unigram(t, normalizers.NFKC(), fallback=True),
    "bert": lambda t: word_piece(t, BERT),
    "bert-cased": lambda t: with_added(word_piece(t, normalizers.BertNormalizer(lowercase=False, strip_accents=False))),
    "word-piece-whitespace": lambda t: word_piece(t, normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]), pre_tokenizers.Whitespace()),
    "clip": clip,
    "bloom-like": lambda t: byte_bpe(t, splits=[(r" ?[^(\s|[.,!?…。，、।۔،])]+", "isolated", False)]),
    "contiguous": lambda t: behaviors(t, "contiguous"),
    "merged-with-next": lambda t: behaviors(t, "merged_with_next"),
    "several": several,
}

FIXTURES = ["llama2", "llama2-new", "gemma-without-fallback", "partial-fallback", "qwen3", "deepseek-v3", "t5", "unigram-fallback",
            "bert-cased", "clip", "kimi", "merged-with-next", "several"]
FAILURES = []


def report(name, differences, detail=""):
    print(f"{'FAIL' if differences else 'ok  '} {name:28} {detail}", flush=True)
    for difference in differences[:3]:
        print("       ", difference[:400])
    FAILURES.extend([name] * bool(differences))


def compare(name, ours, theirs, strings):
    differences = []
    for text in strings:
        for frame in (True, False):
            expected = theirs.encode(text, add_special_tokens=frame).ids
            got = ours.encode(text, ALLOW, frame)
            if got != expected:
                differences.append(f"{text[:60]!r}: {got[:20]} instead of {expected[:20]}")
        for skip in (False, True):
            decoded, wanted = ours.decode(expected, skip), theirs.decode(expected, skip_special_tokens=skip)
            if decoded != wanted and ours.exact_decoding:
                differences.append(f"{text[:60]!r} decoded: {decoded[:60]!r} instead of {wanted[:60]!r}")
    theirs.encode_special_tokens = True
    for text in strings[::7]:
        expected, got = theirs.encode(text, add_special_tokens=False).ids, ours.encode(text, TEXT, False)
        if got != expected:
            differences.append(f"{text[:60]!r} with special tokens as text: {got[:20]} instead of {expected[:20]}")
    theirs.encode_special_tokens = False
    report(name, differences, f"{len(strings)} strings")


def best(function, repeats=3):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def compare_documents(name, ours, theirs, documents):
    differences = []
    for document in documents:
        expected, got = theirs.encode(document).ids, ours.encode(document)
        if got != expected:
            at = next((i for i, (x, y) in enumerate(zip(got, expected)) if x != y), min(len(got), len(expected)))
            differences.append(f"token {at}: {got[at:at + 5]} instead of {expected[at:at + 5]}")
    report(name + ", documents", differences, f"{sum(len(d.encode()) for d in documents) / 1e6:.1f} MB in {len(documents)}")


def speed(name, ours, theirs, documents):
    data = [document.encode() for document in documents]
    size = sum(map(len, data)) / 1e6

    def run():
        for item in data:
            tokens = ours.encode_raw(item, ALLOW, False)
            ours.c.qd_tokens_free(ctypes.byref(tokens))

    mine, other = best(run), best(lambda: theirs.encode_batch_fast(documents, add_special_tokens=False))
    report(name + ", speed", [] if mine <= other else ["slower than tokenizers"],
           f"{size / mine:.1f} MB/s, tokenizers {size / other:.1f} MB/s, {other / mine:.1f} times")


def check_characters(library, work):
    """Every character of Unicode through each normalizer and pre-tokenizer: the words are the tokens."""
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    cases = {"NFC": normalizers.NFC(), "NFD": normalizers.NFD(), "NFKC": normalizers.NFKC(), "NFKD": normalizers.NFKD(),
             "Lowercase": normalizers.Lowercase(), "StripAccents": normalizers.StripAccents(), "Bert": BERT,
             "Strip": normalizers.Strip()}
    for name, normalizer in cases.items():
        tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
        tokenizer.normalizer = normalizer
        path = os.path.join(work, "characters.json")
        tokenizer.save(path)
        ours, differences = Ours(library, path), []
        for before, behind in (("", ""), ("a", ""), ("a\u0323", "\u0301"), ("é", "b"), ("\u1100", "\u1161")):
            for text in (before + c + behind for c in characters):
                if ours.encode(text) != tokenizer.encode(text).ids:
                    differences.append(f"{text!r}")
        report(f"every character, {name}", differences)
    stages = {"Whitespace": pre_tokenizers.Whitespace(), "WhitespaceSplit": pre_tokenizers.WhitespaceSplit(), "Digits": pre_tokenizers.Digits(True),
              "Punctuation": pre_tokenizers.Punctuation("isolated"), "Bert": pre_tokenizers.BertPreTokenizer()}
    for name, stage in stages.items():
        tokenizer = Tokenizer(models.BPE({"a": 0, "aa": 1, "?": 2}, [("a", "a")], unk_token="?"))
        tokenizer.pre_tokenizer = stage
        tokenizer.save(path)
        ours = Ours(library, path)
        report(f"every character, {name}",
               [f"{c!r}" for c in characters for text in (f"a{c}a",) if ours.encode(text) != tokenizer.encode(text).ids])


def fingerprint(ids):
    """FNV-1a of the ids."""
    value = 0x811C9DC5
    for token in ids:
        for byte in token.to_bytes(4, "little"):
            value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:08x}"


EXPRESSIONS = [r"\p{L}+", r"\P{L}+", r"[\P{L}]+", r"[^\P{L}a]+", r"\p{N}", r"\p{^N}+", r"[\p{Lu}&&[^A]]+", r"[a-z&&[^aeiou]]+", r"[^a-z&&[b]]",
               r"[[a-c][x-z]0]+", r"[^[a-c]\s]+", r"[\p{L}\p{N}&&[^\p{Han}]]+", r"[\p{Han}]+", r"\p{Hiragana}", r"\h+", r"\H+", r"[\h]+", r"[^\h]",
               r"\d+", r"\D+", r"[\D]", r"\p{N}{1,3}+", r"a{2}+", r"(?:ab){1,2}+", r"a{2}?b", r"a{,2}b", r"[a&&]?b|c".replace("[a&&]?", ""),
               r"\p{Cn}", r"\P{Cn}+", r"\p{C}+", r"\p{Mn}+", r"\p{Mc}", r"\p{M}", r"\p{P}", r"\p{S}+", r"\p{Zs}", r"[\p{L}--[a]]|b".replace("--[a]", ""),
               r"中{1,2}+", r"[中-文&&[^\x{4e2d}]]+", r"[]^-]+", r"[^]]", r"[a\-z]", r"[[^a]&&[^b]]+", r"[\s&&[^\n]]+", r"(?:[^\s]|\n)+", r"[&a]&", r"[a&b]+",
               r"(?i:[a-c]+)", r"x*+y", r"(?<=a)b", r"(?<![\p{L}&&[^a]])b"]


def check_expressions(library, work, strings):
    """Regular expressions in Oniguruma's syntax: the pieces of Split are the tokens."""
    everything = ["".join(chr(c) for c in range(start, start + 0x400) if not 0xD800 <= c < 0xE000) for start in range(0, 0x110000, 0x400)]
    path = os.path.join(work, "expression.json")
    for expression in EXPRESSIONS:
        tokenizer = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.save(path)
        try:
            ours = Ours(library, path)
        except ValueError as error:
            report(f"expression {expression}", [str(error)])
            continue
        report(f"expression {expression}", [f"{text[:60]!r}: {ours.encode(text)[:20]} instead of {tokenizer.encode(text).ids[:20]}"
                                            for text in strings[:3000] + everything if ours.encode(text) != tokenizer.encode(text).ids])


def write_fixtures(folder, seed):
    """Small tokenizers and fingerprints of the tokens of some strings, for tests without Python: NAME.json; texts.txt with
    a text in hexadecimal per line; NAME.txt with a line for each text: the fingerprints of its tokens with special tokens
    and frame, of those without, and of the decoded text."""
    texts = ["In the beginning God created the heaven and the earth.\n", "int main(void) { return 0; } // 12 345\n",
             "中文字 漢字かな交じり文 한국어 텍스트 Ελληνικά עברית café naïve\n"] * 3
    strings = hostile(20000, seed)[:7] + PIECES + hostile(20000, seed)[-160:]
    with open(os.path.join(folder, "texts.txt"), "w") as out:
        out.writelines(text.encode().hex() + "\n" for text in strings)
    for name in FIXTURES:
        path = os.path.join(folder, name + ".json")
        with open(path, "w", encoding="utf-8") as out:
            json.dump(json.loads(FAMILIES[name](texts).to_str()), out, ensure_ascii=False, separators=(",", ":"))
            out.write("\n")
        theirs = Tokenizer.from_file(path)
        with open(os.path.join(folder, name + ".txt"), "w") as out:
            for text in strings:
                theirs.encode_special_tokens = False
                framed = theirs.encode(text).ids
                decoded = [] if isinstance(theirs.decoder, decoders.ByteLevel) else list(theirs.decode(framed).encode())
                theirs.encode_special_tokens = True
                plain = theirs.encode(text, add_special_tokens=False).ids
                out.write(f"{fingerprint(framed)} {fingerprint(plain)} {fingerprint(decoded)}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="build/release/lib/libquadrille.so")
    parser.add_argument("--strings", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=["characters", "expressions", *FAMILIES])
    parser.add_argument("--keep", help="a folder to which the trained tokenizers are saved")
    parser.add_argument("--fixtures", help="write the fixtures of tests/unit/data/test_tokenizer_families.c to this folder instead")
    parser.add_argument("--no-speed", action="store_true")
    arguments = parser.parse_args()
    print(f"tokenizers {tokenizers.__version__}")
    if arguments.fixtures:
        write_fixtures(arguments.fixtures, arguments.seed)
        return
    library = ctypes.CDLL(os.path.abspath(arguments.library))
    strings, texts = hostile(arguments.strings, arguments.seed), corpus()
    long = "".join(texts)[:5_000_000]
    documents = [long, "x" * 300_000, "ab " * 100_000, "\u0301" * 100_000, texts[-1]]
    with tempfile.TemporaryDirectory() as work:
        if "characters" in arguments.only:
            check_characters(library, work)
        if "expressions" in arguments.only:
            check_expressions(library, work, strings)
        for name, make in FAMILIES.items():
            if name not in arguments.only:
                continue
            theirs = make(texts)
            path = os.path.join(arguments.keep or work, name + ".json")
            theirs.save(path)
            theirs = Tokenizer.from_file(path)
            try:
                ours = Ours(library, path)
            except ValueError as error:
                report(name, [str(error)])
                continue
            # byte-level tokenizers give the bytes of an added token as its name
            ours.exact_decoding = not (isinstance(theirs.decoder, decoders.ByteLevel) and not isinstance(theirs.model, models.Unigram))
            compare(name, ours, theirs, strings)
            compare_documents(name, ours, theirs, documents)
            if not arguments.no_speed:
                speed(name, ours, theirs, texts)
    print(f"{len(FAILURES)} failures")
    sys.exit(1 if FAILURES else 0)


if __name__ == "__main__":
    main()
