"""The journal of a supervised group: whatever is lost whenever, every caller sees what an unlost group would have said.

The group is scripted here, a model whose state is the list of what was done to it; tests/faults has real ranks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import restarts, supervisor
from actors.recovery import RECOVERIES
from actors.restarts import MAX_WITHOUT_PROGRESS
from actors.supervisor import SupervisedGroup
from slimefsdp.errors import BatchError, CheckpointError, ResourceError, SlimeError, StateError, SyncError, WorkerDied

BUG = 1000
Disk = dict[tuple[str, int], tuple[Any, ...]]


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
        placement = "group" if with_reference else "colocated"
        sections = {
            "cluster": {"max_restarts": max_restarts},
            "checkpoint": {"keep_last": keep_last},
            "reference": {"placement": placement},
            "run": {"dir": None},
        }
        self.config: Any = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()})

    def launch(self, config: Any, places: Any = None) -> Any:
        self.launches += 1
        return ScriptedGroup(self, "actor")


class ScriptedGroup:
    def __init__(self, script: Scripted, role: str, actor: ScriptedGroup | None = None) -> None:
        self.script, self.role, self.config = script, role, script.config
        self.state: tuple[Any, ...] = ()
        self.gradients: tuple[int, ...] = ()  # of forward_backward, until the next optimizer_step
        self.loaded: int | None = None
        self.is_lost = False
        self.actor = actor or self
        self.pending: list[tuple[tuple[str, int], Any]] = []  # saves that are not on disk
        self.critic = ScriptedGroup(script, "critic", self) if actor is None else None
        is_referred_to = actor is None and script.with_reference
        self.reference_group = ScriptedGroup(script, "ref", self) if is_referred_to else None

    def prepare(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args == ("bad",):
            raise BatchError("bad", field="batch")
        return args, kwargs

    def begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs at once, in order, as the ranks of a group do; the result waits."""
        script = self.script
        script.calls += 1
        self.actor.is_lost |= script.calls in script.losses
        outcome: Any = WorkerDied("gone", rank=1, phase=name)
        if not self.actor.is_lost:
            try:
                outcome = getattr(self, f"_{name}")(*args, **kwargs)
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

    def _train_step(self, batch: int) -> dict[str, float]:
        self.state, self.gradients = (*self.state, batch), ()  # it drops what was gathered before
        if batch < 0:
            raise StateError("stopped on the way")
        if batch == 0:
            self.actor.is_lost = True
            raise ResourceError("out of memory")
        if batch == BUG:
            raise ZeroDivisionError  # the ranks live on for a moment
        return {"loss": float(hash(self.state)), "grad_norm": math.nan}

    def _compute_log_probs(self, batch: int) -> int:
        return hash((self.state, batch))

    def _forward_backward(self, batch: int) -> dict[str, float]:
        self.gradients += (batch,)
        return {"loss": float(hash((self.state, self.gradients)))}

    def _optimizer_step(self) -> dict[str, float]:
        if not self.gradients:
            raise StateError("no gradients")
        self.state, self.gradients = (*self.state, self.gradients), ()
        return {"grad_norm": float(hash(self.state))}

    def _update_ref(self) -> None:
        assert self.reference_group is not None
        if self.reference_group.dies_in_update:
            self.reference_group.dies_in_update, self.reference_group.is_dead = False, True
            raise SyncError("weights did not arrive")
        self.reference_group.state = self.state

    dies_in_update = is_dead = False  # of a reference group

    def health(self) -> list[Any]:
        return [WorkerDied("gone", rank=0, phase="health")] if self.is_dead else [None]

    @property
    def receivers(self) -> list[Any]:
        return [self]

    def _update_weights(self, receivers: list[Any]) -> tuple[Any, ...]:
        return self.state

    def _save(self, step: int) -> None:
        written = {(role, s) for role, s in self.script.disk if role == self.role}
        keep_last = self.script.keep_last + (self.role == "critic")  # it saves first, see Checkpoints.save
        for key in sorted(written)[:-keep_last]:
            del self.script.disk[key]
        self._commit()
        assert step < 100
        self.pending.append(((self.role, step), self.state))
        if not self.script.in_background:
            self._commit()

    def _commit(self) -> None:
        self.script.disk.update(self.pending)
        self.pending = []

    def _load(self, step: int) -> None:
        if (self.role, step) not in self.script.disk:
            raise CheckpointError(f"no checkpoint of step {step}", field="step")
        self.state, self.gradients, self.loaded = self.script.disk[self.role, step], (), step

    def _restored(self) -> Any:
        return SimpleNamespace(step=self.loaded)

    def _finish_save(self) -> None:
        self._commit()


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Any:
    def launch(script: Scripted) -> SupervisedGroup:
        monkeypatch.setattr(supervisor, "WorkerGroup", script)
        return SupervisedGroup.launch(script.config)

    return launch


