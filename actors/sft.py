"""The training loop of supervised fine-tuning: one update per step on the next demonstrations, and held-out losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.rollout.collect import timed
from actors.rollout.demonstrations import Demonstration, batch_of
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import PromptStream, digest_of
from actors.rollout.scored_groups import Metrics
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.monitoring.progress import SFT_COLUMNS, Column


class SftLoop:
    """Takes one update on demonstrations per step, without rollouts.

    `actors.dpo.DpoLoop` is this loop on pairs: it replaces `columns`, `_batch`, `_trained`, `_evaluated` and `summary`.

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
        """Returns the columns of the progress lines, with one for each held-out set."""
        held_out = [Column(name or "held-out", _loss_name(name), ".4f") for name in self._heldout]
        return (*SFT_COLUMNS[:1], *held_out, *SFT_COLUMNS[1:])

    def prompts_state(self) -> dict[str, Any]:
        """Returns the position in the demonstrations after those that were trained on."""
        return self.prompts.state()

    def settle(self) -> None:
        """Does nothing, since no batch is made during the training on another."""

    def before_training(self, *, evaluates: bool) -> Metrics:
        """Returns the metrics of the held-out sets before training, if asked for."""
        return self._evaluated() if evaluates else {}

    def step(self, step: int) -> Metrics:
        """Takes one update on the next `batch.samples_per_update` samples; evaluates held-out sets if due.

        Under run.epochs, the last update takes the remaining records.
        """
        seconds: Metrics = {}
        count = self._config.samples_per_step // self._samples_of_record
        if self._config.run.epochs is not None:
            left = self._config.run.epochs * self._num_records - self.prompts.records_passed
            count = left if 0 < left < count else count  # not above 0 if a resumed run has fewer records than before
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
        return {_loss_name(name): self._mean_loss(samples) for name, samples in self._heldout.items()}

    def _mean_loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """Returns -log p, averaged over every token of the set that training would use."""
        total, tokens, size = 0.0, 0, self._config.samples_per_step
        for start in range(0, len(demonstrations), size):
            batch = batch_of(demonstrations[start : start + size])
            log_probs = self._group.compute_log_probs(batch).log_probs[batch.mask]
            total -= float(log_probs.sum(dtype=np.float64))
            tokens += log_probs.size
        return total / tokens

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> str:
        seconds = sum(row.get("seconds/step") or 0.0 for row in rows)
        name = "loss" if "loss" in rows[0] else next(name for name in rows[0] if name.endswith("loss"))
        what = "loss" if name == "loss" else f"held-out loss ({name})"
        ranks = self._config.ranks
        return (
            f"SFT on {ranks} FSDP2 rank{'s' * (ranks != 1)}: {what} {rows[0][name]:.3f} -> {rows[-1][name]:.3f} "
            f"in {self._config.run.steps} updates, {seconds:.0f} s"
            + (f"; model in {self._config.run.export_dir}" if self._config.run.export_dir else "")
        )


def _loss_name(held_out: str) -> str:
    return f"eval/{held_out}/loss" if held_out else "eval/loss"
