"""Getting hold of Ray: a local cluster on loopback by default, or a running one by its address."""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

from actors.cluster.cleanup import CleanupProcess
from actors.cluster.ray_log import RayMessages
from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError

_REACH_S = 10.0  # until the machine of a cluster is taken for one that does not answer
_DRIVER_S = 20.0  # for the driver to say which GPUs there are
STARTS = 5  # of a local Ray, whose own deadline of 30 s a busy machine may miss, several times running
_cleanup: CleanupProcess | None = None  # of the local cluster that this process started, on Linux
_messages: RayMessages | None = None  # where this process has Ray's put


def processes_needed(config: RunConfig) -> int:
    """Ray actors that the command line starts for these settings: trainer ranks, reference ranks, engines."""
    return config.ranks + _processes_beside_the_actor(config)


def _processes_beside_the_actor(config: RunConfig) -> int:
    if config.algorithm == "sft":
        return 0
    return config.rollout.engines + _group_ranks_beside_the_actor(config)


def gpus_of_engines(config: RunConfig) -> int:
    """GPUs of their own that engines of `slimefsdp train` take, where there are any.

    Engines in the places of ranks share theirs, and servers that are there already have whatever they have.
    """
    rollout = config.rollout
    if config.algorithm == "sft" or rollout.placement == "colocated" or rollout.engine_urls is not None:
        return 0
    return rollout.engines * rollout.gpus_per_engine


def _group_ranks_beside_the_actor(config: RunConfig) -> int:
    if config.algorithm == "sft":
        return 0
    reference = config.reference_ranks if config.reference.placement == "group" else 0
    critic = config.critic_ranks if config.critic.placement == "group" else 0
    return reference + critic


