"""What a server of vLLM says of itself, and whether an engine of this run can use it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from actors.rollout.child_server import ChildServer
from actors.rollout.vllm_client import Refusal, VllmClient
from actors.rollout.vllm_launch import BACKEND, NEEDED
from actors.startup import stage
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder

SUPPORTED = "0.32"
PROTOCOL = 1  # as in slimefsdp.weight_sync.vllm_plugin
_LOOK_EVERY_S = 0.5
_ASK_S = 60.0  # for a question that costs nothing; a busy machine may take some seconds
_LINES = 15  # of a log, in an error


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server that can be used."""

    version: str
    dtype: str
    vocab_size: int
    max_model_len: int
    workers: int


def wait_until_ready(client: VllmClient, child: ChildServer | None, config: RunConfig, index: int) -> None:
    """Returns when the server answers; one that this process did not start must do so at once.

    Raises:
        EngineError: it ended, or nobody is at the URL. WorkerHung: it took more than cluster.launch_timeout_s.
    """
    began = time.monotonic()
    limit_s = config.cluster.launch_timeout_s

    def how_far() -> str:
        said = child.last_lines(1) if child is not None else []
        return said[0][-100:] if said else "nothing said yet"

    with stage(f"starting vLLM for engine {index}", how_far):
        while True:
            if child is not None and child.status() is not None:
                raise _ended(child)
            if _answers(client):
                return
            if child is None:
                raise EngineError(
                    f"nobody answers at rollout.engine_urls[{index}]={client.url}",
                    field="rollout.engine_urls", hint="start the server, or correct the address",
                )  # fmt: skip
            if time.monotonic() - began > limit_s:
                error = WorkerHung(
                    f"vLLM did not answer within cluster.launch_timeout_s={limit_s:g}; its log ends with: {how_far()}",
                    field="cluster.launch_timeout_s", hint=f"see {child.log}, or raise the timeout", rank=index,
                )  # fmt: skip
                error.seconds = limit_s
                raise error
            heartbeat.tick()
            time.sleep(_LOOK_EVERY_S)


def check_server(client: VllmClient, config: RunConfig, folder: ModelFolder) -> ServerFacts:
    """Asks a server what it is.

    Raises:
        EngineError: it cannot be used, for which reason. WorkerDied, WorkerHung: as VllmClient.
    """
    is_own = config.rollout.engine_urls is None
    arguments = "rollout.engine_args" if is_own else "rollout.engine_urls"
    version = _asked(client, "/version")["version"]
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise EngineError(
            f"the server at {client.url} is vLLM {version}; {SUPPORTED}.x is supported",
            field="rollout.engine_python" if is_own else "rollout.engine_urls",
            hint=f"install vllm=={SUPPORTED}.0 for it",
        )
    try:
        client.get("/weight_info", timeout_s=_ASK_S)
    except Refusal as refusal:
        if refusal.status != 404:
            raise _refused(refusal) from refusal
        raise EngineError(
            f"the server at {client.url} takes no weights: it was started without VLLM_SERVER_DEV_MODE=1",
            field=arguments, hint="start it with VLLM_SERVER_DEV_MODE=1 in its environment",
        ) from refusal  # fmt: skip
    said = _worker(client, arguments)
    wanted = {
        "protocol": (PROTOCOL, "have server and trainer use the same release of slimefsdp"),
        "backend": (BACKEND, f"start it with {NEEDED[1]}"),
        "logprobs_mode": ("processed_logprobs", f"start it with {NEEDED[2]}"),
        "dtype": (config.precision.compute_dtype, "start it with --dtype of precision.compute_dtype"),
        "model_type": (folder.model_type, "have it serve model.path"),
        "vocab_size": (folder.vocab_size, "have it serve model.path"),
    }
    for name, (value, hint) in wanted.items():
        if said.get(name) != value:
            raise EngineError(
                f"the server at {client.url} has {name}={said.get(name)}, and {value} is needed",
                field=arguments,
                hint=hint,
            )
    _check_generate(client, arguments)
    workers = _asked(client, "/get_world_size")["world_size"]
    return ServerFacts(version, said["dtype"], said["vocab_size"], said["max_model_len"], workers)


def _answers(client: VllmClient) -> bool:
    try:
        client.get("/health", timeout_s=_ASK_S)
    except Exception:  # not there, or not ready: both are for the caller's patience
        return False
    return True


def _asked(client: VllmClient, route: str) -> Any:
    try:
        return client.get(route, timeout_s=_ASK_S)
    except Refusal as refusal:
        raise _refused(refusal) from refusal


def _worker(client: VllmClient, arguments: str) -> dict[str, Any]:
    try:
        answer = client.post("/collective_rpc", {"method": "slimefsdp_worker"}, timeout_s=_ASK_S)
        said = answer["results"][0]
    except (Refusal, KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"the workers of the server at {client.url} do not know slimefsdp: {error}",
            field=arguments, hint=f"start it with {NEEDED[0]} and this package in its PYTHONPATH",
        ) from error  # fmt: skip
    return dict(said)


def _check_generate(client: VllmClient, arguments: str) -> None:
    try:
        client.post("/inference/v1/generate", {}, timeout_s=_ASK_S)
    except Refusal as refusal:
        if refusal.status in (400, 422):  # it looked for the fields
            return
        raise EngineError(
            f"the server at {client.url} does not generate from token ids: {refusal}",
            field=arguments, hint=f"start it with {NEEDED[3]}",
        ) from refusal  # fmt: skip


def _refused(refusal: Refusal) -> EngineError:
    return EngineError(f"the server is no vLLM {SUPPORTED}: {refusal}", field="rollout.engine_urls", hint="use one")


def _ended(child: ChildServer) -> EngineError:
    said = "\n    ".join(child.last_lines(_LINES))
    return EngineError(
        f"vLLM ended with status {child.status()} while it started; its log ends with\n    {said}\n ",
        field="rollout.engine_python", hint=f"see {child.log}; rollout.engine_args may be at fault too",
    )  # fmt: skip
