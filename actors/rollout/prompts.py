"""Reads prompts, with errors that name the line or row, and hands them out in a resumable order.

Importing this module imports neither torch nor transformers, so that the command line can check data files quickly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.rollout.data_sets import DataSource, Row, read_rows
from slimefsdp.errors import CheckpointError, ConfigError, short_repr, short_text
from slimefsdp.io.user_files import is_deeper, open_plain, parse_json
from slimefsdp.models.hf_folder import made_by

if TYPE_CHECKING:
    from slimefsdp.config.data import DataSettings

MAX_LINE = 16_000_000  # characters; a prompt of millions of tokens fits
MAX_LEVELS = 100  # levels of brackets in a record; deeper ones could exceed the recursion limit when they are written
_COLUMNS = ("prompt", "answer")  # the keys under which a record has its prompt and its answer
_SPLITS = {"train": "train", "heldout": "test"}  # the split to read from several if the settings name none


class Record(dict[str, Any]):
    """The JSON object of a line, or the row of a data set; `place` is its position: file:line or `id[split] row n`."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        super().__init__(fields)
        self.place = place


def place_of(record: Mapping[str, Any]) -> str:
    """Returns the place of a record for an error message; its prompt if it comes from no file."""
    return record.place if isinstance(record, Record) else f"the prompt {record.get('prompt')!r:.100}"


def read_records(data: DataSettings, name: str) -> list[Record]:
    """Reads the records that a setting of `data` names, in their order.

    A record is an object whose `prompt` is a text or a list of chat messages, each with `role` and `content`.

    Args:
        name: train, heldout, or heldout.NAME if there are several held-out sets.

    Raises:
        ConfigError: as in `read_jsonl` and `actors.rollout.data_sets.read_rows`.
        ResourceError: the disk is full.
    """
    columns = (data.prompt_key, data.answer_column)
    rows = read_data(data, name, chats=(data.prompt_key,))
    return [_with_prompt(row, place, f"data.{name}", columns, data.prompt_template) for row, place in rows]


def read_data(data: DataSettings, name: str, *, chats: Collection[str]) -> list[Row]:
    """Reads the JSON objects or rows that a setting of `data` names, of any form, each with its place.

    Args:
        name: as in `read_records`.
        chats: columns that may hold chat messages or `tools`; null keys that Arrow added are removed from these.

    Raises:
        As `read_records`, except for errors in the form of a record.
    """
    field = f"data.{name}"
    written = data.sources[field]
    source = DataSource.of(written)
    if source.is_table:
        rows = [
            ({key: _cleaned(key, value) if key in chats else value for key, value in row.items()}, place)
            for row, place in read_rows(source, field=field, default_split=_SPLITS[name.partition(".")[0]])
        ]
    else:
        rows = source.selected(_lines_of(source.path, field))
    if not rows:
        raise ConfigError(f"{written} holds no records", field=field, hint="name a file or data set with records")
    return rows


def read_jsonl(path: str | Path, *, field: str, columns: tuple[str, str] = _COLUMNS) -> list[Record]:
    """Reads the records of a JSONL file in file order; skips blank lines, and keeps other keys unchanged.

    Args:
        field: the setting that named the file, e.g. `data.train`.
        columns: the names that `prompt` and `answer` have in the file.

    Raises:
        ConfigError: the file is missing, unreadable or without records, or a line is not a record; the message names
            file:line.
    """
    records = [_with_prompt(row, place, field, columns) for row, place in _lines_of(Path(path), field)]
    if not records:
        raise ConfigError(f"{path} holds no records", field=field, hint="give it one JSON object per line")
    return records


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
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, a NUL in the path
        raise ConfigError(f"{path}: {error}", field=field, hint="name a readable UTF-8 JSONL file") from error


def _with_prompt(
    row: dict[str, Any], place: str, field: str, columns: tuple[str, str], template: str | None = None
) -> Record:
    """Returns the row as a record with a `prompt`; a ConfigError names the place if it has none."""
    if template is not None:
        row = {**row, "prompt": prompt_of_template(template, row, place, field)}
    record = Record(_with_columns(row, columns, place, field), place)
    if fault := prompt_fault(record["prompt"]):
        raise ConfigError(
            f"{place}: 'prompt' {fault}",
            field=field,
            hint="make it a text, or a list of chat messages with 'role' and 'content'",
        )
    return record


