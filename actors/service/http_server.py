"""Runs the HTTP server: limits how long it waits for requests, and ends the work before the connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

_LAST_ANSWERS_S = 5.0  # how long clients may read answers after the runs are saved; then connections are cut
_ENDS_S = 30  # limit on tasks whose connections were cut


class Server(uvicorn.Server):
    """Serves until `should_exit`, and then ends the application's work before it closes any connection.

    Runs are thus saved however long clients take to send or to read.

    Args:
        end: finishes the work and saves it; the application answers requests that arrive during this.
        receive_timeout_s: a connection is closed if the head of a request takes longer, or if it is idle for longer.
    """

    def __init__(self, app: Starlette, end: Callable[[], Awaitable[None]], receive_timeout_s: float) -> None:
        class Connection(_Connection):
            head_timeout_s = receive_timeout_s

        super().__init__(
            uvicorn.Config(app, http=Connection, log_level="warning", lifespan="on", timeout_graceful_shutdown=_ENDS_S)
        )
        self._end = end

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals alone, since uvicorn would raise them again before ranks and engine have ended."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the application's work, then the connections; uvicorn calls it."""
        try:
            await self._end()
        finally:
            cutting = asyncio.get_running_loop().call_later(_LAST_ANSWERS_S, self._cut)
            await super().shutdown(sockets)
            cutting.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


class _Connection(H11Protocol):
    """Closes itself if no complete request head comes in time; uvicorn's own timeout stops at the first byte."""

    head_timeout_s: float
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the head has come
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.head_timeout_s, self._close_without_head)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _close_without_head(self) -> None:
        self._waiting = None
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_handler()
