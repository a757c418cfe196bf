"""Reads the records of a run, in the form that its algorithm needs, with errors that name the line or row.

With rollouts a record has a `prompt`, a text or a list of chat messages. Demonstrations have the forms that
`actors.rollout.demonstrations` lists; a chat may also be in the keys of ShareGPT: `conversations` with `from` and
`value`. A preference pair is a prompt with a chosen and a rejected response:

    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", ..}], "chosen": [{"role": "assistant", ..}], "rejected": [{"role": "assistant", ..}]}
    {"chosen": [{"role": "user", ..}, {"role": "assistant", ..}], "rejected": [{"role": "user", ..}, ..]}

In the last form, `chosen` and `rejected` are whole conversations, and their common messages are the prompt. They may
also be whole texts, whose common beginning is the prompt. A pair of any form has, once it was read, the keys `prompt`,
`chosen` and `rejected`.

Importing this module imports neither torch nor transformers, so that the command line can check data files quickly.
"""

from __future__ import annotations

import math
import re
import string
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors.rollout.data_sets import read_rows
from slimefsdp.errors import ConfigError, short_repr, short_text

if TYPE_CHECKING:
    from slimefsdp.config.data import DataSettings

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


class Record(dict[str, Any]):
    """The JSON object of a line or the row of a data set.

    Args:
        place: `file:line` or `id[split] row n`.
        outside_digest: keys that `actors.rollout.prompts.digest_of` leaves out.
    """

    def __init__(self, fields: Mapping[str, Any], place: str, outside_digest: Collection[str] = ()) -> None:
        super().__init__(fields)
        self.place = place
        self.outside_digest = frozenset(outside_digest)


def place_of(record: Mapping[str, Any]) -> str:
    """Returns the place of a record for an error message, or its prompt if the record is not from a file."""
    return record.place if isinstance(record, Record) else f"the prompt {record.get('prompt')!r:.100}"


def read_records(data: DataSettings, name: str) -> list[Record]:
    """Reads the records that a setting of `data` names, in their order, for rollouts.

    Args:
        name: train, heldout, or heldout.NAME if there are several held-out sets.

    Raises:
        ConfigError: as in `actors.rollout.data_sets.read_rows`, or a record has no usable prompt; the message names the
            record's place.
        ResourceError: the disk is full.
    """
    return _read(data, name, (data.prompt_key,), _with_prompt)


def read_demonstrations(data: DataSettings, name: str) -> list[Record]:
    """Reads the demonstrations that a setting of `data` names; arguments and errors are those of `read_records`."""
    chats = ("prompt", "completion", "messages", "conversations", "tools", data.prompt_key)
    return _read(data, name, chats, _demonstration_of)


def read_pairs(data: DataSettings, name: str) -> list[Record]:
    """Reads the pairs that a setting of `data` names, in their order; reports on stderr how many have equal responses.

    Arguments and errors are those of `read_records`.
    """
    pairs = _read(data, name, (data.prompt_key, "tools", *RESPONSES), _pair_of)
    equal = [pair for pair in pairs if pair["chosen"] == pair["rejected"]]
    if equal:
        print(
            f"data.{name}: {len(equal):,} of {len(pairs):,} pairs have equal responses, which teach nothing, the first "
            f"at {place_of(equal[0])}",
            file=sys.stderr,
        )
    return pairs


def _read(
    data: DataSettings,
    name: str,
    chats: Collection[str],
    form: Callable[[dict[str, Any], DataSettings, str, str], Record],
) -> list[Record]:
    rows = read_rows(data, name, chats=chats)
    return [form(row, data, place, f"data.{name}") for row, place in rows]


def _with_prompt(row: dict[str, Any], data: DataSettings, place: str, field: str) -> Record:
    record = _with_columns(row, data, place, field)
    if "prompt" not in record:
        raise ConfigError(
            f"{place}: no 'prompt' among the keys {short_text(sorted(row))} of {field}",
            field=field,
            hint="give each record one, or say which key or column has the prompt: data.prompt_column",
        )
    if fault := prompt_fault(record["prompt"]):
        raise ConfigError(
            f"{place}: 'prompt' {fault}",
            field=field,
            hint="make it a text, or a list of chat messages with 'role' and 'content'",
        )
    # Rewards may also read a column by its own name, which the digest leaves out: `prompt` or `answer` has its value.
    return Record({**row, **record}, place, outside_digest=row.keys() - record.keys())


def _with_columns(row: dict[str, Any], data: DataSettings, place: str, field: str) -> dict[str, Any]:
    """Returns the row with `prompt` and `answer` from the columns, or the template, that the settings name."""
    columns = {"prompt": data.prompt_key, "answer": data.answer_column}
    columns = {name: column for name, column in columns.items() if column != name}
    for name, column in columns.items():
        if column not in row:
            raise ConfigError(
                f"{place}: no {column!r} among the keys {short_text(sorted(row))} of {field}",
                field=f"data.{name}_column",
                hint=f"name the key or column that has the {name}",
            )
    values = {name: row[column] for name, column in columns.items()}
    if data.prompt_template is not None:
        values["prompt"] = _prompt_of_template(data.prompt_template, row, place, field)
    if not values:
        return row
    return {**{key: value for key, value in row.items() if key not in columns.values()}, **values}


