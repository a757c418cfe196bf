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
        other: another setting, which users confuse with this setting.
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
        None, description=f"{_choices(ESTIMATORS)}; null means grpo, or gae under algorithm=ppo"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards per token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of GAE; 1 trusts only rewards, 0 only the critic")
    pass_k: PositiveInt | None = Field(None, description="k of pass@k, where one of k responses has to be right")
    whiten: bool | None = Field(
        None,
        description="give the advantages of a whole batch mean 0 and variance 1 over its trained tokens; null means "
        "what the estimator's authors do",
    )


class LossSettings(Settings):
    """Chooses the terms of the training loss, and the weights of tokens."""

    policy: Annotated[str, AfterValidator(_name_in(POLICY_LOSSES, "advantage.estimator", ESTIMATORS))] = Field(
        "ppo", description=_choices(POLICY_LOSSES)
    )
    reduction: Literal["token_mean", "sequence_mean", "constant", "prompt_mean"] = Field(
        "token_mean",
        description="token_mean: the mean over all tokens; sequence_mean: the mean over samples of each sample's token "
        "mean; constant: the mean over samples of each sample's token sum, divided by constant_length; prompt_mean: "
        "the mean over prompts of each prompt's token mean",
    )
    constant_length: Annotated[int, Field(ge=1, le=2**31)] | None = Field(None, description="the divisor (Dr.GRPO)")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, le=LARGEST, description="the ratio is clipped above at 1 + clip_high")
    dual_clip: float | None = Field(
        None,
        gt=1,
        le=LARGEST,
        description="bounds the loss of a negative advantage A by dual_clip x |A|; null means no bound",
    )
    beta: float = Field(
        0.1,
        gt=0,
        le=LARGEST,
        description="how strongly the policy is held near the reference (dpo) or the old log-probs (dro)",
    )
    kl_coefficient: float = Field(
        0.0, ge=0, le=LARGEST, description="weight of KL(policy || reference); with kl_target, the initial weight"
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full", "k1_unbiased", "k3_unbiased"] | None = Field(
        None,
        description="estimator of the KL of each token; full is the exact KL over the vocabulary, with a colocated "
        "reference; k1_unbiased, k3_unbiased are weighted by the ratio, so that they have the KL's gradient "
        "however far the policy has moved; null means k3 in the loss, k1 in the reward",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="loss: the KL is a term of the loss; reward: it is subtracted from each token's reward"
    )
    kl_target: float | None = Field(
        None, gt=0, description="nats per token to which the KL is brought by adapting kl_coefficient after each step"
    )
    entropy_coefficient: float = Field(0.0, ge=0, le=LARGEST, description="weight of the entropy bonus")
    old_log_probs: Literal["auto", "recompute", "rollout"] = Field(
        "auto",
        description="where old log-probs come from if the batch has none. recompute: computed before the first update; "
        "rollout: from the engine; auto: the current log-probs if the step has one update, else recomputed",
    )
    epochs: PositiveInt = Field(1, description="passes over one rollout batch")
    max_kl: float | None = Field(
        None, gt=0, description="end the step before an update whose KL(old || policy) exceeds this; null means never"
    )
    routing_replay: Literal["none", "old_log_probs", "rollout"] = Field(
        "none",
        description="which choices of experts the policy's passes repeat. old_log_probs: those of the pass that "
        "computed the old log-probs (R2); rollout: those of the rollout engine (R3); none: each pass chooses anew",
    )


class CorrectionSettings(Settings):
    """Weights or masks tokens for which the probabilities of rollout engine and trainer differ."""

    method: Literal["none", "importance", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis"] = (
        Field("none", description=f"none, or one of {', '.join(CORRECTIONS)}; a method needs rollout_log_probs")
    )
    low: float | None = Field(None, ge=0, le=LARGEST, description="lower bound of trainer / rollout probability")
    high: float | None = Field(None, gt=0, le=LARGEST, description="upper bound of trainer / rollout probability")
    veto_below: float | None = Field(
        None, gt=0, lt=1, description="drop a sequence if any token's trainer / rollout probability is below this"
    )
    opsm_threshold: float | None = Field(
        None,
        ge=0,
        description="drop tokens of negative advantage in sequences with a mean log(engine / policy) above this (OPSM)",
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
    """Describes the value model of algorithm=ppo, which has the optimiser, schedule and epochs of the policy."""

    path: PathOrIdSetting | None = Field(
        None,
        description="folder or id of the critic: a causal LM, whose value head starts at 0, or a token classifier of "
        "one label; null means model.path",
    )
    lr: float | None = Field(None, gt=0, le=LARGEST, description="peak learning rate; null means optim.lr")
    clip: float | None = Field(
        0.2,
        gt=0,
        le=LARGEST,
        description="the loss clips values to this distance from the values before the step; null means no clipping",
    )
    warmup_steps: int = Field(
        0, ge=0, description="number of first steps in which only the critic is trained, on rewards to go"
    )


DPO_LOSS = {"policy": "dpo", "reduction": "sequence_mean"}
"""The settings of `loss` that algorithm=dpo stands for."""


class AlgorithmSettings(Settings):
    """Holds the choices that make an algorithm; `slimefsdp.config.RunConfig` adds all other settings."""

    algorithm: Literal["grpo", "ppo", "sft", "dpo"] = Field(
        "grpo",
        description="grpo: reinforcement learning without a critic; ppo: with a critic; sft: supervised training; dpo: "
        "direct preference optimisation on pairs of responses from a file (docs/dpo.md)",
    )
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    correction: CorrectionSettings = CorrectionSettings()
    critic: CriticSettings = CriticSettings()

    @model_validator(mode="before")
    @classmethod
    def fill_dpo_loss(cls, tree: Any) -> Any:
        """Under algorithm=dpo, sets loss.policy=dpo and loss.reduction=sequence_mean, unless the user has set them."""
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
        """Returns the formula of the KL: `loss.kl_estimator` without `_unbiased`; its default depends on kl_in."""
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
        """Returns the value of a setting; for advantage.estimator, the property `estimator`, which is never null."""
        return self.estimator if field == "advantage.estimator" else self.value_of(field)

    def value_of(self, field: str) -> Any:
        """Returns the value of a setting `section.name`, or of a top-level setting."""
        if "." not in field:
            return getattr(self, field)
        section, name = field.split(".")
        return getattr(getattr(self, section), name)
