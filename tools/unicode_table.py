#!/usr/bin/env python3
"""Writes src/data/tokenizer/split/unicode_table.c: the character classes that the split patterns use.

    python tools/unicode_table.py > src/data/tokenizer/split/unicode_table.c

Needs the Python package tiktoken, whose regular expressions contain the Unicode data (16.0) that both
tiktoken and tokenizers use. tools/tokenizer_oracle.py --only classes compares the table with both
packages, character by character.
"""
import sys

import tiktoken

from c_table import rows

# In the bit order of src/data/tokenizer/split/unicode.h.
CLASSES = [r"\p{L}", r"\p{N}", r"\s", r"[\r\n]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"\w"]
BLOCK = 128


def members(pattern, text):
    single_bytes = {bytes([i]): i for i in range(256)}
    matcher = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=single_bytes, special_tokens={})
    return set(map(ord, bytes(matcher.encode_ordinary(text)).decode()))


def packed(kinds):
    """Sixteen kinds of four bits in each 64-bit number, the first lowest."""
    return [f"0x{sum(kind << 4 * i for i, kind in enumerate(kinds[at:at + 16])):016x}" for at in range(0, len(kinds), 16)]


def main():
    characters = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    text = "".join(map(chr, characters))
    table = bytearray(0x110000)
    for bit, pattern in enumerate(CLASSES):
        for character in members(pattern, text):
            table[character] |= 1 << bit
    combinations = sorted(set(table))
    assert combinations[0] == 0 and len(combinations) <= 16, combinations
    kind = {bits: i for i, bits in enumerate(combinations)}
    blocks, index = {}, []
    for start in range(0, len(table), BLOCK):
        block = bytes(kind[bits] for bits in table[start:start + BLOCK])
        index.append(blocks.setdefault(block, len(blocks)))
    # Characters after the last block with a class have none; the lookup handles that.
    while index[-1] == blocks[bytes(BLOCK)]:
        index.pop()
    assert len(blocks) <= 256, len(blocks)
    print("/* Written by tools/unicode_table.py: character classes of Unicode 16.0. */")
    print('#include "data/tokenizer/split/unicode.h"\n')
    print(f"const uint8_t qd_unicode_ascii[128] = {{\n{rows(table[:128])}\n}};\n")
    print(f"const uint8_t qd_unicode_bits[16] = {{\n{rows(combinations)}\n}};\n")
    print(f"const uint32_t qd_unicode_blocks = {len(index)};")
    print(f"const uint8_t qd_unicode_index[] = {{\n{rows(index)}\n}};\n")
    print(f"const uint64_t qd_unicode_kinds[] = {{\n{rows(packed(b''.join(blocks)))}\n}};")
    print(f"{len(index)} blocks, {len(blocks)} of them different, {len(combinations)} kinds", file=sys.stderr)


if __name__ == "__main__":
    main()
