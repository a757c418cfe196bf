"""Defines the sections of settings that make an algorithm (advantage, loss, correction, critic), and their rules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from slimefsdp.algorithms.registry import (
    CORRECTIONS,
    ESTIMATORS,
    PAIRED_ESTIMATORS,
    PER_SEQUENCE,
    POLICY_LOSSES,
    TOKEN_ESTIMATORS,
)
from slimefsdp.config.base import LARGEST, PathOrIdSetting, PositiveInt, Settings, broken_rule, function_name
from slimefsdp.config.conditions import broken_condition
from slimefsdp.config.messages import RECIPES, BrokenRule
from slimefsdp.config.sections import PlacedSettings
from slimefsdp.errors import short_text


def _name_in(table: Iterable[str], other: str, other_table: Iterable[str]) -> Callable[[str], str]:
    """Returns a validator that accepts a name in the table, or a user's function as `module:function`.

    Args:
        other: a setting with which this one is easily confused.
        other_table: the names that the other setting accepts.
    """
    names, others = list(table), list(other_table)

    def check(value: str) -> str:
        if value in names:
            return value
        if ":" in value:
            return function_name(value)
        if value in others:
            raise broken_rule("is not a known name", f"it is a value of {other}: set {other}={value}")
        near = difflib.get_close_matches(value.lower(), names, n=3, cutoff=0.4)
        near = near[:1] if value.lower() in near else near
        hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(names)}."
        hint = RECIPES.get(value.lower(), hint) if value.lower() not in names else hint
        raise broken_rule("is not a known name", f"{hint} A function of your own is written module:function")

    return check


def _choices(table: Iterable[str]) -> str:
    return f"{', '.join(table)}; or a function of your own as `module:function` (docs/algorithms.md)"


class AdvantageSettings(Settings):
    """Chooses how advantages are computed from rewards, once for a whole rollout batch."""

    estimator: Annotated[str, AfterValidator(_name_in(ESTIMATORS, "loss.policy", POLICY_LOSSES))] | None = Field(
        None, description=f"{_choices(ESTIMATORS)}; null: grpo, or gae under algorithm=ppo"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards a token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="1 trusts rewards alone, 0 the critic")
    pass_k: PositiveInt | None = Field(None, description="responses of a prompt, one of which has to be right")
    whiten: bool | None = Field(
        None,
        description="give the advantages of a whole batch mean 0 and variance 1 over its trained tokens; null: as the "
        "estimator's authors do",
    )


class LossSettings(Settings):
    """Chooses the terms of the training loss, and the weights of tokens."""

    policy: Annotated[str, AfterValidator(_name_in(POLICY_LOSSES, "advantage.estimator", ESTIMATORS))] = Field(
        "ppo", description=_choices(POLICY_LOSSES)
    )
    reduction: Literal["token_mean", "sequence_mean", "constant", "prompt_mean"] = Field(
        "token_mean",
        description="1/N tokens; mean over samples of their token mean; sum over constant_length; mean over prompts of "
        "their token mean",
    )
    constant_length: Annotated[int, Field(ge=1, le=2**31)] | None = Field(None, description="the divisor (Dr.GRPO)")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, le=LARGEST, description="and above at 1 + clip_high")
    dual_clip: float | None = Field(
        None,
        gt=1,
        le=LARGEST,
        description="bounds the loss of a negative advantage A by dual_clip x |A|; null: no bound",
    )
    beta: float = Field(
        0.1,
        gt=0,
        le=LARGEST,
        description="dpo: how strongly the reference holds; dro: how strongly the old log-probs hold",
    )
    kl_coefficient: float = Field(
        0.0, ge=0, le=LARGEST, description="weight of KL(policy || reference); the first one, with kl_target"
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full", "k1_unbiased", "k3_unbiased"] | None = Field(
        None,
        description="per-token estimator of that KL; full: exact over the vocabulary, from a colocated reference; "
        "k1_unbiased, k3_unbiased: weighted by the ratio, so that the gradient is that of the KL however far the "
        "policy has moved; null: k3 in the loss, k1 in the reward",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="a term of the loss, or taken off each token's reward before advantages are computed"
    )
    kl_target: float | None = Field(
        None, gt=0, description="adapt the coefficient after each step so that the KL nears this many nats a token"
    )
    entropy_coefficient: float = Field(0.0, ge=0, le=LARGEST, description="weight of the entropy bonus")
    old_log_probs: Literal["auto", "recompute", "rollout"] = Field(
        "auto",
        description="where the batch brings none; auto: the current ones if the step has one update, else recompute; "
        "rollout: the engine's",
    )
    epochs: PositiveInt = Field(1, description="passes over one rollout batch")
    max_kl: float | None = Field(
        None, gt=0, description="end the step before an update whose KL(old || policy) exceeds this; null: never"
    )


class CorrectionSettings(Settings):
    """Weights or masks tokens for which the probabilities of rollout engine and trainer differ."""

    method: Literal["none", "importance", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis"] = (
        Field("none", description=f"none, or one of {', '.join(CORRECTIONS)}; reads rollout_log_probs")
    )
    low: float | None = Field(None, ge=0, le=LARGEST, description="lower bound of trainer / rollout probability")
    high: float | None = Field(None, gt=0, le=LARGEST, description="upper bound of it")
    veto_below: float | None = Field(
        None, gt=0, lt=1, description="drop a sequence with any token of a trainer / rollout probability below this"
    )
    opsm_threshold: float | None = Field(
        None,
        ge=0,
        description="drop sequences of negative advantage whose mean log(engine / policy) exceeds this (OPSM)",
    )

    @model_validator(mode="after")
    def check_correction_bounds(self) -> CorrectionSettings:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise BrokenRule(
                "correction.low",
                f"correction.low={self.low} is not below correction.high={self.high}",
                "lower it, or raise correction.high",
            )
        return self

    @property
    def reads_rollout_log_probs(self) -> bool:
        return self.method != "none" or self.veto_below is not None


class CriticSettings(PlacedSettings):
    """Describes the value model of algorithm=ppo; its optimiser, schedule and epochs are those of the policy."""

    path: PathOrIdSetting | None = Field(
        None,
        description="its folder, or id: a causal LM, whose value head starts at 0, or a token classifier of one label; "
        "null: model.path",
    )
    lr: float | None = Field(None, gt=0, le=LARGEST, description="peak learning rate; null: optim.lr")
    clip: float | None = Field(
        0.2,
        gt=0,
        le=LARGEST,
        description="values further than this from those before the step stop counting; null: no clipping",
    )
    warmup_steps: int = Field(
        0, ge=0, description="first steps of the run: the critic alone is trained, on rewards to go (lambda 1)"
    )


DPO_LOSS = {"policy": "dpo", "reduction": "sequence_mean"}
"""The settings of `loss` that algorithm=dpo stands for."""


class AlgorithmSettings(Settings):
    """Holds the choices that make an algorithm; `slimefsdp.config.RunConfig` adds all other settings."""

    algorithm: Literal["grpo", "ppo", "sft", "dpo"] = Field(
        "grpo",
        description="grpo: reinforcement learning without a critic; ppo: with one; sft: supervised; dpo: direct "
        "preference optimisation on pairs of responses from a file (docs/dpo.md)",
    )
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    correction: CorrectionSettings = CorrectionSettings()
    critic: CriticSettings = CriticSettings()

    @model_validator(mode="before")
    @classmethod
    def fill_dpo_loss(cls, tree: Any) -> Any:
        """Sets the loss of algorithm=dpo to the mean over pairs, which is loss.policy=dpo with sequence_mean."""
        given = tree.get("loss") or {} if isinstance(tree, dict) else None
        if not isinstance(given, dict) or tree.get("algorithm") != "dpo":
            return tree
        return {**tree, "loss": {**DPO_LOSS, **{name: value for name, value in given.items() if value is not None}}}

    @model_validator(mode="after")
    def check_conditions(self) -> Self:
        if broken := broken_condition(self):
            raise broken
        return self

    @model_validator(mode="after")
    def check_dpo_loss(self) -> Self:
        for name, value in DPO_LOSS.items():
            found = getattr(self.loss, name)
            if self.algorithm == "dpo" and found != value:
                raise BrokenRule(
                    f"loss.{name}",
                    f"loss.{name}={found} does not fit algorithm=dpo, whose loss is loss.{name}={value}",
                    "remove it, or set another algorithm",
                )
        return self

    @model_validator(mode="after")
    def check_critic_requires_ppo(self) -> Self:
        if self.algorithm == "ppo" and self.estimator != "gae" and ":" not in self.estimator:
            raise BrokenRule(
                "advantage.estimator",
                f"advantage.estimator={self.estimator} reads no values, and algorithm=ppo trains a critic for them",
                "remove it, or set algorithm=grpo",
            )
        return self

    @model_validator(mode="after")
    def check_sequence_loss_estimator(self) -> Self:
        discounts = self.estimator == "reinforce_pp" and self.advantage.gamma != 1
        has_token_rewards = self.has_kl_in_reward and self.estimator in TOKEN_ESTIMATORS
        by_token = self.estimator == "gae" or discounts or has_token_rewards
        if self.loss.policy in PER_SEQUENCE and by_token:
            raise BrokenRule(
                "loss.policy",
                f"loss.policy={self.loss.policy} has one advantage for each sequence, and "
                f"advantage.estimator={self.estimator} gives each token its own",
                "choose gspo_token or ppo, or another estimator",
            )
        return self

    @model_validator(mode="after")
    def check_dpo_estimator(self) -> Self:
        corrections = [f"correction.{name}" for name in ("method", "veto_below", "opsm_threshold")]
        changing = [field for field in corrections if self.value_of(field) not in ("none", None)]
        changing += ["loss.kl_in"] if self.has_kl_in_reward else []
        changing += ["advantage.whiten"] if self.advantage.whiten else []
        if self.loss.policy == "dpo" and changing:
            raise BrokenRule(
                changing[0],
                f"{changing[0]}={short_text(self.value_of(changing[0]))} changes what single tokens count, and "
                "loss.policy=dpo compares the rewards of whole pairs",
                "remove one",
            )
        if self.loss.policy == "dpo" and self.estimator not in PAIRED_ESTIMATORS and ":" not in self.estimator:
            raise BrokenRule(
                "advantage.estimator",
                f"advantage.estimator={self.estimator} does not say which of two samples is the better one, and "
                "loss.policy=dpo takes it from the sign",
                f"choose {' or '.join(PAIRED_ESTIMATORS)}",
            )
        return self

    @property
    def has_rollouts(self) -> bool:
        """Returns whether `slimefsdp train` samples responses from engines; otherwise files contain the responses."""
        return self.algorithm not in ("sft", "dpo")

    @property
    def loss_name(self) -> Literal["policy", "sft"]:
        """Returns the kind of loss in an actor's `train_step` under this algorithm."""
        return "sft" if self.algorithm == "sft" else "policy"

    @property
    def kl_estimator(self) -> str:
        """Returns the formula of the KL: that of `loss.kl_estimator`, or the formula with the right gradient."""
        chosen = self.loss.kl_estimator or ("k1" if self.loss.kl_in == "reward" else "k3")
        return chosen.removesuffix("_unbiased")

    @property
    def is_kl_unbiased(self) -> bool:
        """Returns whether the KL of a token is weighted by the ratio, which makes the gradient unbiased."""
        return (self.loss.kl_estimator or "").endswith("_unbiased")

    @property
    def estimator(self) -> str:
        """Returns `advantage.estimator`, or the usual estimator of the algorithm."""
        return self.advantage.estimator or ("gae" if self.algorithm == "ppo" else "grpo")

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl_coefficient > 0 or self.loss.policy == "dpo"

    @property
    def has_kl_in_reward(self) -> bool:
        """Returns whether the KL is subtracted from rewards, so that advantages depend on log-probs."""
        return self.loss.kl_coefficient > 0 and self.loss.kl_in == "reward"

    def effective(self, field: str) -> Any:
        """Returns the value of a setting, with a null replaced where it stands for another value."""
        return self.estimator if field == "advantage.estimator" else self.value_of(field)

    def value_of(self, field: str) -> Any:
        """Returns the value of a setting `section.name`, or of a top-level setting."""
        if "." not in field:
            return getattr(self, field)
        section, name = field.split(".")
        return getattr(getattr(self, section), name)
