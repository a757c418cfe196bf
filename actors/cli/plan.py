"""`slimefsdp plan` estimates how settings would train samples of given lengths, from settings and config.json alone.

A plan has mesh, schedule, balance, traffic, memory and time. It recommends settings of sharding, offloading and
recomputation: the fastest that fit by the estimate. Without `--calibrate`, planning imports neither torch nor ray nor
transformers, and starts no process.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.cluster.capacity import check_cores
from actors.model_folders import models_to_look_at
from slimefsdp.attention.select import AttentionShape, Choice, check_kernel, choose_strategy
from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.batching.plan import MIN_GAIN, PackLimits, UpdateCut, plan_batch
from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ResourceError, byte_text
from slimefsdp.estimate.hardware import (
    LEAST_RATE,
    MOST_RATE,
    Device,
    Rates,
    device_bytes,
    guessed_rates,
    read_calibration,
    write_calibration,
)
from slimefsdp.estimate.memory import Memory, peak_memory
from slimefsdp.estimate.recommend import MOST_TOKENS, Candidate, Recommendation, as_record, longest_contexts, recommend
from slimefsdp.estimate.schedule import Schedule, lightest_strategy, measure_schedule, read_samples
from slimefsdp.estimate.setup import TrainingSetup
from slimefsdp.estimate.traffic import setup_of_folders, sharding_traffic, shared_layer_bytes
from slimefsdp.io.user_files import can_keep_files
from slimefsdp.model_spec import ModelSpec, check_settings
from slimefsdp.models.hf_folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.training.plan import cost_model_of, may_share, plan_training

# limits of what is planned, since planning itself takes time and memory
_MOST_RANKS, _MOST_SAMPLES = 100_000, 10_000_000
_WIDTH = 120  # length of wrapped lines
_TERMS = ["parameters", "gradients", "optimizer", "gathered", "activations", "head", "buffers", "others", "total"]


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of `slimefsdp plan` about samples, ranks and the device."""

    lengths: str | None
    ranks: int | None
    device: str | None
    calibrate: Path | None
    memory_gb: float | None
    gbps: float | None


def plan_command(path: Path, overrides: Sequence[str], flags: Flags, *, longest_context: bool, as_json: bool) -> int:
    """Prints the plan of a YAML file, or the longest sample that fits.

    Raises:
        ConfigError: the settings or a flag are wrong. ModelError: a model's folder cannot be used.
        BatchError: a sample does not fit. ResourceError: nothing fits the memory of the device; or --calibrate needs
            more cores.
    """
    config, _ = models_to_look_at(load_config(path, overrides), with_weights=False)
    config = _with_ranks(config, flags.ranks)
    folder = read_model_folder(config.model.path, with_weights=False)
    check_architecture(folder)
    model = ModelSpec.from_config(folder.config)
    check_settings(folder.config, config, "model.path")
    attention = AttentionShape.of_model_spec(model).over(config.mesh.tp)
    check_kernel(config.attention.kernel, attention, deterministic=config.run.deterministic)
    choice = choose_strategy(config.attention.strategy, attention, config.mesh.cp)
    if longest_context:
        _refuse_flags_without_effect(flags)
    device = _device(flags, config)
    setup = setup_of_folders(config, model, on_cpu=device.on_cpu, memory_bytes=device.memory_bytes)
    if longest_context:
        record, lines = _longest_context(setup, device, min(folder.max_sample_tokens or MOST_TOKENS, MOST_TOKENS))
    else:
        record, lines = _plan(config, folder, choice, setup, device, flags.lengths)
    print(json.dumps(record, indent=1, allow_nan=False) if as_json else "\n".join(lines))
    return 0


def _with_ranks(config: RunConfig, ranks: int | None) -> RunConfig:
    if ranks is None and config.mesh.dp == "auto":
        problem = "mesh.dp=auto depends on the ranks that are started"
        raise ConfigError(problem, field="--ranks", hint="give --ranks N, or mesh.dp")
    if ranks is not None:
        config = config.with_ranks(ranks)
        if config.ranks != ranks:
            raise ConfigError(
                f"--ranks={ranks}, but {config.mesh.product} needs {config.ranks}",
                field="--ranks",
                hint="change the mesh, or set mesh.dp=auto",
            )
    samples_field = "rollout.prompts_per_step" if config.has_rollouts else "batch.samples_per_update"
    for field, what, number, most in (
        ("mesh.dp" if ranks is None else "--ranks", "ranks", config.ranks, _MOST_RANKS),
        (samples_field, "samples", config.samples_per_step, _MOST_SAMPLES),
    ):
        if number > most:
            problem = f"{field}: a step of more than {most:,} {what} is not planned"
            raise ConfigError(problem, field=field, hint="lower it")
    return config


