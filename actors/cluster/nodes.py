"""Checks the nodes of a running Ray cluster and the network between them, for `slimefsdp check --nodes`.

A probe, which is a Ray actor, runs on each node. Probes say what their node has, connect to each other, and measure the
rates at which they send to each other and sum over all of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import slimefsdp
from actors.cluster.interfaces import interface_of, use_interface_of_node
from slimefsdp.errors import ResourceError

_MUST_AGREE = ("python", "torch", "ray", "transformers", "slimefsdp", "slimefsdp's source", "nccl")
_ANSWER_S = 60.0  # limit on the start of a probe, and on each of its answers
_CONNECT_S = 5.0
_PORTS = 3  # ports that each probe listens on; processes of a run listen on any free port
_MOST_SKEW_S = 1.0
_BYTES = {"gloo": 2**24, "nccl": 2**28}  # of one measurement
_REPEATS = 3
# expected share of a link's nominal rate, and the most that one connection reaches, in 10^9 bits a second
_USUAL_SHARE, _MOST_OF_SOCKET_GBPS = 0.7, 15.0
_SLOW_SHARE = 0.3  # a link that reaches less than this share of the expectation, or of the fastest link, is slow


@dataclass(frozen=True, slots=True)
class Node:
    """Describes what one node has.

    Attributes:
        versions: package -> version; `slimefsdp's source` is a digest of slimefsdp's source files.
        gpu_links: how the GPUs of the node are connected: NVLink, PCIe, or "" if there are fewer than two.
        infiniband: a text for each port, such as `mlx5_0: 400 Gb/sec (4X NDR), 4: ACTIVE`.
        interface_gbps: nominal rate of the network interface with the node's address; None means not known.
        skew_s: the node's clock minus the clock of the machine that checks.
        lacks: setting -> why the node does not see the same folder.
    """

    name: str
    address: str
    versions: dict[str, str]
    gpus: list[str]
    gpu_links: str
    infiniband: list[str]
    interface_gbps: float | None
    skew_s: float = 0.0
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Holds what a check of the nodes found.

    Attributes:
        unreachable: (name of a node, name of a node that it cannot connect to, error).
        backend: backend of the measurements, gloo or nccl; "" if there were none.
        sending_gbps: (sender, receiver, rate in 10^9 bits a second).
        all_reduce_gbps: 2 (n - 1) / n x the bits of the tensor / seconds, over all n nodes.
        problems: what a run on these nodes would suffer from.
    """

    nodes: list[Node]
    unreachable: list[tuple[str, str, str]]
    backend: str
    sending_gbps: list[tuple[str, str, float]]
    all_reduce_gbps: float | None
    problems: list[str]


# ---------------------------------------------------------------------- on a node


