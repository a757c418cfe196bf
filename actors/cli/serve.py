"""`slimefsdp serve`: a server for clients of the Tinker API, and what is checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.cli.preflight import check_installed, check_models, check_servers
from actors.cli.ray_session import ray_session
from actors.cluster.capacity import check_gpus, check_machine, gpus_of_engines
from actors.model_folders import with_model_folders
from actors.startup import reporting
from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.config import RunConfig, load_config
from slimefsdp.config.launch import check_ready_to_serve
from slimefsdp.errors import ConfigError, byte_text
from slimefsdp.io.files import FolderLock
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder


def serve_command(path: Path, overrides: Sequence[str]) -> int:
    """Checks the settings, then serves until a signal ends it.

    Raises:
        SlimeError: what is wrong with the settings or the machine, before anything starts; or how the service failed.
    """
    with reporting():
        config = checked_to_serve(load_config(path, overrides))
        with ray_session(config):
            from actors.service.serve import serve

            serve(config, lambda url, stop: print(f"serving {config.model.path} at {url}", flush=True))
    return 0


def checked_to_serve(config: RunConfig) -> RunConfig:
    """The settings with the model's folder, when all that can be known before a start is fine.

    From here on this process has the lock of run.dir, so that no other `serve` or `train` begins there meanwhile.

    Raises:
        ConfigError, ModelError, ResourceError: naming what is not. CheckpointError: another process serves or trains in
            run.dir; its pid and host are named.
    """
    from actors.service.serve import keys_of, listening, require_packages

    check_ready_to_serve(config)
    assert config.run.dir is not None
    FolderLock(config.run.dir).require_free()  # a second server is told at once; the folder is made when all is fine
    listening(config).close()
    require_packages()
    keys_of(config)
    config = with_model_folders(config)
    check_models(config)
    if config.lora.rank is None:
        _check_versions_fit(config)
    check_installed(config)
    check_machine(config)
    check_gpus(config, engines=gpus_of_engines(config) if config.rollout.engine == "vllm" else 1)
    check_servers(config)
    assert config.run.dir is not None
    FolderLock(config.run.dir).acquire()  # before Ray starts, which takes seconds and writes there
    return config


def _check_versions_fit(config: RunConfig) -> None:
    """Whether the sampling engine has room for one whole model beside the base.

    Raises:
        ConfigError: it has not.
    """
    spec = ModelSpec.from_config(read_model_folder(config.model.path, with_weights=False).config)
    needed, room = spec.parameters * ELEMENT_BYTES[config.precision.compute_dtype], config.service.max_version_bytes
    if needed > room:
        raise ConfigError(
            f"service.max_version_bytes={room} holds no version of this model, which has {byte_text(needed)}",
            field="service.max_version_bytes",
            hint=f"set it to {needed:,} for each version that is sampled at once, or train adapters: lora.rank=32",
        )
