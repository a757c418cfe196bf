"""Two machines, emulated by network namespaces: what `check --nodes` finds, and that a job ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import save_tiny_model
from tests.support.two_node_job import GONE, READY
from tests.support.two_nodes import ADDRESS, ROOT, SECOND, TwoNodes, can_emulate
from tests.support.waiting import PATIENCE_S

WANTED = "SLIMEFSDP_TWO_NODES"
pytestmark = [
    # four minutes, as no fixture shares a cluster of two machines
    pytest.mark.skipif(WANTED not in os.environ, reason=f"only with {WANTED}=1, since it takes root"),
    pytest.mark.skipif(WANTED in os.environ and not can_emulate(), reason="needs root, and the programs ip and tc"),
]


@pytest.fixture
def machines() -> Iterator[TwoNodes]:
    # tmp_path is too long for the names of Ray's sockets
    with tempfile.TemporaryDirectory() as folder, TwoNodes(Path(folder)) as machines:
        yield machines


FAULTS = """
import socket, time
real_time, real_server = time.time, socket.create_server
time.time = lambda: real_time() + 90
socket.create_server = lambda address, **options: real_server(("127.0.0.1", address[1]), **options)
"""


def checked(machines: TwoNodes, *arguments: str, at: int = 0, **options: Any) -> tuple[int, list[str], dict[str, Any]]:
    """Exit status, problems, and the JSON record of `slimefsdp check .. --nodes 2`."""
    command = [sys.executable, "-m", "actors.cli", "check", *arguments, "--nodes", "2", "--json"]
    process = machines.run(at, command, **options)
    lines = [line for line in process.stderr.splitlines() if line.startswith(("error", "  also"))]
    return process.returncode, lines, json.loads(process.stdout) if process.stdout else {}


def test_check_finds_five_faults_and_a_slow_link(machines: TwoNodes, tmp_path: Path) -> None:
    model, shared = save_tiny_model(tmp_path / "model", vocab_size=97), tmp_path / "shared"
    shared.mkdir()
    settings = tmp_path / "run.yaml"
    settings.write_text(json.dumps({"model": {"path": str(model)}, "run": {"dir": str(shared / "run")}}))
    config = [str(settings), f"cluster.address={ADDRESS}"]
    assert machines.start_ray(0).returncode == 0

    # a wrong token: the machine is missing in the cluster, and is told why
    assert machines.start_ray(1, token="1" * 64).returncode != 0
    status, problems, _ = checked(machines, *config)
    assert status != 0 and "1 nodes are in the cluster, and 2 are expected" in problems[0]
    status, problems, _ = checked(machines, *config, at=1, token="1" * 64)
    assert status != 0 and "cannot reach a Ray cluster" in problems[0]

    # ports that only the machine itself reaches, other code, a clock that is ahead, and a folder of its own
    own, errors = tmp_path / "own", ROOT / "slimefsdp" / "errors.py"
    (own / "shared").mkdir(parents=True)
    (own / "errors.py").write_text(errors.read_text() + "# of another version\n")
    (own / "sitecustomize.py").write_text(FAULTS)
    mounts = {shared: own / "shared", errors: own / "errors.py"}
    path = os.pathsep.join([str(own), str(ROOT)])
    assert machines.start_ray(1, variables={"PYTHONPATH": path}, mounts=mounts).returncode == 0
    status, problems, record = checked(machines, *config)
    text = "\n".join(problems)
    assert status != 0 and len(problems) == 4, text
    assert "slimefsdp's source" in text and "s off" in text and "does not see the folder of run.dir" in text
    assert f"({SECOND}): {SECOND}:" in text
    assert [node["address"] for node in record["cluster"]["nodes"] if node["lacks"]] == [SECOND]
    machines.stop(1)

    assert machines.start_ray(1).returncode == 0
    machines.slow_down("50mbit")
    status, problems, record = checked(machines, *config)
    rates = [rate for _, _, rate in record["cluster"]["sending_gbps"]]
    assert status != 0 and len(rates) == 2 and max(rates) < 0.06 and record["cluster"]["all_reduce_gbps"] < 0.06
    assert sum("are usual for the link" in problem for problem in problems) == 2, problems


def job(model: Path, folder: Path, address: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.two_node_job", str(model), str(folder), address, *more]


def digest(folder: Path) -> str:
    files = sorted((folder / "exported").glob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_weights_equal_those_of_one_node_also_when_a_node_vanishes(machines: TwoNodes, tmp_path: Path) -> None:
    model, mesh = save_tiny_model(tmp_path / "model", vocab_size=97), json.dumps({"dp": 2})
    one = subprocess.run(
        job(model, tmp_path / "one", "", mesh, "stays"), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert one.returncode == 0, one.stderr
    for index in (0, 1):
        assert machines.start_ray(index).returncode == 0
    two = tmp_path / "two"
    driver = machines.begin(0, job(model, two, ADDRESS, mesh, "loses"))
    deadline = time.monotonic() + PATIENCE_S
    while not (two / READY).exists():
        assert driver.poll() is None and time.monotonic() < deadline, driver.communicate()
        time.sleep(0.2)
    machines.stop(1)
    assert machines.start_ray(1).returncode == 0
    (two / GONE).touch()
    output, said = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, said
    assert "2 ranks on 2 nodes" in said
    result, expected = (json.loads(text.splitlines()[-1]) for text in (output, one.stdout))
    assert result["recoveries"] and not expected["recoveries"]
    assert result["found"] == expected["found"] and digest(two) == digest(tmp_path / "one")
