"""What the service has and does: sessions of clients, their training runs and samplers, on one group and one engine."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.engines.server_launch import longest_sample
from actors.engines.tokenizer import end_token_ids, load_tokenizer
from actors.service import wire
from actors.service.catalogue import Catalogue, SamplerRecord, Saved
from actors.service.datums import Work, output_of, work_of
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
from slimefsdp.sampling.requests import SamplingStats

_MOST_LR = 1000.0  # AdamW moves a weight by about as much: no finite gradients lead to an infinite weight from there
_LEAST_EPS = 1e-15  # AdamW divides by it alone where the second moment has decayed to 0 and the first has not
_SHOWN = 200  # characters of an id that is not known, which has any length
_REMEMBERED = 4096  # requests of a sampler that get their answer again when they are sent again


class Service:
    """Answers what `actors.service.app` hands on; its methods do not block, but for `end_session` and `close`.

    Args:
        group: as it was launched.
    """

    def __init__(self, config: RunConfig, group: GroupCalls, engine: SupervisedEngine) -> None:
        assert config.run.dir is not None
        folder = read_model_folder(Path(config.model.path))
        self.config = config
        self.model_name = config.service.model_name or str(config.model.path)
        self.tokenizer = load_tokenizer(str(config.model.path))
        self.end_token_ids = frozenset(end_token_ids(str(config.model.path), self.tokenizer.eos_token_id))
        self.model_type = folder.model_type
        self.tokenizer_id = str(config.model.path)  # a client on another machine finds it there as little as the model
        self.vocab_size = folder.vocab_size
        self.most_tokens = config.max_pack_tokens  # of a datum
        self.most_context = longest_sample(config, folder)  # of a prompt with its response
        self.most_targets = config.service.max_body_bytes // 8  # as a body has room for where they are dense
        limits = config.service
        self.results = Results(
            limits.result_kept_s, limits.max_result_bytes, limits.max_waiting, limits.max_waiting_bytes
        )
        self.catalogue = Catalogue(config.run.dir)
        self.weights = run_weights_of(config, group, self.catalogue)
        self.samplers = Samplers(engine, limits.max_samplers)
        self.sessions: dict[str, Session] = {}
        self._run_table = RunTable(self.weights, self.results, self.catalogue, self.sessions, limits.max_runs)
        self.is_ending = False
        self.began = time.time()
        self.metrics = Metrics()
        self.log = RequestLog(config.run.dir / "service" / "requests.jsonl")
        self.engine = engine
        self._group = group

    def continue_runs(self) -> None:
        """Continues the runs and sampling clients of the last start in the same run.dir.

        Sampling clients whose weights have no name are not continued.

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
        """The training runs by their ids."""
        return self._run_table.by_id

    # ------------------------------------------------------------------ sessions

    def create_session(self, body: wire.CreateSession, user: User) -> Session:
        """A new client of the user.

        Raises:
            ResourceError: there are as many as there may be.
        """
        if len(self.sessions) >= self.config.service.max_sessions:
            raise ResourceError(
                f"there are {len(self.sessions)} sessions, which is service.max_sessions",
                field="service.max_sessions",
                hint="try again later",
            )
        session = Session(f"session-{uuid.uuid4().hex[:16]}", user.id, body.sdk_version)
        self.sessions[session.id] = session
        return session

    def session(self, key: str, user: User) -> Session:
        """The session, whose client is there.

        Raises:
            NotFound: the user has none of this id.
        """
        session = self.sessions.get(key)
        if session is None or not user.owns(session.owner):
            raise NotFound(f"session {key[:_SHOWN]} has ended", is_gone=True)
        session.seen = time.monotonic()
        return session

    def overdue_sessions(self) -> list[str]:
        """Returns the sessions whose clients were silent for too long."""
        now = time.monotonic()
        return [one.id for one in self.sessions.values() if now - one.seen > self.config.service.session_timeout_s]

    async def end_session(self, key: str, *, is_overdue: bool = False) -> None:
        """Ends its runs and samplers; what it saved under a name stays.

        Args:
            is_overdue: its client has not said so itself, and may come back for what a start has saved for it.
        """
        if self.sessions.pop(key, None) is None:
            return
        self._run_table.end_session(key, is_overdue=is_overdue)
        self.catalogue.forget_samplers(key)
        await self.samplers.end(key)

    # ------------------------------------------------------------------ training

    def create_run(self, body: wire.CreateModel, user: User) -> tuple[str, Result]:
        """A new run; asked for again, the same one.

        Raises:
            ConfigError: it cannot be had here. NotFound: no such session, or the run has ended. StateError: it is of
                an earlier start, there is no place for it beside another one, or its number is of another call.
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
        """Ends a run."""
        return self._run_table.unload(run)

    def refuse_behind_lost(self) -> None:
        """Fails requests that wait for lost ones; it is to be called every few seconds."""
        self._run_table.refuse_behind_lost()

    def run(self, key: str, user: User) -> TrainingRun:
        """The run, whose client is there.

        Raises:
            NotFound: the user has none of this id.
        """
        run = self.runs.get(key)
        if run is None or not user.owns(run.owner):
            raise NotFound(f"there is no training run {key[:_SHOWN]}")
        if run.session in self.sessions:
            self.sessions[run.session].seen = time.monotonic()
        return run

    def forward_backward(self, message: Any, size: int, user: User) -> Result:
        """A ForwardBackwardRequest of so many bytes, whichever of both it asks for."""
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
        """Takes one update of a run."""
        run, asked = self.run(body.model_id, user), body.adam_params

        def do(calls: GroupCalls) -> Answer:
            try:
                metrics = calls.optimizer_step(_update_settings(asked))
            except StateError:  # there were none, or too many in a row were not finite
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
                except CheckpointError as error:  # the update was made all the same, and the checkpoint before stands
                    print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
            return {"type": "optim_step", "metrics": metrics}

        return run.submit(body.seq_id, "optim_step", do, body.size)

    # ------------------------------------------------------------------ saving and loading

    def save_weights(self, body: wire.SaveWeights, user: User) -> Result:
        """A checkpoint under a name."""
        run = self.run(body.model_id, user)
        return run.submit(body.seq_id, "save", lambda _: save_weights(run, body, self.catalogue), body.size)

    def save_for_sampler(self, body: wire.SaveForSampler, user: User) -> Result:
        """Weights to sample from, under a name, or for a sampling client that begins with them."""
        run = self.run(body.model_id, user)
        if body.kind == "inflight":
            raise ConfigError("kind=inflight is not supported", field="kind", hint="use snapshot")
        if body.path is None and body.sampling_session_seq_id is None:
            raise ConfigError("neither path nor sampling_session_seq_id is given", field="path", hint="give a path")

        def do(_: GroupCalls) -> dict[str, Any]:
            answer = save_for_sampler(run, body, self.weights, self.catalogue, self.samplers)
            if run.session not in self.sessions and body.path is None:
                self.samplers.discard(answer["sampling_session_id"])  # which may have come behind the end of the others
            return answer

        return run.submit(body.seq_id, "save_for_sampler", do, body.size)

    def load_weights(self, body: wire.LoadWeights, user: User) -> tuple[str, Result]:
        """A checkpoint, into a run or a new one.

        Raises:
            CheckpointError: there is none under the path. ConfigError: it cannot be loaded here. StateError: there is
                no place for the new run beside another one.
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
        """A sampling client of saved weights, or of the base.

        Raises:
            CheckpointError: there are no such weights. ConfigError: another base, or a checkpoint to train from.
            StateError: its number is that of a client of other weights.
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
        made = SamplerSession(key, session.id, session.owner, version, body.model_path)
        known = self.samplers.sessions.setdefault(key, made)
        require_same_kind(
            "sampling_session_seq_id", body.sampling_session_seq_id, _weights_of(known), _weights_of(made)
        )
        return known

    def keep_sampler(self, sampler: SamplerSession) -> None:
        """Has a sampling client go on at the next start, unless its weights have no name; writes to the disk."""
        session, version = self.sessions.get(sampler.session), sampler.version
        if session is None or (version is not None and version.is_ephemeral):
            return
        name = None if version is None else version.name
        self.catalogue.keep_sampler(
            SamplerRecord(sampler.id, session.id, session.owner, session.sdk_version, sampler.path, name)
        )

    def sampler(self, key: str, user: User) -> SamplerSession:
        """
        Raises:
            NotFound: the user has none of this id.
        """
        sampler = self.samplers.sessions.get(key)
        if sampler is None or not user.owns(sampler.owner):
            raise NotFound(f"there is no sampler {key[:_SHOWN]}")
        if sampler.session in self.sessions:
            self.sessions[sampler.session].seen = time.monotonic()
        return sampler

    def sample(self, body: wire.Sample, user: User) -> tuple[Result, Callable[[], Any] | None]:
        """The result of a request, and what has to be awaited to have it; None where it was seen before.

        Raises:
            BatchError: naming what cannot be served. NotFound: no such sampler.
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
        """Finishes what was taken, and saves every run for the next start."""
        self.is_ending = True
        self._run_table.close()
        self.log.close()

    @property
    def recoveries(self) -> int:
        """Returns how often lost ranks were replaced."""
        return len(getattr(self._group, "recoveries", ()))

    async def sampling_stats(self) -> SamplingStats:
        """Returns the engine's counts."""
        return await self.engine.stats()

    def _check_base(self, name: str) -> None:
        known = {self.model_name, str(self.config.model.path)}
        if name not in known:
            problem = f"base_model={name!r}, and this server has {self.model_name}"
            raise ConfigError(problem, field="base_model", hint="name that one")


