"""Filters groups of rewarded responses to one prompt, and computes the metrics and the batch of groups.

A filter is a function `keep(record, samples) -> bool`, named in the settings as `module:function`. `record` is the
prompt's JSONL object. `samples` are the responses to the prompt, in the order of drawing, with the scores that the
reward function returned. False drops the whole group.

Importing this module imports neither torch nor Ray, so that the command line can check a filter quickly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.rollout.records import Record, place_of
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.config.rollout import LengthLimits
from slimefsdp.data.rollout_batch import RolloutBatch, Sample
from slimefsdp.errors import BatchError, SlimeError, short_repr

if TYPE_CHECKING:
    from actors.engines.pool import SampledResponse

FILTERS: dict[str, str] = {"mixed_groups": "drop groups whose rewards are all equal; arXiv 2503.14476"}
"""Name of each built-in filter -> its description; the settings name these filters without a module."""
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    sample: SampledResponse
    scores: dict[str, float]  # all numbers that the reward function returned, `reward` included
    reward: float  # the reward that is trained on: scores["reward"] minus `overlong_penalty`


Filter = Callable[[Record, Sequence[ScoredSample]], bool]


@dataclass(slots=True)
class Group:
    record: Record
    samples: list[ScoredSample]
    environment_seed: int
    failures: int = 0  # number of failed rewards; with one or more, the group is not used at all

    def trains(self, masks_truncated: bool) -> bool:
        """Returns whether any token of the group would be trained on.

        Args:
            masks_truncated: the value of rollout.mask_truncated.
        """
        return any(scored.sample.finished or not masks_truncated for scored in self.samples)


def metrics_of(config: RunConfig, groups: Sequence[Group], limits: LengthLimits) -> Metrics:
    """Returns metrics of all drawn groups, trained on or not; rewards are without the overlong penalty."""
    scored = [sample for group in groups if not group.failures for sample in group.samples]
    lengths = [scored_sample.sample.response_length for scored_sample in scored]
    metrics = mean_scores(config, groups, "rollout/")
    if not scored:  # every group had a failure
        return metrics
    metrics["rollout/response_length"] = sum(lengths) / len(lengths)
    metrics["rollout/response_length_max"] = float(max(lengths))
    metrics["rollout/truncated"] = sum(not scored_sample.sample.finished for scored_sample in scored) / len(scored)
    if config.rollout.overlong_buffer_tokens is not None:
        penalties = [length_penalty(config, length, limits.new_tokens) for length in lengths]
        metrics["rollout/overlong_penalty"] = sum(penalties) / len(penalties)
    if config.rollout.curriculum:
        prompts = [len(scored_sample.sample.tokens) - scored_sample.sample.response_length for scored_sample in scored]
        metrics["rollout/stage"] = float(limits.stage)
        metrics["rollout/prompt_length"] = sum(prompts) / len(prompts)
        metrics["rollout/prompt_length_max"] = float(max(prompts))
    return metrics


def mean_scores(config: RunConfig, groups: Sequence[Group], prefix: str) -> Metrics:
    """Returns mean scores of the groups without failures.

    With rollout.reward_failure=skip the result also has the share of failed rewards. With an environment, a score is
    averaged over the episodes that have this score, since an episode may end without it.
    """
    scored = [(group.record, sample.scores) for group in groups if not group.failures for sample in group.samples]
    scores = [score for _, score in scored]
    for record, score in scored:
        if config.rollout.environment is None and score.keys() != scores[0].keys():
            raise BatchError(
                f"{config.value_of(config.rewards_by)} gave scores with the names {sorted(score)} for "
                f"{place_of(record)}, and {sorted(scores[0])} before",
                field=config.rewards_by,
                hint="give the same names to every response",
            )
    values_of: dict[str, list[float]] = {}
    for score in scores:
        for key, value in score.items():
            values_of.setdefault(key, []).append(value)
    metrics = {f"{prefix}{key}": sum(values) / len(values) for key, values in values_of.items()}
    if config.skips_failures:
        failures = sum(group.failures for group in groups)
        metrics[f"{prefix}reward_failures"] = failures / (failures + sum(len(group.samples) for group in groups))
    return metrics


def batch_of(
    config: RunConfig, groups: Sequence[Group], baselines: Sequence[float] | None, version: int
) -> RolloutBatch:
    """Returns the batch that trains on these groups.

    Args:
        baselines: for ReMax, the reward of the greedy response of each group.
        version: the weight version of a batch without samples; otherwise the batch has the samples' oldest version.
    """
    settings = config.rollout
    samples = []
    spans = [scored_sample.sample.versions for group in groups for scored_sample in group.samples]
    is_masked = settings.mask_truncated or any(
        scored_sample.sample.loss_mask is not None for group in groups for scored_sample in group.samples
    )
    is_mixed = len({span.version for sample_spans in spans for span in sample_spans}) > 1
    # the version of the trained samples, which may differ from that of all drawn samples
    version = min((span.version for sample_spans in spans for span in sample_spans), default=version)
    for group_id, group in enumerate(groups):
        for scored in group.samples:
            sampled = scored.sample
            sample = Sample(
                *(sampled.tokens, sampled.response_length, scored.reward, group_id),
                rollout_log_probs=sampled.log_probs,
                routed_experts=sampled.routed_experts,
            )
            if is_mixed:
                sample.weight_versions = [
                    span.version for span in sampled.versions for _ in range(span.start, span.end)
                ]
            if is_masked:
                is_left_out = settings.mask_truncated and not sampled.finished
                all_tokens = [not is_left_out] * sampled.response_length
                sample.loss_mask = all_tokens if is_left_out else sampled.loss_mask or all_tokens
            if baselines is not None:
                sample.baseline_reward = baselines[group_id]
            samples.append(sample)
    return RolloutBatch.from_samples(samples, temperature=settings.temperature, weight_version=version)


def length_penalty(config: RunConfig, response_length: int, max_new_tokens: int) -> float:
    """Returns the penalty for a response's length by rollout.overlong_buffer_tokens; 0 if the setting is None."""
    buffer_tokens = config.rollout.overlong_buffer_tokens
    return 0.0 if buffer_tokens is None else overlong_penalty(response_length, max_new_tokens, buffer_tokens)


