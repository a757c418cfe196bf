"""Manages sampling clients: their requests, their weights, and the loading of these weights into the engine."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from actors.fault_tolerance.recovery import LOST
from actors.service import tinker_pb2, wire
from actors.service.catalogue import SamplerRecord, Saved
from actors.service.results import Answer, Result, require_same_kind
from actors.service.run_weights import RunWeights
from actors.service.state import SHOWN, ServiceState
from actors.service.supervised_engine import EngineReplaced, SupervisedEngine
from actors.service.users import NotFound, Session, User
from slimefsdp.errors import BatchError, ConfigError, ResourceError, StateError
from slimefsdp.sampling.params import SampleAnswer, SampleRequest, SamplingParams

_REMEMBERED = 4096  # number of a sampler's newest requests that get the same answer when they are repeated
_BOUNDS = "batch.max_tokens_per_rank of the server and the model's positions limit prompt and response together"
_NO_LOG_PROB = -99999.0  # this log-prob, with token 0, marks a position without top tokens


@dataclass(frozen=True, slots=True)
class Version:
    """Weights to sample from.

    Args:
        name: the name of the weights in the engine.
        folder: a PEFT folder, or the folder of a whole model.
        is_ephemeral: whether the folder is deleted at the end of the client's session.
    """

    name: str
    folder: Path
    is_ephemeral: bool


@dataclass(slots=True)
class SamplerSession:
    """A sampling client.

    Args:
        owner: the id of the user who created the sampling client.
        version: the weights; None means the base model.
        path: the path of the weights in the clients' API; None means the base model, or weights without a name.
    """

    id: str
    session: str
    owner: str
    version: Version | None
    path: str | None = None
    answers: dict[int, Result] = field(default_factory=dict)  # number of a request -> its result
    running: set[asyncio.Task[Any]] = field(default_factory=set)  # the tasks that sample for this client

    @property
    def weights(self) -> str:
        """Returns a description of the client's weights."""
        if self.path is None:
            return "sampler of the base" if self.version is None else "sampler of weights without a name"
        return f"sampler of {self.path}"


