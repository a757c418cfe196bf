#!/usr/bin/env bash
# A virtual environment for each peer of benchmarks/train_step.py:   bash benchmarks/peers/setup.sh DIR
# TORCH and TRL name other versions, PYTHON another interpreter.
set -euo pipefail
target=${1:?"usage: bash benchmarks/peers/setup.sh DIR"}
mkdir -p "$target"

make() { # name, packages after torch: torch goes first, so that nothing replaces the build chosen for this machine
    "${PYTHON:-python3}" -m venv "$target/$1"
    "$target/$1/bin/pip" install --quiet "${TORCH:-torch==2.13.0}" numpy safetensors
    "$target/$1/bin/pip" install --quiet "${@:2}"
    "$target/$1/bin/pip" list 2>/dev/null | grep -E '^(torch|trl|transformers|accelerate|peft) ' || true
}

make hugging_face transformers
make trl "${TRL:-trl}" peft
