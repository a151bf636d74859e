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
    tools/count_passes.py --parity   the passes without the lines that serve only features which the hand-written
                                     writers did not have, and those lines, to be checked
"""
import argparse
import os
import re
import subprocess
import sys

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

# Lines of functions that would be deleted with a feature that the hand-written writers did not
# have. Per feature: a word that BEFORE does not have in src/spec; then (file, function, what to
# count): ALL of it, or the statements, labels and initializers that begin on a line with one of
# these texts. Lines that would only become shorter are not listed, nor are rows of tables. A text
# that is not found, or a word that BEFORE has, is an error.
ALL = None
LATER = {
    "train.precision=fp8": ("fp8", [
        ("quantize.c", "*", ALL),
        ("fuse.c", "enabled", ["bool fp8 ="]),
        ("fuse.c", "remake_swiglu", ["bool fp8 ="]),
        ("recompute.c", "never_runs_again", ["return kind =="]),
    ]),
    "adapters (lora.*), frozen weights": ("lora", [
        ("forward.c", "set_parts", ALL),
        ("forward.c", "state", ["if (op->kind == QD_OP_ADAPT)"]),
        ("gradient.c", "is_frozen", ALL),
        ("gradient.c", "apply", ["op->parts =", "memcpy(op->part_at", "memcpy(op->part_cols"]),
        ("list.c", "qd_class_measure", [
            "for (int i = 0; i < op->parts; i++)",
            "if (op->kind == QD_OP_DROPOUT"]),  # the input of an adapter that has columns of this rank
        ("place.c", "layout_of", ["case WIDE:", "case D_NARROW:"]),
        ("place.c", "width_of", ["case WIDE:"]),
        ("place_experts.c", "has_adapters", ALL),
        ("place_experts.c", "grad_rounds", ["bool trained ="]),
        ("fuse.c", "remake_swiglu", ["if (dw == w->op_count"]),
    ]),
    "latent attention (model.arch=deepseek)": ("kv_lora", [
        ("forward.c", "keep_latent", ALL),
        ("forward.c", "prepare", ["slot[Z] ="]),
        ("forward.c", "qd_pass_forward", [
            "const int64_t key =", "[KEY_COLS] = key", "[MIXED_COLS] =", "const qd_decl_op *join =", "if (join && join->ahead == 0)"]),
        ("recompute.c", "expand_again", ALL),
        ("recompute.c", "qd_pass_recompute", ["expand_again(w);"]),
    ]),
    "prediction modules (model.mtp_modules)": ("mtp", [
        ("forward.c", "state", ["op->ahead ="]),
        ("forward.c", "qd_pass_forward", ["if (d->ahead > 0 && !c->training)"]),
        ("gradient.c", "apply", ["op->ahead ="]),
        ("sequence.c", "state", ["op->ahead ="]),
        ("place_attention.c", "qd_place_attention", ["s.number[AHEAD] ="]),
    ]),
    "sliding windows (model.window), rotary angles by layer": ("window_from", [
        ("forward.c", "state", ["if (op->kind == QD_OP_ATTENTION || op->kind == QD_OP_ATTENTION_CACHED)"]),
        ("forward.c", "prepare", ["(d->local ? LOCAL : 0)"]),
        ("gradient.c", "apply", ["op->window ="]),
        ("sequence.c", "state", ["op->window =", "op->hop ="]),
        ("place_attention.c", "flops_of", ["int64_t window =", "for (int t = 0;", "return flops * qd_context_pairs"]),
        ("place_attention.c", "emit", ["next = qd_context_next_round", "const unsigned alone =", "s->number[HOP] ="]),
    ]),
    "attention sinks (model.sinks)": ("ATTENTION_SINK", [
        ("gradient.c", "sink_of", ALL),
        ("gradient.c", "find_source", ["if (source == SINK || source == SINK_GRAD)"]),
        ("place_attention.c", "qd_place_sink", ALL),
        ("place_attention.c", "qd_place_sink_grad", ALL),
        ("place_attention.c", "qd_place_cached", ALL),
        ("place_attention.c", "qd_place_attention", [
            "const qd_op *next =", "if (next && next->kind == QD_OP_ATTENTION_SINK)"]),
    ]),
    "biases of experts (model.mlp_bias)": ("mlp_bias", [
        ("fuse.c", "bias_in_grouped", ALL),
        ("place_experts.c", "qd_place_expert_bias", ALL),
    ]),
    "norms of queries and keys over their width": ("qk_norm_over", [
        ("place.c", "place", ["needs.slot[j] == 1 + TOTAL"]),
    ]),
    "scaled embeddings, epsilons, soft-caps of logits": ("softcap", [
        ("forward.c", "state", ["op->eps =", "if (op->kind == QD_OP_SCALE)"]),
        ("gradient.c", "apply", ["op->scale ="]),
        ("list.c", "qd_class_measure", ["op->cap ="]),
        ("sequence.c", "state", ["op->cap ="]),
    ]),
    "preferences (dpo.*)": ("preference", [
        ("place_ends.c", "qd_place_loss", ["const qd_group context =", "const bool pairs =", "if (pairs && gradients)"]),
    ]),
}

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


def print_side(title, sources, show):
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


def functions_of(text):
    """Name and lines of each function."""
    for match in BODY.finditer(without_comments(text)):
        name = re.search(r"(\w+)\(", match.group(0)).group(1)
        yield name, [line for line in match.group(0).split("\n") if line.strip()]


def find_lines(name, lines, texts):
    """Indices of the lines of the statements of a function that begin on a line with one of the texts."""
    chosen = set()
    for text in texts:
        first = [i for i, line in enumerate(lines) if text in line]
        if not first:
            sys.exit(f"{name} has no line with '{text}'")
        for i in first:
            end = i
            while not lines[end].rstrip().endswith((";", "{", ":", ",")):
                end += 1
            if lines[end].rstrip().endswith("{"):
                end = lines.index(re.match(" *", lines[i]).group(0) + "}", end)
            chosen.update(range(i, end + 1))
    return sorted(chosen)


def print_parity(before, now, read, show):
    print(f"{before:6}  functions of the hand-written lists ({BEFORE})\n{now:6}  functions of {PASSES}")
    listed = set()
    for feature, (word, places) in LATER.items():
        if subprocess.run(["git", "-C", ROOT, "grep", "-qi", "-e", word, BEFORE, "--", "src/spec"], check=False).returncode == 0:
            sys.exit(f"{feature}: {BEFORE} has '{word}' already")
        counted = []
        for path, wanted, texts in places:
            functions = [pair for pair in functions_of(read(f"{PASSES}/{path}")) if wanted in (pair[0], "*")]
            if not functions:
                sys.exit(f"{path} has no function {wanted}")
            for name, lines in functions:
                found = range(len(lines)) if texts is ALL else find_lines(f"{path}: {name}", lines, texts)
                if not listed.isdisjoint((path, name, i) for i in found):
                    sys.exit(f"{path}: {name}: a line is listed twice")
                listed.update((path, name, i) for i in found)
                counted.append((f"{path}: {name}", [lines[i] for i in found]))
        total = sum(len(lines) for _, lines in counted)
        now -= total
        print(f"{-total:6}  {feature}")
        for place, lines in counted:
            print(f"{-len(lines):14}  {place}")
            if show:
                print("\n".join(f"{'':18}{line}" for line in lines))
    print(f"{now:6}  functions of the passes that do what the hand-written lists did")


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
    parser.add_argument("--parity", action="store_true", help="without features that came later; with --files their lines")
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
    writers = [(path, at_commit(path), functions) for path, functions in WRITERS]
    passes = [(f"{PASSES}/{name}", today(f"{PASSES}/{name}"), None) for name in names]
    if arguments.parity:
        print_parity(*(sum(count(text, only)[0] for _, text, only in side) for side in (writers, passes)), today, show)
        return
    print("  functions      types     tables   total")
    print_side(f"hand-written lists ({BEFORE})", writers, show)
    print_side(f"passes ({PASSES})", passes, show)


if __name__ == "__main__":
    main()
