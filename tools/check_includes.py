#!/usr/bin/env python3
"""Checks the include directions of docs/architecture.md, and calls that library code must not make.

Prints one line per offence and exits with 1 if there is any.
"""
import os
import re
import sys

# What each folder of src/ may include in addition to itself and the public headers.
RUN_TIME = {"base", "model", "spec", "device", "comm", "nn", "parallel", "optim", "data", "ckpt"}
ALLOWED = {
    "base": set(),
    "model": {"base"},
    "spec": {"base", "model"},
    "report": {"base", "model", "spec"},
    "sim": {"base", "model", "spec"},
    "plan": {"base", "model", "spec", "sim"},
    "device": {"base"},
    "comm": {"base", "device"},
    "nn": {"base", "model", "device", "spec"},
    "parallel": {"base", "model", "device", "spec", "nn", "comm"},
    "optim": {"base", "device"},
    "data": {"base", "model", "spec"},
    "ckpt": {"base", "model", "spec"},
    "train": RUN_TIME,
    "app": RUN_TIME | {"train"},
    "bench": RUN_TIME | {"train"},
    "serve": {"base", "model", "spec", "report"},
}

# Headers of libraries that may be included in one place only.
CONTAINED = [
    (re.compile(r"^mpi\.h$"), ("src/comm/mpi/",)),
    (re.compile(r"^(ucp|ucs|uct)/"), ("src/comm/ucx/",)),
    (re.compile(r"^sodium"), ("src/comm/rendezvous/",)),
    (re.compile(r"^(cuda|cublas|cudnn|nccl|nvml)"), ("src/device/cuda/", "src/comm/nccl/")),
    (re.compile(r"^yaml\.h$"), ("src/base/",)),
    (re.compile(r"^microhttpd\.h$"), ("src/serve/",)),
    (re.compile(r"^jansson"), ("src/base/", "tests/")),
]

# Library code returns statuses; it does not print, exit or read the environment.
FORBIDDEN_CALLS = re.compile(
    r"(?<![\w.>])(printf|vprintf|puts|putchar|perror|exit|_exit|_Exit|quick_exit|abort|getenv|secure_getenv)\s*\(")
STANDARD_STREAM = re.compile(r"\bf(?:printf|puts|write|flush|putc)\s*\([^;]*\b(stdout|stderr)\b")
CALLS_ALLOWED = {
    "getenv": ("src/train/launch/launch.c", "src/train/launch/environment.c", "src/train/run/cache_folder.c"),
    # A rank that qd_train() started exits there instead of returning into the caller.
    "_exit": ("src/train/launch/launch.c",),
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
MOST_LINES = 800


def without_comments_and_strings(text):
    """The code of a C file with comments and literals blanked; line breaks are kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
    return pattern.sub(lambda m: "\n" * m.group(0).count("\n") if m.group(0)[0] == "/" else '""', text)


def sources(root, folders):
    for folder in folders:
        for path, _, names in os.walk(os.path.join(root, folder)):
            for name in sorted(names):
                if name.endswith((".c", ".h", ".cu", ".cuh")):
                    yield os.path.relpath(os.path.join(path, name), root)


def check_include(root, path, quoted, target):
    """The problem with one include, or None."""
    for pattern, places in CONTAINED:
        if pattern.match(target) and not path.startswith(places):
            return f"<{target}> belongs in {' and '.join(places)} only"
    if target.startswith("quadrille/"):
        return None
    if path.startswith("include/"):
        return f'"{target}": public headers include public and standard headers only' if quoted else None
    if not quoted:
        return None
    in_src = os.path.exists(os.path.join(root, "src", target))
    beside = os.path.exists(os.path.join(root, os.path.dirname(path), target))
    if path.startswith("cli/"):
        in_cli = os.path.exists(os.path.join(root, "cli", target))
        return None if in_cli and not in_src else f'"{target}": cli includes public headers only'
    if not path.startswith("src/"):
        return None
    folder = path.split("/")[1]
    owner = target.split("/")[0] if in_src else None
    if owner is None:
        return f'"{target}": write the path from src/' if beside else f'"{target}" is not in src/'
    if folder not in ALLOWED:
        return f"folder src/{folder} is not in the table of tools/check_includes.py"
    if owner != folder and owner not in ALLOWED[folder]:
        allowed = ", ".join(sorted(ALLOWED[folder])) or "no other folder"
        return f'"{target}": src/{folder} may include {allowed}'
    if target.endswith("_impl.h") and not path.startswith("src/" + os.path.dirname(target) + "/"):
        return f'"{target}" stays inside its folder'
    return None


def check_file(root, path):
    offences = []
    with open(os.path.join(root, path), encoding="utf-8") as file:
        text = file.read()
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if match:
            wrong = check_include(root, path, match.group(1) == '"', match.group(2))
            if wrong:
                offences.append(f"{path}:{number}: {wrong}")
    generated = lines[0].startswith("/* Written by tools/")
    if len(lines) > MOST_LINES + 1 and not generated:
        offences.append(f"{path}: {len(lines) - 1} lines; split files over {MOST_LINES}")
    if path.startswith("src/"):
        for number, line in enumerate(without_comments_and_strings(text).split("\n"), 1):
            for match in FORBIDDEN_CALLS.finditer(line):
                if path not in CALLS_ALLOWED.get(match.group(1), ()):
                    offences.append(f"{path}:{number}: library code must not call {match.group(1)}()")
            match = STANDARD_STREAM.search(line)
            if match:
                offences.append(f"{path}:{number}: library code must not write to {match.group(1)}")
    return offences


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    checked, offences = 0, []
    for path in sources(root, ["include", "src", "cli", "tests", "bench"]):
        checked += 1
        offences += check_file(root, path)
    for offence in offences:
        print(offence)
    print(f"include directions: {checked} files, {len(offences)} offences")
    sys.exit(1 if offences else 0)


if __name__ == "__main__":
    main()
