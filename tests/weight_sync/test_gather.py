"""Full tensors out of shards: every bit, under every bucket size, on any number of ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slimefsdp.weight_sync import send
from slimefsdp.weight_sync.send import full_weights
from tests.support.all_pairs import all_pairs
from tests.support.rank_pool import RankPool

SHAPES = {"a": (5, 3), "b": (1, 4), "c": (7,), "d": (2, 2, 3), "e": (12, 1)}  # some ranks hold fewer rows, or none
BUCKET_BYTES = [1, 60, 120, 10**9]
ALONE_BYTES = [2**20, 48, 0]  # none of them is gathered by itself, or some, or all


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def gathered(rank: int, dtype: torch.dtype, alone_bytes: int) -> list[list[list[tuple[str, torch.Tensor]]]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = [(name, nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]))) for name, tensor in tensors().items()]
    with patch.object(send, "_ALONE_BYTES", alone_bytes):
        return [
            list(full_weights(named, mesh.get_group(), dtype=dtype, bucket_bytes=bucket_bytes))
            for bucket_bytes in BUCKET_BYTES
        ]


@pytest.mark.parametrize(
    ("world_size", "dtype", "alone_bytes"), all_pairs((1, 2, 4), (torch.float32, torch.bfloat16), ALONE_BYTES)
)
def test_every_tensor_comes_whole_once_and_in_order(
    ranks: RankPool, world_size: int, dtype: torch.dtype, alone_bytes: int
) -> None:
    for per_size in ranks.run(world_size, gathered, dtype, alone_bytes):
        for buckets in per_size:
            received = [pair for bucket in buckets for pair in bucket]
            assert [name for name, _ in received] == list(SHAPES)
            for name, tensor in received:
                assert tensor.dtype == dtype and torch.equal(tensor, tensors()[name].to(dtype))
                assert tensor.is_contiguous() and not tensor.requires_grad


def test_a_bucket_is_within_its_bytes_or_one_tensor(ranks: RankPool) -> None:
    counts = []
    for bucket_bytes, buckets in zip(
        BUCKET_BYTES, ranks.run(2, gathered, torch.float32, ALONE_BYTES[0])[0], strict=True
    ):
        assert all(sum(t.nbytes for _, t in bucket) <= bucket_bytes or len(bucket) == 1 for bucket in buckets)
        for bucket, following in pairwise(buckets):
            assert sum(t.nbytes for _, t in [*bucket, following[0]]) > bucket_bytes  # no smaller than it need be
        counts.append(len(buckets))
    assert counts[0] == len(SHAPES) and counts[-1] == 1 and 1 < counts[2] < counts[0]


def shards_stay(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    ((_, full),) = next(iter(full_weights([("a", parameter)], mesh.get_group(), dtype=torch.float32)))
    full.zero_()
    return bool((parameter.to_local() == 1).all())


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_handed_out_is_a_copy(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(world_size, shards_stay) == [True] * world_size
