"""The HTTP API, as an ASGI application: it checks what comes, hands it to the service, and has answers fetched."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import zstandard
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from actors.service import request_scan, wire
from actors.service.catalogue import Saved
from actors.service.operations import PAGE, counts, status
from actors.service.results import Result, told
from actors.service.service import Service
from actors.service.sessions import NotFound
from actors.service.training_runs import TrainingRun
from actors.service.users import Shares, User, Users
from slimefsdp.errors import CheckpointError, ResourceError, SlimeError

BodyT = TypeVar("BodyT", bound=wire.Body)
Handler = Callable[[Request], Awaitable[Response]]
_POLL_S = 20.0  # clients give up on an answer after 45 s
_TIDY_S = 1.0
_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_UNLOGGED = ("retrieve_future", "session_heartbeat", "status.json", "metrics", "healthz")  # which come all the time
_NEVER_SEEN = 410


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


_JSON_BYTES, _BYTES_A_TOKEN = 1 << 20, 12
_FREE_BYTES = 1 << 14  # of each body, which are not counted: heartbeats and polls have fewer
_PIECE_BYTES = 1 << 10  # of zstd, which become 32 MiB at most: its shortest block has 4 bytes and becomes 128 KiB
_ANSWERED_AT_THE_END = "retrieve_future"  # what was taken is finished, and its answers are fetched
_SAMPLES_END_S = 10.0  # for samples that were taken, when the server ends
_FETCH_S = 5.0  # for clients to fetch what was finished then
_ENDING = "the server is ending: send it again to the next one"


class Refused(Exception):
    """Answered with this status, and not to be tried again."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


def make_app(service: Service, keys: Sequence[str] = ()) -> Starlette:
    """The application.

    Args:
        keys: of which every request must bring one; the first is the operator's. None: no key is asked for.

    `app.state.end()` ends what clients have before the HTTP server ends, as the application's own end does.
    """
    api = _Api(service, Users(keys))
    routes = [
        Route(f"/api/v1/{path}", api.guarded(path, handler), methods=[method]) for method, path, handler in api.table()
    ]
    routes += [
        Route("/", api.page, methods=["GET"]),
        Route("/status.json", api.guarded("status.json", api.status), methods=["GET"]),
        Route("/metrics", api.guarded("metrics", api.metrics), methods=["GET"]),
    ]
    routes.append(Route("/{rest:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"]))
    app = Starlette(routes=routes, lifespan=api.lifespan)
    app.state.end = api.end
    return app


