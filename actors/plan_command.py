"""`slimefsdp plan`: what a configuration would do with samples of given lengths, from config.json alone.

Answers without torch, ray or transformers, on any machine: mesh, schedule, balance, traffic and memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from slimefsdp.attention.choice import AttentionShape, Choice, choose_strategy
from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.cost import ELEMENT_BYTES
from slimefsdp.data.dimensions import ModelDimensions
from slimefsdp.data.lengths import sample_lengths
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.footprint import ByteSizes
from slimefsdp.models.folder import check_architecture, read_model_folder
from slimefsdp.simulate import MeshShape, Simulation, simulate


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("config", type=Path, help="YAML settings")
    parser.add_argument("overrides", nargs="*", help="dotted settings, e.g. mesh.cp=8")
    parser.add_argument(
        "--lengths",
        metavar="SPEC",
        help="tokens per sample: fixed(n), uniform(min, max), lognormal(mean, sigma, min, max), a file of "
        "RolloutBatch.save, or a JSON list; default: a guess from the settings",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="processes to be started; needed where mesh.dp is auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def plan_command(options: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ConfigError: the settings, --lengths or --ranks. ModelError: the model's folder. BatchError: a sample does not
            fit.
    """
    config = _with_ranks(load_config(options.config, options.overrides), options.ranks)
    folder = read_model_folder(config.model.path, with_weights=False)
    check_architecture(folder)
    dimensions = ModelDimensions.from_config(folder.config)
    spec = options.lengths or _guessed_lengths(config)
    choice = choose_strategy(config.attention.strategy, AttentionShape.of_dimensions(dimensions), config.mesh.cp)
    found = _simulated(config, dimensions, choice, spec)
    if folder.max_sample_tokens is not None and found.longest > folder.max_sample_tokens:
        raise BatchError(
            f"a sample of {found.longest} tokens, but {folder.path} has learned positions for "
            f"{folder.max_sample_tokens}",
            field="lengths",
            hint="give shorter --lengths, or another model",
        )
    if options.json:
        record = {"lengths": spec, "parameters": dimensions.parameters, **dataclasses.asdict(found)}
        print(json.dumps(record, indent=1))
    else:
        guessed = "" if options.lengths else " (a guess: give --lengths)"
        print("\n".join(_table(config, dimensions, choice, found, spec + guessed)))
    return 0


def _with_ranks(config: RunConfig, ranks: int | None) -> RunConfig:
    if ranks is None:
        if config.mesh.dp == "auto":
            raise ConfigError(
                "mesh.dp=auto depends on the ranks that are started", field="--ranks", hint="give --ranks N, or mesh.dp"
            )
        return config
    config = config.with_ranks(ranks)
    if config.ranks != ranks:
        raise ConfigError(
            f"--ranks={ranks}, but mesh.dp_replicate={config.mesh.dp_replicate} x mesh.dp={config.mesh.dp} x "
            f"mesh.cp={config.mesh.cp} needs {config.ranks}",
            field="--ranks",
            hint="change the mesh, or set mesh.dp=auto",
        )
    return config


def _guessed_lengths(config: RunConfig) -> str:
    """Half of what a response may have on average; without responses an eighth of what a rank may hold."""
    if config.algorithm == "grpo":
        mean, longest = config.rollout.max_new_tokens / 2, 2 * config.rollout.max_new_tokens
    else:
        mean, longest = config.batch.max_tokens_per_rank / 8, config.max_pack_tokens
    return f"lognormal({max(2, round(mean))}, 0.8, 2, {min(longest, config.max_pack_tokens)})"


def _simulated(config: RunConfig, dimensions: ModelDimensions, choice: Choice, spec: str) -> Simulation:
    precision = config.precision
    compute = ELEMENT_BYTES[precision.compute_dtype]
    master = max(4, compute)
    recomputed = config.model.activation_checkpointing != "none"  # selective repeats the communication, too
    every = config.model.checkpoint_every_n_layers
    assert config.mesh.dp != "auto"
    return simulate(
        sample_lengths(spec, config.samples_per_step, seed=config.run.seed),
        dimensions,
        MeshShape(config.mesh.dp_replicate, config.mesh.dp, config.mesh.cp),
        max_tokens_per_rank=config.batch.max_tokens_per_rank,
        samples_per_update=config.batch.samples_per_update,
        strategy=choice.traffic,
        sharding=config.fsdp.sharding,
        sizes=ByteSizes(
            compute=compute,
            master=master,
            reduce=master if precision.reduce_dtype == "auto" else ELEMENT_BYTES[precision.reduce_dtype],
            optimizer_states=2 if config.optim.name == "adamw" else 1,
        ),
        recomputed_layers=-(-dimensions.layers // every) / dimensions.layers if recomputed else 0.0,
    )


def _table(
    config: RunConfig, dimensions: ModelDimensions, choice: Choice, found: Simulation, lengths: str
) -> list[str]:
    mesh, updates, imbalance = found.mesh, found.updates, found.imbalance
    fewest, mean, most = found.tokens_per_rank
    samples = _range([update.samples for update in updates])
    micro_batches = _range([update.micro_batches for update in updates])
    repeated = f", {config.loss.epochs} times over" if config.loss.epochs > 1 else ""
    lines = [
        f"mesh      {mesh.ranks} ranks = dp_replicate {mesh.dp_replicate} x dp {mesh.dp} x cp {mesh.cp}; packs of at "
        f"most {config.max_pack_tokens:,} tokens",
        f"model     {_count(dimensions.parameters)} parameters: {dimensions.layers} layers of {dimensions.hidden}, "
        f"{dimensions.heads} heads over {dimensions.kv_heads} key heads",
        f"samples   {found.samples:,} with {found.tokens:,} tokens, the longest {found.longest:,}: {lengths}",
        f"schedule  {len(updates)} update{'s' * (len(updates) > 1)} of {samples} samples, micro-batches per "
        f"data rank: {micro_batches}{repeated}",
        f"tokens    {fewest:,} to {most:,} on a rank (mean {mean:,.0f}), at most {found.most_tokens_at_once:,} at once",
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
        lines += [
            "attention's messages in one layer, all ranks, per update",
            *_rows(
                ["", "forward", "backward"],
                *(
                    [_marked(name, name == found.strategy), *(_bytes(sent.forward), _bytes(sent.backward))]
                    if sent is not None
                    else [name, "heads do not", "divide by cp"]
                    for name, sent in found.wire.items()
                ),
            ),
            f"  of a rank in all layers: {_bytes(found.attention_bytes_per_rank)}",
            f"  * {choice}",
            "",
        ]
    place = ", all but the gathered on the host" if config.fsdp.cpu_offload else ""
    sent = found.sharding
    return [
        *lines,
        f"sharding's messages of a rank, per update: gathers {_bytes(sent.all_gather)}, reduce-scatters "
        f"{_bytes(sent.reduce_scatter)}, all-reduces {_bytes(sent.all_reduce)}",
        "",
        f"memory of a rank, without activations, reference model and critic{place}",
        *_rows(
            ["", "parameters", "gradients", "optimizer", "gathered", "total"],
            *(
                [
                    _marked(level, level == config.fsdp.sharding),
                    *map(_bytes, (held.parameters, held.gradients, held.optimizer, held.unsharded, held.total)),
                ]
                for level, held in found.memory.items()
            ),
        ),
    ]


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


def _bytes(number: int) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if number >= 1000**power:
            return f"{number / 1000**power:.1f} {unit}"
    return f"{number} B"
