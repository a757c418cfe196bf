"""Bytes of one rank in training: what it holds at rest, and at the fullest moment of an update.

Activations are counted operation by operation, for decoder layers as transformers writes them: norms in float32, a
gated MLP, rotary positions. Mixtures of experts and layers without a gate are counted alike, which is rough for them.
What kernels allocate inside, what the allocator keeps in reserve and padding are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from slimefsdp.estimate.setup import TrainingSetup
from slimefsdp.models.head_tiles import HeadTiles


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The largest micro-batch of a rank, and how many micro-batches an update has."""

    tokens: int
    rows: int  # tokens that the head projects to the vocabulary
    count: int = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at one moment."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int = 0  # parameters gathered in the compute dtype, and their gradients before they are summed
    activations: int = 0  # of decoder layers
    head: int = 0  # logits, hidden rows, the gradient of the head's weight
    buffers: int = 0  # of collectives and of the optimiser
    others: int = 0  # reference and critic in the policy's processes
    host: int = 0  # in the machine's memory, on top of the device's: what offloading and sleep put there

    @property
    def total(self) -> int:
        """Bytes on the device."""
        at_rest = self.parameters + self.gradients + self.optimizer + self.others
        return at_rest + self.unsharded + self.activations + self.head + self.buffers


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of one token in one decoder layer, and (`sums`, `sums_backward`) bytes that do not depend on tokens."""

    norms: int  # what norms keep, and what the products that read them keep
    attention: int  # from queries, keys and values to the output
    mlp: int
    adapters: int  # what is kept for A and B
    products: int  # what selective recomputation keeps: results of matrix products and attention's output
    stream: int  # the hidden state between layers
    is_stream_kept: bool  # by the first norm; in half precision it keeps a widened copy instead
    mlp_backward: int  # on top of what is kept, while gradients of gate and up are both there
    attention_backward: int  # gradients of queries, keys and values, on top of what is kept
    sums: int = 0  # stacks of experts with their adapters added
    sums_backward: int = 0  # a gradient of the largest stack, on top of what is kept

    @property
    def kept(self) -> int:
        """Bytes of one token that a layer keeps for backward, unless it is recomputed."""
        return self.norms + self.attention + self.mlp + self.adapters

    @classmethod
    def of(cls, setup: TrainingSetup) -> LayerActivations:
        """Returns the activations of a model's mean layer.

        Under adapters a frozen norm or product keeps nothing for its weight.
        """
        model, compute, wide, adapters = setup.model, setup.sizes.compute, setup.sizes.wide, setup.adapters
        hidden = model.hidden
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        # a norm keeps its widened input, the normed one before its weight, and what the products read
        for_weight = compute if adapters is None else 0
        of_rotated = wide + compute + for_weight if model.has_head_norms else compute
        rows = model.intermediate * compute * model.active_experts
        routed = 3 * hidden * compute * model.active_experts if model.experts > 1 else 0
        read_by_last_matrix = rows if adapters is None else 0
        of_adapters = added = sums = sums_backward = 0
        if adapters is not None:
            of_adapters = (adapters.inputs + adapters.inner) * compute // model.layers
            added = (adapters.outputs + adapters.inner) * compute // model.layers
            sums, sums_backward = adapters.summed * compute // model.layers, adapters.largest_sum * compute
        return cls(
            norms=model.norms_per_layer * hidden * (wide + for_weight) + 2 * hidden * for_weight,
            attention=(queries + keys) * of_rotated + (keys + queries) * compute + model.heads * wide,
            mlp=model.mlp_matrices * rows + read_by_last_matrix + routed,
            adapters=of_adapters,
            products=(2 * queries + 2 * keys + 2 * hidden) * compute + (model.mlp_matrices - 1) * rows + routed + added,
            stream=hidden * compute,
            is_stream_kept=compute == wide,
            mlp_backward=2 * rows + hidden * compute,
            attention_backward=(2 * queries + 2 * keys + hidden) * compute,
            sums=sums,
            sums_backward=sums_backward,
        )


class HeadActivations(NamedTuple):
    """Bytes of the head in one micro-batch, from the final norm to log-probs."""

    kept: int  # from forward to backward
    forward: int  # logits of the tiles that are held, and exponentials of one tile
    backward: int  # these logits, and the gradients of the hidden rows and, in float32, of the weight


def head_activations(setup: TrainingSetup, batch: MicroBatches) -> HeadActivations:
    """Returns the bytes of the head. A critic asks for no rows and has no logits."""
    model, sizes, rows = setup.model, setup.sizes, batch.rows
    hidden, compute, wide = model.hidden, sizes.compute, sizes.wide
    is_frozen, is_half = setup.lora_rank is not None, compute != wide
    of_norm = batch.tokens * hidden * (wide if is_frozen else wide + compute)
    if not rows:
        return HeadActivations(of_norm, 0, 0)
    tiles = _head_tiles(setup, rows)
    tile = tiles.elements * wide
    # on a CPU, products need the words of a half-precision weight widened, and are added up in that width
    words = max(end - start for start, end in tiles.words)
    widened = words * hidden * wide * (1 + setup.full_kl) if is_half and setup.on_cpu else 0
    is_summed = len(tiles.words) > 1 or (is_half and setup.on_cpu)
    of_rows = rows * hidden * (wide if is_summed else compute)
    of_rows += rows * hidden * compute if is_summed and is_half else 0
    # on CUDA, products take a tile's gradient in half precision; at the end the weight's gradient is there in both
    of_weight = tile * compute // wide if is_half and not setup.on_cpu else 0
    if not is_frozen:
        rounded_weight = model.vocab * hidden * compute if is_half else 0
        of_weight = model.vocab * hidden * wide + max(of_weight, rounded_weight)
    differentiates_all = setup.entropy_grad or setup.full_kl
    return HeadActivations(
        kept=of_norm + rows * hidden * compute * (1 + setup.full_kl),
        forward=(tiles.held + 1 + setup.full_kl) * tile + widened,
        backward=tile * (tiles.held + differentiates_all + setup.full_kl) + widened + of_rows + of_weight,
    )


def recomputed_head_share(setup: TrainingSetup, rows: int) -> float:
    """Returns the share of the head's projection that backward computes again: all tiles whose logits are not kept.

    Under a final logit soft-cap no logits are kept; the model's dimensions do not tell, and this leaves it out.
    """
    return _head_tiles(setup, rows).recomputed_share


def _head_tiles(setup: TrainingSetup, rows: int) -> HeadTiles:
    return HeadTiles.of(rows, setup.model.vocab, setup.sizes.wide, "cpu" if setup.on_cpu else "cuda")


def kept_activations(setup: TrainingSetup, layers: int, tokens: int) -> int:
    """Returns the bytes on the device that the first `layers` layers keep between their forward and backward."""
    layer, recomputed = LayerActivations.of(setup), setup.recomputed_among(layers)
    left = 0 if setup.inputs_on_host else layer.stream
    left += layer.products if setup.recompute == "selective" else 0
    return tokens * recomputed * left + (layers - recomputed) * (tokens * layer.kept + layer.sums)


def memory_at_rest(setup: TrainingSetup) -> Memory:
    """Returns what a rank holds of parameters, gradients and optimiser state."""
    held, held_adapters = -(-setup.model.parameters // setup.shards), -(-setup.adapter_parameters // setup.shards)
    trained = round(held * setup.trained_share) + held_adapters
    in_layers = round((trained - held_adapters) * setup.model.share_in_layers) + held_adapters
    sizes = setup.sizes
    return Memory(
        # next to adapters, frozen weights are stored in the dtype that they compute in
        parameters=held * (sizes.master if setup.adapters is None else sizes.compute) + held_adapters * sizes.master,
        gradients=trained * sizes.master,
        optimizer=round(sizes.state_bytes(trained - in_layers, in_layers)),
    )


def most_gathered(setup: TrainingSetup) -> int:
    """Returns the most bytes of parameters, and of gradients waiting to be summed, that are whole at a time."""
    whole = setup.parameters
    if not setup.keeps_parameters_gathered:
        # the root stays whole from forward to backward, with one other unit at a time
        unit = max(setup.layer_parameters, setup.model.embedding_unit_parameters)
        whole = min(whole, setup.model.root_parameters + unit)
    of_gradients = setup.trained_parameters * setup.sizes.reduce if setup.sharding == "optimizer" else 0
    return whole * setup.sizes.compute + of_gradients


def step_memory(setup: TrainingSetup, batch: MicroBatches) -> Memory:
    """Returns the fullest moment of an update of this model, without colocated models."""
    fullest = max(_moments(setup, batch), key=lambda moment: moment.total)
    inputs = setup.recomputed_among(setup.model.layers) * batch.tokens * setup.model.hidden * setup.sizes.compute
    host = inputs if setup.inputs_on_host else 0
    if not setup.states_on_host:
        return replace(fullest, host=host)
    host += fullest.parameters + fullest.gradients + fullest.optimizer
    return replace(fullest, parameters=0, gradients=0, optimizer=0, host=host)


def _moments(setup: TrainingSetup, batch: MicroBatches) -> Iterator[Memory]:
    """Yields memory at the moments of an update that may be the fullest."""
    at_rest = memory_at_rest(setup)
    before = at_rest  # what earlier micro-batches left
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
    """Yields memory in the head's forward and backward, when the activations of all layers are there."""
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
    """Yields memory in the backward of the last layers: in the MLP, in attention, and when gradients are summed."""
    model, sizes, tokens, trained = setup.model, setup.sizes, batch.tokens, setup.trained_share
    layer, reduce_buffers = LayerActivations.of(setup), _reduce_buffers(setup)
    unit, unit_gradients = setup.layer_parameters * sizes.compute, setup.trained_layer_parameters * sizes.compute
    unit_reduced = setup.trained_layer_parameters * sizes.reduce
    head_gradient = round(model.embedding_parameters * sizes.compute * trained)
    of_down = round(model.hidden * model.intermediate * sizes.compute * trained)
    of_others = unit_gradients - round(model.attention_parameters * sizes.compute * 3 / 4 * trained)
    # where layers differ in what they keep, the first that is recomputed is among these
    for done in range(min(1 + setup.recompute_every, model.layers)):  # layers whose backward is over
        at_work = model.layers - 1 - done
        below = kept_activations(setup, at_work, tokens)
        is_recomputed = setup.recompute != "none" and at_work % setup.recompute_every == 0
        if is_recomputed and not layer.is_stream_kept:
            below += layer.stream * tokens
        # the next layer is being gathered, the one before is still being summed
        ahead = 0
        if setup.shards > 1 and not setup.keeps_parameters_gathered and done < model.layers - 1:
            ahead = unit * (2 if setup.on_cpu and not done else 1)
        added_up = max(0, before.unsharded - done * unit_reduced)  # the last micro-batch sums layer by layer
        whole = added_up + _gathered(setup, unit, done) + head_gradient
        state = replace(before, buffers=ahead + (unit_reduced * reduce_buffers if done else 0))
        in_mlp = (layer.kept + layer.mlp_backward) * tokens + layer.sums + layer.sums_backward
        in_attention = (layer.norms // 2 + layer.attention + layer.attention_backward) * tokens
        yield replace(state, unsharded=whole + of_down, activations=below + in_mlp)
        yield replace(state, unsharded=whole + of_others, activations=below + in_attention)
        yield replace(
            state,
            unsharded=whole - unit + unit_gradients,
            activations=below + layer.stream * tokens,
            buffers=unit_reduced * reduce_buffers + (unit if ahead else 0),
        )


def _at_embedding(setup: TrainingSetup, batch: MicroBatches, before: Memory) -> Iterator[Memory]:
    """Yields memory at the last gradients: those of the head and of the embedding, which a tied weight adds up."""
    model, sizes = setup.model, setup.sizes
    size = round(model.embedding_parameters * setup.trained_share)
    untied = model.embedding_unit_parameters * sizes.compute
    # where gradients add up over micro-batches, nothing is freed before the last of them
    done = 0 if before.unsharded else model.layers
    whole = before.unsharded + _gathered(setup, 0, done) + untied
    stream = batch.tokens * model.hidden * sizes.compute
    yield replace(before, unsharded=whole + 2 * size * sizes.compute, activations=stream)
    of_layers = model.layers * setup.trained_layer_parameters * sizes.reduce
    gradients = size * sizes.compute * (1 if model.is_tied else 2)
    yield replace(
        before,
        unsharded=max(0, before.unsharded - of_layers) + untied + gradients,
        buffers=size * sizes.reduce * max(1, _reduce_buffers(setup)),
    )


def _gathered(setup: TrainingSetup, at_work: int, done: int = 0) -> int:
    """Returns the bytes of gathered parameters.

    Args:
        at_work: bytes of the layers at work, where layers are gathered one by one.
        done: layers whose backward is over.
    """
    compute = setup.sizes.compute
    if setup.keeps_parameters_gathered:
        at_work = (setup.model.layers - done) * setup.layer_parameters * compute
    return setup.model.root_parameters * compute + at_work


def _reduce_buffers(setup: TrainingSetup) -> int:
    """Returns how many buffers as large as an FSDP unit it takes to sum the unit's gradients."""
    if setup.shards > 1:
        return (2 if setup.on_cpu else 1) + (setup.mesh.dp_replicate > 1)
    return 2 if setup.mesh.ranks > 1 else 1


def training_memory(setup: TrainingSetup, batch: MicroBatches) -> Memory:
    """Returns the fullest moment of the policy's update, with colocated models where they rest."""
    waiting = _Waiting.of(setup)
    training = step_memory(setup, batch)
    return _on_one_memory(setup, replace(training, others=waiting.on_device, host=training.host + waiting.on_host))


def peak_memory(setup: TrainingSetup, batch: MicroBatches) -> Memory:
    """Returns the fullest of three moments: the policy trains, the reference computes, or the critic trains."""
    moments = [training_memory(setup, batch)]
    colocated, waiting = setup.colocated, _Waiting.of(setup)
    policy = replace(memory_at_rest(setup), gradients=0)
    on_host = Memory(0, 0, 0, host=policy.total)
    policy = on_host if setup.states_on_host else policy
    reference, critic = setup.reference_setup, setup.critic_setup
    if reference is not None and colocated.reference_rests_on_host and not setup.full_kl:
        # nothing is kept for a backward, but one layer is at work
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
        # the critic is not among those that wait while it trains
        sleeps = colocated.critic_rests_on_host or setup.states_on_host
        resting_on_host = waiting.on_host - (waiting.critic if sleeps else 0)
        awake = policy.total + (0 if setup.states_on_host else waiting.reference - resting_on_host)
        moment = replace(training, others=awake, host=training.host + policy.host + resting_on_host)
        moments.append(_on_one_memory(setup, moment))
    return max(moments, key=lambda moment: moment.total)


def _on_one_memory(setup: TrainingSetup, moment: Memory) -> Memory:
    """Counts the host's bytes among the device's on a CPU, where the two are the same memory."""
    return replace(moment, others=moment.others + moment.host, host=0) if setup.on_cpu else moment


class _Waiting(NamedTuple):
    """Bytes of the colocated models while none of them is at work."""

    reference: int
    critic: int
    on_device: int  # of both, while the policy trains

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
        on_device = (reference if shows_reference else 0) + (0 if colocated.critic_rests_on_host else critic)
        return cls(reference, critic, 0 if setup.states_on_host else on_device)
