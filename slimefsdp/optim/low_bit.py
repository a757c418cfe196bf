"""AdamW whose moments are stored in fewer bytes than it computes with: bfloat16, or 8 bits with a scale for each block.

bfloat16. A moment that changes by less than half of its last bit would not change at all if it were rounded to nearest:
of a second moment under beta 0.999 that is any change. So moments are rounded stochastically: up with a probability
that grows with the distance from the lower neighbour, which is right on average (Gupta et al. 2015,
https://arxiv.org/abs/1502.02551). The noise is a hash of the run's seed, the number of the update, the parameter's name
and the element's index in the whole parameter. So it does not depend on the sharding, and a resumed run has the same
bits.

8 bits (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, sections 2.1 and 2.2). The codes are those of dynamic
tree quantization: close to each other near 0, down to a millionth of a block's largest value. A block lies within a row
of dim 0, and shards hold whole rows, so blocks, bits and checkpoints are the same on every mesh. Parameters whose rows
no block divides, vectors among them, keep moments in the masters' dtype.

A second moment above 0 never gets the code of 0 (the zero-point problem: Li et al. 2023,
https://arxiv.org/abs/2309.01507). The least code above it is 3.25e-7 of a block's largest value, the second moment of
gradients that are 1/1750 of the largest; first moments have codes down to a millionth. A first moment over a second
moment of 0 would next be divided by the newest gradient's share alone, a step 1 / sqrt(1 - beta2) times too large if
that gradient is as large as those before it, or by eps if it is 0. Rounding up makes steps too small instead.
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

# few enough elements that a CPU's caches hold them, and enough to fill a GPU
BUCKET_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
OTHER_BUCKET_ELEMENTS = 2**20  # of other devices


def bucket_elements(device: torch.device) -> int:
    return BUCKET_ELEMENTS.get(device.type, OTHER_BUCKET_ELEMENTS)


def split_state(
    tensors: Sequence[torch.Tensor], step: torch.Tensor, length: int
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Yields views of a parameter's tensors, `length` rows of dim 0 at a time, each with a step count to increment.

    torch counts a step for every piece, and the parameter has one: all pieces but the last count on a copy of it.

    Args:
        tensors: as long as each other in dim 0; where that is 0, there is one piece all the same.
        step: a scalar.
    """
    pieces = list(zip(*(tensor.split(length) for tensor in tensors), strict=True))
    for number, piece in enumerate(pieces):
        yield piece, step if number == len(pieces) - 1 else step.clone()


# ---------------------------------------------------------------------- bfloat16

_SPREAD = 0x9E3779B1  # odd, 2^32 over the golden ratio
# two multipliers of a hash of 32 bits that leaves next to no bias (Wellons, https://github.com/skeeto/hash-prospector)
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True, slots=True, eq=False)
class RoundedState:
    """A parameter's local shards, each contiguous, and their offset in the whole parameter."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor  # bfloat16
    exp_avg_sq: torch.Tensor  # bfloat16
    step: torch.Tensor  # a scalar, counted up
    name: str
    first_element: int  # of the shard, in the whole parameter as it lies in memory


@torch.no_grad()
def update_rounded(states: Sequence[RoundedState], *, seed: int, update: int, **settings: Any) -> None:
    """Takes one step of AdamW; the weights are updated before the moments are rounded.

    Args:
        seed: of the run.
        update: the number of the update, counted from 0.
        settings: of torch's functional `adamw`.
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
        for moment, bits, kept in (
            (moments[0], noise & 0xFFFF, [part.exp_avg for part in bucket]),
            (moments[1], (noise >> 16) & 0xFFFF, [part.exp_avg_sq for part in bucket]),
        ):
            torch._foreach_copy_(kept, stochastic_round_(moment.type(torch.float32), bits).split(sizes))


