"""Saves and loads the weights of runs, and records in the catalogue what was saved."""

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
from slimefsdp.io.files import disk_reported


def save_weights(run: TrainingRun, body: wire.SaveWeights, catalogue: Catalogue) -> Answer:
    """Writes a named checkpoint and returns the answer with its path.

    Raises:
        CheckpointError: the name is taken, or the checkpoint cannot be written.
        ResourceError: the record of it cannot be written.
    """
    name = body.path or f"checkpoint-{body.seq_id}"
    saved = _begun(run, "weights", name, body.user_metadata)
    if body.overwrite and (known := catalogue.find(saved.path)) is not None:
        catalogue.add(replace(known, expires=None))  # otherwise the expiry of the old one could remove the new one
    run.save(name, overwrite=body.overwrite)
    return {"type": "save_weights", "path": _catalogued(saved, catalogue, body.ttl_seconds)}


def save_for_sampler(
    run: TrainingRun, body: wire.SaveForSampler, weights: RunWeights, catalogue: Catalogue, samplers: Samplers
) -> dict[str, Any]:
    """Writes weights to sample from; if the request has no name, they belong to a new sampler.

    Raises:
        ConfigError: a sampler of this number exists.
        CheckpointError: weights of this name exist, or they cannot be written. ResourceError: the disk is full.
    """
    sampler_id = f"{run.session}:sample:{body.sampling_session_seq_id}"
    if body.path is None and sampler_id in samplers.sessions:
        problem = f"there is a sampler {sampler_id}, which keeps its weights"
        raise ConfigError(problem, field="sampling_session_seq_id", hint="number samplers 0, 1, 2, ..")
    name = body.path or f"_session-{body.sampling_session_seq_id}"  # no path of a client begins with _
    saved = _begun(run, "sampler_weights", name, body.user_metadata)
    known = catalogue.find(saved.path)
    if known is not None and not run.was_lost(known):
        problem = f"there are weights to sample from of the name {name!r}"
        raise CheckpointError(problem, field="path", hint="choose another name, or delete them")
    folder = catalogue.folder(saved)
    with disk_reported(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    weights.export(run.id, folder)
    if body.path is not None:
        return {"type": "save_weights_for_sampler", "path": _catalogued(saved, catalogue, body.ttl_seconds)}
    version = Version(f"{run.id}/{name}", folder, is_ephemeral=True)
    samplers.sessions[sampler_id] = SamplerSession(sampler_id, run.session, run.owner, version)
    return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}


def load_newest(run: TrainingRun, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Loads the first valid one of a run's own checkpoints into it; returns None if all are damaged."""
    for checkpoint in checkpoints:
        try:
            if checkpoint.name is None:
                run.calls.load(checkpoint.step)
            else:
                run.calls.load(name=checkpoint.name)
            return checkpoint
        except CheckpointError as error:
            print(f"{run.id}: checkpoint passed over: {error.message}", file=sys.stderr, flush=True)
    return None


def save_under_a_name(run: TrainingRun, checkpoint: Checkpoint, catalogue: Catalogue) -> str:
    """Saves the checkpoint that a run was resumed from under a name, unless it has one; returns its path.

    Raises:
        CheckpointError, ResourceError: it cannot be written.
    """
    name = checkpoint.name
    if name is None:
        name = f"update-{run.updates}-request-{run.begun}"
        run.save(name, overwrite=True)
    saved = replace(_begun(run, "weights", name), is_of_start=True)
    return _catalogued(saved, catalogue) if catalogue.find(saved.path) is None else saved.path


def _begun(run: TrainingRun, kind: Kind, name: str, user_metadata: dict[str, str] | None = None) -> Saved:
    return Saved(
        run.id, adapter_of(run.id), kind, name, run.rank, time.time(), 0, None, user_metadata, run.owner, run.begun
    )


def _catalogued(saved: Saved, catalogue: Catalogue, ttl_seconds: int | None = None) -> str:
    """Records a save, and returns its path.

    Raises:
        ResourceError: the disk is full; the written files are removed, so that the name is free again.
    """
    expires = None if ttl_seconds is None else time.time() + ttl_seconds
    folder = catalogue.folder(saved)
    try:
        catalogue.add(replace(saved, size=bytes_below(folder), expires=expires))
    except ResourceError:
        if catalogue.find(saved.path) is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return saved.path
