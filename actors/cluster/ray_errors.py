"""Converts failures of Ray to typed errors: a lost cluster, a full object store, a process that has ended."""

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

_VITAL = ("gcs_server", "raylet")  # the processes of a node without which nothing works
_LOST = "its head, or the raylet of this node, ended"
_ASK_EVERY_S = 1.0
_CONNECT_S = 2.0
_AWAY_S = 10.0  # a remote head that is unreachable for longer counts as gone; a shorter time may be a network problem
_FETCH_S = 10.0  # timeout of fetching an object, which may have been spilled to disk
_asked, _reached = 0.0, 0.0  # when the head was last contacted, and when it last answered, by `time.monotonic`


def cluster_is_gone() -> bool:
    """Returns whether the cluster's head or this node's raylet was lost, or this process has left the cluster.

    This check is cheap enough for every call and every slice of a wait. Without the check, Ray would not report a loss,
    but end this process from C++: at once after the loss of the raylet, a minute after the loss of the head. In a
    process that has left the cluster, Ray's functions would start another cluster.
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
            _reached = now  # there was no contact for a while, so nothing is known
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
    """Ends Ray actors at once; does nothing if the cluster is gone, and the actors with it."""
    if not cluster_is_gone():
        for actor in actors:
            ray.kill(actor)


def store(value: Any, field: str) -> Any:
    """Puts a value into the object store, where the ranks of a node share one copy; returns the reference.

    Args:
        field: the name of the value in errors.

    Raises:
        ResourceError: memory and disk of the store are full, or this process has left the cluster.
    """
    if not ray.is_initialized():
        raise _gone()
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise _no_room(error, field) from error


def fetch(reference: Any, field: str) -> Any:
    """Returns the value of a reference from `store`.

    Args:
        field: the name of the value in errors.

    Raises:
        ResourceError: the object store does not return the value.
    """
    try:
        return ray.get(reference, timeout=_FETCH_S)
    except RayError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        problem = f"Ray's object store does not hand over {field}: {reason}"
        raise ResourceError(problem, field=field, hint="look at the disk that Ray spills to") from error


def explained(error: RayError, rank: int, call: str) -> Exception:
    """Returns the typed error for an error that Ray raised instead of a rank's answer.

    A RaySystemError is returned unchanged.
    """
    reason = next(iter(str(error).splitlines()), "")
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
        if getattr(error, "actor_init_failed", False):  # the last line has the error of the constructor
            reason = str(error).strip().splitlines()[-1]
        hint = "look at its log for the reason; where it has none, the kernel's log may say that memory ran out"
        return WorkerDied(ended + reason, hint=hint, rank=rank, call=call)
    if isinstance(error, GetTimeoutError):  # raised in the rank, which did not get the arguments of the call
        return WorkerHung(
            f"rank {rank} waited in vain for what {call} takes: {reason}",
            field="cluster.call_timeout_s",
            hint="look at the network and the disk that Ray's object store spills to",
            rank=rank,
            call=call,
        )
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        typed = _no_room(error, f"what {call} takes or returns")
    elif isinstance(error, ActorUnschedulableError | RuntimeEnvSetupError):
        typed = ResourceError(f"rank {rank} could not be started: {reason}", field="cluster", hint="see the log of Ray")
    elif isinstance(error, RaySystemError):
        return error  # for example, the answer cannot be unpickled here; the error's text has the traceback
    else:
        problem = f"the answer of rank {rank} to {call} is lost: {type(error).__name__}: {reason}"
        return WorkerDied(problem, hint="look at what ended its node or its process", rank=rank, call=call)
    typed.rank, typed.call = rank, call
    return typed


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
