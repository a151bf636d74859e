#!/usr/bin/env python3
"""Writes the Unicode tables of the normalizers, as the package `tokenizers` has them.

    python tools/normalize_table.py src/data/tokenizer/normalize

Needs the Python packages tokenizers and regex. Libraries of Unicode data cannot be used: the parts of
`tokenizers` have the tables of different versions (normal forms of Unicode 9, categories of Unicode 8,
case of Unicode 17), so every character is tried. Combining classes and pairs come from Python's
unicodedata, restricted to characters that `tokenizers` knows; every one of them is checked.
"""
import os
import struct
import sys
import unicodedata

import regex
from tokenizers import normalizers, pre_tokenizers

from c_table import rows

ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
NFC, NFD, NFKC, NFKD = (form().normalize_str for form in (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD))
HANGUL = range(0xAC00, 0xD7A4)
BLOCK = 128


def array(kind, name, values):
    return f"const {kind} {name}[] = {{\n{rows(values)}\n}};\n"


def combining_classes():
    """Class of every character that `tokenizers` reorders."""
    classes = {}
    for c in ALL:
        value = unicodedata.combining(chr(c))
        if value == 0:
            continue
        # Between marks of a lower and a higher class a character with a class moves.
        low, high = ("\u0334", "\u0345") if value not in (1, 240) else ("\u0334", "\u0323")
        text = "a" + high + chr(c) if value < (240 if high == "\u0345" else 220) else "a" + chr(c) + low
        if value == 240:
            text = "a" + chr(c) + "\u0323"
        if NFD(text) == unicodedata.normalize("NFD", text) and NFD(text) != text:
            classes[c] = value
    return classes


def runs(items):
    """(first, last, value) of neighbours with the same value."""
    out = []
    for c in sorted(items):
        if out and out[-1][1] == c - 1 and out[-1][2] == items[c]:
            out[-1][1] = c
        else:
            out.append([c, c, items[c]])
    return out


def compositions(classes):
    """(a, b) -> c for all canonical pairs, without Hangul."""
    out = {}
    for c in ALL:
        pair = unicodedata.decomposition(chr(c)).split()
        if c in HANGUL or len(pair) != 2 or pair[0].startswith("<"):
            continue
        a, b = (int(part, 16) for part in pair)
        if NFC(chr(a) + chr(b)) == chr(c):
            out[a, b] = c
    return out


def lower_runs():
    lower = {c: normalizers.Lowercase().normalize_str(chr(c)) for c in ALL}
    assert {c for c in ALL if len(lower[c]) > 1} == {0x130}, "a new character with a lower case of several"
    out = []
    for c in ALL:
        to = ord(lower[c][0])
        if to == c or c == 0x130:
            continue
        delta = to - c
        if out and out[-1][3] == delta and c - out[-1][1] in ((1, 2) if out[-1][0] == out[-1][1] else (out[-1][2],)):
            out[-1][2] = c - out[-1][1]
            out[-1][1] = c
        else:
            out.append([c, c, 1, delta])
    return out


def split_by(pre_tokenizer):
    return {c for c in ALL if len(pre_tokenizer.pre_tokenize_str("a" + chr(c) + "a")) > 1}


def join_map():
    """A character map from a to b, as a double-array trie. A cluster that starts with a becomes b as a whole."""
    units = [0] * 256
    units[0x61] = 0x61 | 1 << 8 | 0x60 << 10
    units[1] = 1 << 31
    return normalizers.Precompiled(struct.pack("<I256I", 1024, *units) + b"b\0")


