#!/usr/bin/env python3
"""Mutates a file by its structure and runs a command on each mutation.

  tools/mutate.py SEED --runs 1000 -- build/release/bin/quadrille check @@
  tools/mutate.py HF/config.json --folder -- build/release/bin/quadrille train run.from=@@ data.path=TEXT

@@ is the mutated file; with --folder, a copy of the seed's folder that contains it. JSON, lines of
JSON, YAML as our configurations have it and safetensors (a header in JSON, whose length is written
anew) are parsed: values become others of the same or another type, extreme numbers, very long or
deep; members disappear, appear twice or move. Other files lose, repeat and change bytes.

A run fails if a signal ends it, if its status is not 0, 1 or 2, if a refusal has no message, or if it
takes --seconds of CPU time or --memory MiB more than the unchanged seed, plus twice the file's size.
Failing inputs are kept in --keep. The same --seed makes the same mutations.
"""
import argparse
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile

NUMBERS = [0, 1, -1, 2, 3, 7, 255, 65535, 65536, 10**6, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e308]
WORDS = ["", "a", "\0", "\u00e9", "\ud83d\ude00", "true", "null", "../..", "%s%n", "x" * 5000]


def junk(chance, depth=0):
    kind = chance.randrange(8)
    if kind < 3:
        return chance.choice(NUMBERS)
    if kind < 5:
        return chance.choice(WORDS)
    if kind == 5:
        return chance.choice([True, False, None])
    if depth > 2:
        return []
    if kind == 6:
        return [junk(chance, depth + 1)] * chance.choice([0, 1, 2, 1000])
    return {chance.choice(WORDS[:8]): junk(chance, depth + 1) for _ in range(chance.randrange(4))}


def nodes(value, found):
    """(container, key) of everything inside."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []:
        found.append((value, key))
        nodes(value[key], found)
    return found


def mutate_value(value, chance):
    """Changes a parsed document in one to four places."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        inside = nodes(value, [])
        if not inside:
            return junk(chance)
        container, key = chance.choice(inside)
        other, other_key = chance.choice(inside)
        action = chance.randrange(8)
        if action < 3:
            container[key] = junk(chance)
        elif action == 3:
            del container[key]
        elif action == 4:
            container[key], other[other_key] = json.loads(json.dumps(other[other_key])), json.loads(json.dumps(container[key]))
        elif action == 5:
            container[key] = json.loads(json.dumps(other[other_key]))
        elif action == 6 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
            container[key] = container[key] * chance.choice([-1, 2, 1000, 10**9]) + chance.choice([0, 1, -1])
        elif action == 6 and isinstance(container, dict):
            container[chance.choice(WORDS)] = container.pop(key)
        else:
            deep = chance.choice([3, 70, 3000])
            container[key] = json.loads("[" * min(deep, 900) + "]" * min(deep, 900))
    return value


def mutate_bytes(data, chance):
    data = bytearray(data)
    for _ in range(chance.choice([1, 2, 8])):
        at = chance.randrange(len(data) + 1)
        action = chance.randrange(4)
        if action == 0 and data:
            data[min(at, len(data) - 1)] = chance.randrange(256)
        elif action == 1:
            del data[at:at + chance.choice([1, 4, 100, len(data)])]
        elif action == 2:
            data[at:at] = data[at:at + chance.choice([1, 20, 400])] * chance.choice([1, 3, 50])
        else:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.choice([1, 3, 9])))
    return bytes(data)


def dump(value):
    return json.dumps(value, allow_nan=True).encode("utf-8", "surrogatepass")


def mutate_lines(data, chance):
    """Lines of `key: value`."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(chance.choice([1, 2, 3])):
        at = chance.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        action = chance.randrange(4)
        if action == 0 and colon:
            lines[at] = f"{key}: {json.dumps(junk(chance))}"
        elif action == 1:
            lines.insert(at, chance.choice(lines))
        elif action == 2:
            lines[at] = " " * chance.randrange(5) + lines[at]
        else:
            lines[at] = f"{key}: {chance.choice(['*a', '&a [*a]', '!!binary x', '{' * 300, '1e999', '0x10', '~', '- - -'])}"
    return "\n".join(lines).encode("utf-8", "replace")


def mutate(data, name, chance):
    if chance.random() < 0.15:
        return mutate_bytes(data, chance)
    if name.endswith(".safetensors"):
        length = struct.unpack("<Q", data[:8])[0]
        header = dump(mutate_value(json.loads(data[8:8 + length]), chance))
        said = len(header) + (chance.choice([0, 1, -1, 10**9, 2**63]) if chance.random() < 0.1 else 0)
        return struct.pack("<Q", max(said, 0)) + header + data[8 + length:]
    if name.endswith((".yaml", ".yml")):
        return mutate_lines(data, chance)
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in data.splitlines() if line.strip()]
        return b"\n".join(dump(line) for line in mutate_value(lines, chance)) if lines else mutate_bytes(data, chance)
    try:
        return dump(mutate_value(json.loads(data), chance))
    except ValueError:
        return mutate_bytes(data, chance)


def run(command, path, limit):
    """(exit status, CPU seconds, MiB, standard error)"""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([word.replace("@@", path) for word in command], stdout=subprocess.DEVNULL, stderr=errors,
                                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        return process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, errors.read().decode("utf-8", "replace")


sys.setrecursionlimit(10000)  # for lists in lists


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", action="store_true", help="@@ is a copy of the folder of the file")
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--memory", type=float, default=8.0, help="MiB")
    parser.add_argument("--keep", default="mutations", help="folder for failing inputs")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1:]
    if not any("@@" in word for word in command):
        parser.error("after --, give a command in which @@ is the mutated file")
    with open(options.file, "rb") as file:
        seed = file.read()
    name = os.path.basename(options.file)
    failed, refused, slowest, largest = 0, 0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as work:
        if options.folder:
            shutil.copytree(os.path.dirname(os.path.abspath(options.file)), os.path.join(work, "folder"))
        target = os.path.join(work, "folder", name) if options.folder else os.path.join(work, name)
        given = os.path.join(work, "folder") if options.folder else target
        with open(target, "wb") as file:
            file.write(seed)
        status, usual_seconds, usual_memory, errors = run(command, given, 60)
        print(f"{name}, unchanged: status {status}, {1000 * usual_seconds:.0f} ms, {usual_memory:.0f} MiB {errors[:200]}".rstrip())
        for number in range(options.seed, options.seed + options.runs):
            data = mutate(seed, name, random.Random(number))
            with open(target, "wb") as file:
                file.write(data)
            status, seconds, memory, errors = run(command, given, 20)
            seconds, memory = seconds - usual_seconds, memory - usual_memory
            slowest, largest, refused = max(slowest, seconds), max(largest, memory), refused + (status in (1, 2))
            wrong = (f"status {status}" if status not in (0, 1, 2) else "a refusal without a message" if status and not errors.strip()
                     else f"{1000 * seconds:.0f} ms" if seconds > options.seconds
                     else f"{memory:.0f} MiB" if memory > options.memory + 2 * len(data) / 2**20 else "")
            if wrong:
                failed += 1
                os.makedirs(options.keep, exist_ok=True)
                with open(os.path.join(options.keep, f"{number}-{name}"), "wb") as file:
                    file.write(data)
                print(f"mutation {number}: {wrong}: {errors[:200]}", flush=True)
    print(f"{options.runs} mutations, {refused} refused, {failed} failed; at most {1000 * slowest:.0f} ms and {largest:.0f} MiB more")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
