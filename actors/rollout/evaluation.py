"""Evaluates a policy: draws and scores responses to held-out prompts, and saves their texts.

The metrics are the mean scores and, with evaluation.pass_at, pass@k with a confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.rollout.collect import EVALUATION, Collector
from actors.rollout.groups import Metrics, ScoredSample, mean_scores
from actors.rollout.records import Record
from actors.rollout.sample_files import example_line, write_samples
from actors.run_dir import EVALUATIONS
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError
from slimefsdp.monitoring.progress import Column

SOLVED_REWARD = 1.0  # a response with this reward or more solves its prompt
_NORMAL_95 = 1.959964  # 95 % of a normal distribution is within this many standard deviations


def metric_prefix(heldout_set: str) -> str:
    """Returns the prefix of a held-out set's metrics: eval/NAME/, or eval/ for a single set without a name."""
    return f"eval/{heldout_set}/" if heldout_set else "eval/"


class Evaluator:
    """Runs the evaluations of a run; `collector` draws and scores the responses, and has the held-out sets."""

    def __init__(self, config: RunConfig, collector: Collector) -> None:
        self._config = config
        self._collector = collector
        self.example = ""  # a line for the terminal with a response to the first prompt of the last evaluation

    def evaluate(self, step: int, version: int | None = None) -> Metrics:
        """Returns the mean scores of all held-out sets; an empty dictionary if the settings have no evaluation.

        Responses to each set are drawn separately and with the same seed, so that scores do not depend on other sets.

        Args:
            version: the weight version that the engines were sent; None means that they may get newer weights during
                the evaluation.

        Raises:
            CheckpointError: run.dir cannot be written.
            BatchError: a score has the same name as a metric of the evaluation itself.
        """
        metrics: Metrics = {}
        self.example = ""
        if self._config.evaluation.interval_steps is not None:
            with self._collector.function_named(step):
                for name, records in self._collector.heldout.items():
                    metrics |= self._evaluated(name, records, step, version)
        return metrics

    def _evaluated(self, heldout_set: str, records: Sequence[Record], step: int, version: int | None) -> Metrics:
        settings, collector = self._config.evaluation, self._collector
        prefix = metric_prefix(heldout_set)
        drawn, groups = collector.scored_groups(records, settings.samples_per_prompt, (EVALUATION, step), {})
        if version is not None:
            collector.check_version(drawn, version)
        whole = [group.samples for group in groups if not group.failures]
        if not self.example and groups and groups[0].samples:
            self.example = example_line(step, groups[0].record, groups[0].samples[0])
        metrics = mean_scores(self._config, groups, prefix)
        solved = solved_metrics(whole, settings.pass_at, prefix)
        self._require_own_names(metrics, solved, prefix)
        if self._config.run.dir is not None:
            pairs = [(group.record, group.samples) for group in groups]
            write_samples(self._config.run.dir / EVALUATIONS / heldout_set, f"step_{step:08d}", pairs)
        return metrics | solved

    def progress(self) -> str:
        """Returns a text about the progress of a run's first evaluation, before which nothing was sampled."""
        each, collector = self._config.evaluation.samples_per_prompt, self._collector
        return f"{collector.samples_drawn} of {sum(map(len, collector.heldout.values())) * each} responses"

    def columns(self) -> list[Column]:
        """Returns a column of the progress lines for each held-out set."""
        columns = []
        for name in self._collector.heldout if self._config.evaluation.interval_steps is not None else ():
            metric, instead = (metric_prefix(name) + score for score in self._main_scores)
            columns.append(Column(f"eval/{name}" if name else "held-out", metric, instead=instead))
        return columns

    def summary(self, rows: Sequence[Mapping[str, float | None]]) -> str:
        """Returns the first and last score of each held-out set as text; "" if no set was evaluated twice.

        Args:
            rows: the metrics of the run's steps.
        """
        evaluation = self._config.evaluation
        drawn = "greedy" if evaluation.temperature == 0 else "sampled"
        parts = []
        for name, records in self._collector.heldout.items():
            prefix = metric_prefix(name)
            first, second = self._main_scores
            score = first if any(prefix + first in row for row in rows) else second
            values = [value for row in rows if (value := row.get(f"{prefix}{score}")) is not None]
            if len(values) > 1:
                change = f"{score}{f' of {name}' if name else ''} {values[0]:.3f} -> {values[-1]:.3f}"
                parts.append(f"{change} ({len(records)} prompts x {evaluation.samples_per_prompt} samples)")
        return f"held-out {drawn} {', '.join(parts)}" if parts else ""

    def _require_own_names(self, metrics: Metrics, more: Metrics, prefix: str) -> None:
        if taken := sorted(name.removeprefix(prefix) for name in metrics.keys() & more.keys()):
            field = self._config.rewards_by
            raise BatchError(
                f"{self._config.value_of(field)} returned the name {taken[0]}, which an evaluation gives to what it "
                "finds itself",
                field=field,
                hint="return it under another name",
            )

    @property
    def _main_scores(self) -> tuple[str, str]:
        """Returns the main score of a held-out set, and the score to use if no row has the main score."""
        # With an environment it is not "exact", which an episode that reached environment.max_turns may lack.
        return ("exact" if self._config.rollout.environment is None else "reward", "reward")


