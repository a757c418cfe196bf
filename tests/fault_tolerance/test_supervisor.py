"""The call log of a supervised group: whatever is lost whenever, every caller sees what an unlost group would say.

The group is scripted here, a model whose state is the list of what was done to it; tests/faults has real ranks.
"""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
import threading
import warnings
import weakref
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.fault_tolerance import call_log, recovery, supervisor
from actors.fault_tolerance.recovery import MAX_WITHOUT_PROGRESS, RECOVERIES
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers.group_calls import RankRequest, submit
from slimefsdp.batching.plan import Plan
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, CheckpointError, ResourceError, SlimeError, StateError, SyncError, WorkerDied
from slimefsdp.rpc import JobCheckpoint
from slimefsdp.training.prepare import PreparedBatch
from tests.support.process_resources import files_up_to, unnamed_files
from tests.support.refusals import names, refused
from tests.support.tiers import examples
from tests.support.waiting import PATIENCE_S, wait_until

BUG = 1000
Disk = dict[tuple[str, int | str], dict[str, Any]]


class Ref:
    """Stands for a reference to a batch in Ray's object store."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


NO_PLAN = Plan((), 0, 0, 0, 0)


class Scripted:
    """What WorkerGroup does, in one process: its ranks are lost at the times that a script names.

    Args:
        losses: numbers of calls, counted over all launches, whose processes end before they answer.
        in_background: a save is on disk when the next call begins, as with checkpoint.async_save.
    """

    def __init__(self, losses: set[int], *, keep_last: int = 2, max_restarts: int = 1000, with_reference: bool = False):
        self.losses, self.keep_last, self.with_reference = losses, keep_last, with_reference
        self.calls = self.launches = 0
        self.disk: Disk = {}
        self.in_background = False
        self.may_plan = threading.Event()  # cleared: what plans batches waits
        self.may_plan.set()
        self.drift = 0  # of what ranks answer, from what others answered
        self.levels_given: list[Any] = []  # of sharding, by launch
        self.stored = weakref.WeakSet[Ref]()  # batches that the object store has to keep
        sections = {
            "cluster": {"max_restarts": max_restarts},
            "checkpoint": {"keep_last": keep_last, "async_save": False},
            "run": {"dir": None},
        }
        self.config: Any = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()})

    def launch(self, config: Any, places: Any = None, sharding: Any = None) -> Any:
        self.launches += 1
        self.levels_given.append(dict(sharding))
        self.group = ScriptedGroup(self, "actor")  # the ranks there are now, to look at
        return self.group

    def put(self, batch: Any) -> Ref:
        reference = Ref(batch)
        self.stored.add(reference)
        return reference

    def take_place(self, patch: pytest.MonkeyPatch) -> Any:
        """A supervised group of this, and a batch as an object store has it: here it is known by its one reward."""
        patch.setattr(supervisor, "WorkerGroup", self)
        patch.setattr(
            call_log,
            "fetch",
            lambda ref, field: PreparedBatch(
                RolloutBatch(tokens=[1, 1], lengths=[2], response_lengths=[1], rewards=[ref.batch]), NO_PLAN
            ),
        )
        patch.setattr(supervisor, "store", lambda work, field: self.put(int(work.batch.rewards[0])))
        return SupervisedGroup.launch(self.config)


class Planner:
    """Stands for a BatchPlanner: a batch is known by its number."""

    def __init__(self, script: Scripted) -> None:
        self.script = script

    def for_training(self, batch: Any, **options: Any) -> Any:
        if batch == "bad":
            raise BatchError("bad", field="batch")

        def planned() -> Any:
            assert self.script.may_plan.wait(PATIENCE_S)
            return batch

        return planned

    for_forward = for_gradients = for_training


class ScriptedGroup:
    sharding = MappingProxyType({"actor": "optimizer", "critic": "full"})  # of ranks that had less memory free later

    def __init__(self, script: Scripted, role: str, actor: ScriptedGroup | None = None) -> None:
        self.script, self.role, self.config = script, role, script.config
        self.state: tuple[Any, ...] = ()
        self.gradients: tuple[int, ...] = ()  # of forward_backward, until the next optimizer_step
        self.loaded: int | None = None
        self.is_lost = False
        self.actor = actor or self
        self.pending: list[tuple[tuple[str, int | str], dict[str, Any]]] = []  # saves that are not on disk
        self.adapter: str | None = None  # whose state is here; that of the others waits
        self.waiting: dict[str | None, tuple[Any, ...]] = {}
        self.critic = ScriptedGroup(script, "critic", self) if actor is None else None
        is_referred_to = actor is None and script.with_reference
        self.reference_group = ScriptedGroup(script, "ref", self) if is_referred_to else None

    def check(self, request: RankRequest) -> Any:
        return request.call.planning(Planner(self.script), request.arguments)

    def prepared(self, request: RankRequest, planning: Any) -> RankRequest:
        if planning is None:
            return request
        batch = planning()
        if self.reference_group is not None and self.reference_group.dies_in_forward:
            self.reference_group.dies_in_forward = False
            raise WorkerDied("gone", rank=0, call="compute_log_probs")
        return request.having(batch=self.script.put(batch))

    def await_weights(self) -> None:
        """They are there: calls run at once."""

    def begin(self, request: RankRequest) -> Any:
        """Runs at once, in order, as the ranks of a group do; the result waits."""
        script = self.script
        script.calls += 1
        self.actor.is_lost |= script.calls in script.losses
        outcome: Any = WorkerDied("gone", rank=1, call=request.name)
        if not self.actor.is_lost:
            try:
                if request.name not in ("create_adapter", "delete_adapter"):
                    self._use(request.adapter)
                values = {k: v.batch if isinstance(v, Ref) else v for k, v in request.arguments.items()}
                outcome = getattr(self, f"_{request.name}")(**values)
            except (SlimeError, ZeroDivisionError) as error:
                outcome = error

        def result() -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return SimpleNamespace(result=result)

    def end(self) -> None:
        self.actor.is_lost = True

    shutdown = end

    def _use(self, adapter: str | None) -> None:
        if adapter == self.adapter:
            return
        if adapter not in self.waiting:
            raise StateError("no such adapter", field="adapter")
        self.waiting[self.adapter] = self.state, self.gradients, self.loaded
        self.state, self.gradients, self.loaded = self.waiting.pop(adapter)
        self.adapter = adapter

    def _create_adapter(self, name: str, rank: int | None, alpha: float | None, seed: int) -> None:
        if name == self.adapter or name in self.waiting:
            raise StateError("taken", field="name")
        self.waiting[name] = ((name, seed),), (), None

    def _delete_adapter(self, name: str) -> None:
        self._use(None) if name == self.adapter else None
        if self.waiting.pop(name, None) is None:
            raise StateError("no such adapter", field="name")

    @property
    def place(self) -> str:
        """Where the disk has what is saved."""
        return self.role if self.adapter is None else f"{self.role}/{self.adapter}"

    def _train_step(self, batch: int, **options: Any) -> dict[str, float]:
        if self.gradients:
            raise StateError("gradients wait", field="train_step")
        self.state = (*self.state, batch)
        if batch < 0:
            raise StateError("stopped on the way")
        if batch == 0:
            self.actor.is_lost = True
            raise ResourceError("out of memory")
        if batch == BUG:
            raise ZeroDivisionError  # the ranks live on for a moment
        return {"loss": float(hash(self.state) + self.script.drift), "grad_norm": math.nan}

    def _compute_log_probs(self, batch: int, model: str = "actor") -> int:
        return hash((self.state, batch))

    _compute_values = _compute_log_probs

    def _forward_backward(self, batch: int, **options: Any) -> dict[str, float]:
        if batch == 0:
            self.gradients, self.actor.is_lost = (), True
            raise ResourceError("out of memory")
        self.gradients += (batch,)
        return {"loss": float(hash((self.state, self.gradients)))}

    def _optimizer_step(self, settings: None) -> dict[str, float]:
        if not self.gradients:
            raise StateError("no gradients")
        self.state, self.gradients = (*self.state, self.gradients), ()
        return {"grad_norm": float(hash(self.state))}

    def _zero_grad(self) -> None:
        self.gradients = ()

    def _update_ref(self) -> None:
        assert self.reference_group is not None
        if self.reference_group.dies_in_update:
            self.reference_group.dies_in_update, self.reference_group.is_dead = False, True
            raise SyncError("weights did not arrive")
        self.reference_group.state = self.state

    dies_in_update = dies_in_forward = is_dead = False  # of a reference group

    def health(self) -> list[Any]:
        return [WorkerDied("gone", rank=0, call="health")] if self.is_dead else [None]

    @property
    def receivers(self) -> list[Any]:
        return [self]

    receive = commit = begin

    def _update_weights(self, receivers: list[Any], drop_failed: bool) -> tuple[Any, ...]:
        return self.state

    def _save(self, step: int, loop_state: None, name: str | None, overwrite: bool, job: JobCheckpoint) -> None:
        """Writes a checkpoint of the whole job, or of the adapter that is here."""
        assert self.actor is self and step < 100
        if name is None:
            written = [key for key in self.script.disk if key[0] == self.place and isinstance(key[1], int)]
            for key in sorted(written)[: -self.script.keep_last]:
                del self.script.disk[key]
        self._commit()
        key: tuple[str, int | str] = (self.place, step if name is None else name)
        there = self.script.disk.get(key)
        if name is not None and there is not None and not overwrite and there["id"] != job.save_id:
            raise CheckpointError("taken", field="name")
        states = {group.role: group.state for group in self._saved_together()}
        self.pending.append((key, {"id": job.save_id, "states": states}))
        if not self.script.in_background:
            self._commit()

    def _commit(self) -> None:
        self.script.disk.update(self.pending)
        self.pending = []

    def _load(self, step: Any, name: str | None = None, weights_only: bool = False, job: Any = None) -> None:
        if name is not None:
            self._commit()
            step = name
        there = self.script.disk.get((self.place, step))
        if there is None:
            raise CheckpointError(f"no checkpoint of step {step}", field="name" if name else "step")
        if job is not None and there["id"] != job.save_id:
            raise CheckpointError("another save", field="step")
        for group in self._saved_together():
            group.state, group.gradients, group.loaded = there["states"][group.role], (), step

    def _saved_together(self) -> list[ScriptedGroup]:
        whole = [self, self.critic, self.reference_group] if self.adapter is None else [self]
        return [group for group in whole if group is not None]

    def _restored(self) -> Any:
        return SimpleNamespace(step=self.loaded)

    def _finish_save(self) -> None:
        self._commit()


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda script: script.take_place(monkeypatch)


def outcome_of(call: Any, *args: Any) -> Any:
    """What a caller sees of a call, an error that it would catch, too."""
    try:
        return call(*args)
    except (StateError, CheckpointError) as error:
        return type(error)


def job(group: Any, actions: list[tuple[str, int]]) -> list[Any]:
    """What the caller sees of a sequence of calls, each waited for."""
    seen: list[Any] = []
    whole = group
    for number, (name, batch) in enumerate(actions):
        group = whole
        if name.startswith("adapter."):
            name, group = name.removeprefix("adapter."), whole.adapter(f"adapter{batch % 2}")
        target = group.critic if name.startswith("critic.") else group
        match name:
            case "save" | "save again":  # a step of the past once more, with its number
                seen.append(outcome_of(group.save, 0 if name == "save again" else number))
            case "save under a name" | "overwrite a name":
                is_over = name == "overwrite a name"
                seen.append(outcome_of(lambda: group.save(number, None, f"name{batch % 3}", is_over)))  # noqa: B023
            case "load a name":
                seen.append(outcome_of(lambda: group.load(name=f"name{batch % 3}")))  # noqa: B023
            case "load what is not there":
                seen.append(outcome_of(group.load, 99))
            case "create_adapter" | "delete_adapter":
                more = (None, None, number) if name == "create_adapter" else ()
                seen.append(outcome_of(getattr(group, name), f"adapter{batch % 2}", *more))
            case "update_ref" | "optimizer_step" | "zero_grad" | "critic.optimizer_step":
                seen.append(outcome_of(getattr(target, name.removeprefix("critic."))))
            case "update_weights":
                seen.append(outcome_of(group.update_weights, []))
            case _:
                seen.append(outcome_of(getattr(target, name.removeprefix("critic.")), batch))
    return seen


CALLS = ["train_step", "critic.train_step", "compute_log_probs", "critic.compute_values", "save", "update_weights"]
ODD_CALLS = ["save again", "load what is not there", "forward_backward", "critic.forward_backward"]
ODD_CALLS += ["critic.optimizer_step", "save under a name", "overwrite a name", "load a name"]
ACTIONS = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(-1, 5).filter(bool)), max_size=25)
ODD_ACTIONS = st.lists(
    st.tuples(st.sampled_from([*CALLS, *ODD_CALLS, "optimizer_step", "zero_grad"]), st.integers(-1, 5).filter(bool)),
    max_size=25,
)
OF_ADAPTERS = ["train_step", "compute_log_probs", "save", "save under a name", "load a name", "optimizer_step"]
OF_ADAPTERS += ["forward_backward", "zero_grad", "overwrite a name", "load what is not there"]
ADAPTER_CALLS = [*(f"adapter.{name}" for name in OF_ADAPTERS), "create_adapter", "create_adapter", "delete_adapter"]
ADAPTER_ACTIONS = st.lists(
    st.tuples(st.sampled_from([*ADAPTER_CALLS, *OF_ADAPTERS]), st.integers(-1, 5).filter(bool)), max_size=40
)
LOSSES = st.sets(st.integers(1, 80), max_size=12)
NO_WAY_BACK = ("checkpoint", "step")  # none that would do was saved, or it is gone


def after(actions: list[tuple[str, int]], script: Scripted) -> tuple[Any, ...]:
    """Returns what callers saw, the state of each adapter on the ranks, and that of the critic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "MAX_WITHOUT_PROGRESS", 100)
        group = script.take_place(patch)
        seen = job(group, actions)
        ranks = script.group
        # which adapter the ranks used last does not matter: the next call for another one swaps them
        states = {**ranks.waiting, ranks.adapter: (ranks.state, ranks.gradients, ranks.loaded)}
        adapters = {name: (state, gradients) for name, (state, gradients, _) in states.items()}
        assert all(not recovery.differences for recovery in group.recoveries)
        return seen, adapters, ranks.critic.state


