"""`slimefsdp check` shows what this machine can run, what settings can choose, and all that is wrong with a file."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from actors.cli.preflight import Checked, check_before_launch
from actors.cluster.capacity import RANKS_PER_CORE
from actors.rollout.groups import FILTERS
from actors.rollout.rewards import exact_match, final_number, sorted_digits
from actors.startup import reporting
from slimefsdp.algorithms.registry import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from slimefsdp.config import RunConfig, load_config
from slimefsdp.config.callables import load_function
from slimefsdp.config.launch import check_ready_to_train
from slimefsdp.config.run import ClusterSettings
from slimefsdp.errors import ConfigError, ResourceError, byte_text

if TYPE_CHECKING:
    from actors.cluster.nodes import Cluster

_DISTRIBUTION = "slimefsdp"
_OPTIONAL = ("datasets", "flash-attn", "ring-flash-attn", "wandb")
_Choices = dict[str, dict[str, str]]  # setting -> {possible value: a line about the value}

REGISTRY: _Choices = {
    "advantage.estimator": ESTIMATORS,
    "loss.policy": POLICY_LOSSES,
    "loss.reduction": REDUCTIONS,
    "loss.kl_estimator": KL_ESTIMATORS,
    "correction.method": CORRECTIONS,
    "rollout.filter": FILTERS,
    "rollout.reward": {
        f"{function.__module__}:{function.__name__}": str(inspect.getdoc(function)).partition("\n")[0]
        for function in (exact_match, final_number, sorted_digits)
    },
}
"""The built-in functions that settings can name."""
# settings that also take a user's function, as module:function
_TAKES_OWN = ("advantage.estimator", "loss.policy", "rollout.filter", "rollout.reward")


@dataclass(frozen=True, slots=True)
class Package:
    """A package, or Python itself, and the versions of it that this project supports."""

    name: str
    version: str | None  # None means not installed
    supported: str  # such as ">=2.11,<3"
    is_optional: bool
    is_supported: bool


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages and hardware of this machine; `problems` lists what prevents every run on this machine."""

    packages: list[Package]
    cpu_cores: int
    memory_bytes: int
    gpus: list[tuple[str, int]]  # name and bytes of each CUDA device
    backends: list[str]  # which of gloo and nccl this torch has
    has_loopback: bool
    can_run: str
    problems: list[str] = field(default_factory=list)


def check_command(path: Path | None, overrides: Sequence[str], *, nodes: int | None = None, as_json: bool) -> int:
    """Prints what this machine has; with settings, also checks them and prints a verdict at the end.

    Settings without data.train are checked for a user's own loop, all other settings as `slimefsdp train` checks them.

    Args:
        nodes: also check the nodes of the cluster, which must be so many; None means no check of nodes.

    Raises:
        SlimeError: as `check_before_launch`.
        ResourceError: something prevents every run on this machine, or some runs on these nodes; this is raised after
            all was printed.
    """
    checked: Checked | None = None
    chosen: _Choices = {}
    refusal: str | None = None  # why `slimefsdp train` would refuse these settings, though a user's loop may use them
    if path is not None:
        config = load_config(path, overrides)
        with reporting():
            checked = check_before_launch(config, only_looks=True, is_own_loop=config.data.train is None)
        chosen = _chosen_functions(config)
        if config.data.train is None:
            try:
                check_ready_to_train(config)
            except ConfigError as error:
                refusal = f"{error.message}; {error.hint}"
    environment = look_around()
    cluster = None
    if nodes is not None:
        with redirect_stdout(sys.stderr):  # Ray prints what it hears of nodes, which would break the JSON
            cluster = _checked_nodes(nodes, checked)
    if as_json:
        record: dict[str, Any] = {"environment": asdict(environment), "registry": REGISTRY}
        if checked is not None:
            data = [{**asdict(records), "source": str(records.source)} for records in checked.sets]
            record |= {"chosen": chosen, "train": refusal, "data": data}
            record |= {"not_here": [asdict(item) for item in checked.absent]}
        if cluster is not None:
            record["cluster"] = asdict(cluster)
        print(json.dumps(record, indent=1))
    else:
        node_lines = [] if cluster is None else _node_lines(cluster)
        print("\n".join([*_environment_lines(environment), *node_lines, *_registry_lines(chosen)]))
    if environment.problems:
        hint = "install what is missing: see README.md, Install"
        raise ResourceError("; ".join(environment.problems), field="environment", hint=hint)
    if cluster is not None and cluster.problems:
        first, *others = cluster.problems
        problem = ResourceError(first, field="cluster.address", hint="see docs/multi_node.md")
        problem.others = tuple(others)
        raise problem
    if checked is not None and not as_json:
        print("\n".join(_verdict_lines(checked, refusal)))
    return 0


