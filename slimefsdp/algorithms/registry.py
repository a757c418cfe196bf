"""Lists the names in every table of functions, with a one-line description of each.

Settings, the command line and the documentation read this module, because it imports nothing. A test checks that it
agrees with the tables.
"""

from __future__ import annotations

from typing import Literal

LossName = Literal["policy", "sft", "value"]
ESTIMATORS: dict[str, str] = {
    "grpo": "(reward - group mean) / group standard deviation; arXiv 2402.03300",
    "dr_grpo": "reward - group mean; arXiv 2503.20783",
    "rloo": "reward - mean of the group's others; arXiv 2402.14740",
    "reinforce_pp": "rewards to go, whitened over the batch; arXiv 2501.03262",
    "reinforce_pp_baseline": "reward - group mean, whitened over the batch; arXiv 2501.03262",
    "remax": "reward - reward of the greedy response; arXiv 2310.10505",
    "opo": "reward - length-weighted group mean; arXiv 2505.23585",
    "maxrl": "(reward - group mean) / group mean; arXiv 2602.02710",
    "pass_at_k": "advantage of the group's pass@k; arXiv 2508.10751",
    "gae": "generalised advantage estimation from a critic's values; arXiv 1506.02438",
    "raw": "the reward itself",
}
POLICY_LOSSES: dict[str, str] = {
    "ppo": "clipped token ratio, clip-higher and dual clip; arXiv 1707.06347, 2503.14476, 1912.09729",
    "gspo": "clipped sequence ratio; arXiv 2507.18071",
    "gspo_token": "clipped sequence ratio with token advantages; arXiv 2507.18071",
    "cispo": "clipped ratio as a weight without gradient; arXiv 2506.13585",
    "sapo": "soft gate on the token ratio; arXiv 2511.20347",
    "gmpo": "geometric mean of clipped token ratios; arXiv 2507.20673",
    "reinforce": "-advantage x log-prob",
    "importance_sampling": "-advantage x ratio, never clipped",
    "dpo": "pairwise preference loss against the reference; arXiv 2305.18290",
    "dro": "-advantage x log-prob, drawn to the old log-prob by its square; arXiv 2405.19107",
}
CORRECTIONS: dict[str, str] = {
    "importance": "weight by trainer / rollout probability (decoupled PPO); arXiv 2505.24298",
    "tis": "that weight, truncated above",
    "mis": "that weight, tokens outside the bounds dropped",
    "icepop": "tokens outside two bounds dropped",
    "sequence_tis": "weight of the whole sequence, truncated above",
    "sequence_mis": "weight of the whole sequence, sequences outside the bounds dropped",
    "geometric_mis": "sequences whose mean ratio leaves the bounds dropped",
}
KL_ESTIMATORS: dict[str, str] = {
    "k1": "log ratio",
    "k2": "half the squared log ratio",
    "k3": "ratio - 1 - log ratio",
    "abs": "absolute log ratio",
    "full": "exact, over the whole vocabulary",
}
REDUCTIONS: dict[str, str] = {
    "token_mean": "every token counts equally; arXiv 2503.14476",
    "sequence_mean": "every sample counts equally, its tokens equally within it; arXiv 2402.03300",
    "constant": "sum over a sample's tokens divided by one length for all; arXiv 2503.20783",
    "prompt_mean": "every prompt counts equally, the tokens of its group equally within it; arXiv 2510.13786",
}

GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "maxrl", "pass_at_k")
"""Estimators that compare the samples of a group."""
TOKEN_ESTIMATORS = ("reinforce_pp", "remax", "gae")
"""Estimators that give each token its own advantage, where rewards or values differ inside a sample."""
PER_SEQUENCE = ("gspo", "gmpo", "dpo")
"""Policy losses of whole sequences: the advantages of a sequence's tokens must be equal."""
LOOKS_AT_SEQUENCES = (*PER_SEQUENCE, "gspo_token")
"""Policy losses in which the loss of a token depends on other tokens of its sequence."""
TRAINS_WITHOUT_ADVANTAGE = ("dro",)
"""Policy losses in which a token of advantage 0 has a gradient."""
PAIRWISE = ("dpo",)
"""Policy losses that compare the two samples of a group, which must be in one pack."""
PAIRED_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "opo", "maxrl")
"""Estimators under which, of two samples, the better has a positive and the worse a negative advantage."""
