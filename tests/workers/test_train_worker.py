"""A rank whose collectives are aborted takes nothing that comes after for a result or for an error of its own.

In one process: NCCL is stood in for by a call that only an abort ends, and that is over before the abort returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.workers import train_worker
from actors.workers.group_calls import RankRequest
from actors.workers.train_worker import TrainWorker
from slimefsdp.distributed import collectives
from slimefsdp.errors import PeerFailed, ResourceError, StateError
from tests.support.waiting import PATIENCE_S


class Aborts:
    """Stands for torch's abort of all NCCL groups: the thread in a kernel goes on, and this returns after it.

    Args:
        error: that the abort ends with.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.frees = threading.Event()
        self.has_answered = threading.Event()
        self.count = 0
        self._error = error

    def __call__(self) -> None:
        self.count += 1
        self.frees.set()
        assert self.has_answered.wait(PATIENCE_S), "the thread of the call goes on before the abort is over"
        if self._error is not None:
            raise self._error


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """After how many seconds the process was to end, each time that it was; it does not."""
    begun: list[float] = []

    def timer(seconds: float, end: Any, args: tuple[int]) -> Any:
        return SimpleNamespace(start=lambda: begun.append(seconds))

    monkeypatch.setattr(train_worker, "threading", SimpleNamespace(Timer=timer))
    return begun


def worker_that(works: Callable[[], Any], config: Any) -> TrainWorker:
    """Rank 1 of two, whose Trainer does this in `memory`."""
    worker = TrainWorker(1, 2)
    folder = SimpleNamespace(config=None)
    mesh = SimpleNamespace(device=torch.device("cpu"))
    worker.trainers["actor"] = SimpleNamespace(memory=works, config=config, mesh=mesh, folder=folder)
    return worker


def memory_of(worker: TrainWorker) -> Any:
    return worker.call(RankRequest("memory"))


def answer_during(abort: Aborts, worker: TrainWorker) -> Future[Any]:
    """What a call answers that is in a kernel when the worker is told to abort."""
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            answer.set_result(memory_of(worker))
        except Exception as error:
            answer.set_exception(error)
        abort.has_answered.set()

    thread = threading.Thread(target=call)
    thread.start()
    worker.abort_collectives()
    thread.join(PATIENCE_S)
    return answer


def raises(error: Exception) -> Any:
    raise error


AFTERWARDS: dict[str, Callable[[], Any]] = {
    "a result": lambda: {"loss": 1e38},
    "a norm that is no number": lambda: raises(StateError("grad_norm is nan", field="grad_norm")),
    "groups that are gone": lambda: raises(ValueError("Default process group has not been initialized")),
    "a size from garbage": lambda: raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 EiB.")),
}


@pytest.mark.parametrize("error", [None, RuntimeError("ncclSystemError")], ids=["aborted", "not aborted"])
@pytest.mark.parametrize("afterwards", AFTERWARDS.values(), ids=AFTERWARDS)
def test_whatever_comes_after_an_abort_has_begun_is_a_lost_peers_doing(
    make_config: Any,
    ends: list[float],
    monkeypatch: pytest.MonkeyPatch,
    afterwards: Callable[[], Any],
    error: Exception | None,
) -> None:
    abort = Aborts(error)
    monkeypatch.setattr(collectives, "needs_abort", lambda: True)
    monkeypatch.setattr(collectives, "abort_collectives", abort)
    worker = worker_that(lambda: abort.frees.wait(PATIENCE_S) and afterwards(), make_config())
    told = answer_during(abort, worker).exception()
    assert isinstance(told, PeerFailed) and (told.rank, told.call, told.ends_rank) == (1, "memory", False)
    with pytest.raises(PeerFailed):
        memory_of(worker)
    assert abort.count == 1 and ends == [], "it ends with its group"


def test_where_collectives_end_by_themselves_nothing_is_aborted_and_the_rank_goes_on(make_config: Any) -> None:
    assert not collectives.needs_abort(), "as on gloo"
    worker = worker_that(lambda: {"bytes": 1}, make_config())
    worker.abort_collectives()
    assert memory_of(worker) == {"bytes": 1}


@pytest.mark.parametrize(
    ("error", "kind", "ends_rank"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), ResourceError, True),
        (ResourceError("the host has no memory", field="tags"), ResourceError, False),
        (RuntimeError("[a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), PeerFailed, False),
    ],
    ids=["no memory on this rank", "no memory, as all agreed", "a lost peer"],
)
def test_a_typed_error_says_whether_its_rank_ends(
    make_config: Any, ends: list[float], error: Exception, kind: type[Exception], ends_rank: bool
) -> None:
    with pytest.raises(kind) as told:
        memory_of(worker_that(lambda: raises(error), make_config()))
    assert told.value.ends_rank is ends_rank  # type: ignore[attr-defined]
    assert ends == [train_worker.EXIT_AFTER_S] * ends_rank
