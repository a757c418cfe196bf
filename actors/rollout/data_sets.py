"""Reads JSONL and Parquet files, folders of data files and data sets of the Hugging Face hub as plain dictionaries.

All sources except JSONL files need the package `datasets` (the extra `data`), which is imported only for them. Arrow
values become plain Python values and are not decoded. So an image is bytes, and a record must not have bytes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import yaml

from actors.startup import is_reporting, stage
from slimefsdp.errors import ConfigError, byte_text, short_text
from slimefsdp.io.hub import HubId, bytes_there, snapshot
from slimefsdp.io.user_files import is_deeper, open_plain, parse_json
from slimefsdp.models.hf_folder import made_by

if TYPE_CHECKING:
    from slimefsdp.config.data import DataSettings

T = TypeVar("T")
Row = tuple[dict[str, Any], str]
"""A record's columns, and its place for errors: `file:line`, or `file row n` or `id[split] row n` counted from 0."""

MAX_LINE = 16_000_000  # limit on the characters of a line; a prompt of millions of tokens fits
MAX_LEVELS = 100  # limit on nested brackets in a record; more could exceed the recursion limit when it is written
MAX_FILES = 10_000  # limit on the files of a folder
_SELECTION = re.compile(
    r"(?P<path>.+?)(?::(?P<config>[\w.+-]+))?(?:#(?P<split>\w+(?:\.\w+)*)?(?:\[(?P<rows>-?\d*:-?\d*)\])?)?", re.ASCII
)
_SPLITS = {"train": "train", "heldout": "test"}  # the split of several that is read if the settings name no split
_SAVED = ("dataset_dict.json", "state.json")  # `save_to_disk` writes the first for several splits, the second for one
_FORMATS = ("parquet", "json", "csv", "arrow")  # file formats that are read; for others, `datasets` runs more code


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set that data.train or data.heldout names, by a local path or its id on the Hugging Face hub.

    A name is `path`, `owner/name` or `owner/name@revision`. A configuration, a split and a slice of the records may
    follow, as in `owner/name:config#split`, `owner/name#train[:1000]` or `train.jsonl#[100:200]`.

    Args:
        hub_id: the id on the hub; None for a local path, which may be missing.
        rows: the slice of the list of records that is used; None means all records.
    """

    path: Path
    hub_id: HubId | None = None
    config: str | None = None
    split: str | None = None
    rows: slice | None = None

    @classmethod
    def of(cls, written: str | Path) -> Self:
        """Parses a name. If a path of exactly this name exists, or the name is no hub id, it is a local path."""
        whole = Path(written)
        match = _SELECTION.fullmatch(str(written))
        if os.path.lexists(whole) or match is None:
            return cls(whole)
        path = Path(match["path"])
        hub_id = HubId.of(path)
        ends = [int(end) if end else None for end in (match["rows"] or ":").split(":")]
        rows = slice(*ends) if match["rows"] else None
        selects_rows_alone = rows is not None and match["config"] is match["split"] is None
        # the whole name is kept as the path, so that an error shows what the user wrote
        if hub_id is None and not _is_folder(path) and not selects_rows_alone:
            return cls(whole)
        return cls(path, hub_id, match["config"], match["split"], rows)

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        ends = (self.rows.start, self.rows.stop) if self.rows else ()
        rows = f"[{':'.join('' if end is None else str(end) for end in ends)}]" if self.rows else ""
        return f"{self.hub_id or self.path}{config}" + (f"#{self.split or ''}{rows}" if self.split or rows else "")

    def selected(self, records: Iterable[T]) -> list[T]:
        """Returns the records in the slice; reads no later records if the slice counts from the beginning."""
        if self.rows is None:
            return list(records)
        ends = (self.rows.start or 0, self.rows.stop or 0)
        if min(ends) < 0 or max(ends) > sys.maxsize:  # islice refuses these
            return list(records)[self.rows]
        return list(itertools.islice(records, self.rows.start, self.rows.stop))

    @property
    def is_table(self) -> bool:
        """Returns whether this source is read as a table; a JSONL file or a missing file is not."""
        is_parquet = self.path.suffix == ".parquet" and os.path.isfile(self.path)  # noqa: PTH113 - as in _is_folder
        return self.hub_id is not None or is_parquet or _is_folder(self.path)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path's own raises where a folder above may not be entered


def require_reader(source: DataSource, field: str) -> None:
    """Checks that the package needed to read a source is installed.

    Raises:
        ConfigError: the package `datasets` is missing.
    """
    if source.is_table and find_spec("datasets") is None:
        raise ConfigError(
            f"{field}={source} needs the package datasets, which is not installed",
            field=field,
            hint="install the `data` extra: .venv/bin/pip install -c constraints.txt -e '.[data]'; or write the "
            "records into a JSONL file",
        )


def read_rows(data: DataSettings, name: str, *, chats: Collection[str]) -> list[Row]:
    """Reads the JSON objects or rows of the source that a setting of `data` names, in order, each with its place.

    Args:
        name: train, heldout, or heldout.NAME if there are several held-out sets.
        chats: columns that may have chat messages or `tools`; keys with null values, as Arrow adds, are removed there.

    Raises:
        ConfigError: the file is missing, unreadable or without records, or a line is not a JSON object; the package
            `datasets` is missing; the hub cannot be read; the configuration or split does not exist, or has to be
            chosen from several; a value is not JSON. The message names the line or row.
        ResourceError: the disk is full.
    """
    field = f"data.{name}"
    written = data.sources[field]
    source = DataSource.of(written)
    require_reader(source, field)
    rows = _table_rows(source, field, name, chats) if source.is_table else _lines_of(source.path, field)
    selected = source.selected(rows)
    if not selected:
        raise ConfigError(f"{written} holds no records", field=field, hint="name a file or data set with records")
    return selected


def _lines_of(path: Path, field: str) -> Iterator[Row]:
    """Yields the JSON object of each line that is not blank, with its place."""
    try:
        # lines end at newlines only, not at U+2028, which JSON allows inside a string
        with TextIOWrapper(open_plain(path), encoding="utf-8-sig") as lines:
            for number in itertools.count(1):
                line = lines.readline(MAX_LINE + 1)
                if not line:
                    break
                place = f"{path}:{number}"
                if len(line) > MAX_LINE:
                    raise ConfigError(
                        f"{place}: longer than {MAX_LINE} characters", field=field, hint="write one record per line"
                    )
                if line.strip():
                    yield _parsed(line, place, field), place
    except FileNotFoundError as error:
        command = made_by(path)
        hint = f"make it first: `{command}`" if command else "name what is there, or a data set"
        raise ConfigError(f"{path} does not exist", field=field, hint=hint) from error
    except (OSError, ValueError) as error:  # a ValueError if the file is not UTF-8 or the path has a NUL
        raise ConfigError(f"{path}: {error}", field=field, hint="name a readable UTF-8 JSONL file") from error


def _parsed(line: str, place: str, field: str) -> dict[str, Any]:
    try:
        record = parse_json(line.strip())
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not JSON: {error.msg} at column {error.colno}",
            field=field,
            hint="write one JSON object per line",
        ) from error
    except ValueError as error:  # a duplicate key, a number with thousands of digits, or very deep nesting
        raise ConfigError(
            f"{place}: not usable JSON: {error}", field=field, hint="write one plain JSON object per line"
        ) from error
    # counting brackets is much quicker than walking through every record
    if line.count("[") + line.count("{") > MAX_LEVELS and is_deeper(record, MAX_LEVELS):
        raise ConfigError(
            f"{place}: nested more than {MAX_LEVELS} deep", field=field, hint="write one plain JSON object per line"
        )
    if not isinstance(record, dict):
        raise ConfigError(
            f"{place}: a {type(record).__name__}, not an object", field=field, hint="write one JSON object per line"
        )
    return record


def _table_rows(source: DataSource, field: str, name: str, chats: Collection[str]) -> Iterator[Row]:
    """Yields the rows of a Parquet file or data set.

    Raises:
        ConfigError: a value is not JSON; the message names its column and row.
    """
    place, rows = _table(source, field, _SPLITS[name.partition(".")[0]])
    for number, row in enumerate(rows):
        try:
            json.dumps(row)
        except (TypeError, ValueError):
            column, value = next((key, value) for key, value in row.items() if not _is_json(value))
            raise ConfigError(
                f"{place} row {number}: column {column!r} holds {short_text(value)} ({type(value).__name__}), which "
                "JSON has no word for",
                field=field,
                hint="leave that column out of the data set, or make it text or numbers: rewards are given all columns",
            ) from None
        values = {key: _cleaned(key, value) if key in chats else value for key, value in row.items()}
        yield values, f"{place} row {number}"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _cleaned(column: str, value: Any) -> Any:
    return _without_any_null(value) if column == "tools" else _without_nulls(value)


def _without_any_null(value: Any) -> Any:
    """Removes keys with null values at all levels, since Arrow gives every tool the parameters of all tools."""
    if isinstance(value, dict):
        return {key: _without_any_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_any_null(inner) for inner in value] if isinstance(value, list) else value


def _without_nulls(prompt: Any) -> Any:
    """Removes keys with null values, which Arrow adds, from chat messages, since templates test for keys."""
    if not isinstance(prompt, list):
        return prompt
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        if isinstance(message, dict)
        else message
        for message in prompt
    ]


def _table(source: DataSource, field: str, default_split: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns the name of a source for errors, and all rows of the source; the caller takes the slice."""
    if source.hub_id is None and not _is_folder(source.path):
        return str(source.path), _rows_of_parquet(source.path, field)
    # absolute, since `datasets` would take a folder with the bare name `json` for a format
    folder, name = source.path.absolute(), str(source.path)
    if source.hub_id is not None:
        folder, name = fetched(source.hub_id, field), source.hub_id.name
    with stage(f"reading {name}", is_short=True):
        splits = _splits_of(folder, source, name, field)
        split = _chosen_split(splits, source.split, default_split, name, field)
        return f"{name}[{split}]" if split else name, splits[split].with_format("arrow")[:].to_pylist()


