"""The copy that a save in the background writes, and what its callers learn of it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from slimefsdp.checkpoint.save_load import BackgroundSave
from slimefsdp.checkpoint.shards import ShardedTensor
from slimefsdp.errors import PeerFailed, ResourceError
from tests.support.refusals import refused
from tests.support.waiting import wait_until

NO_GROUP = None  # copying needs none


def share(tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor(tensor, tuple(tensor.shape), 0)


def copied(background: BackgroundSave, tensors: dict[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    buffers = background.buffers_for(tensors)
    background.copy(tensors, buffers)
    return buffers


@pytest.mark.filterwarnings("ignore:the save in the background failed")
def test_whoever_changes_the_state_waits_for_the_copy_also_of_one_that_fails() -> None:
    background = BackgroundSave(NO_GROUP)  # type: ignore[arg-type]
    background.wait_for_copy()  # nothing is being copied
    may_copy = threading.Event()

    def write(tensors: dict[str, ShardedTensor]) -> Path:
        may_copy.wait(60)
        background.copy(tensors, {})  # a buffer is missing
        return Path("step_1")

    for tensors, error in (({}, None), ({"weight": share(torch.zeros(2))}, PeerFailed)):
        background.start(partial(write, tensors))
        waiting = threading.Thread(target=background.wait_for_copy)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        may_copy.set()
        waiting.join(60)
        assert not waiting.is_alive()
        with pytest.raises(error) if error else nullcontext():
            background.finish()
        may_copy.clear()
    assert background.is_lost  # its collectives no longer match those of its peers


def test_copies_are_of_their_moment_and_their_memory_is_used_again() -> None:
    background = BackgroundSave(NO_GROUP)  # type: ignore[arg-type]
    weight, other = torch.randn(6, 4).t(), torch.tensor(3.0)
    first = copied(background, {"weight": share(weight), "other": share(other)})
    before = weight.clone()
    address = first["weight"].local.data_ptr()
    weight.add_(1)
    assert torch.equal(first["weight"].local, before) and first["other"].local == 3
    assert background.host_bytes == weight.nbytes + 4
    second = copied(background, {"weight": share(weight)})
    assert torch.equal(second["weight"].local, weight) and second["weight"].local.data_ptr() == address
    assert background.host_bytes == weight.nbytes
    grown = copied(background, {"weight": share(torch.zeros(9, 9))})
    assert grown["weight"].local.shape == (9, 9) and background.host_bytes == 9 * 9 * 4


def test_a_copy_without_memory_says_what_to_do() -> None:
    background = BackgroundSave(NO_GROUP)  # type: ignore[arg-type]
    huge = torch.zeros(1).expand(2**50)
    with refused(ResourceError, "checkpoint.async_save", "weight", 2**52):
        background.buffers_for({"weight": share(huge)})


@pytest.mark.filterwarnings("ignore:the save in the background failed")
def test_a_result_or_error_is_handed_out_once() -> None:
    background = BackgroundSave(NO_GROUP)  # type: ignore[arg-type]
    assert background.finish() is None
    background.start(lambda: Path("step_1"))
    assert background.finish() == Path("step_1") and background.finish() is None

    def fail() -> Path:
        raise ResourceError("full")

    background.start(fail)
    with pytest.raises(ResourceError, match="full"):
        background.finish()
    assert background.finish() is None


def test_a_failure_is_said_also_where_nobody_asks() -> None:
    background = BackgroundSave(NO_GROUP)  # type: ignore[arg-type]

    def fail() -> Path:
        raise ResourceError("full")

    with pytest.warns(UserWarning, match="full") as told:
        background.start(fail)
        assert wait_until(lambda: len(told) > 0)
