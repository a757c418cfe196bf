"""The cluster the product starts: who can reach it, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from actors.cluster import capacity
from actors.cluster import connect as cluster_module
from actors.cluster.capacity import (
    RANKS_PER_CORE,
    check_gpus,
    check_machine,
    gpus_here,
    gpus_of_engines,
    with_cluster_ranks,
)
from actors.cluster.connect import (
    RAY_LOG,
    RayMessages,
    cluster_size,
    connect,
    keep_token_private,
    ray_session,
    require_answer,
    require_lasting_cluster,
)
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import ConfigError, ResourceError
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S

SERVERS = {"engine": "vllm", "engines": 1, "engine_python": "p"}

# in the import order of a user's own loop: starts a local cluster with two ranks and an engine, lets them train and
# sample, and reports where they listen meanwhile, where the token can be read, and whom the cluster lets in
INSIDE = """
import json, os, pathlib, signal, subprocess, sys, time
from actors import EnginePool, WorkerGroup, connect, submit
from slimefsdp import RolloutBatch, load_config
config = load_config(sys.argv[1])
connect(config)
on_sigterm = signal.getsignal(signal.SIGTERM)
import ray
token_file = pathlib.Path.home() / ".ray" / "auth_token"
token = token_file.read_text()
address = ray.get_runtime_context().gcs_address
home = pathlib.Path(sys.argv[2])
strangers = {}  # drivers that begin now, since it takes Ray a while to give up
for name, known in (("stranger", None), ("friend", token)):
    (home / name / ".ray").mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"HOME": str(home / name), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # or it looks beyond loopback
    if known:
        (home / name / ".ray" / "auth_token").write_text(known)
        environment["RAY_AUTH_MODE"] = "token"
    code = f"import ray; ray.init('{address}', logging_level='ERROR'); print(len(ray.nodes()))"
    strangers[name] = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
group = WorkerGroup.launch(config)
engines = EnginePool.launch(config)
group.update_weights(engines.receivers)
engines.generate(["sort 12"], samples_per_prompt=2, seed=(0, 0))
batch = RolloutBatch.from_samples(
    [{"tokens": list(range(1, 30)), "response_length": 9, "reward": i % 3, "group_id": i // 4} for i in range(8)]
)
group.train_step(batch)


def processes():
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return ours


def text(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def listening(ours):
    owners = {}
    for pid in ours:
        for descriptor in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                owners[target[8:-1]] = pid
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            # 0A: a stream that listens; 07: datagrams from anywhere
            if columns[3] == ("07" if table.startswith("udp") else "0A") and columns[9] in owners:
                found.add((owners[columns[9]], columns[1].split(":")[0]))
    return found


training = [submit(group.train_step, batch) for _ in range(4)]
ours, found = processes(), set()
for _ in range(5):
    found |= listening(ours)
    time.sleep(0.1)
for future in training:
    future.result()
ranks = [health.pid for health in group.health()]
niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in ranks]
ours |= processes()
found |= listening(ours)
group.save(1)
places = [path for root in (config.run.dir, pathlib.Path(ray._private.worker._global_node.get_session_dir_path()))
          for path in root.rglob("*") if path.is_file() and path.stat().st_size < 20_000_000]
leaks = [str(path) for path in places if token in text(path)]
leaks += [f"/proc/{pid}/cmdline" for pid in ours if token in text(pathlib.Path(f"/proc/{pid}/cmdline"))]
for name, driver in strangers.items():
    output, errors = driver.communicate(timeout=600)
    strangers[name] = [driver.returncode, output.strip(), errors[-2000:]]
print(json.dumps({
    "processes": len(ours), "ranks": ranks, "niceness": niceness, "own_niceness": os.getpriority(os.PRIO_PROCESS, 0),
    "listening": sorted(found), "token_mode": token_file.stat().st_mode & 0o777,
    "searched": len(places), "leaks": leaks, "token_length": len(token),
    "sigterm_ends_it": on_sigterm is signal.SIG_DFL, **strangers,
}))
group.shutdown()
ray.shutdown()
"""
# how the kernel writes 127.0.0.1, ::1 and ::ffff:127.0.0.1
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def config(**sections: Any) -> RunConfig:
    return config_from_dict({"model": {"path": "x"}, "optim": {"total_updates": 1}, **sections})


@pytest.fixture(scope="module")
def seen_inside(example: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a driver of its own, with a home of its own, saw of its local cluster while that trained."""
    folder = tmp_path_factory.mktemp("inside")
    (folder / "home").mkdir()
    tree = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(example / "model")},
        "mesh": {"dp": 2, "device": "cpu"},
        "optim": {"total_updates": 10},
        "rollout": {"max_new_tokens": 8},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(folder / "home"), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, folder / "c.yaml", folder],
        capture_output=True, text=True, cwd=root, env=environment, timeout=PATIENCE_S, check=False,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nothing_of_a_local_cluster_listens_beyond_loopback_while_ranks_train_and_engines_sample(
    seen_inside: dict[str, Any],
) -> None:
    listening = seen_inside["listening"]
    assert seen_inside["processes"] >= 6 and len(listening) >= 7  # the control: there is something to look at
    assert {pid for pid, _ in listening} >= set(seen_inside["ranks"]), "ranks listen for each other"
    assert {address for _, address in listening} <= LOOPBACK


