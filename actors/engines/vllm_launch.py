"""How a run, or a service, starts a server of vLLM: its command, its environment, and where our end comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import slimefsdp
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
from slimefsdp.config.rollout import VLLM_RANKS
from slimefsdp.models.hf_folder import ModelFolder

EXTENSION = "slimefsdp.weight_sync.vllm_plugin.WorkerExtension"
BACKEND = "slimefsdp"  # as slimefsdp.weight_sync.vllm_plugin registers it
HELD_ADAPTER = "slimefsdp:adapter"  # as there
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # in a server's environment, for it to be told of adapters
NEEDED = (
    f"--worker-extension-cls={EXTENSION}",
    f'--weight-transfer-config={{"backend": "{BACKEND}"}}',
    "--logprobs-mode=processed_logprobs",
    "--enable-scale-out",
)
"""Arguments without which a server is of no use to a run, whoever starts it."""
SAMPLING_NEEDED = (NEEDED[0], "--logprobs-mode=raw_logprobs", NEEDED[3])
"""The same of a service, whose log-probs are at temperature 1 whatever they are drawn at."""
_ON_CPU = {
    # threads that vLLM binds to cores of its choice would share them with the trainer's
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else it takes a share of the machine
}


def start_server(config: RunConfig, folder: ModelFolder, index: int) -> tuple[ChildServer, str]:
    """A server of a run that has just been started, on this machine's loopback alone, and its URL."""
    takes_adapters = config.lora.sync == "adapters"
    return _started(config, index, server_arguments(config, folder), takes_adapters=takes_adapters)


def start_sampling_server(
    config: RunConfig, folder: ModelFolder, adapters: int, modules: Sequence[str]
) -> tuple[ChildServer, str]:
    """One of a service, which samples from the model of the folder beside adapters that it is told of.

    Args:
        adapters: that it has room for.
        modules: last parts of the names of those that adapters are of.
    """
    return _started(config, 0, sampling_arguments(config, folder, adapters, modules), takes_adapters=True)


def server_arguments(config: RunConfig, folder: ModelFolder) -> list[str]:
    """Those of vLLM's server for this run; of the user's, which come last, a later one wins."""
    # its weights come from the trainer
    arguments = [*_common_arguments(config, folder), "--load-format", "dummy", *NEEDED]
    if shares_a_gpu(config):
        arguments.append("--enable-sleep-mode")
    if config.lora.sync == "adapters":
        arguments += ["--enable-lora", "--max-lora-rank", str(room_for(config)), "--max-loras", "1"]
    return [*arguments, *config.rollout.engine_args]


def sampling_arguments(config: RunConfig, folder: ModelFolder, adapters: int, modules: Sequence[str]) -> list[str]:
    """As `server_arguments`, for `start_sampling_server`."""
    room = ["--max-lora-rank", str(room_for(config)), "--max-loras", str(adapters), "--max-cpu-loras", str(adapters)]
    return [
        *_common_arguments(config, folder),
        *SAMPLING_NEEDED,
        *("--max-logprobs", "256"),  # of the likeliest tokens: as many as clients of the service may ask for
        *("--enable-lora", *room, "--lora-target-modules", *modules),
        *config.rollout.engine_args,
    ]


def _common_arguments(config: RunConfig, folder: ModelFolder) -> list[str]:
    arguments = [
        *("--model", str(folder.path)),
        *("--served-model-name", SERVED_AS),
        *("--dtype", config.precision.compute_dtype),
        *("--max-model-len", str(longest_sample(config, folder))),
        "--disable-uvicorn-access-log",
    ]
    if is_on_cpu(config):
        # compiling takes minutes; a prompt that is read in parts has its draw taken back by moving the generator of its
        # seed, which those of a CPU refuse: the server would end
        return [*arguments, "--enforce-eager", "--no-enable-chunked-prefill"]
    return [*arguments, "--tensor-parallel-size", str(config.rollout.gpus_per_engine)]


def room_for(config: RunConfig) -> int:
    """The smallest rank that vLLM keeps room for and the run's adapters have."""
    assert config.lora.rank is not None
    return next(rank for rank in VLLM_RANKS if rank >= config.lora.rank)


def _started(
    config: RunConfig, index: int, arguments: Sequence[str], *, takes_adapters: bool
) -> tuple[ChildServer, str]:
    assert config.rollout.engine_python is not None
    logs = log_folder(config)
    command = [str(config.rollout.engine_python.absolute()), "-m", "vllm.entrypoints.openai.api_server", *arguments]
    return start_on_loopback("vllm", index, command, _environment(config, logs, takes_adapters=takes_adapters), logs)


def _environment(config: RunConfig, logs: Path, *, takes_adapters: bool) -> dict[str, str]:
    """This process's, with a PYTHONPATH that has our package in it and nothing else of our environment."""
    window = logs / "importable"
    window.mkdir(exist_ok=True)
    link, package = window / "slimefsdp", Path(slimefsdp.__file__).resolve().parent
    if not link.is_symlink() or link.resolve() != package:
        fresh = window / f"slimefsdp.{os.getpid()}"  # engines of one run start together
        fresh.symlink_to(package, target_is_directory=True)
        fresh.replace(link)
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    own |= {"PYTHONPATH": str(window), "VLLM_SERVER_DEV_MODE": "1"}
    if takes_adapters:
        own[RUNTIME_LORA] = "1"
    usual = {"VLLM_NO_USAGE_STATS": "1", **(_ON_CPU if is_on_cpu(config) else {})}
    return {**usual, **own}