class NodeProbe:
    """Runs on a node, as a Ray actor, and answers for it."""

    def __init__(self) -> None:
        self._listeners = [socket.create_server(("", 0)) for _ in range(_PORTS)]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def describe(self, address: str) -> Node:
        return Node(
            name=socket.gethostname(),
            address=address,
            versions=versions_here(),
            gpus=_lines_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
            gpu_links=_gpu_links(),
            infiniband=_infiniband(Path("/sys/class/infiniband")),
            interface_gbps=_interface_gbps(address),
        )

    def clock(self) -> float:
        return time.time()

    def ports(self) -> list[int]:
        """Returns the ports at which this probe accepts connections."""
        return [int(listener.getsockname()[1]) for listener in self._listeners]

    def unreachable(self, others: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
        """Connects to the ports of other nodes; returns an error for each node, or "" if all its ports answer."""
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return list(pool.map(lambda other: _error_of_connecting(*other), others))

    def digests(self, paths: Mapping[str, Path]) -> dict[str, str]:
        return digests_of(paths)

    def free_port(self) -> int:
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def measure(self, rank: int, size: int, address: str, port: int, backend: str) -> tuple[list[float], float]:
        """Collective: measures rates between all probes, in 10^9 bits a second.

        Returns:
            The rate from each rank to the next one, and that of the all-reduce. Rates that only other ranks can measure
            are 0.
        """
        import torch
        import torch.distributed as dist

        use_interface_of_node()
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_ANSWER_S),
        )
        try:
            data = torch.ones(_BYTES[backend] // 4, device=device)

            def rate(transfer: Callable[[], Any]) -> float:
                seconds = []
                for _ in range(_REPEATS):
                    dist.barrier()
                    began = time.perf_counter()
                    transfer()
                    if backend == "nccl":
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - began)
                return 8e-9 * _BYTES[backend] / min(seconds)

            def send(sender: int) -> None:
                receiver = (sender + 1) % size
                if rank == sender:
                    dist.send(data, receiver)
                elif rank == receiver:
                    dist.recv(data, sender)

            sending = []
            for sender in range(size):
                own = rate(lambda sender=sender: send(sender))  # type: ignore[misc]
                sending.append(own if rank == (sender + 1) % size else 0.0)
            return sending, 2 * (size - 1) / size * rate(lambda: dist.all_reduce(data))
        finally:
            dist.destroy_process_group()

    @staticmethod
    def _accept(listener: socket.socket) -> None:
        while True:
            with suppress(OSError):
                listener.accept()[0].close()


def versions_here() -> dict[str, str]:
    """Returns the versions of Python, of the packages that all nodes need alike, and of CUDA's libraries if any."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "ray", "transformers", "slimefsdp"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    folder, code = Path(slimefsdp.__file__).parent, hashlib.sha256()
    for file in sorted([*folder.rglob("*.py"), *(folder.parent / "actors").rglob("*.py")]):
        code.update(file.read_bytes())
    versions["slimefsdp's source"] = code.hexdigest()[:12]
    if driver := _lines_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        import torch

        versions["driver"] = driver[0]
        if torch.cuda.is_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def digests_of(paths: Mapping[str, Path]) -> dict[str, str]:
    """Returns setting -> a digest of its file's content, or of the names and sizes of its folder's files.

    Subfolders are left out. If a path cannot be read, the text says why.
    """
    digests = {}
    for setting, path in paths.items():
        try:
            if path.is_dir():
                content = repr(sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.is_file()))
            else:
                content = path.read_text()
        except OSError as error:
            digests[setting] = str(error.strerror)
        else:
            digests[setting] = hashlib.sha256(content.encode()).hexdigest()
    return digests


def _error_of_connecting(address: str, ports: Sequence[int]) -> str:
    for port in ports:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            return f"{address}:{port}: {error.strerror or error}"
    return ""


def _lines_of(*command: str) -> list[str]:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.splitlines() if process.returncode == 0 else []


def _gpu_links() -> str:
    lines = [line for line in _lines_of("nvidia-smi", "topo", "-m") if re.match(r"\s*GPU\d+\s", line)]
    if len(lines) < 2:
        return ""
    return "NVLink" if any(re.search(r"\bNV\d+\b", line) for line in lines) else "PCIe"


def _infiniband(root: Path) -> list[str]:
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        with suppress(OSError):
            rate, state = ((port / name).read_text().strip() for name in ("rate", "state"))
            ports.append(f"{port.parents[1].name}: {rate}, {state}")
    return ports


def _interface_gbps(address: str) -> float | None:
    """Returns the nominal rate of the interface with this address, as the kernel reports it; None if it does not."""
    name = interface_of(address)
    if name is not None:
        with suppress(OSError, ValueError):
            speed = int(Path("/sys/class/net", name, "speed").read_text())  # 10^6 bits a second; -1: not known
            return speed / 1000 if speed > 0 else None
    return None


# ---------------------------------------------------------------------- on the machine that checks


def check_nodes(expected: int, run_dir: Path | None, models: Mapping[str, Path]) -> Cluster:
    """Checks all nodes of the cluster that this process has joined.

    Args:
        expected: the number of nodes that the cluster should have.
        run_dir: a folder that all nodes must see; it, or the folder that it will be made in, has a hidden file during
            the check.
        models: setting -> a model's folder, whose files must have the same names and sizes on all nodes.

    Raises:
        ResourceError: `run_dir` cannot be written here, or a node is lost meanwhile.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"]]
    problems = []
    if len(alive) != expected:
        problems.append(
            f"{len(alive)} nodes are in the cluster, and {expected} are expected: on a machine that is missing, "
            "`ray start` says whether its token, its version or the address is wrong"
        )
    backend = "nccl" if all(node["Resources"].get("GPU") for node in alive) else "gloo"
    remote: Any = ray.remote  # whose overloads know no class
    probe_class = remote(num_cpus=0, num_gpus=int(backend == "nccl"), max_concurrency=4)(NodeProbe)
    probes: list[Any] = []
    nodes: list[Node] = []
    sending: list[tuple[str, str, float]] = []
    all_reduce = None
    try:
        for node in alive:
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            probes.append(probe_class.options(scheduling_strategy=on_node).remote())
            try:
                nodes.append(_answer(probes[-1].describe.remote(node["NodeManagerAddress"])))
            except GetTimeoutError:
                late = f"does not answer within {_ANSWER_S:g} s: its ports are closed, or it or its GPUs are busy"
                problems.append(f"node {node['NodeManagerAddress']} {late}")
                ray.kill(probes.pop())
            except Exception as error:  # slimefsdp is missing there, or the node was lost: the others are checked
                problems.append(f"node {node['NodeManagerAddress']} cannot run slimefsdp: {_last_line(error)}")
                ray.kill(probes.pop())
        nodes = [replace(node, skew_s=_skew(probe)) for node, probe in zip(nodes, probes, strict=True)]
        nodes = _with_folders(nodes, probes, run_dir, models)
        unreachable = _unreachable(nodes, probes)
        if len(nodes) > 1 and not unreachable:
            try:
                sending, all_reduce = _measured(nodes, probes, backend)
            except Exception as error:  # of torch.distributed, which has many classes
                problems.append(f"the nodes cannot form a {backend} process group: {_last_line(error)}")
    except RayError as error:
        problem = f"a node was lost, or stopped answering, during the check: {_last_line(error)}"
        raise ResourceError(problem, field="cluster.address", hint="repeat the check") from error
    finally:
        for probe in probes:
            ray.kill(probe)
    problems += problems_of(nodes, versions_here(), unreachable, sending, backend)
    return Cluster(nodes, unreachable, backend if sending else "", sending, all_reduce, problems)