class Samplers:
    """The sampling clients of one engine; service.max_samplers limits the clients with unnamed weights in a session."""

    def __init__(self, state: ServiceState, engine: SupervisedEngine, weights: RunWeights) -> None:
        self.sessions: dict[str, SamplerSession] = {}
        self._state, self._engine, self._weights = state, engine, weights
        self._running: Counter[str] = Counter()  # version -> number of its requests in the engine
        self._loading = asyncio.Lock()
        self._needs_room = False  # whether a version waits until the engine has room to load it
        self._idle = asyncio.Event()  # is set when a request has left the engine

    # ------------------------------------------------------------------ calls of clients

    async def create_sampling_session(self, body: wire.CreateSamplingSession, user: User) -> Answer:
        """Creates a sampling client of saved weights or the base model; a repeated request returns the same client.

        Raises:
            CheckpointError: there are no such weights. ConfigError: the request names another base model, or a
                checkpoint to train from.
            StateError: the number was used for other weights. ResourceError: the disk is full.
        """
        session = self._state.session(body.session_id, user)
        version = None
        if body.model_path is not None:
            saved = self._state.catalogue.get(body.model_path, user)
            if saved.kind != "sampler_weights":
                raise ConfigError(
                    f"{body.model_path} is a state to train from",
                    field="model_path",
                    hint="name weights of save_weights_for_sampler",
                )
            self._weights.check_rank(saved.rank)
            version = self._version_of(saved)
        elif body.base_model is not None:
            self._state.check_base(body.base_model)
        else:
            raise ConfigError("neither model_path nor base_model is given", field="base_model", hint="give one")
        key = f"{session.id}:sample:{body.sampling_session_seq_id}"
        sampler = SamplerSession(key, session.id, session.owner, version, body.model_path)
        known = self.sessions.setdefault(key, sampler)
        require_same_kind("sampling_session_seq_id", body.sampling_session_seq_id, known.weights, sampler.weights)
        if known.version is None or not known.version.is_ephemeral:
            name = None if known.version is None else known.version.name
            record = SamplerRecord(key, session.id, session.owner, session.sdk_version, known.path, name)
            await asyncio.to_thread(self._state.catalogue.samplers.keep, record)
        return {"type": "create_sampling_session", "sampling_session_id": key}

    def get(self, key: str, user: User) -> SamplerSession:
        """Returns a sampling client, and records that it is alive.

        Raises:
            NotFound: the user has no sampling client of this id.
        """
        sampler = self.sessions.get(key)
        if sampler is None or not user.owns(sampler.owner):
            raise NotFound(f"there is no sampler {key[:SHOWN]}")
        self._state.saw_client_of(sampler.session)
        return sampler

    def describe(self, user: User, id: str) -> Answer:
        sampler = self.get(id, user)
        return {"sampler_id": id, "base_model": self._state.model_name, "model_path": sampler.path}

    async def asample(self, body: wire.Sample, user: User) -> Result:
        """Starts a sampling request; a repeated request returns the same result.

        Raises:
            BatchError: a value of the request is not supported; the message names the value. NotFound: as in `get`.
        """
        sampler, state = self.get(body.sampling_session_id, user), self._state
        if (known := sampler.answers.get(body.seq_id)) is not None:
            return known
        if body.record_stability_info and state.config.service.stable_reinforce is None:
            raise BatchError(
                "record_stability_info=true is for the loss stable_reinforce, which this server does not serve",
                field="record_stability_info",
                hint="train with another loss_fn, or set service.stable_reinforce of the server",
            )
        request = _request_of(body, sampler, state.end_token_ids, state.most_context)
        ids = [f"{sampler.id}/{body.seq_id}/{index}" for index in range(body.num_samples)]
        result = state.results.new(sampler.owner, body.size, sample_sequence_ids=ids)
        sampler.answers[body.seq_id] = result
        if len(sampler.answers) > _REMEMBERED:
            del sampler.answers[next(iter(sampler.answers))]

        async def work() -> Answer:
            answer = await self.sample(sampler, request)
            state.metrics.samples.inc(len(answer.samples))
            return _response_of(answer, body.prompt_logprobs_last_n)

        def ended(task: asyncio.Task[Answer]) -> None:
            sampler.running.discard(task)
            if task.cancelled():
                problem = f"{sampler.session} has ended, and its sampling requests were cancelled"
                result.fail(StateError(problem, field="sampling_session_id", hint="create another sampling client"))
            elif isinstance(error := task.exception(), Exception):
                result.fail(error)
            else:
                result.set(task.result())

        task = asyncio.create_task(work())
        sampler.running.add(task)
        task.add_done_callback(ended)
        return result

    # ------------------------------------------------------------------ sampling

    async def sample(self, sampler: SamplerSession, request: SampleRequest) -> SampleAnswer:
        """Draws samples from the sampler's weights. If the engine is lost, draws them once more on the next engine.

        Raises:
            StateError: the weights were deleted. ResourceError: the weights do not fit into an empty engine.
            BatchError: the request cannot be served. CancelledError: the sampler was removed.
            WorkerDied, WorkerHung: two engines were lost during this request, or the engine cannot be replaced.
        """
        task = asyncio.current_task()
        assert task is not None
        sampler.running.add(task)
        was_lost = False
        try:
            while True:
                try:
                    if sampler.version is None:
                        return await self._engine.sample(request)
                    return await self._sampled(sampler.version, request)
                except EngineReplaced as replaced:  # the same seeds draw the same samples again
                    if replaced.loss is None:  # the lost engine never got the request
                        continue
                    if was_lost:  # the request itself may be what ends engines
                        raise replaced.loss from None
                    was_lost = True
        finally:
            sampler.running.discard(task)

    async def _sampled(self, version: Version, request: SampleRequest) -> SampleAnswer:
        name, used = version.name, self._engine.versions
        if name in used and not self._needs_room:  # no need to wait until another version is loaded
            used[name] = time.monotonic()
            self._running[name] += 1
        else:
            async with self._loading:
                await self._ensure_loaded(version)
                self._running[name] += 1
        try:
            return await self._engine.sample(request)
        finally:
            self._running[name] -= 1
            self._idle.set()

    async def _ensure_loaded(self, version: Version) -> None:
        """Loads a version, unless the engine has it. If there is no room, drops the version unused for longest.

        If all versions are in use, waits until a version is idle. The caller must hold the lock `_loading`.
        """
        if version.name not in self._engine.versions:
            if not version.folder.is_dir():
                problem = f"the weights of this sampler are not there any more: {version.name}"
                raise StateError(problem, field="sampling_session_id", hint="save them again")
            while not await self._try_to_load(version):
                await self._make_room()
        else:
            self._engine.versions[version.name] = time.monotonic()

    async def _try_to_load(self, version: Version) -> bool:
        """Loads a version; returns False if the engine has no room for it because of its other versions.

        The engine completes a load even if this task is cancelled. So a cancelled task still waits for the end of the
        load, and records the version before another version is loaded.
        """
        loading = asyncio.create_task(self._load(version))
        try:
            await asyncio.shield(loading)
        except ResourceError:
            if not self._engine.versions:
                raise
            return False
        except asyncio.CancelledError:
            await asyncio.wait([loading])
            raise
        return True

    async def _load(self, version: Version) -> None:
        versions = self._engine.versions  # read before the call: the engine may be lost and replaced during it
        await self._engine.load(version.name, str(version.folder))
        versions[version.name] = time.monotonic()

    async def _make_room(self) -> None:
        """Drops the idle version unused for longest; waits until a version is idle, or until the engine is replaced."""
        self._needs_room = True  # makes new requests for loaded versions wait, as otherwise none might become idle
        try:
            while not (idle := [name for name in self._engine.versions if not self._running[name]]):
                if not self._engine.versions:  # a new engine, which has room
                    return
                self._idle.clear()
                await self._idle.wait()
        finally:
            self._needs_room = False
        await self._drop(min(idle, key=self._engine.versions.__getitem__))

    async def _drop(self, name: str) -> None:
        self._engine.versions.pop(name, None)
        self._running += Counter()  # removes entries that are 0
        with suppress(EngineReplaced, *LOST):  # a lost engine has no versions
            await self._engine.drop(name)

    # ------------------------------------------------------------------ removal, and starts of the server

    async def forget_oldest(self) -> None:
        """Removes the oldest samplers with unnamed weights beyond service.max_samplers; call it every few seconds."""
        unnamed: dict[str, list[SamplerSession]] = {}
        for sampler in list(self.sessions.values()):
            if sampler.version is not None and sampler.version.is_ephemeral:
                unnamed.setdefault(sampler.session, []).append(sampler)
        for samplers in unnamed.values():
            surplus = max(0, len(samplers) - self._state.config.service.max_samplers)
            for sampler in [sampler for sampler in samplers if not sampler.running][:surplus]:
                await self._forget(sampler)

    def forget_answers(self) -> None:
        """Removes requests whose answers have expired; must be called every few seconds."""
        for sampler in list(self.sessions.values()):  # a copy, since threads of runs add samplers
            for number, _ in list(takewhile(lambda item: item[1].is_forgotten, sampler.answers.items())):
                del sampler.answers[number]

    async def end(self, session: str) -> None:
        """Removes the sampling clients of a session with their unnamed weights; cancels requests in progress."""
        samplers = [candidate for candidate in list(self.sessions.values()) if candidate.session == session]
        for task in [task for sampler in samplers for task in sampler.running]:
            task.cancel()
        for sampler in samplers:
            await self._forget(sampler)

    def discard(self, key: str) -> None:
        """Removes a sampler that no client knows of yet, if it still exists."""
        sampler = self.sessions.pop(key, None)
        if sampler is not None and sampler.version is not None:
            shutil.rmtree(sampler.version.folder, ignore_errors=True)

    async def _forget(self, sampler: SamplerSession) -> None:
        self.sessions.pop(sampler.id, None)
        if sampler.version is not None and sampler.version.is_ephemeral:
            try:
                async with self._loading:
                    if sampler.version.name in self._engine.versions:
                        await self._drop(sampler.version.name)
            finally:  # also if the engine is lost
                shutil.rmtree(sampler.version.folder, ignore_errors=True)

    def continue_kept(self) -> None:
        """Restores the sampling clients that earlier starts with this run.dir recorded and whose weights exist."""
        for record in self._state.catalogue.samplers.all():
            saved = None if record.path is None else self._state.catalogue.find(record.path)
            version = None if saved is None else self._version_of(saved)
            if (None if version is None else version.name) != record.version:
                continue  # its weights were deleted
            self.sessions[record.id] = SamplerSession(record.id, record.session, record.owner, version, record.path)
            session = Session(record.session, record.owner, record.sdk_version)
            self._state.sessions.setdefault(record.session, session)

    def _version_of(self, saved: Saved) -> Version:
        return Version(f"{saved.path}@{saved.time}", self._state.catalogue.folder(saved), is_ephemeral=False)


