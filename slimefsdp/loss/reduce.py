"""How much each token counts: the one owner of the loss's normalisation.

The loss of an update is sum(weight * per-token loss) over all its tokens, wherever they are computed. The weight of a
trained token (mask True) of sample i is 1 / (denominator * length_i):

| reduction     | denominator     | length_i                     | source                                      |
|---------------|-----------------|------------------------------|---------------------------------------------|
| token_mean    | trained tokens  | 1                            | DAPO, arXiv 2503.14476, section 3.3          |
| sequence_mean | trained samples | trained tokens of sample i   | GRPO, arXiv 2402.03300, equation 3          |
| constant      | trained samples | constant_length, one for all | Dr.GRPO, arXiv 2503.20783, its unbiased loss |

A sample is trained if at least one of its tokens is. Every other token weighs exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slimefsdp.errors import BatchError, ConfigError

ReductionName = Literal["token_mean", "sequence_mean", "constant"]
Counts = npt.NDArray[np.int64]  # [samples], the trained tokens of each sample


class Reduction(NamedTuple):
    """The two columns of the table above, as functions of the trained tokens of each sample."""

    denominator: Callable[[Counts], int]
    lengths: Callable[[Counts, int | None], npt.NDArray]  # (counts, constant_length) -> [samples]


def _trained_tokens(counts: Counts) -> int:
    return int(counts.sum())


def _trained_samples(counts: Counts) -> int:
    return int(np.count_nonzero(counts))


REDUCTIONS: dict[ReductionName, Reduction] = {
    "token_mean": Reduction(_trained_tokens, lambda counts, _: np.ones_like(counts)),
    "sequence_mean": Reduction(_trained_samples, lambda counts, _: counts),
    "constant": Reduction(_trained_samples, lambda counts, length: np.full_like(counts, length)),
}


def token_weights(
    mask: npt.NDArray[np.bool_],
    sample_of_token: npt.NDArray[np.int64],
    num_samples: int,
    reduction: ReductionName,
    *,
    constant_length: int | None = None,
    denominator: float | None = None,
) -> npt.NDArray[np.float64]:
    """The weight of each response token of one update, so that its loss is sum(weight * per-token loss).

    When one update is computed in several calls, give each of them the denominator of the whole
    (`update_denominator` of all its tokens): their sums then add up to the whole. A sample's tokens must stay in one
    call, because sequence_mean counts them there.

    Args:
        mask: [tokens] bool, True where the policy chose the token and it is trained.
        sample_of_token: [tokens] which sample a token belongs to, 0 <= value < num_samples, in any order.
        num_samples: samples of this call, trained or not.
        reduction: a key of REDUCTIONS.
        constant_length: for "constant", and only then: the length in tokens that every sample counts as having.
        denominator: replaces this call's own denominator (trained tokens or trained samples, see the table).

    Returns:
        [tokens] float64; all zeros if no token is trained, whatever the denominator.

    Raises:
        ConfigError: constant_length is missing, not positive, or given to a reduction that has no use for it.
        BatchError: the denominator is not a positive number, though there are tokens to train on.
    """
    _check_constant_length(reduction, constant_length)
    counts = _trained_tokens_per_sample(mask, sample_of_token, num_samples)
    weights = np.zeros(mask.shape, dtype=np.float64)
    if not counts.any():
        return weights
    if denominator is None:
        denominator = REDUCTIONS[reduction].denominator(counts)
    if not (math.isfinite(denominator) and denominator > 0):
        raise BatchError(
            f"{denominator} cannot divide the loss of {counts.sum()} trained tokens",
            field="denominator",
            hint="pass the update_denominator of the whole update, or None for this call's own",
        )
    lengths = REDUCTIONS[reduction].lengths(counts, constant_length)
    weights[mask] = 1.0 / (denominator * lengths[sample_of_token[mask]])
    return weights


def update_denominator(
    mask: npt.NDArray[np.bool_],
    sample_of_token: npt.NDArray[np.int64],
    num_samples: int,
    reduction: ReductionName,
) -> float:
    """The denominator of these tokens: how many are trained (token_mean), or how many samples are (the others).

    Arguments as in `token_weights`. Adds up over calls that hold different samples; 0.0 if no token is trained.
    """
    counts = _trained_tokens_per_sample(mask, sample_of_token, num_samples)
    return float(REDUCTIONS[reduction].denominator(counts))


def _trained_tokens_per_sample(
    mask: npt.NDArray[np.bool_], sample_of_token: npt.NDArray[np.int64], num_samples: int
) -> Counts:
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
