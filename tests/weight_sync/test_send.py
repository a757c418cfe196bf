"""What a sender spares receivers: frozen weights that they have; and an update that begins again on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.weight_sync import send
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest
from slimefsdp.weight_sync.receive import WeightReceiver
from slimefsdp.weight_sync.send import DEFAULT_BUCKET_BYTES, BeginAgain, HostCopy, stream_weights
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import CPU, fresh_batch, settings

BUCKET_BYTES = 2000  # of tensors of 64 to 14,000 bytes
FROZEN = "*.mlp.*"


class Keeper(WeightReceiver):
    """Keeps frozen weights of whoever it was last sent all by; begins again where it is told to."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(list(model.named_parameters()))
        self.source: str | None = None
        self.asked: str | None = None
        self.came: list[str] = []
        self.interruptions = 0

    def has_frozen(self, source: str) -> bool:
        self.asked = source
        return self.source == source

    def begin(self, version: int, manifest: Manifest, kept: Any = ()) -> None:
        super().begin(version, manifest, kept)
        self.came = []

    def receive(self, bucket: Bucket) -> None:
        if self.interruptions and self.came:
            self.interruptions -= 1
            raise BeginAgain
        super().receive(bucket)
        self.came += [name for name, _ in bucket]

    def commit(self, version: int) -> None:
        super().commit(version)
        self.source = self.asked


def updates(rank: int, config: RunConfig, batch: RolloutBatch) -> list[tuple[Any, ...]]:
    send.DEFAULT_BUCKET_BYTES = BUCKET_BYTES
    trainer = Trainer(config, device=CPU)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    receiver = Keeper(model)
    found = []

    def update(*receivers: Any) -> None:
        report = trainer.update_weights(receivers)
        full = {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}
        equal = all(torch.equal(p, full[name]) for name, p in model.named_parameters())
        found.append((report.bytes, sorted(receiver.came), equal, receiver.version))

    update(receiver)
    trainer.train_step(batch)
    update(receiver)
    trainer.train_step(batch)
    receiver.interruptions = 2
    update(receiver)
    trainer.save(0)
    trainer.load(0)
    update(receiver)
    update(receiver, WeightReceiver(list(AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters())))
    send.DEFAULT_BUCKET_BYTES = DEFAULT_BUCKET_BYTES
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_frozen_weights_are_sent_again_only_where_they_may_be_others_or_somebody_lacks_them(
    ranks: RankPool, tiny_folder: TinyFolder, dp: int, tmp_path: Any
) -> None:
    folder = tiny_folder(vocab_size=97, intermediate_size=55)
    config = settings(folder, mesh={"dp": dp}, model={"frozen": [FROZEN]}, run={"dir": str(tmp_path)})
    shapes = {name: p.numel() for name, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    trained = {name: size for name, size in shapes.items() if ".mlp." not in name}
    assert 0 < len(trained) < len(shapes)
    whole, part = (4 * sum(shapes.values()), sorted(shapes)), (4 * sum(trained.values()), sorted(trained))
    for rank, found in enumerate(ranks.run(dp, updates, config, fresh_batch())):
        assert [one[0] for one in found] == [whole[0], part[0], part[0], whole[0], whole[0]]
        if rank == 0:
            assert [one[1] for one in found] == [whole[1], part[1], part[1], whole[1], whole[1]]
            assert [one[2:] for one in found] == [(True, version) for version in (0, 1, 2, 2, 2)]


@dataclass
class Told:
    """A receiver that writes down what becomes of buckets."""

    told: list[str]
    takes_device_tensors: bool = False

    def begin(self, version: int, manifest: Manifest) -> None:
        self.told.append("begin")

    def receive(self, bucket: Bucket) -> None:
        self.told.append(f"receive {bucket[0][0]}")

    def commit(self, version: int) -> None:
        self.told.append("commit")


def sent_from(device: str, patch: pytest.MonkeyPatch, *, to_device: bool = False) -> list[str]:
    """What happens to three buckets, in order; as from a GPU where `device` says so."""
    told: list[str] = []

    class Copy(HostCopy):
        def __init__(self, bucket: Bucket, *, is_needed: bool) -> None:
            super().__init__(bucket, is_needed=is_needed)
            self.is_under_way = is_needed and device == "cuda"
            if self.is_under_way:
                told.append(f"begin to copy {bucket[0][0]}")

        def result(self) -> Bucket:
            if self.is_under_way:
                told.append(f"copied {self.bucket[0][0]}")
            return super().result()

    def buckets() -> Iterator[Bucket]:
        for name in "abc":
            told.append(f"gather {name}")
            yield [(name, torch.zeros(1))]

    patch.setattr(send, "HostCopy", Copy)
    patch.setattr(send, "full_weights", lambda *args, **options: buckets())
    named = [(name, torch.nn.Parameter(torch.zeros(1))) for name in "abc"]
    receiver = Told(told, to_device)
    group = dist.group.WORLD
    stream_weights(named, [receiver], version=1, shard_group=group, group=group, dtype=torch.float32)
    return told


def orders(rank: int) -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        return [sent_from("cpu", patch), sent_from("cuda", patch, to_device=True), sent_from("cuda", patch)]


def test_from_a_device_a_bucket_comes_to_the_host_while_receivers_take_the_one_before(ranks: RankPool) -> None:
    on_host, stays_there, from_device = ranks.run(1, orders)[0]
    one_by_one = [f"{what} {name}" for name in "abc" for what in ("gather", "receive")]
    assert on_host == stays_there == ["begin", *one_by_one, "commit"]
    assert from_device == [
        *("begin", "gather a", "begin to copy a", "gather b", "begin to copy b", "copied a", "receive a"),
        *("gather c", "begin to copy c", "copied b", "receive b", "copied c", "receive c", "commit"),
    ]
