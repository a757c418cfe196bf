"""The driver's handle on all ranks of one role, which starts and ends the ranks, and sends them calls.

A batch is checked in the caller's thread and planned in a thread of the group, before any rank sees the batch. So bad
input never disturbs a rank, and `submit` does not wait for the planning.
"""

from __future__ import annotations

import sys
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from actors.cluster.capacity import with_cluster_ranks
from actors.cluster.connect import connect
from actors.cluster.placement import PlacementGroups, actor_options, bundles_by_node, describe_nodes
from actors.cluster.ray_errors import end_processes, require_cluster, store
from actors.model_folders import with_model_folders
from actors.startup import answered, stage
from actors.workers.futures import CallFuture, CallQueue, QueuedCall
from actors.workers.group_calls import EndsWithBlock, GroupCalls, RankRequest
from actors.workers.named_group import NamedGroup
from actors.workers.train_worker import TrainWorker
from actors.workers.watchdog import Limits, Watchdog, remote_class
from slimefsdp.checkpoint.store import PARTS
from slimefsdp.config import RunConfig
from slimefsdp.errors import ModelError, PeerFailed, SlimeError, StateError, WorkerDied, WorkerHung
from slimefsdp.models.hf_folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.results import Health
from slimefsdp.rpc import JobCheckpoint, Role
from slimefsdp.training.plan import cost_model_of, routed_experts_of
from slimefsdp.training.prepare import BatchPlanner, Planning, PreparedBatch

SAVE_GRACE_S = 60.0  # how long `shutdown` waits for a save in the background


