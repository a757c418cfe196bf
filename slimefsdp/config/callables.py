"""Imports the users' functions that settings name as `module:function` or `file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slimefsdp.errors import ConfigError


def load_function(
    name: str,
    *,
    field: str,
    example: str,
    takes: Sequence[str] | None = None,
    may_be_async: bool = False,
    is_class: bool = False,
) -> Callable[..., Any]:
    """Imports and returns the function or class that is named `module:function` or `file.py:function`.

    A relative path of a file starts at the current folder. The file can import modules from its own folder.

    Args:
        field: the setting with this name, for errors.
        example: a valid name, for errors.
        takes: names of the positional arguments that the function must accept; None means any arguments.
        may_be_async: whether a coroutine function is allowed.
        is_class: whether errors speak of a class instead of a function.

    Raises:
        ConfigError: the name has another form, the module cannot be imported or has no such callable, or the callable
            does not accept these arguments.
    """
    module_name, colon, function_name = name.rpartition(":") if ".py:" in name else name.partition(":")
    what = "class" if is_class else "function"
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"{name!r} does not name a {what}",
            field=field,
            hint=f"write it as module:{'Class' if is_class else 'function'}, e.g. {example}",
        )
    try:
        module = imported(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise any error, or exit
        raise ConfigError(
            f"module {module_name!r} of {name!r} cannot be imported: {type(error).__name__}: {error}",
            field=field,
            hint=_import_hint(module_name, function_name, error),
        ) from error
    try:
        function: Callable[..., Any] = getattr(module, function_name)
    except (Exception, SystemExit) as error:  # the module's own __getattr__ may raise any error
        raise ConfigError(
            f"module {module_name!r} has no {function_name!r}",
            field=field,
            hint=_near_names(module, function_name, is_class=is_class) or f"name a {what} that {module_name} defines",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{name!r} is a {type(function).__name__}, which cannot be called", field=field, hint=f"name a {what}"
        )
    if takes is not None:
        _check_arguments(function, name, field, takes, may_be_async)
    return function


def imported(name: str) -> ModuleType:
    """Imports a module by its name or file; the module of a file gets the same name in all processes."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    known_as = f"slimefsdp_file_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}_{path.stem}"
    if known_as in sys.modules:
        return sys.modules[known_as]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(known_as, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[known_as] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known_as]
        raise
    return module


def _import_hint(module_name: str, function_name: str, error: BaseException) -> str:
    also = f", or install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
    if module_name.endswith(".py"):
        if Path(module_name).is_file():
            return f"correct the file{also}"
        return "give the file's path from the settings file's folder or the current folder; neither has this file"
    is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
    if not (is_missing or module_name.startswith(".")):  # for example ./rewards instead of ./rewards.py
        return f"correct the module{also}"
    file = f"{module_name.replace('.', '/')}.py"
    here = (
        f"write {file}:{function_name} for the file here"
        if Path(file).is_file()
        else "write file.py:function for a file"
    )
    return f"install the module, or put its folder on PYTHONPATH (the current folder is not searched), or {here}"


def _near_names(module: Any, name: str, *, is_class: bool) -> str:
    names = [
        public_name
        for public_name, value in vars(module).items()
        if not public_name.startswith("_") and (isinstance(value, type) if is_class else callable(value))
    ]
    lowered = {known.lower(): known for known in names}  # so that case does not matter
    near = difflib.get_close_matches(name.lower(), lowered, n=2)
    return f"did you mean {' or '.join(lowered[key] for key in near)}?" if near else ""


def failure_of(name: str, error: BaseException) -> str:
    """Returns a text with a user's function, the error that it raised, and the line that raised the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    try:
        text = str(error)
    except Exception:  # the error's own __str__ may raise any error
        text = "(it has no text)"
    return f"{name} raised {type(error).__name__}: {text:.300} ({frame.filename}:{frame.lineno})"


def _check_arguments(
    function: Callable[..., Any], name: str, field: str, takes: Sequence[str], may_be_async: bool
) -> None:
    wanted = f"({', '.join(takes)})"
    for is_another, what in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if is_another(function) and not (may_be_async and is_another is inspect.iscoroutinefunction):
            raise ConfigError(f"{name!r} is {what}", field=field, hint=f"make it a plain function{wanted}")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some builtins have no signature
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} takes {signature}, and is called with {wanted}: {error}",
            field=field,
            hint=f"define it as {name.rpartition(':')[2]}{wanted}",
        ) from error
