"""Routing replay: the policy's passes choose the experts that a batch or the old-log-prob pass names, on any mesh."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.models.routing import ExpertLoad, Routing
from slimefsdp.results import LogProbs
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.comparisons import largest_difference, trainer_weights
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.shared_layers import on_mesh
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case
EIGHT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
}
LAYERS, OF_TOKEN = 2, 2


def other_experts(batch: RolloutBatch, *, known: float = 0.8) -> RolloutBatch:
    """Names random experts for most tokens, which are almost never those that the routers would choose.

    For some of the others one expert is unknown, or both are one.
    """
    rng = np.random.default_rng(3)
    experts = rng.random((batch.num_tokens, LAYERS, 8)).argsort(-1)[..., :OF_TOKEN]
    experts[rng.random(batch.num_tokens) > known] = -1
    experts[5::9, 1, 1] = -1
    experts[7::9, 0, 1] = experts[7::9, 0, 0]
    return batch.replace(routed_experts=experts)


class PlainReplay(PlainStep):
    """A plain model whose routers' results are written from each architecture's formula for the named experts."""

    def __init__(self, path: Path, config: RunConfig, batch: RolloutBatch) -> None:
        super().__init__(path, config, torch.float64)
        offsets = batch.token_offsets
        assert batch.routed_experts is not None
        self.experts = {
            tuple(batch.tokens[start:end].tolist()): torch.from_numpy(batch.routed_experts[start:end].astype(np.int64))
            for start, end in pairwise(offsets)
        }
        self.model.register_forward_pre_hook(self.look_up, with_kwargs=True)
        kind = self.model.config.model_type
        for index, layer in enumerate(self.model.model.layers):
            router = layer.mlp.router if kind == "gpt_oss" else layer.mlp.gate
            router.register_forward_hook(lambda *args, index=index: self.routed(kind, index, *args))

    def look_up(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.named = self.experts[tuple(kwargs["input_ids"][0].tolist())]

    def routed(self, kind: str, layer: int, router: Any, args: Any, result: Any) -> Any:
        logits, _, own = result
        named = self.named[:, layer]
        is_choice = (named >= 0).all(1, keepdim=True) & (named[:, :1] != named[:, 1:])
        ids = torch.where(is_choice, named, own)
        if kind == "gpt_oss":
            return logits, logits.gather(1, ids).softmax(1), ids
        chosen = logits.softmax(1).gather(1, ids)
        if kind == "mixtral" or router.norm_topk_prob:
            chosen = chosen / chosen.sum(1, keepdim=True)
        return logits, chosen, ids


MESHES: list[dict[str, Any]] = [
    on_mesh(1, 1, 1, 1),
    on_mesh(1, 1, 2, 1, "all_gather"),
    on_mesh(1, 1, 1, 2) | {"model": {"activation_checkpointing": "full"}},
    {"mesh": on_mesh(1, 2, 1, 2)["mesh"] | {"ep": 4}},
]


@pytest.mark.parametrize("sections", MESHES, ids=str)
@pytest.mark.parametrize("kind", EIGHT)
def test_weights_after_updates_with_named_experts_equal_a_plain_process(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, sections: dict[str, Any]
) -> None:
    path = tiny_folder(kind, **EIGHT[kind])
    loss = {"epochs": 1, "routing_replay": "rollout"}
    config = settings(path, loss=loss, optim={"max_grad_norm": 0.5}, **sections)
    batch = other_experts(make_batch(path))
    plan = plan_training(config, batch)
    with KeepFloat64():
        plain = PlainReplay(path, config, batch)
        plain.train(batch, plan)
        free = PlainStep(path, config, torch.float64)
        free.train(batch, plan)
    expected = plain.weights()
    assert largest_difference(expected, free.weights()) > 1e-3
    for _, weights in ranks.run(config.ranks, trainer_weights, config, batch):
        assert largest_difference(weights, expected) <= 1e-12


def log_probs_of(rank: int, config: RunConfig, batch: RolloutBatch) -> LogProbs:
    with KeepFloat64():
        return Trainer(config, device=CPU).compute_log_probs(batch)


@torch.no_grad()
def experts_of_plain_routers(path: Path, config: RunConfig, batch: RolloutBatch) -> np.ndarray:
    model = PlainStep(path, config, torch.float64).model
    chosen: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *args: chosen.append(args[2][2].numpy()))
    for sample in batch.to_samples():
        model(input_ids=torch.as_tensor(np.array(sample["tokens"]))[None])
    layers = [np.concatenate(chosen[layer :: len(model.model.layers)]) for layer in range(len(model.model.layers))]
    return np.stack(layers, 1)


def forked(batch: RolloutBatch) -> RolloutBatch:
    """Gives the samples one prompt, so that packs share it."""
    samples = batch.to_samples()
    prompt = np.arange(20) % 90
    for sample in samples:
        response = sample["tokens"][-sample["response_length"] :]
        sample["tokens"] = np.concatenate([prompt, response])
        sample.pop("routed_experts", None)
    return RolloutBatch.from_samples(samples)


@pytest.mark.parametrize("sections", [MESHES[0], MESHES[1], MESHES[3]], ids=str)
def test_recorded_experts_are_those_of_plain_routers(
    tiny_folder: TinyFolder, ranks: RankPool, sections: dict[str, Any]
) -> None:
    path = tiny_folder("qwen3_moe", **EIGHT["qwen3_moe"])
    config = settings(path, loss={"routing_replay": "old_log_probs"}, **sections)
    for batch in (make_batch(path), forked(make_batch(path))):
        found = ranks.run(config.ranks, log_probs_of, config, batch)
        with KeepFloat64():
            expected = experts_of_plain_routers(path, config, batch)
        for log_probs in found:
            assert log_probs.routed_experts is not None
            assert np.array_equal(np.sort(log_probs.routed_experts), np.sort(expected))


def first_ratios(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a step that records the experts itself, and of a loop that passes on what a call has recorded."""
    trainer = Trainer(config, device=CPU)
    own_loop = trainer.compute_log_probs(batch).as_old(batch)
    assert own_loop.routed_experts is not None
    metrics = trainer.forward_backward(own_loop)
    trainer.zero_grad()
    return trainer.train_step(batch), metrics


