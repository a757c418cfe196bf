"""The service's sampling engine, which is replaced when its process, or the server beside it, ends or hangs.

An engine that is lost takes its versions and its requests with it. Whoever waited for a request is told so
(`EngineReplaced`) and asks the next engine again, which draws the same samples from the same seeds.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError, RayTaskError

from actors.cluster.ray_errors import end_processes
from actors.fault_tolerance.recovery import LOST, Restarts
from actors.service.results import typed
from actors.workers.futures import meaning_of
from actors.workers.watchdog import Limits, Waiting, Watchdog
from slimefsdp.config import RunConfig
from slimefsdp.errors import SlimeError, StateError, WorkerDied, WorkerHung
from slimefsdp.sampling.requests import SampleAnswer, SampleRequest, SamplingStats

_ANSWER_S = 2.0  # for an engine to say how much it does, before its last answer is taken
_SLOW_S = 10.0  # without that answer for so long, it is said that the engine does not answer
_NOTHING = SamplingStats(0, 0, 0, 0, 0, {}, 0)


class EngineReplaced(Exception):
    """The engine was lost before it answered. Another one has taken its place, and holds no version yet.

    Args:
        loss: why it was lost; None: that was before this call, of which the engine has seen nothing.
    """

    def __init__(self, loss: SlimeError | None) -> None:
        super().__init__(loss)
        self.loss = loss


class SupervisedEngine:
    """A sampling engine, and the next one when it is lost: at most cluster.max_restarts times, three times in a row.

    All methods but `end` are for one event loop.

    Args:
        start: starts an engine and returns its handle when it answers; it may block.

    Raises:
        Exception: what `start` raises.
    """

    def __init__(self, config: RunConfig, start: Callable[[], Any]) -> None:
        self._start, self._limits = start, Limits.of(config)
        self._restarts = Restarts(config.cluster.max_restarts, "sampling engines")
        self._loss: SlimeError | None = None  # of the engine that is being replaced, or that could not be
        self._replacing: asyncio.Task[None] | None = None  # a task that has failed stays: there is no engine any more
        self._asking: asyncio.Task[None] | None = None  # an engine for its stats
        self._asked = 0.0  # of time.monotonic, when that began
        self._is_ended = False
        self.replacements = 0
        self._use(start())

    def _use(self, engine: Any) -> None:
        self._engine, self._began, self._said = engine, time.monotonic(), _NOTHING
        self._watchdog = Watchdog([engine], self._limits, kind="sampling engine")
        self.versions: dict[str, float] = {}
        """Those that the engine was told to load, and when each was last asked for; `Samplers` keeps it."""

    @property
    def problem(self) -> str | None:
        """Returns what is wrong with the engine; None: nothing is known to be."""
        if self._loss is not None:
            return self._loss.message
        silent_s = time.monotonic() - self._asked if self._asking is not None and not self._asking.done() else 0.0
        return f"the sampling engine has not answered for {silent_s:.0f} s" if silent_s > _SLOW_S else None

    @property
    def is_lost(self) -> bool:
        """Whether there is no engine any more, and will be none."""
        return self._replacing is not None and self._replacing.done()

    async def load(self, version: str, folder: str) -> int:
        """Loads a version, as `SamplingEngine.load` does.

        Raises:
            EngineReplaced: the engine was lost. WorkerDied, WorkerHung: it was, and could not be replaced.
            SlimeError: what the engine raises.
        """
        size: int = await self._call("load", version, folder)
        return size

    async def drop(self, version: str) -> None:
        """Drops a version; raises as `load` does."""
        await self._call("drop", version)

    async def sample(self, request: SampleRequest) -> SampleAnswer:
        """Samples a request; raises as `load` does. A call that is cancelled frees its rows."""
        key = uuid.uuid4().hex
        try:
            answer: SampleAnswer = await self._call("sample", request, key)
        except asyncio.CancelledError:
            if self._replacing is None:
                self._engine.cancel.remote(key)
            raise
        self._restarts.progress()
        return answer

    async def stats(self) -> SamplingStats:
        """Returns how much is being sampled and held; of an engine that does not answer at once, what it said last."""
        if self._replacing is None:
            await asyncio.wait([self._question()], timeout=_ANSWER_S)
        return self._said

    async def watch(self) -> None:
        """Finds out whether the engine hangs or has ended; it is to be called about once a second."""
        if self._replacing is not None:
            return
        self._question()
        engine, waiting = self._engine, Waiting("sample", [0], self._began)
        try:
            await asyncio.to_thread(self._watchdog.look, waiting)
        except WorkerHung as error:
            self._lost(engine, error)

    def end(self, timeout_s: float) -> None:
        """Ends the engine for good.

        Raises:
            RayError: it did not end by itself in this time, and was killed.
        """
        import ray

        self._is_ended = True
        try:
            ray.get(self._engine.shutdown.remote(), timeout=timeout_s)
        finally:
            ray.kill(self._engine)

    # ------------------------------------------------------------------ inside

    async def _call(self, method: str, *given: Any) -> Any:
        engine, loss = self._engine, None
        if self._replacing is None:
            try:
                return await getattr(engine, method).remote(*given)
            except RayError as error:
                cause = meaning_of(error, 0, method)
                if not isinstance(cause, LOST):
                    raise cause from error
                loss = cause
                if not isinstance(error, RayTaskError):  # else the engine said itself that its server is lost
                    said = next(iter(str(error).splitlines()), type(error).__name__)
                    hint = "look at its log, or the kernel's: memory may have run out"
                    loss = WorkerDied(f"the sampling engine ended during {method}: {said}", hint=hint)
                self._lost(engine, loss)
        if self._replacing is not None:
            await asyncio.shield(self._replacing)  # whoever gives up waiting leaves it to the others
        raise EngineReplaced(loss)

    def _question(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking, self._asked = asyncio.create_task(self._ask()), time.monotonic()
        return self._asking

    async def _ask(self) -> None:
        with suppress(EngineReplaced, SlimeError):
            self._said = await self._call("stats")

    def _lost(self, engine: Any, error: SlimeError) -> None:
        """Begins to replace an engine, unless somebody has."""
        if self._engine is engine and self._replacing is None:
            self._loss, self._said = error, _NOTHING
            self._replacing = asyncio.create_task(self._replace(error))
            self._replacing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _replace(self, error: SlimeError) -> None:
        try:
            engine = await asyncio.to_thread(self._another, error)
        except Exception as found:
            cause = typed(found)
            self._loss = cause if isinstance(cause, SlimeError) else error
            raise cause from None
        self._use(engine)
        self.replacements += 1
        self._loss = self._replacing = None

    def _another(self, error: SlimeError) -> Any:
        self._watchdog.kill_stopped()
        end_processes([self._engine])

        def start() -> Any:
            if self._is_ended:
                raise StateError("the server is ending", field="engine", hint="ask the next one")
            engine = self._start()
            if self._is_ended:  # meanwhile
                end_processes([engine])
                raise StateError("the server is ending", field="engine", hint="ask the next one")
            return engine

        return self._restarts.start_another(error, start)
