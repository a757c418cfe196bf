"""Defines the ASGI application of the HTTP API. Each path has a handler, which gets the checked body and the user."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from actors.service import datums, wire
from actors.service.http_requests import (
    PROTOBUF,
    Handler,
    Refused,
    RequestGuard,
    cut,
    error_response,
    log_ids,
    media_type,
    user_of,
    within,
)
from actors.service.results import Answer, Result
from actors.service.service import Service
from actors.service.users import User, Users

_POLL_S = 20.0  # how long a poll waits for an answer; clients give up after 45 s
_TIDY_S = 1.0
_NEVER_SEEN = 410
_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_SAMPLES_END_S = 10.0  # how long the end of the server waits for sampling requests
_FETCH_S = 5.0  # how long the end of the server then waits for clients to fetch finished answers
_OF_OPERATOR = ("status.json", "metrics")


def make_app(service: Service, keys: Sequence[str] = ()) -> Starlette:
    """Returns the ASGI application.

    `app.state.end()` finishes the clients' work and saves it. The end of the application's lifespan calls it too.

    Args:
        keys: the accepted API keys; the first is the operator's. If `keys` is empty, requests need no key.
    """
    api = _Api(service, Users(keys))
    app = Starlette(routes=api.routes(), lifespan=api.lifespan)
    app.state.end = api.end
    return app


class _Api:
    def __init__(self, service: Service, users: Users) -> None:
        self._service = service
        self._guard = RequestGuard(service, users)
        self._polling: set[asyncio.Timeout] = set()
        self._has_ended = False

    def routes(self) -> list[Route]:
        """Returns the routes, from a table of method, path, body and handler.

        A handler gets the parsed body, if the table names a class for the body, then the user, and the variable parts
        of the path. A handler returns an answer, a list of answers, a pending `Result`, or a whole response. If the
        table has `bytes` as the body, the body is received but not passed to the handler.
        """
        service, training, samplers = self._service, self._service.training, self._service.samplers
        table: list[tuple[str, str, Any, Callable[..., Any]]] = [
            ("GET", "healthz", None, self._healthz),
            ("GET", "get_server_capabilities", None, service.capabilities),
            ("POST", "client/config", bytes, self._client_config),
            ("POST", "client/dynamic_config", bytes, _dynamic_config),
            ("POST", "telemetry", bytes, lambda _: {"status": "accepted"}),
            ("POST", "create_session", wire.CreateSession, service.create_session),
            ("POST", "session_heartbeat", wire.OfSession, service.heartbeat),
            ("POST", "sessions/{id}/finish", bytes, service.finish),
            ("POST", "create_model", wire.CreateModel, training.create_model),
            ("POST", "unload_model", wire.OfModel, training.unload_model),
            ("POST", "get_info", wire.OfModel, service.get_info),
            ("POST", "optim_step", wire.OptimStep, service.optim_step),
            ("POST", "save_weights", wire.SaveWeights, training.save_weights),
            ("POST", "load_weights", wire.LoadWeights, training.load_weights),
            ("POST", "save_weights_for_sampler", wire.SaveForSampler, training.save_weights_for_sampler),
            ("POST", "create_sampling_session", wire.CreateSamplingSession, samplers.create_sampling_session),
            ("GET", "samplers/{id}", None, samplers.describe),
            ("POST", "asample", wire.Sample, samplers.asample),
            ("POST", "retrieve_future", wire.Retrieve, self._retrieve),
            ("POST", "weights_info", wire.WeightsInfo, service.weights_info),
            ("GET", "training_runs", None, service.training_runs),
            ("GET", "training_runs/{id}", None, service.training_run),
            ("GET", "training_runs/{id}/checkpoints", None, service.checkpoints),
            ("GET", "checkpoints", None, service.checkpoints),
            ("DELETE", "training_runs/{id}/checkpoints/{kind}/{name}", None, service.delete_checkpoint),
        ]

        def route(method: str, url: str, path: str, handler: Handler) -> Route:
            return Route(url, self._guard.guarded(path, handler), methods=[method])

        return [
            *(route(method, f"/api/v1/{path}", path, self._handler(path, body, handler))
              for method, path, body, handler in table),
            route("POST", "/api/v1/forward_backward", "forward_backward", self._forward_backward),
            route("GET", "/status.json", "status.json", self._handler("status.json", None, service.status)),
            route("GET", "/metrics", "metrics", self._handler("metrics", None, self._metrics)),
            Route("/", _page, methods=["GET"]),
            Route("/{rest:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"]),
        ]  # fmt: skip

    def _handler(self, path: str, body: Any, function: Callable[..., Any]) -> Handler:
        async def handler(request: Request) -> Response:
            user, arguments = user_of(request), []
            if path in _OF_OPERATOR and not user.is_operator:
                raise Refused(403, "only the operator, who has the first of the server's keys, sees this")
            if body is bytes:
                await self._guard.body(request)
            elif body is not None:
                arguments.append(await self._guard.json(request, body))
            answer = function(*arguments, user, **request.path_params)
            if inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Response):
                return answer
            if isinstance(answer, Result):
                return _pending(request, answer)
            if isinstance(answer, list):
                name = path.rpartition("/")[2]
                return JSONResponse({name: answer} if request.path_params else _page_of(request, name, answer))
            return JSONResponse(answer)

        return handler

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Runs the periodic tasks while the application runs, and ends the clients' work afterwards."""
        # these are separate tasks, since removing a sampler may have to wait until the engine has loaded a version
        service = self._service
        repeated = (self._tidy, service.samplers.forget_oldest, self._end_overdue, service.engine.watch)
        tasks = [asyncio.create_task(self._repeat(function)) for function in repeated]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.end()

    async def end(self) -> None:
        """Refuses new requests, finishes the requests in progress, saves every run, and ends all polls.

        Sampling requests have `_SAMPLES_END_S` to finish. Then clients have `_FETCH_S` to fetch their answers.
        """
        if self._has_ended:
            return
        self._has_ended = self._service.is_ending = True
        self._guard.stop_receiving()
        unanswered = self._service.results.unanswered()
        closing = asyncio.create_task(asyncio.to_thread(self._service.close))
        if sampling := [task for sampler in self._service.samplers.sessions.values() for task in sampler.running]:
            await asyncio.wait(sampling, timeout=_SAMPLES_END_S)
        await closing
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_S):
                await asyncio.gather(*(result.fetched.wait() for result in unanswered if result.ended is not None))
        cut(self._polling)
        self._guard.close()

    async def _repeat(self, tidy: Callable[[], Awaitable[None]]) -> None:
        while not self._service.is_ending:  # while the server ends, no session may time out, as heartbeats are refused
            await asyncio.sleep(_TIDY_S)
            try:
                await tidy()
            except Exception as error:  # for example a full disk or a lost engine; the next round tries again
                print(f"tidying up: {error!r}", file=sys.stderr, flush=True)

    async def _tidy(self) -> None:
        self._service.results.forget_old()
        self._service.samplers.forget_answers()
        self._service.training.refuse_behind_lost()
        await asyncio.to_thread(self._service.catalogue.remove_expired)

    async def _end_overdue(self) -> None:
        overdue = self._service.overdue_sessions()
        for session in overdue:
            print(f"{session}: its client is gone", file=sys.stderr, flush=True)
        await asyncio.gather(*(self._service.end_session(session_id, is_overdue=True) for session_id in overdue))

    # ------------------------------------------------------------------ handlers

    def _healthz(self, _: User) -> Response:
        engine = self._service.engine
        if engine.problem is None:
            return JSONResponse({"status": "ok"})
        # an engine that is being replaced comes back by itself; a lost one needs a restart of the server
        status = 503 if engine.is_lost else 200
        return JSONResponse({"status": "degraded", "sampling": engine.problem}, status_code=status)

    async def _metrics(self, _: User) -> Response:
        counts = self._service.counts(await self._service.engine.stats())
        return Response(self._service.metrics.text(counts), media_type=CONTENT_TYPE_LATEST)

    def _client_config(self, _: User) -> Answer:
        return {"fwdbwd_max_chunk_bytes_count": min(5_000_000, self._service.limits.body_bytes // 2)}

    async def _forward_backward(self, request: Request) -> Response:
        if media_type(request) != PROTOBUF:
            raise Refused(415, f"forward_backward takes only {PROTOBUF}, which the client sends since version 0.25")
        data = await self._guard.body(request)
        model_id, size = await self._guard.in_turn(request, datums.scan_request, data)
        log_ids(request, model_id=model_id)
        self._service.training.get(model_id, user_of(request))  # raises NotFound before the request is parsed
        self._guard.hold(request, size - len(data))
        message = await self._guard.in_turn(request, datums.parse_request, data)
        self._guard.check_not_ending(request)
        return _pending(request, self._service.forward_backward(message, size, user_of(request)))

    async def _retrieve(self, body: wire.Retrieve, user: User) -> Response:
        result = self._service.results.get(body.request_id)
        if result is None or not user.owns(result.owner):
            raise Refused(_NEVER_SEEN, "there is no such request, or its answer has expired")
        answer = None
        with contextlib.suppress(TimeoutError):
            async with within(_POLL_S, self._polling):
                answer = await result.wait(_POLL_S)
        if answer is None:
            waiting = {"type": "try_again", "request_id": result.id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        result.fetched.set()
        if isinstance(answer, bytes):
            return Response(answer, media_type=PROTOBUF)
        return JSONResponse(answer)


def _dynamic_config(_: User) -> Answer:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


def _pending(request: Request, result: Result) -> Response:
    log_ids(request, request_id=result.id)
    return JSONResponse({"request_id": result.id, **result.fields})


def _page_of(request: Request, name: str, items: list[Any]) -> Answer:
    try:
        offset, limit = (int(request.query_params.get(key, usual)) for key, usual in (("offset", 0), ("limit", 20)))
    except ValueError:
        raise Refused(422, "offset and limit are whole numbers") from None
    if offset < 0 or limit < 0:
        raise Refused(422, "offset and limit are 0 or more")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


async def _page(_: Request) -> Response:
    return HTMLResponse(_PAGE, headers={"content-security-policy": _POLICY})


async def _unknown(request: Request) -> Response:
    return error_response(404, f"{request.method} {request.url.path} is not served")
