"""Advantages of whole samples, computed on the driver from their rewards and the groups they belong to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slimefsdp.errors import BatchError


def group_advantages(
    rewards: npt.NDArray[np.floating],
    group_ids: npt.NDArray[np.int64],
    *,
    normalize_by_std: bool,
    epsilon: float = 1e-6,
) -> npt.NDArray[np.float64]:
    """How much better each sample was rewarded than its group: (r_i - mean) / (std + epsilon).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the sample standard deviation (ddof=1). The advantages of a
    group whose rewards are all equal are exactly 0.0, so that a planner may drop such samples by comparing with zero.

    Args:
        rewards: [samples], finite, in any unit; computed in float64 whatever the dtype.
        group_ids: [samples] any int64; the samples of a group need not be adjacent.
        normalize_by_std: False leaves r_i - mean, in the unit of the rewards.
        epsilon: added to the standard deviation, in the unit of the rewards; may be 0.

    Returns:
        [samples] float64.

    Raises:
        BatchError: normalize_by_std and a group of one sample, which has no standard deviation.
    """
    assert rewards.shape == group_ids.shape and rewards.ndim == 1, (rewards.shape, group_ids.shape)
    rewards = rewards.astype(np.float64)
    groups, first_sample, group_of_sample, sizes = np.unique(
        group_ids, return_index=True, return_inverse=True, return_counts=True
    )
    # measured from one of the group's own rewards: equal rewards become exact zeros before anything is rounded
    offsets = rewards - rewards[first_sample][group_of_sample]
    centred = offsets - (np.bincount(group_of_sample, weights=offsets) / sizes)[group_of_sample]
    if not normalize_by_std:
        return centred
    if (alone := np.flatnonzero(sizes == 1)).size:
        raise BatchError(
            f"group {groups[alone[0]]} has one sample (sample {first_sample[alone[0]]}), and {alone.size} of "
            f"{groups.size} groups are like it: one reward has no standard deviation",
            field="group_ids",
            hint="sample at least two responses per prompt, or switch the normalisation by standard deviation off",
        )
    variances = np.bincount(group_of_sample, weights=centred**2) / (sizes - 1)
    scale = (np.sqrt(variances) + epsilon)[group_of_sample]
    return np.divide(centred, scale, out=np.zeros_like(centred), where=scale > 0)
