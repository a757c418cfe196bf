"""Defines the section `data`: files and data sets of records."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from slimefsdp.config.base import (
    PathOrIdSetting,
    PositiveInt,
    Settings,
    broken_rule,
    keyword_arguments,
    path_or_id,
    path_text,
)
from slimefsdp.errors import short_text

_SET_NAME = "[A-Za-z0-9_-]{1,64}"


def _template_arguments(value: Any) -> dict[str, Any]:
    if "tools" in keyword_arguments(value):
        hint = "have an environment return them with its prompts, as examples/environments/tools.py:ToolUse does"
        raise broken_rule("must not have tools, which belong to a prompt", hint)
    return value  # type: ignore[no-any-return]


def heldout_field(name: str) -> str:
    """Returns the setting that has the path of a held-out set; a set without a name has data.heldout itself."""
    return f"data.heldout.{name}" if name else "data.heldout"


def _checked_heldout(value: Any) -> Path | dict[str, Path]:
    """Checks data.heldout; returns a path or id, or a mapping name -> path or id. Errors name the set."""
    example = "write it like {math: math.jsonl, code: code.jsonl}"
    if isinstance(value, list | tuple):
        raise broken_rule("is a list, and several held-out sets need names", example)
    if not isinstance(value, Mapping):
        return path_or_id(value)
    if not value:
        raise broken_rule("names no held-out set", f"{example}, or remove it")
    kept = {name: path for name, path in value.items() if path is not None}  # a null removes a set
    sets = {}
    for name, path in (kept or value).items():
        # the name is part of names of metrics and folders
        if not isinstance(name, str) or not re.fullmatch(_SET_NAME, name):
            rule = f"has the name {short_text(name)}, which must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
            raise broken_rule(rule, "rename it: the name is part of its metrics, eval/NAME/..")
        try:
            sets[name] = path_or_id(path)
        except PydanticCustomError as error:
            context = error.context or {}
            rule = f"has {short_text(path)} under {name}, which {context['rule']}"
            raise broken_rule(rule, context["hint"]) from None
    return sets


HeldoutSetting = Annotated[
    Path | dict[str, Path],
    BeforeValidator(_checked_heldout),
    PlainSerializer(
        lambda sets: path_text(sets) if isinstance(sets, Path) else {key: path_text(sets[key]) for key in sets},
        return_type=str | dict[str, str],
        when_used="json",
    ),
]


def template_columns(template: str) -> list[str]:
    """Returns the columns in a template like `{instruction}: {input}`; raises a ValueError if it is malformed."""
    columns = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion:
            raise ValueError(f"{{{name}}} names no column alone")
        columns.append(name)
    return columns


def _column_or_template(value: str) -> str:
    try:
        template_columns(value)
    except ValueError as error:
        hint = "write columns in braces, like '{instruction}\\n\\n{input}', and braces themselves twice"
        raise broken_rule(f"is no template: {error}", hint) from None
    return value


class DataSettings(Settings):
    """Names the files and data sets of records, and how they are read."""

    train: PathOrIdSetting | None = Field(
        None,
        description="records with `prompt`; demonstrations under sft (docs/sft.md), pairs under dpo (docs/dpo.md); "
        "`train` needs this. A JSONL or Parquet file, a folder of such files or of `save_to_disk`, or an id of the "
        "Hugging Face hub like `openai/gsm8k:main#train` (docs/rollouts.md); `#[:1000]` at the end, as in "
        "`train.jsonl#[:1000]` or `owner/name#train[:1000]`, takes only these records",
    )
    heldout: HeldoutSetting | None = Field(
        None,
        description="records for evaluation, never for training; in the form of data.train, or several sets by name, "
        "`{math: math.jsonl, code: owner/name#test}`, whose metrics are eval/NAME/.. (docs/evaluation.md)",
    )
    prompt_column: Annotated[str, Field(min_length=1), AfterValidator(_column_or_template)] = Field(
        "prompt",
        description="the key or column with the prompts; or a template of several columns in braces, like "
        "'{instruction}\\n\\n{input}' (space at the end of a prompt is removed)",
    )
    answer_column: str = Field("answer", min_length=1, description="the key or column with the answers")
    train_on: Literal["all_turns", "last_turn"] = Field(
        "all_turns",
        description="which turns of records with `messages` have a loss: every turn of the assistant, or only the "
        "last message (docs/sft.md)",
    )
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_arguments)] = Field(
        {},
        description="more arguments of the tokenizer's chat template, such as {enable_thinking: false}; names that the "
        "template does not read are refused, and so is `tools`, which an environment returns with its prompts",
    )
    max_prompt_tokens: PositiveInt | None = Field(
        None,
        description="longest prompt, chat template included; null means what leaves room for rollout.max_new_tokens in "
        "a pack (batch.max_tokens_per_rank x mesh.cp) and in the model's learned positions",
    )
    max_tokens: int | None = Field(
        None,
        ge=2,
        description="longest sample, prompt and answer together; null means what fits into a pack "
        "(batch.max_tokens_per_rank x mesh.cp) and the model's learned positions",
    )
    overlong_prompts: Literal["error", "skip", "truncate", "split"] = Field(
        "error",
        description="what happens to records that are too long. error: the run ends before it starts, and names the "
        "first; skip: they are left out, and listed in run.dir/skipped_prompts.jsonl; truncate (sft): their ends are "
        "cut off; split (sft): plain texts are cut into pieces",
    )
    allow_changed: bool = Field(
        False,
        description="a resumed run accepts other records in data.train than at its start, from the next epoch on",
    )

    @property
    def prompt_template(self) -> str | None:
        """Returns `prompt_column` if it is a template, with columns in braces; otherwise None."""
        return self.prompt_column if template_columns(self.prompt_column) else None

    @property
    def prompt_key(self) -> str:
        """Returns the key or column that has the prompts; `prompt` if a template makes the prompts."""
        return "prompt" if self.prompt_template else self.prompt_column

    @property
    def heldout_sets(self) -> dict[str, Path]:
        """Returns name -> path or id of each held-out set; data.heldout=PATH is a single set with an empty name."""
        if self.heldout is None:
            return {}
        return {"": self.heldout} if isinstance(self.heldout, Path) else self.heldout

    @property
    def sources(self) -> dict[str, Path]:
        """Returns setting -> path or id for each setting that names records, such as data.heldout.math."""
        train = {} if self.train is None else {"data.train": self.train}
        return train | {heldout_field(name): path for name, path in self.heldout_sets.items()}

    def with_sources(self, paths: Mapping[str, Path]) -> DataSettings:
        """Returns these settings with other paths or ids, given as in `sources`."""
        changed: dict[str, Any] = {"train": paths["data.train"]} if "data.train" in paths else {}
        sets = {name: paths.get(heldout_field(name), path) for name, path in self.heldout_sets.items()}
        if sets:
            changed["heldout"] = sets.get("", sets)
        return self.model_copy(update=changed)
