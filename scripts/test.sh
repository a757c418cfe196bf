#!/usr/bin/env bash
# The tests, in two processes:
#
#   bash scripts/test.sh         the default tier: every module of the product, in minutes
#   bash scripts/test.sh --all   all of them, linters and the wheel included; then those that touch transformers with the
#                                lowest version that is supported, those of a real vLLM, where scripts/setup_vllm.sh can
#                                install it (3 GB), and an audit of the packages (scripts/audit.sh)
#   bash scripts/test.sh --engines   tests of a real vLLM, including training runs with it
#   bash scripts/test.sh --cookbook  recipes of tinker-cookbook against the service (scripts/setup_cookbook.sh, 1.6 GB)
#   bash scripts/test.sh ARGS    the tests that these pytest arguments select, in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import this project: it is compiled once
# the tests of one module stay together, and in their order
both=(-n 2 --dist loadfile --no-loadscope-reorder)
case "$*" in
  "") exec .venv/bin/python -m pytest "${both[@]}" ;;
  --all) ;;
  --engines)
    bash scripts/setup_vllm.sh
    export SLIMEFSDP_VLLM_PYTHON=$PWD/.venv-vllm/bin/python
    exec .venv/bin/python -m pytest tests/engines/real
    ;;
  --cookbook)
    bash scripts/setup_cookbook.sh
    export SLIMEFSDP_COOKBOOK_PYTHON=$PWD/.venv-cookbook/bin/python
    exec .venv/bin/python -m pytest tests/service/test_cookbook.py
    ;;
  *) exec .venv/bin/python -m pytest "$@" ;;
esac

audit=0
bash scripts/audit.sh .venv/bin/python || audit=$?
log=$(mktemp) vllm_log=$(mktemp) lowest_log=$(mktemp)
# 3 GB come while the tests run
timeout 1800 bash scripts/setup_vllm.sh >"$vllm_log" 2>&1 &
vllm=$!
trap 'kill "$vllm" 2>/dev/null || true; rm -f "$log" "$vllm_log" "$lowest_log"' EXIT
.venv/bin/python -m pytest --all "${both[@]}" --durations 40
if ((SECONDS > 3000)); then  # a slow machine, on which the rest would take longer than continuous integration waits
  echo "scripts/test.sh: after $SECONDS s the lowest transformers and a real vLLM were not tested" >&2
  exit "$audit"
fi
# what follows is shown only when it fails, so that the line above with the number of passed tests stays the last one
failed() {  # LOG WHAT
  cat "$1"
  echo "scripts/test.sh: failed $2" >&2
  exit 1
}
bash scripts/test_lowest_transformers.sh .venv/bin/python >"$lowest_log" 2>&1 &
lowest=$!
trap 'kill "$vllm" "$lowest" 2>/dev/null || true; rm -f "$log" "$vllm_log" "$lowest_log"' EXIT
if wait "$vllm"; then
  export SLIMEFSDP_VLLM_PYTHON=$PWD/.venv-vllm/bin/python
  .venv/bin/python -m pytest --all tests/engines/real/test_vllm.py \
    "tests/engines/real/test_vllm_runs.py::test_a_run_samples_from_a_server_what_it_trains_on[in turn]" \
    >"$log" 2>&1 || failed "$log" "with a real vLLM"
else
  tail -3 "$vllm_log" >&2
  echo "scripts/test.sh: vLLM could not be installed, and was not tested" >&2
fi
wait "$lowest" || failed "$lowest_log" "with the lowest supported transformers"
exit "$audit"
