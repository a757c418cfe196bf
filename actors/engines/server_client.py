"""What is said to a rollout server by HTTP, and what its silence and its refusals mean."""

from __future__ import annotations

import json
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from actors.engines.child_server import ChildServer
from slimefsdp.errors import SlimeError, WorkerDied, WorkerHung

if TYPE_CHECKING:  # a command line that asks no server does not wait for httpx
    import httpx

_CONNECT_S = 10.0
_ENDING_S = 5.0  # a server whose engine has died says so first, and ends then
_CUT_S = 2.0  # between the end of connections and that of the server
_MOST = 2**30  # bytes of an answer
_SHOWN = 400  # characters of an answer of another form than expected


class Refusal(Exception):
    """The server answered, with a status other than 200."""

    def __init__(self, route: str, status: int, said: str) -> None:
        super().__init__(f"{route} answered with status {status}: {said}")
        self.status = status


class ServerClient:
    """One server; its methods may be called from several threads.

    Args:
        url: without a slash at its end.
        index: of the engine.
        child: the server, where this process has started it.
        alive: a route that costs nothing, and that a server answers at any time.
    """

    def __init__(self, url: str, index: int, child: ChildServer | None = None, *, alive: str = "/health") -> None:
        self.url = url
        self._index = index
        self.child = child
        self._alive = alive
        self._making = threading.Lock()

    def get(self, route: str, *, timeout_s: float) -> Any:
        """The answer, from JSON; None if there is none.

        Raises:
            Refusal: any other status than 200. WorkerDied: nobody answers. WorkerHung: not in time.
        """
        return self._ask("GET", route, None, timeout_s)

    def post(self, route: str, body: Any = None, *, timeout_s: float) -> Any:
        return self._ask("POST", route, body, timeout_s)

    def tell(self, route: str, body: Any = None, *, timeout_s: float) -> None:
        """Posts a request whose answer is plain text."""
        self._ask("POST", route, body, timeout_s, is_json=False)

    def answers(self, timeout_s: float) -> bool:
        """Whether it is there and ready."""
        try:
            self.get(self._alive, timeout_s=timeout_s)
        except (Refusal, SlimeError):
            return False
        return True

    def lost(self, why: str) -> SlimeError:
        """The error of a server that has ended, or cannot be reached."""
        if self.child is None:
            return WorkerDied(
                f"the server of engine {self._index} at {self.url} does not answer: {why}",
                field="rollout.engine_urls", hint="look at its log, and start it again", rank=self._index,
            )  # fmt: skip
        self.child.ends_within(_CUT_S)
        status = self.child.status()
        how = "does not answer" if status is None else f"ended with status {status}"
        last = " | ".join(self.child.last_lines(3))
        return WorkerDied(
            f"the server of engine {self._index} {how} ({why}); its log ends with: {last}",
            field="rollout.engine", hint=f"see {self.child.log}", rank=self._index,
        )  # fmt: skip

    def has_ended(self) -> bool:
        """Whether nobody is there to ask again, now or in a moment."""
        if self.child is not None:
            return self.child.ends_within(_ENDING_S)
        return not self.answers(_ENDING_S)

    @cached_property
    def _http(self) -> httpx.Client:
        """A client without proxies, for as many threads as ask, with a connection for each question.

        One that was kept may be closed by the server at any moment.
        """
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.Client(trust_env=False, limits=limits, headers={"Connection": "close"})

    def _ask(self, method: str, route: str, body: Any, timeout_s: float, *, is_json: bool = True) -> Any:
        import httpx

        deadline = time.monotonic() + timeout_s
        with self._making:  # else several threads would each make one
            http = self._http
        try:
            timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
            with http.stream(method, self.url + route, json=body, timeout=timeout) as answer:
                content = _whole(answer, deadline)
        except httpx.ConnectTimeout as error:
            raise self.lost(f"no connection within {_CONNECT_S:g} s") from error
        except httpx.TimeoutException as error:
            raise self._late(route, timeout_s) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise self.lost(f"{route}: {_plain(error)}") from error
        text = content.decode(errors="replace")
        if answer.status_code != 200:
            raise Refusal(route, answer.status_code, _said(text))
        if not (content and is_json):
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refusal(route, answer.status_code, text[:_SHOWN]) from error

    def _late(self, route: str, timeout_s: float) -> WorkerHung:
        error = WorkerHung(
            f"the server of engine {self._index} at {self.url} has not answered {route} within {timeout_s:g} s",
            field="cluster.call_timeout_s",
            hint="raise the timeout" if self.child is None else f"see {self.child.log}, or raise the timeout",
            rank=self._index,
        )
        error.seconds = timeout_s
        return error


def _whole(answer: httpx.Response, deadline: float) -> bytes:
    """Returns what a server answers, in time as a whole: httpx allows each piece of it as much.

    Raises:
        httpx.ReadTimeout: it takes longer. httpx.DecodingError: it is too much. httpx.HTTPError: it is cut.
    """
    import httpx

    parts, size = [], 0
    for part in answer.iter_bytes():
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout(f"{size} bytes came")
        if size > _MOST:
            raise httpx.DecodingError(f"more than {_MOST:,} bytes")
    return b"".join(parts)


def _said(text: str) -> str:
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_SHOWN]
    except (ValueError, AttributeError, RecursionError):
        return text[:_SHOWN]


def _plain(error: BaseException) -> str:
    """The innermost cause: what httpx says around it names objects of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:_SHOWN]
