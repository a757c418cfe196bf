#!/usr/bin/env bash
# All tests, or those that the arguments choose: bash scripts/test.sh [arguments for pytest]
# Without arguments the tests that touch transformers run a second time, with the lowest version that is supported, and
# the installed packages are audited (scripts/audit.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
audit=0
if [ $# -eq 0 ]; then bash scripts/audit.sh .venv/bin/python || audit=$?; fi
.venv/bin/python -m pytest "$@"

if [ $# -eq 0 ]; then
  # shown only when it fails, so that the line above with the number of passed tests stays the last one
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  bash scripts/test_lowest_transformers.sh .venv/bin/python >"$log" 2>&1 || {
    code=$?
    cat "$log"
    echo "scripts/test.sh: failed with the lowest supported transformers" >&2
    exit "$code"
  }
fi
exit "$audit"
