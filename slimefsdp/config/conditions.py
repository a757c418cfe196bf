"""Lists which settings are read only with certain values of other settings, and which values contradict each other.

A condition maps settings, `section.name`, to values. It holds if each of these settings has one of its values.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from slimefsdp.config.messages import BrokenRule
from slimefsdp.errors import short_text

OWN = "module:function"  # stands for any user's function or class, which may read every setting
SET = ()  # stands for any value but null, false, 0 and ()


class But(tuple[Any, ...]):
    """Stands for all values except the listed ones."""


Condition = dict[str, tuple[Any, ...]]

_CLIPS: Condition = {"loss.policy": ("ppo", "gspo", "gspo_token", "cispo", "gmpo", OWN)}
_KL: Condition = {"loss.kl_coefficient": SET}
_LORA: Condition = {"lora.rank": SET}
_SERVER: Condition = {"rollout.engine": But(("embedded",))}
# servers may return log-probs over the kept tokens only
_ALL_LOG_PROBS: Condition = {"rollout.engine": ("embedded", OWN)}
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
    "loss.routing_replay": {"algorithm": But(("sft", "dpo"))},
    "correction.low": {"correction.method": ("mis", "icepop", "sequence_mis", "geometric_mis")},
    "correction.high": {
        "correction.method": ("importance", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis")
    },
    "critic": {"algorithm": ("ppo",)},
    "reference.offload": {"reference.dp": (None,)},
    "run.epochs": _FILES,
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
"""Setting, or section -> the condition under which the setting, or the section's settings, are read."""

REQUIRED_WITH: dict[str, Condition] = {
    "advantage.pass_k": {"advantage.estimator": ("pass_at_k",)},
    "loss.constant_length": {"loss.reduction": ("constant",)},
    "correction.low": {"correction.method": ("icepop", "geometric_mis")},
    "correction.high": {"correction.method": ("tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis")},
}
"""Setting -> other setting -> the values of the other setting with which the first must be set."""

CONFLICTS: list[tuple[Condition, str, str]] = [
    (
        {"model.activation_checkpointing": ("selective",), "model.compile": (True,)},
        "the operations inside of a compiled layer cannot be selected",
        "use full or none, or remove model.compile",
    ),
    (
        {"precision.reduce_dtype": ("float16",), "precision.compute_dtype": But(("float16",))},
        "float16 sums overflow without a loss scale, which only float16 computation has",
        "set precision.compute_dtype=float16, or reduce in bfloat16",
    ),
    (
        {"attention.kernel": ("flash_attn_3",), "attention.strategy": ("ring_flash_attn",), "mesh.cp": But((1,))},
        "this strategy always computes by the flash-attn package",
        "set attention.strategy=auto, or remove attention.kernel",
    ),
    (
        {"mesh.tp": But((1,)), "optim.name": ("muon",)},
        "muon needs whole matrices, which tp ranks share",
        "use adamw, or set mesh.tp=1",
    ),
    (
        {"mesh.tp": But((1,)), "fsdp.wrap": SET},
        "units inside of the blocks that tp ranks share would be gathered too late",
        "remove fsdp.wrap, or set mesh.tp=1",
    ),
    (
        {"mesh.ep": But((1,)), "optim.name": ("muon",)},
        "muon needs the experts of a layer together, which ep ranks share",
        "use adamw, or set mesh.ep=1",
    ),
    *(
        (
            {axis: But((1,)), "fsdp.sharding": ("replicate",)},
            "every rank would hold the whole model, which these ranks share",
            f"use another level, or set {axis}=1",
        )
        for axis in ("mesh.tp", "mesh.ep")
    ),
    (
        {"mesh.ep": But((1,)), "optim.state_dtype": ("8bit",)},
        "the scales of these moments are not divided over ep ranks",
        "use bfloat16, or set mesh.ep=1",
    ),
    (
        {"mesh.tp": But((1,)), "optim.state_dtype": ("bfloat16", "8bit")},
        "these moments are rounded by rows, which tp ranks share",
        "remove optim.state_dtype, or set mesh.tp=1",
    ),
    (
        {"precision.float8": But(("none",)), "lora.rank": SET},
        "modules with adapters compute in precision.compute_dtype",
        "remove one",
    ),
    (
        {"precision.float8": But(("none",)), "precision.compute_dtype": ("float16", "float64")},
        "float8 products give bfloat16 or float32",
        "set precision.compute_dtype=bfloat16, or remove precision.float8",
    ),
    (
        {"reference.offload": ("none", "swap"), "fsdp.cpu_offload": (True,)},
        "the policy is on the host between uses, so the reference must be there too",
        "remove one",
    ),
    (
        {"reference.offload": ("swap",), "loss.kl_estimator": ("full",)},
        "swap takes the policy off the device while the reference computes, and full needs both at once",
        "set reference.offload=sleep, or another loss.kl_estimator",
    ),
    (
        {"loss.kl_estimator": ("full",), "reference.dp": SET},
        "full reads the hidden states of the reference, which are in other processes",
        "remove reference.dp, or choose k3",
    ),
    (
        {"loss.kl_estimator": ("full", "k1_unbiased", "k3_unbiased"), "loss.kl_in": ("reward",)},
        "this estimator is a term of the loss",
        "set loss.kl_in=loss, or choose k1",
    ),
    (
        {"loss.kl_in": ("reward",), "advantage.estimator": ("maxrl", "pass_at_k")},
        "the KL would change rewards, which this estimator counts",
        "set loss.kl_in=loss, or choose another estimator",
    ),
    (
        {"correction.method": But(("none",)), "loss.old_log_probs": ("rollout",)},
        "the ratio is measured from the engine's log-probs already, so nothing is left to correct",
        "remove one",
    ),
    (
        {"loss.routing_replay": ("old_log_probs",), "loss.old_log_probs": ("rollout",)},
        "no pass computes old log-probs, whose experts could be repeated",
        "set loss.routing_replay=rollout",
    ),
    (
        {"data.overlong_prompts": ("truncate", "split"), "algorithm": But(("sft",))},
        "only records of supervised training can be cut",
        "set it to error or skip",
    ),
    (
        {"rollout.weight_transport": ("disk",), "run.dir": (None,)},
        "weights are written below run.dir, which is not set",
        "set run.dir, or use broadcast",
    ),
    (
        {"rollout.filter": ("mixed_groups",), "rollout.samples_per_prompt": (1,)},
        "every group of one response is dropped",
        "raise rollout.samples_per_prompt, or remove rollout.filter",
    ),
    (
        {"rollout.reward_workers": (0,), "rollout.environment": But((None,))},
        "episodes need a process",
        "set rollout.reward_workers to 1 or more",
    ),
    (
        {"rollout.reward": But((None,)), "rollout.environment": But((None,))},
        "the environment gives the rewards",
        "remove rollout.reward",
    ),
    (
        {"rollout.overlong_buffer_tokens": But((None,)), "rollout.environment": But((None,))},
        "the environment gives the rewards, from which no penalty is subtracted",
        "remove rollout.overlong_buffer_tokens",
    ),
]
"""(Condition that must not hold, reason, way out). Errors blame the first setting of the condition."""


