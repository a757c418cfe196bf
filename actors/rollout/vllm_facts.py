"""What a server of vLLM says of itself, and whether an engine of this run can use it."""

from __future__ import annotations

from typing import Any

from actors.rollout.server_client import Refusal, ServerClient
from actors.rollout.server_launch import ASK_S, ServerFacts
from actors.rollout.vllm_launch import BACKEND, NEEDED, RUNTIME_LORA, room_for
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError
from slimefsdp.models.hf_folder import ModelFolder

SUPPORTED = "0.32"
PROTOCOL = 3  # as in slimefsdp.weight_sync.vllm_plugin


def check_server(client: ServerClient, config: RunConfig, folder: ModelFolder) -> ServerFacts:
    """Asks a server what it is.

    Raises:
        EngineError: it cannot be used, for which reason. WorkerDied, WorkerHung: as ServerClient.
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
        client.get("/weight_info", timeout_s=ASK_S)
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
    if config.lora.sync == "adapters":
        _check_adapters(client, arguments, config, said.get("max_lora_rank"))
    workers = _asked(client, "/get_world_size")["world_size"]
    return ServerFacts(version, said["dtype"], said["vocab_size"], said["max_model_len"], workers)


def _asked(client: ServerClient, route: str) -> Any:
    try:
        return client.get(route, timeout_s=ASK_S)
    except Refusal as refusal:
        raise _refused(refusal) from refusal


def _worker(client: ServerClient, arguments: str) -> dict[str, Any]:
    try:
        answer = client.post("/collective_rpc", {"method": "slimefsdp_worker"}, timeout_s=ASK_S)
        said = answer["results"][0]
    except (Refusal, KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"the workers of the server at {client.url} do not know slimefsdp: {error}",
            field=arguments, hint=f"start it with {NEEDED[0]} and this package in its PYTHONPATH",
        ) from error  # fmt: skip
    return dict(said)


def _check_generate(client: ServerClient, arguments: str) -> None:
    if (refusal := _refusal_of(client, "/inference/v1/generate")) is not None:
        raise EngineError(
            f"the server at {client.url} does not generate from token ids: {refusal}",
            field=arguments, hint=f"start it with {NEEDED[3]}",
        ) from refusal  # fmt: skip


def _check_adapters(client: ServerClient, arguments: str, config: RunConfig, found: int | None) -> None:
    """Whether a server has room for the run's adapters, `found` being the rank that it has room for."""
    needed = f"--enable-lora --max-lora-rank {room_for(config)}"
    if found is None or found < room_for(config):
        has = "no room for adapters" if found is None else f"room for adapters of rank {found} alone"
        raise EngineError(
            f"the server at {client.url} has {has}: lora.sync=adapters with adapters of rank {config.lora.rank} needs "
            f"{needed}",
            field=arguments, hint="start it so, or set lora.sync=merged",
        )  # fmt: skip
    if (refusal := _refusal_of(client, "/v1/load_lora_adapter")) is not None:
        raise EngineError(
            f"the server at {client.url} has no {RUNTIME_LORA}=1, which lora.sync=adapters needs: {refusal}",
            field=arguments, hint="start it with that in its environment, or set lora.sync=merged",
        ) from refusal  # fmt: skip


def _refused(refusal: Refusal) -> EngineError:
    return EngineError(f"the server is no vLLM {SUPPORTED}: {refusal}", field="rollout.engine_urls", hint="use one")


def _refusal_of(client: ServerClient, route: str) -> Refusal | None:
    """What a server says to a request without fields where it does not have the route; None where it has."""
    try:
        client.post(route, {}, timeout_s=ASK_S)
    except Refusal as refusal:
        return None if refusal.status in (400, 422) else refusal  # it looked for the fields
    return None
