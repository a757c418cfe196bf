"""Creates, saves, loads and ends the training runs of a server, and continues them at the next start."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from actors.service import wire
from actors.service.catalogue import Checkpoint, Kind, Progress, RunRecord, Saved, adapter_of, bytes_below
from actors.service.results import Answer, Result, require_same_kind
from actors.service.run_weights import RunWeights
from actors.service.samplers import Samplers, SamplerSession, Version
from actors.service.state import SHOWN, ServiceState
from actors.service.training_run import MAKE, TrainingRun
from actors.service.users import NotFound, Session, User
from actors.workers.group_calls import GroupCalls
from slimefsdp.errors import CheckpointError, ConfigError, ResourceError, SlimeError, StateError
from slimefsdp.io.files import disk_reported

_MISSING_S = 60.0  # a request that is missing for longer counts as lost; clients repeat requests for half a minute


class Runs:
    """Manages the training runs of a server; `by_id` has the runs that exist now.

    Each run is created, trained, saved and ended by its own thread, so all methods return at once, except
    `continue_kept` and `close`.
    """

    def __init__(self, state: ServiceState, weights: RunWeights, samplers: Samplers) -> None:
        self.by_id: dict[str, TrainingRun] = {}
        self._state, self._weights, self._samplers = state, weights, samplers
        self._catalogue, self._results = state.catalogue, state.results
        self._created: dict[str, TrainingRun] = {}  # id -> run, for runs that were created in this start of the server
        self._not_loaded: set[str] = set()  # ids of runs of earlier starts without a valid checkpoint

    def get(self, key: str, user: User) -> TrainingRun:
        """Returns a run, and records that its client is alive.

        Raises:
            NotFound: the user has no run of this id.
        """
        run = self.by_id.get(key)
        if run is None or not user.owns(run.owner):
            raise NotFound(f"there is no training run {key[:SHOWN]}")
        self._state.saw_client_of(run.session)
        return run

    # ------------------------------------------------------------------ creating and ending

    def create_model(self, body: wire.CreateModel, user: User) -> Result:
        """Creates a new run; a repeated request gets the same result.

        Raises:
            ConfigError: this server cannot train such a run. Also the errors of `_create`.
        """
        self._state.check_base(body.base_model)
        rank = self._weights.check_asked(body.lora_config)
        seed = None if body.lora_config is None else body.lora_config.seed
        session = self._state.session(body.session_id, user)
        run = self._new(session, body.model_seq_id, rank, body.user_metadata)

        def begin() -> Answer:
            self._weights.begin(run.id, rank, seed)
            return {"type": "create_model", "model_id": run.id}

        return self._create("create_model", run, body.model_seq_id, begin)

    def load_weights(self, body: wire.LoadWeights, user: User) -> Result:
        """Loads a checkpoint into a run, or creates a new run from it.

        Raises:
            CheckpointError: the user has no such checkpoint. ConfigError: this server or run cannot load the
                checkpoint. Also the errors of `_create`.
        """
        saved = self._catalogue.get(body.path, user)
        if saved.kind != "weights":
            raise ConfigError(f"{body.path} has no state to train from", field="path", hint="give a save_state path")
        self._weights.check_rank(saved.rank)
        answer = {"type": "load_weights", "path": body.path}
        if body.session_id is not None and body.model_seq_id is not None:
            if body.base_model is not None:
                self._state.check_base(body.base_model)
            new = self._new(self._state.session(body.session_id, user), body.model_seq_id, saved.rank, None)

            def begin() -> Answer:
                self._weights.begin_from(new.id, saved, with_optimizer=body.optimizer)
                return {**answer, "model_id": new.id}

            return self._create("load_weights", new, body.model_seq_id, begin)
        if body.model_id is None or body.seq_id is None:
            raise ConfigError("neither a run nor a session is named", field="model_id", hint="name one")
        run = self.get(body.model_id, user)
        if run.rank != saved.rank:
            problem = f"{body.path} has rank {saved.rank}, and this run has rank {run.rank}"
            raise ConfigError(problem, field="path", hint="create a training client from it")

        def do(_: GroupCalls) -> Answer:
            self._weights.load(run.id, saved, with_optimizer=body.optimizer)
            return answer

        return run.submit(body.seq_id, "load", do, body.size)

    def _new(self, session: Session, number: int, rank: int, user_metadata: dict[str, Any] | None) -> TrainingRun:
        key = f"{session.id}:train:{number}"
        calls = self._weights.calls(key)
        return TrainingRun(
            key, session.id, session.owner, rank, calls, self._results, user_metadata or {}, next_number=MAKE
        )

    def _create(self, kind: str, run: TrainingRun, number: int, begin: Callable[[], Answer]) -> Result:
        """Lets the thread of a new run call `begin`; returns the pending result.

        A repeated request gets the result of the first request.

        Args:
            kind: the kind of the request. Two requests of different kinds may not have the same number.
            begin: gives the run its weights, and returns the client's answer.

        Raises:
            NotFound: the run has ended.
            StateError: the number was used by a request of another kind, or before the server was restarted; or
                another run has the whole model.
            ResourceError: the server has as many runs as it takes.
        """
        if (known := self._created.get(run.id)) is not None and known.made_by is not None:
            require_same_kind("model_seq_id", number, known.made_by[0], kind)
            if known.is_ending:
                raise NotFound(f"{run.id} has ended", is_gone=True)
            return known.made_by[1]
        self._check_room(run)

        def do(_: GroupCalls) -> Answer:
            try:
                answer = begin()
                self._keep(run)
            except Exception:
                run.stop()
                self._end(run)
                raise
            return answer

        self.by_id[run.id] = self._created[run.id] = run
        result = run.submit(MAKE, "make", do)
        run.made_by = kind, result
        return result

    def _check_room(self, new: TrainingRun) -> None:
        if new.id in self.by_id:
            problem = f"{new.id} was created before the server was restarted, and continues"
            raise StateError(problem, field="model_seq_id", hint="continue this run, or use another number")
        if new.id in self._not_loaded:
            problem = f"{new.id} was created before the server was restarted, and its checkpoints could not be loaded"
            raise StateError(problem, field="model_seq_id", hint="use another number")
        if len(self.by_id) >= self._state.limits.runs:
            problem = f"there are {len(self.by_id)} training runs, as many as this server takes"
            raise ResourceError(problem, hint="end one")
        running = [run for run in list(self.by_id.values()) if not run.is_ending]
        self._weights.check_free([run.id if run.owner == new.owner else "another user's run" for run in running])

    def unload_model(self, body: wire.OfModel, user: User) -> Result:
        """Ends a run at the request of its client.

        Raises:
            NotFound: the user has no run of this id, or the run is already ending.
        """
        run = self.get(body.model_id, user)
        if run.is_ending:
            raise NotFound(f"{run.id} has ended", is_gone=True)
        result = self._results.new(run.owner, is_needed=True, model_id=run.id)
        run.is_ending = True

        def end() -> None:
            self._end(run)
            result.set({"type": "unload_model", "model_id": run.id})

        run.stop(end)
        return result

    def end_session(self, session: str, *, is_overdue: bool) -> None:
        """Ends the runs of a session.

        Args:
            is_overdue: whether the session ends because its client was silent for too long. Such a client may return,
                so the checkpoints that starts of the server have saved for its runs are kept.
        """
        for run in [run for run in list(self.by_id.values()) if run.session == session]:
            run.is_ending = True
            run.stop(partial(self._end, run, is_overdue))
        self._created = {key: run for key, run in self._created.items() if run.session != session}

    def _end(self, run: TrainingRun, is_overdue: bool = False) -> None:
        if run.id not in self.by_id:  # the run could not be created
            return
        try:
            self._weights.end(run.id)
        except SlimeError as error:  # the run was never created
            print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
        if not is_overdue:
            self._catalogue.remove_made_at_starts(run.id)
        self._catalogue.runs.forget(adapter_of(run.id))
        self.by_id.pop(run.id, None)

    # ------------------------------------------------------------------ saving

    def save_weights(self, body: wire.SaveWeights, user: User) -> Result:
        """Submits a request to write a checkpoint with a name."""
        run = self.get(body.model_id, user)

        def do(_: GroupCalls) -> Answer:
            saved = _begun(run, "weights", body.path or f"checkpoint-{body.seq_id}", body.user_metadata)
            if body.overwrite and (known := self._catalogue.find(saved.path)) is not None:
                # otherwise the expiry of the old checkpoint could remove the new one
                self._catalogue.add(replace(known, expires=None))
            self.save(run, saved.name, overwrite=body.overwrite)
            return {"type": "save_weights", "path": self._record(saved, body.ttl_seconds)}

        return run.submit(body.seq_id, "save", do, body.size)

    def save_weights_for_sampler(self, body: wire.SaveForSampler, user: User) -> Result:
        """Submits a request to write weights to sample from, with a name or for a new sampling client."""
        run = self.get(body.model_id, user)
        if body.kind == "inflight":
            raise ConfigError("kind=inflight is not supported", field="kind", hint="use snapshot")
        if body.path is None and body.sampling_session_seq_id is None:
            raise ConfigError("neither path nor sampling_session_seq_id is given", field="path", hint="give a path")
        return run.submit(body.seq_id, "save_for_sampler", lambda _: self._save_for_sampler(run, body), body.size)

    def _save_for_sampler(self, run: TrainingRun, body: wire.SaveForSampler) -> Answer:
        """Writes weights to sample from; if the request has no name, the weights belong to a new sampler.

        Raises:
            ConfigError: a sampler of this number exists.
            CheckpointError: the name is taken, or the weights cannot be written. ResourceError: the disk is full.
        """
        sampler_id = f"{run.session}:sample:{body.sampling_session_seq_id}"
        if body.path is None and sampler_id in self._samplers.sessions:
            problem = f"there is a sampler {sampler_id}, which keeps its weights"
            raise ConfigError(problem, field="sampling_session_seq_id", hint="number samplers 0, 1, 2, ..")
        name = body.path or f"_session-{body.sampling_session_seq_id}"  # names that clients give cannot begin with _
        saved = _begun(run, "sampler_weights", name, body.user_metadata)
        known = self._catalogue.find(saved.path)
        if known is not None and not run.was_lost(known):
            problem = f"there are weights to sample from with the name {name!r}"
            raise CheckpointError(problem, field="path", hint="choose another name, or delete them")
        folder = self._catalogue.folder(saved)
        with disk_reported(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        self._weights.export(run.id, folder)
        if body.path is not None:
            return {"type": "save_weights_for_sampler", "path": self._record(saved, body.ttl_seconds)}
        version = Version(f"{run.id}/{name}", folder, is_ephemeral=True)
        self._samplers.sessions[sampler_id] = SamplerSession(sampler_id, run.session, run.owner, version)
        if run.session not in self._state.sessions:
            self._samplers.discard(sampler_id)  # the session ended before this sampler existed
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

    def save(self, run: TrainingRun, name: str | None = None, *, overwrite: bool = False) -> None:
        """Writes a checkpoint with the run's progress up to the last request that has begun.

        Raises:
            CheckpointError: the name is taken, or the checkpoint cannot be written.
        """
        has_gradients = run.has_gradients or run.incomplete is not None
        progress = Progress(run.id, run.next_number, run.updates, run.tokens, has_gradients)
        self._weights.save(run.id, run.updates, asdict(progress), name, overwrite=overwrite)

    def _record(self, saved: Saved, ttl_seconds: int | None = None) -> str:
        """Records a save in the catalogue, and returns its path.

        Raises:
            ResourceError: the disk is full; the written files are removed, so that the name is free again.
        """
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        folder = self._catalogue.folder(saved)
        try:
            self._catalogue.add(replace(saved, size=bytes_below(folder), expires=expires))
        except ResourceError:
            if self._catalogue.find(saved.path) is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return saved.path

    # ------------------------------------------------------------------ over starts of the server

    def refuse_behind_lost(self) -> None:
        """Fails requests that wait for lost requests; must be called every few seconds."""
        for run in list(self.by_id.values()):
            run.refuse_behind_lost(_MISSING_S)

    def continue_kept(self) -> None:
        """Continues the runs of the last start in the same run.dir, each from its newest valid checkpoint.

        A run without a valid checkpoint is not continued, which a message on stderr reports.

        Raises:
            SlimeError: a run does not fit the settings of this server.
        """
        self._catalogue.remove_unknown()
        for record in self._catalogue.runs.all():
            self._weights.check_rank(record.rank)
            checkpoints = self._catalogue.checkpoints_of(record.run, record.rank)
            if not checkpoints:
                print(f"{record.run} had no checkpoint, so it cannot be continued", file=sys.stderr, flush=True)
                self._catalogue.runs.forget(record.file)
                continue
            self._weights.reopen(record.run, record.rank)
            calls = self._weights.calls(record.run)
            run = TrainingRun(
                record.run, record.session, record.owner, record.rank, calls, self._results, record.user_metadata
            )
            checkpoint = self._load_newest(run, checkpoints)
            if checkpoint is None:
                self._weights.end(record.run)
                self._not_loaded.add(run.id)
                continue
            run.resume(checkpoint.progress)
            if checkpoint.name is not None:
                self.save(run)  # for recoveries of ranks, since the client may delete a checkpoint with a name
            if not record.is_finished:
                run.resumed_at = self._save_under_a_name(run, checkpoint)
                self._catalogue.remove_made_at_starts(run.id, but=run.resumed_at)
            self.by_id[run.id] = run
            self._state.sessions.setdefault(run.session, Session(run.session, run.owner, record.sdk_version))
            self._keep(run)  # not as finished, since this checkpoint does not cover the requests that follow

    def _load_newest(self, run: TrainingRun, checkpoints: list[Checkpoint]) -> Checkpoint | None:
        """Loads the first valid checkpoint of a list into a run, and returns it; returns None if all are damaged."""
        for checkpoint in checkpoints:
            try:
                self._weights.load_own(run.id, checkpoint)
                return checkpoint
            except CheckpointError as error:
                print(f"{run.id}: checkpoint skipped: {error.message}", file=sys.stderr, flush=True)
        return None

    def _save_under_a_name(self, run: TrainingRun, checkpoint: Checkpoint) -> str:
        """Saves a run under a name, unless `checkpoint`, from which it was resumed, has one; returns the path."""
        name = checkpoint.name
        if name is None:
            name = f"update-{run.updates}-request-{run.begun}"
            self.save(run, name, overwrite=True)
        saved = replace(_begun(run, "weights", name), is_of_start=True)
        return self._record(saved) if self._catalogue.find(saved.path) is None else saved.path

    def _keep(self, run: TrainingRun, *, is_finished: bool = False) -> None:
        """Writes the `RunRecord` of a run, so that the next start of the service continues the run."""
        session = self._state.sessions.get(run.session)
        sdk_version = "" if session is None else session.sdk_version
        self._catalogue.runs.keep(
            RunRecord(run.id, run.session, run.owner, sdk_version, run.rank, run.user_metadata, is_finished)
        )

    def close(self) -> None:
        """Finishes the requests of all runs, and saves every run for the next start."""
        runs = list(self.by_id.values())
        for run in runs:
            run.stop(finishes=True)
        for run in runs:
            run.join()
            if run.id not in self.by_id:  # the run has ended
                continue
            try:
                if run.lost is None:
                    self.save(run)
                self._keep(run, is_finished=run.lost is None and run.resumed_at is None)
            except SlimeError as error:  # the next start continues this run from an earlier checkpoint
                print(f"{run.id} is kept without its newest updates: {error}", file=sys.stderr, flush=True)


def _begun(run: TrainingRun, kind: Kind, name: str, user_metadata: dict[str, str] | None = None) -> Saved:
    """Returns the record of a save that begins now."""
    return Saved(
        run.id, adapter_of(run.id), kind, name, run.rank, time.time(), 0, None, user_metadata, run.owner, run.begun
    )
