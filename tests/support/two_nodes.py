"""Two machines emulated by two network namespaces, each with a Ray node, with faults to inject.

Both have their own interface, addresses and routes, and share the file system; `unshared` hides a folder from the
second. Making namespaces needs root and the program `ip`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PORT = 6379
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{FIRST}:{PORT}"
TOKEN = "0" * 64


def can_emulate() -> bool:
    """Whether this process may make network namespaces and links between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"try-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class TwoNodes:
    """The two namespaces, and the processes that were started in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = [f"n{index}-{uuid.uuid4().hex[:8]}" for index in (1, 2)]
        self._processes: list[subprocess.Popen[str]] = []
        (folder / "home").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> TwoNodes:
        first, second = self._names
        for name in self._names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self._names, (FIRST, SECOND), strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for index, name in enumerate(self._names):
            self.stop(index)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for process in self._processes:
            process.communicate()

    def start_ray(
        self,
        index: int,
        *,
        cpus: int = 1,
        token: str = TOKEN,
        variables: Mapping[str, str] | None = None,
        mounts: Mapping[Path, Path] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Starts the Ray node of a machine, 0 (the head) or 1.

        Args:
            variables: more environment variables of the node.
            mounts: path -> another file or folder that the node sees in its place.
        """
        if index == 0:
            command = ["--head", "--node-ip-address", FIRST, "--port", str(PORT), "--include-dashboard", "false"]
            command += ["--temp-dir", str(self._folder / "ray")]
        else:
            command = ["--address", ADDRESS, "--node-ip-address", SECOND]
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--disable-usage-stats", "--num-cpus", str(cpus), *command]
        if mounts:
            binds = [f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(at))}" for at, source in mounts.items()]
            command = ["unshare", "--mount", "sh", "-c", " && ".join([*binds, 'exec "$@"']), "sh", *command]
        return self.run(index, command, token=token, variables=variables)

    def stop(self, index: int) -> None:
        """Kills all processes of a machine."""
        listed = subprocess.run(["ip", "netns", "pids", self._names[index]], capture_output=True, text=True)
        subprocess.run(["kill", "-9", *listed.stdout.split()], capture_output=True)

    def run(
        self, index: int, command: Sequence[str], *, token: str = TOKEN, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a machine, 0 or 1."""
        environment, line = self._environment(token, variables or {}), self._in_namespace(index, command)
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    def begin(self, index: int, command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts a command on a machine; it ends with the machines at the latest."""
        process = subprocess.Popen(
            self._in_namespace(index, command), env=self._environment(TOKEN, {}),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _in_namespace(self, index: int, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._names[index], *command]

    def _environment(self, token: str, variables: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": str(self._folder / "home"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # other tests of this process leave variables of Ray, such as one that has it listen on loopback only
        others = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        return others | own | dict(variables)

    def slow_down(self, rate: str) -> None:
        """Limits the link between the nodes, in both directions; such as 50mbit."""
        for name in self._names:
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)

    def cut(self) -> None:
        """Takes the link down; both nodes live on, and neither hears of the other."""
        _run("ip", "-n", self._names[1], "link", "set", "eth0", "down")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
