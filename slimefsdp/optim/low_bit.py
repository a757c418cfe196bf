"""Implements AdamW with moments in bfloat16, or in 8 bits with a scale for each block.

bfloat16: Rounding to nearest would discard every change of a moment that is smaller than half of the moment's last bit.
With beta = 0.999 this holds for every change of a second moment. Moments are therefore rounded stochastically: the
probability of rounding up is proportional to the distance from the lower neighbour, so rounding is exact on average
(Gupta et al. 2015, https://arxiv.org/abs/1502.02551). The noise is a hash of the run's seed, the update's number, the
parameter's name and the element's index in the whole parameter. So the noise does not depend on the sharding, and a
resumed run has the same bits.

8 bits: The codes are those of dynamic tree quantization (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861,
sections 2.1 and 2.2), whose values are densest near 0. The smallest positive value is 5.5e-7 (first moments) or 3.25e-7
(second moments) of a block's largest value. A block lies within a row of dim 0, and shards hold whole rows, so blocks,
bits and checkpoints are equal on every mesh. If no block size divides the rows of a parameter, as with vectors, its
moments have the parameter's dtype.

A positive second moment never gets the code 0 (the zero-point problem: Li et al. 2023,
https://arxiv.org/abs/2309.01507). If a second moment were stored as 0, the divisor of the next step would contain only
the newest gradient. The step would be 1 / sqrt(1 - beta2) times too large if all gradients are equally large; if the
newest gradient is 0, the divisor would be eps. Rounding up makes steps too small instead. The smallest positive second
moment, 3.25e-7 of a block's largest, corresponds to a gradient of 1/1750 of the block's largest gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.optim.adamw import adamw

# number of elements to process at a time: small enough for a CPU's caches, large enough to use a whole GPU
BUCKET_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
OTHER_BUCKET_ELEMENTS = 2**20  # for other devices


def bucket_elements(device: torch.device) -> int:
    return BUCKET_ELEMENTS.get(device.type, OTHER_BUCKET_ELEMENTS)


@dataclass(frozen=True, slots=True, eq=False)
class AdamWState:
    """Holds the local shards of a parameter, its gradient and its moments, [rows, ...], each contiguous."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor  # step count, a scalar that the update increments


