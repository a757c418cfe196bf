#!/usr/bin/env bash
# Runs all steps on one machine: data, supervised warm-up, then GRPO with two trainer ranks. Arguments are settings for
# the GRPO run, e.g. bash scripts/demo.sh run.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for setting in "$@"; do
  case "$setting" in
    *.*=*) ;;
    *) echo "scripts/demo.sh: $setting is not of the form section.name=value, e.g. run.seed=1" >&2; exit 2 ;;
  esac
done
bash scripts/setup.sh

# only folders with this mark are removed, so that a user's own run with the same name is kept
mark=.written-by-demo
run_dirs=(runs/sort_digits_sft runs/sort_digits_grpo)
for dir in "${run_dirs[@]}"; do
  if [ -d "$dir" ] && [ ! -e "$dir/$mark" ]; then
    echo "scripts/demo.sh: $dir was not written by an earlier demo; move it away and run this again" >&2
    exit 1
  fi
done
rm -rf "${run_dirs[@]}"
mark_run_dirs() {
  for dir in "${run_dirs[@]}"; do
    if [ -d "$dir" ]; then touch "$dir/$mark"; fi
  done
}
trap mark_run_dirs EXIT

# heldout.jsonl is the last file that the script writes
[ -f data/sort_digits/heldout.jsonl ] || .venv/bin/python scripts/make_sort_digits.py data/sort_digits
.venv/bin/slimefsdp train configs/sort_digits_sft.yaml
.venv/bin/slimefsdp train configs/sort_digits_grpo.yaml "$@"
