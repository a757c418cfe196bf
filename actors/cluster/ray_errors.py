"""What Ray's own failures mean: a cluster that is gone, a store that is full, a process that Ray has ended."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from slimefsdp.errors import ResourceError, WorkerDied, WorkerHung

_VITAL = ("gcs_server", "raylet")  # of a node's processes those without which nothing works
_LOST = "its head, or the raylet of this node, ended"
_ASK_EVERY_S = 1.0
_CONNECT_S = 2.0
_AWAY_S = 10.0  # a head elsewhere that cannot be reached for so long is gone; for less, the network may be at fault
_FETCH_S = 10.0  # for a value that this process has put into the object store; it may have been spilled to disk
_asked, _reached = 0.0, 0.0  # when the head was last asked, and when it last answered; of `time.monotonic`


def cluster_is_gone() -> bool:
    """Whether the cluster has lost its head, or this node its raylet, or this process has left it; cheap enough to ask
    in every call and slice of a wait.

    Ray itself would say nothing, then end this process from C++: at once without a raylet, after a minute without a
    head. In a process that has left, its functions start another cluster.
    """
    from ray._private import worker

    if not ray.is_initialized():
        return True

    node = getattr(worker, "_global_node", None)
    if node is None:
        return False
    if node.is_head():  # started by this process
        return any(kind in _VITAL for kind, _ in node.dead_processes())
    return _is_away(node.gcs_address)


def _is_away(address: str) -> bool:
    global _asked, _reached
    now = time.monotonic()
    if now - _asked > _ASK_EVERY_S:
        if now - _asked > _AWAY_S:
            _reached = now  # nobody asked meanwhile: nothing is known
        _asked = now
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            _reached = now
        except OSError:
            pass
    return now - _reached > _AWAY_S


def require_cluster() -> None:
    """Requires a Ray cluster that answers.

    Raises:
        ResourceError: the cluster is gone.
    """
    if cluster_is_gone():
        raise _gone()


def end_processes(actors: Sequence[Any]) -> None:
    """Ends Ray actors at once, unless the cluster has gone and taken them along."""
    if not cluster_is_gone():
        for actor in actors:
            ray.kill(actor)


def store(value: Any, field: str) -> Any:
    """A reference to a value in the object store, from which all ranks of a node read one copy.

    Args:
        field: what the value is to the caller.

    Raises:
        ResourceError: there is no room for it, in memory and on the disk behind it, or this process has left the
            cluster.
    """
    if not ray.is_initialized():
        raise _gone()
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise _no_room(error, field) from error


def fetch(reference: Any, field: str) -> Any:
    """The value behind a reference of `store`.

    Raises:
        ResourceError: the store does not hand it over.
    """
    try:
        return ray.get(reference, timeout=_FETCH_S)
    except RayError as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        problem = f"Ray's object store does not hand over {field}: {said}"
        raise ResourceError(problem, field=field, hint="look at the disk that Ray spills to") from error


def explained(error: RayError, rank: int, call: str) -> Exception:
    """Returns a typed error for what Ray raised in place of a rank's answer; other errors are returned unchanged."""
    said = next(iter(str(error).splitlines()), "")
    ended = f"the process of rank {rank} ended during {call}: "
    if cluster_is_gone():
        return _gone()
    if isinstance(error, OutOfMemoryError):
        return WorkerDied(
            ended + "Ray ended it, because its node ran out of memory",
            hint="start fewer ranks and engines on a node, make batches smaller, or take nodes with more memory",
            rank=rank,
            call=call,
        )
    if isinstance(error, RayActorError | WorkerCrashedError):
        if getattr(error, "actor_init_failed", False):  # what its constructor raised is the last line
            said = str(error).strip().splitlines()[-1]
        hint = "look at its log for the reason; where it has none, the kernel's log may say that memory ran out"
        return WorkerDied(ended + said, hint=hint, rank=rank, call=call)
    if isinstance(error, GetTimeoutError):  # raised there: what the call takes did not come
        return WorkerHung(
            f"rank {rank} waited in vain for what {call} takes: {said}",
            field="cluster.call_timeout_s",
            hint="look at the network and the disk that Ray's object store spills to",
            rank=rank,
            call=call,
        )
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        found = _no_room(error, f"what {call} takes or returns")
    elif isinstance(error, ActorUnschedulableError | RuntimeEnvSetupError):
        found = ResourceError(f"rank {rank} could not be started: {said}", field="cluster", hint="see the log of Ray")
    elif isinstance(error, RaySystemError):
        return error  # such as an answer that cannot be read here: its text has the traceback
    else:
        problem = f"the answer of rank {rank} to {call} is lost: {type(error).__name__}: {said}"
        return WorkerDied(problem, hint="look at what ended its node or its process", rank=rank, call=call)
    found.rank, found.call = rank, call
    return found


def _gone() -> ResourceError:
    reason = _LOST if ray.is_initialized() else "this process has left it by ray.shutdown()"
    return ResourceError(
        f"the Ray cluster is gone: {reason}",
        field="cluster.address",
        hint="start the run again with checkpoint.resume=true; if it ends again, the machine may lack memory",
    )


def _no_room(error: RayError, field: str) -> ResourceError:
    return ResourceError(
        f"Ray's object store has no room for {field}: {next(iter(str(error).splitlines()), '')}",
        field=field,
        hint="make it smaller, free the disk that Ray spills to, or give the cluster a larger object store",
    )