def split_state(
    tensors: Sequence[torch.Tensor], step: torch.Tensor, length: int
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Yields views of `length` rows of a parameter's tensors, each with a step count for torch to increment.

    torch increments the count of every piece, but the parameter has a single count. Therefore the last piece gets this
    count, and all other pieces get a copy.

    Args:
        tensors: tensors with equally many rows; without rows, there is one piece.
        step: the step count, a scalar.
    """
    pieces = list(zip(*(tensor.split(length) for tensor in tensors), strict=True))
    for number, piece in enumerate(pieces):
        yield piece, step if number == len(pieces) - 1 else step.clone()


# ---------------------------------------------------------------------- bfloat16

_SPREAD = 0x9E3779B1  # 2^32 / the golden ratio, odd
# multipliers of a 32-bit hash with very little bias (Wellons, https://github.com/skeeto/hash-prospector)
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True, slots=True, eq=False)
class RoundedState(AdamWState):
    """Holds a parameter with moments in bfloat16."""

    name: str
    first_element: int  # index of the shard's first element in the whole parameter


@torch.no_grad()
def update_rounded(states: Sequence[RoundedState], *, seed: int, update: int, **settings: Any) -> None:
    """Takes one step of AdamW; the weights are updated before the moments are rounded.

    Args:
        seed: seed of the run.
        update: number of the update, counted from 0.
        settings: arguments of torch's functional `adamw`.
    """
    if not states:
        return
    key = f"{seed} {update}"
    for bucket in _flat_pieces(states, bucket_elements(states[0].parameter.device)):
        master = bucket[0].parameter.dtype
        moments = [torch.cat([part.exp_avg for part in bucket]), torch.cat([part.exp_avg_sq for part in bucket])]
        moments = [moment.to(master) for moment in moments]
        sizes = [part.parameter.numel() for part in bucket]
        adamw(
            [part.parameter for part in bucket],
            [part.gradient for part in bucket],
            list(moments[0].split(sizes)),
            list(moments[1].split(sizes)),
            [],
            [part.step for part in bucket],
            amsgrad=False,
            maximize=False,
            **settings,
        )
        noise = noise_of([(part.name, part.first_element, part.parameter.numel()) for part in bucket], key, moments[0])
        for moment, bits, stored in (
            (moments[0], noise & 0xFFFF, [part.exp_avg for part in bucket]),
            (moments[1], (noise >> 16) & 0xFFFF, [part.exp_avg_sq for part in bucket]),
        ):
            torch._foreach_copy_(stored, stochastic_round_(moment.type(torch.float32), bits).split(sizes))


def stochastic_round_(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Rounds values stochastically to one of their two bfloat16 neighbours, in place.

    A value between neighbours a and b, |a| < |b|, becomes b with probability |value - a| / |b - a|.

    Args:
        values: float32, finite.
        noise: int32, uniform in [0, 2^16), of the same shape.
    """
    bits = values.view(torch.int32)
    bits.add_(noise).bitwise_and_(-0x10000)
    return values


def noise_of(pieces: Sequence[tuple[str, int, int]], key: str, like: torch.Tensor) -> torch.Tensor:
    """Returns 32 random bits for each element, as int32.

    Args:
        pieces: (parameter's name, index of the first element, number of elements); the bits of all pieces are
            concatenated.
        key: text that identifies the seed and the update.
        like: a tensor on the device of the result.
    """
    sizes, starts, offset = [count for *_, count in pieces], [], 0
    for name, first, count in pieces:
        starts.append(_signed((first - offset) * _SPREAD + _hashed(f"{key} {name}")))
        offset += count
    x = torch.arange(offset, dtype=torch.int32, device=like.device).mul_(_signed(_SPREAD))
    # passed as scalars: copying them to a GPU as a tensor would make the host wait in every bucket
    torch._foreach_add_(x.split(sizes), starts)
    # right shifts of int32 are arithmetic, so the shifted-in sign bits are masked out
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _signed(value: int) -> int:
    """Returns the int32 with the lowest 32 bits of an integer."""
    return (value + 2**31) % 2**32 - 2**31


def _flat_pieces(states: Sequence[RoundedState], most: int) -> Iterator[list[RoundedState]]:
    """Yields buckets of flat pieces that together contain all elements; a bucket has at most `most` elements."""
    bucket: list[RoundedState] = []
    room = most
    for state in states:
        flat = [tensor.view(-1) for tensor in (state.parameter, state.gradient, state.exp_avg, state.exp_avg_sq)]
        first = state.first_element
        for (parameter, gradient, exp_avg, exp_avg_sq), step in split_state(flat, state.step, most):
            if parameter.numel() > room:
                yield bucket
                bucket, room = [], most
            bucket.append(RoundedState(parameter, gradient, exp_avg, exp_avg_sq, step, state.name, first))
            first += parameter.numel()
            room -= parameter.numel()
    if bucket:
        yield bucket


# ---------------------------------------------------------------------- 8 bits

BLOCK = 256  # largest number of elements of a block
LEAST_BLOCK = 32  # smallest number; the scales of smaller blocks would take too much memory
_DECADES = 7


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedState(AdamWState):
    """Holds a parameter with moments as uint8 codes."""

    exp_avg_scale: torch.Tensor  # [rows, blocks] float32
    exp_avg_sq_scale: torch.Tensor  # [rows, blocks] float32


def block_of(shape: Sequence[int]) -> int | None:
    """Returns the block size for a parameter of this shape.

    The size is the largest divisor, up to BLOCK, of the number of elements in a row of dim 0. It is None if that
    divisor is below LEAST_BLOCK.
    """
    row = math.prod(shape[1:])
    largest = next(size for size in range(min(row, BLOCK), 0, -1) if row % size == 0)
    return largest if largest >= LEAST_BLOCK else None


@torch.no_grad()
def update_quantized(states: Sequence[QuantizedState], **settings: Any) -> None:
    """Takes one step of AdamW; the weights are updated before the moments are quantized.

    Args:
        settings: arguments of torch's functional `adamw`.
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
    """Quantizes values: writes the nearest code of each value, and the scale of each block.

    Unless `is_signed`, a positive value gets the nearest code of a positive value, never that of 0.

    Args:
        codes: receives the codes, uint8 in the shape of `values`.
        scales: receives the scales, [rows, blocks] float32.
        values: [rows, ...], finite; not negative unless `is_signed`.
    """
    if not values.numel():
        return
    blocks = values.type(torch.float32).reshape(scales.numel(), -1)
    largest = blocks.abs().amax(dim=1)
    scales.copy_(largest.view_as(scales))
    scaled = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    first, borders = _tables(is_signed, values.device)
    indices = first.index_select(0, (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1))
    indices += scaled.view(-1) >= borders.index_select(0, indices)
    if not is_signed:
        indices = torch.maximum(indices, blocks.view(-1) > 0)
    codes.copy_(indices.view_as(codes))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """Returns the float32 values of codes, the inverse of `quantize_`."""
    if not codes.numel():
        return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    values = dynamic_map(is_signed, codes.device).index_select(0, codes.view(-1).int())
    return values.view(scales.numel(), -1).mul_(scales.view(-1, 1)).view(codes.shape)


@lru_cache(maxsize=8)
def dynamic_map(is_signed: bool, device: torch.device) -> torch.Tensor:
    """Returns the 256 values of the codes in ascending order, float32.

    These are 0, 1, and values in seven decades below 1. Each decade has twice as many values as the next lower decade;
    the values are the centres of equal parts of the decade.

    Args:
        is_signed: whether half of the values of each decade are negative.
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
    """Returns two tables that replace the search for the nearest code.

    The first maps the upper half of a float32's bits to the code of the smallest float with these bits, [65536] int32.
    The second has the upper border of each code, [256] float32; the last border is infinite. Floats with the same upper
    half are so close that at most one border is between them.
    """
    values = dynamic_map(is_signed, torch.device("cpu"))
    borders = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([math.inf])])
    upper = torch.arange(2**16, dtype=torch.int32)
    least = (upper << 16) + torch.where(upper >= 2**15, 0xFFFF, 0).int()  # negative floats decrease with their bits
    first = torch.bucketize(least.view(torch.float32), borders[:-1], out_int32=True, right=True)
    return first.to(device), borders.to(device)


def _some_rows(state: QuantizedState) -> Iterator[QuantizedState]:
    rows = max(1, bucket_elements(state.parameter.device) // max(1, math.prod(state.parameter.shape[1:])))
    tensors = (
        state.parameter, state.gradient, state.exp_avg, state.exp_avg_sq, state.exp_avg_scale, state.exp_avg_sq_scale
    )  # fmt: skip
    for (parameter, gradient, exp_avg, exp_avg_sq, scale, scale_sq), step in split_state(tensors, state.step, rows):
        yield QuantizedState(parameter, gradient, exp_avg, exp_avg_sq, step, scale, scale_sq)
