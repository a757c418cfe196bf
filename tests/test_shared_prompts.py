"""What samples have in common is computed once, and nothing that a step says or learns shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.all_pairs import all_pairs
from tests.support.comparisons import largest_difference, plain_gradients
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import step_and_updates

Rng = np.random.Generator
Sample = tuple[list[int], int]  # tokens, and how many of them are the prompt


def fresh(rng: Rng, tokens: int) -> list[int]:
    return rng.integers(3, 96, tokens).tolist()


def answers(rng: Rng, prompt: list[int], *lengths: int) -> list[Sample]:
    return [(prompt + fresh(rng, length), len(prompt)) for length in lengths]


def groups(rng: Rng) -> list[Sample]:
    return [sample for prompt in (20, 40, 3) for sample in answers(rng, fresh(rng, prompt), 5, 1, 17)]


def system_prompt(rng: Rng) -> list[Sample]:
    """Three levels, and a prompt that goes on from another one."""
    system = fresh(rng, 30)
    short, long = system + fresh(rng, 17), system + fresh(rng, 25)
    longest = long + fresh(rng, 16)
    return [
        *(*answers(rng, short, 4, 20, 1), *answers(rng, long, 9, 9)),
        *(*answers(rng, longest, 6, 2), *answers(rng, system, 3)),
    ]


def conversation(rng: Rng) -> list[Sample]:
    """A turn goes on from the one before, without what that one's answer was thought with."""
    turns, history = [], fresh(rng, 20)
    for _ in range(4):
        turns += answers(rng, history, 12)
        history = history + fresh(rng, 18)
    return turns


def forks(rng: Rng) -> list[Sample]:
    """Duplicates, a sample that another begins with, and responses that part late; some share trained tokens."""
    first = fresh(rng, 52)
    ends = [
        first[:35],
        first + fresh(rng, 8),
        first[:48] + fresh(rng, 3),
        *(first[:30] + fresh(rng, n) for n in (20, 1)),
    ]
    return [(tokens, 12) for tokens in (first, first, *ends, first[:30])]


KINDS: dict[str, Callable[[Rng], list[Sample]]] = {
    "groups": groups,
    "system prompt": system_prompt,
    "conversation": conversation,
    "forks": forks,
}


def unrelated(rng: Rng) -> list[Sample]:
    return [sample for prompt in (3, 15, 20, 9) for sample in answers(rng, fresh(rng, prompt), 21)]


