"""What is decided before any rank works: refusals, advantages, plans and token weights, by numpy alone."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.plan import Plan
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.estimate.hardware import Rates, write_calibration
from slimefsdp.training.plan import (
    cost_model_of,
    loss_weights,
    plan_everything,
    plan_training,
)
from slimefsdp.training.prepare import batch_digest, check_plan, checked_advantages
from tests.support.refusals import names, refused
from tests.support.small_batches import VOCAB, make_batch, settings

BATCH = make_batch([0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 5.0, 5.0, 1.0, 0.0])  # samples 2, 3 and 6, 7 have equal rewards


def refusal(config: RunConfig, batch: RolloutBatch, loss: Any = "policy") -> tuple[str | None, str, str]:
    with pytest.raises(BatchError) as caught:
        checked_advantages(config, batch, VOCAB, loss=loss)
    assert caught.value.hint
    return caught.value.field, caught.value.message, caught.value.hint


def test_a_token_outside_the_vocabulary_is_refused_whatever_it_is_for() -> None:
    tokens = BATCH.tokens.copy()
    tokens[BATCH.token_offsets[3] + 1] = VOCAB
    for loss in ("policy", "sft", None):
        field, message, _ = refusal(settings(), BATCH.replace(tokens=tokens), loss)
        assert field == "tokens" and names(message, "sample 3, token 1") and names(message, 50)


def test_a_sample_over_the_budget_is_named_with_the_budget_that_would_do() -> None:
    longest = int(BATCH.lengths.max())
    config = settings(batch={"max_tokens_per_rank": longest - 1})
    for loss in ("policy", "sft", None):
        field, message, hint = refusal(config, BATCH, loss)
        assert field == "lengths" and names(message, f"sample {BATCH.lengths.argmax()} ") and names(message, longest)
        assert "batch.max_tokens_per_rank" in hint and names(hint, longest)
    checked_advantages(settings(batch={"max_tokens_per_rank": longest}), BATCH, VOCAB, loss="policy")


def test_a_sample_longer_than_the_positions_that_the_model_learned_is_named() -> None:
    longest = int(BATCH.lengths.max())
    with refused(BatchError, "lengths", f"sample {BATCH.lengths.argmax()} ", longest, longest - 1):
        checked_advantages(settings(), BATCH, VOCAB, loss=None, max_sample_tokens=longest - 1)
    checked_advantages(settings(), BATCH, VOCAB, loss=None, max_sample_tokens=longest)


def test_the_policy_loss_needs_rewards_with_groups_or_advantages_and_others_need_neither() -> None:
    for name in ("rewards", "group_ids"):
        without = BATCH.replace(**{name: None})
        assert refusal(settings(), without)[0] == name
        for loss in ("sft", None):
            checked_advantages(settings(), without, VOCAB, loss=loss)  # type: ignore[arg-type]
        checked_advantages(
            settings(), without.replace(advantages=np.zeros(BATCH.num_response_tokens)), VOCAB, loss="policy"
        )


OLD_IS_ROLLOUT = {"loss": {"old_log_probs": "rollout"}}
# settings, what the batch of rewards lacks for them, and who asks for it
LACKING = {
    "old log-probs": (OLD_IS_ROLLOUT, "rollout_log_probs", "loss.old_log_probs=rollout"),
    "correction": ({"correction": {"method": "tis", "high": 2.0}}, "rollout_log_probs", "correction"),
    "veto": ({"correction": {"veto_below": 0.01}}, "rollout_log_probs", "correction"),
    "critic": ({"algorithm": "ppo"}, "values", "advantage.estimator=gae"),
    "greedy": ({"advantage": {"estimator": "remax"}}, "baseline_rewards", "advantage.estimator=remax"),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_the_settings_read_is_asked_of_the_batch(case: str) -> None:
    sections, missing, reader = LACKING[case]
    field, message, hint = refusal(settings(**sections), BATCH)
    assert field == missing and message.startswith(f"{missing} is missing") and reader in message and missing in hint
    size = BATCH.num_samples if missing == "baseline_rewards" else BATCH.num_response_tokens
    checked_advantages(settings(**sections), BATCH.replace(**{missing: np.full(size, -1.0)}), VOCAB, loss="policy")
    checked_advantages(settings(), BATCH, VOCAB, loss="policy")


def test_a_critics_loss_needs_its_values_and_returns_or_what_they_are_computed_from() -> None:
    config, tokens = settings(algorithm="ppo"), np.full(BATCH.num_response_tokens, -1.0)
    with_kl = settings(algorithm="ppo", loss={"kl_coefficient": 0.1, "kl_in": "reward"})
    assert refusal(config, BATCH, "value")[0] == "values"
    batch = BATCH.replace(values=tokens)
    checked_advantages(config, batch, VOCAB, loss="value")
    assert refusal(config, batch.replace(rewards=None), "value")[0] == "rewards"
    checked_advantages(config, batch.replace(rewards=None, token_rewards=tokens), VOCAB, loss="value")
    for name in ("old_log_probs", "ref_log_probs"):
        both = {"old_log_probs": tokens, "ref_log_probs": tokens}
        field, message, hint = refusal(with_kl, batch.replace(**{**both, name: None}), "value")
        assert field == name and "loss.kl_in=reward" in message and "compute_log_probs" in hint
    checked_advantages(with_kl, batch.replace(old_log_probs=tokens, ref_log_probs=tokens), VOCAB, loss="value")
    for given in (config, with_kl):
        checked_advantages(given, batch.replace(rewards=None, returns=tokens), VOCAB, loss="value")


def test_batches_have_one_digest_exactly_if_they_are_the_same() -> None:
    tokens = BATCH.tokens.copy()
    tokens[-1] += 1
    zeros = np.zeros(BATCH.num_response_tokens)
    assert BATCH.loss_mask is not None
    variants = [
        BATCH, BATCH.replace(tokens=tokens), BATCH.replace(loss_mask=None), BATCH.replace(loss_mask=~BATCH.loss_mask),
        BATCH.replace(values=zeros), BATCH.replace(returns=zeros), BATCH.replace(temperature=1.0),
        BATCH.replace(weight_version=1), BATCH.select(range(9)), BATCH.select(range(9, -1, -1)),
    ]  # fmt: skip
    assert len({batch_digest(batch) for batch in variants}) == len(variants)
    assert all(batch_digest(pickle.loads(pickle.dumps(batch))) == batch_digest(batch) for batch in variants)


def planned_samples(plan: Any) -> list[int]:
    return sorted(int(sample) for update in range(len(plan.updates)) for sample in plan.samples_of(update))


def test_samples_in_which_nothing_trains_are_left_out() -> None:
    plan = plan_training(settings(), BATCH)
    assert planned_samples(plan) == [0, 1, 4, 5, 8, 9] and plan.num_dropped == 4
    kept = plan_training(settings(loss={"max_kl": 1e9}), BATCH)
    assert planned_samples(kept) == list(range(10)) and kept.num_dropped == 0
    assert plan.counted_of(0).tolist() == kept.counted_of(0).tolist() == list(range(10))
    masked = BATCH.replace(loss_mask=BATCH.mask & (BATCH.sample_ids != 4))
    without = plan_training(settings(), masked)
    assert planned_samples(without) == [0, 1, 5, 8, 9] and without.counted_of(0).tolist() == [0, 1, 2, 3, *range(5, 10)]
    supervised = plan_training(settings(algorithm="sft"), masked.replace(rewards=None, group_ids=None))
    assert planned_samples(supervised) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    # advantages of one's own are looked at where the mask is True alone, and group by group
    own = np.where(BATCH.mask & (BATCH.sample_ids != 7), 1.0, 0.0) + np.where(BATCH.mask, 0.0, 9.0)
    assert planned_samples(plan_training(settings(), BATCH.replace(advantages=own))) == list(range(10))
    own[BATCH.sample_ids == 6] = 0.0
    assert planned_samples(plan_training(settings(), BATCH.replace(advantages=own))) == [0, 1, 2, 3, 4, 5, 8, 9]


def test_a_zero_advantage_that_says_nothing_of_a_group_leaves_its_sample_in_the_denominators() -> None:
    zeros = BATCH.replace(rewards=np.zeros(10))
    assert planned_samples(plan_training(settings(advantage={"estimator": "raw"}), zeros)) == list(range(10))
    own = zeros.replace(advantages=np.zeros(BATCH.num_response_tokens), group_ids=None)
    assert planned_samples(plan_training(settings(), own)) == list(range(10))
    between = make_batch([0.0, 0.5, 1.0], group=3)
    config = settings(advantage={"estimator": "dr_grpo"}, loss={"policy": "reinforce", "reduction": "sequence_mean"})
    plan = plan_training(config, between)
    assert planned_samples(plan) == [0, 1, 2]
    weights = loss_weights(config, between, plan.samples_of(0))
    assert np.allclose(np.bincount(between.sample_ids, weights), 1 / 3), "the mean of three samples, not of two"


def test_a_function_of_ones_own_may_say_that_its_zeros_are_those_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_estimators.py").write_text(
        "import numpy as np\n"
        "def silent(inputs, options):\n"
        "    sizes = np.bincount(inputs.group_ids)\n"
        "    return inputs.scores - (np.bincount(inputs.group_ids, inputs.scores) / sizes)[inputs.group_ids]\n"
        "def telling(inputs, options):\n"
        "    return silent(inputs, options)\n"
        "telling.compares_groups = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plans = {
        name: plan_training(settings(advantage={"estimator": name}), BATCH)
        for name in ("dr_grpo", "two_estimators:silent", "two_estimators:telling")
    }
    assert planned_samples(plans["two_estimators:silent"]) == list(range(10))
    assert planned_samples(plans["two_estimators:telling"]) == planned_samples(plans["dr_grpo"]) == [0, 1, 4, 5, 8, 9]


def test_samples_of_zero_advantage_stay_where_another_term_trains_them() -> None:
    for loss in ({"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}):
        assert planned_samples(plan_training(settings(loss=loss), BATCH)) == list(range(10))
    # what whitening leaves of a group without variance is not zero
    whitened = settings(advantage={"estimator": "reinforce_pp_baseline"})
    assert planned_samples(plan_training(whitened, BATCH)) == list(range(10))


def test_a_critic_trains_on_every_sample_with_a_token_and_on_its_own_mesh() -> None:
    config = settings(algorithm="ppo", mesh={"dp": 2}, critic={"dp": 3})
    masked = BATCH.replace(loss_mask=BATCH.mask & (BATCH.sample_ids != 4), values=np.zeros(BATCH.num_response_tokens))
    plan = plan_training(config, masked, loss="value")
    assert planned_samples(plan) == [0, 1, 2, 3, 5, 6, 7, 8, 9] and [len(update) for update in plan.updates] == [3]
    actors = plan_training(config, masked)
    assert [len(update) for update in actors.updates] == [2]


def test_a_step_of_several_updates_is_shuffled_and_the_same_batch_always_the_same_way() -> None:
    rewards = np.random.default_rng(1).random(40).tolist()
    config, batch = settings(batch={"samples_per_update": 8}, loss={"epochs": 2}), make_batch(rewards)
    plan = plan_training(config, batch)

    def order(of: Any) -> list[tuple[int, ...]]:
        return [tuple(of.samples_of(update).tolist()) for update in range(len(of.updates))]

    assert plan_training(config, make_batch(rewards)).digest() == plan.digest()
    in_order = [tuple(range(start, start + 8)) for start in range(0, 40, 8)]
    assert set(order(plan)[:5]).isdisjoint(in_order) and order(plan)[:5] != order(plan)[5:]
    another_seed = settings(batch={"samples_per_update": 8}, loss={"epochs": 2}, run={"seed": 1})
    assert order(plan_training(another_seed, batch)) != order(plan)
    other_tokens = batch.replace(tokens=(batch.tokens + 1) % VOCAB)  # so that successive batches differ in their order
    assert order(plan_training(config, other_tokens)) != order(plan)


def test_log_probs_are_planned_for_every_sample_in_one_update() -> None:
    plan = plan_everything(settings(), BATCH, data_ranks=2)
    assert len(plan.updates) == 1 and planned_samples(plan) == list(range(10)) and plan.num_dropped == 0
    assert all(BATCH.lengths[pack].sum() <= 16 for packs in plan.updates[0] for pack in packs)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant", "prompt_mean"])
def test_token_weights_look_at_one_update_alone(reduction: str) -> None:
    loss = {"reduction": reduction, **({"constant_length": 7} if reduction == "constant" else {})}
    samples = np.array([1, 4, 5, 8])  # 4 and 5 answer one prompt
    weights = loss_weights(settings(loss=loss), BATCH, samples)
    expected = np.zeros(BATCH.num_response_tokens)
    trained = BATCH.mask & np.isin(BATCH.sample_ids, samples)
    assert BATCH.group_ids is not None
    groups = BATCH.group_ids[BATCH.sample_ids]
    for token in np.flatnonzero(trained):
        in_sample = (trained & (BATCH.sample_ids == BATCH.sample_ids[token])).sum()
        in_group = (trained & (groups == groups[token])).sum()
        expected[token] = {
            "token_mean": 1 / trained.sum(), "sequence_mean": 1 / (4 * in_sample), "constant": 1 / 28,
            "prompt_mean": 1 / (3 * in_group),
        }[reduction]  # fmt: skip
    assert weights == pytest.approx(expected)
    halved = loss_weights(settings(loss=loss), BATCH, samples, denominator=2.0)
    own = {"token_mean": trained.sum(), "prompt_mean": 3}.get(reduction, 4)
    assert halved == pytest.approx(expected * own / 2.0)


def test_a_plan_made_for_another_batch_never_breaks_the_cap() -> None:
    batch = make_batch([1.0, 0.0, 1.0, 0.0])
    cap = int(batch.lengths.sum())
    packs = (np.arange(4), np.array([], dtype=np.int64))
    plan = Plan(((packs[:1], packs[1:]),), 0, 0, 1, cap)  # two dp ranks, the second with a dummy
    check_plan(plan, batch, dp=2, max_pack_tokens=cap)
    strange = Plan(((packs[:1], (np.array([-1]),)),), 0, 0, 1, cap)
    for wrong, dp, limit in ((plan, 2, cap - 1), (plan, 1, cap), (strange, 2, cap), ("plan", 2, cap)):
        with pytest.raises(BatchError) as caught:
            check_plan(wrong, batch, dp=dp, max_pack_tokens=limit)
        assert caught.value.field == "plan"


def test_a_plan_that_parts_a_pair_is_refused_where_the_loss_compares_pairs() -> None:
    batch, cap = make_batch([1.0, 0.0, 1.0, 0.0]), 1000
    pair = np.flatnonzero(batch.group_ids == batch.group_ids[0])
    whole = Plan((((pair,), (np.setdiff1d(np.arange(4), pair),)),), 0, 0, 1, cap)
    for parting in (((pair[:1],), (np.setdiff1d(np.arange(4), pair[:1]),)), ((pair[:1],), (pair[1:],))):
        parted = Plan((parting,), 0, 0, 1, cap)
        check_plan(parted, batch, dp=2, max_pack_tokens=cap)
        with refused(BatchError, "plan"):
            check_plan(parted, batch, dp=2, max_pack_tokens=cap, together=batch.group_ids)
    check_plan(whole, batch, dp=2, max_pack_tokens=cap, together=batch.group_ids)


def test_a_plan_of_other_things_than_sample_indices_is_refused() -> None:
    batch = make_batch([1.0, 0.0])
    good = np.arange(2)
    twice = ((good[:1],),), ((good[:1],),), ((good[1:],),)
    wrong: list[Any] = [
        Plan((((),),), 0, 0, 1, 99),
        Plan(((([0, 1],),),), 0, 0, 1, 99),
        Plan((((good.astype(float),),),), 0, 0, 1, 99),
        Plan((((good > 0,),),), 0, 0, 1, 99),
        Plan((((good[None],),),), 0, 0, 1, 99),
        Plan(None, 0, 0, 1, 99),  # type: ignore[arg-type]
        Plan((((good,),),), 0, 0, -1, 99),
        Plan((((good,),),), 0, 0, None, 99),  # type: ignore[arg-type]
        Plan((((good,),),), 0, 0, 1, 99, "yes"),  # type: ignore[arg-type]
        Plan((((good,),),), 0, 0, 1, 99, SharedPrefixes(good.astype(float), good)),
        Plan(twice, 0, 0, 3, 99),
        *(
            Plan((((good[:1],),),), 1, 0, 1, 99, None, counted)  # type: ignore[arg-type]
            for counted in ((), 7, (good.astype(float),), (good[1:],), (good[::-1],), (good - 1,), (good + 1,), ([0],))
        ),
    ]
    check_plan(Plan((((good,),),), 0, 0, 1, 99), batch, dp=1, max_pack_tokens=99)
    check_plan(Plan((((good[:1],),),), 1, 0, 1, 99, None, (good, good)), batch, dp=1, max_pack_tokens=99)
    for plan in wrong:
        with pytest.raises(BatchError) as caught:
            check_plan(plan, batch, dp=1, max_pack_tokens=99)
        assert caught.value.field == "plan"


def test_a_plan_may_not_claim_more_in_common_than_there_is() -> None:
    prompt = list(range(20))
    batch = RolloutBatch.from_samples([{"tokens": [*prompt, 1, i], "response_length": 2} for i in range(3)])
    config = settings(batch={"share_prefixes": "always", "max_tokens_per_rank": 64})
    plan = plan_everything(config, batch, data_ranks=1)
    assert plan.shared is not None
    check_plan(plan, batch, dp=1, max_pack_tokens=24)  # 21 shared, 3 of their own
    with refused(BatchError, "plan", 23):
        check_plan(plan, batch, dp=1, max_pack_tokens=23)
    wrong = dataclasses.replace(plan.shared, shared=plan.shared.shared + (plan.shared.shared > 0))
    with refused(BatchError, "plan"):
        check_plan(dataclasses.replace(plan, shared=wrong), batch, dp=1, max_pack_tokens=24)
    twice = dataclasses.replace(plan, updates=(((np.array([0, 0, 1]),),),))
    with refused(BatchError, "plan"):
        check_plan(twice, batch, dp=1, max_pack_tokens=24)


@pytest.mark.parametrize(
    ("how", "sections", "is_shared"),
    [
        ("auto", {}, True),
        ("never", {}, False),
        ("auto", {"mesh": {"cp": 2}, "attention": {"strategy": "ring"}}, True),
        ("always", {"mesh": {"cp": 2}, "attention": {"strategy": "ring_flash_attn"}}, False),
    ],
)
def test_prefixes_are_shared_where_the_settings_and_the_strategy_let_them(how, sections, is_shared) -> None:
    batch = RolloutBatch.from_samples([{"tokens": [7] * 60 + [i], "response_length": 1} for i in range(4)])
    plan = plan_everything(
        settings(batch={"share_prefixes": how, "max_tokens_per_rank": 64}, **sections), batch, data_ranks=1
    )
    assert (plan.shared is not None) == is_shared


def test_a_calibration_says_what_attention_and_sending_cost(tmp_path: Path) -> None:
    model = {"model_type": "llama", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 64}
    model |= {"num_attention_heads": 2, "intermediate_size": 8}
    write_calibration(tmp_path / "rates.json", Rates("made up", 3.0, 1.0, 1.0, 1.0, 1.0), {})
    guessed = cost_model_of(settings(mesh={"cp": 2}), model)
    measured = cost_model_of(settings(mesh={"cp": 2}, batch={"cost_model": str(tmp_path / "rates.json")}), model)
    assert measured.quadratic == pytest.approx(3 * guessed.quadratic)
    assert measured.comm == pytest.approx(3 * guessed.comm)  # 3,000 operations a byte, where 1,000 are guessed
    with pytest.raises(ConfigError) as caught:
        cost_model_of(settings(batch={"cost_model": str(tmp_path / "nowhere.json")}), model)
    assert caught.value.field == "batch.cost_model"


def test_ranks_are_balanced_by_the_cost_of_this_model_on_this_mesh() -> None:
    model = {"model_type": "llama", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 64}
    model |= {"num_attention_heads": 2, "intermediate_size": 8}
    config = settings(mesh={"dp": 2}, batch={"max_tokens_per_rank": 200, "share_prefixes": "never"})
    # so small a model has nothing to do but attention: one sample of 90 tokens takes longer than six of 30
    cost = cost_model_of(config, model)
    assert cost.quadratic > 0.01 > cost_model_of(config, None).quadratic == CostModel().quadratic
    samples = [{"tokens": [1] * n, "response_length": 1, "reward": float(n), "group_id": 0} for n in [90, *[30] * 6]]
    batch = RolloutBatch.from_samples(samples)
    (update,) = plan_training(config, batch, cost).updates
    assert sorted(batch.lengths[np.concatenate(rank)].tolist() for rank in update) == [[30] * 6, [90]]
    (by_tokens,) = plan_training(config, batch, CostModel(quadratic=0.0)).updates
    assert sorted(batch.lengths[np.concatenate(rank)].sum() for rank in by_tokens) == [120, 150]


def test_under_cp_packs_are_planned_for_all_ranks_that_share_them() -> None:
    config = settings(mesh={"dp": 2, "cp": 4}, batch={"max_tokens_per_rank": 100, "share_prefixes": "never"})
    samples = [{"tokens": [1] * n, "response_length": 1, "reward": float(n), "group_id": 0} for n in [101, *[100] * 4]]
    batch = RolloutBatch.from_samples(samples)
    # 101 tokens fit no rank and are cut, which makes them send; see tests/batching/test_plan.py
    plan = plan_training(config, batch, CostModel(quadratic=0.0, comm=1.0))
    assert plan.max_pack_tokens == 400
    assert sorted(batch.lengths[np.concatenate(rank)].tolist() for rank in plan.updates[0]) == [[100] * 4, [101]]
