"""Defines the base class of all sections of settings, and the types that sections share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from slimefsdp.config.loader import IN_A_FILE
from slimefsdp.config.messages import UNKNOWN_KIND
from slimefsdp.errors import ConfigError
from slimefsdp.io.hub import reads_like_id
from slimefsdp.io.user_files import NoPath, path_of, possible


def broken_rule(rule: str, hint: str) -> PydanticCustomError:
    """Returns the error for a value that breaks a rule; `config_error` puts the setting and the value before `rule`."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "hint": hint})


MOST = 10**12
"""The largest whole number that a setting may have."""
LARGEST = 1e30  # a float32 can represent it
LONGEST_S = 1e9  # thirty years; system calls refuse much longer waits
MOST_RANKS = 100_000


def _within_range(value: Any) -> Any:
    if type(value) is int and abs(value) > MOST:
        rule, hint = (f"must be at most {MOST:,}", "lower it") if value > 0 else ("must not be so low", "raise it")
        raise broken_rule(rule, hint)
    return value


def _path_from_text(value: Any) -> Path:
    try:
        return possible(value) if isinstance(value, Path) else path_of(value)
    except NoPath as error:
        raise broken_rule(error.rule, error.hint) from None


def path_or_id(value: Any) -> Path:
    """Returns a path, or an id of the Hugging Face hub as a path.

    A path such as `./owner/name`, which without `./` would look like an id, becomes absolute.
    """
    path = _path_from_text(value)
    is_written_so = isinstance(value, str) and reads_like_id(_without_selection(value))
    return path if is_written_so or not reads_like_id(_without_selection(str(path))) else path.absolute()


def _without_selection(text: str) -> str:
    """Removes the configuration and the split from the name of a data set (owner/name:config#split)."""
    return re.split("[:#]", text, maxsplit=1)[0]


_NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def function_name(value: str) -> str:
    """Checks and returns `module:function` or `file.py:function`; the returned path of a file is absolute.

    Raises the error of `broken_rule` if the name has another form.
    """
    return _named(value, "must be module:function or file.py:function", "actors.rollout.rewards:exact_match")


def class_name(value: str) -> str:
    """Checks the name of a user's class in the same way as `function_name`."""
    return _named(value, "must be module:Class or file.py:Class", "examples/environments/tools.py:ToolUse")


def _named(value: str, rule: str, example: str) -> str:
    if found := IN_A_FILE.fullmatch(value):
        return f"{_path_from_text(found['file']).absolute()}:{found['name']}"
    if not _NAMED.fullmatch(value):
        raise broken_rule(rule, f"write it like {example}")
    return value


def within_ranks(value: Any) -> Any:
    if type(value) is int and value > MOST_RANKS:
        raise broken_rule(f"must be at most {MOST_RANKS:,}", "lower it")
    return value


def list_of(is_item: Callable[[Any], Any], items: str, example: str, *, may_be_empty: bool = False) -> BeforeValidator:
    """Returns a validator that accepts lists whose items all fulfil `is_item`, and converts them to tuples.

    Args:
        items: a plural noun for the items, for the error.
        example: a valid list, for the error.
    """

    def check(value: Any) -> tuple[Any, ...]:
        is_list = isinstance(value, list | tuple) and (may_be_empty or len(value) > 0)
        if not is_list or not all(map(is_item, value)):
            raise broken_rule(f"must be a list of {items}", f"write it like {example}")
        return tuple(value)

    return BeforeValidator(check)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def keyword_arguments(value: Any) -> dict[str, Any]:
    try:
        is_plain = isinstance(value, dict) and json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):  # raised for values such as the dates of YAML
        is_plain = False
    if not is_plain or not all(name.isidentifier() for name in value):
        raise broken_rule("must be names with plain values", "write it like {level: 3, operators: ['+', '-']}")
    return value  # type: ignore[no-any-return]


def path_text(path: Path) -> str:
    """Returns a path as text for a YAML file; reading the file gives the same path."""
    return str(path).replace("$", "$$")


PathSetting = Annotated[
    Path, BeforeValidator(_path_from_text), PlainSerializer(path_text, return_type=str, when_used="json")
]
PathOrIdSetting = Annotated[PathSetting, BeforeValidator(path_or_id)]
PositiveInt = Annotated[int, Field(ge=1)]
RankCount = Annotated[PositiveInt, BeforeValidator(within_ranks)]


def chosen_by(name: str, *, default: str) -> Discriminator:
    """Returns pydantic's discriminator for a section of several kinds; a setting of the section names the kind.

    Args:
        name: the setting that names the kind.
        default: the kind if that setting is missing.
    """

    def kind(section: Any) -> str:
        given = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
        return default if given is None else str(given)

    return Discriminator(kind, UNKNOWN_KIND, "no such kind", {"choice": name})


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Returns kind -> settings class for the type of a section.

    If the section has only one kind, that kind is "". If the type is no section, the result is empty.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"": annotation}
    classes: dict[str, type[BaseModel]] = {}
    for member in get_args(annotation):
        model, *marks = get_args(member) or (None,)
        classes |= {mark.tag: model for mark in marks if isinstance(mark, Tag)}
    return classes


def _has_own_null(field: FieldInfo) -> bool:
    return field.default is not None and type(None) in get_args(field.annotation)


def without_nulls(value: Any, *kinds: type[BaseModel]) -> Any:
    """Removes the null values of a section, so that these settings get their defaults.

    A null with a meaning of its own stays, as for critic.clip. A null under an unknown name stays, to be reported.

    Args:
        kinds: the settings classes of all kinds of the section.
    """
    if not isinstance(value, Mapping):
        return value
    withdrawn = {name for kind in kinds for name, field in kind.model_fields.items() if not _has_own_null(field)}
    return {name: setting for name, setting in value.items() if setting is not None or name not in withdrawn}


class Settings(BaseModel):
    """Base class of all sections: refuses unknown keys and silent conversions, and is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    section: ClassVar[str] = ""  # name of the section, if it differs from the class's name

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._frozen(name)

    def __delattr__(self, name: str) -> None:
        raise self._frozen(name)

    def _frozen(self, name: str) -> ConfigError:
        own = type(self).__name__
        section = self.section or own.removesuffix("Settings").lower()
        field = f"{section}.{name}" if own.endswith("Settings") else name
        return ConfigError(
            f"{field} cannot be changed: settings are read once, and running processes would not see the change",
            field=field,
            hint=f"read them again with an override: load_config(path, ['{field}=...'])",
        )

    @model_validator(mode="before")
    @classmethod
    def null_is_not_given(cls, value: Any) -> Any:
        return without_nulls(value, cls)

    @field_validator("*", mode="before")
    @classmethod
    def check_integer_range(cls, value: Any) -> Any:
        return _within_range(value)
