"""Prints the reference of all settings as Markdown, generated from the classes in slimefsdp/config.

python scripts/settings_reference.py            # to the terminal
python scripts/settings_reference.py --write    # to docs/settings.md
"""

from __future__ import annotations

import argparse
import inspect
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slimefsdp.config import RunConfig
from slimefsdp.config.base import kinds_of
from slimefsdp.config.conditions import condition_text

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

<!-- written by `python scripts/settings_reference.py --write`; change slimefsdp/config/, not this file -->

A run is one YAML file. Any value can also be set on the command line, as `section.name=value`. A **required** setting
has no default. A setting marked *with X=a or b* is read only then; `module:function` stands for a function of your own.
Unknown names, wrong types and contradictory settings are refused before anything starts. `slimefsdp train` needs at
least:

```yaml
model:
  path: path/to/model
run:
  dir: runs/first
  steps: 100
data:
  train: prompts.jsonl
rollout:
  reward: my_package.rewards:score
optim:
  total_updates: 100
```

A file can build on another file, with a line `base: FILE`. FILE is relative to the folder of the file that names it.
All other paths are relative to the working directory, but files of code (`./mine.py:score`) are looked for next to the
settings file first. Sections are merged name by name, and the file that names the base wins. A base may have a base.

`null`, in a file or on the command line, gives a setting or a whole section its defaults again. (Only
`critic.clip: null` is a value of its own.) A GRPO file becomes a supervised one like this:

```yaml
base: grpo.yaml
algorithm: sft
rollout: null
evaluation: null
loss: null
advantage: null
correction: null
data:
  heldout: null
```

Sections that the GRPO file does not have may be named, too.

`run.dir/settings.yaml` has the merged settings of a run, and no base. `slimefsdp.load_config` takes a file's path, or
a dictionary of the same shape, whose `base` is relative to the working directory."""

_NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "`true` \\| `false`",
    Path: "path",
    type(None): "`null`",
    Any: "any",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def settings_reference() -> str:
    """Returns the whole document: one part for the top-level settings, and one for each section of settings."""
    sections = {name: kinds_of(info.annotation) for name, info in RunConfig.model_fields.items()}
    sections = {name: kinds for name, kinds in sections.items() if kinds}
    parts = [INTRODUCTION, _section("Top level", {"": RunConfig}, skip=sections)]
    parts += [_section(f"`{name}`", kinds) for name, kinds in sections.items()]
    return "\n\n".join(parts) + "\n"


def type_text(annotation: Any, constraints: list[Any]) -> str:
    """Returns the description of a type and its bounds in YAML's terms, escaped for a Markdown table.

    Args:
        annotation: the annotation of a pydantic field, or a part of it.
        constraints: pydantic's metadata of the field: objects with some of the attributes gt, ge, lt, le.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = arguments
        nested = [item for part in more for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return type_text(inner, [*constraints, *nested])
    if origin in (Union, types.UnionType):
        return " \\| ".join(type_text(argument, constraints) for argument in arguments)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"[{type_text(arguments[0], [])}, ...]"
    if origin is dict:
        return f"{{name: {type_text(arguments[1], [])}, ...}}"
    if origin is tuple:
        return f"[{', '.join(type_text(argument, []) for argument in arguments)}]"
    if _is_section(annotation):
        inner = (
            f"{name}: {type_text(part.annotation, part.metadata)}" for name, part in annotation.model_fields.items()
        )
        return f"{{{', '.join(inner)}}}"
    bounds = [
        f"{sign} {_bound(getattr(item, name))}"
        for item in constraints
        for name, sign in _BOUNDS.items()
        if annotation in (int, float) and getattr(item, name, None) is not None
    ]
    return " ".join([_NAMES[annotation], ", ".join(bounds)]).rstrip()


def _section(title: str, kinds: Mapping[str, type[BaseModel]], skip: Any = ()) -> str:
    """Returns a part of the document: heading, description and table.

    Args:
        kinds: kind (such as an optimiser) -> its settings. Settings that all kinds have come first in the table.
        skip: names to leave out.
    """
    owners: dict[str, list[str]] = {}
    for kind, model in kinds.items():
        for name in model.model_fields.keys() - set(skip):
            owners.setdefault(name, []).append(kind)
    order = [name for model in kinds.values() for name in model.model_fields if name in owners]
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name in sorted(dict.fromkeys(order), key=lambda name: len(owners[name]) < len(kinds)):
        fields = [kinds[kind].model_fields[name] for kind in owners[name]]
        types = " \\| ".join(dict.fromkeys(type_text(info.annotation, info.metadata) for info in fields))
        default = "**required**" if fields[0].is_required() else f"`{_yaml(fields[0].default)}`"
        meaning = (fields[0].description or "").replace("|", "\\|")
        if condition := condition_text(f"{title.strip('`')}.{name}"):
            meaning = f"*with {condition}*: {meaning}"
        if len(fields) < len(kinds):
            meaning = f"*{', '.join(owners[name])}*: {meaning}"
        rows.append(f"| `{name}` | {types} | {default} | {meaning} |")
    texts = [inspect.getdoc(model) or "" for model in kinds.values()]
    if len(texts) > 1:
        texts = [f"- `{kind}`: {text}" for kind, text in zip(kinds, texts, strict=True)]
    return "\n\n".join([f"## {title}", "\n".join(texts), "\n".join(rows)])


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bound(value: float) -> str:
    return "2^31" if value == 2**31 else f"{value:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The reference of all settings, as Markdown.")
    parser.add_argument("--write", action="store_true", help="write docs/settings.md instead of printing")
    if parser.parse_args().write:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(settings_reference(), encoding="utf-8")
        print(f"wrote {DOCUMENT}")
    else:
        print(settings_reference(), end="")


if __name__ == "__main__":
    main()
