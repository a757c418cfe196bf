"""What a server of SGLang says of itself, and whether an engine of this run can use it."""

from __future__ import annotations

import re
from typing import Any

from actors.engines.server_client import Refusal, ServerClient
from actors.engines.server_launch import ASK_S, ServerFacts
from actors.engines.sglang_launch import lora_arguments
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError
from slimefsdp.models.hf_folder import ModelFolder

OLDEST = (0, 5, 23)  # of the releases 0.5.x


def check_server(client: ServerClient, config: RunConfig, folder: ModelFolder) -> ServerFacts:
    """Asks a server what it is.

    Raises:
        EngineError: it cannot be used, for which reason. WorkerDied, WorkerHung: as ServerClient.
    """
    is_own = config.rollout.engine_urls is None
    arguments = "rollout.engine_args" if is_own else "rollout.engine_urls"
    server, model = _asked(client, "/server_info"), _asked(client, "/model_info")
    version = str(server.get("version"))
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else ()
    if release[:2] != OLDEST[:2] or release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineError(
            f"the server at {client.url} is SGLang {version}; 0.5.x from {oldest} on is supported",
            field="rollout.engine_python" if is_own else "rollout.engine_urls",
            hint=f"install sglang=={oldest} for it",
        )
    wanted = {
        "dtype": (config.precision.compute_dtype, "start it with --dtype of precision.compute_dtype"),
        "dp_size": (1, "give each of rollout.engines a server of its own instead of --dp-size"),
        "pp_size": (1, "use --tp-size: stages of a pipeline would take the same rank in the broadcast"),
        "speculative_algorithm": (None, "start it without: drafts have weights that the run does not send"),
        "skip_tokenizer_init": (False, "start it with a tokenizer, for stop texts"),
        "disaggregation_mode": ("null", "start it without: prompts and samples come from one server"),
        "quantization": (None, "start it without: the trainer's log-probs are not of such weights"),
        "preferred_sampling_params": (None, "start it without: the run says how to sample"),
    }
    said = {**server, "model_type": model.get("model_type"), "is_generation": model.get("is_generation")}
    wanted |= {
        "model_type": (folder.model_type, "have it serve model.path"),
        "is_generation": (True, "have it serve model.path"),
    }
    for name, (value, hint) in wanted.items():
        if name not in said or said[name] != value:
            raise EngineError(
                f"the server at {client.url} has {name}={said.get(name)}, and {value} is needed",
                field=arguments,
                hint=hint,
            )
    if config.lora.sync == "adapters":
        found, rank = said.get("max_lora_rank"), config.lora.rank
        assert rank is not None
        if said.get("enable_lora") is not True or not isinstance(found, int) or found < rank:
            raise EngineError(
                f"the server at {client.url} has enable_lora={said.get('enable_lora')} and max_lora_rank={found}: "
                f"lora.sync=adapters with adapters of rank {rank} needs {' '.join(lora_arguments(config))}",
                field=arguments, hint="start it so, or set lora.sync=merged",
            )  # fmt: skip
    sizes = [said.get("max_req_input_len"), said.get("tp_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise EngineError(
            f"the server at {client.url} does not say max_req_input_len and tp_size, but {sizes}",
            field=arguments, hint="use a supported release",
        )  # fmt: skip
    # it takes prompts that are shorter than that, and what goes on after an update is all prompt but for one token
    return ServerFacts(version, said["dtype"], folder.vocab_size, said["max_req_input_len"], said["tp_size"])


def _asked(client: ServerClient, route: str) -> dict[str, Any]:
    try:
        return dict(client.get(route, timeout_s=ASK_S))
    except (Refusal, TypeError, ValueError) as error:
        raise EngineError(
            f"the server at {client.url} is no SGLang: {error}", field="rollout.engine_urls", hint="use one"
        ) from error