def test_the_token_is_for_this_user_alone_and_in_no_log_run_folder_or_command_line(seen_inside: dict[str, Any]) -> None:
    assert seen_inside["token_mode"] == 0o600 and seen_inside["token_length"] >= 32
    assert seen_inside["searched"] >= 10  # the control: logs, settings and a checkpoint were there to be searched
    assert seen_inside["leaks"] == []


def test_a_second_driver_is_let_in_with_the_token_and_refused_without_it(seen_inside: dict[str, Any]) -> None:
    code, nodes, _ = seen_inside["friend"]
    assert (code, nodes) == (0, "1")
    code, nodes, error = seen_inside["stranger"]
    assert code != 0 and nodes == "" and "uthenticat" in error


def test_ray_leaves_a_driver_what_sigterm_meant_to_it(seen_inside: dict[str, Any]) -> None:
    assert seen_inside["sigterm_ends_it"]


def test_ranks_of_a_local_cluster_have_the_drivers_priority(seen_inside: dict[str, Any]) -> None:
    assert seen_inside["niceness"] == [seen_inside["own_niceness"]] * 2


def modes(path: Path) -> tuple[int, int]:
    return path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777


def test_a_token_is_made_and_kept_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    keep_token_private(make=False)  # to join a cluster, which has its own
    assert not file.exists()
    keep_token_private(make=True)
    token = file.read_text()
    assert modes(file) == (0o700, 0o600) and len(token) == 64 and list(file.parent.iterdir()) == [file]
    file.chmod(0o644)  # as Ray writes it
    keep_token_private(make=True)
    assert modes(file) == (0o700, 0o600) and file.read_text() == token
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "own"))
    (tmp_path / "own").write_text("x" * 64)
    keep_token_private(make=True)
    assert modes(tmp_path / "own")[1] == 0o600 and (tmp_path / "own").read_text() == "x" * 64


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def raising(error: Exception) -> Any:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    return fails


def test_a_token_is_whole_where_files_cannot_be_linked_and_the_first_ones_where_two_are_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / ".ray" / "auth_token"

    def overtaken(own: Path, target: Path) -> None:
        own.write_text("the other's")
        raise FileExistsError

    monkeypatch.setattr(Path, "hardlink_to", raising(OSError(1, "no links here")))
    keep_token_private(make=True)
    assert len(file.read_text()) == 64 and list(file.parent.iterdir()) == [file] and modes(file)[1] == 0o600
    file.unlink()
    monkeypatch.setattr(Path, "hardlink_to", overtaken)
    keep_token_private(make=True)
    assert file.read_text() == "the other's" and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "word"), [(PermissionError(13, "denied"), "no permission"), (OSError(30, "read-only"), "read-only")]
)
def test_where_no_token_can_be_made_the_folder_is_named(
    error: OSError, word: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", raising(error))
    with refused(ResourceError, "cluster.address", home / ".ray" / "auth_token", word) as caught:
        keep_token_private(make=True)
    assert "RAY_AUTH_TOKEN_PATH" in str(caught.value.hint)


def test_another_users_token_that_all_can_read_is_warned_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "token").write_text("x")
    (home / "token").chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(Path, "chmod", raising(PermissionError(1, "not yours")))
    with pytest.warns(UserWarning, match=str(home / "token")):
        keep_token_private(make=False)


def test_what_ray_would_print_is_in_a_file_with_its_process_until_that_is_closed(tmp_path: Path) -> None:
    from ray._private import worker

    printed, logger = worker.print_to_stdstream, logging.getLogger("ray")
    handlers, path = list(logger.handlers), tmp_path / "run" / RAY_LOG
    messages = RayMessages(path)
    write: Any = worker.print_to_stdstream
    try:
        write({"pid": "autoscaler", "lines": ["a table"]})
        write({"pid": 7, "actor_name": "Rank", "lines": ["\x1b[36mhello\x1b[0m", "there"]})
        write({"pid": 8, "actor_name": None, "task_name": None, "lines": ["alone"]}, "more")
        write({"pid": "raylet", "lines": ["lost"]})
        logger.error("a problem")
    finally:
        messages.close()
    write({"pid": 7, "lines": ["late"]})  # from a thread of Ray's, which must not end
    assert (worker.print_to_stdstream, logger.handlers) == (printed, handlers)
    *lines, last = path.read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "(Rank pid=7) hello", "(Rank pid=7) there", "(pid=8) alone", "(raylet) lost"
    ]  # fmt: skip
    assert last.endswith("ERROR ray: a problem")