def _request_of(
    body: wire.Sample, sampler: SamplerSession, end_token_ids: frozenset[int], most_tokens: int
) -> SampleRequest:
    """Converts a client's sampling request to a request for the engine.

    Args:
        end_token_ids: the model's end tokens, which end a response if the client gives no `stop`.
        most_tokens: limit on the tokens of a prompt with its response.

    Raises:
        BatchError: a value of the request is not supported; the message names the value.
    """
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise BatchError(f"a chunk of {chunk.type}", field="prompt", hint="send only encoded_text")
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    left = most_tokens - len(prompt)
    if left < 1:
        problem = f"a prompt of {len(prompt)} tokens, and this server reads at most {most_tokens - 1}"
        raise BatchError(problem, field="prompt", hint=f"cut it: {_BOUNDS}")
    wanted = body.sampling_params
    max_tokens = wanted.max_tokens or left
    if max_tokens > left:
        problem = f"max_tokens={max_tokens} after a prompt of {len(prompt)} tokens, and there is room for {left}"
        raise BatchError(problem, field="max_tokens", hint=f"lower it: {_BOUNDS}")
    stop = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
    params = SamplingParams(
        max_tokens,
        temperature=wanted.temperature or 1.0,
        greedy=wanted.temperature == 0,
        tempered=False,
        end_token_ids=end_token_ids if stop is None else frozenset(item for item in stop if isinstance(item, int)),
        stop=tuple(item for item in stop or () if isinstance(item, str)),
        seed=(wanted.seed if wanted.seed is not None else secrets.randbits(62),),
        top_k=wanted.top_k if wanted.top_k > 0 else None,
        top_p=wanted.top_p,
    )
    version = None if sampler.version is None else sampler.version.name
    top_k = body.topk_prompt_logprobs
    wants_prompt = bool(body.prompt_logprobs or top_k)
    return SampleRequest(version, prompt, body.num_samples, params, wants_prompt, top_k, client=sampler.session)


