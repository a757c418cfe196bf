"""Reads the records of supervised training and of preference optimisation in their common forms.

The forms of demonstrations are those of `actors.rollout.demonstrations`; a chat may also be in the keys of ShareGPT:
`conversations` with `from` and `value`. A preference pair is a prompt with a chosen and a rejected response:

    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", ..}], "chosen": [{"role": "assistant", ..}], "rejected": [{"role": "assistant", ..}]}
    {"chosen": [{"role": "user", ..}, {"role": "assistant", ..}], "rejected": [{"role": "user", ..}, ..]}

In the last form both are whole conversations, and their common messages are the prompt. Two whole texts likewise share
their beginning. A pair of any form has the keys `prompt`, `chosen` and `rejected` once it is read.
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
from slimefsdp.config.data import DataSettings
from slimefsdp.errors import ConfigError, short_repr, short_text

# columns that may hold chat messages or tools, in which Arrow leaves nulls
_CHATS = ("prompt", "completion", "messages", "conversations", "tools")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_FORMS = (
    "give each record `messages`, `prompt` and `completion`, `prompt` and `answer`, or `text`; or name its columns: "
    "data.prompt_column, which may be a template, and data.answer_column (docs/sft.md)"
)
RESPONSES = ("chosen", "rejected")
_SPACE = re.compile(r"\s")
_PAIR_FORMS = (
    "write texts, or lists of chat messages with 'role' and 'content': the prompt and the two responses, or two whole "
    "conversations that begin alike (docs/dpo.md)"
)


# ---------------------------------------------------------------------- demonstrations


def read_demonstrations(data: DataSettings, name: str) -> list[Record]:
    """Reads the demonstrations that a setting of `data` names, in their order.

    Args:
        name: train, heldout, or heldout.NAME if there are several held-out sets.

    Raises:
        ConfigError: as in `actors.rollout.prompts.read_data`, or a record has none of the forms; its place is named.
        ResourceError: the disk is full.
    """
    rows = read_data(data, name, chats={*_CHATS, data.prompt_key})
    return [Record(_record_of(row, data, place, f"data.{name}"), place) for row, place in rows]


def _record_of(row: dict[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    record = _with_columns(row, data, place, field)
    if form_of(record) is None and isinstance(record.get("conversations"), list):
        record = {**record, "messages": [_chat_message(turn, place, field) for turn in record["conversations"]]}
    form = form_of(record)
    if form is None:
        problem = f"a record of none of the forms, with the keys {sorted(row)!r:.300}"
        raise ConfigError(f"{place}: {problem}", field=field, hint=_FORMS)
    for key, fault in _faults(record, form):
        if fault is not None:
            raise ConfigError(f"{place}: {key!r} {fault}", field=field, hint=_FORMS)
    return record


def _with_columns(row: dict[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    """Returns the row with `prompt` and `answer` taken from the columns that the settings name for them."""
    named = {
        name: column for name, column in (("prompt", data.prompt_key), ("answer", data.answer_column)) if column != name
    }
    for name, column in named.items():
        if column not in row:
            raise ConfigError(
                f"{place}: no {column!r} among the keys {sorted(row)!r:.300}",
                field=f"data.{name}_column",
                hint=f"name the key or column that has the {name}",
            )
    values = {name: row[column] for name, column in named.items()}
    if data.prompt_template is not None:
        values["prompt"] = prompt_of_template(data.prompt_template, row, place, field)
    return {**{key: value for key, value in row.items() if key not in named.values()}, **values}


def _chat_message(turn: Any, place: str, field: str) -> dict[str, Any]:
    """Converts a turn of ShareGPT's form to a chat message."""
    speaker = turn.get("from") if isinstance(turn, dict) else None
    if speaker not in _ROLES or "value" not in turn:
        raise ConfigError(
            f"{place}: 'conversations' has the turn {short_repr(turn)}",
            field=field,
            hint=f"give each turn `from`, one of {', '.join(_ROLES)}, and `value`; others are written as `messages`",
        )
    return {"role": _ROLES[speaker], "content": turn["value"]}


