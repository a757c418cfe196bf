"""Reports what a run of scripts/demo_llm.sh has learned: held-out accuracy of each family, before and after training.

    python scripts/demo_llm_report.py FOLDER [--json]

FOLDER has the run in `grpo`, with a held-out set for each family. Accuracy is the share of responses at temperature 1
that solve their problem, with its 95 % interval over problems.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from actors.rollout.evaluation import share_of
from slimefsdp.errors import ConfigError, SlimeError
from slimefsdp.monitoring.metrics_log import read_metrics


def report(folder: Path) -> dict[str, Any]:
    """Returns the figures of a run: `families` (name -> figures `before` and `after`), and metrics of the whole run.

    Raises:
        ConfigError: the folder does not have two evaluations.
    """
    run = folder / "grpo"
    families = {}
    for heldout_set in sorted(run.glob("evaluations/*")):
        evaluations = sorted(heldout_set.glob("step_*.jsonl"))
        if len(evaluations) > 1:
            sides = {"before": evaluations[0], "after": evaluations[-1]}
            families[heldout_set.name] = {side: _accuracy(file) for side, file in sides.items()}
    if not families:
        raise ConfigError(
            f"{run} has no two evaluations to compare",
            field="FOLDER",
            hint="name a folder of scripts/demo_llm.sh whose run has ended",
        )
    rows = read_metrics(run)
    trained = [row for row in rows if "rollout_mismatch" in row]
    steps = [row for row in rows if "seconds/step" in row]
    return {
        "families": families,
        "steps": max(int(row["step"]) for row in rows),
        "updates": len(trained),
        "rollout_mismatch": fmean(row["rollout_mismatch"] for row in trained),
        "rollout_mismatch_max": max(row["rollout_mismatch_max"] for row in trained),
        "entropy": [trained[0]["entropy"], trained[-1]["entropy"]],
        "zero_variance_groups": [fmean(row["zero_variance_groups"] for row in part) for part in _ends(trained)],
        "training_reward": [fmean(row["rollout/reward"] for row in part) for part in _ends(steps)],
        "response_length": [steps[0]["rollout/response_length"], steps[-1]["rollout/response_length"]],
        "training_seconds": sum(row["seconds/step"] for row in steps),
    }


def _ends(rows: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    return rows[:5], rows[-5:]


def _accuracy(file: Path) -> dict[str, Any]:
    responses: dict[str, list[dict[str, Any]]] = defaultdict(list)  # prompt -> its responses
    for line in file.read_text().splitlines():
        row = json.loads(line)
        responses[row["prompt"]].append(row)
    rows = [row for group in responses.values() for row in group]
    ended = [row for row in rows if row["finished"]]
    groups = responses.values()
    share = share_of([fmean(map(_is_solved, group)) for group in groups], min(map(len, groups)))
    return {
        "problems": len(responses),
        "responses": len(rows),
        "solved": share.value,
        "interval": [share.low, share.high],
        "finished": len(ended) / len(rows),
        "solved_of_finished": fmean(map(_is_solved, ended)) if ended else None,
        "mentioned": fmean(row["scores"]["mentioned"] for row in rows),
        "answer_only": fmean(row["scores"]["answer_only"] for row in rows),
    }


def _is_solved(row: dict[str, Any]) -> float:
    """Returns 1 if the problem is solved, else 0; the control run logs this as `solved` and rewards something else."""
    scores = row["scores"]
    return float(scores.get("solved", scores["reward"]) >= 1)


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| held-out family | problems | solved before | after | of finished before | after | finished before | after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, sides in figures["families"].items():
        before, after = sides["before"], sides["after"]
        lines.append(
            f"| `{family}` | {before['problems']} | {_with_interval(before)} | {_with_interval(after)} "
            f"| {_text(before['solved_of_finished'])} | {_text(after['solved_of_finished'])} "
            f"| {_text(before['finished'])} | {_text(after['finished'])} |"
        )
    return "\n".join(lines)


def _with_interval(side: dict[str, Any]) -> str:
    return f"{side['solved']:.3f} ({side['interval'][0]:.3f} to {side['interval'][1]:.3f})"


def _text(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def last_line(folder: Path, figures: dict[str, Any]) -> str:
    gains = ", ".join(
        f"{family} {sides['before']['solved']:.3f} -> {sides['after']['solved']:.3f}"
        for family, sides in figures["families"].items()
    )
    run = folder / "grpo"
    return (
        f"{_model_of(run)}, held-out solved: {gains} in {figures['steps']} steps, "
        f"{figures['training_seconds']:.0f} s; rollout/trainer log-probs apart by {figures['rollout_mismatch']:.1e}, "
        f"at most {figures['rollout_mismatch_max']:.1e}; curves in {run / 'curves.png'}; model in {run / 'model'}"
    )


def _model_of(run: Path) -> str:
    """Returns the name of the model; the folder that the demo writes has SmolLM2."""
    folder = Path(yaml.safe_load((run / "settings.yaml").read_text())["model"]["path"]).name
    return "SmolLM2-135M-Instruct" if folder == "smollm2" else folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of one run, e.g. runs/demo_llm/seed_0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        figures = report(options.folder)
    except SlimeError as error:
        print(f"error [{error.code}]: {error}", file=sys.stderr)
        return error.exit_code
    print(
        json.dumps(figures, indent=1) if options.json else f"{table(figures)}\n\n{last_line(options.folder, figures)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
