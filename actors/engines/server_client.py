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
HEALTH_S = 10.0  # timeout of the check that a server is alive
_CONNECT_S = 10.0
_ENDING_S = 5.0  # limit on the time from an answer with status 500 to the end of a server whose engine has died
_CUT_S = 2.0  # limit on the time from the end of a server's connections to the end of its process
_LOOK_EVERY_S = 0.05  # interval of checking whether a server has ended
_MOST = 2**30  # limit on the bytes of an answer
_SHOWN = 400  # limit on the characters of an answer in an error


class Refusal(Exception):
    """The server answered with a status other than 200, or with a text that is not JSON."""

    def __init__(self, route: str, status: int, said: str) -> None:
        super().__init__(f"{route} answered with status {status}: {said}")
        self.status = status


class ServerClient:
    """A client of one server; all of its requests run on one event loop, which has its own thread.

    `get`, `post`, `call`, `answers` and `lost` wait for the loop and may be called from any other thread. Coroutines
    on the loop (see `start`) use `ask`, `is_alive` and `loss` instead.

    Args:
        url: the server's URL, without a slash at its end.
        index: the index of the engine, for errors.
        child: the server's process, if this process has started it.
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
        """Gets a route and returns the JSON of the answer; None means that the answer is empty.

        Raises:
            Refusal: the status is not 200. WorkerDied: the server cannot be reached. WorkerHung: no answer in time.
        """
        return self.call("GET", route, timeout_s=timeout_s)

    def post(self, route: str, body: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Posts JSON, and returns the answer as `get` does, or None if `is_json` is False."""
        return self.call("POST", route, body, timeout_s=timeout_s, is_json=is_json)

    def call(self, method: str, route: str, body: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Sends a request as `ask` does, from another thread."""
        return self.start(self.ask(method, route, body, timeout_s=timeout_s, is_json=is_json)).result()

    def answers(self, timeout_s: float) -> bool:
        """Returns whether the server is running and ready."""
        return self.start(self.is_alive(timeout_s)).result()

    def lost(self, why: str) -> SlimeError:
        """Returns the error that `loss` returns, from another thread."""
        return self.start(self.loss(why)).result()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs a coroutine on the client's event loop; cancelling the returned future cancels the coroutine."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Ends the server if this process has started it; idempotent."""
        if self.child is not None:
            self.child.end()

    # ------------------------------------------------------------------ on the client's event loop

    async def ask(self, method: str, route: str, body: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Returns the server's answer; cancelling the caller closes the connection.

        Args:
            is_json: whether the answer is JSON; any other answer is dropped, and None is returned.

        Raises:
            Refusal, WorkerDied, WorkerHung: as `get`. WorkerDied also if the server refuses because it is about to end.
        """
        try:
            return await self._ask(method, route, body, timeout_s, is_json=is_json)
        except Refusal as refusal:
            if refusal.status >= 500 and await self._has_ended():
                raise await self.loss(str(refusal)) from refusal
            raise

    async def is_alive(self, timeout_s: float) -> bool:
        try:
            await self._ask("GET", self._alive, None, timeout_s)
        except (Refusal, SlimeError):
            return False
        return True

    async def _ask(self, method: str, route: str, body: Any, timeout_s: float, *, is_json: bool = True) -> Any:
        import httpx

        if self._http is None:
            # Proxies are not used. Each request has a new connection: the server may close a connection that is kept.
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
        """Returns the error that reports the loss of the server; `why` says how the loss was noticed."""
        if self.child is None:
            return WorkerDied(
                f"the server of engine {self._index} at {self.url} does not answer: {why}",
                field="rollout.engine_urls", hint="look at its log, and start it again", rank=self._index,
            )  # fmt: skip
        await self._ends_within(_CUT_S)
        status = self.child.status()
        state = "does not answer" if status is None else f"ended with status {status}"
        last = " | ".join(self.child.last_lines(3))
        return WorkerDied(
            f"the server of engine {self._index} {state} ({why}); its log ends with: {last}",
            field="rollout.engine", hint=f"see {self.child.log}", rank=self._index,
        )  # fmt: skip

    async def _has_ended(self) -> bool:
        return not await self.is_alive(_ENDING_S) if self.child is None else await self._ends_within(_ENDING_S)

    async def _ends_within(self, seconds: float) -> bool:
        """Waits up to `seconds` for the end of a server that this process started; returns whether it has ended."""
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
    """Sends requests of weight updates to a server; a refusal or a timeout raises a `SyncError`.

    Args:
        index: the index of the engine, for errors.
        is_of_group: returns whether a broken broadcast group may be the cause of a route's refusal.
    """

    def __init__(
        self, client: ServerClient, config: RunConfig, index: int, is_of_group: Callable[[str, Refusal], bool]
    ) -> None:
        self._client = client
        self._timeout_s = config.cluster.sync_timeout_s
        self._index, self._is_of_group = index, is_of_group

    def get(self, route: str) -> Any:
        """Returns the JSON of the answer; raises as `post`."""
        return self._ask("GET", route, None, self._timeout_s)

    def post(self, route: str, body: Any = None, *, timeout_s: float | None = None, is_json: bool = True) -> Any:
        """Posts JSON, and returns the answer as `ServerClient.post` does.

        Raises:
            SyncError: the server refused, or did not answer in time. WorkerDied: the server has ended.
        """
        return self._ask("POST", route, body, self._timeout_s if timeout_s is None else timeout_s, is_json=is_json)

    def try_post(self, route: str, body: Any = None) -> bool:
        """Posts JSON; returns False instead of raising if the server refuses."""
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
    """Returns the body of an answer.

    Raises:
        httpx.DecodingError: the body has more than `_MOST` bytes. httpx.HTTPError: the connection was cut.
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
    """Returns the message in the body of a refusal, whose form differs between servers."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_SHOWN]
    except (ValueError, AttributeError, RecursionError):
        return text[:_SHOWN]


def _plain(error: BaseException) -> str:
    """Returns the text of the innermost cause of an error of httpx; the outer errors name objects of httpx."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:_SHOWN]
