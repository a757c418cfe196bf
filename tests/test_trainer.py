"""What a training step promises: exact ratios and KL, honest skipping, refusals that change nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ResourceError, StateError
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import (
    CPU,
    error_of,
    fingerprint,
    fresh_batch,
    settings,
    step_and_updates,
    steps_then_weights,
)

OVERFLOWING = 3e38  # a legal float32 whose gradients are not

DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case


# ---------------------------------------------------------------------- ratio, KL and log-probs


def updates_of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> list[dict[str, float]]:
    trainer = Trainer(config, device=CPU)
    return step_and_updates(trainer, batch)[1]


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"loss": {"old_log_probs": "recompute"}},
        {"batch": {"samples_per_update": 3}, "loss": {"epochs": 2}},
        {"batch": {"samples_per_update": 3}, "loss": {"kl_coefficient": 0.1}},
        {"batch": {"samples_per_update": 3}, "model": {"activation_checkpointing": True}},
        {"batch": {"samples_per_update": 3}, "precision": {"compute_dtype": "bfloat16"}},
        {"batch": {"samples_per_update": 3}, "loss": {"entropy_coefficient": 0.1}, "rollout": {"temperature": 0.7}},
    ],
    ids=["auto", "recompute", "epochs", "reference", "checkpointing", "bfloat16", "temperature"],
)
def test_the_ratio_of_the_first_update_is_exactly_one(
    folder: Path, ranks: RankPool, dp: int, cp: int, sections: dict[str, Any]
) -> None:
    config = settings(folder, mesh={"dp": dp, "cp": cp}, **sections)
    for updates in ranks.run(dp * cp, updates_of_a_step, config, fresh_batch()):
        assert updates[0]["ratio"] == 1.0 and updates[0]["ratio_deviation_max"] == 0.0
        assert (len(updates) > 1) == ("batch" in sections)
        # after an update the policy is another one: the zero above is no constant
        assert all(later["ratio_deviation_max"] > 1e-3 for later in updates[1:])


# ---------------------------------------------------------------------- which old log-probs are read


def forwards_and_metrics(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[int, dict[str, float], np.ndarray]:
    """Forwards of the policy in a step, its metrics, and the log-probs before it."""
    trainer = Trainer(config, device=CPU)
    current = trainer.compute_log_probs(batch).log_probs
    forwards = []
    trainer.policy.register_forward_hook(lambda *_: forwards.append(1))
    metrics = trainer.train_step(batch)
    return len(forwards), metrics, current


@pytest.mark.parametrize(
    "how, samples_per_update, extra",
    [("auto", None, 0), ("auto", 4, 1), ("recompute", None, 1), ("recompute", 4, 1), ("rollout", 4, 0)],
)
def test_an_extra_forward_is_taken_only_where_something_reads_it(
    folder: Path, ranks: RankPool, how: str, samples_per_update: int | None, extra: int
) -> None:
    config = settings(folder, loss={"old_log_probs": how}, batch={"samples_per_update": samples_per_update})
    batch = fresh_batch()
    batch = batch.replace(rollout_log_probs=np.full(batch.num_response_tokens, -3.0))
    plan = plan_training(config, batch)
    packs = sum(len(update[0]) for update in plan.updates)
    forwards, _, _ = ranks.run(1, forwards_and_metrics, config, batch)[0]
    assert forwards == packs * (1 + extra)


@pytest.mark.parametrize("dp", [2])
def test_the_ratio_is_taken_against_the_chosen_old_log_probs(folder: Path, ranks: RankPool, dp: int) -> None:
    rng = np.random.default_rng(5)
    batch = fresh_batch()
    rollout, own = (-rng.random((2, batch.num_response_tokens)) * 6).astype(np.float32)
    batch = batch.replace(rollout_log_probs=rollout)
    trained = batch.mask & ~np.isin(batch.sample_ids, [4, 5])  # their group has no variance
    for how, given, old in [
        ("rollout", None, rollout), ("rollout", own, own), ("recompute", own, own), ("auto", own, own),
        ("auto", None, None), ("recompute", None, None),
    ]:  # fmt: skip
        config = settings(folder, mesh={"dp": dp}, loss={"old_log_probs": how})
        for _, metrics, current in ranks.run(dp, forwards_and_metrics, config, batch.replace(old_log_probs=given)):
            read = current if old is None else old
            assert metrics["ratio"] == pytest.approx(np.exp(current - read)[trained].mean(), rel=1e-4)
            # where the engine's own serve as the old ones, its mismatch shows in the current ones
            mismatch = np.abs((current if how == "rollout" and given is None else read) - rollout)[trained]
            assert metrics["rollout_mismatch"] == pytest.approx(mismatch.mean(), rel=1e-4)
            assert metrics["rollout_mismatch_max"] == pytest.approx(mismatch.max(), rel=1e-4)


# ---------------------------------------------------------------------- masters, clipping, skipping


def ten_small_steps(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    before = {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}
    for _ in range(10):
        trainer.train_step(batch)
    after = {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}
    state = [value for values in trainer.updater.optimizer.state.values() for value in values.values()]
    return {
        "dtypes": {p.dtype for p in trainer.policy.parameters()} | {value.dtype for value in state},
        "tensors_moved": np.mean([not torch.equal(before[name], after[name]) for name in before]),
        "largest": max((after[name] - before[name]).abs().max().item() for name in before),
        "visible_in_bfloat16": sum(
            int((before[name].bfloat16() != after[name].bfloat16()).sum()) for name in before
        ) / sum(tensor.numel() for tensor in before.values()),
    }  # fmt: skip


@pytest.mark.parametrize(("compute_dtype", "dp"), [("float32", 1), ("bfloat16", 2)])
def test_a_tiny_rate_moves_float32_masters_of_a_bfloat16_checkpoint(
    ranks: RankPool, tiny_folder: TinyFolder, compute_dtype: str, dp: int
) -> None:
    folder = tiny_folder(dtype=torch.bfloat16)
    config = settings(folder, mesh={"dp": dp}, optim={"lr": 1e-6}, precision={"compute_dtype": compute_dtype})
    for result in ranks.run(dp, ten_small_steps, config, fresh_batch()):
        assert result["dtypes"] == {torch.float32}
        assert result["tensors_moved"] == 1.0 and 1e-6 < result["largest"] < 2e-5
        assert result["visible_in_bfloat16"] < 0.05  # bfloat16 masters would have stood still


def skipping(rank: int, config: RunConfig, good: RolloutBatch, bad: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    before = fingerprint(trainer.policy)
    skipped = [trainer.train_step(bad) for _ in range(2)]
    unchanged, taken = fingerprint(trainer.policy) == before, trainer.updates_taken
    recovered = trainer.train_step(good)
    trainer.train_step(bad)
    trainer.train_step(bad)  # the good one started the count afresh
    stopped = error_of(lambda: trainer.train_step(bad))
    return {
        "skipped": skipped, "unchanged": unchanged, "taken": taken, "recovered": recovered, "stopped": stopped,
        "weights": fingerprint(trainer.policy), "updates_taken": trainer.updates_taken,
    }  # fmt: skip


@pytest.mark.parametrize("dp", [2])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(folder: Path, ranks: RankPool, dp: int) -> None:
    optim = {"schedule": "linear", "total_updates": 3}
    config = settings(folder, mesh={"dp": dp}, optim=optim)
    good = fresh_batch()
    bad = good.replace(advantages=np.full(good.num_response_tokens, OVERFLOWING))
    undisturbed = ranks.run(dp, steps_then_weights, config, [good])[0]
    for result in ranks.run(dp, skipping, config, good, bad):
        assert [metrics["skipped_update"] for metrics in result["skipped"]] == [1.0, 1.0]
        for metrics in result["skipped"]:  # nothing was taken, and nobody is to be sent the weights again
            assert metrics["updates"] == metrics["tokens_per_second"] == metrics["tflops_per_rank"] == 0.0
            assert metrics["early_stopped_updates"] == 0.0
        assert result["recovered"]["updates"] == 1.0 and result["recovered"]["tokens_per_second"] > 0
        assert not any(np.isfinite(metrics["grad_norm"]) for metrics in result["skipped"])
        assert result["unchanged"] and result["taken"] == 0
        # the schedule counts updates that were taken: the first good one has the first rate
        assert result["recovered"]["lr"] == config.optim.lr and result["recovered"]["skipped_update"] == 0.0
        assert isinstance(result["stopped"], StateError) and result["stopped"].field == "optim.lr"
        assert result["updates_taken"] == 1 and result["weights"] == undisturbed[1]


# ---------------------------------------------------------------------- what an update is made of


def float64_steps(rank: int, config: RunConfig, batches: list[RolloutBatch], losses: list[Any]) -> list[Any]:
    """Of each loss, metrics of every batch's step and what all of them took off the initial weights."""
    found = []
    with KeepFloat64():
        for loss in losses:
            trainer = Trainer(config.model_copy(update={"loss": loss}), device=CPU)
            start = [parameter.full_tensor().detach().clone() for _, parameter in trainer.policy.named_weights()]
            metrics = [trainer.train_step(batch) for batch in batches]
            moved = [
                (before - parameter.full_tensor().detach()).numpy().copy()
                for before, (_, parameter) in zip(start, trainer.policy.named_weights(), strict=True)
            ]
            found.append((metrics, np.concatenate([value.ravel() for value in moved])))
    return found


