"""No rank ever has the whole of a parameter in memory while a sharded model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.models import build, load_weights
from slimefsdp.trainer import Trainer

BUCKET_BYTES = 4096


class LargestStorage(TorchDispatchMode):
    """The most bytes in one storage that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor and leaf.device.type == "cpu":
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def loaded(rank: int, config: RunConfig, bucket_bytes: int) -> tuple[int, int, int]:
    """Bytes of the largest parameter, of the largest share of one, and of the largest tensor while they were read."""
    seen = LargestStorage()

    def watched(*args: Any, **kwargs: Any) -> None:
        with seen:
            load_weights.read_weights(*args, **kwargs)

    with patch.object(load_weights, "BUCKET_BYTES", bucket_bytes), patch.object(build, "read_weights", watched):
        trainer = Trainer(config, device=torch.device("cpu"))
    parameters = [parameter for _, parameter in trainer.policy.named_weights()]
    shares = [local_shard(parameter).untyped_storage().nbytes() for parameter in parameters]
    return max(parameter.numel() * 4 for parameter in parameters), max(shares), seen.nbytes


@pytest.mark.parametrize("reader", ["every_rank", "first_rank"])
def test_a_rank_holds_its_rows_and_a_bucket_while_it_loads(example: Path, ranks: Any, reader: str) -> None:
    config = config_from_dict(
        {
            "model": {"path": str(example / "model"), "read": reader},
            "mesh": {"dp": 2, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "optim": {"total_updates": 1},
        }
    )
    for whole, share, largest in ranks.run(2, loaded, config, BUCKET_BYTES):
        assert 0 < largest <= max(share, BUCKET_BYTES) < whole, (whole, share, largest)
