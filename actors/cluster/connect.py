"""Connects to Ray: starts a local cluster on loopback by default, or joins a running one by its address."""

from __future__ import annotations

import atexit
import importlib
import ipaddress
import itertools
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from actors.cluster.capacity import check_machine, most_processes
from actors.cluster.cleanup import CleanupProcess
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.config.run import ClusterSettings
from slimefsdp.errors import ResourceError

_REACH_S = 10.0  # how long a cluster's machine may take to answer
STARTS = 5  # limit on attempts to start a local Ray, except after an attempt that missed Ray's own deadline
_attempt = 0  # the attempt in progress
_cleanup: CleanupProcess | None = None  # for the local cluster that this process started; only on Linux
_messages: RayMessages | None = None  # receives the messages of Ray in this process
RAY_LOG = "ray.log"
_PRINT = "print_to_stdstream"  # not public, but Ray prints all output of other processes through it
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RayMessages:
    """Writes the messages that Ray would print in this process to a file, until `close`.

    Construct this before `ray.init`. With log_to_driver=True, the output of the job's processes is included.

    Args:
        path: the file to append to; its folder is created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._worker: Any = importlib.import_module("ray._private.worker")
        self._printed_before = getattr(self._worker, _PRINT)
        setattr(self._worker, _PRINT, self._write)
        self._logger = logging.getLogger("ray")
        self._handlers_before = list(self._logger.handlers)
        handler = logging.StreamHandler(self._file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._logger.handlers[:] = [handler]

    def close(self) -> None:
        """Lets Ray print again."""
        setattr(self._worker, _PRINT, self._printed_before)
        self._logger.handlers[:] = self._handlers_before
        self._file.close()

    def _write(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        """Writes lines that Ray would print, each with the time and the process that printed it."""
        if data["pid"] == "autoscaler":  # prints a table of nodes every few seconds
            return
        name = data.get("actor_name") or data.get("task_name") or ""
        who = f"{name} pid={data['pid']}".strip() if isinstance(data["pid"], int) else str(data["pid"])
        now = time.strftime("%H:%M:%S")
        text = "".join(f"{now} ({who}) {_COLOURS.sub('', line)}\n" for line in data["lines"])
        try:
            self._file.write(text)
        except (OSError, ValueError):  # the disk is full or the file closed, which must not end Ray's thread
            return


def _require_safe(address: str, *, allow_without_token: bool) -> None:
    """Refuses a cluster that other machines or users can reach without a token, since Ray runs any code it is sent."""
    named = f"cluster.address={address}"
    if address == "auto" and (address := os.environ.get("RAY_ADDRESS") or address) != "auto":  # as Ray does
        named += f" with RAY_ADDRESS={address}"
    if address == "local":
        raise ResourceError(
            f"{named} has Ray start a cluster of its own, which others can reach",
            field="cluster.address",
            hint="leave cluster.address out: then one starts that nobody else can reach",
        )
    host = address.rpartition("://")[2].rsplit(":", 1)[0].strip("[]")
    if os.environ.get("RAY_AUTH_MODE") == "token" or host == "auto" or _is_loopback(host):
        return
    if allow_without_token or _is_here(host):
        warnings.warn(f"{named} asks for no token: whoever reaches its ports can run code in this run", stacklevel=3)
        return
    raise ResourceError(
        f"{named} is not on this machine, and RAY_AUTH_MODE is not `token`",
        field="cluster.address",
        hint="start the cluster with scripts/launch_cluster.sh and set RAY_AUTH_MODE=token here; in a closed network, "
        "such as that of KubeRay or Anyscale, set cluster.allow_without_token=true",
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """Returns whether a host is this machine: only here can a socket be bound to the host's address."""
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(socket_address)
    except OSError:
        return False
    return True


