"""Starts, watches, puts to sleep and ends the processes of a run's rollout engines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from ray.exceptions import RayError

from actors.cluster.placement import PlacementGroups, actor_options, gpus_per_rank
from actors.cluster.ray_errors import end_processes, require_cluster
from actors.engines.protocol import Engine, EngineInfo, EngineTag, is_info
from actors.fault_tolerance.recovery import LOST
from actors.startup import answered, stage
from actors.workers.futures import CallFuture
from actors.workers.watchdog import Limits, Waiting, Watchdog, remote_class
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import load_function
from slimefsdp.config.rollout import ENGINES, SERVERS
from slimefsdp.errors import (
    ConfigError,
    EngineError,
    SlimeError,
    StateError,
    SyncError,
    WorkerDied,
    WorkerHung,
    short_repr,
)
from slimefsdp.models.hf_folder import read_model_folder

_HOMES = {"embedded": "actors.engines.embedded:EmbeddedEngine"}
_HOMES |= dict.fromkeys(SERVERS, "actors.engines.served:ServedEngine")


class ColocatedRanks:
    """Frees and takes the devices that a trainer group shares with colocated engines.

    While engines sample, the trainer has nothing on the devices. While the trainer trains, the engines have nothing
    there. While weights are sent, a device holds the parameters of its rank and the weights of its engine.
    """

    def __init__(self, group: Any) -> None:
        self.group = group  # a WorkerGroup or a SupervisedGroup

    def sleep(self) -> None:
        """Frees the devices; idempotent. Later calls on the group take back the memory that these calls need."""
        self.keep_parameters_only()
        self.free_parameters()

    def keep_parameters_only(self) -> None:
        """Frees all device memory that is not needed to send weights; idempotent."""
        critic = self.group.critic
        if critic is not None and self.group.config.critic.is_colocated:
            critic.sleep()
        self.group.sleep(("optimizer", "reference"))

    def free_parameters(self) -> None:
        self.group.sleep(("parameters",))

    def wake_up(self) -> None:
        """Takes back the memory that a step needs; reference and critic take back their own when they are called."""
        self.group.wake_up(("parameters", "optimizer"))


class EngineProcesses:
    """Holds the engines of a pool, which are Ray actors.

    Args:
        group: the actor's group with which engines share devices, if rollout.placement=colocated.

    Raises:
        StateError: `group` is missing with rollout.placement=colocated, or given with another placement.
        ConfigError: there are more engines than ranks of the group. Also the errors of `engine_class`.
    """

    def __init__(self, config: RunConfig, group: Any = None) -> None:
        self.config = config
        self.engines: list[Any] = []
        _require_matching_group(config, group)
        self.colocated = None if group is None else ColocatedRanks(group)
        self.are_asleep = False  # whether all (colocated) engines are asleep
        self.places = PlacementGroups() if group is None else group.places
        self.vocab_size = read_model_folder(config.model.path, with_weights=False).vocab_size
        self.end_token_ids: frozenset[int] = frozenset()  # the tokens that end a response
        self.max_tokens: dict[int, int | None] = {}  # index of an engine -> limit on tokens of prompt and response
        self.is_ended = False
        self.may_ask = threading.Event()  # cleared while new requests must wait for new weights
        self.may_ask.set()
        self._class: Any = engine_class(config)
        self._watchdog: Watchdog | None = None
        self._starting = threading.Lock()  # a thread that replaces a lost engine must not start an engine after `end`

    def start(self, indices: Sequence[int]) -> None:
        """Starts the engines of these indices, which have no weights yet.

        Raises:
            ResourceError: the cluster is too small. WorkerDied, WorkerHung: an engine did not start.
            EngineError: the run cannot use an engine.
        """
        self.require_running("launch")
        require_cluster()
        config, began = self.config, time.monotonic()
        if self.colocated is not None:
            self.colocated.sleep()  # a new engine measures the free memory of its device
            placement, gpus = self.places.reserve_for_ranks(self.colocated.group.config, "actor")
        else:
            count, timeout_s = config.rollout.engines, config.cluster.launch_timeout_s
            gpus_per_engine = 0 if config.rollout.engine_urls is not None else config.rollout.gpus_per_engine
            gpus = gpus_per_engine * gpus_per_rank(config.mesh.device)
            placement = self.places.reserve("engine", count, gpus_per_rank=gpus, timeout_s=timeout_s)
        actor_class = remote_class(self._class)
        with self._starting:
            if self.is_ended:  # another thread called `end` meanwhile, maybe before the places above were reserved
                self._release_places()
            self.require_running("launch")
            engines = list(self.engines) or [None] * config.rollout.engines
            for index in indices:
                options = actor_options(placement, index, gpus, config.cluster.environment)
                if config.rollout.engine not in ENGINES:  # a user's class may be in a folder of this process's sys.path
                    variables = {**options["runtime_env"].get("env_vars", {}), "PYTHONPATH": os.pathsep.join(sys.path)}
                    options["runtime_env"] = {"env_vars": variables}
                engines[index] = actor_class.options(**options).remote(config, index)
            self.engines = engines
        self._watchdog = Watchdog(engines, Limits.of(config), kind="engine")
        ready = [engines[index].keep_stacks.remote(config.run.dir, f"engine_{index}") for index in indices]
        infos = [engines[index].info.remote() for index in indices]
        with stage(f"starting {len(ready)} engine{'s' * (len(ready) != 1)}", answered(infos)):
            for index, *refs in zip(indices, ready, infos, strict=True):
                with errors_of(index, "info"):
                    _, info = (
                        self.wait([ref], "launch", "launch_timeout_s", began, first_rank=index)[0] for ref in refs
                    )
                _require_usable(config, index, info, self.vocab_size)
                self.max_tokens[index] = info.max_tokens
        first = indices[0]  # an engine that was just started, since earlier engines may be lost
        with errors_of(first, "end_token_ids"):
            (self.end_token_ids,) = self.wait(
                [engines[first].end_token_ids.remote()], "launch", "launch_timeout_s", began, first_rank=first
            )
        if self.colocated is not None:
            self.put_to_sleep(indices)
            self.are_asleep |= len(indices) == len(engines)

    def restart(self, indices: Sequence[int]) -> None:
        """Ends these engines and starts new engines with the same indices; raises the errors of `start`."""
        self.require_running("restart")
        end_processes([self.engines[index] for index in indices])
        self.start(indices)

    def lost(self) -> list[int]:
        """Returns the indices of the lost engines; waits until each engine has finished its earlier calls."""
        began, refs = time.monotonic(), [engine.health.remote() for engine in self.engines]
        lost = []
        for index, ref in enumerate(refs):
            try:
                self.wait([ref], "check", "sync_timeout_s", began, first_rank=index)
            except (WorkerDied, WorkerHung):
                lost.append(index)
        return lost

    def hanging(self, heard: Mapping[int, float], asked: float) -> dict[int, SlimeError]:
        """Returns {index: error} of an engine that hangs, or an empty dictionary.

        Args:
            heard: index of an engine -> the time.monotonic() when the engine was asked, or last handed samples over.
            asked: the time.monotonic() of the latest request to any engine.
        """
        assert self._watchdog is not None
        timeout_s = self.config.cluster.call_timeout_s
        try:
            self._watchdog.look(Waiting("generate", sorted(heard), asked))
            late = [index for index, since in sorted(heard.items()) if time.monotonic() - since > timeout_s]
            if late:
                raise self._watchdog.overdue(Waiting("generate", late, asked), timeout_s)
        except WorkerHung as error:
            return {error.rank or 0: error}
        return {}

    def put_to_sleep(self, indices: Sequence[int]) -> None:
        """Has engines free their devices. Ends lost or silent engines, so that the next update reports their loss."""
        began, refs = time.monotonic(), {index: self.engines[index].sleep.remote() for index in indices}
        for index, ref in refs.items():
            try:
                self.wait([ref], "sleep", "sync_timeout_s", began, first_rank=index)
            except LOST:
                end_processes([self.engines[index]])

    def wake_up(self, indices: Sequence[int], tags: Sequence[EngineTag]) -> None:
        """Has engines take memory of their devices; raises a SyncError if an engine refuses or is lost."""
        began, refs = time.monotonic(), {index: self.engines[index].wake_up.remote(tags) for index in indices}
        for index, ref in refs.items():
            try:
                self.wait([ref], "wake_up", "sync_timeout_s", began, first_rank=index)
            except LOST as error:
                problem = f"engine {index} was lost before it was sent weights: {error.message}"
                raise SyncError(problem, field="update_weights", hint="restart it", rank=index) from error

    def end(self) -> None:
        """Ends the engines; idempotent."""
        with self._starting:
            self.is_ended = True
        end_processes(self.engines)  # the list stays as it is: another thread may be about to call an engine
        self._release_places()

    def _release_places(self) -> None:
        if self.colocated is None:
            self.places.release()

    def require_running(self, name: str) -> None:
        """Raises a StateError if the engines have been ended."""
        if self.is_ended:
            raise StateError(f"{name}() after shutdown()", field=name, hint="launch other engines")

    def wait(
        self,
        refs: Sequence[Any],
        name: str,
        limit: Literal["launch_timeout_s", "sync_timeout_s", "call_timeout_s"],
        began: float | None = None,
        first_rank: int = 0,
    ) -> Any:
        """Waits for calls of engines, and returns their results.

        Args:
            limit: the setting of section `cluster` that limits the time from `began` (time.monotonic) on.
            began: None means now.
            first_rank: the index of the engine of the first ref; the other refs are of the engines after it.

        Raises:
            WorkerDied, WorkerHung: an engine is lost. Exception: any error that an engine raises.
        """
        return CallFuture(
            refs, name=name, timeout_s=getattr(self.config.cluster, limit), setting=f"cluster.{limit}",
            first_only=False, first_rank=first_rank, watchdog=self._watchdog, since=began,
        ).result()  # fmt: skip


def engine_class(config: RunConfig) -> type[Engine]:
    """Returns the class that `rollout.engine` names.

    Raises:
        ConfigError: the class cannot be imported, is not an `Engine`, or lacks a method; rollout.placement=colocated
            also requires `sleep` and `wake_up`.
    """
    name = config.rollout.engine
    found: Any = load_function(_HOMES.get(name, name), field="rollout.engine", example="my_package.engines:MyEngine")
    if not (isinstance(found, type) and issubclass(found, Engine)) or found.generate is Engine.generate:
        hint = "name a class made from actors.engines.protocol.Engine"
        raise ConfigError(f"{name} is not an engine", field="rollout.engine", hint=hint)
    for needed in ("info", "begin", "commit"):
        if getattr(found, needed) is getattr(Engine, needed):
            hint = "write it: docs/engines.md says what an engine of your own needs"
            raise ConfigError(f"{name} has no {needed}() of its own", field="rollout.engine", hint=hint)
    if config.rollout.placement == "colocated" and (found.sleep is Engine.sleep or found.wake_up is Engine.wake_up):
        problem = f"{name} has no sleep() and wake_up(), by which rollout.placement=colocated has it share a device"
        raise ConfigError(problem, field="rollout.engine", hint="write both, or set rollout.placement=own")
    return found


@contextmanager
def errors_of(index: int, call: str) -> Iterator[None]:
    """Turns an exception of an engine's own code into an EngineError that names the engine."""
    try:
        yield
    except (SlimeError, RayError):
        raise
    except Exception as error:
        raise EngineError(
            f"{call} of engine {index} raised {type(error).__name__}: {short_repr(str(error))}",
            field="rollout.engine", hint="correct the engine: its log has the traceback", rank=index,
        ) from error  # fmt: skip