@given(actions=ACTIONS, losses=LOSSES, keep_last=st.integers(1, 3), in_background=st.booleans())
def test_every_caller_sees_what_an_unlost_group_says(
    actions: list[tuple[str, int]], losses: set[int], keep_last: int, in_background: bool
) -> None:
    straight, struck = Scripted(set(), keep_last=keep_last), Scripted(losses, keep_last=keep_last)
    straight.in_background = struck.in_background = in_background
    assert after(actions, straight) == after(actions, struck)


def test_ranks_that_replace_others_keep_their_levels_of_sharding(supervised: Any) -> None:
    group = supervised(script := Scripted({1, 2}))
    job(group, [("train_step", number) for number in (1, 2, 3)])
    assert script.levels_given == [{}, ScriptedGroup.sharding, ScriptedGroup.sharding]


def test_what_else_is_on_the_devices_leaves_them_before_ranks_are_started(supervised: Any) -> None:
    straight = job(supervised(Scripted(set())), [("train_step", number) for number in (1, 2, 3, 4)])
    script = Scripted({3, 5})
    group = supervised(script)
    seen: list[tuple[int, bool]] = []
    group.before_relaunch(lambda: seen.append((script.launches, script.group.is_lost)))
    assert job(group, [("train_step", number) for number in (1, 2, 3, 4)]) == straight
    assert seen == [(1, True), (2, True)] and script.launches == 3, "each before the next launch"


