"""How a run starts a server of SGLang: its command and its environment."""

from __future__ import annotations

import os

from actors.engines.child_server import ChildServer
from actors.engines.server_launch import (
    SERVED_AS,
    is_on_cpu,
    log_folder,
    longest_sample,
    shares_a_gpu,
    start_on_loopback,
)
from slimefsdp.config import RunConfig
from slimefsdp.models.hf_folder import ModelFolder

_KEPT_BACK = 6  # tokens of its context that SGLang leaves free: its max_req_input_len is so much less
# they would make log-probs those of other logits than tokens are drawn from, or numbers of what is none
_CHANGES_LOG_PROBS = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_SANITIZE_NAN_LOGITS")


def start_server(config: RunConfig, folder: ModelFolder, index: int) -> tuple[ChildServer, str]:
    """A server that has just been started, on this machine's loopback alone, and its URL."""
    assert config.rollout.engine_python is not None
    command = [
        str(config.rollout.engine_python.absolute()),
        *("-m", "sglang.launch_server"),
        *server_arguments(config, folder),
    ]
    return start_on_loopback("sglang", index, command, _environment(), log_folder(config))


def server_arguments(config: RunConfig, folder: ModelFolder) -> list[str]:
    """Those of SGLang's server for this run; of the user's, which come last, a later one wins."""
    arguments = [
        *("--model-path", str(folder.path)),
        *("--served-model-name", SERVED_AS),
        *("--dtype", config.precision.compute_dtype),
        *("--context-length", str(longest_sample(config, folder) + _KEPT_BACK)),
        *("--load-format", "dummy"),  # its weights come from the trainer
        "--skip-server-warmup",  # there are none to warm up with
    ]
    if is_on_cpu(config):
        arguments += ["--device", "cpu"]
    else:
        arguments += ["--tp-size", str(config.rollout.gpus_per_engine)]
    if shares_a_gpu(config):
        arguments.append("--enable-memory-saver")
    if config.lora.sync == "adapters":
        arguments += lora_arguments(config)
    return [*arguments, *config.rollout.engine_args]


def lora_arguments(config: RunConfig) -> list[str]:
    """Those of a server with room for the run's adapter; of every matrix that SGLang has one of."""
    assert config.lora.rank is not None
    return ["--enable-lora", "--max-lora-rank", str(config.lora.rank), "--lora-target-modules", "all"]


def _environment() -> dict[str, str]:
    """This process's without its packages, and without what would change log-probs."""
    removed = ("PYTHONPATH", "PYTHONHOME", *_CHANGES_LOG_PROBS)
    own = {name: value for name, value in os.environ.items() if name not in removed}
    # what SGLang keeps back may lie beyond the model's positions; no token comes there
    return {**own, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
