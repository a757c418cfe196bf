"""float8: what a linear module computes, that packs, ranks and recomputation change nothing, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from actors.cli import preflight
from actors.cli.preflight import check_installed, check_models
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed import float8
from slimefsdp.errors import ConfigError
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.shared_layers import difference_of_checkpoints, digest_of_weights
from tests.support.tiny_models import TinyFolder, tiny_model
from tests.support.trainers import fresh_batch, settings

CPU = torch.device("cpu")
DEFAULT_CASES = 1
RECIPE = "rowwise_with_gw_hp"
PRECISION = {"compute_dtype": "float32", "float8": RECIPE}
LARGEST = 448.0  # of float8 e4m3


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("qwen3", intermediate_size=64, seed=1)


def rounded(values: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The values as float8 holds them, with a power of two as scale: for all of them, or for each along `dim`."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / largest.double().clamp(min=1e-12)))).float()
    return (values.float() * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_computes_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"proj": nn.Linear(48, 32)}).to(dtype)
    weight, bias = layer["proj"].weight, layer["proj"].bias
    float8.convert_layers([layer], RECIPE, CPU)
    assert layer["proj"].weight is weight and layer["proj"].bias is bias
    x = torch.randn(7, 48, dtype=dtype) * torch.tensor([1e-3, 1.0, 0.0, 50.0, 1.0, 0.1, 3.0], dtype=dtype)[:, None]
    x.requires_grad_()
    y = layer["proj"](x)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected = (rounded(x.detach(), -1) @ rounded(weight.detach(), -1).T).to(dtype) + bias.detach()
    torch.testing.assert_close(y.detach(), expected)
    plain = nn.functional.linear(x.detach(), weight.detach(), bias.detach())
    assert (y.detach() - plain).abs().max() > 1e-2 * plain.abs().max()
    torch.testing.assert_close(x.grad, (rounded(gradient, -1) @ rounded(weight.detach(), None)).to(dtype))
    torch.testing.assert_close(weight.grad, gradient.T @ x.detach())  # in the compute dtype


def test_only_linear_modules_of_attention_and_mlp_are_converted() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0], intermediate_size=64)
    names = [name for name, _ in model.named_parameters()]
    float8.convert_layers(model.model.layers, RECIPE, CPU)
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    mlp = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert converted == {f"model.layers.0.{name}" for name in attention | mlp} | {
        f"model.layers.1.{name}" for name in attention
    }
    assert [name for name, _ in model.named_parameters()] == names


# ---------------------------------------------------------------------- training

Found = tuple[dict[str, torch.Tensor], torch.Tensor]


def of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> Found:
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    gradients = {name: p.grad.full_tensor().clone() for name, p in trainer.policy.named_weights()}
    return gradients, torch.as_tensor(trainer.compute_log_probs(batch).log_probs)


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[float]:
    """Of each gradient, as a part of its norm."""
    assert a.keys() == b.keys()
    return [((a[name] - b[name]).norm() / b[name].norm()).item() for name in b]


def assert_same(found: Found, expected: Found) -> None:
    """Gradients and log-probs agree to float32.

    An exception are few gradients: another order of sums may move a number over the border between two of float8.
    """
    errors = differences(found[0], expected[0])
    assert median(errors) <= 1e-6 and max(errors) <= 1e-2
    assert (found[1] - expected[1]).abs().max() <= 1e-3


def with_tokens(tokens: int, **sections: Any) -> dict[str, Any]:
    return {"batch": {"max_tokens_per_rank": tokens}, "precision": PRECISION, **sections}


@pytest.fixture(scope="module")
def one_pack(folder: Path, ranks: RankPool) -> Found:
    found: Found = ranks.run(1, of_a_step, settings(folder, **with_tokens(512)), fresh_batch())[0]
    plain = ranks.run(1, of_a_step, settings(folder, **with_tokens(512, precision={})), fresh_batch())[0]
    assert min(differences(found[0], plain[0])) > 1e-3 and (found[1] - plain[1]).abs().max() > 1e-2
    return found


@pytest.mark.parametrize(
    "sections",
    [
        with_tokens(64),  # four packs
        with_tokens(64, model={"activation_checkpointing": "selective"}),
        with_tokens(512, model={"activation_checkpointing": "full"}),
        with_tokens(512, mesh={"cp": 2}),
        with_tokens(512, mesh={"tp": 2}),
        with_tokens(64, mesh={"dp": 2}, fsdp={"sharding": "optimizer"}),
        with_tokens(64, fsdp={"wrap": ["Linear"], "cpu_offload": True}),
        with_tokens(64, mesh={"dp": 2}),
    ],
    ids=str,
)
def test_neither_packs_nor_ranks_change_anything(
    folder: Path, ranks: RankPool, one_pack: Found, sections: dict[str, Any]
) -> None:
    config = settings(folder, **sections)
    for found in ranks.run(config.ranks, of_a_step, config, fresh_batch()):
        assert_same(found, one_pack)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_layers_compute_the_same(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    path = tiny_folder("qwen3", intermediate_size=64, num_hidden_layers=1)
    plain, compiled = (
        ranks.run(1, of_a_step, settings(path, **with_tokens(512, model={"compile": one})), fresh_batch())[0]
        for one in (False, True)
    )
    assert_same(compiled, plain)


def first_update(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, float]:
    trainer = Trainer(config, device=CPU)
    old = trainer.compute_log_probs(batch)
    return trainer.train_step(batch.replace(old_log_probs=old.log_probs))


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}], ids=str)
def test_the_first_ratio_is_1_and_the_first_kl_is_0(folder: Path, ranks: RankPool, mesh: dict[str, int]) -> None:
    config = settings(folder, mesh=mesh, precision=PRECISION, loss={"kl_coefficient": 0.1})
    metrics = ranks.run(config.ranks, first_update, config, fresh_batch())[0]
    assert metrics["ratio"] == 1 and metrics["ratio_deviation_max"] == 0
    assert metrics["kl_ref"] == 0 and metrics["grad_norm"] > 1e-3


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_loads_with_and_without_float8(
    folder: Path, ranks: RankPool, tmp_path: Path, is_first: bool, dp: int
) -> None:
    with_it, without = {"precision": PRECISION, "mesh": {"dp": dp}}, {"precision": {"compute_dtype": "float32"}}
    first, second = (with_it, without) if is_first else (without, with_it)
    assert difference_of_checkpoints(ranks, folder, tmp_path, first, second) == []


def test_weights_read_or_drawn_are_those_without_float8(folder: Path, ranks: RankPool) -> None:
    configs = [
        settings(folder, model={"init": init}, precision={"float8": recipe})
        for init in ("folder", "random")
        for recipe in (RECIPE, "none")
    ]
    read, plain_read, drawn, plain_drawn = ranks.run(1, digest_of_weights, configs)[0]
    assert read == plain_read != drawn == plain_drawn


def exported(rank: int, config: RunConfig, target: Path) -> None:
    Trainer(config, device=CPU).export_hf(target)


def test_an_export_is_that_of_a_run_without_float8(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, exported, settings(folder, precision=PRECISION), tmp_path / "a")
    a, b = load_file(tmp_path / "a" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "changes", "tp", "values"),
    [
        ("qwen3", {}, 1, ["the MLP", 56]),
        ("qwen3", {"intermediate_size": 64, "head_dim": 12}, 1, ["keys", 24]),
        ("qwen3", {"intermediate_size": 64, "hidden_size": 40}, 1, ["hidden states", 40]),
        ("qwen3", {"intermediate_size": 80}, 2, ["the MLP", 40, "mesh.tp=2"]),
        ("qwen3_moe", {}, 1, ["the MLP", 56]),
        ("gpt2", {}, 1, ["gpt2"]),
    ],
)
def test_sizes_that_16_does_not_divide_are_refused_before_a_rank_starts(
    tiny_folder: TinyFolder, kind: str, changes: dict[str, Any], tp: int, values: list[Any]
) -> None:
    path = tiny_folder(kind, **changes)
    with refused(ConfigError, "precision.float8", RECIPE, *values):
        check_models(settings(path, mesh={"tp": tp}, precision=PRECISION))
    check_models(settings(path, mesh={"tp": tp}))


def test_mixtures_need_only_their_attention_divisible(tiny_folder: TinyFolder) -> None:
    check_models(settings(tiny_folder("mixtral"), precision=PRECISION))  # experts of 24 features


def trained(rank: int, config: RunConfig) -> None:
    float8.find_spec = lambda name: None  # type: ignore[assignment]
    try:
        Trainer(config, device=CPU)
    finally:
        from importlib.util import find_spec

        float8.find_spec = find_spec


def test_a_missing_torchao_is_refused(folder: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(folder, precision=PRECISION)
    with refused(ConfigError, "precision.float8", RECIPE, "torchao"):
        ranks.run(1, trained, config)
    check_installed(config)
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with refused(ConfigError, "precision.float8", RECIPE, "torchao") as caught:
        check_installed(config)
    assert ".[float8]" in str(caught.value.hint)
    check_installed(settings(folder))


def test_gpus_without_float8_are_refused_and_a_cpu_emulates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(folder, precision=PRECISION, mesh={"device": "auto"})
    monkeypatch.setattr(preflight, "has_nvidia_driver", lambda: True)
    for capabilities in (["8.9"], ["9.0"], ["10.0"], ["8.0", "9.0"], []):  # an old driver tells none
        monkeypatch.setattr(preflight, "compute_capabilities_here", lambda found=capabilities: found)
        check_installed(config)
    monkeypatch.setattr(preflight, "compute_capabilities_here", lambda: ["8.0", "8.6", "8.0"])
    with refused(ConfigError, "precision.float8", RECIPE, "8.0, 8.6"):
        check_installed(config)
    assert "emulated" not in capsys.readouterr().err
    monkeypatch.setattr(preflight, "has_nvidia_driver", lambda: False)
    check_installed(config)
    assert "precision.float8" in capsys.readouterr().err
