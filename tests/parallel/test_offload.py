"""Sleeping tensors: their memory is gone, they stay the same objects, and they wake with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimefsdp.errors import ConfigError
from slimefsdp.parallel.offload import Sleeper
from slimefsdp.parallel.residency import TAGS, Residency


def make_tensors() -> list[torch.Tensor]:
    """Two that share one storage, one that is part of a larger one, an empty one, and other dtypes."""
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    return [base, base[2:4], torch.randn(8)[1:3], torch.zeros(0, 3), torch.arange(5), torch.randn(3).bfloat16()]


STORAGE_BYTES = 6 * 4 * 4 + 8 * 4 + 5 * 8 + 3 * 2  # each distinct storage once


def test_memory_is_gone_while_asleep_and_bits_are_back_afterwards() -> None:
    tensors = make_tensors()
    copies, addresses = [tensor.clone() for tensor in tensors], [tensor.storage_offset() for tensor in tensors]
    sleeper = Sleeper()
    for _ in range(3):
        report = sleeper.sleep(tensors)
        assert (report.device_bytes_before, report.device_bytes_after) == (STORAGE_BYTES, 0)
        assert report.host_bytes == sleeper.host_bytes == STORAGE_BYTES
        assert sleeper.is_asleep and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        report = sleeper.wake_up()
        assert (report.device_bytes_before, report.device_bytes_after) == (0, STORAGE_BYTES)
        assert not sleeper.is_asleep
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert addresses == [tensor.storage_offset() for tensor in tensors]
    tensors[1].fill_(7.0)
    assert (tensors[0][2:4] == 7.0).all()  # still one storage


def test_what_changed_between_sleeps_is_what_wakes() -> None:
    (tensor,) = tensors = [torch.zeros(4)]
    sleeper = Sleeper()
    for value in (1.0, 2.0):
        tensor.fill_(value)
        sleeper.sleep(tensors)
        sleeper.wake_up()
        assert (tensor == value).all()


def test_a_second_sleep_or_wake_does_nothing() -> None:
    tensors = make_tensors()
    copies, sleeper = [tensor.clone() for tensor in tensors], Sleeper()
    assert sleeper.wake_up().device_bytes_after == 0
    sleeper.sleep(tensors)
    again = sleeper.sleep(tensors)  # copying the freed storages would lose everything
    assert (again.device_bytes_before, again.host_bytes) == (0, STORAGE_BYTES)
    sleeper.wake_up()
    assert sleeper.wake_up().device_bytes_after == 0
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_another_set_of_tensors_takes_buffers_of_its_own_sizes() -> None:
    sleeper, small, large = Sleeper(), torch.ones(2), torch.ones(100)
    for tensor in (small, large, small):
        sleeper.sleep([tensor])
        sleeper.wake_up()
        assert (tensor == 1).all() and sleeper.host_bytes == tensor.nbytes


@pytest.mark.parametrize("pin_memory", [True, False])
def test_host_buffers_are_page_locked_only_if_asked_for(monkeypatch: pytest.MonkeyPatch, pin_memory: bool) -> None:
    asked, empty = [], torch.empty

    def recording(*size: int, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **others)  # without CUDA nothing can be page-locked

    monkeypatch.setattr("slimefsdp.parallel.offload.torch.empty", recording)
    tensors = [torch.ones(3), torch.ones(5)]
    Residency(lambda tag: tensors, pin_memory=pin_memory).sleep(("parameters",))
    assert asked.count(True) == (2 if pin_memory else 0)


def test_each_tag_sleeps_for_itself_and_reports_add_up() -> None:
    held = {tag: [torch.ones(size)] for tag, size in zip(TAGS, (3, 5, 7), strict=True)}
    residency, device = Residency(lambda tag: held[tag]), torch.device("cpu")
    report = residency.sleep(("reference", "parameters"))
    assert (report.device_bytes_before, report.device_bytes_after, report.host_bytes) == (40, 0, 40)
    memory = residency.memory(device)
    assert (memory.parameters, memory.optimizer, memory.reference, memory.host_buffers) == (0, 20, 0, 40)
    assert memory.asleep == ("parameters", "reference")
    assert residency.wake_up(("parameters",)).device_bytes_after == 12
    assert residency.memory(device).asleep == ("reference",)
    assert residency.wake_up(TAGS).device_bytes_after == 28 and residency.memory(device).asleep == ()
    assert residency.sleep(()).device_bytes_before == 0


def test_an_unknown_tag_is_refused_before_anything_sleeps() -> None:
    residency = Residency(lambda _: [torch.ones(3)])
    for call in (residency.sleep, residency.wake_up):
        with pytest.raises(ConfigError, match="'weights' is not a tag") as caught:
            call(("parameters", "weights"))  # type: ignore[arg-type]
        assert caught.value.hint is not None and "optimizer" in caught.value.hint
    assert residency.memory(torch.device("cpu")).asleep == ()
