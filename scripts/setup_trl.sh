#!/usr/bin/env bash
# Makes an environment for TRL, which benchmarks/rl_step.py measures. FOLDER is .venv-trl by default. Does nothing if
# this was done before in the folder, for the same versions. TORCH names another build of torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case "${1:-}" in
  -*) echo "usage: bash scripts/setup_trl.sh [FOLDER]" >&2; exit 2 ;;
  "") folder=$root/.venv-trl ;;
  *) folder=$1 ;;
esac

# torch is installed first, so that the chosen build is kept; transformers has the version in constraints.txt
torch=${TORCH:-torch==2.13.0}
requirements=(trl==1.16.0 transformers==5.23.0 accelerate==1.15.0)

python=
for name in python3 python3.13 python3.12 python3.11; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$name; break; fi
done
if [ -z "$python" ]; then
  echo "scripts/setup_trl.sh: Python 3.11 or newer is needed, python3 here is: $(python3 --version 2>&1 || true)" >&2
  exit 1
fi

stamp=$folder/slimefsdp-setup
inputs="$torch ${requirements[*]}"
if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
  echo "scripts/setup_trl.sh: $folder has $inputs already" >&2
  exit 0
fi

if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
  echo "scripts/setup_trl.sh: $folder is there and is no virtual environment; give another folder" >&2
  exit 1
fi
unset PYTHONPATH  # pip would count what it finds there as installed
"$python" -m venv --clear "$folder" || {
  echo "scripts/setup_trl.sh: $python cannot make a virtual environment; install its venv module (python3-venv)" >&2
  exit 1
}
echo "scripts/setup_trl.sh: installing $inputs into $folder; it takes minutes and about 1.5 GB" >&2
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
"$folder/bin/python" -c 'import importlib.metadata as m; print("scripts/setup_trl.sh: trl", m.version("trl"), "with torch", m.version("torch"))' >&2
echo "$inputs" >"$stamp"
echo "scripts/setup_trl.sh: give benchmarks/rl_step.py --trl-python $folder/bin/python" >&2
