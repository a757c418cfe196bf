"""Defines the interface for kinds of rollout servers, and starts servers.

`ServedEngine` has all code that does not depend on the kind of server. To support another kind, write a subclass of
`ServerDialect` in a new module and add a row to `slimefsdp.config.rollout.SERVERS`; docs/contributing.md shows how.
"""

from __future__ import annotations

import importlib
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from actors.cluster.capacity import ALLOCATOR, has_nvidia_driver
from actors.engines.child_server import ChildServer
from actors.engines.protocol import EngineTag, GroupKind, Request, TensorInfo
from actors.engines.served_samples import PartialSample
from actors.engines.server_client import Refusal, ServerClient, WeightRoutes
from actors.startup import stage
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import SERVERS
from slimefsdp.errors import EngineError, WorkerHung, short_repr
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.sampling.params import FinishReason

if TYPE_CHECKING:  # importing this file does not import torch
    from slimefsdp.weight_sync.broadcast import Rendezvous

SERVED_AS = "policy"  # the model's name at a server that the run starts
ADAPTER = "policy-adapter"  # the adapter's name in requests, with lora.sync=adapters
ASK_S = 60.0  # timeout of cheap requests; a busy machine may take some seconds
TIED_HEAD = "lm_head.weight"
LOGS = "engine_logs"  # subfolder of run.dir
LOOPBACK = "127.0.0.1"
BACK_S = 60.0  # limit on the wait for a server at a URL, which may be restarting
_LOOK_EVERY_S = 0.5
_LINES = 15  # number of lines of a log in an error


@dataclass(frozen=True, slots=True)
class ServerFacts:
    version: str
    dtype: str
    vocab_size: int
    max_model_len: int  # limit on the tokens of a prompt and its response
    workers: int


