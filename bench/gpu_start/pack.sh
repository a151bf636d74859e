#!/usr/bin/env bash
# Packs the programs that measure.py needs for a machine with a GPU but without our libraries:
# build/gpu.tar.xz. On that machine:
#
#   tar xJf build/gpu.tar.xz -C /tmp
#   python3 bench/gpu_start/measure.py --quadrille /tmp/gpu/bin/quadrille --tests /tmp/gpu/tests
#
# ARCHITECTURE=90a-real (the default): H100 and H200.
set -euo pipefail
cd "$(dirname "$0")/../.."
cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DQD_CUDA=on -DQD_MPI=off -DQD_STATIC_DEPS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURE:-90a-real}" >build/gpu.log
ninja -C build/gpu quadrille-program bench-cuda-kernels ops-cuda_matmul ops-matmul ops-optimizer ops-cross_entropy
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for program in bin/quadrille bench/bench-cuda-kernels tests/ops/test_{cuda_matmul,matmul,optimizer,cross_entropy}; do
    install -D -s "build/gpu/$program" "$folder/gpu/$program"
done
if [ -d build/gpu/lib ]; then # libraries without a .a file are loaded from next to the programs
    find build/gpu/lib -name '*.so*' -exec install -D -t "$folder/gpu/lib" {} +
fi
tar cJf build/gpu.tar.xz -C "$folder" gpu
ls -l build/gpu.tar.xz
