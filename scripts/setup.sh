#!/usr/bin/env bash
# Makes .venv and installs slimefsdp into it with the versions of constraints.txt; --dev adds what the tests need,
# --demo-llm what scripts/demo_llm.sh needs.
# Does nothing if this was done before in this folder, for the same pyproject.toml and constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  "") extra="" ;;
  --dev) extra="[dev]" ;;
  --demo-llm) extra="[gguf,reasoning-gym]" ;;
  *) echo "usage: bash scripts/setup.sh [--dev | --demo-llm]" >&2; exit 2 ;;
esac

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if is_new_enough "$name"; then echo "$name"; return; fi
  done
  echo "scripts/setup.sh: Python 3.11 or newer is needed, python3 here is: $(python3 --version 2>&1 || true)" >&2
  echo "scripts/setup.sh: install a newer one as python3, python3.13, python3.12 or python3.11, and run this again" >&2
  return 1
}

stamp=.venv/slimefsdp-setup
inputs=$({ pwd; cat pyproject.toml constraints.txt; } | cksum)
if is_new_enough .venv/bin/python; then
  # the dev extra includes what the demos need
  for done_before in "$inputs$extra" "${inputs}[dev]"; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$done_before" ]; then exit 0; fi
  done
else
  python=$(find_python)
  "$python" -m venv --clear .venv || {
    rm -rf .venv
    echo "scripts/setup.sh: $python cannot make a virtual environment; install its venv module (python3-venv)" >&2
    exit 1
  }
fi

rm -f "$stamp"
pip_install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt)
echo "scripts/setup.sh: installing torch, the largest download" >&2
"${pip_install[@]}" torch
echo "scripts/setup.sh: installing slimefsdp$extra" >&2
"${pip_install[@]}" -e ".$extra"
echo "$inputs$extra" >"$stamp"