def keep_token_private(*, make: bool) -> None:
    """Makes Ray's token unreadable for other users of the machine, which Ray itself does not do.

    Args:
        make: whether to make a missing token before Ray does it.

    Raises:
        ResourceError: the file cannot be made.
    """
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or Path.home() / ".ray" / "auth_token")
    try:
        if make and not path.exists() and not named and not os.environ.get("RAY_AUTH_TOKEN"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            whole = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            whole.touch(mode=0o600)
            try:
                whole.write_text(secrets.token_hex(32))
                path.hardlink_to(whole)  # fails if another process has created the token in the meantime
            except FileExistsError:
                pass
            except OSError:  # the file system has no links
                whole.replace(path)
            finally:
                whole.unlink(missing_ok=True)
        if path.exists() and path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except PermissionError:
        if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises if the folder may not be entered
            raise _no_token(path, "no permission") from None
        warnings.warn(f"others can read Ray's token, and it is not yours to change: {path}", stacklevel=2)
    except OSError as error:
        raise _no_token(path, error.strerror) from error


def _no_token(path: Path, reason: str | None) -> ResourceError:
    hint = "make that folder writable, or give a token in RAY_AUTH_TOKEN_PATH"
    return ResourceError(f"no token for Ray can be kept in {path}: {reason}", field="cluster.address", hint=hint)


def connect(config: RunConfig, messages: Path | None = None) -> None:
    """Starts or joins the Ray cluster, unless this process is connected already.

    A local cluster declares as many logical CPUs as the run needs, since there may be more ranks than cores. The
    cluster ends with this process, however this process ends. The cluster's processes block SIGINT and SIGTERM, which
    may be sent to the whole process group or job.

    Args:
        messages: a file for the messages of Ray and the output of the job's processes, until `disconnect`. None means
            that Ray's warnings are printed, and output of processes stays in the logs of Ray's session.

    Raises:
        ResourceError: this machine has too few cores; there is no cluster at `cluster.address`, or joining it is not
            safe; the token of a local cluster, or `messages`, cannot be written.
    """
    check_machine(config)
    num_cpus = max(os.cpu_count() or 1, most_processes(config) + 1)
    _connect(config.cluster, num_cpus, messages)


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Starts Ray or joins the cluster at cluster.address for the block of a command, and then leaves the cluster.

    What Ray, ranks and engines print is written to a file; a line on stderr names the file.

    Raises:
        ResourceError, ConfigError: as `connect`.
    """
    path = (config.run.dir or Path(tempfile.mkdtemp(prefix="slimefsdp-"))) / RAY_LOG
    print(f"Ray's messages, and what ranks and engines print: {path}", file=sys.stderr, flush=True)
    connect(config, path)
    try:
        yield
    finally:
        disconnect()


def join(address: str = "auto", *, allow_without_token: bool = False) -> None:
    """Joins a running cluster, unless this process is connected already.

    Args:
        allow_without_token: as cluster.allow_without_token.

    Raises:
        ResourceError: there is no cluster, or joining it is not safe.
    """
    require_answer(address)
    _connect(ClusterSettings(address=address, allow_without_token=allow_without_token), 0, None)


def require_answer(address: str) -> None:
    """Checks that a machine answers at `address`, if that is HOST:PORT, since Ray itself would try for minutes.

    Raises:
        ResourceError: nothing answers within a few seconds.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"cannot reach a Ray cluster at {address}: {error}",
            field="cluster.address",
            hint="start one with scripts/launch_cluster.sh or `ray start --head`, or name another",
        ) from error


def require_lasting_cluster() -> None:
    """Checks that the connected cluster outlives this process.

    Raises:
        ResourceError: this process has started the cluster, which ends with this process.
    """
    if _ray_processes():
        raise ResourceError(
            "the Ray cluster of this program ends with it, and all that is in it",
            field="cluster.address",
            hint="start one with scripts/launch_cluster.sh or `ray start --head`, and name it in cluster.address",
        )


