"""Draws samples at a rollout server, many at once; each goes on after new weights or a cut connection."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from actors.engines.dialect import ServerDialect
from actors.engines.protocol import Request, Sample
from actors.engines.served_samples import PartialSample, length_with_stop
from actors.engines.server_client import HEALTH_S, Refusal, ServerClient
from slimefsdp import heartbeat
from slimefsdp.errors import EngineError, SlimeError, StateError, WorkerDied
from slimefsdp.sampling.params import FinishReason, SamplingParams

MOST_AT_ONCE = 1024  # requests under way; servers queue what is more than they do at once
_TICK_S = 1.0
ABORT_AGAIN_S = 0.1
_ALIVE_EVERY_S = 10.0  # a server is asked whether it is there, while no sample ends
MOST_CUTS = 3  # connections that a sample may lose
GIVE_UP_S = 10.0  # for requests to end that nobody waits for


class CommittedVersions:
    """The versions of the weights that a server has or is being sent; samples wait here for weights.

    Its fields only change on the client's event loop, so that a sample sees no change between two waits.

    Args:
        timeout_s: limit on the wait for the end of an update.
    """

    def __init__(self, client: ServerClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._changed = asyncio.Condition()
        self.incoming: int | None = None  # the version of the update that has begun
        self.committed: int | None = None  # None between two, and after an update that failed
        self.commits: list[int] = []  # all committed versions
        self.interruptions = 0  # number of events that ended all sampling, such as updates
        self.failures = 0  # number of failed updates; tokens drawn across one are of unknown weights

    def begin(self, version: int) -> None:
        """Begins an update: from now on nothing is sampled."""
        self._change(weights=(None, version), interruptions=1)

    def fail(self) -> None:
        """Ends an update that failed: there are no weights to sample from, and none come."""
        self._change(weights=(None, None), interruptions=1, failures=1)

    def interrupt(self) -> None:
        """Notes that all samples are ended now, and continue."""
        self._change(interruptions=1)

    def commit(self, version: int) -> None:
        """Ends an update: all samples that wait continue."""
        self._change(weights=(version, None), commits=[version])

    def _change(
        self,
        *,
        weights: tuple[int | None, int | None] | None = None,
        interruptions: int = 0,
        failures: int = 0,
        commits: Sequence[int] = (),
    ) -> None:
        """Changes fields on the client's event loop; `weights` are the new (committed, incoming)."""

        async def change() -> None:
            async with self._changed:
                if weights is not None:
                    self.committed, self.incoming = weights
                self.commits += commits
                self.interruptions += interruptions
                self.failures += failures
                self._changed.notify_all()

        self._client.start(change()).result()

    def known_since(self, place: int) -> set[int]:
        """Returns the versions from this place of `commits` on, the incoming one included.

        A request may have waited at the server during updates, and goes on before the last one is known to be whole.
        """
        return {*self.commits[place:], *([] if self.incoming is None else [self.incoming])}

    async def wait(self, is_over: Callable[[], bool]) -> int | None:
        """Waits for committed weights; returns their place among `commits`, or None as soon as `is_over`.

        Raises:
            StateError: there are none and none come, or it took too long.
        """
        deadline = time.monotonic() + self._timeout_s
        while not is_over():
            if self.committed is not None:
                return len(self.commits) - 1
            if self.incoming is None:
                raise StateError(
                    "the engine has no committed weights",
                    field="update_weights",
                    hint="call engines.update_from(group) first",
                )
            if time.monotonic() > deadline:
                raise StateError(
                    f"new weights were not committed within cluster.sync_timeout_s={self._timeout_s:g}",
                    field="cluster.sync_timeout_s", hint="call update_weights again, or raise the timeout",
                )  # fmt: skip
            heartbeat.tick()
            with suppress(TimeoutError):
                async with self._changed, asyncio.timeout(_TICK_S):
                    await self._changed.wait()
        return None


class _Call:
    """A call of `generate`, whose samples hand themselves in here."""

    def __init__(self, decode: Callable[[list[list[int]]], list[str]]) -> None:
        self.decode = decode
        self.ended: SimpleQueue[Sample | Exception] = SimpleQueue()
        self.is_aborted = False  # its samples end as they are
        self.is_given_up = False  # nobody waits for them any more


