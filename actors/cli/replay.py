"""`slimefsdp replay`: one recorded batch through train_step, on Ray workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.cli.preflight import check_installed, check_models
from actors.cli.ray_session import ray_session
from actors.cluster.capacity import check_gpus, check_machine
from actors.model_folders import with_model_folders
from actors.startup import reporting
from slimefsdp.config import load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from slimefsdp.io.files import require_free_folder
from slimefsdp.replay import json_text


def replay_command(path: Path, overrides: Sequence[str], batch_file: Path, export: Path | None) -> int:
    """Trains one step on the batch of a file, and prints its metrics as one JSON object.

    Raises:
        SlimeError: what is wrong with the settings, the machine or the batch; or how the step failed.
    """
    with reporting():
        config = with_model_folders(load_config(path, overrides))
    check_models(config)
    check_installed(config)
    check_machine(config)
    check_gpus(config, engines=0)
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
