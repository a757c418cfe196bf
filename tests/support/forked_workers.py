"""Workers of Ray that are forked from a process that has imported the trainer: half a second each, not six.

Ray starts a worker by a command. In the clusters of `forked_workers` this file is that command: it hands what it was
given, its environment, folder and streams over to a server, whose child goes on as Ray's own worker would have.
What that has imported beforehand is no part of Ray, which reads its environment while it is imported.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS = "SLIMEFSDP_TEST_FORKED_WORKERS"  # the server's socket, in the environment of a raylet
SERVE = "--serve"
PRELOADED = (
    "slimefsdp.trainer",
    "slimefsdp.weight_sync.broadcast",
    "transformers.models.qwen3.modeling_qwen3",
)
Request = tuple[list[str], dict[str, str], str]


def hand_over(address: str) -> None:
    """Has a fork of the server run what this process was to run."""
    message = pickle.dumps((sys.argv, dict(os.environ), str(Path.cwd())))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        streams = array.array("i", [0, 1, 2])
        connection.sendmsg(
            [struct.pack("q", len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams.tobytes())]
        )
        connection.sendall(message)
        connection.recv(1)  # until it has taken them


def serve(listener: socket.socket) -> None:
    """Forks a worker for each connection, until whoever started the server is gone."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: Ray sees their connections end
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            run_worker(*taken(connection))
        connection.close()


def taken(connection: socket.socket) -> Request:
    """What a launched process handed over; its streams are this one's from here on."""
    head, control, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    (size,) = struct.unpack("q", head)
    streams = array.array("i")
    streams.frombytes(control[0][2][: 3 * 4])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with connection, connection.makefile("rb") as file:
        request: Request = pickle.loads(file.read(size))
    return request


def run_worker(argv: list[str], environment: dict[str, str], folder: str) -> None:
    """Goes on as `python ARGV`, without an end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.pop(ADDRESS, None)
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    options, argv = setup_worker.parser.parse_known_args(argv[1:])
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}")
    assert not context.command_prefix and context.py_executable == sys.executable, "not run as tests run it"
    os.environ.update(context.env_vars)
    script = argv[0]
    sys.argv, sys.path[0] = argv, str(Path(script).parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    code = 1
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """The clusters that this process starts meanwhile have forked workers."""
    from unittest import mock

    from ray._private import ray_constants

    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listener,
        mock.patch.object(ray_constants, "SETUP_WORKER_FILENAME", __file__),  # absolute: no folder is put before it
        # no worker a core in advance: a fork is here at once
        mock.patch.dict(os.environ, {ADDRESS: f"{folder}/socket", "RAY_prestart_worker_first_driver": "0"}),
    ):
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)
        command = [sys.executable, "-m", "tests.support.forked_workers", SERVE, str(listener.fileno())]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, pass_fds=[listener.fileno()], **pipes) as server:  # ends when its input does
            assert server.stdout is not None
            assert server.stdout.readline(), "the server has ended"
            yield
            server.kill()  # it has nothing left to do, and nothing to lose


if __name__ == "__main__":
    if sys.argv[1] == SERVE:
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        hand_over(os.environ[ADDRESS])
