"""A sampling engine that dies or hangs is replaced, and what it was asked for is asked of the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from actors.cluster import ray_errors
from actors.engines.sampling_engine import start_sampling_engine
from actors.service import supervised_engine
from actors.service.samplers import Samplers, SamplerSession, Version
from actors.service.supervised_engine import SupervisedEngine
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, ResourceError, StateError, WorkerDied
from slimefsdp.sampling.params import SampleAnswer, SampledTokens, SampleRequest, SamplingStats
from tests.support.refusals import refused
from tests.support.service_standins import samplers_of
from tests.support.versions import asked, random_adapters
from tests.support.waiting import PATIENCE_S

FATAL_SEED = 666


class Handle:
    """An actor's: it holds so many versions and answers a request by its seed, until it is killed."""

    def __init__(self, room: int = 9) -> None:
        self.room = room
        self.held: dict[str, str] = {}
        self.calls: list[str] = []
        self.loads: list[str] = []
        self.is_dead = self.has_lost_server = False
        self.reads, self.draws, self.cancelled = asyncio.Event(), asyncio.Event(), list[str]()
        self.reads.set()
        for name in ("load", "drop", "sample", "stats", "cancel"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _cancel(self, key: str) -> None:
        self.cancelled.append(key)

    def _load(self, version: str, folder: str) -> asyncio.Future[int]:
        return asyncio.shield(asyncio.ensure_future(self._read(version, folder)))  # it goes on without its caller

    async def _read(self, version: str, folder: str) -> int:
        self._require_alive()
        self.loads.append(version)
        if version in self.held:
            raise ray.exceptions.RayTaskError("load", "", StateError("it is there", field="version", hint="drop it"))
        if len(self.held) >= self.room:
            raise ray.exceptions.RayTaskError("load", "", ResourceError("full", field="memory_bytes", hint="drop one"))
        await self.reads.wait()
        self._require_alive()
        self.held[version] = folder
        return 1

    async def _drop(self, version: str) -> None:
        self._require_alive()
        del self.held[version]

    async def _sample(self, request: SampleRequest, key: str) -> SampleAnswer:
        self._require_alive()
        self.calls.append(key)
        if request.params.seed == (FATAL_SEED,):
            self.kill()
        assert request.version is None or request.version in self.held
        if request.num_samples > 9:
            raise ray.exceptions.RayTaskError("sample", "", BatchError("many", field="num_samples", hint="fewer"))
        await self.draws.wait()
        self._require_alive()
        return SampleAnswer([SampledTokens([*request.params.seed], [-1.0], "stop")], None)

    async def _stats(self) -> SamplingStats:
        self._require_alive()
        return SamplingStats(1, 0, 0, 50, 0, dict.fromkeys(self.held, 1), 100)

    def _require_alive(self) -> None:
        if self.has_lost_server:
            raise ray.exceptions.RayTaskError("", "", WorkerDied("its server ended", hint="see its log"))
        if self.is_dead:
            raise ActorDiedError

    def kill(self) -> None:
        self.is_dead = True
        self.draws.set()


class Starts:
    """Handles by the order in which they were started; the next start raises what `fails` has."""

    def __init__(self) -> None:
        self.all: list[Handle] = []
        self.fails: Exception | None = None

    def __call__(self) -> Handle:
        if self.fails is not None:
            raise self.fails
        self.all.append(Handle())
        return self.all[-1]


@pytest.fixture
def config(make_config: Any) -> RunConfig:
    made: RunConfig = make_config(mesh={"dp": 1}, lora={"rank": 4}, cluster={"max_restarts": 2, "ping_timeout_s": 2.0})
    return made


@pytest.fixture
def lived(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Runs what a test does with two samplers, of the base and of a version, on engines without Ray."""
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: False)
    monkeypatch.setattr(supervised_engine, "end_processes", lambda engines: [one.kill() for one in engines])

    def live(life: Any) -> None:
        async def whole() -> None:
            starts = Starts()
            engine = SupervisedEngine(config, starts)
            samplers = samplers_of(engine, 2)
            versions = [None, Version("a", tmp_path, is_ephemeral=False)]
            for place, version in enumerate(versions):
                samplers.sessions[str(place)] = SamplerSession(str(place), f"s{place}", "", version)
            await asyncio.wait_for(life(starts, engine, samplers), PATIENCE_S)

        asyncio.run(whole())

    return live


def sampling(samplers: Samplers, place: int, seed: int) -> asyncio.Task[SampleAnswer]:
    one = samplers.sessions[str(place)]
    version = None if one.version is None else one.version.name
    return asyncio.create_task(samplers.sample(one, asked(version, [1], 1, seed)))


async def until(check: Callable[[], object]) -> None:
    while not check():
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_of_server", [False, True])
def test_what_an_engine_that_died_or_lost_its_server_was_asked_for_is_answered_by_the_next_one(
    lived: Any, is_of_server: bool
) -> None:
    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        tasks = [sampling(samplers, place % 2, 100 + place) for place in range(4)]
        await until(lambda: len(starts.all[0].calls) == 4)
        assert (await engine.stats()).tokens_drawn == 50 and engine.problem is None
        starts.all[0].has_lost_server = is_of_server
        starts.all[0].kill()
        await until(lambda: engine.problem)
        assert (await engine.stats()).tokens_drawn == 0 and not engine.is_lost  # answers meanwhile, too
        await until(lambda: len(starts.all) == 2)
        starts.all[1].draws.set()
        found = [await task for task in tasks]
        assert [one.samples[0].tokens for one in found] == [[100], [101], [102], [103]]
        assert list(starts.all[1].held) == ["a"] == list(engine.versions)  # is read anew
        assert (engine.problem, engine.replacements) == (None, 1)

    lived(life)


def test_an_engine_that_died_while_nobody_asked_it_is_replaced_when_it_is_looked_after(
    lived: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_engine.Watchdog, "look", lambda *_: None)

    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        starts.all[0].kill()
        while len(starts.all) < 2 or engine.problem:
            await engine.watch()
            await asyncio.sleep(0)
        assert engine.replacements == 1

    lived(life)


def test_without_restarts_left_requests_fail_with_the_loss_and_what_a_request_lacks_is_no_loss(lived: Any) -> None:
    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        with refused(BatchError, "num_samples"):
            await samplers.sample(samplers.sessions["0"], asked(None, [1], 10, 1))
        assert engine.problem is None
        starts.fails = WorkerDied("no memory", hint="take more")
        task = sampling(samplers, 0, 1)
        await until(lambda: starts.all[0].calls)
        starts.all[0].kill()
        for one in (task, sampling(samplers, 1, 2)):
            with pytest.raises(WorkerDied, match="no memory") as caught:
                await one
            assert "cluster.max_restarts=2" in str(caught.value.hint)
        assert engine.is_lost and engine.problem == "no memory" and (await engine.stats()).tokens_drawn == 0
        await engine.watch()
        await samplers.end("s1")
        assert list(samplers.sessions) == ["0"]

    lived(life)


def test_who_gives_up_waiting_frees_the_rows_and_keeps_no_other_from_the_next_engine(lived: Any) -> None:
    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        tasks = [sampling(samplers, 0, 1), sampling(samplers, 1, 2)]
        await until(lambda: len(starts.all[0].calls) == 2)
        await samplers.end("s0")
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert len(starts.all[0].cancelled) == 1 and not tasks[1].done()
        starts.all[0].kill()
        await until(lambda: engine.problem)
        late = sampling(samplers, 1, 3)
        await asyncio.sleep(0)
        late.cancel()
        await until(lambda: len(starts.all) == 2)
        starts.all[1].draws.set()
        assert (await tasks[1]).samples[0].tokens == [2]

    lived(life)


def test_who_waits_for_room_in_an_engine_that_dies_has_it_in_the_next_one(lived: Any, tmp_path: Path) -> None:
    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        starts.all[0].room = 1
        samplers.sessions["2"] = SamplerSession("2", "s2", "", Version("b", tmp_path, is_ephemeral=False))
        first = sampling(samplers, 1, 1)
        await until(lambda: starts.all[0].calls)
        second = sampling(samplers, 2, 2)
        await until(lambda: "b" in starts.all[0].loads)
        for _ in range(20):  # until it waits
            await asyncio.sleep(0)
        starts.all[0].kill()
        await until(lambda: len(starts.all) == 2)
        starts.all[1].draws.set()
        assert [(await task).samples[0].tokens for task in (first, second)] == [[1], [2]]
        assert sorted(engine.versions) == sorted(starts.all[1].held) == ["a", "b"]

    lived(life)


@pytest.mark.parametrize("is_ephemeral", [False, True])
def test_weights_whose_session_ends_while_they_are_read_stay_known_or_go(
    lived: Any, tmp_path: Path, is_ephemeral: bool
) -> None:
    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        (handle,) = starts.all
        (tmp_path / "b").mkdir()
        for place in (2, 3):
            version = Version("b", tmp_path / "b", is_ephemeral)
            samplers.sessions[str(place)] = SamplerSession(str(place), f"s{place}", "", version)
        handle.reads.clear()
        task = sampling(samplers, 2, 1)
        await until(lambda: handle.loads)
        ending = asyncio.create_task(samplers.end("s2"))
        await asyncio.sleep(0)
        handle.reads.set()
        handle.draws.set()
        await ending
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(handle.held) == list(engine.versions) == ([] if is_ephemeral else ["b"])
        if not is_ephemeral:
            assert (await sampling(samplers, 3, 2)).samples[0].tokens == [2]

    lived(life)


def test_a_request_that_ends_engines_ends_two_of_them_and_fails(lived: Any) -> None:
    async def life(starts: Starts, engine: SupervisedEngine, samplers: Samplers) -> None:
        with pytest.raises(WorkerDied):
            await sampling(samplers, 0, FATAL_SEED)
        assert len(starts.all) == 3 and engine.problem is None and not engine.is_lost
        starts.all[2].draws.set()
        assert (await sampling(samplers, 0, 1)).samples[0].tokens == [1]

    lived(life)


def test_engines_that_are_killed_or_stopped_draw_the_same_after_they_were_replaced(
    cluster: None, config: RunConfig, example: Path, tmp_path: Path
) -> None:
    folder = random_adapters(example / "model", tmp_path / "a", rank=2, seed=1)
    version = Version("a", folder, is_ephemeral=False)
    pids: list[int] = []

    def started() -> Any:
        engine = start_sampling_engine(config, max_rows=8)
        pids.append(ray.get(engine.progress.remote(), timeout=PATIENCE_S).pid)
        return engine

    async def life(engine: SupervisedEngine) -> None:
        samplers = samplers_of(engine, 1)
        sessions = [SamplerSession("b", "s", "", None), SamplerSession("v", "s", "", version)]
        requests = [asked(name, [5, 9], 2, 7, max_new_tokens=200) for name in (None, "a")]

        async def drawn() -> list[Any]:
            both = [samplers.sample(*pair) for pair in zip(sessions, requests, strict=True)]
            return [one.samples[0].tokens for one in await asyncio.gather(*both)]

        undisturbed = await drawn()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            task, before = asyncio.create_task(drawn()), (await engine.stats()).tokens_drawn
            while (await engine.stats()).tokens_drawn <= before:
                await asyncio.sleep(0)
            os.kill(pids[-1], number)
            while not task.done():
                await engine.watch()
                await asyncio.sleep(0.2)
            assert await task == undisturbed
        assert len(pids) == 3 and engine.problem is None

    engine = SupervisedEngine(config, started)
    try:
        asyncio.run(life(engine))
    finally:
        engine.end(PATIENCE_S)
