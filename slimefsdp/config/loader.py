"""Reads YAML by the core schema of version 1.2, and refuses texts that YAML 1.1 reads differently.

`1e-6` is a float and `yes` is a string. Texts that two parsers may read differently (`010`, `1:30`, a repeated key) are
refused. Aliases are refused too, because with them a small file can become a very large tree.

ruamel.yaml, a parser of YAML 1.2, would not replace this module: it reads `010`, `0x10` and `1_000` as numbers and
converts dates, and its scanner accepts tabs in brackets and odd anchors.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from slimefsdp.config.earlier import STORED, changed_constants, with_present_names
from slimefsdp.config.messages import NAMES_ELSEWHERE
from slimefsdp.errors import ConfigError, short_text
from slimefsdp.io.user_files import NoPath, open_plain, path_of

MAX_BYTES = 100_000
MAX_DEPTH = 20
MAX_BASES = 20  # largest number of files that build on each other
MAX_INTEGER_DIGITS = 40

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*)(?:[eE][-+]?[0-9]+)?|(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_OWN_NAME = r"[A-Za-z0-9_-]+"  # names that users choose below a setting, such as NAME in data.heldout.NAME
IN_A_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
# settings that name a function or class, which may be in a file in the settings file's folder
_NAMES_OF_CODE = (
    ("advantage", "estimator"), ("loss", "policy"), ("rollout", "reward"), ("rollout", "environment"),
    ("rollout", "filter"), ("rollout", "engine"),
)  # fmt: skip
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_SURPRISE = re.compile(
    r"^[-+]?(?:0[0-9_]+|0[oO][0-7_]+|0[xX][0-9a-fA-F_]+|0[bB][01_]+|[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?)$"
)

# (part of PyYAML's message, replacement of the message or None, the way out)
_SYNTAX_ERRORS = (
    ("found character '\\t'", "a tab", "use spaces, not tabs"),
    ("found another document", "a second document begins", "keep one: remove the `---` and what does not belong"),
    ("mapping values are not allowed", "a `:` where no setting can begin", "quote text that holds `: `; indent evenly"),
    ("cannot start any token", None, "put the value in quotes"),
    ("stream end", "it ends inside a bracket", "close the bracket"),
    ("end of stream", "it ends inside a quote", "close the quote"),
    ("second occurrence", "an anchor is given twice", "remove the `&` and its name"),
    ("expected <block end>", "this does not fit the lines above", "indent one section's settings alike"),
)


class _StrictLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            _refuse(event.start_mark, f"alias *{event.anchor}", "write the value out where it is used")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            _refuse(event.start_mark, f"tag {tag}", "remove it: a value's type follows from how it is written")
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > MAX_DEPTH:
            _refuse(event.start_mark, f"more than {MAX_DEPTH} levels", "write settings as section and name")
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if not isinstance(key, str):
                _refuse(key_node.start_mark, f"key {short_text(key)} is not a name", "quote it or remove it")
            if key == "<<":
                _refuse(key_node.start_mark, "merge key <<", "write the settings out where they are used")
            if key in seen:
                _refuse(key_node.start_mark, f"key {short_text(key)} is given twice", "keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refuse(mark: Any, problem: str, hint: str) -> NoReturn:
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    raise ConfigError(f"{problem} ({mark.name}, {where})", hint=hint)


def _construct_surprise(loader: _StrictLoader, node: yaml.ScalarNode) -> None:
    _refuse(
        node.start_mark,
        f"{short_text(node.value)} means different numbers to different YAML parsers",
        "write a plain decimal number, or quote it if text is meant",
    )


def _construct_int(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    digits = len(node.value.lstrip("+-"))
    if digits > MAX_INTEGER_DIGITS:  # Python refuses to convert several thousand digits
        _refuse(node.start_mark, f"an integer of {digits} digits", "write a smaller number")
    return int(node.value)


def _construct_float(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    if node.value[-1] in "fFnN":  # .inf or .nan; the caller decides whether these are valid
        return float(node.value.replace(".", ""))
    value = float(node.value)
    if math.isinf(value):
        _refuse(node.start_mark, f"{short_text(node.value)} is beyond the range of a float", "write a smaller number")
    return value


def _construct_text(loader: _StrictLoader, node: yaml.ScalarNode) -> str:
    text = str(node.value)
    if "\0" in text:
        _refuse(node.start_mark, f"{short_text(text)} holds a NUL", "remove the escape")
    # JSON writes a large character as two such escapes, which YAML does not join
    if any("\ud800" <= character <= "\udfff" for character in text):
        _refuse(node.start_mark, f"{short_text(text)} holds half a character", "write the character itself")
    return text


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("!surprise", _SURPRISE, "-+0123456789"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
):
    _StrictLoader.add_implicit_resolver(_tag, _pattern, list(_first))
for _tag, _constructor in (
    ("!surprise", _construct_surprise),
    ("tag:yaml.org,2002:int", _construct_int),
    ("tag:yaml.org,2002:float", _construct_float),
    ("tag:yaml.org,2002:str", _construct_text),
):
    _StrictLoader.add_constructor(_tag, _constructor)


def parse_yaml(text: str, *, name: str = "<text>") -> Any:
    """Returns the value of one YAML document.

    Raises:
        ConfigError: bad syntax, duplicate or non-string keys, aliases, tags, several documents, numbers out of range,
            or scalars that YAML 1.1 and 1.2 read differently; the error has line and column.
    """
    try:
        loader = _StrictLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"character U+{ord(text[error.position]):04X} is not text ({name}, line {line})", hint="remove it"
        ) from None
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from None
    except (ValueError, OverflowError):  # for example for "\UFFFFFFFF"
        line = loader.get_mark().line + 1  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"an escape that names no character ({name}, line {line})", hint="remove the escape"
        ) from None
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> ConfigError:
    problem, hint = error.problem, "correct it at that place"
    for needle, instead, way_out in _SYNTAX_ERRORS:
        if needle in str(error.problem):
            problem, hint = instead or problem, way_out
            break
    # for an unclosed bracket, the position where it was opened is more useful than the end of the file
    ends_early = "ends inside" in str(problem)
    mark = (error.context_mark if ends_early else None) or error.problem_mark or error.context_mark
    if mark is None:
        return ConfigError(f"not valid YAML: {problem} ({name})", hint=hint)
    line = "".join(text.splitlines()[mark.line : mark.line + 1]).strip(" ")
    where = f"{name}, line {mark.line + 1}, column {mark.column + 1}"
    return ConfigError(f"not valid YAML: {problem} at {short_text(line)} ({where})", hint=hint)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Returns the top-level mapping of a YAML file of at most 100 kB.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8, too large, empty or not a mapping.
    """
    name = str(path) if str(path).isprintable() and len(str(path)) < 300 else short_text(str(path))
    try:
        with open_plain(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        preset = Path("configs", path.name.removesuffix(".yaml") + ".yaml")
        is_preset = path != preset and preset in Path("configs").glob("*.yaml")
        hint = f"did you mean {preset}?" if is_preset else "give the path of a YAML file"
        raise ConfigError(f"cannot read {name}: {reason}", hint=hint) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than {MAX_BYTES} bytes", hint="give a settings file: a few kilobytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name} is not UTF-8 text (byte 0x{raw[error.start]:02x} in line {line})", hint="save it as UTF-8"
        ) from None
    value = parse_yaml(text, name=name)
    if not isinstance(value, dict):
        problem = "is empty" if value is None else f"holds {short_text(value)}, not sections of settings"
        raise ConfigError(f"{name} {problem}", hint="begin with sections such as `model:` and `optim:`")
    if not text.startswith(STORED):
        return value
    for message in changed_constants(value):
        warnings.warn(f"{name}: {message}", stacklevel=2)
    return with_present_names(value)


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the settings of a YAML file, merged over the settings of the file in its line `base: FILE`.

    FILE is relative to the folder of the file with the line. The base may have a base of its own.

    Raises:
        ConfigError: a file cannot be read (see `read_yaml_mapping`), a base is no path, or the files name each other in
            a circle.
    """
    return with_base(read_yaml_mapping(path), path)


def with_base(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings `tree` of the file `path`, merged over the settings of its base; see `read_settings`."""
    files, trees = [path], [dict(tree)]
    find_code_beside(trees[0], path.parent)
    while (base := trees[-1].pop("base", None)) is not None:
        try:
            file = files[-1].parent / path_of(base)
        except NoPath as error:
            raise ConfigError(f"base={short_text(base)} {error.rule}", field="base", hint=error.hint) from None
        if file.resolve() in [known.resolve() for known in files]:
            circle = " -> ".join(map(str, [*files, file]))
            raise ConfigError(f"base={short_text(base)} leads in a circle: {circle}", field="base", hint="remove one")
        if len(files) > MAX_BASES:
            problem = f"base={short_text(base)} is the base of more than {MAX_BASES} files, one on top of another"
            raise ConfigError(problem, field="base", hint="merge some of them")
        files.append(file)
        trees.append(read_yaml_mapping(file))
        find_code_beside(trees[-1], file.parent)
    settings = trees.pop()
    while trees:
        settings = _merged(settings, trees.pop())
    return settings


