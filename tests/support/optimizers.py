"""Optimisers from plain keywords, for tests that vary them one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from slimefsdp.optim.optimizer import OptimizerOptions, build_optimizer


def optimizer_of(
    named: Iterable[tuple[str, nn.Parameter]],
    name: str,
    *,
    undecayed: Collection[str] = (),
    matrices: Collection[str] = (),
    **options: Any,
) -> torch.optim.Optimizer:
    """Returns the optimiser of these parameters; `options` are fields of `OptimizerOptions`."""
    chosen = OptimizerOptions(name, **options)  # type: ignore[arg-type]
    return build_optimizer(named, chosen, undecayed=undecayed, matrices=matrices)
