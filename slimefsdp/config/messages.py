"""Makes one `ConfigError` of all errors that pydantic and this project's rules find in settings.

A rule about several settings raises `BrokenRule`. This module does not import pydantic; it uses the dictionaries that
pydantic's `ValidationError.errors()` returns.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from slimefsdp.config.earlier import hint_of
from slimefsdp.errors import ConfigError, short_text

MAX_FINDINGS = 8

Sections = Mapping[str, Mapping[str, Any]]
"""Section ("" for the top level) -> name of a setting -> its pydantic field."""
Kinds = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Section ("" for the top level) -> kind ("" if there is only one) -> name of a setting -> its pydantic field."""


class BrokenRule(ValueError):
    """Reports that settings break a rule about several settings; validators raise it.

    Args:
        field: the setting that the error is about.
        problem: a sentence with that setting and its value.
        hint: the way out.
    """

    def __init__(self, field: str, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.field, self.problem, self.hint = field, problem, hint


UNKNOWN_KIND = "unknown_kind"  # error type of a section in which a setting names an unknown kind

# pydantic's error type -> (rule, way out), formatted with the error's context
_RULES = {
    "int_type": ("must be a whole number", "write digits only, without quotes"),
    "float_type": ("must be a number", "write it like 0.1 or 1e-6, without quotes"),
    "finite_number": ("must be a finite number", "write it like 0.1 or 1e-6"),
    "bool_type": ("must be true or false", "write true or false, without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "string_unicode": ("must be text without half characters", "remove the escape"),
    "string_too_short": ("must not be empty", "write a name, or remove the setting"),
    "literal_error": ("must be {expected}", "choose one of these"),
    "greater_than": ("must be above {gt}", "raise it"),
    "greater_than_equal": ("must be at least {ge}", "raise it"),
    "less_than": ("must be below {lt}", "lower it"),
    "less_than_equal": ("must be at most {le}", "lower it"),
    "model_type": ("must be a section", "write its settings on indented lines below its name, or remove it"),
    "rule": ("{rule}", "{hint}"),  # rules of slimefsdp/config about one value (broken_rule)
}

# setting of this project -> its names in Accelerate, Axolotl, slime, TRL and verl
_FOREIGN_NAMES = {
    "a line of a settings file, `base: FILE`, and no setting": ("base",),
    "run.dir": ("output_dir", "save", "default_local_dir"),
    "run.steps": ("max_steps", "num_rollout", "total_training_steps"),
    "run.epochs under algorithm=sft and dpo, else run.steps, of one rollout batch each": (
        "num_train_epochs", "num_epochs", "num_epoch", "total_epochs",
    ),
    "run.wandb_project": ("use_wandb", "report_to", "project_name"),
    "model.path": ("hf_checkpoint", "base_model", "model_name_or_path"),
    "reference.path": ("ref_load",),
    "model.activation_checkpointing": (
        "gradient_checkpointing", "enable_gradient_checkpointing", "recompute_granularity",
        "fsdp_activation_checkpointing",
    ),
    "model.compile": ("torch_compile", "use_torch_compile"),
    "lora.rank": ("lora_r", "r", "lora_rank", "use_peft", "adapter"),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("lora_target_modules", "target_modules", "lora_target_linear"),
    "mesh.dp": ("dp_shard_size", "num_processes", "actor_num_gpus_per_node", "n_gpus_per_node", "nproc_per_node"),
    "mesh.dp, the ranks of all nodes": ("actor_num_nodes", "nnodes", "num_machines"),
    "mesh.dp_replicate": ("dp_replicate_size",),
    "mesh.cp": (
        "context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size", "ulysses_sequence_parallel_size",
    ),
    "mesh.tp": ("tp", "tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
    "mesh.ep": ("ep", "expert_model_parallel_size", "expert_parallel_size", "ep_size"),
    "attention.kernel": ("attn_implementation", "flash_attention"),
    "precision.compute_dtype": ("bf16", "fp16", "torch_dtype", "mixed_precision"),
    "fsdp.sharding": ("fsdp_sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward", "zero_stage"),
    "fsdp.wrap": ("fsdp_transformer_layer_cls_to_wrap", "fsdp_auto_wrap_policy", "fsdp_min_num_params"),
    "fsdp.cpu_offload": ("fsdp_offload_params", "param_offload", "optimizer_offload"),
    "batch.samples_per_update": ("global_batch_size", "per_device_train_batch_size"),
    "batch.samples_per_update (samples, not prompts)": ("ppo_mini_batch_size",),
    "batch.samples_per_update (packs of at most batch.max_tokens_per_rank are made of them)": (
        "gradient_accumulation_steps", "num_steps_per_rollout",
    ),
    "batch.max_tokens_per_rank": (
        "micro_batch_size", "max_tokens_per_gpu", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu",
        "sequence_len", "max_seq_length", "max_length", "use_dynamic_batch_size", "sample_packing", "packing",
    ),
    "optim.name": ("optimizer",),
    "optim.lr": ("learning_rate",),
    "optim.betas": ("adam_beta1", "adam_beta2"),
    "optim.eps": ("adam_epsilon", "adam_eps"),
    "optim.schedule": ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    "optim.warmup_updates": ("warmup_steps", "lr_warmup_steps", "lr_warmup_iters", "num_warmup_steps", "warmup_ratio"),
    "optim.max_grad_norm": ("clip_grad", "grad_clip", "gradient_clipping"),
    "data.train": ("prompt_data", "train_files", "datasets", "dataset_name"),
    "data.heldout": ("eval_prompt_data", "val_files"),
    "data.heldout, a file or data set of its own": ("val_set_size",),
    "data.prompt_column": ("input_key", "prompt_key"),
    "data.answer_column": ("label_key",),
    "data.max_prompt_tokens": ("max_prompt_length", "rollout_max_prompt_len"),
    "rollout.temperature": ("rollout_temperature",),
    "rollout.prompts_per_step": ("train_batch_size", "rollout_batch_size"),
    "rollout.samples_per_prompt": ("num_generations", "n", "n_samples_per_prompt"),
    "rollout.max_new_tokens": (
        "max_completion_length", "response_length", "max_response_length", "rollout_max_response_len",
    ),
    "rollout.engine": ("use_vllm",),
    "rollout.engines": ("rollout_num_gpus", "rollout_num_engines"),
    "rollout.engine_args": (
        "gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static", "mem_fraction_static",
    ),
    "rollout.gpus_per_engine": ("rollout_num_gpus_per_engine", "vllm_tensor_parallel_size"),
    "rollout.placement": ("colocate", "vllm_mode", "vllm_enable_sleep_mode"),
    "rollout.reward": ("reward_funcs", "custom_rm_path", "rm_type", "rm_url", "custom_reward_function"),
    "evaluation.interval_steps": ("eval_steps", "eval_interval", "test_freq"),
    "evaluation.samples_per_prompt": ("n_samples_per_eval_prompt",),
    "checkpoint.interval_steps": ("save_steps", "save_interval", "save_freq"),
    "checkpoint.keep_last": ("save_total_limit", "max_actor_ckpt_to_keep"),
    "checkpoint.resume": ("resume_from_checkpoint", "resume_mode", "load"),
    "loss.policy": ("loss_mode",),
    "loss.reduction (token_mean for dapo, sequence_mean for grpo, constant for dr_grpo), and advantage.estimator": (
        "loss_type",
    ),
    "loss.reduction": ("loss_agg_mode", "calculate_per_token_loss"),
    "loss.epochs": ("num_iterations", "ppo_epochs"),
    "loss.kl_coefficient (of DPO loss.beta)": ("kl_beta",),
    "loss.kl_coefficient": ("kl_loss_coef", "use_kl_loss"),
    "loss.kl_coefficient with loss.kl_in=reward": ("kl_coef", "use_kl_in_reward"),
    "loss.kl_estimator": ("kl_loss_type",),
    "loss.entropy_coefficient": ("entropy_coef", "entropy_coeff"),
    "loss.clip_low and loss.clip_high": ("epsilon", "clip_ratio", "eps_clip"),
    "loss.clip_low": ("clip_ratio_low",),
    "loss.clip_high": ("epsilon_high", "eps_clip_high", "clip_ratio_high"),
    "loss.dual_clip": ("clip_ratio_c", "eps_clip_c"),
    "advantage.estimator": ("advantage_estimator", "adv_estimator"),
    "advantage.estimator (grpo divides by a group's deviation, dr_grpo does not)": (
        "scale_rewards", "norm_adv_by_std_in_grpo",
    ),
    "advantage.gae_lambda": ("lam", "lambd"),
    "correction.method": ("use_tis", "vllm_importance_sampling_correction"),
}  # fmt: skip
# what this project does not have -> names of such settings in other trainers
_ABSENT = {
    "pipeline parallelism": ("pp", "pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size"),
    "quantized weights": ("load_in_4bit", "load_in_8bit", "quantization_config"),
    "dropout of adapters": ("lora_dropout", "dropout"),
    "DeepSpeed and Megatron": ("deepspeed", "train_backend", "megatron"),
    "an interval of logging, since every step is logged": ("logging_steps", "log_interval"),
}

NAMES_ELSEWHERE = {name: f"here it is {ours}" for ours, names in _FOREIGN_NAMES.items() for name in names} | {
    name: f"not in this version: {what}; remove it" for what, names in _ABSENT.items() for name in names
}
"""Name of a setting in another trainer -> the hint with the setting of this project."""

RECIPES = {
    "dapo": "DAPO is algorithm=grpo with loss.clip_high=0.28, rollout.filter=mixed_groups and "
    "rollout.overlong_buffer_tokens (docs/algorithms.md).",
    "gspo": "GSPO is algorithm=grpo with loss.policy=gspo, loss.reduction=sequence_mean, loss.clip_low=3e-4 and "
    "loss.clip_high=4e-4 (docs/algorithms.md).",
    "dr_grpo": "Dr.GRPO is algorithm=grpo with advantage.estimator=dr_grpo, loss.reduction=constant and "
    "loss.constant_length (docs/algorithms.md).",
    "rloo": "RLOO is algorithm=grpo with advantage.estimator=rloo and loss.policy=reinforce (docs/algorithms.md).",
}
"""Algorithm that is a combination of settings here -> the hint with these settings."""


def config_error(findings: Sequence[Mapping[str, Any]], kinds: Kinds) -> ConfigError:
    """Returns one error for all findings. Its message is about the first finding, its `others` about the rest."""
    sections = {
        section: {name: info for fields in fields_of.values() for name, info in fields.items()}
        for section, fields_of in kinds.items()
    }
    # unknown names come first, because a misspelt name is often the reason for a missing one
    ordered = sorted(findings, key=lambda finding: finding["type"] != "extra_forbidden")
    first, *others = (_in_words(finding, sections, kinds) for finding in ordered[:MAX_FINDINGS])
    error = ConfigError(first[1], field=first[0], hint=first[2])
    error.others = tuple(f"{message}; {hint}" for _, message, hint in others)
    if len(ordered) > MAX_FINDINGS:
        error.others += (f"{len(ordered) - MAX_FINDINGS} more like these",)
    return error


def _in_words(finding: Mapping[str, Any], sections: Sections, kinds: Kinds) -> tuple[str | None, str, str]:
    """Returns (the setting of a finding, what is wrong with it, the way out)."""
    kind, value, context = finding["type"], short_text(finding["input"]), finding.get("ctx", {})
    loc, chosen = tuple(map(str, finding["loc"])), ""
    if len(loc) > 1 and loc[1] in kinds.get(loc[0], {}):  # pydantic puts the kind after the section
        chosen, loc = loc[1], (loc[0], *loc[2:])
    field = ".".join(map(_name, loc))
    if kind == UNKNOWN_KIND:
        given, known = str(finding["input"][context["choice"]]), kinds[field]
        near = difflib.get_close_matches(given.lower(), known, n=2)
        problem = f"{field}.{context['choice']}={short_text(given)} must be {' or '.join(known)}"
        return f"{field}.{context['choice']}", problem, f"did you mean {near[0]}?" if near else "choose one of these"
    if kind == "value_error":
        broken: BrokenRule = context["error"]
        return broken.field, broken.problem, broken.hint
    if not field:
        return None, f"the settings are {value}, not sections", "begin with sections such as `model:` and `optim:`"
    if kind == "missing":
        required = [f"{field}.{name}" for name, info in sections.get(field, {}).items() if info.is_required()]
        return field, f"{field} is required and not set", f"add {' and '.join(required) or 'it'}"
    if kind == "extra_forbidden":
        *section, name = loc
        if chosen and name in sections[section[0]]:
            owners = [owner for owner, fields in kinds[section[0]].items() if name in fields]
            return (
                field,
                f"{field}={value} is not a setting of {section[0]} of the kind {chosen}",
                (f"remove it, or choose {' or '.join(owners)}"),
            )
        hint = _elsewhere(".".join(section), name, finding["input"], sections)
        return field, f"{field}={value} is not a setting", hint or _near_names(".".join(section), name, sections)
    if kind == "invalid_key":
        return field, f"{field} is not the name of a setting", "use text as the name"
    is_short = {name: isinstance(x, float) and x.is_integer() and x < 1e15 for name, x in context.items()}
    context = {name: int(x) if is_short[name] else x for name, x in context.items()}
    rule, hint = _RULES.get(kind, (finding["msg"], "correct the value"))
    if kind == "literal_error" and isinstance(finding["input"], str):
        written = finding["input"].lower()
        first, second = (*loc, "")[:2]
        info = sections.get(first, {}).get(second) or sections[""].get(first)
        near = difflib.get_close_matches(written, _choices(getattr(info, "annotation", None)), n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else hint
        hint = RECIPES.get(written, hint) if field == "algorithm" else hint
    elif kind == "literal_error":  # in verl, `algorithm` is a section
        hint = _inner_names(finding["input"], sections) or hint
    return field, f"{field}={value} {rule.format(**context)}", hint.format(**context)


def _choices(annotation: Any) -> list[str]:
    """Returns the texts that the `Literal`s in a field's type allow."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _name(part: str) -> str:
    """Returns a part of a name that a user typed; a long or unprintable part is shortened and escaped."""
    return part if part.isprintable() and 0 < len(part) <= 60 else short_text(part)


def _elsewhere(section: str, name: str, value: Any, sections: Sections) -> str:
    """Returns a hint which settings replace a name of an earlier version or another trainer; "" if it is unknown."""
    name, known = name.replace("-", "_"), sections.get(section, {})
    if hint := hint_of(f"{section}.{name}"):
        return hint
    ours = {own for names in sections.values() for own in names}
    # misspelt names are found too, unless a name of this project is as similar
    near = difflib.get_close_matches(
        name, [name, *ours] if name in ours else [*NAMES_ELSEWHERE, *ours], n=1, cutoff=0.9
    )
    if near and near[0] in NAMES_ELSEWHERE and name not in known:
        return NAMES_ELSEWHERE[near[0]]
    if name.startswith("fsdp_") and not isinstance(value, Mapping):
        return "look at the section fsdp, such as fsdp.sharding and fsdp.wrap"
    return _inner_names(value, {} if section else sections)


def _inner_names(value: Any, sections: Sections) -> str:
    """Returns a hint which settings replace the names in a section of another trainer; "" if no name is known.

    Args:
        sections: this project's sections; their names may be inside of `value`, as in actor_rollout_ref.actor.optim.lr.
    """
    inner = {}
    for parent, leaf in _leaves(value):
        own = leaf.replace("-", "_")
        if own in sections.get(parent, {}):
            inner[leaf] = f"here it is {parent}.{own}"
        elif own in NAMES_ELSEWHERE:
            inner[leaf] = NAMES_ELSEWHERE[own]
    return "; ".join(f"{leaf}: {hint}" for leaf, hint in list(inner.items())[:MAX_FINDINGS])


def _leaves(value: Any, parent: str = "", levels: int = 4) -> Iterator[tuple[str, str]]:
    """Yields (name of the innermost mapping, name) of each value in nested mappings, up to `levels` deep."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if isinstance(inner, Mapping) and levels > 1:
            yield from _leaves(inner, str(name), levels - 1)
        else:
            yield parent, str(name)


def _near_names(section: str, name: str, sections: Sections) -> str:
    def full(section: str, name: str) -> str:
        return f"{section}.{name}" if section else name

    known = sections.get(section, {})
    near = [full(other, name) for other, names in sections.items() if name in names]  # the same name in another section
    if not near:
        near = [full(section, match) for match in difflib.get_close_matches(name, known, n=2, cutoff=0.5)]
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return f"use one of {', '.join(sorted(known))}" if known else "remove it"
