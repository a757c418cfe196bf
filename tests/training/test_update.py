"""An update of one rank: nothing in it makes the host wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.training import step
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

# results whose values, or whose sizes, the host has to read
WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


# methods that read a tensor without an operation that a dispatch mode sees
READING = ("tolist", "numpy", "cpu", "__array__")


class FailsWhereTheHostWaits(TorchDispatchMode):
    """Stands for a device: an operation whose result the host reads is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> FailsWhereTheHostWaits:
        for name in READING:
            self._patch.setattr(torch.Tensor, name, _failing(name))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = func.overloadpacket.__name__
        assert not any(name.startswith(waiting) for waiting in WAITING), f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{name} by a mask waits"
        return func(*args, **(kwargs or {}))


def _failing(name: str) -> Any:
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{name} waits for the device")

    return read


def watched_update(rank: int, config: RunConfig, batch: RolloutBatch) -> int:
    """Operations of an update's micro-batches; none of them waits."""
    trainer, original = Trainer(config, device=torch.device("cpu")), step.accumulate_gradients
    watch = FailsWhereTheHostWaits()

    def accumulate_gradients(*args: Any, **kwargs: Any) -> Any:
        with watch:
            return original(*args, **kwargs)

    step.accumulate_gradients = accumulate_gradients
    try:
        trainer.train_step(batch)
    finally:
        step.accumulate_gradients = original
    return watch.operations


CASES: dict[str, dict[str, Any]] = {
    "ppo, kl and entropy": {},
    "sequence correction, veto, opsm": {
        "correction": {"method": "sequence_mis", "low": 0.5, "high": 2.0, "veto_below": 1e-4, "opsm_threshold": 0.5},
        "loss": {"kl_coefficient": 0.0, "entropy_coefficient": 0.0},
    },
    "gspo, parameters kept over the update": {"loss": {"policy": "gspo"}, "fsdp": {"sharding": "optimizer"}},
    "recomputed": {"model": {"activation_checkpointing": "full"}},
}


@pytest.mark.parametrize("case", CASES)
def test_no_operation_of_an_update_waits_for_the_device(tiny_folder: TinyFolder, ranks: RankPool, case: str) -> None:
    folder = tiny_folder()
    samples = make_batch(folder).to_samples()
    for sample in samples:
        sample["rollout_log_probs"] = np.asarray(sample["old_log_probs"]) - 0.1
    sections = {"precision": {"compute_dtype": "float32"}, **CASES[case]}
    (operations,) = ranks.run(1, watched_update, settings(folder, **sections), RolloutBatch.from_samples(samples))
    assert operations > 1000
