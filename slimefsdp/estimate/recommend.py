"""Estimates the time of an update, recommends the fastest setup that fits, and finds the longest sample that fits.

The compared setups vary the sharding, recomputation and offloading of one setup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from slimefsdp.errors import ResourceError, byte_text
from slimefsdp.estimate.flops import executed_flops
from slimefsdp.estimate.hardware import HEADROOM, Device, Rates, fits
from slimefsdp.estimate.memory import LayerActivations, Memory, MicroBatches, peak_memory, recomputed_head_share
from slimefsdp.estimate.schedule import Schedule
from slimefsdp.estimate.setup import Recompute, TrainingSetup
from slimefsdp.estimate.traffic import copied_token_bytes, gathered_parameters, sharding_traffic, shared_layer_bytes

_RECOMPUTATIONS: tuple[Recompute, ...] = ("none", "selective", "full")
_MOST_RANKS = 8192  # largest mesh that is considered
MOST_TOKENS = 2**27  # longest sample that is considered
# an optimiser reads each gradient, and reads and writes each parameter and each state
_PASSES_OVER_PARAMETERS = 3
_PASSES_OVER_STATES = 2
# activations are written in forward and read in backward; their gradients are written and read in backward
_PASSES_OVER_ACTIVATIONS = 4


@dataclass(frozen=True, slots=True)
class StepTime:
    """Holds the seconds of an update on a rank by activity."""

    products: float  # matrix products with weights, including the head's
    attention: float
    memory: float  # reads and writes of activations, parameters and optimiser state
    comm: float
    host: float  # copies between device and host

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.comm + self.host


def step_time(setup: TrainingSetup, schedule: Schedule, rates: Rates) -> StepTime:
    """Returns a lower bound on the time of an update.

    With recomputation `full`, layers are computed again as a whole; with `selective`, all but products and attention.
    """
    model, sizes, ranks = setup.model, setup.sizes, setup.mesh.ranks
    slowdown = schedule.imbalance.micro_batches  # time of the slowest rank / mean time
    micro_batches, tokens = schedule.largest.count, schedule.computed_tokens / len(schedule.updates) / ranks
    recomputed, layer = setup.recomputed_share, LayerActivations.of(setup)
    executed = executed_flops(
        schedule.needed_flops.over(ranks),
        schedule.forward_flops.over(ranks),
        recomputed_layers=recomputed if setup.recompute in ("full", "offload") else 0.0,
        recomputed_head=recomputed_head_share(setup, schedule.largest.rows),
    )
    # Muon distributes matrices over all ranks; the cost of its iterations on adapters is negligible
    muon = model.newton_schulz_flops(setup.newton_schulz_steps) * setup.trained_share / ranks
    model_parameters, adapters = (
        model.parameters * setup.trained_share / setup.shards,
        setup.adapter_parameters / setup.shards,
    )
    trained, in_layers = model_parameters + adapters, model_parameters * model.share_in_layers + adapters
    states = sizes.state_bytes(trained - in_layers, in_layers)
    optimizer = _PASSES_OVER_PARAMETERS * trained * sizes.master + _PASSES_OVER_STATES * states
    sharding = sharding_traffic(setup, micro_batches)
    touched = layer.kept * model.layers * tokens * (_PASSES_OVER_ACTIVATIONS + recomputed) + sharding.copied
    touched += copied_token_bytes(setup, tokens)
    to_host = 0.0
    if setup.cpu_offload:
        stored = sizes.master if setup.adapters is None else sizes.compute
        sums = 1 if setup.sharding == "optimizer" else micro_batches
        to_host = gathered_parameters(setup, micro_batches) / setup.shards * stored + trained * sizes.master * sums
        to_host += optimizer
    else:
        touched += optimizer
    if setup.inputs_on_host:  # copies to the host and back
        to_host += 2 * layer.stream * model.layers * tokens * recomputed
    return StepTime(
        products=(slowdown * (executed.layers + executed.head) + muon) / (1e12 * rates.matrix_tflops),
        attention=slowdown * executed.attention / (1e12 * rates.attention_tflops),
        memory=touched / (1e9 * rates.memory_gbps),
        comm=(
            sharding.total + schedule.attention_bytes_per_rank(setup) + sum(shared_layer_bytes(setup, tokens).values())
        )
        / (1e9 * rates.comm_gbps),
        host=to_host / (1e9 * rates.host_gbps),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    setup: TrainingSetup
    memory: Memory
    seconds: StepTime

    @classmethod
    def of(cls, setup: TrainingSetup, schedule: Schedule, rates: Rates) -> Candidate:
        return cls(setup, peak_memory(setup, schedule.largest), step_time(setup, schedule, rates))

    def tokens_per_second(self, schedule: Schedule) -> float:
        """Returns the throughput of all ranks; the tokens of a shared prefix count in each of its samples."""
        return schedule.tokens / len(schedule.updates) / self.seconds.total

    def mfu(self, schedule: Schedule, rates: Rates) -> float:
        """Returns the model FLOPs utilisation of a rank, relative to `rates.matrix_tflops`."""
        needed = schedule.needed_flops.total / self.setup.mesh.ranks
        return needed / (self.seconds.total * rates.matrix_tflops * 1e12)


@dataclass(frozen=True, slots=True)
class Recommendation:
    chosen: Candidate
    candidates: tuple[Candidate, ...]  # fastest first
    recommended: Candidate | None  # None means that nothing fits
    advice: str


def recommend(setup: TrainingSetup, schedule: Schedule, device: Device, *, selective: bool = True) -> Recommendation:
    """Compares setups that differ in sharding, recomputation and offloading; recommends the fastest that fits.

    Args:
        selective: whether selective recomputation is possible; compiled layers do not support it.

    Raises:
        ResourceError: no setup fits the memory that a flag gives; the hint names changes that would make one fit.
    """
    chosen = Candidate.of(setup, schedule, device.rates)
    compared = [
        Candidate.of(way, schedule, device.rates)
        for way in _ways_to_train(setup, _RECOMPUTATIONS)
        if selective or way.recompute != "selective"
    ]
    compared.sort(key=lambda candidate: (candidate.seconds.total, candidate.memory.total))
    recommended = next((candidate for candidate in compared if device.has_room(candidate.memory.total)), None)
    if recommended is not None:
        return Recommendation(chosen, tuple(compared), recommended, _advice(chosen, recommended, device))
    assert device.memory_bytes is not None
    least = min(candidate.memory.total for candidate in compared)
    problem = (
        f"no way to train fits {byte_text(device.memory_bytes)} a rank: the smallest is estimated at "
        f"{byte_text(least)}, and a tenth is left free"
    )
    ways_out = _ways_out(setup, schedule, device.memory_bytes, least)
    if device.named_by is not None:
        raise ResourceError(problem, field=device.named_by, hint=ways_out)
    return Recommendation(chosen, tuple(compared), None, f"{problem}; {ways_out}")


def _ways_to_train(setup: TrainingSetup, recomputations: tuple[Recompute, ...]) -> Iterator[TrainingSetup]:
    """Yields every combination of sharding, recomputation, and, unless on a CPU, states on device or host."""
    for sharding in setup.shardings:
        for recompute in recomputations:
            if recompute == "full" and setup.recompute == "offload":
                recompute = "offload"
            for offload in (False,) if setup.on_cpu else (False, True):
                yield replace(setup, sharding=sharding, recompute=recompute, cpu_offload=offload)


def _advice(chosen: Candidate, recommended: Candidate, device: Device) -> str:
    room = "" if device.memory_bytes is None else f" of those that fit {byte_text(device.memory_bytes)}"
    if chosen.setup.settings == recommended.setup.settings:
        return f"recommended: keep the settings, which are estimated to be the fastest{room}"
    why = f"recommended: {recommended.setup.settings} (estimated to be the fastest{room}"
    if not device.has_room(chosen.memory.total):
        return f"{why}; the present settings do not fit)"
    return f"{why}, {chosen.seconds.total / recommended.seconds.total:.2f} times as fast as the present ones)"


def _ways_out(setup: TrainingSetup, schedule: Schedule, memory_bytes: int, least_bytes: int) -> str:
    """Returns a text with changes that would make the run fit, according to the estimate.

    Args:
        least_bytes: the least memory that any of the compared setups needs.
    """
    cp, batch = setup.mesh.cp, schedule.largest
    ways = []
    shortest_cap = -(-schedule.longest // cp)
    tokens = largest(lambda cap: _some_way_fits(setup, with_cap(batch, cap), memory_bytes), batch.tokens - 1)
    if tokens >= shortest_cap:
        ways.append(f"lower batch.max_tokens_per_rank to {tokens}")
    if (dp := fewest_data_ranks(setup, batch, memory_bytes)) is not None:
        ways.append(f"raise mesh.dp to {dp}")
    if not ways and shortest_cap < batch.tokens:
        dp = fewest_data_ranks(setup, with_cap(batch, shortest_cap), memory_bytes)
        if dp is not None:
            ways.append(f"lower batch.max_tokens_per_rank to {shortest_cap} and raise mesh.dp to {dp}")
    ways.append(f"take devices of {byte_text(math.ceil(least_bytes / HEADROOM), round_up=True)}")
    return ", or ".join(ways)


def with_cap(batch: MicroBatches, tokens: int) -> MicroBatches:
    """Returns the same update, divided into micro-batches of `tokens` tokens each."""
    rows = max(1, round(tokens * batch.rows / batch.tokens))
    return MicroBatches(tokens, rows, -(-batch.count * batch.tokens // tokens))


def fewest_data_ranks(setup: TrainingSetup, batch: MicroBatches, memory_bytes: int) -> int | None:
    """Returns the smallest mesh.dp, a power of two times the current one, with which a compared setup fits, or None."""
    mesh = setup.mesh
    while mesh.shard_ranks <= _MOST_RANKS:
        if _some_way_fits(replace(setup, mesh=mesh), batch, memory_bytes):
            return mesh.dp
        mesh = replace(mesh, dp=2 * mesh.dp)
    return None


def _some_way_fits(setup: TrainingSetup, batch: MicroBatches, memory_bytes: int) -> bool:
    """Returns whether a compared setup fits; tries only setups that recompute every layer, since these need least."""
    ways = _ways_to_train(setup, ("full",))
    return any(fits(peak_memory(way, batch).total, memory_bytes) for way in ways)


def largest(does: Callable[[int], bool], most: int) -> int:
    """Returns the largest number in [1, most] for which the monotone predicate `does` is true; 0 if there is none."""
    low, high = 0, most + 1  # invariant: does(low), not does(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class LongestContext:
    """Holds a setup, and the longest sample whose training fits the memory."""

    setup: TrainingSetup
    tokens: int  # length of the sample; 0 if none fits
    memory: Memory  # a rank's peak memory with a sample of this length

    @property
    def attention_workspace(self) -> int:
        """Returns the bytes that flash attention's backward allocates: float32 gradients of queries, and sums per head.

        Memory estimates do not include these bytes, so they must fit into the memory that stays free.
        """
        model = self.setup.model
        return -(-self.tokens // self.setup.mesh.cp) * model.heads * (model.head_dim + 1) * 4


def longest_contexts(
    setup: TrainingSetup, memory_bytes: int, *, counted_share: float = 1.0, most_tokens: int = MOST_TOKENS
) -> list[LongestContext]:
    """Returns the longest sample under the setup, and under each other setting for activations and states.

    Args:
        memory_bytes: memory of a rank's device, of which a tenth stays free.
        counted_share: share of a sample's tokens whose log-probs are computed.
        most_tokens: upper limit, such as the number of learned positions of the model.
    """
    ways = [setup]
    for offload in (False,) if setup.on_cpu else (False, True):
        stored = replace(setup, cpu_offload=offload)
        ways += [replace(stored, recompute="none"), replace(stored, recompute="full")]
        if not setup.on_cpu:
            ways.append(replace(stored, recompute="offload"))
    contexts = []
    for way in dict.fromkeys(ways):

        def memory_with(tokens: int, way: TrainingSetup = way) -> Memory:
            return memory_of_context(way, tokens, counted_share)

        tokens = largest(lambda tokens: fits(memory_with(tokens).total, memory_bytes), most_tokens)
        contexts.append(LongestContext(way, tokens, memory_with(max(tokens, setup.mesh.cp))))
    return contexts


def memory_of_context(setup: TrainingSetup, tokens: int, counted_share: float = 1.0) -> Memory:
    """Returns the peak memory of an update whose micro-batches are one sample of `tokens` tokens each."""
    local = -(-tokens // setup.mesh.cp)
    return peak_memory(setup, MicroBatches(local, rows=max(1, round(local * counted_share)), count=2))


def as_record(memory: Memory) -> dict[str, int]:
    return asdict(memory) | {"total": memory.total}