def test_a_command_names_the_file_of_messages_and_leaves_the_cluster_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(cluster_module, "connect", lambda config, path: done.append(path))
    monkeypatch.setattr(cluster_module, "disconnect", lambda: done.append("left"))
    for sections in ({"run": {"dir": str(tmp_path)}}, {}):
        with pytest.raises(KeyError), ray_session(config(**sections)):
            raise KeyError
    assert done[0] == tmp_path / RAY_LOG and done[1] == done[3] == "left"
    assert str(done[0]) in capsys.readouterr().err
    assert done[2].name == RAY_LOG and done[2].parent.is_dir()
    done[2].parent.rmdir()


def test_a_machine_that_does_not_answer_is_an_error_at_once() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for named in (address, f"ray://{address}", "127.0.0.1:99999999999"):
            with refused(ResourceError, "cluster.address", named):
                require_answer(named)
    for not_one in ("auto", "10.0.0.1", "10.0.0.1:port", ":1"):
        require_answer(not_one)  # which is Ray's to judge
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_answer(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_cluster_that_ends_with_its_program_is_not_one_for_named_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker

    for processes in ({}, {"raylet": [1]}):
        monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes=processes))
        if processes:
            with refused(ResourceError, "cluster.address"):
                require_lasting_cluster()
        else:
            require_lasting_cluster()


def test_the_size_of_a_cluster_counts_the_nodes_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "join", lambda *_, **__: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}])
    assert cluster_size("10.0.0.1:6379", True) == (2, 6, 0)


