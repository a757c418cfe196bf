"""Evaluations of a policy: held-out prompts are answered and scored, and the texts are left to be read.

What is said of the scores is their means and, where it is asked for, the share of prompts that are solved, with an
interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.rollout.collect import EVALUATION, Collector, Metrics
from actors.rollout.filters import ScoredSample
from actors.rollout.prompts import Record
from actors.rollout.sample_files import example_line, write_samples
from actors.run_dir import EVALUATIONS
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError
from slimefsdp.monitoring.progress_table import Column

_NORMAL_95 = 1.959964  # standard deviations: the normal distribution has 95 % within


def metric_prefix(heldout_set: str) -> str:
    """Returns the prefix of a held-out set's metrics: eval/NAME/, or eval/ for a single set without a name."""
    return f"eval/{heldout_set}/" if heldout_set else "eval/"


class Evaluator:
    """The evaluations of a run.

    Args:
        collector: draws and scores the responses; the held-out sets are those it has.
    """

    def __init__(self, config: RunConfig, collector: Collector) -> None:
        self._config = config
        self._collector = collector
        self.example = ""  # of the last evaluation, a line: the first prompt, which is the same each time

    def evaluate(self, step: int, version: int | None = None) -> Metrics:
        """Mean scores of all held-out sets, sampled as in training; nothing where no evaluation is asked for.

        Each set is drawn by itself and with the same seed, so that its numbers do not depend on the others.

        Args:
            version: of the weights that engines have been sent; None: they may get others meanwhile.

        Raises:
            CheckpointError: run.dir cannot be written, where samples are to be left there.
            BatchError: a score has a name that is given to what an evaluation finds itself.
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
        metrics: Metrics = {}
        for kind, count in (("", settings.samples_per_prompt), ("greedy_", int(settings.greedy))):
            if not count:
                continue
            prefix = metric_prefix(heldout_set) + kind
            drawn, groups = collector.scored_groups(records, count, (EVALUATION, step), {}, greedy=bool(kind))
            if version is not None:
                collector.check_version(drawn, version)
            whole = [group.samples for group in groups if not group.failures]
            if not self.example and groups and groups[0].samples:
                self.example = example_line(step, groups[0].record, groups[0].samples[0])
            ks = settings.pass_at
            if kind and ks:  # of greedy responses there is one to a prompt
                ks = (1,)
            for found in (
                collector.mean_scores(groups, prefix),
                solved_metrics(whole, ks, settings.solved_reward, prefix),
            ):
                self._require_own_names(metrics, found, metric_prefix(heldout_set))
                metrics |= found
            if settings.save_samples and self._config.run.dir is not None:
                folder = self._config.run.dir / EVALUATIONS / heldout_set
                pairs = [(group.record, group.samples) for group in groups]
                write_samples(folder, f"{kind}step_{step:08d}", pairs)
        return metrics

    def progress(self) -> str:
        """Returns how far an evaluation is that nothing else was drawn before."""
        settings, collector = self._config.evaluation, self._collector
        each = settings.samples_per_prompt + settings.greedy
        return f"{collector.samples_drawn} of {sum(map(len, collector.heldout.values())) * each} responses"

    def columns(self) -> list[Column]:
        """Returns a column of the progress table for each held-out set."""
        columns = []
        for name in self._collector.heldout if self._config.evaluation.interval_steps is not None else ():
            metric, instead = (self._prefix(name) + score for score in self._known_by)
            columns.append(Column(f"eval/{name}" if name else "held-out", metric, instead=instead))
        return columns

    def summary(self, rows: Sequence[Mapping[str, float | None]]) -> str:
        """Returns what was found of each held-out set first and last; nothing where none was evaluated twice.

        Args:
            rows: the metrics of the run's steps.
        """
        samples = self._config.evaluation.samples_per_prompt
        parts = []
        for name, records in self._collector.heldout.items():
            prefix = self._prefix(name)
            first, otherwise = self._known_by
            score = first if any(prefix + first in row for row in rows) else otherwise
            values = [value for row in rows if (value := row.get(f"{prefix}{score}")) is not None]
            if len(values) > 1:
                change = f"{score}{f' of {name}' if name else ''} {values[0]:.3f} -> {values[-1]:.3f}"
                parts.append(f"{change} ({len(records)} prompts" + (f" x {samples} samples)" if samples else ")"))
        return f"held-out {'sampled' if samples else 'greedy'} {', '.join(parts)}" if parts else ""

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
    def _known_by(self) -> tuple[str, str]:
        """The score that a held-out set is known by, and what it is where none has that."""
        # an episode that was ended for want of turns has no score of a reward function, and counts all the same
        return ("exact" if self._config.rollout.environment is None else "reward", "reward")

    def _prefix(self, heldout_set: str) -> str:
        """Returns the prefix of a set's main metrics: of sampled responses, or of greedy ones if only these exist."""
        return metric_prefix(heldout_set) + ("" if self._config.evaluation.samples_per_prompt else "greedy_")


