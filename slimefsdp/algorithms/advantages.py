"""Advantages: how much better a sample, or a token, did than could be expected; computed over a whole batch.

ESTIMATORS is the table of names to pure functions. A function returns one number per sample or one per response token;
`advantages` does what all have in common: groups are checked before, masked tokens get exactly 0.0, and the result is
whitened where asked for. Numpy only and float64, so that driver and ranks find the same numbers.

Masked tokens are skipped as if they were not there: the next state of a trained token is the next trained token,
whatever stands between them, and discounts count trained tokens only.

A new estimator is a function here with a row in ESTIMATORS, and in registry.py, which settings read, its name and the
tuples it belongs to (GROUPED, TOKEN_ESTIMATORS, PAIRED_ESTIMATORS). If it reads gamma, gae_lambda or pass_k,
`config/algorithm.py` has to know; tests/algorithms/test_advantages.py and tests/test_algorithms.py want a case of it,
and docs/algorithms.md a row.
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
    """What estimators read of B samples with R response tokens (each sample has at least one), in the batch's order."""

    scores: Floats  # [B] reward of the whole sample: its scalar reward plus all its token rewards
    token_rewards: Floats  # [R] the same where they were earned; the scalar reward at the last trained token
    mask: npt.NDArray[np.bool_]  # [R] trained tokens; holes anywhere, a sample may have none
    sample_ids: Integers  # [R] ascending
    group_ids: Integers | None = None  # [B] samples of one prompt share one, in any order
    baseline_rewards: Floats | None = None  # [B] e.g. the reward of the greedy response to the same prompt
    values: Floats | None = None  # [R] of a critic: the rewards to go that it expects before the token


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """The parameters of the formulas; each estimator documents which ones it reads."""

    gamma: float = 1.0
    gae_lambda: float = 1.0
    epsilon: float = 1e-6  # added to standard deviations, in the unit of the rewards; may be 0
    pass_k: int = 1


class Estimator(NamedTuple):
    """An estimator's function, and what it requires of a batch."""

    function: Callable[[AdvantageInputs, AdvantageOptions], Floats]  # -> [B] one per sample, or [R] one per token
    reads: tuple[str, ...] = ("rewards",)  # fields of RolloutBatch that must be there
    smallest_group: int = 1  # samples that every group must have
    whitens: bool = False  # whether its authors, or users, whiten over the batch
    compares_groups: bool = False  # groups of zeros may be left out; of those in the table, GROUPED says it


class _Groups(NamedTuple):
    ids: Integers  # [groups] ascending
    first_sample: npt.NDArray[np.intp]  # [groups]
    of_sample: npt.NDArray[np.intp]  # [B] index of the sample's group
    sizes: npt.NDArray[np.intp]  # [groups] samples


def _groups(group_ids: Integers | None) -> _Groups:
    assert group_ids is not None
    return _Groups(*np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True))


def _centred(scores: Floats, groups: _Groups, weights: npt.NDArray | None = None) -> Floats:
    """Scores minus the (weighted) mean of their group, [B]; exactly 0.0 throughout a group of equal scores."""
    weights = np.ones_like(scores) if weights is None else weights
    # measured from one of the group's own scores: equal scores become exact zeros before anything is rounded
    offsets = scores - scores[groups.first_sample][groups.of_sample]
    sums = np.bincount(groups.of_sample, weights=weights * offsets)
    totals = np.bincount(groups.of_sample, weights=weights)
    return offsets - _ratio(sums, totals)[groups.of_sample]


def _ratio(numerator: npt.NDArray, denominator: npt.NDArray | np.floating) -> Floats:
    """numerator / denominator, and 0.0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape), where=denominator > 0)


def _grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """(r - group mean) / (group std + epsilon), [B]; the sample standard deviation (ddof=1).

    GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    groups = _groups(inputs.group_ids)
    centred = _centred(inputs.scores, groups)
    variances = np.bincount(groups.of_sample, weights=centred**2) / (groups.sizes - 1)
    return _ratio(centred, (np.sqrt(variances) + options.epsilon)[groups.of_sample])


