"""Weights on the disk: what a run writes for its client and a start reads again, and what the catalogue has of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

from actors.service import wire
from actors.service.catalogue import Catalogue, Checkpoint, Kind, Saved, adapter_of, bytes_below
from actors.service.results import Answer
from actors.service.run_weights import RunWeights
from actors.service.samplers import Samplers, SamplerSession, Version
from actors.service.training_runs import TrainingRun
from slimefsdp.errors import CheckpointError, ConfigError


def save_weights(run: TrainingRun, body: wire.SaveWeights, catalogue: Catalogue) -> Answer:
    """Writes a checkpoint under a name, and gives its path.

    Raises:
        CheckpointError: there is one of this name, or it cannot be written.
    """
    name = body.path or f"checkpoint-{body.seq_id}"
    run.save(name, overwrite=body.overwrite)
    path = _catalogued(run, "weights", name, catalogue, body.ttl_seconds, body.user_metadata)
    return {"type": "save_weights", "path": path}


def save_for_sampler(
    run: TrainingRun, body: wire.SaveForSampler, weights: RunWeights, catalogue: Catalogue, samplers: Samplers
) -> Answer:
    """Writes weights to sample from; without a name they are those of a new sampler.

    Raises:
        ConfigError: there is a sampler of this number.
    """
    sampler_id = f"{run.session}:sample:{body.sampling_session_seq_id}"
    if body.path is None and sampler_id in samplers.sessions:
        problem = f"there is a sampler {sampler_id}, which keeps its weights"
        raise ConfigError(problem, field="sampling_session_seq_id", hint="number samplers 0, 1, 2, ..")
    name = body.path or f"_session-{body.sampling_session_seq_id}"  # which no path can be
    folder = catalogue.folder_of(run.id, run.rank, "sampler_weights", name)
    if body.path is None:
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    weights.export(run.id, folder)
    if body.path is not None:
        path = _catalogued(run, "sampler_weights", name, catalogue, body.ttl_seconds, body.user_metadata)
        return {"type": "save_weights_for_sampler", "path": path}
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


def save_named_and_numbered(run: TrainingRun, checkpoint: Checkpoint, catalogue: Catalogue) -> str:
    """Has the checkpoint that a run stands at by its step, for recoveries of ranks, and under a name; gives its path.

    Raises:
        CheckpointError: it cannot be written.
    """
    if checkpoint.name is not None:
        run.save()
        name = checkpoint.name
    else:
        name = f"update-{run.updates}-request-{run.begun}"
        run.save(name, overwrite=True)
    return catalogue.path_of(run.id, name) or _catalogued(run, "weights", name, catalogue)


def _catalogued(
    run: TrainingRun,
    kind: Kind,
    name: str,
    catalogue: Catalogue,
    ttl_seconds: int | None = None,
    user_metadata: dict[str, str] | None = None,
) -> str:
    folder, now = catalogue.folder_of(run.id, run.rank, kind, name), time.time()
    expires = None if ttl_seconds is None else now + ttl_seconds
    size = bytes_below(folder)
    one = Saved(run.id, adapter_of(run.id), kind, name, run.rank, now, size, expires, user_metadata, run.owner)
    catalogue.add(one)
    return one.path
