"""Groups of rewarded responses to one prompt each: their metrics, and the batch that trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.rollout.filters import ScoredSample
from actors.rollout.prompts import Record, place_of
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import LengthLimits
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError

Metrics = dict[str, float]


@dataclass(slots=True)
class Group:
    """The responses to one prompt."""

    record: Record
    samples: list[ScoredSample]
    environment_seed: int
    failures: int = 0  # of the reward; with one or more the group is left out of everything

    def trains(self, masks_truncated: bool) -> bool:
        """Returns whether any token would be trained on.

        Args:
            masks_truncated: as rollout.mask_truncated.
        """
        return any(one.sample.finished or not masks_truncated for one in self.samples)


def metrics_of(config: RunConfig, groups: Sequence[Group], limits: LengthLimits) -> Metrics:
    """Returns metrics of all groups that were drawn, trained or not; rewards are without the overlong penalty."""
    scored = [one for group in groups if not group.failures for one in group.samples]
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
    """Returns mean scores of the groups without failures; under skip, also the share of responses that failed.

    A score that only some episodes have is averaged over these, since an episode may end before a score is given.
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
        baselines: rewards of the prompts' likeliest responses, by group, for ReMax.
        version: of the weights that sampled, where there are no samples.
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
            fields: dict[str, Any] = {
                "tokens": sampled.tokens,
                "response_length": sampled.response_length,
                "rollout_log_probs": sampled.log_probs,
                "reward": scored.reward,
                "group_id": group_id,
            }
            if is_mixed:
                fields["weight_versions"] = [
                    span.version for span in sampled.versions for _ in range(span.start, span.end)
                ]
            if is_masked:
                mask = sampled.loss_mask or [True] * sampled.response_length
                is_left_out = settings.mask_truncated and not sampled.finished
                fields["loss_mask"] = [False] * sampled.response_length if is_left_out else mask
            if baselines is not None:
                fields["baseline_reward"] = baselines[group_id]
            samples.append(fields)
    return RolloutBatch.from_samples(samples, temperature=settings.temperature, weight_version=version)


def length_penalty(config: RunConfig, response_length: int, max_new_tokens: int) -> float:
    """Returns what a response's length takes off its reward under rollout.overlong_buffer_tokens."""
    buffer_tokens = config.rollout.overlong_buffer_tokens
    return 0.0 if buffer_tokens is None else overlong_penalty(response_length, max_new_tokens, buffer_tokens)


def overlong_penalty(response_length: int, max_new_tokens: int, buffer_tokens: int) -> float:
    """Returns the penalty on a response for its length: 0 up to the buffer at the end of the limit, then linear.

    A response cut at `max_new_tokens` gets a penalty of 1. This is the soft overlong punishment of DAPO (arXiv
    2503.14476, equation 13), for rewards from 0 or -1 to 1.
    """
    return max(0, response_length - (max_new_tokens - buffer_tokens)) / buffer_tokens
