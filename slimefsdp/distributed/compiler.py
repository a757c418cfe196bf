"""Checks that a machine has what `model.compile` needs: a compiler, Python's headers, and Triton on CUDA.

This module does not import torch, so that a driver can check before a launch.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from slimefsdp.errors import ConfigError


def require_compiler(device_type: str) -> None:
    """Checks that torch can compile for a device type on this machine.

    For CPUs torch compiles C++ extensions of Python. For CUDA it uses Triton, which compiles a C launcher at its first
    use in a process.

    Args:
        device_type: cpu or cuda.

    Raises:
        ConfigError: there is no compiler, no Python.h, or on CUDA no Triton.
    """
    variable, usual = ("CXX", ("g++",)) if device_type == "cpu" else ("CC", ("gcc", "clang"))
    language = "C++" if device_type == "cpu" else "C"
    candidates = (os.environ[variable],) if os.environ.get(variable) else usual
    where = "a CPU" if device_type == "cpu" else "CUDA"
    problem = None
    if not any(shutil.which(name) for name in candidates):
        problem = f"a {language} compiler on {where}, and there is no {' or '.join(candidates)}"
        hint = f"install {usual[0]}, name another compiler in {variable}"
    elif not Path(sysconfig.get_path("include"), "Python.h").is_file():
        problem = f"Python's headers, and there is no {sysconfig.get_path('include')}/Python.h"
        hint = "install them (python3-dev)"
    elif device_type == "cuda" and find_spec("triton") is None:
        problem = "the package triton on CUDA, which is not installed"
        hint = "install torch for CUDA, which brings it"
    if problem is not None:
        raise ConfigError(
            f"model.compile=true needs {problem}", field="model.compile", hint=f"{hint}, or set model.compile=false"
        )