def assert_made_good(actions: list[tuple[str, int]], struck: Scripted) -> None:
    """What callers saw is what an unlost group says, unless no checkpoint leads back."""
    expected = after(actions, Scripted(set(), keep_last=struck.keep_last))
    try:
        found = after(actions, struck)
    except CheckpointError as error:
        assert error.field in NO_WAY_BACK
    else:
        assert found == expected


SAVED_TWICE: list[tuple[str, int]] = [  # under one step, which is then deleted, so that all calls are made again
    ("train_step", 1), ("save again", 1), ("critic.train_step", 1), ("save again", 1), *[("train_step", 1)] * 7,
    ("save", 1), ("save", 1), ("train_step", 1), ("save", 1),
]  # fmt: skip


REFUSED_CREATION: list[tuple[str, int]] = [
    *[("adapter.train_step", 1)] * 2, *[("adapter.load a name", 1)] * 4, ("compute_log_probs", 2), ("create_adapter", 1)
]  # fmt: skip


@given(actions=ADAPTER_ACTIONS, losses=LOSSES, keep_last=st.integers(1, 3))
@example(actions=REFUSED_CREATION, losses={14}, keep_last=1)
def test_calls_for_several_adapters_are_made_good_or_the_job_ends(
    actions: list[tuple[str, int]], losses: set[int], keep_last: int
) -> None:
    made = [("create_adapter", 2), ("create_adapter", 1), *actions]
    assert_made_good(made, Scripted(losses, keep_last=keep_last))


