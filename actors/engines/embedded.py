"""Provides the embedded rollout engine, which samples a Hugging Face model in its own process with our sampler.

The engine loads the model's architecture and tokenizer from model.path; the weights come from the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
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
from actors.engines.sampling_thread import SamplingThread, use_one_thread
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError, SyncError

if TYPE_CHECKING:  # importing this file does not import torch
    from slimefsdp.sampling.params import SampledTokens
    from slimefsdp.weight_sync.broadcast import BroadcastGroup, Rendezvous

_LOOK_S = 1.0  # interval of checks while a call waits


@dataclass(slots=True, eq=False)
class _Call:
    left: int  # number of samples that were not yielded yet
    ended: SimpleQueue[tuple[int, int, SampledTokens] | Exception] = field(default_factory=SimpleQueue)
    """(index of the request, number, sample) of each sample that has ended."""


class EmbeddedEngine(Engine):
    """Samples in this actor's process; one thread draws the tokens of all calls of `generate` together."""

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__(config, index)
        import torch

        from slimefsdp.models.build import build_for_sampling
        from slimefsdp.sampling.sampler import Sampler
        from slimefsdp.training.build import lora_of
        from slimefsdp.weight_sync.buckets import OpenedBuffers, host_buffers
        from slimefsdp.weight_sync.receive import WeightReceiver

        self._is_on_cuda = config.mesh.device != "cpu" and torch.cuda.is_available()
        if not self._is_on_cuda:
            use_one_thread()
        device = torch.device("cuda" if self._is_on_cuda else "cpu")
        dtype = getattr(torch, config.precision.compute_dtype)
        # with lora.sync=adapters, each update sets the scale of the adapters
        lora = lora_of(config) if config.lora.sync == "adapters" else None
        self._policy = build_for_sampling(Path(config.model.path), dtype, device, lora)
        self._receiver = WeightReceiver(self._policy.all_parameters())
        replays = config.loss.routing_replay == "rollout"
        self._sampler = Sampler(self._policy, decode=self.tokenizer.decode, records_experts=replays)
        # the sampler's number of a request -> the request's call, and its index in that call
        self._calls: dict[int, tuple[_Call, int]] = {}
        self._group: BroadcastGroup | None = None
        self._buffers = OpenedBuffers()
        self._arriving = host_buffers(1)  # a buffer into which broadcasts are received
        self._bytes: dict[Any, int] = {}  # parameter -> bytes of its storage, while the engine sleeps
        self._thread = SamplingThread(
            self._step, lambda: self._sampler.is_idle or self._receiver.version is None,
            activity="generate", is_on_cpu=not self._is_on_cuda,
        )  # fmt: skip

    def info(self) -> EngineInfo:
        config = self._policy.hf.config
        positions = getattr(config, "n_positions", None)  # models without learned positions have no limit
        return EngineInfo(
            "embedded", config.vocab_size, self.config.precision.compute_dtype, positions, get_args(Transport)
        )

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        call = _Call(sum(request.samples for request in requests))

        def add() -> None:
            if self._receiver.version is None and self._receiver.incoming is None:
                hint = "call engines.update_from(group) first"
                raise StateError("the engine has no committed weights", field="update_weights", hint=hint)
            for index, request in enumerate(requests):
                self._calls[self._sampler.add(request.prompt, request.samples, request.params)] = (call, index)

        def give_up() -> None:
            numbers = {number for number, (owner, _) in self._calls.items() if owner is call}
            if call.left:
                self._sampler.abort(numbers)
            for number in numbers:
                del self._calls[number]

        self._between_tokens(add)
        try:
            while call.left:
                ended = self._next(call)
                call.left -= len(ended)
                yield self._samples(ended)
        finally:
            self._between_tokens(give_up)

    def _next(self, call: _Call) -> list[tuple[int, int, SampledTokens]]:
        """Waits until a sample of a call has ended; returns all ended samples that were not returned yet."""
        outcomes = [self._first(call)]
        with suppress(Empty):
            while True:
                outcomes.append(call.ended.get_nowait())
        ended = []
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            ended.append(outcome)
        return ended

    def _first(self, call: _Call) -> tuple[int, int, SampledTokens] | Exception:
        """Waits for a sample; raises a StateError after cluster.sync_timeout_s without committed weights."""
        since = time.monotonic()  # the last time at which the engine had committed weights
        while True:
            with suppress(Empty):
                return call.ended.get(timeout=_LOOK_S)
            if self._receiver.version is not None:
                since = time.monotonic()
            elif time.monotonic() - since > self.config.cluster.sync_timeout_s:
                limit = f"cluster.sync_timeout_s={self.config.cluster.sync_timeout_s:g}"
                problem = f"no weights were committed within {limit} of the beginning of an update"
                raise StateError(problem, field="update_weights", hint="call update_weights, and generate again")

    def _step(self) -> None:
        """Draws a token for all calls; runs in the sampling thread."""
        try:
            self._hand_out(self._sampler.step())
        except Exception as error:  # the sampler has dropped the samples of all calls
            for call in {id(call): call for call, _ in self._calls.values()}.values():
                call.ended.put(error)

    def _hand_out(self, ended: Sequence[tuple[int, int, SampledTokens]]) -> None:
        for request, number, sample in ended:
            call, index = self._calls[request]
            call.ended.put((index, number, sample))

    def _samples(self, ended: Sequence[tuple[int, int, SampledTokens]]) -> list[Sample]:
        texts = self.decode([sample.tokens for _, _, sample in ended])
        return [
            Sample(
                *(index, number, sample.tokens, sample.log_probs, sample.finish_reason, sample.versions, text),
                routed_experts=sample.routed_experts,
            )
            for (index, number, sample), text in zip(ended, texts, strict=True)
        ]

    def abort(self) -> None:
        self._between_tokens(lambda: self._hand_out(self._sampler.abort()))

    def has_frozen(self, source: str) -> bool:
        return self._receiver.has_frozen(source)

    def takes_adapters(self) -> bool:
        """Returns whether updates may send adapters, which the engine then keeps separate from the weights."""
        return self.config.lora.sync == "adapters"

    def begin(
        self, version: int, manifest: Manifest, kept: Collection[str] = (), adapter_scale: float | None = None
    ) -> None:
        from slimefsdp.models.lora import set_scale

        def begin() -> None:
            if self._bytes:
                raise StateError("the engine is asleep", field="update_weights", hint="call wake_up() first")
            self._receiver.begin(version, manifest, kept)
            if adapter_scale is not None:
                set_scale(self._policy, adapter_scale)

        self._between_tokens(begin)

    def receive(self, bucket: Any) -> None:
        from actors.workers.weight_update import unpack_bucket

        self._receiver.receive(unpack_bucket(bucket))

    def join(self, meeting: Rendezvous) -> None:
        from slimefsdp.weight_sync.broadcast import BroadcastError, BroadcastGroup

        if self._group is not None:
            self._group.close()
        self._arriving.clear()  # an unfinished broadcast of the previous group may still write to it
        try:
            self._group = BroadcastGroup(*meeting)
        except BroadcastError as error:
            raise _not_arrived(error) from error

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        import torch

        from slimefsdp.weight_sync.broadcast import BroadcastError
        from slimefsdp.weight_sync.buckets import packed_bytes

        if self._group is None:
            raise StateError("receive_broadcast() before join()", field="update_weights", hint="call join first")
        nbytes = packed_bytes(tensors)
        if self._is_on_cuda:  # torch caches device memory, so no buffer has to be kept
            flat = torch.empty(nbytes, dtype=torch.uint8, device=next(self._policy.parameters()).device)
        else:
            flat = self._arriving.next(nbytes)[:nbytes]
        try:
            self._group.broadcast(flat)
        except BroadcastError as error:
            raise _not_arrived(error) from error
        self._take(flat, tensors, digest)

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        from slimefsdp.weight_sync.buckets import packed_bytes

        try:
            data = self._buffers.get(handle)
        except OSError as error:
            hint = "ipc is for engines on the machine of the trainer's first rank; set broadcast"
            raise SyncError(f"weights did not arrive: {error}", field="rollout.weight_transport", hint=hint) from error
        self._take(data[: packed_bytes(tensors)], tensors, digest)
        if self._is_on_cuda:  # rank 0 may write to the buffer again when this returns
            import torch

            torch.cuda.synchronize()

    def receive_disk(self, path: str) -> None:
        from actors.workers.disk_update import checked_weights, read_weights

        for named in read_weights(checked_weights(path), self._receiver.manifest):
            self._receiver.receive([named])

    def _take(self, data: Any, tensors: Sequence[TensorInfo], digest: str | None) -> None:
        from actors.workers.weight_update import altered
        from slimefsdp.weight_sync.buckets import check_digest, unpack

        try:
            check_digest(data, digest)
        except ValueError:
            raise altered(f"a bucket of {data.numel()} bytes") from None
        self._receiver.receive(unpack(data, tensors))

    def commit(self, version: int) -> None:
        def commit() -> None:
            self._receiver.commit(version)
            self._sampler.take_new_weights(version)

        self._between_tokens(commit)

    def sleep(self) -> None:
        from slimefsdp.distributed.memory_manager import give_back_free_memory

        def sleep() -> None:
            self._receiver.forget()
            self._arriving.clear()
            for _, parameter in () if self._bytes else self._policy.all_parameters():
                storage = parameter.untyped_storage()
                self._bytes[parameter] = storage.nbytes()
                storage.resize_(0)
            give_back_free_memory()

        self.abort()
        self._between_tokens(sleep)

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        """Takes memory for the weights again; the cache takes memory when samples are drawn."""

        def wake_up() -> None:
            for parameter, size in self._bytes.items():
                parameter.untyped_storage().resize_(size)
            self._bytes = {}

        if "weights" in tags:
            self._between_tokens(wake_up)

    def _between_tokens(self, function: Callable[[], None]) -> None:
        """Has the sampling thread call a function between two tokens, and waits until the function has returned."""
        self._thread.do(function).result()


def _not_arrived(error: Exception) -> SyncError:
    hint = "send the update again; where the sender has ended, start it first"
    sync_error = SyncError(f"weights did not arrive: {error}", field="update_weights", hint=hint)
    sync_error.is_of_group = True
    return sync_error
