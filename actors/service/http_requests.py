"""Checks the key, the sender and the body of every HTTP request, and turns errors into answers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import zstandard
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from actors.service import wire
from actors.service.results import error_text
from actors.service.service import Service
from actors.service.users import NotFound, Shares, User, Users
from slimefsdp.errors import CheckpointError, ResourceError, SlimeError

Handler = Callable[[Request], Awaitable[Response]]
BodyT = TypeVar("BodyT", bound=wire.Body)
PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_UNLOGGED = ("retrieve_future", "session_heartbeat", "status.json", "metrics", "healthz")  # polled all the time
_ANSWERED_AT_THE_END = "retrieve_future"  # clients may fetch finished answers while the server ends
_ENDING = "the server is ending: send it again to the next one"
_JSON_BYTES, _BYTES_PER_TOKEN = 1 << 20, 12  # limit on a JSON body without its prompt, and on each token in the prompt
_FREE_BYTES = 1 << 14  # bytes of each body that are not counted; heartbeats and polls are smaller
_PIECE_BYTES = 1 << 10  # compressed bytes to expand at a time; they become at most 32 MiB, 128 KiB for each 4 bytes
_ID_CHARACTERS = 200  # characters of an id in the log; clients may send ids of any length


class Refused(Exception):
    """Refuses a request with an HTTP status. Clients repeat the request only after status 408, 429 or 503."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RequestGuard:
    """Checks requests, receives bodies within limits on bytes and time, and turns errors into answers.

    One thread decompresses bodies and parses protobuf, as parsing holds the interpreter's lock; users take turns.
    """

    def __init__(self, service: Service, users: Users) -> None:
        self._service, self._users = service, users
        limits = service.limits
        self._bodies = Shares(limits.waiting_bytes)  # bytes of the bodies of unanswered requests
        self._receive_s = limits.receive_s
        self._max_body = limits.body_bytes
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="parsing")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # id of a user -> lock
        self._receiving: set[asyncio.Timeout] = set()

    def guarded(self, path: str, handler: Handler) -> Handler:
        """Wraps a handler: checks key and sender first, turns errors into answers, and counts and logs the request.

        Args:
            path: the path in metrics and log, with placeholders for variable parts.
        """

        async def logged(request: Request) -> Response:
            began = time.perf_counter()
            request.state.path, request.state.held, request.state.user = path, 0, None
            try:
                response = await answered(request)
            finally:
                if request.state.user is not None:
                    self._bodies.take(request.state.user.id, -_counted(request.state.held))
            seconds, metrics = time.perf_counter() - began, self._service.metrics
            metrics.requests.labels(path, response.status_code).inc()
            metrics.seconds.labels(path).observe(seconds)
            if path not in _UNLOGGED or response.status_code not in (200, 408):
                ids = getattr(request.state, "ids", {})
                self._service.log.write(path, response.status_code, seconds, **ids)
            return response

        async def answered(request: Request) -> Response:
            user = self._users.of(request.headers.get("x-api-key", ""))
            if user is None:
                return error_response(401, "X-API-Key is missing or wrong")
            request.state.user, request.state.ids = user, {"user": user.id[:8]} if user.id else {}
            try:
                self._check_sender(request)
                self.check_not_ending(request)
                return await handler(request)
            except Refused as error:
                return error_response(error.status, str(error))
            except NotFound as error:
                return error_response(410 if error.is_gone else 404, str(error))
            except SlimeError as error:
                statuses = {ResourceError: 429, CheckpointError: 404}
                return error_response(statuses.get(type(error), 400), error_text(error, self._service.model_name))
            except ClientDisconnect:  # the body was not complete; nobody reads this answer
                return error_response(400, "the client is gone")
            except Exception as error:  # a bug of the server; a repetition of the request would fail too
                print(f"{request.url.path}: {error!r}", file=sys.stderr, flush=True)
                return error_response(400, f"{type(error).__name__} in the server")

        return logged

    def _check_sender(self, request: Request) -> None:
        """Refuses requests that a browser sends for a web page of another site; only browsers send the header Origin.

        If the server has no keys, Host must be an address, since another site's name may resolve to this server.
        """
        headers = request.headers
        host, origin, kind = headers.get("host"), headers.get("origin"), headers.get("content-type", "")
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have used the other header
            raise Refused(400, "both Content-Length and Transfer-Encoding are given: send one of them")
        if origin is not None and _netloc(origin) != host:
            raise Refused(403, f"this is a request of a page of {origin[:200]!r}, which is another site")
        if not self._users.have_keys and host is not None and not _is_address(host, self._service.config.service.host):
            raise Refused(403, f"Host {host[:200]!r} is a name: use an IP address or localhost, or service.api_key_env")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if request.method == "POST" and has_body and media_type(request).lower() not in (_JSON, PROTOBUF):
            raise Refused(415, f"content-type {kind[:200]!r} is not supported: send {_JSON} or {PROTOBUF}")

    def check_not_ending(self, request: Request) -> None:
        """Refuses the request if the server is ending, unless the request fetches an answer."""
        if self._service.is_ending and request.state.path != _ANSWERED_AT_THE_END:
            raise Refused(503, _ENDING)

    async def body(self, request: Request, max_bytes: int | None = None) -> bytes:
        """Receives and decompresses a body of at most `max_bytes`, or of at most `ServiceLimits.body_bytes`.

        Raises:
            Refused: the body is too large, too slow, or compressed in another format than zstd.
        """
        limit, named = self._max_body, "this server reads"
        if max_bytes is not None and max_bytes < limit:
            limit, named = max_bytes, "JSON of this kind may have"
        parts, size = [], 0
        try:
            async with within(self._receive_s, self._receiving):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise Refused(413, f"the body is larger than the {limit} bytes that {named}")
                    self.hold(request, len(part))
                    parts.append(part)
        except TimeoutError:
            self.check_not_ending(request)
            problem = f"the body did not come within {self._receive_s:g} s"
            raise Refused(408, problem) from None
        data = b"".join(parts)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            data = await self.in_turn(request, _decompressed, data, limit)
            self.hold(request, len(data))
        elif encoding != "identity":
            raise Refused(415, f"content-encoding {encoding!r} is not supported: send zstd, or none")
        self.check_not_ending(request)
        return data

    async def json(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Receives a JSON body and checks its fields.

        Raises:
            Refused: a field is missing or invalid; also as in `body`.
        """
        # the event loop parses the body, so its size must be limited; a client's longest JSON has a prompt's tokens
        data = await self.body(request, _JSON_BYTES + _BYTES_PER_TOKEN * self._service.most_tokens)
        try:
            body = kind.read(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "the body"
            raise Refused(422, f"{field}: {first['msg']}") from None
        names = ("session_id", "model_id", "sampling_session_id")
        log_ids(request, **{name: str(getattr(body, name)) for name in names if getattr(body, name, None)})
        return body

    async def in_turn(self, request: Request, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in the parsing thread when it is this user's turn."""
        async with self._turns[user_of(request).id]:
            return await asyncio.get_running_loop().run_in_executor(self._parsing, function, *arguments)

    def hold(self, request: Request, size: int) -> None:
        """Counts `size` more bytes of a request's body, until the request is answered.

        The first `_FREE_BYTES` of a body do not count. If no other body counts, the body may have any size.

        Raises:
            Refused: the bodies of all users, or of this user, would exceed their limit.
        """
        size_before = request.state.held
        before, more = _counted(size_before), _counted(size_before + size) - _counted(size_before)
        user = user_of(request).id
        if more and self._bodies.taken > before and not self._bodies.has_room(user, more):
            problem = f"bodies of {self._bodies.taken} bytes wait or are being received"
            raise Refused(429, f"{problem}, and at most {self._bodies.most} may: send it again later")
        request.state.held += size
        self._bodies.take(user, more)

    def stop_receiving(self) -> None:
        cut(self._receiving)

    def close(self) -> None:
        self._parsing.shutdown(wait=False)


def user_of(request: Request) -> User:
    user: User = request.state.user
    return user


def log_ids(request: Request, **ids: str) -> None:
    request.state.ids |= {name: value[:_ID_CHARACTERS] for name, value in ids.items()}


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip()


def error_response(status: int, problem: str) -> Response:
    """Returns an error in the API's form, with a header that tells clients whether to repeat the request."""
    retry = {"x-should-retry": "true" if status in (408, 429, 503) else "false"}
    return JSONResponse({"error": problem, "detail": problem}, status_code=status, headers=retry)


@contextlib.asynccontextmanager
async def within(seconds: float, deadlines: set[asyncio.Timeout]) -> AsyncIterator[None]:
    """Limits the time of the block: raises TimeoutError after `seconds`, or when `cut(deadlines)` is called."""
    async with asyncio.timeout(seconds) as deadline:
        deadlines.add(deadline)
        try:
            yield
        finally:
            deadlines.discard(deadline)


def cut(deadlines: set[asyncio.Timeout]) -> None:
    """Lets all deadlines expire now."""
    for deadline in [deadline for deadline in deadlines if not deadline.expired()]:
        deadline.reschedule(asyncio.get_running_loop().time())


def _counted(size: int) -> int:
    return max(0, size - _FREE_BYTES)


def _decompressed(data: bytes, max_bytes: int) -> bytes:
    """Decompresses one complete zstd frame of at most `max_bytes`."""
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    parts, size, offset = [], 0, 0
    try:
        while offset < len(data) and not reader.eof:
            parts.append(reader.decompress(data[offset : offset + _PIECE_BYTES]))
            size, offset = size + len(parts[-1]), offset + _PIECE_BYTES
            if size > max_bytes:
                problem = f"the body is larger than {max_bytes} bytes when it is decompressed"
                raise Refused(413, problem)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Refused(400, f"the body is no zstd: {error}") from None
    if not reader.eof:
        raise Refused(400, "the body is no zstd: its frame is cut off")
    if reader.unused_data or offset < len(data):
        raise Refused(400, "the body is no zstd: there is data after its first frame")
    return b"".join(parts)


def _netloc(origin: str) -> str | None:
    """Returns the host and port in an Origin header; None if the header cannot be parsed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_address(host: str, listening_at: str) -> bool:
    """Returns whether a Host header is an IP address or a name that other sites cannot have."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", listening_at):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
