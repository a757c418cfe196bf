#!/usr/bin/env bash
# Shows that a run is not tied to its processes or its mesh: GRPO on the demo's warm-up model with two data ranks is
# killed in the middle, and resumes with two context-parallel ranks, first on the batches that it had recorded. The
# trained model is in runs/resume_elsewhere/model. Run scripts/demo.sh first. This takes a minute or two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=runs/resume_elsewhere
if [ ! -x .venv/bin/slimefsdp ] || [ ! -f runs/sort_digits_sft/model/config.json ]; then
  echo "scripts/resume_elsewhere.sh: there is no warm-up model yet; run bash scripts/demo.sh first" >&2
  exit 1
fi
if [ -e "$run" ]; then
  echo "scripts/resume_elsewhere.sh: $run exists; move it away or remove it, and run this again" >&2
  exit 1
fi

train=(.venv/bin/slimefsdp train configs/sort_digits_grpo.yaml run.dir=$run run.steps=12
  checkpoint.interval_steps=4 rollout.engines=1 evaluation.interval_steps=6)

# in a process group of its own, so that the driver and all ranks can be killed together
set -m
"${train[@]}" &
first=$!
set +m
trap 'kill -KILL -- "-$first" 2>/dev/null || true' EXIT
until [ "$(grep -cs '"loss"' "$run/metrics.jsonl" || true)" -ge 6 ] 2>/dev/null; do
  kill -0 "$first" 2>/dev/null || { echo "scripts/resume_elsewhere.sh: the run ended by itself" >&2; exit 1; }
  sleep 0.1
done
kill -KILL -- "-$first"
wait "$first" 2>/dev/null || true
echo "killed after step 6; the newest checkpoint is $(cat "$run/checkpoints/latest")" >&2

"${train[@]}" checkpoint.resume=true mesh.dp=1 mesh.cp=2
echo "model in $run/model"
