#!/usr/bin/env python3
"""Counts the code that writes or transforms op lists: the passes of `src/spec/passes`, and the
hand-written writers that they replaced, at the last commit that had them.

A line counts if it holds a token that is not part of a comment. Three kinds are told apart:
functions; the initializers of constant arrays and structs at file scope, which are tables (rules,
shapes, names); and what remains: types, the names that tables are written in, macros, prototypes,
includes. The verifier (`src/spec/proof`), the declarations of models
(`src/model`) and the table of ops (`src/spec/ops`) are not part of either side. Nor are the scales
of losses: four lines of `nn` and `train` then, `src/spec/program/program.c` today. Checks inside
writers and passes count on both sides.

    tools/count_passes.py            both sides; needs the history of the repository
    tools/count_passes.py --files    each file
    tools/count_passes.py --growth   functions of the passes after each commit that changed their number,
                                     which tells what new models and features took from what rewriting saved
"""
import argparse
import os
import re
import subprocess

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
BEFORE = "6e00c55"  # the last commit with qd_write_block
# (path, functions): the whole file, or only these functions of it.
WRITERS = [(f"src/spec/{name}", None) for name in (
    "ops_impl.h",  # types of the writers, and the functions that they share
    "class_write.c", "block_ops.c", "attention_ops.c", "moe_ops.c", "moe_nodes_ops.c", "head_ops.c",
    "tensor_ops.c",  # exchanges of tensor parallelism; the check that slots in flight are not accessed
    "overlap_ops.c", "recompute.c",
    "module_ops.c",  # lifetimes
)] + [
    # `nn` decided which grouped GEMMs run as one with SwiGLU.
    ("src/nn/moe.c", ("reads", "may_share_memory", "may_run_together", "qd_experts_fuse")),
]
PASSES = "src/spec/passes"

TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.S)
# A constant with an initializer at file scope; function-local ones belong to their function.
TABLE = re.compile(r"^static (?:const struct \{[^{}]*\} |[^;{}]*\bconst\b)[^;{}]*= \{(?:[^\n]*\};$|$.*?^\};$)", re.M | re.S)
BODY = re.compile(r"^(?!typedef|struct|enum|#)\w[^;{}=]*\)\n\{$.*?^\}$", re.M | re.S)
FUNCTION = r"^(?:static )?[\w *]*\b{}\([^;{{]*\)\n\{{$.*?^\}}$"


def without_comments(text):
    return TOKEN.sub(lambda m: m.group(0) if m.group(0)[0] in "\"'" else "\n" * m.group(0).count("\n"), text)


def lines(text):
    return sum(1 for line in text.split("\n") if line.strip())


def count(text, functions=None):
    """Lines of functions, of declarations and of tables."""
    text = without_comments(text)
    if functions:
        found = [re.search(FUNCTION.format(name), text, re.M | re.S) for name in functions]
        text = "\n".join(match.group(0) for match in found)
    tables = sum(lines(match.group(0)) for match in TABLE.finditer(text))
    code = sum(lines(match.group(0)) for match in BODY.finditer(text))
    return code, lines(text) - code - tables, tables


def side(title, sources, show):
    total = [0, 0, 0]
    for path, text, functions in sources:
        row = count(text, functions)
        total = [sum(pair) for pair in zip(total, row)]
        if show:
            print_row(row, path + (f" ({', '.join(functions)})" if functions else ""))
    print_row(total, title)


def print_row(row, title):
    print("".join(f"{number:11}" for number in row) + f"{sum(row):8}  {title}")


def git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout


def print_growth():
    before = 0
    for line in git("log", "--reverse", "--format=%h %s", f"{BEFORE}..HEAD", "--", PASSES).splitlines():
        commit = line.split()[0]
        paths = [path for path in git("ls-tree", "--name-only", commit, PASSES + "/").split() if path.endswith((".c", ".h"))]
        now = sum(count(git("show", f"{commit}:{path}"))[0] for path in paths)
        if now != before:
            print(f"{now:11}{now - before:+6}  {line}")
        before = now


def main():
    parser = argparse.ArgumentParser(description="counts the code that writes or transforms op lists")
    parser.add_argument("--files", action="store_true", help="each file as well")
    parser.add_argument("--growth", action="store_true", help="the passes after each commit instead")
    arguments = parser.parse_args()
    show = arguments.files
    if arguments.growth:
        print_growth()
        return

    def at_commit(path):
        return git("show", f"{BEFORE}:{path}")

    def today(path):
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            return file.read()

    names = sorted(name for name in os.listdir(os.path.join(ROOT, PASSES)) if name.endswith((".c", ".h")))
    print("  functions      types     tables   total")
    side(f"hand-written lists ({BEFORE})", [(path, at_commit(path), functions) for path, functions in WRITERS], show)
    side(f"passes ({PASSES})", [(f"{PASSES}/{name}", today(f"{PASSES}/{name}"), None) for name in names], show)


if __name__ == "__main__":
    main()
