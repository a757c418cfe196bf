"""Sleeping tensors: their memory is gone, they stay the same objects, and they wake with the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slimefsdp.distributed.memory_manager import CHUNK_BYTES, HostBuffers, StorageOffloader
from slimefsdp.errors import ResourceError, StateError
from tests.support.refusals import refused


def make_tensors() -> list[torch.Tensor]:
    """Two that share one storage, one that is part of a larger one, an empty one, and other dtypes."""
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    return [base, base[2:4], torch.randn(8)[1:3], torch.zeros(0, 3), torch.arange(5), torch.randn(3).bfloat16()]


STORAGE_BYTES = 6 * 4 * 4 + 8 * 4 + 5 * 8 + 3 * 2  # each distinct storage once


@pytest.mark.parametrize("chunk_bytes", [1, 16, 64, CHUNK_BYTES])
def test_memory_is_gone_while_asleep_and_bits_are_back_afterwards(chunk_bytes: int) -> None:
    tensors = make_tensors()
    copies, offsets = [tensor.clone() for tensor in tensors], [tensor.storage_offset() for tensor in tensors]
    offloader = StorageOffloader(chunk_bytes=chunk_bytes)
    for _ in range(3):
        report = offloader.sleep(tensors)
        assert (report.device_bytes_before, report.device_bytes_after) == (STORAGE_BYTES, 0)
        assert STORAGE_BYTES <= report.host_bytes == offloader.host_bytes < 2 * STORAGE_BYTES
        assert report.bytes_per_s == STORAGE_BYTES / report.seconds
        assert offloader.is_asleep and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        report = offloader.wake_up()
        assert (report.device_bytes_before, report.device_bytes_after) == (0, STORAGE_BYTES)
        assert report.bytes_per_s == STORAGE_BYTES / report.seconds
        assert not offloader.is_asleep
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert offsets == [tensor.storage_offset() for tensor in tensors]
    tensors[1].fill_(7.0)
    assert (tensors[0][2:4] == 7.0).all()  # still one storage


def test_any_sets_of_tensors_share_the_host_memory_of_the_largest() -> None:
    """As gradients come and go; what a set had in the host buffers before must not show in the next one."""
    random.seed(0)
    offloader, largest = StorageOffloader(chunk_bytes=256), 0
    for _ in range(50):
        tensors = [
            torch.randint(0, 256, (random.randrange(200),), dtype=torch.uint8) for _ in range(random.randrange(9))
        ]
        copies = [tensor.clone() for tensor in tensors]
        largest = max(largest, sum(tensor.nbytes for tensor in tensors))
        before = offloader.host_bytes
        offloader.sleep(tensors)
        tensors.reverse()  # nobody's order matters but the one that slept
        copies.reverse()
        offloader.wake_up()
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
        assert offloader.host_bytes == before or before < largest <= offloader.host_bytes
    assert largest > 3 * 256 and offloader.host_bytes < largest + 256


@pytest.mark.parametrize("needed", [1, 1000, 2**20, 2**20 + 1, 24 * 10**6, 200 * 10**6])
def test_little_host_memory_is_taken_in_vain_and_in_few_chunks(needed: int) -> None:
    host_buffers = HostBuffers(pin_memory=False)
    host_buffers.grow_to(needed)  # never written, so nothing of it is resident
    assert needed <= host_buffers.nbytes < min(2 * needed, needed + 2**20) + 1
    assert len(host_buffers._chunks) <= needed / CHUNK_BYTES + 7


# ---------------------------------------------------------------------- failures half-way


class Failing:
    """Stands for a function of torch: raises at its n-th call from now on."""

    def __init__(self, function: Any, error: Exception, after: int) -> None:
        self.function, self.error, self.left = function, error, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no\nmore"), torch.OutOfMemoryError("none")], ids=repr)
def test_without_host_memory_everything_stays_awake(
    monkeypatch: pytest.MonkeyPatch, error: Exception, after: int
) -> None:
    tensors = make_tensors()
    copies, offloader = [tensor.clone() for tensor in tensors], StorageOffloader(chunk_bytes=128)
    with monkeypatch.context() as patched:
        patched.setattr("slimefsdp.distributed.memory_manager.torch.empty", Failing(torch.empty, error, after))
        with refused(ResourceError, "tags", STORAGE_BYTES, "host") as caught:
            offloader.sleep(tensors)
    assert "\n" not in str(caught.value)
    assert not offloader.is_asleep and all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert offloader.sleep(tensors).device_bytes_before == STORAGE_BYTES  # and with memory it works
    offloader.wake_up()
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_a_copy_to_the_host_that_fails_leaves_everything_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()
    copies, offloader = [tensor.clone() for tensor in tensors], StorageOffloader()
    monkeypatch.setattr(HostBuffers, "views", Failing(HostBuffers.views, RuntimeError("lost the device"), 0))
    with pytest.raises(RuntimeError, match="lost the device"):
        offloader.sleep(tensors)
    assert not offloader.is_asleep and all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


class Unresizable:
    """A storage that cannot have its memory back before `allowed` is set."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.allowed = storage, False

    def resize_(self, size: int) -> None:
        if size and not self.allowed:
            raise RuntimeError("out of memory")
        self.storage.resize_(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)


def test_without_device_memory_everything_stays_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()
    copies, offloader = [tensor.clone() for tensor in tensors], StorageOffloader()
    offloader.sleep(tensors)
    storage, size = offloader._asleep[2]
    last = Unresizable(storage)
    offloader._asleep[2] = last, size  # type: ignore[assignment]
    with refused(ResourceError, "tags", STORAGE_BYTES, "device"):
        offloader.wake_up()
    assert offloader.is_asleep and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    offloader._asleep[2] = storage, size
    offloader.wake_up()
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_memory_that_numpy_has_seen_is_refused_before_anything_is_freed() -> None:
    tensors = make_tensors()
    array, offloader = tensors[4].numpy(), StorageOffloader()
    with refused(StateError, "tags"):
        offloader.sleep(tensors)
    assert not offloader.is_asleep and array.tolist() == tensors[4].tolist() == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- CUDA, by what torch is asked for


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_what_is_still_queued_sleeps_too_and_the_memory_is_really_free() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.full((1 << 22,), float(number), device=device) for number in range(8)]
    expected = [torch.full((1 << 22,), float(number)) for number in range(8)]
    offloader, moved = StorageOffloader(pin_memory=True, chunk_bytes=2**20), 8 * (4 << 22)
    for _ in range(5):
        for tensor, copy in zip(tensors, expected, strict=True):
            for _ in range(20):
                tensor.add_(1.0)  # the host runs ahead of these
            copy.add_(20.0)
        before = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
        offloader.sleep(tensors)
        assert torch.cuda.memory_allocated(device) == before[0] - moved
        assert torch.cuda.mem_get_info(device)[0] >= before[1] + moved * 9 // 10  # the driver has it back
        garbage = torch.full((16 << 20,), -1.0, device=device)  # somebody else's, in the memory that was freed
        del garbage
        offloader.wake_up()
        doubled = [tensor * 2 for tensor in tensors]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, expected, strict=True))
        assert all(torch.equal(a.cpu(), b * 2) for a, b in zip(doubled, expected, strict=True))
        del doubled