def _weights_of(sampler: SamplerSession) -> str:
    """Returns which weights a sampling client was made for, in words."""
    if sampler.path is None:
        return "sampler of the base" if sampler.version is None else "sampler of weights without a name"
    return f"sampler of {sampler.path}"


def _version_of(saved: Saved, catalogue: Catalogue) -> Version:
    return Version(f"{saved.path}@{saved.time}", catalogue.folder(saved), is_ephemeral=False)


def _update_settings(asked: wire.AdamParams) -> UpdateSettings:
    """Returns what a client asks an update for.

    Raises:
        ConfigError: a value is not in its range, or makes weights infinite or NaN of usual gradients.
    """
    bounds = {
        "learning_rate": (asked.learning_rate, asked.learning_rate <= _MOST_LR, f"{_MOST_LR:g} at most"),
        "eps": (asked.eps, asked.eps >= _LEAST_EPS, f"{_LEAST_EPS:g} at least"),
        "weight_decay": (
            asked.weight_decay,
            asked.learning_rate * asked.weight_decay <= 1,
            "1 / learning_rate at most, which takes a whole weight off",
        ),
    }
    for name, (value, is_in_range, rule) in bounds.items():
        if not is_in_range:
            raise ConfigError(f"{name}={value:g}, and it may be {rule}", field=name, hint="choose another one")
    return UpdateSettings(
        lr=asked.learning_rate,
        betas=(asked.beta1, asked.beta2),
        eps=asked.eps,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.grad_clip_norm,
    )


def _log_probs(calls: GroupCalls, work: Work) -> Any:
    """Returns the targets' log-probs, float32 [R], and adds their gradients unless the work is forward only."""
    if work.forward_only:
        return calls.compute_log_probs(work.batch).log_probs
    found = calls.forward_backward(work.batch, work.loss, 1.0, settings=work.settings, with_log_probs=True)
    return found.log_probs.log_probs
