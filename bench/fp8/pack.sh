#!/usr/bin/env bash
# Packs what gpu.sh runs on a machine with a GPU: build/fp8_gpu.tar.xz, with the programs of this
# tree and, to compare with, the program of another build of pack.sh's kind:
#
#   bench/fp8/pack.sh [OLD_BUILD/bin/quadrille]
#
# ARCHITECTURE=90a-real (the default): H100 and H200.
set -euo pipefail
cd "$(dirname "$0")/../.."
cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DQD_CUDA=on -DQD_MPI=off -DQD_STATIC_DEPS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURE:-90a-real}" >build/gpu.log
ninja -C build/gpu quadrille-program ops-fp8 ops-fp8_fused ops-activation equiv-fp8
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
install -D -s build/gpu/bin/quadrille "$folder/fp8/bin/quadrille"
if [ $# -gt 0 ]; then
    install -D -s "$1" "$folder/fp8/old/quadrille"
fi
for program in ops/test_{fp8,fp8_fused,activation} equiv/test_fp8; do
    install -D -s "build/gpu/tests/$program" "$folder/fp8/tests/$program"
done
if [ -d build/gpu/lib ]; then # libraries without a .a file are loaded from next to the programs
    find build/gpu/lib -name '*.so*' -exec install -D -t "$folder/fp8/lib" {} +
fi
tar c -C "$folder" fp8 | xz -T1 --lzma2=preset=1,dict=192MiB >build/fp8_gpu.tar.xz # programs have most bytes in common
ls -l build/fp8_gpu.tar.xz
