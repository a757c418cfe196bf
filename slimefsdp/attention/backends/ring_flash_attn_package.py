"""Computes attention with the ring-flash-attn package (`attention.strategy: ring_flash_attn`).

It uses the package's llama3 style: each rank takes one contiguous run of the pack, keys are gathered some heads at a
time, and sliding windows are supported. The number of tokens must be a multiple of the number of ranks, so packs are
padded with one more sequence. The package's zig-zag ring is not used, because it requires every length to be a multiple
of twice the number of ranks. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from slimefsdp.attention.call_plan import Layout, PackAttention
from slimefsdp.batching.cp_sharding import Piece
from slimefsdp.errors import ConfigError


def require() -> None:
    """Checks that the package is installed.

    Raises:
        ConfigError: the package, or flash-attn, on which the package depends, is not installed.
    """
    missing = [name for name in ("flash-attn", "ring-flash-attn") if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise ConfigError(
            f"attention.strategy=ring_flash_attn needs {' and '.join(missing)}, not installed here",
            field="attention.strategy",
            hint="install the `cuda` extra, or use auto, which needs no package",
        )


def contiguous_layout(cu_seqlens: Sequence[int], cp: int) -> Layout:
    """Returns a layout of equal runs of the pack, rank after rank; the pack must have a multiple of `cp` tokens."""
    share, rest = divmod(cu_seqlens[-1], cp)
    assert rest == 0, f"a pack of {cu_seqlens[-1]} tokens over {cp} ranks"
    spans = [
        (node, max(start, rank * share), min(end, (rank + 1) * share), rank)
        for rank in range(cp)
        for node, (start, end) in enumerate(pairwise(cu_seqlens))
    ]
    return [[Piece(n, start, end) for n, start, end, owner in spans if owner == r and start < end] for r in range(cp)]


def for_pack(layout: Layout, device: torch.device, group: dist.ProcessGroup) -> PackAttention:
    """Returns the function that computes attention over one pack in the layout of `contiguous_layout`."""
    package = _llama3_style()
    last = {piece.node: piece for owned in layout for piece in owned}  # ends where its sequence ends
    offsets = [0, *sorted(piece.end for piece in last.values())]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    cu_q, cu_k, max_q, max_k, keys = package.llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens, causal=True, rank=dist.get_rank(group), world_size=dist.get_world_size(group)
    )

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert sinks is None and scoring.softcap is None, "refused when the strategy was chosen"
        window = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
        out: torch.Tensor = package.llama3_flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k,
            heads_k_stride=1, local_k_slice=keys, softmax_scale=scoring.scale, causal=True, window_size=window,
            deterministic=True, group=group,
        )  # fmt: skip
        return out

    return attend


def _llama3_style() -> Any:
    """Imports the package's module `llama3_flash_attn_varlen` without running the package's `__init__`.

    `__init__` (of 0.1.8) also imports an adapter for transformers 4, which fails with transformers 5.
    """
    loaded = sys.modules.get("ring_flash_attn")
    if loaded is None:
        spec = find_spec("ring_flash_attn")
        assert spec is not None, "looked for when the strategy was set up"
        sys.modules["ring_flash_attn"] = module_from_spec(spec)
    try:
        return importlib.import_module("ring_flash_attn.llama3_flash_attn_varlen")
    finally:
        if loaded is None:
            del sys.modules["ring_flash_attn"]  # a later import of the package must run its `__init__`