MASKED = fresh_batch().replace(loss_mask=fresh_batch().mask & (fresh_batch().sample_ids != 2))
OWN_ADVANTAGES = fresh_batch().replace(
    rewards=None, advantages=np.where(np.isin(fresh_batch().sample_ids, [4, 5]), 0.0, 0.7)
)
SGD = {"name": "sgd", "lr": 0.05, "max_grad_norm": 1e9}  # no clipping that would hide a scale
NOTHING = fresh_batch(seed=1).replace(rewards=np.ones(8))


PPO: dict[str, Any] = {"loss": {"policy": "ppo"}}
GSPO = {"loss": {"policy": "gspo"}, "batch": {"samples_per_update": 3}}
CISPO = {"loss": {"policy": "cispo", "epochs": 2}, "batch": {"samples_per_update": 3}}
MAX_KL = {"loss": {"policy": "gspo_token", "epochs": 2, "max_kl": 10.0}, "batch": {"samples_per_update": 3}}
SHARED = {"loss": {"policy": "reinforce"}, "batch": {"samples_per_update": 3, "share_prefixes": "always"}}


@pytest.mark.parametrize(("mesh", "sections", "reductions"), [
    pytest.param({"dp": 1}, PPO, ["token_mean", "sequence_mean", "constant", "prompt_mean"], id="one rank, ppo"),
    pytest.param({"dp": 1}, MAX_KL, ["sequence_mean"], id="one rank, max_kl"),
    pytest.param({"dp": 2}, CISPO, ["token_mean", "prompt_mean"], id="dp 2, cispo"),
    pytest.param({"dp": 2}, SHARED, ["constant"], id="dp 2, shared prefixes"),
    pytest.param({"cp": 2}, GSPO, ["sequence_mean", "constant"], id="cp 2, gspo"),
])  # fmt: skip
def test_to_leave_samples_without_variance_out_is_a_matter_of_speed_alone(
    folder: Path, ranks: RankPool, mesh: dict[str, int], sections: dict[str, Any], reductions: list[str]
) -> None:
    # one prompt for all, which may be computed once
    prompts = fresh_batch().to_samples()
    batches = [MASKED, NOTHING, OWN_ADVANTAGES, fresh_batch(seed=2)]
    if "share_prefixes" in sections.get("batch", {}):
        batches.append(RolloutBatch.from_samples([
            {**sample, "tokens": [7, 8, 9, *sample["tokens"][-sample["response_length"]:].tolist()]}
            for sample in prompts
        ]))  # fmt: skip
    config = settings(folder, mesh=mesh, precision={"compute_dtype": "float64"}, optim=SGD,
                      batch=sections.get("batch", {}))  # fmt: skip
    losses = [
        settings(folder, loss={"reduction": reduction, "constant_length": 30 if reduction == "constant" else None,
                               **({} if drop else {"max_kl": 1e9}), **sections["loss"]}).loss
        for reduction in reductions for drop in (True, False)
    ]  # fmt: skip
    found = ranks.run(mesh.get("dp", 1) * mesh.get("cp", 1), float64_steps, config, batches, losses)[0]
    for (dropped, ours), (kept, theirs) in zip(found[::2], found[1::2], strict=True):
        assert np.abs(theirs).max() > 1e-3 and np.abs(ours - theirs).max() <= 1e-12 * np.abs(theirs).max()
        for one, other in zip(dropped, kept, strict=True):
            assert (one["updates"], one["empty_updates"]) == (other["updates"], other["empty_updates"])
            if one["updates"]:
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-12, abs=1e-14)
        assert dropped[1]["updates"] == 0.0
        if "max_kl" not in sections["loss"]:
            assert dropped[0]["dropped_samples"] == kept[0]["dropped_samples"] + 2


