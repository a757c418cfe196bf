"""What rewards say of each token: what estimators are given, whose advantages win, what no batch can be judged by."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimefsdp.algorithms.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, Estimator
from slimefsdp.algorithms.registry import PAIRED_ESTIMATORS
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.training.advantages import check_functions, check_pairs, response_advantages, value_targets
from slimefsdp.training.prepare import checked_advantages
from tests.support.refusals import assert_refusal
from tests.support.small_batches import VOCAB, make_batch, settings

BATCH = make_batch([0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 5.0, 5.0, 1.0, 0.0])
R = BATCH.num_response_tokens
OWN = """
import numpy as np
def of_samples(inputs, options):
    return options.gamma * inputs.scores + options.pass_k + options.gae_lambda
def of_tokens(inputs, options):
    return np.arange(len(inputs.mask))
def too_few(inputs, options):
    return inputs.scores[1:]
def infinite(inputs, options):
    return np.where(inputs.sample_ids == 3, np.inf, 1.0)
def loss(tokens, options):
    raise NotImplementedError
number = 3
def raising(inputs, options):
    return {}["none"]
def ending(inputs, options):
    raise SystemExit(3)
def one(tokens):
    return tokens
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_advantages.py").write_text(OWN)
    (tmp_path / "broken_advantages.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_advantages", None)


def error_of(config: RunConfig, batch: RolloutBatch, kind: type[BatchError | ConfigError] = BatchError) -> Any:
    """What `checked_advantages` raises, which is before any rank works."""
    with pytest.raises(kind) as caught:
        checked_advantages(config, batch, VOCAB, loss="policy")
    assert caught.value.hint
    return caught.value


# ---------------------------------------------------------------------- what estimators are given


def three_samples(**fields: Any) -> RolloutBatch:
    """Holes at the start, in the middle and at the end of the first response; the second is masked altogether."""
    mask = [False, True, False, True, True, False, *[False, False], *[True, True, True]]
    samples = {"tokens": np.arange(14), "lengths": [7, 3, 4], "response_lengths": [6, 2, 3], "loss_mask": mask}
    return RolloutBatch(**samples, rewards=[2.0, -1.0, 4.0], group_ids=[5, 5, 5]).replace(**fields)


def seen_inputs(batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch, kl: np.ndarray | None = None) -> AdvantageInputs:
    seen = []

    def looking(inputs: AdvantageInputs, options: AdvantageOptions) -> np.ndarray:
        seen.append(inputs)
        return inputs.scores

    monkeypatch.setitem(ESTIMATORS, "raw", Estimator(looking))
    response_advantages(settings(advantage={"estimator": "raw"}), batch, kl)
    (inputs,) = seen
    return inputs


