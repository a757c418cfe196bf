"""`slimefsdp plan`: what settings would do with samples of given lengths, from the settings and config.json alone.

The answer needs no torch, ray or transformers: mesh, schedule, balance, traffic, memory and time, and which way of
sharding, storing and recomputing is estimated to be the fastest that fits. Only `--calibrate` starts processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.cli.plan_table import longest_context_table, plan_table
from actors.cluster.capacity import check_cores
from actors.model_folders import models_to_look_at
from slimefsdp.attention.select import AttentionShape, check_kernel, choose_strategy
from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.batching.plan import PackLimits, UpdateCut, plan_batch
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
from slimefsdp.estimate.lengths import read_samples
from slimefsdp.estimate.memory import peak_memory
from slimefsdp.estimate.recommend import (
    MOST_TOKENS,
    Candidate,
    Recommendation,
    as_record,
    longest_contexts,
    recommend,
)
from slimefsdp.estimate.schedule import Schedule, lightest_strategy, measure_schedule
from slimefsdp.estimate.setup import SHARDINGS, MeshShape, TrainingSetup, setup_of
from slimefsdp.estimate.traffic import choose_sharding, sharding_traffic
from slimefsdp.io.user_files import can_keep_files
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import check_architecture, read_model_folder
from slimefsdp.rpc import Role
from slimefsdp.training.plan import cost_model_of, plan_training

# beyond these, a plan takes longer than anybody waits, and more memory than it plans for
_MOST_RANKS, _MOST_SAMPLES = 100_000, 10_000_000


def plan_command(options: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ConfigError: the settings, --lengths, --ranks or a rate. ModelError: a model's folder. BatchError: a sample does
            not fit. ResourceError: nothing fits the memory of the device that was named.
    """
    config, _ = models_to_look_at(load_config(options.config, options.overrides), with_weights=False)
    config = _with_ranks(config, options.ranks)
    folder = read_model_folder(config.model.path, with_weights=False)
    check_architecture(folder)
    model = ModelSpec.from_config(folder.config)
    attention = AttentionShape.of_model_spec(model)
    check_kernel(config.attention.kernel, attention, deterministic=config.run.deterministic)
    choice = choose_strategy(config.attention.strategy, attention, config.mesh.cp)
    _check_flags(options)
    device = _device(options, config)
    setup = setup_of_folders(config, model, on_cpu=device.on_cpu, memory_bytes=device.memory_bytes)
    if options.longest_context:
        return _print_longest_context(options, setup, device, min(folder.max_sample_tokens or MOST_TOKENS, MOST_TOKENS))

    spec = _guessed_lengths(config) if options.lengths is None else options.lengths
    samples = read_samples(spec, config.samples_per_step, seed=config.run.seed)
    cost = cost_model_of(config, folder.config)
    if isinstance(samples, RolloutBatch):
        batch, lengths = samples, samples.lengths
        plan = plan_training(config, batch, cost)
        plan = replace(plan, updates=plan.updates[: plan.num_first_epoch_updates])
        if not plan.updates:
            problem = "nothing in this batch trains: its tokens are masked, or all rewards of each group are equal"
            raise BatchError(problem, field="rewards", hint="give another batch, or lengths")
        counted = int(batch.mask.sum()) / batch.num_tokens
    else:
        batch, lengths, counted = None, samples, 1.0
        plan = plan_batch(
            lengths,
            PackLimits(setup.mesh.data_ranks, config.max_pack_tokens, config.mesh.cp, cost),
            UpdateCut(config.batch.samples_per_update),
            together=np.arange(len(lengths)) // 2 if config.loss.policy == "dpo" else None,
        )
    counted = counted if options.counted is None else options.counted
    schedule = measure_schedule(plan, lengths, setup, strategy=choice.traffic, cost=cost, counted_share=counted)
    if folder.max_sample_tokens is not None and schedule.longest > folder.max_sample_tokens:
        raise BatchError(
            f"a sample of {schedule.longest} tokens, but {folder.path} has learned positions for "
            f"{folder.max_sample_tokens}",
            field="lengths",
            hint="give shorter --lengths, or another model",
        )
    found = recommend(setup, schedule, device, selective=not config.model.compile)
    if options.json:
        record = {"lengths": spec, "is_batch": batch is not None, **_record(setup, schedule, device, found, attention)}
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        source = spec if options.lengths is not None else f"{spec} (a guess: give --lengths)"
        print("\n".join(plan_table(config, setup, choice, schedule, device, found, source, batch)))
    return 0


