"""A run does its requests once each, in the order of their numbers, and makes no update of half a batch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from actors.service.results import Answer, Results, error_text, failure
from actors.service.training_run import TrainingRun
from actors.workers.group_calls import AdapterHandle
from slimefsdp.errors import BatchError, ResourceError, StateError
from tests.support.refusals import refused


class Calls:
    """Stands for the group's calls for an adapter."""

    def __init__(self) -> None:
        self.dropped = 0

    def zero_grad(self) -> None:
        self.dropped += 1


@pytest.fixture
def run() -> Any:
    made = TrainingRun("s:train:0", "s", "", 4, cast(AdapterHandle, Calls()), Results(60.0, 10**6, 10, 10**6))
    yield made
    made.stop()
    made.join()


def answer_of(result: Any) -> Answer | None:
    return asyncio.run(result.wait(30.0))


def test_requests_wait_for_those_before_them_and_are_done_once_however_often_they_are_sent(run: TrainingRun) -> None:
    done: list[int] = []

    def request(number: int) -> Any:
        def do(calls: AdapterHandle) -> Answer:
            done.append(number)
            return {"number": number}

        return run.submit(number, "forward_backward", do)

    late = [request(number) for number in (3, 2, 3)]
    assert done == [] and late[0] is late[2] and run.waiting == 2
    first = request(1)
    assert [answer_of(one) for one in (first, late[1], late[0])] == [{"number": n} for n in (1, 2, 3)]
    assert request(2) is late[1] and answer_of(request(1)) == {"number": 1} and done == [1, 2, 3]
    with refused(StateError, "seq_id", "next request to perform is 4"):
        request(10**6)


def test_a_number_that_was_another_requests_is_refused(run: TrainingRun) -> None:
    kind: Any = "optim_step"
    first = run.submit(1, "forward_backward", lambda _: {"is": "done"})
    assert answer_of(first) == {"is": "done"}
    waiting = run.submit(3, kind, lambda _: {"is": "done"})
    for number, other in ((1, kind), (3, "forward_backward")):
        with refused(StateError, "seq_id", number, kind, "forward_backward"):
            run.submit(number, other, lambda _: {"is": "another"})
    run.submit(2, "forward_backward", lambda _: {})
    assert answer_of(waiting) == {"is": "done"}


def test_after_a_failed_gradient_the_next_update_alone_is_refused(run: TrainingRun) -> None:
    def fails(calls: AdapterHandle) -> Answer:
        raise BatchError("a token of none", field="data[3]")

    def works(calls: AdapterHandle) -> Answer:
        return {"is": "done"}

    sent = [
        run.submit(1, "forward_backward", works),
        run.submit(2, "forward_backward", fails),
        run.submit(3, "forward_backward", works),
        run.submit(4, "optim_step", works),
        run.submit(5, "forward_backward", works),
        run.submit(6, "optim_step", works),
    ]
    found = [cast(dict[str, Any], answer_of(one)) for one in sent]
    assert [one.get("category") for one in found] == [None, "user", None, "user", None, None]
    assert "a token of none" in found[3]["error"] and "no update was made" in found[3]["error"]
    assert cast(Any, run.calls).dropped == 1


def test_a_defect_fails_its_request_alone_and_what_waits_when_the_run_ends_is_told(run: TrainingRun) -> None:
    def breaks(calls: AdapterHandle) -> Answer:
        raise KeyError("of ours")

    begun, may_end = threading.Event(), threading.Event()

    def slow(calls: AdapterHandle) -> Answer:
        begun.set()
        may_end.wait(30)
        return {"is": "done"}

    broken, working = run.submit(1, "forward", breaks), run.submit(2, "forward", slow)
    waiting, early = run.submit(3, "forward", breaks), run.submit(5, "forward", breaks)
    assert cast(Any, answer_of(broken))["category"] == "server" and begun.wait(30)
    run.stop()
    for one in (waiting, early):
        assert "has ended" in cast(Any, answer_of(one))["error"]
    may_end.set()
    run.join()
    assert answer_of(working) == {"is": "done"}
    with refused(StateError, "model_id", "has ended"):
        run.submit(4, "forward", breaks)


def test_results_go_after_their_time_and_the_oldest_first_for_room() -> None:
    results = Results(3600.0, 100, 10, 100)
    made = [results.new("") for _ in range(4)]
    for one in made[:3]:
        one.set(b"x" * 40)
    results.forget_old()
    assert [results.get(one.id) is not None for one in made] == [False, True, True, True] and results.waiting == 1
    short = Results(0.0, 100, 10, 100)
    kept, gone = short.new(""), short.new("")
    gone.set({})
    short.forget_old()
    assert short.get(kept.id) is kept and short.get(gone.id) is None


def test_more_requests_or_bytes_than_there_may_be_wait_until_others_have_their_answer() -> None:
    results = Results(60.0, 10**6, most_waiting=6, most_waiting_bytes=100)
    large = results.new("", 10**6)  # it is alone
    with refused(ResourceError, None, "bytes of requests", 10**6, 1, 100):
        results.new("", 1)
    needed = results.new("", 1, is_needed=True)
    large.fail(StateError("it failed", field="x"))
    large.fail(StateError("it failed twice", field="x"))
    assert (results.waiting, results.waiting_bytes) == (1, 1)
    with refused(ResourceError, None, "bytes of requests", 80):  # four fifths are one user's
        results.new("", 80)
    others = [results.new("", size) for size in (79, 0, 0)]
    with refused(ResourceError, None, "requests wait", 4, 6):
        results.new("", 0)
    others.append(results.new("another", 9))
    for one in (needed, *others):
        one.set({})
    assert (results.waiting, results.waiting_bytes) == (0, 0) and results.new("", 100)


def test_what_a_client_is_told_has_no_path_of_the_servers_disk() -> None:
    run = "session-0a1b.train.3"
    saved = f"tinker://{run.replace('.', ':')}"
    root = "/srv/team-a/runs"
    for text, expected in (
        (f"it is in {root}/adapters/{run}/checkpoints/named/ck", f"{saved}/weights/ck"),
        (f"none in {root}/checkpoints/named/{run}.a.b (x)", f"{saved}/weights/a.b (x)"),
        (f"[Errno 28]: '{root}/service/sampler_weights/{run}/w@17.25/a.part'", f"{saved}/sampler_weights/w'"),
        (f"torn: {root}/adapters/{run}/checkpoints/global_step_2.", "global_step_2."),
        (f"tokens/s and 1/2 of {saved}/weights/ck, {root}/model", f"tokens/s and 1/2 of {saved}/weights/ck, model"),
        (f"[Errno 2] No such file: '{root}/a b/c.json'", "No such file: 'c.json'"),
        (f"it cannot read file://{root}/c.json", "it cannot read c.json"),
    ):
        for error in (StateError(text, field="x", hint=f"look at {root}"), OSError(text)):
            found = failure(error)["error"]
            assert expected in found and "/srv" not in found and "team-a" not in found, found
    assert "/srv/model" in error_text(StateError("this server has /srv/model", field="x"), "/srv/model")
