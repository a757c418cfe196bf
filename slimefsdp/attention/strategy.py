"""How a model's attention is computed on its mesh: one strategy, chosen once, that serves every pack.

`ring` passes keys and values round the context-parallel ranks and overlaps that with computing. `all_gather` fetches
them first and can therefore keep sliding windows. `ulysses` trades tokens for heads. `ring_flash_attn` hands the pack
to the package of that name. With one rank per pack none is needed, and `local` packed attention it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from slimefsdp.attention import ring_flash_attn_package
from slimefsdp.attention.all_gather import all_gather_attention
from slimefsdp.attention.choice import Choice
from slimefsdp.attention.kernels import KernelName, Scoring
from slimefsdp.attention.plan import Layout, PathPlan, path_plan, ring_plan, whole_plan
from slimefsdp.attention.ring import ring_attention
from slimefsdp.attention.ulysses import ulysses_attention
from slimefsdp.attention.wire import Wire
from slimefsdp.data.cost import DEFAULT_COST_MODEL, CostModel
from slimefsdp.data.layout import hybrid_layout, zigzag_layout
from slimefsdp.data.prefixes import Forest

# (q, k, v, scoring, sinks) of this rank's tokens in one pack to its output, [local_tokens, heads, head_dim]
PackAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scoring, torch.Tensor | None], torch.Tensor]


class Attention:
    """The attention of one model on one mesh.

    Args:
        choice: of `slimefsdp.attention.choice.choose_strategy`.
        group: the context-parallel ranks; `local` needs none.
        kernel: which kernels compute the calls.
        cost: what decides which sequences of a pack are cut; the same on all ranks.

    Raises:
        ConfigError: a package that the choice needs is not installed.
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
        self.wire = None if choice.name == "local" or group is None else Wire(group)
        self._kernel: KernelName = kernel
        self._group = group
        self.cost = cost

    @property
    def padding_multiple(self) -> int:
        """Packs must have a multiple of this many tokens; 1 for all strategies of our own."""
        return self.wire.size if self.wire is not None and self.choice.name == "ring_flash_attn" else 1

    def layout(self, cu_seqlens: Sequence[int], forest: Forest | None = None) -> Layout:
        """Which rank computes which tokens of a pack whose nodes have these offsets and hang together like this."""
        if self.wire is None:
            return zigzag_layout(cu_seqlens, 1)
        if self.choice.name == "ring_flash_attn":
            assert forest is None, "no plan of a phase shares prompts where this is set"
            return ring_flash_attn_package.contiguous_layout(cu_seqlens, self.wire.size)
        return hybrid_layout(cu_seqlens, self.wire.size, self.cost, forest)

    def for_pack(
        self, layout: Layout, device: torch.device, parents: Sequence[int | None] | None = None
    ) -> PackAttention:
        """What every layer calls for one pack.

        Args:
            layout: of `self.layout`.
            parents: of every node of the pack, where nodes share prompts.
        """
        wire = self.wire
        if wire is None:
            attend = _local(layout, device, parents)
        elif self.choice.name == "ring_flash_attn":
            assert self._group is not None
            attend = ring_flash_attn_package.for_pack(layout, device, self._group)
        elif self.choice.name == "ulysses":
            attend = _ulysses(layout, device, parents, wire)
        elif self.choice.name == "all_gather":
            path = path_plan(layout, wire.rank, device, parents)
            attend = _all_gather(path, wire)
        else:
            attend = _ring(layout, device, parents, wire)
        return lambda q, k, v, scoring, sinks: attend(q, k, v, replace(scoring, kernel=self._kernel), sinks)


def _local(layout: Layout, device: torch.device, parents: Sequence[int | None] | None) -> PackAttention:
    """Attention over a whole pack on one rank."""
    assert len(layout) == 1
    calls = ring_plan(layout, 0, device, parents)
    # a window reaches from a node into its parent: the calls cannot be parted there
    path = path_plan(layout, 0, device, parents) if any(calls.sources) else None

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if path is not None and scoring.window is not None:
            return all_gather_attention(q, k, v, path, None, scoring, sinks)
        return ring_attention(q, k, v, calls, None, scoring, sinks)

    return attend


def _ring(layout: Layout, device: torch.device, parents: Sequence[int | None] | None, wire: Wire) -> PackAttention:
    calls = ring_plan(layout, wire.rank, device, parents)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert scoring.window is None, "refused when the strategy was chosen"
        return ring_attention(q, k, v, calls, wire, scoring, sinks)

    return attend


def _all_gather(path: PathPlan, wire: Wire) -> PackAttention:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return all_gather_attention(q, k, v, path, wire, scoring, sinks)

    return attend


def _ulysses(layout: Layout, device: torch.device, parents: Sequence[int | None] | None, wire: Wire) -> PackAttention:
    whole = whole_plan(layout, device)
    local = _local([sorted(piece for owned in layout for piece in owned)], device, parents)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        def of_own_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
            return local(q, k, v, scoring, sinks)

        return ulysses_attention(q, k, v, whole, wire, of_own_heads, sinks)

    return attend
