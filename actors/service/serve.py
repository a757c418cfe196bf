"""Starts and ends the service: a group, a sampling engine, and the HTTP server in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import uvicorn
from ray.exceptions import RayError
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from actors.engines.sampling_engine import start_sampling_engine
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.run_dir import RunFolder
from actors.service.app import make_app
from actors.service.results import typed
from actors.service.service import Service
from actors.service.supervised_engine import SupervisedEngine
from actors.startup import stage
from actors.workers.futures import meaning_of
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, ResourceError

_BASE_S = 300.0  # extra time for an engine to read the base model before it starts its server
_ENGINE_ENDS_S = 30.0  # how long an engine may take to end; it is killed afterwards
_LAST_ANSWERS_S = 5.0  # how long clients may read answers after the runs are saved; then connections are cut
_ENDS_S = 30  # how long tasks may still run after their connections were cut


def serve(config: RunConfig, on_start: Callable[[str, Callable[[], None]], None]) -> None:
    """Serves until SIGTERM or SIGINT; then finishes the requests in progress, saves the runs and ends all processes.

    Ray must be connected, and the settings must have passed `actors.cli.serve.checked_to_serve`.

    Args:
        on_start: called with the address and a function that ends the server, before any request is answered.

    Raises:
        ConfigError: the variable with the keys is not set. ResourceError: the port is taken.
        SlimeError: ranks or the engine do not start. CheckpointError: another process serves or trains in run.dir.
    """
    keys = keys_of(config)
    assert config.run.dir is not None
    with RunFolder(config.run.dir):  # a second service would take over the runs of this one
        _serve(config, keys, on_start)


def _serve(config: RunConfig, keys: tuple[str, ...], on_start: Callable[[str, Callable[[], None]], None]) -> None:
    listener = listening(config)
    try:
        group, engine = _launched(config)
        try:
            with stage("preparing the service", is_short=True):
                service = Service(config, group, engine)
                service.continue_runs()
            app = make_app(service, keys)
            signals: list[str] = []

            async def end() -> None:
                waiting, runs = service.results.waiting, len(service.runs)
                left = f"finishing {waiting} request{'s' * (waiting != 1)}, saving {runs} run{'s' * (runs != 1)}"
                _say(": ".join([*signals[:1], left]))
                await app.state.end()

            server = Server(app, end, service.limits.receive_s)
            host, port = listener.getsockname()[:2]

            def stop(*names: str) -> None:
                signals.extend(names)
                server.should_exit = True

            on_start(f"http://{host}:{port}", stop)
            with _ended_by_signals(stop):
                server.run(sockets=[listener])
        finally:
            _end(group, engine)
    finally:
        listener.close()
    _say(f"ended; to continue, start again with run.dir={config.run.dir}")


@contextmanager
def _ended_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Calls `stop` with the name of a SIGTERM or SIGINT that arrives in the block; only works in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: object) -> None:
        stop(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keys_of(config: RunConfig) -> tuple[str, ...]:
    """Returns the accepted API keys; an empty tuple means that requests need no key.

    Raises:
        ConfigError: the environment variable service.api_key_env has no keys, an empty key, or a key twice.
    """
    name = config.service.api_key_env
    if name is None:
        return ()
    keys = tuple(key.strip() for key in os.environ.get(name, "").split(","))
    if not all(keys):
        problem = f"service.api_key_env={name}, and this variable is not set, or has an empty key"
        raise ConfigError(problem, field="service.api_key_env", hint=f"export {name}=tml-..,tml-..")
    if len(set(keys)) < len(keys):
        problem = f"service.api_key_env={name}, and this variable has the same key twice"
        raise ConfigError(problem, field="service.api_key_env", hint="give each user another key")
    return keys


def listening(config: RunConfig) -> socket.socket:
    """Returns a listening socket at service.address.

    Raises:
        ResourceError: the port is taken.
    """
    service = config.service
    family = socket.AF_INET6 if ":" in service.host else socket.AF_INET
    # asyncio only turns Nagle's algorithm off if the socket's protocol is named; otherwise the body of an answer waits
    # 40 ms for the client to acknowledge the head
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((service.host, service.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        problem = f"cannot listen at {service.address}: {error.strerror or error}"
        raise ResourceError(
            problem, field="service.address", hint="choose another port, or 0 for a free one"
        ) from error
    return listener


def _launched(config: RunConfig) -> tuple[Any, Any]:
    group = SupervisedGroup.launch(config)
    try:
        with stage("starting the sampling engine"):
            return group, SupervisedEngine(config, lambda: _started_engine(group.config))
    except Exception as error:
        group.shutdown()
        raise typed(error) from error
    except BaseException:
        group.shutdown()
        raise


def _started_engine(config: RunConfig) -> Any:
    """Starts a sampling engine and waits until it answers; returns its handle.

    Raises:
        SlimeError: the engine did not start, and its process was ended.
    """
    engine = start_sampling_engine(config, memory_bytes=config.service.max_version_bytes)
    limit_s = config.cluster.launch_timeout_s
    try:
        if config.rollout.engine == "vllm":  # begin() has its own limit on the start of the server
            ray.get(engine.begin.remote(), timeout=limit_s + _BASE_S)
        ray.get([engine.keep_stacks.remote(config.run.dir, "sampling_engine"), engine.stats.remote()], timeout=limit_s)
    except BaseException as error:
        ray.kill(engine)
        if isinstance(error, RayError):
            raise meaning_of(error, 0, "launch") from error
        raise
    return engine


def _end(group: Any, engine: Any) -> None:
    try:
        engine.end(_ENGINE_ENDS_S)
    except Exception as error:
        _say(f"the sampling engine did not end by itself: {error}")
    group.shutdown()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


class Server(uvicorn.Server):
    """Serves until `should_exit`, and then ends the application's work before it closes any connection.

    So runs are saved even if clients take long to send or to read.

    Args:
        end: finishes and saves the clients' work; the application still answers requests during this.
        receive_timeout_s: the time after which an idle connection, or one without a whole request head, is closed.
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
        """Ends the application's work, then the connections; uvicorn calls this method."""
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
    """A connection that closes if no complete request head arrives in time; uvicorn's timeout ends at a first byte."""

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
        if self.cycle is not None and not self.cycle.response_complete:  # the head is complete
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
