"""The receiving end: it takes an update whole or says so, and a sender's ranks stay in step whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import StateError, SyncError
from slimefsdp.trainer import Trainer
from slimefsdp.training import build
from slimefsdp.weight_sync import send
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest
from slimefsdp.weight_sync.receive import WeightReceiver
from slimefsdp.weight_sync.send import DEFAULT_BUCKET_BYTES, full_weights
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import CPU, error_of, fingerprint, fresh_batch, settings

BUCKET_BYTES = 2000  # of tensors of 64 to 14,000 bytes


def receiver_of(model: torch.nn.Module) -> tuple[WeightReceiver, Manifest]:
    named = list(model.named_parameters())
    return WeightReceiver(named), {name: tuple(parameter.shape) for name, parameter in named}


def test_a_whole_update_is_committed_bit_for_bit() -> None:
    old, new = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    receiver, manifest = receiver_of(old)
    parameters = list(old.parameters())
    assert receiver.version is None
    receiver.begin(4, manifest)
    for name, tensor in new.state_dict().items():
        assert receiver.version is None  # between two versions
        receiver.receive([(name, tensor)])
    receiver.commit(4)
    assert receiver.version == 4
    assert all(torch.equal(old.state_dict()[name], tensor) for name, tensor in new.state_dict().items())
    assert all(a is b for a, b in zip(parameters, old.parameters(), strict=True))


def test_an_update_that_is_not_whole_is_not_committed() -> None:
    model = torch.nn.Linear(3, 2)
    receiver, manifest = receiver_of(model)
    with refused(StateError, "update_weights"):
        receiver.receive([])
    with refused(SyncError, "update_weights", 1, None):
        receiver.commit(1)
    receiver.begin(1, manifest)
    receiver.receive([("weight", torch.zeros(2, 3))])
    with refused(SyncError, "update_weights", 1, "'bias'"):
        receiver.commit(1)
    receiver.receive([("bias", torch.zeros(2))])
    with refused(SyncError, "update_weights", 2, 1):
        receiver.commit(2)
    assert receiver.version is None
    receiver.commit(1)
    receiver.begin(2, manifest)
    assert receiver.version is None  # nothing of the new one is there, but the old one is no longer promised
    with refused(SyncError, "update_weights", 2, "'bias'"):
        receiver.commit(2)


@pytest.mark.parametrize(
    "manifest, named",
    [
        ({"weight": (2, 4), "bias": (2,)}, "weight"),
        ({"weight": (2, 3)}, "bias"),
        ({"weight": (2, 3), "bias": (2,), "extra": (1,)}, "extra"),
    ],
)
def test_another_architecture_is_refused_at_the_door(manifest: Manifest, named: str) -> None:
    model = torch.nn.Linear(3, 2)
    receiver, own = receiver_of(model)
    receiver.begin(1, own)
    receiver.receive(list(model.state_dict().items()))
    receiver.commit(1)
    with refused(SyncError, "update_weights", repr(named)):
        receiver.begin(2, manifest)
    assert receiver.version == 1  # its weights are still whole


@pytest.mark.parametrize("name, shape", [("weight", (1, 3)), ("weight", (3,)), ("bias", ()), ("strange", (2,))])
def test_a_tensor_that_was_not_announced_so_is_refused_and_not_broadcast(name: str, shape: tuple[int, ...]) -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receiver, manifest = receiver_of(model)
    receiver.begin(1, manifest)
    with refused(SyncError, "update_weights", repr(name)):
        receiver.receive([(name, torch.zeros(shape))])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------------- from a sharded trainer


def stream_to_models(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=build.compute_dtype(config))
    streamed = receiver_of(model)[0]
    report = trainer.update_weights([streamed])
    in_small_buckets = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=build.compute_dtype(config))
    receiver, manifest = receiver_of(in_small_buckets)
    receiver.begin(1, manifest)
    named = trainer.policy.named_weights()
    for bucket in full_weights(named, trainer.mesh.group, dtype=build.compute_dtype(config), bucket_bytes=BUCKET_BYTES):
        receiver.receive(bucket)
    receiver.commit(1)
    full = {
        name: p.full_tensor().detach().to(build.compute_dtype(config)) for name, p in trainer.policy.named_weights()
    }
    tokens = torch.arange(1, 20)
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1].float()
    sample = {"tokens": tokens.tolist(), "response_length": len(tokens) - 1}
    ours = trainer.compute_log_probs(RolloutBatch.from_samples([sample])).log_probs
    theirs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
    return {"equal": full.keys() == dict(model.named_parameters()).keys()
            and all(torch.equal(parameter, full[name]) for name, parameter in model.named_parameters()),
            "in_small_buckets": all(torch.equal(p, full[name]) for name, p in in_small_buckets.named_parameters()),
            "version": streamed.version, "report": report,
            "bytes": sum(t.nbytes for t in full.values()), "difference": np.abs(ours - theirs).max()}  # fmt: skip


@pytest.mark.parametrize(
    ("dp", "tied", "compute_dtype", "tolerance"),
    [(1, True, "float32", 1e-5), (2, False, "bfloat16", 0.3), (2, True, "bfloat16", 0.3), (4, False, "float32", 1e-5)],
)
def test_a_plain_model_holds_the_trained_weights_afterwards(
    ranks: RankPool, tiny_folder: TinyFolder, dp: int, compute_dtype: str, tolerance: float, tied: bool
) -> None:
    folder = tiny_folder(vocab_size=97, intermediate_size=55, tie_word_embeddings=tied)
    config = settings(folder, mesh={"dp": dp}, precision={"compute_dtype": compute_dtype})
    results = ranks.run(dp, stream_to_models, config, fresh_batch())
    first = results[0]
    assert first["difference"] < tolerance
    for rank, result in enumerate(results):
        assert (result["report"].version, result["report"].bytes) == (1, result["bytes"])
        assert result["version"] == (1 if rank == 0 else None)  # only rank 0 talks to receivers
        assert result["in_small_buckets"] and result["equal"] == (rank == 0)


class Breaking(WeightReceiver):
    """Raises in the call named `at`, once."""

    def __init__(self, model: torch.nn.Module, at: str) -> None:
        super().__init__(list(model.named_parameters()))
        self.at: str | None = at

    def _break(self, here: str) -> None:
        if self.at == here:
            self.at = None
            raise SyncError(f"the engine went away in {here}")

    def begin(self, version: int, manifest: Manifest) -> None:
        self._break("begin")
        super().begin(version, manifest)

    def receive(self, bucket: Bucket) -> None:
        if len(self.missing) < len(self._parameters):  # half-way: not the first bucket
            self._break("receive")
        super().receive(bucket)

    def commit(self, version: int) -> None:
        self._break("commit")
        super().commit(version)


def breaking_receivers(rank: int, config: RunConfig, batch: RolloutBatch, strange: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    before = fingerprint(trainer.policy)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(strange, dtype=torch.float32)
    healthy = receiver_of(model)[0]
    send.DEFAULT_BUCKET_BYTES = BUCKET_BYTES
    errors, versions, afterwards = [], [], []
    for at in ("begin", "receive", "commit"):
        breaking = Breaking(model, at)
        errors.append(error_of(lambda breaking=breaking: trainer.update_weights([breaking, healthy])))
        versions.append((breaking.version, healthy.version))
        trainer.update_weights([breaking, healthy])
        afterwards.append((breaking.version, healthy.version))
    errors.append(error_of(lambda: trainer.update_weights([receiver_of(other)[0]])))
    send.DEFAULT_BUCKET_BYTES = DEFAULT_BUCKET_BYTES
    untouched = fingerprint(trainer.policy) == before
    return {"errors": errors, "versions": versions, "afterwards": afterwards, "untouched": untouched,
            "loss": trainer.train_step(batch)["loss"]}  # fmt: skip


@pytest.mark.parametrize("dp", [1, 2])
def test_a_receiver_that_fails_is_an_error_on_every_rank_and_the_next_update_works(
    ranks: RankPool, tiny_folder: TinyFolder, dp: int
) -> None:
    folder, strange = (tiny_folder(vocab_size=vocab) for name, vocab in (("model", 97), ("strange", 98)))
    results = ranks.run(dp, breaking_receivers, settings(folder, mesh={"dp": dp}), fresh_batch(), strange)
    for result in results:
        assert [type(error) for error in result["errors"]] == [SyncError] * 4
        assert [str(error) for error in result["errors"]] == [str(error) for error in results[0]["errors"]]
        assert result["untouched"] and np.isfinite(result["loss"])
    assert all("went away" in str(error) for error in results[0]["errors"][:3])
    assert results[0]["versions"] == [(None, None), (None, None), (None, None)]  # no commit without all buckets
    assert results[0]["afterwards"] == [(0, 0)] * 3


def reference_group_receives(rank: int, config: RunConfig) -> tuple[str, str, int | None, str]:
    """A reference group of the same ranks takes the full tensors that the actor hands out."""
    actor, reference = Trainer(config, device=CPU), Trainer(config, "ref", device=CPU)
    before = fingerprint(reference.policy)
    receiver = reference.receiver
    receiver.begin(3, {name: tuple(p.shape) for name, p in actor.policy.named_weights()})
    receiver.receive([(name, p.full_tensor().detach()) for name, p in actor.policy.named_weights()])
    receiver.commit(3)
    return before, fingerprint(reference.policy), receiver.version, fingerprint(actor.policy)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_sharded_receiver_keeps_its_own_rows(ranks: RankPool, tiny_folder: TinyFolder, dp: int) -> None:
    folder, other = (tiny_folder(vocab_size=97, seed=seed) for seed in (0, 1))
    config = settings(folder, mesh={"dp": dp}, reference={"path": str(other), "dp": dp})
    for before, after, version, actor in ranks.run(dp, reference_group_receives, config):
        assert after == actor != before and version == 3
