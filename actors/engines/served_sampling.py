"""Draws many samples at once at a rollout server; a sample continues after new weights or a cut connection."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from actors.engines.dialect import ADAPTER, ServerDialect
from actors.engines.protocol import Request, Sample
from actors.engines.served_samples import PartialSample, length_with_stop
from actors.engines.server_client import HEALTH_S, Refusal, ServerClient
from slimefsdp import heartbeat
from slimefsdp.errors import EngineError, SlimeError, StateError, WorkerDied
from slimefsdp.sampling.params import FinishReason, SamplingParams

MOST_AT_ONCE = 1024  # limit on requests in flight; servers queue those that they cannot run
_TICK_S = 1.0
ABORT_AGAIN_S = 0.1  # interval of aborting requests that were still in transit
_ALIVE_EVERY_S = 10.0  # interval of checking that the server answers, while no sample ends
MOST_CUTS = 3  # limit on the lost connections of a sample
GIVE_UP_S = 10.0  # timeout of aborting requests that are not needed any more


class CommittedVersions:
    """Knows which weight versions a server was sent, and which is being sent; samples wait here for weights.

    The fields only change on the client's event loop, so a coroutine sees no change between two of its awaits.

    Args:
        timeout_s: limit on the wait for the end of an update.
    """

    def __init__(self, client: ServerClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._changed = asyncio.Condition()
        self.incoming: int | None = None  # the version of the update that has begun
        self.committed: int | None = None  # None during an update, and after an update that failed
        self.commits: list[int] = []  # all committed versions, in order
        self.interruptions = 0  # number of events that ended all sampling, such as updates
        self.failures = 0  # number of failed updates; after each, the weights of requests in flight are not known

    def begin(self, version: int) -> None:
        """Begins an update: from now on nothing is sampled."""
        self._change(weights=(None, version), interruptions=1)

    def fail(self) -> None:
        """Ends an update that failed: samples that wait for weights raise a StateError."""
        self._change(weights=(None, None), interruptions=1, failures=1)

    def interrupt(self) -> None:
        """Counts an event that aborts all requests at the server; their samples continue with new requests."""
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
        """Changes fields on the client's event loop; `weights` are new values of (`committed`, `incoming`)."""

        async def change() -> None:
            async with self._changed:
                if weights is not None:
                    self.committed, self.incoming = weights
                self.commits += commits
                self.interruptions += interruptions
                self.failures += failures
                self._changed.notify_all()

        self._client.start(change()).result()

    def known_since(self, first: int) -> set[int]:
        """Returns `commits` from index `first` on, and the incoming version.

        The incoming version is included because a request that waits at the server during an update may continue before
        this process knows that the update is complete.
        """
        return {*self.commits[first:], *([] if self.incoming is None else [self.incoming])}

    async def wait(self, is_over: Callable[[], bool]) -> int | None:
        """Waits for committed weights; returns their version's index in `commits`, or None once `is_over()` is True.

        Raises:
            StateError: there are no weights and no update has begun, or the update took more than `timeout_s`.
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
    """A call of `generate`, with its ended samples that were not yielded yet."""

    def __init__(self, decode: Callable[[list[list[int]]], list[str]]) -> None:
        self.decode = decode
        self.ended: SimpleQueue[Sample | Exception] = SimpleQueue()
        self.is_aborted = False  # whether the call's samples end with the tokens drawn so far
        self.is_given_up = False  # whether the call's samples are not needed any more


class ServedSampling:
    """Runs the calls of `generate` of one engine at its server.

    Args:
        tokenizer: the model's tokenizer.
        call_timeout_s: limit on the server's time for one request.
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
        self.vocab_size = 0  # of the server's model, once it is known
        self.uses_adapter = False
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._lock = threading.Lock()  # guards the next three attributes
        self._calls: set[_Call] = set()
        self._in_flight: dict[str, _Call] = {}  # id of each request at the server -> its call
        self._activity = ExitStack()

    def generate(
        self, requests: Sequence[Request], decode: Callable[[list[list[int]]], list[str]]
    ) -> Iterator[list[Sample]]:
        """Yields samples as `Engine.generate` does; `decode` returns the texts of responses."""
        call = _Call(decode)
        left = sum(request.samples for request in requests)
        with self._during(call):
            for index, request in enumerate(requests):
                for number in range(request.samples):
                    self._client.start(self._add_sample(call, index, number, request))
            while left:
                samples = self._next_samples(call)
                left -= len(samples)
                yield samples

    def _next_samples(self, call: _Call) -> list[Sample]:
        """Waits until a sample of a call has ended; returns all ended samples that were not returned yet."""
        outcomes: list[Sample | Exception] = []
        while not outcomes:
            try:
                outcomes.append(call.ended.get(timeout=_ALIVE_EVERY_S))
            except Empty:  # a response may be long; `_ask` limits its time
                if not self._client.answers(HEALTH_S):
                    continue
            heartbeat.tick()
        with suppress(Empty):
            while True:
                outcomes.append(call.ended.get_nowait())
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Sample)]

    async def _add_sample(self, call: _Call, index: int, number: int, request: Request) -> None:
        try:
            async with self._places:
                call.ended.put(await self._sample(call, index, number, request))
        except Exception as error:  # `generate` raises it in its caller's thread
            call.ended.put(error)

    async def _sample(self, call: _Call, index: int, number: int, request: Request) -> Sample:
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
            except WorkerDied:  # if the server answers, only the connection is lost
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
                    field="engine", hint="only this engine may pause the server or abort its requests",
                )  # fmt: skip
        (text,) = call.decode([drawn.tokens])
        return Sample(
            *(index, number, drawn.tokens, drawn.log_probs, reason, tuple(drawn.versions), text),
            routed_experts=drawn.experts,
        )

    def _ended(
        self, drawn: PartialSample, before: int, params: SamplingParams, end: FinishReason | None
    ) -> FinishReason | None:
        """Returns the reason why a sample ended; None means that the sample has to be continued.

        The server's reason may be wrong: an aborted request may have drawn an end token, or completed a stop text.

        Args:
            before: number of tokens that were drawn by earlier requests; a stop text may have begun in these tokens.
            end: the server's reason.
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
            body[self._dialect.ADAPTER_FIELD] = ADAPTER
        with self._lock:
            if call.is_aborted or call.is_given_up:  # `_end_at_server` may be done, and would miss this request
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
        """Registers a call while the block runs; ends the call's requests at the server afterwards."""
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
        """Aborts all requests of `calls`, which send no further requests; returns whether all ended in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                ids = [name for name, call in self._in_flight.items() if call in calls]
                are_all = len(ids) == len(self._in_flight)
            if not ids or time.monotonic() > deadline:
                return not ids
            with suppress(Refusal, SlimeError):  # a lost server has no requests
                if are_all and self._dialect.ABORTS_ALL:  # the server may also abort other calls' requests
                    self._versions.interrupt()
                self._dialect.end_requests(self._client, ids, are_all=are_all)
            time.sleep(ABORT_AGAIN_S)  # repeat: a request may have been in transit

    def abort(self) -> bool:
        """Ends all samples with the tokens drawn so far; returns whether the server ended their requests in time."""
        with self._lock:
            calls = list(self._calls)
            for call in calls:
                call.is_aborted = True
        return self._end_at_server(calls, self._call_timeout_s)

    def give_up(self) -> None:
        """Has all running calls drop their samples, before the engine ends."""
        with self._lock:
            for call in self._calls:
                call.is_given_up = True
