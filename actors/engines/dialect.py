"""What one kind of rollout server understands: how it is started, what it says of itself, its requests and its answers.

`ServedEngine` does everything else. A new server is a subclass of `ServerDialect` in a module of its own, and a row of
`slimefsdp.config.rollout.SERVERS`; docs/contributing.md goes through it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from actors.engines.protocol import EngineTag, GroupKind, Request, TensorInfo
from actors.engines.served_samples import PartialSample
from actors.engines.server_client import Refusal, ServerClient
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import SERVERS
from slimefsdp.errors import SyncError, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.sampling.params import FinishReason

if TYPE_CHECKING:  # importing this file costs no torch
    from slimefsdp.weight_sync.broadcast import Rendezvous

SERVED_AS = "policy"  # the name under which a server that the run starts serves the model
ADAPTER = "policy-adapter"  # the name by which requests ask for the adapter of lora.sync=adapters
ASK_S = 60.0  # for a question that costs nothing; a busy machine may take some seconds
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Holds the answers of a usable server about itself."""

    version: str
    dtype: str
    vocab_size: int
    max_model_len: int  # of a prompt and its response
    workers: int


class WeightRoutes:
    """The routes of a server by which it is given weights. What goes wrong on them is a `SyncError`.

    Args:
        index: of the engine.
        is_of_group: says of a route and a refusal whether the broadcast group may have broken.
    """

    def __init__(
        self, client: ServerClient, config: RunConfig, index: int, is_of_group: Callable[[str, Refusal], bool]
    ) -> None:
        self.client = client
        self.timeout_s = config.cluster.sync_timeout_s
        self._index, self._is_of_group = index, is_of_group

    def post(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Returns the answer.

        Raises:
            SyncError: the server refused, or did not answer in time. WorkerDied: it is gone.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return self._asked(route, lambda: self.client.post(route, body, timeout_s=limit_s), limit_s)

    def tell(self, route: str, body: Any = None) -> None:
        """Does as `post`, where the answer is a text for people."""
        self._asked(route, lambda: self.client.tell(route, body, timeout_s=self.timeout_s), self.timeout_s)

    def get(self, route: str) -> Any:
        """Does as `post`, by GET."""
        return self._asked(route, lambda: self.client.get(route, timeout_s=self.timeout_s), self.timeout_s)

    def try_post(self, route: str, body: Any = None) -> bool:
        """Returns whether the server took what it may refuse."""
        try:
            self.client.post(route, body, timeout_s=self.timeout_s)
        except Refusal:
            return False
        return True

    def _asked(self, route: str, ask: Callable[[], Any], limit_s: float) -> Any:
        try:
            return ask()
        except Refusal as refusal:
            error = SyncError(
                f"weights did not arrive at engine {self._index}: {refusal}",
                field="update_weights", hint="send the whole update again",
            )  # fmt: skip
            error.is_of_group = self._is_of_group(route, refusal)
            raise error from refusal
        except WorkerHung as error:
            raise SyncError(
                f"weights did not arrive: engine {self._index} has not answered {route} within {limit_s:g} s",
                field="cluster.sync_timeout_s", hint="start the server again, or raise cluster.sync_timeout_s",
            ) from error  # fmt: skip


class ServerDialect(ABC):
    """Translates the calls of a run for a kind of server.

    Args:
        folder: of the model that the server serves.
    """

    NAME: ClassVar[str]
    ALIVE: ClassVar[str] = "/health"  # a route that costs nothing and is answered at any time
    GENERATE: ClassVar[str]  # the route that samples
    GROUP: ClassVar[GroupKind] = "slimefsdp"
    LENGTH_OPTION: ClassVar[str]  # with which a server is started that takes longer samples
    ABORTS_ALL: ClassVar[bool] = False  # whether `end_requests` of all that was asked ends what comes meanwhile, too

    def __init__(self, config: RunConfig, folder: ModelFolder) -> None:
        self.config, self.folder = config, folder
        self.head_is_tied = bool(folder.config.get("tie_word_embeddings", TIED_HEAD not in folder.tensors))
        self.group_name: str | None = None  # of the broadcast group that the server's workers are in

    # ------------------------------------------------------------------ starting

    @abstractmethod
    def arguments(self) -> list[str]:
        """Returns the arguments of a server of this run, after its interpreter; the user's come last."""

    @abstractmethod
    def environment(self, logs: Path) -> dict[str, str]:
        """Returns the environment variables of such a server; `logs` is a folder where it may keep files."""

    @abstractmethod
    def check(self, client: ServerClient) -> ServerFacts:
        """Asks a server what it is.

        Raises:
            EngineError: the run cannot use it; the message says why. WorkerDied, WorkerHung: as `ServerClient`.
        """

    # ------------------------------------------------------------------ sampling

    @abstractmethod
    def body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        """Returns the JSON that asks for the rest of a sample."""

    @abstractmethod
    def with_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON of a request that is answered with the adapter."""

    @abstractmethod
    def read(
        self, answer: Any, body: dict[str, Any], *, vocab_size: int, versions: Collection[int]
    ) -> tuple[PartialSample, FinishReason | None]:
        """Returns what a server has drawn, and why it ended there: None, where the sample is to go on.

        Args:
            body: as `body` made it.
            versions: of weights that it may have drawn from.

        Raises:
            EngineError: the answer is not what was asked for. StateError: the logits were not finite.
        """

    @abstractmethod
    def end_requests(self, client: ServerClient, ids: Sequence[str], *, are_all: bool) -> None:
        """Tells the server to abort requests, which may be all that it has been asked."""

    # ------------------------------------------------------------------ weights

    @abstractmethod
    def join(self, routes: WeightRoutes, meeting: Rendezvous) -> None:
        """Has the server's workers join the group in which the trainer's first rank broadcasts."""

    @abstractmethod
    def open_update(self, routes: WeightRoutes) -> None:
        """Ends what is sampled, and makes the server ready for weights, also where an update was left unfinished."""

    @abstractmethod
    def take_bucket(
        self, routes: WeightRoutes, tensors: Sequence[TensorInfo], adapter_scale: float | None, **how: Any
    ) -> None:
        """Has the server take a bucket that the trainer's first rank broadcasts now.

        Args:
            how: `digest` of its bytes; `buffer`, a handle of shared memory, where it lies there instead.
        """

    @abstractmethod
    def take_folder(self, routes: WeightRoutes, path: Path, adapter_scale: float | None, *, has_weights: bool) -> None:
        """Has the server load a folder: of weights, of an adapter where there is a scale, or of both."""

    @abstractmethod
    def close_update(self, routes: WeightRoutes, version: int, *, has_adapter: bool) -> None:
        """Has the server sample from the new weights."""

    @abstractmethod
    def weight_version(self, routes: WeightRoutes) -> str:
        """Returns which weights the server says it has."""

    @abstractmethod
    def end_waiting(self, client: ServerClient) -> None:
        """Ends requests that wait at the server for an update that has failed."""

    @abstractmethod
    def is_of_group(self, route: str, refusal: Refusal) -> bool:
        """Returns whether a refusal of a weight route may be that the broadcast group broke, or did not form."""

    # ------------------------------------------------------------------ memory

    @abstractmethod
    def free_memory(self, routes: WeightRoutes) -> None:
        """Has a server that is awake and samples nothing free its device."""

    @abstractmethod
    def take_memory(self, routes: WeightRoutes, tags: Sequence[EngineTag]) -> None:
        """Has a server take memory that it had freed."""


def dialect_class(engine: str) -> type[ServerDialect]:
    """Returns the dialect of the servers that `rollout.engine` names."""
    module, _, name = SERVERS[engine].dialect.partition(":")
    found: type[ServerDialect] = getattr(importlib.import_module(module), name)
    return found
