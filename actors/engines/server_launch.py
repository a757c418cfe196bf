"""What the starts of rollout servers have in common: where their logs are, how long samples get, when one is ready."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.cluster.allocator import ALLOCATOR
from actors.cluster.connect import has_nvidia_driver
from actors.engines.child_server import ChildServer
from actors.engines.server_client import ServerClient
from actors.startup import stage
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder

LOGS = "engine_logs"  # below run.dir
SERVED_AS = "policy"
ADAPTER = "policy-adapter"  # what requests call the adapter of lora.sync=adapters
LOOPBACK = "127.0.0.1"
ASK_S = 60.0  # for a question that costs nothing; a busy machine may take some seconds
BACK_S = 60.0  # for a server at a URL, which whoever keeps it may be starting again
_LOOK_EVERY_S = 0.5
_LINES = 15  # of a log, in an error


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server that can be used."""

    version: str
    dtype: str
    vocab_size: int
    max_model_len: int  # of a prompt and its response
    workers: int


def is_on_cpu(config: RunConfig) -> bool:
    """Whether a server that is started here has no GPU."""
    return config.mesh.device == "cpu" or (config.mesh.device == "auto" and not has_nvidia_driver())


def shares_a_gpu(config: RunConfig) -> bool:
    """Whether a server that is started here has to free its GPU for a rank."""
    return config.rollout.placement == "colocated" and not is_on_cpu(config)


def log_folder(config: RunConfig) -> Path:
    """Where servers of a run write, and run."""
    if config.run.dir is None:
        return Path(tempfile.mkdtemp(prefix="slimefsdp_engine_"))
    logs = config.run.dir.absolute() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def start_on_loopback(
    kind: str, index: int, command: Sequence[str], environment: Mapping[str, str], logs: Path
) -> tuple[ChildServer, str]:
    """A server that has just been started, on this machine's loopback alone, and its URL.

    Args:
        command: without host and port.
        environment: that of this process, which computes by one thread, has settings that are not for a server.
    """
    port = free_port()
    environment = {name: value for name, value in environment.items() if name not in ALLOCATOR}
    whole = [*command, "--host", LOOPBACK, "--port", str(port)]
    return ChildServer(whole, environment, logs / f"{kind}_{index}.log", logs), f"http://{LOOPBACK}:{port}"


def free_port() -> int:
    """One that is free now; whoever takes it before the server does is told of in its log."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def longest_sample(config: RunConfig, folder: ModelFolder) -> int:
    """Of how many tokens a prompt with its response can be: what a pack holds and the model has positions for."""
    pack = config.batch.max_tokens_per_rank * config.mesh.cp
    positions = folder.config.get("max_position_embeddings", folder.max_sample_tokens)
    return pack if positions is None else min(pack, int(positions))


def wait_until_ready(name: str, client: ServerClient, child: ChildServer | None, config: RunConfig, index: int) -> None:
    """Returns when the server answers; one that this process did not start may be on its way back.

    Raises:
        EngineError: it ended, or nobody comes to the URL. WorkerHung: it took more than cluster.launch_timeout_s.
    """
    began = time.monotonic()
    limit_s = config.cluster.launch_timeout_s
    back_s = min(BACK_S, limit_s / 2)  # before the driver's own deadline

    def how_far() -> str:
        if child is None:
            return f"nobody answers at {client.url}"
        said = child.last_lines(1)
        return said[0][-100:] if said else "nothing said yet"

    with stage(f"starting {name} for engine {index}", how_far):
        while True:
            if child is not None and child.status() is not None:
                raise _ended(name, child)
            if client.answers(ASK_S):
                return
            waited_s = time.monotonic() - began
            if child is None and waited_s > back_s:
                raise EngineError(
                    f"nobody answers at rollout.engine_urls[{index}]={client.url}",
                    field="rollout.engine_urls", hint="start the server, or correct the address",
                )  # fmt: skip
            if child is not None and waited_s > limit_s:
                error = WorkerHung(
                    f"{name} did not answer within cluster.launch_timeout_s={limit_s:g}; its log ends with: "
                    f"{how_far()}",
                    field="cluster.launch_timeout_s", hint=f"see {child.log}, or raise the timeout", rank=index,
                )  # fmt: skip
                error.seconds = limit_s
                raise error
            heartbeat.tick()
            time.sleep(_LOOK_EVERY_S)


def _ended(name: str, child: ChildServer) -> EngineError:
    said = "\n    ".join(child.last_lines(_LINES))
    return EngineError(
        f"{name} ended with status {child.status()} while it started; its log ends with\n    {said}\n ",
        field="rollout.engine_python", hint=f"see {child.log}; rollout.engine_args may be at fault too",
    )  # fmt: skip
