"""The training loop of direct preference optimisation: one update per step on the next pairs, and held-out metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.rollout.demonstrations import Demonstration
from actors.rollout.evaluation import metric_prefix
from actors.rollout.scored_groups import Metrics
from actors.sft import SftLoop
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.monitoring.progress import DPO_COLUMNS, Column, with_held_out

_OF_OLD_POLICY = ("ratio", "clip_", "kl_", "advantage")
"""Prefixes of metrics that compare with the policy that sampled, which is unknown for pairs."""


class DpoLoop(SftLoop):
    """The loop of supervised training on pairs of a chosen and a rejected response."""

    _samples_of_record = 2

    @property
    def columns(self) -> tuple[Column, ...]:
        held_out = [Column(name or "held-out", f"{metric_prefix(name)}rewards/accuracies") for name in self._heldout]
        return with_held_out(DPO_COLUMNS, held_out)

    def _batch(self, samples: Sequence[Demonstration]) -> RolloutBatch:
        return batch_of_pairs(samples)

    def _trained(self, batch: RolloutBatch) -> Metrics:
        metrics = self._group.train_step(batch)
        return {name: value for name, value in metrics.items() if not name.startswith(_OF_OLD_POLICY)}

    def _evaluated(self) -> Metrics:
        """Returns the loss and the implicit rewards of each held-out set, under eval/ or eval/NAME/."""
        metrics: Metrics = {}
        for name, samples in self._heldout.items():
            for metric, values in self._held_out_values(samples).items():
                metrics[metric_prefix(name) + metric] = float(values.mean())
        return metrics

    def _held_out_values(self, samples: Sequence[Demonstration]) -> dict[str, np.ndarray]:
        """Returns each metric of all pairs, in batches of the size of an update."""
        size, group = self._config.samples_per_step, self._group
        batches: list[dict[str, np.ndarray]] = []
        for start in range(0, len(samples), size):
            batch = batch_of_pairs(samples[start : start + size])
            log_probs = group.compute_log_probs(batch).log_probs
            reference = (group.reference_group or group).compute_log_probs(batch, "ref").log_probs
            batches.append(pair_metrics(batch, log_probs, reference, self._config.loss.beta))
        return {name: np.concatenate([values[name] for values in batches]) for name in batches[0]}

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> str:
        run, seconds = self._config.run, sum(row.get("seconds/step") or 0.0 for row in rows)
        parts = [_change("loss", rows, "loss"), _change("accuracy", rows, "rewards/accuracies")]
        for name in self._heldout:
            what = f"held-out accuracy{f' of {name}' if name else ''}"
            parts.append(_change(what, rows, f"{metric_prefix(name)}rewards/accuracies"))
        ranks = self._config.ranks
        return (
            f"DPO on {ranks} FSDP2 rank{'s' * (ranks != 1)}: {', '.join(parts)} in {run.steps} updates, {seconds:.0f} s"
            + (f"; model in {run.export_dir}" if run.export_dir else "")
        )


def _change(what: str, rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    values = [value for row in rows if (value := row.get(metric)) is not None]
    return f"{what} {values[0]:.3f} -> {values[-1]:.3f}" if values else f"no {what}"


def batch_of_pairs(samples: Sequence[Demonstration]) -> RolloutBatch:
    """Makes a batch whose groups are pairs, in their order; a positive advantage marks the chosen sample.

    Args:
        samples: the chosen and the rejected sample of each pair in turn.
    """
    return RolloutBatch.from_samples(
        {
            "tokens": sample.tokens,
            "response_length": sample.response_length,
            "advantages": np.full(sample.response_length, -1.0 if index % 2 else 1.0),
            "group_id": index // 2,
        }
        for index, sample in enumerate(samples)
    )


def pair_metrics(
    batch: RolloutBatch, log_probs: np.ndarray, reference: np.ndarray, beta: float
) -> dict[str, np.ndarray]:
    """Returns the metrics that `train_step` has of pairs, under the same names; float64 [pairs].

    Args:
        batch: made by `batch_of_pairs`.
        log_probs, reference: of the policy and of the reference model, [R].
        beta: the value of loss.beta.
    """
    policy, ref = (
        np.bincount(batch.sample_ids, values.astype(np.float64)).reshape(-1, 2) for values in (log_probs, reference)
    )
    rewards = beta * (policy - ref)  # [pairs, 2]: chosen, rejected
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "loss": np.logaddexp(0.0, -margins),
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).astype(np.float64),
        "logps/chosen": policy[:, 0],
        "logps/rejected": policy[:, 1],
    }
