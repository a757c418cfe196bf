"""What a server of vLLM says of itself, and whether an engine of this run can use it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from actors.engines.server_client import Refusal, ServerClient
from actors.engines.server_launch import ASK_S, ServerFacts
from actors.engines.vllm_launch import BACKEND, NEEDED, RUNTIME_LORA, SAMPLING_NEEDED, room_for
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError
from slimefsdp.models.hf_folder import ModelFolder

SUPPORTED = "0.32"
PROTOCOL = 4  # as in slimefsdp.weight_sync.vllm_plugin


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """A server that a service can sample with."""

    max_model_len: int  # of a prompt and its response
    adapters: int  # that it has room for
    prompt_top_k: int  # likeliest tokens of a place in a prompt that it tells of at most
    reads_prompts: bool  # and has log-probs of several at once: vLLM fails beside adapters of the head


def check_server(client: ServerClient, config: RunConfig, folder: ModelFolder) -> ServerFacts:
    """Asks a server what it is.

    Raises:
        EngineError: it cannot be used, for which reason. WorkerDied, WorkerHung: as ServerClient.
    """
    arguments = _arguments(config)
    version = _version(client, config)
    if (refusal := _refusal_of_weights(client)) is not None:
        raise EngineError(
            f"the server at {client.url} takes no weights: it was started without VLLM_SERVER_DEV_MODE=1",
            field=arguments, hint="start it with VLLM_SERVER_DEV_MODE=1 in its environment",
        ) from refusal  # fmt: skip
    wanted = {
        "backend": (BACKEND, f"start it with {NEEDED[1]}"),
        "logprobs_mode": ("processed_logprobs", f"start it with {NEEDED[2]}"),
    }
    said = _said_by_worker(client, config, folder, wanted)
    _check_generate(client, arguments)
    if config.lora.sync == "adapters":
        _check_adapters(client, arguments, config, said["max_lora_rank"], "lora.sync=adapters", "lora.sync=merged")
    workers = _asked(client, "/get_world_size")["world_size"]
    return ServerFacts(version, said["dtype"], said["vocab_size"], said["max_model_len"], workers)


def check_sampling_server(
    client: ServerClient, config: RunConfig, folder: ModelFolder, modules: Collection[str]
) -> SamplingFacts:
    """As `check_server`, for a service.

    Args:
        modules: last parts of the names of those that adapters are of.

    Raises:
        EngineError, WorkerDied, WorkerHung: as `check_server`.
    """
    arguments = _arguments(config)
    _version(client, config)
    wanted = {"logprobs_mode": ("raw_logprobs", f"start it with {SAMPLING_NEEDED[1]}")}
    said = _said_by_worker(client, config, folder, wanted)
    _check_generate(client, arguments)
    _check_adapters(client, arguments, config, said["max_lora_rank"], "a service", "rollout.engine=embedded")
    own = said["lora_modules"]
    missing = [] if own is None else sorted(set(modules) - set(own))
    if said["max_loras"] < 2 or missing:
        has = f"no adapters of {missing[0]}" if missing else "room for one adapter alone, which the base takes"
        raise EngineError(
            f"the server at {client.url} has {has}", field=arguments,
            hint=f"start it with --max-loras 9 --lora-target-modules {' '.join(modules)}, to hold 8 versions at once",
        )  # fmt: skip
    reads_prompts = own is not None and "lm_head" not in own
    top_k = said["vocab_size"] if said["max_logprobs"] == -1 else said["max_logprobs"]
    return SamplingFacts(said["max_model_len"], said["max_loras"], top_k, reads_prompts)


def _arguments(config: RunConfig) -> str:
    """The setting that says how a server is started."""
    return "rollout.engine_args" if config.rollout.engine_urls is None else "rollout.engine_urls"


def _version(client: ServerClient, config: RunConfig) -> str:
    version: str = _asked(client, "/version")["version"]
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise EngineError(
            f"the server at {client.url} is vLLM {version}; {SUPPORTED}.x is supported",
            field="rollout.engine_python" if config.rollout.engine_urls is None else "rollout.engine_urls",
            hint=f"install vllm=={SUPPORTED}.0 for it",
        )
    return version


def _refusal_of_weights(client: ServerClient) -> Refusal | None:
    try:
        client.get("/weight_info", timeout_s=ASK_S)
    except Refusal as refusal:
        if refusal.status != 404:
            raise _refused(refusal) from refusal
        return refusal
    return None


def _said_by_worker(
    client: ServerClient, config: RunConfig, folder: ModelFolder, wanted: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """What one of its workers says of itself.

    Args:
        wanted: values of what has to be as they say, and the way out; what is the same of all servers is added.
    """
    arguments = _arguments(config)
    said = _worker(client, arguments)
    common: dict[str, tuple[Any, str]] = {
        "protocol": (PROTOCOL, "have server and trainer use the same release of slimefsdp"),
        **wanted,
        "dtype": (config.precision.compute_dtype, "start it with --dtype of precision.compute_dtype"),
        "model_type": (folder.model_type, "have it serve model.path"),
        "vocab_size": (folder.vocab_size, "have it serve model.path"),
    }
    for name, (value, hint) in common.items():
        if said.get(name) != value:
            raise EngineError(
                f"the server at {client.url} has {name}={said.get(name)}, and {value} is needed",
                field=arguments,
                hint=hint,
            )
    return said


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


def _check_adapters(
    client: ServerClient, arguments: str, config: RunConfig, found: int | None, who: str, otherwise: str
) -> None:
    """Whether a server has room for adapters of lora.rank, `found` being the rank that it has room for.

    Args:
        who: needs them.
        otherwise: the setting that does without.
    """
    needed = f"--enable-lora --max-lora-rank {room_for(config)}"
    if found is None or found < room_for(config):
        has = "no room for adapters" if found is None else f"room for adapters of rank {found} alone"
        raise EngineError(
            f"the server at {client.url} has {has}: {who} with adapters of rank {config.lora.rank} needs {needed}",
            field=arguments, hint=f"start it so, or set {otherwise}",
        )  # fmt: skip
    if (refusal := _refusal_of(client, "/v1/load_lora_adapter")) is not None:
        raise EngineError(
            f"the server at {client.url} has no {RUNTIME_LORA}=1, which {who} needs: {refusal}",
            field=arguments, hint=f"start it with that in its environment, or set {otherwise}",
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