@dataclass(frozen=True, slots=True)
class Share:
    """Holds the mean of values between 0 and 1, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def share_of(values: Sequence[float], answers_each: int = 1) -> Share:
    """Returns the mean of one value per prompt, each between 0 and 1, with a confidence interval.

    The independent draws are the prompts, not the answers. With one answer per prompt, the result is Wilson's interval.
    With several answers per prompt, Wilson's interval is computed for an effective number of prompts (Kish). This is
    the number of 0/1 values whose mean would have the same variance as the mean of `values`, and at most the number of
    all answers. The variance is estimated without bias from `values`, and widened by the squared ratio of Student's t
    to the normal quantile, since few prompts give a rough estimate.

    Args:
        answers_each: number of independent answers from which each value is computed; for pass@k, the responses per
            prompt divided by k.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    effective = float(count)
    if answers_each > 1 and count > 1 and 0 < mean < 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        least = mean * (1 - mean) / answers_each  # the variance if all prompts are equally hard
        wider = (_student_95(count - 1) / _NORMAL_95) ** 2
        effective = count * mean * (1 - mean) / max(variance * wider, least)
    square = _NORMAL_95**2 / effective
    middle = (mean + square / 2) / (1 + square)
    reach = math.sqrt(square * mean * (1 - mean) + square**2 / 4) / (1 + square)
    # the bounds contain the mean, also after rounding
    return Share(mean, max(0.0, min(mean, middle - reach)), min(1.0, max(mean, middle + reach)))


def _student_95(degrees: int) -> float:
    """Returns Student's t of a two-sided 95 % interval, within 1 % from 3 degrees on (Abramowitz, Stegun 26.7.5)."""
    z = _NORMAL_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def pass_probability(k: int, solved: int, drawn: int) -> float:
    """Returns the unbiased estimate of pass@k for a prompt with `solved` solving responses among `drawn`.

    This is 1 minus the share of subsets of k responses that have no solving response (Chen et al., arXiv 2107.03374,
    equation 1).
    """
    return 1.0 - math.comb(drawn - solved, k) / math.comb(drawn, k)


def solved_metrics(groups: Sequence[Sequence[ScoredSample]], pass_at: Sequence[int], prefix: str) -> dict[str, float]:
    """Returns pass@k for each k of `pass_at`, the share of responses that finished, and of these the share that solved.

    Args:
        groups: the responses to each prompt.
        pass_at: values of k; if there are none, the result is empty.
    """
    if not pass_at or not groups:
        return {}
    is_solved = [[scored.scores["reward"] >= SOLVED_REWARD for scored in group] for group in groups]
    metrics: dict[str, float] = {}
    drawn = min(map(len, groups))
    for k in pass_at:
        share = share_of([pass_probability(k, sum(group), len(group)) for group in is_solved], max(1, drawn // k))
        name = f"{prefix}pass@{k}"
        metrics |= {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}
    ended = [
        solved
        for group, answers in zip(groups, is_solved, strict=True)
        for scored, solved in zip(group, answers, strict=True)
        if scored.sample.finished
    ]
    metrics[f"{prefix}finished"] = len(ended) / sum(map(len, groups))
    if ended:
        metrics[f"{prefix}solved_of_finished"] = sum(ended) / len(ended)
    return metrics
