"""What a WorkerGroup decides on the driver, before it asks Ray or any rank for something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actors.cluster import ray_errors
from actors.engines.pool import EnginePool
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers import futures, worker_group
from actors.workers.group_calls import JobGroup, submit
from actors.workers.worker_group import WorkerGroup
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ResourceError, SlimeError, StateError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.results import LogProbs
from slimefsdp.training import prepare
from slimefsdp.training.plan import plan_training
from tests.support.refusals import refused
from tests.support.runs import Untouchable
from tests.support.scripted_ray import Actor
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def group(make_config: Any, example: Path) -> Any:
    folder = read_model_folder(example / "model")
    watchdog: Any = Untouchable()
    return WorkerGroup(make_config(), "actor", [Untouchable()] * 2, folder, watchdog=watchdog)


BAD_CALLS: dict[str, tuple[Callable[[Any, RolloutBatch], Any], type[SlimeError], str]] = {
    "a token id outside the vocabulary": (
        lambda group, batch: group.train_step(batch.replace(tokens=np.full(batch.num_tokens, 320))),
        BatchError,
        "tokens",
    ),
    "no rewards, for a future": (
        lambda group, batch: submit(group.train_step, batch.replace(rewards=None)),
        BatchError,
        "rewards",
    ),
    "a dictionary": (lambda group, batch: group.train_step({"tokens": batch.tokens}), BatchError, "batch"),
    "an unknown model": (lambda group, batch: group.compute_log_probs(batch, "critic"), ConfigError, "model"),
    "another batch's plan": (
        lambda group, batch: group.train_step(batch.select([4, 5]), plan_training(group.config, batch)),
        BatchError,
        "plan",
    ),
    "a critic's call": (lambda group, batch: group.compute_values(batch), StateError, "compute_values"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_before_any_rank_sees_it(
    case: str, group: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: False)  # whether or not this process is in one
    call, kind, field = BAD_CALLS[case]
    with pytest.raises(kind) as caught:
        call(group, batch)
    assert type(caught.value) is kind and caught.value.field == field and caught.value.hint
    assert caught.value.rank is None


def test_what_is_no_call_of_a_group_cannot_be_submitted(group: Any) -> None:
    for other, name in ((group.health, "health"), (len, "len"), (3, "3")):
        with refused(ConfigError, "call", name):
            submit(other)


def test_a_handle_says_what_it_is_of_while_its_job_lasts(group: Any, example: Path) -> None:
    model = str(example / "model")
    assert repr(group) == f"WorkerGroup(actor, 2 ranks, {model})"
    assert repr(group.adapter("a")) == f"AdapterHandle(a of {group!r})"
    with refused(ConfigError, "name", "a/b"):
        group.adapter("a/b")

    class Ended:
        roles = ("actor",)

        def config_of(self, role: str) -> Any:
            raise StateError("it has ended", field="job", hint="launch another")

    assert repr(JobGroup(Ended(), "actor")) == "JobGroup(actor)"  # type: ignore[arg-type]


def test_a_handle_on_a_job_asks_the_job_for_its_own_role_and_has_the_others_of_an_actor(group: Any) -> None:
    asked: list[Any] = []
    job: Any = SimpleNamespace(
        roles=("actor", "critic"), config_of=lambda role: group.config,
        receivers=lambda role: asked.append(role) or [role],
        health=lambda role, timeout_s: asked.append(timeout_s) or [],
    )  # fmt: skip
    handle = JobGroup(job, "actor")
    critic = handle.critic
    assert critic is not None and critic.role == "critic" and handle.reference_group is None
    assert critic.critic is None and critic.receivers == ["critic"] and handle.health(7.0) == []
    assert asked == ["critic", 7.0]


@pytest.mark.parametrize(
    ("role", "call", "field", "word"),
    [
        ("actor", lambda group: group.update_weights(group.receivers), "receivers", "cannot receive"),
        ("ref", lambda group: group.save(3), "save", "reference group"),
    ],
)
def test_a_group_does_not_send_to_itself_and_a_reference_does_not_save(
    group: Any, role: Any, call: Any, field: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: False)
    rank, watchdog = Actor(), cast(Any, Untouchable())
    folder = read_model_folder(group.config.model.path)
    with refused(StateError, field, word):
        call(WorkerGroup(group.config, role, [rank], folder, watchdog=watchdog))
    assert rank.calls == []


def test_once_the_cluster_is_gone_no_call_reaches_a_rank(
    group: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: True)
    for call in (lambda: group.train_step(batch), lambda: group.update_weights([]), group.memory, group.update_ref):
        with pytest.raises(ResourceError):
            call()


# ---------------------------------------------------------------------- calls that are queued


class Rank:
    """Stands for a rank's process: answers at once, and writes down what it was given."""

    def __init__(self, events: list[Any]) -> None:
        self.call = SimpleNamespace(
            remote=lambda request, role: self.took(events, request.arguments.get("receivers", request))
        )

    @staticmethod
    def took(events: list[Any], what: Any) -> object:
        events.append(what)
        return object()