def find_code_beside(tree: dict[str, Any], folder: Path) -> None:
    """Changes `tree`: in settings like `file.py:name`, makes the path absolute if `folder` has the file."""
    for section, name in _NAMES_OF_CODE:
        values = tree.get(section)
        value = values.get(name) if isinstance(values, dict) else None
        found = IN_A_FILE.fullmatch(value) if isinstance(value, str) else None
        if found and (file := folder / found["file"]).is_file():
            values[name] = f"{file.absolute()}:{found['name']}"  # type: ignore[index]


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merges `own` over `base`: values that are mappings in both are merged, other values are replaced."""
    both = {name: (base.get(name), value) for name, value in own.items()}
    return base | {
        name: _merged(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for name, (old, new) in both.items()
    }


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one value of the nested `tree` in place, from `section.name=value` on a command line.

    Raises:
        ConfigError: the override has another form, no value, a value that is not YAML, or a name below a setting that
            is no section.
    """
    name, equals, text = override.partition("=")
    keys = name.split(".")
    are_names = all(key.isidentifier() for key in keys[:2]) and all(re.fullmatch(_OWN_NAME, key) for key in keys[2:])
    if not equals or not are_names or len(keys) > MAX_DEPTH:
        raise ConfigError(
            f"override {short_text(override)} is not of the form section.name=value",
            hint=NAMES_ELSEWHERE.get(
                keys[-1].replace("-", "_"), "write it like optim.lr=1e-6, without spaces or dashes before the ="
            ),
        )
    if not text.strip():  # probably an unset variable of the shell
        raise ConfigError(f"{name}= has no value", field=name, hint=f"write one, or {name}=null for the default")
    node = tree
    for depth, key in enumerate(keys[:-1], start=1):
        if node.get(key) is None:  # a section that is null can still get settings
            node[key] = {}
        child = node[key]
        if not isinstance(child, dict):
            section = ".".join(keys[:depth])
            raise ConfigError(
                f"{name}={short_text(text)} needs the section {section}, but {section}={short_text(child)}",
                field=name,
                hint=NAMES_ELSEWHERE.get(keys[-1], f"remove that value of {section}, or correct the name"),
            )
        node = child
    node[keys[-1]] = parse_yaml(text, name=f"override {short_text(override)}")
