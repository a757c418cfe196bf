"""Moments in bfloat16: rounded without bias by noise that no sharding changes, and as good as float32 for training."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slimefsdp.errors import CheckpointError
from slimefsdp.optim import low_bit
from slimefsdp.optim.low_bit import noise_of, stochastic_round_
from slimefsdp.optim.optimizer import update_shards
from tests.support.comparisons import largest_difference
from tests.support.moments import SPREADS, loads_other, trained
from tests.support.optimizers import optimizer_of
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool

SHAPES = {"matrix": (5, 9), "vector": (7,), "thin": (1, 4), "stack": (5, 3, 2), "large": (40, 30)}
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3, "undecayed": ["vector"]}


def noise_by_hand(name: str, key: str, place: int) -> int:
    """By whole numbers of Python."""
    start = int.from_bytes(hashlib.sha256(f"{key} {name}".encode()).digest()[:4], "little")
    x = (place * 0x9E3779B1 + start) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_noise_is_a_hash_of_the_place_in_the_whole_parameter() -> None:
    like = torch.empty(0)
    for key in ("0 0", "0 1", "17 1000000"):
        pieces = [("a", 0, 50), ("b", 2**31 - 20, 40), ("a", 2**32 - 5, 10)]
        expected = [noise_by_hand(name, key, first + i) for name, first, count in pieces for i in range(count)]
        assert [value % 2**32 for value in noise_of(pieces, key, like).tolist()] == expected
        for name, first, count in pieces:  # cut otherwise
            halves = [(name, first, 7), (name, first + 7, count - 7)]
            whole = noise_of([(name, first, count)], key, like)
            assert torch.equal(noise_of(halves, key, like), whole)


def test_noise_is_spread_evenly_and_differs_by_update_and_parameter() -> None:
    found = [noise_of([(name, 0, 2**16)], key, torch.empty(0)) for name in "ab" for key in ("0 0", "0 1")]
    for noise in found:
        for bits in (noise & 0xFFFF, (noise >> 16) & 0xFFFF):
            counts = torch.bincount(bits >> 8, minlength=256).double()  # 256 expected in each
            assert (counts - 256).square().sum().item() / 256 < 350  # chi squared of 255 degrees: 255 +- 23
    values = torch.stack([noise.double() for noise in found])
    # of the same noise at two places, moments, parameters or updates nothing can be told from each other
    assert (torch.corrcoef(values) - torch.eye(4)).abs().max() < 0.02
    assert torch.corrcoef(torch.stack([values[0, 1:], values[0, :-1]]))[0, 1].abs() < 0.02
    halves = torch.stack([(found[0] & 0xFFFF).double(), ((found[0] >> 16) & 0xFFFF).double()])
    assert torch.corrcoef(halves)[0, 1].abs() < 0.02


@pytest.mark.parametrize("value", [1.0 + 2**-12, -3.14159, 1e-30, 2.7e-42, 65504.0, 0.0, 1.0])
def test_rounding_takes_one_of_two_neighbours_and_is_right_on_average(value: float) -> None:
    exact = torch.tensor(value, dtype=torch.float32)
    found = stochastic_round_(exact.repeat(2**16).clone(), torch.arange(2**16, dtype=torch.int32))  # all noise once
    halves = found.bfloat16()
    assert torch.equal(halves.float(), found) and halves.unique().numel() <= 2
    assert found.double().mean().item() == exact.item()
    assert (found - exact).abs().max() <= max(abs(value) * 2**-7, 1e-40)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {
        n: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for n, s in SHAPES.items()
    }


def gradients(update: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + update)
    return {name: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for name, s in SHAPES.items()}


def steps_on_ranks(rank: int, copies: int, dtype: torch.dtype, bucket: int) -> dict[str, list[torch.Tensor]]:
    """Weights and both moments after four steps."""
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies))

    def shards(whole: torch.Tensor) -> Any:
        return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])

    named = {name: nn.Parameter(shards(parameter.detach())) for name, parameter in parameters(dtype).items()}
    optimizer = optimizer_of(named.items(), "adamw", state_dtype=torch.bfloat16, seed=5, **OPTIONS)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(low_bit.BUCKET_ELEMENTS, "cpu", bucket)
        for update in range(4):
            for name, gradient in gradients(update, dtype).items():
                named[name].grad = shards(gradient)
            update_shards(optimizer, update=update)
    states = {name: optimizer.state[parameter] for name, parameter in named.items()}
    assert all(state["step"] == 4 and state["exp_avg"].dtype == torch.bfloat16 for state in states.values())
    return {
        name: [one.full_tensor().detach().clone() for one in (p, states[name]["exp_avg"], states[name]["exp_avg_sq"])]
        for name, p in named.items()
    }


def by_hand(dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """The same from the formulas of AdamW, on whole tensors, each moment rounded by noise of Python's numbers."""
    found = {}
    for name, parameter in parameters(dtype).items():
        weight = parameter.detach().clone()
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for update in range(4):
            gradient = gradients(update, dtype)[name]
            if name != "vector":
                weight *= 1 - 0.1 * 0.3
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient.square()
            unbiased = second / (1 - 0.95 ** (update + 1))
            weight -= 0.1 / (1 - 0.9 ** (update + 1)) * first / (unbiased.sqrt() + 1e-8)
            noise = np.array(
                [noise_by_hand(name, f"5 {update}", place) for place in range(weight.numel())], dtype=np.int64
            )
            low, high = (
                torch.from_numpy(bits).to(torch.int32).view(weight.shape) for bits in (noise & 0xFFFF, noise >> 16)
            )
            first = stochastic_round_(first.float(), low).to(dtype)
            second = stochastic_round_(second.float(), high).to(dtype)
        found[name] = [weight, first.bfloat16(), second.bfloat16()]
    return found


