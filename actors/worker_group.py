"""The driver's handle on all ranks of one role: the Trainer's methods, called everywhere at once.

The list of methods is `slimefsdp.surface.RPCS`; each has a twin `NAME_async` that returns a future. The
driver checks a batch and plans it before any rank sees it, so bad input never disturbs a rank.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from actors.calls import CallFuture, CallQueue
from actors.cluster import connect, with_cluster_ranks
from actors.placement import Places, actor_options, gpus_per_rank
from actors.ray_failures import end_processes, require_cluster, store
from actors.startup import answered, stage
from actors.train_worker import TrainWorker
from actors.watchdog import Limits, Watchdog, remote_class
from slimefsdp.checkpoint.identity import check_loop_state
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, ModelError, SlimeError, StateError
from slimefsdp.models.folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.phase import check_batch, check_plan, cost_model_of, plan_training, require_batch, samples_together
from slimefsdp.reports import Health
from slimefsdp.surface import RPCS, Role, require_loss, require_receivers, require_role

# calls that take a batch first: the name of their second argument, and its default
SECOND_ARGUMENT: dict[str, tuple[str, Any]] = {
    "compute_log_probs": ("model", "actor"),
    "compute_values": ("", None),
    "train_step": ("plan", None),
    "forward_backward": ("loss", "policy"),
}
SAVE_GRACE_S = 60.0  # how long `shutdown` waits for a save in the background


class WorkerGroup:
    """All ranks of one role. Make one with `launch`; the methods are those of `slimefsdp.Trainer`."""

    if TYPE_CHECKING:  # what `add_calls` adds

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __init__(
        self,
        config: RunConfig,
        role: Role,
        workers: Sequence[Any],
        vocab_size: int,
        folder: ModelFolder,
        *,
        watchdog: Watchdog,
        places: Places | None = None,
        is_guest: bool = False,
    ) -> None:
        self.config = config
        self.role: Role = role
        self.reference_group: WorkerGroup | None = None  # its own group, where reference.placement=group
        self.critic: WorkerGroup | None = None  # of an actor under algorithm=ppo, in its processes or in its own
        self._workers = list(workers)
        self._watchdog = watchdog
        self._places = places  # to be given back at the end; None: by another group or a supervisor
        self._is_guest = is_guest  # in another group's processes
        self._vocab_size = vocab_size
        self._max_sample_tokens = folder.max_sample_tokens
        self._cost = cost_model_of(config, folder.config)  # plans are balanced by it
        self._queue = CallQueue()

    @classmethod
    def launch(
        cls, config: RunConfig, role: Role = "actor", *, beside: WorkerGroup | None = None, places: Places | None = None
    ) -> WorkerGroup:
        """Starts one process a rank, joins them and loads the model; all ranks are ready on return.

        An actor group launches its reference group too, with `reference.placement: group`, and under `algorithm: ppo`
        its critic. With `mesh.dp: auto` the group takes what `actors.cluster.with_cluster_ranks` finds; its `config`
        has the number.

        Args:
            beside: for a critic, the actor group in whose processes it is to be; it ends with them.
            places: where the processes go, kept by the caller when the group ends; None: places of its own.

        Raises:
            ResourceError: the cluster is too small. ModelError: the folder cannot be loaded.
            StateError: `beside` is no actor group, or the role is no critic.
            WorkerDied, WorkerHung: a rank did not come up.
        """
        found = _model_folder(config, role)
        if beside is not None:
            return cls._beside(beside, config.with_ranks(beside.config.ranks), role, found)
        if role == "actor" and config.algorithm == "ppo":
            _require_vocabulary(_model_folder(config, "critic"), found)
        connect(config)
        config = with_cluster_ranks(config)
        taken = Places() if places is None else places
        group: WorkerGroup | None = None
        try:
            workers, watchdog, vocab_size = _start_ranks(config, role, taken)
            own = taken if places is None else None
            group = cls(config, role, workers, vocab_size, found, watchdog=watchdog, places=own)
            if role == "actor":
                group._launch_others(taken)
        except BaseException:  # Ctrl-C too: in a notebook the driver lives on
            if group is not None:
                group.end()
            if places is None:
                taken.release()
            raise
        return group

    @classmethod
    def _beside(cls, actor: WorkerGroup, config: RunConfig, role: Role, folder: ModelFolder) -> WorkerGroup:
        if role != "critic" or actor.role != "actor":
            raise StateError(
                f"a group of role {role!r} beside one of role {actor.role!r}",
                field="beside",
                hint="only a critic shares the processes of an actor group; launch others without it",
            )
        actor._require_workers("launch")
        vocab_size = actor._queue.begin(
            lambda: [worker.add_trainer.remote(config, role) for worker in actor._workers],
            name="launch",
            timeout_s=config.cluster.launch_timeout_s,
            first_only=True,
            watchdog=actor._watchdog,
        ).result()
        group = cls(config, role, actor._workers, vocab_size, folder, watchdog=actor._watchdog, is_guest=True)
        group._queue = actor._queue  # both roles' collectives are on the same ranks
        return group

    def _launch_others(self, places: Places) -> None:
        config = self.config
        if config.reference.placement == "group":
            self.reference_group = self.launch(config, "ref", places=places)
        if config.algorithm == "ppo" and config.critic.placement == "colocated":
            self.critic = self.launch(config, "critic", beside=self)
        elif config.algorithm == "ppo":
            self.critic = self.launch(config, "critic", places=places)

    @property
    def receivers(self) -> list[Any]:
        """What `update_weights` of another group can send to."""
        return list(self._workers)

    def update_weights_async(self, receivers: Sequence[Any]) -> CallFuture:
        """Streams the weights to Ray actors with `begin`, `receive` and `commit` (engines, a reference group).

        Raises:
            SyncError: a receiver refused, died, or did not answer within cluster.sync_timeout_s.
        """
        self._require_workers("update_weights")
        require_role("update_weights", self.role)
        require_receivers(receivers)
        timeout_s = self.config.cluster.sync_timeout_s
        return self._begin(
            "update_weights", lambda worker: worker.update_weights.remote(list(receivers), timeout_s, self.role)
        )

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        """Each rank's answer, or why there is none; works while ranks are inside a collective."""
        futures = [
            CallFuture(
                [worker.health.remote(self.role)], name="health", timeout_s=timeout_s, first_only=True, first_rank=rank
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

    def shutdown(self) -> None:
        """Ends all processes of the group, its critic and its reference group, after saves in the background.

        Idempotent. A critic beside an actor only stops answering: the processes are the actor's.
        """
        for group in (self, self.critic):
            if group is not None and group._workers and group.role != "ref" and self.config.checkpoint.async_save:
                group._finish_running_save()
        self.end()
        if self._places is not None:
            self._places.release()

    def end(self) -> None:
        """Ends the same processes as they are, at once; their places stay with whoever reserved them. Idempotent."""
        for other in (self.critic, self.reference_group):
            if other is not None:
                other.end()
        if self._workers and not self._is_guest:
            self._watchdog.kill_stopped()
            end_processes(self._workers)
        self._workers = []

    def _finish_running_save(self) -> None:
        """Lets a save end that the processes' end would tear; where ranks are lost it says so, and goes on."""
        try:
            self._queue.begin(
                lambda: [worker.call.remote("finish_save", (), {}, self.role) for worker in self._workers],
                name="finish_save",
                timeout_s=SAVE_GRACE_S,
                first_only=True,
                counts_from_now=True,
            ).result()
        except Exception as error:
            warnings.warn(f"a save in the background may be lost: {error}", stacklevel=3)

    def prepare(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as the ranks get them: its batch checked, completed, planned and stored once.

        They serve any group of these settings, also one launched later.

        Raises:
            WorkerHung: the ranks hang in an earlier call.
            SlimeError: of the class that fits; no rank has seen anything.
        """
        self._require_workers(name)
        require_role(name, self.role)
        if name in SECOND_ARGUMENT:
            return self._prepared(name, args, kwargs)
        if name == "update_weights" and (args or "receivers" in kwargs):
            require_receivers(args[0] if args else kwargs["receivers"])
        if name == "save":  # what is nested too deep, or is no data, could not even be sent to the ranks
            check_loop_state(args[1] if len(args) > 1 else kwargs.get("loop_state"))
        return args, kwargs

    def begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        """Starts a call with prepared arguments on all ranks."""
        if name == "update_weights":
            return self.update_weights_async(*args, **kwargs)
        if name == "update_ref" and self.reference_group is not None:
            return self.update_weights_async(self.reference_group.receivers)
        self._require_workers(name)
        return self._begin(name, lambda worker: worker.call.remote(name, args, kwargs, self.role))

    def _begin(self, name: str, start: Callable[[Any], Any]) -> CallFuture:
        return self._queue.begin(
            lambda: [start(worker) for worker in self._workers],
            name=name,
            timeout_s=self.config.cluster.call_timeout_s,
            first_only=RPCS[name] == "first",
            watchdog=self._watchdog,
        )

    def _start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        return self.begin(name, *self.prepare(name, args, kwargs))

    def _require_workers(self, name: str) -> None:
        if not self._workers:
            raise StateError(f"{name}() after shutdown()", field=name, hint="launch a new group")
        require_cluster()
        self._queue.require_moving(name)

    def _prepared(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a call with a batch, as the ranks get them: checked, completed, in the object store once."""
        if "batch" in kwargs:
            args, kwargs = (kwargs["batch"], *args), {k: v for k, v in kwargs.items() if k != "batch"}
        batch, *rest = args or (None,)
        require_batch(batch)
        field, default = SECOND_ARGUMENT[name]
        second = rest[0] if rest else kwargs.get(field, default)
        loss: Any = None
        if name == "train_step":
            loss = "value" if self.role == "critic" else self.config.loss_name
            if second is not None:
                dp = math.prod(self.config.mesh_of(self.role))
                together = samples_together(self.config, batch, loss)
                check_plan(second, batch, dp=dp, max_pack_tokens=self.config.max_pack_tokens, together=together)
        elif name == "forward_backward":
            require_loss(second, self.role)
            loss = second
        elif name == "compute_log_probs" and second not in ("actor", "ref"):
            raise ConfigError(f"{field}={second!r} is unknown", field=field, hint="use actor or ref")
        limits: dict[str, Any] = {"max_sample_tokens": self._max_sample_tokens}
        advantages = check_batch(self.config, batch, self._vocab_size, loss=loss, **limits)
        if name == "compute_log_probs" and second == "ref" and self.reference_group is not None:
            raise StateError(
                "the reference model is a group of its own", field="model", hint="call group.reference_group instead"
            )
        if (
            loss == "policy"
            and self.config.needs_reference
            and self.reference_group is not None
            and batch.ref_log_probs is None
        ):
            batch = batch.replace(ref_log_probs=self.reference_group.compute_log_probs(batch, model="ref").log_probs)
        if name == "train_step" and second is None:
            rest, kwargs = (
                [plan_training(self.config, batch, self._cost, loss=loss, advantages=advantages), *rest[1:]],
                {k: v for k, v in kwargs.items() if k != field},
            )
        return (store(batch, "batch"), *rest), kwargs


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


def _start_ranks(config: RunConfig, role: Role, places: Places) -> tuple[list[Any], Watchdog, int]:
    """The processes of a group with its model loaded, who looks after them, and the vocabulary size."""
    began = time.monotonic()
    ranks = {"actor": config.ranks, "ref": config.reference_ranks, "critic": config.critic_ranks}[role]
    gpus = gpus_per_rank(config.mesh.device)
    timeout_s = config.cluster.launch_timeout_s
    placement = places.reserve(role, ranks, gpus_per_rank=gpus, timeout_s=timeout_s)
    actor_class = remote_class(TrainWorker)
    workers = [actor_class.options(**actor_options(placement, rank, gpus)).remote(rank, ranks) for rank in range(ranks)]
    watchdog = Watchdog(workers, Limits.of(config))
    try:
        ready = [worker.__ray_ready__.remote() for worker in workers]
        with stage(f"starting {ranks} processes of role {role}", answered(ready)):
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
        refs, name="launch", timeout_s=timeout_s, first_only=True, watchdog=watchdog, began=began
    ).result()


class Handle(Protocol):
    """What `add_calls` completes."""

    def _start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def add_calls(handle: type[Handle]) -> None:
    """Gives a driver's handle every call of the surface, and an async twin of each, as its `_start` does them."""

    def synchronous(name: str) -> Callable[..., Any]:
        def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
            return self._start(name, args, kwargs).result()

        return method

    def asynchronous(name: str) -> Callable[..., Any]:
        def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
            return self._start(name, args, kwargs)

        return method

    for name in RPCS:
        for method_name, make in ((name, synchronous), (f"{name}_async", asynchronous)):
            if method_name not in vars(handle):
                method = make(name)
                method.__name__ = method_name
                method.__doc__ = f"As `slimefsdp.Trainer.{name}`" + (
                    ", returning a future." if make is asynchronous else "."
                )
                setattr(handle, method_name, method)


add_calls(WorkerGroup)
