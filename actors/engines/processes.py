"""The processes of a run's rollout engines: they are started, watched, put to sleep, and ended here."""

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
from actors.engines.colocated import RanksBeside, ranks_beside
from actors.engines.handshake import require_fit
from actors.engines.protocol import Engine, EngineTag, is_info
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


class EngineProcesses:
    """The engines of a pool, which are Ray actors.

    Args:
        group: the actor's, in whose places the engines are, with rollout.placement=colocated.

    Raises:
        ConfigError, StateError: as `engine_class` and `ranks_beside`.
    """

    def __init__(self, config: RunConfig, group: Any = None) -> None:
        self.config = config
        self.engines: list[Any] = []
        self.beside: RanksBeside | None = ranks_beside(config, group)
        self.are_asleep = False  # all of them, which are colocated
        self.places = PlacementGroups() if self.beside is None else self.beside.places
        self.vocab_size = read_model_folder(config.model.path, with_weights=False).vocab_size
        self.end_token_ids: frozenset[int] = frozenset()  # the tokens that end a response
        self.max_tokens: dict[int, int | None] = {}  # of a prompt and its response, by engine
        self.is_ended = False
        self.may_ask = threading.Event()  # not, while what was aborted is to wait for new weights
        self.may_ask.set()
        self._class: Any = engine_class(config)
        self._watchdog: Watchdog | None = None
        self._starting = threading.Lock()  # or a thread that replaces an engine starts one after the end

    def start(self, indices: Sequence[int]) -> None:
        """Starts the engines of these indices, in place of those that are there."""
        self.require_running("launch")
        require_cluster()
        config, began = self.config, time.monotonic()
        if self.beside is not None:
            self.beside.sleep()  # what is started measures what is free
            placement, gpus = self.places.reserve_for_ranks(self.beside.config, "actor")
        else:
            count, timeout_s = config.rollout.engines, config.cluster.launch_timeout_s
            each = 0 if config.rollout.engine_urls is not None else config.rollout.gpus_per_engine
            gpus = each * gpus_per_rank(config.mesh.device)
            placement = self.places.reserve("engine", count, gpus_per_rank=gpus, timeout_s=timeout_s)
        actor_class = remote_class(self._class)
        with self._starting:
            if self.is_ended:  # meanwhile, by another thread, which has given places back
                self._release_places()
            self.require_running("launch")
            engines = list(self.engines) or [None] * config.rollout.engines
            for index in indices:
                options = actor_options(placement, index, gpus)
                if config.rollout.engine not in ENGINES:  # a class that this process finds in a folder of its own
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
                if not is_info(info):
                    problem = f"info of engine {index} is {short_repr(info)}"
                    hint = "return an EngineInfo, its fields of the types that actors/engines/protocol.py says"
                    raise EngineError(problem, field="rollout.engine", hint=hint, rank=index)
                require_fit(config, index, info, self.vocab_size)
                self.max_tokens[index] = info.max_tokens
        first = indices[0]  # of those that were just started: another one may be lost
        with errors_of(first, "end_token_ids"):
            (self.end_token_ids,) = self.wait(
                [engines[first].end_token_ids.remote()], "launch", "launch_timeout_s", began, first_rank=first
            )
        if self.beside is not None:
            self.put_to_sleep(indices)
            self.are_asleep |= len(indices) == len(engines)

    def relaunch(self, indices: Sequence[int] | None = None) -> None:
        """Ends engines as they are and starts others in their places, or in new ones if those are gone.

        They hold no weights yet.

        Args:
            indices: the engines to restart; None: all.

        Raises:
            ResourceError: the cluster has become too small. WorkerDied, WorkerHung: one did not come up.
        """
        self.require_running("relaunch")
        count = len(self.engines)
        indices = range(count) if indices is None else indices
        if not indices or not all(0 <= index < count for index in indices):
            raise StateError(
                f"indices={list(indices)} of {count} engines", field="indices", hint=f"give some of 0 to {count - 1}"
            )
        end_processes([self.engines[index] for index in indices])
        self.start(indices)

    def dead(self) -> list[int]:
        """The indices of engines that are of no more use, once they have done what they were asked before."""
        self.require_running("dead")
        began, refs = time.monotonic(), [engine.health.remote() for engine in self.engines]
        found = []
        for index, ref in enumerate(refs):
            try:
                self.wait([ref], "check", "sync_timeout_s", began, first_rank=index)
            except (WorkerDied, WorkerHung):
                found.append(index)
        return found

    def found_hanging(self, heard: Mapping[int, float], asked: float) -> dict[int, SlimeError]:
        """The engine that hangs, if one of these does.

        Args:
            heard: when they were asked, or last handed samples over.
            asked: when the last one was asked.
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
        began, refs = time.monotonic(), {index: self.engines[index].sleep.remote() for index in indices}
        for index, ref in refs.items():
            try:
                self.wait([ref], "sleep", "sync_timeout_s", began, first_rank=index)
            except LOST:
                # its memory is needed now, and it when engines have their turn again: who sends it weights finds out
                end_processes([self.engines[index]])

    def wake_up(self, indices: Sequence[int], tags: Sequence[EngineTag]) -> None:
        """
        Raises:
            SyncError: an engine refused, or is no more.
        """
        began, refs = time.monotonic(), {index: self.engines[index].wake_up.remote(tags) for index in indices}
        for index, ref in refs.items():
            try:
                self.wait([ref], "wake_up", "sync_timeout_s", began, first_rank=index)
            except LOST as error:
                raise SyncError(
                    f"engine {index} was lost before it was sent weights: {error.message}",
                    field="update_weights", hint="restart it", rank=index,
                ) from error  # fmt: skip

    def end(self) -> None:
        """Ends the engines; idempotent."""
        with self._starting:
            self.is_ended = True
        end_processes(self.engines)  # the handles stay: another thread may be about to ask one
        self._release_places()

    def _release_places(self) -> None:
        if self.beside is None:
            self.places.release()

    def require_running(self, name: str) -> None:
        """
        Raises:
            StateError: the engines have been ended.
        """
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
        """Returns what calls of engines return.

        Args:
            limit: the setting of `cluster` that says how long they may take, from `began` on.
            first_rank: the index of the first of these engines.

        Raises:
            WorkerDied, WorkerHung: an engine is lost. Exception: what an engine raises.
        """
        return CallFuture(
            refs,
            name=name,
            timeout_s=getattr(self.config.cluster, limit),
            setting=f"cluster.{limit}",
            first_only=False,
            first_rank=first_rank,
            watchdog=self._watchdog,
            since=began,
        ).result()


def engine_class(config: RunConfig) -> type[Engine]:
    """The class that `rollout.engine` names.

    Raises:
        ConfigError: it cannot be imported, is no `Engine`, or is to sleep and cannot.
    """
    name = config.rollout.engine
    found: Any = load_function(_HOMES.get(name, name), field="rollout.engine", example="my_package.engines:MyEngine")
    if not (isinstance(found, type) and issubclass(found, Engine)) or found.generate is Engine.generate:
        hint = "name a class made from actors.engines.protocol.Engine"
        raise ConfigError(f"{name} is no engine", field="rollout.engine", hint=hint)
    for needed in ("info", "begin", "commit"):
        if getattr(found, needed) is getattr(Engine, needed):
            hint = "write it: docs/engines.md says what an engine of your own needs"
            raise ConfigError(f"{name} has no {needed}() of its own", field="rollout.engine", hint=hint)
    if config.rollout.placement == "colocated" and (found.sleep is Engine.sleep or found.wake_up is Engine.wake_up):
        raise ConfigError(
            f"{name} has no sleep() and wake_up(), by which rollout.placement=colocated has it share a device",
            field="rollout.engine", hint="write both, or set rollout.placement=own",
        )  # fmt: skip
    return found


@contextmanager
def errors_of(index: int, call: str) -> Iterator[None]:
    """Turns what an engine's own code raises into an EngineError that names the engine."""
    try:
        yield
    except (SlimeError, RayError):
        raise
    except Exception as error:
        raise EngineError(
            f"{call} of engine {index} raised {type(error).__name__}: {short_repr(str(error))}",
            field="rollout.engine", hint="correct the engine: its log has the traceback", rank=index,
        ) from error  # fmt: skip
