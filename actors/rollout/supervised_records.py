"""Reads the records of supervised training and of preference optimisation, in the forms in which people keep them.

The forms of demonstrations are those of `actors.rollout.demonstrations`; a chat may also be in ShareGPT's words, as
`conversations` with `from` and `value`. A preference pair is a prompt with a chosen and a rejected response:

    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", ..}], "chosen": [{"role": "assistant", ..}], "rejected": [{"role": "assistant", ..}]}
    {"chosen": [{"role": "user", ..}, {"role": "assistant", ..}], "rejected": [{"role": "user", ..}, ..]}

In the last form both are whole conversations, and the messages that they share are the prompt; two whole texts share
their beginning. Whatever the form, a pair has the keys `prompt`, `chosen` and `rejected` once it is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from actors.rollout.demonstrations import form_of
from actors.rollout.prompts import (
    Record,
    answer_fault,
    place_of,
    prompt_fault,
    prompt_of_template,
    read_data,
    text_fault,
)
from slimefsdp.config.rollout import DataSettings
from slimefsdp.errors import ConfigError, short_repr, short_text

# columns that may hold chat messages, or tools, in which Arrow leaves nulls
_CHATS = ("prompt", "completion", "messages", "conversations", "tools")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_FORMS = (
    "give each record `messages`, `prompt` and `completion`, `prompt` and `answer`, or `text`; or name its columns: "
    "data.prompt_column or data.prompt_template, and data.answer_column (docs/sft.md)"
)
RESPONSES = ("chosen", "rejected")
_SPACE = re.compile(r"\s")
_PAIR_FORMS = (
    "write texts, or lists of chat messages with 'role' and 'content': the prompt and the two responses, or two whole "
    "conversations that begin alike (docs/dpo.md)"
)


# ---------------------------------------------------------------------- demonstrations


def read_demonstrations(data: DataSettings, name: str) -> list[Record]:
    """The records that a setting of `data` names, each of one of the forms above, in their order.

    Args:
        name: train, heldout, or heldout.NAME where there are several held-out sets.

    Raises:
        ConfigError: as `actors.rollout.prompts.read_data`, or a record has no such form; the message names its place.
        ResourceError: the disk is full.
    """
    rows = read_data(data, name, chats={*_CHATS, data.prompt_column})
    return [Record(_record_of(row, data, place, f"data.{name}"), place) for row, place in rows]


def _record_of(row: dict[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    record = _with_columns(row, data, place, field)
    if form_of(record) is None and isinstance(record.get("conversations"), list):
        record = {**record, "messages": [_chat_message(turn, place, field) for turn in record["conversations"]]}
    form = form_of(record)
    if form is None:
        found = f"a record of none of the forms, with the keys {sorted(row)!r:.300}"
        raise ConfigError(f"{place}: {found}", field=field, hint=_FORMS)
    for key, fault in _faults(record, form):
        if fault is not None:
            raise ConfigError(f"{place}: {key!r} {fault}", field=field, hint=_FORMS)
    return record


def _with_columns(row: dict[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    """The row with `prompt` and `answer` of the columns that settings name for them."""
    named = {
        name: column
        for name, column in (("prompt", data.prompt_column), ("answer", data.answer_column))
        if column != name
    }
    for name, column in named.items():
        if column not in row:
            raise ConfigError(
                f"{place}: no {column!r} among the keys {sorted(row)!r:.300}",
                field=f"data.{name}_column",
                hint=f"name the key or column that has the {name}",
            )
    found = {name: row[column] for name, column in named.items()}
    if data.prompt_template is not None:
        found["prompt"] = prompt_of_template(data.prompt_template, row, place, field)
    return {**{key: value for key, value in row.items() if key not in named.values()}, **found}


def _chat_message(turn: Any, place: str, field: str) -> dict[str, Any]:
    """A turn of ShareGPT's form as a chat message."""
    speaker = turn.get("from") if isinstance(turn, dict) else None
    if speaker not in _ROLES or "value" not in turn:
        raise ConfigError(
            f"{place}: 'conversations' has the turn {short_repr(turn)}",
            field=field,
            hint=f"give each turn `from`, one of {', '.join(_ROLES)}, and `value`; others are written as `messages`",
        )
    return {"role": _ROLES[speaker], "content": turn["value"]}


def _faults(record: Mapping[str, Any], form: str) -> list[tuple[str, str | None]]:
    """Returns what is wrong with the values of a record, by key; None: nothing."""
    if form == "text":
        text = record["text"]
        is_text = isinstance(text, str) and bool(text.strip())
        return [("text", text_fault(text) if is_text else f"is {short_repr(text)}, not a text")]
    if form == "messages":
        return [("messages", _chat_fault(record["messages"]))]
    found = [("prompt", prompt_fault(record["prompt"]))]
    if form == "answer":
        return [*found, ("answer", answer_fault(record["answer"]))]
    completion = record["completion"]
    found.append(("completion", prompt_fault(completion)))
    if isinstance(completion, str) != isinstance(record["prompt"], str):
        found.append(("completion", "and 'prompt' are not both texts, or both lists of chat messages"))
    return found


