"""The driver's handle on all ranks of one role: starting and ending them, and giving them calls.

The driver checks a batch where the call is made, and plans it, in a thread of the group's own, before any rank sees it:
bad input never disturbs a rank, and who made the call goes on meanwhile.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from actors.cluster.capacity import with_cluster_ranks
from actors.cluster.connect import connect
from actors.cluster.placement import PlacementGroups, actor_options
from actors.cluster.ray_errors import end_processes, require_cluster, store
from actors.model_folders import with_model_folders
from actors.startup import answered, stage
from actors.workers.futures import CallFuture, CallQueue, QueuedCall
from actors.workers.group_calls import EndsWithBlock, GroupCalls, RankRequest
from actors.workers.named_group import NamedGroup
from actors.workers.train_worker import Loaded, TrainWorker
from actors.workers.watchdog import Limits, Watchdog, remote_class
from slimefsdp.checkpoint.store import PARTS
from slimefsdp.config import RunConfig
from slimefsdp.errors import ModelError, PeerFailed, SlimeError, StateError, WorkerDied, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.results import Health
from slimefsdp.rpc import JobCheckpoint, Role
from slimefsdp.training.plan import cost_model_of
from slimefsdp.training.prepare import BatchPlanner, Planning, PreparedBatch

SAVE_GRACE_S = 60.0  # how long `shutdown` waits for a save in the background


class WorkerGroup(EndsWithBlock, GroupCalls):
    """All ranks of one role. Make one with `launch`; `with` ends it."""

    def __init__(
        self,
        config: RunConfig,
        role: Role,
        workers: Sequence[Any],
        vocab_size: int,
        folder: ModelFolder,
        *,
        watchdog: Watchdog,
        places: PlacementGroups | None = None,
        ends: Literal["nothing", "processes", "places"] = "processes",
    ) -> None:
        self.config = config
        self.role: Role = role
        self.reference_group: WorkerGroup | None = None  # its own group, where reference.placement=group
        self.critic: WorkerGroup | None = None  # of an actor under algorithm=ppo, in its processes or in its own
        self._workers = list(workers)
        self._watchdog = watchdog
        self.places = PlacementGroups() if places is None else places  # where its processes are
        # what its end ends: nothing, if it is in another group's processes; or also their placement groups, which are
        # else another group's or a supervisor's
        self._ends = ends
        cost = cost_model_of(config, folder.config)
        self._planner = BatchPlanner(config, role, vocab_size, folder.max_sample_tokens, cost)
        self._queue = CallQueue()
        # of a reference group: its actor's newest update_ref, until it has been waited for; how the one before failed
        self._coming_weights: CallFuture | None = None
        self._failed_update: Exception | None = None

    @classmethod
    def launch(
        cls,
        config: RunConfig,
        role: Role = "actor",
        *,
        beside: WorkerGroup | None = None,
        places: PlacementGroups | None = None,
        sharding: Mapping[Role, str] = MappingProxyType({}),
    ) -> WorkerGroup:
        """Starts one process a rank, joins them and loads the model; all ranks are ready on return.

        An actor group launches its reference group too, with `reference.placement: group`, and under `algorithm: ppo`
        its critic. With `mesh.dp: auto` the group takes what the cluster has; its `config` has the number.

        Args:
            beside: for a critic, the actor group in whose processes it is to be; it ends with them.
            places: where the processes go, kept by the caller when the group ends; None: places of its own.
            sharding: levels by role, as of the group that this one replaces; the memory that is free now says nothing.

        Raises:
            ResourceError: the cluster is too small. ModelError: the folder cannot be loaded, or had from the hub.
            StateError: `beside` is no actor group, or the role is no critic.
            WorkerDied, WorkerHung: a rank did not come up.
        """
        config = with_model_folders(config)
        found = _model_folder(config, role)
        if beside is not None:
            return cls._beside(beside, config.with_ranks(beside.config.ranks), role, found, sharding)
        if role == "actor" and config.algorithm == "ppo":
            _require_vocabulary(_model_folder(config, "critic"), found)
        connect(config)
        config = with_cluster_ranks(config)
        taken = PlacementGroups() if places is None else places
        group: WorkerGroup | None = None
        try:
            workers, watchdog, loaded = _start_ranks(_sharded_as(config, sharding.get(role)), role, taken)
            group = cls(
                config.with_sharding(loaded.sharding), role, workers, loaded.vocab_size, found,
                watchdog=watchdog, places=taken, ends="places" if places is None else "processes",
            )  # fmt: skip
            if role == "actor":
                group._launch_others(config, taken, sharding)
        except BaseException:  # Ctrl-C too: in a notebook the driver lives on
            if group is not None:
                group.end()
            if places is None:
                taken.release()
            raise
        return group

    attach = staticmethod(NamedGroup.attach)

    @classmethod
    def _beside(
        cls, actor: WorkerGroup, config: RunConfig, role: Role, folder: ModelFolder, sharding: Mapping[Role, str]
    ) -> WorkerGroup:
        if role != "critic" or actor.role != "actor":
            raise StateError(
                f"a group of role {role!r} beside one of role {actor.role!r}",
                field="beside",
                hint="only a critic shares the processes of an actor group; launch others without it",
            )
        actor._require_workers("launch")
        given = _sharded_as(config, sharding.get(role))
        loaded = actor._queue.begin(
            lambda: [worker.add_trainer.remote(given, role) for worker in actor._workers],
            name="launch",
            timeout_s=config.cluster.launch_timeout_s,
            first_only=True,
            watchdog=actor._watchdog,
            setting="cluster.launch_timeout_s",
        ).result()
        group = cls(
            config.with_sharding(loaded.sharding), role, actor._workers, loaded.vocab_size, folder,
            watchdog=actor._watchdog, places=actor.places, ends="nothing",
        )  # fmt: skip
        group._queue = actor._queue  # both roles' collectives are on the same ranks
        return group

    def _launch_others(self, config: RunConfig, places: PlacementGroups, sharding: Mapping[Role, str]) -> None:
        if config.reference.placement == "group":
            self._refer_to(self.launch(config, "ref", places=places, sharding=sharding))
        if config.algorithm == "ppo" and config.critic.placement == "colocated":
            self.critic = self.launch(config, "critic", beside=self, sharding=sharding)
        elif config.algorithm == "ppo":
            self.critic = self.launch(config, "critic", places=places, sharding=sharding)

    def _refer_to(self, reference: WorkerGroup) -> None:
        """Makes a group that was just launched the reference; its calls and this group's keep one order."""
        self.reference_group = reference
        reference._queue = CallQueue(self._queue.dispatcher)

    @property
    def sharding(self) -> dict[Role, str]:
        """The level of fsdp.sharding by role, of this group and those that it launched."""
        groups = [group for group in (self, self.critic, self.reference_group) if group is not None]
        return {group.role: group.config.fsdp.sharding for group in groups}

    @property
    def receivers(self) -> list[Any]:
        """Returns what `update_weights` of another group can send to."""
        return list(self._workers)

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        """Returns each rank's answer, or the error that stands for it; works while ranks are inside a collective."""
        futures = [
            CallFuture(
                [worker.health.remote(self.role)],
                name="health",
                timeout_s=timeout_s,
                setting="timeout_s",
                first_only=True,
                first_rank=rank,
            )
            for rank, worker in enumerate(self._workers)
        ]
        answers: list[Health | SlimeError] = []
        for future in futures:
            try:
                answers.append(future.result())
            except SlimeError as error:
                answers.append(error)
        return answers

    def __repr__(self) -> str:
        return super().__repr__() if self._workers else f"{super().__repr__()[:-1]}, shut down)"

    def shutdown(self) -> None:
        """Ends all processes of the group, its critic and its reference group, after saves in the background.

        Idempotent. A critic beside an actor only stops answering: the processes are the actor's.
        """
        for group in (self, self.critic):
            if group is not None and group._workers and group.role != "ref" and self.config.checkpoint.async_save:
                group._finish_running_save()
        self.end()
        if self._ends == "places":
            self.places.release()

    def end(self) -> None:
        """Ends the same processes at once; their placement groups stay with whoever reserved them. Idempotent."""
        for other in (self.critic, self.reference_group):
            if other is not None:
                other.end()
        if self._workers and self._ends != "nothing":
            self._watchdog.kill_stopped()
            end_processes(self._workers)
        self._workers = []

    def _finish_running_save(self) -> None:
        """Waits for a save in the background; where ranks are lost it warns and goes on."""
        try:
            self._queue.dispatcher.drain(SAVE_GRACE_S)
        except TimeoutError:
            warnings.warn(f"calls are given up that could not begin within {SAVE_GRACE_S:g} s", stacklevel=3)
        try:
            self._queue.begin(
                lambda: [worker.call.remote(RankRequest("finish_save"), self.role) for worker in self._workers],
                name="finish_save",
                timeout_s=SAVE_GRACE_S,
                first_only=True,
                counts_from_now=True,
            ).result()
        except Exception as error:
            warnings.warn(f"a save in the background may be lost: {error}", stacklevel=3)

    def check(self, request: RankRequest) -> Planning | None:
        """Refuses a wrong call; returns the planning of its batch, None for a call without one.

        Raises:
            WorkerHung: the ranks hang in an earlier call.
            SlimeError: of the class that fits; no rank has seen anything.
        """
        self._require_workers(request.name)
        if request.name in ("save", "load") and self.role == "ref":
            problem = f"{request.name}() on a reference group"
            raise StateError(problem, field=request.name, hint="call it on the actor's group: its checkpoints hold all")
        receivers = request.arguments.get("receivers", ())
        if any(receiver in self._workers for receiver in receivers):
            problem = "a group's ranks cannot receive the weights that they send"
            raise StateError(problem, field="receivers", hint="give engines, or another group's receivers")
        planning: Planning | None = request.call.planning(self._planner, request.arguments)
        if self.reference_group is not None and request.arguments.get("model") == "ref":
            problem = "the reference model is a group of its own"
            raise StateError(problem, field="model", hint="call group.reference_group instead")
        return planning

    def prepared(self, request: RankRequest, planning: Planning | None) -> RankRequest:
        """Plans and completes the batch of a checked call, and puts it into the object store.

        It serves any group of these settings, also one launched later.

        Raises:
            SlimeError: of a reference group that completes the batch. ResourceError: the object store is full.
        """
        if planning is None:
            return request
        work = planning()
        self._require_workers(request.name)  # they may have been ended meanwhile, and Ray with them
        self.await_weights()
        if self.reference_group is not None:
            work = self._with_reference(work, self.reference_group)
        prepared = request.having(batch=store(work, "batch"))
        prepared.arguments.pop("plan", None)  # the batch has it
        return prepared

    def await_weights(self) -> None:
        """Waits until the weights of an earlier update_ref have reached this reference group.

        Raises:
            WorkerDied, WorkerHung, PeerFailed: ranks of the actor were lost in it, and nobody knows what came.
            StateError: it failed in another way, and no other has come to its end since: some weights may be new.
        """
        coming, self._coming_weights = self._coming_weights, None
        if coming is not None:
            try:
                coming.result()
                self._failed_update = None
            except Exception as error:  # for whoever waits for that call, too
                self._failed_update = error
                if isinstance(error, WorkerDied | WorkerHung | PeerFailed):
                    raise
        if self._failed_update is not None:
            raise StateError(
                f"the reference's weights may be of two versions: its last update failed: {self._failed_update}",
                field="update_ref",
                hint="call update_ref again",
            )

    def _with_reference(self, work: PreparedBatch, reference: WorkerGroup) -> PreparedBatch:
        """Adds the log-probs of a reference group to a batch, where a loss reads them and the batch has none."""
        batch = work.batch
        if work.loss != "policy" or not self.config.needs_reference or batch.ref_log_probs is not None:
            return work
        # not through its `compute_log_probs`, which would queue behind the call that is being prepared here
        request = RankRequest("compute_log_probs", {"batch": batch, "model": "ref"})
        future = reference.begin(reference.prepared(request, reference.check(request)))
        return replace(work, batch=batch.replace(ref_log_probs=future.result().log_probs))

    def begin(self, request: RankRequest) -> CallFuture:
        """Starts a call with prepared arguments on all ranks.

        A save or a load of a job with a critic or a reference group waits for these.
        """
        others = [group for group in (self.critic, self.reference_group) if group is not None]
        if others and request.name in ("save", "load") and request.adapter is None:
            started = self._begin_save if request.name == "save" else self._begin_load
            return started(request, others)
        return self._begin(request)

    def _begin_save(self, request: RankRequest, others: Sequence[WorkerGroup]) -> CallFuture:
        """Writes the parts of the other groups, then begins the save that takes them in.

        Returns:
            The future of that save, or of what failed before it.
        """
        job = request.arguments.get("job") or JobCheckpoint(uuid.uuid4().hex)
        request = request.having(job=replace(job, parts=tuple(PARTS[group.role] for group in others)))
        of_part = {**request.arguments, "loop_state": None, "job": replace(job, is_part=True)}
        if self.config.checkpoint.async_save:  # it may still be taking in parts, or be of the same step
            finishing = self._begin(RankRequest("finish_save"))
            if _failed([finishing]):
                return finishing
        for group in others:
            group.await_weights()
        return _failed([group._begin(RankRequest("save", of_part)) for group in others]) or self._begin(request)

    def _begin_load(self, request: RankRequest, others: Sequence[WorkerGroup]) -> CallFuture:
        """Loads a checkpoint, then the parts of the other groups from the same one.

        Returns:
            The future of the load, or of what failed behind it.
        """
        load = self._begin(request.having(job=request.arguments.get("job") or JobCheckpoint()))
        if _failed([load]):
            return load
        step = self._begin(RankRequest("restored")).result().step
        of_part = {**request.arguments, "step": step, "job": JobCheckpoint(is_part=True)}
        return _failed([group._begin(RankRequest("load", of_part)) for group in others]) or load

    def _begin(self, request: RankRequest) -> CallFuture:
        reference = self.reference_group
        if request.name == "update_ref" and reference is not None:
            arguments = {"receivers": reference.receivers, "drop_failed": False}
            request = RankRequest("update_weights", arguments, request.adapter)
        workers = self._workers  # another thread may end the group meanwhile
        self._require_workers(request.name)
        future = self._queue.begin(
            lambda: [worker.call.remote(request, self.role) for worker in workers],
            name=request.name,
            timeout_s=self.config.cluster.call_timeout_s,
            first_only=not request.call.answers_by_rank,
            watchdog=self._watchdog,
        )
        receivers = request.arguments.get("receivers", ())
        if reference is not None and any(receiver in reference.receivers for receiver in receivers):
            reference._coming_weights = future
        return future

    def _start(self, request: RankRequest) -> QueuedCall:
        planning = self.check(request)
        return self._queue.dispatcher.submit(lambda: self.begin(self.prepared(request, planning)), request.adapter)

    def _require_workers(self, name: str) -> None:
        if not self._workers:
            raise StateError(f"{name}() after shutdown()", field=name, hint="launch a new group")
        require_cluster()
        self._queue.require_moving(name)


