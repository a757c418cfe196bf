"""The server of vLLM that a service samples with: started anew when it is lost, and told of its adapters again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from actors.engines.dialect import ASK_S
from actors.engines.server_client import Refusal
from actors.engines.server_launch import facts_of, start_client
from actors.engines.vllm_service import SamplingFacts, VllmServiceDialect
from actors.fault_tolerance.recovery import Restarts
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, ModelError, SlimeError, WorkerDied, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder

_HEALTH_S = 10.0
_MOST_CUTS = 3  # connections that a request may lose
_ABORT_AGAIN_S = 0.1
_NOT_FOUND = 404  # of an adapter that a server which was started anew has not been told of


class Adapter(NamedTuple):
    """An adapter that the server may be asked to sample with."""

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
        self._config, self._dialect = config, VllmServiceDialect(config, folder, adapters, modules)
        self._restarts = Restarts(config.cluster.max_restarts, "sampling servers")
        self._lock = threading.RLock()  # of all below
        self._has: set[str] = set()  # names of the adapters that it was told of
        self._losses = 0  # that were seen to
        self._is_ended = False
        self._client = start_client(self._dialect, config, 0)

    def facts(self) -> SamplingFacts:
        """Waits until the server answers, and asks what it is.

        Raises:
            EngineError: it ended, nobody is there, or it cannot be used. WorkerHung: it takes too long.
        """
        return facts_of(self._dialect, self._client, self._config, 0)

    def load(self, adapter: Adapter) -> None:
        """Has the server read an adapter, once.

        Raises:
            ModelError: vLLM refuses the adapter. WorkerDied, WorkerHung: the server is lost, and does not come back.
        """
        self._until_answered(lambda: self._have(adapter))

    def unload(self, adapter: Adapter) -> None:
        """Has the server forget an adapter; one that is lost has forgotten it."""
        with self._lock, suppress(Refusal, SlimeError):
            if adapter.name in self._has:
                self._has.discard(adapter.name)
                self._tell("/v1/unload_lora_adapter", lora_name=adapter.name)

    def generate(self, adapter: Adapter, body: dict[str, Any]) -> Any:
        """Returns the answer to a request with this adapter; asks again when a server that was lost is back.

        Raises:
            EngineError: it refuses. ModelError, WorkerDied, WorkerHung: as `load`.
        """

        def ask() -> Any:
            self._have(adapter)
            try:
                limit_s = self._config.cluster.call_timeout_s
                return self._client.post(self._dialect.GENERATE, {**body, "model": adapter.name}, timeout_s=limit_s)
            except Refusal as refusal:
                if refusal.status == _NOT_FOUND or self._is_lost(refusal):
                    raise self._client.lost(str(refusal)) from refusal
                raise EngineError(
                    f"the server refused a request: {refusal}", field="engine", hint="look at its log"
                ) from refusal

        answer = self._until_answered(ask)
        self._restarts.progress()
        return answer

    def abort(self, ids: Collection[str], timeout_s: float) -> None:
        """Has it end requests of these names; returns when they have left `ids`, or after that time."""
        deadline = time.monotonic() + timeout_s
        while asked := list(ids):
            if time.monotonic() > deadline:
                return
            with suppress(Refusal, SlimeError):  # a server that is gone has aborted them
                self._dialect.end_requests(self._client, asked, are_all=False)
            time.sleep(_ABORT_AGAIN_S)  # again: a request may have been on its way

    def end(self) -> None:
        """Ends one that was started here, for good; idempotent."""
        self._is_ended = True
        if (child := self._client.child) is not None:
            child.end()

    # ------------------------------------------------------------------ inside

    def _have(self, adapter: Adapter) -> None:
        """Tells the server of an adapter that it has not been told of."""
        with self._lock:
            if adapter.name in self._has:
                return
            try:
                self._tell("/v1/load_lora_adapter", lora_name=adapter.name, lora_path=str(adapter.folder))
            except Refusal as refusal:
                if self._is_lost(refusal):
                    raise self._client.lost(str(refusal)) from refusal
                raise ModelError(
                    f"vLLM cannot load the adapters of {adapter.folder}: {refusal}",
                    field="folder", hint="train modules that vLLM has adapters of, or set rollout.engine=embedded",
                ) from refusal  # fmt: skip
            self._has.add(adapter.name)

    def _is_lost(self, refusal: Refusal) -> bool:
        return refusal.status >= 500 and self._client.has_ended()

    def _until_answered(self, ask: Callable[[], Any]) -> Any:
        """Returns what `ask` returns, which is called again when a server that was lost meanwhile is there again."""
        cuts = 0
        while True:
            losses = self._losses
            try:
                return ask()
            except (WorkerDied, WorkerHung) as lost:
                cuts = self._see_to(losses, lost, cuts)

    def _see_to(self, losses: int, error: SlimeError, cuts: int) -> int:
        """Restores a server after a call without an answer; returns how many calls were cut.

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
            elif self._client.child is not None:
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
            assert self._client.child is not None
            self._client.child.end()
            self._client = start_client(self._dialect, self._config, 0)
            try:
                self.facts()
                return
            except (WorkerDied, WorkerHung, EngineError) as another:  # it did not start
                error = another

    def _tell(self, route: str, **body: str) -> None:
        self._client.tell(route, body, timeout_s=self._config.cluster.sync_timeout_s)
