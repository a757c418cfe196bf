"""What an update takes at least, and which way of sharding, storing and recomputing is the fastest that fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from slimefsdp.batching.hardware import Rates
from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.activations import LayerActivations, Recompute, recomputed_head_share
from slimefsdp.perf_model.flops import Flops
from slimefsdp.perf_model.memory import (
    SHARDINGS,
    ByteSizes,
    Computing,
    Memory,
    MicroBatches,
    Sharding,
    gathered_parameters,
    memory_per_rank,
    sharding_traffic,
    step_memory,
)

# what an optimiser reads and writes of each parameter: gradient and parameter, and each state both ways
_PASSES_OVER_PARAMETERS = 3
_PASSES_OVER_STATES = 2
# what lies between products is written once and read once in backward, as much again for its gradients
_PASSES_OVER_ACTIVATIONS = 4
# an estimate is right within a tenth, and allocators keep more than is in use
HEADROOM = 0.9
RECOMPUTATIONS: tuple[tuple[Recompute, int], ...] = (("none", 1), ("selective", 1), ("full", 2), ("full", 1))


@dataclass(frozen=True, slots=True)
class ColocatedModels:
    """Models in the policy's processes, sharded as it is, and where they are while they are not used."""

    reference: ModelSpec | None = None
    reference_rests_on_host: bool = True
    reference_computes_from_host: bool = False  # reference.offload=fsdp
    reference_takes_policys_place: bool = False  # reference.offload=swap
    critic: ModelSpec | None = None
    critic_rests_on_host: bool = True

    @property
    def headless_critic(self) -> ModelSpec | None:
        """The critic as if its embedding were its head, since it has no other over the vocabulary."""
        return None if self.critic is None else replace(self.critic, is_tied=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """An update of a mesh: the model, what its ranks share, and what falls to the slowest of them."""

    model_spec: ModelSpec
    dp_replicate: int
    shard_ranks: int  # mesh.dp x mesh.cp
    sizes: ByteSizes
    batch: MicroBatches  # the largest of a rank
    needed: Flops  # of the mean rank: forward and backward, nothing twice
    forward: Flops  # forward alone
    tokens: float  # that the mean rank computes
    attention_bytes: int = 0  # sent by a rank, all layers, with nothing recomputed
    attention_bytes_again: int = 0  # sent once more, were all layers recomputed
    repeats: float = 1.0  # tokens of the samples over those that are computed, since some are shared
    longest: int = 1  # tokens of the longest sample
    slowdown: float = 1.0  # of the slowest rank against the mean one
    beside: ColocatedModels = field(default_factory=ColocatedModels)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train, and what it is estimated to take."""

    sharding: Sharding
    recompute: Recompute
    recompute_every: int
    offload_activations: bool
    cpu_offload: bool
    memory: Memory
    seconds: StepTime

    @property
    def settings(self) -> str:
        """As overrides of a command line."""
        text = f"fsdp.sharding={self.sharding} model.activation_checkpointing={self.recompute}"
        if self.recompute_every > 1:
            text += f" model.checkpoint_every_n_layers={self.recompute_every}"
        if self.offload_activations:
            text += " model.offload_activations=true"
        return text + (" fsdp.cpu_offload=true" if self.cpu_offload else "")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an update on a rank, by what they go to; nothing overlaps."""

    products: float  # with weights, the head's among them
    attention: float
    memory: float  # what is read and written between products, and by the optimiser
    comm: float
    host: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.comm + self.host


def step_time(work: Workload, rates: Rates, sharding: Sharding, computing: Computing) -> StepTime:
    """The floor of an update under one way to train.

    A head computes the logits again that it did not keep, attention multiplies queries and keys twice, and what is
    recomputed is computed again: whole, or under `selective` without matrix products and attention.
    """
    model, sizes = work.model_spec, work.sizes
    recomputed = computing.recomputed_share(model.layers)
    again = recomputed if computing.recompute == "full" else 0.0
    of_head = recomputed_head_share(model, wide=sizes.wide, rows=work.batch.rows, on_cpu=computing.on_cpu)
    products = work.needed.layers + work.needed.head + of_head * work.forward.head + again * work.forward.layers
    attention = work.needed.attention + (0.5 + again) * work.forward.attention
    adapters = computing.adapters_of(model)
    beside = 0 if adapters is None else adapters.parameters
    layer = LayerActivations.of_model(model, compute=sizes.compute, wide=sizes.wide, adapters=adapters)
    touched = layer.kept * model.layers * work.tokens * (_PASSES_OVER_ACTIVATIONS + recomputed)
    shards = 1 if sharding == "replicate" else work.shard_ranks
    of_model = model.parameters * computing.trained_share / shards
    trained = of_model + beside / shards
    in_layers = of_model * model.share_in_layers + beside / shards
    states = sizes.state_bytes(trained - in_layers, in_layers)
    of_optimizer = _PASSES_OVER_PARAMETERS * trained * sizes.master + _PASSES_OVER_STATES * states
    # of Muon, whose matrices are assigned to all ranks; adapters are too thin to count
    orthogonalizing = model.newton_schulz_flops(computing.newton_schulz_steps) * computing.trained_share
    orthogonalizing /= work.dp_replicate * work.shard_ranks
    sent = sharding_traffic(
        model,
        sharding,
        dp_replicate=work.dp_replicate,
        shard_ranks=work.shard_ranks,
        sizes=sizes,
        micro_batches=work.batch.count,
        trained_share=computing.trained_share,
        adapters=adapters,
    )
    touched += sent.copied
    to_host = 0.0
    if computing.cpu_offload:
        gathered = gathered_parameters(model, sharding, work.batch.count, adapters) / shards
        sums = 1 if sharding == "optimizer" else work.batch.count
        stored = sizes.master if adapters is None else sizes.compute
        to_host = gathered * stored + trained * sizes.master * sums
    if computing.offload_activations and not computing.on_cpu:  # there and back
        to_host += 2 * layer.stream * model.layers * work.tokens * recomputed
    attention_bytes = work.attention_bytes + work.attention_bytes_again * recomputed
    return StepTime(
        products=(work.slowdown * products + orthogonalizing) / (1e12 * rates.matrix_tflops),
        attention=work.slowdown * attention / (1e12 * rates.attention_tflops),
        memory=(touched + (0 if computing.cpu_offload else of_optimizer)) / (1e9 * rates.memory_gbps),
        comm=(sent.total + attention_bytes) / (1e9 * rates.comm_gbps),
        host=(to_host + (of_optimizer if computing.cpu_offload else 0)) / (1e9 * rates.host_gbps),
    )


@dataclass(frozen=True, slots=True)
class _Others:
    """Bytes of the models beside the policy, while none of them is at work."""

    reference: int
    critic: int
    shown: int  # of both, on the device while the policy trains; what a CPU calls its host is left out


def _others_at_rest(
    beside: ColocatedModels, sharding: Sharding, *, shard_ranks: int, sizes: ByteSizes, computing: Computing
) -> _Others:
    frozen, critics = replace(computing, trained_share=0.0, lora_rank=None), _of_critic(computing)
    reference = _at_rest(beside.reference, sharding, shard_ranks, sizes, frozen).total
    critic = _at_rest(beside.headless_critic, sharding, shard_ranks, sizes, critics).total
    is_read = computing.full_kl or not beside.reference_rests_on_host
    shown = (reference if is_read else 0) + (0 if beside.critic_rests_on_host else critic)
    # offloaded, all that is at rest is on the host
    return _Others(reference, critic, 0 if computing.cpu_offload and not computing.on_cpu else shown)


def _at_rest(
    model: ModelSpec | None, sharding: Sharding, shard_ranks: int, sizes: ByteSizes, computing: Computing
) -> Memory:
    if model is None:
        return Memory(0, 0, 0, 0)
    held = memory_per_rank(
        model,
        sharding,
        shard_ranks=shard_ranks,
        sizes=sizes,
        trained_share=computing.trained_share,
        adapters=computing.adapters_of(model),
    )
    return replace(held, unsharded=0, gradients=0)


def _of_critic(computing: Computing) -> Computing:
    """Nothing of a critic is frozen but what its adapters freeze."""
    return replace(computing, trained_share=1.0 if computing.lora_rank is None else 0.0)


def bytes_beside(
    beside: ColocatedModels, sharding: Sharding, *, shard_ranks: int, sizes: ByteSizes, computing: Computing
) -> int:
    """What the models beside a policy take of a rank's device while the policy trains; on a CPU, where they rest, too.

    Args:
        shard_ranks: that share a copy of each model.
    """
    found = _others_at_rest(beside, sharding, shard_ranks=shard_ranks, sizes=sizes, computing=computing)
    return found.reference + found.critic if computing.on_cpu else found.shown


def peak_memory(work: Workload, sharding: Sharding, computing: Computing) -> Memory:
    """The fullest moment of a rank: while the policy trains, the reference computes, or the critic trains."""
    beside, sizes = work.beside, work.sizes
    others = _others_at_rest(beside, sharding, shard_ranks=work.shard_ranks, sizes=sizes, computing=computing)
    reference, critic, shown = others.reference, others.critic, others.shown
    hidden = reference + critic - shown
    policy = _at_rest(work.model_spec, sharding, work.shard_ranks, sizes, computing)
    is_offloaded = computing.cpu_offload and not computing.on_cpu
    if is_offloaded:
        policy = Memory(0, 0, 0, 0, host=policy.total)
    training = _step_memory(work, work.model_spec, sharding, computing, work.batch)
    moments = [replace(training, others=shown, host=training.host + hidden)]
    if beside.reference is not None and beside.reference_rests_on_host and not computing.full_kl:
        awake = 0 if beside.reference_computes_from_host or is_offloaded else reference
        gathered = memory_per_rank(beside.reference, sharding, shard_ranks=work.shard_ranks, sizes=sizes).unsharded
        layer = LayerActivations.of_model(beside.reference, compute=sizes.compute, wide=sizes.wide)
        at_rest = Memory(0, 0, 0, 0, host=policy.total) if beside.reference_takes_policys_place else policy
        moments.append(
            replace(
                at_rest,
                others=shown + awake,
                host=at_rest.host + hidden - awake,
                unsharded=gathered,
                activations=layer.kept * work.batch.tokens,  # nothing is kept, but a layer is at work
            )
        )
    if (model := beside.headless_critic) is not None:
        # no gradient of logits is added to that of the tokens
        batch = replace(work.batch, rows=0)
        training = _step_memory(work, model, sharding, _of_critic(computing), batch)
        resting = hidden - (critic if beside.critic_rests_on_host or is_offloaded else 0)
        awake = policy.total + (0 if is_offloaded else reference - resting)
        moments.append(replace(training, others=awake, host=training.host + policy.host + resting))
    if computing.on_cpu:
        moments = [replace(moment, others=moment.others + moment.host, host=0) for moment in moments]
    return max(moments, key=lambda moment: moment.total)


def _step_memory(
    work: Workload, model: ModelSpec, sharding: Sharding, computing: Computing, batch: MicroBatches
) -> Memory:
    return step_memory(
        model,
        sharding,
        batch,
        shard_ranks=work.shard_ranks,
        copies=work.dp_replicate,
        sizes=work.sizes,
        computing=computing,
    )


def candidates(work: Workload, rates: Rates, computing: Computing, *, selective: bool = True) -> list[Candidate]:
    """Every way to train that is compared, the fastest first, and of equally fast ones the smallest.

    Args:
        computing: its recomputation and offload are what varies.
        selective: whether layers can be recomputed in part; compiled ones cannot.
    """
    found = []
    for sharding in SHARDINGS:
        for recompute, every in RECOMPUTATIONS:
            for cpu_offload in (False,) if computing.on_cpu else (False, True):
                how = replace(computing, recompute=recompute, recompute_every=every, cpu_offload=cpu_offload)
                how = replace(how, offload_activations=computing.offload_activations and recompute == "full")
                if selective or recompute != "selective":
                    found.append(candidate(work, rates, sharding, how))
    return sorted(found, key=lambda one: (one.seconds.total, one.memory.total))


def candidate(work: Workload, rates: Rates, sharding: Sharding, computing: Computing) -> Candidate:
    """One way to train, estimated."""
    return Candidate(
        sharding,
        computing.recompute,
        computing.recompute_every,
        computing.offload_activations,
        computing.cpu_offload,
        peak_memory(work, sharding, computing),
        step_time(work, rates, sharding, computing),
    )


def fits(memory: Memory, memory_bytes: int) -> bool:
    """Whether an estimate leaves what it may be wrong by."""
    return memory.total <= HEADROOM * memory_bytes


def most_tokens_that_fit(work: Workload, computing: Computing, memory_bytes: int) -> int:
    """Tokens of a micro-batch on one rank that fit with some way to train; 0: not one."""

    def does(tokens: int) -> bool:
        return _some_way_fits(with_cap(work, tokens), computing, memory_bytes)

    low, high = 0, work.batch.tokens  # does(low), not does(high)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low


def with_cap(work: Workload, tokens: int) -> Workload:
    """The same update in smaller micro-batches, of so many tokens and as many more of them."""
    batch = work.batch
    rows = max(1, round(tokens * batch.rows / batch.tokens))
    return replace(work, batch=MicroBatches(tokens, rows, -(-batch.count * batch.tokens // tokens)))


def fewest_shard_ranks_that_fit(work: Workload, computing: Computing, memory_bytes: int, *, most: int) -> int | None:
    """Ranks that share a copy of the model, today's number times a power of two; None: not with `most` of them."""
    ranks = work.shard_ranks
    while ranks <= most:
        if _some_way_fits(replace(work, shard_ranks=ranks), computing, memory_bytes):
            return ranks
        ranks *= 2
    return None


def _some_way_fits(work: Workload, computing: Computing, memory_bytes: int) -> bool:
    """Whether one of `candidates` does; those that recompute every layer hold least."""
    return any(
        fits(peak_memory(work, sharding, replace(how, cpu_offload=offload)), memory_bytes)
        for how in (replace(computing, recompute="full", recompute_every=1),)
        for sharding in SHARDINGS
        for offload in ((False,) if computing.on_cpu else (False, True))
    )
