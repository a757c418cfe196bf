"""What a rank holds and sends: the sharded model at rest and at the fullest moment of a step, in bytes.

Counted from the model's dimensions alone. Backends may pad what does not divide; what they allocate inside of kernels,
and what allocators keep beside what is in use, is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from slimefsdp.model_spec import Adapters, ModelSpec
from slimefsdp.perf_model.activations import HeadActivations, LayerActivations, Recompute, is_recomputed, kept_between

Sharding = Literal["full", "keep_parameters", "optimizer", "replicate"]
SHARDINGS: tuple[Sharding, ...] = ("full", "keep_parameters", "optimizer", "replicate")


@dataclass(frozen=True, slots=True)
class ByteSizes:
    """Bytes per element of what a training rank holds and sends."""

    compute: int = 2  # parameters and activations in forward and backward
    master: int = 4  # parameters, gradients and optimiser state at rest
    reduce: int = 4  # gradients while they are summed over ranks
    optimizer_states: int = 2  # tensors as large as the parameters: 2 in AdamW, 1 with momentum alone
    matrix_states: int | None = None  # of the layers' matrices and adapters; None: as of all others
    state: float | None = None  # of an element of these; None: master

    def state_bytes(self, others: float, matrices: float) -> float:
        """Of the optimiser's state of so many trained parameters, of which some are in matrices of the layers."""
        of_matrices = self.optimizer_states if self.matrix_states is None else self.matrix_states
        element = self.master if self.state is None else self.state
        return element * (others * self.optimizer_states + matrices * of_matrices)

    @property
    def wide(self) -> int:
        """What norms, softmaxes and the accumulators of attention's gradients are in."""
        return max(4, self.compute)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at one moment."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int  # parameters gathered in the compute dtype, and their gradients before they are summed
    activations: int = 0  # of decoder layers
    head: int = 0  # logits of a chunk, its hidden rows, the gradient of its weight
    buffers: int = 0  # of collectives and of the optimiser
    others: int = 0  # reference and critic beside the policy
    host: int = 0  # further bytes, in the memory of the machine: what offloading and sleep put there

    @property
    def total(self) -> int:
        """On the device."""
        at_rest = self.parameters + self.gradients + self.optimizer + self.others
        return at_rest + self.unsharded + self.activations + self.head + self.buffers


@dataclass(frozen=True, slots=True)
class ShardingTraffic:
    """Bytes that one rank sends."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int
    copied: int = 0  # read and written on the device to gather parameters and to sum gradients

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce


@dataclass(frozen=True, slots=True)
class Computing:
    """How a rank computes, as far as its memory depends on it; the settings of the same names as values."""

    recompute: Recompute = "none"
    recompute_every: int = 1
    is_optimizer_fused: bool = False
    cpu_offload: bool = False
    trained_share: float = 1.0  # of the model's parameters: what has gradients and optimiser state
    lora_rank: int | None = None  # then these are adapters alone, and no share of the model's
    lora_targets: Sequence[str] = ("attention", "mlp")
    entropy_grad: bool = False
    full_kl: bool = False
    newton_schulz_steps: int = 0  # of Muon; 0: another optimiser
    on_cpu: bool = False  # gloo copies what it sends, and memory of the host is the device's
    offload_activations: bool = False  # inputs of recomputed layers wait on the host, under `full`

    def adapters_of(self, model_spec: ModelSpec) -> Adapters | None:
        """What is trained beside a model; None: all of it, or `trained_share`."""
        return None if self.lora_rank is None else model_spec.adapters(self.lora_rank, self.lora_targets)

    def recomputed_share(self, layers: int) -> float:
        """Of so many layers, whose forward runs, and sends, once more in backward."""
        return 0.0 if self.recompute == "none" else -(-layers // self.recompute_every) / layers


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The largest micro-batch of a rank, and how many an update has."""

    tokens: int
    rows: int  # that the head projects, among the tokens
    count: int = 1