def _prompt_of_template(template: str, row: Mapping[str, Any], place: str, field: str) -> str:
    """Returns the template of data.prompt_column filled with the columns of a row, without trailing space."""
    parts = []
    for text, column, _, _ in string.Formatter().parse(template):
        value = row.get(column) if column else None
        if column and (column not in row or not isinstance(value, str | int | float | None)):
            has = f"{column!r} is {short_repr(value)}" if column in row else f"no {column!r} among {sorted(row)!r:.200}"
            raise ConfigError(
                f"{place}: {has}",
                field="data.prompt_column",
                hint=f"give each record of {field} a text there, or name other columns in data.prompt_column",
            )
        parts += [text, "" if value is None else str(value)]
    return "".join(parts).rstrip()


def prompt_fault(prompt: Any) -> str | None:
    """Returns the reason why a prompt is neither a text nor a list of chat messages; None means a valid prompt."""
    if isinstance(prompt, str):
        return text_fault(prompt) or (None if prompt.strip() else "is empty")
    if not isinstance(prompt, list | tuple):
        return f"is a {type(prompt).__name__}"
    if not prompt:
        return "is empty"
    for index, message in enumerate(prompt):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role.strip() or "content" not in message:
            return f"has no chat message at index {index}"
        content = message["content"]
        if content is None and "tool_calls" in message:  # a message with tool calls needs no text
            continue
        if not isinstance(content, str):
            return f"has a {type(content).__name__} for the content of message {index}"
        if fault := text_fault(role + content):
            return f"{fault}, in message {index}"
    has_words = any("tool_calls" in message or message["content"].strip() for message in prompt)
    return None if has_words else "is empty"


def text_fault(text: str) -> str | None:
    """Returns the reason why a text cannot be encoded; None means that the text can be encoded."""
    is_broken = any("\ud800" <= character <= "\udfff" for character in text)
    return "holds half of a surrogate pair, which is no text" if is_broken else None


def check_answers(records: Sequence[Record], *, field: str) -> None:
    """Checks that each record has an `answer`, a text or a number, which some rewards need.

    Raises:
        ConfigError: a record has no such answer; the message names the place of the first such record.
    """
    for record in records:
        if fault := answer_fault(record.get("answer")):
            problem = f"'answer' {fault}" if "answer" in record else "no 'answer'"
            hint = "give each record an 'answer', a text or a number, or name the key that has it: data.answer_column"
            raise ConfigError(f"{place_of(record)}: {problem}", field=field, hint=hint)


def answer_fault(answer: Any) -> str | None:
    """Returns the reason why an answer is neither a text nor a number; None means that the answer is valid."""
    is_number = type(answer) is int or (type(answer) is float and math.isfinite(answer))
    is_text = isinstance(answer, str) and answer.strip() and not text_fault(answer)
    return None if is_number or is_text else f"is {short_repr(answer)}"


# ---------------------------------------------------------------------- demonstrations


def form_of(record: Mapping[str, Any]) -> str | None:
    """Returns the name of a demonstration's form (answer, completion, messages or text), or None if it has no form."""
    if "prompt" in record:
        for key in ("answer", "completion"):
            if key in record:
                return key
    return next((key for key in ("messages", "text") if key in record), None)


def _demonstration_of(row: dict[str, Any], data: DataSettings, place: str, field: str) -> Record:
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
    return Record(record, place)


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
    """Returns (key, fault) for each key of the record's form; None as fault means that the value is valid."""
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


def _pair_of(row: dict[str, Any], data: DataSettings, place: str, field: str) -> Record:
    responses = {name: row.get(name) for name in RESPONSES}
    prompt = row.get(data.prompt_key)
    if data.prompt_template is not None:
        prompt = _prompt_of_template(data.prompt_template, row, place, field)
    fault = _response_fault(row, responses)
    if fault is None and (prompt is None or (isinstance(prompt, str) and isinstance(responses["chosen"], list))):
        prompt, responses = _parted(prompt, responses)
    fault = fault or _pair_fault(prompt, responses, data.prompt_key)
    if fault is not None:
        raise ConfigError(f"{place}: {fault}", field=field, hint=_PAIR_FORMS)
    others = {key: value for key, value in row.items() if key != data.prompt_key}
    return Record({**others, "prompt": prompt, **responses}, place)


def _response_fault(row: Mapping[str, Any], responses: Mapping[str, Any]) -> str | None:
    for name, response in responses.items():
        if name not in row:
            return f"no {name!r} among the keys {short_text(sorted(row))}"
        if not isinstance(response, str | list):
            return f"{name!r} is a {type(response).__name__}"
    kinds = {type(response) for response in responses.values()}
    return None if len(kinds) == 1 else "one of 'chosen' and 'rejected' is a text and the other a list of messages"


def _parted(prompt: str | None, responses: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Splits two whole conversations into their common beginning and the rest of each conversation.

    No rest is empty. Texts are split before the space of the first word that differs, since tokenizers join a space
    with the word after the space. If the common beginning has no space, texts are split at the first difference.
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