def broken_condition(config: Any) -> BrokenRule | None:
    """Returns the first rule of this module that the settings break, or None if they break none.

    Args:
        config: the settings, with the method `effective` of `AlgorithmSettings`.
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
    for conflict, reason, hint in CONFLICTS:
        is_known = all(_has(config, *setting.split(".")) for setting in conflict)
        if is_known and all(_holds(config.effective(setting), values) for setting, values in conflict.items()):
            shown = " with ".join(_shown(setting, config.effective(setting)) for setting in conflict)
            return BrokenRule(next(iter(conflict)), f"{shown}: {reason}", hint)
    return None


def condition_text(field: str) -> str:
    """Returns the condition under which a setting is read, as a text for documents; empty if it is always read."""
    return " and ".join(map(_condition, *zip(*ONLY_WITH[field].items(), strict=True))) if field in ONLY_WITH else ""


def _has(config: Any, section: str, name: str = "") -> bool:
    """Returns whether the settings have a setting; the sections of some optimisers lack some."""
    return hasattr(config, section) and (not name or hasattr(getattr(config, section), name))


def _holds(value: Any, values: tuple[Any, ...]) -> bool:
    if OWN in values and isinstance(value, str) and ":" in value:
        return True
    if isinstance(values, But):
        return value not in values
    return value in values if values else value not in (None, False, 0, ())


def _shown(setting: str, value: Any) -> str:
    return f"{setting}={value if isinstance(value, str) else short_text(value)}"


def _condition(setting: str, values: tuple[Any, ...]) -> str:
    sign = " other than " if isinstance(values, But) else "="
    shown = ("null" if value is None else str(value) for value in values)
    return f"{setting}{sign}{' or '.join(shown)}" if values else setting


def _unread(field: str, value: Any, other: str, values: tuple[Any, ...], found: Any) -> BrokenRule:
    return BrokenRule(
        field,
        f"{field}={short_text(value)} does nothing with {_shown(other, found)}",
        f"remove it, or set {_condition(other, values)}",
    )
