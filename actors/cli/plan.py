"""`slimefsdp plan`: what a configuration would do with samples of given lengths, from config.json alone.

Answers without torch, ray or transformers, on any machine: mesh, schedule, balance, traffic, memory and time, and
which way of sharding, storing and recomputing is estimated to be the fastest that fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import replace
from pathlib import Path

from actors.cli.plan_table import longest_context_table, plan_table
from actors.model_folders import models_to_look_at
from slimefsdp.attention.select import AttentionShape, check_kernel, choose_strategy
from slimefsdp.batching.hardware import (
    LEAST_RATE,
    MOST_RATE,
    Rates,
    device_bytes,
    guessed_rates,
    read_calibration,
)
from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ResourceError, byte_text
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import check_architecture, read_model_folder
from slimefsdp.perf_model.from_config import (
    byte_sizes_of,
    colocated_models_of,
    computing_of,
    simulate_settings,
    with_chosen_sharding,
    workload_of,
)
from slimefsdp.perf_model.lengths import read_samples
from slimefsdp.perf_model.longest_context import MOST_TOKENS, attention_workspace, longest_contexts
from slimefsdp.perf_model.memory import Computing
from slimefsdp.perf_model.recommend import Device, as_record, lightest_strategy, look_ahead
from slimefsdp.perf_model.simulate import MeshShape
from slimefsdp.perf_model.step_time import ColocatedModels
from slimefsdp.rpc import Role
from slimefsdp.training.plan import cost_model_of, plan_training

# beyond these a plan takes longer than anybody waits, and more memory than it plans for
_MOST_RANKS, _MOST_SAMPLES = 100_000, 10_000_000


def plan_command(options: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ConfigError: the settings, --lengths, --ranks or a rate. ModelError: a model's folder. BatchError: a sample does
            not fit. ResourceError: nothing fits the memory of the device that was named.
    """
    config, _ = models_to_look_at(load_config(options.config, options.overrides), with_weights=False)
    config = _with_ranks(config, options.ranks)
    _check_size(config, "mesh.dp" if options.ranks is None else "--ranks")
    folder = read_model_folder(config.model.path, with_weights=False)
    check_architecture(folder)
    model_spec = ModelSpec.from_config(folder.config)
    spec = _guessed_lengths(config) if options.lengths is None else options.lengths
    attention = AttentionShape.of_model_spec(model_spec)
    check_kernel(config.attention.kernel, attention, deterministic=config.run.deterministic)
    choice = choose_strategy(config.attention.strategy, attention, config.mesh.cp)
    device = _device(options, config)
    assert config.mesh.dp != "auto"
    shape = MeshShape(config.mesh.dp_replicate, config.mesh.dp, config.mesh.cp)
    beside = colocated_models_of(config, *(_model_spec_of(config, role) for role in ("ref", "critic")))
    config = with_chosen_sharding(
        config, model_spec, shape, beside=beside, memory_bytes=device.memory_bytes, on_cpu=device.on_cpu
    )
    computing = computing_of(config, model_spec, on_cpu=device.on_cpu)
    if options.longest_context:
        most = min(folder.max_sample_tokens or MOST_TOKENS, MOST_TOKENS)
        return _print_longest_context(options, config, model_spec, shape, beside, computing, device, most)
    adapters = computing.adapters_of(model_spec)
    samples = read_samples(spec, config.samples_per_step, seed=config.run.seed)
    cost = cost_model_of(config, folder.config)
    found = simulate_settings(
        config,
        model_spec,
        choice,
        samples,
        computing=computing,
        counted_share=options.counted,
        cost=cost,
        plan_batch=plan_training,
    )
    if folder.max_sample_tokens is not None and found.longest > folder.max_sample_tokens:
        raise BatchError(
            f"a sample of {found.longest} tokens, but {folder.path} has learned positions for "
            f"{folder.max_sample_tokens}",
            field="lengths",
            hint="give shorter --lengths, or another model",
        )
    work = workload_of(model_spec, found, byte_sizes_of(config), beside, computing.recomputed_share(model_spec.layers))
    outlook = look_ahead(work, computing, device, config)
    batch = samples if isinstance(samples, RolloutBatch) else None
    if options.json:
        record = {"lengths": spec, "is_batch": batch is not None, "parameters": model_spec.parameters}
        if adapters is not None:
            record |= {"adapters": dataclasses.asdict(adapters)}
        record |= dataclasses.asdict(found)
        if config.mesh.cp > 1:
            record |= {"lightest_strategy": lightest_strategy(found, attention)}
        record |= {"memory": {level: as_record(held) for level, held in outlook.memory.items()}}
        print(json.dumps({**record, "estimate": outlook.to_json()}, indent=1, allow_nan=False))
    else:
        source = spec if options.lengths is not None else f"{spec} (a guess: give --lengths)"
        print("\n".join(plan_table(config, model_spec, choice, found, outlook, source, batch, adapters)))
    return 0


