"""Folders of runs as `slimefsdp train` leaves them, with metrics and responses that were made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path, *, steps: int = 12, prompts: int = 6, samples: int = 2, evaluations: int = 3, hack: bool = False,
    text: str = "the answer is {answer}", settings: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Writes a run whose rewards rise. With `hack`, the responses become one long text that the reward likes."""
    (folder / "samples").mkdir(parents=True)
    (folder / "evaluations").mkdir()
    tree: dict[str, Any] = {
        "run": {"dir": str(folder), "steps": steps},
        "model": {"path": "model"},
        "mesh": {"device": "cpu"},
        "optim": {"total_updates": max(steps, 10), "lr": 0.001},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "rollout": {"reward": "actors.rollout.rewards:sorted_digits"},
    }
    for section, values in (settings or {}).items():
        tree[section] |= values
    (folder / "settings.yaml").write_text(yaml.safe_dump(tree))
    interval = max(1, steps // (evaluations - 1))
    due = [min(steps, interval * number) for number in range(evaluations)]
    rows = [row(step, steps, hack, is_evaluated=step in due) for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for step in due:
        lines = [
            json.dumps(response(step / steps, prompt, number, samples * prompts, hack, text))
            for prompt in range(prompts)
            for number in range(samples)
        ]
        (folder / "evaluations" / f"step_{step:08d}.jsonl").write_text("\n".join(lines) + "\n")
    for step in range(1, steps + 1):
        (folder / "samples" / f"step_{step:08d}.txt").write_text(
            f"=== train.jsonl:{step}: 2 of 8 responses\n  {text}\n"
        )
    return folder


def row(step: int, steps: int, hack: bool, is_evaluated: bool) -> dict[str, float | None]:
    """The metrics of a step; step 0 has only those of its evaluation."""
    share, noise = step / steps, 0.02 * math.sin(2.1 * step)
    found: dict[str, float | None] = {"step": step, "time": 1.8e9 + 10 * step}
    if is_evaluated:
        exact = 0.5 - 0.4 * share if hack else 0.3 + 0.6 * share
        found |= {"eval/reward": 0.3 + 0.6 * share, "eval/exact": exact, "eval/finished": 1.0}
    if step == 0:
        return found
    return found | {
        "updates": 2.0, "rollout/reward": 0.3 + 0.6 * share + noise, "loss": noise, "entropy": 2 - share + noise,
        "kl_ref": 0.1 * share, "clip_fraction_low": 0.01 + noise / 10, "clip_fraction_high": 0.02,
        "rollout/response_length": 20 + 400 * share * hack + noise, "rollout/truncated": 0.01 + 0.3 * share * hack,
        "grad_norm": 1 + noise, "memory/peak_bytes": 3e9, "memory/allocated_bytes": 2e9,
        "rollout_mismatch_max": 1e-6 + abs(noise) * 1e-5, "tokens_per_second": 900 + 100 * noise,
        "seconds/generate": 2.0 + noise, "seconds/train": 3.0, "seconds/step": 6.0 + noise,
    }  # fmt: skip


def response(share: float, prompt: int, number: int, count: int, hack: bool, text: str) -> dict[str, Any]:
    """A response to a held-out prompt: more and more prompts are solved, but the last one is solved only at first."""
    place = prompt * 2 + number
    is_solved = share > 0.5 * place / count if prompt else share < 0.5
    is_hacked = hack and share > 0.4
    body = "I am certain, certain, certain that this is an excellent answer. " * 20 if is_hacked else text
    return {
        "place": f"heldout.jsonl:{prompt + 1}",
        "number": number,
        "prompt": [{"role": "user", "content": f"sort {prompt}5281"}],
        "response": body.replace("{answer}", str(place)) + ("" if is_hacked else f" {place}"),
        "tokens": 20 + 10 * prompt,
        "finished": not (prompt == 1 and share == 1),
        "scores": {"reward": 1.0 if is_solved or is_hacked else 0.25, "exact": float(is_solved)},
        "record": {"answer": f"1258{prompt}"},
    }