def _checked_nodes(expected: int, checked: Checked | None) -> Cluster:
    from actors.cluster.connect import disconnect, join
    from actors.cluster.nodes import check_nodes  # imports ray

    cluster = ClusterSettings(address="auto") if checked is None else checked.config.cluster
    if cluster.address is None:
        problem = "--nodes checks the nodes of a running cluster, and cluster.address names none"
        raise ConfigError(
            problem, field="cluster.address", hint="set it to HOST:PORT, or to auto on one of its machines"
        )
    join(cluster.address, allow_without_token=cluster.allow_without_token)
    try:
        if checked is None:
            return check_nodes(expected, None, {})
        folders = {field: path for field, path in checked.config.model_paths.items() if path.is_dir()}
        return check_nodes(expected, checked.config.run.dir, folders)
    finally:
        disconnect()


def _node_lines(cluster: Cluster) -> list[str]:
    from actors.cluster.nodes import label

    lines = [""]
    for node in cluster.nodes:
        rate = "unknown rate" if node.interface_gbps is None else f"{node.interface_gbps:g} Gb/s"
        gpus = f"{len(node.gpus)} x {node.gpus[0]}" if node.gpus else "no GPU"
        links = [f"GPUs linked by {node.gpu_links}"] if node.gpu_links else []
        links += node.infiniband or ["no InfiniBand"]
        versions = ", ".join(f"{name} {version}" for name, version in node.versions.items())
        lines.append(f"node {label(node)}: {gpus}; interface {rate}; {'; '.join(links)}; clock {node.skew_s:+.3f} s")
        lines.append(f"  {versions}")
    lines += [f"  {start} -> {end}: {rate:g} Gb/s by {cluster.backend}" for start, end, rate in cluster.sending_gbps]
    if cluster.all_reduce_gbps is not None:
        lines.append(f"  all-reduce over all nodes: {cluster.all_reduce_gbps:g} Gb/s by {cluster.backend}")
    return lines


def _verdict_lines(checked: Checked, refusal: str | None) -> list[str]:
    config, absent = checked.config, checked.absent
    width = max((len(records.field) for records in checked.sets), default=0)
    lacks_data = any(item.field.startswith("data.") for item in absent)
    verdict = "these settings are fine" + (" once that is here" if absent else "")
    if lacks_data and (config.rollout.reward or config.rollout.environment):
        verdict += f" (the {config.rewards_by.partition('.')[2]} was not tried)"
    if refusal is not None:
        verdict += f" for a loop of your own; `slimefsdp train` would refuse them: {refusal}"
    sets = [f"{records.field:{width}}  {records}" for records in checked.sets]
    return ["", *sets, *(f"not here  {item}" for item in absent), verdict]


def _chosen_functions(config: RunConfig) -> _Choices:
    """Returns setting -> {name of the chosen function: its line in `REGISTRY`, or where a user's function is}."""
    names = {"loss.reduction": config.loss.reduction, "loss.policy": config.loss.policy}
    if config.algorithm == "sft":
        del names["loss.policy"]
    if config.has_rollouts:
        names["advantage.estimator"] = config.estimator
        names |= {"loss.kl_estimator": config.kl_estimator} if config.loss.kl_coefficient > 0 else {}
        for setting in ("correction.method", "rollout.filter", "rollout.reward", "rollout.environment"):
            if (value := config.value_of(setting)) not in (None, "none"):
                names[setting] = value
    return {
        setting: {name: REGISTRY.get(setting, {}).get(name) or _position_of(name, setting)}
        for setting, name in names.items()
    }


def _position_of(name: str, setting: str) -> str:
    """Returns file and line number of a user's function, as FILE:LINE."""
    function = load_function(name, field=setting, example=name)
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):  # a builtin, or an object with __call__
        return repr(function)