def fetched(hub_id: HubId, field: str) -> Path:
    """Returns the local folder of a hub data set, named by its commit, after a download if needed; see `read_rows`."""

    def progress() -> str:
        return f"{byte_text(bytes_there(hub_id, 'dataset'))} in the cache"

    with stage(f"fetching {hub_id} from the Hugging Face hub", progress, is_short=True):
        return snapshot(hub_id, "dataset", field=field, error=ConfigError, shows_bars=not is_reporting())


def _rows_of_parquet(path: Path, field: str) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        with open_plain(path) as file:
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
            return rows
    except Exception as error:  # the file can hold anything
        raise ConfigError(
            f"{path} cannot be read: {_short_error(error)}", field=field, hint="name a readable Parquet file"
        ) from error


def _splits_of(folder: Path, source: DataSource, name: str, field: str) -> dict[str, Any]:
    """Returns name of a split -> split; a data set that was saved without splits has one split with the name "".

    Raises:
        ConfigError: the configuration does not exist or has to be chosen; the files cannot be read.
    """
    import datasets

    try:
        with _without_bars():
            if any((folder / file).is_file() for file in _SAVED):
                _check_config(source.config, [], None, name, field)
                loaded = datasets.load_from_disk(str(folder))
            else:
                _require_few_files(folder)
                _require_local(folder)
                configs = datasets.get_dataset_config_names(str(folder))
                default = datasets.get_dataset_default_config_name(str(folder))
                _check_config(source.config, configs, default, name, field)
                builder = datasets.load_dataset_builder(str(folder), source.config or default)
                if builder.name not in _FORMATS:
                    raise ValueError(f"its files are of the format {builder.name}, not {', '.join(_FORMATS)}")
                _require_inside(folder, builder.config.data_files)
                builder.download_and_prepare()
                loaded = builder.as_dataset()
    except ConfigError:
        raise
    except Exception as error:  # the files can hold anything
        raise ConfigError(
            f"{field}: {name} cannot be read as a data set: {_short_error(error)}",
            field=field,
            hint="name a folder of Parquet or JSONL files, or one that `save_to_disk` wrote",
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"": loaded}


