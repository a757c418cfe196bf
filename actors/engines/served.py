"""What engines have in common that are a Ray actor beside a rollout server, which they start or find at a URL.

The server has an environment of its own, and this process speaks to it by HTTP. Prompts and samples are token ids. New
weights come to the server by broadcast, in a group that the trainer's first rank and the server's workers form, as a
folder, or in shared memory (`TRANSPORTS` of each class); what is being sampled when they come is aborted, and what it
has so far is sent again, as part of the prompt, once they are committed. Under lora.sync=adapters the server has the
model's own weights, which are sent once, and an adapter that every request names.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from actors.engines.child_server import ChildServer
from actors.engines.protocol import (
    ENGINE_TAGS,
    Engine,
    EngineInfo,
    EngineTag,
    GroupKind,
    Manifest,
    Request,
    Sample,
    TensorInfo,
    Transport,
)
from actors.engines.served_samples import PartialSample, length_with_stop
from actors.engines.server_client import Refusal, ServerClient
from actors.engines.server_launch import ServerFacts, wait_until_ready
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, SlimeError, StateError, SyncError, WorkerDied, WorkerHung, short_repr
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.hf_weight_names import hub_parts, is_no_weight, stored_parts
from slimefsdp.models.peft_folder import MATRICES
from slimefsdp.sampling.params import FinishReason, SamplingParams

_MOST_AT_ONCE = 1024  # requests under way; servers queue what is more than they do at once
_TICK_S = 1.0
_HEALTH_S = 10.0
_ABORT_AGAIN_S = 0.1
_ALIVE_EVERY_S = 10.0  # a server is asked whether it is there, while no sample ends
_MOST_CUTS = 3  # connections that a sample may lose
_GIVE_UP_S = 10.0  # for requests to end that nobody waits for
GROUP = "the broadcast group"  # in what our end in a server says when that breaks (slimefsdp.weight_sync.broadcast)
TIED_HEAD = "lm_head.weight"


class Versions:
    """Which weights a server has, for threads that wait for some.

    Args:
        timeout_s: how long they wait for an update that has begun.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._is_updating = False
        self.committed: int | None = None  # None between two, and after an update that failed
        self.commits: list[int] = []  # all that there were
        self.interruptions = 0  # of what was sampled: by updates, and by whatever else ends all of it
        self.failures = 0  # what a server draws across one is of weights that nobody knows

    def begin(self) -> None:
        """From now on nobody samples."""
        self._set(None, is_updating=True)

    def fail(self) -> None:
        """There are no weights to sample from, and none come."""
        with self._changed:
            self.failures += 1
        self._set(None, is_updating=False)

    def interrupt(self) -> None:
        """All that is sampled ends now, and goes on."""
        with self._changed:
            self.interruptions += 1

    def commit(self, version: int) -> None:
        """All that wait go on."""
        with self._changed:
            self.commits.append(version)
        self._set(version, is_updating=False)

    def wait(self, is_over: Callable[[], bool]) -> int | None:
        """The place among `commits` of what is committed, once it is; None as soon as `is_over`.

        Raises:
            StateError: there is none and none comes, or it took too long.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not is_over():
                if self.committed is not None:
                    return len(self.commits) - 1
                if not self._is_updating:
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
                self._changed.wait(_TICK_S)
        return None

    def _set(self, committed: int | None, *, is_updating: bool) -> None:
        with self._changed:
            self.interruptions += committed is None
            self.committed, self._is_updating = committed, is_updating
            self._changed.notify_all()


class _Call:
    """One call of `generate`: its samples hand themselves in here."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[Sample | Exception] = SimpleQueue()
        self.is_aborted = False  # its samples end as they are
        self.is_given_up = False  # nobody waits for them any more


