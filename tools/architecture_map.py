#!/usr/bin/env python3
"""Draws docs/images/architecture.svg: the folders of src/, what each may include, and the path of the
step program through them.

The lists of includes come from tools/check_includes.py, so the drawing cannot contradict what is
enforced; tests/cli/test_docs.py compares the stored file with what this script writes.
"""
import os
import sys
import textwrap

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check_includes import ALLOWED, RUN_TIME  # noqa: E402

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "images", "architecture.svg")
WIDTH, HEIGHT = 1100, 796

STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #c4ccd6; --box: #f6f8fa; --flow: #b35900; --spec: #fff4e5; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9aa4af; --line: #444c56; --box: #161b22; --flow: #f0a04b; --spec: #2b2116; }
  }
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); font-size: 13px; }
  .name { font-weight: 600; font-size: 14px; font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
  .soft { fill: var(--soft); font-size: 12px; }
  .on { fill: var(--flow); font-size: 12px; }
  .box { fill: var(--box); stroke: var(--line); }
  .program { fill: var(--spec); stroke: var(--flow); stroke-width: 2; }
  .frame { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
  .flow { fill: none; stroke: var(--flow); stroke-width: 2; marker-end: url(#head); }
""".strip("\n")


def includes(folder):
    """The folders besides base that one may include, the nearest first."""
    order = list(ALLOWED)
    if ALLOWED[folder] >= RUN_TIME:
        return "includes " + ("train and all below it" if "train" in ALLOWED[folder] else "spec, model and the run-time folders below")
    names = sorted(ALLOWED[folder] - {"base"}, key=order.index, reverse=True)
    return "includes " + (", ".join(names) or "base only")


def text(x, y, words, kind=""):
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'  <text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escaped}</text>'


def box(x, y, width, height, name, lines=(), kind="box"):
    """A folder: its name, and lines below it; a line that begins with '<' is soft."""
    yield f'  <rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    yield text(x + 10, y + 20, name, "name")
    for number, line in enumerate(lines, 1):
        yield text(x + 10, y + 21 + 17 * number, line.lstrip("<"), "soft" if line.startswith("<") else "")


def folder(x, y, width, height, name, *lines):
    """As box, with the folders that it may include, wrapped."""
    wrapped = textwrap.wrap(includes(name), int((width - 16) / 5.9))
    return box(x, y, width, height, f"{name}/", [*lines, *("<" + line for line in wrapped)])


def flow(path, x=0, y=0, words=""):
    yield f'  <path class="flow" d="{path}"/>'
    if words:
        yield text(x, y, words, "on")


def drawing():
    yield from box(20, 16, 1060, 34, "cli/")
    yield text(74, 36, "one file per sub-command, and any program of yours: public headers only", "soft")
    yield from box(20, 58, 1060, 34, "include/quadrille/")
    yield text(192, 78, "public headers, plain C, no MPI or CUDA types; their symbols are all that the libraries export", "soft")

    yield '  <rect class="frame" x="20" y="104" width="520" height="590" rx="8"/>'
    yield text(36, 126, "libquadrille-plan: no kernels, no MPI", "soft")
    yield from folder(36, 138, 236, 62, "plan", "searches layouts, explains")
    yield from folder(36, 222, 236, 62, "sim", "simulates it on a cluster")
    yield from folder(288, 138, 236, 146, "report", "the HTML page of a run:", "curves, memory, timelines,", "measured next to simulated")

    yield '  <rect class="box" x="36" y="308" width="488" height="292" rx="6"/>'
    yield text(46, 328, "spec/", "name")
    yield text(100, 328, "what a run is, as data", "")
    yield text(46, 590, includes("spec"), "soft")
    yield from box(48, 342, 148, 64, "proof/", ["communication and", "gradients are right"])
    yield from box(206, 342, 148, 64, "program/", ["the step program:", "actions, memory"], "program")
    yield from box(364, 342, 148, 64, "config/", ["option table,", "presets, check"])
    yield from box(48, 428, 148, 64, "schedule/", ["turns of a pipeline", "as data"])
    yield from box(206, 428, 148, 64, "ops/", ["op table and", "op lists"], "program")
    yield from box(364, 428, 148, 64, "passes/", ["forward, gradient,", "place, fuse, order …"])
    yield from box(48, 514, 306, 56, "layout/", ["mesh, ledger, storage, stages, experts"])
    yield from folder(36, 616, 488, 62, "model", "families: parameters and forward pass of whole tensors; fields")

    yield '  <rect class="frame" x="560" y="104" width="520" height="590" rx="8"/>'
    yield text(576, 126, "libquadrille: the above and the run time", "soft")
    yield from folder(576, 138, 180, 62, "app", "eval, generate, convert")
    yield from folder(766, 138, 148, 62, "bench", "measurements")
    yield from folder(924, 138, 140, 62, "serve", "the web server")
    yield '  <rect class="box" x="576" y="222" width="488" height="128" rx="6"/>'
    yield text(586, 242, "train/", "name")
    yield text(650, 242, includes("train"), "soft")
    yield from box(588, 254, 148, 84, "exec/", ["the interpreter:", "one function per", "kind of action"], "program")
    yield from box(746, 254, 148, 84, "run/", ["one rank of a run:", "folder, metrics,", "checkpoints, stop"])
    yield from box(904, 254, 148, 84, "launch/", ["processes, threads", "or MPI ranks"])

    yield from folder(576, 384, 156, 96, "parallel", "binds buffers and", "groups; exchanges")
    yield from folder(742, 384, 156, 96, "nn", "runs op lists; never", "communicates")
    yield from folder(908, 384, 156, 96, "optim", "AdamW, SGD, Muon,", "learning rates")
    yield from folder(576, 506, 156, 96, "comm", "collectives: local/", "mpi/ device/ nccl/")
    yield from folder(742, 506, 322, 96, "device", "memory, streams, kernels; cpu/, cuda/ with", "gemm/ attention/ experts/ rowwise/")
    yield from folder(576, 616, 236, 62, "data", "tokenizer, shards, sampler")
    yield from folder(828, 616, 236, 62, "ckpt", "checkpoints, Hugging Face")

    yield from box(20, 710, 1060, 34, "base/")
    yield text(80, 730, "status, log, options, JSON, YAML, random numbers, threads, clock. Every folder may include it; "
                        "it includes no other folder", "soft")

    yield from flow("M438 616 V494", 446, 556, "declaration")
    yield from flow("M364 460 H356")
    yield from flow("M280 428 V408")
    yield from flow("M154 428 V417 H230 V408")
    yield from flow("M300 514 V504 H400 V494")
    yield from flow("M206 374 H198")
    yield from flow("M258 342 V286")
    yield from flow("M154 222 V202")
    yield from flow("M320 342 V296 H586", 386, 291, "executed")
    yield from flow("M620 338 V382")
    yield from flow("M700 338 V366 H800 V382")
    yield from flow("M720 338 V358 H980 V382")
    yield from flow("M654 480 V504")
    yield from flow("M820 480 V504")
    yield from flow("M980 480 V504")

    yield '  <path class="flow" d="M22 774 H58"/>'
    yield text(68, 778, "the path of the step program: declared, derived, proved, simulated, executed", "soft")
    yield text(640, 778, "includes …: the folders that one may include besides base", "soft")


def picture():
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img"' % (WIDTH, HEIGHT, WIDTH, HEIGHT),
             '     aria-label="Folders of src, what each may include, and the path of the step program">',
             "<!-- Written by tools/architecture_map.py. -->", "<style>", STYLE, "</style>",
             '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto" markerUnits="userSpaceOnUse">'
             '<path d="M0 0 L8 4 L0 8 Z" style="fill: var(--flow)"/></marker></defs>',
             f'<rect width="{WIDTH}" height="{HEIGHT}" style="fill: var(--paper)"/>', *drawing(), "</svg>"]
    return "\n".join(lines) + "\n"


def main():
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(picture())


if __name__ == "__main__":
    main()
