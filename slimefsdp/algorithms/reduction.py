"""Computes the weight of each token in the loss; nothing else normalises the loss.

The loss of an update is sum(weight * per-token loss) over all its tokens on all ranks. The weight of a trained token
(mask True) of sample i is 1 / (denominator * length_i):

| reduction     | denominator     | length_i                     | source                                        |
|---------------|-----------------|------------------------------|-----------------------------------------------|
| token_mean    | trained tokens  | 1                            | DAPO, arXiv 2503.14476, section 3.3           |
| sequence_mean | trained samples | trained tokens of sample i   | GRPO, arXiv 2402.03300, equation 3            |
| constant      | trained samples | constant_length, one for all | Dr.GRPO, arXiv 2503.20783, its unbiased loss  |
| prompt_mean   | trained prompts | trained tokens of i's prompt | ScaleRL, arXiv 2510.13786, its prompt average |

A sample or a prompt is trained if at least one of its tokens is. The samples of a prompt share a group id. Masked
tokens have weight exactly 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slimefsdp.errors import BatchError, ConfigError

ReductionName = Literal["token_mean", "sequence_mean", "constant", "prompt_mean"]
Integers = npt.NDArray[np.int64]


class Samples(NamedTuple):
    """Holds the inputs of the functions in `Reduction`, for the samples of one call."""

    counts: Integers  # [samples] trained tokens of each sample
    group_ids: Integers | None
    constant_length: int | None = None


class Reduction(NamedTuple):
    """Holds the functions that compute the two columns of the table above."""

    denominator: Callable[[Samples], int]
    lengths: Callable[[Samples], npt.NDArray]  # -> [samples]


def _trained_tokens(samples: Samples) -> int:
    return int(samples.counts.sum())


def _trained_samples(samples: Samples) -> int:
    return int(np.count_nonzero(samples.counts))


def _trained_prompts(samples: Samples) -> int:
    assert samples.group_ids is not None
    return np.unique(samples.group_ids[samples.counts > 0]).size


def _trained_tokens_of_prompt(samples: Samples) -> npt.NDArray:
    assert samples.group_ids is not None
    _, group_of_sample = np.unique(samples.group_ids, return_inverse=True)
    return np.bincount(group_of_sample, weights=samples.counts)[group_of_sample]


REDUCTIONS: dict[ReductionName, Reduction] = {
    "token_mean": Reduction(_trained_tokens, lambda samples: np.ones_like(samples.counts)),
    "sequence_mean": Reduction(_trained_samples, lambda samples: samples.counts),
    "constant": Reduction(_trained_samples, lambda samples: np.full_like(samples.counts, samples.constant_length)),
    "prompt_mean": Reduction(_trained_prompts, _trained_tokens_of_prompt),
}


def token_weights(
    mask: npt.NDArray[np.bool_],
    sample_of_token: npt.NDArray[np.int64],
    num_samples: int,
    reduction: ReductionName,
    *,
    group_ids: Integers | None = None,
    constant_length: int | None = None,
    denominator: float | None = None,
) -> npt.NDArray[np.float64]:
    """Returns the weight of each response token of one update, so that the loss is sum(weight * per-token loss).

    To compute one update in several calls, pass each call the denominator of the whole update (`update_denominator` of
    all its tokens); the losses of the calls then add up. All tokens of a sample must be in one call, because
    sequence_mean counts them; under prompt_mean all samples of a prompt must be in one call.

    Args:
        mask: [tokens] bool, True at trained tokens.
        sample_of_token: [tokens], the sample of each token, 0 <= value < num_samples, in any order.
        num_samples: samples of this call, trained or not.
        reduction: a key of REDUCTIONS.
        group_ids: [num_samples] int64, the prompt of each sample; read by "prompt_mean" only.
        constant_length: only for "constant", the length in tokens by which every sample is divided.
        denominator: replaces this call's own denominator (trained tokens, samples or prompts, see the table).

    Returns:
        [tokens] float64; all zeros if no token is trained, for every denominator.

    Raises:
        ConfigError: constant_length is missing or not positive, or is set for a reduction that does not use it.
        BatchError: the denominator is not a positive number although there are trained tokens; or group_ids is missing
            under prompt_mean.
    """
    counts = _trained_tokens_per_sample(mask, sample_of_token, num_samples)
    options = {"group_ids": group_ids, "constant_length": constant_length, "denominator": denominator}
    of_sample = sample_weights(counts, reduction, **options)  # type: ignore[arg-type]
    weights = np.zeros(mask.shape, dtype=np.float64)
    weights[mask] = of_sample[sample_of_token[mask]]
    return weights


def sample_weights(
    counts: Integers,
    reduction: ReductionName,
    *,
    group_ids: Integers | None = None,
    constant_length: int | None = None,
    denominator: float | None = None,
) -> npt.NDArray[np.float64]:
    """Returns the weight of each trained token of a sample, float64 [samples]; 0 for a sample without trained tokens.

    Args:
        counts: int64 [samples], trained tokens of each sample.

    The other arguments and the errors are those of `token_weights`.
    """
    _check_constant_length(reduction, constant_length)
    _check_group_ids(reduction, group_ids, counts.size)
    samples = Samples(counts, group_ids, constant_length)
    weights = np.zeros(counts.shape, dtype=np.float64)
    if not counts.any():
        return weights
    if denominator is None:
        denominator = REDUCTIONS[reduction].denominator(samples)
    if not 0 < denominator <= sys.float_info.max:  # an int may exceed every float; NaN fails both comparisons
        raise BatchError(
            f"{denominator} cannot divide the loss of {counts.sum()} trained tokens",
            field="denominator",
            hint="pass the update_denominator of the whole update, or None for this call's own",
        )
    trained = counts > 0
    weights[trained] = 1.0 / (denominator * REDUCTIONS[reduction].lengths(samples)[trained])
    return weights


def update_denominator(
    mask: npt.NDArray[np.bool_],
    sample_of_token: npt.NDArray[np.int64],
    num_samples: int,
    reduction: ReductionName,
    *,
    group_ids: Integers | None = None,
) -> float:
    """Returns the denominator of an update's loss (see the table at the top of this file); 0.0 if no token is trained.

    The denominators of several calls may be added if no sample is in two calls; under prompt_mean, no prompt may be in
    two calls. Arguments and errors are those of `token_weights`.
    """
    _check_group_ids(reduction, group_ids, num_samples)
    counts = _trained_tokens_per_sample(mask, sample_of_token, num_samples)
    return float(REDUCTIONS[reduction].denominator(Samples(counts, group_ids)))


def _trained_tokens_per_sample(
    mask: npt.NDArray[np.bool_], sample_of_token: npt.NDArray[np.int64], num_samples: int
) -> Integers:
    assert mask.dtype == np.bool_ and mask.shape == sample_of_token.shape, (mask.dtype, mask.shape)
    counts = np.bincount(sample_of_token[mask], minlength=num_samples)
    assert counts.size == num_samples, f"a token of sample {counts.size - 1}, but num_samples={num_samples}"
    return counts


def _check_constant_length(reduction: ReductionName, constant_length: int | None) -> None:
    if reduction == "constant" and (constant_length is None or constant_length <= 0):
        raise ConfigError(
            f"{constant_length} is no length to divide by under reduction=constant",
            field="constant_length",
            hint="set it to a positive number of tokens, e.g. the longest response the engine may sample",
        )
    if reduction != "constant" and constant_length is not None:
        raise ConfigError(
            f"{constant_length} would have no effect under reduction={reduction}",
            field="constant_length",
            hint="leave it out, or use reduction=constant",
        )


def _check_group_ids(reduction: ReductionName, group_ids: Integers | None, num_samples: int) -> None:
    assert group_ids is None or group_ids.shape == (num_samples,), (group_ids.shape, num_samples)
    if reduction == "prompt_mean" and group_ids is None:
        raise BatchError(
            "group_ids is missing, and reduction=prompt_mean reads from it which samples answer one prompt",
            field="group_ids",
            hint="give group_ids, or use another reduction, e.g. token_mean",
        )
