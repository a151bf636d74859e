# Quadrille in a container, as its Debian package.
#
#   docker build -t quadrille .                                           CPU
#   docker build -t quadrille:cuda --build-arg CUDA=on \
#       --build-arg BUILD_IMAGE=nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04 \
#       --build-arg RUN_IMAGE=nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04 .   NVIDIA GPUs
#
#   docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/work" --shm-size=2g quadrille train run.yaml
#   docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/work" --shm-size=8g --gpus all quadrille:cuda train run.yaml --device cuda
#   docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/work" --network host quadrille serve
#
# Local ranks exchange data through /dev/shm, of which a container has 64 MB: --shm-size sets it. --user
# lets the run write to the mounted folder; --network host lets the browser reach 127.0.0.1.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG RUN_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
ARG CUDA=off
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY tools/bootstrap.sh tools/
RUN tools/bootstrap.sh dpkg-dev libmicrohttpd-dev
COPY . .
RUN make deb CMAKE_ARGS=-DQD_CUDA=${CUDA}

FROM ${RUN_IMAGE}
RUN --mount=from=build,source=/source/build,target=/package \
    apt-get update && apt-get install -y --no-install-recommends openmpi-bin /package/quadrille_*.deb && \
    rm -rf /var/lib/apt/lists/*
# A user without privileges; mpirun need not be told that it may run as root.
RUN useradd --create-home --uid 10000 quadrille && mkdir /work && chown quadrille /work
USER quadrille
# A user without a home folder caches here.
ENV XDG_CACHE_HOME=/tmp/cache
WORKDIR /work
ENTRYPOINT ["quadrille"]
CMD ["help"]
