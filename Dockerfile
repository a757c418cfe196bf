# syntax=docker/dockerfile:1
# The image for machines with NVIDIA GPUs; docs/docker.md says how to build and run it, and what of it was tried.
# Needs BuildKit (the default since Docker 23). Targets, the last of which `docker build .` makes:
#   vllm     the trainer and, in /venv-vllm, vLLM for `rollout.engine: vllm`
#   kernels  the trainer and the packages of the `cuda` extra, compiled
#   trainer  all that `slimefsdp` needs, with the extras data, serve and wandb
# torch's wheels bring CUDA's libraries, so the base image has only what makes the driver visible.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base
# gcc and Python's headers are for `model.compile`: Triton makes a launcher in C when a process first uses it. The
# libraries of rdma-core are what NCCL uses InfiniBand and RoCE by; without them it falls back to TCP.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 python3 python3-dev python3-venv rdma-core \
    && rm -rf /var/lib/apt/lists/*
# Whoever runs the container owns the environments, so that packages of a reward function can be added. Any other user
# (docker run --user) can write to the home, to data and to runs.
RUN useradd --create-home --uid 10001 slimefsdp \
    && install --directory --owner slimefsdp /src /venv /venv-vllm \
    && install --directory --owner slimefsdp --mode 1777 /home/slimefsdp /home/slimefsdp/data /home/slimefsdp/runs
# models and data sets of the Hugging Face hub are kept below data/, which a volume holds from one container to the next
ENV HOME=/home/slimefsdp USER=slimefsdp HF_HOME=/home/slimefsdp/data/huggingface
WORKDIR /home/slimefsdp
USER 10001
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
# torch first and alone, so that a change of the code reuses this layer
COPY --chown=10001 constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt torch
COPY --chown=10001 pyproject.toml README.md LICENSE /src/
COPY --chown=10001 slimefsdp /src/slimefsdp
COPY --chown=10001 actors /src/actors
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[data,serve,wandb]"
COPY --chown=10001 configs configs
COPY --chown=10001 scripts scripts
COPY --chown=10001 examples examples
ENTRYPOINT ["slimefsdp"]

# vLLM in an environment of its own: it needs other releases than the trainer.
FROM base AS vllm
RUN python3 -m venv /venv-vllm \
    && /venv-vllm/bin/pip install --no-cache-dir vllm==0.32.0

# flash-attn has no wheels for this torch, so it is compiled, by a CUDA compiler that stays in this stage.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS wheels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt torch \
    && pip install --no-cache-dir -c /src/constraints.txt setuptools packaging psutil wheel==0.45.1 ninja==1.13.0
# 80 is A100, 90 is H100 and H200, 100 and 120 are Blackwell; each costs many minutes. A job needs several GB of memory.
ARG CUDA_ARCHS="80;90"
ARG BUILD_JOBS=4
RUN FLASH_ATTN_CUDA_ARCHS="$CUDA_ARCHS" MAX_JOBS="$BUILD_JOBS" FLASH_ATTENTION_FORCE_BUILD=TRUE \
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels \
    flash-attn==2.8.3.post2 ring-flash-attn==0.1.8

FROM base AS kernels
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /src/constraints.txt /wheels/*.whl "/src[cuda]"

FROM base AS trainer
