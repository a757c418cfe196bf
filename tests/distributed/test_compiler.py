"""model.compile without a compiler, Python's headers or Triton is refused, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimefsdp.distributed import fsdp
from slimefsdp.distributed.fsdp import require_compiler
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on it: programs are found in the folder `bin` of what is returned, headers in it."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"include": str(tmp_path)}[name])
    monkeypatch.setattr(fsdp, "find_spec", lambda name: None)
    return tmp_path


def install(program: Path) -> None:
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


def test_on_a_cpu_it_takes_a_cxx_compiler_and_headers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "bin/gcc")
    with refused(ConfigError, "model.compile", "C++", "g++"):
        require_compiler("cpu")
    monkeypatch.setenv("CXX", "c++-14")
    with refused(ConfigError, "model.compile", "c++-14"):
        require_compiler("cpu")
    install(machine / "bin/c++-14")
    with refused(ConfigError, "model.compile", f"{machine}/Python.h"):
        require_compiler("cpu")
    (machine / "Python.h").touch()
    require_compiler("cpu")


@pytest.mark.parametrize("usual", ["gcc", "clang"])
def test_on_cuda_it_takes_a_c_compiler_headers_and_triton(
    machine: Path, monkeypatch: pytest.MonkeyPatch, usual: str
) -> None:
    install(machine / "bin/g++")
    with refused(ConfigError, "model.compile", "gcc or clang"):
        require_compiler("cuda")
    install(machine / "bin" / usual)
    with refused(ConfigError, "model.compile", f"{machine}/Python.h"):
        require_compiler("cuda")
    (machine / "Python.h").touch()
    with refused(ConfigError, "model.compile", "triton"):
        require_compiler("cuda")
    monkeypatch.setattr(fsdp, "find_spec", lambda name: name == "triton" or None)
    require_compiler("cuda")
    monkeypatch.setenv("CC", "none-such")
    with refused(ConfigError, "model.compile", "none-such"):
        require_compiler("cuda")
