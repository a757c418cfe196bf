"""Calls that were made and not waited for, on groups whose ranks are lost, whose job ends, or that are shut down.

WorkerGroup, its futures and the supervisor are the real ones; Ray and the ranks' processes are stood in for.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.cluster import ray_errors
from actors.fault_tolerance import supervisor
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers import futures, worker_group
from actors.workers.group_calls import submit
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import StateError, SyncError, WorkerDied
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.results import LogProbs
from slimefsdp.training import prepare
from slimefsdp.training.plan import plan_training
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S, wait_until

OWN_REFERENCE = {"loss": {"kl_coefficient": 0.1}, "reference": {"dp": 2}}


class Bug(RayTaskError):
    """What Ray hands over where a rank raised an error that is no typed one."""

    def __init__(self) -> None:
        self.cause = ZeroDivisionError("bug")


class Refused(RayTaskError):
    """What Ray hands over where a receiver did not take weights."""

    def __init__(self) -> None:
        self.cause = SyncError("receiver 0 refused", field="update_weights", hint="restart it")


class Answer:
    """Stands for a reference to a rank's answer, or to the error in its place."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error


class Rank:
    """A rank's process: its state is the number of its training steps; a reference says it as its log-probs."""

    def __init__(self, job: Job) -> None:
        self.job, self.state, self.is_dead = job, 0, False
        self.call = SimpleNamespace(remote=self._call)
        self.update_weights = SimpleNamespace(remote=self._update_weights)  # what a test replaces
        self.health = SimpleNamespace(remote=lambda role: Answer(None))

    def begin(self) -> None:
        """As of a receiver, like the two below."""

    receive = commit = begin

    def _call(self, request: Any, role: str) -> Answer:
        if request.name != "update_weights":
            self.job.given.append(request.name)
        if self.is_dead:
            return Answer(error=ActorDiedError())
        if request.name == "compute_log_probs":
            tokens = request.arguments["batch"].batch.num_response_tokens
            return Answer(LogProbs(*np.full((2, tokens), -1.0 - self.state, dtype=np.float32)))
        if request.name == "zero_grad":
            return Answer(error=Bug())
        if request.name == "train_step":
            reference = request.arguments["batch"].batch.ref_log_probs
            self.state += 1
            return Answer({"loss": float(self.state), "reference": None if reference is None else float(reference[0])})
        if request.name == "update_weights":
            answer: Answer = self.update_weights.remote(request.arguments["receivers"])
            return answer
        return Answer([0] if request.call.answers_by_rank else None)

    def _update_weights(self, receivers: list[Rank]) -> Answer:
        self.is_dead |= self.job.dies_in_update
        self.job.dies_in_update = False
        if self.is_dead:
            return Answer(error=ActorDiedError())
        for receiver in receivers:
            receiver.state = self.state
        return Answer()


class Job:
    """A supervised group of one rank, and what became of it."""

    def __init__(self, launch: Callable[[Job, RunConfig], Any], config: RunConfig, patch: pytest.MonkeyPatch) -> None:
        self.given: list[str] = []
        self.launches = 0
        self.dies_in_update = False

        def launched(config: RunConfig, places: Any, sharding: Any) -> Any:
            self.launches += 1
            self.ranks = launch(self, config)
            return self.ranks

        patch.setattr(supervisor, "WorkerGroup", SimpleNamespace(launch=launched))
        self.group = SupervisedGroup.launch(config)

    def has_begun(self, *calls: str) -> bool:
        """Waits until ranks have got these, in this order and no others."""
        return wait_until(lambda: self.given == list(calls))


@pytest.fixture
def launch(example: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Job, RunConfig], Any]:
    def get(answer: Answer, timeout: float) -> Any:
        if answer.error is not None:
            raise answer.error
        return answer.value

    def end(ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.is_dead = True

    for module in (futures, worker_group):
        monkeypatch.setattr(module, "require_cluster", lambda: None)
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: False)
    monkeypatch.setattr(futures, "ray", SimpleNamespace(wait=lambda refs, **how: (list(refs), []), get=get))
    monkeypatch.setattr(worker_group, "store", lambda work, field: work)
    monkeypatch.setattr(worker_group, "end_processes", end)
    folder = read_model_folder(example / "model")
    watchdog: Any = SimpleNamespace(
        kill_stopped=lambda: None, look=lambda waiting: None, abort_collectives=lambda lost: None
    )

    def make(job: Job, config: RunConfig) -> Any:
        group = WorkerGroup(config, "actor", [Rank(job)], folder, watchdog=watchdog)
        if not config.reference.is_colocated:
            group._refer_to(WorkerGroup(config, "ref", [Rank(job)], folder, watchdog=watchdog))
        return group

    return make


