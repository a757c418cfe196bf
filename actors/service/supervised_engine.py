"""The service's sampling engine, which is replaced when its process or its server ends or hangs.

The versions and requests of a lost engine are lost with it. A task that waits for a request gets `EngineReplaced` and
sends the request to the next engine, which draws the same samples from the same seeds.
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
from slimefsdp.sampling.params import SampleAnswer, SampleRequest, SamplingStats

_ANSWER_S = 2.0  # how long `stats` waits for an engine; after this time it returns the last known values
_SLOW_S = 10.0  # an engine that does not answer for longer is reported as a problem
_NOTHING = SamplingStats(0, 0, 0, 0, 0, {}, 0)


class EngineReplaced(Exception):
    """The engine was lost before it answered, and was replaced by an engine without versions.

    Args:
        loss: how the engine was lost; None means that it was lost before this call, and never got the request.
    """

    def __init__(self, loss: SlimeError | None) -> None:
        super().__init__(loss)
        self.loss = loss


class SupervisedEngine:
    """A sampling engine that is replaced when it is lost: at most cluster.max_restarts times, and at most three times
    without a sampled request in between.

    All methods except `end` must be called from one event loop.

    Args:
        start: starts an engine and returns its handle when the engine answers; this function may block.

    Raises:
        Exception: the errors of `start`.
    """

    def __init__(self, config: RunConfig, start: Callable[[], Any]) -> None:
        self._start, self._limits = start, Limits.of(config)
        self._restarts = Restarts(config.cluster.max_restarts, "sampling engines")
        self._loss: SlimeError | None = None  # why the engine is being replaced, or could not be replaced
        self._replacing: asyncio.Task[None] | None = None  # stays set if the replacement failed and there is no engine
        self._query: asyncio.Task[None] | None = None  # a pending request for the stats of the engine
        self._query_began = 0.0  # the time.monotonic() at which `_query` began
        self._is_ended = False
        self.replacements = 0
        self._use(start())

    def _use(self, engine: Any) -> None:
        self._engine, self._began, self._last_stats = engine, time.monotonic(), _NOTHING
        self._watchdog = Watchdog([engine], self._limits, kind="sampling engine")
        self.versions: dict[str, float] = {}
        """Version that the engine has loaded -> time.monotonic() of its last use; `Samplers` maintains this."""

    @property
    def problem(self) -> str | None:
        """Returns the problem of the engine as text; None if no problem is known."""
        if self._loss is not None:
            return self._loss.message
        silent_s = time.monotonic() - self._query_began if self._query is not None and not self._query.done() else 0.0
        return f"the sampling engine has not answered for {silent_s:.0f} s" if silent_s > _SLOW_S else None

    @property
    def is_lost(self) -> bool:
        """Returns whether the engine was lost and cannot be replaced."""
        return self._replacing is not None and self._replacing.done()

    async def load(self, version: str, folder: str) -> int:
        """Loads a version, as `SamplingEngine.load` does.

        Raises:
            EngineReplaced: the engine was lost. WorkerDied, WorkerHung: it could not be replaced.
            SlimeError: what the engine raises.
        """
        size: int = await self._call("load", version, folder)
        return size

    async def drop(self, version: str) -> None:
        """Drops a version; raises the errors of `load`."""
        await self._call("drop", version)

    async def sample(self, request: SampleRequest) -> SampleAnswer:
        """Samples a request; raises the errors of `load`. Cancelling the call frees the request's rows."""
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
        """Returns the engine's stats, or its last known stats if the engine does not answer within `_ANSWER_S`."""
        if self._replacing is None:
            await asyncio.wait([self._stats_query()], timeout=_ANSWER_S)
        return self._last_stats

    async def watch(self) -> None:
        """Checks whether the engine hangs or has ended; must be called about once a second."""
        if self._replacing is not None:
            return
        self._stats_query()
        engine, waiting = self._engine, Waiting("sample", [0], self._began)
        try:
            await asyncio.to_thread(self._watchdog.look, waiting)
        except WorkerHung as error:
            self._lost(engine, error)

    def end(self, timeout_s: float) -> None:
        """Ends the engine for good.

        Raises:
            RayError: the engine did not end within `timeout_s`, and was killed.
        """
        import ray

        self._is_ended = True
        try:
            ray.get(self._engine.shutdown.remote(), timeout=timeout_s)
        finally:
            ray.kill(self._engine)

    # ------------------------------------------------------------------ inside

    async def _call(self, method: str, *arguments: Any) -> Any:
        engine, loss = self._engine, None
        if self._replacing is None:
            try:
                return await getattr(engine, method).remote(*arguments)
            except RayError as error:
                cause = meaning_of(error, 0, method)
                if not isinstance(cause, LOST):
                    raise cause from error
                loss = cause
                if not isinstance(error, RayTaskError):  # otherwise the engine itself reported that its server is lost
                    reason = next(iter(str(error).splitlines()), type(error).__name__)
                    hint = "look at its log, or the kernel's: memory may have run out"
                    loss = WorkerDied(f"the sampling engine ended during {method}: {reason}", hint=hint)
                self._lost(engine, loss)
        if self._replacing is not None:
            await asyncio.shield(self._replacing)  # shielded, since other tasks may wait when this one is cancelled
        raise EngineReplaced(loss)

    def _stats_query(self) -> asyncio.Task[None]:
        if self._query is None or self._query.done():
            self._query, self._query_began = asyncio.create_task(self._query_stats()), time.monotonic()
        return self._query

    async def _query_stats(self) -> None:
        with suppress(EngineReplaced, SlimeError):
            self._last_stats = await self._call("stats")

    def _lost(self, engine: Any, error: SlimeError) -> None:
        """Starts the replacement of an engine, unless its replacement has already started."""
        if self._engine is engine and self._replacing is None:
            self._loss, self._last_stats = error, _NOTHING
            self._replacing = asyncio.create_task(self._replace(error))
            self._replacing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _replace(self, error: SlimeError) -> None:
        try:
            engine = await asyncio.to_thread(self._start_another, error)
        except Exception as failed:
            cause = typed(failed)
            self._loss = cause if isinstance(cause, SlimeError) else error
            raise cause from None
        self._use(engine)
        self.replacements += 1
        self._loss = self._replacing = None

    def _start_another(self, error: SlimeError) -> Any:
        self._watchdog.kill_stopped()
        end_processes([self._engine])

        def start() -> Any:
            if self._is_ended:
                raise StateError("the server is ending", field="engine", hint="send the request to the next server")
            engine = self._start()
            if self._is_ended:  # the server ended during the start
                end_processes([engine])
                raise StateError("the server is ending", field="engine", hint="send the request to the next server")
            return engine

        return self._restarts.start_another(error, start)
