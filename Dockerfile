# Quadrille in a container, as its Debian package.
#
#   docker build -t quadrille .                                           CPU
#   docker build -t quadrille:cuda --build-arg CUDA=on \
#       --build-arg BUILD_IMAGE=nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04 \
#       --build-arg RUN_IMAGE=nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04 .   NVIDIA GPUs
#
#   docker run --rm -it -v "$PWD:/work" quadrille train run.yaml
#   docker run --rm -it -v "$PWD:/work" --gpus all --shm-size=8g quadrille:cuda train run.yaml --device cuda
#
# Local ranks exchange data through /dev/shm, of which a container has 64 MB: --shm-size sets it.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG RUN_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
ARG CUDA=off
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY tools/bootstrap.sh tools/
RUN tools/bootstrap.sh dpkg-dev
COPY . .
RUN make deb CMAKE_ARGS=-DQD_CUDA=${CUDA}

FROM ${RUN_IMAGE}
RUN --mount=from=build,source=/source/build,target=/package \
    apt-get update && apt-get install -y --no-install-recommends openmpi-bin /package/quadrille_*.deb && \
    rm -rf /var/lib/apt/lists/*
# A user without privileges; mpirun need not be told that it may run as root.
RUN useradd --create-home --uid 10000 quadrille && mkdir /work && chown quadrille /work
USER quadrille
WORKDIR /work
ENTRYPOINT ["quadrille"]
CMD ["help"]