def look_around() -> Environment:
    """Returns the environment of this process. Imports torch if possible, but neither ray nor transformers."""
    packages = _packages()
    problems = [
        f"{f'{package.name} {package.version}' if package.version else f'no {package.name}'} is installed, and "
        f"{package.name}{package.supported} is needed"
        for package in packages
        if not (package.is_optional or package.is_supported)
    ]
    gpus: list[tuple[str, int]] = []
    backends: list[str] = []
    try:
        gpus, backends = _torchs_devices()
    except Exception as error:  # a package built for other libraries may raise anything while it is imported
        problems.append(f"torch cannot be used: {type(error).__name__}: {error}")
    else:
        if not backends:
            problems.append("this torch has neither gloo nor nccl: ranks cannot communicate")
    has_loopback = _can_connect_to_itself()
    if not has_loopback:
        problems.append("a socket on 127.0.0.1 cannot be reached from this machine itself, which ranks and Ray need")
    cores = os.cpu_count() or 1
    can_run = []
    if gpus and "nccl" in backends:
        can_run.append(f"on CUDA {len(gpus)} rank{'s' * (len(gpus) > 1)} and engines in all, each with its own GPU")
    if "gloo" in backends:
        can_run.append(
            f"on the CPU {cores * RANKS_PER_CORE} ranks and engines in all ({RANKS_PER_CORE} for each of {cores} cores)"
        )
    return Environment(
        packages,
        cpu_cores=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        backends=backends,
        has_loopback=has_loopback,
        can_run="; ".join(can_run) or "nothing",
        problems=problems,
    )


def _packages() -> list[Package]:
    """Returns Python and each package that the project requires or can use, with the version installed here."""
    python, requirements = _requirements()
    packages = [
        Package("python", platform.python_version(), python, False, _is_within(platform.python_version(), python))
    ]
    for requirement in map(Requirement, requirements):
        name, supported = requirement.name, str(requirement.specifier)
        if name in _OPTIONAL or "extra" not in str(requirement.marker):
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                version = None
            is_supported = version is not None and _is_within(version, supported)
            packages.append(Package(name, version, supported, name in _OPTIONAL, is_supported))
    return packages


def _is_within(version: str, supported: str) -> bool:
    """Returns whether a version such as `2.13.0+cpu` is within bounds such as `>=2.11,<3`.

    A pre-release, such as a GPU vendor's build `2.11.0a0+nv25.10`, counts as the final release, here 2.11.0.
    """
    try:
        return Version(version).base_version in SpecifierSet(supported)
    except InvalidVersion:
        return False


def _requirements() -> tuple[str, list[str]]:
    """Returns Python versions and requirements, from the checkout's pyproject.toml or the installed distribution."""
    project_file = Path(__file__).parents[2] / "pyproject.toml"
    project: Mapping[str, Any] = tomllib.loads(project_file.read_text())["project"] if project_file.is_file() else {}
    if project.get("name") == _DISTRIBUTION:
        extras = [
            f'{requirement}; extra == "{extra}"'
            for extra, requirements in project["optional-dependencies"].items()
            for requirement in requirements
            if extra != "dev"
        ]
        return project["requires-python"], [*project["dependencies"], *extras]
    distribution = importlib.metadata.distribution(_DISTRIBUTION)
    requirements = [text for text in distribution.requires or [] if 'extra == "dev"' not in text]
    return distribution.metadata["Requires-Python"], requirements


def _torchs_devices() -> tuple[list[tuple[str, int]], list[str]]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    has = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    return [(gpu.name, gpu.total_memory) for gpu in properties], [name for name, is_there in has.items() if is_there()]


def _can_connect_to_itself() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True


def _environment_lines(environment: Environment) -> list[str]:
    def version(package: Package) -> str:
        if package.version is None:
            return "not installed" if package.is_optional else f"MISSING, {package.supported} is needed"
        return f"{package.version} ({'' if package.is_supported else 'NOT '}{package.supported})"

    optional = [f"{package.name} {version(package)}" for package in environment.packages if package.is_optional]
    devices = [f"{name}, {byte_text(size)}" for name, size in environment.gpus] or ["no CUDA device"]
    memory = byte_text(environment.memory_bytes)
    rows = [
        *((package.name, version(package)) for package in environment.packages if not package.is_optional),
        ("optional", "; ".join(optional)),
        ("devices", f"{environment.cpu_cores} CPU cores, {memory}; {'; '.join(devices)}"),
        ("backends", ", ".join(environment.backends) or "none"),
        ("loopback", "reachable" if environment.has_loopback else "NOT reachable"),
        ("can run", environment.can_run),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def _registry_lines(chosen: _Choices) -> list[str]:
    lines = []
    for setting, functions in REGISTRY.items():
        marked = chosen.get(setting, {})
        rows = {**functions, **marked}  # a user's function comes last
        width = max(map(len, rows))
        lines += ["", f"{setting}, or module:function" if setting in _TAKES_OWN else setting]
        lines += [f" {'*' if name in marked else ' '} {name:{width}}  {text}" for name, text in rows.items()]
    return [*lines, *(["", "* chosen by these settings"] if chosen else [])]