def outcome_of(call: Any, *args: Any) -> Any:
    """What a caller sees of a call, an error that it would catch, too."""
    try:
        return call(*args)
    except (StateError, CheckpointError) as error:
        return type(error)


def job(group: Any, actions: list[tuple[str, int]]) -> list[Any]:
    """What the caller sees of a sequence of calls, each waited for."""
    seen: list[Any] = []
    for number, (name, batch) in enumerate(actions):
        target = group.critic if name.startswith("critic.") else group
        match name:
            case "save" | "save, critic last" | "save again":  # a step of the past once more, with its number
                step = 0 if name == "save again" else number
                order = (group, group.critic) if name == "save, critic last" else (group.critic, group)
                seen += [outcome_of(one.save, step) for one in order]
            case "actor.save":
                seen.append(outcome_of(group.save, number))
            case "load what is not there":
                seen.append(outcome_of(group.load, 99))
            case "update_ref" | "optimizer_step":
                seen.append(outcome_of(getattr(group, name)))
            case "update_weights":
                seen.append(outcome_of(group.update_weights, []))
            case _:
                seen.append(outcome_of(getattr(target, name.removeprefix("critic.")), batch))
    return seen


CALLS = ["train_step", "critic.train_step", "compute_log_probs", "critic.compute_log_probs", "save", "update_weights"]
ODD_CALLS = ["save, critic last", "save again", "actor.save", "load what is not there", "forward_backward"]
ACTIONS = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(-1, 5).filter(bool)), max_size=25)
ODD_ACTIONS = st.lists(
    st.tuples(st.sampled_from([*CALLS, *ODD_CALLS, "optimizer_step"]), st.integers(-1, 5).filter(bool)), max_size=25
)
LOSSES = st.sets(st.integers(1, 80), max_size=12)


