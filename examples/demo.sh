#!/usr/bin/env bash
# Trains a small Llama-style model on four local ranks and shows what happens. Run it with `make demo`.
set -euo pipefail

cd "$(dirname "$0")/.."
quadrille=${QUADRILLE:-quadrille}
if ! command -v "$quadrille" >/dev/null 2>&1; then
    echo "demo: the program '$quadrille' is not there; run: make demo" >&2
    exit 1
fi

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

say "The training, on four ranks of this machine: quadrille train examples/demo.yaml --trace"
"$quadrille" train examples/demo.yaml --trace "$@"

say "What to try next"
cat <<'TEXT'
  runs/demo/metrics.jsonl      every step, as JSON
  runs/demo/trace.json         who did what when: open it at https://ui.perfetto.dev
  quadrille train examples/demo.yaml --ranks 2 --dir runs/two        another number of ranks: the same losses, to rounding
  quadrille verify examples/demo.yaml --against "ranks=1 dp=1"        ... and the proof
  quadrille check examples/demo.yaml --print 0                       the step program of rank 0, action by action
  mpirun -n 4 quadrille train examples/demo.yaml                     the same under MPI
  quadrille help train                                               all settings
TEXT
