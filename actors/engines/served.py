"""Provides the engine that samples at a rollout server, which the engine starts or finds at a URL.

A `ServerDialect` has what differs between kinds of servers. The server runs in its own Python environment, and the
engine sends HTTP requests with token ids to the server. New weights do not pass through the engine. The engine posts a
request for each bucket, and the server's workers take the bytes from the broadcast group of rank 0, from shared memory
or from a folder. An update aborts the running samples. Once the weights are committed, each sample's tokens so far are
sent again as part of the prompt. With lora.sync=adapters, the server gets the whole model only in its first update, and
an adapter in each update.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engines.dialect import TIED_HEAD, ServerFacts, dialect_class, facts_of, start_client
from actors.engines.protocol import (
    ENGINE_TAGS,
    Engine,
    EngineInfo,
    EngineTag,
    Manifest,
    Request,
    Sample,
    TensorInfo,
)
from actors.engines.served_samples import check_request
from actors.engines.served_sampling import CommittedVersions, ServedSampling
from actors.engines.server_client import HEALTH_S, Refusal, WeightRoutes
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import SERVERS
from slimefsdp.errors import SlimeError, StateError, SyncError, WorkerHung
from slimefsdp.models.hf_folder import hub_parts, is_no_weight, read_model_folder, stored_parts
from slimefsdp.models.peft_folder import MATRICES
from slimefsdp.weight_sync.progress import UpdateProgress, other_model

if TYPE_CHECKING:  # importing this file does not import torch
    from slimefsdp.weight_sync.broadcast import Rendezvous


class ServedEngine(Engine):
    """Samples at a server. Log-probs are at the sampling temperature, and for greedy samples at temperature 1.

    Args:
        config: with rollout.engine_python, the engine starts a server; rollout.engine_urls names running servers.
        index: the index of this engine.

    Raises:
        ModelError: model.path cannot be read.
    """

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__(config, index)
        is_random = config.model.init == "random"  # then the folder may have no weights
        self._folder = read_model_folder(config.model.path, with_weights=not is_random)
        self._shapes = {name: entry.shape for name, entry in self._folder.tensors.items()}
        self._server = SERVERS[config.rollout.engine]
        self._dialect = dialect_class(config.rollout.engine)(config, self._folder)
        self._client = start_client(self._dialect, config, index)
        self._facts: ServerFacts | None = None
        self._asking = threading.Lock()
        self._routes = WeightRoutes(self._client, config, index, self._dialect.is_of_group)
        self._versions = CommittedVersions(self._client, config.cluster.sync_timeout_s)
        self._sampling = ServedSampling(
            self._dialect, self._client, self._versions, self.tokenizer, config.cluster.call_timeout_s
        )
        self._updating = threading.Lock()
        self._progress = UpdateProgress()
        self._adapter_scale: float | None = None  # in the latest update; None means that it has no adapter
        self._asleep: frozenset[EngineTag] = frozenset()

    def health(self) -> None:
        """Returns normally if the server answers; raises as `Engine.health`."""
        try:
            self._client.get(self._dialect.ALIVE, timeout_s=HEALTH_S)
        except Refusal as refusal:  # the inference engine inside the server has ended, and the server is about to end
            raise self._client.lost(str(refusal)) from refusal

    def info(self) -> EngineInfo:
        """Waits until the server is ready, and returns its properties.

        Raises:
            EngineError: the server ended, does not exist, or cannot be used. WorkerHung: the server starts too slowly.
        """
        facts = self._ready_facts()
        heartbeat.enter(heartbeat.IDLE)
        return EngineInfo(
            f"{self._dialect.NAME.lower()} {facts.version}", facts.vocab_size, facts.dtype, facts.max_model_len,
            self._server.transports, facts.workers, self._dialect.GROUP,
        )  # fmt: skip

    def _ready_facts(self) -> ServerFacts:
        """Waits until the server is ready, and returns its properties."""
        with self._asking:
            if self._facts is None:
                self._facts = facts_of(self._dialect, self._client, self.config, self.index)
                self._sampling.vocab_size = self._facts.vocab_size
            return self._facts

    # ------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """Yields samples as they end; implements `Engine.generate`.

        Raises:
            StateError, EngineError: as `Engine.generate`. BatchError: a request is invalid or too long for the server.
            WorkerDied, WorkerHung: the server ended, or did not answer within cluster.call_timeout_s.
        """
        facts = self._ready_facts()
        self._require_awake(ENGINE_TAGS)
        for request in requests:
            check_request(
                request, facts.max_model_len, engine=self._dialect.NAME, temperatures=self._server.temperatures,
                length_option=self._dialect.LENGTH_OPTION,
            )  # fmt: skip
        yield from self._sampling.generate(requests, self.decode)

    def abort(self) -> None:
        """Aborts all samples; returns when the server has ended them.

        Raises:
            WorkerHung: samples did not end within cluster.call_timeout_s.
        """
        if not self._sampling.abort():
            raise WorkerHung(
                f"samples of engine {self.index} did not end within cluster.call_timeout_s",
                field="cluster.call_timeout_s", hint="start the server again", rank=self.index,
            )  # fmt: skip

    # ------------------------------------------------------------------ weights

    def join(self, meeting: Rendezvous) -> None:
        self._ready_facts()
        self._dialect.join(self._routes, meeting)

    def takes_adapters(self) -> bool:
        """Returns whether updates may send adapters, which the server then keeps separate from the weights."""
        return self.config.lora.sync == "adapters"

    def has_frozen(self, source: str) -> bool:
        """Implements `Engine.has_frozen`; False without adapters, as servers then fuse frozen and trained weights."""
        with self._updating:
            are_present = self._progress.has_frozen(source if self.takes_adapters() else None)
            committed = self._versions.committed
            if committed is None or not are_present:
                return False
            # a server that was restarted has another version, and none of the weights
            return self._dialect.weight_version(self._routes) == str(committed)

    def begin(
        self, version: int, manifest: Manifest, kept: Collection[str] = (), adapter_scale: float | None = None
    ) -> None:
        with self._updating:
            self._ready_facts()
            self._require_awake(("weights",))
            self._check_manifest(manifest)
            self._progress.begin(version, manifest, kept)
            self._adapter_scale = adapter_scale
            self._sampling.uses_adapter = adapter_scale is not None
            self._versions.begin(version)
            with self._or_fail():
                self._dialect.open_update(self._routes)

    def receive(self, bucket: Any) -> None:
        """Raises a SyncError, since no server reads from Ray's object store."""
        raise SyncError(
            f"{self._dialect.NAME} takes weights by {' or '.join(self._server.transports)}, not from the object store",
            field="rollout.engine", hint="send them as EngineInfo.transports says",
        )  # fmt: skip

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """Has the server's workers receive a broadcast bucket; implements `Engine.receive_broadcast`.

        Raises:
            StateError: no update has begun. SyncError: a tensor was not announced by `begin`, or did not arrive.
        """
        self._receive(tensors, "receive_broadcast", digest=digest)

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        self._receive(tensors, "receive_ipc", digest=digest, buffer=handle)

    def _receive(self, tensors: Sequence[TensorInfo], name: str, **options: Any) -> None:
        self._progress.require_begun(name)
        tensors = [TensorInfo(*tensor) for tensor in tensors]  # plain tuples are accepted
        with self._updating, self._or_fail():
            for tensor in tensors:
                self._progress.require_announced(tensor.name, tensor.shape)
            self._dialect.take_bucket(self._routes, tensors, self._adapter_scale, **options)
            self._progress.missing -= {tensor.name for tensor in tensors}
            heartbeat.tick()

    def receive_disk(self, path: str) -> None:
        from actors.workers.disk_update import checked_adapter, checked_weights

        self._progress.require_begun("receive_disk")
        with self._updating, self._or_fail():
            present: set[str] = set()  # names of the tensors in the folder
            if has_weights := any(not name.endswith(MATRICES) for name in self._progress.missing):
                present |= checked_weights(path).tensors.keys()
            if self._adapter_scale is not None:
                present |= checked_adapter(path)
            kind, manifest = self._folder.model_type, self._progress.manifest
            self._dialect.take_folder(self._routes, Path(path), self._adapter_scale, has_weights=has_weights)
            self._progress.missing -= {
                name for name in manifest if all(part.name in present for part in hub_parts(kind, name, manifest[name]))
            }

    def commit(self, version: int) -> None:
        self._progress.require_complete(version)
        with self._updating, self._or_fail():
            self._dialect.close_update(self._routes, version, has_adapter=self._adapter_scale is not None)
            present = self._dialect.weight_version(self._routes)
            if present != str(version):
                raise SyncError(
                    f"the server has weights {present!r} after version {version} was committed",
                    field="update_weights", hint="only this run may update this server",
                )  # fmt: skip
            self._progress.commit(version)
            self._versions.commit(version)

    def _check_manifest(self, manifest: Manifest) -> None:
        """Raises a SyncError if the manifest differs from the tensors of model.path, which the server serves."""
        kind, seen = self._folder.model_type, set()
        for name in sorted(name for name in manifest if name.endswith(MATRICES)):
            if not name.endswith(tuple(f".{end}" for end in MATRICES)):
                raise SyncError(
                    f"{name} is of an adapter of experts, which {self._dialect.NAME} is not sent", field="lora.targets",
                    hint="leave experts out, or set lora.sync=merged",
                )  # fmt: skip
        if not self._shapes:
            return
        for name, shape in sorted(manifest.items()):
            if (name == TIED_HEAD and self._dialect.head_is_tied) or name.endswith(MATRICES):
                continue
            for part in stored_parts(kind, name, shape, self._shapes):
                if self._shapes.get(part.name) != part.shape:
                    raise other_model(name, shape, self._shapes.get(part.name))
                seen.add(part.name)
        unsent = sorted(name for name in self._shapes.keys() - seen if not is_no_weight(kind, name))
        for name in unsent:
            if not (name == TIED_HEAD and self._dialect.head_is_tied):
                raise other_model(name, None, self._shapes[name])

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """If the block fails, leaves the engine without weights and ends requests that wait at the server."""
        try:
            yield
        except BaseException:
            self._lose_weights()
            with suppress(Refusal, SlimeError):
                self._dialect.end_waiting(self._client)
            raise

    def _lose_weights(self) -> None:
        self._progress.forget()
        self._versions.fail()

    # ------------------------------------------------------------------ memory, end

    def sleep(self) -> None:
        """Frees the server's memory; docs/engines.md says which memory each kind of server frees.

        Raises:
            SyncError: the server refused. WorkerDied, WorkerHung: the server has ended, or samples did not end.
        """
        if self._asleep == set(ENGINE_TAGS):
            return
        self.abort()
        with self._updating:
            self._lose_weights()
            if self._asleep:  # a server frees everything or nothing, so it first has to be wholly awake
                self._dialect.take_memory(self._routes, _in_order(self._asleep))
            self._dialect.free_memory(self._routes)
            self._asleep = frozenset(ENGINE_TAGS)

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        """Takes the memory of these tags again; implements `Engine.wake_up`.

        Raises:
            SyncError: the server refused. WorkerDied: the server has ended.
        """
        with self._updating:
            taken = self._asleep & set(tags)
            if taken:
                self._dialect.take_memory(self._routes, _in_order(taken))
                self._asleep -= taken

    def _require_awake(self, tags: Sequence[EngineTag]) -> None:
        if asleep := _in_order(self._asleep & set(tags)):
            raise StateError(
                f"engine {self.index} is asleep: {', '.join(asleep)}", field="update_weights",
                hint="call wake_up(), and update_weights for the weights that it lost",
            )  # fmt: skip

    def stop(self) -> None:
        """Ends a server that this engine has started, but not a server at a URL; idempotent."""
        self._versions.fail()
        self._sampling.give_up()
        self._client.end()


def _in_order(tags: Collection[EngineTag]) -> list[EngineTag]:
    return [tag for tag in ENGINE_TAGS if tag in tags]
