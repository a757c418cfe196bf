"""Translates the settings of earlier versions, so that files of earlier runs can still be read.

This module translates the settings.yaml in a run's folder, and the settings inside checkpoints and recorded batches. It
does not translate a user's settings file; there, the error for an old name gives the new name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

STORED = "# Every setting of this run."
"""The beginning of the settings.yaml in a run's folder."""


@dataclass(frozen=True)
class Always:
    """Holds the constant that replaced a setting on which results depended."""

    value: Any


RENAMED: dict[str, str | Always | None] = {
    "cluster.hang_timeout_s": None,  # now ten times cluster.ping_timeout_s
    "cluster.max_ranks_per_core": None,
    "critic.offload": None,
    "critic.placement": "critic.dp",
    "critic.pretrain_steps": "critic.warmup_steps",
    "data.prompt_template": "data.prompt_column",
    "environment.concurrency": "rollout.reward_concurrency",
    "environment.failure": "rollout.reward_failure",
    "environment.timeout_s": "rollout.reward_timeout_s",
    "environment.workers": "rollout.reward_workers",
    "evaluation.greedy": "evaluation.temperature=0",
    "evaluation.save_samples": None,
    "evaluation.solved_reward": Always(1.0),
    "fsdp.offload_threads": None,
    "fsdp.pin_memory": None,
    "fsdp.prefetch_layers": None,
    "fsdp.wrap_layers": "fsdp.wrap",
    "fsdp.wrap_min_parameters": "fsdp.wrap",
    "lora.resident_adapters": None,
    "loss.dpo_beta": "loss.beta",
    "loss.dro_beta": "loss.beta",  # after loss.dpo_beta, to replace its value; it was null unless the loss was dro
    "loss.drop_zero_advantages": None,
    "loss.kl_horizon": Always(10_000),
    "loss.kl_unbiased": "loss.kl_estimator=k3_unbiased",
    "loss.sapo_temperature_negative": Always(1.05),
    "loss.sapo_temperature_positive": Always(1.0),
    "model.checkpoint_every_n_layers": None,
    "model.offload_activations": "model.activation_checkpointing=offload",
    "optim.adjust_lr_fn": Always("match_rms_adamw"),
    "optim.implementation": None,
    "optim.max_skipped_updates": None,
    "optim.nesterov": Always(True),
    "optim.ns_steps": Always(5),
    "optim.warmup_ratio": "optim.warmup_updates",
    "precision.buffer_dtype": Always("auto"),
    "precision.loss_scale_growth_interval": Always(2000),
    "precision.tf32": Always(False),
    "profile.memory": None,
    "profile.record_shapes": None,
    "profile.with_stack": None,
    "reference.placement": "reference.dp",
    "rollout.max_failed_steps": None,
    "rollout.overlong_penalty": Always(1.0),
    "rollout.show_groups": None,
    "run.export_dtype": None,  # precision.compute_dtype
    "run.wandb_group": None,
    "run.wandb_name": None,
    "service.host": "service.address",
    "service.max_body_bytes": None,
    "service.max_result_bytes": None,
    "service.max_runs": None,
    "service.max_sessions": None,
    "service.max_waiting": None,
    "service.max_waiting_bytes": None,
    "service.port": "service.address",
    "service.receive_timeout_s": None,
    "service.result_kept_s": None,
    "service.session_timeout_s": None,
}
"""Earlier name -> present name, or the constant that replaced the setting. None means that the setting now follows
from another setting, or is a constant on which no result depends.

`section.name=value` replaces an earlier switch: the setting has this value if the switch was on.
"""


def with_present_names(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an earlier run (section -> its settings) with the present names."""
    tree: dict[str, Any] = copy.deepcopy(dict(stored))
    _merge_settings(tree)
    for earlier, present in RENAMED.items():
        section, _, name = earlier.partition(".")
        values = tree.get(section)
        if not isinstance(values, dict) or name not in values:
            continue
        value = values.pop(name)
        if not isinstance(present, str) or value is None:
            continue
        present, _, switched = present.partition("=")
        if switched and not value:
            continue
        section, _, name = present.partition(".")
        tree.setdefault(section, {})[name] = switched or value
    optim = tree.get("optim")
    if isinstance(optim, dict) and optim.get("name") == "sgd":
        if optim.get("betas"):
            optim["momentum"] = optim["betas"][0]
        for name in ("adamw_lr", "betas", "eps", "state_dtype"):  # earlier, all optimisers had these settings
            optim.pop(name, None)
    return tree


def changed_constants(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each setting of an earlier run that was replaced by a constant with another value."""
    for earlier, present in RENAMED.items():
        section, _, name = earlier.partition(".")
        values = stored.get(section)
        value = values.get(name) if isinstance(values, Mapping) else None
        if isinstance(present, Always) and value not in (None, present.value):
            yield f"{earlier} was {_text(value)} and is always {_text(present.value)} now"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merge_settings(tree: dict[str, Any]) -> None:
    """Changes `tree`: computes each setting that replaces several earlier settings, such as `service.address`."""
    loss, critic = (tree[name] if isinstance(tree.get(name), dict) else {} for name in ("loss", "critic"))
    if loss.get("kl_unbiased") and loss.get("kl_estimator"):
        loss["kl_estimator"] = f"{loss['kl_estimator']}_unbiased"
        del loss["kl_unbiased"]
    if critic.get("pretrain_steps"):
        critic["pretrain_steps"] += critic.get("warmup_steps") or 0
    evaluation, service = (tree[name] if isinstance(tree.get(name), dict) else {} for name in ("evaluation", "service"))
    if evaluation.pop("greedy", False) and evaluation.get("samples_per_prompt") == 0:
        evaluation |= {"samples_per_prompt": 1, "temperature": 0.0}
    if "host" in service or "port" in service:
        host, port = service.pop("host", None) or "127.0.0.1", service.pop("port", None)
        service["address"] = f"{f'[{host}]' if ':' in host else host}:{8000 if port is None else port}"
    mesh = tree.get("mesh") or {}
    for name in ("critic", "reference"):
        section = tree.get(name)
        if isinstance(section, dict) and section.pop("placement", None) == "group" and section.get("dp") is None:
            section["dp"] = (mesh.get("dp") or 1) * (mesh.get("dp_replicate") or 1)  # data ranks of the actor


def hint_of(field: str) -> str:
    """Returns a hint about a setting of an earlier version; an empty text if there was no setting of this name."""
    if field not in RENAMED:
        return ""
    present = RENAMED[field]
    if isinstance(present, Always):
        return f"remove it: it is always {_text(present.value)} now"
    return "remove it: it cannot be chosen any more" if present is None else f"it is called {present} now"