def stochastic_round_(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Rounds values to one of their two bfloat16 neighbours, in place. The probability of the neighbour away from 0 is
    the value's relative distance from the other one.

    Args:
        values: float32, finite.
        noise: int32 in [0, 2^16), of the same shape; evenly spread, it makes the mean right.
    """
    bits = values.view(torch.int32)
    bits.add_(noise).bitwise_and_(-0x10000)
    return values


def noise_of(pieces: Sequence[tuple[str, int, int]], key: str, like: torch.Tensor) -> torch.Tensor:
    """Returns 32 random bits for each element, as int32.

    Args:
        pieces: (parameter's name, first element in it, number of elements), end to end.
        key: of the seed and the update.
        like: on the device.
    """
    sizes, starts, place = [count for *_, count in pieces], [], 0
    for name, first, count in pieces:
        starts.append(_signed((first - place) * _SPREAD + _hashed(f"{key} {name}")))
        place += count
    x = torch.arange(place, dtype=torch.int32, device=like.device).mul_(_signed(_SPREAD))
    # as arguments of kernels: copied to a GPU as tensors, they would have the host wait for it in every bucket
    torch._foreach_add_(x.split(sizes), starts)
    # right shifts of int32 repeat the sign, so the bits that come in are taken out
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _signed(value: int) -> int:
    """Returns the int32 with the lowest 32 bits of an integer."""
    return (value + 2**31) % 2**32 - 2**31


def _flat_pieces(states: Sequence[RoundedState], most: int) -> Iterator[list[RoundedState]]:
    """Yields all elements in flat pieces of limited size."""
    bucket: list[RoundedState] = []
    room = most
    for state in states:
        flat = [one.view(-1) for one in (state.parameter, state.gradient, state.exp_avg, state.exp_avg_sq)]
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

BLOCK = 256  # elements, at most
LEAST_BLOCK = 32  # below which scales would take too large a part of the memory
_DECADES = 7


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedState:
    """A parameter's local shards, [rows, ...], each contiguous."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor  # codes, uint8
    exp_avg_sq: torch.Tensor  # codes, uint8
    step: torch.Tensor  # a scalar, counted up
    exp_avg_scale: torch.Tensor  # [rows, blocks] float32
    exp_avg_sq_scale: torch.Tensor  # [rows, blocks] float32


def block_of(shape: Sequence[int]) -> int | None:
    """Returns the block size for a parameter of this shape: the largest divisor of a row of dim 0 up to BLOCK; None if
    that is below LEAST_BLOCK.
    """
    row = math.prod(shape[1:])
    found = next(size for size in range(min(row, BLOCK), 0, -1) if row % size == 0)
    return found if found >= LEAST_BLOCK else None


@torch.no_grad()
def update_quantized(states: Sequence[QuantizedState], **settings: Any) -> None:
    """Takes one step of AdamW; the weights are updated before the moments are quantized.

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
    """Fills the codes, in the values' shape, and a scale for each block.

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
    """Returns the float32 values of codes; under a scale of 0 all values are 0."""
    if not codes.numel():
        return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    values = dynamic_map(is_signed, codes.device).index_select(0, codes.view(-1).int())
    return values.view(scales.numel(), -1).mul_(scales.view(-1, 1)).view(codes.shape)


@lru_cache(maxsize=8)
def dynamic_map(is_signed: bool, device: torch.device) -> torch.Tensor:
    """Returns the 256 values of the codes in ascending order: 0, 1, and seven decades below 1, each with twice as many
    values as the decade below it. A value is the middle of one of the equal parts of its decade.

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
    """Returns two tables that replace the search for a code. The first maps the upper half of a float32's bits to the
    code of the least float with these bits, [65536] int32. The second holds the border above each code, [256], the last
    one infinite. Floats with the same upper half are so close that at most one border lies between them.
    """
    values = dynamic_map(is_signed, torch.device("cpu"))
    borders = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([math.inf])])
    upper = torch.arange(2**16, dtype=torch.int32)
    least = (upper << 16) + torch.where(upper >= 2**15, 0xFFFF, 0).int()  # below 0 the largest bits are the least float
    first = torch.bucketize(least.view(torch.float32), borders[:-1], out_int32=True, right=True)
    return first.to(device), borders.to(device)


def _some_rows(state: QuantizedState) -> Iterator[QuantizedState]:
    """Yields a parameter in runs of rows."""
    rows = max(1, bucket_elements(state.parameter.device) // max(1, math.prod(state.parameter.shape[1:])))
    tensors = (
        state.parameter, state.gradient, state.exp_avg, state.exp_avg_sq, state.exp_avg_scale, state.exp_avg_sq_scale
    )  # fmt: skip
    for (parameter, gradient, exp_avg, exp_avg_sq, scale, scale_sq), step in split_state(tensors, state.step, rows):
        yield QuantizedState(parameter, gradient, exp_avg, exp_avg_sq, step, scale, scale_sq)