TWO_ADAPTERS: list[tuple[str, int]] = [
    ("create_adapter", 2), ("create_adapter", 1), ("train_step", 9),
    *[("adapter.train_step", 1), ("adapter.train_step", 2), ("adapter.save", 2), ("adapter.save", 1)] * 3,
    ("adapter.train_step", 1), ("adapter.forward_backward", 2), ("adapter.save", 2),
    ("adapter.save under a name", 1), ("delete_adapter", 1), ("create_adapter", 1), ("adapter.train_step", 1),
    ("adapter.optimizer_step", 2), ("save", 0), ("adapter.load a name", 1), ("train_step", 8),
]  # fmt: skip


@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("lost", range(1, 36))
def test_adapters_come_back_each_from_its_own_checkpoint(lost: int, keep_last: int) -> None:
    """Whichever call is lost, also the first one after the recovery."""
    expected = after(TWO_ADAPTERS, Scripted(set(), keep_last=keep_last))
    assert after(TWO_ADAPTERS, Scripted({lost}, keep_last=keep_last)) == expected
    assert after(TWO_ADAPTERS, Scripted({lost, lost + 3}, keep_last=keep_last)) == expected


@given(actions=ODD_ACTIONS, losses=LOSSES)
@example(actions=SAVED_TWICE, losses={1, 2, 17, 31, 42, 58, 63})
def test_calls_in_any_order_are_made_good_or_the_job_ends(actions: list[tuple[str, int]], losses: set[int]) -> None:
    assert_made_good(actions, Scripted(losses, keep_last=3))