def setup_of_folders(
    config: RunConfig, model: ModelSpec, *, on_cpu: bool, memory_bytes: int | None = None
) -> TrainingSetup:
    """Returns the setup of settings whose mesh.dp is a number, with the models that their other roles name.

    Args:
        memory_bytes: of a rank's device, which fsdp.sharding=auto depends on; None: more than enough.
    """
    assert config.mesh.dp != "auto"
    mesh = MeshShape(config.mesh.dp_replicate, config.mesh.dp, config.mesh.cp)

    def model_of(role: Role) -> ModelSpec:
        path, field = config.folder_of(role)
        return ModelSpec.from_config(read_model_folder(path, field=field, with_weights=False).config, field=field)

    setup = setup_of(config, model, mesh, on_cpu=on_cpu, reference=model_of("ref"), critic=model_of("critic"))
    if config.fsdp.sharding != "auto":
        return setup
    return replace(setup, sharding=choose_sharding(setup, config.batch.max_tokens_per_rank, memory_bytes))


def _record(
    setup: TrainingSetup, schedule: Schedule, device: Device, found: Recommendation, attention: AttentionShape
) -> dict[str, Any]:
    """Returns the plan for JSON."""

    def of_candidate(one: Candidate) -> dict[str, Any]:
        return {
            "settings": one.setup.settings,
            "memory": as_record(one.memory),
            "seconds": dataclasses.asdict(one.seconds) | {"total": one.seconds.total},
            "fits": device.has_room(one.memory.total),
            "tokens_per_second": one.tokens_per_second(schedule),
            "mfu": one.mfu(schedule, device.rates),
        }

    comm = {name: schedule.comm_bytes(name, setup) for name in schedule.comm}
    record: dict[str, Any] = {"parameters": setup.model.parameters, "mesh": dataclasses.asdict(setup.mesh)}
    if setup.adapters is not None:
        record["adapters"] = dataclasses.asdict(setup.adapters)
    if setup.mesh.cp > 1:
        record["lightest_strategy"] = lightest_strategy(schedule, setup, attention)
    return record | {
        **dataclasses.asdict(schedule),
        "comm": {name: None if sent is None else dataclasses.asdict(sent) for name, sent in comm.items()},
        "most_tokens_at_once": schedule.largest.tokens,
        "attention_bytes_per_rank": schedule.attention_bytes_per_rank(setup),
        "sharding": dataclasses.asdict(sharding_traffic(setup, schedule.micro_batches_per_update)),
        "memory": {
            level: as_record(peak_memory(replace(setup, sharding=level), schedule.largest)) for level in SHARDINGS
        },
        "estimate": {
            "rates": dataclasses.asdict(device.rates),
            "memory_bytes": device.memory_bytes,
            "tokens_per_micro_batch": schedule.largest.tokens,
            "chosen": of_candidate(found.chosen),
            "recommended": None if found.recommended is None else of_candidate(found.recommended),
            "advice": found.advice,
            "candidates": [of_candidate(one) for one in found.candidates],
        },
    }


def _print_longest_context(options: argparse.Namespace, setup: TrainingSetup, device: Device, most_tokens: int) -> int:
    for flag, because in (
        ("lengths", "looks for the length"),
        *((name, "is about memory alone") for name in ("tflops", "gbps", "calibration", "calibrate")),
    ):
        if getattr(options, flag) is not None:
            problem = f"--{flag} with --longest-context, which {because}"
            raise ConfigError(problem, field=f"--{flag}", hint="leave one of them out")
    if device.memory_bytes is None:
        problem = "--longest-context on a device whose memory is not known"
        raise ConfigError(problem, field="--memory-gb", hint="give it, or --device")
    counted = 1.0 if options.counted is None else options.counted
    found = longest_contexts(setup, device.memory_bytes, counted_share=counted, most_tokens=most_tokens)
    if not any(one.tokens for one in found):
        least = min(one.memory.total for one in found)
        raise ResourceError(
            f"no sample fits {byte_text(device.memory_bytes)} a rank: one token is estimated at {byte_text(least)}, "
            "and a tenth is left free",
            field=device.named_by or "--memory-gb",
            hint="raise mesh.dp, train adapters (lora.rank), or name a larger device",
        )
    if options.json:
        ways = [one.record() for one in found]
        record = {"memory_bytes": device.memory_bytes, "most_tokens": most_tokens, "longest_context": ways}
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        print("\n".join(longest_context_table(setup, found, device.memory_bytes, most_tokens)))
    return 0