def main():
    folder = sys.argv[1]
    classes = combining_classes()
    pairs = compositions(classes)
    seconds = {b for _, b in pairs} | set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    clean = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    strip = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False)
    accents = normalizers.StripAccents()
    chinese = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=True, strip_accents=False, lowercase=False)
    # In the bit order of unicode_data.h.
    members = [
        split_by(pre_tokenizers.Punctuation("isolated")),
        split_by(pre_tokenizers.Digits(True)),
        {c for c in ALL if accents.normalize_str("a" + chr(c)) == "a"},
        {c for c in ALL if strip.normalize_str("a" + chr(c)) == "a"},
        {c for c in ALL if clean.normalize_str("a" + chr(c)) == "a"},
        {c for c in ALL if chinese.normalize_str(chr(c)) != chr(c)},
        {c for c in ALL if c in classes or c in seconds or NFC(chr(c)) != chr(c)},
        {c for c in ALL if c in classes or NFD(chr(c)) != chr(c)},
        {c for c in ALL if c in classes or c in seconds or NFKC(chr(c)) != chr(c)},
        {c for c in ALL if c in classes or NFKD(chr(c)) != chr(c)},
    ]
    joined = join_map()
    members.append({c for c in ALL if joined.normalize_str("a" + chr(c)) == "b"})
    clusters = [r"\p{GCB=Prepend}", r"[\p{GCB=Control}\p{GCB=CR}\p{GCB=LF}]",
                r"\p{Extended_Pictographic}"]
    for pattern in map(regex.compile, clusters):
        members.append({c for c in ALL if pattern.match(chr(c))})
    table = [sum(1 << bit for bit, characters in enumerate(members) if c in characters) for c in range(0x110000)]
    combinations = sorted(set(table))
    assert combinations[0] == 0 and len(combinations) <= 256, len(combinations)
    kind = {bits: i for i, bits in enumerate(combinations)}
    blocks, index = {}, []
    for start in range(0, len(table), BLOCK):
        block = bytes(kind[bits] for bits in table[start:start + BLOCK])
        index.append(blocks.setdefault(block, len(blocks)))
    while index[-1] == blocks[bytes(BLOCK)]:
        index.pop()
    assert len(blocks) <= 65535
    packed = [f"0x{int.from_bytes(block[at:at + 8], 'little'):x}" for block in blocks for at in range(0, BLOCK, 8)]
    head = "/* Written by tools/normalize_table.py: {}. */\n#include \"data/tokenizer/normalize/unicode_data.h\"\n\n"
    with open(os.path.join(folder, "class_table.c"), "w") as out:
        out.write(head.format("properties of characters"))
        out.write(array("uint16_t", "qd_property_bits", combinations) + "\n")
        out.write(f"const uint32_t qd_property_blocks = {len(index)};\n")
        out.write(array("uint16_t", "qd_property_index", index) + "\n")
        out.write(array("uint64_t", "qd_property_kinds", packed))
    canonical, compatible = {}, {}
    for c in ALL:
        if c in HANGUL:
            continue
        if NFD(chr(c)) != chr(c):
            canonical[c] = NFD(chr(c))
        if NFKD(chr(c)) != NFD(chr(c)):
            compatible[c] = NFKD(chr(c))
    with open(os.path.join(folder, "compose_table.c"), "w") as out:
        out.write(head.format("combining classes, compositions and lower case"))
        flat = [f"0x{first << 32 | (last - first) << 8 | value:x}" for first, last, value in runs(classes)]
        out.write(f"const uint32_t qd_combining_count = {len(flat)};\n" + array("uint64_t", "qd_combining_runs", flat) + "\n")
        flat = [f"0x{a << 42 | b << 21 | c:x}" for (a, b), c in sorted(pairs.items())]
        out.write(f"const uint32_t qd_compose_count = {len(flat)};\n" + array("uint64_t", "qd_compose_pairs", flat) + "\n")
        flat = lower_runs()
        out.write(f"const uint32_t qd_lower_count = {len(flat)};\n")
        out.write("const qd_lower_run qd_lower_runs[] = {\n" +
                  rows("{%d, %d, %d, %d}" % tuple(run) for run in flat) + "\n};\n")
    for name, title, items in (("canonical", "canonical decompositions", canonical), ("compatible", "compatibility decompositions", compatible)):
        with open(os.path.join(folder, name + "_table.c"), "w") as out:
            out.write(head.format(title))
            pool, keys = [], []
            for c in sorted(items):
                assert len(items[c]) < 32 and len(pool) < 1 << 15
                keys.append(f"0x{c << 20 | len(pool) << 5 | len(items[c]):x}")
                pool += map(ord, items[c])
            out.write(f"const uint32_t qd_{name}_count = {len(keys)};\n")
            out.write(array("uint64_t", f"qd_{name}_keys", keys) + "\n")
            out.write(array("uint32_t", f"qd_{name}_pool", pool))


if __name__ == "__main__":
    main()