def _answer(refs: Any, timeout_s: float = _ANSWER_S) -> Any:
    import ray

    return ray.get(refs, timeout=timeout_s)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def label(node: Node) -> str:
    """Returns the name of a node for people."""
    return f"{node.name} ({node.address})"


def _skew(probe: Any) -> float:
    """Returns a node's clock minus this machine's, in seconds; the shortest round trip measures most exactly."""
    trips = []
    for _ in range(5):
        began = time.time()
        there = _answer(probe.clock.remote())
        ended = time.time()
        trips.append((ended - began, there - (began + ended) / 2))
    return min(trips)[1]


def _with_folders(
    nodes: Sequence[Node], probes: Sequence[Any], run_dir: Path | None, models: Mapping[str, Path]
) -> list[Node]:
    paths, token = dict(models), None
    if run_dir is not None:
        folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
        token = paths["run.dir"] = folder / f".slimefsdp_check_{uuid.uuid4().hex}"
    try:
        if token is not None:
            token.write_text(token.name)
        here = digests_of(paths)
        there = _answer([probe.digests.remote(paths) for probe in probes])
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise ResourceError(problem, field="run.dir", hint="name a folder that you may write to") from None
    finally:
        if token is not None:
            token.unlink(missing_ok=True)

    def lacks(digests: Mapping[str, str]) -> dict[str, str]:
        differing = {setting: digest for setting, digest in digests.items() if digest != here[setting]}
        return {
            setting: "has other files there" if re.fullmatch("[0-9a-f]{64}", digest) else digest
            for setting, digest in differing.items()
        }

    return [replace(node, lacks=lacks(digests)) for node, digests in zip(nodes, there, strict=True)]


