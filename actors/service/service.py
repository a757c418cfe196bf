"""The service: sessions of clients with their training runs and samplers, on one group and one engine."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.engines.dialect import longest_sample
from actors.engines.tokenizer import end_token_ids, load_tokenizer
from actors.service import wire
from actors.service.catalogue import Catalogue, SamplerRecord, Saved
from actors.service.datums import Work, output_of, work_of
from actors.service.limits import LIMITS, ServiceLimits
from actors.service.operations import Metrics, RequestLog
from actors.service.results import Answer, Result, Results
from actors.service.run_table import RunTable
from actors.service.run_weights import run_weights_of
from actors.service.sample_requests import response_of, sample_request
from actors.service.samplers import Samplers, SamplerSession, Version
from actors.service.saving import save_for_sampler, save_weights
from actors.service.sessions import NotFound, Session
from actors.service.supervised_engine import SupervisedEngine
from actors.service.training_runs import RequestKind, TrainingRun, require_same_kind
from actors.service.users import User
from actors.workers.group_calls import GroupCalls
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, CheckpointError, ConfigError, ResourceError, StateError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.rpc import UpdateSettings
from slimefsdp.sampling.params import SamplingStats

_MOST_LR = 1000.0  # an update of AdamW changes a weight by about this; finite gradients then never make it infinite
_LEAST_EPS = 1e-15  # AdamW divides by eps alone if the second moment has decayed to 0 and the first has not
_SHOWN = 200  # characters to show of an unknown id, which can have any length
_REMEMBERED = 4096  # requests of a sampler that get the same answer when they are repeated


class Service:
    """Performs the requests that `actors.service.app` receives; only `end_session` and `close` block.

    Args:
        group: the group as it was launched.
        limits: on what clients may ask for at once.
    """

    def __init__(
        self,
        config: RunConfig,
        group: GroupCalls,
        engine: SupervisedEngine,
        limits: ServiceLimits = LIMITS,
    ) -> None:
        assert config.run.dir is not None
        folder = read_model_folder(Path(config.model.path))
        self.config, self.limits = config, limits
        self.model_name = config.service.model_name or str(config.model.path)
        self.tokenizer = load_tokenizer(str(config.model.path))
        self.end_token_ids = frozenset(end_token_ids(str(config.model.path), self.tokenizer.eos_token_id))
        self.model_type = folder.model_type
        self.tokenizer_id = str(config.model.path)  # like the model, it is only on the server's disk
        self.vocab_size = folder.vocab_size
        self.most_tokens = config.max_pack_tokens  # limit on a datum
        self.most_context = longest_sample(config, folder)  # limit on a prompt with its response
        self.most_targets = limits.body_bytes // 8  # the most dense targets that fit into a body
        self.results = Results(limits.result_kept_s, limits.result_bytes, limits.waiting, limits.waiting_bytes)
        self.catalogue = Catalogue(config.run.dir)
        self.weights = run_weights_of(config, group, self.catalogue)
        self.samplers = Samplers(engine, config.service.max_samplers)
        self.sessions: dict[str, Session] = {}
        self._run_table = RunTable(self.weights, self.results, self.catalogue, self.sessions, limits.runs)
        self.is_ending = False
        self.began = time.time()
        self.metrics = Metrics()
        self.log = RequestLog(config.run.dir / "service" / "requests.jsonl")
        self.engine = engine
        self._group = group

    def continue_runs(self) -> None:
        """Continues the runs and sampling clients of the last start in the same run.dir.

        Sampling clients with unnamed weights are not continued.

        Raises:
            SlimeError: a run does not fit the settings of this server.
        """
        self._run_table.continue_kept()
        for record in self.catalogue.kept_samplers():
            saved = None if record.path is None else self.catalogue.find(record.path)
            version = None if saved is None else _version_of(saved, self.catalogue)
            if (None if version is None else version.name) != record.version:
                continue  # its weights were deleted
            self.samplers.sessions[record.id] = SamplerSession(
                record.id, record.session, record.owner, version, record.path
            )
            self.sessions.setdefault(record.session, Session(record.session, record.owner, record.sdk_version))

    @property
    def runs(self) -> dict[str, TrainingRun]:
        return self._run_table.by_id

    # ------------------------------------------------------------------ sessions

    def create_session(self, body: wire.CreateSession, user: User) -> Session:
        """Makes a session for a new client of the user.

        Raises:
            ResourceError: there are as many as there may be.
        """
        if len(self.sessions) >= self.limits.sessions:
            raise ResourceError(
                f"there are {len(self.sessions)} sessions, as many as this server takes", hint="try again later"
            )
        session = Session(f"session-{uuid.uuid4().hex[:16]}", user.id, body.sdk_version)
        self.sessions[session.id] = session
        return session

    def session(self, key: str, user: User) -> Session:
        """Returns a session, and records that its client is alive.

        Raises:
            NotFound: the user has no session of this id.
        """
        session = self.sessions.get(key)
        if session is None or not user.owns(session.owner):
            raise NotFound(f"session {key[:_SHOWN]} has ended", is_gone=True)
        session.seen = time.monotonic()
        return session

    def overdue_sessions(self) -> list[str]:
        """Returns the sessions whose clients were silent for too long."""
        now = time.monotonic()
        return [
            session.id
            for session in self.sessions.values()
            if now - session.seen > self.config.service.session_timeout_s
        ]

    async def end_session(self, key: str, *, is_overdue: bool = False) -> None:
        """Ends a session with its runs and samplers; what it saved under a name stays.

        Args:
            is_overdue: as in `RunTable.end_session`.
        """
        if self.sessions.pop(key, None) is None:
            return
        self._run_table.end_session(key, is_overdue=is_overdue)
        self.catalogue.forget_samplers(key)
        await self.samplers.end(key)

    # ------------------------------------------------------------------ training

    def create_run(self, body: wire.CreateModel, user: User) -> tuple[str, Result]:
        """Makes a new run; a repeated request returns the same run.

        Raises:
            ConfigError: this server cannot train it.
            NotFound, StateError, ResourceError: as in `session` and `RunTable.make`.
        """
        self._check_base(body.base_model)
        lora = body.lora_config
        rank = self.weights.check_asked(lora)

        def make(run: TrainingRun) -> Answer:
            self.weights.begin(run.id, rank, None if lora is None else lora.seed)
            return {"type": "create_model", "model_id": run.id}

        session = self.session(body.session_id, user)
        return self._run_table.make("create_model", session, body.model_seq_id, rank, body.user_metadata, make)

    def unload(self, run: TrainingRun) -> Result:
        return self._run_table.unload(run)

    def refuse_behind_lost(self) -> None:
        self._run_table.refuse_behind_lost()

    def run(self, key: str, user: User) -> TrainingRun:
        """Returns a run, and records that its client is alive.

        Raises:
            NotFound: the user has no run of this id.
        """
        run = self.runs.get(key)
        if run is None or not user.owns(run.owner):
            raise NotFound(f"there is no training run {key[:_SHOWN]}")
        if run.session in self.sessions:
            self.sessions[run.session].seen = time.monotonic()
        return run

    def forward_backward(self, message: Any, size: int, user: User) -> Result:
        """Submits a ForwardBackwardRequest whose body has `size` bytes; it may ask for the forward pass only."""
        run = self.run(message.model_id, user)

        def do(calls: GroupCalls) -> Answer:
            work = work_of(
                message,
                vocab_size=self.vocab_size,
                max_tokens=self.most_tokens,
                max_targets=self.most_targets,
                stable_reinforce=self.config.service.stable_reinforce,
            )
            run.tokens += work.num_tokens
            self.metrics.count_trained(work.num_tokens)
            return output_of(work, _log_probs(calls, work))

        kind: RequestKind = "forward" if message.forward_only else "forward_backward"
        return run.submit(message.seq_id, kind, do, size)

    def optim_step(self, body: wire.OptimStep, user: User) -> Result:
        run, params = self.run(body.model_id, user), body.adam_params

        def do(calls: GroupCalls) -> Answer:
            try:
                metrics = calls.optimizer_step(_update_settings(params))
            except StateError:  # there were no gradients, or too many updates in a row were not finite
                run.has_gradients = False
                raise
            run.has_gradients = False
            if metrics["skipped_update"]:
                raise StateError(
                    "the gradients are not finite, or their squares are not in float32, and no update was made",
                    field="optim_step",
                    hint="lower the learning rate, or look at the data",
                )
            run.updates += 1
            self.metrics.updates.inc()
            every = self.config.checkpoint.interval_steps
            if every is not None and run.updates % every == 0:
                try:
                    run.save()
                except CheckpointError as error:  # the update itself succeeded, and the previous checkpoint is valid
                    print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
            return {"type": "optim_step", "metrics": metrics}

        return run.submit(body.seq_id, "optim_step", do, body.size)

    # ------------------------------------------------------------------ saving and loading

    def save_weights(self, body: wire.SaveWeights, user: User) -> Result:
        run = self.run(body.model_id, user)
        return run.submit(body.seq_id, "save", lambda _: save_weights(run, body, self.catalogue), body.size)

    def save_for_sampler(self, body: wire.SaveForSampler, user: User) -> Result:
        """Submits the writing of weights to sample from, with a name or for a new sampling client."""
        run = self.run(body.model_id, user)
        if body.kind == "inflight":
            raise ConfigError("kind=inflight is not supported", field="kind", hint="use snapshot")
        if body.path is None and body.sampling_session_seq_id is None:
            raise ConfigError("neither path nor sampling_session_seq_id is given", field="path", hint="give a path")

        def do(_: GroupCalls) -> dict[str, Any]:
            answer = save_for_sampler(run, body, self.weights, self.catalogue, self.samplers)
            if run.session not in self.sessions and body.path is None:
                self.samplers.discard(answer["sampling_session_id"])  # the session ended before this sampler existed
            return answer

        return run.submit(body.seq_id, "save_for_sampler", do, body.size)

    def load_weights(self, body: wire.LoadWeights, user: User) -> tuple[str, Result]:
        """Submits the loading of a checkpoint into a run, or makes a new run from it.

        Raises:
            CheckpointError: the user has no such checkpoint. ConfigError: it cannot be loaded here.
            StateError: other runs leave no place for a new one.
        """
        saved = self.catalogue.get(body.path, user)
        if saved.kind != "weights":
            raise ConfigError(f"{body.path} has no state to train from", field="path", hint="name one of save_state")
        self.weights.check_rank(saved.rank)
        if body.session_id is not None and body.model_seq_id is not None:
            if body.base_model is not None:
                self._check_base(body.base_model)

            def make(run: TrainingRun) -> Answer:
                self.weights.begin_from(run.id, saved, with_optimizer=body.optimizer)
                return {"type": "load_weights", "path": body.path, "model_id": run.id}

            session = self.session(body.session_id, user)
            return self._run_table.make("load_weights", session, body.model_seq_id, saved.rank, None, make)
        if body.model_id is None or body.seq_id is None:
            raise ConfigError("neither a run nor a session is named", field="model_id", hint="name one")
        run = self.run(body.model_id, user)
        if run.rank != saved.rank:
            problem = f"{body.path} is of rank {saved.rank}, and this run of rank {run.rank}"
            raise ConfigError(problem, field="path", hint="create a training client from it")

        def do(_: GroupCalls) -> Answer:
            self.weights.load(run.id, saved, with_optimizer=body.optimizer)
            return {"type": "load_weights", "path": body.path}

        return run.id, run.submit(body.seq_id, "load", do, body.size)

    # ------------------------------------------------------------------ sampling

    def create_sampler(self, body: wire.CreateSamplingSession, user: User) -> SamplerSession:
        """Makes a sampling client of saved weights, or of the base model; a repeated request returns the same one.

        Raises:
            CheckpointError: there are no such weights. ConfigError: another base, or a checkpoint to train from.
            StateError: its number was used for other weights.
        """
        session = self.session(body.session_id, user)
        version = None
        if body.model_path is not None:
            saved = self.catalogue.get(body.model_path, user)
            if saved.kind != "sampler_weights":
                raise ConfigError(
                    f"{body.model_path} is a state to train from",
                    field="model_path",
                    hint="name weights of save_weights_for_sampler",
                )
            self.weights.check_rank(saved.rank)
            version = _version_of(saved, self.catalogue)
        elif body.base_model is not None:
            self._check_base(body.base_model)
        else:
            raise ConfigError("neither model_path nor base_model is given", field="base_model", hint="give one")
        key = f"{session.id}:sample:{body.sampling_session_seq_id}"
        sampler = SamplerSession(key, session.id, session.owner, version, body.model_path)
        known = self.samplers.sessions.setdefault(key, sampler)
        require_same_kind(
            "sampling_session_seq_id", body.sampling_session_seq_id, _weights_of(known), _weights_of(sampler)
        )
        return known

    def keep_sampler(self, sampler: SamplerSession) -> None:
        """Records a sampling client for the next start, unless its weights have no name; writes to the disk."""
        session, version = self.sessions.get(sampler.session), sampler.version
        if session is None or (version is not None and version.is_ephemeral):
            return
        name = None if version is None else version.name
        self.catalogue.keep_sampler(
            SamplerRecord(sampler.id, session.id, session.owner, session.sdk_version, sampler.path, name)
        )

    def sampler(self, key: str, user: User) -> SamplerSession:
        """Returns a sampling client, and records that it is alive.

        Raises:
            NotFound: the user has no sampling client of this id.
        """
        sampler = self.samplers.sessions.get(key)
        if sampler is None or not user.owns(sampler.owner):
            raise NotFound(f"there is no sampler {key[:_SHOWN]}")
        if sampler.session in self.sessions:
            self.sessions[sampler.session].seen = time.monotonic()
        return sampler

    def sample(self, body: wire.Sample, user: User) -> tuple[Result, Callable[[], Any] | None]:
        """Returns the result of a sampling request, and the coroutine function that computes it; None if it is known.

        Raises:
            BatchError: a value cannot be served; the message names it. NotFound: as in `sampler`.
        """
        sampler = self.sampler(body.sampling_session_id, user)
        if (known := sampler.answers.get(body.seq_id)) is not None:
            return known, None
        if body.record_stability_info and self.config.service.stable_reinforce is None:
            raise BatchError(
                "record_stability_info=true is for the loss stable_reinforce, which this server does not serve",
                field="record_stability_info",
                hint="train with another loss_fn, or set service.stable_reinforce of the server",
            )
        version = None if sampler.version is None else sampler.version.name
        request = sample_request(body, version, self.end_token_ids, self.most_context)
        request = replace(request, client=sampler.session)
        result = sampler.answers[body.seq_id] = self.results.new(sampler.owner, body.size)
        if len(sampler.answers) > _REMEMBERED:
            del sampler.answers[next(iter(sampler.answers))]

        async def work() -> None:
            try:
                answer = await self.samplers.sample(sampler, request)
                self.metrics.samples.inc(len(answer.samples))
                result.set(response_of(answer, body.prompt_logprobs_last_n))
            except asyncio.CancelledError:
                ended = f"{sampler.session} has ended, and what was sampled for it was given up"
                result.fail(StateError(ended, field="sampling_session_id", hint="create another sampling client"))
                raise
            except Exception as error:
                result.fail(error)

        return result, work

    # ------------------------------------------------------------------ the rest

    def close(self) -> None:
        """Finishes all accepted requests, and saves every run for the next start."""
        self.is_ending = True
        self._run_table.close()
        self.log.close()

    @property
    def recoveries(self) -> int:
        """Returns how often lost ranks were replaced."""
        return len(getattr(self._group, "recoveries", ()))

    async def sampling_stats(self) -> SamplingStats:
        return await self.engine.stats()

    def _check_base(self, name: str) -> None:
        known = {self.model_name, str(self.config.model.path)}
        if name not in known:
            problem = f"base_model={name!r}, and this server has {self.model_name}"
            raise ConfigError(problem, field="base_model", hint="name that one")


def _weights_of(sampler: SamplerSession) -> str:
    """Describes the weights that a sampling client was made for."""
    if sampler.path is None:
        return "sampler of the base" if sampler.version is None else "sampler of weights without a name"
    return f"sampler of {sampler.path}"


def _version_of(saved: Saved, catalogue: Catalogue) -> Version:
    return Version(f"{saved.path}@{saved.time}", catalogue.folder(saved), is_ephemeral=False)


def _update_settings(params: wire.AdamParams) -> UpdateSettings:
    """Converts the client's settings of an update.

    Raises:
        ConfigError: a value is out of range, or would make weights infinite or NaN with ordinary gradients.
    """
    bounds = {
        "learning_rate": (params.learning_rate, params.learning_rate <= _MOST_LR, f"{_MOST_LR:g} at most"),
        "eps": (params.eps, params.eps >= _LEAST_EPS, f"{_LEAST_EPS:g} at least"),
        "weight_decay": (
            params.weight_decay,
            params.learning_rate * params.weight_decay <= 1,
            "1 / learning_rate at most, which takes a whole weight off",
        ),
    }
    for name, (value, is_in_range, rule) in bounds.items():
        if not is_in_range:
            raise ConfigError(f"{name}={value:g}, and it may be {rule}", field=name, hint="choose another one")
    return UpdateSettings(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=params.grad_clip_norm,
    )


def _log_probs(calls: GroupCalls, work: Work) -> Any:
    """Returns the log-probs of the targets, float32 [R]; adds their gradients unless the work is forward only."""
    if work.forward_only:
        return calls.compute_log_probs(work.batch).log_probs
    output = calls.forward_backward(work.batch, work.loss, 1.0, settings=work.settings, with_log_probs=True)
    return output.log_probs.log_probs
