"""Preference pairs: a prompt with a chosen and a rejected response, read in the forms that people have.

    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", ..}], "chosen": [{"role": "assistant", ..}], "rejected": [{"role": "assistant", ..}]}
    {"chosen": [{"role": "user", ..}, {"role": "assistant", ..}], "rejected": [{"role": "user", ..}, ..]}

In the last form both are whole conversations, and the messages that they share are the prompt; two whole texts share
their beginning. Whatever the form, a record has the keys `prompt`, `chosen` and `rejected` once it is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from actors.rollout.prompts import Record, place_of, prompt_fault, prompt_of_template, read_data, text_fault
from slimefsdp.config.rollout import DataSettings
from slimefsdp.errors import ConfigError, short_text

RESPONSES = ("chosen", "rejected")
_SPACE = re.compile(r"\s")
_HINT = (
    "write texts, or lists of chat messages with 'role' and 'content': the prompt and the two responses, or two whole "
    "conversations that begin alike (docs/dpo.md)"
)


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
    """Two demonstrations of each pair, the chosen response first, as `actors.rollout.demonstrations` encodes them."""
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
    fault = fault or _fault(prompt, given, data.prompt_column)
    if fault is not None:
        raise ConfigError(f"{place}: {fault}", field=field, hint=_HINT)
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
    """What two whole conversations share, and what each has of its own: one message at least, or one character.

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


def _fault(prompt: Any, given: Mapping[str, Any], prompt_column: str) -> str | None:
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
