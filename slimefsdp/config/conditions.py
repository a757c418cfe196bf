"""Says which settings are read only with some values of others, so that no setting is given in vain.

A condition is `section.name` of another setting -> the values with which the first one is read.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from slimefsdp.config.messages import BrokenRule
from slimefsdp.errors import short_text

OWN = "module:function"  # a function or class of the user's own, which may read every setting
SET = ()  # any value but null, false and 0

Condition = dict[str, tuple[Any, ...]]

_CLIPS: Condition = {"loss.policy": ("ppo", "gspo", "gspo_token", "cispo", "gmpo", OWN)}
_KL: Condition = {"loss.kl_coefficient": SET}
_LORA: Condition = {"lora.rank": SET}
_SERVER: Condition = {"rollout.engine": ("vllm", "sglang")}
_ALL_LOG_PROBS: Condition = {"rollout.engine": ("embedded", OWN)}  # servers may give those of the remaining tokens
_OWN_PLACE: Condition = {"rollout.placement": ("own",)}
_FILES: Condition = {"algorithm": ("sft", "dpo")}

ONLY_WITH: dict[str, Condition] = {
    "advantage.gamma": {"advantage.estimator": ("reinforce_pp", "gae", OWN)},
    "advantage.gae_lambda": {"advantage.estimator": ("gae", OWN)},
    "advantage.pass_k": {"advantage.estimator": ("pass_at_k", OWN)},
    "loss.constant_length": {"loss.reduction": ("constant",)},
    "loss.clip_low": _CLIPS,
    "loss.clip_high": _CLIPS,
    "loss.dual_clip": {"loss.policy": ("ppo", OWN)},
    "loss.beta": {"loss.policy": ("dpo", "dro", OWN)},
    "loss.kl_estimator": _KL,
    "loss.kl_in": _KL,
    "loss.kl_target": _KL,
    "correction.low": {"correction.method": ("mis", "icepop", "sequence_mis", "geometric_mis")},
    "correction.high": {
        "correction.method": ("importance", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis")
    },
    "critic": {"algorithm": ("ppo",)},
    "critic.dp": {"critic.placement": ("group",)},
    "critic.offload": {"critic.placement": ("colocated",)},
    "reference.dp": {"reference.placement": ("group",)},
    "reference.offload": {"reference.placement": ("colocated",)},
    "run.epochs": _FILES,
    "run.export_dtype": {"run.export_dir": SET},
    "model.checkpoint_every_n_layers": {"model.activation_checkpointing": ("full", "selective", "offload")},
    "lora.alpha": _LORA,
    "lora.targets": _LORA,
    "lora.sync": _LORA,
    "precision.loss_scale_init": {"precision.compute_dtype": ("float16",)},
    "optim.min_lr_ratio": {"optim.schedule": ("linear", "cosine")},
    "profile.details": {"profile.updates": SET},
    "data.train_on": {"algorithm": ("sft",)},
    "data.max_tokens": _FILES,
    "rollout.top_p": _ALL_LOG_PROBS,
    "rollout.top_k": _ALL_LOG_PROBS,
    "rollout.min_p": _ALL_LOG_PROBS,
    "rollout.engine_python": _SERVER,
    "rollout.engine_urls": _SERVER | _OWN_PLACE,
    "rollout.engine_args": {"rollout.engine_python": SET},
    "rollout.gpus_per_engine": {"rollout.engine_python": SET, "mesh.device": ("auto", "cuda")} | _OWN_PLACE,
    "rollout.sync_interval_steps": {"rollout.max_staleness": (0,)} | _OWN_PLACE,
    "rollout.max_staleness": _OWN_PLACE,
    "rollout.on_update": {"rollout.max_staleness": SET},
    "rollout.max_rounds": {"rollout.filter": SET},
    "environment": {"rollout.environment": SET},
    "cluster.allow_without_token": {"cluster.address": SET},
}
"""Setting, or section -> when it, or any setting of it, is read; all of the conditions must hold."""

REQUIRED_WITH: dict[str, Condition] = {
    "advantage.pass_k": {"advantage.estimator": ("pass_at_k",)},
    "loss.constant_length": {"loss.reduction": ("constant",)},
    "correction.low": {"correction.method": ("icepop", "geometric_mis")},
    "correction.high": {"correction.method": ("tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis")},
}
"""Setting -> with which values of another one it must be set."""


def broken_condition(config: Any) -> BrokenRule | None:
    """Returns the first setting that is set in vain, or is required and not set; None if there is none.

    Args:
        config: the settings; its `effective(field)` returns the value of a setting that holds in the end.
    """
    for section in type(config).model_fields:
        settings = getattr(config, section)
        for name, info in type(settings).model_fields.items() if isinstance(settings, BaseModel) else ():
            field, value = f"{section}.{name}", getattr(settings, name)
            if value == info.get_default(call_default_factory=True):
                continue
            for other, values in (ONLY_WITH.get(section, {}) | ONLY_WITH.get(field, {})).items():
                if not _holds(config.effective(other), values):
                    return _unread(field, value, other, values, config.effective(other))
    for field, condition in REQUIRED_WITH.items():
        for other, values in condition.items():
            if config.effective(field) is None and config.effective(other) in values:
                chosen = f"{other}={config.effective(other)}"
                return BrokenRule(other, f"{chosen} needs {field}, which is not set", "set it")
    return None


def condition_text(field: str) -> str:
    """Returns the condition of a setting as the documents write it; empty if it is always read."""
    return " and ".join(map(_condition, *zip(*ONLY_WITH[field].items(), strict=True))) if field in ONLY_WITH else ""


def _holds(value: Any, values: tuple[Any, ...]) -> bool:
    if OWN in values and isinstance(value, str) and ":" in value:
        return True
    return value in values if values else value not in (None, False, 0, ())


def _condition(setting: str, values: tuple[Any, ...]) -> str:
    return f"{setting}={' or '.join(map(str, values))}" if values else setting


def _unread(field: str, value: Any, other: str, values: tuple[Any, ...], found: Any) -> BrokenRule:
    shown = f"{other}={found if isinstance(found, str) else short_text(found)}"
    return BrokenRule(
        field,
        f"{field}={short_text(value)} does nothing with {shown}",
        f"remove it, or set {_condition(other, values)}",
    )
