"""Replaces hub ids of models in the settings by local folders; the driver downloads each model before a run starts.

All other processes get the path in the user's cache, which contains the commit. `run.dir/settings.yaml` records id and
commit, so that a resumed run uses the same commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.run_dir import SETTINGS
from actors.startup import is_reporting, stage
from slimefsdp.config import RunConfig
from slimefsdp.config.loader import read_yaml_mapping
from slimefsdp.errors import ConfigError, ModelError, byte_text
from slimefsdp.io.hub import HubId, bytes_there, is_out_of_reach, snapshot
from slimefsdp.models.hf_folder import lacks_weights, made_by, shape_of
from slimefsdp.models.peft_folder import read_peft_folder

DOWNLOADED = "downloaded from the Hugging Face hub when the run starts"


@dataclass(frozen=True, slots=True)
class NotHere:
    """Describes something that valid settings name and that this machine lacks, such as a model or a data set.

    Args:
        field: the setting.
        name: the value of the setting.
        comes: says where the missing thing comes from.
    """

    field: str
    name: str
    comes: str

    def __str__(self) -> str:
        return f"{self.field}={self.name}: {self.comes}"


def models_to_look_at(config: RunConfig, *, with_weights: bool = True) -> tuple[RunConfig, list[NotHere]]:
    """Returns settings with local model folders, and a list of missing models; downloads no weights.

    In the settings, a missing model is a folder with only its config.json, which comes from the hub or this package. A
    missing model of the hub is listed only if its weights are needed.

    Raises:
        As `with_model_folders`; also ModelError if the config.json of a missing model is not available.
    """
    folders: dict[str, Path] = {}
    absent: list[NotHere] = []
    for field, path in config.model_paths.items():
        shape, command = shape_of(path), made_by(path)
        if shape is not None and command is not None:
            folders[field] = shape
            absent.append(NotHere(field, str(path), f"`{command}` makes it"))
        elif field != "lora.path" and (hub_id := HubId.of(path)) is not None:
            wanted = _begun_with(config).get(hub_id.name, hub_id) if hub_id.revision is None else hub_id
            folder = _folder_to_look_at(wanted, field, shape)
            if not with_weights or (field == "model.path" and config.model.init == "random"):
                folders[field] = folder
            elif lacks_weights(folder):
                folders[field] = folder
                absent.append(NotHere(field, str(path), DOWNLOADED))
    return with_model_folders(config.with_model_paths(folders), with_weights=with_weights), absent


def _folder_to_look_at(hub_id: HubId, field: str, shape: Path | None) -> Path:
    """Returns the folder of a hub model without downloading its weights.

    Args:
        shape: the folder to return if the hub is out of reach, as in `shape_of`; None means that this is an error.
    """
    with stage(f"fetching config.json of {hub_id} from the Hugging Face hub", is_short=True):
        try:
            shows_bars = not is_reporting()
            return snapshot(hub_id, "model", field=field, error=ModelError, with_weights=False, shows_bars=shows_bars)
        except ModelError as error:
            if shape is None or not is_out_of_reach(error):
                raise
            return shape


def with_model_folders(config: RunConfig, *, with_weights: bool = True) -> RunConfig:
    """Replaces hub ids of models by local folders, and adds rank, alpha and targets of the adapters in lora.path.

    Args:
        with_weights: whether to download weights; configurations, tokenizers and adapters are always downloaded.

    Raises:
        ModelError: a model is not available, as in `slimefsdp.io.hub.snapshot`, or lora.path is not usable.
        ConfigError: as in `RunConfig.with_adapters`. ResourceError: the disk is full.
    """
    config = _with_local_folders(config, with_weights)
    if config.lora.path is None:
        return config
    adapters = read_peft_folder(config.lora.path)
    return config.with_adapters(adapters.rank, adapters.alpha, adapters.targets)


def _with_local_folders(config: RunConfig, with_weights: bool) -> RunConfig:
    ids = {field: hub_id_of_path for field, path in config.model_paths.items() if (hub_id_of_path := HubId.of(path))}
    if not ids:
        return config
    begun_with = _begun_with(config)
    folders: dict[str, Path] = {}
    for field, wanted in ids.items():
        hub_id = begun_with.get(wanted.name, wanted) if wanted.revision is None else wanted

        def progress(hub_id: HubId = hub_id) -> str:
            return f"{byte_text(bytes_there(hub_id, 'model'))} in the cache"

        with stage(f"fetching {hub_id} from the Hugging Face hub", progress, is_short=True):
            folders[field] = snapshot(
                hub_id,
                "model",
                field=field,
                error=ModelError,
                with_weights=field == "lora.path"
                or (with_weights and (field != "model.path" or config.model.init == "folder")),
                shows_bars=not is_reporting(),
            )
    return config.with_model_paths(folders)


def _begun_with(config: RunConfig) -> dict[str, HubId]:
    """Returns hub name (owner/name) -> id with commit, for the models of the run that is resumed; empty without one."""
    recorded = recorded_settings(config)
    sections = [recorded.get(field.partition(".")[0]) for field in config.model_paths]
    texts = [section.get("path") for section in sections if isinstance(section, dict)]
    ids = [HubId.of(Path(text)) for text in texts if isinstance(text, str)]
    return {hub_id.name: hub_id for hub_id in ids if hub_id is not None and hub_id.is_commit}


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that the resumed run recorded at its last start; empty if no run is resumed."""
    if not config.checkpoint.resume or config.run.dir is None:
        return {}
    try:
        return read_yaml_mapping(config.run.dir / SETTINGS)
    except ConfigError:  # the file is missing or was changed; the checkpoint is checked in any case
        return {}
