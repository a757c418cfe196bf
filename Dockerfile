# syntax=docker/dockerfile:1
# slimefsdp on CUDA 13.0, the version that torch's own wheels are built for. Needs BuildKit (the default since Docker 23).
#   docker build -t slimefsdp .
#   docker run --rm --gpus all --shm-size 8g --user "$(id -u)" --env HOME=/tmp \
#       -v "$PWD/data:/home/slimefsdp/data" -v "$PWD/runs:/home/slimefsdp/runs" slimefsdp train configs/NAME.yaml
# with the models and data that the YAML names under data/ or runs/, and as yourself, who may write there.

# The optional kernels of the `cuda` extra have no wheels for this torch: they are compiled here, and CUDA's compiler stays here.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS kernels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt torch \
    && pip install --no-cache-dir -c /src/constraints.txt setuptools packaging wheel==0.45.1 ninja==1.13.0 psutil==7.1.3
# 80 is A100, 90 is H100 and H200, 100 and 120 are Blackwell; each costs many minutes. A job needs several GB of memory.
ARG CUDA_ARCHS="80;90"
ARG BUILD_JOBS=4
RUN FLASH_ATTN_CUDA_ARCHS="$CUDA_ARCHS" MAX_JOBS="$BUILD_JOBS" FLASH_ATTENTION_FORCE_BUILD=TRUE \
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels \
    flash-attn==2.8.3.post2 ring-flash-attn==0.1.8

# gcc and Python's headers are for `model.compile`: Triton makes a launcher in C when a process first uses it.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 slimefsdp
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
# torch first and alone, so that a change of the code reuses this layer
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt torch
COPY pyproject.toml README.md LICENSE /src/
COPY slimefsdp /src/slimefsdp
COPY actors /src/actors
RUN --mount=type=bind,from=kernels,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /src/constraints.txt /wheels/*.whl "/src[cuda]"
WORKDIR /home/slimefsdp
COPY configs configs
COPY scripts scripts
# so that a volume mounted on either starts out as the user's
RUN install --directory --owner slimefsdp --group slimefsdp data runs
USER 10001
ENTRYPOINT ["slimefsdp"]