def test_a_cluster_on_other_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ResourceError, match=r"10\.0\.0\.1:6379") as caught:
        connect(config(cluster={"address": "10.0.0.1:6379"}))
    assert caught.value.field == "cluster.address" and "RAY_AUTH_MODE=token" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("address", "variable", "named"),
    [
        ("local", "", "cluster.address=local"),
        ("auto", "local", "RAY_ADDRESS=local"),
        ("auto", "10.0.0.1:6379", "RAY_ADDRESS=10.0.0.1:6379"),
        ("auto", "ray://head:10001", "RAY_ADDRESS=ray://head:10001"),
    ],
)
def test_no_address_leads_to_an_open_cluster(
    address: str, variable: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with refused(ResourceError, "cluster.address", named):
        connect(config(cluster={"address": address}))


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of Ray's is started or ended, whatever cluster this process is connected to; `ray.init` is the test's."""
    for name, stand_in in (("is_initialized", lambda: False), ("shutdown", lambda: None)):
        monkeypatch.setattr(f"ray.{name}", stand_in)
    monkeypatch.setattr(cluster_module, "CleanupProcess", lambda: None)
    monkeypatch.setattr(cluster_module, "_cleanup", None)


@pytest.mark.parametrize(
    ("cluster", "is_warned"),
    [
        ({"address": "127.0.0.2:6379"}, False),
        ({"address": "0.0.0.0:6379"}, True),  # this machine's own, which others may reach
        ({"address": "10.0.0.1:6379", "allow_without_token": True}, True),
    ],
)
def test_this_machines_own_addresses_and_what_is_allowed_need_no_token(
    cluster: dict[str, Any],
    is_warned: bool,
    no_ray: None,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    def asked(**options: Any) -> None:
        raise ConnectionError(f"asked for {options['address']}")

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr("ray.init", asked)
    with refused(ResourceError, "cluster.address", f"asked for {cluster['address']}"):
        connect(config(cluster=cluster))
    assert any(cluster["address"] in str(one.message) for one in recwarn) is is_warned


def test_messages_that_cannot_be_written_are_an_error_and_no_cluster_is_started(
    no_ray: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setattr("ray.init", raising(AssertionError("it was started")))
    with refused(ResourceError, "run.dir", home / "file" / RAY_LOG):
        connect(config(mesh={"device": "cpu"}), home / "file" / RAY_LOG)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    connect(config(mesh={"device": "cpu"}), home / "file" / RAY_LOG)  # nothing is to be done


def test_a_cluster_that_refuses_the_token_is_told_from_one_that_is_not_there(
    no_ray: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import worker

    printed, refusal = worker.print_to_stdstream, ConnectionError("no")
    monkeypatch.setattr("ray.init", raising(refusal))
    for cause, hint in ((None, "ray start --head"), (RuntimeError("InvalidAuthToken: x"), "RAY_AUTH_MODE=token")):
        refusal.__cause__ = cause
        with refused(ResourceError, "cluster.address", "127.0.0.2:6379") as caught:
            connect(config(cluster={"address": "127.0.0.2:6379"}), home / RAY_LOG)
        assert hint in str(caught.value.hint) and worker.print_to_stdstream is printed


def test_a_cluster_is_allowed_without_a_token_only_where_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.allow_without_token"):
        config(cluster={"allow_without_token": True})


def test_more_processes_than_the_machine_may_run_are_refused_with_both_numbers() -> None:
    cap = RANKS_PER_CORE * (os.cpu_count() or 1)
    with refused(ResourceError, "mesh.dp", cap + 1, cap):
        check_machine(config(mesh={"dp": cap, "device": "cpu"}))


@pytest.mark.parametrize(
    ("gpus", "sections", "is_refused"),
    [
        (4, {"mesh": {"dp": 3}}, False),
        (4, {"mesh": {"dp": 4}}, True),
        (4, {"mesh": {"dp": 4, "device": "cpu"}}, False),
        (4, {"mesh": {"dp": 4}, "cluster": {"address": "10.0.0.1:6379"}}, False),
        (4, {"mesh": {"dp": 2}, "rollout": {"engines": 2}}, False),
        (4, {"mesh": {"dp": 2}, "rollout": {"engines": 2}, "reference": {"dp": 1}}, True),
        (4, {"mesh": {"dp": 2}, "rollout": {**SERVERS, "gpus_per_engine": 2}}, False),
        (4, {"mesh": {"dp": 3}, "rollout": {**SERVERS, "gpus_per_engine": 2}}, True),
        (4, {"mesh": {"dp": 4}, "rollout": {"engine": "vllm", "engines": 1, "engine_urls": ["http://a:1"]}}, False),
        (4, {"mesh": {"dp": "auto", "cp": 2}, "rollout": {"engines": 2}}, False),
        (4, {"mesh": {"dp": "auto", "cp": 2}, "rollout": {"engines": 3}}, True),
        (1, {"mesh": {"dp": 1}, "rollout": {"engines": 1, "placement": "colocated"}}, False),
        (1, {"mesh": {"dp": 2}, "rollout": {"engines": 1, "placement": "colocated"}}, True),
        (2, {"algorithm": "sft", "mesh": {"dp": 2}}, False),
        (2, {"algorithm": "sft", "mesh": {"dp": 3}}, True),
        (0, {"mesh": {"dp": 1, "device": "cuda"}}, True),
        (0, {"mesh": {"dp": 8}}, False),  # on the CPU then
        (None, {"mesh": {"dp": 8, "device": "cuda"}}, False),  # nothing tells
    ],
)
def test_too_few_gpus_of_this_machine_are_refused_with_both_numbers(
    gpus: int | None, sections: dict[str, Any], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "gpus_here", lambda: gpus)
    settings = config(**sections)
    engines = gpus_of_engines(settings)
    if not is_refused:
        return check_gpus(settings, engines=engines)
    assert gpus is not None
    with refused(ResourceError, "mesh.dp", gpus):
        check_gpus(settings, engines=engines)


@pytest.mark.parametrize(
    ("devices", "visible", "found"),
    [
        (["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia10"], None, 3),
        (["nvidiactl", "nvidia0", "nvidia1"], "1", 1),
        (["nvidiactl", "nvidia0", "nvidia1"], "0,1,2,3", 2),
        (["nvidiactl", "nvidia0"], "", 0),
        (["nvidiactl", "nvidia0"], "NoDevFiles", 0),
        (["nvidiactl"], None, None),
        ([], "0", None),
    ],
)
def test_gpus_are_counted_without_asking_a_library(
    devices: list[str], visible: str | None, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
    assert gpus_here(tmp_path) == found
    for index in range(5):
        (tmp_path / "proc/driver/nvidia/gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    assert gpus_here(tmp_path) == {None: 5, "": 0, "NoDevFiles": 0}.get(visible, visible and len(visible.split(",")))


def test_auto_takes_the_gpus_that_engines_and_a_reference_group_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    auto: dict[str, Any] = {"dp": "auto", "dp_replicate": 2}
    assert with_cluster_ranks(config(mesh=auto, rollout={"engines": 2})).actor_mesh == (2, 3)
    assert with_cluster_ranks(config(algorithm="sft", mesh=auto)).actor_mesh == (2, 4)
    beside = {"engines": 2, "placement": "colocated"}
    assert with_cluster_ranks(config(mesh=auto, rollout=beside)).actor_mesh == (2, 4)
    apart = {"dp": 3}
    assert with_cluster_ranks(config(mesh=auto, rollout={"engines": 1}, reference=apart)).actor_mesh == (2, 2)
    with refused(ConfigError, "mesh.dp", 7, "mesh.dp_replicate=2"):
        with_cluster_ranks(config(mesh=auto, rollout={"engines": 1}))
    with refused(ResourceError, "mesh.dp", 8):
        with_cluster_ranks(config(mesh=auto, rollout={"engines": 8}))
    fixed = config(mesh={"dp": 3}, rollout={"engines": 8})
    assert with_cluster_ranks(fixed) is fixed


def test_auto_takes_the_cores_where_ranks_run_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 100.0, "GPU": 8.0})  # a local cluster's are made up
    on_cpu: dict[str, Any] = {"dp": "auto", "device": "cpu"}
    assert with_cluster_ranks(config(mesh={**on_cpu, "cp": 2})).ranks == 6
    assert with_cluster_ranks(config(mesh={**on_cpu, "cp": 8})).actor_mesh == (1, 1)
    assert with_cluster_ranks(config(mesh=on_cpu, cluster={"address": "10.0.0.1:6379"})).ranks == 100
    check_machine(config(mesh=on_cpu))
    many_engines = config(mesh=on_cpu, rollout={"engines": 7 * RANKS_PER_CORE})
    with refused(ResourceError, "mesh.dp", 7 * RANKS_PER_CORE):
        with_cluster_ranks(many_engines)


RECORDING_RAY = """#!/bin/sh
echo "$@ mode=$RAY_AUTH_MODE" >>"$HOME/calls"
if [ "$1" = get-auth-token ] && [ ! -e "$HOME/.ray/auth_token" ]; then
  mkdir -p "$HOME/.ray" && printf secret >"$HOME/.ray/auth_token"
fi
cat "$HOME/.ray/auth_token"
"""


@pytest.mark.default_tier
@pytest.mark.parametrize("made_before", [False, True])
def test_the_launch_script_keeps_the_token_in_a_private_file_and_off_every_command_line(
    tmp_path: Path, made_before: bool
) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "launch_cluster.sh"
    for name in ("bin", "scripts", "home"):
        (tmp_path / name).mkdir()
    shutil.copy(script, tmp_path / "scripts")  # beside no virtual environment whose ray it would take
    (tmp_path / "bin" / "ray").write_text(RECORDING_RAY)
    (tmp_path / "bin" / "ray").chmod(0o755)
    token = tmp_path / "home" / ".ray" / "auth_token"
    if made_before:  # as Ray makes it
        token.parent.mkdir()
        token.write_text("secret")
        token.chmod(0o644)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path / "home")}
    for role in ("head", "worker"):
        done = subprocess.run(
            ["bash", tmp_path / "scripts" / "launch_cluster.sh", role, "10.0.0.1", "--min-worker-port", "20000"],
            env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        # what `ray start` prints is the stand-in's; before it nothing is said of the token
        assert done.stdout.removesuffix("secret").count("secret") == 0 and "secret" not in done.stderr
        assert token.stat().st_mode & 0o777 == 0o600
    calls = (tmp_path / "home" / "calls").read_text()
    assert calls.count("--min-worker-port 20000 mode=token") == 2, "further options are those of ray start"
    assert calls.count("start --block") == 2 and calls.count("mode=token") == 4 and "secret" not in calls


def test_ray_is_started_again_until_the_launchs_deadline(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def failing(problem: str) -> Any:
        def start(**_: Any) -> None:
            begun.append(problem)
            raise Exception(problem)

        return start

    local = config(mesh={"device": "cpu"}, cluster={"launch_timeout_s": 0.2})
    monkeypatch.setattr("ray.init", failing("The current node timed out during startup."))
    with refused(ResourceError, "cluster.address", "cluster.launch_timeout_s=0.2"):
        connect(local)
    assert len(begun) > cluster_module.STARTS, "Ray's own deadline is no reason to give up before ours"
    begun.clear()
    monkeypatch.setattr("ray.init", failing("no room in /tmp"))
    with refused(ResourceError, "cluster.address", "no room in /tmp"):
        connect(config(mesh={"device": "cpu"}, cluster={"launch_timeout_s": 600.0}))
    assert len(begun) == cluster_module.STARTS
