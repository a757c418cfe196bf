"""Moments in 8 bits: codes of the paper's map in blocks that no mesh cuts, and as good as float32 for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from slimefsdp.optim import low_bit
from slimefsdp.optim.low_bit import block_of, dequantize, dynamic_map, quantize_
from slimefsdp.optim.optimizer import update_shards
from tests.support.comparisons import largest_difference
from tests.support.moments import SPREADS, trained
from tests.support.optimizers import optimizer_of
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

SHAPES = {"matrix": (5, 64), "vector": (7,), "thin": (3, 4), "stack": (5, 6, 32), "wide": (9, 512), "prime": (2, 257)}
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3, "undecayed": ["vector"]}
CPU = torch.device("cpu")


def nearest(values: torch.Tensor, is_signed: bool, block: int) -> torch.Tensor:
    """Each value as the nearest one of its block's largest times the map, by looking at all 256; of unsigned values
    those above 0 as the nearest one above 0.
    """
    blocks = values.double().reshape(-1, block)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    table = dynamic_map(is_signed, CPU).double()
    distance = (blocks.unsqueeze(-1) / scale.unsqueeze(-1) - table).abs()
    if not is_signed:
        distance[..., 0] = torch.where(blocks > 0, torch.inf, distance[..., 0])
    return (table[distance.argmin(-1)] * scale).view(values.shape)


@pytest.mark.parametrize("is_signed", [True, False])
def test_values_become_the_nearest_of_their_block(is_signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20, 128, generator=generator) * torch.logspace(-6, 3, 20).unsqueeze(1)
    values[0] *= torch.logspace(-8, 0, 128)
    values = values if is_signed else values.square()
    codes, scales = torch.zeros(20, 128, dtype=torch.uint8), torch.zeros(20, 2)
    quantize_(codes, scales, values, is_signed=is_signed)
    found = dequantize(codes, scales, is_signed=is_signed)
    assert torch.allclose(found.double(), nearest(values, is_signed, 64), rtol=1e-6, atol=0)
    again, scales_again = torch.zeros_like(codes), torch.zeros_like(scales)
    quantize_(again, scales_again, found, is_signed=is_signed)
    largest = found.abs().view(40, 64).amax(dim=1).view(20, 2)
    assert torch.equal(largest, scales_again) and codes.unique().numel() > 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_moment_above_zero_is_never_kept_as_zero(dtype: torch.dtype) -> None:
    values = torch.logspace(-44, 0, 64, dtype=torch.float64).to(dtype).repeat(3, 1)
    values[1] *= 1e30  # to the largest, the least are what no float32 can be
    values[2, ::2] = 0.0
    codes, scales = torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 1)
    quantize_(codes, scales, values, is_signed=False)
    assert torch.equal(codes > 0, values > 0)
    least = dynamic_map(False, CPU)[1] * scales
    assert torch.equal(dequantize(codes, scales, is_signed=False)[:2, :30], least[:2].expand(2, 30))


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {
        n: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for n, s in SHAPES.items()
    }


def gradients(update: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + update)
    return {name: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for name, s in SHAPES.items()}


def steps_on_ranks(rank: int, copies: int, bucket: int) -> dict[str, list[torch.Tensor]]:
    """Weights, and both moments as values, after four steps."""
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies))

    def shards(whole: torch.Tensor) -> Any:
        return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])

    named = {name: nn.Parameter(shards(parameter.detach())) for name, parameter in parameters(torch.float64).items()}
    optimizer = optimizer_of(named.items(), "adamw", state_dtype=torch.uint8, **OPTIONS)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(low_bit.BUCKET_ELEMENTS, "cpu", bucket)
        for update in range(4):
            for name, gradient in gradients(update, torch.float64).items():
                named[name].grad = shards(gradient)
            update_shards(optimizer, update=update)
    found = {}
    for name, parameter in named.items():
        state = {
            key: getattr(value, "full_tensor", lambda own=value: own)()
            for key, value in optimizer.state[parameter].items()
        }
        moments = [state["exp_avg"], state["exp_avg_sq"]]
        if block_of(SHAPES[name]) is not None:
            assert all(moment.dtype == torch.uint8 for moment in moments)
            moments = [
                dequantize(moment, state[f"{key}_scale"], is_signed=key == "exp_avg")
                for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)
            ]
        assert state["step"] == 4
        found[name] = [parameter.full_tensor().detach().clone(), *moments]
    return found


def by_hand() -> dict[str, list[torch.Tensor]]:
    """The same from the formulas of AdamW, on whole tensors, with moments that are `nearest`."""
    found = {}
    for name, parameter in parameters(torch.float64).items():
        weight, block = parameter.detach().clone(), block_of(SHAPES[name])
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for update in range(4):
            gradient = gradients(update, torch.float64)[name]
            if name != "vector":
                weight *= 1 - 0.1 * 0.3
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient.square()
            unbiased = second / (1 - 0.95 ** (update + 1))
            weight -= 0.1 / (1 - 0.9 ** (update + 1)) * first / (unbiased.sqrt() + 1e-8)
            if block is not None:
                first, second = nearest(first, True, block), nearest(second, False, block)
        found[name] = [weight, first, second]
    return found


@pytest.mark.parametrize(
    ("world", "copies", "bucket"),
    [(1, 1, 10**6), (2, 1, 100), (2, 2, 600), (4, 2, 50)],
)
def test_steps_on_any_ranks_have_the_bits_of_one_and_are_those_of_the_formulas(
    ranks: RankPool, world: int, copies: int, bucket: int
) -> None:
    plain, alone = by_hand(), ranks.run(1, steps_on_ranks, 1, 10**6)[0]
    for ours in ranks.run(world, steps_on_ranks, copies, bucket):
        for name in SHAPES:
            # scales are float32
            assert all(
                torch.allclose(a.double(), b, rtol=1e-5, atol=1e-6)
                for a, b in zip(ours[name], plain[name], strict=True)
            )
            assert (ours[name][0] - alone[name][0]).abs().max() <= 1e-12
            if block_of(SHAPES[name]) is not None:
                assert torch.equal(ours[name][1], alone[name][1]) and torch.equal(ours[name][2], alone[name][2])


def steps_beside_large_gradients(dtype: torch.dtype | None, ratio: float) -> torch.Tensor:
    """[updates, 4, 64]: what each update takes off a weight at a rate of 1, where the gradients of column 0 are `ratio`
    times the others, and after 150 updates those of every second column are 0.
    """
    weight = nn.Parameter(torch.zeros(4, 64))
    how: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = optimizer_of([("w", weight)], "adamw", state_dtype=dtype, **how)
    generator = torch.Generator().manual_seed(0)
    steps = []
    for update in range(300):
        gradient = torch.randn(4, 64, generator=generator) / ratio
        gradient[:, 0] *= ratio
        if update >= 150:
            gradient[:, 1::2] = 0.0
        before = weight.detach().clone()
        weight.grad = gradient
        update_shards(optimizer, update=update)
        steps.append(before - weight.detach())
    return torch.stack(steps)


@pytest.mark.parametrize(("ratio", "least", "most"), [(1e2, 0.95, 1.1), (1e3, 0.9, 1.4), (1e4, 0.12, 1.0)])
def test_steps_beside_much_larger_gradients_stay_within_a_small_factor_of_adamws(
    ratio: float, least: float, most: float
) -> None:
    ours, exact = steps_beside_large_gradients(torch.uint8, ratio), steps_beside_large_gradients(None, ratio)
    assert (ours - exact)[0].abs().max() <= 1e-5, "the first update reads no moment"
    assert ours.abs().max() <= 2 * exact.abs().max()
    for updates, columns in ((slice(1, 150), slice(1, None)), (slice(150, None), slice(2, None, 2))):
        size, expected = (one[updates, :, columns].square().mean().sqrt().item() for one in (ours, exact))
        assert least * expected <= size <= most * expected
    silent, expected = (one[150:, :, 1::2].abs().max().item() for one in (ours, exact))
    assert silent <= 2 * expected, "what has no gradients any more comes to rest"


# ---------------------------------------------------------------------- trainers

SMALL: dict[str, Any] = {"name": "adamw", "lr": 0.01, "eps": 1e-3, "state_dtype": "8bit"}


@pytest.mark.parametrize("spread", SPREADS)
def test_training_and_resuming_on_any_mesh_end_as_on_one_rank(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, spread: str
) -> None:
    folder = tiny_folder("qwen3_moe" if spread == "dp 2" else "qwen3")
    run, batch = {"dir": str(tmp_path)}, make_batch(folder)
    (alone,) = ranks.run(1, trained, settings(folder, optim=SMALL, run=run), batch, False, True)
    config = settings(folder, optim=SMALL, run=run, **SPREADS[spread])
    for loads in (False, True):
        for ours in ranks.run(config.ranks, trained, config, batch, loads, False):
            assert largest_difference(ours["weights"], alone["weights"]) <= 1e-12 and ours["in sync"]
            assert ours["left"] == 0
    (again,) = ranks.run(1, trained, settings(folder, optim=SMALL, run=run), batch, True, False)
    assert largest_difference(again["weights"], alone["weights"]) == 0
    exact = ranks.run(1, trained, settings(folder, optim={**SMALL, "state_dtype": "auto"}), batch, False, False)[0]
    assert 1e-6 < largest_difference(exact["weights"], alone["weights"]) < 0.1
    assert exact["bytes"] / alone["bytes"] > 5  # float64 against codes and scales, and vectors as they are