def overlong_penalty(response_length: int, max_new_tokens: int, buffer_tokens: int) -> float:
    """Returns the penalty for a response's length, which grows linearly from 0 to 1 in the last `buffer_tokens`.

    A response cut at `max_new_tokens` gets a penalty of 1. This is the soft overlong punishment of DAPO (arXiv
    2503.14476, equation 13), for rewards from 0 or -1 to 1.
    """
    return max(0, response_length - (max_new_tokens - buffer_tokens)) / buffer_tokens


# ---------------------------------------------------------------------- filters


def load_filter(name: str) -> Filter:
    """Returns a filter of `FILTERS`, or a user's function `module:function`.

    The returned filter raises BatchError if the user's function raises, or returns neither True nor False.

    Raises:
        ConfigError: the module cannot be imported, or has no such callable.
    """
    if name == "mixed_groups":
        return mixed_groups
    takes = ("record", "samples")
    return _checked(load_function(name, field="rollout.filter", example="my_filters:keep", takes=takes), name)


def mixed_groups(record: Record, samples: Sequence[ScoredSample]) -> bool:
    """Keeps a group whose rewards differ. If all rewards are equal, all advantages are zero, and nothing is learned.

    This is the dynamic sampling of DAPO (arXiv 2503.14476, section 3.2).
    """
    return len({scored.scores["reward"] for scored in samples}) > 1


def _checked(function: Callable[..., Any], name: str) -> Filter:
    @functools.wraps(function)
    def keep(record: Record, samples: Sequence[ScoredSample]) -> bool:
        try:
            kept = function(deepcopy(record), samples)  # a copy, since the function may change the record
        except (SlimeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's function may raise anything
            raise BatchError(
                f"{failure_of(name, error)} for {place_of(record)}",
                field="rollout.filter",
                hint="correct the function",
            ) from error
        if not isinstance(kept, bool | np.bool_):  # the truth value of anything else would be a guess
            raise BatchError(
                f"{name} returned {short_repr(kept)} for {place_of(record)}",
                field="rollout.filter",
                hint="return True to keep the group, or False",
            )
        return bool(kept)

    return keep
