#!/usr/bin/env bash
# Makes an environment for the recipes of tinker-cookbook, which tests/service/test_cookbook.py runs against the
# service. FOLDER is .venv-cookbook by default. Does nothing if this was done before in the folder, for the same
# versions. TORCH names another build of torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case "${1:-}" in
  -*) echo "usage: bash scripts/setup_cookbook.sh [FOLDER]" >&2; exit 2 ;;
  "") folder=$root/.venv-cookbook ;;
  *) folder=$1 ;;
esac

# torch is installed first, so that the chosen build is kept
torch=${TORCH:-torch==2.13.0}
# the requirements of tinker-cookbook with its extra math-rl; other versions come from constraints.txt
requirements=(
  tinker==0.38.0 tml-renderers==0.2.1 aiohttp==3.14.5 blobfile==3.3.0 chz==0.4.0 cloudpickle==3.1.3 pyrage==1.4.0
  termcolor==3.3.0 tiktoken==0.14.0 pylatexenc==2.11 math-verify==0.9.0 sympy anyio datasets huggingface_hub numpy pillow
  pydantic rich safetensors tqdm transformers
)
# tinker-cookbook asks for tml-renderers>=0.4.1, which is not published; the version above is enough for its recipes
cookbook=tinker-cookbook==0.6.1

python=
for name in python3 python3.13 python3.12 python3.11; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$name; break; fi
done
if [ -z "$python" ]; then
  echo "scripts/setup_cookbook.sh: Python 3.11 or newer is needed, python3 here is: $(python3 --version 2>&1 || true)" >&2
  exit 1
fi

stamp=$folder/slimefsdp-setup
inputs="$cookbook $torch ${requirements[*]} $(cksum <"$root/constraints.txt")"
if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
  echo "scripts/setup_cookbook.sh: $folder has $cookbook already" >&2
  exit 0
fi

if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
  echo "scripts/setup_cookbook.sh: $folder is there and is no virtual environment; give another folder" >&2
  exit 1
fi
unset PYTHONPATH  # pip would count what it finds there as installed
"$python" -m venv --clear "$folder" || {
  echo "scripts/setup_cookbook.sh: $python cannot make a virtual environment; install its venv module (python3-venv)" >&2
  exit 1
}
echo "scripts/setup_cookbook.sh: installing $cookbook into $folder; it takes minutes and about 1.6 GB" >&2
install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${install[@]}" "$torch"
"${install[@]}" --constraint "$root/constraints.txt" "${requirements[@]}"
"${install[@]}" --no-deps "$cookbook"
"$folder/bin/python" -c 'import importlib.metadata as m; print("scripts/setup_cookbook.sh:", *(f"{name} {m.version(name)}" for name in ("tinker-cookbook", "tinker", "tml-renderers", "torch", "transformers")))' >&2
echo "$inputs" >"$stamp"
echo "scripts/setup_cookbook.sh: set SLIMEFSDP_COOKBOOK_PYTHON to $folder/bin/python" >&2