@dataclass(frozen=True, slots=True)
class Share:
    """A mean of values between 0 and 1, and the 95 % interval of what it estimates."""

    value: float
    low: float
    high: float


def share_of(values: Sequence[float], answers_each: int = 1) -> Share:
    """The mean of one value a prompt, each between 0 and 1.

    The interval is Wilson's, with the number of prompts that would have the variance found if each value were 0 or 1
    (the effective sample size of Kish): of single answers it is Wilson's own. Of several answers the variance is an
    estimate, and one of a few prompts a rough one: it is the unbiased one, as far from it as Student's t is wider than
    the normal distribution. However alike the values are, no more is counted than all answers would be as prompts of
    their own. Prompts are what is drawn at random: several answers to one are not independent.

    Args:
        answers_each: independent answers that a value is the mean of; of pass@k, the responses to a prompt by k.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    effective = float(count)
    if answers_each > 1 and count > 1 and 0 < mean < 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        least = mean * (1 - mean) / answers_each  # where all prompts are equally hard
        wider = (_student_95(count - 1) / _NORMAL_95) ** 2
        effective = count * mean * (1 - mean) / max(variance * wider, least)
    square = _NORMAL_95**2 / effective
    middle = (mean + square / 2) / (1 + square)
    reach = math.sqrt(square * mean * (1 - mean) + square**2 / 4) / (1 + square)
    return Share(mean, max(0.0, min(mean, middle - reach)), min(1.0, max(mean, middle + reach)))  # but for rounding


def _student_95(degrees: int) -> float:
    """Returns the 95 % quantile of Student's t, within 1 % from 3 degrees of freedom on (Abramowitz, Stegun 26.7.5)."""
    z = _NORMAL_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def pass_probability(k: int, solved: int, drawn: int) -> float:
    """Returns how likely one of `k` responses solves a prompt, of which `solved` of the `drawn` ones do; without bias.

    One minus the share of the subsets of k in which none does (Chen et al., arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(drawn - solved, k) / math.comb(drawn, k)


def solved_metrics(
    groups: Sequence[Sequence[ScoredSample]], pass_at: Sequence[int], solved_reward: float, prefix: str
) -> dict[str, float]:
    """Returns pass@k for each k of `pass_at`, the share of responses that end, and the solved share of these.

    Args:
        groups: the responses to each prompt.
        pass_at: none: nothing is found.
        solved_reward: of a response that solves its prompt, at least.
    """
    if not pass_at or not groups:
        return {}
    is_solved = [[one.scores["reward"] >= solved_reward for one in group] for group in groups]
    metrics: dict[str, float] = {}
    drawn = min(map(len, groups))
    for k in pass_at:
        share = share_of([pass_probability(k, sum(group), len(group)) for group in is_solved], max(1, drawn // k))
        name = f"{prefix}pass@{k}"
        metrics |= {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}
    ended = [
        solved
        for group, answers in zip(groups, is_solved, strict=True)
        for one, solved in zip(group, answers, strict=True)
        if one.sample.finished
    ]
    metrics[f"{prefix}finished"] = len(ended) / sum(map(len, groups))
    if ended:
        metrics[f"{prefix}solved_of_finished"] = sum(ended) / len(ended)
    return metrics