def memory_per_rank(
    model_spec: ModelSpec,
    sharding: Sharding,
    *,
    shard_ranks: int,
    sizes: ByteSizes,
    trained_share: float = 1.0,
    adapters: Adapters | None = None,
) -> Memory:
    """What a rank holds without activations.

    Args:
        shard_ranks: ranks that share one copy of the model, mesh.dp x mesh.cp; `replicate` shares nothing.
        trained_share: of the model's parameters: the others have neither gradients nor optimiser state.
        adapters: are trained, too; beside them the model is stored in the dtype that it computes in.
    """
    shards, beside = 1 if sharding == "replicate" else shard_ranks, 0 if adapters is None else adapters.parameters
    held, held_beside = -(-model_spec.parameters // shards), -(-beside // shards)
    trained = round(held * trained_share) + held_beside
    in_layers = round((trained - held_beside) * model_spec.share_in_layers) + held_beside
    # the root stays whole from forward to backward; beside it one layer at a time, or everything
    layer = model_spec.layer_parameters + beside // model_spec.layers
    gathered = model_spec.root_parameters + max(layer, model_spec.embedding_unit_parameters)
    if sharding in ("keep_parameters", "optimizer"):
        gathered = model_spec.parameters + beside
    whole_gradients = 0
    if sharding == "optimizer":
        whole_gradients = (round(model_spec.parameters * trained_share) + beside) * sizes.reduce
    return Memory(
        parameters=held * (sizes.master if adapters is None else sizes.compute) + held_beside * sizes.master,
        gradients=trained * sizes.master,
        optimizer=round(sizes.state_bytes(trained - in_layers, in_layers)),
        unsharded=min(gathered, model_spec.parameters + beside) * sizes.compute + whole_gradients,
    )


def step_memory(
    model_spec: ModelSpec,
    sharding: Sharding,
    batch: MicroBatches,
    *,
    shard_ranks: int,
    copies: int = 1,
    sizes: ByteSizes,
    computing: Computing | None = None,
) -> Memory:
    """The fullest moment of an update.

    Args:
        shard_ranks: as `memory_per_rank`.
        copies: of the model that shards, mesh.dp_replicate.
    """
    step = _Step(model_spec, sharding, batch, shard_ranks, copies, sizes, computing or Computing())
    fullest = max(step.moments(), key=lambda moment: moment.total)
    fullest = replace(fullest, host=step.on_host)
    if not step.computing.cpu_offload or step.computing.on_cpu:
        return fullest
    moved = fullest.parameters + fullest.gradients + fullest.optimizer
    return replace(fullest, parameters=0, gradients=0, optimizer=0, host=fullest.host + moved)


@dataclass(frozen=True)
class _Step:
    """The moments of a step at which memory may be fullest."""

    model_spec: ModelSpec
    sharding: Sharding
    batch: MicroBatches
    shard_ranks: int
    copies: int
    sizes: ByteSizes
    computing: Computing

    def moments(self) -> Iterator[Memory]:
        """Memory in the head, in the backward of the last layers, at the embedding, in the optimiser."""
        model, sizes, how = self.model_spec, self.sizes, self.computing
        at_rest = memory_per_rank(
            model,
            self.sharding,
            shard_ranks=self._shards,
            sizes=sizes,
            trained_share=how.trained_share,
            adapters=self._adapters,
        )
        at_rest = replace(at_rest, unsharded=0)
        before = at_rest  # what earlier micro-batches left
        if self.batch.count == 1:
            before = replace(at_rest, gradients=0)
        elif self.sharding == "optimizer":
            trained = round(model.parameters * how.trained_share) + self._adapter_parameters
            before = replace(at_rest, gradients=0, unsharded=trained * sizes.reduce)
        layer = LayerActivations.of_model(model, compute=sizes.compute, wide=sizes.wide, adapters=self._adapters)
        kept = self._kept_between(layer, model.layers)
        yield from self._in_head(before, kept)
        yield from self._in_layers(before, layer)
        yield from self._at_embedding(at_rest if before.gradients else replace(before, gradients=at_rest.gradients))
        in_optimizer = 0 if how.is_optimizer_fused else at_rest.gradients
        yield replace(at_rest, buffers=0 if how.cpu_offload and not how.on_cpu else in_optimizer)

    def _in_head(self, before: Memory, kept: int) -> Iterator[Memory]:
        head = self._head()
        in_flight = self._unit(self.sizes.compute) if self._is_gathered_by_message else 0
        state = replace(before, unsharded=before.unsharded + self._gathered(0), activations=kept)
        yield replace(state, head=head.kept + head.forward, buffers=in_flight)
        yield replace(state, head=head.kept + head.backward, buffers=0 if self._is_kept_whole else in_flight)

    def _in_layers(self, before: Memory, layer: LayerActivations) -> Iterator[Memory]:
        """The backward of the last layers: in its MLP, in its attention, and when its gradients are summed."""
        model, sizes, how, tokens = self.model_spec, self.sizes, self.computing, self.batch.tokens
        trained = how.trained_share
        unit, unit_reduced = self._unit(sizes.compute), self._unit_gradients(sizes.reduce)
        head_gradient = round(model.embedding_parameters * sizes.compute * trained)
        of_down = round(model.hidden * model.intermediate * sizes.compute * trained)
        of_others = self._unit_gradients(sizes.compute) - round(
            model.attention_parameters * sizes.compute * 3 / 4 * trained
        )
        # where layers differ in what they keep, the first that is recomputed is among these
        for behind in range(min(1 + how.recompute_every, model.layers)):  # layers whose backward is over
            at_work = model.layers - 1 - behind
            below = self._kept_between(layer, at_work)
            if is_recomputed(at_work, how.recompute, how.recompute_every) and not layer.is_stream_kept:
                below += layer.stream * tokens
            # one layer ahead is being gathered, one behind still being summed
            ahead = 0
            if self._is_gathered_by_message and not self._is_kept_whole and behind < model.layers - 1:
                ahead = unit * (2 if how.on_cpu and not behind else 1)
            added_up = max(0, before.unsharded - behind * unit_reduced)  # the last micro-batch sums layer by layer
            whole = added_up + self._gathered(unit, behind) + head_gradient
            state = replace(before, buffers=ahead + (unit_reduced * self._reduce_buffers if behind else 0))
            yield replace(
                state,
                unsharded=whole + of_down,
                activations=below + (layer.kept + layer.mlp_backward) * tokens + layer.sums + layer.sums_backward,
            )
            in_attention = layer.norms // 2 + layer.attention + layer.attention_backward
            yield replace(state, unsharded=whole + of_others, activations=below + in_attention * tokens)
            yield replace(
                state,
                unsharded=whole - unit + self._unit_gradients(sizes.compute),
                activations=below + layer.stream * tokens,
                buffers=unit_reduced * self._reduce_buffers + (unit if ahead else 0),
            )

    def _at_embedding(self, before: Memory) -> Iterator[Memory]:
        """The last gradients of a micro-batch: those of the head and of the embedding, which a tied weight adds up."""
        model, sizes, trained = self.model_spec, self.sizes, self.computing.trained_share
        size = round(model.embedding_parameters * trained)
        stream = self.batch.tokens * model.hidden * sizes.compute
        untied = model.embedding_unit_parameters * sizes.compute
        # where gradients add up over micro-batches, nothing is freed before the last of them
        freed = 0 if before.unsharded else model.layers
        whole = before.unsharded + self._gathered(0, freed) + untied
        yield replace(before, unsharded=whole + 2 * size * sizes.compute, activations=stream)
        of_layers = model.layers * self._unit_gradients(sizes.reduce)
        gradients = size * sizes.compute * (1 if model.is_tied else 2)
        yield replace(
            before,
            unsharded=max(0, before.unsharded - of_layers) + untied + gradients,
            buffers=size * sizes.reduce * max(1, self._reduce_buffers),
        )

    def _head(self) -> HeadActivations:
        how = self.computing
        return HeadActivations.of_model(
            self.model_spec,
            compute=self.sizes.compute,
            wide=self.sizes.wide,
            tokens=self.batch.tokens,
            rows=self.batch.rows,
            entropy_grad=how.entropy_grad,
            full_kl=how.full_kl,
            is_frozen=how.lora_rank is not None,
            on_cpu=how.on_cpu,
        )

    def _kept_between(self, layer: LayerActivations, layers: int) -> int:
        """Bytes on the device that the first so many layers keep between their forward and their backward."""
        how = self.computing
        kept = kept_between(layer, layers, self.batch.tokens, how.recompute, how.recompute_every)
        return kept - self._offloaded(layers)

    @property
    def on_host(self) -> int:
        """Bytes of layers' inputs in the host's memory at the end of a forward."""
        return self._offloaded(self.model_spec.layers)

    def _offloaded(self, layers: int) -> int:
        how, stream = self.computing, self.model_spec.hidden * self.sizes.compute
        if not how.offload_activations or how.on_cpu:
            return 0
        recomputed = sum(is_recomputed(index, how.recompute, how.recompute_every) for index in range(layers))
        return self.batch.tokens * recomputed * stream

    @cached_property
    def _adapters(self) -> Adapters | None:
        return self.computing.adapters_of(self.model_spec)

    @property
    def _adapter_parameters(self) -> int:
        return 0 if self._adapters is None else self._adapters.parameters

    @property
    def _shards(self) -> int:
        return 1 if self.sharding == "replicate" else self.shard_ranks

    @property
    def _is_kept_whole(self) -> bool:
        """Whether parameters stay gathered from forward to backward."""
        return self.sharding in ("keep_parameters", "optimizer")

    @property
    def _is_gathered_by_message(self) -> bool:
        """Whether gathered bytes arrive in a buffer of their own; a rank alone copies its shard."""
        return self._shards > 1

    @property
    def _reduce_buffers(self) -> int:
        """Buffers as large as a unit that summing its gradients takes."""
        if self._shards > 1:
            return (2 if self.computing.on_cpu else 1) + (self.copies > 1)
        return 2 if self.copies * self.shard_ranks > 1 else 1

    def _unit(self, element_bytes: int) -> int:
        return (self.model_spec.layer_parameters + self._adapter_parameters // self.model_spec.layers) * element_bytes

    def _unit_gradients(self, element_bytes: int) -> int:
        trained = round(self.model_spec.layer_parameters * self.computing.trained_share)
        return (trained + self._adapter_parameters // self.model_spec.layers) * element_bytes

    def _gathered(self, of_layers: int, behind: int = 0) -> int:
        """Bytes of parameters that are whole.

        Args:
            of_layers: bytes of the layers at work, where layers are gathered one by one.
            behind: layers that backward is done with.
        """
        root = self.model_spec.root_parameters * self.sizes.compute
        if not self._is_kept_whole:
            return root + of_layers
        return root + (self.model_spec.layers - behind) * self._unit(self.sizes.compute)


def gathered_parameters(
    model_spec: ModelSpec, sharding: Sharding, micro_batches: float, adapters: Adapters | None = None
) -> float:
    """Parameters that a rank makes whole in an update, those of adapters too, counted as often as they are.

    In forward and, but for the root's, again in backward; `keep_parameters` once a micro-batch, `optimizer` once.
    """
    parameters = model_spec.parameters + (0 if adapters is None else adapters.parameters)
    if sharding == "optimizer":
        return float(parameters)
    each = parameters * (1 if sharding == "keep_parameters" else 2)
    return micro_batches * (each if sharding == "keep_parameters" else each - model_spec.root_parameters)


def sharding_traffic(
    model_spec: ModelSpec,
    sharding: Sharding,
    *,
    dp_replicate: int,
    shard_ranks: int,
    sizes: ByteSizes,
    micro_batches: float = 1,
    trained_share: float = 1.0,
    adapters: Adapters | None = None,
) -> ShardingTraffic:
    """What a rank sends for the forward and backward of an update's micro-batches, by ring collectives.

    Gradients are summed over the shards, then over the copies of the model, in every micro-batch; under `optimizer`
    once.

    Args:
        trained_share, adapters: as `memory_per_rank`.
    """
    if sharding == "replicate":
        dp_replicate, shard_ranks = dp_replicate * shard_ranks, 1
    gathered = gathered_parameters(model_spec, sharding, micro_batches, adapters) * sizes.compute
    sums = 1 if sharding == "optimizer" else micro_batches
    trained = model_spec.parameters * trained_share + (0 if adapters is None else adapters.parameters)
    summed = sums * trained * sizes.reduce
    others = (shard_ranks - 1) / shard_ranks
    return ShardingTraffic(
        all_gather=round(gathered * others),
        reduce_scatter=round(summed * others),
        all_reduce=round(2 * summed / shard_ranks * (dp_replicate - 1) / dp_replicate),
        copied=round(2 * (gathered + summed)),
    )


def choose_sharding(
    model_spec: ModelSpec,
    batch: MicroBatches,
    *,
    memory_bytes: int,
    dp_replicate: int,
    shard_ranks: int,
    sizes: ByteSizes,
    computing: Computing | None = None,
    others: int = 0,
    levels: Sequence[Sharding] = SHARDINGS,
) -> Sharding:
    """Of the levels whose estimate fits, the one that sends least, and then copies least.

    The same for the same values; where none fits, the one that holds least.

    Args:
        memory_bytes: of a rank's device.
        others: bytes there that are not this model's.
        levels: to choose from.
    """
    how = computing or Computing()

    def held(level: Sharding) -> int:
        found = step_memory(
            model_spec, level, batch, shard_ranks=shard_ranks, copies=dp_replicate, sizes=sizes, computing=how
        )
        return found.total + others

    def cost(level: Sharding) -> tuple[int, int, int]:
        sent = sharding_traffic(
            model_spec,
            level,
            dp_replicate=dp_replicate,
            shard_ranks=shard_ranks,
            sizes=sizes,
            micro_batches=batch.count,
            trained_share=how.trained_share,
            adapters=how.adapters_of(model_spec),
        )
        return sent.total, sent.copied, held(level)

    fitting = [level for level in levels if held(level) <= memory_bytes]
    return min(fitting, key=cost) if fitting else min(levels, key=held)
