"""Buckets in kept memory: one that is on its way stays as it is while the next is packed."""

from __future__ import annotations

import socket

import pytest
import torch

from slimefsdp.weight_sync.broadcast import BroadcastGroup, TorchBroadcastGroup
from slimefsdp.weight_sync.buckets import Bucket, KeptBuffers, pack, packed_bytes, unpack


def bucket(seed: int, sizes: tuple[int, ...]) -> Bucket:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"t{place}", torch.randn(size, generator=generator, dtype=dtype))
        for place, (size, dtype) in enumerate(zip(sizes, (torch.float32, torch.bfloat16) * 3, strict=False))
    ]


@pytest.mark.parametrize("kind", [BroadcastGroup, TorchBroadcastGroup])
def test_a_bucket_keeps_every_bit_until_the_next_but_one_is_packed(kind: type[BroadcastGroup]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    group = kind("127.0.0.1", listener.getsockname()[1], 0, 1, "gloo", 60.0, listener=listener)
    sizes = [(5, 3), (700, 11, 2), (1,), (64, 64, 64, 9), (700, 11, 2), (3, 1)]  # larger and smaller than those before
    before: list[tuple[torch.Tensor, bytes]] = []
    addresses = set()
    for number in range(24):
        given = bucket(number, sizes[number % len(sizes)])
        layout, flat = group.packed(given)
        assert flat.numel() == packed_bytes(layout, 16 if kind is BroadcastGroup else 1)
        names = [name for name, _, _ in layout]
        alone = pack([dict(given)[name] for name in names], alignment=16 if kind is BroadcastGroup else 1)
        assert torch.equal(flat, alone)
        if kind is BroadcastGroup:
            assert all(torch.equal(tensor, dict(given)[name]) for name, tensor in unpack(flat, layout))
        for held, bits in before[-1:]:
            assert held.numpy().tobytes() == bits, "that one may be on its way"
        before.append((flat, flat.numpy().tobytes()))
        if number >= 2 * len(sizes):
            addresses.add(flat.data_ptr())
    assert len(addresses) == 2, "no new memory once the largest has been there"
    group.close()


def test_kept_buffers_take_turns_grow_where_they_must_and_go_when_they_are_cleared() -> None:
    made: list[int] = []

    def make(nbytes: int) -> list[int]:
        made.append(nbytes)
        return [nbytes]

    buffers = KeptBuffers(2, make)
    assert [buffers.next(n) for n in (5, 7, 4, 7, 9, 1)] == [[5], [7], [5], [7], [9], [7]]
    assert made == [5, 7, 9]
    buffers.clear()
    assert [buffers.next(n) for n in (1, 1, 1)] == [[1]] * 3 and made == [5, 7, 9, 1, 1]