@given(actions=ACTIONS, lost_at=st.integers(1, 60))
def test_calls_that_nobody_has_waited_for_are_answered_in_their_order(
    actions: list[tuple[str, int]], lost_at: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        answers = []
        for losses in (set(), {lost_at}):
            script = Scripted(losses)
            group = script.take_place(patch)
            futures = []
            for number, (name, batch) in enumerate(actions):
                target = group.critic if name.startswith("critic.") else group
                argument = {"save": number, "update_weights": []}.get(name, abs(batch))
                futures.append(submit(getattr(target, name.removeprefix("critic.")), argument))
            answers.append([future.result() for future in futures])
        assert answers[0] == answers[1]


@examples(60)
@given(actions=ODD_ACTIONS, losses=LOSSES)
def test_calls_whose_batches_are_on_the_disk_are_made_again_as_others(
    actions: list[tuple[str, int]], losses: set[int]
) -> None:
    struck = Scripted(losses, keep_last=3)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_log, "KEPT_IN_STORE", 1)
        struck.config.run.dir = Path(folder)
        assert_made_good(actions, struck)


@pytest.mark.parametrize("interval", [1, 7, 30, None])
def test_the_object_store_holds_four_batches_whatever_the_interval_and_a_recovery_gets_all(
    supervised: Any, tmp_path: Path, interval: int | None
) -> None:
    script = Scripted(set(), keep_last=2)
    script.config.run.dir = tmp_path
    group = supervised(script)
    steps = range(1, 100)
    for step in steps:
        group.train_step(step)
        assert len(script.stored) <= 4
        if interval is not None and step % interval == 0:
            group.save(step)
        assert len(unnamed_files(tmp_path)) <= 5, "one between two of the checkpoints that the call log reaches back to"
    script.losses = {script.calls + 1}
    group.train_step(100)
    assert script.group.state == (*steps, 100)
    (recovery,) = group.recoveries
    assert recovery.calls_repeated == (99 if interval is None else 99 % interval)
    assert recovery.differences == () and len(script.stored) <= 4
    assert [path.name for path in tmp_path.iterdir()] == [RECOVERIES], "files have no name, so none stays behind"
    group.shutdown()
    gc.collect()  # the error of the loss and the frames that it went through
    assert not script.stored and not unnamed_files(tmp_path)


