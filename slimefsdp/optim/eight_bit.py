"""AdamW whose moments rest in 8 bits an element: codes of values between -1 and 1, and a scale for each block of them.

Dettmers et al. 2021 (https://arxiv.org/abs/2110.02861), sections 2.1 and 2.2. The codes are those of dynamic tree
quantization: close to each other near 0, down to a millionth of a block's largest value. A block lies within a row of
dim 0, of which shards have whole ones, so blocks, bits and checkpoints are the same on every mesh. Parameters whose
rows no block divides, vectors among them, keep moments in the masters' dtype.

A second moment above 0 never gets the code of 0 (the zero-point problem: Li et al. 2023,
https://arxiv.org/abs/2309.01507). The least code above it is 3.25e-7 of a block's largest value, the second moment of
gradients that are 1/1750 of the largest; first moments have codes down to a millionth. One that is left over a second
moment of 0 would next be divided by the newest gradient's share alone, a step 1 / sqrt(1 - beta2) times too large where
that gradient is as large as those before it, or by eps where it is 0. Rounded up, steps are too small instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.optim.adamw import adamw

from slimefsdp.optim.buckets import bucket_elements, split_state

BLOCK = 256  # elements, at most
LEAST_BLOCK = 32  # below which scales would take too large a part of the memory
_DECADES = 7


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedState:
    """A parameter's local shards, each contiguous, of [rows, ...]."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor  # codes, uint8
    exp_avg_sq: torch.Tensor  # codes, uint8
    step: torch.Tensor  # a scalar, counted up
    exp_avg_scale: torch.Tensor  # [rows, blocks] float32
    exp_avg_sq_scale: torch.Tensor  # [rows, blocks] float32


def block_of(shape: Sequence[int]) -> int | None:
    """Elements of a block of a parameter of this shape: the largest divisor of a row of dim 0 that is no more than
    BLOCK; None: it is less than LEAST_BLOCK.
    """
    row = math.prod(shape[1:])
    found = next(size for size in range(min(row, BLOCK), 0, -1) if row % size == 0)
    return found if found >= LEAST_BLOCK else None


@torch.no_grad()
def update_quantized(states: Sequence[QuantizedState], **settings: Any) -> None:
    """One step of AdamW; the weights take it before moments are quantized.

    Args:
        settings: of torch's functional `adamw`.
    """
    for state in states:
        for part in _some_rows(state):
            dtype = part.parameter.dtype
            exp_avg = dequantize(part.exp_avg, part.exp_avg_scale, is_signed=True).to(dtype)
            exp_avg_sq = dequantize(part.exp_avg_sq, part.exp_avg_sq_scale, is_signed=False).to(dtype)
            adamw(
                [part.parameter],
                [part.gradient],
                [exp_avg],
                [exp_avg_sq],
                [],
                [part.step],
                amsgrad=False,
                maximize=False,
                **settings,
            )
            quantize_(part.exp_avg, part.exp_avg_scale, exp_avg, is_signed=True)
            quantize_(part.exp_avg_sq, part.exp_avg_sq_scale, exp_avg_sq, is_signed=False)


def quantize_(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, *, is_signed: bool) -> None:
    """Fills codes, of the values' shape, and a scale for each block.

    A value gets the nearest code; unless `is_signed`, one above 0 the nearest of those above 0.

    Args:
        values: [rows, ...], finite; of 0 or more unless `is_signed`.
    """
    if not values.numel():
        return
    blocks = values.type(torch.float32).reshape(scales.numel(), -1)
    largest = blocks.abs().amax(dim=1)
    scales.copy_(largest.view_as(scales))
    scaled = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    first, borders = _tables(is_signed, values.device)
    found = first.index_select(0, (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1))
    found += scaled.view(-1) >= borders.index_select(0, found)
    if not is_signed:
        found = torch.maximum(found, blocks.view(-1) > 0)
    codes.copy_(found.view_as(codes))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """The values of codes, float32; of zeros under a scale of 0 they are 0."""
    if not codes.numel():
        return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    values = dynamic_map(is_signed, codes.device).index_select(0, codes.view(-1).int())
    return values.view(scales.numel(), -1).mul_(scales.view(-1, 1)).view(codes.shape)


@lru_cache(maxsize=8)
def dynamic_map(is_signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values of codes, rising: 0, 1, and in each of seven decades below 1 twice as many as in the one below it,
    each in the middle of an equal part of the decade.

    Args:
        is_signed: half of them are below 0.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (0 if is_signed else 1))
        scale = 10.0 ** (decade + 1 - _DECADES)
        positive = [scale * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        values += positive + ([-value for value in positive] if is_signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def _tables(is_signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What finds a code in two look-ups instead of a search: by the upper half of a float32's bits, the code of the
    least float with these, [65536] int32; and above each code the border to the next, [256], the last of which is
    infinite. Floats of one upper half are so close that no two borders lie between them.
    """
    values = dynamic_map(is_signed, torch.device("cpu"))
    borders = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([math.inf])])
    upper = torch.arange(2**16, dtype=torch.int32)
    least = (upper << 16) + torch.where(upper >= 2**15, 0xFFFF, 0).int()  # below 0 the largest bits are the least float
    first = torch.bucketize(least.view(torch.float32), borders[:-1], out_int32=True, right=True)
    return first.to(device), borders.to(device)


def _some_rows(state: QuantizedState) -> Iterator[QuantizedState]:
    """A parameter, so many rows at a time."""
    rows = max(1, bucket_elements(state.parameter.device) // max(1, math.prod(state.parameter.shape[1:])))
    tensors = (
        state.parameter, state.gradient, state.exp_avg, state.exp_avg_sq, state.exp_avg_scale, state.exp_avg_sq_scale
    )  # fmt: skip
    for (parameter, gradient, exp_avg, exp_avg_sq, scale, scale_sq), step in split_state(tensors, state.step, rows):
        yield QuantizedState(parameter, gradient, exp_avg, exp_avg_sq, step, scale, scale_sq)
