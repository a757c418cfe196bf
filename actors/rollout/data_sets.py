"""The rows of Parquet files, of folders of data files, and of data sets of the Hugging Face hub, as plain dictionaries.

Reading them takes the package `datasets` (the `data` extra), which is imported when there is one to read. Nothing is
decoded: what Arrow holds becomes plain Python, and an image is its bytes, which no record takes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from actors.startup import is_reporting, stage
from slimefsdp.errors import ConfigError, byte_text, short_text
from slimefsdp.io.hub import HubId, bytes_there, snapshot
from slimefsdp.io.user_files import open_plain

T = TypeVar("T")
Row = tuple[dict[str, Any], str]
"""Its columns, and its place: `file row n` or `id[split] row n`, counted from 0 as `dataset[n]` is."""

MAX_FILES = 10_000  # in a folder
_SELECTION = re.compile(
    r"(?P<path>.+?)(?::(?P<config>[\w.+-]+))?(?:#(?P<split>\w+(?:\.\w+)*)?(?:\[(?P<rows>-?\d*:-?\d*)\])?)?", re.ASCII
)
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves of several splits, and of one
_FORMATS = ("parquet", "json", "csv", "arrow")  # as `datasets` names them; it can read others, with code for each


@dataclass(frozen=True, slots=True)
class DataSource:
    """What data.train or data.heldout name: `path`, `owner/name` or `owner/name@revision`, each with `:config#split`.

    A slice of the records stands at the end, as in `owner/name#train[:1000]` or `train.jsonl#[100:200]`.

    Args:
        hub_id: where it is on the hub; None: on this machine, or nowhere.
        rows: which records to take, as Python slices a list; None: all.
    """

    path: Path
    hub_id: HubId | None = None
    config: str | None = None
    split: str | None = None
    rows: slice | None = None

    @classmethod
    def of(cls, written: str | Path) -> Self:
        """Parses a name. A path that exists under the whole name comes first; no hub id is a local path."""
        whole = Path(written)
        found = _SELECTION.fullmatch(str(written))
        if os.path.lexists(whole) or found is None:
            return cls(whole)
        path = Path(found["path"])
        hub_id = HubId.of(path)
        ends = [int(end) if end else None for end in (found["rows"] or ":").split(":")]
        rows = slice(*ends) if found["rows"] else None
        selects_rows_alone = rows is not None and found["config"] is found["split"] is None
        if (
            hub_id is None and not _is_folder(path) and not selects_rows_alone
        ):  # so that an error names what was written
            return cls(whole)
        return cls(path, hub_id, found["config"], found["split"], rows)

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        ends = (self.rows.start, self.rows.stop) if self.rows else ()
        rows = f"[{':'.join('' if end is None else str(end) for end in ends)}]" if self.rows else ""
        return f"{self.hub_id or self.path}{config}" + (f"#{self.split or ''}{rows}" if self.split or rows else "")

    def selected(self, records: Iterable[T]) -> list[T]:
        """The records that the slice takes. No more than these are read, where it counts from the beginning."""
        if self.rows is None:
            return list(records)
        ends = (self.rows.start or 0, self.rows.stop or 0)
        if min(ends) < 0 or max(ends) > sys.maxsize:  # which islice does not take
            return list(records)[self.rows]
        return list(itertools.islice(records, self.rows.start, self.rows.stop))

    @property
    def is_table(self) -> bool:
        """Whether `read_rows` reads it; anything else is a JSONL file, or missing."""
        is_parquet = self.path.suffix == ".parquet" and os.path.isfile(self.path)  # noqa: PTH113 - as in _is_folder
        return self.hub_id is not None or is_parquet or _is_folder(self.path)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path's own raises where a folder above may not be entered


def require_reader(source: DataSource, field: str) -> None:
    """Whether what it takes to read a source is installed.

    Raises:
        ConfigError: the package `datasets` is not.
    """
    if source.is_table and find_spec("datasets") is None:
        raise ConfigError(
            f"{field}={source} needs the package datasets, which is not installed",
            field=field,
            hint="install the `data` extra: .venv/bin/pip install -c constraints.txt -e '.[data]'; or write the "
            "records into a JSONL file",
        )


def read_rows(source: DataSource, *, field: str, default_split: str) -> list[Row]:
    """All rows that the source selects, in their order.

    Args:
        field: the setting that errors name.
        default_split: the one that is meant where there are several and the source names none.

    Raises:
        ConfigError: the package `datasets` is missing; the hub or the files cannot be read; there is no such
            configuration or split, or several to choose from; a value is not what JSON can hold, named by column and
            row. ResourceError: the disk is full.
    """
    require_reader(source, field)
    if source.hub_id is None and not _is_folder(source.path):
        return source.selected(_plain(_rows_of_parquet(source.path, field), str(source.path), field))
    folder, name = source.path.absolute(), str(source.path)  # `json` alone would be a format to datasets
    if source.hub_id is not None:
        folder, name = fetched(source.hub_id, field), source.hub_id.name
    with stage(f"reading {name}", is_short=True):
        splits = _splits_of(folder, source, name, field)
        split = _chosen_split(splits, source.split, default_split, name, field)
        table = splits[split].with_format("arrow")[:]
        place = f"{name}[{split}]" if split else name
        return source.selected(_plain(table.to_pylist(), place, field))


def fetched(hub_id: HubId, field: str) -> Path:
    """The folder with the files of a data set of the hub, named by its commit; errors as of `read_rows`."""

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
            f"{path} cannot be read: {_said(error)}", field=field, hint="name a readable Parquet file"
        ) from error


def _splits_of(folder: Path, source: DataSource, name: str, field: str) -> dict[str, Any]:
    """Split -> its data set; of a data set that was saved alone the split has no name.

    Raises:
        ConfigError: there is no such configuration, or several to choose from; the files cannot be read.
    """
    import datasets

    try:
        with _without_bars():
            if any((folder / file).is_file() for file in _SAVED):
                _check_config(source.config, [], None, name, field)
                found = datasets.load_from_disk(str(folder))
            else:
                _require_few_files(folder)
                _require_local(folder)
                there = datasets.get_dataset_config_names(str(folder))
                default = datasets.get_dataset_default_config_name(str(folder))
                _check_config(source.config, there, default, name, field)
                builder = datasets.load_dataset_builder(str(folder), source.config or default)
                if builder.name not in _FORMATS:
                    raise ValueError(f"its files are of the format {builder.name}, not {', '.join(_FORMATS)}")
                _require_inside(folder, builder.config.data_files)
                builder.download_and_prepare()
                found = builder.as_dataset()
    except ConfigError:
        raise
    except Exception as error:  # the files can hold anything
        raise ConfigError(
            f"{field}: {name} cannot be read as a data set: {_said(error)}",
            field=field,
            hint="name a folder of Parquet or JSONL files, or one that `save_to_disk` wrote",
        ) from error
    return dict(found) if isinstance(found, dict) else {"": found}


def _require_few_files(folder: Path) -> None:
    """A home or a root that was named by mistake would be walked through for very long."""
    files = itertools.chain.from_iterable(names for _, _, names in os.walk(folder))
    if sum(1 for _ in itertools.islice(files, MAX_FILES + 1)) > MAX_FILES:
        raise ValueError(f"there are more than {MAX_FILES:,} files in it")


def _require_local(folder: Path) -> None:
    """Refuses a description that names files of other machines, which `datasets` would download without asking."""
    for name in ("README.md", ".huggingface.yaml"):
        text = (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""
        # of a README.md, what stands between its first two lines ---
        parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE) if name == "README.md" else ["", text, ""]
        try:
            described = yaml.safe_load(parts[1]) if len(parts) == 3 else None
        except yaml.YAMLError:  # which `datasets` says in its own words
            continue
        waiting, seen = [described.get("configs") if isinstance(described, dict) else None], set[int]()
        while waiting:
            one = waiting.pop()
            if isinstance(one, str) and "://" in one:
                raise ValueError(f"its {name} names a file elsewhere, {short_text(one)}")
            if isinstance(one, dict | list) and id(one) not in seen:  # aliases can make a little text endless
                seen.add(id(one))
                waiting += one.values() if isinstance(one, dict) else one


def _require_inside(folder: Path, data_files: Mapping[str, Sequence[object]]) -> None:
    """A README.md can name other files of this machine, or of another one."""
    for file in itertools.chain.from_iterable(data_files.values()):
        if not Path(os.path.normpath(str(file))).is_relative_to(folder):
            raise ValueError(f"it names a file elsewhere, {file}")


def _check_config(asked: str | None, there: list[str], default: str | None, name: str, field: str) -> None:
    if asked is None and len(there) > 1 and default is None:
        problem = f"{field}: {name} has several configurations: {', '.join(there)}"
        raise ConfigError(problem, field=field, hint=f"name one of them behind a colon, like {name}:{there[0]}")
    if asked is not None and asked not in there:
        raise ConfigError(
            f"{field}: {name} has no configuration {asked}, but {', '.join(there) or 'none at all'}",
            field=field,
            hint="name one of these" if there else f"remove :{asked}",
        )


def _chosen_split(splits: dict[str, Any], asked: str | None, default: str, name: str, field: str) -> str:
    only = next(iter(splits)) if len(splits) == 1 else None
    split = asked if asked is not None else only if only is not None else default
    if split in splits:
        return split
    listed = ", ".join(filter(None, splits)) or "none: it was saved alone"
    raise ConfigError(
        f"{field}: {name} has no split {split}; its splits are {listed}",
        field=field,
        hint="name one of them behind a #" if splits.keys() != {""} else f"remove #{split}",
    )


def _plain(rows: list[dict[str, Any]], place: str, field: str) -> Iterator[Row]:
    """The rows with their places; ConfigError where one holds what JSON does not."""
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
        yield row, f"{place} row {number}"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
