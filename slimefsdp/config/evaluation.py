"""The sections of episodes and of held-out evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from slimefsdp.config.base import LARGEST, PositiveInt, Settings, broken_rule, keyword_arguments
from slimefsdp.config.messages import BrokenRule


def _whole_numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise broken_rule("must be a list of whole numbers", "write it like [1, 8]")
    return tuple(sorted(set(value)))


class EnvironmentSettings(Settings):
    """Episodes with `rollout.environment`."""

    arguments: Annotated[dict[str, Any], BeforeValidator(keyword_arguments)] = Field(
        {}, description="keyword arguments of the class, for each episode"
    )
    max_turns: PositiveInt = Field(8, description="responses in an episode; one that is not done then ends there")
    max_tokens: PositiveInt | None = Field(
        None,
        description="longest episode with its prompt, responses and observations; one that has no room for more ends; "
        "null: what a pack holds (batch.max_tokens_per_rank x mesh.cp), the model's learned positions and the engines",
    )


class EvaluationSettings(Settings):
    """Held-out evaluation by sampling; how is said here, or else by `rollout`."""

    interval_steps: PositiveInt | None = Field(None, description="every so many steps; also before and after the run")
    samples_per_prompt: int = Field(
        1, ge=0, description="responses sampled per held-out prompt; 0, with evaluation.greedy: none but the likeliest"
    )
    temperature: float | None = Field(None, ge=1e-30, le=LARGEST, description="of sampling; null: rollout.temperature")
    max_new_tokens: PositiveInt | None = Field(
        None, description="longest response, of greedy ones too; null: rollout.max_new_tokens"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="as rollout.top_p, which null stands for")
    top_k: PositiveInt | None = Field(None, description="as rollout.top_k, which null stands for")
    min_p: float | None = Field(None, ge=0, lt=1, description="as rollout.min_p, which null stands for")
    greedy: bool = Field(
        False,
        description="also one response of the likeliest tokens to each prompt; its metrics begin with eval/greedy_",
    )
    pass_at: Annotated[tuple[PositiveInt, ...], BeforeValidator(_whole_numbers)] = Field(
        (),
        description="each k of which eval/pass@k is to be logged, how likely one of k responses solves a prompt, with "
        "the ends of its 95 % interval (_low, _high); also eval/finished and eval/solved_of_finished",
    )

    @model_validator(mode="after")
    def check_draws_responses(self) -> EvaluationSettings:
        if not self.samples_per_prompt and not self.greedy:
            raise BrokenRule(
                "evaluation.samples_per_prompt",
                "evaluation.samples_per_prompt=0 draws no response without evaluation.greedy=true",
                "set that, or sample at least 1",
            )
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = getattr(self, name)
            if not self.samples_per_prompt and value is not None:
                raise BrokenRule(
                    f"evaluation.{name}",
                    f"evaluation.{name}={value:g} says nothing about greedy responses, and "
                    "evaluation.samples_per_prompt=0 draws no others",
                    "remove it, or sample at least 1",
                )
        return self

    @model_validator(mode="after")
    def check_pass_at(self) -> EvaluationSettings:
        most = max(self.pass_at, default=0)
        if most > (self.samples_per_prompt or 1):  # of greedy responses alone there is one
            raise BrokenRule(
                "evaluation.pass_at",
                f"evaluation.pass_at={list(self.pass_at)} needs {most} responses to each prompt, and "
                f"evaluation.samples_per_prompt is {self.samples_per_prompt}",
                f"set evaluation.samples_per_prompt={most} or more, or lower evaluation.pass_at",
            )
        return self
