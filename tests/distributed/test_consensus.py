"""Ranks agree on values and on errors, whatever the error is made of, and can go on afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimefsdp.distributed import collectives
from slimefsdp.distributed.collectives import all_equal, run_on_first, run_together
from slimefsdp.errors import CheckpointError
from tests.support.rank_pool import RankPool


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def caught(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def ranks_compared(rank: int) -> list[bool]:
    return [all_equal("same", group()), all_equal(f"of {rank}", group()), all_equal("x" * rank, group())]


def test_values_are_equal_only_if_all_ranks_bring_the_same(ranks: RankPool) -> None:
    assert ranks.run(1, ranks_compared) == [[True, True, True]]
    assert ranks.run(3, ranks_compared) == [[True, False, False]] * 3


def gathers_of_agreement(rank: int) -> list[int]:
    """How often values were gathered: where all went well, and where one rank failed."""
    gathered, counts = collectives.gathered, [0]

    def counting(*args: Any) -> list[Any]:
        counts[-1] += 1
        return gathered(*args)

    collectives.gathered = counting  # type: ignore[assignment]
    try:
        run_together(lambda: None, group())
        run_on_first(lambda: None, group())
        all_equal(f"of {rank}", group())
        counts.append(0)
        caught(lambda: run_together(lambda: rank and fail(CheckpointError("disk full")), group()))
    finally:
        collectives.gathered = gathered
    return counts


def test_no_rank_is_sent_what_all_others_say_unless_one_has_an_error(ranks: RankPool) -> None:
    assert ranks.run(2, gathers_of_agreement) == [[0, 1]] * 2


class Unpicklable(Exception):
    """As many client libraries' errors are: it holds a lock."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class NotRebuilt(Exception):
    """Can be pickled, but not rebuilt: Exception passes on one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail(error: Exception) -> None:
    raise error


def together(rank: int) -> list[Any]:
    ran = []
    run_together(lambda: ran.append(rank), group())
    makers: list[Callable[[], Exception]] = [
        lambda: CheckpointError("disk full", field="run.dir", hint="make room"),
        lambda: Unpicklable("a socket broke"),
        lambda: NotRebuilt("a", "b"),
    ]
    errors = []
    for make in makers:
        # rank 0 succeeds: the others' first error reaches it too
        errors.append(caught(lambda make=make: run_together(lambda: rank and fail(make()), group())))
    usable = all_equal("still here", group())
    described = [f"{type(error).__name__}: {error}" for error in errors]
    return [ran, described, errors[0].__dict__ if errors[0] else None, usable]


def test_one_ranks_error_is_raised_by_all(ranks: RankPool) -> None:
    for rank, (ran, described, fields, usable) in enumerate(ranks.run(3, together)):
        assert ran == [rank] and usable
        assert fields["field"] == "run.dir" and fields["hint"] == "make room" and fields["rank"] == 1
        assert "CheckpointError" in described[0] and "disk full" in described[0]
        assert "Unpicklable" in described[1] and "a socket broke" in described[1]
        assert "NotRebuilt" in described[2] and "ab" in described[2]


def own_traceback(rank: int) -> bool:
    error = caught(lambda: run_together(lambda: fail(ValueError(f"of {rank}")), group()))
    assert error is not None and error.__traceback__ is not None
    names, frame = [], error.__traceback__
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next  # type: ignore[assignment]
    return str(error) == "of 0" and ("fail" in names) == (rank == 0)


def test_the_first_error_in_rank_order_counts_and_keeps_its_traceback_at_home(ranks: RankPool) -> None:
    assert ranks.run(2, own_traceback) == [True, True]


def collective_stream(length: int) -> Iterator[int]:
    """Each element takes a collective that every rank must join."""
    for number in range(length):
        total = torch.tensor(number)
        dist.all_reduce(total)
        yield int(total)


def streaming(rank: int, take: int) -> tuple[Any, ...]:
    taken: list[int] = []

    def consume() -> None:
        for value in stream:
            taken.append(value)
            if len(taken) == take:
                raise OSError(28, "No space left on device")

    stream = collective_stream(4)
    error = caught(lambda: run_on_first(consume, group(), stream))
    return taken, type(error), str(error), all_equal("in step", group())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("take", [1, 3, 9])
def test_a_stream_is_taken_by_all_also_when_the_first_rank_fails_half_way(
    ranks: RankPool, world_size: int, take: int
) -> None:
    for rank, (taken, kind, text, in_step) in enumerate(ranks.run(world_size, streaming, take)):
        assert in_step
        assert taken == ([number * world_size for number in range(4)][:take] if rank == 0 else [])
        assert (kind is OSError and "No space left" in text) if take < 4 else kind is type(None)