def prompt_of_template(template: str, row: Mapping[str, Any], place: str, field: str) -> str:
    """Returns the prompt that the template in data.prompt_column makes of a row, without trailing space.

    Raises:
        ConfigError: the row lacks a column of the template, or its value is neither text nor number.
    """
    values: dict[str, str] = {}
    from slimefsdp.config.data import template_columns  # here, so that loading a reward does not import pydantic

    for column in template_columns(template):
        value = row.get(column)
        if column not in row or not isinstance(value, str | int | float | None):
            problem = (
                f"{column!r} is {short_repr(value)}" if column in row else f"no {column!r} among {sorted(row)!r:.200}"
            )
            raise ConfigError(
                f"{place}: {problem}",
                field="data.prompt_column",
                hint=f"give each record of {field} a text there, or name other columns in data.prompt_column",
            )
        values[column] = "" if value is None else str(value)
    parts = string.Formatter().parse(template)
    return "".join(text + (values[name] if name else "") for text, name, _, _ in parts).rstrip()


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


def _with_columns(row: dict[str, Any], columns: tuple[str, str], place: str, field: str) -> dict[str, Any]:
    """Returns the row with the values of its prompt and answer columns under the names `prompt` and `answer`.

    Raises:
        ConfigError: a column is missing; an answer may be missing if the settings name no column for it.
    """
    for name, column in zip(_COLUMNS, columns, strict=True):
        if column not in row and (name == "prompt" or column != name):
            raise ConfigError(
                f"{place}: no {column!r} among the keys {short_text(sorted(row))} of {field}",
                field=field if column == name else f"data.{name}_column",
                hint=f"give each record one, or say which key or column has the {name}: data.{name}_column",
            )
    if columns == _COLUMNS:
        return row
    values = {name: row[column] for name, column in zip(_COLUMNS, columns, strict=True) if column in row}
    return {**{key: value for key, value in row.items() if key not in columns}, **values}


def _cleaned(column: str, value: Any) -> Any:
    return _without_any_null(value) if column == "tools" else _without_nulls(value)


def _without_any_null(value: Any) -> Any:
    """Removes null keys at all levels: Arrow gives every tool the parameters of all tools."""
    if isinstance(value, dict):
        return {key: _without_any_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_any_null(inner) for inner in value] if isinstance(value, list) else value


def _without_nulls(prompt: Any) -> Any:
    """Removes null keys from chat messages: Arrow gives every message all keys, and templates test which exist."""
    if not isinstance(prompt, list):
        return prompt
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        if isinstance(message, dict)
        else message
        for message in prompt
    ]


def prompt_fault(prompt: Any) -> str | None:
    """Returns the reason why a prompt is neither a text nor a list of chat messages; None if it is valid."""
    if isinstance(prompt, str):
        return text_fault(prompt) or (None if prompt.strip() else "is empty")
    if not isinstance(prompt, list | tuple):
        return f"is a {type(prompt).__name__}"
    if not prompt:
        return "is empty"
    for index, message in enumerate(prompt):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role.strip() or "content" not in message:
            return f"has no chat message at index {index}"
        content = message["content"]
        if content is None and "tool_calls" in message:  # tool calls stand in for words
            continue
        if not isinstance(content, str):
            return f"has a {type(content).__name__} for the content of message {index}"
        if fault := text_fault(role + content):
            return f"{fault}, in message {index}"
    has_words = any("tool_calls" in message or message["content"].strip() for message in prompt)
    return None if has_words else "is empty"


def text_fault(text: str) -> str | None:
    """Returns the reason why a text cannot be encoded; None if it can."""
    is_broken = any("\ud800" <= character <= "\udfff" for character in text)
    return "holds half of a surrogate pair, which is no text" if is_broken else None


def check_answers(records: Sequence[Record], *, field: str) -> None:
    """Checks that each record has an `answer`, a text or a number, as supervised training and some rewards need.

    Raises:
        ConfigError: naming the place of the first record without one.
    """
    for record in records:
        if fault := answer_fault(record.get("answer")):
            problem = f"'answer' {fault}" if "answer" in record else "no 'answer'"
            hint = "give each record an 'answer', a text or a number, or name the key that has it: data.answer_column"
            raise ConfigError(f"{place_of(record)}: {problem}", field=field, hint=hint)


