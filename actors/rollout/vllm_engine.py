"""The vLLM engine: a Ray actor beside a server of vLLM, which it starts or finds at a URL, and speaks to by HTTP.

The server has an environment of its own, and this process never imports vLLM. Prompts and samples are token ids. New
weights come to the server in a broadcast group that the trainer's first rank and the server's workers form; what is
being sampled when they come is aborted, and what it has so far is sent again, as part of the prompt, once they are
committed.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from actors.rollout.child_server import ChildServer
from actors.rollout.protocol import Engine, EngineInfo, Manifest, Request, Sample, TensorInfo
from actors.rollout.vllm_client import Refusal, VllmClient
from actors.rollout.vllm_facts import ServerFacts, check_server, wait_until_ready
from actors.rollout.vllm_launch import start_server
from actors.rollout.vllm_samples import Drawn, body_of, check_request, length_with_stop, read_answer
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, SlimeError, StateError, SyncError, WorkerHung
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.hf_weight_names import hub_parts, is_no_weight, stored_parts
from slimefsdp.sampling.params import FinishReason

_MOST_AT_ONCE = 1024  # requests under way; vLLM itself queues what is more than its --max-num-seqs
_TICK_S = 1.0
_ABORT_AGAIN_S = 0.1
_HEALTH_S = 10.0
_TIED_HEAD = "lm_head.weight"


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
        self.updates = 0  # that have begun

    def begin(self) -> None:
        """From now on nobody samples."""
        self._set(None, is_updating=True)

    def fail(self) -> None:
        """There are no weights to sample from, and none come."""
        self._set(None, is_updating=False)

    def commit(self, version: int) -> None:
        """All that wait go on."""
        self._set(version, is_updating=False)

    def wait(self, is_over: Callable[[], bool]) -> int | None:
        """The version that is committed, once it is; None as soon as `is_over`.

        Raises:
            StateError: there is none and none comes, or it took too long.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not is_over():
                if self.committed is not None:
                    return self.committed
                if not self._is_updating:
                    raise StateError(
                        "the engine has no committed weights", field="update_weights", hint="call update_weights first"
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
            self.updates += is_updating
            self.committed, self._is_updating = committed, is_updating
            self._changed.notify_all()


class _Call:
    """One call of `generate`: its samples hand themselves in here."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[Sample | Exception] = SimpleQueue()
        self.is_aborted = False  # its samples end as they are
        self.is_given_up = False  # nobody waits for them any more


class VllmEngine(Engine):
    """See `Engine`. Its samples' log-probs are at the sampling temperature; greedy ones are at temperature 1.

    Args:
        config: of the run; rollout.engine_python starts a server, rollout.engine_urls names those that are there.
        index: of this engine.

    Raises:
        ModelError: model.path cannot be read.
    """

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__(config, index)
        self._folder = read_model_folder(config.model.path)
        self._shapes = {name: entry.shape for name, entry in self._folder.tensors.items()}
        self._is_tied = bool(self._folder.config.get("tie_word_embeddings", _TIED_HEAD not in self._shapes))
        self._child: ChildServer | None = None
        if config.rollout.engine_urls is not None:
            url = config.rollout.engine_urls[index]
        else:
            self._child, url = start_server(config, self._folder, index)
        self._client = VllmClient(url, index, self._child)
        self._facts: ServerFacts | None = None
        self._asking = threading.Lock()

        self._versions = Versions(config.cluster.sync_timeout_s)
        self._updating = threading.Lock()
        self._incoming: int | None = None
        self._manifest: Manifest = {}
        self._missing: set[str] = set()

        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, "sample")
        self._lock = threading.Lock()  # of what follows
        self._calls: set[_Call] = set()
        self._in_flight: dict[str, _Call] = {}  # by request id, what the server has been asked
        self._activity = ExitStack()

    # ------------------------------------------------------------------ who it is

    def info(self) -> EngineInfo:
        """As `Engine`; waits for a server that was started here, and asks it what it is.

        Raises:
            EngineError: it ended, nobody is there, or it cannot be used. WorkerHung: it takes too long.
        """
        facts = self._known()
        heartbeat.enter(heartbeat.IDLE)
        name, transports = f"vllm {facts.version}", ("broadcast",)
        return EngineInfo(name, facts.vocab_size, facts.dtype, facts.max_model_len, transports, facts.workers)  # type: ignore[arg-type]

    def _known(self) -> ServerFacts:
        with self._asking:
            if self._facts is None:
                wait_until_ready(self._client, self._child, self.config, self.index)
                self._facts = check_server(self._client, self.config, self._folder)
            return self._facts

    def health(self) -> None:
        """As `Engine`: whether the server answers."""
        try:
            self._client.get("/health", timeout_s=_HEALTH_S)
        except Refusal as refusal:  # its engine has ended, and it does so itself
            raise self._client.lost(str(refusal)) from refusal

    # ------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """As `Engine`.

        Raises:
            StateError, EngineError: as `Engine`. BatchError: a request that no server could do.
            WorkerDied, WorkerHung: the server ended, or did not answer within cluster.call_timeout_s.
        """
        facts = self._known()
        for request in requests:
            check_request(request, facts.max_model_len)
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
        found = [call.ended.get()]
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
        drawn, params = Drawn(), request.params
        reason: FinishReason = "abort"
        while not call.is_aborted and not call.is_given_up:
            updates, before = self._versions.updates, len(drawn.tokens)
            version = self._versions.wait(lambda: call.is_aborted or call.is_given_up)
            if version is None:
                break
            piece, reason = self._ask(call, request, number, drawn, version)
            drawn.add(piece)
            if before and params.stop:
                length = length_with_stop(drawn.tokens, before, params, lambda tokens: self.decode([tokens])[0])
                if length is not None:
                    drawn.cut(length)
                    reason = "stop"
            if reason != "abort":
                break
            if not (call.is_aborted or call.is_given_up) and self._versions.updates == updates:
                raise EngineError(
                    "the server aborted a request that this engine did not abort",
                    field="engine", hint="let nobody else pause or abort what this server does",
                )  # fmt: skip
        (text,) = self.decode([drawn.tokens])
        return Sample(place, number, drawn.tokens, drawn.log_probs, reason, tuple(drawn.versions), text)

    def _ask(
        self, call: _Call, request: Request, number: int, drawn: Drawn, version: int
    ) -> tuple[Drawn, FinishReason]:
        body = body_of(request, number, drawn, f"slimefsdp-{uuid.uuid4().hex}")
        with self._lock:
            self._in_flight[body["request_id"]] = call
        try:
            answer = self._client.post("/inference/v1/generate", body, timeout_s=self.config.cluster.call_timeout_s)
        except Refusal as refusal:
            if refusal.status >= 500 and self._client.has_ended():
                raise self._client.lost(str(refusal)) from refusal
            raise EngineError(
                f"the server refused a request: {refusal}", field="engine", hint="look at its log"
            ) from refusal
        finally:
            with self._lock:
                del self._in_flight[body["request_id"]]
        facts = self._known()
        now = self._versions.committed
        versions = {version} if now is None else {version, now}  # it may have waited at the server during an update
        return read_answer(answer, body, vocab_size=facts.vocab_size, versions=versions)

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
            call.is_given_up = True
            self._abort_at_server(call)
            with self._lock:
                self._calls.remove(call)
                if not self._calls:
                    self._activity.close()

    def _abort_at_server(self, call: _Call) -> None:
        with self._lock:
            ids = [f"generate-tokens-{one}" for one, asker in self._in_flight.items() if asker is call]
        if ids:
            with suppress(Refusal, SlimeError):  # a server that is gone has aborted them
                self._client.post("/inference/v1/abort_requests", {"request_ids": ids}, timeout_s=60.0)

    def abort(self) -> None:
        """As `Engine`; returns when the server has been told.

        Raises:
            WorkerHung: samples did not end within cluster.call_timeout_s.
        """
        with self._lock:
            calls = list(self._calls)
            for call in calls:
                call.is_aborted = True
        deadline = time.monotonic() + self.config.cluster.call_timeout_s
        while True:
            with self._lock:
                left = {call for call in self._in_flight.values() if call in calls}
            if not left:
                return
            for call in left:  # again: a request may have been on its way
                self._abort_at_server(call)
            if time.monotonic() > deadline:
                raise WorkerHung(
                    f"samples of engine {self.index} did not end within cluster.call_timeout_s",
                    field="cluster.call_timeout_s", hint="start the server again", rank=self.index,
                )  # fmt: skip
            time.sleep(_ABORT_AGAIN_S)

    # ------------------------------------------------------------------ weights

    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        """As `Engine`."""
        self._known()
        info = {
            "address": address,
            "port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "backend": backend,
            "timeout_s": timeout_s,
        }
        # the server's workers give up by themselves, and look for rank 0 a second time before
        self._update("/init_weight_transfer_engine", {"init_info": info}, timeout_s=3 * timeout_s + 30)

    def begin(self, version: int, manifest: Manifest) -> None:
        """As `slimefsdp.weight_sync.receive.Receiver`; what is being sampled goes on after `commit`."""
        with self._updating:
            self._known()
            self._check_manifest(manifest)
            self._incoming, self._manifest, self._missing = version, dict(manifest), set(manifest)
            self._versions.begin()
            with self._or_fail():
                self._update("/pause?mode=abort&clear_cache=true")
                try:
                    self._client.post("/start_weight_update", timeout_s=self._sync_timeout_s)
                except Refusal:  # one that nobody has finished is open
                    with suppress(Refusal):
                        self._client.post("/finish_weight_update", timeout_s=self._sync_timeout_s)
                    self._update("/start_weight_update")

    def receive(self, bucket: Any) -> None:
        """Refuses: this engine takes weights by broadcast alone."""
        raise SyncError(
            "vLLM takes weights by broadcast alone, not from the object store",
            field="rollout.engine", hint="send them by broadcast, as EngineInfo.transports says",
        )  # fmt: skip

    def receive_broadcast(self, tensors: Sequence[TensorInfo]) -> None:
        """As `Engine`.

        Raises:
            StateError: no update was begun. SyncError: a tensor that was not announced, or what went wrong on the way.
        """
        if self._incoming is None:
            raise StateError(
                "receive_broadcast() before begin()", field="update_weights", hint="call begin(version, manifest)"
            )
        tensors = [TensorInfo(*tensor) for tensor in tensors]  # plain tuples will do
        with self._updating, self._or_fail():
            for name, _, shape in tensors:
                if self._manifest.get(name) != tuple(shape):
                    raise SyncError(
                        f"tensor {name!r} came as {tuple(shape)}, announced was {self._manifest.get(name)}",
                        field="update_weights", hint="send the tensors of the manifest",
                    )  # fmt: skip
            info = {
                "names": [tensor.name for tensor in tensors],
                "dtypes": [tensor.dtype for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
                "parts": [self._parts(tensor) for tensor in tensors],
            }
            self._update("/update_weights", {"update_info": info})
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
            self._update("/finish_weight_update", {"weight_version": str(version)})
            self._update("/reset_prefix_cache")
            self._update("/resume")
            found = self._asked("/weight_info")
            if found.get("weight_version") != str(version):
                raise SyncError(
                    f"the server has weights {found.get('weight_version')!r} after version {version} was committed",
                    field="update_weights", hint="let nobody else update this server",
                )  # fmt: skip
            self._incoming = None
            self._versions.commit(version)

    def _check_manifest(self, manifest: Manifest) -> None:
        """Whether these are the tensors of model.path, which is what the server has loaded the architecture of."""
        kind, seen = self._folder.model_type, set()
        for name, shape in sorted(manifest.items()):
            if name == _TIED_HEAD and self._is_tied:
                continue
            for part in stored_parts(kind, name, shape, self._shapes):
                if self._shapes.get(part.name) != part.shape:
                    raise _other_model(name, shape, self._shapes.get(part.name))
                seen.add(part.name)
        unsent = sorted(name for name in self._shapes.keys() - seen if not is_no_weight(kind, name))
        for name in unsent:
            if not (name == _TIED_HEAD and self._is_tied):
                raise _other_model(name, None, self._shapes[name])

    def _parts(self, tensor: TensorInfo) -> list[tuple[str, int | None, int, int]]:
        """As slimefsdp.weight_sync.vllm_plugin.UpdateInfo; a head that is the embedding has none."""
        if tensor.name == _TIED_HEAD and self._is_tied:
            return []
        parts = hub_parts(self._folder.model_type, tensor.name, tensor.shape)
        return [(part.name, part.expert, part.start, part.end) for part in parts]

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """What goes wrong inside leaves no weights, and ends what waits for them."""
        try:
            yield
        except BaseException:
            self._incoming = None
            self._versions.fail()
            # a request that came to the server while it was paused would wait there
            with suppress(Refusal, SlimeError):
                self._client.post("/abort_requests", {}, timeout_s=10.0)
            raise

    @property
    def _sync_timeout_s(self) -> float:
        return self.config.cluster.sync_timeout_s

    def _update(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        return self._synced(route, lambda limit_s: self._client.post(route, body, timeout_s=limit_s), timeout_s)

    def _asked(self, route: str) -> Any:
        return self._synced(route, lambda limit_s: self._client.get(route, timeout_s=limit_s), None)

    def _synced(self, route: str, ask: Callable[[float], Any], timeout_s: float | None) -> Any:
        """The answer of one of vLLM's routes for weights.

        Raises:
            SyncError: it refused, or did not answer in time. WorkerDied: it is gone.
        """
        limit_s = self._sync_timeout_s if timeout_s is None else timeout_s
        try:
            return ask(limit_s)
        except Refusal as refusal:
            if refusal.status >= 500 and self._child is not None and self._child.ends_within(0.5):
                raise self._client.lost(str(refusal)) from refusal
            raise SyncError(
                f"weights did not arrive at engine {self.index}: {refusal}",
                field="update_weights", hint="send the whole update again",
            ) from refusal  # fmt: skip
        except WorkerHung as error:
            raise SyncError(
                f"weights did not arrive: engine {self.index} has not answered {route} within {limit_s:g} s",
                field="cluster.sync_timeout_s", hint="start the server again, or raise cluster.sync_timeout_s",
            ) from error  # fmt: skip

    # ------------------------------------------------------------------ its life

    def sleep(self) -> None:
        """As `Engine`; only a server on GPUs that was started with --enable-sleep-mode gives its memory back."""
        self.abort()
        self._versions.fail()
        self._synced("/sleep", lambda limit_s: self._client.post("/sleep?level=2", timeout_s=limit_s), None)

    def wake_up(self) -> None:
        """As `Engine`."""
        self._synced("/wake_up", lambda limit_s: self._client.post("/wake_up", timeout_s=limit_s), None)

    def stop(self) -> None:
        """Ends a server that was started here; idempotent. One at a URL goes on."""
        self._versions.fail()
        with self._lock:
            for call in self._calls:
                call.is_given_up = True
        if self._child is not None:
            self._child.end()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _other_model(name: str, sent: Any, here: Any) -> SyncError:
    return SyncError(
        f"tensor {name!r} is {sent} at the sender and {here} here",
        field="update_weights",
        hint="sender and receiver must load the same architecture",
    )