def after(actions: list[tuple[str, int]], script: Scripted) -> tuple[Any, ...]:
    """What callers saw, and the state that the ranks have then; and how often they were replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "WorkerGroup", script)
        patch.setattr(restarts, "MAX_WITHOUT_PROGRESS", 100)
        group: Any = SupervisedGroup.launch(script.config)
        seen = job(group, actions), group._group.state, group._group.gradients, group.critic._group.state
        assert all(not recovery.differences for recovery in group.recoveries)
        return seen


@given(actions=ACTIONS, losses=LOSSES, keep_last=st.integers(1, 3), in_background=st.booleans())
def test_every_caller_sees_what_an_unlost_group_says(
    actions: list[tuple[str, int]], losses: set[int], keep_last: int, in_background: bool
) -> None:
    straight, struck = Scripted(set(), keep_last=keep_last), Scripted(losses, keep_last=keep_last)
    straight.in_background = struck.in_background = in_background
    assert after(actions, straight) == after(actions, struck)


@given(actions=ODD_ACTIONS, losses=LOSSES)
def test_calls_in_any_order_are_made_good_or_the_job_ends(actions: list[tuple[str, int]], losses: set[int]) -> None:
    straight, struck = Scripted(set(), keep_last=3), Scripted(losses, keep_last=3)
    expected = after(actions, straight)
    try:
        found = after(actions, struck)
    except SlimeError as error:
        assert "no checkpoint" in str(error)
    else:
        assert found == expected


@given(actions=ACTIONS, lost_at=st.integers(1, 60))
def test_calls_that_nobody_has_waited_for_are_answered_in_their_order(
    actions: list[tuple[str, int]], lost_at: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        answers = []
        for losses in (set(), {lost_at}):
            script = Scripted(losses)
            patch.setattr(supervisor, "WorkerGroup", script)
            group: Any = SupervisedGroup.launch(script.config)
            futures = []
            for number, (name, batch) in enumerate(actions):
                target = group.critic if name.startswith("critic.") else group
                start = getattr(target, f"{name.removeprefix('critic.')}_async")
                argument = {"save": number, "update_weights": []}.get(name, abs(batch))
                futures.append(start(argument))
            answers.append([future.result() for future in futures])
        assert answers[0] == answers[1]


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
    assert group._group.state == (1, 2, 3, 4)
    assert ("actor", 3) in script.disk, "it was saved again on the way"
    assert "checkpoint passed over" in capsys.readouterr().err


def test_a_save_in_the_background_that_was_lost_is_no_checkpoint(supervised: Any) -> None:
    script = Scripted(set(), keep_last=1)
    group = supervised(script)
    script.in_background = True
    for step in range(6):
        group.train_step(step + 1)
        group.save(step)
    script.losses = {script.calls + 1}
    group.train_step(7)
    assert group._group.state == (1, 2, 3, 4, 5, 6, 7)


def test_the_journal_is_no_longer_than_the_checkpoints_that_are_kept(supervised: Any) -> None:
    group = supervised(Scripted(set(), keep_last=2))
    job(group, [("train_step", 1), ("compute_log_probs", 1), ("save", 0)] * 20)
    assert len(group._supervisor._journal) <= 3 * (2 + 2)  # train_step and two saves, of each that is kept and two more


def test_bad_input_and_an_end_for_want_of_memory_are_not_repeated(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    group.train_step(1)
    with pytest.raises(BatchError):
        group.train_step("bad")
    with pytest.raises(ResourceError):
        group.train_step(0)
    group.train_step(2)  # the ranks ended with the error
    assert group._group.state == (1, 2) and len(group.recoveries) == 1


def test_a_fault_that_comes_back_ends_the_run_with_its_cause(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    group.train_step(1)
    script.losses = set(range(script.calls + 1, 1000))
    with pytest.raises(WorkerDied, match="gone") as caught:
        group.train_step(2)
    assert "in a row" in str(caught.value.hint)
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
    group._supervisor._journal.behind(None)[0].value["loss"] = 0.5
    script.losses = {script.calls + 1}
    group.train_step(2)
    (line,) = (tmp_path / RECOVERIES).read_text().splitlines()
    assert "loss of train_step was" in json.loads(line)["differences"][0]


def test_a_reference_group_is_again_what_it_was_or_the_run_ends(supervised: Any) -> None:
    script = Scripted(set(), with_reference=True)
    group = supervised(script)
    job(group, [("train_step", 1), ("update_ref", 0), ("save", 0), ("train_step", 2), ("save", 0)])
    for expected in [(1, 2, 3), (1, 2, 3, 4)]:
        script.losses = {script.calls + 1}
        group.train_step(len(expected))
        assert group._group.state == expected
        assert group.reference_group._group.state == (1,), "as at update_ref, which the newest checkpoint is behind"
    assert [recovery.checkpoint_step for recovery in group.recoveries] == [2, 2]
    job(group, [("save", 0)] * 9)
    script.losses = {script.calls + 1}
    with pytest.raises(CheckpointError, match="reference group"):
        group.train_step(5)


def test_a_reference_rank_that_is_lost_in_update_ref_is_replaced(supervised: Any) -> None:
    group = supervised(Scripted(set(), with_reference=True))
    group.train_step(1)
    group._group.reference_group.dies_in_update = True
    group.update_ref()
    assert len(group.recoveries) == 1
    assert group.reference_group._group.state == group._group.state == (1,)
    with pytest.raises(StateError, match="update_weights to the reference group"):
        group.update_weights(group.reference_group.receivers)


def test_ranks_that_end_after_a_bug_get_no_other_call(supervised: Any) -> None:
    group = supervised(Scripted(set()))
    group.train_step(1)
    with pytest.raises(ZeroDivisionError):
        group.train_step(BUG)
    group.save(3)  # on ranks that have half a step, which are about to end, it would be kept
    assert group._group.state == (1,) and len(group.recoveries) == 1


def test_after_a_recovery_that_failed_nothing_is_answered_from_another_state(supervised: Any) -> None:
    script = Scripted(set())
    group = supervised(script)
    job(group, [("train_step", 1), ("save", 0)] * 5)
    script.disk.clear()
    script.losses = {script.calls + 1}
    pending = group.train_step_async(2)
    for call in (pending.result, pending.result, lambda: group.train_step(3), lambda: group.save(7)):
        with pytest.raises(CheckpointError, match="no checkpoint of step") as caught:
            call()
        assert "it began with: " in "".join(caught.value.others)


def test_a_line_that_cannot_be_written_does_not_fail_a_recovery(supervised: Any, tmp_path: Path, capsys: Any) -> None:
    script = Scripted(set())
    script.config.run.dir = tmp_path / "file"
    (tmp_path / "file").write_text("in the way")
    group = supervised(script)
    script.losses = {script.calls + 1}
    group.train_step(1)
    assert len(group.recoveries) == 1 and RECOVERIES in capsys.readouterr().err
