"""Sums and means over the sequences of a pack, where losses and corrections look at more than one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each token of a pack belongs to.

    A pack holds whole sequences, and of each its trained tokens only. Nothing here waits for the device.
    """

    index: torch.Tensor  # [tokens] int64 in [0, count), in any order
    count: int  # may be larger than how many occur, such as the samples of the whole batch

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Of `values` [tokens] over each sequence, [count]; 0 where a sequence has no token; differentiable."""
        # in float64: atomics add in any order on a GPU, and ranks that hold the same pack must decide alike
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.index, values.double()).to(values.dtype)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of `values` [tokens] over each sequence, [count]; 0 where a sequence has no token; differentiable."""
        return self.sum(values) / self.lengths().clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """To each token the value of its sequence, [count] to [tokens]; differentiable."""
        return per_sequence.index_select(0, self.index)

    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence in this pack, [count] int64."""
        return torch.zeros(self.count, dtype=torch.int64, device=self.index.device).index_add(
            0, self.index, torch.ones_like(self.index)
        )

    def occurs(self) -> torch.Tensor:
        """Whether a sequence has a token here, [count] bool."""
        return self.lengths() > 0