class ServedEngine(Engine):
    """See `Engine`. Its samples' log-probs are at the sampling temperature; greedy ones are at temperature 1.

    Args:
        config: of the run; rollout.engine_python starts a server, rollout.engine_urls names those that are there.
        index: of this engine.

    Raises:
        ModelError: model.path cannot be read.
    """

    NAME: ClassVar[str]
    ALIVE: ClassVar[str] = "/health"  # a route that a server answers at any time
    GENERATE: ClassVar[str]  # the route that samples
    GROUP: ClassVar[GroupKind] = "slimefsdp"
    TRANSPORTS: ClassVar[tuple[Transport, ...]]

    # ------------------------------------------------------------------ what differs from server to server

    def _start_server(self) -> tuple[ChildServer, str]:
        """A server that has just been started, and its URL."""
        raise NotImplementedError

    def _check_server(self) -> ServerFacts:
        """
        Raises:
            EngineError: the server that answers cannot be used.
        """
        raise NotImplementedError

    def _check_request(self, request: Request, most_tokens: int) -> None:
        """As `served_samples.check_request`."""
        raise NotImplementedError

    def _body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        """The JSON that asks for the rest of a sample."""
        raise NotImplementedError

    def _read(self, answer: Any, body: dict[str, Any], versions: set[int]) -> tuple[PartialSample, FinishReason | None]:
        """What was drawn, checked, and why it ended; None: by what the request did not ask for, so it is to go on."""
        raise NotImplementedError

    def _end_requests(self, ids: Sequence[str], *, are_all: bool) -> None:
        """Tells the server to abort these, which may be all that it has been asked."""
        raise NotImplementedError

    def _join(
        self, address: str, port: int, rank: int, world_size: int, backend: str, *, group_timeout_s: float
    ) -> None:
        raise NotImplementedError

    def _open_update(self) -> None:
        """Ends what is sampled, and makes the server ready for weights; one that nobody has finished may be open."""
        raise NotImplementedError

    def _take_bucket(self, tensors: Sequence[TensorInfo], **how: Any) -> None:
        """Has the server take what rank 0 broadcasts now.

        Args:
            how: `digest` of it; `buffer`, a handle of memory where it lies instead.
        """
        raise NotImplementedError

    def _take_folder(self, path: Path, *, has_weights: bool) -> None:
        """Has the server load a folder of weights, and of an adapter where `_adapter_scale` says that one comes."""
        raise NotImplementedError

    def _close_update(self, version: int) -> None:
        """Has the server sample from the new weights."""
        raise NotImplementedError

    def _server_version(self) -> str:
        """Which weights the server says it has."""
        raise NotImplementedError

    def _end_waiting(self) -> None:
        """Ends requests that wait at the server for an update that has failed."""
        raise NotImplementedError

    def _free_memory(self) -> None:
        """Has the server, which is awake and samples nothing, free its device."""
        raise NotImplementedError

    def _take_memory(self, tags: Sequence[EngineTag]) -> None:
        """Has it take memory that it had freed."""
        raise NotImplementedError

    # ------------------------------------------------------------------ who it is

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__(config, index)
        is_random = config.model.init == "random"  # the folder may have no weights, whose names and shapes we compare
        self._folder = read_model_folder(config.model.path, with_weights=not is_random)
        self._shapes = {name: entry.shape for name, entry in self._folder.tensors.items()}
        self._is_tied = bool(self._folder.config.get("tie_word_embeddings", TIED_HEAD not in self._shapes))
        self._child: ChildServer | None = None
        if config.rollout.engine_urls is not None:
            url = config.rollout.engine_urls[index]
        else:
            self._child, url = self._start_server()
        self._client = ServerClient(url, index, self._child, alive=self.ALIVE)
        self._facts: ServerFacts | None = None
        self._asking = threading.Lock()

        self._versions = Versions(config.cluster.sync_timeout_s)
        self._updating = threading.Lock()
        self._incoming: int | None = None
        self._manifest: Manifest = {}
        self._missing: set[str] = set()
        self._adapter_scale: float | None = None  # of the adapter that comes, or is there; None: of none
        # whose frozen weights are here, by the last update that was committed, that was begun, and that is to begin
        self._frozen: str | None = None
        self._frozen_coming: str | None = None
        self._frozen_asked: str | None = None
        self._asleep: frozenset[EngineTag] = frozenset()

        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, "sample")
        self._lock = threading.Lock()  # of what follows
        self._calls: set[_Call] = set()
        self._in_flight: dict[str, _Call] = {}  # by request id, what the server has been asked
        self._activity = ExitStack()

    def health(self) -> None:
        """As `Engine`: whether the server answers."""
        try:
            self._client.get(self.ALIVE, timeout_s=_HEALTH_S)
        except Refusal as refusal:  # its engine has ended, and it does so itself
            raise self._client.lost(str(refusal)) from refusal

    def info(self) -> EngineInfo:
        """As `Engine`; waits for a server that was started here, and asks it what it is.

        Raises:
            EngineError: it ended, nobody is there, or it cannot be used. WorkerHung: it takes too long.
        """
        facts = self._known()
        heartbeat.enter(heartbeat.IDLE)
        return EngineInfo(
            f"{self.NAME.lower()} {facts.version}", facts.vocab_size, facts.dtype, facts.max_model_len, self.TRANSPORTS,
            facts.workers, self.GROUP,
        )  # fmt: skip

    def _known(self) -> ServerFacts:
        with self._asking:
            if self._facts is None:
                wait_until_ready(self.NAME, self._client, self._child, self.config, self.index)
                try:
                    self._facts = self._check_server()
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                    raise EngineError(
                        f"the server at {self._client.url} does not answer as {self.NAME} does: "
                        f"{type(error).__name__}: {short_repr(str(error))}",
                        field="rollout.engine_urls", hint="name one of a supported release (docs/engines.md)",
                    ) from error  # fmt: skip
            return self._facts

    # ------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """As `Engine`.

        Raises:
            StateError, EngineError: as `Engine`. BatchError: a request that no server could do.
            WorkerDied, WorkerHung: the server ended, or did not answer within cluster.call_timeout_s.
        """
        facts = self._known()
        self._require_awake(ENGINE_TAGS)
        for request in requests:
            self._check_request(request, facts.max_model_len)
        call = _Call()
        left = sum(request.samples for request in requests)
        with self._during(call):
            self._versions.wait(lambda: call.is_aborted)
            for place, request in enumerate(requests):
                for number in range(request.samples):
                    self._threads.submit(self._hand_in, call, place, number, request)
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
                if not self._client.answers(_HEALTH_S):
                    continue
            heartbeat.tick()
        with suppress(Empty):
            while True:
                found.append(call.ended.get_nowait())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [one for one in found if isinstance(one, Sample)]

    def _hand_in(self, call: _Call, place: int, number: int, request: Request) -> None:
        try:
            call.ended.put(self._sample(call, place, number, request))
        except Exception as error:  # raised where somebody waits
            call.ended.put(error)

    def _sample(self, call: _Call, place: int, number: int, request: Request) -> Sample:
        drawn, params = PartialSample(), request.params
        reason: FinishReason = "abort"
        cuts = 0
        while not call.is_aborted and not call.is_given_up:
            interruptions, failures, before = self._versions.interruptions, self._versions.failures, len(drawn.tokens)
            since = self._versions.wait(lambda: call.is_aborted or call.is_given_up)
            if since is None:
                break
            try:
                piece, end = self._ask(call, request, number, drawn, since)
            except WorkerDied:  # of the connection alone, where the server is there
                cuts += 1
                if cuts > _MOST_CUTS or not self._client.answers(_HEALTH_S):
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
        (text,) = self.decode([drawn.tokens])
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
            length = length_with_stop(drawn.tokens, before, params, self.tokenizer.decode)
            if length is not None:
                drawn.cut(length)
                return "stop"
        if drawn.tokens and drawn.tokens[-1] in params.end_token_ids:
            return "stop"
        return "length" if len(drawn.tokens) == params.max_new_tokens and end != "stop" else end

    def _ask(
        self, call: _Call, request: Request, number: int, drawn: PartialSample, since: int
    ) -> tuple[PartialSample, FinishReason | None]:
        name = f"slimefsdp-{uuid.uuid4().hex}"
        body = self._body(request, number, drawn, name)
        with self._lock:
            if call.is_aborted or call.is_given_up:  # who ends what it asked the server may be done already
                return PartialSample(), "abort"
            self._in_flight[name] = call
        try:
            answer = self._client.post(self.GENERATE, body, timeout_s=self.config.cluster.call_timeout_s)
        except Refusal as refusal:
            if refusal.status >= 500 and self._client.has_ended():
                raise self._client.lost(str(refusal)) from refusal
            raise EngineError(
                f"the server refused a request: {refusal}", field="engine", hint="look at its log"
            ) from refusal
        finally:
            with self._lock:
                del self._in_flight[name]
        # it may have waited at the server during updates, and that has gone on before the last one is known to be whole
        incoming = self._incoming
        known = {*self._versions.commits[since:], *([] if incoming is None else [incoming])}
        return self._read(answer, body, known)

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
            self._end_at_server([call], _GIVE_UP_S)
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
                self._end_requests(ids, are_all=are_all)
            time.sleep(_ABORT_AGAIN_S)  # again: a request may have been on its way

    def abort(self) -> None:
        """As `Engine`; returns when the server has been told.

        Raises:
            WorkerHung: samples did not end within cluster.call_timeout_s.
        """
        with self._lock:
            calls = list(self._calls)
            for call in calls:
                call.is_aborted = True
        if not self._end_at_server(calls, self.config.cluster.call_timeout_s):
            raise WorkerHung(
                f"samples of engine {self.index} did not end within cluster.call_timeout_s",
                field="cluster.call_timeout_s", hint="start the server again", rank=self.index,
            )  # fmt: skip

    # ------------------------------------------------------------------ weights

    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        """As `Engine`."""
        self._known()
        self._join(address, port, rank, world_size, backend, group_timeout_s=timeout_s)

    def takes_adapters(self) -> bool:
        """Whether its server has room for an adapter: under lora.sync=adapters."""
        return self.config.lora.sync == "adapters"

    def has_frozen(self, source: str) -> bool:
        """As `Engine`: only beside an adapter, since servers fuse what is frozen with what is not."""
        with self._updating:
            self._frozen_asked = source if self.takes_adapters() else None
            committed = self._versions.committed
            if committed is None or self._frozen is None or self._frozen != self._frozen_asked:
                return False
            return self._server_version() == str(committed)  # else it was started anew

    def begin(
        self, version: int, manifest: Manifest, kept: Collection[str] = (), adapter_scale: float | None = None
    ) -> None:
        """As `Engine`; what is being sampled goes on after `commit`."""
        with self._updating:
            self._known()
            self._require_awake(("weights",))
            self._check_manifest(manifest)
            self._incoming, self._manifest, self._missing = version, dict(manifest), set(manifest) - set(kept)
            self._adapter_scale = adapter_scale
            self._frozen_coming, self._frozen_asked = self._frozen_asked, None
            self._versions.begin()
            with self._or_fail():
                self._open_update()

    def receive(self, bucket: Any) -> None:
        """Refuses: no server reads from Ray's object store."""
        raise SyncError(
            f"{self.NAME} takes weights by {' or '.join(self.TRANSPORTS)}, not from the object store",
            field="rollout.engine", hint="send them as EngineInfo.transports says",
        )  # fmt: skip

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """As `Engine`.

        Raises:
            StateError: no update was begun. SyncError: a tensor that was not announced, or what went wrong on the way.
        """
        self._receive(tensors, "receive_broadcast", digest=digest)

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """As `Engine`, and `receive_broadcast`."""
        self._receive(tensors, "receive_ipc", digest=digest, buffer=handle)

    def receive_disk(self, path: str) -> None:
        """As `Engine`, and `receive_broadcast`."""
        from actors.workers.weights_folder import checked_adapter, checked_weights

        self._require_begun("receive_disk")
        with self._updating, self._or_fail():
            there: set[str] = set()
            if has_weights := any(not name.endswith(MATRICES) for name in self._missing):
                there |= checked_weights(path).tensors.keys()
            if self._adapter_scale is not None:
                there |= checked_adapter(path)
            kind = self._folder.model_type
            self._take_folder(Path(path), has_weights=has_weights)
            self._missing = {
                name
                for name in self._missing
                if not all(part.name in there for part in hub_parts(kind, name, self._manifest[name]))
            }

    def _require_begun(self, name: str) -> None:
        if self._incoming is None:
            raise StateError(f"{name}() before begin()", field="update_weights", hint="call begin(version, manifest)")

    def _receive(self, tensors: Sequence[TensorInfo], name: str, **how: Any) -> None:
        self._require_begun(name)
        tensors = [TensorInfo(*tensor) for tensor in tensors]  # plain tuples will do
        with self._updating, self._or_fail():
            for name, _, shape in tensors:
                if self._manifest.get(name) != tuple(shape):
                    raise SyncError(
                        f"tensor {name!r} came as {tuple(shape)}, announced was {self._manifest.get(name)}",
                        field="update_weights", hint="send the tensors of the manifest",
                    )  # fmt: skip
            self._take_bucket(tensors, **how)
            self._missing -= {tensor.name for tensor in tensors}
            heartbeat.tick()

    def commit(self, version: int) -> None:
        """As `slimefsdp.weight_sync.receive.Receiver`."""
        if self._incoming != version or self._missing:
            missing = f"{len(self._missing)} tensors missing, e.g. {min(self._missing)!r}" if self._missing else ""
            raise SyncError(
                f"cannot commit version {version}: begun was {self._incoming}" + (f", {missing}" if missing else ""),
                field="update_weights",
                hint="send the whole update again",
            )
        with self._updating, self._or_fail():
            self._close_update(version)
            found = self._server_version()
            if found != str(version):
                raise SyncError(
                    f"the server has weights {found!r} after version {version} was committed",
                    field="update_weights", hint="let nobody else update this server",
                )  # fmt: skip
            self._frozen = self._frozen_coming
            self._versions.commit(version)
            self._incoming = None  # last: one of the two knows the version at any time

    def _check_manifest(self, manifest: Manifest) -> None:
        """Whether these are the tensors of model.path, which is what the server has loaded the architecture of."""
        kind, seen = self._folder.model_type, set()
        for name in sorted(name for name in manifest if name.endswith(MATRICES)):
            if not name.endswith(tuple(f".{end}" for end in MATRICES)):
                raise SyncError(
                    f"{name} is of an adapter of experts, which {self.NAME} is not sent", field="lora.targets",
                    hint="leave experts out, or set lora.sync=merged",
                )  # fmt: skip
        if not self._shapes:
            return
        for name, shape in sorted(manifest.items()):
            if (name == TIED_HEAD and self._is_tied) or name.endswith(MATRICES):
                continue
            for part in stored_parts(kind, name, shape, self._shapes):
                if self._shapes.get(part.name) != part.shape:
                    raise _other_model(name, shape, self._shapes.get(part.name))
                seen.add(part.name)
        unsent = sorted(name for name in self._shapes.keys() - seen if not is_no_weight(kind, name))
        for name in unsent:
            if not (name == TIED_HEAD and self._is_tied):
                raise _other_model(name, None, self._shapes[name])

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """What goes wrong inside leaves no weights, and ends what waits for them."""
        try:
            yield
        except BaseException:
            self._incoming = self._frozen = None
            self._versions.fail()
            with suppress(Refusal, SlimeError):
                self._end_waiting()
            raise

    def _is_of_group(self, route: str, refusal: Refusal) -> bool:
        """Whether a server refused because the broadcast group broke, or did not form: for all it knows, by others."""
        return GROUP in str(refusal)

    @property
    def _sync_timeout_s(self) -> float:
        return self.config.cluster.sync_timeout_s

    def _update(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        return self._synced(route, lambda limit_s: self._client.post(route, body, timeout_s=limit_s), timeout_s)

    def _told(self, route: str, body: Any = None) -> None:
        """`_update`, where the answer is a text for people."""
        self._synced(route, lambda limit_s: self._client.tell(route, body, timeout_s=limit_s), None)

    def _asked(self, route: str) -> Any:
        return self._synced(route, lambda limit_s: self._client.get(route, timeout_s=limit_s), None)

    def _synced(self, route: str, ask: Callable[[float], Any], timeout_s: float | None) -> Any:
        """The answer of one of the server's routes for weights.

        Raises:
            SyncError: it refused, or did not answer in time. WorkerDied: it is gone.
        """
        limit_s = self._sync_timeout_s if timeout_s is None else timeout_s
        try:
            return ask(limit_s)
        except Refusal as refusal:
            if refusal.status >= 500 and self._child is not None and self._child.ends_within(0.5):
                raise self._client.lost(str(refusal)) from refusal
            error = SyncError(
                f"weights did not arrive at engine {self.index}: {refusal}",
                field="update_weights", hint="send the whole update again",
            )  # fmt: skip
            error.is_of_group = self._is_of_group(route, refusal)
            raise error from refusal
        except WorkerHung as error:
            raise SyncError(
                f"weights did not arrive: engine {self.index} has not answered {route} within {limit_s:g} s",
                field="cluster.sync_timeout_s", hint="start the server again, or raise cluster.sync_timeout_s",
            ) from error  # fmt: skip

    # ------------------------------------------------------------------ its life

    def sleep(self) -> None:
        """As `Engine`; what that frees on which server, docs/engines.md says.

        Raises:
            SyncError: the server refused. WorkerDied, WorkerHung: it is gone, or samples did not end.
        """
        if self._asleep == set(ENGINE_TAGS):
            return
        self.abort()
        with self._updating:
            self._incoming = self._frozen = None
            self._versions.fail()
            if self._asleep:  # servers free all that they hold, or nothing
                self._take_memory(_in_order(self._asleep))
            self._free_memory()
            self._asleep = frozenset(ENGINE_TAGS)

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        """As `Engine`.

        Raises:
            SyncError: the server refused. WorkerDied: it is gone.
        """
        with self._updating:
            taken = self._asleep & set(tags)
            if taken:
                self._take_memory(_in_order(taken))
                self._asleep -= taken

    def _require_awake(self, tags: Sequence[EngineTag]) -> None:
        if asleep := _in_order(self._asleep & set(tags)):
            raise StateError(
                f"engine {self.index} is asleep: {', '.join(asleep)}", field="update_weights",
                hint="call wake_up(), and update_weights for the weights that it lost",
            )  # fmt: skip

    def stop(self) -> None:
        """Ends a server that was started here; idempotent. One at a URL goes on."""
        self._versions.fail()
        with self._lock:
            for call in self._calls:
                call.is_given_up = True
        if self._child is not None:
            self._child.end()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _in_order(tags: Collection[EngineTag]) -> list[EngineTag]:
    return [tag for tag in ENGINE_TAGS if tag in tags]


def _other_model(name: str, sent: Any, here: Any) -> SyncError:
    return SyncError(
        f"tensor {name!r} is {sent} at the sender and {here} here",
        field="update_weights",
        hint="sender and receiver must load the same architecture",
    )