def _faults(record: Mapping[str, Any], form: str) -> list[tuple[str, str | None]]:
    """Returns the fault of each value of a record by its key; None if it has none."""
    if form == "text":
        text = record["text"]
        is_text = isinstance(text, str) and bool(text.strip())
        return [("text", text_fault(text) if is_text else f"is {short_repr(text)}, not a text")]
    if form == "messages":
        return [("messages", _chat_fault(record["messages"]))]
    faults = [("prompt", prompt_fault(record["prompt"]))]
    if form == "answer":
        return [*faults, ("answer", answer_fault(record["answer"]))]
    completion = record["completion"]
    faults.append(("completion", prompt_fault(completion)))
    if isinstance(completion, str) != isinstance(record["prompt"], str):
        faults.append(("completion", "and 'prompt' are not both texts, or both lists of chat messages"))
    return faults


def _chat_fault(messages: Any) -> str | None:
    if isinstance(messages, str):
        return "is a text, not a list of chat messages"
    if (fault := prompt_fault(messages)) is not None:
        return fault
    return None if any(message["role"] == "assistant" for message in messages) else "has no turn of the assistant"


# ---------------------------------------------------------------------- preference pairs


def read_pairs(data: DataSettings, name: str) -> list[Record]:
    """Reads the pairs that a setting of `data` names, in their order; reports on stderr how many have equal responses.

    Args:
        name: train, heldout, or heldout.NAME if there are several held-out sets.

    Raises:
        ConfigError: as in `actors.rollout.prompts.read_data`, or a record has none of the forms; its place is named.
        ResourceError: the disk is full.
    """
    rows = read_data(data, name, chats={data.prompt_key, "tools", *RESPONSES})
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
    records = []
    for pair in pairs:
        tools = {"tools": pair["tools"]} if "tools" in pair else {}
        for name in RESPONSES:
            is_text_after_chat = isinstance(pair["prompt"], list) and isinstance(pair[name], str)
            key = "answer" if is_text_after_chat else "completion"
            records.append(Record({"prompt": pair["prompt"], key: pair[name], **tools}, place_of(pair)))
    return records


def _pair_of(row: Mapping[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    responses = {name: row.get(name) for name in RESPONSES}
    prompt = row.get(data.prompt_key)
    if data.prompt_template is not None:
        prompt = prompt_of_template(data.prompt_template, row, place, field)
    fault = _response_fault(row, responses)
    if fault is None and (prompt is None or (isinstance(prompt, str) and isinstance(responses["chosen"], list))):
        prompt, responses = _parted(prompt, responses)
    fault = fault or _pair_fault(prompt, responses, data.prompt_key)
    if fault is not None:
        raise ConfigError(f"{place}: {fault}", field=field, hint=_PAIR_FORMS)
    return {**{key: value for key, value in row.items() if key != data.prompt_key}, "prompt": prompt, **responses}


def _response_fault(row: Mapping[str, Any], responses: Mapping[str, Any]) -> str | None:
    for name, response in responses.items():
        if name not in row:
            return f"no {name!r} among the keys {short_text(sorted(row))}"
        if not isinstance(response, str | list):
            return f"{name!r} is a {type(response).__name__}"
    kinds = {type(response) for response in responses.values()}
    return None if len(kinds) == 1 else "one of 'chosen' and 'rejected' is a text and the other a list of messages"


def _parted(prompt: str | None, responses: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Splits two whole conversations into their common beginning and the rest of each, which is never empty.

    Texts are split before the space of the first word that differs, since tokenizers join a space with the word after
    it. Texts that share no space, as in languages without spaces, are split where they differ.
    """
    chosen, rejected = responses["chosen"], responses["rejected"]
    most = max(0, min(len(chosen), len(rejected)) - 1)
    shared = next((position for position in range(most) if chosen[position] != rejected[position]), most)
    if not shared:  # a text prompt, followed by responses that are lists of the assistant's messages
        return (prompt if prompt is None else [{"role": "user", "content": prompt}]), responses
    if isinstance(chosen, str) and (spaces := list(_SPACE.finditer(chosen, 1, shared))):
        shared = spaces[-1].start()
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def _pair_fault(prompt: Any, responses: Mapping[str, Any], prompt_column: str) -> str | None:
    if prompt is None:
        return f"no {prompt_column!r}, and 'chosen' and 'rejected' do not begin alike"
    if fault := prompt_fault(prompt):
        return f"the prompt {fault}"
    for name, response in responses.items():
        if isinstance(response, str):
            fault = text_fault(response)
        else:
            fault = prompt_fault([*prompt, *response]) if response else "is empty"
            if fault is None and response[0]["role"] != "assistant":
                fault = f"goes on after the prompt with a message of the role {short_text(response[0]['role'])}"
        if fault is not None:
            return f"{name!r} {fault}"
    return None
