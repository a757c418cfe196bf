"""What the service has and does: sessions of clients, their training runs and samplers, on one group and one engine."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.rollout.tokenizer import end_token_ids, load_tokenizer
from actors.service import wire
from actors.service.catalogue import Catalogue, KeptRun, Kind, Saved, adapter_of, bytes_below
from actors.service.datums import Work, output_of, work_of
from actors.service.operations import Metrics, RequestLog
from actors.service.results import Answer, Result, Results, typed
from actors.service.samplers import Samplers, SamplerSession, Version, response_of
from actors.service.training_runs import RequestKind, TrainingRun
from actors.workers.group_calls import AdapterCalls, GroupCalls
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, ConfigError, ResourceError, SlimeError, StateError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.rpc import UpdateSettings
from slimefsdp.sampling.requests import SampleRequest, SamplingStats

_REMEMBERED = 4096  # requests of a sampler that get their answer again when they are sent again


class NotFound(Exception):
    """Something that a client names is not there; answered as 404, or 410 where it was there once."""

    def __init__(self, what: str, *, is_gone: bool = False) -> None:
        super().__init__(what)
        self.is_gone = is_gone


@dataclass(slots=True)
class Session:
    """A client, for as long as it says that it is there."""

    id: str
    sdk_version: str
    began: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    made: dict[tuple[str, int], Result] = field(default_factory=dict)  # runs and samplers by their numbers


class Service:
    """Answers what `actors.service.app` hands on; its methods do not block, but for `end_session` and `close`.

    Args:
        group: has adapters.
        engine: a `SamplingEngine`.
    """

    def __init__(self, config: RunConfig, group: GroupCalls, engine: Any) -> None:
        assert config.run.dir is not None and config.lora.rank is not None
        folder = read_model_folder(Path(config.model.path))
        self.config = config
        self.model_name = config.service.model_name or str(config.model.path)
        self.tokenizer = load_tokenizer(str(config.model.path))
        self.end_token_ids = frozenset(end_token_ids(str(config.model.path), self.tokenizer.eos_token_id))
        self.model_type = folder.model_type
        self.tokenizer_id = str(config.model.path)  # a client on another machine finds it there as little as the model
        self.vocab_size = folder.vocab_size
        self.most_tokens = config.max_pack_tokens
        self.results = Results(config.service.result_kept_s, config.service.max_result_bytes)
        self.catalogue = Catalogue(config.run.dir)
        self.samplers = Samplers(engine, config.service.max_samplers)
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, TrainingRun] = {}
        self.is_ending = False
        self.trained_tokens = 0
        self.began = time.time()
        self.metrics = Metrics()
        self.log = RequestLog(config.run.dir / "service" / "requests.jsonl")
        self._engine = engine
        self._run_dir, self._group = config.run.dir, group
        self._making = ThreadPoolExecutor(4, thread_name_prefix="making-runs")
        self._lock = threading.Lock()

    def continue_runs(self) -> None:
        """Has the runs that the last end of a service in the same run.dir left; their clients need not know of it.

        Raises:
            SlimeError: one of them cannot be had again.
        """
        for kept in self.catalogue.kept_runs():
            calls = self._group.adapter(adapter_of(kept.run))
            self._group.create_adapter(calls.name, rank=kept.rank, alpha=self.config.lora.alpha)
            calls.load(kept.updates)
            run = TrainingRun(kept.run, kept.session, kept.rank, calls, self.results, kept.user_metadata)
            run.next_number, run.updates, run.tokens = kept.next_number, kept.updates, kept.tokens
            if kept.has_gradients:  # which are in no checkpoint
                run.incomplete = StateError("the server was started anew", field="forward_backward")
            self.runs[run.id] = run
            self.sessions.setdefault(kept.session, Session(kept.session, kept.sdk_version))
            self.catalogue.forget_run(kept)

    # ------------------------------------------------------------------ sessions

    def create_session(self, body: wire.CreateSession) -> Session:
        """
        Raises:
            ResourceError: there are as many as there may be.
        """
        if len(self.sessions) >= self.config.service.max_sessions:
            raise ResourceError(
                f"there are {len(self.sessions)} sessions, which is service.max_sessions",
                field="service.max_sessions",
                hint="try again later",
            )
        session = Session(f"session-{uuid.uuid4().hex[:16]}", body.sdk_version)
        self.sessions[session.id] = session
        return session

    def session(self, key: str) -> Session:
        """The session, whose client is there.

        Raises:
            NotFound: there is none.
        """
        session = self.sessions.get(key)
        if session is None:
            raise NotFound(f"session {key} has ended", is_gone=True)
        session.seen = time.monotonic()
        return session

    def overdue_sessions(self) -> list[str]:
        """Those whose clients have said nothing for so long that they are taken for gone."""
        now = time.monotonic()
        return [one.id for one in self.sessions.values() if now - one.seen > self.config.service.session_timeout_s]

    async def end_session(self, key: str) -> None:
        """Ends its runs and samplers; what it saved under a name stays."""
        if self.sessions.pop(key, None) is None:
            return
        await self.samplers.end(key)
        for run in [one for one in self.runs.values() if one.session == key]:
            self._making.submit(self._end_run, run)

    def _end_run(self, run: TrainingRun) -> None:
        run.close()
        try:
            self._group.delete_adapter(adapter_of(run.id))
        except SlimeError as error:  # it was never made
            print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
        self.runs.pop(run.id, None)

    # ------------------------------------------------------------------ training

    def create_run(self, body: wire.CreateModel) -> tuple[str, Result]:
        """A new run; asked for again, the same one.

        Raises:
            ConfigError: it cannot be had here. NotFound: no such session. StateError: it is there since an earlier
                start.
        """
        self._check_base(body.base_model)
        lora = body.lora_config
        self._check_lora(lora)
        assert lora is not None
        rank, alpha = lora.rank, self.config.lora.alpha
        seed = lora.seed if lora.seed is not None else secrets.randbits(31)

        def make(run: TrainingRun) -> Answer:
            self._group.create_adapter(adapter_of(run.id), rank=rank, alpha=alpha, seed=seed)
            return {"type": "create_model", "model_id": run.id}

        return self._made(body.session_id, body.model_seq_id, rank, body.user_metadata, make)

    def _made(
        self,
        session_id: str,
        number: int,
        rank: int,
        user_metadata: dict[str, Any] | None,
        make: Callable[[TrainingRun], Answer],
    ) -> tuple[str, Result]:
        session, run_id = self.session(session_id), f"{session_id}:train:{number}"
        with self._lock:
            if (known := session.made.get(("run", number))) is not None:
                return run_id, known
            if run_id in self.runs:
                problem = f"{run_id} goes on since before the server was started anew"
                raise StateError(problem, field="model_seq_id", hint="go on with it, or give another number")
            if len(self.runs) >= self.config.service.max_runs:
                raise ResourceError(
                    f"there are {len(self.runs)} training runs, which is service.max_runs",
                    field="service.max_runs",
                    hint="end one, or raise it",
                )
            result = session.made["run", number] = self.results.new()
            calls = self._group.adapter(adapter_of(run_id))
            run = TrainingRun(run_id, session_id, rank, calls, self.results, user_metadata or {})
            self.runs[run_id] = run

        def work() -> None:
            try:
                result.set(make(run))
            except Exception as error:
                self._end_run(run)
                result.fail(error)

        self._making.submit(work)
        return run_id, result

    def unload(self, run: TrainingRun) -> Result:
        """Ends a run."""
        result = self.results.new()

        def work() -> None:
            self._end_run(run)
            result.set({"type": "unload_model", "model_id": run.id})

        self._making.submit(work)
        return result

    def run(self, key: str) -> TrainingRun:
        """The run, whose client is there.

        Raises:
            NotFound: there is none.
        """
        run = self.runs.get(key)
        if run is None:
            raise NotFound(f"there is no training run {key}")
        if run.session in self.sessions:
            self.sessions[run.session].seen = time.monotonic()
        return run

    def forward_backward(self, message: Any) -> Result:
        """A ForwardBackwardRequest, whichever of both it asks for."""
        run = self.run(message.model_id)

        def do(calls: AdapterCalls) -> Answer:
            work = work_of(message, vocab_size=self.vocab_size, max_tokens=self.most_tokens)
            run.tokens += work.num_tokens
            self.trained_tokens += work.num_tokens
            self.metrics.trained_tokens.inc(work.num_tokens)
            return output_of(work, _log_probs(calls, work))

        kind: RequestKind = "forward" if message.forward_only else "forward_backward"
        return run.submit(message.seq_id, kind, do)

    def optim_step(self, body: wire.OptimStep) -> Result:
        """One update of a run."""
        run, asked = self.run(body.model_id), body.adam_params

        def do(calls: AdapterCalls) -> Answer:
            settings = UpdateSettings(
                lr=asked.learning_rate,
                betas=(asked.beta1, asked.beta2),
                eps=asked.eps,
                weight_decay=asked.weight_decay,
                max_grad_norm=asked.grad_clip_norm,
            )
            metrics = calls.optimizer_step(settings)
            if metrics["skipped_update"]:
                raise StateError(
                    "the gradients are not finite, and no update was made",
                    field="optim_step",
                    hint="lower the learning rate, or look at the data",
                )
            self.metrics.updates.inc()
            every = self.config.checkpoint.interval_steps
            if every is not None and (run.updates + 1) % every == 0:
                calls.save(run.updates + 1)
            return {"type": "optim_step", "metrics": metrics}

        return run.submit(body.seq_id, "optim_step", do)

    # ------------------------------------------------------------------ saving and loading

    def save_weights(self, body: wire.SaveWeights) -> Result:
        """A checkpoint under a name."""
        run = self.run(body.model_id)
        name = body.path or f"checkpoint-{body.seq_id}"

        def do(calls: AdapterCalls) -> Answer:
            calls.save(run.updates, name=name, overwrite=body.overwrite)
            return {"type": "save_weights", "path": self._catalogued(run, "weights", name, body)}

        return run.submit(body.seq_id, "save", do)

    def save_for_sampler(self, body: wire.SaveForSampler) -> Result:
        """Weights to sample from, under a name, or for a sampling client that begins with them."""
        run = self.run(body.model_id)
        if body.kind == "inflight":
            raise ConfigError("kind=inflight is not supported", field="kind", hint="use snapshot")
        if body.path is None and body.sampling_session_seq_id is None:
            raise ConfigError("neither path nor sampling_session_seq_id is given", field="path", hint="give a path")

        def do(calls: AdapterCalls) -> Answer:
            adapter = adapter_of(run.id)
            sampler_id = f"{run.session}:sample:{body.sampling_session_seq_id}"
            if body.path is None and sampler_id in self.samplers.sessions:
                problem = f"there is a sampler {sampler_id}, which keeps its weights"
                raise ConfigError(problem, field="sampling_session_seq_id", hint="number samplers 0, 1, 2, ..")
            name = body.path or f"_session-{body.sampling_session_seq_id}"  # which no path can be
            folder = self.catalogue.folder_of(adapter, "sampler_weights", name)
            if body.path is None:
                shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            calls.export_adapter(folder)
            if body.path is not None:
                return {
                    "type": "save_weights_for_sampler",
                    "path": self._catalogued(run, "sampler_weights", name, body),
                }
            version = Version(f"{run.id}/{name}", folder, is_ephemeral=True)
            sampler = SamplerSession(sampler_id, run.session, version)
            self.samplers.sessions[sampler.id] = sampler
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}

        return run.submit(body.seq_id, "save", do)

    def _catalogued(self, run: TrainingRun, kind: Kind, name: str, body: wire.SaveWeights | wire.SaveForSampler) -> str:
        folder = self.catalogue.folder_of(adapter_of(run.id), kind, name)
        now = time.time()
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        size = bytes_below(folder)
        one = Saved(run.id, adapter_of(run.id), kind, name, run.rank, now, size, expires, body.user_metadata)
        self.catalogue.add(one)
        return one.path

    def load_weights(self, body: wire.LoadWeights) -> tuple[str, Result]:
        """A checkpoint, into a run or a new one.

        Raises:
            CheckpointError: there is none under the path. ConfigError: it is to be loaded without its optimiser.
        """
        saved = self.catalogue.get(body.path)
        if saved.kind != "weights":
            raise ConfigError(f"{body.path} has no state to train from", field="path", hint="name one of save_state")

        def load(calls: AdapterCalls, adapter: str) -> None:
            name = saved.name
            if saved.adapter != adapter:
                # longer than a name that a client can give: the run may have one of its own of that name
                name = f"loaded-{hashlib.sha256(f'{saved.path}@{saved.time}'.encode()).hexdigest()}"
                target = self.catalogue.folder_of(adapter, "weights", name)
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part = target.with_name(f".{target.name}.part")
                    shutil.rmtree(part, ignore_errors=True)
                    shutil.copytree(self.catalogue.folder(saved), part)
                    part.replace(target)
            calls.load(name=name, weights_only=not body.optimizer)

        if body.session_id is not None and body.model_seq_id is not None:
            if body.base_model is not None:
                self._check_base(body.base_model)

            def make(run: TrainingRun) -> Answer:
                adapter = adapter_of(run.id)
                self._group.create_adapter(adapter, rank=saved.rank, alpha=self.config.lora.alpha)
                load(run.calls, adapter)
                return {"type": "load_weights", "path": body.path, "model_id": run.id}

            return self._made(body.session_id, body.model_seq_id, saved.rank, None, make)
        if body.model_id is None or body.seq_id is None:
            raise ConfigError("neither a run nor a session is named", field="model_id", hint="name one")
        run = self.run(body.model_id)
        if run.rank != saved.rank:
            problem = f"{body.path} is of rank {saved.rank}, and this run of rank {run.rank}"
            raise ConfigError(problem, field="path", hint="create a training client from it")

        def do(calls: AdapterCalls) -> Answer:
            load(calls, adapter_of(run.id))
            return {"type": "load_weights", "path": body.path}

        return run.id, run.submit(body.seq_id, "load", do)

    # ------------------------------------------------------------------ sampling

    def create_sampler(self, body: wire.CreateSamplingSession) -> SamplerSession:
        """A sampling client of saved weights, or of the base.

        Raises:
            CheckpointError: there are no such weights. ConfigError: another base, or a checkpoint to train from.
        """
        self.session(body.session_id)
        version = None
        if body.model_path is not None:
            saved = self.catalogue.get(body.model_path)
            if saved.kind != "sampler_weights":
                raise ConfigError(
                    f"{body.model_path} is a state to train from",
                    field="model_path",
                    hint="name weights of save_weights_for_sampler",
                )
            version = Version(f"{saved.path}@{saved.time}", self.catalogue.folder(saved), is_ephemeral=False)
        elif body.base_model is not None:
            self._check_base(body.base_model)
        else:
            raise ConfigError("neither model_path nor base_model is given", field="base_model", hint="give one")
        key = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        sampler = SamplerSession(key, body.session_id, version, body.model_path)
        return self.samplers.sessions.setdefault(key, sampler)

    def sampler(self, key: str) -> SamplerSession:
        """
        Raises:
            NotFound: there is none.
        """
        sampler = self.samplers.sessions.get(key)
        if sampler is None:
            raise NotFound(f"there is no sampler {key}")
        if sampler.session in self.sessions:
            self.sessions[sampler.session].seen = time.monotonic()
        return sampler

    def sample(self, body: wire.Sample) -> tuple[Result, Callable[[], Any] | None]:
        """The result of a request, and what has to be awaited to have it; None where it was seen before.

        Raises:
            BatchError: naming what cannot be served. NotFound: no such sampler.
        """
        sampler = self.sampler(body.sampling_session_id)
        if (known := sampler.answers.get(body.seq_id)) is not None:
            return known, None
        for chunk in body.prompt.chunks:
            if chunk.type != "encoded_text":
                raise BatchError(f"a chunk of {chunk.type}", field="prompt", hint="send encoded_text alone")
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        left = self.most_tokens - len(prompt)
        if left < 1:
            problem = f"a prompt of {len(prompt)} tokens, and this server reads at most {self.most_tokens - 1}"
            raise BatchError(problem, field="prompt", hint="cut it, or raise batch.max_tokens_per_rank of the server")
        params = body.params(self.end_token_ids, left, secrets.randbits(62))
        if params.max_new_tokens > left:
            problem = f"max_tokens={params.max_new_tokens} behind {len(prompt)} tokens, and there is room for {left}"
            hint = "lower it, or raise batch.max_tokens_per_rank of the server"
            raise BatchError(problem, field="max_tokens", hint=hint)
        version = None if sampler.version is None else sampler.version.name
        top_k = body.topk_prompt_logprobs
        request = SampleRequest(version, prompt, body.num_samples, params, bool(body.prompt_logprobs or top_k), top_k)
        result = sampler.answers[body.seq_id] = self.results.new()
        if len(sampler.answers) > _REMEMBERED:
            del sampler.answers[next(iter(sampler.answers))]

        async def work() -> None:
            try:
                answer = await self.samplers.sample(sampler, request)
                self.metrics.samples.inc(len(answer.samples))
                result.set(response_of(answer, body.prompt_logprobs_last_n))
            except Exception as error:
                result.fail(typed(error))

        return result, work

    # ------------------------------------------------------------------ the rest

    def close(self) -> None:
        """Finishes what was taken, and saves every run for the next start."""
        self.is_ending = True
        self._making.shutdown()  # runs that are being made or ended are there, or not, behind this
        for run in list(self.runs.values()):
            run.close(finishes=True)
            try:
                run.calls.save(run.updates)
            except SlimeError as error:  # the others can be kept
                print(f"{run.id} is not kept: {error}", file=sys.stderr, flush=True)
                continue
            seen = self.sessions[run.session].sdk_version if run.session in self.sessions else ""
            self.catalogue.keep_run(
                KeptRun(
                    run.id, run.session, seen, run.rank, run.next_number, run.updates, run.tokens, run.has_gradients,
                    run.user_metadata,
                )
            )  # fmt: skip
        self.log.close()

    @property
    def recoveries(self) -> int:
        """How often lost ranks were replaced."""
        return len(getattr(self._group, "recoveries", ()))

    async def sampling_stats(self) -> SamplingStats:
        """Of the engine."""
        stats: SamplingStats = await self._engine.stats.remote()
        return stats

    def _check_base(self, name: str) -> None:
        known = {self.model_name, str(self.config.model.path)}
        if name not in known:
            problem = f"base_model={name!r}, and this server has {self.model_name}"
            raise ConfigError(problem, field="base_model", hint="name that one")

    def _check_lora(self, lora: wire.LoraConfig | None) -> None:
        settings = self.config.lora
        assert settings.rank is not None
        if lora is None or not 1 <= lora.rank <= settings.rank:
            rank = None if lora is None else lora.rank
            raise ConfigError(
                f"rank={rank}, and this server trains adapters of rank 1 to {settings.rank}",
                field="lora_config.rank",
                hint="choose one of these, or raise lora.rank of the server",
            )
        for field_name, target in (("train_attn", "attention"), ("train_mlp", "mlp"), ("train_unembed", "head")):
            has = target in settings.targets
            if getattr(lora, field_name) != has:
                raise ConfigError(
                    f"{field_name}={not has}, and the adapters of this server have lora.targets="
                    f"{list(settings.targets)}",
                    field=f"lora_config.{field_name}",
                    hint=f"set it to {has}",
                )


def _log_probs(calls: AdapterCalls, work: Work) -> Any:
    """Of the targets, float32 [R]; with their gradients added where these are wanted."""
    if work.forward_only:
        return calls.compute_log_probs(work.batch).log_probs
    found = calls.forward_backward(work.batch, work.loss, 1.0, settings=work.settings, with_log_probs=True)
    return found.log_probs.log_probs
