#!/usr/bin/env python3
"""Checks how the repository is written: prose lines of at most 100 columns in *.md and in comments,
an opening comment in every source file that says what it is, and none of the phrasings of BANNED in
prose, messages and help.

Tables, code blocks and lines that cannot be broken are excepted. Code spans are not searched for
phrasings. Prints one line per offence and exits with 1 when there is any.
"""
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check_layout import sources  # noqa: E402

COLUMNS = 100
SOURCES = (".c", ".h", ".cu", ".cuh", ".py", ".sh", ".js", ".css")

# A phrasing, and what to write instead. The field's own terms can be searched for.
BANNED = [
    (r"\b(go|goes|going|gone|went) on\b(?! to\b)", "resume, continue"),
    (r"\b(is|are|was|were|be|been|being) told\b", "is reported, prints; is distinguished"),
    (r"\blies?\b", "is placed, is stored; does not match"),
    (r"\bbeside\b", "next to, alongside, overlapped with, compared with"),
    (r"\b(take|takes|taken|took|give|gives|given|gave) (it |them )?back\b", "released, freed; reverted"),
    (r"\b(rank|ranks|process|processes|thread|threads) who\b", "that, which"),
    (r"\b(nobody|whoever)\b", "no rank, no process; the one that"),
    (r"(?<!inner )(?<!outer )(?<!dot )(?<!tensor )\bproducts\b", "GEMMs"),
    (r"\bproducts? over experts\b", "grouped GEMM"),
    (r"\bwarpgroups?\b[^.]{0,20}\bturns\b", "ping-pong warpgroups"),
    (r"\bthe copy engine\b", "TMA"),
    (r"\broom\b", "capacity, buffer space"),
    (r"\bfurther rounds?\b", "extra dispatch rounds"),
    (r"\bremarks?\b", "note, warning"),
    (r"\b(the|with the) same bits\b|\bsame bits\b", "bit-identical"),
    (r"\bin turn\b", "alternately"),
    (r"\bways at a time\b", "both ways concurrently"),
    (r"\bwithout a word\b", "silently"),
    (r"\bbf16 (weight|one|rounding) lacks\b|\bwhat (those|it) lacks?\b", "the low 16 bits of the master weight"),
    (r"\botherwise than\b", "differently from; does not match"),
    (r"\bcomput(e|es|ed|ing)( \w+)? again\b", "recompute"),
]
PHRASES = re.compile("|".join(f"(?P<p{index}>{phrase})" for index, (phrase, _) in enumerate(BANNED)), re.IGNORECASE)

def prose_of_markdown(lines):
    """(number, line) of what is neither in a code block nor a row of a table."""
    fence, blank = False, True
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fence = not fence
        elif not fence and not (blank and line.startswith("    ")) and not line.lstrip().startswith("|"):
            yield number, line
        blank = not line.strip() or blank and line.startswith("    ")


COMMENT = {".py": re.compile(r"^\s*#"), ".sh": re.compile(r"^\s*#")}
C_COMMENT = re.compile(r"^\s*(/\*|\*(?=[ /]|$)|//)")


def prose_of_source(lines, kind):
    """(number, line) of the lines that are comments from their beginning."""
    opening = COMMENT.get(kind, C_COMMENT)
    for number, line in enumerate(lines, 1):
        if opening.match(line):
            yield number, line


STRING = re.compile(r'"((?:\\.|[^"\\\n])*)"')


def strings_of_source(lines, kind):
    """(number, text) of string literals with a space in them, in C: messages, help and descriptions of options."""
    if kind not in (".c", ".h", ".cu", ".cuh"):
        return
    for number, line in enumerate(lines, 1):
        if not C_COMMENT.match(line) and not line.startswith("#include"):
            for match in STRING.finditer(line):
                if " " in match.group(1):
                    yield number, match.group(1)


def breakable(line):
    """Whether a line that is too long has a space to break it at, outside of code spans."""
    text = re.sub(r"`[^`]*`", lambda span: "x" * len(span.group()), line.strip().lstrip("-*# "))
    return " " in text[:COLUMNS]


def opening_is_missing(lines):
    """A file opens with a comment or doc string of at least three words."""
    rest = [line for line in lines[:4] if line.strip() and not line.startswith("#!")]
    if not rest:
        return False
    first = rest[0].lstrip()
    if not first.startswith(("/*", "//", '"""', "# ")):
        return True
    return len(re.findall(r"[A-Za-z]{2,}", " ".join(rest[:2]))) < 3


def offences(path, text):
    """(line, what) of one file."""
    kind = os.path.splitext(path)[1]
    lines = text.split("\n")
    if kind == ".md":
        prose = list(prose_of_markdown(lines))
        tables = [(number, line) for number, line in enumerate(lines, 1) if line.lstrip().startswith("|")]
    else:
        prose, tables = list(prose_of_source(lines, kind)), list(strings_of_source(lines, kind))
        if opening_is_missing(lines):
            yield 1, "the file does not open with a comment that says what it is"
    for number, line in prose:
        if len(line) > COLUMNS and breakable(line):
            yield number, f"{len(line)} columns, the most are {COLUMNS}"
    for number, line in prose + tables:
        for match in PHRASES.finditer(re.sub(r"`[^`]*`", "", line)):
            yield number, f'"{match.group()}": write {BANNED[int(match.lastgroup[1:])][1]}'


def main():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    count = found = 0
    for path in sources(root):
        full = os.path.join(root, path)
        if not path.endswith((".md",) + SOURCES) or not os.path.exists(full) or path == "tools/check_language.py":
            continue
        count += 1
        with open(full, encoding="utf-8", newline="") as file:
            text = file.read()
        for line, what in offences(path, text):
            found += 1
            print(f"{path}:{line}: {what}")
    print(f"language: {count} files, {found} offences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