def _refuse_flags_without_effect(flags: Flags) -> None:
    for name in ("lengths", "calibrate", "gbps"):
        if getattr(flags, name) is not None:
            problem = f"--{name} has no effect on --longest-context, which looks for a length by memory alone"
            raise ConfigError(problem, field=f"--{name}", hint="leave one of them out")


def _device(flags: Flags, config: RunConfig) -> Device:
    """Returns the known or guessed properties of a rank's device."""
    for flag, value in (("--memory-gb", flags.memory_gb), ("--gbps", flags.gbps)):
        if value is not None and not LEAST_RATE <= value <= MOST_RATE:
            problem = f"{flag}={value:g} is not a positive number from {LEAST_RATE:g} to {MOST_RATE:g}"
            raise ConfigError(problem, field=flag, hint="give one, or leave it out")
    name, dtype = flags.device or ("CPU" if config.mesh.device == "cpu" else "H100"), config.precision.compute_dtype
    if flags.calibrate is not None:
        rates = _calibrated(flags.calibrate, config)
    elif config.batch.cost_model is not None:
        rates = read_calibration(config.batch.cost_model, field="batch.cost_model")
        if rates.dtype not in (None, dtype):
            source = f"{rates.source}, in {rates.dtype} where precision.compute_dtype is {dtype}"
            rates = replace(rates, source=source)
    else:
        rates = guessed_rates(name, ELEMENT_BYTES[dtype])
    if flags.gbps is not None:
        rates = replace(rates, source=f"{rates.source} and --gbps", comm_gbps=flags.gbps)
    memory = device_bytes(name) if flags.memory_gb is None else round(flags.memory_gb * 1e9)
    named_by = "--memory-gb" if flags.memory_gb is not None else "--device" if flags.device else None
    return Device(rates, memory, named_by, on_cpu=name == "CPU")


def _calibrated(path: Path, config: RunConfig) -> Rates:
    """Measures the rates of this machine with a process for each rank, or for each GPU, and writes them to a file.

    Raises:
        ConfigError: the file cannot be written, or this machine has no device of the kind in mesh.device.
        ResourceError: the cores may not run as many ranks.
    """
    folder = path.absolute().parent
    is_sound = folder.is_dir() and (path.is_file() or not path.exists()) and can_keep_files(path)
    if not is_sound or not os.access(path if path.exists() else folder, os.W_OK):
        problem = f"--calibrate={path} is not a file that can be written"
        raise ConfigError(problem, field="--calibrate", hint="name a file in a folder that exists")
    check_cores(
        config.ranks,
        config.mesh.device,
        asked=f"--calibrate with {config.ranks} ranks",
        field="--calibrate",
        hint="plan a smaller mesh here, or calibrate where it will run",
    )
    import torch

    from slimefsdp.distributed.mesh import choose_device
    from slimefsdp.estimate.calibrate import calibrate

    device = choose_device(config.mesh.device).type
    ranks = min(config.ranks, torch.cuda.device_count()) if device == "cuda" else config.ranks
    rates, details = calibrate(device, config.precision.compute_dtype, ranks)
    write_calibration(path, rates, details)
    return rates


