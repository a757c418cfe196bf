"""What `slimefsdp plan` says of memory and time: how the settings do, and which others would do better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from slimefsdp.attention.select import AttentionShape, serving_strategies
from slimefsdp.batching.cost import Strategy
from slimefsdp.batching.hardware import Rates
from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError, byte_text
from slimefsdp.perf_model.memory import SHARDINGS, Computing, Memory, Sharding
from slimefsdp.perf_model.simulate import Simulation
from slimefsdp.perf_model.step_time import (
    HEADROOM,
    Candidate,
    Workload,
    candidate,
    candidates,
    fewest_shard_ranks_that_fit,
    fits,
    most_tokens_that_fit,
    peak_memory,
    with_cap,
)

_MOST_RANKS = 8192  # that are looked at for a mesh that fits


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of the device of a rank."""

    rates: Rates
    memory_bytes: int | None  # None: no limit is known
    said_by: str | None  # the flag that named the memory; None: it is a guess
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Outlook:
    """Estimates of an update."""

    work: Workload
    rates: Rates
    memory_bytes: int | None
    memory: dict[Sharding, Memory]  # the other settings as they are
    chosen: Candidate  # the settings
    candidates: tuple[Candidate, ...]  # the fastest first
    recommended: Candidate | None  # None: nothing fits
    advice: str

    def has_room(self, one: Candidate) -> bool:
        """Whether it fits, as far as a limit is known."""
        return self.memory_bytes is None or fits(one.memory, self.memory_bytes)

    def tokens_per_second(self, one: Candidate) -> float:
        """Of all ranks, at the floor; shared ones as often as they occur."""
        work = self.work
        return work.tokens * work.repeats * work.dp_replicate * work.shard_ranks / one.seconds.total

    def mfu(self, one: Candidate) -> float:
        """Operations that the update needs over those that the rate in products allows in the floor's time."""
        return self.work.needed.total / (one.seconds.total * self.rates.matrix_tflops * 1e12)

    def to_json(self) -> dict[str, Any]:
        """The part of `--json` under `estimate`."""
        return {
            "rates": asdict(self.rates),
            "memory_bytes": self.memory_bytes,
            "tokens_per_micro_batch": self.work.batch.tokens,
            "chosen": self._record(self.chosen),
            "recommended": None if self.recommended is None else self._record(self.recommended),
            "advice": self.advice,
            "candidates": [self._record(one) for one in self.candidates],
        }

    def _record(self, one: Candidate) -> dict[str, Any]:
        return {
            "settings": one.settings,
            "memory": as_record(one.memory),
            "seconds": asdict(one.seconds) | {"total": one.seconds.total},
            "fits": self.has_room(one),
            "tokens_per_second": self.tokens_per_second(one),
            "mfu": self.mfu(one),
        }


def as_record(memory: Memory) -> dict[str, int]:
    """Its fields and their sum on the device."""
    return asdict(memory) | {"total": memory.total}


def look_ahead(work: Workload, computing: Computing, device: Device, config: RunConfig) -> Outlook:
    """Estimates of these settings and of others.

    Raises:
        ResourceError: nothing fits the memory that a flag named; says what would.
    """
    assert config.fsdp.sharding in SHARDINGS
    chosen = candidate(work, device.rates, config.fsdp.sharding, computing)
    compared = candidates(work, device.rates, computing, selective=not config.model.compile)
    limit = device.memory_bytes
    fitting = [one for one in compared if limit is None or fits(one.memory, limit)]
    recommended = fitting[0] if fitting else None
    if recommended is None:
        assert limit is not None
        least = min(one.memory.total for one in compared)
        ways = _ways_out(work, computing, limit, least, config)
        said = (
            f"no way to train fits {byte_text(limit)} a rank: the smallest is estimated at {byte_text(least)}, "
            "and a tenth is left free"
        )
        if device.said_by is not None:
            raise ResourceError(said, field=device.said_by, hint=ways)
        advice = f"{said}; {ways}"
    else:
        advice = _advice(chosen, recommended, limit)
    levels = {level: peak_memory(work, level, computing) for level in SHARDINGS}
    return Outlook(work, device.rates, limit, levels, chosen, tuple(compared), recommended, advice)


def _advice(chosen: Candidate, recommended: Candidate, limit: int | None) -> str:
    room = "" if limit is None else f" that fits {byte_text(limit)}"
    if chosen.settings == recommended.settings:
        return f"recommended: as it is set, which is the fastest{room} by the estimate"
    why = f"the fastest{room} by the estimate"
    if limit is not None and not fits(chosen.memory, limit):
        return f"recommended: {recommended.settings}: {why}; what is set does not fit"
    gain = chosen.seconds.total / recommended.seconds.total
    return f"recommended: {recommended.settings}: {why}, {gain:.2f}x what is set"


def lightest_strategy(found: Simulation, shape: AttentionShape) -> Strategy:
    """The strategy that sends least for these samples, forward and backward, of those that can serve the model."""
    sent = {name: comm.total for name in serving_strategies(shape, found.mesh.cp) if (comm := found.comm[name])}
    # of equals the one that is taken
    return min(sent, key=lambda name: (sent[name], name != found.strategy))


def _ways_out(work: Workload, computing: Computing, limit: int, least_held: int, config: RunConfig) -> str:
    """What to change, in numbers that the estimate says fit.

    Args:
        least_held: bytes of the smallest way to train.
    """
    cp = config.mesh.cp
    ways = []
    shortest_cap = -(-work.longest // cp)
    tokens = most_tokens_that_fit(work, computing, limit)
    if tokens >= shortest_cap:
        ways.append(f"lower batch.max_tokens_per_rank to {tokens}")
    ranks = fewest_shard_ranks_that_fit(work, computing, limit, most=_MOST_RANKS)
    if ranks is not None:
        ways.append(f"raise mesh.dp to {ranks // cp}")
    if not ways and shortest_cap < work.batch.tokens:
        ranks = fewest_shard_ranks_that_fit(with_cap(work, shortest_cap), computing, limit, most=_MOST_RANKS)
        if ranks is not None:
            ways.append(f"lower batch.max_tokens_per_rank to {shortest_cap} and raise mesh.dp to {ranks // cp}")
    ways.append(f"take devices of {byte_text(math.ceil(least_held / HEADROOM), round_up=True)}")
    return ", or ".join(ways)
