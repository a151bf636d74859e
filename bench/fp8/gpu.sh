#!/usr/bin/env bash
# Tests and measures fp8 on one GPU in less than three minutes, with the programs that pack.sh
# packed:
#
#   tar xJf build/fp8_gpu.tar.xz -C /tmp
#   bench/fp8/gpu.sh /tmp/fp8 [SECONDS]
#
# The most important comes first. Each step has a time limit, prints its result at once, and does
# not keep the next from running; no step begins after SECONDS (170). Where old/quadrille exists,
# its step is measured next to that of bin/quadrille, with the same algorithms of GEMMs. Logs: LOGS
# or /tmp/fp8_logs.
set -u
programs=$1 limit=${2:-170} logs=${LOGS:-/tmp/fp8_logs} root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$logs"
# PyTorch's libraries, for a machine without others
LD_LIBRARY_PATH=/usr/local/cuda/lib64:$(python3 -c 'import glob, os, sysconfig
print(":".join(sorted({os.path.dirname(p) for p in glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib/lib*.so*")})))')
export LD_LIBRARY_PATH QUADRILLE=$programs/bin/quadrille QUADRILLE_SOURCE=$root PYTHONUNBUFFERED=1

step() { # step NAME SECONDS SHOWN COMMAND...: SHOWN is a pattern of lines of the log to print
    local name=$1 most=$2 shown=$3 begin=$SECONDS
    shift 3
    if [ "$SECONDS" -ge "$limit" ]; then
        echo "== $name: not started, $SECONDS s are over"
        return
    fi
    [ "$most" -gt $((limit - SECONDS)) ] && most=$((limit - SECONDS))
    timeout -k 2 "$most" "$@" >"$logs/$name.log" 2>&1
    local status=$?
    echo "== $name: exit status $status, $((SECONDS - begin)) s"
    grep -E "$shown" "$logs/$name.log" | cut -c1-190
    if [ $status -ne 0 ]; then
        tail -n 12 "$logs/$name.log" | cut -c1-230
    fi
}
of_tests='FAILED|PASSED|LINE|layouts,|skipped: no CUDA|not supported|differ|elements|is not|apart|^\[ +ERROR'
of_steps='x 2048|ms a step|amax|cast|failed'
measure() { # measure NAME PROGRAM CASE WORDS...
    local name=$1 program=$2 case=$3
    shift 3
    step "$name" 75 "$of_steps" python3 "$root/bench/gpu_step/compare.py" "$case" --ours-only --quadrille "$program" \
        --warm-up 3 --repeat 8 --set train.precision=fp8 "${@/#/--set=}"
}
tuned=run.tuning=$logs/tuning

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
step casts_and_gemms 30 "$of_tests" "$programs/tests/ops/test_fp8" --isa cuda
step fused_casts 20 "$of_tests" "$programs/tests/ops/test_fp8_fused"
measure llama_new "$programs/bin/quadrille" llama3.2-1b "$tuned"
measure gpt3_new "$programs/bin/quadrille" gpt3-1.3b "$tuned"
if [ -e "$programs/old/quadrille" ]; then
    measure llama_old "$programs/old/quadrille" llama3.2-1b "$tuned"
fi
QUADRILLE_DEVICE=cuda QUADRILLE_LAYOUTS=8 step layouts 25 "$of_tests" "$programs/tests/equiv/test_fp8"
if [ -e "$programs/old/quadrille" ]; then
    measure gpt3_old "$programs/old/quadrille" gpt3-1.3b "$tuned"
fi
for recipe in row block; do # without a search: the library's first algorithms
    measure "llama_$recipe" "$programs/bin/quadrille" llama3.2-1b "fp8.recipe=$recipe" run.tuning=none run.tuning_seconds=0
done
step activations 15 "$of_tests" "$programs/tests/ops/test_activation" --isa cuda
step follows_the_cpu 60 'FAIL|OK|Error|step ' python3 "$root/tests/cli/test_cuda_fp8.py"
step speed_of_casts 15 '.' "$programs/tests/ops/test_fp8" --speed --isa cuda
echo "== $SECONDS s"
