"""Estimates a rank's memory in training: between updates, and at the peak of an update.

Activations are counted for each operation of a decoder layer as transformers implements it: norms in float32, a gated
MLP, rotary positions. The counts are only rough for mixtures of experts and for MLPs without a gate. Workspace of
kernels, memory that the allocator reserves, and padding are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from slimefsdp.estimate.setup import TrainingSetup
from slimefsdp.models.head_tiles import HeadTiles


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Describes the largest micro-batch of a rank, and the number of micro-batches of an update."""

    tokens: int
    rows: int  # tokens that the head projects to the vocabulary
    count: int = 1


@dataclass(frozen=True, slots=True)
class Memory:
    parameters: int
    gradients: int
    optimizer: int
    unsharded: int = 0  # parameters gathered in the compute dtype, and gradients before their reduction
    activations: int = 0  # of decoder layers
    head: int = 0  # logits, hidden rows, gradient of the head's weight
    buffers: int = 0  # of collectives and the optimiser
    others: int = 0  # memory of the colocated reference and critic
    host: int = 0  # host memory for offloaded and sleeping states, not part of `total`

    @property
    def total(self) -> int:
        at_rest = self.parameters + self.gradients + self.optimizer + self.others
        return at_rest + self.unsharded + self.activations + self.head + self.buffers


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Holds a decoder layer's bytes for each token; only `sums` and `sums_backward` are independent of the tokens."""

    norms: int  # saved by norms, and by the products that follow norms
    attention: int  # from queries, keys and values to the output
    mlp: int
    adapters: int  # saved by the products with A and B
    products: int  # saved under selective recomputation: the results of matrix products and of attention
    stream: int  # hidden state between layers
    is_stream_kept: bool  # whether the first norm saves the stream itself; in half precision it saves a float32 copy
    mlp_backward: int  # additional memory of the MLP's backward, for gradients of gate and up
    attention_backward: int  # additional memory of attention's backward, for gradients of queries, keys and values
    sums: int = 0  # stacks of experts plus the products of their adapters
    sums_backward: int = 0  # additional memory for the gradient of the largest stack

    @property
    def kept(self) -> int:
        """Returns the bytes of one token that a layer saves for backward, unless the layer is recomputed."""
        return self.norms + self.attention + self.mlp + self.adapters

    @classmethod
    def of(cls, setup: TrainingSetup) -> LayerActivations:
        """Returns the activations of a model's average layer.

        With adapters, frozen norms and products save nothing for the gradients of their weights.
        """
        model, compute, wide, adapters = setup.model, setup.sizes.compute, setup.sizes.wide, setup.adapters
        hidden = model.hidden
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        # a norm saves its float32 input, and the normed value before the weight; the products that follow save the
        # norm's output
        for_weight = compute if adapters is None else 0
        rotated_bytes = wide + compute + for_weight if model.has_head_norms else compute
        rows = model.intermediate * compute * model.active_experts
        routed = 3 * hidden * compute * model.active_experts if model.experts > 1 else 0
        read_by_last_matrix = rows if adapters is None else 0
        adapter_bytes = added = sums = sums_backward = 0
        if adapters is not None:
            adapter_bytes = (adapters.inputs + adapters.inner) * compute // model.layers
            added = (adapters.outputs + adapters.inner) * compute // model.layers
            sums, sums_backward = adapters.summed * compute // model.layers, adapters.largest_sum * compute
        return cls(
            # norms save the tokens of one tp rank, the products that follow save those of all tp ranks
            norms=model.norms_per_layer * hidden * (wide + for_weight) // setup.tp + 2 * hidden * for_weight,
            attention=(queries + keys) * rotated_bytes + (keys + queries) * compute + model.heads * wide,
            mlp=model.mlp_matrices * rows + read_by_last_matrix + routed,
            adapters=adapter_bytes,
            products=(2 * queries + 2 * keys + 2 * hidden) * compute + (model.mlp_matrices - 1) * rows + routed + added,
            stream=hidden * compute // setup.tp,
            is_stream_kept=compute == wide,
            mlp_backward=2 * rows + hidden * compute,
            attention_backward=(2 * queries + 2 * keys + hidden) * compute,
            sums=sums,
            sums_backward=sums_backward,
        )


class HeadActivations(NamedTuple):
    """Holds the bytes of the head for one micro-batch, from the final norm to log-probs."""

    kept: int  # saved from forward to backward
    forward: int  # in forward: logits of the kept tiles, and exponentials of one tile
    backward: int  # in backward: the same, gradients of the hidden rows, and the weight's float32 gradient


