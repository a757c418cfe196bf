"""What this machine and this installation offer a run: versions, devices, ways to communicate, and what is amiss."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from actors.cluster.capacity import RANKS_PER_CORE

_DISTRIBUTION = "slimefsdp"
_OPTIONAL = ("datasets", "flash-attn", "ring-flash-attn", "wandb")


@dataclass(frozen=True, slots=True)
class Package:
    """Names a package, or Python itself, and the versions that this project supports."""

    name: str
    version: str | None  # None: not installed
    supported: str  # such as ">=2.11,<3"
    is_optional: bool

    @property
    def is_supported(self) -> bool:
        return self.version is not None and is_within(self.version, self.supported)


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages and hardware of this machine; `problems` names everything without which nothing runs."""

    packages: list[Package]
    cpu_cores: int
    memory_bytes: int
    gpus: list[tuple[str, int]]  # name and bytes of each CUDA device
    backends: list[str]  # of gloo and nccl, those that this torch has
    has_loopback: bool
    can_run: str
    problems: list[str] = field(default_factory=list)


def look_around() -> Environment:
    """The environment of this process. Imports torch, where it can be imported, and neither ray nor transformers."""
    packages = supported_packages()
    problems = [_package_problem(one) for one in packages if not (one.is_optional or one.is_supported)]
    cores = os.cpu_count() or 1
    gpus: list[tuple[str, int]] = []
    backends: list[str] = []
    try:
        gpus, backends = _torchs_devices()
    except Exception as error:  # a package built for other libraries may raise anything while it is imported
        problems.append(f"torch cannot be used: {type(error).__name__}: {error}")
    else:
        if not backends:
            problems.append("this torch has neither gloo nor nccl: ranks cannot talk to each other")
    has_loopback = _can_connect_to_itself()
    if not has_loopback:
        problems.append("a socket on 127.0.0.1 cannot be reached from this machine itself, which ranks and Ray need")
    return Environment(
        packages,
        cpu_cores=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        backends=backends,
        has_loopback=has_loopback,
        can_run=_what_runs(cores, len(gpus), backends),
        problems=problems,
    )


def supported_packages() -> list[Package]:
    """Python and the packages that the project names, as they are installed here."""
    python, requirements = _requirements()
    packages = [Package("python", platform.python_version(), python, is_optional=False)]
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        name, supported = re.fullmatch(r"\s*([\w.-]+)\s*(.*?)\s*", text).groups()  # type: ignore[union-attr]
        if "extra" in marker and name not in _OPTIONAL:
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        packages.append(Package(name, version, supported, is_optional=name in _OPTIONAL))
    return packages


def is_within(version: str, supported: str) -> bool:
    """Returns whether a version such as `2.13.0+cpu` keeps to bounds such as `>=2.11,<3`.

    Builds of GPU vendors, such as `2.11.0a0+nv25.10`, count as the release that they lead to.
    """
    try:
        return Version(version).base_version in SpecifierSet(supported)
    except InvalidVersion:
        return False


def _requirements() -> tuple[str, list[str]]:
    """Python versions and requirements: of the source that is run, or of the installed distribution."""
    project_file = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(project_file.read_text())["project"] if project_file.is_file() else {}
    if project.get("name") == _DISTRIBUTION:
        extras = [
            f'{requirement}; extra == "{extra}"'
            for extra, requirements in project["optional-dependencies"].items()
            for requirement in requirements
            if extra != "dev"
        ]
        return project["requires-python"], [*project["dependencies"], *extras]
    distribution = importlib.metadata.distribution(_DISTRIBUTION)
    requirements = [one for one in distribution.requires or [] if 'extra == "dev"' not in one]
    return distribution.metadata["Requires-Python"], requirements


def _package_problem(package: Package) -> str:
    what = f"{package.name} {package.version}" if package.version else f"no {package.name}"
    return f"{what} is installed, and {package.name}{package.supported} is needed"


def _torchs_devices() -> tuple[list[tuple[str, int]], list[str]]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    has = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    return [(one.name, one.total_memory) for one in properties], [name for name, is_there in has.items() if is_there()]


def _can_connect_to_itself() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True


def _what_runs(cores: int, gpus: int, backends: list[str]) -> str:
    """Describes how many ranks and engines this machine can run, and on what."""
    parts = []
    if gpus and "nccl" in backends:
        parts.append(f"on CUDA {gpus} rank{'s' * (gpus > 1)} and engines in all, each with a GPU of its own")
    if "gloo" in backends:
        parts.append(
            f"on the CPU {cores * RANKS_PER_CORE} ranks and engines in all ({RANKS_PER_CORE} for each of {cores} cores)"
        )
    return "; ".join(parts) or "nothing"