def batch_of(*kinds: Callable[[Rng], list[Sample]], **changes: Any) -> RolloutBatch:
    """With holes in the masks, and old and reference log-probs that differ even between duplicates."""
    rng = np.random.default_rng(7)
    samples = [sample for kind in kinds for sample in kind(rng)]
    records = []
    for index, (tokens, prompt) in enumerate(samples):
        response = len(tokens) - prompt
        mask = rng.random(response) < 0.7
        mask[-1] = True
        records.append(
            {
                "tokens": tokens,
                "response_length": response,
                "reward": float(rng.random()),
                "group_id": index % (len(samples) // 2),
                "loss_mask": mask.tolist(),
                "old_log_probs": -rng.random(response) * 6,
                "ref_log_probs": -rng.random(response) * 6,
            }
            | changes
        )
    return RolloutBatch.from_samples(records)


@pytest.fixture(scope="module")
def truth(folder: Path, ranks: RankPool) -> dict[str, Any]:
    """What unshared packs on one rank and a plain step make of all kinds in one batch."""
    batch, config = batch_of(*KINDS.values()), configured(folder, "never")
    assert shared_tokens(config, batch) == 0
    return {
        "batch": batch,
        "said": ranks.run(1, what_a_trainer_says, config, batch)[0],
        "gradients": plain_gradients(folder, config, batch, torch.float64),
    }


def configured(path: Path, share: str, *, cap: int = 400, cp: int = 1, **sections: Any) -> RunConfig:
    batch = {"max_tokens_per_rank": -(-cap // cp), "samples_per_update": None, "share_prefixes": share}
    mesh = {"cp": cp, **sections.pop("mesh", {})}
    return settings(path, **{"batch": batch, "mesh": mesh, **sections})


def shared_tokens(config: RunConfig, batch: RolloutBatch) -> float:
    """The part of the plan's tokens that is not computed."""
    plan = plan_training(config, batch)
    return 1 - plan.computed_tokens(batch.lengths) / (batch.lengths.sum() * config.loss.epochs)


def what_a_trainer_says(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        said = trainer.compute_log_probs(batch)
        metrics = trainer.forward_backward(batch)
    gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}
    return {"log_probs": said.log_probs, "entropy": said.entropy, "metrics": metrics, "gradients": gradients}


def assert_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("log_probs", "entropy"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-12, atol=1e-12)
    for name in ("loss", "kl_ref", "ratio"):
        assert one["metrics"][name] == pytest.approx(other["metrics"][name], rel=1e-12, abs=1e-12), name
    assert largest_difference(one["gradients"], other["gradients"]) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [90, 1000])
def test_one_rank_says_and_learns_what_unshared_packs_and_a_plain_step_do(
    folder: Path, ranks: RankPool, kind: str, cap: int
) -> None:
    batch = batch_of(KINDS[kind])
    unshared, shared = (configured(folder, how, cap=cap) for how in ("never", "always"))
    assert shared_tokens(unshared, batch) == 0 < shared_tokens(shared, batch)
    one, other = (ranks.run(1, what_a_trainer_says, config, batch)[0] for config in (unshared, shared))
    assert_the_same(one, other)
    plain = plain_gradients(folder, shared, batch, torch.float64)
    assert largest_difference(other["gradients"], plain) <= 1e-12 < max(g.abs().max() for g in plain.values())


@pytest.mark.parametrize(
    ("dp", "cp", "strategy"),
    [
        *((2, 1, "auto"), (4, 1, "auto"), (1, 2, "ring"), (1, 2, "ulysses"), (1, 2, "all_gather")),
        *((1, 3, "ring"), (1, 3, "all_gather"), (1, 4, "ulysses"), (2, 2, "ring")),
    ],
)
def test_any_mesh_and_strategy_gives_the_gradients_of_a_plain_step(
    folder: Path, ranks: RankPool, truth: dict[str, Any], dp: int, cp: int, strategy: str
) -> None:
    config = configured(folder, "always", cap=300, cp=cp, mesh={"dp": dp}, attention={"strategy": strategy})
    assert shared_tokens(config, truth["batch"]) > 0.2
    for found in ranks.run(config.ranks, what_a_trainer_says, config, truth["batch"]):
        assert largest_difference(found["gradients"], truth["gradients"]) <= 1e-12
        assert_the_same(found, truth["said"])


@pytest.mark.parametrize(("cp", "checkpointing"), [(1, "full"), (1, "selective"), (2, "selective")])
def test_layers_that_are_computed_again_in_backward_see_the_same_forest(
    folder: Path, ranks: RankPool, truth: dict[str, Any], cp: int, checkpointing: str
) -> None:
    config = configured(folder, "always", cp=cp, model={"activation_checkpointing": checkpointing})
    for found in ranks.run(cp, what_a_trainer_says, config, truth["batch"]):
        assert largest_difference(found["gradients"], truth["gradients"]) <= 1e-12


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("cp", "strategy"), [(1, "auto"), (2, "ulysses"), (2, "all_gather")])
def test_windows_soft_caps_and_sinks_reach_from_a_node_into_those_above(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, cp: int, strategy: str
) -> None:
    path = tiny_folder(kind, sliding_window=13)
    batch = batch_of(*KINDS.values())
    config = configured(path, "always", cp=cp, attention={"strategy": strategy})
    # the largest gradients of these models are above 1, where 1e-12 is less than rounding leaves
    plain = plain_gradients(path, config, batch, torch.float64)
    scale = max(1.0, max(g.abs().max().item() for g in plain.values()))
    for found in ranks.run(cp, what_a_trainer_says, config, batch):
        assert largest_difference(found["gradients"], plain) <= 1e-12 * scale


def steps(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        metrics = [trainer.train_step(batch) for _ in range(2)]
    return metrics, {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}


@pytest.mark.slow  # several steps a case
@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"cp": 2}], ids=str)
def test_steps_of_several_updates_lead_to_the_same_weights(folder: Path, ranks: RankPool, mesh: dict[str, int]) -> None:
    batch = batch_of(*KINDS.values())
    sizes = {"max_tokens_per_rank": 200, "samples_per_update": 12}
    runs = {}
    for how in ("never", "always"):
        config = settings(folder, mesh=mesh, batch={**sizes, "share_prefixes": how})
        runs[how] = ranks.run(config.ranks, steps, config, batch)[0]
    for one, other in zip(runs["never"][0], runs["always"][0], strict=True):
        assert one["shared_tokens"] == 0 < other["shared_tokens"]
        for name in ("loss", "grad_norm", "kl_ref", "ratio", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-11, abs=1e-11), name
    assert largest_difference(runs["never"][1], runs["always"][1]) <= 1e-11


def updates_of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> list[dict[str, float]]:
    trainer = Trainer(config, device=torch.device("cpu"))
    return step_and_updates(trainer, batch)[1]


@pytest.mark.parametrize(
    ("precision", "mesh", "old"), all_pairs(("float32", "bfloat16"), ({}, {"cp": 2}), ("auto", "recompute"))
)
def test_the_first_ratio_is_exactly_1_and_the_kl_to_an_equal_reference_exactly_0(
    folder: Path, ranks: RankPool, precision: str, mesh: dict[str, int], old: str
) -> None:
    batch = batch_of(*KINDS.values(), old_log_probs=None, ref_log_probs=None)
    config = settings(
        folder, mesh=mesh, precision={"compute_dtype": precision}, loss={"old_log_probs": old},
        batch={"max_tokens_per_rank": 200, "samples_per_update": 15, "share_prefixes": "always"},
    )  # fmt: skip
    for updates in ranks.run(config.ranks, updates_of_a_step, config, batch):
        assert updates[0]["ratio"] == 1.0 and updates[0]["ratio_deviation_max"] == 0.0 == updates[0]["kl_ref"]
        assert all(later["ratio_deviation_max"] > 1e-4 and later["kl_ref"] > 0 for later in updates[1:])


def test_samples_that_share_nothing_are_packed_as_if_nothing_were_shared(folder: Path, ranks: RankPool) -> None:
    batch = batch_of(unrelated)
    found = [ranks.run(1, steps, configured(folder, how), batch)[0] for how in ("never", "auto", "always")]
    for metrics, weights in found[1:]:
        assert [m["loss"] for m in metrics] == [m["loss"] for m in found[0][0]]
        assert all(torch.equal(weights[name], found[0][1][name]) for name in weights)
