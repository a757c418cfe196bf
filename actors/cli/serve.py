"""`slimefsdp serve` checks the settings and serves the Tinker API over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.cli.preflight import check_start
from actors.cluster.capacity import gpus_of_engines
from actors.cluster.connect import ray_session
from actors.startup import reporting
from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.config import RunConfig, load_config
from slimefsdp.config.launch import check_ready_to_serve
from slimefsdp.errors import ConfigError, byte_text
from slimefsdp.io.files import FolderLock
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import check_tokenizer, read_model_folder


def serve_command(path: Path, overrides: Sequence[str]) -> int:
    """Checks the settings, then serves until a signal ends this process.

    Raises:
        SlimeError: the settings or the machine are wrong, which is found before anything starts; or a failure later.
    """
    with reporting():
        config = checked_to_serve(load_config(path, overrides))
        with ray_session(config):
            from actors.service.serve import serve

            serve(config, lambda url, stop: print(f"serving {config.model.path} at {url}", flush=True))
    return 0


def checked_to_serve(config: RunConfig) -> RunConfig:
    """Checks all that can be known before a start; returns the settings, with a local folder for a model of the hub.

    Afterwards this process holds the lock of run.dir, so that no other `serve` or `train` begins there.

    Raises:
        ConfigError, ModelError, ResourceError: something is missing or does not fit; the error names the setting.
        CheckpointError: another process serves or trains in run.dir; the error names its pid and host.
    """
    check_ready_to_serve(config)
    assert config.run.dir is not None
    FolderLock(config.run.dir).require_free()  # refuses a second server early; the folder is made when all is fine
    _require_packages()
    from actors.service.serve import keys_of, listening

    listening(config).close()
    keys_of(config)
    config = check_start(config, engines=gpus_of_engines(config) if config.rollout.engine == "vllm" else 1)
    check_tokenizer(config.model.path)
    if config.lora.rank is None:
        _check_versions_fit(config)
    assert config.run.dir is not None
    FolderLock(config.run.dir).acquire()  # before Ray starts, which takes seconds and writes there
    return config


def _require_packages() -> None:
    """Raises ConfigError if a package of the extra `serve` is not installed."""
    try:
        import google.protobuf
        import prometheus_client
        import starlette
        import uvicorn
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed, and `serve` needs it",
            field="serve",
            hint="pip install 'slimefsdp[serve]'",
        ) from error
    del google, prometheus_client, starlette, uvicorn, zstandard


def _check_versions_fit(config: RunConfig) -> None:
    """Refuses a service.max_version_bytes that is smaller than one version of all weights of the model."""
    spec = ModelSpec.from_config(read_model_folder(config.model.path, with_weights=False).config)
    needed, room = spec.parameters * ELEMENT_BYTES[config.precision.compute_dtype], config.service.max_version_bytes
    if needed > room:
        raise ConfigError(
            f"service.max_version_bytes={room} holds no version of this model, which has {byte_text(needed)}",
            field="service.max_version_bytes",
            hint=f"set it to {needed:,} for each version that is sampled at once, or train adapters: lora.rank=32",
        )