class ServerDialect(ABC):
    """Translates a run's requests and weight updates into the HTTP requests of one kind of server."""

    NAME: ClassVar[str]
    ALIVE: ClassVar[str] = "/health"  # a cheap route that the server answers at any time
    GENERATE: ClassVar[str]  # the route that samples
    ADAPTER_FIELD: ClassVar[str]  # the field of a sampling request that names the adapter
    GROUP: ClassVar[GroupKind] = "slimefsdp"
    LENGTH_OPTION: ClassVar[str]  # the server's command-line option for longer samples
    ABORTS_ALL: ClassVar[bool] = False  # whether `end_requests(are_all=True)` may also abort requests not in its list

    def __init__(self, config: RunConfig, folder: ModelFolder) -> None:
        self.config, self.folder = config, folder
        self.head_is_tied = bool(folder.config.get("tie_word_embeddings", TIED_HEAD not in folder.tensors))
        self.group_name: str | None = None  # the broadcast group that the server's workers have joined
        # what samples are asked for: numbers of layers, experts, and experts of a token; None: no experts
        self.routed_experts: tuple[int, int, int] | None = None
        if config.loss.routing_replay == "rollout":
            self.routed_experts = ModelSpec.from_config(folder.config).routed_experts

    # ------------------------------------------------------------------ starting

    @abstractmethod
    def arguments(self) -> list[str]:
        """Returns the server's command line after the Python interpreter; rollout.engine_args come last."""

    @abstractmethod
    def environment(self, logs: Path) -> dict[str, str]:
        """Returns the environment variables of a server to start; `logs` is a folder for files that it needs."""

    @abstractmethod
    def check(self, client: ServerClient) -> ServerFacts:
        """Returns a server's properties.

        Raises:
            EngineError: the run cannot use the server. WorkerDied, WorkerHung: as `ServerClient.get`.
        """

    def unusable(self, client: ServerClient, problem: str, hint: str, field: str | None = None) -> EngineError:
        """Returns the error of a server that the run cannot use.

        Args:
            field: the setting at fault; None means rollout.engine_args or, for a server at a URL, rollout.engine_urls.
        """
        if field is None:
            field = "rollout.engine_args" if self.config.rollout.engine_urls is None else "rollout.engine_urls"
        return EngineError(f"the server at {client.url} {problem}", field=field, hint=hint)

    def other_release(self, client: ServerClient, found: str, supported: str, package: str) -> EngineError:
        field = "rollout.engine_python" if self.config.rollout.engine_urls is None else "rollout.engine_urls"
        return self.unusable(client, f"is {found}; {supported} is supported", f"install {package} for it", field)

    def require(
        self, client: ServerClient, properties: Mapping[str, Any], wanted: Mapping[str, tuple[Any, str]]
    ) -> None:
        """Compares a server's properties with the needed values.

        Args:
            wanted: name of a property -> (needed value, hint for the error).

        Raises:
            EngineError: a property differs, or is missing.
        """
        for name, (value, hint) in wanted.items():
            if name not in properties or properties[name] != value:
                raise self.unusable(client, f"has {name}={properties.get(name)}, and {value} is needed", hint)

    # ------------------------------------------------------------------ sampling

    @abstractmethod
    def body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        """Returns the JSON of a request that begins or continues sample `number`, with the tokens `drawn` so far."""

    @abstractmethod
    def read(
        self, answer: Any, body: dict[str, Any], *, vocab_size: int, versions: Collection[int]
    ) -> tuple[PartialSample, FinishReason | None]:
        """Returns the new tokens and the reason why the sample ended; None means that the sample has to be continued.

        Args:
            body: the request, as the method `body` returned it.
            versions: the versions of the weights with which the server may have drawn the tokens.

        Raises:
            EngineError: the answer contradicts the request. StateError: the logits were not finite.
        """

    @abstractmethod
    def end_requests(self, client: ServerClient, ids: Sequence[str], *, are_all: bool) -> None:
        """Has the server abort the requests `ids`; `are_all` says whether no other request is in flight."""

    # ------------------------------------------------------------------ weights

    @abstractmethod
    def join(self, routes: WeightRoutes, meeting: Rendezvous) -> None:
        """Has the server's workers join the group in which rank 0 of the trainer broadcasts."""

    @abstractmethod
    def open_update(self, routes: WeightRoutes) -> None:
        """Aborts all sampling and prepares the server for weights, also if an earlier update was not finished."""

    @abstractmethod
    def take_bucket(
        self, routes: WeightRoutes, tensors: Sequence[TensorInfo], adapter_scale: float | None, **options: Any
    ) -> None:
        """Has the server's workers take a bucket, which rank 0 of the trainer broadcasts now or has in shared memory.

        Args:
            options: `digest` is the sha256 of the bucket's bytes. `buffer` is the handle of the shared memory that has
                the bucket; without it, the bucket is broadcast.
        """

    @abstractmethod
    def take_folder(self, routes: WeightRoutes, path: Path, adapter_scale: float | None, *, has_weights: bool) -> None:
        """Has the server load a folder's weights (if `has_weights`) and adapter (if there is an `adapter_scale`)."""

    @abstractmethod
    def close_update(self, routes: WeightRoutes, version: int, *, has_adapter: bool) -> None:
        """Ends an update; from then on the server samples from the new weights, and reports their version."""

    @abstractmethod
    def weight_version(self, routes: WeightRoutes) -> str:
        """Returns the version of the weights that the server reports."""

    @abstractmethod
    def end_waiting(self, client: ServerClient) -> None:
        """Aborts requests that wait at the server for an update that failed."""

    @abstractmethod
    def is_of_group(self, route: str, refusal: Refusal) -> bool:
        """Returns whether a broken broadcast group may be why the server refused a request for weights."""

    # ------------------------------------------------------------------ memory

    @abstractmethod
    def free_memory(self, routes: WeightRoutes) -> None:
        """Has the server free its device's memory. Called only while the server is awake and samples nothing."""

    @abstractmethod
    def take_memory(self, routes: WeightRoutes, tags: Sequence[EngineTag]) -> None:
        """Has the server take back memory that `free_memory` freed."""


def dialect_class(engine: str) -> type[ServerDialect]:
    """Returns the dialect of the servers that `rollout.engine` names."""
    module, _, name = SERVERS[engine].dialect.partition(":")
    dialect: type[ServerDialect] = getattr(importlib.import_module(module), name)
    return dialect


# ---------------------------------------------------------------------- starting a server


def is_on_cpu(config: RunConfig) -> bool:
    """Returns whether a server that the run starts has no GPU."""
    return config.mesh.device == "cpu" or (config.mesh.device == "auto" and not has_nvidia_driver())


def shares_a_gpu(config: RunConfig) -> bool:
    """Returns whether a server that the run starts has to free its GPU for a rank."""
    return config.rollout.placement == "colocated" and not is_on_cpu(config)


