"""Sampling clients: which weights each samples from, and how these come into the engine and leave it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from actors.fault_tolerance.recovery import LOST
from actors.service.results import Result
from actors.service.supervised_engine import EngineReplaced, SupervisedEngine
from slimefsdp.errors import ResourceError, StateError
from slimefsdp.sampling.requests import SampleAnswer, SampleRequest


@dataclass(frozen=True, slots=True)
class Version:
    """Weights to sample from.

    Args:
        name: in the engine.
        folder: of PEFT, or of a whole model.
        is_ephemeral: it goes with its client's session.
    """

    name: str
    folder: Path
    is_ephemeral: bool


@dataclass(slots=True)
class SamplerSession:
    """A sampling client.

    Args:
        owner: the id of the user whose client made it.
        version: None: the base.
        path: of the saved weights, as clients name it.
    """

    id: str
    session: str
    owner: str
    version: Version | None
    path: str | None = None
    answers: dict[int, Result] = field(default_factory=dict)  # the newest ones, by number of the request
    running: set[asyncio.Task[Any]] = field(default_factory=set)  # that sample for it


class Samplers:
    """All sampling clients, on one engine.

    Args:
        most_unnamed: of a session, those with weights of their own; the oldest ones go.
    """

    def __init__(self, engine: SupervisedEngine, most_unnamed: int) -> None:
        self.sessions: dict[str, SamplerSession] = {}
        self._engine = engine
        self._asked: Counter[str] = Counter()  # requests by version, also those that wait for it to be loaded
        self._running: Counter[str] = Counter()  # those that are in the engine
        self._most_unnamed = most_unnamed
        self._loading = asyncio.Lock()
        self._needs_room = False  # for a version that is to be loaded
        self._idle = asyncio.Event()  # a request has left the engine

    async def sample(self, sampler: SamplerSession, request: SampleRequest) -> SampleAnswer:
        """Draws what is asked for from the sampler's own weights; once more from the next engine, where one is lost.

        Raises:
            StateError: these weights are not there any more. ResourceError: there is no room for them, also alone.
            BatchError: the request cannot be served. WorkerDied, WorkerHung: two engines were lost while they did what
                this request needs, or there will be none any more. CancelledError: the sampler was forgotten meanwhile.
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
                except EngineReplaced as replaced:  # equal seeds draw the same samples again
                    if replaced.loss is None:  # the engine had not been asked
                        continue
                    if was_lost:  # this request may be what ends them
                        raise replaced.loss from None
                    was_lost = True
        finally:
            sampler.running.discard(task)

    async def _sampled(self, version: Version, request: SampleRequest) -> SampleAnswer:
        name, used = version.name, self._engine.versions
        self._asked[name] += 1
        try:
            if name in used and not self._needs_room:  # not behind a version that is being read
                used[name] = time.monotonic()
                self._running[name] += 1
            else:
                async with self._loading:
                    await self._have(version)
                    self._running[name] += 1
            try:
                return await self._engine.sample(request)
            finally:
                self._running[name] -= 1
                self._idle.set()
        finally:
            self._asked[name] -= 1

    async def _have(self, version: Version) -> None:
        """Loads a version that is not in the engine; the one that nobody has used longest makes room for it.

        Where all are sampled from, it waits for one of them, and other requests wait behind it.
        """
        if version.name not in self._engine.versions:
            if not version.folder.is_dir():
                problem = f"the weights of this sampler are not there any more: {version.name}"
                raise StateError(problem, field="sampling_session_id", hint="save them again")
            while not await self._loaded(version):
                await self._make_room()
        else:
            self._engine.versions[version.name] = time.monotonic()

    async def _loaded(self, version: Version) -> bool:
        """Loads a version; False: there is no room beside the others.

        The engine goes on with a load whose caller is cancelled. So the caller waits until the version is known, and
        no other one is loaded meanwhile.
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
        versions = self._engine.versions  # of this engine, which may be lost before its answer is read
        await self._engine.load(version.name, str(version.folder))
        versions[version.name] = time.monotonic()

    async def _make_room(self) -> None:
        """Drops the version that was longest unused, when it is idle; nothing where the engine is lost meanwhile."""
        self._needs_room = True  # nothing more is sampled of those that are there, or none would ever be idle
        try:
            while not (idle := [name for name in self._engine.versions if not self._running[name]]):
                if not self._engine.versions:  # of the next engine, which has room
                    return
                self._idle.clear()
                await self._idle.wait()
        finally:
            self._needs_room = False
        await self._drop(min(idle, key=self._engine.versions.__getitem__))

    async def _drop(self, name: str) -> None:
        self._engine.versions.pop(name, None)
        self._asked += Counter()  # without those that have come to 0
        self._running += Counter()
        with suppress(EngineReplaced, *LOST):  # an engine that is lost holds no version
            await self._engine.drop(name)

    async def forget_oldest(self) -> None:
        """Forgets the samplers longest unused; it is to be called every few seconds."""
        unnamed: dict[str, list[SamplerSession]] = {}
        for sampler in list(self.sessions.values()):
            if sampler.version is not None and sampler.version.is_ephemeral:
                unnamed.setdefault(sampler.session, []).append(sampler)
        for samplers in unnamed.values():
            idle = [one for one in samplers if one.version is not None and not self._asked[one.version.name]]
            for sampler in idle[: max(0, len(samplers) - self._most_unnamed)]:
                await self._forget(sampler)

    def forget_answers(self) -> None:
        """Forgets requests whose answers are forgotten; it is to be called every few seconds."""
        for sampler in list(self.sessions.values()):  # runs add to them
            for number, _ in list(takewhile(lambda item: item[1].is_forgotten, sampler.answers.items())):
                del sampler.answers[number]

    async def end(self, session: str) -> None:
        """Forgets the clients of a session, and weights that were theirs alone; what is being sampled is given up."""
        samplers = [one for one in list(self.sessions.values()) if one.session == session]
        for task in [task for sampler in samplers for task in sampler.running]:
            task.cancel()
        for sampler in samplers:
            await self._forget(sampler)

    def discard(self, key: str) -> None:
        """Forgets one that nobody knows of yet, where it is still there."""
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
            finally:  # also where the engine is lost
                shutil.rmtree(sampler.version.folder, ignore_errors=True)
