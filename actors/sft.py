"""The loop of supervised training: one update a step on the next demonstrations, and the loss on held-out ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.rollout.collect import Metrics, timed
from actors.rollout.demonstrations import Demonstration, batch_of
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import PromptStream, digest_of
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.monitoring.progress_table import SFT_COLUMNS, Column


class SftLoop:
    """One step: one update on demonstrations, the same loop without rollouts.

    `actors.dpo.DpoLoop` is this loop on pairs: it replaces `columns`, `_batch`, `_evaluated` and `summary`.

    Args:
        group: of the ranks, of whatever kind: `train_step` and `compute_log_probs` are called.
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
        """The columns of the progress table, with one for each held-out set."""
        held_out = [Column(name or "held-out", _loss_name(name), ".4f") for name in self._heldout]
        return (*SFT_COLUMNS[:1], *held_out, *SFT_COLUMNS[1:])

    def prompts_state(self) -> dict[str, Any]:
        """Returns where the demonstrations stand behind what was trained on."""
        return self.prompts.state()

    def settle(self) -> None:
        """Nothing: no batch is made beside the training of another."""

    def before_training(self, *, evaluates: bool) -> Metrics:
        """Metrics of the held-out sets of the model as it is, if asked for."""
        return self._evaluated() if evaluates else {}

    def step(self, step: int) -> Metrics:
        """Takes one update on the next `batch.samples_per_update` samples; evaluates held-out sets if that is due.

        Under run.epochs the last update takes the records that are left.
        """
        seconds: Metrics = {}
        count = self._config.samples_per_step // self._samples_of_record
        if self._config.run.epochs is not None:
            left = self._config.run.epochs * self._num_records - self.prompts.records_passed
            count = left if 0 < left < count else count  # other records than the run began with may be fewer
        batch = self._batch([one for record in self.prompts.take(count) for one in record])
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
        """The loss on each held-out set."""
        return {_loss_name(name): self._mean_loss(found) for name, found in self._heldout.items()}

    def _mean_loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """-log p, averaged over every token of the set that would be trained."""
        total, tokens, size = 0.0, 0, self._config.samples_per_step
        for start in range(0, len(demonstrations), size):
            batch = batch_of(demonstrations[start : start + size])
            log_probs = self._group.compute_log_probs(batch).log_probs[batch.mask]
            total -= float(log_probs.sum(dtype=np.float64))
            tokens += log_probs.size
        return total / tokens

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The run in one line."""
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
