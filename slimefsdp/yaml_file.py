"""YAML as people expect it: the core schema of YAML 1.2, and an error where the 1.1 reading would surprise.

`1e-6` is a float, `yes` is a string, and what two parsers read differently (`010`, `1:30`, a key given
twice) is refused. Aliases are refused too: they are how a small file becomes a very large tree.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from slimefsdp.errors import ConfigError

MAX_BYTES = 1_000_000
MAX_DEPTH = 20

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*)(?:[eE][-+]?[0-9]+)?|(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_SURPRISE = re.compile(
    r"^[-+]?(?:0[0-9_]+|0[oO][0-7_]+|0[xX][0-9a-fA-F_]+|0[bB][01_]+|[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?)$"
)


class _StrictLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            _refuse(event.start_mark, f"alias *{event.anchor}", "write the value out where it is used")
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > MAX_DEPTH:
            _refuse(event.start_mark, f"more than {MAX_DEPTH} levels", "settings are at most a few levels deep")
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if not isinstance(key, str):
                _refuse(key_node.start_mark, f"key {key!r} is not a string", "quote it or remove it")
            if key in seen:
                _refuse(key_node.start_mark, f"key {key!r} is given twice", "keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refuse(mark: Any, problem: str, hint: str) -> None:
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    raise ConfigError(f"{problem} ({mark.name}, {where})", hint=hint)


def _construct_surprise(loader: _StrictLoader, node: yaml.ScalarNode) -> None:
    _refuse(
        node.start_mark,
        f"{node.value!r} means different numbers to different YAML parsers",
        "write a plain decimal number, or quote it if text is meant",
    )


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("!surprise", _SURPRISE, "-+0123456789"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
):
    _StrictLoader.add_implicit_resolver(_tag, _pattern, list(_first))
_StrictLoader.add_constructor("!surprise", _construct_surprise)


def parse_yaml(text: str, *, name: str = "<text>") -> Any:
    """The value of one YAML document.

    Raises:
        ConfigError: with line and column, on bad syntax, duplicate or non-string keys, aliases, tags, several
            documents, and scalars that YAML 1.1 and 1.2 read differently.
    """
    loader = _StrictLoader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(f"not valid YAML: {error.problem} ({where})", hint="correct the file at that place") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error} ({name})", hint="correct the file") from None
    except (ValueError, OverflowError) as error:  # e.g. an integer of 5,000 digits
        raise ConfigError(f"not a usable value: {error} ({name})", hint="correct the file") from None
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file of at most 1 MB.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8, too large, empty or not a mapping.
    """
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="give the path of a YAML file") from None
    if raw is None:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes", hint="settings files are a few kilobytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8") from None
    value = parse_yaml(text, name=str(path))
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} holds {type(value).__name__}, not a mapping of settings",
            hint="begin with sections such as `model:` and `mesh:`",
        )
    return value