@pytest.mark.parametrize(
    ("world", "copies", "bucket"),
    [(1, 1, 10**6), (2, 1, 100), (2, 2, 7), (4, 2, 50)],
)
def test_steps_on_any_ranks_are_those_of_the_formulas(ranks: RankPool, world: int, copies: int, bucket: int) -> None:
    plain = by_hand(torch.float64)
    for ours in ranks.run(world, steps_on_ranks, copies, torch.float64, bucket):
        for name in SHAPES:
            assert (ours[name][0] - plain[name][0]).abs().max() <= 1e-12
            assert torch.equal(ours[name][1], plain[name][1]) and torch.equal(ours[name][2], plain[name][2])


def test_in_float32_all_ranks_have_the_bits_of_one(ranks: RankPool) -> None:
    alone = ranks.run(1, steps_on_ranks, 1, torch.float32, 10**6)[0]
    for world, bucket in ((2, 10**6), (2, 33), (3, 64)):
        for ours in ranks.run(world, steps_on_ranks, 1, torch.float32, bucket):
            # a weight may differ in its last bit, by where in a vector of the CPU an element is
            assert all(torch.allclose(ours[name][0], alone[name][0], rtol=1e-6, atol=1e-7) for name in SHAPES)
            same = [torch.equal(ours[name][i], alone[name][i]) for name in SHAPES for i in (1, 2)]
            assert all(same)


def test_a_second_moment_that_rounding_to_nearest_would_freeze_follows_its_gradients() -> None:
    """Gradients of 2 after a second moment of 1 under beta 0.999: a step changes it by less than half its last bit."""
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = optimizer_of(
        [("p", parameter)], "adamw", state_dtype=torch.bfloat16, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    assert torch.tensor(1.0 * 0.999 + 0.001 * 4).bfloat16() == 1.0
    for update in range(500):
        parameter.grad = torch.full_like(parameter, 2.0)
        update_shards(optimizer, update=update)
    expected = 4 - 3 * 0.999**500
    found = optimizer.state[parameter]["exp_avg_sq"].double()
    assert found.mean().item() == pytest.approx(expected, rel=0.01) and found.std() > 0


class WaitsForDevice(TorchDispatchMode):
    """What has the host wait for a GPU: a tensor that is made of its numbers, and a number that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.uint8])
def test_an_update_has_the_host_wait_for_nothing(state_dtype: torch.dtype) -> None:
    named = [(f"p{i}", nn.Parameter(torch.ones(4, 64))) for i in range(3)]
    optimizer = optimizer_of(named, "adamw", state_dtype=state_dtype, **OPTIONS)
    for update in range(2):
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        waits = WaitsForDevice()
        with waits:  # the first update makes tables that are kept
            update_shards(optimizer, update=update)
    assert not waits.found
    with waits:
        torch.tensor([1, 2]).sum().item()
    assert len(waits.found) == 2


# ---------------------------------------------------------------------- trainers

SMALL: dict[str, Any] = {"name": "adamw", "lr": 0.01, "eps": 1e-3, "state_dtype": "bfloat16"}


@pytest.mark.parametrize("spread", SPREADS)
def test_training_and_resuming_on_any_mesh_end_as_on_one_rank(
    folder: Path, ranks: RankPool, tmp_path: Path, spread: str
) -> None:
    run, batch = {"dir": str(tmp_path)}, make_batch(folder)
    (alone,) = ranks.run(1, trained, settings(folder, optim=SMALL, run=run), batch, False, True)
    config = settings(folder, optim=SMALL, run=run, **SPREADS[spread])
    for loads in (False, True):
        for ours in ranks.run(config.ranks, trained, config, batch, loads, False):
            assert largest_difference(ours["weights"], alone["weights"]) <= 1e-12 and ours["in sync"]
    (again,) = ranks.run(1, trained, settings(folder, optim=SMALL, run=run), batch, True, False)
    assert largest_difference(again["weights"], alone["weights"]) == 0
    exact = ranks.run(1, trained, settings(folder, optim={**SMALL, "state_dtype": "auto"}), batch, False, False)[0]
    assert 1e-6 < largest_difference(exact["weights"], alone["weights"]) < 0.05
    assert exact["bytes"] / alone["bytes"] == pytest.approx(4, rel=0.01)  # float64 against bfloat16


@pytest.mark.parametrize("dtypes", [("auto", "bfloat16"), ("bfloat16", "auto")], ids=str)
def test_a_checkpoint_of_another_dtype_is_refused(
    folder: Path, ranks: RankPool, tmp_path: Path, dtypes: tuple[str, str]
) -> None:
    run, batch = {"dir": str(tmp_path)}, make_batch(folder)
    configs = [settings(folder, run=run, optim={**SMALL, "state_dtype": dtype}) for dtype in dtypes]
    (error,) = ranks.run(1, loads_other, *configs, batch)[0]
    assert isinstance(error, CheckpointError) and error.field == "optim.state_dtype" and "bfloat16" in str(error)
