"""`slimefsdp train`, its `--dry-run`, and `slimefsdp replay`, which trains one step on a recorded batch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from actors import side_process
from actors.cli.preflight import Checked, check_before_launch, check_start
from actors.cli.torchrun import is_rank_of_torchrun, train_as_rank
from actors.cluster.capacity import check_gpus, check_machine, gpus_of_engines, has_nvidia_driver, processes_needed
from actors.cluster.connect import cluster_size, ray_session, require_answer
from actors.rollout.record_sets import RecordSet
from actors.run_dir import RunFolder
from actors.signals import Interrupts
from actors.startup import reporting, stage
from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ResourceError, byte_text
from slimefsdp.estimate.memory import MicroBatches, training_memory
from slimefsdp.estimate.traffic import setup_of_folders
from slimefsdp.io.files import require_free_folder
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.replay import json_text

_CLUSTER_S = 60.0  # timeout of a Ray cluster's answer to a dry run


def train_command(path: Path, overrides: Sequence[str]) -> int:
    """Checks the settings, then runs the training loop; under torchrun, this process is one of the ranks.

    Raises:
        SlimeError: the settings or the machine are wrong, which is found before anything starts; or a failure later.
    """
    config = load_config(path, overrides)
    if is_rank_of_torchrun():
        return train_as_rank(config)
    with ExitStack() as stack:
        stack.enter_context(reporting())
        checked = check_before_launch(config)
        interrupts = stack.enter_context(Interrupts().listening(checked.config.cluster.grace_s))
        stack.enter_context(ray_session(checked.config))
        from actors.loop import train

        print(train(checked.config, interrupts, checked.prompts))
    return 0


def replay_command(path: Path, overrides: Sequence[str], batch_file: Path, export: Path | None) -> int:
    """Trains one step on the batch of a file, and prints the step's metrics as one JSON object.

    Raises:
        SlimeError: the settings, the machine or the batch are wrong; or the step failed.
    """
    with reporting():
        config = check_start(load_config(path, overrides), engines=None)
    if not batch_file.exists():
        raise BatchError(f"{batch_file} does not exist", field="--batch", hint="name a file of RolloutBatch.save")
    if export is not None:
        require_free_folder(export, field="--export")
    try:
        batch = RolloutBatch.load(batch_file)
    except BatchError as error:
        error.field = error.field or "--batch"
        raise
    with reporting(), ray_session(config):
        from actors.workers.worker_group import WorkerGroup

        group = WorkerGroup.launch(config)
        metrics = group.train_step(batch)
        if export is not None:
            group.export_hf(export)
        group.shutdown()
        print(json_text(metrics))
    return 0


def dry_run_command(path: Path, overrides: Sequence[str]) -> int:
    """Prints what `train` would start; starts and writes nothing. Asks a cluster at cluster.address for its size.

    Raises:
        SlimeError: as `train_command` before anything starts; also if the cluster cannot be used.
    """
    config = load_config(path, overrides)
    with reporting():
        checked = check_before_launch(config, only_looks=True)
        cluster = [] if config.cluster.address is None else [_cluster_line(config, config.cluster.address)]
    verdict = "once that is here" if checked.absent else "now"
    lines = [*_start_lines(checked), *(f"not here  {item}" for item in checked.absent), *cluster]
    print("\n".join([*lines, f"these settings are fine: `slimefsdp train` would start {verdict}"]))
    return 0


def _cluster_line(config: RunConfig, address: str) -> str:
    """Returns a line about the cluster's size; raises ResourceError if the cluster cannot be joined or is too small."""
    require_answer(address)
    join_arguments = address, config.cluster.allow_without_token
    with stage(f"looking at the cluster at {address}", is_short=True):
        try:
            nodes, cores, gpus = side_process.call(cluster_size, *join_arguments, timeout_s=_CLUSTER_S)
        except side_process.SideProcessError as error:
            reason = "gave no answer: " + (error.reason if error.is_overdue else error.printed)
            raise ResourceError(
                f"the Ray cluster at {address} {reason}",
                field="cluster.address",
                hint="look at what listens there and at the cluster's logs, or name another",
            ) from None
    check_gpus(config, engines=gpus_of_engines(config), of_cluster=gpus)
    return f"cluster   {nodes} nodes with {cores} CPUs and {gpus} GPUs at {address}"


