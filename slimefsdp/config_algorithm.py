"""What an algorithm is made of, as the base of the settings tree: its sections, and the rules between them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slimefsdp.config_loss import AdvantageSettings, CorrectionSettings, CriticSettings, LossSettings
from slimefsdp.config_messages import short_text
from slimefsdp.config_sections import Settings
from slimefsdp.loss.names import PAIRED_ESTIMATORS, PER_SEQUENCE, TOKEN_ESTIMATORS


class AlgorithmSettings(Settings):
    """The choices that make an algorithm; `slimefsdp.config.RunConfig` adds everything else."""

    algorithm: Literal["grpo", "ppo", "sft"] = Field(
        "grpo", description="grpo: reinforcement learning without a critic; ppo: with one; sft: supervised"
    )
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    correction: CorrectionSettings = CorrectionSettings()
    critic: CriticSettings = CriticSettings()

    @model_validator(mode="after")
    def a_critic_belongs_to_ppo(self) -> Self:
        given = [name for name, value in self.critic if value != type(self.critic).model_fields[name].default]
        if self.algorithm == "grpo" and given:
            field = f"critic.{given[0]}"
            raise ValueError(
                f"{field}={short_text(self.value_of(field))} does nothing with algorithm=grpo, which has no critic; "
                "remove it, or set algorithm=ppo"
            )
        if self.algorithm == "ppo" and self.estimator != "gae" and ":" not in self.estimator:
            raise ValueError(
                f"advantage.estimator={self.estimator} reads no values, and algorithm=ppo trains a critic for them; "
                "remove it, or set algorithm=grpo"
            )
        return self

    @model_validator(mode="after")
    def advantage_parameters_belong_to_their_estimator(self) -> Self:
        if self.algorithm != "sft":  # which reads none of them
            self.advantage.refuse_unread(self.estimator)
        return self

    @model_validator(mode="after")
    def rewards_that_are_counted_take_no_kl(self) -> Self:
        if self.has_kl_in_reward and self.estimator in ("maxrl", "pass_at_k"):
            raise ValueError(
                f"loss.kl_in=reward takes a KL off the rewards, and advantage.estimator={self.estimator} counts them; "
                "set loss.kl_in=loss, or choose another estimator"
            )
        return self

    @model_validator(mode="after")
    def a_loss_of_sequences_has_one_advantage_for_each(self) -> Self:
        discounts = self.estimator == "reinforce_pp" and self.advantage.gamma != 1
        has_token_rewards = self.has_kl_in_reward and self.estimator in TOKEN_ESTIMATORS
        by_token = self.estimator == "gae" or discounts or has_token_rewards
        if self.loss.policy in PER_SEQUENCE and by_token:
            raise ValueError(
                f"loss.policy={self.loss.policy} has one advantage for each sequence, and advantage.estimator="
                f"{self.estimator} gives each token its own; choose gspo_token or ppo, or another estimator"
            )
        return self

    @model_validator(mode="after")
    def a_rollout_is_corrected_once(self) -> Self:
        if self.correction.method != "none" and self.loss.old_log_probs == "rollout":
            raise ValueError(
                f"correction.method={self.correction.method} corrects for the engine's log-probs, and "
                "loss.old_log_probs=rollout measures the ratio from them already; remove one"
            )
        return self

    @model_validator(mode="after")
    def preference_pairs_are_compared_by_their_rewards(self) -> Self:
        corrections = [f"correction.{name}" for name in ("method", "veto_below", "opsm_threshold")]
        changing = [field for field in corrections if self.value_of(field) not in ("none", None)]
        changing += ["loss.kl_in"] if self.has_kl_in_reward else []
        changing += ["advantage.whiten"] if self.advantage.whiten else []
        if self.loss.policy == "dpo" and changing:
            raise ValueError(
                f"{changing[0]}={short_text(self.value_of(changing[0]))} changes what single tokens count, and "
                "loss.policy=dpo compares the rewards of whole pairs; remove one"
            )
        if self.loss.policy == "dpo" and self.estimator not in PAIRED_ESTIMATORS and ":" not in self.estimator:
            raise ValueError(
                f"advantage.estimator={self.estimator} does not say which of two samples is the better one, and "
                f"loss.policy=dpo takes it from the sign; choose {' or '.join(PAIRED_ESTIMATORS)}"
            )
        return self

    @property
    def loss_name(self) -> Literal["policy", "sft"]:
        """The loss that an actor's `train_step` takes under this algorithm."""
        return "sft" if self.algorithm == "sft" else "policy"

    @property
    def kl_estimator(self) -> str:
        """The KL estimator: `loss.kl_estimator`, or the one whose gradient is right where the KL enters."""
        return self.loss.kl_estimator or ("k1" if self.loss.kl_in == "reward" else "k3")

    @property
    def estimator(self) -> str:
        """The advantage estimator: `advantage.estimator`, or what the algorithm is known by."""
        return self.advantage.estimator or ("gae" if self.algorithm == "ppo" else "grpo")

    @property
    def needs_reference(self) -> bool:
        """Whether training reads a reference model."""
        return self.loss.kl_coefficient > 0 or self.loss.policy == "dpo"

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether rewards, and so advantages, depend on log-probs of policy and reference."""
        return self.loss.kl_coefficient > 0 and self.loss.kl_in == "reward"

    def value_of(self, field: str) -> Any:
        """The value of `section.name`."""
        section, name = field.split(".")
        return getattr(getattr(self, section), name)
