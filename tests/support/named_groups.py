"""A script: a group outlives the program that launched it, which is killed; prints what became of it as JSON.

It runs in a process of its own, since the Ray cluster is none that the tests started.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray takes another address of the machine for this one
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

from actors import WorkerGroup, launch_named, submit
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import StateError
from tests.support.node_loss import batch_of
from tests.support.tiny_models import save_tiny_model
from tests.support.waiting import PATIENCE_S, is_alive, wait_until

ROOT = Path(__file__).parents[2]
NAME, STEPS = "policy", 4
SCRIPT = [sys.executable, "-m", "tests.support.named_groups"]


def config_of(address: str, folder: Path) -> RunConfig:
    return config_from_dict(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"path": str(folder / "model")},
            "mesh": {"dp": 2, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"samples_per_update": 4},
            "optim": {"lr": 1e-3, "total_updates": 100},
            "cluster": {"address": address, "launch_timeout_s": 120.0, "call_timeout_s": 120.0},
        }
    )


def launcher(address: str, folder: Path) -> None:
    """The program that launches the group, and is killed while the group does a call that it has not waited for."""
    group = launch_named(config_of(address, folder), NAME)
    print(group.train_step(batch_of(0))["grad_norm"].hex(), flush=True)
    group.save(1)
    submit(group.train_step, batch_of(1))
    os.kill(os.getpid(), signal.SIGKILL)


def is_listening(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def command(*words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "actors.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return run.stdout + "".join(line for line in run.stderr.splitlines(keepends=True) if not line.startswith("["))


def found(address: str, folder: Path) -> dict[str, Any]:
    save_tiny_model(folder / "model", vocab_size=97)
    with subprocess.Popen(
        [*SCRIPT, "launch", address, str(folder)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        first = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    results: dict[str, Any] = {"launcher": process.returncode, "norms": first}
    try:
        with WorkerGroup.attach(NAME, write=True, address=address):
            results["taken over"] = "at once"
    except StateError as error:  # the other one may be there still, as far as anybody knows
        results["taken over"] = error.field
    group = WorkerGroup.attach(NAME, write=True, wait_s=PATIENCE_S, address=address)
    results["updates"] = wait_until(lambda: group.status().updates == 4) and group.status().updates
    results["norms"].append(group.train_step(batch_of(2))["grad_norm"].hex())
    pids = [one.pid for one in group.health()]  # type: ignore[union-attr]
    os.kill(pids[1], signal.SIGKILL)
    results["norms"].append(group.train_step(batch_of(3))["grad_norm"].hex())
    reader = WorkerGroup.attach(NAME)
    results["read"] = reader.compute_log_probs(batch_of(0)).log_probs.tolist()
    results["status"] = json.loads(command("groups", "list", NAME, "--json", "--address", address))[NAME]
    results["stopped while written"] = command("groups", "stop", NAME, "--address", address)
    pids = [one.pid for one in group.health()]  # type: ignore[union-attr]
    group.detach()
    subprocess.run([*SCRIPT, "write", address], cwd=ROOT, check=True, timeout=PATIENCE_S)
    with WorkerGroup.attach(NAME, write=True, address=address):
        results["behind one that ended"] = "at once"
    results["stopped"] = command("groups", "stop", NAME, "--address", address)
    results["ended"] = wait_until(lambda: not any(map(is_alive, pids)))
    reader.detach()

    straight = WorkerGroup.launch(config_of(address, folder))
    results["expected"] = [straight.train_step(batch_of(step))["grad_norm"].hex() for step in range(STEPS)]
    results["expected read"] = straight.compute_log_probs(batch_of(0)).log_probs.tolist()
    straight.shutdown()
    return results


def main(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    head = subprocess.Popen(
        ["bash", "scripts/launch_cluster.sh", "head", address], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert wait_until(lambda: is_listening(address))
        result = found(address, folder)
    finally:
        head.terminate()
        head.wait()
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launcher(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1] == "write":
        group = WorkerGroup.attach(NAME, write=True, address=sys.argv[2])  # and ends without a word
    else:
        main(Path(sys.argv[1]))