def _unreachable(nodes: Sequence[Node], probes: Sequence[Any]) -> list[tuple[str, str, str]]:
    ports = _answer([probe.ports.remote() for probe in probes])
    others = [(node.address, own) for node, own in zip(nodes, ports, strict=True)]
    errors = _answer([probe.unreachable.remote(others) for probe in probes])
    return [
        (label(nodes[start]), label(nodes[end]), error)
        for start, row in enumerate(errors)
        for end, error in enumerate(row)
        if error and end != start
    ]


def _measured(nodes: Sequence[Node], probes: Sequence[Any], backend: str) -> tuple[list[tuple[str, str, float]], float]:
    address, port, size = nodes[0].address, _answer(probes[0].free_port.remote()), len(nodes)
    measuring = [probe.measure.remote(rank, size, address, port, backend) for rank, probe in enumerate(probes)]
    rows = _answer(measuring, _ANSWER_S * (1 + size))
    rates = [sum(column) for column in zip(*(sending for sending, _ in rows), strict=True)]
    sending = [(label(nodes[rank]), label(nodes[(rank + 1) % size]), round(rate, 3)) for rank, rate in enumerate(rates)]
    return sending, round(min(all_reduce for _, all_reduce in rows), 3)


def usual_gbps(node: Node, backend: str) -> float | None:
    """Returns the rate that one process can expect to send at, in 10^9 bits a second; None if no link is known."""
    rates = [
        float(found[1]) for port in node.infiniband if "ACTIVE" in port and (found := re.search(r"(\d+) Gb", port))
    ]
    if backend == "nccl" and rates:
        return _USUAL_SHARE * max(rates)
    if node.interface_gbps is None:
        return None
    return min(_USUAL_SHARE * node.interface_gbps, _MOST_OF_SOCKET_GBPS)


def problems_of(
    nodes: Sequence[Node],
    here: Mapping[str, str],
    unreachable: Sequence[tuple[str, str, str]],
    sending: Sequence[tuple[str, str, float]],
    backend: str = "gloo",
) -> list[str]:
    """Returns a sentence for each thing that a run on these nodes would suffer from.

    Args:
        here: versions of the machine that checks, from `versions_here`.
        unreachable, sending: as in Cluster.
    """
    problems = []
    for node in nodes:
        for package in _MUST_AGREE:
            own, theirs = here.get(package), node.versions.get(package)
            if own and theirs and own != theirs:
                problems.append(f"{label(node)} has {package} {theirs}, and this machine has {own}")
        if abs(node.skew_s) > _MOST_SKEW_S:
            problems.append(f"the clock of {label(node)} is {node.skew_s:+.1f} s off; synchronise it (chrony, ntp)")
        for setting, reason in node.lacks.items():
            problems.append(f"{label(node)} does not see the folder of {setting}: {reason}; all nodes must share it")
    for start, end, error in unreachable:
        problems.append(f"{start} cannot connect to {end}: {error}; open all ports between the nodes")
    fastest = max((rate for _, _, rate in sending), default=0.0)
    usual = {label(node): usual_gbps(node, backend) for node in nodes}
    for start, end, rate in sending:
        expected = min((rate for rate in (usual[start], usual[end]) if rate is not None), default=None)
        if expected is not None and rate < _SLOW_SHARE * expected:
            problems.append(f"{start} sends to {end} at {rate:g} Gb/s, where {expected:g} Gb/s are usual for the link")
        elif rate < _SLOW_SHARE * fastest:
            problems.append(f"{start} sends to {end} at {rate:g} Gb/s, where the fastest link has {fastest:g} Gb/s")
    return problems
