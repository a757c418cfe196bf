"""Connections that stall are closed in time, and keep no run from being saved when the server ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from starlette.testclient import TestClient

import actors.service.app
from actors.service.app import make_app
from actors.service.serve import Server
from actors.service.service import Service
from slimefsdp.config import config_from_dict
from tests.support.service import service_tree
from tests.support.service_standins import LOCAL, Engine, Group, new_run
from tests.support.waiting import PATIENCE_S

HEAD = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
Life = Callable[[Server, str, int], Awaitable[None]]


@pytest.fixture
def service(untied: Path, tmp_path: Path) -> Service:
    config = config_from_dict(service_tree(untied, tmp_path, service={"model_name": "tiny/model"}))
    assert config.run.dir is not None
    config.run.dir.mkdir()
    return Service(config, cast(Any, Group(config.run.dir)), Engine(2))


def served(service: Service, receive_timeout_s: float, life: Life) -> None:
    """A life beside a server, which ends behind it."""

    async def both() -> None:
        app = make_app(service)
        server = Server(app, app.state.end, receive_timeout_s)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            try:
                await life(server, *listener.getsockname())
            finally:
                server.should_exit = True
                await asyncio.wait_for(serving, PATIENCE_S)

    asyncio.run(both())


def test_a_head_that_does_not_come_whole_in_time_closes_its_connection(service: Service) -> None:
    async def life(_: Server, host: str, port: int) -> None:
        first, _, third = [await asyncio.open_connection(host, port) for _ in range(3)]
        first[1].write(HEAD)
        third[1].write(HEAD + b"Content-Length: 0\r\n\r\n")
        assert (await third[0].readline()).split()[1] == b"200"
        third[1].write(HEAD)  # the next one on the same connection
        for reader, _ in (first, third):
            await asyncio.wait_for(reader.read(), PATIENCE_S)  # to its end

    served(service, 0.2, life)


def test_runs_are_saved_while_connections_stall_and_these_are_closed_then(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run(TestClient(make_app(service), LOCAL))
    answers: list[bytes] = []
    open_then: list[int] = []
    close = service.close

    async def life(server: Server, host: str, port: int) -> None:
        body, head, idle = [await asyncio.open_connection(host, port) for _ in range(3)]
        body[1].write(HEAD + b"Content-Length: 100\r\n\r\n{")
        head[1].write(HEAD)
        idle[1].write(HEAD + b"Content-Length: 0\r\n\r\n")
        await idle[0].readline()

        def closing() -> None:
            open_then.append(len(server.server_state.connections))
            close()

        monkeypatch.setattr(service, "close", closing)
        server.should_exit = True
        answers.append(await asyncio.wait_for(body[0].readline(), PATIENCE_S))
        for reader, _ in (body, head, idle):
            await asyncio.wait_for(reader.read(), PATIENCE_S)

    served(service, 3600.0, life)
    assert [one.split()[1] for one in answers] == [b"503"] and open_then == [3]
    assert [one.is_finished for one in service.catalogue.runs.all()] == [True]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_sample_that_was_taken_is_finished_and_fetched_while_the_server_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.service.app, "_FETCH_S", PATIENCE_S)
    engine, close, closed = cast(Any, service.engine), service.close, threading.Event()

    def closing() -> None:
        close()
        closed.set()

    monkeypatch.setattr(service, "close", closing)

    async def life(server: Server, host: str, port: int) -> None:
        async def post(path: str, **body: Any) -> requests.Response:
            where = f"http://{host}:{port}/api/v1/{path}"
            return await asyncio.to_thread(requests.post, where, json=body, timeout=PATIENCE_S)

        session = (await post("create_session")).json()["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/model"}
        key = (await post("create_sampling_session", **asked)).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
        sample = {"sampling_session_id": key, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        engine.draws.clear()
        sent = await post("asample", seq_id=0, **sample)
        server.should_exit = True
        assert await asyncio.to_thread(closed.wait, PATIENCE_S)
        assert (await post("asample", seq_id=1, **sample)).status_code == 503
        engine.draws.set()
        result = service.results.get(sent.json()["request_id"])
        assert result is not None and await result.wait(PATIENCE_S)
        found = await post("retrieve_future", request_id=result.id)
        assert found.status_code == 200 and found.headers["content-type"] == "application/x-protobuf"

    served(service, 3600.0, life)
