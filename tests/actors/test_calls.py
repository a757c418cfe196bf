"""Waiting for several actors: one deadline, and of several failures the one that caused the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.calls import GRACE_S, CallFuture, lost_a_peer
from slimefsdp.errors import BatchError, WorkerDied, WorkerHung


@pytest.fixture
def rank_pair(cluster: None) -> Iterator[list[Any]]:
    """Two processes without torch that do as they are told."""

    class Rank:  # defined here, so that it travels by value and the processes need not import this file
        def act(self, seconds: float = 0.0, error: Exception | None = None, dies: bool = False) -> float:
            import os
            import time

            time.sleep(seconds)
            if dies:
                os._exit(1)
            if error is not None:
                raise error
            return seconds

    actors = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)]
    ray.get([actor.act.remote() for actor in actors], timeout=60)
    yield actors
    for actor in actors:
        ray.kill(actor)


def call(actors: list[Any], *actions: dict[str, Any], timeout_s: float = 30.0, **options: Any) -> CallFuture:
    refs = [actor.act.remote(**action) for actor, action in zip(actors, actions, strict=True)]
    return CallFuture(refs, name="act", timeout_s=timeout_s, **{"first_only": False, **options})


def test_results_come_in_rank_order_whoever_is_first(rank_pair: list[Any]) -> None:
    assert call(rank_pair, {"seconds": 0.3}, {}).result() == [0.3, 0.0]
    assert call(rank_pair, {"seconds": 0.3}, {}, first_only=True).result() == 0.3


def test_one_deadline_holds_for_all_and_the_late_rank_is_named(rank_pair: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerHung, match=r"act did not finish within 0\.5 s") as hung:
        call(rank_pair, {}, {"seconds": 5.0}, timeout_s=0.5).result()
    assert time.monotonic() - started < 3
    assert (hung.value.rank, hung.value.phase, hung.value.field) == (1, "act", "cluster.call_timeout_s")
    with pytest.raises(WorkerHung) as renumbered:
        call(rank_pair[1:], {"seconds": 5.0}, timeout_s=0.5, first_rank=7).result()
    assert renumbered.value.rank == 7


def test_a_failure_does_not_wait_for_ranks_that_hang(rank_pair: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(BatchError, match="bad tokens") as failed:
        call(rank_pair, {"seconds": 20.0}, {"error": BatchError("bad tokens", field="tokens", hint="drop it")}).result()
    assert time.monotonic() - started < GRACE_S + 3
    assert (type(failed.value), failed.value.field, failed.value.hint) == (BatchError, "tokens", "drop it")


LOST = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")


@pytest.mark.parametrize(
    ("first", "second"),
    [(LOST, ValueError("the cause")), (LOST, BatchError("the cause")), (KeyError("a"), BatchError("the cause"))],
    ids=["lost peer, untyped", "lost peer, typed", "untyped, typed"],
)
def test_the_cause_is_reported_though_its_consequence_arrives_first(
    rank_pair: list[Any], first: Exception, second: Exception
) -> None:
    with pytest.raises(type(second), match="the cause"):
        call(rank_pair, {"error": first}, {"seconds": 0.5, "error": second}).result()


def test_a_death_explains_everything_else(rank_pair: list[Any]) -> None:
    with pytest.raises(WorkerDied, match="rank 1 ended during act") as died:
        call(rank_pair, {"error": BatchError("odd")}, {"seconds": 0.5, "dies": True}).result()
    assert (died.value.rank, died.value.phase) == (1, "act")
    with pytest.raises(WorkerDied) as still:
        call(rank_pair, {}, {}).result()
    assert still.value.rank == 1


def test_gloos_words_for_a_lost_peer_are_known() -> None:
    assert lost_a_peer(LOST) and lost_a_peer(RuntimeError("recv: Connection reset by peer"))
    assert not lost_a_peer(ValueError("the cause"))
