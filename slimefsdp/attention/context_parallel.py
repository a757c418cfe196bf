"""Computes a model's attention on its mesh with one strategy, chosen once for all packs.

`ring` passes keys and values round the context-parallel ranks while it computes. `all_gather` fetches
all keys and values first, and therefore supports sliding windows. `ulysses` exchanges the split by tokens for a split
by heads. `ring_flash_attn` uses the package of that name. `local` is packed attention on one rank, for cp == 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from slimefsdp.attention.all_gather import all_gather_attention
from slimefsdp.attention.backends import ring_flash_attn_package
from slimefsdp.attention.call_plan import (
    AttentionParams,
    GatherPlan,
    KernelName,
    Layout,
    PackAttention,
    gather_plan,
    ring_plan,
    ulysses_plan,
)
from slimefsdp.attention.cp_comm import Comm
from slimefsdp.attention.select import Choice
from slimefsdp.attention.ulysses import ulysses_attention
from slimefsdp.attention.varlen import ring_attention
from slimefsdp.batching.cost import DEFAULT_COST_MODEL, CostModel
from slimefsdp.batching.cp_sharding import hybrid_layout, zigzag_layout
from slimefsdp.batching.prefix_tree import Forest


class Attention:
    """Computes the attention of one model on one mesh.

    Args:
        choice: the strategy, from `slimefsdp.attention.select.choose_strategy`.
        group: the context-parallel ranks; None for `local`.
        kernel: the kernels that compute attention calls.
        cost: the cost model that decides which sequences of a pack are cut; it must be equal on all ranks.

    Raises:
        ConfigError: a package that the strategy needs is not installed.
    """

    def __init__(
        self,
        choice: Choice,
        group: dist.ProcessGroup | None = None,
        kernel: KernelName = "torch",
        cost: CostModel = DEFAULT_COST_MODEL,
    ) -> None:
        if choice.name == "ring_flash_attn":
            ring_flash_attn_package.require()
        assert choice.name == "local" or group is not None, f"{choice.name} without a group"
        self.choice = choice
        self.comm = None if choice.name == "local" or group is None else Comm(group)
        self._kernel: KernelName = kernel
        self._group = group
        self.cost = cost
        # the number of tokens of a pack must be a multiple of this
        self.padding_multiple = self.comm.size if self.comm is not None and choice.name == "ring_flash_attn" else 1

    def layout(self, cu_seqlens: Sequence[int], forest: Forest | None = None) -> Layout:
        """Returns the tokens of a pack that each rank owns, given the offsets of its nodes and their forest."""
        if self.comm is None:
            return zigzag_layout(cu_seqlens, 1)
        if self.choice.name == "ring_flash_attn":
            assert forest is None, "plans do not share prefixes under ring_flash_attn"
            return ring_flash_attn_package.contiguous_layout(cu_seqlens, self.comm.size)
        return hybrid_layout(cu_seqlens, self.comm.size, self.cost, forest)

    def for_pack(
        self, layout: Layout, device: torch.device, parents: Sequence[int | None] | None = None
    ) -> PackAttention:
        """Returns the function that computes attention over one pack in every layer.

        Args:
            layout: the result of `self.layout`.
            parents: the parent of every node of the pack; None means that no node has a parent.
        """
        comm = self.comm
        if comm is None:
            attend = _local(layout, device, parents)
        elif self.choice.name == "ring_flash_attn":
            assert self._group is not None
            attend = ring_flash_attn_package.for_pack(layout, device, self._group)
        elif self.choice.name == "ulysses":
            attend = _ulysses(layout, device, parents, comm)
        elif self.choice.name == "all_gather":
            attend = _all_gather(gather_plan(layout, comm.rank, device, parents), comm)
        else:
            attend = _ring(layout, device, parents, comm)
        return lambda q, k, v, scoring, sinks: attend(q, k, v, replace(scoring, kernel=self._kernel), sinks)


def _local(layout: Layout, device: torch.device, parents: Sequence[int | None] | None) -> PackAttention:
    assert len(layout) == 1
    calls = ring_plan(layout, 0, device, parents)
    # a window may reach from a node into its parent, which separate calls per node cannot express
    windowed_plan = gather_plan(layout, 0, device, parents) if any(calls.sources) else None

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if windowed_plan is not None and scoring.window is not None:
            return all_gather_attention(q, k, v, windowed_plan, None, scoring, sinks)
        return ring_attention(q, k, v, calls, None, scoring, sinks)

    return attend


def _ring(layout: Layout, device: torch.device, parents: Sequence[int | None] | None, comm: Comm) -> PackAttention:
    calls = ring_plan(layout, comm.rank, device, parents)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert scoring.window is None, "refused when the strategy was chosen"
        return ring_attention(q, k, v, calls, comm, scoring, sinks)

    return attend


def _all_gather(plan: GatherPlan, comm: Comm) -> PackAttention:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return all_gather_attention(q, k, v, plan, comm, scoring, sinks)

    return attend


def _ulysses(layout: Layout, device: torch.device, parents: Sequence[int | None] | None, comm: Comm) -> PackAttention:
    whole = ulysses_plan(layout, device)
    local = _local([sorted(piece for owned in layout for piece in owned)], device, parents)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        def of_own_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
            return local(q, k, v, scoring, sinks)

        return ulysses_attention(q, k, v, whole, comm, of_own_heads, sinks)

    return attend