def log_folder(config: RunConfig) -> Path:
    """Returns the working directory of a run's servers, which also has their logs."""
    if config.run.dir is None:
        return Path(tempfile.mkdtemp(prefix="slimefsdp_engine_"))
    logs = config.run.dir.absolute() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def start_client(dialect: ServerDialect, config: RunConfig, index: int) -> ServerClient:
    """Returns a client of an engine's server, which runs at a URL of rollout.engine_urls, or is started on loopback."""
    if config.rollout.engine_urls is not None:
        return ServerClient(config.rollout.engine_urls[index], index, alive=dialect.ALIVE)
    assert config.rollout.engine_python is not None
    logs, port = log_folder(config), free_port()
    program = str(config.rollout.engine_python.absolute())
    command = [program, *dialect.arguments(), "--host", LOOPBACK, "--port", str(port)]
    # the server does not inherit the variables by which this process computes with one thread
    environment = {name: value for name, value in dialect.environment(logs).items() if name not in ALLOCATOR}
    child = ChildServer(command, environment, logs / f"{dialect.NAME.lower()}_{index}.log", logs)
    return ServerClient(f"http://{LOOPBACK}:{port}", index, child, alive=dialect.ALIVE)


def facts_of(dialect: ServerDialect, client: ServerClient, config: RunConfig, index: int) -> Any:
    """Waits until a server answers, and returns the properties that `dialect.check` returns.

    Raises:
        EngineError: the server ended, does not exist, or cannot be used. WorkerHung: the server starts too slowly.
    """
    _wait_until_ready(dialect.NAME, client, config, index)
    try:
        return dialect.check(client)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the server at {client.url} does not answer as {dialect.NAME} does: {type(error).__name__}: "
            f"{short_repr(str(error))}",
            field="rollout.engine_urls", hint="name one of a supported release (docs/engines.md)",
        ) from error  # fmt: skip


def free_port() -> int:
    """Returns a port that is free now. If another process takes the port first, the server's log says so."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def longest_sample(config: RunConfig, folder: ModelFolder) -> int:
    """Returns the most tokens of a prompt with its response: the pack size, or the model's positions if fewer."""
    pack = config.batch.max_tokens_per_rank * config.mesh.cp
    positions = folder.config.get("max_position_embeddings", folder.max_sample_tokens)
    return pack if positions is None else min(pack, int(positions))


def _wait_until_ready(name: str, client: ServerClient, config: RunConfig, index: int) -> None:
    """Waits until the server answers; a server at a URL may be restarting.

    Raises:
        EngineError: the server ended, or no server appears at the URL. WorkerHung: cluster.launch_timeout_s is over.
    """
    child, began = client.child, time.monotonic()
    limit_s = config.cluster.launch_timeout_s
    back_s = min(BACK_S, limit_s / 2)  # half, so that this error comes before the driver's own deadline

    def progress() -> str:
        if child is None:
            return f"no server answers at {client.url}"
        lines = child.last_lines(1)
        return lines[0][-100:] if lines else "its log is empty"

    with stage(f"starting {name} for engine {index}", progress):
        while True:
            if child is not None and child.status() is not None:
                raise _ended(name, child)
            if client.answers(ASK_S):
                return
            waited_s = time.monotonic() - began
            if child is None and waited_s > back_s:
                raise EngineError(
                    f"no server answers at rollout.engine_urls[{index}]={client.url}",
                    field="rollout.engine_urls", hint="start the server, or correct the address",
                )  # fmt: skip
            if child is not None and waited_s > limit_s:
                error = WorkerHung(
                    f"{name} did not answer within cluster.launch_timeout_s={limit_s:g}; its log ends with: "
                    f"{progress()}",
                    field="cluster.launch_timeout_s", hint=f"see {child.log}, or raise the timeout", rank=index,
                )  # fmt: skip
                error.seconds = limit_s
                raise error
            heartbeat.tick()
            time.sleep(_LOOK_EVERY_S)


def _ended(name: str, child: ChildServer) -> EngineError:
    lines = "\n    ".join(child.last_lines(_LINES))
    return EngineError(
        f"{name} ended with status {child.status()} while it started; its log ends with\n    {lines}\n ",
        field="rollout.engine_python", hint=f"see {child.log}; rollout.engine_args may be at fault too",
    )  # fmt: skip
