"""Models that the settings name by an id of the Hugging Face hub: fetched once, by the driver, before anything starts.

Everybody else is given the folder in the user's cache, whose name is the commit. `run.dir/settings.yaml` says id and
commit, and there a resumed run looks which commit it began with.
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
from slimefsdp.models.hf_folder import lacks_weights
from slimefsdp.models.named_shapes import made_by, shape_of
from slimefsdp.models.peft_folder import read_peft_folder

DOWNLOADED = "downloaded from the Hugging Face hub when the run starts"


@dataclass(frozen=True, slots=True)
class NotHere:
    """Something that settings name and this machine does not have yet, although the settings are fine.

    Args:
        name: as the settings write it.
        comes: how it gets here.
    """

    field: str
    name: str
    comes: str

    def __str__(self) -> str:
        return f"{self.field}={self.name}: {self.comes}"


def models_to_look_at(config: RunConfig, *, with_weights: bool = True) -> tuple[RunConfig, list[NotHere]]:
    """Finds the models' folders without downloading weights; lists models that are not here yet.

    A model that is not here is replaced by a folder with its config.json, from the hub or from
    `slimefsdp.models.named_shapes`, and listed where its weights were needed.

    Raises:
        As `with_model_folders`; ModelError too where nothing is known of a model that is not here.
    """
    folders: dict[str, Path] = {}
    absent: list[NotHere] = []
    for field, path in config.model_paths.items():
        shape, command = shape_of(path), made_by(path)
        if shape is not None and command is not None:
            folders[field] = shape
            absent.append(NotHere(field, str(path), f"`{command}` makes it"))
        elif field != "lora.path" and (hub_id := HubId.of(path)) is not None:
            asked = _begun_with(config).get(hub_id.name, hub_id) if hub_id.revision is None else hub_id
            found = _folder_to_look_at(asked, field, shape)
            if not with_weights or (field == "model.path" and config.model.init == "random"):
                folders[field] = found
            elif lacks_weights(found):
                folders[field] = found
                absent.append(NotHere(field, str(path), DOWNLOADED))
    return with_model_folders(config.with_model_paths(folders), with_weights=with_weights), absent


def _folder_to_look_at(hub_id: HubId, field: str, shape: Path | None) -> Path:
    """Returns a hub model's folder without downloading weights, or its named shape if the hub is out of reach.

    Raises:
        ModelError: as `slimefsdp.io.hub.snapshot`, and nothing is known of the model.
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
    """The settings with a local folder wherever they name a model by its id, and with what lora.path says of adapters.

    Args:
        with_weights: without, configurations and tokenizers alone are fetched; adapters are.

    Raises:
        ModelError: a model cannot be had, as `slimefsdp.io.hub.snapshot` says, or lora.path not be honoured.
        ConfigError: as `RunConfig.with_adapters`. ResourceError: the disk is full.
    """
    config = _with_local_folders(config, with_weights)
    if config.lora.path is None:
        return config
    adapters = read_peft_folder(config.lora.path)
    return config.with_adapters(adapters.rank, adapters.alpha, adapters.targets)


def _with_local_folders(config: RunConfig, with_weights: bool) -> RunConfig:
    ids = {field: found for field, path in config.model_paths.items() if (found := HubId.of(path))}
    if not ids:
        return config
    begun_with = _begun_with(config)
    folders: dict[str, Path] = {}
    for field, asked in ids.items():
        hub_id = begun_with.get(asked.name, asked) if asked.revision is None else asked

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
    """Name -> the id with its commit, of the models that a run to be resumed has begun with."""
    recorded = recorded_settings(config)
    sections = [recorded.get(field.partition(".")[0]) for field in config.model_paths]
    texts = [section.get("path") for section in sections if isinstance(section, dict)]
    ids = [HubId.of(Path(text)) for text in texts if isinstance(text, str)]
    return {found.name: found for found in ids if found is not None and found.is_commit}


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """Returns what the newest start of a run to be resumed has left as its settings; nothing of any other run."""
    if not config.checkpoint.resume or config.run.dir is None:
        return {}
    try:
        return read_yaml_mapping(config.run.dir / SETTINGS)
    except ConfigError:  # there is none, or somebody has written another one: the checkpoint says what it can
        return {}
