"""The calls that all ranks of a group answer, as a driver makes them: those of `slimefsdp.Trainer`, and a twin of each.

A twin NAME_async returns a future before the batch is planned; its `result()` is what NAME returns, or raises what NAME
raises. Batches, plans, losses, receivers and `loop_state` are refused where the call is made, before a rank has seen
anything; tags, steps and paths are refused by the ranks, by all alike. What was given is what ranks get, whatever
becomes of it in the meantime, and calls run in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, overload

import numpy as np

from slimefsdp.algorithms.registry import LossName
from slimefsdp.batching.plan import Plan
from slimefsdp.checkpoint.compatibility import check_loop_state
from slimefsdp.checkpoint.store import require_name
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import SlimeError
from slimefsdp.results import (
    TAGS,
    AdapterInfo,
    Description,
    ForwardBackward,
    GradientHealth,
    LoadReport,
    LogProbs,
    Memory,
    MemoryReport,
    ReplicaCheck,
    SyncReport,
    Tag,
)
from slimefsdp.rpc import (
    DEFAULT_ADAPTER,
    Role,
    UpdateSettings,
    require_adapter_name,
    require_adapter_settings,
    require_log_probs,
    require_receivers,
    require_update_settings,
)
from slimefsdp.training.prepare import BatchPlanner, Planning

Result = TypeVar("Result", covariant=True)


class Future(Protocol[Result]):
    """The result of a call that is queued or running."""

    def result(self) -> Result:
        """Waits for it.

        Raises:
            WorkerHung: not all ranks answered in time. WorkerDied: a process ended.
            SlimeError: what a rank raised.
        """
        ...

    def __await__(self) -> Generator[Any, None, Result]:
        """As `result`, in a coroutine, while its event loop goes on."""
        ...


class EndsWithBlock:
    """A handle that a `with` block ends by its `shutdown`, whatever is raised there."""

    def shutdown(self) -> None:
        """Ends what the handle launched."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A call for all ranks, before they get it.

    Args:
        name: of Trainer's method.
        args: of that method, behind the batch.
        check: refuses the batch, where there is one, or returns what makes it what ranks get in its place.
        of_all_ranks: every rank's result is wanted, in rank order; else rank 0's.
        adapter: that the call is for, by its name; None: the run's own, or there are none.
    """

    name: str
    args: tuple[Any, ...] = ()
    check: Callable[[BatchPlanner], Planning] | None = None
    of_all_ranks: bool = False
    adapter: str | None = None


class GroupCalls:
    """The methods of a handle on a group; a subclass says how a request reaches the ranks."""

    role: Role

    def _start(self, request: RankRequest) -> Future[Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        parts: list[str] = [self.role]
        with suppress(SlimeError):  # of a job that has ended
            config: RunConfig | None = getattr(self, "config", None)
            if config is not None:
                dp_replicate, dp = config.mesh_of(self.role)
                ranks = dp_replicate * dp * config.mesh.cp
                parts += [f"{ranks} rank{'s' * (ranks != 1)}", str(config.folder_of(self.role)[0])]
        return f"{type(self).__name__}({', '.join(parts)})"

    # ------------------------------------------------------------------ log-probs and training

    def compute_log_probs(self, batch: RolloutBatch, model: Literal["actor", "ref"] = "actor") -> LogProbs:
        """Log-probs and entropies of every response token, masked ones too.

        Args:
            model: the group's weights now, or the frozen reference beside an actor (loaded on first use).

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the group has no such model.
            StateError: the reference is a group of its own, which is to be called instead.
        """
        return self.compute_log_probs_async(batch, model).result()

    def compute_log_probs_async(
        self, batch: RolloutBatch, model: Literal["actor", "ref"] = "actor"
    ) -> Future[LogProbs]:
        """As `compute_log_probs`, returning a future."""
        own = _copied(batch)
        return self._start(
            RankRequest("compute_log_probs", (model,), check=lambda planner: planner.for_forward(own, model))
        )

    def compute_values(self, batch: RolloutBatch) -> np.ndarray:
        """A critic's value of every response token, masked ones too: float32 [R], in the order of the batch.

        Raises:
            BatchError: the batch does not fit the settings. StateError: the group is no critic.
        """
        return self.compute_values_async(batch).result()

    def compute_values_async(self, batch: RolloutBatch) -> Future[np.ndarray]:
        """As `compute_values`, returning a future."""
        own = _copied(batch)
        return self._start(RankRequest("compute_values", check=lambda planner: planner.for_forward(own)))

    def train_step(
        self,
        batch: RolloutBatch,
        plan: Plan | None = None,
        *,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> dict[str, float]:
        """All updates over one rollout batch; returns metrics averaged over them.

        Args:
            plan: of `slimefsdp.training.plan.plan_training`; made here when not given.
            gae_lambda, kl_coefficient: of a critic's targets, instead of those in the settings.

        Raises:
            BatchError: the batch does not fit the settings; nothing was changed.
            ConfigError: a critic's option is given to another group, or is no number in its range.
            StateError: forward_backward has gathered gradients, which stay; or too many non-finite gradient norms in
                a row.
        """
        return self.train_step_async(batch, plan, gae_lambda=gae_lambda, kl_coefficient=kl_coefficient).result()

    def train_step_async(
        self,
        batch: RolloutBatch,
        plan: Plan | None = None,
        *,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> Future[dict[str, float]]:
        """As `train_step`, returning a future."""
        own, own_plan = _copied(batch), deepcopy(plan)
        return self._start(
            RankRequest(
                "train_step",
                check=lambda planner: planner.for_training(own, own_plan, gae_lambda, kl_coefficient),
            )
        )

    @overload
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: Literal[False] = False,
    ) -> dict[str, float]: ...

    @overload
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        with_log_probs: Literal[True],
    ) -> ForwardBackward: ...

    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: bool = False,
    ) -> dict[str, float] | ForwardBackward:
        """Adds the gradients of one batch as (part of) one update; nothing is dropped. Returns its metrics.

        Args:
            loss: `policy` (needs advantages or what they are computed from) or `sft`; of a critic `value`.
            batch: without `old_log_probs` the current ones serve, and the ratio is 1.
            denominator: what the loss is divided by; default: this call's own count. Halves called with the whole's
                denominator (`slimefsdp.algorithms.reduction.update_denominator`) equal one call with the whole.
            settings: of `loss`, for this call alone, such as {"policy": "cispo", "clip_high": 0.3}: the policy loss and
                its parameters, `reduction`, `constant_length` and `entropy_coefficient`.
            with_log_probs: returns a `ForwardBackward`: the metrics, and the log-probs of this very pass in the order
                of the batch.

        Raises:
            BatchError: the batch does not fit the settings; no gradient was added. ConfigError: no such loss, or
                `settings` that one call cannot choose.
        """
        return self.forward_backward_async(batch, loss, denominator, settings, with_log_probs).result()

    def forward_backward_async(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: bool = False,
    ) -> Future[dict[str, float] | ForwardBackward]:
        """As `forward_backward`, returning a future."""
        require_log_probs(with_log_probs, self.role)
        own, own_settings = _copied(batch), deepcopy(settings)
        return self._start(
            RankRequest(
                "forward_backward",
                ("policy", None, None, True) if with_log_probs else (),
                check=lambda planner: planner.for_gradients(own, loss, denominator, own_settings),
            )
        )

    def optimizer_step(self, settings: UpdateSettings | None = None) -> dict[str, float]:
        """One optimiser update with the gradients gathered so far; clips by global norm, skips a non-finite one.

        Args:
            settings: of this update alone, in place of those of `optim`: learning rate, betas, eps, weight decay and
                the norm that gradients are clipped to.

        Raises:
            StateError: there are no gradients, or optim.max_skipped_updates were skipped in a row.
            ConfigError: `settings` are none, or have an `eps` under SGD.
        """
        return self.optimizer_step_async(settings).result()

    def optimizer_step_async(self, settings: UpdateSettings | None = None) -> Future[dict[str, float]]:
        """As `optimizer_step`, returning a future."""
        require_update_settings(settings)
        return self._start(RankRequest("optimizer_step", () if settings is None else (settings,)))

    def zero_grad(self) -> None:
        """Drops the gradients that forward_backward has gathered; idempotent."""
        self.zero_grad_async().result()

    def zero_grad_async(self) -> Future[None]:
        """As `zero_grad`, returning a future."""
        return self._start(RankRequest("zero_grad"))

    # ------------------------------------------------------------------ adapters

    def adapter(self, name: str) -> AdapterCalls:
        """The same calls for another adapter beside the base; that there is one is asked when it is called."""
        return AdapterCalls(self, name)

    def create_adapter(
        self, name: str, rank: int | None = None, alpha: float | None = None, seed: int | None = None
    ) -> None:
        """Makes another adapter beside the same base, at its beginning.

        Args:
            rank: at most lora.rank, which is the default.
            alpha: default: lora.alpha.
            seed: that A is drawn from; default: run.seed.

        Raises:
            ConfigError: the run has no adapters, or a value is not in its range. StateError: the name is taken.
            ResourceError: there is no memory for the adapter that was in the model.
        """
        self.create_adapter_async(name, rank, alpha, seed).result()

    def create_adapter_async(
        self, name: str, rank: int | None = None, alpha: float | None = None, seed: int | None = None
    ) -> Future[None]:
        """As `create_adapter`, returning a future."""
        require_adapter_settings(name, rank, alpha, seed)
        return self._start(RankRequest("create_adapter", (name, rank, alpha, seed), adapter=name))

    def delete_adapter(self, name: str) -> None:
        """Forgets an adapter, but for what it left on the disk.

        Raises:
            StateError: there is none of this name, or it is the run's own. ConfigError: the run has no adapters, or it
                cannot be a name.
        """
        self.delete_adapter_async(name).result()

    def delete_adapter_async(self, name: str) -> Future[None]:
        """As `delete_adapter`, returning a future."""
        require_adapter_name(name)
        return self._start(RankRequest("delete_adapter", (name,), adapter=name))

    def adapters(self) -> list[AdapterInfo]:
        """All adapters beside the base, in the order of their making.

        Raises:
            ConfigError: the run has none.
        """
        return self.adapters_async().result()

    def adapters_async(self) -> Future[list[AdapterInfo]]:
        """As `adapters`, returning a future."""
        return self._start(RankRequest("adapters"))

    # ------------------------------------------------------------------ memory

    def sleep(self, tags: Sequence[Tag] = TAGS) -> list[MemoryReport]:
        """Frees the device memory of parameters (with buffers), optimiser state and reference; idempotent.

        Returns:
            What it freed, by rank.

        Raises:
            ConfigError: there is no such tag. ResourceError: a host has no room for what goes there.
        """
        return self.sleep_async(tags).result()

    def sleep_async(self, tags: Sequence[Tag] = TAGS) -> Future[list[MemoryReport]]:
        """As `sleep`, returning a future."""
        return self._start(RankRequest("sleep", (_as_tuple(tags),), of_all_ranks=True))

    def wake_up(self, tags: Sequence[Tag] = TAGS) -> list[MemoryReport]:
        """Brings them back; idempotent. Calls that need the model do it themselves.

        Returns:
            What it brought back, by rank.

        Raises:
            ConfigError: there is no such tag. ResourceError: a device has no room for what comes back.
        """
        return self.wake_up_async(tags).result()

    def wake_up_async(self, tags: Sequence[Tag] = TAGS) -> Future[list[MemoryReport]]:
        """As `wake_up`, returning a future."""
        return self._start(RankRequest("wake_up", (_as_tuple(tags),), of_all_ranks=True))

    def memory(self) -> list[Memory]:
        """Bytes held by each rank."""
        return self.memory_async().result()

    def memory_async(self) -> Future[list[Memory]]:
        """As `memory`, returning a future."""
        return self._start(RankRequest("memory", of_all_ranks=True))

    # ------------------------------------------------------------------ looking inside

    def describe(self) -> list[Description]:
        """The sharded units of the model by rank: sizes, dtypes and layout."""
        return self.describe_async().result()

    def describe_async(self) -> Future[list[Description]]:
        """As `describe`, returning a future."""
        return self._start(RankRequest("describe", of_all_ranks=True))

    def check_sync(self) -> ReplicaCheck:
        """Whether ranks hold the same bits where they should: replicas of shards, buffers, moments, counters."""
        return self.check_sync_async().result()

    def check_sync_async(self) -> Future[ReplicaCheck]:
        """As `check_sync`, returning a future."""
        return self._start(RankRequest("check_sync"))

    def gradient_health(self) -> GradientHealth:
        """The gradients of the last update: their norm by layer, and the first parameter that was not finite.

        Raises:
            StateError: no update has been tried since the start, or since the last load.
        """
        return self.gradient_health_async().result()

    def gradient_health_async(self) -> Future[GradientHealth]:
        """As `gradient_health`, returning a future."""
        return self._start(RankRequest("gradient_health"))

    # ------------------------------------------------------------------ weights and state

    def update_weights(self, receivers: Sequence[Any], *, drop_failed: bool = False) -> SyncReport:
        """Streams the weights, in the compute dtype, to rollout engines.

        Args:
            receivers: Ray actors with `begin`, `receive` and `commit` as of `slimefsdp.weight_sync.receive.Receiver`.
            drop_failed: the update goes on without receivers that fail, which the report names; else it ends with the
                first failure.

        Raises:
            SyncError: a receiver refused, died, or did not answer within cluster.sync_timeout_s; under `drop_failed`,
                all of them. None that had begun must be sampled from until the next update.
        """
        return self.update_weights_async(receivers, drop_failed=drop_failed).result()

    def update_weights_async(self, receivers: Sequence[Any], *, drop_failed: bool = False) -> Future[SyncReport]:
        """As `update_weights`, returning a future."""
        require_receivers(receivers)
        return self._start(RankRequest("update_weights", (list(receivers), drop_failed)))

    def update_ref(self) -> None:
        """Makes the reference model equal to the actor, beside it or in a group of its own.

        Raises:
            StateError: there is none, or it is of another architecture.
            SyncError: as `update_weights`, of a reference group.
        """
        self.update_ref_async().result()

    def update_ref_async(self) -> Future[None]:
        """As `update_ref`, returning a future."""
        return self._start(RankRequest("update_ref"))

    def save(
        self,
        step: int,
        loop_state: dict[str, Any] | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes a checkpoint of everything that training continues from; committed whole or not at all.

        With `checkpoint.async_save` it returns at once, and holds this moment all the same: `finish_save` waits for it.

        Args:
            loop_state: JSON of the caller's own, which `load` returns.
            name: keeps it beside the numbered ones, until somebody removes its folder: it is not among the
                `checkpoint.keep_last`, and no `latest`.
            overwrite: in place of one that has the name already.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: it cannot be written, or the save before could not; or
                the name cannot be one, or is taken.
        """
        return self.save_async(step, loop_state, name, overwrite).result()

    def save_async(
        self,
        step: int,
        loop_state: dict[str, Any] | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> Future[Path]:
        """As `save`, returning a future."""
        check_loop_state(loop_state)  # what is nested too deep, or is no data, could not even be sent to the ranks
        if name is not None:
            require_name(name)
        more = () if name is None and not overwrite else (name, overwrite)
        return self._start(RankRequest("save", (step, deepcopy(loop_state), *more)))

    def finish_save(self) -> Path | None:
        """Waits until the save in the background is on disk; returns its folder, None if there was none.

        Raises:
            CheckpointError: it could not be written; the earlier checkpoints stand.
        """
        return self.finish_save_async().result()

    def finish_save_async(self) -> Future[Path | None]:
        """As `finish_save`, returning a future."""
        return self._start(RankRequest("finish_save"))

    def load(
        self, step: int | Literal["latest"] = "latest", name: str | None = None, weights_only: bool = False
    ) -> dict[str, Any]:
        """Restores a checkpoint, on whatever mesh wrote it; returns its loop state.

        Args:
            name: of the one that was saved under it.
            weights_only: begin from its weights, with an optimiser and counters that have taken no update.

        Raises:
            CheckpointError: there is none, or it is torn, altered, or of another model.
        """
        return self.load_async(step, name, weights_only).result()

    def load_async(
        self, step: int | Literal["latest"] = "latest", name: str | None = None, weights_only: bool = False
    ) -> Future[dict[str, Any]]:
        """As `load`, returning a future."""
        if name is not None:
            require_name(name)
        more = (name, True) if weights_only else () if name is None else (name,)
        return self._start(RankRequest("load", (step, *more)))

    def restored(self) -> LoadReport | None:
        """What the last `load` took and passed over; None before the first one."""
        return self.restored_async().result()

    def restored_async(self) -> Future[LoadReport | None]:
        """As `restored`, returning a future."""
        return self._start(RankRequest("restored"))

    def export_hf(self, path: str | Path, dtype: str | None = None) -> Path:
        """Writes the weights as a folder for `AutoModelForCausalLM`, of a critic for `AutoModelForTokenClassification`.

        Args:
            dtype: of the tensors, e.g. `bfloat16`; None: the master dtype.

        Raises:
            ConfigError: no such dtype. CheckpointError: the folder exists already, cannot be written, or a value is
                infinite in `dtype`.
        """
        return self.export_hf_async(path, dtype).result()

    def export_hf_async(self, path: str | Path, dtype: str | None = None) -> Future[Path]:
        """As `export_hf`, returning a future."""
        return self._start(RankRequest("export_hf", (path, dtype)))

    def export_adapter(self, path: str | Path) -> Path:
        """Writes the adapters alone as a folder for `PeftModel.from_pretrained`, in the master dtype.

        Raises:
            StateError: nothing has adapters. CheckpointError: the folder exists already, or cannot be written.
        """
        return self.export_adapter_async(path).result()

    def export_adapter_async(self, path: str | Path) -> Future[Path]:
        """As `export_adapter`, returning a future."""
        return self._start(RankRequest("export_adapter", (path,)))


class AdapterCalls(GroupCalls):
    """The calls of a group for one of its adapters, as `GroupCalls.adapter` gives them.

    Calls for one adapter run in the order in which they were made; adapters whose calls wait take turns, a call each.
    """

    def __init__(self, group: GroupCalls, name: str) -> None:
        require_adapter_name(name)
        self.name, self.role = name, group.role
        self._group = group

    def __repr__(self) -> str:
        return f"AdapterCalls({self.name} of {self._group!r})"

    def _start(self, request: RankRequest) -> Future[Any]:
        # None where it is the run's own: one adapter has one name, and one place in the order of calls
        own = None if self.name == DEFAULT_ADAPTER else self.name
        return self._group._start(replace(request, adapter=request.adapter or own))


def _as_tuple(tags: Any) -> Any:
    """The tags as they are now; what is no list of them is refused by the ranks."""
    return tuple(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else tags


def _copied(batch: RolloutBatch) -> RolloutBatch:
    """The batch as it is now; what is none is refused later, like any other mistake."""
    return batch.copy() if isinstance(batch, RolloutBatch) else batch
