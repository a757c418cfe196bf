"""Functions of the user's own, named in the settings as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from slimefsdp.errors import ConfigError


def load_function(name: str, *, field: str, example: str) -> Callable[..., Any]:
    """The function `module:function`, imported.

    Args:
        field: the setting that names it.
        example: a name that would do, for the error.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, or it has no such callable.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"{name!r} does not name a function",
            field=field,
            hint=f"write it as module:function, e.g. {example}",
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or be a script that ends
        raise ConfigError(
            f"module {module_name!r} of {name!r} cannot be imported: {type(error).__name__}: {error}",
            field=field,
            hint="install the module, or put its folder on PYTHONPATH",
        ) from error
    if not hasattr(module, function_name):
        raise ConfigError(
            f"module {module_name!r} has no {function_name!r}",
            field=field,
            hint=f"name a function that {module_name} defines",
        )
    function: Callable[..., Any] = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(
            f"{name!r} is a {type(function).__name__}, which cannot be called", field=field, hint="name a function"
        )
    return function