def with_cluster_ranks(config: RunConfig) -> RunConfig:
    """The settings with mesh.dp=auto resolved by the connected cluster, or as they are when it is a number.

    On GPUs the actor group takes all that engines, reference and critic group leave. On CPUs, where ranks share cores,
    it takes one rank a core as far as the mesh divides them, at least one data rank.

    Raises:
        ConfigError: what is left is no multiple of mesh.dp_replicate x mesh.cp. ResourceError: nothing is left.
    """
    if config.mesh.dp != "auto":
        return config
    import ray

    total = ray.cluster_resources()
    if config.mesh.device == "cpu" or (config.mesh.device == "auto" and not total.get("GPU")):
        cores = int(total["CPU"]) if config.cluster.address is not None else os.cpu_count() or 1
        copies = config.mesh.dp_replicate * config.mesh.cp
        resolved = config.with_ranks(max(1, cores // copies) * copies)
        check_machine(resolved)
        return resolved
    gpus, others = int(total.get("GPU", 0)), gpus_of_engines(config) + _group_ranks_beside_the_actor(config)
    if gpus <= others:
        raise ResourceError(
            f"mesh.dp=auto: engines and other groups need {others} GPUs, the cluster has {gpus}: none is left",
            field="mesh.dp",
            hint="use fewer engines, or a larger cluster",
        )
    return config.with_ranks(gpus - others)


def check_machine(config: RunConfig) -> None:
    """Whether this machine may run that many CPU processes; answers without importing ray or torch.

    Raises:
        ResourceError: more processes than cluster.max_ranks_per_core allows.
    """
    if config.mesh.dp == "auto":
        return  # `with_cluster_ranks` chooses, and checks the choice
    if config.cluster.address is None:
        needed = processes_needed(config)
        check_cores(
            needed,
            config.mesh.device,
            config.cluster.max_ranks_per_core,
            asked=f"mesh.dp_replicate={config.mesh.dp_replicate} x mesh.dp={config.mesh.dp} x mesh.cp={config.mesh.cp} "
            f"with {needed - config.ranks} more processes",
            field="mesh.dp",
            hint="use fewer ranks or engines, raise cluster.max_ranks_per_core, or name a cluster.address",
        )


def check_cores(processes: int, device: str, per_core: int, *, asked: str, field: str, hint: str) -> None:
    """Whether this machine may run that many processes where they compute on its cores; imports nothing heavy.

    Args:
        device: auto, cpu or cuda.
        per_core: as cluster.max_ranks_per_core.
        asked: what needs them, for the error, as are field and hint.

    Raises:
        ResourceError: more processes than cores x per_core.
    """
    cores = os.cpu_count() or 1
    on_cpu = device == "cpu" or (device == "auto" and not has_nvidia_driver())
    if on_cpu and processes > cores * per_core:
        raise ResourceError(
            f"{asked} needs {processes}, but {cores} cores x cluster.max_ranks_per_core={per_core} allow "
            f"{cores * per_core}",
            field=field,
            hint=hint,
        )


def _most_processes(config: RunConfig) -> int:
    """As `processes_needed`, or as many as a machine may run while mesh.dp=auto is not resolved."""
    if config.mesh.dp == "auto":
        return (os.cpu_count() or 1) * config.cluster.max_ranks_per_core
    return processes_needed(config)


def check_gpus(config: RunConfig, *, engines: int) -> None:
    """Whether this machine has a GPU for every process that takes one; asks neither Ray nor torch.

    Nothing is said where a cluster is named, where mesh.device=auto finds no GPU, or where the machine does not tell.

    Args:
        engines: that are started beside the worker groups of these settings.

    Raises:
        ResourceError: naming mesh.dp, and both numbers.
    """
    found = None if config.cluster.address is not None or config.mesh.device == "cpu" else gpus_here()
    if found is None or (found == 0 and config.mesh.device == "auto"):
        return
    others = _group_ranks_beside_the_actor(config) + engines
    needed = others + (config.mesh.dp_replicate * config.mesh.cp if config.mesh.dp == "auto" else config.ranks)
    if needed > found:
        raise ResourceError(
            f"mesh.dp_replicate={config.mesh.dp_replicate} x mesh.dp={config.mesh.dp} x mesh.cp={config.mesh.cp} with "
            f"{others} more processes needs {needed} GPUs{' or more' * (config.mesh.dp == 'auto')}, and this machine "
            f"shows {found} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'is not set')})",
            field="mesh.dp",
            hint="use fewer ranks or engines, mesh.device=cpu, or name a cluster.address",
        )


def gpus_here(root: Path = Path("/")) -> int | None:
    """The NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as Ray counts them; None: nothing tells.

    Args:
        root: of the file system that is looked at.
    """
    # either may list fewer than there are: devices are made when they are first used
    listed = max(
        sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in root.glob("dev/nvidia*")),
        sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*")),
    )
    if listed == 0:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    return 0 if visible in ("", "NoDevFiles") else min(listed, len(visible.split(",")))


def compute_capabilities_here() -> list[str]:
    """Of this machine's NVIDIA GPUs, such as 9.0, whatever CUDA_VISIBLE_DEVICES leaves; none: nothing tells.

    The driver's own program is asked: CUDA would take memory of a device for this process.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = said.stdout.split() if said.returncode == 0 else []
    return [
        line for line in lines if re.fullmatch(r"\d+\.\d+", line)
    ]  # an old driver writes that it knows no such field


def has_nvidia_driver() -> bool:
    """Whether this machine seems to have CUDA devices; says so without torch."""
    # asking torch would take its import; the second is what Windows' subsystem for Linux has in place of the first
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _require_safe(address: str) -> None:
    """Ray runs whatever code it is sent: who else can reach a cluster must be asked for a token."""
    named = f"cluster.address={address}"
    if address == "auto" and (address := os.environ.get("RAY_ADDRESS") or address) != "auto":  # as Ray reads it
        named += f" with RAY_ADDRESS={address}"
    if address == "local":
        raise ResourceError(
            f"{named} has Ray start a cluster of its own, which others can reach",
            field="cluster.address",
            hint="leave cluster.address out: then one starts that nobody else can reach",
        )
    host = address.rpartition("://")[2].rsplit(":", 1)[0]
    if host not in ("auto", "localhost", "127.0.0.1", "[::1]") and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ResourceError(
            f"{named} is not on this machine, and RAY_AUTH_MODE is not `token`",
            field="cluster.address",
            hint="start the cluster with scripts/launch_cluster.sh and set RAY_AUTH_MODE=token here",
        )


def keep_token_private(*, make: bool) -> None:
    """Takes Ray's token from all other users of the machine, whom Ray lets read what it writes.

    Args:
        make: where there is none, before Ray does; else there is nothing to do.

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
                path.hardlink_to(whole)  # unless another process has made one meanwhile
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                whole.replace(path)
            finally:
                whole.unlink(missing_ok=True)
        if path.exists() and path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except PermissionError:
        if not path.exists():
            raise _no_token(path, "no permission") from None
        warnings.warn(f"others can read Ray's token, and it is not yours to change: {path}", stacklevel=2)
    except OSError as error:
        raise _no_token(path, error.strerror) from error


def _no_token(path: Path, reason: str | None) -> ResourceError:
    hint = "make that folder writable, or give a token in RAY_AUTH_TOKEN_PATH"
    return ResourceError(f"no token for Ray can be kept in {path}: {reason}", field="cluster.address", hint=hint)


def connect(config: RunConfig, messages: Path | None = None) -> None:
    """Starts or joins the Ray cluster, unless this process is connected already.

    A local cluster declares as many logical CPUs as the run needs, since on a laptop ranks may outnumber cores. It ends
    with this process, however that ends, and no SIGINT or SIGTERM to this process's group or job disturbs it.

    Args:
        messages: a file for what Ray says, and what processes of the job print, until `disconnect`; None: Ray's own
            warnings are printed, and output of the processes stays in the logs of Ray's session.

    Raises:
        ResourceError: too many processes for this machine, no cluster at `cluster.address`, or one that is not safe to
            join. A local one needs a place to keep its token. `messages` cannot be written.
    """
    check_machine(config)
    _connect(config.cluster.address, max(os.cpu_count() or 1, _most_processes(config) + 1), messages)


def join(address: str = "auto") -> None:
    """Joins a cluster that is there, unless this process is connected already.

    Raises:
        ResourceError: there is none, or one that is not safe to join.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():  # Ray itself would try for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"cannot reach a Ray cluster at {address}: {error}",
                field="cluster.address",
                hint="start one with scripts/launch_cluster.sh or `ray start --head`, or name another",
            ) from error
    _connect(address, 0, None)


def require_lasting_cluster() -> None:
    """For what is to outlive this process.

    Raises:
        ResourceError: the cluster that this process is connected to was started by it, and ends with it.
    """
    if _ray_processes():
        raise ResourceError(
            "the Ray cluster of this program ends with it, and all that is in it",
            field="cluster.address",
            hint="start one with scripts/launch_cluster.sh or `ray start --head`, and name it in cluster.address",
        )


def _connect(address: str | None, num_cpus: int, messages: Path | None) -> None:
    """As `connect`; a local cluster declares `num_cpus`."""
    global _messages
    if address is None:
        # undocumented switch of ray's that puts a cluster's sockets on loopback; a test looks at the sockets
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    else:
        _require_safe(address)
    # ray would otherwise warn that a future version stops hiding accelerators from actors that ask for none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        return
    keep_token_private(make=address is None)
    if address is None:
        ray_constants.ENABLE_RAY_CLUSTER = False  # the same, where ray was imported before this call
    if messages is not None:
        try:
            _messages = RayMessages(messages)
        except OSError as error:
            raise ResourceError(
                f"{messages}: {error.strerror}", field="run.dir", hint="choose a folder that is writable"
            ) from error
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=messages is not None, logging_level=logging.ERROR)
        else:
            _start_local(num_cpus)
    except Exception as error:  # ray raises that very class where a node does not come up
        disconnect()
        if address is None:
            raise ResourceError(
                f"Ray did not start on this machine in {STARTS} attempts: {error}",
                field="cluster.address",
                hint="the machine may be overloaded or out of memory: end what else runs on it, and try again",
            ) from error
        hint = "start one with `ray start --head`, or leave cluster.address out for a local one"
        if "InvalidAuthToken" in str(error.__cause__):
            hint = "set RAY_AUTH_MODE=token here, with the cluster's token in ~/.ray/auth_token"
        problem = f"cannot reach a Ray cluster at {address}: {error}"
        raise ResourceError(problem, field="cluster.address", hint=hint) from error
    finally:
        if signal.getsignal(signal.SIGTERM) is not on_sigterm:  # ray.init puts one of its own in its place
            signal.signal(signal.SIGTERM, signal.SIG_DFL if on_sigterm is None else on_sigterm)


def _start_local(num_cpus: int) -> None:
    """Starts Ray, again where that fails; nothing of an attempt that failed runs on beside the next."""
    for attempt in range(1, STARTS + 1):
        try:
            return _start_once(num_cpus)
        except Exception as error:
            if attempt == STARTS:
                raise
            said = next(iter(str(error).splitlines()), type(error).__name__)
            print(f"Ray did not start, attempt {attempt} of {STARTS}: {said}", file=sys.stderr, flush=True)


def _start_once(num_cpus: int) -> None:
    global _cleanup
    import ray

    # Ray's own default is 15: on a busy machine ranks and engines would get one thirtieth of what other programs get
    os.environ.setdefault("RAY_worker_niceness", "0")
    # at once: Ray would keep what nobody holds any more for up to a second, many buckets of a weight update
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "0")
    is_guarded = sys.platform == "linux"
    if is_guarded:
        _cleanup = CleanupProcess()
        # all of Ray's processes inherit it, as they do SIGINT from Ray: a scheduler that signals every process of a job
        # would end the ranks in the step that the driver wants to finish
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
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
    finally:
        if is_guarded:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if _cleanup is not None:
        _cleanup.watch([info.process.pid for infos in _ray_processes().values() for info in infos])
        atexit.register(disconnect)  # before Ray's own, which would wait for what ignores its SIGTERM


def disconnect() -> None:
    """Leaves the cluster; a local one ends, with every process in it. Idempotent."""
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
    record.clear()  # or Ray would ask each of them by SIGTERM, which is blocked there, and wait a second
    ray.shutdown()
    _cleanup.end()
    _cleanup = None
    for process in processes:
        process.poll()  # no zombie stays


def _ray_processes() -> dict[str, list[Any]]:
    """Ray's own record of what `ray.init` started here, by kind; `ray.shutdown` ends those that are in it."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return {} if node is None else node.all_processes  # type: ignore[no-any-return]
