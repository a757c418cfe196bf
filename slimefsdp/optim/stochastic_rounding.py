"""AdamW whose moments rest in bfloat16: computed in the masters' dtype, and rounded stochastically when they are kept.

A moment that changes by less than half of its last bit would not change at all if it were rounded to nearest: of a
second moment under beta 0.999 that is any change. Rounded up with a probability of how near it is to the upper of its
two neighbours, it is right on average (Gupta et al. 2015, https://arxiv.org/abs/1502.02551). The noise is a hash of the
run's seed, the number of the update, the parameter's name and the element's place in the whole parameter. So it is the
same however parameters are sharded, and a resumed run goes on with the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from slimefsdp.optim.buckets import bucket_elements, split_state

_SPREAD = 0x9E3779B1  # odd, 2^32 over the golden ratio
# two multipliers of a hash of 32 bits that leaves next to no bias (Wellons, https://github.com/skeeto/hash-prospector)
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True, slots=True, eq=False)
class RoundedState:
    """A parameter's local shards, each contiguous, and where they are in the whole."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor  # bfloat16
    exp_avg_sq: torch.Tensor  # bfloat16
    step: torch.Tensor  # a scalar, counted up
    name: str
    first_element: int  # of the shard, in the whole parameter as it lies in memory


@torch.no_grad()
def update_rounded(states: Sequence[RoundedState], *, seed: int, update: int, **settings: Any) -> None:
    """One step of AdamW; the weights take it before moments are rounded.

    Args:
        seed: of the run.
        update: the number of the update, counted from 0.
        settings: of torch's functional `adamw`.
    """
    if not states:
        return
    key = f"{seed} {update}"
    for bucket in _buckets(states, bucket_elements(states[0].parameter.device)):
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
    """Values as one of their two neighbours in bfloat16, in place; the one away from 0 for so much of all noise as
    they are on the way to it.

    Args:
        values: float32, finite.
        noise: int32 in [0, 2^16), of the same shape; evenly spread, it makes the mean right.
    """
    bits = values.view(torch.int32)
    bits.add_(noise).bitwise_and_(-0x10000)
    return values


def noise_of(pieces: Sequence[tuple[str, int, int]], key: str, like: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element, as int32.

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
    """The int32 that has the last 32 bits of a whole number."""
    return (value + 2**31) % 2**32 - 2**31


def _buckets(states: Sequence[RoundedState], most: int) -> Iterator[list[RoundedState]]:
    """All elements in flat pieces, so many at a time."""
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
