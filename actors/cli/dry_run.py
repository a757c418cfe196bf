"""`slimefsdp train CONFIG --dry-run`: what would be started, in a few lines."""

from __future__ import annotations

import math
import os

from actors.cli.plan import setup_of_folders
from actors.cli.preflight import Checked
from actors.cluster.capacity import check_machine, has_nvidia_driver, processes_needed
from actors.rollout.record_sets import RecordSet
from actors.run_dir import RunFolder
from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.config import RunConfig
from slimefsdp.errors import byte_text
from slimefsdp.estimate.memory import MicroBatches, training_memory
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder


def start_lines(checked: Checked) -> list[str]:
    """Returns lines about what `slimefsdp train` would start. Reads the models' config.json and writes nothing.

    With mesh.dp=auto on a CPU it is what the cores of this machine make of it.

    Raises:
        ResourceError: the cores of this machine cannot run that many processes.
    """
    config, steps = checked.config, checked.config.run.steps  # None: of epochs of records that are not here yet
    # with mesh.device=auto a cluster's GPUs are taken, which nobody here can count
    has_gpus = config.cluster.address is not None or has_nvidia_driver()
    on_cpu = config.mesh.device == "cpu" or (config.mesh.device == "auto" and not has_gpus)
    written = {one.field: one.name for one in checked.absent}
    if config.mesh.dp == "auto" and on_cpu and config.cluster.address is None:
        copies = config.mesh.dp_replicate * config.mesh.cp
        config = config.with_ranks(max(1, (os.cpu_count() or 1) // copies) * copies)
        check_machine(config)
    folder = read_model_folder(config.model.path, with_weights=False)
    model_spec = ModelSpec.from_config(folder.config)
    choice = choose_strategy(config.attention.strategy, AttentionShape.of_model_spec(model_spec), config.mesh.cp)
    per_step = config.updates_per_step
    begins = 0 if steps is None else _first_step(config, steps)
    length = f"{config.run.epochs} epochs" if steps is None else f"{steps} steps"
    in_all = "" if steps is None else f", {per_step * (steps - begins):,} in all"
    in_all += "" if config.total_updates is None else f"; optim.total_updates={config.total_updates:,}"
    lines = [
        f"run       {config.algorithm} into {config.run.dir}, "
        + (f"steps {begins + 1} to {steps}, resumed" if config.checkpoint.resume else f"{length} from the start"),
        f"model     {model_spec.parameters:,} parameters in "
        + written.get("model.path", str(config.model.path))
        + _adapters(config, model_spec),
        *(f"{'data' if one.field == 'data.train' else _held_out(one):<9} {one}" for one in checked.sets),
        _ranks_line(config, on_cpu=on_cpu),
        *([f"attention {choice}"] if config.mesh.cp > 1 else []),
        f"updates   {per_step} a step of {config.samples_per_step:,} samples{_last_update(config)}{in_all}",
    ]
    if config.has_rollouts:
        where = " in the places of ranks, in turns with them" if config.rollout.placement == "colocated" else ""
        lines.append(
            f"engines   {config.rollout.engines} {_engine(config)}{where}; "
            f"{config.rollout.prompts_per_step:,} prompts x {config.rollout.samples_per_prompt:,} responses "
            f"of at most {config.rollout.max_new_tokens:,} tokens"
        )
    if config.mesh.dp != "auto":
        lines.append(_memory_line(config, model_spec, on_cpu=on_cpu))
    lines.append(_leaves_line(config))
    if config.data.heldout is not None and config.evaluation.interval_steps is None:
        lines.append("evaluates nothing: data.heldout is read by evaluation.interval_steps, which is not set")
    return [*lines, *(f"not here  {one}" for one in checked.absent)]


def _leaves_line(config: RunConfig) -> str:
    interval, model = config.checkpoint.interval_steps, config.run.export_dir
    saves = "no checkpoints" if interval is None else f"a checkpoint every {interval:,} steps"
    if interval is None and model is None:
        return "leaves    neither a model (run.export_dir) nor checkpoints (checkpoint.interval_steps)"
    return f"leaves    {saves}" + (f"; a model in {model}" if model else "")


def _adapters(config: RunConfig, model_spec: ModelSpec) -> str:
    if config.lora.rank is None:
        return ""
    begin = "" if config.lora.path is None else f" from {config.lora.path}"
    beside = model_spec.adapters(config.lora.rank, config.lora.targets)
    return f", and {beside.parameters:,} in adapters of rank {config.lora.rank}{begin}, which alone are trained"


def _held_out(one: RecordSet) -> str:
    return f"held out {one.field.removeprefix('data.heldout').removeprefix('.')}".strip()


def _last_update(config: RunConfig) -> str:
    """Returns how many samples the last update of an epoch has, where it has fewer than the others."""
    per_update = config.batch.samples_per_update
    rest = config.samples_per_step % per_update if per_update else 0
    if not rest or config.samples_per_step < (per_update or 0):
        return ""
    return f" ({per_update:,} each, the last of an epoch {rest:,})"


def _engine(config: RunConfig) -> str:
    """Returns which engine it is, and where its servers are or come from."""
    name, urls, python = config.rollout.engine, config.rollout.engine_urls, config.rollout.engine_python
    return f"{name} at {', '.join(urls)}" if urls else f"{name} by {python}" if python else name


def _first_step(config: RunConfig, last: int) -> int:
    assert config.run.dir is not None
    if not config.checkpoint.resume:
        return 0
    return max(step for step in RunFolder(config.run.dir).checkpoint_steps if step <= last)


def _ranks_line(config: RunConfig, *, on_cpu: bool) -> str:
    where = "cluster " + config.cluster.address if config.cluster.address else "CPU" if on_cpu else "CUDA"
    if config.mesh.dp == "auto":
        return f"ranks     as many as the GPUs that engines and other groups leave, on {where}"
    mesh, others = config.mesh, processes_needed(config) - config.ranks
    return (
        f"ranks     {config.ranks} = dp_replicate {mesh.dp_replicate} x dp {mesh.dp} x cp {mesh.cp} on {where}, "
        f"and {others} more process{'es' * (others != 1)}"
    )


def _memory_line(config: RunConfig, model_spec: ModelSpec, *, on_cpu: bool) -> str:
    """Returns the memory of a rank in a micro-batch as large as the settings allow."""
    setup, tokens = setup_of_folders(config, model_spec, on_cpu=on_cpu), config.batch.max_tokens_per_rank
    per_update = math.ceil(config.samples_per_step / config.data_ranks / config.updates_per_step)
    held = training_memory(setup, MicroBatches(tokens, rows=tokens, count=min(2, per_update)))
    return (
        f"memory    {byte_text(held.total)} of a rank in a micro-batch of {tokens:,} tokens, by an estimate "
        f"(fsdp.sharding={setup.sharding})"
    )