def head_activations(setup: TrainingSetup, batch: MicroBatches) -> HeadActivations:
    """Returns the bytes of the head; a critic has no head rows and no logits."""
    model, sizes, rows = setup.model, setup.sizes, batch.rows
    hidden, compute, wide = model.hidden, sizes.compute, sizes.wide
    is_frozen, is_half = setup.lora_rank is not None, compute != wide
    norm_bytes = batch.tokens * hidden * (wide if is_frozen else wide + compute) // setup.tp
    norm_bytes += batch.tokens * hidden * compute if setup.tp > 1 else 0  # the hidden states of all tp ranks' tokens
    if not rows:
        return HeadActivations(norm_bytes, 0, 0)
    tiles = _head_tiles(setup, rows)
    tile = tiles.elements * wide
    # on a CPU, the head converts half-precision weights to float32, for each part of the vocabulary
    words = max(end - start for start, end in tiles.words)
    widened = words * hidden * wide * (1 + setup.full_kl) if is_half and setup.on_cpu else 0
    is_summed = len(tiles.words) > 1 or (is_half and setup.on_cpu)
    rows_gradient = rows * hidden * (wide if is_summed else compute)
    rows_gradient += rows * hidden * compute if is_summed and is_half else 0
    # on CUDA, a tile's gradient is converted to half precision; at the end the weight's gradient exists in both dtypes
    weight_gradient = tile * compute // wide if is_half and not setup.on_cpu else 0
    if not is_frozen:
        rounded_weight = model.vocab * hidden * compute if is_half else 0
        weight_gradient = model.vocab * hidden * wide + max(weight_gradient, rounded_weight)
    differentiates_all = setup.entropy_grad or setup.full_kl
    return HeadActivations(
        kept=norm_bytes + rows * hidden * compute * (1 + setup.full_kl),
        forward=(tiles.held + 1 + setup.full_kl) * tile + widened,
        backward=tile * (tiles.held + differentiates_all + setup.full_kl) + widened + rows_gradient + weight_gradient,
    )


def recomputed_head_share(setup: TrainingSetup, rows: int) -> float:
    """Returns the share of the head's logits that backward recomputes because they are not kept.

    A head with a soft-cap keeps no logits. ModelSpec does not have the soft-cap, so the estimate ignores it.
    """
    return _head_tiles(setup, rows).recomputed_share


def _head_tiles(setup: TrainingSetup, rows: int) -> HeadTiles:
    return HeadTiles.of(rows, setup.model.vocab, setup.sizes.wide, "cpu" if setup.on_cpu else "cuda")


def kept_activations(setup: TrainingSetup, layers: int, tokens: int) -> int:
    """Returns the device memory that the first `layers` layers save from forward to backward."""
    layer, recomputed = LayerActivations.of(setup), setup.recomputed_among(layers)
    kept_if_recomputed = 0 if setup.inputs_on_host else layer.stream
    kept_if_recomputed += layer.products if setup.recompute == "selective" else 0
    return tokens * recomputed * kept_if_recomputed + (layers - recomputed) * (tokens * layer.kept + layer.sums)


