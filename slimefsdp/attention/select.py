"""Chooses the attention strategy for a model and a number of context-parallel ranks, and checks kernels.

This module does not import torch, so that a driver can check settings before a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from slimefsdp.batching.cost import STRATEGIES, Strategy
from slimefsdp.errors import ConfigError
from slimefsdp.model_spec import ModelSpec

StrategyName = Literal["ring", "ulysses", "all_gather", "ring_flash_attn"]
KernelSetting = Literal["torch", "flash_attn", "flash_attn_3"]

_MAX_HEAD_DIM = 256  # limit of flash kernels: torch's, the flash-attn package's, FlashAttention 3's
_MAX_DETERMINISTIC_HEAD_DIM = 192  # limit of FlashAttention 3's deterministic backward
_KERNEL_NAMES = {"flash_attn": "the flash-attn package", "flash_attn_3": "FlashAttention 3"}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Holds the properties of a model that decide which strategies and kernels support it."""

    heads: int
    kv_heads: int
    head_dim: int  # features of a head
    has_windows: bool = False  # some layer has a sliding window
    has_sinks: bool = False
    has_softcap: bool = False

    @classmethod
    def of_model_spec(cls, model_spec: ModelSpec) -> AttentionShape:
        """Returns the shape according to config.json; the built model has the same."""
        return cls(
            model_spec.heads,
            model_spec.kv_heads,
            model_spec.head_dim,
            has_windows=model_spec.windowed_layers > 0,
            has_sinks=model_spec.has_sinks,
            has_softcap=model_spec.has_softcap,
        )

    def over(self, tp: int) -> AttentionShape:
        """Returns the shape of one of `tp` tensor-parallel ranks; several ranks may share a key-value head."""
        return replace(self, heads=self.heads // tp, kv_heads=max(1, self.kv_heads // tp))


@dataclass(frozen=True, slots=True)
class Choice:
    name: StrategyName | Literal["local"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    @property
    def traffic(self) -> Strategy:
        """Returns the strategy whose traffic estimate applies.

        The ring-flash-attn package gathers all keys, like all_gather. A single rank sends nothing under any strategy.
        """
        if self.name == "ring_flash_attn":
            return "all_gather"
        return "ring" if self.name == "local" else self.name


def choose_strategy(setting: StrategyName | Literal["auto"], shape: AttentionShape, cp: int) -> Choice:
    """Returns the strategy of a model over `cp` ranks.

    Raises:
        ConfigError: the strategy of `attention.strategy` cannot serve this model on this mesh.
    """
    if cp == 1:
        return Choice("local", "one rank holds each pack")
    if setting != "auto":
        if problem := _problem(setting, shape, cp):
            fitting = serving_strategies(shape, cp)
            raise ConfigError(
                f"attention.strategy={setting} with mesh.cp={cp}: {problem}",
                field="attention.strategy",
                hint=f"use auto, or {' or '.join(fitting)}",
            )
        return Choice(setting, "set by attention.strategy")
    # For a sequence cut over all ranks, the ring sends cp - 1 times the bytes of its K and V, summed over ranks,
    # and Ulysses (cp - 1)/cp x (1 + heads/kv_heads) times. Only Ulysses sends uncut sequences; lengths are unknown here
    ulysses_is_lighter = cp > shape.heads / shape.kv_heads + 1
    cannot_split_heads = _problem("ulysses", shape, cp)
    if shape.has_windows and cannot_split_heads:
        problem = f"the ring cannot compute this model's sliding windows, and for ulysses {cannot_split_heads}"
        return Choice("all_gather", problem)
    if shape.has_windows:
        return Choice("ulysses", "the ring cannot compute this model's sliding windows")
    if cannot_split_heads:
        return Choice("ring", f"it overlaps communication with computing, and for ulysses {cannot_split_heads}")
    heads = f"with {shape.heads} attention heads and {shape.kv_heads} key-value heads"
    if ulysses_is_lighter:
        return Choice("ulysses", f"{heads} it sends fewer bytes than the ring for a sequence that all {cp} ranks share")
    return Choice("ring", f"{heads} ulysses would not send fewer bytes, and the ring overlaps sending with computing")


def serving_strategies(shape: AttentionShape, cp: int) -> list[Strategy]:
    """Returns the strategies that need no package and can serve a model over `cp` ranks."""
    return [name for name in STRATEGIES if not _problem(name, shape, cp)]


def _problem(name: StrategyName, shape: AttentionShape, cp: int) -> str | None:
    """Returns the reason why a strategy cannot serve the model; None if it can."""
    if name == "ring" and shape.has_windows:
        return "the ring cannot express sliding windows, which this model has"
    if name == "ulysses" and shape.heads % cp:
        return f"{shape.heads} attention heads cannot be divided over {cp} ranks"
    if name == "ring_flash_attn" and not is_flash_head_dim(shape.head_dim):
        return _head_dim_problem("ring-flash-attn", shape.head_dim)
    if name == "ring_flash_attn" and shape.has_sinks:
        return "ring-flash-attn has no attention sinks, which this model has"
    if name == "ring_flash_attn" and shape.has_softcap:
        return "ring-flash-attn has no attention soft-cap, which this model has"
    return None


def check_kernel(setting: KernelSetting, shape: AttentionShape, *, deterministic: bool) -> None:
    """Checks that the chosen kernels support every attention call of a model.

    Args:
        deterministic: the setting run.deterministic.

    Raises:
        ConfigError: torch would silently replace the kernels of `attention.kernel`, or their first call would fail.
    """
    if setting == "torch":
        return
    name, others = _KERNEL_NAMES[setting], "leave attention.kernel at its default"
    if not is_flash_head_dim(shape.head_dim):
        problem, hint = _head_dim_problem(name, shape.head_dim), others
    elif setting == "flash_attn_3" and shape.has_softcap:
        problem = "torch's switch to FlashAttention 3 takes no attention soft-cap, which this model has"
        hint = f"use flash_attn, which has one, or {others}"
    elif setting == "flash_attn_3" and deterministic and shape.head_dim > _MAX_DETERMINISTIC_HEAD_DIM:
        problem = (
            f"FlashAttention 3 has a deterministic backward for heads of at most {_MAX_DETERMINISTIC_HEAD_DIM} "
            f"features, which run.deterministic=true asks for, and this model's have {shape.head_dim}"
        )
        hint = f"{others}, or set run.deterministic=false"
    else:
        return
    raise ConfigError(f"attention.kernel={setting}: {problem}", field="attention.kernel", hint=hint)


def is_flash_head_dim(head_dim: int) -> bool:
    """Returns whether flash kernels on CUDA support this head size: a multiple of 16 bytes, up to a limit."""
    return head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM


def _head_dim_problem(name: str, head_dim: int) -> str:
    return (
        f"{name} computes heads of a multiple of 8 features, at most {_MAX_HEAD_DIM}, and this model's have {head_dim}"
    )


def repeated_kv_heads(heads: int, kv_heads: int, cp: int) -> int:
    """Returns the number of key/value heads after Ulysses has repeated them, at most the number of query heads.

    Every rank then gets equally many key/value heads, and the query heads that read these.
    """
    repeated = math.lcm(kv_heads, cp)
    return repeated if heads % repeated == 0 else heads