def _require_few_files(folder: Path) -> None:
    """Refuses a folder with too many files, since a home or root folder may be named by mistake."""
    files = itertools.chain.from_iterable(names for _, _, names in os.walk(folder))
    if sum(1 for _ in itertools.islice(files, MAX_FILES + 1)) > MAX_FILES:
        raise ValueError(f"there are more than {MAX_FILES:,} files in it")


def _require_local(folder: Path) -> None:
    """Refuses a data set whose metadata names remote files, which `datasets` would download without asking."""
    for name in ("README.md", ".huggingface.yaml"):
        text = (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""
        # the metadata of a README.md is between its first two lines of ---
        parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE) if name == "README.md" else ["", text, ""]
        try:
            described = yaml.safe_load(parts[1]) if len(parts) == 3 else None
        except yaml.YAMLError:  # `datasets` reports this error itself
            continue
        waiting, seen = [described.get("configs") if isinstance(described, dict) else None], set[int]()
        while waiting:
            value = waiting.pop()
            if isinstance(value, str) and "://" in value:
                raise ValueError(f"its {name} names a file elsewhere, {short_text(value)}")
            if isinstance(value, dict | list) and id(value) not in seen:  # YAML aliases can form a loop
                seen.add(id(value))
                waiting += value.values() if isinstance(value, dict) else value


def _require_inside(folder: Path, data_files: Mapping[str, Sequence[object]]) -> None:
    """Refuses a data set with files outside of its folder, since its README.md can name any path."""
    for file in itertools.chain.from_iterable(data_files.values()):
        if not Path(os.path.normpath(str(file))).is_relative_to(folder):
            raise ValueError(f"it names a file elsewhere, {file}")


def _check_config(config: str | None, configs: list[str], default: str | None, name: str, field: str) -> None:
    if config is None and len(configs) > 1 and default is None:
        problem = f"{field}: {name} has several configurations: {', '.join(configs)}"
        raise ConfigError(problem, field=field, hint=f"name one of them behind a colon, like {name}:{configs[0]}")
    if config is not None and config not in configs:
        raise ConfigError(
            f"{field}: {name} has no configuration {config}, but {', '.join(configs) or 'none at all'}",
            field=field,
            hint="name one of these" if configs else f"remove :{config}",
        )


def _chosen_split(splits: dict[str, Any], requested: str | None, default: str, name: str, field: str) -> str:
    only = next(iter(splits)) if len(splits) == 1 else None
    split = requested if requested is not None else only if only is not None else default
    if split in splits:
        return split
    listed = ", ".join(filter(None, splits)) or "none: it was saved alone"
    raise ConfigError(
        f"{field}: {name} has no split {split}; its splits are {listed}",
        field=field,
        hint="name one of them behind a #" if splits.keys() != {""} else f"remove #{split}",
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the progress bars of `datasets`, since stages report progress."""
    import datasets

    if not is_reporting() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _short_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