def test_a_reward_is_earned_at_the_last_trained_token(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = seen_inputs(three_samples(), monkeypatch)
    assert inputs.token_rewards.tolist() == [0, 0, 0, 0, 2, 0, *[0, 0], *[0, 0, 4]]
    assert inputs.scores.tolist() == [2, -1, 4]  # the masked sample counts in its group
    assert inputs.mask.tolist() == three_samples().mask.tolist()
    assert inputs.sample_ids.tolist() == [0] * 6 + [1] * 2 + [2] * 3 and inputs.group_ids.tolist() == [5, 5, 5]
    assert inputs.values is None and inputs.baseline_rewards is None


def test_a_reward_at_a_token_that_is_not_trained_is_earned_by_the_trained_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_rewards = 2.0 ** np.arange(11)
    kl = 0.5 * np.ones(11)
    inputs = seen_inputs(three_samples(token_rewards=token_rewards), monkeypatch, kl)
    # the first one has none before it; the sample's own 2 is earned at its end; the KL is that of trained tokens alone
    first, last = 1 + 2 + 4 - 0.5, 16 + 32 + 2 - 0.5
    assert inputs.token_rewards.tolist() == [0, first, 0, 7.5, last, 0, *[0, 0], *[255.5, 511.5, 1027.5]]
    assert inputs.scores.tolist() == [first + 7.5 + last, 64 + 128 - 1, 255.5 + 511.5 + 1027.5]
    alone = seen_inputs(three_samples(token_rewards=token_rewards, rewards=None), monkeypatch)
    assert alone.scores.tolist() == [63, 64 + 128, 256 + 512 + 1024]
    plain = seen_inputs(three_samples(), monkeypatch, kl)
    assert plain.scores.tolist() == [2 - 1.5, -1, 4 - 1.5]


def test_rewards_of_tokens_alone_serve_every_estimator_that_reads_rewards() -> None:
    per_token = np.random.default_rng(0).normal(size=R).astype(np.float32)
    sums = np.bincount(BATCH.sample_ids, per_token.astype(np.float64), 10)
    for name in ("grpo", "rloo", "opo", "raw"):
        config = settings(advantage={"estimator": name})
        by_tokens = response_advantages(config, BATCH.replace(rewards=None, token_rewards=per_token))
        by_samples = response_advantages(config, BATCH.replace(rewards=sums))
        np.testing.assert_allclose(by_tokens, by_samples, rtol=1e-5, atol=1e-6)  # rewards are float32


def test_the_kl_lowers_the_advantage_of_whoever_left_the_reference() -> None:
    config = settings(advantage={"estimator": "dr_grpo"})
    kl = np.where(BATCH.sample_ids == 2, 0.25, 0.0)
    change = response_advantages(config, BATCH, kl) - response_advantages(config, BATCH)
    cost = 0.25 * (BATCH.mask & (BATCH.sample_ids == 2)).sum()
    by_sample = {2: -cost / 2, 3: cost / 2}
    expected = [by_sample.get(int(sample), 0.0) for sample in BATCH.sample_ids]
    np.testing.assert_allclose(change, np.where(BATCH.mask, expected, 0.0), atol=1e-12)


# ---------------------------------------------------------------------- whose advantages


def test_the_groups_advantages_are_those_of_the_formula_at_every_trained_token() -> None:
    assert BATCH.rewards is not None and BATCH.group_ids is not None
    for name in ("grpo", "dr_grpo"):
        computed = response_advantages(settings(advantage={"estimator": name}), BATCH)
        for token, sample in enumerate(BATCH.sample_ids):
            group = BATCH.rewards[BATCH.group_ids == BATCH.group_ids[sample]].astype(float)
            scale = group.std(ddof=1) + 1e-6 if name == "grpo" else 1.0
            expected = (BATCH.rewards[sample] - group.mean()) / scale if BATCH.mask[token] else 0.0
            assert computed[token] == pytest.approx(expected)


def test_the_callers_advantages_win_and_are_whitened_only_on_request() -> None:
    own = np.random.default_rng(1).normal(3.0, 2.0, size=R).astype(np.float32)
    batch = BATCH.replace(advantages=own, rewards=None, group_ids=None)
    for estimator in ("grpo", "reinforce_pp"):  # which whitens its own
        assert np.array_equal(response_advantages(settings(advantage={"estimator": estimator}), batch), own)
    white = response_advantages(settings(advantage={"whiten": True}), batch)
    trained = own[batch.mask].astype(np.float64)
    np.testing.assert_allclose(white[batch.mask], (trained - trained.mean()) / trained.std(), rtol=1e-7)
    assert (white[~batch.mask] == 0.0).all() and (~batch.mask).any()


@pytest.mark.parametrize(("estimator", "by_default"), [("reinforce_pp", True), ("rloo", False)])
def test_whitening_is_the_estimators_own_choice_unless_the_settings_say(estimator: str, by_default: bool) -> None:
    found = {
        whiten: response_advantages(settings(advantage={"estimator": estimator, "whiten": whiten}), BATCH)
        for whiten in (None, True, False)
    }
    assert np.array_equal(found[None], found[by_default]) and not np.array_equal(found[True], found[False])
    raw = found[False][BATCH.mask]
    np.testing.assert_allclose(found[True][BATCH.mask], (raw - raw.mean()) / (raw.std() + 1e-8), rtol=1e-12)


# ---------------------------------------------------------------------- functions of the user's own


def test_a_function_of_ones_own_gets_the_options_and_gives_samples_or_tokens_their_advantages() -> None:
    options = {"gamma": 0.5, "pass_k": 7, "gae_lambda": 0.25}
    config = settings(advantage={"estimator": "own_advantages:of_samples", **options})
    check_functions(config)
    assert BATCH.rewards is not None
    expected = np.where(BATCH.mask, 0.5 * BATCH.rewards[BATCH.sample_ids] + 7.25, 0.0)
    np.testing.assert_allclose(response_advantages(config, BATCH), expected)
    bare = BATCH.replace(rewards=None, group_ids=None)  # what it reads is its own affair
    tokens = response_advantages(settings(advantage={"estimator": "own_advantages:of_tokens"}), bare)
    assert tokens.tolist() == np.where(BATCH.mask, np.arange(R), 0).tolist()


@pytest.mark.parametrize(("function", "values"), [("too_few", [(9,)]), ("infinite", ["inf", "sample 3"])])
def test_advantages_of_ones_own_that_are_none_are_refused_before_any_rank_works(
    function: str, values: list[Any]
) -> None:
    error = error_of(settings(advantage={"estimator": f"own_advantages:{function}"}), BATCH)
    assert_refusal(error, BatchError, "advantages", *values)


# ---------------------------------------------------------------------- losses of sequences and pairs


@pytest.mark.parametrize("policy", ["gspo", "gmpo"])
def test_a_loss_of_sequences_refuses_advantages_that_differ_inside_one(policy: str) -> None:
    rewards = np.zeros(R)
    last_of_2 = np.flatnonzero(BATCH.mask & (BATCH.sample_ids == 2))[0]
    rewards[last_of_2] = 1.0
    batch = BATCH.replace(token_rewards=rewards)
    counts = np.bincount(BATCH.sample_ids[BATCH.mask], minlength=10)
    assert counts[2] > 1 and counts[:2].max() > 1
    to_go = {"advantage": {"estimator": "reinforce_pp"}}
    error = error_of(settings(loss={"policy": policy}, **to_go), batch)
    assert error.field == "advantages" and "sample 2" in error.message and policy in error.message
    checked_advantages(settings(loss={"policy": "gspo_token"}, **to_go), batch, VOCAB, loss="policy")
    checked_advantages(
        settings(loss={"policy": policy}, **to_go), BATCH, VOCAB, loss="policy"
    )  # one reward for all tokens
    # what stands at masked tokens is nobody's advantage, and samples may differ from each other
    own = np.where(BATCH.mask, BATCH.sample_ids, np.arange(R))
    checked_advantages(settings(loss={"policy": policy}), BATCH.replace(advantages=own), VOCAB, loss="policy")


DPO: dict[str, Any] = {"loss": {"policy": "dpo"}, "batch": {"max_tokens_per_rank": 100}}
PAIRS = make_batch([0.0, 1.0, 5.0, 3.0, -1.0, -2.0])
JUDGED = PAIRS.replace(advantages=np.ones(PAIRS.num_response_tokens))
NO_PAIRS = {
    "three": (JUDGED.replace(group_ids=[0, 0, 0, 1, 2, 2]), ["group 0", 3]),
    "one": (JUDGED.replace(group_ids=[0, 0, 1, 1, 2, 9]), ["group 2", 1]),
    "equal": (PAIRS.replace(rewards=[0, 1, 5, 5, -1, -2]), ["group 1"]),
    "masked": (PAIRS.replace(loss_mask=PAIRS.mask & (PAIRS.sample_ids != 4)), ["group 2"]),
    "both chosen": (
        PAIRS.replace(advantages=np.where(PAIRS.sample_ids < 4, 1.0, -1.0)), ["group 0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_PAIRS)
def test_a_group_that_is_no_pair_is_named(case: str) -> None:
    check_pairs(settings(**DPO), PAIRS)
    batch, values = NO_PAIRS[case]
    assert_refusal(error_of(settings(**DPO), batch), BatchError, "group_ids", "loss.policy=dpo", *values)


@pytest.mark.parametrize("name", PAIRED_ESTIMATORS)
def test_under_estimators_of_pairs_the_better_sample_has_a_positive_advantage_and_the_other_a_negative_one(
    name: str,
) -> None:
    batch = make_batch([1.0, 0.25, 0.0, 0.5, 0.75, 3.0])
    found = response_advantages(settings(advantage={"estimator": name}), batch)
    for sample, sign in enumerate((1, -1, -1, 1, -1, 1)):
        assert (np.sign(found[batch.mask & (batch.sample_ids == sample)]) == sign).all()


# ---------------------------------------------------------------------- targets of a critic


def test_targets_are_the_callers_returns_or_rewards_to_go_mixed_with_values() -> None:
    values, per_token = np.random.default_rng(3).normal(size=(2, R)).astype(np.float32)
    kl = np.random.default_rng(4).random(R)
    batch = BATCH.replace(values=values, token_rewards=per_token)
    gamma, default = 0.9, 0.8
    config = settings(algorithm="ppo", advantage={"gamma": gamma, "gae_lambda": default})
    assert BATCH.rewards is not None
    for given in (None, 1.0, 0.0):
        lam = default if given is None else given
        expected = np.zeros(R)
        for sample in range(10):
            target = value = 0.0
            tokens = np.flatnonzero(BATCH.mask & (BATCH.sample_ids == sample))[::-1]
            earned = dict.fromkeys(tokens.tolist(), 0.0)
            for place in np.flatnonzero(BATCH.sample_ids == sample).tolist():
                earned[max((token for token in earned if token <= place), default=min(earned))] += float(
                    per_token[place]
                )
            for token in tokens.tolist():
                reward = earned[token] - kl[token] + (BATCH.rewards[sample] if token == tokens[0] else 0.0)
                # the lambda-return by its recursion
                target = reward + gamma * ((1 - lam) * value + lam * target)
                value = float(values[token])
                expected[token] = target
        np.testing.assert_allclose(value_targets(config, batch, kl, given), expected, rtol=1e-12, atol=1e-12)
    returns = np.arange(R, dtype=np.float32)
    assert np.array_equal(value_targets(config, batch.replace(returns=returns), kl, 1.0), returns)