def _connect(cluster: ClusterSettings, num_cpus: int, messages: Path | None) -> None:
    global _messages
    address = cluster.address
    if address is None:
        # an undocumented switch of Ray that binds a cluster's sockets to loopback, which a test verifies
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    else:
        _require_safe(address, allow_without_token=cluster.allow_without_token)
    # avoids Ray's warning that future versions will not hide accelerators from actors that request none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        return
    keep_token_private(make=address is None)
    if address is None:
        ray_constants.ENABLE_RAY_CLUSTER = False  # the same switch, if ray was imported before this call
    if messages is not None:
        try:
            _messages = RayMessages(messages)
        except OSError as error:
            raise ResourceError(
                f"{messages}: {error.strerror}", field="run.dir", hint="choose a folder that is writable"
            ) from error
    try:
        if address is not None:
            with stage("joining the cluster", is_short=True), _keeping_sigterm():
                ray.init(address=address, log_to_driver=messages is not None, logging_level=logging.ERROR)
        else:
            with stage("starting Ray", start_progress):
                _start_local(num_cpus, cluster.launch_timeout_s)
    except Exception as error:  # Ray raises `Exception` itself if a node does not start
        disconnect()
        if address is None:
            raise ResourceError(
                f"Ray did not start on this machine in {_attempt} attempts, within "
                f"cluster.launch_timeout_s={cluster.launch_timeout_s:g}: {error}",
                field="cluster.address",
                hint="the machine may be overloaded or out of memory: end what else runs on it, or raise "
                "cluster.launch_timeout_s",
            ) from error
        hint = "start one with `ray start --head`, or leave cluster.address out for a local one"
        if "InvalidAuthToken" in str(error.__cause__):
            hint = "set RAY_AUTH_MODE=token here, with the cluster's token in ~/.ray/auth_token"
        problem = f"cannot reach a Ray cluster at {address}: {error}"
        raise ResourceError(problem, field="cluster.address", hint=hint) from error


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Blocks SIGTERM while Ray starts, and keeps Ray from replacing this process's handler of SIGTERM.

    Ray's processes inherit the mask. So a scheduler that signals every process of a job does not end the ranks, and the
    driver can finish its step. Ray itself masks SIGINT in the same way.
    """
    utils: Any = importlib.import_module("ray._private.utils")
    install, handler = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda handler: None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        utils.set_sigterm_handler = install
        if threading.current_thread() is threading.main_thread():  # Ray's C++ code has replaced the handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_progress() -> str:
    """Returns the progress of starting a local cluster; it is called from another thread."""
    return f"attempt {_attempt}" if _attempt > 1 else ""


def _start_local(num_cpus: int, timeout_s: float) -> None:
    """Starts Ray, and repeats a failed attempt; no process of a failed attempt keeps running.

    A busy machine can miss Ray's own deadline of 30 s, which no setting changes, several times in a row. Attempts are
    repeated until `timeout_s` has passed; but from attempt `STARTS` on, a failure of any other kind is raised.
    """
    global _attempt
    deadline = time.monotonic() + timeout_s
    for _attempt in itertools.count(1):
        try:
            return _start_once(num_cpus)
        except Exception as error:
            is_overdue = "timed out" in str(error)
            if time.monotonic() > deadline or (_attempt >= STARTS and not is_overdue):
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            print(f"Ray did not start in attempt {_attempt}: {reason}", file=sys.stderr, flush=True)


def _start_once(num_cpus: int) -> None:
    global _cleanup
    import ray

    # Ray's default is 15; on a busy machine, ranks and engines would get a thirtieth of the time of other programs
    os.environ.setdefault("RAY_worker_niceness", "0")
    # frees objects at once; otherwise Ray keeps released buckets of a weight update in memory for up to a second
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "0")
    if sys.platform == "linux":
        _cleanup = CleanupProcess()
    try:
        # without the cleanup process nothing would end processes that block SIGTERM
        with _keeping_sigterm() if _cleanup else nullcontext(), _cleanup.marking() if _cleanup else nullcontext():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=_messages is not None,
                logging_level=logging.ERROR,
            )
    except BaseException:
        _end_local()
        raise
    if _cleanup is not None:
        _cleanup.watch([info.process.pid for infos in _ray_processes().values() for info in infos])
        atexit.register(disconnect)  # runs before Ray's own handler, which would wait for processes that block SIGTERM


def disconnect() -> None:
    """Leaves the cluster; a local cluster ends with all of its processes. Idempotent."""
    global _messages
    _end_local()
    if _messages is not None:
        _messages.close()
        _messages = None


def _end_local() -> None:
    global _cleanup
    import ray

    if _cleanup is None:
        ray.shutdown()
        return
    record = _ray_processes()
    processes = [info.process for infos in record.values() for info in infos]
    record.clear()  # otherwise Ray would send each process a SIGTERM, which it blocks, and wait for a second
    ray.shutdown()
    _cleanup.end()
    _cleanup = None
    for process in processes:
        process.poll()  # reaps the ended process, so that no zombie stays


def cluster_size(address: str, allow_without_token: bool) -> tuple[int, int, int]:
    """Joins a cluster and returns its numbers of nodes, cores and GPUs.

    Call it in a side process: Ray waits for a silent cluster without a deadline.

    Raises:
        ResourceError: the cluster cannot be joined.
    """
    join(address, allow_without_token=allow_without_token)
    import ray

    total = ray.cluster_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    return nodes, int(total.get("CPU", 0)), int(total.get("GPU", 0))


def _ray_processes() -> dict[str, list[Any]]:
    """Returns Ray's own record, kind -> processes, of what `ray.init` started and `ray.shutdown` ends."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return {} if node is None else node.all_processes  # type: ignore[no-any-return]
