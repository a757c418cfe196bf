"""What a sender spares receivers: frozen weights that they have; and an update that begins again on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.weight_sync import send
from slimefsdp.weight_sync.gather import DEFAULT_BUCKET_BYTES, Bucket
from slimefsdp.weight_sync.receive import Manifest, WeightReceiver
from slimefsdp.weight_sync.send import BeginAgain
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