def _response_of(answer: SampleAnswer, last_n: int | None) -> bytes:
    """Returns the serialised SampleResponse of an answer.

    Args:
        last_n: number of tokens at the end of the prompt whose log-probs are returned; None means all.
    """
    response = tinker_pb2.SampleResponse()
    if answer.prompt_log_probs is not None:
        values = np.array(answer.prompt_log_probs, "<f4")
        if last_n is not None:
            values[: max(0, values.size - last_n)] = np.nan
        response.prompt_logprobs = values.tobytes()
    if (top := answer.prompt_top_tokens) is not None:
        # positions without top tokens: the first token, and all tokens before the last `last_n`
        empty = max(1, 0 if last_n is None else len(top.tokens) + 1 - last_n)
        k = top.tokens.shape[1]
        tokens = np.concatenate([np.zeros((empty, k)), top.tokens[empty - 1 :]]).astype("<i4")
        log_probs = np.concatenate([np.full((empty, k), _NO_LOG_PROB), top.log_probs[empty - 1 :]]).astype("<f4")
        response.topk_prompt_logprobs.CopyFrom(
            tinker_pb2.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=log_probs.tobytes(), k=k, length=len(tokens))
        )
    for sample in answer.samples:
        was_cut = sample.finish_reason == "length"
        response.sequences.add(
            stop_reason=tinker_pb2.STOP_REASON_LENGTH if was_cut else tinker_pb2.STOP_REASON_STOP,
            tokens=np.array(sample.tokens, "<i4").tobytes(),
            logprobs=np.array(sample.log_probs, "<f4").tobytes(),
        )
    return bytes(response.SerializeToString())
