#!/usr/bin/env bash
# A first tour: trains a tokenizer and a small Llama-style model on four local ranks, compares it
# with a trigram model, and generates text. `make demo` builds the program and runs this; extra
# arguments are settings, for example --ranks 2.
set -euo pipefail

quadrille=${QUADRILLE:-$(dirname "$0")/../build/release/bin/quadrille}
[ -n "${QUADRILLE:-}" ] || [ -e "$quadrille" ] || quadrille=quadrille # installed
if ! quadrille=$(command -v "$quadrille"); then
    echo "demo: ${QUADRILLE:-build/release/bin/quadrille} does not exist; make demo builds it" >&2
    exit 1
fi
quadrille=$(realpath "$quadrille")
cd "$(dirname "$0")/.."
begin=$SECONDS

say() {
    if [ -t 1 ]; then printf '\n\033[1m%s\033[0m\n' "$*"; else printf '\n%s\n' "$*"; fi
}

say "1. Training on four ranks of this machine: quadrille train examples/demo.yaml"
"$quadrille" train examples/demo.yaml "$@"

say "2. Text that it has never seen: quadrille eval runs/demo --baseline"
"$quadrille" eval runs/demo --baseline

say "3. Its own words: quadrille generate runs/demo --prompt \"And God said\""
"$quadrille" generate runs/demo --prompt "And God said" --tokens 120 --temperature 0.7 --seed 4 2>/dev/null

say "That took $((SECONDS - begin)) s. What to try next"
q=quadrille
[ "$(command -v quadrille || true)" -ef "$quadrille" ] || q=${quadrille#"$PWD/"}
next() { printf '  %s  # %s\n' "$1" "$2"; }
next "$q generate runs/demo --prompt \"The LORD\" --seed 2" "another sample"
next "$q train examples/demo.yaml --ranks 2 --dir runs/two" "another number of ranks: the same losses up to rounding"
next "$q verify examples/demo.yaml --against \"ranks=1 dp=1\"" "checks that: four ranks against one"
next "$q train examples/demo.yaml --steps 20 --trace --dir runs/t" "a timeline of all ranks: open runs/t/trace.json at ui.perfetto.dev"
if command -v mpirun >/dev/null; then
    # Open MPI needs flags to run as root and to run more ranks than cores; both are common in
    # containers.
    flags=
    if mpirun --version 2>/dev/null | grep -q "Open MPI"; then
        [ "$(id -u)" != 0 ] || flags="--allow-run-as-root "
        flags+="--oversubscribe "
    fi
    next "mpirun ${flags}-n 4 $q train examples/demo.yaml --dir runs/mpi" "the same under MPI"
fi
next "$q check examples/demo.yaml --print 0" "the step program of rank 0, action by action"
echo "  docs/tutorial.md shows the same with your own text; runs/demo/metrics.jsonl has every step"