@pytest.fixture
def launched(make_config: Any, example: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    """A group of one rank without Ray, and what that rank is given, in order."""
    made_up = SimpleNamespace(wait=lambda refs, **how: (list(refs), []), get=lambda ref, timeout: ref)
    for module in (futures, worker_group):
        monkeypatch.setattr(module, "require_cluster", lambda: None)
    monkeypatch.setattr(futures, "ray", made_up)
    monkeypatch.setattr(worker_group, "store", lambda work, field: work)

    def launch(**sections: dict[str, Any]) -> tuple[Any, list[Any]]:
        events: list[Any] = []
        folder = read_model_folder(example / "model")
        config = make_config(**{"mesh": {"dp": 1}, **sections})
        watchdog: Any = Untouchable()
        return WorkerGroup(config, "actor", [Rank(events)], folder, watchdog=watchdog), events

    return launch


@pytest.fixture
def may_plan(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Planning waits for it."""
    event = threading.Event()

    def waits(*args: Any, **how: Any) -> Any:
        assert event.wait(PATIENCE_S)
        return plan_training(*args, **how)

    monkeypatch.setattr(prepare, "plan_training", waits)
    return event


def test_submit_returns_before_its_batch_is_planned_and_calls_keep_their_order_and_their_arguments(
    launched: Any, may_plan: threading.Event, batch: RolloutBatch
) -> None:
    group, given = launched()
    tokens, loop_state, tags = batch.tokens.copy(), {"cursor": [1]}, ["reference"]
    calls = [
        submit(group.train_step, batch.replace(tokens=tokens)),
        submit(group.save, 3, loop_state),
        submit(group.sleep, tags),
        submit(group.memory),
    ]
    tokens[:] = 0
    loop_state["cursor"].append(2)
    tags.append("optimizer")
    with pytest.raises(BatchError):  # where it is called, though others wait
        submit(group.train_step, batch.replace(rewards=None))
    assert given == []
    may_plan.set()
    for call in calls:
        call.result()
    assert [request.name for request in given] == ["train_step", "save", "sleep", "memory"]
    train_step, save, sleep = (request.arguments for request in given[:3])
    assert (save["step"], save["loop_state"]) == (3, {"cursor": [1]}) and sleep == {"tags": ["reference"]}
    assert train_step["batch"].batch.same_as(batch)
    assert train_step["batch"].plan.digest() == plan_training(group.config, batch, group._planner.cost).digest()


class Reference:
    """A rank of a reference group."""

    def __init__(self, given: list[Any], may_answer: threading.Event) -> None:
        self.given, self.may_answer = given, may_answer
        self.call = SimpleNamespace(remote=self._call)

    def _call(self, request: Any, role: str) -> LogProbs:
        self.given.append(role)
        assert self.may_answer.wait(PATIENCE_S)
        tokens = request.arguments["batch"].batch.num_response_tokens
        return LogProbs(*np.full((2, tokens), -1.0, dtype=np.float32))


@pytest.fixture
def with_reference(launched: Any) -> Callable[[threading.Event], tuple[Any, list[Any]]]:
    """As `launched`, with a reference group, whose rank answers when it may."""

    def launch(may_answer: threading.Event) -> tuple[Any, list[Any]]:
        group, given = launched(loss={"kl_coefficient": 0.1}, reference={"dp": 2})
        rank: Any = Reference(given, may_answer)
        folder = read_model_folder(group.config.model.path)
        watchdog: Any = Untouchable()
        group._refer_to(WorkerGroup(group.config, "ref", [rank], folder, watchdog=watchdog))
        return group, given

    return launch


def test_submit_returns_before_a_reference_group_answers_which_is_asked_after_what_was_called_before(
    with_reference: Any, batch: RolloutBatch
) -> None:
    may_answer = threading.Event()
    group, given = with_reference(may_answer)
    calls = [submit(group.update_ref), submit(group.train_step, batch), submit(group.memory)]
    calls[0].result()
    may_answer.set()
    calls[-1].result()
    assert given[:2] == [group.reference_group.receivers, "ref"]
    assert [request.name for request in given[2:]] == ["train_step", "memory"]
    assert (given[2].arguments["batch"].batch.ref_log_probs == -1.0).all()


def test_a_reference_group_gets_calls_in_the_order_in_which_they_and_those_of_its_actor_were_made(
    with_reference: Any, batch: RolloutBatch, may_plan: threading.Event
) -> None:
    may_answer = threading.Event()
    may_answer.set()
    group, given = with_reference(may_answer)
    calls = [
        submit(group.train_step, batch),  # is being planned when the others are called
        submit(group.update_ref),
        submit(group.reference_group.compute_log_probs, batch, "ref"),
        submit(group.update_ref),
    ]
    may_plan.set()
    for call in calls:
        call.result()
    receivers = group.reference_group.receivers
    assert given[0] == "ref" and given[1].name == "train_step", "its reference log-probs and the step"
    assert given[2:] == [receivers, "ref", receivers]


def test_a_call_that_cannot_be_begun_says_so_when_it_is_waited_for_and_those_behind_it_begin(
    launched: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, given = launched()

    def store(work: Any, field: str) -> Any:
        raise ResourceError("the object store is full", field=field, hint="make room")

    monkeypatch.setattr(worker_group, "store", store)
    first, second = submit(group.train_step, batch), submit(group.memory)
    second.result()
    for _ in range(2):
        with pytest.raises(ResourceError):
            first.result()
    assert [request.name for request in given] == ["memory"]


def test_a_dispatcher_begins_calls_in_the_order_in_which_threads_made_them_and_rests_between() -> None:
    dispatcher, order, made = futures.Dispatcher(), [], []
    lock = threading.Lock()

    def make(thread: int) -> None:
        for number in range(200):
            with lock:
                made.append((thread, number))
                dispatcher.submit(lambda call=(thread, number): order.append(call))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    dispatcher.drain(PATIENCE_S)
    assert order == made and len(made) == 800
    may_go = threading.Event()
    dispatcher.submit(lambda: may_go.wait(PATIENCE_S))
    with pytest.raises(TimeoutError):
        dispatcher.drain(0.01)
    may_go.set()
    dispatcher.drain(PATIENCE_S)


def test_a_coroutine_awaits_a_call_while_its_event_loop_goes_on() -> None:
    dispatcher, may_end = futures.Dispatcher(), threading.Event()

    class Held:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def result(self) -> str:
            assert may_end.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            return "done"

    async def awaited() -> None:
        good, bad = (dispatcher.submit(lambda error=error: Held(error)) for error in (None, StateError("no")))
        asyncio.get_running_loop().call_later(0, may_end.set)  # which a loop that waits would never do
        assert await good == "done"
        with pytest.raises(StateError):
            await bad

    asyncio.run(awaited())


def test_a_block_ends_what_was_launched_whatever_is_raised_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (WorkerGroup, SupervisedGroup, EnginePool):
        handle, ended = object.__new__(kind), list[Any]()
        monkeypatch.setattr(kind, "shutdown", lambda own, ended=ended: ended.append(own))
        with pytest.raises(KeyError), handle as inside:
            assert inside is handle and not ended
            raise KeyError
        assert len(ended) == 1 and ended[0] is handle