def test_batches_of_calls_that_nobody_has_waited_for_come_back_from_the_disk_too(
    supervised: Any, tmp_path: Path
) -> None:
    script = Scripted({20})
    script.config.run.dir = tmp_path
    group = supervised(script)
    futures = [submit(group.train_step, batch) for batch in range(1, 31)]
    assert wait_until(lambda: script.calls == 30 and len(script.stored) <= 4) and unnamed_files(tmp_path)
    assert len([future.result() for future in futures]) == 30
    assert script.group.state == tuple(range(1, 31)) and len(group.recoveries) == 1


def test_without_a_run_dir_batches_stay_in_the_object_store(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    job(group, [("train_step", 1)] * 9)
    assert len(script.stored) == 9
    group.shutdown()
    assert not script.stored


def test_batches_that_the_disk_refuses_stay_in_the_object_store_until_it_takes_them(
    supervised: Any, tmp_path: Path
) -> None:
    script = Scripted(set())
    script.config.run.dir = tmp_path
    group = supervised(script)
    with pytest.warns(UserWarning) as caught, files_up_to(1000):
        job(group, [("train_step", step) for step in range(1, 21)])
    assert len(caught) == 1, "once, and not at every call"
    assert 4 < len(script.stored) < 20, "some were there before the disk was full"
    script.losses = {script.calls + 1}
    with warnings.catch_warnings(action="error"):
        group.train_step(21)
        assert script.group.state == tuple(range(1, 22))
        assert len(script.stored) <= 4


def test_a_run_dir_that_cannot_be_written_costs_a_warning(supervised: Any, tmp_path: Path) -> None:
    script = Scripted(set())
    script.config.run.dir = tmp_path / "file"
    (tmp_path / "file").write_text("in the way")
    group = supervised(script)
    with pytest.warns(UserWarning):
        job(group, [("train_step", step) for step in range(1, 10)])
    script.losses = {script.calls + 1}
    group.train_step(10)
    assert script.group.state == tuple(range(1, 11))


def test_a_batch_that_the_disk_gives_back_otherwise_ends_the_job(supervised: Any, tmp_path: Path) -> None:
    script = Scripted(set())
    script.config.run.dir = tmp_path
    group = supervised(script)
    job(group, [("train_step", step) for step in range(1, 10)])
    (descriptor,) = unnamed_files(tmp_path)
    (last,) = os.pread(descriptor, 1, os.fstat(descriptor).st_size - 1)
    os.pwrite(descriptor, bytes([last ^ 1]), os.fstat(descriptor).st_size - 1)
    script.losses = {script.calls + 1}
    for call in (lambda: group.train_step(10), lambda: group.save(1)):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert caught.value.field == "run.dir" and caught.value.hint
    assert script.group.state != tuple(range(1, 11))


def test_a_loss_costs_the_calls_since_the_newest_checkpoint_and_no_more(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    job(group, [("train_step", 1), ("save", 0), ("train_step", 2), ("compute_log_probs", 1), ("train_step", 3)])
    script.losses = {script.calls + 1}
    group.train_step(4)
    (recovery,) = group.recoveries
    assert (recovery.checkpoint_step, recovery.calls_repeated, recovery.rank) == (1, 2, 1)
    assert script.launches == 2


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(supervised: Any, capsys: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    job(group, [("train_step", 1), ("save", 0), ("train_step", 2), ("save", 0), ("train_step", 3)])
    del script.disk["actor", 3]
    script.losses = {script.calls + 1}
    group.train_step(4)
    assert group.recoveries[0].checkpoint_step == 1
    assert script.group.state == (1, 2, 3, 4)
    assert ("actor", 3) in script.disk, "it was saved again on the way"
    assert "no checkpoint of step 3" in capsys.readouterr().err, "what ScriptedGroup says of it"


def test_a_save_in_the_background_that_was_lost_is_no_checkpoint(supervised: Any) -> None:
    script = Scripted(set(), keep_last=1)
    group = supervised(script)
    script.in_background = True
    for step in range(6):
        group.train_step(step + 1)
        group.save(step)
    script.losses = {script.calls + 1}
    group.train_step(7)
    assert script.group.state == (1, 2, 3, 4, 5, 6, 7)


def test_the_call_log_is_no_longer_than_the_checkpoints_that_are_kept(supervised: Any) -> None:
    script = Scripted(set(), keep_last=2)
    group = supervised(script)
    job(group, [("train_step", 1), ("compute_log_probs", 1), ("save", 0)] * 20)
    assert 0 < len(script.stored) <= 2 * (2 + 2)  # of each checkpoint that is kept and two more, what could be repeated


def test_bad_input_and_an_end_for_want_of_memory_are_not_repeated(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    group.train_step(1)
    with pytest.raises(BatchError):
        group.train_step("bad")
    with pytest.raises(ResourceError):
        group.train_step(0)
    group.train_step(2)  # the ranks ended with the error
    assert script.group.state == (1, 2) and len(group.recoveries) == 1


def test_gradients_that_waited_at_a_save_are_gathered_again_behind_it(supervised: Any) -> None:
    script = Scripted(set(), keep_last=1)
    group = supervised(script)
    group.save(0)
    group.train_step(1)
    group.forward_backward(2)
    with pytest.raises(StateError):
        group.train_step(3)
    group.critic.forward_backward(4)
    group.save(1)  # without the gradients, as all are
    script.losses = {script.calls + 1}
    group.optimizer_step()
    assert script.group.state == (1, (2,)) and script.group.critic.gradients == (4,)
    assert [(recovery.checkpoint_step, recovery.calls_repeated) for recovery in group.recoveries] == [(1, 2)]


def test_gradients_that_an_error_dropped_do_not_come_back_with_a_recovery(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    group.train_step(1)
    group.forward_backward(2)
    with pytest.raises(ResourceError):
        group.forward_backward(0)
    group.train_step(3)  # on new ranks
    assert script.group.state == (1, 3) and len(group.recoveries) == 1


def test_a_fault_that_comes_back_ends_the_run_with_its_cause(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    group.train_step(1)
    script.losses = set(range(script.calls + 1, 1000))
    with pytest.raises(WorkerDied, match="gone") as caught:
        group.train_step(2)
    assert names(str(caught.value.hint), MAX_WITHOUT_PROGRESS)
    assert script.launches == 1 + MAX_WITHOUT_PROGRESS


@pytest.mark.parametrize("most", [0, 2])
def test_no_more_ranks_are_replaced_than_the_settings_allow(supervised: Any, most: int) -> None:
    script = Scripted(set(), max_restarts=most)
    group = supervised(script)
    for _ in range(most):
        script.losses = {script.calls + 1}
        group.train_step(1)
    script.losses = {script.calls + 1}
    with pytest.raises(WorkerDied) as caught:
        group.train_step(1)
    assert script.launches == 1 + most
    assert most == 0 or "cluster.max_restarts=2" in str(caught.value.hint)


def test_a_replay_that_comes_out_otherwise_is_said(supervised: Any, tmp_path: Path) -> None:
    script = Scripted(set())
    script.config.run.dir = tmp_path
    group = supervised(script)
    group.train_step(1)
    script.drift = 10**17  # more than a float rounds away
    script.losses = {script.calls + 1}
    group.train_step(2)
    (line,) = (tmp_path / RECOVERIES).read_text().splitlines()
    (difference,) = json.loads(line)["differences"]
    assert "loss" in difference and "train_step" in difference


def test_a_reference_group_is_again_what_it_was(supervised: Any) -> None:
    script = Scripted(set(), with_reference=True)
    group = supervised(script)
    job(group, [("train_step", 1), ("update_ref", 0), ("save", 0), ("train_step", 2), ("save", 0)])
    for expected in [(1, 2, 3), (1, 2, 3, 4)]:
        script.losses = {script.calls + 1}
        group.train_step(len(expected))
        assert script.group.state == expected
        assert script.group.reference_group.state == (1,), "as at update_ref, before the policy was trained further"
    assert [recovery.checkpoint_step for recovery in group.recoveries] == [4, 4]


def test_a_reference_rank_that_is_lost_in_update_ref_is_replaced(supervised: Any) -> None:
    script = Scripted(set(), with_reference=True)
    group = supervised(script)
    group.train_step(1)
    script.group.reference_group.dies_in_update = True
    group.update_ref()
    assert len(group.recoveries) == 1
    assert script.group.reference_group.state == script.group.state == (1,)
    with refused(StateError, "receivers"):
        group.update_weights(group.reference_group.receivers)


def test_a_reference_rank_that_is_lost_while_it_completes_a_batch_is_replaced(supervised: Any) -> None:
    script = Scripted(set(), with_reference=True)
    group = supervised(script)
    group.train_step(1)
    script.group.reference_group.dies_in_forward = True
    futures = [submit(group.train_step, 2), submit(group.train_step, 3)]
    assert len([future.result() for future in futures]) == 2
    assert script.group.state == (1, 2, 3) and len(group.recoveries) == 1


def test_calls_are_queued_while_one_is_planned_and_begin_on_the_ranks_that_there_are_by_then(supervised: Any) -> None:
    script = Scripted({2})
    group = supervised(script)
    group.train_step(1)
    lost = submit(group.train_step, 2)
    assert wait_until(lambda: script.calls == 2)
    script.may_plan.clear()
    queued = [submit(group.train_step, 3), submit(group.compute_log_probs, 4), submit(group.save, 5)]
    with pytest.raises(BatchError):
        submit(group.train_step, "bad")
    assert lost.result() and len(group.recoveries) == 1
    assert script.group.state == (1, 2) and script.calls == 4, "two calls made again, and none that is queued"
    script.may_plan.set()
    results = [future.result() for future in queued]
    assert script.group.state == (1, 2, 3) and results[1] == hash(((1, 2, 3), 4)) and ("actor", 5) in script.disk


def test_calls_that_are_queued_at_a_shutdown_are_refused(supervised: Any) -> None:
    script = Scripted(set(), with_reference=True)
    group = supervised(script)
    script.may_plan.clear()
    queued = submit(group.train_step, 1)
    group.shutdown()
    script.group.reference_group.dies_in_forward = True  # as it does when its processes are ended
    script.may_plan.set()
    with pytest.raises(WorkerDied):
        queued.result()
    assert script.launches == 1 and script.calls == 0


def test_ranks_that_end_after_a_bug_get_no_other_call(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    group.train_step(1)
    with pytest.raises(ZeroDivisionError):
        group.train_step(BUG)
    group.save(3)  # on ranks that have half a step, which are about to end, it would be kept
    assert script.group.state == (1,) and len(group.recoveries) == 1


def test_after_a_recovery_that_failed_nothing_is_answered_from_another_state(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    job(group, [("train_step", 1), ("save", 0)] * 5)
    script.disk.clear()
    script.losses = {script.calls + 1}
    pending = submit(group.train_step, 2)
    for call in (pending.result, pending.result, lambda: group.train_step(3), lambda: group.save(7)):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert caught.value.field == "step" and "gone" in "".join(caught.value.others), "what it began with"


def test_a_line_that_cannot_be_written_does_not_fail_a_recovery(supervised: Any, tmp_path: Path, capsys: Any) -> None:
    script = Scripted(set())
    script.config.run.dir = tmp_path / "file"
    (tmp_path / "file").write_text("in the way")
    group = supervised(script)
    script.losses = {script.calls + 1}
    group.train_step(1)
    assert len(group.recoveries) == 1 and RECOVERIES in capsys.readouterr().err