def test_the_first_ratio_of_a_mixture_is_exactly_1(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    path = tiny_folder("qwen3_moe", **EIGHT["qwen3_moe"])
    config = settings(
        path,
        mesh={"dp": 2},
        precision={"compute_dtype": "bfloat16"},
        batch={"samples_per_update": 8},
        loss={"routing_replay": "old_log_probs", "old_log_probs": "recompute", "epochs": 1, "kl_coefficient": 0.0},
    )
    batch = make_batch(path).replace(old_log_probs=None)
    for in_step, own_loop in ranks.run(config.ranks, first_ratios, config, batch):
        for metrics in (in_step, own_loop):
            assert metrics["ratio_deviation_max"] == 0.0 and metrics["kl_old"] == 0.0
            assert 0 < metrics["expert_max_violation"] < 7 and metrics["idle_experts"] < 2 * 8


def test_every_update_of_a_step_replays_the_first_pass(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    path = tiny_folder("qwen3_moe", **EIGHT["qwen3_moe"])
    shared: dict[str, Any] = {"mesh": {"dp": 2}, "optim": {"lr": 0.3}}
    recording = settings(path, loss={"routing_replay": "old_log_probs", "epochs": 2}, **shared)
    batch = make_batch(path).replace(old_log_probs=None)
    recorded = ranks.run(2, log_probs_of, recording, batch)[0]
    given = batch.replace(old_log_probs=recorded.log_probs, routed_experts=recorded.routed_experts)
    weights = ranks.run(2, trainer_weights, recording, batch)[0][1]
    expected = ranks.run(2, trainer_weights, settings(path, loss={"routing_replay": "rollout"}, **shared), given)[0][1]
    free = ranks.run(2, trainer_weights, settings(path, **shared), given.replace(routed_experts=None))[0][1]
    assert largest_difference(weights, expected) < 1e-5 < 1e-3 < largest_difference(weights, free)


@pytest.mark.parametrize(
    ("replay", "changes", "reason"),
    [
        ("none", {}, "would be ignored"),
        ("rollout", {"routed_experts": None}, "routed_experts is missing"),
        ("old_log_probs", {"routed_experts": None}, "routed_experts is missing"),
        ("rollout", {"routed_experts": 3}, "model has 2 layers and chooses 2"),
        ("rollout", {"routed_experts": 9}, "has expert 9; the model has 8"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(
    tiny_folder: TinyFolder, ranks: RankPool, replay: str, changes: dict[str, Any], reason: str
) -> None:
    path = tiny_folder("qwen3_moe", **EIGHT["qwen3_moe"])
    batch = other_experts(make_batch(path))
    assert batch.routed_experts is not None
    other = {None: None, 3: np.repeat(batch.routed_experts, 2, 2)[..., :3], 9: np.full_like(batch.routed_experts, 9)}
    batch = batch.replace(**{name: other[value] for name, value in changes.items()})
    config = settings(path, loss={"routing_replay": replay})
    with pytest.raises(BatchError, match=reason) as error:
        ranks.run(1, trainer_weights, config, batch)
    assert error.value.field == "routed_experts"


def test_a_model_without_experts_is_refused(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    path = tiny_folder("qwen3")
    with pytest.raises(ConfigError, match="a model of type qwen3 has none") as error:
        ranks.run(1, trainer_weights, settings(path, loss={"routing_replay": "rollout"}), make_batch(path))
    assert error.value.field == "loss.routing_replay"


def test_samples_share_only_prefixes_with_equal_experts(tiny_folder: TinyFolder) -> None:
    path = tiny_folder("qwen3_moe", **EIGHT["qwen3_moe"])
    config = settings(path, loss={"routing_replay": "rollout"}, batch={"share_prefixes": "always"})
    batch = forked(make_batch(path))
    experts = np.zeros((batch.num_tokens, LAYERS, OF_TOKEN), np.int16)
    starts = batch.token_offsets[:-1]
    experts[starts + 17, 1, 0] = np.arange(len(starts)) % 2  # the 18th token of every second sample
    whole, parted = (
        plan_training(config, batch.replace(routed_experts=x)).shared for x in (np.zeros_like(experts), experts)
    )
    assert whole is not None and set(whole.shared[1:]) == {20}
    assert parted is not None and set(parted.shared[1:]) <= {17, 20} and 17 in parted.shared
    # a plan that was made without the experts is refused
    assert whole.fit(batch.tokens, batch.lengths) and parted.fit(batch.tokens, batch.lengths, experts)
    assert not whole.fit(batch.tokens, batch.lengths, experts)


def load_of_no_tokens(rank: int) -> dict[str, float]:
    return ExpertLoad(Routing([torch.nn.Identity()]), CPU).metrics(dist.group.WORLD)


def test_an_update_without_tokens_has_no_load(ranks: RankPool) -> None:
    assert ranks.run(2, load_of_no_tokens) == [{}, {}]