def answer_fault(answer: Any) -> str | None:
    """Returns the reason why an answer is neither a text nor a number; None if it is valid."""
    is_number = type(answer) is int or (type(answer) is float and math.isfinite(answer))
    is_text = isinstance(answer, str) and answer.strip() and not text_fault(answer)
    return None if is_number or is_text else f"is {short_repr(answer)}"


def digest_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns the sha256 of records in their order; the order of keys does not matter."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class PromptStream:
    """An endless stream of records: each once per epoch, in an order that depends only on the seed and the epoch.

    The order of epoch e is a permutation by numpy's Philox generator with the key (seed, e), so that a position is two
    numbers and needs no generator state.

    Args:
        digest: identifies the records for a resumed run; None: it is computed from the records.
        lengths: tokens of each record's prompt, for `take` with a limit.
    """

    def __init__(
        self, records: Sequence[Any], seed: int, *, digest: str | None = None, lengths: Sequence[int] = ()
    ) -> None:
        assert records and len(lengths) in (0, len(records))
        self._records = records
        self._seed = seed
        self._lengths = lengths
        self._digest = digest_of(records) if digest is None else digest
        self._start_epoch(0)

    def take(self, count: int, max_tokens: int | None = None) -> list[Any]:
        """Returns the next `count` records; begins the next epoch when one ends.

        Args:
            max_tokens: longer prompts are skipped until the next epoch.
        """
        assert max_tokens is None or (self._lengths and min(self._lengths) <= max_tokens), "none would ever be taken"
        taken: list[Any] = []
        while len(taken) < count:
            if self._offset == len(self._records):
                self._start_epoch(self._epoch + 1)
            index = self._order[self._offset]
            self._offset += 1
            if max_tokens is None or self._lengths[index] <= max_tokens:
                taken.append(self._records[index])
        return taken

    @property
    def records_passed(self) -> int:
        """Returns the number of records that were taken or skipped since the first epoch began."""
        return self._epoch * len(self._records) + self._offset

    def state(self) -> dict[str, Any]:
        """Returns the stream's position as JSON values; `offset` counts the records of `epoch` taken or skipped."""
        position = {"seed": self._seed, "records": len(self._records), "epoch": self._epoch, "offset": self._offset}
        return {**position, "digest": self._digest}

    def has_records_of(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a `state()` was taken from a stream of these records."""
        return state.get("records") == len(self._records) and state.get("digest") == self._digest

    def restore(self, state: dict[str, Any], *, allow_changed: bool = False) -> None:
        """Continues from a `state()` of a stream with the same records and seed.

        Args:
            allow_changed: if the records differ, the next epoch begins; otherwise that is an error.

        Raises:
            CheckpointError: the state is invalid, or of another seed or other records.
        """
        keys = ("seed", "records", "epoch", "offset")
        numbers = [state.get(key) for key in keys] if isinstance(state, dict) else [None]
        if (
            not all(type(value) is int and 0 <= value < 2**62 for value in numbers)
            or state["offset"] > state["records"]
        ):
            raise CheckpointError(
                f"{short_repr(state)} is no place in the prompts",
                field="prompts",
                hint="resume from a checkpoint of this loop",
            )
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the place in the prompts was saved with seed={state['seed']}, but this run has {self._seed}",
                field="prompts.seed",
                hint="resume with the settings the run began with, or begin a new run",
            )
        if self.has_records_of(state):
            self._start_epoch(state["epoch"])
            self._offset = state["offset"]
        elif allow_changed:
            self._start_epoch(state["epoch"] + 1)
        else:
            is_shorter_or_longer = state["records"] != len(self._records)
            raise CheckpointError(
                f"the place in the prompts was saved with {state['records']} records, and this run has "
                + (str(len(self._records)) if is_shorter_or_longer else "others, of the same number"),
                field="prompts.records" if is_shorter_or_longer else "prompts.digest",
                hint="resume with the data.train and model the run began with and, under data.overlong_prompts=skip, "
                "with as much room for a prompt (data.max_prompt_tokens, rollout.max_new_tokens, "
                "batch.max_tokens_per_rank x mesh.cp), or go on with the new records from the next epoch: "
                "data.allow_changed=true",
            )

    def _start_epoch(self, epoch: int) -> None:
        import numpy as np  # here, so that reading a file needs only the standard library

        generator = np.random.Generator(np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)))
        self._order: list[int] = generator.permutation(len(self._records)).tolist()
        self._epoch = epoch
        self._offset = 0