def _start_lines(checked: Checked) -> list[str]:
    """Returns lines about what `slimefsdp train` would start; mesh.dp=auto on CPUs means this machine's cores."""
    config = checked.config
    # with mesh.device=auto, a cluster is assumed to have GPUs, since the cluster is not asked here
    has_gpus = config.cluster.address is not None or has_nvidia_driver()
    on_cpu = config.mesh.device == "cpu" or (config.mesh.device == "auto" and not has_gpus)
    if config.mesh.dp == "auto" and on_cpu and config.cluster.address is None:
        copies = config.mesh.dp_replicate * config.mesh.ranks_per_pack
        config = config.with_ranks(max(1, (os.cpu_count() or 1) // copies) * copies)
        check_machine(config)
    model = ModelSpec.from_config(read_model_folder(config.model.path, with_weights=False).config)
    name = next((item.name for item in checked.absent if item.field == "model.path"), str(config.model.path))
    adapters = ""
    if config.lora.rank is not None:
        count = model.adapters(config.lora.rank, config.lora.targets).parameters
        begin = "" if config.lora.path is None else f" from {config.lora.path}"
        adapters = f", and {count:,} in adapters of rank {config.lora.rank}{begin}, which alone are trained"
    lines = [
        _run_line(config),
        f"model     {model.parameters:,} parameters in {name}{adapters}",
        *(f"{_name_of(records):<9} {records}" for records in checked.sets),
        _ranks_line(config, on_cpu=on_cpu),
    ]
    if config.mesh.cp > 1:
        shape = AttentionShape.of_model_spec(model).over(config.mesh.tp)
        lines.append(f"attention {choose_strategy(config.attention.strategy, shape, config.mesh.cp)}")
    lines.append(_updates_line(config))
    if config.has_rollouts:
        rollout = config.rollout
        origin = f" at {', '.join(rollout.engine_urls)}" if rollout.engine_urls else ""
        origin = f" by {rollout.engine_python}" if rollout.engine_python and not origin else origin
        shared = " in the places of ranks, in turns with them" if rollout.placement == "colocated" else ""
        lines.append(
            f"engines   {rollout.engines} {rollout.engine}{origin}{shared}; {rollout.prompts_per_step:,} prompts x "
            f"{rollout.samples_per_prompt:,} responses of at most {rollout.max_new_tokens:,} tokens"
        )
    if config.mesh.dp != "auto":
        setup, tokens = setup_of_folders(config, model, on_cpu=on_cpu), config.batch.max_tokens_per_rank
        per_update = math.ceil(config.samples_per_step / config.data_ranks / config.updates_per_step)
        memory = training_memory(setup, MicroBatches(tokens, rows=tokens, count=min(2, per_update)))
        lines.append(
            f"memory    {byte_text(memory.total)} of a rank in a micro-batch of {tokens:,} tokens, by an estimate "
            f"(fsdp.sharding={setup.sharding})"
        )
    interval, export_dir = config.checkpoint.interval_steps, config.run.export_dir
    saves = "no checkpoints" if interval is None else f"a checkpoint every {interval:,} steps"
    saves += f"; a model in {export_dir}" if export_dir else "" if interval else " and no model"
    lines.append(f"leaves    {saves}")
    if config.data.heldout is not None and config.evaluation.interval_steps is None:
        lines.append("evaluates nothing: data.heldout is read by evaluation.interval_steps, which is not set")
    return lines


def _name_of(records: RecordSet) -> str:
    if records.field == "data.train":
        return "data"
    return f"held out {records.field.removeprefix('data.heldout').removeprefix('.')}".strip()


def _run_line(config: RunConfig) -> str:
    steps = config.run.steps  # None if it follows from run.epochs and the records are not on this machine yet
    length = f"{config.run.epochs} epochs" if steps is None else f"{steps} steps"
    done = _steps_done(config)
    extent = f"{length} from the start"
    if config.checkpoint.resume:
        extent = f"resumes from step {done} of {length}"
    return f"run       {config.algorithm} into {config.run.dir}, {extent}"


def _steps_done(config: RunConfig) -> int:
    """Returns the step of the checkpoint from which a run is resumed; 0 for a new run."""
    if not config.checkpoint.resume or config.run.dir is None:
        return 0
    return RunFolder(config.run.dir).newest_step or 0


def _ranks_line(config: RunConfig, *, on_cpu: bool) -> str:
    device = f"cluster {config.cluster.address}" if config.cluster.address else "CPU" if on_cpu else "CUDA"
    if config.mesh.dp == "auto":
        return f"ranks     as many as the GPUs that engines and other groups leave, on {device}"
    mesh, others = config.mesh, processes_needed(config) - config.ranks
    return (
        f"ranks     {config.ranks} = dp_replicate {mesh.dp_replicate} x dp {mesh.dp} x cp {mesh.cp}"
        f"{f' x tp {mesh.tp}' if mesh.tp > 1 else ''} on {device}, "
        f"and {others} more process{'es' * (others != 1)}"
    )


def _updates_line(config: RunConfig) -> str:
    per_step, per_update, steps = config.updates_per_step, config.batch.samples_per_update, config.run.steps
    line = f"updates   {per_step} a step of {config.samples_per_step:,} samples"
    if per_update is not None and per_update <= config.samples_per_step and config.samples_per_step % per_update:
        line += f" ({per_update:,} each, the last of an epoch {config.samples_per_step % per_update:,})"
    line += "" if steps is None else f", {per_step * (steps - _steps_done(config)):,} in all"
    return line + ("" if config.total_updates is None else f"; optim.total_updates={config.total_updates:,}")
