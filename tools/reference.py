#!/usr/bin/env python3
"""Writes docs/configuration.md from the program's option table: tools/reference.py [PROGRAM]"""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "configuration.md")
HEAD = """# Configuration

All keys of a run, made from the program's own table by `tools/reference.py`; `quadrille help train` shows the same. A key may
stand in the YAML file (`train: {lr: 1e-3}`), on the command line as `train.lr=1e-3`, or in its short form, `--lr 1e-3`. The
command line wins over the file, the file over the default. Integers may be written as `4k`, `1.5M`, `2G` or `1e6`.

"""


def page(program):
    result = subprocess.run([program, "help", "--markdown"], capture_output=True, text=True, check=True)
    return HEAD + result.stdout


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build", "release", "bin", "quadrille")
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(page(program))


if __name__ == "__main__":
    main()
