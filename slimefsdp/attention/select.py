"""Which strategy serves a model on so many context-parallel ranks; no torch, so that it is known before a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slimefsdp.batching.cost import STRATEGIES, Strategy
from slimefsdp.errors import ConfigError
from slimefsdp.model_spec import ModelSpec

StrategyName = Literal["ring", "ulysses", "all_gather", "ring_flash_attn"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a model decides which strategies can serve it."""

    heads: int
    kv_heads: int
    has_windows: bool = False  # some layer sees its newest keys alone
    has_sinks: bool = False
    has_softcap: bool = False

    @classmethod
    def of_model_spec(cls, model_spec: ModelSpec) -> AttentionShape:
        """As far as config.json says it; sinks and soft-caps only matter to packages."""
        return cls(model_spec.heads, model_spec.kv_heads, has_windows=model_spec.windowed_layers > 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy, and why it was taken."""

    name: StrategyName | Literal["local"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    @property
    def traffic(self) -> Strategy:
        """Whose bytes it sends: the ring-flash-attn package gathers all keys; one rank sends nothing under any."""
        if self.name == "ring_flash_attn":
            return "all_gather"
        return "ring" if self.name == "local" else self.name


def choose_strategy(setting: StrategyName | Literal["auto"], shape: AttentionShape, cp: int) -> Choice:
    """The strategy of a model over `cp` ranks.

    Raises:
        ConfigError: naming `attention.strategy`; the one asked for cannot serve this model on this mesh.
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
        return Choice(setting, "as set")
    # of K+V bytes of a sequence that all ranks share, summed over them: the ring moves cp - 1, Ulysses
    # (cp - 1)/cp x (1 + heads/kv_heads). Shorter ones travel under Ulysses alone; lengths are not known here
    ulysses_is_lighter = cp > shape.heads / shape.kv_heads + 1
    cannot_split_heads = _problem("ulysses", shape, cp)
    if shape.has_windows and cannot_split_heads:
        return Choice("all_gather", f"the ring cannot express this model's sliding windows, and {cannot_split_heads}")
    if shape.has_windows:
        return Choice("ulysses", "the ring cannot express this model's sliding windows, and its heads can be divided")
    if ulysses_is_lighter and not cannot_split_heads:
        ratio = f"{shape.heads} heads over {shape.kv_heads} key heads"
        return Choice("ulysses", f"with {ratio} a sequence that all ranks share takes it fewer bytes than the ring")
    return Choice("ring", "its communication overlaps with computing")


def serving_strategies(shape: AttentionShape, cp: int) -> list[Strategy]:
    """Of the strategies that need no package, those that can serve a model over `cp` ranks."""
    return [name for name in STRATEGIES if not _problem(name, shape, cp)]


def _problem(name: StrategyName, shape: AttentionShape, cp: int) -> str | None:
    """Why a strategy cannot serve; None: it can."""
    if name == "ring" and shape.has_windows:
        return "the ring cannot express sliding windows, which this model has"
    if name == "ulysses" and shape.heads % cp:
        return f"{shape.heads} attention heads cannot be divided over {cp} ranks"
    if name == "ring_flash_attn" and shape.has_sinks:
        return "ring-flash-attn has no attention sinks, which this model has"
    if name == "ring_flash_attn" and shape.has_softcap:
        return "ring-flash-attn has no attention soft-cap, which this model has"
    return None


def repeated_kv_heads(heads: int, kv_heads: int, cp: int) -> int:
    """As many as ranks can share out evenly, each with its own query heads; at worst one for every query head."""
    repeated = math.lcm(kv_heads, cp)
    return repeated if heads % repeated == 0 else heads
