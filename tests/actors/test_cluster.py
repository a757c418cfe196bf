"""The cluster the product starts: who can reach it, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import check_machine, connect, processes_needed, with_cluster_ranks
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import ConfigError, ResourceError

# starts a local cluster in the import order of a user's own loop, and prints the addresses it listens on
LISTENING = """
import json, os, pathlib, sys
from actors import EnginePool, WorkerGroup, connect
WorkerGroup, EnginePool
from slimefsdp.config import config_from_dict
connect(config_from_dict({"model": {"path": "x"}, "optim": {"total_updates": 1}}))
import ray
ray.get(ray.remote(num_cpus=1)(lambda: 1).remote(), timeout=60)

parents = {}
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
        parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        pass
ours = {os.getpid()}
while True:
    more = {pid for pid, parent in parents.items() if parent in ours} - ours
    if not more:
        break
    ours |= more
inodes = set()
for pid in ours:
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
addresses = []
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and columns[9] in inodes:
            addresses.append(columns[1].split(":")[0])
print(json.dumps({"processes": len(ours), "addresses": addresses}))
ray.shutdown()
"""
# how the kernel writes 127.0.0.1, ::1 and ::ffff:127.0.0.1
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def config(**sections: Any) -> RunConfig:
    return config_from_dict({"model": {"path": "x"}, "optim": {"total_updates": 1}, **sections})


@pytest.mark.slow
def test_a_local_cluster_listens_on_loopback_only_even_when_ray_was_imported_first() -> None:
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, cwd=root, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["processes"] >= 4 and len(found["addresses"]) >= 5  # the control: there is something to look at
    assert set(found["addresses"]) <= LOOPBACK


def test_a_cluster_on_other_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ResourceError, match=r"10\.0\.0\.1:6379") as caught:
        connect(config(cluster={"address": "10.0.0.1:6379"}))
    assert caught.value.field == "cluster.address" and "RAY_AUTH_MODE=token" in str(caught.value.hint)


def test_more_processes_than_the_machine_may_run_are_refused_with_both_numbers() -> None:
    many = config(mesh={"dp": 1000, "device": "cpu"})
    with pytest.raises(ResourceError, match="1001") as caught:
        check_machine(many)
    assert caught.value.field == "mesh.dp"


def test_processes_count_ranks_engines_and_a_reference_group() -> None:
    reference = {"placement": "group", "dp": 3}
    assert processes_needed(config(mesh={"dp": 2}, rollout={"engines": 2})) == 4
    assert processes_needed(config(mesh={"dp": 2}, rollout={"engines": 2}, reference=reference)) == 7
    assert processes_needed(config(algorithm="sft", mesh={"dp": 2})) == 2


def test_auto_takes_the_gpus_that_engines_and_a_reference_group_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    auto: dict[str, Any] = {"dp": "auto", "dp_replicate": 2}
    assert with_cluster_ranks(config(mesh=auto, rollout={"engines": 2})).actor_mesh == (2, 3)
    assert with_cluster_ranks(config(algorithm="sft", mesh=auto)).actor_mesh == (2, 4)
    apart = {"placement": "group", "dp": 3}
    assert with_cluster_ranks(config(mesh=auto, rollout={"engines": 1}, reference=apart)).actor_mesh == (2, 2)
    with pytest.raises(ConfigError, match="7 ranks are no multiple of") as caught:
        with_cluster_ranks(config(mesh=auto, rollout={"engines": 1}))
    assert caught.value.field == "mesh.dp"
    with pytest.raises(ResourceError, match="none is left"):
        with_cluster_ranks(config(mesh=auto, rollout={"engines": 8}))
    fixed = config(mesh={"dp": 3}, rollout={"engines": 8})
    assert with_cluster_ranks(fixed) is fixed


def test_auto_takes_the_cores_where_ranks_run_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 100.0, "GPU": 8.0})  # a local cluster's are made up
    on_cpu: dict[str, Any] = {"dp": "auto", "device": "cpu"}
    assert with_cluster_ranks(config(mesh={**on_cpu, "cp": 2})).ranks == 6
    assert with_cluster_ranks(config(mesh={**on_cpu, "cp": 8})).actor_mesh == (1, 1)
    assert with_cluster_ranks(config(mesh=on_cpu, cluster={"address": "local"})).ranks == 100
    check_machine(config(mesh=on_cpu))
    with pytest.raises(ResourceError, match="allow 7"):
        with_cluster_ranks(config(mesh=on_cpu, cluster={"max_ranks_per_core": 1}))
