"""Makes tools of functions: a policy calls a tool by name with JSON arguments, as the function's signature demands.

The schema of a function equals the result of `transformers.utils.get_json_schema`. This module does not import
transformers, so that processes of environments start quickly.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from slimefsdp.config.callables import load_function
from slimefsdp.errors import ConfigError, short_repr

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_FIELD = "environment.arguments"


class ToolError(Exception):
    """A call failed because of its arguments; the policy gets the error's text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool; `schema` is `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Tool:
        """Makes a tool of a plain or coroutine function with annotations and a docstring.

        Raises:
            ConfigError: an argument's annotation is missing or has no JSON type, or there is no docstring.
        """
        name = name or function.__name__
        return cls(name, function, {"type": "function", "function": {"name": name, **_schema_of(function)}})

    async def call(self, arguments: Any) -> str:
        """Calls the function and returns its value as text: a string unchanged, anything else as JSON.

        Raises:
            ToolError: the arguments do not match the schema, or the function raised.
        """
        parameters = self.schema["function"]["parameters"]
        if fault := fault_of(arguments, parameters):
            raise ToolError(f"{self.name}: {fault}")
        try:
            returned = self.function(**arguments)
            if isinstance(returned, Awaitable):
                returned = await returned
            return returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False)
        except ToolError:
            raise
        except Exception as error:  # the policy is told; a cancellation by a deadline is not an Exception
            raise ToolError(f"{self.name}: {type(error).__name__}: {error!s:.1000}") from error


def load_tool(name: str) -> Tool:
    """Loads the tool `module:function`, which is called by the function's name.

    Raises:
        ConfigError: the function cannot be imported, or is not a valid tool.
    """
    function = load_function(name, field=_FIELD, example="my_package.tools:search")
    try:
        return Tool.of(function, name.rpartition(":")[2])
    except ConfigError as error:
        raise ConfigError(f"{name} is no tool: {error.message}", field=_FIELD, hint=error.hint) from error


def fault_of(value: Any, schema: Mapping[str, Any], where: str = "arguments") -> str | None:
    """Returns why a value does not match a schema that this module made; None if it does."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        faults = [fault_of(value, item, where) for item in schema["anyOf"]]
        return None if None in faults else faults[0]
    kind = schema.get("type")
    if kind is not None and not _is_of(value, kind):
        return f"{where} is {short_repr(value)}, not of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} is {short_repr(value)}, none of {', '.join(map(str, schema['enum']))}"
    if kind == "array" and "items" in schema:
        faults_inside = (fault_of(item, schema["items"], f"{where}[{index}]") for index, item in enumerate(value))
        return next((fault for fault in faults_inside if fault), None)
    if kind == "object" and "properties" in schema:
        properties = schema["properties"]
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{where} without {missing[0]!r}"
        if unknown := [name for name in value if name not in properties]:
            return f"{where} with {short_repr(unknown[0])}; there are {', '.join(properties) or 'none'}"
        faults_inside = (fault_of(item, properties[name], name) for name, item in value.items())
        return next((fault for fault in faults_inside if fault), None)
    return None


def _is_of(value: Any, kind: str) -> bool:
    match kind:
        case "integer":
            return type(value) is int
        case "number":
            return type(value) in (int, float)
        case "object":
            return isinstance(value, dict)
    return isinstance(value, {"string": str, "boolean": bool, "array": list}[kind])


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns `description` and `parameters` of a function; raises ConfigError as `Tool.of`."""
    text = inspect.getdoc(function) or ""
    # sections of a Google-style docstring
    description, *sections = re.split(r"^(?=(?:Args|Returns|Raises|Yields|Examples?):\s*$)", text, flags=re.MULTILINE)
    if not description.strip():
        raise ConfigError("it has no docstring", field=_FIELD, hint="write one, which tells the policy what it does")
    descriptions = next((_arguments_in(section) for section in sections if section.startswith("Args:")), {})
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # such as undefined names
        raise ConfigError(f"its annotations: {error}", field=_FIELD, hint="correct them") from error
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"it takes {parameter}", field=_FIELD, hint="give it arguments with names alone")
        if name not in hints:
            raise ConfigError(f"{name} has no annotation", field=_FIELD, hint=f"write {name}: str, say")
        properties[name] = _type_of(hints[name], name) | (
            {"description": descriptions[name]} if name in descriptions else {}
        )
        if parameter.default is parameter.empty:
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"description": description.strip(), "parameters": parameters}


def _arguments_in(section: str) -> dict[str, str]:
    """Returns the descriptions in an `Args:` section by name, each on one line."""
    lines = section.splitlines()[1:]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    descriptions: dict[str, str] = {}
    name = None
    for line in lines:
        begins = re.match(rf" {{{margin}}}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        if begins:
            name, descriptions[begins[1]] = begins[1], begins[2].strip()
        elif name is not None and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def _type_of(hint: Any, name: str) -> dict[str, Any]:
    """Returns the JSON type of an annotation; raises ConfigError if there is none."""
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Literal and all(isinstance(member, str) for member in inner):
        return {"type": "string", "enum": list(inner)}
    if origin is list:
        return {"type": "array", **({"items": _type_of(inner[0], name)} if inner else {})}
    if origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        kinds = [_type_of(member, name) for member in inner if member is not type(None)]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return {**schema, "nullable": True} if type(None) in inner else schema
    raise ConfigError(
        f"{name} is annotated as {hint}, which JSON has no type for",
        field=_FIELD,
        hint="annotate it as str, int, float, bool, list, dict, Literal of texts, or one of them | None",
    )
