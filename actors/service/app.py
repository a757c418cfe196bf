"""The HTTP API as an ASGI application: each path has a handler that passes the request to the service."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from actors.service import request_scan, wire
from actors.service.catalogue import Saved
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
from actors.service.results import Result
from actors.service.service import Service
from actors.service.sessions import NotFound
from actors.service.status import PAGE, counts, status
from actors.service.training_runs import TrainingRun
from actors.service.users import User, Users

_POLL_S = 20.0  # how long a poll waits for an answer; clients give up after 45 s
_TIDY_S = 1.0
_NEVER_SEEN = 410
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_SAMPLES_END_S = 10.0  # how long the end of the server waits for samples in progress
_FETCH_S = 5.0  # how long it then waits for clients to fetch finished answers


def make_app(service: Service, keys: Sequence[str] = ()) -> Starlette:
    """Makes the application.

    `app.state.end()` finishes the clients' work and saves it; the end of the application's lifespan does the same.

    Args:
        keys: the accepted API keys; the first is the operator's. If there are none, requests need no key.
    """
    api = _Api(service, Users(keys))
    routes = [
        Route(f"/api/v1/{path}", api.guard.guarded(path, handler), methods=[method])
        for method, path, handler in api.table()
    ]
    routes += [
        Route("/", api.page, methods=["GET"]),
        Route("/status.json", api.guard.guarded("status.json", api.status), methods=["GET"]),
        Route("/metrics", api.guard.guarded("metrics", api.metrics), methods=["GET"]),
    ]
    routes.append(Route("/{rest:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"]))
    app = Starlette(routes=routes, lifespan=api.lifespan)
    app.state.end = api.end
    return app


class _Api:
    def __init__(self, service: Service, users: Users) -> None:
        self._service = service
        self.guard = RequestGuard(service, users)
        self._tasks: set[asyncio.Task[None]] = set()
        self._polling: set[asyncio.Timeout] = set()
        self._has_ended = False

    def table(self) -> list[tuple[str, str, Handler]]:
        """Returns the method, path and handler of every route of the API."""
        return [
            ("GET", "healthz", self.healthz),
            ("GET", "get_server_capabilities", self.capabilities),
            ("POST", "client/config", self.client_config),
            ("POST", "client/dynamic_config", self.dynamic_config),
            ("POST", "telemetry", self.telemetry),
            ("POST", "create_session", self.create_session),
            ("POST", "session_heartbeat", self.heartbeat),
            ("POST", "sessions/{id}/finish", self.finish),
            ("POST", "create_model", self.create_model),
            ("POST", "unload_model", self.unload_model),
            ("POST", "get_info", self.get_info),
            ("POST", "forward_backward", self.forward_backward),
            ("POST", "optim_step", self.optim_step),
            ("POST", "save_weights", self.save_weights),
            ("POST", "load_weights", self.load_weights),
            ("POST", "save_weights_for_sampler", self.save_for_sampler),
            ("POST", "create_sampling_session", self.create_sampler),
            ("GET", "samplers/{id}", self.get_sampler),
            ("POST", "asample", self.asample),
            ("POST", "retrieve_future", self.retrieve),
            ("POST", "weights_info", self.weights_info),
            ("GET", "training_runs", self.training_runs),
            ("GET", "training_runs/{id}", self.training_run),
            ("GET", "training_runs/{id}/checkpoints", self.checkpoints_of_run),
            ("GET", "checkpoints", self.checkpoints),
            ("DELETE", "training_runs/{id}/checkpoints/{kind}/{name}", self.delete_checkpoint),
        ]

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Runs the periodic tasks while the application runs, and ends the clients' work afterwards."""
        # separate tasks, since ending samplers may have to wait for a version that is being loaded
        repeated = (self._tidy, self._forget, self._end_overdue, self._service.engine.watch)
        tasks = [asyncio.create_task(self._repeat(function)) for function in repeated]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.end()

    async def end(self) -> None:
        """Refuses new requests, finishes those in progress, saves every run, and ends all polls.

        Samples get some seconds to finish, and clients get some more to fetch their answers.
        """
        if self._has_ended:
            return
        self._has_ended = self._service.is_ending = True
        self.guard.stop_receiving()
        taken = self._service.results.unanswered()
        closing = asyncio.create_task(asyncio.to_thread(self._service.close))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SAMPLES_END_S)
        await closing
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_S):
                await asyncio.gather(*(result.fetched.wait() for result in taken if result.ended is not None))
        cut(self._polling)
        self.guard.close()

    async def _repeat(self, tidy: Callable[[], Awaitable[None]]) -> None:
        while not self._service.is_ending:  # heartbeats are refused then, so sessions must not time out
            await asyncio.sleep(_TIDY_S)
            try:
                await tidy()
            except Exception as error:  # of the disk or of a lost engine; the next round tries again
                print(f"tidying up: {error!r}", file=sys.stderr, flush=True)

    async def _tidy(self) -> None:
        self._service.results.forget_old()
        self._service.samplers.forget_answers()
        self._service.refuse_behind_lost()
        await asyncio.to_thread(self._service.catalogue.remove_expired)

    async def _forget(self) -> None:
        await self._service.samplers.forget_oldest()

    async def _end_overdue(self) -> None:
        overdue = self._service.overdue_sessions()
        for session in overdue:
            print(f"{session}: its client is gone", file=sys.stderr, flush=True)
        await asyncio.gather(*(self._service.end_session(session_id, is_overdue=True) for session_id in overdue))

    def _future(self, request: Request, result: Result, **more: Any) -> Response:
        log_ids(request, request_id=result.id)
        return JSONResponse({"request_id": result.id, **more})

    # ------------------------------------------------------------------ the server

    async def healthz(self, _: Request) -> Response:
        engine = self._service.engine
        if engine.problem is None:
            return JSONResponse({"status": "ok"})
        # an engine that is being replaced comes back by itself; a lost one needs a restart of the server
        status = 503 if engine.is_lost else 200
        return JSONResponse({"status": "degraded", "sampling": engine.problem}, status_code=status)

    async def capabilities(self, _: Request) -> Response:
        service = self._service
        model = {
            "model_name": service.model_name, "max_context_length": service.most_context, "trainable": True,
            "sampleable": True,
        }  # fmt: skip
        return JSONResponse({"supported_models": [model]})

    async def page(self, _: Request) -> Response:
        return HTMLResponse(PAGE, headers={"content-security-policy": _POLICY})

    async def status(self, request: Request) -> Response:
        _require_operator(request)
        return JSONResponse(status(self._service, await self._service.sampling_stats()))

    async def metrics(self, request: Request) -> Response:
        _require_operator(request)
        now = counts(self._service, await self._service.sampling_stats())
        return Response(self._service.metrics.text(now), media_type=CONTENT_TYPE_LATEST)

    async def client_config(self, request: Request) -> Response:
        await self.guard.body(request)
        most = self._service.limits.body_bytes
        return JSONResponse({"fwdbwd_max_chunk_bytes_count": min(5_000_000, most // 2)})

    async def dynamic_config(self, request: Request) -> Response:
        await self.guard.body(request)
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

    async def telemetry(self, request: Request) -> Response:
        await self.guard.body(request)  # exception texts and headers of the client, which are not stored
        return JSONResponse({"status": "accepted"})

    # ------------------------------------------------------------------ sessions

    async def create_session(self, request: Request) -> Response:
        session = self._service.create_session(await self.guard.json(request, wire.CreateSession), user_of(request))
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.OfSession)
        self._service.session(body.session_id, user_of(request))
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        await self.guard.body(request)
        with contextlib.suppress(NotFound):  # it has ended, or belongs to another user and must stay hidden
            await self._service.end_session(self._service.session(request.path_params["id"], user_of(request)).id)
        return JSONResponse({})

    # ------------------------------------------------------------------ training

    async def create_model(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.CreateModel)
        if body.optimizer_config.get("type", "adamw") != "adamw":
            raise Refused(422, f"optimizer_config.type={body.optimizer_config['type']!r}: adamw is supported alone")
        run, result = self._service.create_run(body, user_of(request))
        return self._future(request, result, model_id=run)

    async def unload_model(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.OfModel)
        result = self._service.unload(self._service.run(body.model_id, user_of(request)))
        return self._future(request, result, model_id=body.model_id)

    async def get_info(self, request: Request) -> Response:
        run = self._service.run((await self.guard.json(request, wire.OfModel)).model_id, user_of(request))
        service = self._service
        about = {"arch": service.model_type, "model_name": service.model_name, "tokenizer_id": service.tokenizer_id}
        return JSONResponse(
            {
                "type": "get_info", "model_id": run.id, "model_data": about, **_lora(run.rank),
                "model_name": service.model_name,
            }
        )  # fmt: skip

    async def forward_backward(self, request: Request) -> Response:
        if media_type(request) != PROTOBUF:
            raise Refused(415, f"forward_backward takes {PROTOBUF} alone, as the client sends since version 0.25")
        data = await self.guard.body(request)
        model_id, size = await self.guard.in_turn(request, request_scan.scan_request, data)
        log_ids(request, model_id=model_id)
        self._service.run(model_id, user_of(request))  # an unknown run's request is not parsed
        self.guard.hold(request, size - len(data))
        message = await self.guard.in_turn(request, request_scan.parse_request, data)
        self.guard.check_not_ending(request)
        return self._future(request, self._service.forward_backward(message, size, user_of(request)), model_id=model_id)

    async def optim_step(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.OptimStep)
        return self._future(request, self._service.optim_step(body, user_of(request)), model_id=body.model_id)

    async def save_weights(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.SaveWeights)
        return self._future(request, self._service.save_weights(body, user_of(request)), model_id=body.model_id)

    async def save_for_sampler(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.SaveForSampler)
        return self._future(request, self._service.save_for_sampler(body, user_of(request)), model_id=body.model_id)

    async def load_weights(self, request: Request) -> Response:
        run, result = self._service.load_weights(await self.guard.json(request, wire.LoadWeights), user_of(request))
        return self._future(request, result, model_id=run)

    # ------------------------------------------------------------------ sampling

    async def create_sampler(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.CreateSamplingSession)
        sampler = self._service.create_sampler(body, user_of(request))
        await asyncio.to_thread(self._service.keep_sampler, sampler)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def get_sampler(self, request: Request) -> Response:
        sampler = self._service.sampler(request.path_params["id"], user_of(request))
        return JSONResponse(
            {"sampler_id": sampler.id, "base_model": self._service.model_name, "model_path": sampler.path}
        )

    async def asample(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.Sample)
        result, work = self._service.sample(body, user_of(request))
        if work is not None:
            task = asyncio.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        prefix = f"{body.sampling_session_id}/{body.seq_id}"
        return self._future(
            request, result, sample_sequence_ids=[f"{prefix}/{index}" for index in range(body.num_samples)]
        )

    async def retrieve(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.Retrieve)
        result = self._service.results.get(body.request_id)
        if result is None or not user_of(request).owns(result.owner):
            raise Refused(_NEVER_SEEN, "no such request, or its answer was kept long enough")
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

    # ------------------------------------------------------------------ what was saved

    async def weights_info(self, request: Request) -> Response:
        body = await self.guard.json(request, wire.WeightsInfo)
        saved = self._service.catalogue.get(body.tinker_path, user_of(request))
        has = self._service.weights.switches(saved.rank)
        return JSONResponse({"base_model": self._service.model_name, **_lora(saved.rank), **has})

    async def training_runs(self, request: Request) -> Response:
        user = user_of(request)
        runs = [self._described(run, user) for run in list(self._service.runs.values()) if user.owns(run.owner)]
        page, cursor = _page(request, runs)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        user = user_of(request)
        return JSONResponse(self._described(self._service.run(request.path_params["id"], user), user))

    def _described(self, run: TrainingRun, user: User) -> dict[str, Any]:
        saved = self._service.catalogue.listed(user, run.id)
        newest = {kind: next((_listed(entry) for entry in reversed(saved) if entry.kind == kind), None)
                  for kind in ("weights", "sampler_weights")}  # fmt: skip
        return {
            "training_run_id": run.id, "base_model": self._service.model_name, "model_owner": "local",
            **_lora(run.rank), "corrupted": False, "last_request_time": _time(run.last_request),
            "last_checkpoint": newest["weights"], "last_sampler_checkpoint": newest["sampler_weights"],
            "user_metadata": run.user_metadata or None,
        }  # fmt: skip

    async def checkpoints_of_run(self, request: Request) -> Response:
        saved = self._service.catalogue.listed(user_of(request), request.path_params["id"])
        return JSONResponse({"checkpoints": [_listed(entry) for entry in saved]})

    async def checkpoints(self, request: Request) -> Response:
        page, cursor = _page(request, [_listed(entry) for entry in self._service.catalogue.listed(user_of(request))])
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        parts = request.path_params
        path = f"tinker://{parts['id']}/{parts['kind']}/{parts['name']}"
        await asyncio.to_thread(self._service.catalogue.remove, path, user_of(request))
        return JSONResponse({})


def _require_operator(request: Request) -> None:
    if not user_of(request).is_operator:
        raise Refused(403, "the first of the server's keys is its operator's, who alone sees this")


def _lora(rank: int) -> dict[str, Any]:
    """Returns the API's fields of a rank; rank 0 stands for all weights."""
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _listed(saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": "training" if saved.kind == "weights" else "sampler",
        "time": _time(saved.time),
        "tinker_path": saved.path,
        "size_bytes": saved.size,
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        offset, limit = (int(request.query_params.get(name, usual)) for name, usual in (("offset", 0), ("limit", 20)))
    except ValueError:
        raise Refused(422, "offset and limit are whole numbers") from None
    if offset < 0 or limit < 0:
        raise Refused(422, "offset and limit are 0 or more")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


async def _unknown(request: Request) -> Response:
    return error_response(404, f"{request.method} {request.url.path} is not served")
