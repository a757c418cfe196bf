"""Sends requests to a rollout server by HTTP, and turns refusals and silence into errors."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from actors.engines.child_server import ChildServer
from slimefsdp.errors import SlimeError, SyncError, WorkerDied, WorkerHung

if TYPE_CHECKING:  # commands that use no server do not import httpx
    import httpx

    from slimefsdp.config import RunConfig

Result = TypeVar("Result")
HEALTH_S = 10.0  # for a server to say that it is alive
_CONNECT_S = 10.0
_ENDING_S = 5.0  # time in which a server ends after it has answered that its engine died
_CUT_S = 2.0  # between the end of connections and that of the server
_LOOK_EVERY_S = 0.05  # at whether a server has ended
_MOST = 2**30  # bytes of an answer
_SHOWN = 400  # characters of an answer of another form than expected


class Refusal(Exception):
    """The server answered, with a status other than 200."""

    def __init__(self, route: str, status: int, said: str) -> None:
        super().__init__(f"{route} answered with status {status}: {said}")
        self.status = status


class ServerClient:
    """A client of one server; its requests run on one event loop, in a thread of the client's own.

    `get`, `post`, `call`, `answers` and `lost` wait for the loop and may be called from any other thread. Code that
    runs on the loop, by `start`, awaits `ask`, `is_alive` and `loss`.

    Args:
        url: without a slash at its end.
        index: of the engine.
        child: the server, if this process has started it.
        alive: a cheap route that the server answers at any time.
    """

    def __init__(self, url: str, index: int, child: ChildServer | None = None, *, alive: str = "/health") -> None:
        self.url = url
        self._index = index
        self.child = child
        self._alive = alive
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None

    # ------------------------------------------------------------------ for other threads

    def get(self, route: str, *, timeout_s: float) -> Any:
        """Returns the answer, from JSON; None if it is empty.

        Raises:
            Refusal: the status is not 200. WorkerDied: the server cannot be reached. WorkerHung: no answer in time.
        """
        return self.call("GET", route, timeout_s=timeout_s)

    def post(self, route: str, body: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Posts JSON, and returns the answer as `get` does; None, if it is not `is_json`."""
        return self.call("POST", route, body, timeout_s=timeout_s, is_json=is_json)

    def call(self, method: str, route: str, body: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Sends a request as `ask` does."""
        return self.start(self.ask(method, route, body, timeout_s=timeout_s, is_json=is_json)).result()

    def answers(self, timeout_s: float) -> bool:
        """Returns whether the server is there and ready."""
        return self.start(self.is_alive(timeout_s)).result()

    def lost(self, why: str) -> SlimeError:
        """Returns the error of a server that has ended, or cannot be reached."""
        return self.start(self.loss(why)).result()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs a coroutine on the client's event loop; cancelling the future cancels it."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Ends the server where this process has started it; idempotent."""
        if self.child is not None:
            self.child.end()

    # ------------------------------------------------------------------ on the client's event loop

    async def ask(self, method: str, route: str, body: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Returns the server's answer; cancelling the caller closes the connection.

        Args:
            is_json: whether the answer is JSON; otherwise it is a text, and None is returned.

        Raises:
            Refusal, WorkerDied, WorkerHung: as `get`. A server that refuses because it is about to end counts as died.
        """
        try:
            return await self._ask(method, route, body, timeout_s, is_json=is_json)
        except Refusal as refusal:
            if refusal.status >= 500 and await self._has_ended():
                raise await self.loss(str(refusal)) from refusal
            raise

    async def is_alive(self, timeout_s: float) -> bool:
        """Returns whether the server is there and ready."""
        try:
            await self._ask("GET", self._alive, None, timeout_s)
        except (Refusal, SlimeError):
            return False
        return True

    async def _ask(self, method: str, route: str, body: Any, timeout_s: float, *, is_json: bool = True) -> Any:
        import httpx

        if self._http is None:
            # without proxies, and with a connection for each question: the server may close one that was kept
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._http = httpx.AsyncClient(trust_env=False, limits=limits, headers={"Connection": "close"})
        try:
            async with asyncio.timeout(timeout_s):
                timeout = httpx.Timeout(None, connect=_CONNECT_S)
                async with self._http.stream(method, self.url + route, json=body, timeout=timeout) as answer:
                    content = await _whole(answer)
        except httpx.ConnectTimeout as error:
            raise await self.loss(f"no connection within {_CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise self._late(route, timeout_s) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise await self.loss(f"{route}: {_plain(error)}") from error
        text = content.decode(errors="replace")
        if answer.status_code != 200:
            raise Refusal(route, answer.status_code, _said(text))
        if not (content and is_json):
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refusal(route, answer.status_code, text[:_SHOWN]) from error

    async def loss(self, why: str) -> SlimeError:
        """Returns the error of a server that has ended, or cannot be reached."""
        if self.child is None:
            return WorkerDied(
                f"the server of engine {self._index} at {self.url} does not answer: {why}",
                field="rollout.engine_urls", hint="look at its log, and start it again", rank=self._index,
            )  # fmt: skip
        await self._ends_within(_CUT_S)
        status = self.child.status()
        how = "does not answer" if status is None else f"ended with status {status}"
        last = " | ".join(self.child.last_lines(3))
        return WorkerDied(
            f"the server of engine {self._index} {how} ({why}); its log ends with: {last}",
            field="rollout.engine", hint=f"see {self.child.log}", rank=self._index,
        )  # fmt: skip

    async def _has_ended(self) -> bool:
        """Returns whether the server has ended, or is about to."""
        return not await self.is_alive(_ENDING_S) if self.child is None else await self._ends_within(_ENDING_S)

    async def _ends_within(self, seconds: float) -> bool:
        """Returns whether the server that this process has started has ended, or does so in that time."""
        assert self.child is not None
        deadline = time.monotonic() + seconds
        while self.child.status() is None and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        return self.child.status() is not None

    def _late(self, route: str, timeout_s: float) -> WorkerHung:
        error = WorkerHung(
            f"the server of engine {self._index} at {self.url} has not answered {route} within {timeout_s:g} s",
            field="cluster.call_timeout_s",
            hint="raise the timeout" if self.child is None else f"see {self.child.log}, or raise the timeout",
            rank=self._index,
        )
        error.seconds = timeout_s
        return error


class WeightRoutes:
    """The routes of a server that take weights; failures are `SyncError`s.

    Args:
        index: of the engine.
        is_of_group: returns whether the broadcast group may be the cause of a route's refusal.
    """

    def __init__(
        self, client: ServerClient, config: RunConfig, index: int, is_of_group: Callable[[str, Refusal], bool]
    ) -> None:
        self._client = client
        self._timeout_s = config.cluster.sync_timeout_s
        self._index, self._is_of_group = index, is_of_group

    def get(self, route: str) -> Any:
        """Returns the answer; raises as `post`."""
        return self._ask("GET", route, None, self._timeout_s)

    def post(self, route: str, body: Any = None, *, timeout_s: float | None = None, is_json: bool = True) -> Any:
        """Posts JSON, and returns the answer.

        Raises:
            SyncError: the server refused, or did not answer in time. WorkerDied: it is gone.
        """
        return self._ask("POST", route, body, self._timeout_s if timeout_s is None else timeout_s, is_json=is_json)

    def try_post(self, route: str, body: Any = None) -> bool:
        """Returns whether the server accepts a request that it may refuse."""
        try:
            self._client.post(route, body, timeout_s=self._timeout_s)
        except Refusal:
            return False
        return True

    def _ask(self, method: str, route: str, body: Any, timeout_s: float, *, is_json: bool = True) -> Any:
        try:
            return self._client.call(method, route, body, timeout_s=timeout_s, is_json=is_json)
        except Refusal as refusal:
            error = SyncError(
                f"weights did not arrive at engine {self._index}: {refusal}",
                field="update_weights", hint="send the whole update again",
            )  # fmt: skip
            error.is_of_group = self._is_of_group(route, refusal)
            raise error from refusal
        except WorkerHung as error:
            raise SyncError(
                f"weights did not arrive: engine {self._index} has not answered {route} within {timeout_s:g} s",
                field="cluster.sync_timeout_s", hint="start the server again, or raise cluster.sync_timeout_s",
            ) from error  # fmt: skip


async def _whole(answer: httpx.Response) -> bytes:
    """Returns what a server answers.

    Raises:
        httpx.DecodingError: it is too much. httpx.HTTPError: it is cut.
    """
    import httpx

    parts, size = [], 0
    async for part in answer.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MOST:
            raise httpx.DecodingError(f"more than {_MOST:,} bytes")
    return b"".join(parts)


def _said(text: str) -> str:
    """Returns the message of a refusal, whose JSON differs from server to server."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_SHOWN]
    except (ValueError, AttributeError, RecursionError):
        return text[:_SHOWN]


def _plain(error: BaseException) -> str:
    """Returns the innermost cause: what httpx says around it names objects of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:_SHOWN]
