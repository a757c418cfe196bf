"""The driver's handle on all ranks of one role: the Trainer's methods, called everywhere at once.

The list of methods is `slimefsdp.surface.RPCS`; each has a twin `NAME_async` that returns a future. The
driver checks a batch and plans it before any rank sees it, so bad input never disturbs a rank.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import ray

from actors.calls import CallFuture
from actors.cluster import connect, with_cluster_ranks
from actors.placement import actor_options, gpus_per_rank, release, reserve
from actors.train_worker import TrainWorker
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, SlimeError, StateError, SyncError
from slimefsdp.models.folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.phase import check_batch, check_plan, cost_model_of, plan_training
from slimefsdp.reports import Health, SyncReport
from slimefsdp.surface import RPCS

# calls that take a batch first: the name of their second argument, and what it may be, the default first
SECOND_ARGUMENT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "compute_log_probs": ("model", ("actor", "ref")),
    "train_step": ("plan", (None,)),
    "forward_backward": ("loss", ("policy", "sft")),
}
SAVE_GRACE_S = 60.0  # how long `shutdown` waits for a save in the background


class WorkerGroup:
    """All ranks of one role. Make one with `launch`; the methods are those of `slimefsdp.Trainer`."""

    if TYPE_CHECKING:  # what `_forward_trainer_methods` adds

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __init__(
        self,
        config: RunConfig,
        role: str,
        workers: Sequence[Any],
        placement: Any,
        vocab_size: int,
        folder: ModelFolder,
    ) -> None:
        self.config = config
        self.role = role
        self.reference_group: WorkerGroup | None = None  # its own group, where reference.placement=group
        self._workers = list(workers)
        self._placement = placement
        self._vocab_size = vocab_size
        self._max_sample_tokens = folder.max_sample_tokens
        self._cost = cost_model_of(config, folder.config)  # plans are balanced by it
        # two threads' calls must reach all ranks in one order, or their collectives would meet each other
        self._order = threading.Lock()

    @classmethod
    def launch(cls, config: RunConfig, role: Literal["actor", "ref"] = "actor") -> WorkerGroup:
        """Starts one process a rank, joins them and loads the model; all ranks are ready on return.

        With `reference.placement: group` an actor group launches its reference group too. With `mesh.dp: auto` the
        group takes what `actors.cluster.with_cluster_ranks` finds; its `config` has the number.

        Raises:
            ResourceError: the cluster is too small. ModelError: the folder cannot be loaded.
            WorkerDied, WorkerHung: a rank did not come up.
        """
        is_ref = role == "ref"
        field = "reference.path" if is_ref and config.reference.path else "model.path"
        folder = (config.reference.path if is_ref else None) or config.model.path
        with_weights = field == "reference.path" or config.model.init == "folder"
        found = read_model_folder(folder, field=field, with_weights=with_weights)
        check_architecture(found, field=field)
        connect(config)
        config = with_cluster_ranks(config)
        ranks = config.reference_ranks if is_ref else config.ranks
        gpus = gpus_per_rank(config.mesh.device)
        placement = reserve(ranks, gpus_per_rank=gpus, timeout_s=config.cluster.launch_timeout_s)
        try:
            actor_class: Any = ray.remote(concurrency_groups={"control": 1})(TrainWorker)  # type: ignore[call-overload]
            workers = [
                actor_class.options(**actor_options(placement, rank, gpus)).remote(rank, ranks) for rank in range(ranks)
            ]
            wait = functools.partial(_wait, timeout_s=config.cluster.launch_timeout_s, name="launch")
            address, port = wait([workers[0].free_address.remote()])
            vocab_size = wait([worker.start.remote(config, role, address, port) for worker in workers])
            group = cls(config, role, workers, placement, vocab_size, found)
            if not is_ref and config.reference.placement == "group":
                group.reference_group = cls.launch(config, role="ref")
        except Exception:
            release(placement)
            raise
        return group

    @property
    def receivers(self) -> list[Any]:
        """What `update_weights` of another group can send to."""
        return list(self._workers)

    def update_weights(self, receivers: Sequence[Any]) -> SyncReport:
        """Streams the weights to Ray actors with `begin`, `receive` and `commit` (engines, a reference group).

        Raises:
            SyncError: a receiver refused, died, or did not answer within cluster.sync_timeout_s.
        """
        return self.update_weights_async(receivers).result()

    def update_weights_async(self, receivers: Sequence[Any]) -> CallFuture:
        """As `update_weights`, returning a future."""
        self._require_workers("update_weights")
        for receiver in receivers:
            if not all(hasattr(receiver, name) for name in ("begin", "receive", "commit")):
                raise SyncError(
                    f"{type(receiver).__name__} has no begin, receive and commit",
                    field="receivers",
                    hint="give actors that implement slimefsdp.weights.receive.Receiver",
                )
        timeout_s = self.config.cluster.sync_timeout_s
        with self._order:
            refs = [worker.update_weights.remote(list(receivers), timeout_s) for worker in self._workers]
        return CallFuture(refs, name="update_weights", timeout_s=self.config.cluster.call_timeout_s, first_only=True)

    def update_ref(self) -> None:
        """Makes the reference model equal to the actor: shard to shard in-process, or as a receiver of its weights."""
        self.update_ref_async().result()

    def update_ref_async(self) -> CallFuture:
        """As `update_ref`, returning a future."""
        if self.reference_group is not None:
            return self.update_weights_async(self.reference_group.receivers)
        return self._start("update_ref", (), {})

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        """Each rank's answer, or why there is none; works while ranks are inside a collective."""
        futures = [
            CallFuture([worker.health.remote()], name="health", timeout_s=timeout_s, first_only=True, first_rank=rank)
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
        """Ends all processes of the group and of its reference group, after a save in the background; idempotent."""
        if self._workers and self.role == "actor" and self.config.checkpoint.async_save:
            self._finish_running_save()
        if self.reference_group is not None:
            self.reference_group.shutdown()
        for worker in self._workers:
            ray.kill(worker)
        if self._workers:
            release(self._placement)
        self._workers = []

    def _finish_running_save(self) -> None:
        """Lets a save end that the processes' end would tear; where ranks are lost it says so, and goes on."""
        try:
            with self._order:
                refs = [worker.call.remote("finish_save", (), {}) for worker in self._workers]
            CallFuture(refs, name="finish_save", timeout_s=SAVE_GRACE_S, first_only=True).result()
        except Exception as error:
            warnings.warn(f"a save in the background may be lost: {error}", stacklevel=3)

    def _start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        self._require_workers(name)
        if name in SECOND_ARGUMENT:
            args, kwargs = self._prepared(name, args, kwargs)
        with self._order:
            refs = [worker.call.remote(name, args, kwargs) for worker in self._workers]
        return CallFuture(
            refs,
            name=name,
            timeout_s=self.config.cluster.call_timeout_s,
            first_only=RPCS[name] == "first",
        )

    def _require_workers(self, name: str) -> None:
        if not self._workers:
            raise StateError(f"{name}() after shutdown()", field=name, hint="launch a new group")

    def _prepared(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a call with a batch, as the ranks get them: checked, completed, in the object store once."""
        if "batch" in kwargs:
            args, kwargs = (kwargs["batch"], *args), {k: v for k, v in kwargs.items() if k != "batch"}
        batch, *rest = args or (None,)
        if not isinstance(batch, RolloutBatch):
            raise BatchError(
                f"{name}() was given a {type(batch).__name__} for a batch",
                field="batch",
                hint="make one with RolloutBatch.from_samples",
            )
        field, choices = SECOND_ARGUMENT[name]
        second = rest[0] if rest else kwargs.get(field, choices[0])
        if name == "train_step":
            if second is not None:
                check_plan(second, batch, dp=self.config.data_ranks, max_pack_tokens=self.config.max_pack_tokens)
        elif second not in choices:
            raise ConfigError(f"{field}={second!r} is unknown", field=field, hint=f"use {' or '.join(choices)}")
        loss = self.config.loss_name if name == "train_step" else second if name == "forward_backward" else None
        check_batch(self.config, batch, self._vocab_size, loss=loss, max_sample_tokens=self._max_sample_tokens)
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
                [plan_training(self.config, batch, self._cost), *rest[1:]],
                {k: v for k, v in kwargs.items() if k != field},
            )
        return (ray.put(batch), *rest), kwargs


def _wait(refs: Sequence[Any], *, timeout_s: float, name: str) -> Any:
    return CallFuture(refs, name=name, timeout_s=timeout_s, first_only=True).result()


def _forward_trainer_methods() -> None:
    """Gives WorkerGroup every call of the surface, and an async twin of each."""

    def synchronous(name: str) -> Callable[..., Any]:
        def method(self: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
            return self._start(name, args, kwargs).result()

        return method

    def asynchronous(name: str) -> Callable[..., Any]:
        def method(self: WorkerGroup, *args: Any, **kwargs: Any) -> CallFuture:
            return self._start(name, args, kwargs)

        return method

    for name in RPCS:
        for method_name, make in ((name, synchronous), (f"{name}_async", asynchronous)):
            if method_name not in vars(WorkerGroup):
                method = make(name)
                method.__name__ = method_name
                method.__doc__ = f"As `slimefsdp.Trainer.{name}`" + (
                    ", returning a future." if make is asynchronous else "."
                )
                setattr(WorkerGroup, method_name, method)


_forward_trainer_methods()
