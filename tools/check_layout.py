#!/usr/bin/env python3
"""Checks the layout of every source file: lines of at most 140 columns (160 in Python), files of at
most 800 lines, no tabs, no trailing spaces, a newline at the end of the file, and at most 30 files
in a source folder; and that every code block of a Markdown file ends with a line of its own.
Statements are laid out by hand; .clang-format is for editors.

Prints one line per offence and exits with 1 if there is any.
"""
import collections
import os
import subprocess
import sys

LINES = 800
FILES = 30  # directly in a folder of FOLDERS
FOLDERS = ("src/", "cli/", "include/")
COLUMNS = {".c": 140, ".h": 140, ".cu": 140, ".cuh": 140, ".py": 160, ".sh": 140}


def sources(root):
    """The files git tracks; in a folder without git, such as a release, all files except build outputs."""
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True)
    if listed.returncode == 0:
        return listed.stdout.splitlines()
    return [os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root) for name in names
            if not os.path.relpath(folder, root).startswith(("build", "runs"))]


def offences(columns, text):
    lines = text.split("\n")
    if lines[-1] != "":
        yield len(lines), "no newline at the end of the file"
    if len(lines) - 1 > LINES:
        yield LINES + 1, f"the file has {len(lines) - 1} lines, the limit is {LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > columns:
            yield number, f"{len(line)} columns, the limit is {columns}"
        if "\t" in line:
            yield number, "a tab"
        if line != line.rstrip():
            yield number, "trailing spaces"


def code_blocks(text):
    begun = 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            begun = 0 if begun else number
        elif "```" in line:
            yield number, "the mark of a code block inside a line"
    if begun:
        yield begun, "a code block without an end"


def main():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    count = found = 0
    for path in sources(root):
        full = os.path.join(root, path)
        ending = os.path.splitext(path)[1]
        if (ending not in COLUMNS and ending != ".md") or not os.path.exists(full):
            continue
        count += 1
        with open(full, encoding="utf-8", newline="") as file:
            text = file.read()
            for line, what in code_blocks(text) if ending == ".md" else offences(COLUMNS[ending], text):
                print(f"{path}:{line}: {what}")
                found += 1
    folders = collections.Counter(os.path.dirname(path) for path in sources(root) if path.startswith(FOLDERS))
    for folder, files in folders.items():
        if files > FILES:
            print(f"{folder}: {files} files, the limit is {FILES}")
            found += 1
    print(f"layout: {count} files, {found} offences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