class WorkerGroup(EndsWithBlock, GroupCalls):
    """The handle on all ranks of one role; `launch` returns it, and the end of its `with` block ends the ranks."""

    def __init__(
        self,
        config: RunConfig,
        role: Role,
        workers: Sequence[Any],
        folder: ModelFolder,
        *,
        watchdog: Watchdog,
        places: PlacementGroups | None = None,
        ends: Literal["nothing", "processes", "places"] = "processes",
    ) -> None:
        self.config = config
        self.role: Role = role
        self.reference_group: WorkerGroup | None = None  # only in an actor's group, with reference.dp
        self.critic: WorkerGroup | None = None  # only in an actor's group, with algorithm=ppo
        self._workers = list(workers)
        self._watchdog = watchdog
        self.places = PlacementGroups() if places is None else places
        # What `shutdown` ends: "nothing" if the processes belong to another group, "processes", or "places": processes
        # and placement groups.
        self._ends = ends
        cost = cost_model_of(config, folder.config)
        experts = routed_experts_of(folder.config)
        self._planner = BatchPlanner(config, role, folder.vocab_size, folder.max_sample_tokens, cost, experts=experts)
        self._queue = CallQueue()
        # The next two are used in a reference group.
        self._coming_weights: CallFuture | None = None  # the actor's last update_ref, until `await_weights` takes it
        self._failed_update: Exception | None = None  # the error of the update that `await_weights` took last

    @classmethod
    def launch(
        cls,
        config: RunConfig,
        role: Role = "actor",
        *,
        places: PlacementGroups | None = None,
        sharding: Mapping[Role, str] = MappingProxyType({}),
    ) -> WorkerGroup:
        """Starts one process for each rank, joins them in a process group and loads the model; waits for all ranks.

        An actor's group also launches its reference group if `reference.dp` is set, and its critic if `algorithm` is
        ppo. With `mesh.dp: auto` the group takes all devices of the cluster; its `config` has the resulting number.

        Args:
            places: placement groups for the processes, which the caller releases; None means that the group reserves
                and releases its own placement groups.
            sharding: role -> level that replaces fsdp.sharding, so that a relaunched group keeps its earlier levels.

        Raises:
            ResourceError: the cluster is too small. ModelError: the folder cannot be loaded or downloaded.
            WorkerDied, WorkerHung: a rank did not come up.
        """
        config = with_model_folders(config)
        folder = _model_folder(config, role)
        if role == "actor" and config.algorithm == "ppo":
            _require_vocabulary(_model_folder(config, "critic"), folder)
        connect(config)
        config = with_cluster_ranks(config)
        own_places = PlacementGroups() if places is None else places
        group: WorkerGroup | None = None
        try:
            workers, watchdog, level = _start_ranks(_with_level(config, sharding.get(role)), role, own_places)
            group = cls(
                config.with_sharding(level), role, workers, folder,
                watchdog=watchdog, places=own_places, ends="places" if places is None else "processes",
            )  # fmt: skip
            if role == "actor":
                group._launch_others(config, own_places, sharding)
        except BaseException:  # includes Ctrl-C: in a notebook the driver's process continues
            if group is not None:
                group.end()
            if places is None:
                own_places.release()
            raise
        return group

    attach = staticmethod(NamedGroup.attach)

    def _launch_others(self, config: RunConfig, places: PlacementGroups, sharding: Mapping[Role, str]) -> None:
        if not config.reference.is_colocated:
            self._refer_to(self.launch(config, "ref", places=places, sharding=sharding))
        if config.algorithm == "ppo" and config.critic.is_colocated:
            self.critic = self._colocated_critic(config, sharding.get("critic"))
        elif config.algorithm == "ppo":
            self.critic = self.launch(config, "critic", places=places, sharding=sharding)

    def _colocated_critic(self, config: RunConfig, level: str | None) -> WorkerGroup:
        """Returns a critic in the processes of this actor's group; the critic ends with this group."""
        rank_config, workers = _with_level(config, level), self._workers
        level = self._queue.begin(
            lambda: [worker.add_trainer.remote(rank_config, "critic") for worker in workers],
            name="launch",
            timeout_s=config.cluster.launch_timeout_s,
            first_only=True,
            watchdog=self._watchdog,
            setting="cluster.launch_timeout_s",
        ).result()
        critic = WorkerGroup(
            config.with_sharding(level), "critic", workers, _model_folder(config, "critic"),
            watchdog=self._watchdog, places=self.places, ends="nothing",
        )  # fmt: skip
        critic._queue = self._queue  # collectives of both roles run on the same ranks
        return critic

    def _refer_to(self, reference: WorkerGroup) -> None:
        """Makes a new group the reference group; calls of both groups start in the order in which they were made."""
        self.reference_group = reference
        reference._queue = CallQueue(self._queue.dispatcher)

    @property
    def sharding(self) -> dict[Role, str]:
        """Returns role -> level of fsdp.sharding, for this group, its critic and its reference group."""
        groups = [group for group in (self, self.critic, self.reference_group) if group is not None]
        return {group.role: group.config.fsdp.sharding for group in groups}

    @property
    def receivers(self) -> list[Any]:
        return list(self._workers)

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        """Returns the answer or the error of each rank; works while ranks are in a collective."""
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

        Idempotent. If a critic is in an actor's processes, its own shutdown only makes the critic refuse further calls.
        """
        for group in (self, self.critic):
            if group is not None and group._workers and group.role != "ref" and self.config.checkpoint.async_save:
                group._finish_running_save()
        self.end()
        if self._ends == "places":
            self.places.release()

    def end(self) -> None:
        """Ends the same processes as `shutdown`, but without waiting, and keeps placement groups. Idempotent."""
        for other in (self.critic, self.reference_group):
            if other is not None:
                other.end()
        if self._workers and self._ends != "nothing":
            self._watchdog.kill_stopped()
            end_processes(self._workers)
        self._workers = []

    def _finish_running_save(self) -> None:
        """Waits for a save in the background; warns if the save may be lost."""
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
        """Checks a call; returns the function that plans its batch, or None for a call without a batch.

        Raises:
            WorkerHung: the ranks hang in an earlier call. SlimeError: the call is wrong; no rank has seen it.
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
        """Plans the batch of a checked call, adds the reference's log-probs, and puts the batch into the object store.

        The returned request is valid for all groups with these settings, including groups that are launched later.

        Raises:
            SlimeError: the reference group failed to compute log-probs. ResourceError: the object store is full.
        """
        if planning is None:
            return request
        batch = planning()
        self._require_workers(request.name)  # another thread may have ended the workers, or Ray
        self.await_weights()
        if self.reference_group is not None:
            batch = self._with_reference(batch, self.reference_group)
        prepared = request.having(batch=store(batch, "batch"))
        prepared.arguments.pop("plan", None)  # the prepared batch has the plan
        return prepared

    def await_weights(self) -> None:
        """Waits until the weights of the actor's last `update_ref` have reached this reference group.

        Raises:
            WorkerDied, WorkerHung, PeerFailed: ranks of the actor were lost during the update.
            StateError: the last update failed in another way; the reference may have a mixture of old and new weights.
        """
        update, self._coming_weights = self._coming_weights, None
        if update is not None:
            try:
                update.result()
                self._failed_update = None
            except Exception as error:  # also raised in the caller of update_ref
                self._failed_update = error
                if isinstance(error, WorkerDied | WorkerHung | PeerFailed):
                    raise
        if self._failed_update is not None:
            raise StateError(
                f"the reference's weights may be of two versions: its last update failed: {self._failed_update}",
                field="update_ref",
                hint="call update_ref again",
            )

    def _with_reference(self, prepared: PreparedBatch, reference: WorkerGroup) -> PreparedBatch:
        """Adds the log-probs of a reference group to a batch that lacks them, if the loss reads them."""
        batch = prepared.batch
        if prepared.loss != "policy" or not self.config.needs_reference or batch.ref_log_probs is not None:
            return prepared
        # reference.compute_log_probs() would queue the request behind the call that is being prepared, and never return
        request = RankRequest("compute_log_probs", {"batch": batch, "model": "ref"})
        future = reference.begin(reference.prepared(request, reference.check(request)))
        return replace(prepared, batch=batch.replace(ref_log_probs=future.result().log_probs))

    def begin(self, request: RankRequest) -> CallFuture:
        """Starts a prepared call on all ranks; a save or load of the job includes critic and reference group."""
        others = [group for group in (self.critic, self.reference_group) if group is not None]
        if others and request.name in ("save", "load") and request.adapter is None:
            started = self._begin_save if request.name == "save" else self._begin_load
            return started(request, others)
        return self._begin(request)

    def _begin_save(self, request: RankRequest, others: Sequence[WorkerGroup]) -> CallFuture:
        """Saves the other groups' parts and starts the actor's save; returns the future of this or of a failed part."""
        job = request.arguments.get("job") or JobCheckpoint(uuid.uuid4().hex)
        request = request.having(job=replace(job, parts=tuple(PARTS[group.role] for group in others)))
        part_arguments = {**request.arguments, "loop_state": None, "job": replace(job, is_part=True)}
        if self.config.checkpoint.async_save:  # the previous save may still read parts, or have the same step
            finishing = self._begin(RankRequest("finish_save"))
            if _failed([finishing]):
                return finishing
        for group in others:
            group.await_weights()
        return _failed([group._begin(RankRequest("save", part_arguments)) for group in others]) or self._begin(request)

    def _begin_load(self, request: RankRequest, others: Sequence[WorkerGroup]) -> CallFuture:
        """Loads the actor's part, then the other groups' parts; returns the future of this load or of a failed part."""
        load = self._begin(request.having(job=request.arguments.get("job") or JobCheckpoint()))
        if _failed([load]):
            return load
        step = self._begin(RankRequest("restored")).result().step
        part_arguments = {**request.arguments, "step": step, "job": JobCheckpoint(is_part=True)}
        return _failed([group._begin(RankRequest("load", part_arguments)) for group in others]) or load

    def _begin(self, request: RankRequest) -> CallFuture:
        reference = self.reference_group
        if request.name == "update_ref" and reference is not None:
            arguments = {"receivers": reference.receivers, "drop_failed": False}
            request = RankRequest("update_weights", arguments, request.adapter)
        workers = self._workers  # read once, since another thread may replace the list
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
    failed = None
    for future in futures:
        try:
            future.result()
        except Exception:
            failed = failed or future
    return failed


