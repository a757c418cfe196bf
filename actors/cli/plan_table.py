"""What `slimefsdp plan` found, as text."""

from __future__ import annotations

import textwrap

from slimefsdp.attention.select import AttentionShape, Choice
from slimefsdp.batching.plan import MIN_GAIN
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import byte_text
from slimefsdp.model_spec import Adapters, ModelSpec
from slimefsdp.perf_model.longest_context import MOST_TOKENS, LongestContext, attention_workspace
from slimefsdp.perf_model.memory import Memory
from slimefsdp.perf_model.recommend import Outlook, lightest_strategy
from slimefsdp.perf_model.simulate import MeshShape, Simulation
from slimefsdp.perf_model.step_time import Candidate
from slimefsdp.training.plan import may_share

_WIDTH = 120  # of running text


def plan_table(
    config: RunConfig,
    model_spec: ModelSpec,
    choice: Choice,
    found: Simulation,
    outlook: Outlook,
    source: str,
    batch: RolloutBatch | None,
    adapters: Adapters | None,
) -> list[str]:
    """The lines of a plan.

    Args:
        choice: of the attention's strategy.
        source: where the samples are from.
        batch: that is planned; None: nothing is known but lengths.
        adapters: that are trained; None: the model is.
    """
    mesh, updates, imbalance = found.mesh, found.updates, found.imbalance
    fewest, mean, most = found.tokens_per_rank
    samples = _range([update.samples for update in updates])
    micro_batches = _range([update.micro_batches for update in updates])
    repeated = f", {config.loss.epochs} times over" if config.loss.epochs > 1 else ""
    lines = [
        f"mesh      {mesh.ranks} rank{'s' * (mesh.ranks != 1)} = dp_replicate {mesh.dp_replicate} x dp {mesh.dp} x "
        f"cp {mesh.cp}; packs of at most {config.max_pack_tokens:,} tokens",
        f"model     {_count(model_spec.parameters)} parameters: {model_spec.layers} layers of {model_spec.hidden}, "
        f"{model_spec.heads} heads over {model_spec.kv_heads} key heads",
        *([] if adapters is None else [_adapters_line(config, adapters)]),
        f"samples   {found.samples:,} with {found.tokens:,} tokens, the longest {found.longest:,}: {source}",
        *_batch_lines(config, found, batch),
        f"schedule  {len(updates)} update{'s' * (len(updates) > 1)} of {samples} samples, micro-batches per "
        f"data rank: {micro_batches}{repeated}",
        f"tokens    {fewest:,} to {most:,} of a step on a rank (mean {mean:,.0f}), at most "
        f"{found.most_tokens_at_once:,} at once",
        "",
        "imbalance, slowest over mean (time and work are estimates)",
        *_rows(
            ["", "time", "tokens", "pairs", "work"],
            ["data ranks, per update", f"{imbalance.data_ranks:.3f}", "", "", ""],
            ["data ranks, per micro-batch", f"{imbalance.micro_batches:.3f}", "", "", ""],
            *(
                [name, "", f"{cp.tokens:.3f}", f"{cp.pairs:.3f}", f"{cp.work:.3f}"]
                for name, cp in (("cp ranks, per pack", imbalance.cp), ("  were all cut", imbalance.zigzag))
                if mesh.cp > 1
            ),
        ),
        "",
    ]
    if mesh.cp > 1:
        lines += _attention_lines(found, choice, AttentionShape.of_model_spec(model_spec))
    sent = found.sharding
    lines += [
        f"sharding's messages of a rank, per update: gathers {byte_text(sent.all_gather)}, reduce-scatters "
        f"{byte_text(sent.reduce_scatter)}, all-reduces {byte_text(sent.all_reduce)}",
        "",
    ]
    return [*lines, *_memory_lines(config, outlook), "", *_time_lines(outlook)]


def _adapters_line(config: RunConfig, adapters: Adapters) -> str:
    return (
        f"adapters  {_count(adapters.parameters)} parameters of rank {config.lora.rank} are trained, beside weights in "
        f"{config.precision.compute_dtype} that are not"
    )


def _batch_lines(config: RunConfig, found: Simulation, batch: RolloutBatch | None) -> list[str]:
    """What a batch leaves out, and what its samples share."""
    how = config.batch.share_prefixes
    if batch is None:
        whole = f"prefixes  all samples are counted whole; batch.share_prefixes={how} may compute less"
        return [whole] if may_share(config) else []
    left_out = batch.num_samples - found.samples
    lines = [f"left out  {left_out:,} samples in which nothing trains"] if left_out else []
    if found.computed_tokens < found.tokens:
        lines.append(f"prefixes  {found.computed_tokens:,} tokens are computed: what samples share, once")
    elif may_share(config):
        needed = f"; under auto it must save {MIN_GAIN:.0%} of the time" if how == "auto" else ""
        lines.append(f"prefixes  nothing is shared{needed}")
    return lines


def _attention_lines(found: Simulation, choice: Choice, shape: AttentionShape) -> list[str]:
    return [
        "attention's messages in one layer, all ranks, per update",
        *_rows(
            ["", "forward", "backward"],
            *(
                [_marked(name, name == found.strategy), *(byte_text(sent.forward), byte_text(sent.backward))]
                if sent is not None
                else [name, "heads do not", "divide by cp"]
                for name, sent in found.comm.items()
            ),
        ),
        f"  of a rank in all layers: {byte_text(found.attention_bytes_per_rank)}",
        f"  * {choice}",
        *_lighter_lines(found, shape),
        "",
    ]


