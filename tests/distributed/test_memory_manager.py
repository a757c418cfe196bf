"""What a rank holds, by tag: each sleeps for itself, and what fails on one rank fails on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.memory_manager import (
    TAGS,
    HostBuffers,
    MemoryManager,
)
from slimefsdp.errors import ResourceError, SlimeError
from slimefsdp.results import Memory
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal

CPU = torch.device("cpu")


def model_of(size: int) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.arange(size, dtype=torch.float32)))
    return model


def make_memory_manager() -> MemoryManager:
    """12 bytes of parameters, 40 of moments (and a step count), 28 of a reference."""
    memory_manager = MemoryManager(CPU, dist.group.WORLD)
    memory_manager.models["parameters"], memory_manager.models["reference"] = model_of(3), model_of(7)
    moved = nn.Parameter(torch.ones(5))
    memory_manager.optimizer = torch.optim.AdamW([moved])
    moved.grad = torch.ones(5)
    memory_manager.optimizer.step()
    return memory_manager


def refusal(call: Any, *arguments: Any) -> SlimeError | None:
    try:
        call(*arguments)
    except SlimeError as error:
        return error
    return None


def one_tag_after_the_other(rank: int) -> list[Any]:
    memory_manager = make_memory_manager()
    seen: list[Any] = []
    for call, tags in [
        (memory_manager.sleep, ("reference", "parameters")), (memory_manager.wake_up, ("parameters",)),
        (memory_manager.wake_up, TAGS), (memory_manager.sleep, ()), (memory_manager.sleep, ["optimizer"]),
    ]:  # fmt: skip
        report, memory = call(tags), memory_manager.memory()
        seen.append((report.device_bytes_before, report.device_bytes_after, memory.asleep))
        seen.append((memory.parameters, memory.optimizer, memory.reference, memory.host_buffers))
    (state,) = memory_manager.optimizer.state.values()
    return [*seen, state["step"].item()]


def test_each_tag_sleeps_for_itself_and_reports_add_up(ranks: RankPool) -> None:
    both = ("parameters", "reference")
    assert ranks.run(1, one_tag_after_the_other)[0] == [
        (40, 0, both), (0, 40, 0, 16 + 32),
        (0, 12, ("reference",)), (12, 40, 0, 16 + 32),
        (0, 28, ()), (12, 40, 28, 16 + 32),
        (0, 0, ()), (12, 40, 28, 16 + 32),
        (40, 0, ("optimizer",)), (12, 0, 28, 16 + 32 + 64),
        1.0,  # the step count is on the host anyway
    ]  # fmt: skip


def shared_gradients(rank: int) -> list[int]:
    memory_manager = MemoryManager(CPU, dist.group.WORLD)
    model = memory_manager.models["parameters"] = nn.Module()
    for name in ("first", "second"):
        model.register_parameter(name, nn.Parameter(torch.zeros(4)))
    flat = torch.ones(8)  # as FSDP makes the gradients of a unit
    model.first.grad, model.second.grad = flat[:4], flat[4:]
    before = memory_manager.memory().parameters
    return [before, memory_manager.sleep(TAGS).device_bytes_before, memory_manager.memory().parameters]


def test_memory_counts_each_storage_once(ranks: RankPool) -> None:
    assert ranks.run(1, shared_gradients)[0] == [64, 64, 0]


def gradients_that_come_and_go(rank: int) -> list[Any]:
    memory_manager = make_memory_manager()
    weight = memory_manager.models["parameters"].weight
    seen: list[Any] = []
    for has_gradient in (False, True, True, False, True):
        weight.grad = torch.full((3,), 7.0) if has_gradient else None
        gradient = weight.grad
        report = memory_manager.sleep(("parameters",))
        freed = weight.untyped_storage().nbytes() + (weight.grad.untyped_storage().nbytes() if has_gradient else 0)
        memory_manager.wake_up(("parameters",))
        same = weight.grad is gradient and (gradient is None or gradient.tolist() == [7.0] * 3)
        seen.append((report.device_bytes_before, freed, same, weight.tolist()))
    memory_manager.sleep(("parameters",))
    weight.grad = None  # dropped in its sleep
    memory_manager.wake_up(("parameters",))
    return [*seen, weight.tolist(), memory_manager.memory().parameters]


def test_gradients_sleep_with_their_parameters(ranks: RankPool) -> None:
    weights = [0.0, 1.0, 2.0]
    expected = [(24 if has_gradient else 12, 0, True, weights) for has_gradient in (False, True, True, False, True)]
    assert ranks.run(1, gradients_that_come_and_go)[0] == [*expected, weights, 12]


def one_rank_without_memory(rank: int) -> dict[str, Any]:
    memory_manager = make_memory_manager()
    grow = HostBuffers.grow_to

    def failing(self: HostBuffers, nbytes: int) -> None:
        raise MemoryError

    if rank == 1:
        HostBuffers.grow_to = failing  # type: ignore[method-assign]
    error = refusal(memory_manager.sleep, ("parameters",))
    HostBuffers.grow_to = grow  # type: ignore[method-assign]
    asleep = memory_manager.memory().asleep
    memory_manager.wake_up(("parameters",))  # collective on all ranks, whatever each of them has to do
    awake, weights = memory_manager.memory().asleep, memory_manager.models["parameters"].weight.tolist()
    memory_manager.sleep(("parameters",))
    again = memory_manager.memory().asleep
    memory_manager.wake_up(TAGS)
    return {"error": error, "asleep": asleep, "awake": awake, "again": again,
            "weights": [weights, memory_manager.models["parameters"].weight.tolist()]}  # fmt: skip


def test_a_rank_without_host_memory_fails_all_alike_and_loses_nothing(ranks: RankPool) -> None:
    results = ranks.run(2, one_rank_without_memory)
    assert [result["asleep"] for result in results] == [("parameters",), ()]
    for result in results:
        assert isinstance(result["error"], ResourceError) and str(result["error"]) == str(results[1]["error"])
        assert_refusal(result["error"], ResourceError, "tags", 12, "host")
        assert result["awake"] == () and result["again"] == ("parameters",)
        assert result["weights"] == [[0.0, 1.0, 2.0]] * 2


def model_that_is_dropped(rank: int) -> list[Any]:
    memory_manager = make_memory_manager()
    seen = []
    for asleep_first in (True, False):
        old = memory_manager.models["reference"]
        if asleep_first:
            memory_manager.sleep(("reference",))
        memory_manager.drop("reference")
        memory = memory_manager.memory()
        seen.append((old.weight.untyped_storage().nbytes(), memory.reference, memory.asleep))
        memory_manager.models["reference"] = new = model_of(9)
        memory_manager.sleep(("reference",))
        memory_manager.wake_up(("reference",))
        seen.append(new.weight.tolist())
    return seen


def test_a_dropped_model_gives_its_memory_back_and_another_takes_its_place(ranks: RankPool) -> None:
    assert ranks.run(1, model_that_is_dropped)[0] == [(0, 0, ()), [float(i) for i in range(9)]] * 2


def what_lies_elsewhere(rank: int) -> list[Any]:
    memory_manager = MemoryManager(torch.device("meta"), dist.group.WORLD)  # stands for a device that holds none of it
    memory_manager.models["parameters"] = model_of(3)
    return [memory_manager.sleep(TAGS), memory_manager.memory(), memory_manager.models["parameters"].weight.tolist()]


def test_what_lies_on_the_host_already_is_left_alone(ranks: RankPool) -> None:
    report, memory, weights = ranks.run(1, what_lies_elsewhere)[0]
    assert (report.device_bytes_before, report.device_bytes_after, report.host_bytes) == (0, 0, 0)
    assert memory == Memory(0, 0, 0, 0, ()) and weights == [0.0, 1.0, 2.0]