def _failed(futures: Sequence[CallFuture]) -> CallFuture | None:
    """Waits for calls; returns the first one that has failed, whose `result` raises its error again."""
    failed = None
    for future in futures:
        try:
            future.result()
        except Exception:
            failed = failed or future
    return failed


def _model_folder(config: RunConfig, role: Role) -> ModelFolder:
    path, field = config.folder_of(role)
    found = read_model_folder(path, field=field, with_weights=field != "model.path" or config.model.init == "folder")
    check_architecture(found, field=field)
    return found


def _require_vocabulary(critic: ModelFolder, policy: ModelFolder) -> None:
    if critic.vocab_size != policy.vocab_size:
        raise ModelError(
            f"the critic has a vocabulary of {critic.vocab_size}, the policy of {policy.vocab_size}",
            field="critic.path",
            hint="choose a critic with the policy's vocabulary",
        )


def _sharded_as(config: RunConfig, level: str | None) -> RunConfig:
    return config if level is None else config.with_sharding(level)


def _start_ranks(config: RunConfig, role: Role, places: PlacementGroups) -> tuple[list[Any], Watchdog, Loaded]:
    """Starts the processes of a group and loads the model; returns them, their watchdog and what they loaded."""
    began = time.monotonic()
    timeout_s = config.cluster.launch_timeout_s
    placement, gpus = places.reserve_for_ranks(config, role)
    ranks = placement.bundle_count
    actor_class = remote_class(TrainWorker)
    workers: list[Any] = []
    try:
        for rank in range(ranks):
            workers.append(actor_class.options(**actor_options(placement, rank, gpus)).remote(rank, ranks))
        watchdog = Watchdog(workers, Limits.of(config))
        ready = [worker.__ray_ready__.remote() for worker in workers]
        with stage(f"starting {ranks} process{'es' * (ranks != 1)} of role {role}", answered(ready)):
            _launched(ready, watchdog, timeout_s, began)
        address, port = _launched([workers[0].free_address.remote()], watchdog, timeout_s, began)
        starts = [worker.start.remote(config, role, address, port) for worker in workers]
        with stage(f"loading the model of role {role}", answered(starts)):
            return workers, watchdog, _launched(starts, watchdog, timeout_s, began)
    except BaseException:
        end_processes(workers)
        raise


def _launched(refs: Sequence[Any], watchdog: Watchdog, timeout_s: float, began: float) -> Any:
    return CallFuture(
        refs, name="launch", timeout_s=timeout_s, first_only=True, watchdog=watchdog, since=began,
        setting="cluster.launch_timeout_s",
    ).result()  # fmt: skip