def _chat_fault(messages: Any) -> str | None:
    if isinstance(messages, str):
        return "is a text, not a list of chat messages"
    if (fault := prompt_fault(messages)) is not None:
        return fault
    return None if any(one["role"] == "assistant" for one in messages) else "has no turn of the assistant"


# ---------------------------------------------------------------------- preference pairs


def read_pairs(data: DataSettings, name: str) -> list[Record]:
    """The pairs that a setting of `data` names, in their order; says on stderr how many have equal responses.

    Args:
        name: train, heldout, or heldout.NAME where there are several held-out sets.

    Raises:
        ConfigError: as `actors.rollout.prompts.read_data`, or a record is in none of the forms; the message names its
            place. ResourceError: the disk is full.
    """
    rows = read_data(data, name, chats={data.prompt_column, "tools", *RESPONSES})
    pairs = [Record(_pair_of(row, data, place, f"data.{name}"), place) for row, place in rows]
    equal = [pair for pair in pairs if pair["chosen"] == pair["rejected"]]
    if equal:
        print(
            f"data.{name}: {len(equal):,} of {len(pairs):,} pairs have equal responses, which teach nothing, the first "
            f"at {place_of(equal[0])}",
            file=sys.stderr,
        )
    return pairs


def demonstrations(pairs: Sequence[Record]) -> list[Record]:
    """Returns two demonstrations for each pair, the chosen response first."""
    found = []
    for pair in pairs:
        tools = {"tools": pair["tools"]} if "tools" in pair else {}
        for name in RESPONSES:
            is_text_after_chat = isinstance(pair["prompt"], list) and isinstance(pair[name], str)
            key = "answer" if is_text_after_chat else "completion"
            found.append(Record({"prompt": pair["prompt"], key: pair[name], **tools}, place_of(pair)))
    return found


def _pair_of(row: Mapping[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    given = {name: row.get(name) for name in RESPONSES}
    prompt = row.get(data.prompt_column)
    if data.prompt_template is not None:
        prompt = prompt_of_template(data.prompt_template, row, place, field)
    fault = _response_fault(row, given)
    if fault is None and (prompt is None or (isinstance(prompt, str) and isinstance(given["chosen"], list))):
        prompt, given = _parted(prompt, given)
    fault = fault or _pair_fault(prompt, given, data.prompt_column)
    if fault is not None:
        raise ConfigError(f"{place}: {fault}", field=field, hint=_PAIR_FORMS)
    return {**{key: value for key, value in row.items() if key != data.prompt_column}, "prompt": prompt, **given}


def _response_fault(row: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    for name, response in given.items():
        if name not in row:
            return f"no {name!r} among the keys {short_text(sorted(row))}"
        if not isinstance(response, str | list):
            return f"{name!r} is a {type(response).__name__}"
    kinds = {type(response) for response in given.values()}
    return None if len(kinds) == 1 else "one of 'chosen' and 'rejected' is a text and the other a list of messages"


def _parted(prompt: str | None, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what two whole conversations share, and what each has of its own: one message at least, or one character.

    Texts are parted before the space of the first word that differs, since tokenizers take a space together with the
    word behind it. Texts that share no space, as in languages without any, are parted where they differ.
    """
    chosen, rejected = given["chosen"], given["rejected"]
    most = max(0, min(len(chosen), len(rejected)) - 1)
    shared = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    if not shared:  # what only the assistant says follows a prompt that is a text
        return (prompt if prompt is None else [{"role": "user", "content": prompt}]), given
    if isinstance(chosen, str) and (spaces := list(_SPACE.finditer(chosen, 1, shared))):
        shared = spaces[-1].start()
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def _pair_fault(prompt: Any, given: Mapping[str, Any], prompt_column: str) -> str | None:
    if prompt is None:
        return f"no {prompt_column!r}, and 'chosen' and 'rejected' do not begin alike"
    if fault := prompt_fault(prompt):
        return f"the prompt {fault}"
    for name, response in given.items():
        if isinstance(response, str):
            fault = text_fault(response)
        else:
            fault = prompt_fault([*prompt, *response]) if response else "is empty"
            if fault is None and response[0]["role"] != "assistant":
                fault = f"goes on after the prompt with a message of the role {short_text(response[0]['role'])}"
        if fault is not None:
            return f"{name!r} {fault}"
    return None
