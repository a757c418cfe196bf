"""What the starts of rollout servers have in common: where their logs are, how long samples get, when one is ready."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.cluster.allocator import ALLOCATOR
from actors.cluster.capacity import has_nvidia_driver
from actors.engines.child_server import ChildServer
from actors.engines.dialect import ASK_S, ServerDialect
from actors.engines.server_client import ServerClient
from actors.startup import stage
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, WorkerHung, short_repr
from slimefsdp.models.hf_folder import ModelFolder

LOGS = "engine_logs"  # below run.dir
LOOPBACK = "127.0.0.1"
BACK_S = 60.0  # for a server at a URL, which whoever keeps it may be starting again
_LOOK_EVERY_S = 0.5
_LINES = 15  # of a log, in an error


def is_on_cpu(config: RunConfig) -> bool:
    """Whether a server that is started here has no GPU."""
    return config.mesh.device == "cpu" or (config.mesh.device == "auto" and not has_nvidia_driver())


def shares_a_gpu(config: RunConfig) -> bool:
    """Whether a server that is started here has to free its GPU for a rank."""
    return config.rollout.placement == "colocated" and not is_on_cpu(config)


def log_folder(config: RunConfig) -> Path:
    """Returns where servers of a run write, and run."""
    if config.run.dir is None:
        return Path(tempfile.mkdtemp(prefix="slimefsdp_engine_"))
    logs = config.run.dir.absolute() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def start_client(dialect: ServerDialect, config: RunConfig, index: int) -> ServerClient:
    """Returns a client of the server of an engine: one of rollout.engine_urls, or one that is started on loopback."""
    if config.rollout.engine_urls is not None:
        return ServerClient(config.rollout.engine_urls[index], index, alive=dialect.ALIVE)
    assert config.rollout.engine_python is not None
    logs, port = log_folder(config), free_port()
    program = str(config.rollout.engine_python.absolute())
    command = [program, *dialect.arguments(), "--host", LOOPBACK, "--port", str(port)]
    # this process computes by one thread, and has settings for that which are not for a server
    environment = {name: value for name, value in dialect.environment(logs).items() if name not in ALLOCATOR}
    child = ChildServer(command, environment, logs / f"{dialect.NAME.lower()}_{index}.log", logs)
    return ServerClient(f"http://{LOOPBACK}:{port}", index, child, alive=dialect.ALIVE)


def facts_of(dialect: ServerDialect, client: ServerClient, config: RunConfig, index: int) -> Any:
    """Waits until a server answers, and returns what it says of itself, as `dialect.check` does.

    Raises:
        EngineError: it ended, nobody is there, or it cannot be used. WorkerHung: it takes too long.
    """
    wait_until_ready(dialect.NAME, client, config, index)
    try:
        return dialect.check(client)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the server at {client.url} does not answer as {dialect.NAME} does: {type(error).__name__}: "
            f"{short_repr(str(error))}",
            field="rollout.engine_urls", hint="name one of a supported release (docs/engines.md)",
        ) from error  # fmt: skip


def free_port() -> int:
    """Returns a port that is free now. If another process takes it first, the server's log says so."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def longest_sample(config: RunConfig, folder: ModelFolder) -> int:
    """Returns the most tokens of a prompt with its response: bounded by a pack and by the model's positions."""
    pack = config.batch.max_tokens_per_rank * config.mesh.cp
    positions = folder.config.get("max_position_embeddings", folder.max_sample_tokens)
    return pack if positions is None else min(pack, int(positions))


def wait_until_ready(name: str, client: ServerClient, config: RunConfig, index: int) -> None:
    """Returns when the server answers; one that this process did not start may be on its way back.

    Raises:
        EngineError: it ended, or nobody comes to the URL. WorkerHung: it took more than cluster.launch_timeout_s.
    """
    child, began = client.child, time.monotonic()
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
