#!/usr/bin/env python3
"""Writes docs/configuration.md from the program's option table: tools/reference.py [PROGRAM]"""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "configuration.md")
HEAD = """# Configuration

Look up any key of a run; `quadrille help KEY` explains one, `quadrille help train --all` prints the
same list. A key can be set in a YAML file, on the command line, or in its short form. The command
line overrides the file, the file overrides the default. Integers can be written as `4k`, `1.5M`,
`2G` or `1e6`. Names of other trainers (`learning_rate`, `n_layer`, `--tensor-model-parallel-size`)
are refused with a message that names the key here.

```yaml
model:    {preset: llama-tiny}
data:     {path: examples/data/king-james.txt, seq: 128}
train:    {steps: 30, global_batch: 8, lr: 3e-3}   # or train.lr=3e-3, or --lr 3e-3
parallel: {ranks: 2}
```

This page is generated from the option table by `tools/reference.py`.

"""


def page(program):
    result = subprocess.run([program, "help", "--markdown"], capture_output=True, text=True, check=True)
    return HEAD + result.stdout


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build", "release", "bin", "quadrille")
    text = page(program)  # before the file is opened: a wrong program must not leave an empty page
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