def _dr_grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """r - group mean, [B]. Dr. GRPO (arXiv 2503.20783): GRPO without its division by the std."""
    return _centred(inputs.scores, _groups(inputs.group_ids))


def _rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """r - mean of the group's other samples, [B]. REINFORCE leave-one-out (arXiv 2402.14740)."""
    groups = _groups(inputs.group_ids)
    # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
    return _centred(inputs.scores, groups) * (groups.sizes / (groups.sizes - 1))[groups.of_sample]


def _reinforce_pp(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Rewards from the token on, discounted by gamma, [R]; whitened over the batch.

    REINFORCE++ (arXiv 2501.03262), the variant without groups. Its KL penalty is a token reward.
    """
    return _sums_to_go(inputs.token_rewards, inputs, options.gamma)


def _reinforce_pp_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """r - group mean, [B]; whitened over the batch. REINFORCE++ with baseline (arXiv 2501.03262).

    Whitening subtracts the mean over all tokens, so a group of equal rewards then no longer has advantages of 0.
    """
    return _dr_grpo(inputs, options)


def _remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Rewards from the token on, minus the baseline reward of the sample, [R].

    ReMax (arXiv 2310.10505), whose baseline is the reward of the greedy response. Its reward comes whole at the end
    of the response: then this is r - baseline at every token. A reward at an earlier token counts for the tokens up to
    it only: later ones cannot have earned it, and the gradient's expectation is the same.
    """
    assert inputs.baseline_rewards is not None
    return _sums_to_go(inputs.token_rewards, inputs, 1.0) - inputs.baseline_rewards[inputs.sample_ids]


def _opo(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """r - mean of the group's rewards, each weighted by the trained tokens of its sample, [B].

    OPO (arXiv 2505.23585), the optimal baseline where squared gradient norms grow with the length; tokens without a
    gradient do not count.
    """
    lengths = np.bincount(inputs.sample_ids[inputs.mask], minlength=inputs.scores.size)
    return _centred(inputs.scores, _groups(inputs.group_ids), weights=lengths)


def _maxrl(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """(r - group mean) / group mean, [B]; 0 where the mean is 0. MaxRL (arXiv 2602.02710).

    With rewards of 0 and 1 the group's mean of advantage x grad log-prob is the mean of grad log-prob over its right
    responses, less that over all of them as a control variate.

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
    """Returns how much better the k-subsets of the group that hold a sample do than all its k-subsets, [B].

    Pass@k training (arXiv 2508.10751), section 2.4. A subset is rewarded 1 if any of its k samples is right, else 0. Of
    n samples w are wrong: the mean reward is p = 1 - C(w, k) / C(n, k), the standard deviation s = sqrt(p (1 - p)). A
    right sample gets (1 - p) / (s + epsilon), a wrong one (1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / (s + epsilon),
    and both 0 where s is 0. The larger of the batch's two rewards is right; nothing else of them is read.

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
    failed_with_it = np.ones(groups.sizes.size)  # C(w - 1, k - 1) / C(n - 1, k - 1): a wrong sample's subset fails
    for others in range(1, k):
        failed_with_it *= np.maximum(wrong - others, 0) / (groups.sizes - others)
    wrong_share = wrong / groups.sizes
    failed = failed_with_it * wrong_share  # C(w, k) / C(n, k)
    scale = np.sqrt(failed * (1 - failed)) + options.epsilon
    # failed - failed_with_it, without the cancellation
    numerator = np.where(is_right, failed[groups.of_sample], -(failed_with_it * (1 - wrong_share))[groups.of_sample])
    return _ratio(numerator, scale[groups.of_sample])


def _gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """Sum over l of (gamma lambda)^l delta_(t+l) with delta_t = r_t + gamma V_(t+1) - V_t, [R]; V after the last is 0.

    Generalised advantage estimation (arXiv 1506.02438), equation 16.
    """
    assert inputs.values is not None
    values, samples = inputs.values[inputs.mask], inputs.sample_ids[inputs.mask]
    next_values = np.zeros_like(values)
    next_values[:-1] = np.where(samples[1:] == samples[:-1], values[1:], 0.0)
    deltas = np.zeros_like(inputs.values)
    deltas[inputs.mask] = inputs.token_rewards[inputs.mask] + options.gamma * next_values - values
    return _sums_to_go(deltas, inputs, options.gamma * options.gae_lambda)


def _raw(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
    """The sample's reward itself, [B]: REINFORCE without a baseline, or rewards that are advantages already."""
    return inputs.scores


def _sums_to_go(terms: Floats, inputs: AdvantageInputs, discount: float) -> Floats:
    """Sum over l >= 0 of discount^l terms[t + l] over the trained tokens of a sample, [R]; 0.0 at masked tokens."""
    trained = np.flatnonzero(inputs.mask)
    counts = np.bincount(inputs.sample_ids[trained], minlength=inputs.scores.size)
    longest_first = np.argsort(-counts, kind="stable")
    last = (np.cumsum(counts) - 1)[longest_first]  # of each sample, among the trained tokens
    # one step per position from the end, over all samples that are that long: those stand in front
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

    Without whitening, those of a group whose rewards are all equal are exactly 0.0 under every estimator that compares
    within groups, so that a planner may drop such samples by comparing with zero.

    Args:
        inputs: with every field that `estimator.reads` names.
        whiten: also bring them to mean 0 and standard deviation 1 over the trained tokens (`whitened`).

    Raises:
        BatchError: a group is smaller than the estimator can use, the rewards are none that it can use, or what it
            returned is not one finite number per sample or per response token.
    """
    if "group_ids" in estimator.reads:
        _check_group_sizes(_groups(inputs.group_ids), estimator.smallest_group)
    found = np.asarray(estimator.function(inputs, options), dtype=np.float64)
    is_finite = False  # as far as is known
    if found.shape == inputs.scores.shape:  # B == R means one token per sample, and then both readings agree
        is_finite = bool(np.isfinite(found).all())
        found = found[inputs.sample_ids]
    if found.shape != inputs.mask.shape:
        raise BatchError(
            f"advantages of shape {found.shape} came from the estimator, for {inputs.scores.size} samples with "
            f"{inputs.mask.size} response tokens",
            field="advantages",
            hint="return one per sample or one per response token",
        )
    if not (is_finite and inputs.mask.all()):
        found = np.where(inputs.mask, found, 0.0)
    if not is_finite and (broken := np.flatnonzero(~np.isfinite(found))).size:
        raise BatchError(
            f"advantages has {found[broken[0]]} in sample {inputs.sample_ids[broken[0]]} (response token {broken[0]})",
            field="advantages",
            hint="give rewards and values whose sums and squares are finite",
        )
    return whitened(found, inputs.mask) if whiten else found


def whitened(values: Floats, mask: npt.NDArray[np.bool_], epsilon: float = 1e-8) -> Floats:
    """(values - mean) / (std + epsilon) over the trained tokens of the whole batch, [R]; 0.0 at masked tokens.

    The standard deviation is that of these very tokens (ddof=0). All 0.0 if their values are all equal.

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
    """Returns a critic's targets, [R]: GAE advantages, not whitened, plus values; 0.0 at masked tokens.

    The lambda-return: with lambda 1 the discounted rewards to go, for any values (arXiv 1506.02438, section 5).
    """
    assert inputs.values is not None
    return np.where(inputs.mask, _gae(inputs, options) + inputs.values, 0.0)


def zero_variance_share(scores: npt.NDArray[np.floating], group_ids: Integers) -> float:
    """Returns the share of groups with equal scores among groups of two samples or more; 0.0 if there are none.

    Args:
        scores: [B].
        group_ids: [B].
    """
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
