"""Bytes sent between ranks, against a count message by message."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.attention.call_plan import AttentionParams
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice, repeated_kv_heads
from slimefsdp.batching.cost import STRATEGIES, Strategy
from slimefsdp.batching.cp_sharding import Layout, hybrid_layout, sent_rows, zigzag_layout
from slimefsdp.batching.prefix_tree import Forest
from slimefsdp.errors import ConfigError
from slimefsdp.perf_model.simulate import attention_comm_bytes
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused

LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=10)
SIZES = {"head_dim": 16, "bytes_per_element": 2, "grad_bytes_per_element": 4}


FOREST = Forest(parents=(None, 0, 0, None, 3, 4), depths=(0, 150, 150, 0, 3, 67))


def layouts_of(lengths: Sequence[int], cp: int, forest: Forest | None = None) -> list[Layout]:
    cu = [0, *accumulate(lengths)]
    return [zigzag_layout(cu, cp), hybrid_layout(cu, cp, forest=forest)]


def row_bytes(heads: int, size: int) -> int:
    return heads * SIZES["head_dim"] * size


def ring_messages(rows: Sequence[int], kv_heads: int) -> tuple[int, int]:
    """Every rank passes on what it holds until all have seen it; gradients follow until they are home."""
    cp, keys, grads = len(rows), 0, 0
    for source in range(cp):
        for _hop in range(cp - 1):
            keys += 2 * rows[source] * row_bytes(kv_heads, 2)
            grads += 2 * rows[source] * row_bytes(kv_heads, 4)
    return keys, keys + grads


def all_gather_messages(rows: Sequence[int], kv_heads: int) -> tuple[int, int]:
    pairs = [(sender, receiver) for sender in range(len(rows)) for receiver in range(len(rows)) if sender != receiver]
    forward = sum(2 * rows[sender] * row_bytes(kv_heads, 2) for sender, _ in pairs)
    backward = sum(2 * rows[receiver] * row_bytes(kv_heads, 4) for _, receiver in pairs)
    return forward, backward


def ulysses_messages(tokens: Sequence[int], heads: int, kv_heads: int) -> tuple[int, int]:
    cp = len(tokens)
    repeated = repeated_kv_heads(heads, kv_heads, cp)
    one_way = 0
    for sender in range(cp):
        for receiver in range(cp):
            if sender != receiver:
                one_way += tokens[sender] * row_bytes((heads + 2 * repeated) // cp, 2)  # q, k, v of its heads
                one_way += tokens[receiver] * row_bytes(heads // cp, 2)  # the output of the sender's heads
    return one_way, one_way


@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4, 6]), kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_the_formula_counts_what_is_sent(lengths: list[int], cp: int, kv_heads: int) -> None:
    heads = 12
    for layout in layouts_of(lengths, cp):
        rows = sent_rows(layout)
        tokens = [sum(piece.end - piece.start for piece in pieces) for pieces in layout]
        counted = {
            "ring": ring_messages(rows, kv_heads),
            "all_gather": all_gather_messages(rows, kv_heads),
            "ulysses": ulysses_messages(tokens, heads, kv_heads),
        }
        for strategy, expected in counted.items():
            assert attention_comm_bytes(layout, strategy, heads=heads, kv_heads=kv_heads, **SIZES) == expected


def test_one_long_sequence_sends_what_was_worked_out_by_hand() -> None:
    # a 7-billion model, multi-head, bfloat16, 4096 tokens on two ranks: all but the last of four chunks travel
    layout = zigzag_layout([0, 4096], 2)
    forward, backward = attention_comm_bytes(
        layout, "ring", heads=32, kv_heads=32, head_dim=128, bytes_per_element=2, grad_bytes_per_element=4
    )
    assert forward == 48 * 2**20 and backward == 3 * forward


def test_sequences_that_stay_whole_send_nothing() -> None:
    layout = hybrid_layout([0, 100, 200, 300, 400], 2)
    for strategy in ("ring", "all_gather"):
        assert attention_comm_bytes(layout, strategy, heads=4, kv_heads=4, **SIZES) == (0, 0)
    assert attention_comm_bytes(layout, "ulysses", heads=4, kv_heads=4, **SIZES)[0] > 0


def test_heads_that_do_not_divide_are_named() -> None:
    layout = zigzag_layout([0, 100], 4)
    with refused(ConfigError, "attention.strategy", 6, "mesh.cp=4"):
        attention_comm_bytes(layout, "ulysses", heads=6, kv_heads=2, **SIZES)


def really_sent(
    rank: int, lengths: Sequence[int], strategy: Strategy, dtype: torch.dtype, forest: Forest | None
) -> list[tuple[int, int]]:
    """(forward, backward) bytes that this rank's attention counted, of both layouts."""
    sent = []
    parents = None if forest is None else forest.parents
    for layout in layouts_of(lengths, dist.get_world_size(), forest):
        attention = Attention(Choice(strategy, "test"), dist.group.WORLD)
        attend, comm = attention.for_pack(layout, torch.device("cpu"), parents), attention.comm
        assert comm is not None
        tokens = sum(piece.end - piece.start for piece in layout[rank])
        q, k, v = (torch.randn(tokens, heads, 16, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
        out = attend(q, k, v, AttentionParams(scale=0.25), None)
        forward = comm.sent_bytes
        out.sum().backward()
        sent.append((forward, comm.sent_bytes - forward))
    return sent


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("dtype", "forest"), [(torch.bfloat16, None), (torch.float32, None), (torch.float64, None), (torch.float32, FOREST)]
)
def test_the_formula_is_what_ranks_really_send(
    ranks: RankPool, world_size: int, strategy: Strategy, dtype: torch.dtype, forest: Forest | None
) -> None:
    lengths = [150, 31, 9, 3, 64, 1]
    counted = np.array(ranks.run(world_size, really_sent, lengths, strategy, dtype, forest)).sum(axis=0)
    for layout, found in zip(layouts_of(lengths, world_size, forest), counted.tolist(), strict=True):
        expected = attention_comm_bytes(
            layout, strategy, heads=8, kv_heads=2, head_dim=16,
            bytes_per_element=dtype.itemsize, grad_bytes_per_element=max(4, dtype.itemsize),
            parents=None if forest is None else forest.parents,
        )  # fmt: skip
        assert tuple(found) == expected and min(expected) > 0
