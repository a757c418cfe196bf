"""Computes the advantages of a whole batch.

ESTIMATORS maps names to pure functions, which return one number per sample or one per response token. `advantages`
does what all estimators have in common: it checks groups, sets masked tokens to exactly 0.0, and whitens the result if
requested. Everything is computed in float64 by numpy, so that the driver and the ranks get the same numbers.

Masked tokens are skipped as if they did not exist: the next state of a trained token is the next trained token, and
discounts count trained tokens only.

To add an estimator, write a function here and add it to ESTIMATORS; add its name to registry.py and to those of
its tuples that apply (GROUPED, TOKEN_ESTIMATORS, PAIRED_ESTIMATORS). If it reads gamma, gae_lambda or pass_k, also add
its name to `config/algorithm.py`. Add a case to tests/algorithms/test_advantages.py and tests/test_algorithms.py, and a
row to docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slimefsdp.errors import BatchError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInputs:
    """Holds the inputs of estimators for B samples with R response tokens, at least one per sample, in batch order."""

    scores: Floats  # [B] reward of the whole sample: its scalar reward plus all its token rewards
    token_rewards: Floats  # [R] rewards at the tokens that earned them; the scalar reward is at the last trained token
    mask: npt.NDArray[np.bool_]  # [R] True at trained tokens; a sample may have gaps, or no trained token at all
    sample_ids: Integers  # [R] ascending
    group_ids: Integers | None = None  # [B] equal for samples of one prompt, in any order
    baseline_rewards: Floats | None = None  # [B] e.g. the reward of the greedy response to the same prompt
    values: Floats | None = None  # [R] the critic's estimate of the rewards to go, before each token


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """Holds the parameters of the formulas; each estimator documents which ones it reads."""

    gamma: float = 1.0
    gae_lambda: float = 1.0
    epsilon: float = 1e-6  # added to standard deviations, in the unit of the rewards; may be 0
    pass_k: int = 1


class Estimator(NamedTuple):
    """Holds an estimator's function and its requirements on a batch."""

    function: Callable[[AdvantageInputs, AdvantageOptions], Floats]  # -> [B] one per sample, or [R] one per token
    reads: tuple[str, ...] = ("rewards",)  # fields of RolloutBatch that must be present
    smallest_group: int = 1  # the least number of samples in a group
    whitens: bool = False  # whether the estimator's authors, or common use, whiten over the batch
    compares_groups: bool = False  # whether a group of advantages 0 may be left out; GROUPED sets it in ESTIMATORS


class _Groups(NamedTuple):
    ids: Integers  # [groups] ascending
    first_sample: npt.NDArray[np.intp]  # [groups]
    of_sample: npt.NDArray[np.intp]  # [B] index of the sample's group
    sizes: npt.NDArray[np.intp]  # [groups] samples


def _groups(group_ids: Integers | None) -> _Groups:
    assert group_ids is not None
    return _Groups(*np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True))


def _centred(scores: Floats, groups: _Groups, weights: npt.NDArray | None = None) -> Floats:
    """Returns scores minus the (weighted) mean of their group, [B]; exactly 0.0 in a group of equal scores."""
    weights = np.ones_like(scores) if weights is None else weights
    # relative to the first score of the group, so that equal scores become exact zeros before anything is rounded
    offsets = scores - scores[groups.first_sample][groups.of_sample]
    sums = np.bincount(groups.of_sample, weights=weights * offsets)
    totals = np.bincount(groups.of_sample, weights=weights)
    return offsets - _ratio(sums, totals)[groups.of_sample]


def _ratio(numerator: npt.NDArray, denominator: npt.NDArray | np.floating) -> Floats:
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape), where=denominator > 0)


def _grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns (r - group mean) / (group std + epsilon), [B], with the sample standard deviation (ddof=1).

    GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    groups = _groups(inputs.group_ids)
    centred = _centred(inputs.scores, groups)
    variances = np.bincount(groups.of_sample, weights=centred**2) / (groups.sizes - 1)
    return _ratio(centred, (np.sqrt(variances) + options.epsilon)[groups.of_sample])


