#!/usr/bin/env python3
"""Greedy decoding of GPT-2 124M (random weights) on one thread, compared with transformers.

    bench/generate/measure.py [PROGRAM] [--tokens N] [--folder FOLDER]

Prints tokens per second of processor time, so that other processes on the machine change little, the
time from the start of the program to its first token, and whether the tokens agree. Needs torch and
transformers. --folder keeps the model for the next call.
"""
import argparse
import json
import os
import resource
import subprocess
import tempfile
import time

PROMPT = list(range(100, 108))


def ours(program, model, tokens, precision):
    """Tokens, processor seconds and wall seconds of one call."""
    command = [program, "generate", model, "--ids", "--prompt", " ".join(map(str, PROMPT)), "--tokens", str(tokens), "--temperature", "0",
               "--threads", "1", "--ignore-end", "--precision", precision, "--json"]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [int(word) for word in json.loads(text)["text"].split()], seconds, wall


def theirs(model, tokens, precision):
    """Tokens and processor seconds of the best of three calls."""
    import torch
    import transformers
    torch.set_num_threads(1)
    network = transformers.GPT2LMHeadModel.from_pretrained(model, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision]).eval()
    best = None
    with torch.no_grad():
        for _ in range(3):
            begin = time.process_time()
            out = network.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=50256)
            seconds = time.process_time() - begin
            best = seconds if best is None else min(best, seconds)
    return out[0, len(PROMPT):].tolist(), best


def make_model(program, folder):
    import torch
    import transformers
    theirs_folder, ours_folder = os.path.join(folder, "gpt2"), os.path.join(folder, "run")
    if not os.path.exists(theirs_folder):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(theirs_folder)
    if not os.path.exists(ours_folder):
        subprocess.run([program, "convert", theirs_folder, ours_folder], check=True, capture_output=True)
    return theirs_folder, ours_folder


def compare(program, folder, tokens):
    hf, run = make_model(program, folder)
    for precision in ("fp32", "bf16"):
        expected, torch_seconds = theirs(hf, tokens, precision)
        first = min((ours(program, run, 1, precision)[1:] for _ in range(5)), key=lambda pair: pair[1])
        best = min((ours(program, run, tokens + 1, precision) for _ in range(3)), key=lambda result: result[1])
        rate, torch_rate = tokens / (best[1] - first[0]), tokens / torch_seconds
        same = next((i for i, (a, b) in enumerate(zip(best[0], expected)) if a != b), tokens)
        print(f"{precision}: {rate:.1f} tokens/s, transformers {torch_rate:.1f}: {rate / torch_rate:.2f} times; first token after "
              f"{first[1]:.2f} s ({first[0]:.2f} s of processor time); {same} of {tokens} tokens agree")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", nargs="?", default="build/release/bin/quadrille")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder")
    given = parser.parse_args()
    if given.folder:
        os.makedirs(given.folder, exist_ok=True)
        compare(given.program, given.folder, given.tokens)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(given.program, folder, given.tokens)


if __name__ == "__main__":
    main()