@pytest.mark.parametrize("dp", [2])
def test_updates_in_which_nothing_trains_are_counted_not_taken(folder: Path, ranks: RankPool, dp: int) -> None:
    batch = fresh_batch()
    nothing = batch.replace(rewards=np.ones(batch.num_samples))
    one_by_one = settings(folder, mesh={"dp": dp}, batch={"samples_per_update": 1})
    for (some, none), weights in ranks.run(dp, steps_then_weights, one_by_one, [batch, nothing]):
        assert (some["updates"], some["empty_updates"], some["dropped_samples"]) == (6.0, 2.0, 2.0)
        assert (none["updates"], none["empty_updates"], none["dropped_samples"]) == (0.0, 8.0, 8.0)
        assert "loss" not in none and np.isfinite(list(none.values())).all()
        assert weights == ranks.run(dp, steps_then_weights, one_by_one, [batch])[0][1]


def step_by_primitives(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[Any, ...]:
    trainer = Trainer(config, device=CPU)
    too_early = error_of(trainer.optimizer_step)
    metrics = trainer.forward_backward(batch)
    metrics |= trainer.optimizer_step()
    return too_early, error_of(trainer.optimizer_step), metrics, fingerprint(trainer.policy)


@pytest.mark.parametrize("dp", [2])
def test_the_primitives_make_the_same_step(folder: Path, ranks: RankPool, dp: int) -> None:
    config, batch = settings(folder, mesh={"dp": dp}), fresh_batch().select([0, 1, 2, 3, 6, 7])
    (whole,), weights = ranks.run(dp, steps_then_weights, config, [batch])[0]
    for too_early, again, metrics, same_weights in ranks.run(dp, step_by_primitives, config, batch):
        assert same_weights == weights
        assert metrics == {name: whole[name] for name in metrics}
        assert isinstance(too_early, StateError) and isinstance(again, StateError)


def sft_gradients(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[float, dict[str, np.ndarray]]:
    trainer = Trainer(config, device=CPU)
    metrics = trainer.forward_backward(batch, loss="sft")
    return metrics["loss"], {n: p.grad.full_tensor().numpy() for n, p in trainer.policy.named_weights()}


@pytest.mark.parametrize(("dp", "algorithm"), [(1, "sft"), (2, "sft"), (2, "grpo")])
def test_supervised_loss_equals_cross_entropy(folder: Path, ranks: RankPool, dp: int, algorithm: str) -> None:
    batch = fresh_batch().replace(rewards=None, group_ids=None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for sample in batch.to_samples():
        tokens, mask = torch.as_tensor(np.array(sample["tokens"])), torch.as_tensor(np.array(sample["loss_mask"]))
        logits = model(input_ids=tokens[None]).logits[0, :-1][-len(mask) :]
        losses.append(torch.nn.functional.cross_entropy(logits[mask], tokens[-len(mask) :][mask], reduction="none"))
    plain = torch.cat(losses).mean()
    plain.backward()
    config = settings(folder, mesh={"dp": dp}).model_copy(update={"algorithm": algorithm})
    for loss, gradients in ranks.run(dp, sft_gradients, config, batch):
        assert loss == pytest.approx(plain.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            assert np.abs(gradients[name] - parameter.grad.numpy()).max() <= 1e-5


# ---------------------------------------------------------------------- refusals


def gathered_and_refused(rank: int, config: RunConfig, batch: RolloutBatch, discards: bool) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    before = fingerprint(trainer.policy)
    refused = [error_of(lambda: trainer.train_step(batch))]
    trainer.sleep()  # with the gradients
    refused.append(error_of(lambda: trainer.train_step(batch)))
    trainer.wake_up()
    unchanged = fingerprint(trainer.policy) == before
    if discards:
        trainer.zero_grad()
        trainer.zero_grad()
        assert error_of(trainer.optimizer_step) is not None
        trainer.train_step(batch)
    else:
        trainer.optimizer_step()
    return {"refused": refused, "unchanged": unchanged, "weights": fingerprint(trainer.policy)}


@pytest.mark.parametrize("dp", [2])
def test_gradients_that_were_gathered_are_not_dropped_unasked(folder: Path, ranks: RankPool, dp: int) -> None:
    config, batch = settings(folder, mesh={"dp": dp}), fresh_batch().select([0, 1, 2, 3, 6, 7])
    expected = ranks.run(dp, steps_then_weights, config, [batch])[0][1]
    for discards in (True, False):
        for result in ranks.run(dp, gathered_and_refused, config, batch, discards):
            for error in result["refused"]:
                assert isinstance(error, StateError) and error.field == "train_step"
            assert result["unchanged"] and result["weights"] == expected


def failing_then_stepping(rank: int, config: RunConfig, good: RolloutBatch, bad: RolloutBatch) -> dict[str, Any]:
    """What is possible after a train_step that ended on the way, and after a load that came upon gradients."""
    trainer = Trainer(config, device=CPU)
    trainer.save(0)
    wake_up, calls = trainer._state.memory_manager.wake_up, []

    def failing(tags: Any) -> Any:
        calls.append(tags)
        if len(calls) == 2:  # the first is for the gradients, the second before the optimiser takes them
            raise ResourceError("no memory", field="test")
        return wake_up(tags)

    trainer._state.memory_manager.wake_up = failing  # type: ignore[method-assign]
    failed = error_of(lambda: trainer.train_step(good))
    trainer._state.memory_manager.wake_up = wake_up  # type: ignore[method-assign]
    nothing_left = error_of(trainer.optimizer_step)
    stopped = [error_of(lambda: trainer.train_step(bad)) for _ in range(3)][-1]
    trainer.train_step(good)
    trainer.forward_backward(good)
    trainer.load(0)
    trainer.train_step(good)
    return {"failed": failed, "nothing left": nothing_left, "stopped": stopped, "weights": fingerprint(trainer.policy)}


def test_a_step_that_failed_and_a_load_leave_no_gradients(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)})
    good = fresh_batch()
    bad = good.replace(advantages=np.full(good.num_response_tokens, OVERFLOWING))
    expected = ranks.run(2, steps_then_weights, config, [good])[0][1]
    for result in ranks.run(2, failing_then_stepping, config, good, bad):
        assert isinstance(result["failed"], ResourceError) and isinstance(result["nothing left"], StateError)
        assert isinstance(result["stopped"], StateError) and result["stopped"].field == "optim.lr"
        assert result["weights"] == expected


OWN_ESTIMATORS = """
import torch.distributed as dist
calls = []
def drifting(inputs, options):
    calls.append(1)
    return inputs.scores + dist.get_rank() * (len(calls) > 1)
def different(inputs, options):
    return inputs.scores + dist.get_rank()
"""


def asked_once_a_step(rank: int, code: Path, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    sys.path.insert(0, str(code))
    try:
        own = importlib.import_module("own_estimators")
        trainer, asked = Trainer(config, device=CPU), []
        for _ in range(2):
            own.calls.clear()
            metrics = trainer.train_step(batch)
            asked.append(len(own.calls))
        own.calls.clear()
        trainer.forward_backward(batch)
        asked.append(len(own.calls))
        tree = config.model_dump(mode="json", exclude_unset=True)
        differs = config_from_dict({**tree, "advantage": {"estimator": "own_estimators:different"}})
        other = Trainer(differs, device=CPU)
        refused = [error_of(lambda: other.train_step(batch)), error_of(lambda: other.forward_backward(batch))]
        given = batch.replace(advantages=np.ones(batch.num_response_tokens))
        return {"asked": asked, "advantage": metrics["advantage"], "refused": refused,
                "updates": other.train_step(given)["updates"]}  # fmt: skip
    finally:
        sys.path.pop(0)
        sys.modules.pop("own_estimators", None)


@pytest.mark.parametrize("kl_in", [None, "reward", "loss"])
def test_the_advantages_that_were_compared_are_trained_on(
    folder: Path, ranks: RankPool, tmp_path: Path, kl_in: str | None
) -> None:
    (tmp_path / "own_estimators.py").write_text(OWN_ESTIMATORS)
    loss = {} if kl_in is None else {"kl_coefficient": 0.1, "kl_in": kl_in}
    own = {"estimator": "own_estimators:drifting"}
    slow = {"lr": 1e-7}  # the KL stays small
    config, batch = settings(folder, mesh={"dp": 2}, advantage=own, loss=loss, optim=slow), fresh_batch()
    scores = batch.rewards[batch.sample_ids][batch.mask].mean()
    for result in ranks.run(2, asked_once_a_step, tmp_path, config, batch):
        assert result["asked"] == [1, 1, 1]
        assert result["advantage"] == pytest.approx(scores, rel=1e-3)
        for error in result["refused"]:
            assert isinstance(error, StateError) and error.field == "advantage.estimator"
        assert result["updates"] == 1.0, "the ranks work on"


def different_batches(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[list[Any], float]:
    trainer = Trainer(config, device=CPU)
    others = [
        batch.select([0, 1, 2, 3]),  # of other lengths
        batch.replace(tokens=batch.tokens[::-1]),  # which the same plan would fit
        batch.replace(tokens=np.full_like(batch.tokens, 97)),  # which this rank alone would refuse
    ]
    errors = []
    for other in others:
        mine = batch if rank == 0 else other
        for call in (trainer.train_step, trainer.forward_backward, trainer.compute_log_probs):
            errors.append(error_of(lambda call=call, mine=mine: call(mine)))
    plan = plan_training(config, batch if rank == 0 else batch.replace(rewards=np.arange(batch.num_samples)))
    errors.append(error_of(lambda: trainer.train_step(batch, plan)))
    return errors, trainer.train_step(batch)["loss"]


def test_ranks_with_different_batches_or_plans_stop_and_stay_usable(folder: Path, ranks: RankPool) -> None:
    config = settings(folder, mesh={"dp": 2})
    (undisturbed,), _ = ranks.run(2, steps_then_weights, config, [fresh_batch()])[0]
    for errors, loss in ranks.run(2, different_batches, config, fresh_batch()):
        assert [type(error) for error in errors] == [StateError] * 10
        assert [error.field for error in errors] == ["batch"] * 9 + ["plan"]
        assert loss == undisturbed["loss"]
