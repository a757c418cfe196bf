"""Which attention calls a rank makes for its share of a pack: sequences never see each other.

Without context parallelism that is one causal call over the rank's own pieces, each a whole sequence. The plan travels
through the model as the keyword `attention_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from slimefsdp.data.layout import Piece


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One variable-length attention call: query segment i sees key segment i.

    No segment is empty: the CPU kernel divides by its length, which would end the process. Every kernel call takes its
    segments from here, so this is the one place that checks it.
    """

    cu_q: tuple[int, ...]  # [segments + 1] offsets
    cu_k: tuple[int, ...]
    # the same offsets as int32 tensors where the kernel wants them on the device; made once, not once a layer
    device_cu_q: torch.Tensor | None
    device_cu_k: torch.Tensor | None

    def __post_init__(self) -> None:
        assert len(self.cu_q) == len(self.cu_k), f"{len(self.cu_q)} query offsets, {len(self.cu_k)} key offsets"
        for offsets in (self.cu_q, self.cu_k):
            assert offsets[0] == 0 and all(a < b for a, b in pairwise(offsets)), f"empty segment in {offsets}"

    @property
    def max_q(self) -> int:
        return max(b - a for a, b in pairwise(self.cu_q))

    @property
    def max_k(self) -> int:
        return max(b - a for a, b in pairwise(self.cu_k))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All attention calls of one rank for one pack."""

    own: CallPlan  # causal, over the rank's own tokens


def attention_plan(pieces: Sequence[Piece], device: torch.device) -> AttentionPlan:
    """The plan of a rank that owns `pieces`, each a whole sequence."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + piece.end - piece.start)
    cu = tuple(offsets)
    on_device = torch.tensor(cu, dtype=torch.int32, device=device) if device.type == "cuda" else None
    return AttentionPlan(own=CallPlan(cu, cu, on_device, on_device))