def _dr_grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns r - group mean, [B]. Dr. GRPO (arXiv 2503.20783) is GRPO without the division by the std."""
    return _centred(inputs.scores, _groups(inputs.group_ids))


def _rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns r - mean of the group's other samples, [B]. REINFORCE leave-one-out (arXiv 2402.14740)."""
    groups = _groups(inputs.group_ids)
    # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
    return _centred(inputs.scores, groups) * (groups.sizes / (groups.sizes - 1))[groups.of_sample]


def _reinforce_pp(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns the sum of rewards from each token on, discounted by gamma, [R]; `advantages` whitens it over the batch.

    REINFORCE++ (arXiv 2501.03262), the variant without groups. Its KL penalty is a token reward.
    """
    return _sums_to_go(inputs.token_rewards, inputs, options.gamma)


def _reinforce_pp_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns r - group mean, [B]; `advantages` whitens it. REINFORCE++ with baseline (arXiv 2501.03262).

    Whitening subtracts the mean over all tokens, so the advantages of a group of equal rewards are no longer 0.
    """
    return _dr_grpo(inputs, options)


def _remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns the sum of rewards from each token on, minus the baseline reward of the sample, [R].

    ReMax (arXiv 2310.10505); its baseline is the reward of the greedy response. In the paper the whole reward is at the
    end of the response, which gives r - baseline at every token. A reward at an earlier token counts only for the
    tokens up to it: later tokens cannot have earned it, and the gradient's expectation is the same.
    """
    assert inputs.baseline_rewards is not None
    return _sums_to_go(inputs.token_rewards, inputs, 1.0) - inputs.baseline_rewards[inputs.sample_ids]


def _opo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns r - mean of the group's rewards, each weighted by the trained tokens of its sample, [B].

    OPO (arXiv 2505.23585): the optimal baseline if squared gradient norms grow with the length. Masked tokens
    do not count.
    """
    lengths = np.bincount(inputs.sample_ids[inputs.mask], minlength=inputs.scores.size)
    return _centred(inputs.scores, _groups(inputs.group_ids), weights=lengths)


def _maxrl(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns (r - group mean) / group mean, [B]; 0 where the mean is 0. MaxRL (arXiv 2602.02710).

    With rewards of 0 and 1, the group's mean of advantage x grad log-prob is the mean of grad log-prob over the correct
    responses, minus the mean over all responses as a control variate.

    Raises:
        BatchError: a reward is negative.
    """
    if (below := np.flatnonzero(inputs.scores < 0)).size:
        raise BatchError(
            f"sample {below[0]} has a reward of {inputs.scores[below[0]]}, and {below.size} samples are below 0: maxrl "
            "divides by the mean reward of a group",
            field="rewards",
            hint="give rewards >= 0 (token rewards and KL penalties count), or choose another estimator",
        )
    groups = _groups(inputs.group_ids)
    means = np.bincount(groups.of_sample, weights=inputs.scores) / groups.sizes
    return _ratio(_centred(inputs.scores, groups), means[groups.of_sample])


def _pass_at_k(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns the mean reward of the k-subsets that contain a sample, normalised over all k-subsets of its group.

    Pass@k training (arXiv 2508.10751), section 2.4; [B]. A subset has reward 1 if any of its k samples is correct, else
    0. If w of n samples are wrong, the mean reward is p = 1 - C(w, k) / C(n, k) and the standard deviation is
    s = sqrt(p (1 - p)). A correct sample gets (1 - p) / (s + epsilon), a wrong one
    (1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / (s + epsilon); both get 0 if s is 0. A sample is correct if it has the
    larger of the batch's two rewards; the size of the rewards does not matter.

    Raises:
        BatchError: the batch has more than two different rewards, or a group has fewer than k samples.
    """
    scores, k = inputs.scores, options.pass_k
    middle = np.flatnonzero((scores > scores.min(initial=np.inf)) & (scores < scores.max(initial=-np.inf)))
    if middle.size:
        raise BatchError(
            f"sample {middle[0]} has a reward of {scores[middle[0]]}, between {scores.min()} and {scores.max()}: "
            "pass_at_k knows right and wrong only",
            field="rewards",
            hint="give right responses one reward and wrong ones another (token rewards and KL penalties count), or "
            "choose another estimator",
        )
    groups = _groups(inputs.group_ids)
    _check_group_sizes(groups, k)
    is_right = scores > scores.min(initial=np.inf)
    wrong = groups.sizes - np.bincount(groups.of_sample, weights=is_right)
    # C(w - 1, k - 1) / C(n - 1, k - 1), the probability that a subset with a given wrong sample fails
    failed_with_it = np.ones(groups.sizes.size)
    for others in range(1, k):
        failed_with_it *= np.maximum(wrong - others, 0) / (groups.sizes - others)
    wrong_share = wrong / groups.sizes
    failed = failed_with_it * wrong_share  # C(w, k) / C(n, k)
    scale = np.sqrt(failed * (1 - failed)) + options.epsilon
    # for wrong samples failed - failed_with_it, without cancellation
    numerator = np.where(is_right, failed[groups.of_sample], -(failed_with_it * (1 - wrong_share))[groups.of_sample])
    return _ratio(numerator, scale[groups.of_sample])


def _gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns the sum over l of (gamma lambda)^l delta_(t+l), where delta_t = r_t + gamma V_(t+1) - V_t; [R].

    Generalised advantage estimation (arXiv 1506.02438), equation 16. The value after the last token is 0.
    """
    assert inputs.values is not None
    values, samples = inputs.values[inputs.mask], inputs.sample_ids[inputs.mask]
    next_values = np.zeros_like(values)
    next_values[:-1] = np.where(samples[1:] == samples[:-1], values[1:], 0.0)
    deltas = np.zeros_like(inputs.values)
    deltas[inputs.mask] = inputs.token_rewards[inputs.mask] + options.gamma * next_values - values
    return _sums_to_go(deltas, inputs, options.gamma * options.gae_lambda)


def _raw(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns the sample's reward, [B]: REINFORCE without a baseline, or rewards that are advantages already."""
    return inputs.scores


def _sums_to_go(terms: Floats, inputs: AdvantageInputs, discount: float) -> Floats:
    """Returns the discounted sum of `terms` from each trained token to the end of its sample, [R]; 0.0 where masked.

    The discount counts trained tokens: the l-th trained token after this one has the factor discount^l.
    """
    trained = np.flatnonzero(inputs.mask)
    counts = np.bincount(inputs.sample_ids[trained], minlength=inputs.scores.size)
    longest_first = np.argsort(-counts, kind="stable")
    last = (np.cumsum(counts) - 1)[longest_first]  # index of each sample's last token among the trained tokens
    # steps back token by token from the samples' ends; alive[back] samples have more than `back` tokens
    alive = np.searchsorted(-counts[longest_first], -np.arange(counts.max(initial=0)))
    sums = np.zeros_like(terms)
    running = np.zeros(counts.size)
    for back, num_samples in enumerate(alive):
        tokens = trained[last[:num_samples] - back]
        running = terms[tokens] + discount * running[:num_samples]
        sums[tokens] = running
    return sums


_READS_GROUPS = ("rewards", "group_ids")

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(_grpo, _READS_GROUPS, smallest_group=2),
    "dr_grpo": Estimator(_dr_grpo, _READS_GROUPS),
    "rloo": Estimator(_rloo, _READS_GROUPS, smallest_group=2),
    "reinforce_pp": Estimator(_reinforce_pp, whitens=True),
    "reinforce_pp_baseline": Estimator(_reinforce_pp_baseline, _READS_GROUPS, whitens=True),
    "remax": Estimator(_remax, ("rewards", "baseline_rewards")),
    "opo": Estimator(_opo, _READS_GROUPS),
    "maxrl": Estimator(_maxrl, _READS_GROUPS),
    "pass_at_k": Estimator(_pass_at_k, _READS_GROUPS),
    "gae": Estimator(_gae, ("rewards", "values"), whitens=True),  # not in the paper, but in every PPO since baselines
    "raw": Estimator(_raw),
}
"""Name in the settings -> estimator. pass_at_k needs groups of at least `pass_k` samples."""


def advantages(inputs: AdvantageInputs, estimator: Estimator, options: AdvantageOptions, *, whiten: bool) -> Floats:
    """Returns the advantage of every response token, float64 [R]; exactly 0.0 at masked tokens.

    Without whitening, the advantages of a group of equal rewards are exactly 0.0 under every estimator that compares
    within groups, so that the planner can find such samples by comparing with zero.

    Args:
        inputs: every field that `estimator.reads` names must be set.
        whiten: also scale the result to mean 0 and standard deviation 1 over the trained tokens (`whitened`).

    Raises:
        BatchError: a group is too small for the estimator, the estimator cannot use these rewards, or it did not return
            one finite number per sample or per response token.
    """
    if "group_ids" in estimator.reads:
        _check_group_sizes(_groups(inputs.group_ids), estimator.smallest_group)
    result = np.asarray(estimator.function(inputs, options), dtype=np.float64)
    is_finite = False  # unknown until checked below
    if result.shape == inputs.scores.shape:  # B == R means one token per sample, and then both readings agree
        is_finite = bool(np.isfinite(result).all())
        result = result[inputs.sample_ids]
    if result.shape != inputs.mask.shape:
        raise BatchError(
            f"advantages of shape {result.shape} came from the estimator, for {inputs.scores.size} samples with "
            f"{inputs.mask.size} response tokens",
            field="advantages",
            hint="return one per sample or one per response token",
        )
    if not (is_finite and inputs.mask.all()):
        result = np.where(inputs.mask, result, 0.0)
    if not is_finite and (broken := np.flatnonzero(~np.isfinite(result))).size:
        raise BatchError(
            f"advantages has {result[broken[0]]} in sample {inputs.sample_ids[broken[0]]} (response token {broken[0]})",
            field="advantages",
            hint="give rewards and values whose sums and squares are finite",
        )
    return whitened(result, inputs.mask) if whiten else result


def whitened(values: Floats, mask: npt.NDArray[np.bool_], epsilon: float = 1e-8) -> Floats:
    """Returns (values - mean) / (std + epsilon), [R]; 0.0 at masked tokens.

    Mean and standard deviation (ddof=0) are over the trained tokens of the whole batch. The result is all 0.0 if
    the trained tokens have equal values.

    Args:
        values: [R].
        mask: [R], True at trained tokens.
        epsilon: in the unit of `values`; may be 0.
    """
    result = np.zeros(mask.shape)
    if mask.any():
        trained = values[mask]
        offsets = trained - trained[0]  # equal values become exact zeros before anything is rounded
        centred = offsets - offsets.mean()
        result[mask] = _ratio(centred, np.sqrt(np.mean(centred**2)) + epsilon)
    return result


def value_targets(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Returns a critic's targets, [R]: GAE advantages (not whitened) plus values; 0.0 at masked tokens.

    This is the lambda-return. With lambda 1 it equals the discounted rewards to go, for any values (arXiv 1506.02438,
    section 5).
    """
    assert inputs.values is not None
    return np.where(inputs.mask, _gae(inputs, options) + inputs.values, 0.0)


def zero_variance_share(scores: npt.NDArray[np.floating], group_ids: Integers) -> float:
    """Returns the share of groups with equal `scores` [B] among those of several samples; 0.0 without such groups."""
    groups = _groups(group_ids)
    differs = scores != scores[groups.first_sample][groups.of_sample]
    num_different = np.bincount(groups.of_sample, weights=differs)
    is_group = groups.sizes > 1
    return float(np.mean(num_different[is_group] == 0)) if is_group.any() else 0.0


def _check_group_sizes(groups: _Groups, smallest: int) -> None:
    if (small := np.flatnonzero(groups.sizes < smallest)).size:
        raise BatchError(
            f"group {groups.ids[small[0]]} has {groups.sizes[small[0]]} of the {smallest} samples that the estimator "
            f"needs (the first is sample {groups.first_sample[small[0]]}); {small.size} of {groups.ids.size} groups "
            "are too small",
            field="group_ids",
            hint=f"sample at least {smallest} responses per prompt and keep groups whole, or choose another estimator",
        )