def _with_ranks(config: RunConfig, ranks: int | None) -> RunConfig:
    if ranks is None and config.mesh.dp == "auto":
        problem = "mesh.dp=auto depends on the ranks that are started"
        raise ConfigError(problem, field="--ranks", hint="give --ranks N, or mesh.dp")
    if ranks is not None:
        config = config.with_ranks(ranks)
        if config.ranks != ranks:
            raise ConfigError(
                f"--ranks={ranks}, but mesh.dp_replicate={config.mesh.dp_replicate} x mesh.dp={config.mesh.dp} x "
                f"mesh.cp={config.mesh.cp} needs {config.ranks}",
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


def _guessed_lengths(config: RunConfig) -> str:
    """Returns a guess: half of a response's bound on average; without responses an eighth of what a rank may hold.

    With responses the guess does not depend on the packs, unless a sample would not fit one, so that plans of one task
    can be compared.
    """
    if config.algorithm != "sft":
        new_tokens, of_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
        mean, longest = new_tokens / 2, new_tokens + (new_tokens if of_prompt is None else of_prompt)
    else:
        mean, longest = config.batch.max_tokens_per_rank / 8, config.max_pack_tokens
    if config.loss.policy == "dpo":  # the two samples of a pair are in one pack
        longest = min(longest, config.max_pack_tokens // 2)
    return f"lognormal({max(2, round(mean))}, 0.8, 2, {min(longest, config.max_pack_tokens)})"


def _check_flags(options: argparse.Namespace) -> None:
    for flag, value in (("--memory-gb", options.memory_gb), ("--tflops", options.tflops), ("--gbps", options.gbps)):
        if value is not None and not LEAST_RATE <= value <= MOST_RATE:
            problem = f"{flag}={value:g} is no positive number from {LEAST_RATE:g} to {MOST_RATE:g}"
            raise ConfigError(problem, field=flag, hint="give one, or leave it out")
    if options.counted is not None and not 0 < options.counted <= 1:
        raise ConfigError(f"--counted={options.counted:g} is no share in (0, 1]", field="--counted", hint="give one")
    if options.calibrate is not None and options.calibration is not None:
        raise ConfigError("--calibrate with --calibration", field="--calibrate", hint="leave one of them out")


def _device(options: argparse.Namespace, config: RunConfig) -> Device:
    """Returns what is known of a rank's device, or guessed."""
    name = options.device or ("CPU" if config.mesh.device == "cpu" else "H100")
    path, field = options.calibration, "--calibration"
    if path is None:
        path, field = config.batch.cost_model, "batch.cost_model"
    if options.calibrate is not None and not options.longest_context:
        rates = _calibrated(options.calibrate, config)
    elif path is not None:
        rates, dtype = read_calibration(path, field=field), config.precision.compute_dtype
        if rates.dtype not in (None, dtype):
            source = f"{rates.source}, in {rates.dtype} where precision.compute_dtype is {dtype}"
            rates = replace(rates, source=source)
    else:
        rates = guessed_rates(name, ELEMENT_BYTES[config.precision.compute_dtype])
    if options.tflops is not None:
        attention = options.tflops / rates.attention_slowdown
        source = f"{rates.source} and --tflops"
        rates = replace(rates, source=source, matrix_tflops=options.tflops, attention_tflops=attention)
    if options.gbps is not None:
        rates = replace(rates, source=f"{rates.source} and --gbps", comm_gbps=options.gbps)
    memory = device_bytes(name) if options.memory_gb is None else round(options.memory_gb * 1e9)
    named_by = "--memory-gb" if options.memory_gb is not None else "--device" if options.device else None
    return Device(rates, memory, named_by, on_cpu=name == "CPU")


def _calibrated(path: Path, config: RunConfig) -> Rates:
    """Measures this machine with processes that compute as the settings say, and writes the rates.

    Raises:
        ConfigError: the file cannot be written, or there is no such device. ResourceError: the ranks are more than the
            cores may run.
    """
    folder = path.absolute().parent
    is_sound = folder.is_dir() and (path.is_file() or not path.exists()) and can_keep_files(path)
    if not is_sound or not os.access(path if path.exists() else folder, os.W_OK):
        problem = f"--calibrate={path} is no file that can be written"
        raise ConfigError(problem, field="--calibrate", hint="name a file in a folder that exists")
    check_cores(
        config.ranks,
        config.mesh.device,
        config.cluster.max_ranks_per_core,
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
