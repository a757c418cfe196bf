"""The embedded rollout engine: samples from a Hugging Face model in its own process, on this project's own sampler.

It loads the model's architecture and tokenizer from the folder, never its weights: those come from the trainer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from actors.engines.protocol import (
    ENGINE_TAGS,
    Engine,
    EngineInfo,
    EngineTag,
    Manifest,
    Request,
    Sample,
    TensorInfo,
    Transport,
)
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError, SyncError

if TYPE_CHECKING:  # finding an engine's class costs no torch
    from slimefsdp.sampling.sampler import Completion
    from slimefsdp.weight_sync.broadcast import BroadcastGroup

_LOOK_S = 1.0  # of a call that waits for weights


@dataclass(slots=True, eq=False)
class _Call:
    """A call of `generate` that has not ended."""

    left: int  # samples
    ended: list[tuple[int, int, Completion]] = field(default_factory=list)  # that are to be handed over
    error: BaseException | None = None


class EmbeddedEngine(Engine):
    """One engine process; a Ray actor. Its calls sample together: whichever has its turn draws a token for all."""

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__(config, index)
        import torch

        from slimefsdp.models.build import build_for_sampling
        from slimefsdp.sampling.sampler import Sampler
        from slimefsdp.training.build import lora_of
        from slimefsdp.weight_sync.packed_bucket import host_buffers
        from slimefsdp.weight_sync.receive import WeightReceiver
        from slimefsdp.weight_sync.shared_buffer import OpenedBuffers

        self._is_on_cuda = config.mesh.device != "cpu" and torch.cuda.is_available()
        self._use_one_thread()
        device = torch.device("cuda" if self._is_on_cuda else "cpu")
        dtype = getattr(torch, config.precision.compute_dtype)
        # under lora.sync=adapters the update says what they are multiplied by; nothing is drawn before
        lora = lora_of(config) if config.lora.sync == "adapters" else None
        self._policy = build_for_sampling(Path(config.model.path), dtype, device, lora)
        self._receiver = WeightReceiver(self._policy.all_parameters())
        self._sampler = Sampler(self._policy, decode=self.tokenizer.decode)
        self._changed = threading.Condition()  # holds the lock of all of the following, and of the model
        self._calls: dict[int, tuple[_Call, int]] = {}  # by number of the sampler's request: whose, and its place there
        self._num_running = 0
        self._activity = heartbeat.during("generate")  # of all that run
        self._others: deque[None] = deque()  # one for each thread that wants the lock for something else than a token
        self._group: BroadcastGroup | None = None  # that weights are broadcast in
        self._buffers = OpenedBuffers()
        self._arriving = host_buffers(1)  # what is broadcast
        self._manifest: Manifest = {}  # of the update that was begun last
        # whose frozen weights are here, by the last update that was committed, that was begun, and that is to begin
        self._frozen: str | None = None
        self._frozen_coming: str | None = None
        self._frozen_asked: str | None = None
        self._bytes: dict[Any, int] = {}  # of parameters while asleep
        heartbeat.enter(heartbeat.IDLE)

    def info(self) -> EngineInfo:
        config = self._policy.hf.config
        positions = getattr(config, "n_positions", None)  # learned ones; others have no end
        return EngineInfo(
            "embedded", config.vocab_size, self.config.precision.compute_dtype, positions, get_args(Transport)
        )

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        self._use_one_thread()
        call = _Call(sum(request.samples for request in requests))
        with self._before_the_next_token():
            if self._receiver.version is None and not self._receiver.is_receiving:
                raise StateError(
                    "the engine has no committed weights",
                    field="update_weights",
                    hint="call engines.update_from(group) first",
                )
            for place, request in enumerate(requests):
                self._calls[self._sampler.add(request.prompt, request.samples, request.params)] = (call, place)
            self._num_running += 1
            if self._num_running == 1:
                self._activity = heartbeat.during("generate")
                self._activity.__enter__()
        try:
            while call.left:
                ended = self._next(call)
                call.left -= len(ended)
                if ended:
                    yield self._samples(ended)
        finally:
            with self._before_the_next_token():
                given_up = {number for number, (owner, _) in self._calls.items() if owner is call}
                if call.left:
                    self._sampler.abort(given_up)
                for number in given_up:
                    del self._calls[number]
                self._num_running -= 1
                if self._num_running == 0:
                    self._activity.__exit__(*sys.exc_info())

    def _next(self, call: _Call) -> list[tuple[int, int, Completion]]:
        """Returns what has ended of a call since it last had a turn; draws a token for all calls where nothing has."""
        with self._changed:
            while self._others:
                self._changed.wait(_LOOK_S)
            self._wait_for_weights(call)
            if call.error is not None:
                raise call.error
            if not call.ended:
                try:
                    self._hand_out(self._sampler.step())
                except BaseException as error:  # the sampler holds nothing any more, of no call
                    for other, _ in self._calls.values():
                        other.error = error
                    raise
            ended, call.ended = call.ended, []
            return ended

    def _wait_for_weights(self, call: _Call) -> None:
        """A call goes on after an update, whether it began before or meanwhile; what was aborted need not wait."""
        deadline = time.monotonic() + self.config.cluster.sync_timeout_s
        while self._receiver.version is None and not call.ended:
            if time.monotonic() > deadline:
                raise StateError(
                    f"no weights were committed within cluster.sync_timeout_s={self.config.cluster.sync_timeout_s:g} "
                    "of the beginning of an update",
                    field="update_weights",
                    hint="call update_weights, and generate again",
                )
            heartbeat.tick()
            self._changed.wait(_LOOK_S)

    def _hand_out(self, ended: Sequence[tuple[int, int, Completion]]) -> None:
        for request, number, completion in ended:
            call, place = self._calls[request]
            call.ended.append((place, number, completion))

    def _samples(self, ended: Sequence[tuple[int, int, Completion]]) -> list[Sample]:
        texts = self.decode([completion.tokens for _, _, completion in ended])
        return [
            Sample(place, number, one.tokens, one.log_probs, one.finish_reason, one.versions, text)
            for (place, number, one), text in zip(ended, texts, strict=True)
        ]

    def abort(self) -> None:
        with self._before_the_next_token():
            self._hand_out(self._sampler.abort())

    def has_frozen(self, source: str) -> bool:
        with self._before_the_next_token():
            self._frozen_asked = source
            return self._frozen == source

    def takes_adapters(self) -> bool:
        """Whether it has adapters of its own, which updates fill: under lora.sync=adapters."""
        return self.config.lora.sync == "adapters"

    def begin(
        self, version: int, manifest: Manifest, kept: Collection[str] = (), adapter_scale: float | None = None
    ) -> None:
        from slimefsdp.models.lora import set_scale

        with self._before_the_next_token():
            if self._bytes:
                raise StateError("the engine is asleep", field="update_weights", hint="call wake_up() first")
            self._receiver.begin(version, manifest, kept)
            if adapter_scale is not None:
                set_scale(self._policy, adapter_scale)
            self._manifest = manifest
            self._frozen_coming, self._frozen_asked = self._frozen_asked, None
            if not kept:
                self._frozen = None

    def receive(self, bucket: Any) -> None:
        from actors.workers.object_store_update import unpack_bucket

        self._receiver.receive(unpack_bucket(bucket))

    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        from slimefsdp.weight_sync.broadcast import BroadcastError, BroadcastGroup

        if self._group is not None:
            self._group.close()
        self._arriving.clear()  # a broadcast of the group before that did not end may write there yet
        try:
            self._group = BroadcastGroup(address, port, rank, world_size, backend, timeout_s)
        except BroadcastError as error:
            raise _not_arrived(error) from error

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        import torch

        from slimefsdp.weight_sync.broadcast import BroadcastError
        from slimefsdp.weight_sync.packed_bucket import packed_bytes

        if self._group is None:
            raise StateError("receive_broadcast() before join()", field="update_weights", hint="call join first")
        nbytes = packed_bytes(tensors)
        if self._is_on_cuda:  # whose allocator keeps memory
            flat = torch.empty(nbytes, dtype=torch.uint8, device=next(self._policy.parameters()).device)
        else:
            flat = self._arriving.next(nbytes)[:nbytes]
        try:
            self._group.broadcast(flat)
        except BroadcastError as error:
            raise _not_arrived(error) from error
        self._take(flat, tensors, digest)

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        from slimefsdp.weight_sync.packed_bucket import packed_bytes

        try:
            data = self._buffers.get(handle)
        except OSError as error:
            raise SyncError(
                f"weights did not arrive: {error}",
                field="rollout.weight_transport",
                hint="ipc is for engines beside the trainer's first rank; set broadcast",
            ) from error
        self._take(data[: packed_bytes(tensors)], tensors, digest)
        if self._is_on_cuda:  # rank 0 writes to it again when this has returned
            import torch

            torch.cuda.synchronize()

    def receive_disk(self, path: str) -> None:
        from actors.workers.weights_folder import checked_weights, read_weights

        for named in read_weights(checked_weights(path), self._manifest):
            self._receiver.receive([named])

    def _take(self, data: Any, tensors: Sequence[TensorInfo], digest: str | None) -> None:
        from actors.workers.object_store_update import altered
        from slimefsdp.weight_sync.packed_bucket import check_digest, unpack

        try:
            check_digest(data, digest)
        except ValueError:
            raise altered(f"a bucket of {data.numel()} bytes") from None
        self._receiver.receive(unpack(data, tensors))

    def commit(self, version: int) -> None:
        with self._before_the_next_token():
            self._receiver.commit(version)
            self._frozen = self._frozen_coming
            self._sampler.take_new_weights(version)

    def sleep(self) -> None:
        from slimefsdp.distributed.memory_manager import give_back_free_memory

        self.abort()
        with self._before_the_next_token():
            self._receiver.forget()
            self._frozen = None
            self._arriving.clear()
            for _, parameter in () if self._bytes else self._policy.all_parameters():
                storage = parameter.untyped_storage()
                self._bytes[parameter] = storage.nbytes()
                storage.resize_(0)
            give_back_free_memory()

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        """Takes memory for the weights again; a cache exists only while samples are drawn."""
        if "weights" not in tags:
            return
        with self._before_the_next_token():
            for parameter, size in self._bytes.items():
                parameter.untyped_storage().resize_(size)
            self._bytes = {}

    @contextmanager
    def _before_the_next_token(self) -> Iterator[None]:
        """The lock, at the next opportunity: a thread that draws token after token would hardly ever leave it."""
        self._others.append(None)
        with self._changed:
            self._others.pop()
            try:
                yield
            finally:
                self._changed.notify_all()

    def _use_one_thread(self) -> None:
        import torch

        if not self._is_on_cuda:
            torch.set_num_threads(1)  # per thread, and Ray runs methods on threads of its own


def _not_arrived(error: Exception) -> SyncError:
    made = SyncError(
        f"weights did not arrive: {error}",
        field="update_weights",
        hint="send the update again; where the sender has ended, start it first",
    )
    made.is_of_group = True
    return made
