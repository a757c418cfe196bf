"""The optimiser: its settings depend on which one it is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, Tag, model_validator

from slimefsdp.config.base import (
    LARGEST,
    MOST,
    PositiveInt,
    Settings,
    broken_rule,
    chosen_by,
)
from slimefsdp.config.messages import BrokenRule


def _two_fractions(value: Any) -> tuple[float, float]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(item) in (int, float) and 0 <= item < 1 for item in value):
        raise broken_rule("must be two numbers in [0, 1)", "write them like [0.9, 0.95]")
    return (float(value[0]), float(value[1]))


def _count_or_share(value: Any) -> Any:
    is_count = type(value) is int and 0 <= value <= MOST
    if not is_count and not (type(value) is float and 0 <= value < 1):
        raise broken_rule("must be a number of updates, or a share of them below 1", "write it like 100, or like 0.05")
    return value


class _OptimSettings(Settings):
    """Holds what all optimisers have; lengths are counted in optimiser updates, not in rollouts."""

    section: ClassVar[str] = "optim"

    lr: float = Field(1e-6, gt=0, le=LARGEST, description="peak learning rate")
    weight_decay: float = Field(
        0.0, ge=0, le=LARGEST, description="decoupled decay; none on norms, biases and embeddings"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_updates: Annotated[int | float, BeforeValidator(_count_or_share)] = Field(
        0,
        description="updates in which the rate rises from 0 to lr; or, between 0 and 1, their share of all updates, "
        "rounded up to whole ones",
    )
    total_updates: PositiveInt | None = Field(
        None, description="where the schedule ends; null: with the last update of run.steps or run.epochs"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the schedule ends at lr x this")
    max_grad_norm: float = Field(1.0, ge=0, description="global-norm clipping; 0: none")
    log_layer_norms: bool = Field(False, description="metrics also have the gradient norm of each layer")

    @model_validator(mode="after")
    def check_warmup(self) -> Self:
        if self.total_updates is not None and self.warmup_updates >= self.total_updates:
            raise BrokenRule(
                "optim.warmup_updates",
                f"optim.warmup_updates={self.warmup_updates} leaves no update at the full rate out of "
                f"optim.total_updates={self.total_updates}",
                "lower the first or raise the second",
            )
        return self


class _AdamMoments(_OptimSettings):
    betas: Annotated[tuple[float, float], BeforeValidator(_two_fractions)] = Field(
        (0.9, 0.95), description="AdamW's decay of the momentum and of the second moment; each in [0, 1)"
    )
    eps: float = Field(1e-8, gt=0, le=LARGEST, description="AdamW's epsilon")


class AdamWSettings(_AdamMoments):
    """AdamW, in one fused kernel for a whole update."""

    name: Literal["adamw"] = Field("adamw", description="the optimiser")
    state_dtype: Literal["auto", "bfloat16", "8bit"] = Field(
        "auto",
        description="of the moments between updates. auto: as the masters; bfloat16: half of float32's, rounded "
        "stochastically by run.seed, the update and the element; 8bit: a quarter, codes in blocks with a scale each",
    )


class MuonSettings(_AdamMoments):
    """Muon for matrices of the layers, of experts and adapters too, with AdamW for all else (docs/optimizers.md)."""

    name: Literal["muon"] = Field("muon", description="the optimiser")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum; AdamW's is betas[0]")
    adamw_lr: float | None = Field(
        None,
        gt=0,
        le=LARGEST,
        description="peak rate of what AdamW updates; it follows lr's schedule, and a critic's lr in proportion; null: "
        "lr",
    )


class SgdSettings(_OptimSettings):
    """Plain stochastic gradient descent with momentum."""

    name: Literal["sgd"] = Field("sgd", description="the optimiser")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step in the next one")


OptimSettings = AdamWSettings | MuonSettings | SgdSettings
OptimChoice = Annotated[
    Annotated[AdamWSettings, Tag("adamw")] | Annotated[MuonSettings, Tag("muon")] | Annotated[SgdSettings, Tag("sgd")],
    chosen_by("name", default="adamw"),
]