def memory_at_rest(setup: TrainingSetup) -> Memory:
    in_shard, adapters_in_shard = (
        -(-setup.model.parameters // setup.shards),
        -(-setup.adapter_parameters // setup.shards),
    )
    trained = round(in_shard * setup.trained_share) + adapters_in_shard
    in_layers = round((trained - adapters_in_shard) * setup.model.share_in_layers) + adapters_in_shard
    sizes = setup.sizes
    return Memory(
        # with adapters, frozen weights are stored in the compute dtype
        parameters=in_shard * (sizes.master if setup.adapters is None else sizes.compute)
        + adapters_in_shard * sizes.master,
        gradients=trained * sizes.master,
        optimizer=round(sizes.state_bytes(trained - in_layers, in_layers)),
    )


def most_gathered(setup: TrainingSetup) -> int:
    """Returns the largest number of bytes of gathered parameters and unsharded gradients at a time."""
    whole = setup.parameters
    if not setup.keeps_parameters_gathered:
        # the root stays gathered from forward to backward, and one other unit is gathered at a time
        unit = max(setup.layer_parameters, setup.model.embedding_unit_parameters)
        whole = min(whole, setup.model.root_parameters + unit)
    gradients = setup.trained_parameters * setup.sizes.reduce if setup.sharding == "optimizer" else 0
    return whole * setup.sizes.compute + gradients


def step_memory(setup: TrainingSetup, batch: MicroBatches) -> Memory:
    """Returns the peak memory of an update of `setup.model`, not counting colocated models."""
    fullest = max(_moments(setup, batch), key=lambda moment: moment.total)
    inputs = setup.recomputed_among(setup.model.layers) * batch.tokens * LayerActivations.of(setup).stream
    host = inputs if setup.inputs_on_host else 0
    if not setup.states_on_host:
        return replace(fullest, host=host)
    host += fullest.parameters + fullest.gradients + fullest.optimizer
    return replace(fullest, parameters=0, gradients=0, optimizer=0, host=host)


def _moments(setup: TrainingSetup, batch: MicroBatches) -> Iterator[Memory]:
    """Yields the memory at each moment of an update that may be the peak."""
    at_rest = memory_at_rest(setup)
    before = at_rest  # memory before the last micro-batch
    if batch.count == 1:
        before = replace(at_rest, gradients=0)
    elif setup.sharding == "optimizer":
        before = replace(at_rest, gradients=0, unsharded=setup.trained_parameters * setup.sizes.reduce)
    yield from _in_head(setup, batch, before)
    yield from _in_last_layers(setup, batch, before)
    yield from _at_embedding(
        setup, batch, at_rest if before.gradients else replace(before, gradients=at_rest.gradients)
    )
    has_copies = not (setup.is_optimizer_fused or setup.states_on_host)
    yield replace(at_rest, buffers=at_rest.gradients if has_copies else 0)


def _in_head(setup: TrainingSetup, batch: MicroBatches, before: Memory) -> Iterator[Memory]:
    """Yields the memory in the head's forward and in its backward, when the activations of all layers are saved."""
    head, layers = head_activations(setup, batch), setup.model.layers
    in_flight = setup.layer_parameters * setup.sizes.compute if setup.shards > 1 else 0
    state = replace(
        before,
        unsharded=before.unsharded + _gathered(setup, 0),
        activations=kept_activations(setup, layers, batch.tokens),
    )
    yield replace(state, head=head.kept + head.forward, buffers=in_flight)
    yield replace(state, head=head.kept + head.backward, buffers=0 if setup.keeps_parameters_gathered else in_flight)


def _in_last_layers(setup: TrainingSetup, batch: MicroBatches, before: Memory) -> Iterator[Memory]:
    """Yields the memory in the backward of the last two layers: in the MLP, in attention, and in the reduction."""
    model, sizes, tokens, trained = setup.model, setup.sizes, batch.tokens, setup.trained_share
    layer, reduce_buffers = LayerActivations.of(setup), _reduce_buffers(setup)
    unit, unit_gradients = setup.layer_parameters * sizes.compute, setup.trained_layer_parameters * sizes.compute
    unit_reduced = setup.trained_layer_parameters * sizes.reduce
    head_gradient = round(model.embedding_parameters * sizes.compute * trained)
    down_gradient = round(model.hidden * model.intermediate * sizes.compute * trained)
    other_gradients = unit_gradients - round(model.attention_parameters * sizes.compute * 3 / 4 * trained)
    for done in range(min(2, model.layers)):  # number of layers whose backward is complete
        current = model.layers - 1 - done
        below = kept_activations(setup, current, tokens)
        if setup.recompute != "none" and not layer.is_stream_kept:
            below += layer.stream * tokens
        # meanwhile the next layer is gathered, and the previous layer's gradients are reduced
        prefetched = 0
        if setup.shards > 1 and not setup.keeps_parameters_gathered and done < model.layers - 1:
            prefetched = unit * (2 if setup.on_cpu and not done else 1)
        accumulated = max(0, before.unsharded - done * unit_reduced)  # the last micro-batch reduces layer by layer
        unsharded = accumulated + _gathered(setup, unit, done) + head_gradient
        state = replace(before, buffers=prefetched + (unit_reduced * reduce_buffers if done else 0))
        in_mlp = (layer.kept + layer.mlp_backward) * tokens + layer.sums + layer.sums_backward
        in_attention = (layer.norms // 2 + layer.attention + layer.attention_backward) * tokens
        yield replace(state, unsharded=unsharded + down_gradient, activations=below + in_mlp)
        yield replace(state, unsharded=unsharded + other_gradients, activations=below + in_attention)
        yield replace(
            state,
            unsharded=unsharded - unit + unit_gradients,
            activations=below + layer.stream * tokens,
            buffers=unit_reduced * reduce_buffers + (unit if prefetched else 0),
        )


def _at_embedding(setup: TrainingSetup, batch: MicroBatches, before: Memory) -> Iterator[Memory]:
    """Yields the memory when the gradients of embedding and head are reduced; if the two are tied, as one sum."""
    model, sizes = setup.model, setup.sizes
    size = round(model.embedding_parameters * setup.trained_share)
    untied = model.embedding_unit_parameters * sizes.compute
    # if gradients accumulate unsharded, parameters stay gathered until the last micro-batch
    done = 0 if before.unsharded else model.layers
    unsharded = before.unsharded + _gathered(setup, 0, done) + untied
    stream = batch.tokens * LayerActivations.of(setup).stream
    yield replace(before, unsharded=unsharded + 2 * size * sizes.compute, activations=stream)
    layer_gradients = model.layers * setup.trained_layer_parameters * sizes.reduce
    gradients = size * sizes.compute * (1 if model.is_tied else 2)
    yield replace(
        before,
        unsharded=max(0, before.unsharded - layer_gradients) + untied + gradients,
        buffers=size * sizes.reduce * max(1, _reduce_buffers(setup)),
    )


def _gathered(setup: TrainingSetup, at_work: int, done: int = 0) -> int:
    """Returns the bytes of gathered parameters.

    Args:
        at_work: bytes of the layers that are gathered at this moment, if layers are gathered one by one.
        done: number of layers whose backward is complete.
    """
    compute = setup.sizes.compute
    if setup.keeps_parameters_gathered:
        at_work = (setup.model.layers - done) * setup.layer_parameters * compute
    return setup.model.root_parameters * compute + at_work


def _reduce_buffers(setup: TrainingSetup) -> int:
    """Returns how many buffers, each as large as an FSDP unit, the reduction of the unit's gradients needs."""
    if setup.shards > 1:
        return (2 if setup.on_cpu else 1) + (setup.mesh.dp_replicate > 1)
    return 2 if setup.mesh.ranks > 1 else 1


def training_memory(setup: TrainingSetup, batch: MicroBatches) -> Memory:
    """Returns the peak memory of the policy's update, including the colocated models that wait meanwhile."""
    waiting = _Waiting.of(setup)
    training = step_memory(setup, batch)
    return _on_one_memory(setup, replace(training, others=waiting.on_device, host=training.host + waiting.on_host))


def peak_memory(setup: TrainingSetup, batch: MicroBatches) -> Memory:
    """Returns the peak memory of three phases: the policy trains, the reference computes, and the critic trains."""
    moments = [training_memory(setup, batch)]
    colocated, waiting = setup.colocated, _Waiting.of(setup)
    policy = replace(memory_at_rest(setup), gradients=0)
    on_host = Memory(0, 0, 0, host=policy.total)
    policy = on_host if setup.states_on_host else policy
    reference, critic = setup.reference_setup, setup.critic_setup
    if reference is not None and colocated.reference_rests_on_host and not setup.full_kl:
        # there is no backward, so only one layer's activations exist
        from_host = colocated.reference_computes_from_host or setup.states_on_host
        awake = 0 if from_host else waiting.reference
        resting = on_host if colocated.reference_takes_policys_place else policy
        moment = replace(
            resting,
            others=waiting.on_device + awake,
            host=resting.host + waiting.on_host - awake,
            unsharded=most_gathered(reference),
            activations=LayerActivations.of(reference).kept * batch.tokens,
        )
        moments.append(_on_one_memory(setup, moment))
    if critic is not None:
        training = step_memory(critic, replace(batch, rows=0))
        # while the critic trains, it is not among the waiting models
        resting_on_host = waiting.on_host - waiting.critic
        awake = policy.total + (0 if setup.states_on_host else waiting.reference - resting_on_host)
        moment = replace(training, others=awake, host=training.host + policy.host + resting_on_host)
        moments.append(_on_one_memory(setup, moment))
    return max(moments, key=lambda moment: moment.total)


def _on_one_memory(setup: TrainingSetup, moment: Memory) -> Memory:
    """On a CPU, where host and device share their memory, adds the host's bytes to the device's."""
    return replace(moment, others=moment.others + moment.host, host=0) if setup.on_cpu else moment


class _Waiting(NamedTuple):
    """Holds the bytes of the colocated models while they are unused."""

    reference: int
    critic: int
    on_device: int  # bytes of the reference on the device while the policy trains

    @property
    def on_host(self) -> int:
        return self.reference + self.critic - self.on_device

    @classmethod
    def of(cls, setup: TrainingSetup) -> _Waiting:
        def at_rest(other: TrainingSetup | None) -> int:
            return 0 if other is None else replace(memory_at_rest(other), gradients=0).total

        reference, critic = at_rest(setup.reference_setup), at_rest(setup.critic_setup)
        colocated = setup.colocated
        shows_reference = setup.full_kl or not colocated.reference_rests_on_host
        on_device = reference if shows_reference and not setup.states_on_host else 0
        return cls(reference, critic, on_device)