def _print_longest_context(
    options: argparse.Namespace,
    config: RunConfig,
    model_spec: ModelSpec,
    mesh: MeshShape,
    beside: ColocatedModels,
    computing: Computing,
    device: Device,
    most_tokens: int,
) -> int:
    for flag, given, because in (
        ("--lengths", options.lengths, "looks for the length"),
        ("--tflops", options.tflops, "is about memory alone"),
        ("--gbps", options.gbps, "is about memory alone"),
        ("--calibration", options.calibration, "is about memory alone"),
    ):
        if given is not None:
            problem = f"{flag} with --longest-context, which {because}"
            raise ConfigError(problem, field=flag, hint="leave one of them out")
    if device.memory_bytes is None:
        problem = "--longest-context on a device whose memory is not known"
        raise ConfigError(problem, field="--memory-gb", hint="give it, or --device")
    assert config.fsdp.sharding != "auto"
    found = longest_contexts(
        model_spec,
        config.fsdp.sharding,
        mesh=mesh,
        sizes=byte_sizes_of(config),
        computing=computing,
        beside=beside,
        memory_bytes=device.memory_bytes,
        counted_share=1.0 if options.counted is None else options.counted,
        most_tokens=most_tokens,
    )
    if not any(one.tokens for one in found):
        least = min(one.memory.total for one in found)
        raise ResourceError(
            f"no sample fits {byte_text(device.memory_bytes)} a rank: one token is estimated at {byte_text(least)}, "
            "and a tenth is left free",
            field=device.said_by or "--memory-gb",
            hint="raise mesh.dp, train adapters (lora.rank), or name a larger device",
        )
    if options.json:
        ways = [
            {"settings": one.settings, "tokens": one.tokens, "memory": as_record(one.memory),
             "attention_workspace": attention_workspace(model_spec, one.tokens, mesh.cp)}
            for one in found
        ]  # fmt: skip
        record = {"memory_bytes": device.memory_bytes, "most_tokens": most_tokens, "longest_context": ways}
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        print("\n".join(longest_context_table(model_spec, mesh, found, device.memory_bytes, most_tokens)))
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


def _check_size(config: RunConfig, ranks_field: str) -> None:
    samples_field = "rollout.prompts_per_step" if config.has_rollouts else "batch.samples_per_update"
    for field, what, number, most in (
        (ranks_field, "ranks", config.ranks, _MOST_RANKS),
        (samples_field, "samples", config.samples_per_step, _MOST_SAMPLES),
    ):
        if number > most:
            problem = f"{field}: a step of more than {most:,} {what} is not planned"
            raise ConfigError(problem, field=field, hint="lower it")


def _guessed_lengths(config: RunConfig) -> str:
    """Half of what a response may have on average; without responses an eighth of what a rank may hold.

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


def _model_spec_of(config: RunConfig, role: Role) -> ModelSpec:
    path, field = config.folder_of(role)
    return ModelSpec.from_config(read_model_folder(path, field=field, with_weights=False).config, field=field)


def _device(options: argparse.Namespace, config: RunConfig) -> Device:
    """What is known of a rank's device, or guessed."""
    for flag, value in (("--memory-gb", options.memory_gb), ("--tflops", options.tflops), ("--gbps", options.gbps)):
        if value is not None and not LEAST_RATE <= value <= MOST_RATE:
            raise ConfigError(
                f"{flag}={value:g} is no positive number from {LEAST_RATE:g} to {MOST_RATE:g}",
                field=flag,
                hint="give one, or leave it out",
            )
    if options.counted is not None and not 0 < options.counted <= 1:
        raise ConfigError(f"--counted={options.counted:g} is no share in (0, 1]", field="--counted", hint="give one")
    name = options.device or ("CPU" if config.mesh.device == "cpu" else "H100")
    rates = guessed_rates(name, byte_sizes_of(config).compute)
    if options.calibration is not None:
        rates = _calibrated(options.calibration, "--calibration", config)
    elif config.batch.cost_model is not None:
        rates = _calibrated(config.batch.cost_model, "batch.cost_model", config)
    if options.tflops is not None:
        slowdown = rates.attention_slowdown
        rates = replace(
            rates, source=f"{rates.source} and --tflops", matrix_tflops=options.tflops,
            attention_tflops=options.tflops / slowdown,
        )  # fmt: skip
    if options.gbps is not None:
        rates = replace(rates, source=f"{rates.source} and --gbps", comm_gbps=options.gbps)
    memory = device_bytes(name) if options.memory_gb is None else round(options.memory_gb * 1e9)
    said = "--memory-gb" if options.memory_gb is not None else "--device" if options.device else None
    return Device(rates, memory, said, on_cpu=name == "CPU")


def _calibrated(path: Path, field: str, config: RunConfig) -> Rates:
    """The rates of a file, which says so where they are of another dtype than the one that is computed in."""
    rates, dtype = read_calibration(path, field=field), config.precision.compute_dtype
    if rates.dtype in (None, dtype):
        return rates
    return replace(rates, source=f"{rates.source}, in {rates.dtype} where precision.compute_dtype is {dtype}")