@pytest.fixture
def make_job(launch: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    return lambda **sections: Job(launch, make_config(**{"mesh": {"dp": 1}, **sections}), monkeypatch)


@pytest.fixture
def may_plan(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Planning waits for it where it is not set."""
    event = threading.Event()
    event.set()

    def waits(*args: Any, **how: Any) -> Any:
        assert event.wait(PATIENCE_S)
        return plan_training(*args, **how)

    monkeypatch.setattr(prepare, "plan_training", waits)
    return event


# ---------------------------------------------------------------------- a reference group of its own


def arrives_late(actor: Rank, patch: pytest.MonkeyPatch) -> None:
    """Weights that this rank sends arrive some time after the call has begun."""
    arrived = threading.Event()

    class Late(Answer):
        """Of a call that takes its time."""

    def update_weights(receivers: list[Rank], *how: Any) -> Answer:
        def arrive() -> None:
            receivers[0].state = actor.state
            arrived.set()

        threading.Timer(0.5, arrive).start()
        return Late()

    def wait(refs: list[Answer], **how: Any) -> tuple[list[Answer], list[Answer]]:
        if any(isinstance(ref, Late) for ref in refs):
            arrived.wait(how["timeout"])
        still = [ref for ref in refs if isinstance(ref, Late) and not arrived.is_set()]
        return [ref for ref in refs if ref not in still], still

    actor.update_weights = SimpleNamespace(remote=update_weights)
    patch.setattr(futures.ray, "wait", wait)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_behind_an_update_ref_has_the_new_reference_also_where_ranks_are_lost_in_it(
    make_job: Any, batch: RolloutBatch, is_lost: bool
) -> None:
    job = make_job(**OWN_REFERENCE)
    assert job.group.train_step(batch)["reference"] == -1.0
    job.dies_in_update = is_lost
    calls = [submit(job.group.update_ref), submit(job.group.train_step, batch)]
    assert calls[1].result() == {"loss": 2.0, "reference": -2.0} and calls[0].result() is None
    assert len(job.group.recoveries) == is_lost


def test_a_reference_group_answers_after_the_update_ref_that_was_called_before(
    make_job: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(**OWN_REFERENCE)
    job.group.train_step(batch)
    arrives_late(job.ranks.receivers[0], monkeypatch)
    update, answer = submit(job.group.update_ref), submit(job.group.reference_group.compute_log_probs, batch, "ref")
    assert answer.result().log_probs[0] == -2.0 and update.result() is None


def test_a_reference_group_whose_update_failed_answers_after_another_only(make_job: Any, batch: RolloutBatch) -> None:
    job = make_job(**OWN_REFERENCE)
    job.group.train_step(batch)
    actor = job.ranks.receivers[0]
    works, actor.update_weights = actor.update_weights, SimpleNamespace(remote=lambda *_: Answer(error=Refused()))
    with refused(SyncError, "update_weights", "refused"):
        job.group.update_ref()
    unread = submit(job.group.update_ref)
    for _ in range(2):
        with refused(StateError, "update_ref", "refused"):
            job.group.train_step(batch)
        with refused(StateError, "update_ref", "refused"):
            job.group.reference_group.compute_log_probs(batch, "ref")
    actor.update_weights = works
    job.group.update_ref()
    assert job.group.train_step(batch) == {"loss": 2.0, "reference": -2.0}
    with refused(SyncError, "update_weights"):
        unread.result()


def test_calls_that_are_made_again_read_the_reference_in_their_order_too(
    make_job: Any, launch: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(**OWN_REFERENCE)
    job.group.train_step(batch)
    calls = [submit(job.group.update_ref), submit(job.group.reference_group.compute_log_probs, batch, "ref")]
    assert job.has_begun("compute_log_probs", "train_step", "compute_log_probs")

    def launched(config: RunConfig, places: Any, sharding: Any) -> Any:
        group = launch(job, config)
        arrives_late(group.receivers[0], monkeypatch)
        return group

    monkeypatch.setattr(supervisor.WorkerGroup, "launch", launched)
    for future in [call._started.result()._call.running for call in calls]:  # neither answer came: the ranks are lost
        for ref in future._refs:
            ref.error = ActorDiedError()
    assert calls[1].result().log_probs[0] == -2.0 and calls[0].result() is None
    assert len(job.group.recoveries) == 1


# ---------------------------------------------------------------------- ranks that end, and jobs


def test_a_call_that_was_planned_while_ranks_came_to_their_end_begins_on_new_ones(
    make_job: Any, batch: RolloutBatch, may_plan: threading.Event
) -> None:
    job = make_job()
    fails = submit(job.group.zero_grad)
    assert job.has_begun("zero_grad")
    may_plan.clear()
    queued = submit(job.group.train_step, batch)
    with pytest.raises(ZeroDivisionError):
        fails.result()
    may_plan.set()
    assert queued.result()["loss"] == 1.0 and job.launches == 2


def test_a_call_that_was_planned_while_the_job_ended_says_what_ended_it(
    make_job: Any, batch: RolloutBatch, may_plan: threading.Event
) -> None:
    job = make_job(cluster={"max_restarts": 0})
    job.ranks.receivers[0].is_dead = True
    lost = submit(job.group.optimizer_step)
    assert job.has_begun("optimizer_step")
    may_plan.clear()
    queued = submit(job.group.train_step, batch)
    with pytest.raises(WorkerDied):
        lost.result()
    may_plan.set()
    for call in (queued.result, job.group.memory):
        with pytest.raises(WorkerDied):
            call()


def test_after_the_end_of_a_job_the_batches_of_refused_calls_are_let_go(make_job: Any, batch: RolloutBatch) -> None:
    job = make_job(cluster={"max_restarts": 0})
    job.ranks.receivers[0].is_dead = True
    kept = []
    for _ in range(9):
        given = batch.copy()
        kept.append(weakref.ref(given.tokens))
        with pytest.raises(WorkerDied):
            job.group.train_step(given)
        del given
    gc.collect()
    assert sum(tokens() is not None for tokens in kept) <= 2, "of the call that was lost, and of the last one"


# ---------------------------------------------------------------------- shutting down


def test_no_ranks_are_started_after_a_shutdown_for_calls_that_were_queued(
    make_job: Any, batch: RolloutBatch, may_plan: threading.Event
) -> None:
    job = make_job()
    fails = submit(job.group.zero_grad)
    assert job.has_begun("zero_grad")
    may_plan.clear()
    queued = [submit(job.group.train_step, batch) for _ in range(2)]
    with pytest.raises(ZeroDivisionError):
        fails.result()
    job.group.shutdown()
    may_plan.set()
    for call in queued:
        with pytest.raises((StateError, WorkerDied)):
            call.result()
    assert job.launches == 1


def test_nothing_is_put_into_the_object_store_for_a_group_that_has_ended(
    launch: Any, make_config: Any, batch: RolloutBatch, may_plan: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(worker_group, "store", lambda work, field: stored.append(work))
    group = launch(SimpleNamespace(given=[]), make_config(mesh={"dp": 1}))
    may_plan.clear()
    queued = submit(group.train_step, batch)
    group.shutdown()
    may_plan.set()
    with pytest.raises(StateError):
        queued.result()
    assert not stored, "Ray would be started anew for it"


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_save_that_goes_on_is_waited_for_at_a_shutdown_though_other_calls_cannot_begin(
    launch: Any, make_config: Any, make_job: Any, batch: RolloutBatch, may_plan: threading.Event, tmp_path: Path,
    is_supervised: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in (worker_group, supervisor):
        monkeypatch.setattr(module, "SAVE_GRACE_S", 0.2)
    sections = {"checkpoint": {"async_save": True}, "run": {"dir": str(tmp_path)}}
    job: Any = SimpleNamespace(given=[])
    if is_supervised:
        job = make_job(**sections)
    group = job.group if is_supervised else launch(job, make_config(mesh={"dp": 1}, **sections))
    group.save(1)
    may_plan.clear()
    queued = submit(group.train_step, batch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        group.shutdown()
    may_plan.set()
    assert job.given == ["save", "finish_save"] and any("could not begin" in str(warning.message) for warning in said)
    with pytest.raises(StateError):
        queued.result()


def test_a_group_that_ends_between_the_check_of_a_call_and_its_beginning_refuses_it(
    launch: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = launch(SimpleNamespace(given=[]), make_config(mesh={"dp": 1}))
    check = WorkerGroup.check

    def checked(self: WorkerGroup, request: Any) -> Any:
        found = check(self, request)
        self.end()
        return found

    monkeypatch.setattr(WorkerGroup, "check", checked)
    with pytest.raises(StateError):
        group.memory()


# ---------------------------------------------------------------------- the thread that begins calls


@pytest.mark.parametrize("has_started", [True, False], ids=["Ctrl-C", "no more threads"])
def test_a_thread_that_could_not_be_started_leaves_no_call_and_no_second_thread(
    monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    dispatcher, order, start = futures.Dispatcher(), [], threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if has_started:
            start(thread)
            raise KeyboardInterrupt  # as a signal while start() waits for the thread
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            dispatcher.submit(lambda: order.append("refused"))
    for number in range(3):
        dispatcher.submit(lambda number=number: order.append(number))
    dispatcher.drain(PATIENCE_S)
    assert order == [0, 1, 2]