def _lighter_lines(found: Simulation, shape: AttentionShape) -> list[str]:
    """Another strategy that sends less for these samples, which `auto` does not know when it chooses."""
    least = lightest_strategy(found, shape)
    now, then = found.comm[found.strategy], found.comm[least]
    if now is None or then is None or least == found.strategy:
        return []
    return [
        f"  of these samples {least} sends fewer bytes, {byte_text(then.total)} against {byte_text(now.total)}: "
        f"attention.strategy={least} would take it"
    ]


def _memory_lines(config: RunConfig, outlook: Outlook) -> list[str]:
    """What a rank holds under each level of sharding, the other settings as they are."""
    headings = ["parameters", "gradients", "optimizer", "gathered", "activations", "head", "buffers", "others", "total"]
    on_host = any(memory.host for memory in outlook.memory.values())
    return [
        "memory of a rank at the fullest moment of an update (an estimate)",
        *_rows(
            ["", *headings, *(["on the host"] if on_host else [])],
            *(
                [
                    _marked(level, level == config.fsdp.sharding),
                    *map(byte_text, _terms(held)),
                    *([byte_text(held.host)] if on_host else []),
                ]
                for level, held in outlook.memory.items()
            ),
        ),
    ]


def longest_context_table(
    model_spec: ModelSpec, mesh: MeshShape, found: list[LongestContext], memory_bytes: int, most_tokens: int
) -> list[str]:
    """The longest sample of the settings, which come first, and of other ways to store, term by term.

    Args:
        most_tokens: longer ones were not looked for.
    """
    terms = ["weights", "gradients", "optimizer", "gathered", "activations", "head", "buffers", "others", "total"]
    return [
        f"the longest sample that fits {byte_text(memory_bytes)} a rank, a tenth of them left free (an estimate); "
        f"cp {mesh.cp}, {_count(model_spec.parameters)} parameters",
        *_rows(
            ["", "tokens", *terms, "on the host", "of the free tenth"],
            *(
                [
                    _marked(_stored(one), index == 0),
                    f"{one.tokens:,}",
                    *map(byte_text, _terms(one.memory)),
                    byte_text(one.memory.host),
                    byte_text(attention_workspace(model_spec, one.tokens, mesh.cp)),
                ]
                for index, one in enumerate(found)
            ),
        ),
        "  * as set. Of the free tenth: what flash attention's backward allocates inside, which no other term has",
        *(
            [
                f"  no longer samples than {most_tokens:,} tokens, "
                + (
                    "which were not looked for"
                    if most_tokens == MOST_TOKENS
                    else "for which the model has learned positions"
                )
            ]
            if any(one.tokens == most_tokens for one in found)
            else []
        ),
    ]


def _stored(one: LongestContext) -> str:
    text = f"recompute {one.recompute}" + (f"/{one.recompute_every}" if one.recompute_every > 1 else "")
    text += ", inputs on the host" if one.offload_activations else ""
    return text + (", states on the host" if one.cpu_offload else "")


def _terms(held: Memory) -> tuple[int, ...]:
    """In the order of the tables' headings."""
    at_rest = (held.parameters, held.gradients, held.optimizer, held.unsharded)
    return (*at_rest, held.activations, held.head, held.buffers, held.others, held.total)


def _time_lines(outlook: Outlook) -> list[str]:
    limit = "no limit (give --memory-gb)" if outlook.memory_bytes is None else byte_text(outlook.memory_bytes)
    rates, now = outlook.rates, outlook.chosen
    shown = [one for one in dict.fromkeys((now, outlook.recommended, *outlook.candidates[:6])) if one is not None]
    return [
        f"an update's floor, nothing overlapping, by {rates.source}: {rates.matrix_tflops:,.3g} TFLOP/s in products, "
        f"{rates.comm_gbps:,.3g} GB/s sent; memory: {limit}",
        *_rows(
            ["", "seconds", "products", "attention", "memory", "sent", "host", "bytes", "fits"],
            *(
                [
                    _marked(_named(one), one == now),
                    *(f"{value:,.3g}" for value in _seconds(one)),
                    byte_text(one.memory.total),
                    "yes" if outlook.has_room(one) else "no",
                ]
                for one in shown
            ),
        ),
        f"  * as set: {outlook.tokens_per_second(now):,.0f} tokens/s, {outlook.mfu(now):.0%} of the rate in products",
        *textwrap.wrap(outlook.advice, _WIDTH, initial_indent="  ", subsequent_indent="    "),
    ]


def _named(one: Candidate) -> str:
    recompute = f"{one.recompute}/{one.recompute_every}" if one.recompute_every > 1 else one.recompute
    inputs = ", inputs on the host" if one.offload_activations else ""
    return f"{one.sharding}, recompute {recompute}{inputs}{', offload' if one.cpu_offload else ''}"


def _seconds(one: Candidate) -> tuple[float, ...]:
    spent = one.seconds
    return (spent.total, spent.products, spent.attention, spent.memory, spent.comm, spent.host)


def _rows(*rows: list[str]) -> list[str]:
    """Aligned columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(["  " + first.ljust(widths[0]), *cells]).rstrip())
    return lines


def _marked(name: str, is_chosen: bool) -> str:
    return f"{name} *" if is_chosen else name


def _range(values: list[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
