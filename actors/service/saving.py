"""Weights on the disk: what a run writes for its client and a start reads again, and what the catalogue has of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.service import wire
from actors.service.catalogue import Catalogue, Checkpoint, Kind, Saved, adapter_of, bytes_below
from actors.service.results import Answer
from actors.service.run_weights import RunWeights
from actors.service.samplers import Samplers, SamplerSession, Version
from actors.service.training_runs import TrainingRun
from slimefsdp.errors import CheckpointError, ConfigError, ResourceError
from slimefsdp.io.checksummed_files import disk_reported


def save_weights(run: TrainingRun, body: wire.SaveWeights, catalogue: Catalogue) -> Answer:
    """Writes a checkpoint under a name, and gives its path.

    Raises:
        CheckpointError: there is one of this name, or it cannot be written. ResourceError: nor can what is known of it.
    """
    name = body.path or f"checkpoint-{body.seq_id}"
    one = _begun(run, "weights", name, body.user_metadata)
    if body.overwrite and (known := catalogue.find(one.path)) is not None:
        catalogue.add(replace(known, expires=None))  # or it might go, and with it what takes its place
    run.save(name, overwrite=body.overwrite)
    return {"type": "save_weights", "path": _catalogued(one, catalogue, body.ttl_seconds)}


def save_for_sampler(
    run: TrainingRun, body: wire.SaveForSampler, weights: RunWeights, catalogue: Catalogue, samplers: Samplers
) -> dict[str, Any]:
    """Writes weights to sample from; without a name they are those of a new sampler.

    Raises:
        ConfigError: there is a sampler of this number.
        CheckpointError: there are weights of this name, or they cannot be written. ResourceError: the disk is full.
    """
    sampler_id = f"{run.session}:sample:{body.sampling_session_seq_id}"
    if body.path is None and sampler_id in samplers.sessions:
        problem = f"there is a sampler {sampler_id}, which keeps its weights"
        raise ConfigError(problem, field="sampling_session_seq_id", hint="number samplers 0, 1, 2, ..")
    name = body.path or f"_session-{body.sampling_session_seq_id}"  # which no path can be
    one = _begun(run, "sampler_weights", name, body.user_metadata)
    known = catalogue.find(one.path)
    if known is not None and not run.was_lost(known):
        problem = f"there are weights to sample from of the name {name!r}"
        raise CheckpointError(problem, field="path", hint="choose another name, or delete them")
    folder = catalogue.folder(one)
    with disk_reported(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    weights.export(run.id, folder)
    if body.path is not None:
        return {"type": "save_weights_for_sampler", "path": _catalogued(one, catalogue, body.ttl_seconds)}
    version = Version(f"{run.id}/{name}", folder, is_ephemeral=True)
    samplers.sessions[sampler_id] = SamplerSession(sampler_id, run.session, run.owner, version)
    return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}


def load_newest(run: TrainingRun, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Reads the first of a run's own checkpoints that is whole into it; None: none is."""
    for one in checkpoints:
        try:
            if one.name is None:
                run.calls.load(one.step)
            else:
                run.calls.load(name=one.name)
            return one
        except CheckpointError as error:
            print(f"{run.id}: checkpoint passed over: {error.message}", file=sys.stderr, flush=True)
    return None


def save_under_a_name(run: TrainingRun, checkpoint: Checkpoint, catalogue: Catalogue) -> str:
    """Has the checkpoint that a run stands at under a name, too; gives its path.

    Raises:
        CheckpointError, ResourceError: it cannot be written.
    """
    name = checkpoint.name
    if name is None:
        name = f"update-{run.updates}-request-{run.begun}"
        run.save(name, overwrite=True)
    one = replace(_begun(run, "weights", name), is_of_start=True)
    return _catalogued(one, catalogue) if catalogue.find(one.path) is None else one.path


def _begun(run: TrainingRun, kind: Kind, name: str, user_metadata: dict[str, str] | None = None) -> Saved:
    return Saved(
        run.id, adapter_of(run.id), kind, name, run.rank, time.time(), 0, None, user_metadata, run.owner, run.begun
    )


def _catalogued(one: Saved, catalogue: Catalogue, ttl_seconds: int | None = None) -> str:
    """The path of what has been written.

    Raises:
        ResourceError: the disk is full; what was written is removed, so that its name is free again.
    """
    expires = None if ttl_seconds is None else time.time() + ttl_seconds
    folder = catalogue.folder(one)
    try:
        catalogue.add(replace(one, size=bytes_below(folder), expires=expires))
    except ResourceError:
        if catalogue.find(one.path) is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return one.path