def _require_matching_group(config: RunConfig, group: Any) -> None:
    if (config.rollout.placement == "colocated") != (group is not None):
        raise StateError(
            f"rollout.placement={config.rollout.placement}, and {'no' if group is None else 'a'} trainer group for the "
            "engines to share devices with",
            field="beside",
            hint="give the actor's group with rollout.placement=colocated, and with it alone",
        )
    if group is not None and config.rollout.engines > group.config.ranks:
        raise ConfigError(
            f"rollout.engines={config.rollout.engines} are more than the {group.config.ranks} ranks of the group that "
            "they are to share devices with",
            field="rollout.engines",
            hint="start fewer, or launch a larger group",
        )


def _require_usable(config: RunConfig, index: int, info: EngineInfo, vocab_size: int) -> None:
    """Raises an EngineError if a run cannot use an engine with these properties; `vocab_size` is the trainer's."""

    def refuse(problem: str, field: str, hint: str) -> EngineError:
        return EngineError(f"engine {index} {problem}", field=field, hint=hint, rank=index)

    if not is_info(info):
        hint = "return an EngineInfo, its fields of the types that actors/engines/protocol.py says"
        raise refuse(f"returned {short_repr(info)} from info()", "rollout.engine", hint)
    dtype, rollout = config.precision.compute_dtype, config.rollout
    same_model = "start the engine with the model and the dtype of the run"
    if info.vocab_size != vocab_size:
        has = f"({info.name}) has a vocabulary of {info.vocab_size}, and the trainer of {vocab_size}"
        raise refuse(has, "model.path", same_model)
    if info.dtype != dtype:
        has = f"({info.name}) has weights in {info.dtype}, and the trainer in {dtype}"
        raise refuse(has, "precision.compute_dtype", same_model)
    if info.max_tokens is not None and rollout.max_new_tokens >= info.max_tokens:
        has = f"({info.name}) takes {info.max_tokens} tokens of prompt and response"
        has += f", and rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt"
        raise refuse(has, "rollout.max_new_tokens", "lower it, or start the engine with a longer context")
    if rollout.placement == "colocated" and info.processes > 1:
        has = f"({info.name}) has {info.processes} workers, and rollout.placement=colocated gives an engine one device"
        raise refuse(has, "rollout.placement", "start it with one worker, or set rollout.placement=own")
    if rollout.transport not in info.transports:
        takes = f"({info.name}) takes weights by {' or '.join(info.transports)}, not by {rollout.transport}"
        raise refuse(takes, "rollout.weight_transport", f"set it to {info.transports[0]}")
