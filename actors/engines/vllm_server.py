"""The server of vLLM that a service samples with: started anew when it is lost, and told of its adapters again."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from actors.engines.child_server import ChildServer
from actors.engines.server_client import Refusal, ServerClient
from actors.engines.server_launch import ASK_S, wait_until_ready
from actors.engines.vllm_facts import SamplingFacts, check_sampling_server
from actors.engines.vllm_launch import start_sampling_server
from actors.fault_tolerance.recovery import Restarts
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, ModelError, SlimeError, WorkerDied, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder

GENERATE = "/inference/v1/generate"
_HEALTH_S = 10.0
_MOST_CUTS = 3  # connections that a request may lose
_ABORT_AGAIN_S = 0.1
_NOT_FOUND = 404  # of an adapter that a server which was started anew has not been told of


class Adapter(NamedTuple):
    """One that the server may be asked to sample with."""

    name: str  # at the server; of this one alone, whatever else it was told of before
    folder: Path  # of PEFT, which stays there as long as the server may be asked for it


class VllmServer:
    """A server; its methods may be called from several threads.

    Args:
        config: rollout.engine_python starts it, rollout.engine_urls names one that is there.
        adapters: that one which is started has room for.
        modules: last parts of the names of those that adapters are of.
    """

    def __init__(self, config: RunConfig, folder: ModelFolder, adapters: int, modules: Sequence[str]) -> None:
        self._config, self._folder, self._adapters, self._modules = config, folder, adapters, modules
        self._restarts = Restarts(config.cluster.max_restarts, "sampling servers")
        self._lock = threading.RLock()  # of all below
        self._child: ChildServer | None = None
        self._has: set[str] = set()  # names of the adapters that it was told of
        self._losses = 0  # that were seen to
        self._is_ended = False
        self._client = self._started()

    def facts(self) -> SamplingFacts:
        """Waits until it answers, and asks what it is.

        Raises:
            EngineError: it ended, nobody is there, or it cannot be used. WorkerHung: it takes too long.
        """
        wait_until_ready("vLLM", self._client, self._child, self._config, 0)
        try:
            return check_sampling_server(self._client, self._config, self._folder, self._modules)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"the server at {self._client.url} does not answer as vLLM does: {type(error).__name__}: {error}",
                field="rollout.engine_urls", hint="name one of a supported release (docs/engines.md)",
            ) from error  # fmt: skip

    def load(self, adapter: Adapter) -> None:
        """Has it read an adapter, once.

        Raises:
            ModelError: vLLM refuses the adapter. WorkerDied, WorkerHung: the server is lost, and does not come back.
        """
        cuts = 0
        while True:
            losses = self._losses
            try:
                with self._lock:
                    if adapter.name not in self._has:
                        self._tell("/v1/load_lora_adapter", lora_name=adapter.name, lora_path=str(adapter.folder))
                        self._has.add(adapter.name)
                return
            except Refusal as refusal:
                if not (refusal.status >= 500 and self._client.has_ended()):
                    raise ModelError(
                        f"vLLM cannot load the adapters of {adapter.folder}: {refusal}",
                        field="folder", hint="train modules that vLLM has adapters of, or set rollout.engine=embedded",
                    ) from refusal  # fmt: skip
                error: SlimeError = self._client.lost(str(refusal))
            except (WorkerDied, WorkerHung) as lost:
                error = lost
            cuts = self._see_to(losses, error, cuts)

    def unload(self, adapter: Adapter) -> None:
        """Has it forget an adapter; a server that is lost has forgotten it."""
        with self._lock, suppress(Refusal, SlimeError):
            if adapter.name in self._has:
                self._has.discard(adapter.name)
                self._tell("/v1/unload_lora_adapter", lora_name=adapter.name)

    def generate(self, adapter: Adapter, body: dict[str, Any]) -> Any:
        """Its answer to a request, by this adapter; a server that is lost meanwhile is asked again when it is back.

        Raises:
            EngineError: it refuses. ModelError, WorkerDied, WorkerHung: as `load`.
        """
        limit_s = self._config.cluster.call_timeout_s
        cuts = 0
        while True:
            losses = self._losses
            self.load(adapter)
            try:
                answer = self._client.post(GENERATE, {**body, "model": adapter.name}, timeout_s=limit_s)
            except Refusal as refusal:
                is_lost = refusal.status >= 500 and self._client.has_ended()
                if not is_lost and refusal.status != _NOT_FOUND:
                    raise EngineError(
                        f"the server refused a request: {refusal}", field="engine", hint="look at its log"
                    ) from refusal
                cuts = self._see_to(losses, self._client.lost(str(refusal)), cuts)
            except (WorkerDied, WorkerHung) as lost:
                cuts = self._see_to(losses, lost, cuts)
            else:
                self._restarts.progress()
                return answer

    def abort(self, ids: Collection[str], timeout_s: float) -> None:
        """Has it end requests of these names; returns when they have left `ids`, or after that time."""
        deadline = time.monotonic() + timeout_s
        while names := [f"generate-tokens-{one}" for one in list(ids)]:
            if time.monotonic() > deadline:
                return
            with suppress(Refusal, SlimeError):  # a server that is gone has aborted them
                self._client.post("/inference/v1/abort_requests", {"request_ids": names}, timeout_s=ASK_S)
            time.sleep(_ABORT_AGAIN_S)  # again: a request may have been on its way

    def end(self) -> None:
        """Ends one that was started here, for good; idempotent."""
        self._is_ended = True
        if (child := self._child) is not None:
            child.end()

    # ------------------------------------------------------------------ inside

    def _started(self) -> ServerClient:
        urls = self._config.rollout.engine_urls
        if urls is not None:
            return ServerClient(urls[0], 0)
        self._child, url = start_sampling_server(self._config, self._folder, self._adapters, self._modules)
        return ServerClient(url, 0, self._child)

    def _see_to(self, losses: int, error: SlimeError, cuts: int) -> int:
        """After a call that got no answer: has a server that can be asked again; returns how many calls were cut.

        Args:
            losses: as many had been seen to before the call.
            cuts: of the same request, of servers that went on.

        Raises:
            SlimeError: the error, where it cannot be had.
        """
        with self._lock:
            if self._is_ended:
                raise error
            if self._losses != losses:  # somebody else has
                return cuts
            is_there = not isinstance(error, WorkerHung) and self._client.answers(_HEALTH_S)
            if is_there:
                cuts += 1
                if cuts > _MOST_CUTS:
                    raise error
            elif self._child is not None:
                self._replace(error)
            else:
                if isinstance(error, WorkerHung):
                    raise error
                self.facts()  # whoever keeps it may be starting it again
            try:
                self._has &= {one["id"] for one in self._client.get("/v1/models", timeout_s=ASK_S)["data"]}
            except (Refusal, KeyError, TypeError) as refusal:
                raise error from refusal
            self._losses += 1
            return cuts

    def _replace(self, error: SlimeError) -> None:
        while True:
            self._restarts.spend(error)
            assert self._child is not None
            self._child.end()
            self._client = self._started()
            try:
                self.facts()
                return
            except (WorkerDied, WorkerHung, EngineError) as another:  # it did not start
                error = another

    def _tell(self, route: str, **body: str) -> None:
        self._client.tell(route, body, timeout_s=self._config.cluster.sync_timeout_s)
