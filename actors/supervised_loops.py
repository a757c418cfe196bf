"""Trains without rollouts: supervised fine-tuning and direct preference optimisation, one update per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.rollout.collect import timed
from actors.rollout.demonstrations import Demonstration, batch_of
from actors.rollout.evaluation import metric_prefix
from actors.rollout.groups import Metrics
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import PromptStream, digest_of
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch, Sample
from slimefsdp.monitoring.curves import CURVES
from slimefsdp.monitoring.progress import DPO_COLUMNS, SFT_COLUMNS, Column, with_held_out

_OF_OLD_POLICY = ("ratio", "clip_", "kl_", "advantage")
"""Prefixes of metrics that compare the policy with the policy that sampled; pairs come from no known policy."""


class SftLoop:
    """Takes one update on demonstrations per step, without rollouts.

    Args:
        group: any group of ranks; its `train_step` and `compute_log_probs` are called.
    """

    _samples_of_record = 1

    def __init__(self, config: RunConfig, group: Any, prompts: Prompts) -> None:
        self._config = config
        self._group = group
        self._heldout = prompts.heldout_demonstrations
        each, samples = self._samples_of_record, prompts.demonstrations
        records = [samples[start : start + each] for start in range(0, len(samples), each)]
        self._num_records = len(records)
        self.prompts = PromptStream(records, config.run.seed, digest=digest_of(prompts.train))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Returns the columns of the progress lines, including one for each held-out set."""
        held_out = [Column(name or "held-out", f"{metric_prefix(name)}loss", ".4f") for name in self._heldout]
        return (*SFT_COLUMNS[:1], *held_out, *SFT_COLUMNS[1:])

    def prompts_state(self) -> dict[str, Any]:
        """Returns the position in the demonstrations after the last demonstration that was trained on."""
        return self.prompts.state()

    def settle(self) -> None:
        """Does nothing, since this loop collects no batches ahead."""

    def before_training(self, *, evaluates: bool) -> Metrics:
        """Returns the metrics of the held-out sets before training if `evaluates`, otherwise no metrics."""
        return self._evaluated() if evaluates else {}

    def step(self, step: int) -> Metrics:
        """Takes one update on the next `batch.samples_per_update` samples; evaluates held-out sets if that is due.

        Under run.epochs, the last update takes the remaining records.
        """
        seconds: Metrics = {}
        count = self._config.samples_per_step // self._samples_of_record
        if self._config.run.epochs is not None:
            left = self._config.run.epochs * self._num_records - self.prompts.records_passed
            count = left if 0 < left < count else count  # `left` may be negative: a resumed run may have fewer records
        batch = self._batch([sample for record in self.prompts.take(count) for sample in record])
        with timed(seconds, "train"):
            metrics: Metrics = self._trained(batch)
        metrics["epoch"] = self.prompts.records_passed / self._num_records
        interval = self._config.evaluation.interval_steps
        if interval is not None and ((step + 1) % interval == 0 or step + 1 == self._config.run.steps):
            with timed(seconds, "evaluate"):
                metrics |= self._evaluated()
        return metrics | {f"seconds/{name}": value for name, value in seconds.items()}

    def _batch(self, samples: Sequence[Demonstration]) -> RolloutBatch:
        return batch_of(samples)

    def _trained(self, batch: RolloutBatch) -> Metrics:
        metrics: Metrics = self._group.train_step(batch)
        return metrics

    def _evaluated(self) -> Metrics:
        return {f"{metric_prefix(name)}loss": self._mean_loss(samples) for name, samples in self._heldout.items()}

    def _mean_loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """Returns the mean of -log p over all tokens of the set on which training would compute a loss."""
        total, tokens, size = 0.0, 0, self._config.samples_per_step
        for start in range(0, len(demonstrations), size):
            batch = batch_of(demonstrations[start : start + size])
            log_probs = self._group.compute_log_probs(batch).log_probs[batch.mask]
            total -= float(log_probs.sum(dtype=np.float64))
            tokens += log_probs.size
        return total / tokens

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Returns the run in one line; `rows` are the metrics of its steps."""
        run, ranks = self._config.run, self._config.ranks
        seconds = sum(row.get("seconds/step") or 0.0 for row in rows)
        return (
            f"{self._config.algorithm_title} on {ranks} FSDP2 rank{'s' * (ranks != 1)}: {self._changes(rows)} "
            f"in {run.steps} updates, {seconds:.0f} s; curves in {Path(str(run.dir)) / CURVES}"
            + (f"; model in {run.export_dir}" if run.export_dir else "")
        )

    def _changes(self, rows: Sequence[Mapping[str, Any]]) -> str:
        name = "loss" if "loss" in rows[0] else next(name for name in rows[0] if name.endswith("loss"))
        return _change("loss" if name == "loss" else f"held-out loss ({name})", rows, name)


class DpoLoop(SftLoop):
    """Takes one DPO update per step on pairs of a chosen and a rejected response, without rollouts."""

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
        """Returns metric -> its value for every pair; computes log-probs in batches of the size of an update."""
        size, group = self._config.samples_per_step, self._group
        batches: list[dict[str, np.ndarray]] = []
        for start in range(0, len(samples), size):
            batch = batch_of_pairs(samples[start : start + size])
            log_probs = group.compute_log_probs(batch).log_probs
            reference = (group.reference_group or group).compute_log_probs(batch, "ref").log_probs
            batches.append(pair_metrics(batch, log_probs, reference, self._config.loss.beta))
        return {name: np.concatenate([values[name] for values in batches]) for name in batches[0]}

    def _changes(self, rows: Sequence[Mapping[str, Any]]) -> str:
        changes = [_change("loss", rows, "loss"), _change("accuracy", rows, "rewards/accuracies")]
        for name in self._heldout:
            what = f"held-out accuracy{f' of {name}' if name else ''}"
            changes.append(_change(what, rows, f"{metric_prefix(name)}rewards/accuracies"))
        return ", ".join(changes)


def _change(what: str, rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    values = [value for row in rows if (value := row.get(metric)) is not None]
    return f"{what} {values[0]:.3f} -> {values[-1]:.3f}" if values else f"no {what}"


def batch_of_pairs(samples: Sequence[Demonstration]) -> RolloutBatch:
    """Returns a batch in which each pair is a group, in order; a positive advantage marks the chosen sample.

    Args:
        samples: the chosen and the rejected sample of each pair in turn.
    """
    return RolloutBatch.from_samples(
        Sample(
            sample.tokens,
            sample.response_length,
            group_id=index // 2,
            advantages=np.full(sample.response_length, -1.0 if index % 2 else 1.0),
        )
        for index, sample in enumerate(samples)
    )


def pair_metrics(
    batch: RolloutBatch, log_probs: np.ndarray, reference: np.ndarray, beta: float
) -> dict[str, np.ndarray]:
    """Returns the metrics that `train_step` reports for pairs, with the same names; each is float64 [pairs].

    Args:
        batch: made by `batch_of_pairs`.
        log_probs, reference: log-probs of the policy and of the reference model, [R] as in `RolloutBatch`.
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
