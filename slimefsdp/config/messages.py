"""What is wrong with the settings, in words a person can act on: pydantic's findings as one `ConfigError`.

Takes the plain dictionaries of `ValidationError.errors()`, so it needs no pydantic itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slimefsdp.errors import ConfigError, short_text

MAX_FINDINGS = 8

Sections = Mapping[str, Mapping[str, bool]]
"""Section ("" for the top level) -> its names -> whether one must be given."""

# pydantic's error type -> the rule and the way out, filled from the error's context
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

NAMES_ELSEWHERE = {
    # TRL
    "learning_rate": "optim.lr",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "num_iterations": "loss.epochs",
    "beta": "loss.kl_coefficient",
    "epsilon": "loss.clip_low and loss.clip_high",
    "epsilon_high": "loss.clip_high",
    # verl
    "n": "rollout.samples_per_prompt",
    "train_batch_size": "rollout.prompts_per_step",
    "ppo_mini_batch_size": "batch.samples_per_update (samples, not prompts)",
    "ppo_epochs": "loss.epochs",
    "response_length": "rollout.max_new_tokens",
    "kl_loss_coef": "loss.kl_coefficient",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "adv_estimator": "advantage.estimator",
    # slime
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "rollout_batch_size": "rollout.prompts_per_step",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "global_batch_size": "batch.samples_per_update",
    "max_tokens_per_gpu": "batch.max_tokens_per_rank",
    "eps_clip": "loss.clip_low and loss.clip_high",
    "eps_clip_high": "loss.clip_high",
}
"""Names that other trainers have for settings of this one, for those who come from there."""


def config_error(findings: Sequence[Mapping[str, Any]], sections: Sections) -> ConfigError:
    """All findings as one error: the first in full, the others listed below it."""
    # an unknown name is often why another one is missing, so it comes first
    ordered = sorted(findings, key=lambda finding: finding["type"] != "extra_forbidden")
    first, *others = (_in_words(finding, sections) for finding in ordered[:MAX_FINDINGS])
    error = ConfigError(first[1], field=first[0], hint=first[2])
    error.others = tuple(f"{message}; {hint}" for _, message, hint in others)
    if len(ordered) > MAX_FINDINGS:
        error.others += (f"{len(ordered) - MAX_FINDINGS} more like these",)
    return error


def _in_words(finding: Mapping[str, Any], sections: Sections) -> tuple[str | None, str, str]:
    """The setting, what is wrong with it, and the way out."""
    field = ".".join(_name(str(part)) for part in finding["loc"])
    kind, value, context = finding["type"], short_text(finding["input"]), finding.get("ctx", {})
    if kind == "value_error":  # rules about several settings name them themselves, and the way out after "; "
        message, _, hint = str(context["error"]).partition("; ")
        named = re.match(r"[a-z_]+(\.[a-z_]+)*", message)
        return named and named[0], message, hint
    if not field:
        return None, f"the settings are {value}, not sections", "begin with sections such as `model:` and `optim:`"
    if kind == "missing":
        required = [f"{field}.{name}" for name, is_required in sections.get(field, {}).items() if is_required]
        return field, f"{field} is required and not set", f"add {' and '.join(required) or 'it'}"
    if kind == "extra_forbidden":
        *section, name = map(str, finding["loc"])
        return field, f"{field}={value} is not a setting", _near_names(".".join(section), name, sections)
    if kind == "invalid_key":
        return field, f"{field} is not the name of a setting", "use text as the name"
    is_short = {name: isinstance(x, float) and x.is_integer() and x < 1e15 for name, x in context.items()}
    context = {name: int(x) if is_short[name] else x for name, x in context.items()}
    rule, hint = _RULES.get(kind, (finding["msg"], "correct the value"))
    if kind == "literal_error" and isinstance(finding["input"], str):
        near = difflib.get_close_matches(finding["input"], re.findall(r"'([^']*)'", context["expected"]), n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else hint
    return field, f"{field}={value} {rule.format(**context)}", hint.format(**context)


def _name(part: str) -> str:
    """A part of a setting's name, which may be anything that somebody typed."""
    return part if part.isprintable() and 0 < len(part) <= 60 else short_text(part)


def _near_names(section: str, name: str, sections: Sections) -> str:
    def full(section: str, name: str) -> str:
        return f"{section}.{name}" if section else name

    known = sections.get(section, {})
    if name in NAMES_ELSEWHERE and name not in known:
        return f"here it is {NAMES_ELSEWHERE[name]}"
    near = [full(other, name) for other, names in sections.items() if name in names]  # the right name, elsewhere
    near += [full(section, match) for match in difflib.get_close_matches(name, known, n=2, cutoff=0.5)]
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return f"use one of {', '.join(sorted(known))}" if known else "remove it"