class _Api:
    def __init__(self, service: Service, users: Users) -> None:
        self._service, self._users = service, users
        self._tasks: set[asyncio.Task[None]] = set()
        limits = service.config.service
        self._bodies = Shares(limits.max_waiting_bytes)  # bytes that have come, and are not handed on yet
        self._receive_s = limits.receive_timeout_s
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="parsing")  # one: it holds the interpreter's lock
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of users: each has one body parsed
        self._receiving: set[asyncio.Timeout] = set()
        self._polling: set[asyncio.Timeout] = set()
        self._has_ended = False

    def table(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of everything that is answered."""
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

    def guarded(self, path: str, handler: Handler) -> Handler:
        """Checks the key, turns what is raised into an answer that a client does not try again, and counts and logs it.

        Args:
            path: with the names of its parts in place of what a request has there.
        """

        async def logged(request: Request) -> Response:
            began = time.perf_counter()
            request.state.path, request.state.held, request.state.user = path, 0, None
            try:
                response = await guarded(request)
            finally:
                if request.state.user is not None:
                    self._bodies.give_back(request.state.user.id, _counted(request.state.held))
            seconds, metrics = time.perf_counter() - began, self._service.metrics
            metrics.requests.labels(path, response.status_code).inc()
            metrics.seconds.labels(path).observe(seconds)
            if path not in _UNLOGGED or response.status_code not in (200, 408):
                ids = getattr(request.state, "ids", {})
                self._service.log.write(path, response.status_code, seconds, **ids)
            return response

        async def guarded(request: Request) -> Response:
            user = self._users.of(request.headers.get("x-api-key", ""))
            if user is None:
                return _error(401, "X-API-Key is missing or wrong")
            request.state.user, request.state.ids = user, {"user": user.id[:8]} if user.id else {}
            try:
                self._check_sender(request)
                self._check_not_ending(request)
                return await handler(request)
            except Refused as error:
                return _error(error.status, str(error))
            except NotFound as error:
                return _error(410 if error.is_gone else 404, str(error))
            except SlimeError as error:
                kinds = {ResourceError: 429, CheckpointError: 404}
                return _error(kinds.get(type(error), 400), told(error, self._service.model_name))
            except ClientDisconnect:  # before its body had come: nobody reads this
                return _error(400, "the client is gone")
            except Exception as error:  # a defect of ours: tried again it would fail again
                print(f"{request.url.path}: {error!r}", file=sys.stderr, flush=True)
                return _error(400, f"{type(error).__name__} in the server")

        return logged

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Tidies up while the application runs, and ends what clients have when it ends."""
        # each by itself: what ends samplers may wait for a version that waits for room
        repeated = (self._tidy, self._forget, self._end_overdue, self._service.engine.watch)
        tidying = [asyncio.create_task(self._repeat(one)) for one in repeated]
        try:
            yield
        finally:
            for one in tidying:
                one.cancel()
            await self.end()

    async def end(self) -> None:
        """Refuses what comes from now on, finishes what was taken, saves every run, and lets nobody wait any longer.

        Samples have some seconds to be finished, and clients some more to fetch what they are waiting for.
        """
        if self._has_ended:
            return
        self._has_ended = self._service.is_ending = True
        _cut(self._receiving)
        taken = self._service.results.unanswered()
        closing = asyncio.create_task(asyncio.to_thread(self._service.close))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SAMPLES_END_S)
        await closing
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_S):
                await asyncio.gather(*(one.fetched.wait() for one in taken if one.ended is not None))
        _cut(self._polling)
        self._parsing.shutdown(wait=False)

    async def _repeat(self, tidy: Callable[[], Awaitable[None]]) -> None:
        while not self._service.is_ending:  # heartbeats are refused then, and nobody is gone for that
            await asyncio.sleep(_TIDY_S)
            try:
                await tidy()
            except Exception as error:  # of a disk, or of an engine that is lost: the next round is another one
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
        await asyncio.gather(*(self._service.end_session(one, is_overdue=True) for one in overdue))

    # ------------------------------------------------------------------ what is refused unread

    def _check_sender(self, request: Request) -> None:
        """Refuses what pages of other sites can have a browser send. Programs name no Origin.

        Where no key is asked for, the page might have the server's address under a name of its own.
        """
        headers = request.headers
        host, origin, kind = headers.get("host"), headers.get("origin"), headers.get("content-type", "")
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have read the other one
            raise Refused(400, "both Content-Length and Transfer-Encoding are given: send one of them")
        if origin is not None and _netloc(origin) != host:
            raise Refused(403, f"this is a request of a page of {origin[:200]!r}, which is another site")
        if not self._users.have_keys and host is not None and not _is_address(host, self._service.config.service.host):
            raise Refused(403, f"Host {host[:200]!r} is a name: use an IP address or localhost, or service.api_key_env")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if request.method == "POST" and has_body and kind.partition(";")[0].strip().lower() not in (_JSON, _PROTOBUF):
            raise Refused(415, f"content-type {kind[:200]!r} is not supported: send {_JSON} or {_PROTOBUF}")

    def _check_not_ending(self, request: Request) -> None:
        if self._service.is_ending and request.state.path != _ANSWERED_AT_THE_END:
            raise Refused(503, _ENDING)

    # ------------------------------------------------------------------ bodies

    async def _bytes(self, request: Request, most: int | None = None) -> bytes:
        """The body, decompressed; never more of it than there may be, or than `most` bytes."""
        limit, named = self._service.config.service.max_body_bytes, "service.max_body_bytes"
        most, named = (limit, named) if most is None or limit <= most else (most, "the longest JSON that is read here")
        parts, size = [], 0
        try:
            async with _within(self._receive_s, self._receiving):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refused(413, f"the body is larger than {named}={most}")
                    self._hold(request, len(part))
                    parts.append(part)
        except TimeoutError:
            self._check_not_ending(request)
            problem = f"the body did not come within service.receive_timeout_s={self._receive_s:g}"
            raise Refused(408, problem) from None
        data = b"".join(parts)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            data = await self._off_loop(request, _decompressed, data, most)
            self._hold(request, len(data))
        elif encoding != "identity":
            raise Refused(415, f"content-encoding {encoding!r} is not supported: send zstd, or none")
        self._check_not_ending(request)
        return data

    async def _off_loop(self, request: Request, function: Callable[..., Any], *given: Any) -> Any:
        """Runs beside the event loop, one call at a time, by turns of users who have something to run."""
        async with self._turns[_user(request).id]:
            return await asyncio.get_running_loop().run_in_executor(self._parsing, function, *given)

    def _hold(self, request: Request, size: int) -> None:
        """Counts bytes of a body until it is answered: all together, and those of one user, may have so many.

        A body that is alone may have any size, and small ones are taken in any case.
        """
        held = request.state.held
        before, more = _counted(held), _counted(held + size) - _counted(held)
        user = _user(request).id
        if more and self._bodies.taken > before and not self._bodies.has_room(user, more):
            problem = f"bodies of {self._bodies.taken} bytes are on their way"
            raise Refused(429, f"{problem}, and service.max_waiting_bytes={self._bodies.most}: send it again later")
        request.state.held += size
        self._bodies.take(user, more)

    async def _json(self, request: Request, kind: type[BodyT]) -> BodyT:
        # nobody is answered while JSON is parsed; of what clients send the tokens of a prompt take the most
        data = await self._bytes(request, _JSON_BYTES + _BYTES_A_TOKEN * self._service.most_tokens)
        try:
            body = kind.read(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            raise Refused(422, f"{place}: {first['msg']}") from None
        names = ("session_id", "model_id", "sampling_session_id")
        request.state.ids |= {name: str(getattr(body, name))[:200] for name in names if getattr(body, name, None)}
        return body

    def _future(self, request: Request, result: Result, **more: Any) -> Response:
        request.state.ids |= {"request_id": result.id}
        return JSONResponse({"request_id": result.id, **more})

    # ------------------------------------------------------------------ the server

    async def healthz(self, _: Request) -> Response:
        engine = self._service.engine
        if engine.problem is None:
            return JSONResponse({"status": "ok"})
        # an engine that is being replaced needs nobody's help; one that cannot be takes a new start of the server
        status = 503 if engine.is_lost else 200
        return JSONResponse({"status": "degraded", "sampling": engine.problem}, status_code=status)

    async def capabilities(self, _: Request) -> Response:
        service = self._service
        one = {
            "model_name": service.model_name, "max_context_length": service.most_context, "trainable": True,
            "sampleable": True,
        }  # fmt: skip
        return JSONResponse({"supported_models": [one]})

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
        await self._bytes(request)
        most = self._service.config.service.max_body_bytes
        return JSONResponse({"fwdbwd_max_chunk_bytes_count": min(5_000_000, most // 2)})

    async def dynamic_config(self, request: Request) -> Response:
        await self._bytes(request)
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

    async def telemetry(self, request: Request) -> Response:
        await self._bytes(request)  # texts of exceptions and headers, which are nobody's business: they are dropped
        return JSONResponse({"status": "accepted"})

    # ------------------------------------------------------------------ sessions

    async def create_session(self, request: Request) -> Response:
        session = self._service.create_session(await self._json(request, wire.CreateSession), _user(request))
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, request: Request) -> Response:
        body = await self._json(request, wire.OfSession)
        self._service.session(body.session_id, _user(request))
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        await self._bytes(request)
        with contextlib.suppress(NotFound):  # it has ended, or is another user's, who alone is to know of it
            await self._service.end_session(self._service.session(request.path_params["id"], _user(request)).id)
        return JSONResponse({})

    # ------------------------------------------------------------------ training

    async def create_model(self, request: Request) -> Response:
        body = await self._json(request, wire.CreateModel)
        if body.optimizer_config.get("type", "adamw") != "adamw":
            raise Refused(422, f"optimizer_config.type={body.optimizer_config['type']!r}: adamw is supported alone")
        run, result = self._service.create_run(body, _user(request))
        return self._future(request, result, model_id=run)

    async def unload_model(self, request: Request) -> Response:
        body = await self._json(request, wire.OfModel)
        result = self._service.unload(self._service.run(body.model_id, _user(request)))
        return self._future(request, result, model_id=body.model_id)

    async def get_info(self, request: Request) -> Response:
        run = self._service.run((await self._json(request, wire.OfModel)).model_id, _user(request))
        service = self._service
        about = {"arch": service.model_type, "model_name": service.model_name, "tokenizer_id": service.tokenizer_id}
        return JSONResponse(
            {
                "type": "get_info", "model_id": run.id, "model_data": about, **_lora(run.rank),
                "model_name": service.model_name,
            }
        )  # fmt: skip

    async def forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != _PROTOBUF:
            raise Refused(415, f"forward_backward takes {_PROTOBUF} alone, as the client sends since version 0.25")
        data = await self._bytes(request)
        model_id, size = await self._off_loop(request, request_scan.scan_request, data)
        request.state.ids |= {"model_id": model_id[:200]}
        self._service.run(model_id, _user(request))  # an unknown run's request is not parsed
        self._hold(request, size - len(data))
        message = await self._off_loop(request, request_scan.parse_request, data)
        self._check_not_ending(request)
        return self._future(request, self._service.forward_backward(message, size, _user(request)), model_id=model_id)

    async def optim_step(self, request: Request) -> Response:
        body = await self._json(request, wire.OptimStep)
        return self._future(request, self._service.optim_step(body, _user(request)), model_id=body.model_id)

    async def save_weights(self, request: Request) -> Response:
        body = await self._json(request, wire.SaveWeights)
        return self._future(request, self._service.save_weights(body, _user(request)), model_id=body.model_id)

    async def save_for_sampler(self, request: Request) -> Response:
        body = await self._json(request, wire.SaveForSampler)
        return self._future(request, self._service.save_for_sampler(body, _user(request)), model_id=body.model_id)

    async def load_weights(self, request: Request) -> Response:
        run, result = self._service.load_weights(await self._json(request, wire.LoadWeights), _user(request))
        return self._future(request, result, model_id=run)

    # ------------------------------------------------------------------ sampling

    async def create_sampler(self, request: Request) -> Response:
        sampler = self._service.create_sampler(await self._json(request, wire.CreateSamplingSession), _user(request))
        await asyncio.to_thread(self._service.keep_sampler, sampler)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def get_sampler(self, request: Request) -> Response:
        sampler = self._service.sampler(request.path_params["id"], _user(request))
        return JSONResponse(
            {"sampler_id": sampler.id, "base_model": self._service.model_name, "model_path": sampler.path}
        )

    async def asample(self, request: Request) -> Response:
        body = await self._json(request, wire.Sample)
        result, work = self._service.sample(body, _user(request))
        if work is not None:
            task = asyncio.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        place = f"{body.sampling_session_id}/{body.seq_id}"
        return self._future(
            request, result, sample_sequence_ids=[f"{place}/{index}" for index in range(body.num_samples)]
        )

    async def retrieve(self, request: Request) -> Response:
        body = await self._json(request, wire.Retrieve)
        result = self._service.results.get(body.request_id)
        if result is None or not _user(request).owns(result.owner):
            raise Refused(_NEVER_SEEN, "no such request, or its answer was kept long enough")
        answer = None
        with contextlib.suppress(TimeoutError):
            async with _within(_POLL_S, self._polling):
                answer = await result.wait(_POLL_S)
        if answer is None:
            waiting = {"type": "try_again", "request_id": result.id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        result.fetched.set()
        if isinstance(answer, bytes):
            return Response(answer, media_type=_PROTOBUF)
        return JSONResponse(answer)

    # ------------------------------------------------------------------ what was saved

    async def weights_info(self, request: Request) -> Response:
        saved = self._service.catalogue.get((await self._json(request, wire.WeightsInfo)).tinker_path, _user(request))
        has = self._service.weights.switches(saved.rank)
        return JSONResponse({"base_model": self._service.model_name, **_lora(saved.rank), **has})

    async def training_runs(self, request: Request) -> Response:
        user = _user(request)
        runs = [self._described(run, user) for run in list(self._service.runs.values()) if user.owns(run.owner)]
        page, cursor = _page(request, runs)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        user = _user(request)
        return JSONResponse(self._described(self._service.run(request.path_params["id"], user), user))

    def _described(self, run: TrainingRun, user: User) -> dict[str, Any]:
        saved = self._service.catalogue.listed(user, run.id)
        newest = {kind: next((_listed(one) for one in reversed(saved) if one.kind == kind), None)
                  for kind in ("weights", "sampler_weights")}  # fmt: skip
        return {
            "training_run_id": run.id, "base_model": self._service.model_name, "model_owner": "local",
            **_lora(run.rank), "corrupted": False, "last_request_time": _time(run.last_request),
            "last_checkpoint": newest["weights"], "last_sampler_checkpoint": newest["sampler_weights"],
            "user_metadata": run.user_metadata or None,
        }  # fmt: skip

    async def checkpoints_of_run(self, request: Request) -> Response:
        saved = self._service.catalogue.listed(_user(request), request.path_params["id"])
        return JSONResponse({"checkpoints": [_listed(one) for one in saved]})

    async def checkpoints(self, request: Request) -> Response:
        page, cursor = _page(request, [_listed(one) for one in self._service.catalogue.listed(_user(request))])
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        parts = request.path_params
        path = f"tinker://{parts['id']}/{parts['kind']}/{parts['name']}"
        await asyncio.to_thread(self._service.catalogue.remove, path, _user(request))
        return JSONResponse({})


def _user(request: Request) -> User:
    user: User = request.state.user
    return user


def _require_operator(request: Request) -> None:
    if not _user(request).is_operator:
        raise Refused(403, "the first of the server's keys is its operator's, who alone sees this")


def _lora(rank: int) -> dict[str, Any]:
    """As clients are told of a rank; 0: all weights."""
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _listed(one: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": "training" if one.kind == "weights" else "sampler",
        "time": _time(one.time),
        "tinker_path": one.path,
        "size_bytes": one.size,
        "public": False,
        "user_metadata": one.user_metadata,
        "expires_at": None if one.expires is None else _time(one.expires),
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


def _decompressed(data: bytes, most: int) -> bytes:
    """One whole frame of zstd, of at most so many bytes when it is decompressed."""
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    parts, size, at = [], 0, 0
    try:
        while at < len(data) and not reader.eof:
            parts.append(reader.decompress(data[at : at + _PIECE_BYTES]))
            size, at = size + len(parts[-1]), at + _PIECE_BYTES
            if size > most:
                raise Refused(413, f"the body is larger than service.max_body_bytes={most} when it is decompressed")
    except (zstandard.ZstdError, MemoryError) as error:
        raise Refused(400, f"the body is no zstd: {error}") from None
    if not reader.eof:
        raise Refused(400, "the body is no zstd: its frame is cut off")
    if reader.unused_data or at < len(data):
        raise Refused(400, "the body is no zstd: there is more behind its first frame")
    return b"".join(parts)


@contextlib.asynccontextmanager
async def _within(seconds: float, deadlines: set[asyncio.Timeout]) -> AsyncIterator[None]:
    """Raises TimeoutError behind so many seconds, or when the set is cut before."""
    async with asyncio.timeout(seconds) as deadline:
        deadlines.add(deadline)
        try:
            yield
        finally:
            deadlines.discard(deadline)


def _cut(deadlines: set[asyncio.Timeout]) -> None:
    for deadline in [one for one in deadlines if not one.expired()]:
        deadline.reschedule(asyncio.get_running_loop().time())


def _counted(size: int) -> int:
    return max(0, size - _FREE_BYTES)


def _netloc(origin: str) -> str | None:
    """Returns an origin's host with its port; None: it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_address(host: str, listening_at: str) -> bool:
    """Whether a Host header names this machine by something that nobody else can give to another one."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", listening_at):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _error(status: int, problem: str) -> Response:
    retry = {"x-should-retry": "true" if status in (408, 429, 503) else "false"}
    return JSONResponse({"error": problem, "detail": problem}, status_code=status, headers=retry)


async def _unknown(request: Request) -> Response:
    return _error(404, f"{request.method} {request.url.path} is not served")
