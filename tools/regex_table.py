#!/usr/bin/env python3
"""Writes src/data/tokenizer/split/new_characters.c: characters that Oniguruma knows and PCRE2 may not.

    python3.11 tools/regex_table.py > src/data/tokenizer/split/new_characters.c

Needs the Python packages tokenizers and regex, and a Python whose unicodedata has Unicode 14, the version
of PCRE2 10.40 to 10.42. Regular expressions are matched with PCRE2 here and with Oniguruma in
`tokenizers`, which knows Unicode 16.
"""
import sys
import unicodedata

import regex
from tokenizers import Regex, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()


def main():
    assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    category = dict.fromkeys(characters, "Cn")
    text = "".join(characters)
    for name in CATEGORIES:
        split = pre_tokenizers.Split(Regex(rf"\p{{{name}}}"), "removed", invert=True)
        for character, _ in split.pre_tokenize_str(text):
            category[character] = name
    runs, changed = [], []
    for c in characters:
        old = unicodedata.category(c)
        if old == category[c]:
            continue
        if old != "Cn":
            changed.append((c, old, category[c]))
            continue
        script = regex.match(r"\p{Han}", c) and "Han" or next(
            (name for name in ("Hiragana", "Katakana", "Hangul", "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Thai", "Devanagari",
                               "Bopomofo", "Kannada", "Telugu", "Bengali", "Tamil", "Khmer", "Lao", "Myanmar", "Tibetan", "Georgian",
                               "Armenian", "Ethiopic", "Mongolian", "Inherited", "Common") if regex.match(rf"\p{{Script={name}}}", c)), "")
        if runs and ord(c) == runs[-1][1] + 1 and runs[-1][2:] == [category[c], script]:
            runs[-1][1] = ord(c)
        else:
            runs.append([ord(c), ord(c), category[c], script])
    print(f"changed: {changed}", file=sys.stderr)
    print("/* Written by tools/regex_table.py: characters of Unicode 15 to 16 with category and script. */")
    print('#include "data/tokenizer/split/onig.h"\n')
    print(f"const int qd_new_count = {len(runs)};")
    print("const qd_new_characters qd_new_characters_of[] = {")
    for first, last, kind, script in runs:
        print(f'    {{0x{first:x}, 0x{last:x}, "{kind}", "{script}"}},')
    print("};")


if __name__ == "__main__":
    main()