class ServedSampling:
    """The calls of `generate` of one engine, at its server.

    Args:
        tokenizer: of the model.
        call_timeout_s: how long the server may take for a sample.
    """

    def __init__(
        self,
        dialect: ServerDialect,
        client: ServerClient,
        versions: CommittedVersions,
        tokenizer: Any,
        call_timeout_s: float,
    ) -> None:
        self._dialect, self._client, self._versions, self._tokenizer = dialect, client, versions, tokenizer
        self._call_timeout_s = call_timeout_s
        self.vocab_size = 0  # of the server's model, as it has said
        self.uses_adapter = False
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._lock = threading.Lock()  # of what follows
        self._calls: set[_Call] = set()
        self._in_flight: dict[str, _Call] = {}  # by request id, what the server has been asked
        self._activity = ExitStack()

    def generate(
        self, requests: Sequence[Request], decode: Callable[[list[list[int]]], list[str]]
    ) -> Iterator[list[Sample]]:
        """Does as `Engine.generate`.

        Args:
            decode: returns the texts of responses.
        """
        call = _Call(decode)
        left = sum(request.samples for request in requests)
        with self._during(call):
            for place, request in enumerate(requests):
                for number in range(request.samples):
                    self._client.start(self._hand_in(call, place, number, request))
            while left:
                samples = self._next_samples(call)
                left -= len(samples)
                yield samples

    def _next_samples(self, call: _Call) -> list[Sample]:
        """Waits for one, and takes what else is there."""
        found: list[Sample | Exception] = []
        while not found:
            try:
                found.append(call.ended.get(timeout=_ALIVE_EVERY_S))
            except Empty:  # a long response; how long the server may take for one, `_ask` says
                if not self._client.answers(HEALTH_S):
                    continue
            heartbeat.tick()
        with suppress(Empty):
            while True:
                found.append(call.ended.get_nowait())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [one for one in found if isinstance(one, Sample)]

    async def _hand_in(self, call: _Call, place: int, number: int, request: Request) -> None:
        try:
            async with self._places:
                call.ended.put(await self._sample(call, place, number, request))
        except Exception as error:  # raised where somebody waits
            call.ended.put(error)

    async def _sample(self, call: _Call, place: int, number: int, request: Request) -> Sample:
        drawn, params = PartialSample(), request.params
        reason: FinishReason = "abort"
        cuts = 0
        while not call.is_aborted and not call.is_given_up:
            interruptions, failures, before = self._versions.interruptions, self._versions.failures, len(drawn.tokens)
            since = await self._versions.wait(lambda: call.is_aborted or call.is_given_up)
            if since is None:
                break
            try:
                piece, end = await self._ask(call, request, number, drawn, since)
            except WorkerDied:  # of the connection alone, where the server is there
                cuts += 1
                if cuts > MOST_CUTS or not await self._client.is_alive(HEALTH_S):
                    raise
                continue
            if self._versions.failures != failures:
                continue
            drawn.add(piece)
            end = self._ended(drawn, before, params, end)
            if end is None:
                continue
            if end != "abort":
                reason = end
                break
            if not (call.is_aborted or call.is_given_up) and self._versions.interruptions == interruptions:
                raise EngineError(
                    "the server aborted a request that this engine did not abort",
                    field="engine", hint="let nobody else pause or abort what this server does",
                )  # fmt: skip
        (text,) = call.decode([drawn.tokens])
        return Sample(place, number, drawn.tokens, drawn.log_probs, reason, tuple(drawn.versions), text)

    def _ended(
        self, drawn: PartialSample, before: int, params: SamplingParams, end: FinishReason | None
    ) -> FinishReason | None:
        """Why a sample ended, where the server knows less: what it drew last may be an end that it did not look at.

        Args:
            before: so many tokens it was given; a stop text may have begun among them.
            end: as the server has it.
        """
        if params.stop and (before or end in (None, "abort")):
            length = length_with_stop(drawn.tokens, before, params, self._tokenizer.decode)
            if length is not None:
                drawn.cut(length)
                return "stop"
        if drawn.tokens and drawn.tokens[-1] in params.end_token_ids:
            return "stop"
        return "length" if len(drawn.tokens) == params.max_new_tokens and end != "stop" else end

    async def _ask(
        self, call: _Call, request: Request, number: int, drawn: PartialSample, since: int
    ) -> tuple[PartialSample, FinishReason | None]:
        name = f"slimefsdp-{uuid.uuid4().hex}"
        body = self._dialect.body(request, number, drawn, name)
        if self.uses_adapter:
            body = self._dialect.with_adapter(body)
        with self._lock:
            if call.is_aborted or call.is_given_up:  # who ends what it asked the server may be done already
                return PartialSample(), "abort"
            self._in_flight[name] = call
        try:
            answer = await self._client.ask("POST", self._dialect.GENERATE, body, timeout_s=self._call_timeout_s)
        except Refusal as refusal:
            raise EngineError(
                f"the server refused a request: {refusal}", field="engine", hint="look at its log"
            ) from refusal
        finally:
            with self._lock:
                del self._in_flight[name]
        known = self._versions.known_since(since)
        return self._dialect.read(answer, body, vocab_size=self.vocab_size, versions=known)

    @contextmanager
    def _during(self, call: _Call) -> Iterator[None]:
        """The call is under way; afterwards nothing of it is."""
        with self._lock:
            if not self._calls:
                self._activity.enter_context(heartbeat.during("generate"))
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                call.is_given_up = True
            self._end_at_server([call], GIVE_UP_S)
            with self._lock:
                self._calls.remove(call)
                if not self._calls:
                    self._activity.close()

    def _end_at_server(self, calls: Sequence[_Call], timeout_s: float) -> bool:
        """Whether the server has ended, in this time, what it was asked in these calls, which ask no more."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                ids = [one for one, call in self._in_flight.items() if call in calls]
                are_all = len(ids) == len(self._in_flight)
            if not ids or time.monotonic() > deadline:
                return not ids
            with suppress(Refusal, SlimeError):  # a server that is gone has aborted them
                if are_all and self._dialect.ABORTS_ALL:  # of a request that comes now it is known why it ends
                    self._versions.interrupt()
                self._dialect.end_requests(self._client, ids, are_all=are_all)
            time.sleep(ABORT_AGAIN_S)  # again: a request may have been on its way

    def abort(self) -> bool:
        """Ends all samples that are running or wait, as they are; returns whether the server has ended them in time."""
        with self._lock:
            calls = list(self._calls)
            for call in calls:
                call.is_aborted = True
        return self._end_at_server(calls, self._call_timeout_s)

    def give_up(self) -> None:
        """Ends the sampling for good: nobody waits for what is under way."""
        with self._lock:
            for call in self._calls:
                call.is_given_up = True
