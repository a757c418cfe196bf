"""What `slimefsdp plan` found, as text."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from slimefsdp.attention.select import AttentionShape, Choice
from slimefsdp.batching.plan import MIN_GAIN
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import byte_text
from slimefsdp.estimate.hardware import Device
from slimefsdp.estimate.memory import Memory, peak_memory
from slimefsdp.estimate.recommend import MOST_TOKENS, LongestContext, Recommendation
from slimefsdp.estimate.schedule import Schedule, lightest_strategy
from slimefsdp.estimate.setup import SHARDINGS, TrainingSetup
from slimefsdp.estimate.traffic import sharding_traffic
from slimefsdp.training.plan import may_share

_WIDTH = 120  # of running text
_TERMS = ["parameters", "gradients", "optimizer", "gathered", "activations", "head", "buffers", "others", "total"]


def plan_table(
    config: RunConfig,
    setup: TrainingSetup,
    choice: Choice,
    schedule: Schedule,
    device: Device,
    found: Recommendation,
    source: str,
    batch: RolloutBatch | None,
) -> list[str]:
    """Returns the lines of a plan.

    Args:
        choice: of the attention's strategy.
        source: where the samples come from.
        batch: that is planned; None: nothing but lengths is known.
    """
    model, mesh, updates, imbalance = setup.model, setup.mesh, schedule.updates, schedule.imbalance
    fewest, mean, most = schedule.tokens_per_rank
    samples = _range([update.samples for update in updates])
    micro_batches = _range([update.micro_batches for update in updates])
    repeated = f", {config.loss.epochs} times over" if config.loss.epochs > 1 else ""
    lines = [
        f"mesh      {mesh.ranks} rank{'s' * (mesh.ranks != 1)} = dp_replicate {mesh.dp_replicate} x dp {mesh.dp} x "
        f"cp {mesh.cp}; packs of at most {config.max_pack_tokens:,} tokens",
        f"model     {_count(model.parameters)} parameters: {model.layers} layers of {model.hidden}, "
        f"{model.heads} heads over {model.kv_heads} key heads",
    ]
    if setup.adapters is not None:
        lines.append(
            f"adapters  {_count(setup.adapter_parameters)} parameters of rank {setup.lora_rank} are trained, next to "
            f"weights in {config.precision.compute_dtype} that are not"
        )
    lines += [
        f"samples   {schedule.samples:,} with {schedule.tokens:,} tokens, the longest {schedule.longest:,}: {source}",
        *_batch_lines(config, schedule, batch),
        f"schedule  {len(updates)} update{'s' * (len(updates) > 1)} of {samples} samples, micro-batches per "
        f"data rank: {micro_batches}{repeated}",
        f"tokens    {fewest:,} to {most:,} of a step on a rank (mean {mean:,.0f}), at most "
        f"{schedule.largest.tokens:,} at once",
        "",
        "imbalance, slowest over mean (time and work are estimates)",
        *_rows(
            ["", "time", "tokens", "pairs", "work"],
            ["data ranks, per update", f"{imbalance.data_ranks:.3f}", "", "", ""],
            ["data ranks, per micro-batch", f"{imbalance.micro_batches:.3f}", "", "", ""],
            *(
                [name, "", f"{cp.tokens:.3f}", f"{cp.pairs:.3f}", f"{cp.work:.3f}"]
                for name, cp in (("cp ranks, per pack", imbalance.cp), ("  if all were cut", imbalance.zigzag))
                if mesh.cp > 1
            ),
        ),
        "",
    ]
    if mesh.cp > 1:
        lines += _attention_lines(setup, schedule, choice)
    sent = sharding_traffic(setup, schedule.micro_batches_per_update)
    levels = {level: peak_memory(replace(setup, sharding=level), schedule.largest) for level in SHARDINGS}
    return [
        *lines,
        f"sharding's messages of a rank, per update: gathers {byte_text(sent.all_gather)}, reduce-scatters "
        f"{byte_text(sent.reduce_scatter)}, all-reduces {byte_text(sent.all_reduce)}",
        "",
        "memory of a rank at the fullest moment of an update (an estimate)",
        *_rows(
            ["", *_TERMS, "on the host"],
            *([_marked(level, level == setup.sharding), *_terms(held)] for level, held in levels.items()),
        ),
        "",
        *_time_lines(schedule, device, found),
    ]


def _batch_lines(config: RunConfig, schedule: Schedule, batch: RolloutBatch | None) -> list[str]:
    """Returns what a batch leaves out, and what its samples share."""
    how = config.batch.share_prefixes
    if batch is None:
        whole = f"prefixes  all samples are counted whole; batch.share_prefixes={how} may compute less"
        return [whole] if may_share(config) else []
    left_out = batch.num_samples - schedule.samples
    lines = [f"left out  {left_out:,} samples in which nothing trains"] if left_out else []
    if schedule.computed_tokens < schedule.tokens:
        lines.append(f"prefixes  {schedule.computed_tokens:,} tokens are computed: what samples share, once")
    elif may_share(config):
        needed = f"; under auto it must save {MIN_GAIN:.0%} of the time" if how == "auto" else ""
        lines.append(f"prefixes  nothing is shared{needed}")
    return lines


def _attention_lines(setup: TrainingSetup, schedule: Schedule, choice: Choice) -> list[str]:
    rows = []
    for name in schedule.comm:
        sent = schedule.comm_bytes(name, setup)
        cells = ["heads do not", "divide by cp"] if sent is None else map(byte_text, (sent.forward, sent.backward))
        rows.append([_marked(name, name == schedule.strategy), *cells])
    lines = [
        "attention's messages in one layer, all ranks, per update",
        *_rows(["", "forward", "backward"], *rows),
        f"  of a rank in all layers: {byte_text(schedule.attention_bytes_per_rank(setup))}",
        f"  * {choice}",
    ]
    least = lightest_strategy(schedule, setup, AttentionShape.of_model_spec(setup.model))
    now, then = schedule.comm_bytes(schedule.strategy, setup), schedule.comm_bytes(least, setup)
    if now is not None and then is not None and least != schedule.strategy:
        lines.append(  # auto chooses before it knows the samples
            f"  of these samples {least} sends fewer bytes, {byte_text(then.total)} against {byte_text(now.total)}: "
            f"attention.strategy={least} would take it"
        )
    return [*lines, ""]


def _time_lines(schedule: Schedule, device: Device, found: Recommendation) -> list[str]:
    limit = "no limit (give --memory-gb)" if device.memory_bytes is None else byte_text(device.memory_bytes)
    rates, now = device.rates, found.chosen
    rows = []
    for one in dict.fromkeys((now, found.recommended, *found.candidates[:6])):
        if one is None:
            continue
        spent = one.seconds
        rows.append(
            [
                _marked(f"{one.setup.sharding}, {_stored(one.setup)}", one == now),
                *(
                    f"{value:,.3g}"
                    for value in (spent.total, spent.products, spent.attention, spent.memory, spent.comm, spent.host)
                ),
                byte_text(one.memory.total),
                "yes" if device.has_room(one.memory.total) else "no",
            ]
        )
    return [
        f"an update's floor, nothing overlapping, by {rates.source}: {rates.matrix_tflops:,.3g} TFLOP/s in products, "
        f"{rates.comm_gbps:,.3g} GB/s sent; memory: {limit}",
        *_rows(["", "seconds", "products", "attention", "memory", "sent", "host", "bytes", "fits"], *rows),
        f"  * as set: {now.tokens_per_second(schedule):,.0f} tokens/s, "
        f"{now.mfu(schedule, rates):.0%} of the rate in products",
        *textwrap.wrap(found.advice, _WIDTH, initial_indent="  ", subsequent_indent="    "),
    ]


def longest_context_table(
    setup: TrainingSetup, found: list[LongestContext], memory_bytes: int, most_tokens: int
) -> list[str]:
    """Returns the longest sample of the settings, which come first, and of other ways to store, term by term.

    Args:
        most_tokens: longer ones were not looked for.
    """
    rows = []
    for one in found:
        name, workspace = _marked(_stored(one.setup), one is found[0]), byte_text(one.attention_workspace)
        rows.append([name, f"{one.tokens:,}", *_terms(one.memory), workspace])
    lines = [
        f"the longest sample that fits {byte_text(memory_bytes)} a rank, a tenth of them left free (an estimate); "
        f"cp {setup.mesh.cp}, {_count(setup.model.parameters)} parameters",
        *_rows(["", "tokens", *_TERMS, "on the host", "of the free tenth"], *rows),
        "  * as set. Of the free tenth: what flash attention's backward allocates inside, which no other term has",
    ]
    if any(one.tokens == most_tokens for one in found):
        why = "which were not looked for" if most_tokens == MOST_TOKENS else "for which the model has learned positions"
        lines.append(f"  no longer samples than {most_tokens:,} tokens, {why}")
    return lines


def _stored(setup: TrainingSetup) -> str:
    text = f"recompute {setup.recompute}" + (f"/{setup.recompute_every}" if setup.recompute_every > 1 else "")
    text += ", inputs on the host" if setup.offload_activations else ""
    return text + (", states on the host" if setup.cpu_offload else "")


def _terms(held: Memory) -> list[str]:
    """Returns the parts of memory in the order of `_TERMS`, and the host's."""
    at_rest = (held.parameters, held.gradients, held.optimizer, held.unsharded)
    return [*map(byte_text, (*at_rest, held.activations, held.head, held.buffers, held.others, held.total, held.host))]


def _rows(*rows: list[str]) -> list[str]:
    """Aligns columns, the first to the left and the others to the right."""
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
