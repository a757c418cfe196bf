"""The optional packages: flash-attn's calling convention, and the real ring-flash-attn on top of a stand-in for it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from slimefsdp.attention.backends import flash_attn_3, flash_attn_package, ring_flash_attn_package
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError
from slimefsdp.trainer import Trainer
from tests.support import fake_flash_attn
from tests.support.all_pairs import all_pairs
from tests.support.attention_cases import CPU, Case, inputs, largest_differences
from tests.support.plain_step import settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder


def with_packages(rank: int, case: Case, strategy: Any, kernel: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """out, dq, dk, dv of the whole pack, padded where the strategy wants it, and the calls that flash-attn saw."""
    with fake_flash_attn.installed() as calls:
        return whole_pack(rank, case, Attention(Choice(strategy, "test"), dist.group.WORLD, kernel)), list(calls)


def whole_pack(rank: int, case: Case, attention: Attention) -> list[torch.Tensor]:
    tokens = case.cu_seqlens[-1]
    missing = -tokens % attention.padding_multiple
    layout = attention.layout([*case.cu_seqlens, *([tokens + missing] if missing else [])])
    attend = attention.for_pack(layout, CPU, case.parents)
    q, k, v, _, grad = (torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in inputs(case))
    rows = torch.tensor([t for piece in layout[rank] for t in range(piece.start, piece.end)], dtype=torch.int64)
    leaves = [x[rows].requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, case.scoring(), None)
    out.backward(grad[rows])
    results = []
    for local, whole in zip([out.detach(), *(x.grad for x in leaves)], (q, q, k, v), strict=True):
        full = torch.zeros_like(whole, dtype=torch.float64)
        full[rows] = local.double()
        dist.all_reduce(full)
        results.append(full[:tokens])
    return results


@pytest.mark.parametrize(
    ("cp", "lengths", "window"),
    all_pairs((2, 4), ((33, 7, 1, 90, 2, 50, 3), (64, 64), (5,), (130, 2)), (None, 8)),
)
def test_ring_flash_attn_equals_one_process_after_padding(
    ranks: RankPool, cp: int, lengths: tuple[int, ...], window: int | None
) -> None:
    case = Case(lengths, window=window)
    for found, calls in ranks.run(cp, with_packages, case, "ring_flash_attn", "torch"):
        assert max(largest_differences(case, found)) <= 1e-12
        assert {call["pass"] for call in calls} == {"forward", "backward"}
        assert all(call["causal"] and call["window"] == window for call in calls)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "all_gather"])
def test_every_call_of_a_strategy_can_go_through_flash_attn(ranks: RankPool, strategy: str) -> None:
    case = Case((33, 7, 1, 90), softcap=2.0)
    for found, calls in ranks.run(2, with_packages, case, strategy, "flash_attn"):
        assert max(largest_differences(case, found)) <= 1e-12
        assert all(call["softcap"] == 2.0 for call in calls)
        # of the ring: a causal call of the rank's own, and one with the other rank's keys
        assert [call["pass"] for call in calls].count("forward") == [call["pass"] for call in calls].count("backward")
        assert [call["causal"] for call in calls] == ([True, False] * 2 if strategy == "ring" else [True] * 2)


def test_a_package_that_is_missing_or_cannot_compute_here_is_refused_by_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: None)
    monkeypatch.setattr(ring_flash_attn_package, "find_spec", lambda name: None)
    with refused(ConfigError, "attention.kernel", "attention.kernel=flash_attn", "flash-attn") as caught:
        flash_attn_package.require("attention.kernel=flash_attn", torch.device("cuda"), torch.bfloat16)
    assert "attention.kernel" in str(caught.value.hint)
    with refused(ConfigError, "attention.strategy", "ring_flash_attn", " flash-attn", "ring-flash-attn") as caught:
        ring_flash_attn_package.require()
    assert "auto" in str(caught.value.hint)
    monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: object())
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        with refused(ConfigError, "attention.strategy", "ring_flash_attn", dtype, device):
            flash_attn_package.require("attention.strategy=ring_flash_attn", torch.device(device), dtype)


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The switches of a Hopper's torch with the package, as they are made."""
    made: list[str] = []
    torch_attention = torch.nn.attention
    monkeypatch.setattr(torch_attention, "list_flash_attention_impls", lambda: ["FA3", "FA4"], raising=False)
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", made.append, raising=False)
    monkeypatch.setattr(
        torch_attention, "restore_flash_attention_impl", lambda: made.append("torch's own"), raising=False
    )
    monkeypatch.setattr(
        torch_attention, "current_flash_attention_impl", lambda: made[-1] if made else None, raising=False
    )
    monkeypatch.setattr(flash_attn_3, "find_spec", lambda name: name == "flash_attn_interface" or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return made


CUDA = torch.device("cuda", 0)


def test_flash_attention_3_is_switched_on_where_it_is_asked_for_and_off_for_who_comes_next(switched: list[str]) -> None:
    flash_attn_3.switch(on=False, device=CUDA, dtype=torch.bfloat16)
    assert switched == [], "nobody had asked for it"
    flash_attn_3.switch(on=True, device=CUDA, dtype=torch.bfloat16)
    flash_attn_3.switch(on=False, device=CPU, dtype=torch.float32)
    flash_attn_3.switch(on=False, device=CPU, dtype=torch.float32)
    assert switched == ["FA3", "torch's own"]


@pytest.mark.parametrize(
    ("kind", "changes", "values"), [("gemma2", {}, ["soft-cap"]), ("qwen3", {"head_dim": 12}, [12, 256])]
)
def test_a_model_that_flash_attention_3_would_not_compute_is_refused_where_it_is_built(
    ranks: RankPool, tiny_folder: TinyFolder, kind: str, changes: dict[str, Any], values: list[object]
) -> None:
    config = settings(tiny_folder(kind, **changes), attention={"kernel": "flash_attn_3"})
    with refused(ConfigError, "attention.kernel", "attention.kernel=flash_attn_3", *values):
        ranks.run(1, trainer_on_a_hopper, config)
    ranks.run(1, trainer_on_a_hopper, settings(tiny_folder(), attention={"kernel": "flash_attn_3"}))


def trainer_on_a_hopper(rank: int, config: RunConfig) -> None:
    """As far as switching goes: it computes on the CPU."""
    with mock.patch.object(flash_attn_3, "switch"):
        Trainer(config, device=CPU)


def test_a_trainer_that_asks_for_flash_attention_3_switches_it_on_or_is_refused(
    ranks: RankPool, tiny_folder: TinyFolder
) -> None:
    config = settings(tiny_folder(), attention={"kernel": "flash_attn_3"})
    with refused(ConfigError, "attention.kernel", "attention.kernel=flash_attn_3"):
        ranks.run(1, trainer_of, config)


def trainer_of(rank: int, config: RunConfig) -> None:
    Trainer(config, device=CPU)