def _plan(
    config: RunConfig, folder: ModelFolder, choice: Choice, setup: TrainingSetup, device: Device, lengths: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the plan as a record and as lines.

    Args:
        lengths: the value of `--lengths`; None means a guess from the settings.
    """
    spec = _guessed_lengths(config) if lengths is None else lengths
    samples, cost = (
        read_samples(spec, config.samples_per_step, seed=config.run.seed),
        cost_model_of(config, folder.config),
    )
    if isinstance(samples, RolloutBatch):
        plan = plan_training(config, samples, cost)
        plan = replace(plan, updates=plan.updates[: plan.num_first_epoch_updates])
        if not plan.updates:
            problem = "nothing in this batch trains: its tokens are masked, or all rewards of each group are equal"
            raise BatchError(problem, field="rewards", hint="give another batch, or lengths")
        tokens, counted = samples.lengths, int(samples.mask.sum()) / samples.num_tokens
    else:
        tokens, counted = samples, 1.0
        plan = plan_batch(
            tokens,
            PackLimits(setup.mesh.data_ranks, config.max_pack_tokens, config.mesh.cp, cost),
            UpdateCut(config.batch.samples_per_update),
            together=np.arange(len(tokens)) // 2 if config.loss.policy == "dpo" else None,
        )
    schedule = measure_schedule(plan, tokens, setup, strategy=choice.traffic, cost=cost, counted_share=counted)
    if folder.max_sample_tokens is not None and schedule.longest > folder.max_sample_tokens:
        raise BatchError(
            f"a sample has {schedule.longest} tokens, but {folder.path} has learned positions for "
            f"{folder.max_sample_tokens}",
            field="lengths",
            hint="give shorter --lengths, or another model",
        )
    result = recommend(setup, schedule, device, selective=not config.model.compile)
    batch = samples if isinstance(samples, RolloutBatch) else None
    source = spec if lengths is not None else f"{spec} (a guess: give --lengths)"
    lines = [
        *_load_lines(config, setup, schedule, source, batch),
        *(_attention_lines(setup, schedule, choice) if setup.mesh.cp > 1 else []),
        *_memory_lines(setup, schedule),
        *_time_lines(schedule, device, result),
    ]
    return {"lengths": spec, "is_batch": batch is not None, **_record(setup, schedule, device, result)}, lines


def _guessed_lengths(config: RunConfig) -> str:
    """Returns a guess of the samples' lengths, as a value of `--lengths`.

    The mean is half of rollout.max_new_tokens or, for sft, an eighth of batch.max_tokens_per_rank. Except for sft, the
    size of packs matters only if a sample would not fit into a pack, so that plans of one task can be compared.
    """
    if config.algorithm != "sft":
        new_tokens, of_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
        mean, longest = new_tokens / 2, new_tokens + (new_tokens if of_prompt is None else of_prompt)
    else:
        mean, longest = config.batch.max_tokens_per_rank / 8, config.max_pack_tokens
    if config.loss.policy == "dpo":  # the two samples of a pair are in one pack
        longest = min(longest, config.max_pack_tokens // 2)
    return f"lognormal({max(2, round(mean))}, 0.8, 2, {min(longest, config.max_pack_tokens)})"


def _record(setup: TrainingSetup, schedule: Schedule, device: Device, result: Recommendation) -> dict[str, Any]:
    def of_candidate(candidate: Candidate) -> dict[str, Any]:
        return {
            "settings": candidate.setup.settings,
            "memory": as_record(candidate.memory),
            "seconds": asdict(candidate.seconds) | {"total": candidate.seconds.total},
            "fits": device.has_room(candidate.memory.total),
            "tokens_per_second": candidate.tokens_per_second(schedule),
            "mfu": candidate.mfu(schedule, device.rates),
        }

    comm = {name: schedule.comm_bytes(name, setup) for name in schedule.comm}
    return {
        "parameters": (setup.whole or setup.model).parameters,
        "mesh": asdict(setup.mesh) | {"tp": setup.tp, "ep": setup.ep},
        "shared_layers": _shared_layers(setup, schedule),
        **({} if setup.adapters is None else {"adapters": asdict(setup.adapters)}),
        **({"lightest_strategy": lightest_strategy(schedule, setup)} if setup.mesh.cp > 1 else {}),
        **asdict(schedule),
        "comm": {name: None if sent is None else asdict(sent) for name, sent in comm.items()},
        "most_tokens_at_once": schedule.largest.tokens,
        "attention_bytes_per_rank": schedule.attention_bytes_per_rank(setup),
        "sharding": asdict(sharding_traffic(setup, schedule.micro_batches_per_update)),
        "memory": {level: as_record(memory) for level, memory in _memory_by_level(setup, schedule).items()},
        "estimate": {
            "rates": asdict(device.rates),
            "memory_bytes": device.memory_bytes,
            "tokens_per_micro_batch": schedule.largest.tokens,
            "chosen": of_candidate(result.chosen),
            "recommended": None if result.recommended is None else of_candidate(result.recommended),
            "advice": result.advice,
            "candidates": [of_candidate(candidate) for candidate in result.candidates],
        },
    }


def _shared_layers(setup: TrainingSetup, schedule: Schedule) -> dict[str, int]:
    return shared_layer_bytes(setup, schedule.computed_tokens / len(schedule.updates) / setup.mesh.ranks)


def _memory_by_level(setup: TrainingSetup, schedule: Schedule) -> dict[str, Memory]:
    return {level: peak_memory(replace(setup, sharding=level), schedule.largest) for level in setup.shardings}


def _load_lines(
    config: RunConfig, setup: TrainingSetup, schedule: Schedule, source: str, batch: RolloutBatch | None
) -> list[str]:
    """Returns lines about mesh, model, samples, schedule and balance.

    Args:
        source: where the samples come from.
        batch: the planned batch; None if only lengths are known.
    """
    model, mesh, updates, imbalance = setup.whole or setup.model, setup.mesh, schedule.updates, schedule.imbalance
    fewest, mean, most = schedule.tokens_per_rank
    samples = _range([update.samples for update in updates])
    micro_batches = _range([update.micro_batches for update in updates])
    repeated = f", {config.loss.epochs} times over" if config.loss.epochs > 1 else ""
    lines = [
        f"mesh      {config.ranks} rank{'s' * (config.ranks != 1)} = dp_replicate {mesh.dp_replicate} "
        f"x dp {mesh.dp} x cp {mesh.cp}{f' x tp {setup.tp}' if setup.tp > 1 else ''}; "
        f"packs of at most {config.max_pack_tokens:,} tokens",
        f"model     {_count(model.parameters)} parameters: {model.layers} layers of {model.hidden}, "
        f"{model.heads} heads over {model.kv_heads} key heads",
    ]
    if setup.adapters is not None:
        lines.append(
            f"adapters  {_count(setup.adapter_parameters)} parameters of rank {setup.lora_rank} are trained, next to "
            f"weights in {config.precision.compute_dtype} that are not"
        )
    lines.append(
        f"samples   {schedule.samples:,} with {schedule.tokens:,} tokens, the longest {schedule.longest:,}: {source}"
    )
    sharing = config.batch.share_prefixes
    if batch is not None and (left_out := batch.num_samples - schedule.samples):
        lines.append(f"left out  {left_out:,} samples in which nothing trains")
    if schedule.computed_tokens < schedule.tokens:
        lines.append(f"prefixes  {schedule.computed_tokens:,} tokens are computed: what samples share, once")
    elif may_share(config) and batch is None:
        lines.append(f"prefixes  all samples are counted whole; batch.share_prefixes={sharing} may compute less")
    elif may_share(config):
        needed = f"; under auto it must save {MIN_GAIN:.0%} of the time" if sharing == "auto" else ""
        lines.append(f"prefixes  nothing is shared{needed}")
    cp_rows = (("cp ranks, per pack", imbalance.cp), ("  if all were cut", imbalance.zigzag)) if mesh.cp > 1 else ()
    return [
        *lines,
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
            *([name, "", f"{cp.tokens:.3f}", f"{cp.pairs:.3f}", f"{cp.work:.3f}"] for name, cp in cp_rows),
        ),
        "",
    ]


def _attention_lines(setup: TrainingSetup, schedule: Schedule, choice: Choice) -> list[str]:
    sent = {name: schedule.comm_bytes(name, setup) for name in schedule.comm}
    rows = []
    for name, comm in sent.items():
        cells = ["heads do not", "divide by cp"] if comm is None else map(byte_text, (comm.forward, comm.backward))
        rows.append([_marked(name, name == schedule.strategy), *cells])
    lines = [
        "bytes that attention sends in one layer, of all ranks together, per update",
        *_rows(["", "forward", "backward"], *rows),
        f"  one rank in all layers: {byte_text(schedule.attention_bytes_per_rank(setup))}",
        *_wrapped(f"* {choice.name} is used: {choice.reason}"),
    ]
    least = lightest_strategy(schedule, setup)
    current, lightest = sent[schedule.strategy], sent[least]
    if current is not None and lightest is not None and least != schedule.strategy:
        bytes_of_both = f"{byte_text(lightest.total)} instead of {byte_text(current.total)}"
        lines += _wrapped(
            f"attention.strategy={least} would send {bytes_of_both} for samples of these lengths, which auto does not "
            "look at"
        )
    return [*lines, ""]


def _memory_lines(setup: TrainingSetup, schedule: Schedule) -> list[str]:
    sent = sharding_traffic(setup, schedule.micro_batches_per_update)
    levels = _memory_by_level(setup, schedule)
    return [
        f"bytes that sharding sends per rank and update: gathers {byte_text(sent.all_gather)}, reduce-scatters "
        f"{byte_text(sent.reduce_scatter)}, all-reduces {byte_text(sent.all_reduce)}",
        *(
            f"bytes that {kind} parallelism sends per rank and update: {byte_text(count)} of hidden states"
            for kind, count in _shared_layers(setup, schedule).items()
        ),
        "",
        "memory of a rank at the fullest moment of an update (an estimate)",
        *_rows(
            ["", *_TERMS, "on the host"],
            *([_marked(level, level == setup.sharding), *_terms(memory)] for level, memory in levels.items()),
        ),
        "",
    ]


def _time_lines(schedule: Schedule, device: Device, result: Recommendation) -> list[str]:
    limit = "no limit (give --memory-gb)" if device.memory_bytes is None else byte_text(device.memory_bytes)
    rates, now = device.rates, result.chosen
    rows = []
    for candidate in dict.fromkeys((now, result.recommended, *result.candidates[:6])):
        if candidate is not None:
            time, size = candidate.seconds, candidate.memory.total
            seconds = (time.total, time.products, time.attention, time.memory, time.comm, time.host)
            name = _marked(f"{candidate.setup.sharding}, {_stored(candidate.setup)}", candidate == now)
            fits = "yes" if device.has_room(size) else "no"
            rows.append([name, *(f"{value:,.3g}" for value in seconds), byte_text(size), fits])
    return [
        f"least time of an update if nothing overlaps, by {rates.source}: {rates.matrix_tflops:,.3g} TFLOP/s in "
        f"products, {rates.comm_gbps:,.3g} GB/s between ranks; memory: {limit}",
        *_rows(["", "seconds", "products", "attention", "memory", "sent", "host", "bytes", "fits"], *rows),
        f"  * the present settings: {now.tokens_per_second(schedule):,.0f} tokens/s, "
        f"{now.mfu(schedule, rates):.0%} of the rate in products",
        *_wrapped(result.advice),
    ]


def _longest_context(setup: TrainingSetup, device: Device, most_tokens: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the longest samples that fit, as a record and as lines.

    The first is for the settings themselves, the others for other settings of offloading and recomputation.

    Args:
        most_tokens: limit on the length that is considered.

    Raises:
        ConfigError: the memory of the device is not known. ResourceError: not even one token fits.
    """
    if device.memory_bytes is None:
        problem = "--longest-context needs the memory of a rank, which is not known of a CPU"
        raise ConfigError(problem, field="--memory-gb", hint="give it, or --device")
    contexts = longest_contexts(setup, device.memory_bytes, most_tokens=most_tokens)
    if not any(context.tokens for context in contexts):
        least = min(context.memory.total for context in contexts)
        raise ResourceError(
            f"no sample fits {byte_text(device.memory_bytes)} a rank: one token is estimated at {byte_text(least)}, "
            "and a tenth is left free",
            field=device.named_by or "--memory-gb",
            hint="raise mesh.dp, train adapters (lora.rank), or name a larger device",
        )
    rows, records = [], []
    for context in contexts:
        workspace = context.attention_workspace
        name = _marked(_stored(context.setup), context is contexts[0])
        rows.append([name, f"{context.tokens:,}", *_terms(context.memory), byte_text(workspace)])
        records.append(
            {
                "settings": context.setup.storage_settings,
                "tokens": context.tokens,
                "memory": as_record(context.memory),
                "attention_workspace": workspace,
            }
        )
    lines = [
        f"the longest sample that fits {byte_text(device.memory_bytes)} a rank, a tenth of them left free (an "
        f"estimate); cp {setup.mesh.cp}, {_count((setup.whole or setup.model).parameters)} parameters",
        *_rows(["", "tokens", *_TERMS, "on the host", "of the free tenth"], *rows),
        "  * the present settings. The last column is what flash attention's backward allocates inside, from the tenth "
        "that is left free",
    ]
    if any(context.tokens == most_tokens for context in contexts):
        reason = "longer ones were not tried" if most_tokens == MOST_TOKENS else "the positions that the model learned"
        lines.append(f"  no longer samples than {most_tokens:,} tokens: {reason}")
    record = {"memory_bytes": device.memory_bytes, "most_tokens": most_tokens, "longest_context": records}
    return record, lines


def _stored(setup: TrainingSetup) -> str:
    return f"recompute {setup.recompute}" + (", states on the host" if setup.cpu_offload else "")


def _terms(memory: Memory) -> list[str]:
    """Returns the parts of a device's memory in the order of `_TERMS`, then the memory of the host."""
    at_rest = (memory.parameters, memory.gradients, memory.optimizer, memory.unsharded)
    in_use = (memory.activations, memory.head, memory.buffers, memory.others, memory.total, memory.host)
    return [byte_text(size) for size in (*at_rest, *in_use)]


def _rows(*rows: list[str]) -> list[str]:
    """Returns lines with aligned columns: the first column to the left, all other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(["  " + first.ljust(widths[0]), *cells]).rstrip())
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _marked(name: str, is_chosen: bool) -> str:
    return f"{name} *" if is_chosen else name


def _range(values: list[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
