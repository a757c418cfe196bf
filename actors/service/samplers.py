"""Manages sampling clients: the weights that each samples from, and their loading into the engine and removal."""

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
from slimefsdp.sampling.params import SampleAnswer, SampleRequest


@dataclass(frozen=True, slots=True)
class Version:
    """Weights to sample from.

    Args:
        name: the name in the engine.
        folder: a PEFT folder, or one of a whole model.
        is_ephemeral: whether it is deleted with its client's session.
    """

    name: str
    folder: Path
    is_ephemeral: bool


@dataclass(slots=True)
class SamplerSession:
    """A sampling client.

    Args:
        owner: the id of the user whose client made it.
        version: the weights; None: the base model.
        path: the path of the saved weights in the clients' API.
    """

    id: str
    session: str
    owner: str
    version: Version | None
    path: str | None = None
    answers: dict[int, Result] = field(default_factory=dict)  # the newest results by number of the request
    running: set[asyncio.Task[Any]] = field(default_factory=set)  # the tasks that sample for it


class Samplers:
    """The sampling clients of one engine.

    Args:
        most_unnamed: limit per session on samplers with unnamed weights; the oldest ones are removed.
    """

    def __init__(self, engine: SupervisedEngine, most_unnamed: int) -> None:
        self.sessions: dict[str, SamplerSession] = {}
        self._engine = engine
        self._asked: Counter[str] = Counter()  # requests by version, including those that wait for it to be loaded
        self._running: Counter[str] = Counter()  # requests by version that are in the engine
        self._most_unnamed = most_unnamed
        self._loading = asyncio.Lock()
        self._needs_room = False  # whether a version waits for room to be loaded
        self._idle = asyncio.Event()  # is set when a request has left the engine

    async def sample(self, sampler: SamplerSession, request: SampleRequest) -> SampleAnswer:
        """Draws samples from the sampler's weights; if an engine is lost, draws them once more on the next one.

        Raises:
            StateError: the weights were deleted. ResourceError: the engine has no room for them, even alone.
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
        self._asked[name] += 1
        try:
            if name in used and not self._needs_room:  # it need not wait for another version to be loaded
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
        """Loads a version that is not in the engine; the one that was unused for longest makes room for it.

        If all are in use, it waits until one is idle; other requests wait behind it, since they hold `_loading`.
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
        """Loads a version; returns False if the engine has no room for it besides the others.

        The engine completes a load even if the caller is cancelled. So the caller waits until the version is known, and
        no other version is loaded in the meantime.
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
        versions = self._engine.versions  # those of this engine, which may be lost before it answers
        await self._engine.load(version.name, str(version.folder))
        versions[version.name] = time.monotonic()

    async def _make_room(self) -> None:
        """Drops the version that was unused for longest, once it is idle; drops none if the engine is lost."""
        self._needs_room = True  # holds back new requests for loaded versions, or none might ever become idle
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
        self._asked += Counter()  # removes entries that are 0
        self._running += Counter()
        with suppress(EngineReplaced, *LOST):  # an engine that is lost holds no version
            await self._engine.drop(name)

    async def forget_oldest(self) -> None:
        """Removes the samplers that were unused for longest; it is to be called every few seconds."""
        unnamed: dict[str, list[SamplerSession]] = {}
        for sampler in list(self.sessions.values()):
            if sampler.version is not None and sampler.version.is_ephemeral:
                unnamed.setdefault(sampler.session, []).append(sampler)
        for samplers in unnamed.values():
            idle = [
                candidate
                for candidate in samplers
                if candidate.version is not None and not self._asked[candidate.version.name]
            ]
            for sampler in idle[: max(0, len(samplers) - self._most_unnamed)]:
                await self._forget(sampler)

    def forget_answers(self) -> None:
        """Removes requests whose answers have expired; it is to be called every few seconds."""
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