def _model_folder(config: RunConfig, role: Role) -> ModelFolder:
    path, field = config.folder_of(role)
    folder = read_model_folder(path, field=field, with_weights=field != "model.path" or config.model.init == "folder")
    check_architecture(folder, field=field)
    return folder


def _require_vocabulary(critic: ModelFolder, policy: ModelFolder) -> None:
    if critic.vocab_size != policy.vocab_size:
        raise ModelError(
            f"the critic has a vocabulary of {critic.vocab_size}, the policy of {policy.vocab_size}",
            field="critic.path",
            hint="choose a critic with the policy's vocabulary",
        )


def _with_level(config: RunConfig, level: str | None) -> RunConfig:
    return config if level is None else config.with_sharding(level)


def _start_ranks(config: RunConfig, role: Role, places: PlacementGroups) -> tuple[list[Any], Watchdog, str]:
    """Starts a group's processes, which load the model; returns processes, watchdog and level of fsdp.sharding."""
    began = time.monotonic()
    timeout_s = config.cluster.launch_timeout_s
    placement, gpus = places.reserve_for_ranks(config, role)
    ranks = placement.bundle_count
    bundles, nodes = bundles_by_node(placement)
    copies, _ = config.mesh_of(role)
    if line := describe_nodes(nodes, tp=config.mesh.tp, cp=config.mesh.cp, copies=copies):
        print(f"{role}: {line}", file=sys.stderr, flush=True)
    actor_class = remote_class(TrainWorker)
    workers: list[Any] = []
    try:
        for rank, bundle in enumerate(bundles):
            options = actor_options(placement, bundle, gpus, config.cluster.environment)
            workers.append(actor_class.options(**options).remote(rank, ranks))
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
