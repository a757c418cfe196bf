"""Encodes records for supervised training into tokens and a mask of the tokens that are trained on.

`actors.rollout.records` reads the records. The form of a record follows from its keys, in this order:

    prompt and answer        the answer is trained on; it is encoded separately, and the end token is appended
    prompt and completion    both are texts or both are lists of chat messages; the completion is trained on
    messages                 a chat; all turns of the assistant are trained on, or only the last message
    text                     every token but the first is trained on; the end token is appended
    conversations            a chat with the keys of ShareGPT: `from` and `value`

The response of a demonstration begins with the first trained token and includes all later tokens. The loss mask is
False for later tokens that are not trained on. Records are encoded in a side process, since a chat template may run for
long, and so that the driver does not import transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from actors import side_process
from actors.engines.tokenizer import (
    encode_prompt,
    end_token_ids,
    load_tokenizer,
    require_read,
    require_tools_written,
    templated,
)
from actors.rollout.records import Record, form_of, place_of
from slimefsdp.config.data import DataSettings
from slimefsdp.data.rollout_batch import RolloutBatch, Sample
from slimefsdp.errors import ConfigError, ModelError

T = TypeVar("T")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # precedes the assistant's text in a chat template


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """Holds the tokens of a record, or of a part of a record."""

    tokens: np.ndarray  # int64 [length]
    response_length: int  # number of tokens from the first trained token to the end
    loss_mask: np.ndarray | None = None  # bool [response_length]; None means that the whole response is trained on

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def truncated(self, length: int) -> Demonstration | None:
        """Returns the first `length` tokens as a demonstration; None means that none of them is trained on."""
        left = self.response_length - (len(self.tokens) - length)
        mask = None if self.loss_mask is None or left < 1 else self.loss_mask[:left]
        if left < 1 or (mask is not None and not mask.any()):
            return None
        return Demonstration(self.tokens[:length], left, mask)

    def split(self, length: int) -> list[Demonstration]:
        """Splits a demonstration of the form `text` into pieces of at most `length` tokens.

        Each piece begins with the last token of the previous piece, which this piece does not train on. So every token
        of the text but the first is trained on once.
        """
        starts = range(0, len(self.tokens) - 1, length - 1)
        pieces = [self.tokens[start : start + length] for start in starts]
        return [Demonstration(piece, len(piece) - 1) for piece in pieces]


def batch_of(demonstrations: Sequence[Demonstration]) -> RolloutBatch:
    """Returns one batch of the demonstrations in order; the batch has loss masks if any demonstration has one."""
    samples = [Sample(item.tokens, item.response_length) for item in demonstrations]
    if any(item.loss_mask is not None for item in demonstrations):
        for sample, item in zip(samples, demonstrations, strict=True):
            all_tokens = np.ones(item.response_length, dtype=np.bool_)
            sample.loss_mask = all_tokens if item.loss_mask is None else item.loss_mask
    return RolloutBatch.from_samples(samples)


# ---------------------------------------------------------------------- tokens


def encode_demonstration(
    tokenizer: Any,
    record: Mapping[str, Any],
    *,
    train_on: str = "all_turns",
    template_kwargs: Mapping[str, Any] | None = None,
) -> Demonstration:
    """Encodes a record of any form.

    Args:
        train_on: the value of data.train_on.
        template_kwargs: as in `actors.engines.tokenizer.encode_prompt`.

    Raises:
        ConfigError: the chat template refuses the record, or the tokens of the record's turns cannot be found, or no
            token would be trained on.
        ModelError: the form needs an end token, and the tokenizer has none.
    """
    form = form_of(record)
    if form == "answer":
        prompt = encode_prompt(tokenizer, record["prompt"], template_kwargs)
        answer = tokenizer.encode(str(record["answer"]), add_special_tokens=False)
        tokens = [*prompt, *answer, _end_token(tokenizer)[1]]
        return Demonstration(np.array(tokens), len(answer) + 1)
    if form == "text":
        tokens = tokenizer.encode(_ended(tokenizer, record["text"]))
        return _demonstration(tokens, [True] * len(tokens))
    if form == "completion" and isinstance(record["prompt"], str):
        prompt = tokenizer.encode(record["prompt"])
        tokens = tokenizer.encode(record["prompt"] + _ended(tokenizer, record["completion"]))
        start = _common_length(prompt, tokens)
        return _demonstration(tokens, [position >= start for position in range(len(tokens))])
    return _encoded_chat(tokenizer, record, train_on, template_kwargs)


def _demonstration(tokens: Sequence[int], trained: Sequence[bool]) -> Demonstration:
    """Returns a demonstration whose response begins with the first trained token; token 0 is never trained on."""
    first = next((position for position, is_trained in enumerate(trained) if is_trained and position), None)
    if first is None:
        raise ConfigError(
            f"nothing of its {len(tokens)} tokens would be trained",
            field="data.train",
            hint="give the record a longer answer, or remove it",
        )
    mask = np.array(trained[first:], dtype=np.bool_)
    return Demonstration(np.array(tokens), len(tokens) - first, None if mask.all() else mask)


def _end_token(tokenizer: Any) -> tuple[str, int]:
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end token", field="model.path", hint="set its eos_token")
    return tokenizer.eos_token, tokenizer.eos_token_id


def _ended(tokenizer: Any, text: str) -> str:
    """Appends the end token unless the text already ends with it."""
    end, _ = _end_token(tokenizer)
    return text if text.endswith(end) else text + end


def _encoded_chat(
    tokenizer: Any, record: Mapping[str, Any], train_on: str, template_kwargs: Mapping[str, Any] | None
) -> Demonstration:
    if not tokenizer.chat_template:
        raise ConfigError(
            "the record is a chat, but the tokenizer has no chat template",
            field="messages",
            hint="use a chat model's tokenizer, or write the records as texts: `prompt` and `completion`, or `text`",
        )
    require_read(tokenizer, template_kwargs)
    tools = _tools_of(record)
    require_tools_written(tokenizer, tools)
    options: dict[str, Any] = {**(template_kwargs or {}), "tools": tools}
    if "messages" in record and form_of(record) == "messages":
        messages, first_trained = list(record["messages"]), 0
        if train_on == "last_turn":
            first_trained = len(messages) - 1
            if messages[-1]["role"] != "assistant" or not first_trained:
                raise ConfigError(
                    f"the last of its messages is of the role {messages[-1]['role']!r}, with {first_trained} before it",
                    field="data.train_on",
                    hint="end each chat with a turn of the assistant that answers another, or train on all_turns",
                )
    else:
        messages, first_trained = [*record["prompt"], *record["completion"]], len(record["prompt"])
    if first_trained:  # trains on all tokens after the opening of the assistant's turn at this index
        if not _begins_with(tokenizer, messages, first_trained, options):
            _refuse_template(first_trained, may_train_last=False)
        tokens = _tokens(tokenizer, messages, options)
        start = _common_length(_tokens(tokenizer, messages[:first_trained], options, opens_answer=True), tokens)
        return _demonstration(tokens, [position >= start for position in range(len(tokens))])
    if _MARKERS.search(str(tokenizer.chat_template)):
        return _by_markers(tokenizer, messages, options)
    return _by_prefixes(tokenizer, messages, options)


def _tools_of(record: Mapping[str, Any]) -> Any:
    """Returns the tools of a record as a list; some data sets have them as a JSON text."""
    tools = record.get("tools")
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) or None
    except ValueError as error:
        raise ConfigError(f"'tools' is no JSON: {error}", field="tools", hint="write a list of tools") from None


def _by_markers(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> Demonstration:
    """Encodes a chat; trains on all tokens with at least one character between the template's `generation` markers.

    The `return_assistant_tokens_mask` of transformers is not used, since it may include the rest of the chat. This
    happens if no token covers the last character before a closing marker, for example a space that a special token
    absorbs.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    encoded = templated(
        tokenizer, messages, "messages", add_generation_prompt=False, tokenize=True, return_dict=True,
        tokenizer_kwargs={"return_offsets_mapping": True}, **options,
    )  # fmt: skip
    template = tokenizer.get_chat_template(tools=options["tools"])
    variables = {**tokenizer.special_tokens_map, **options}
    rendered: Any = render_jinja_template(  # returns the text of each chat, and its marked ranges of characters
        [list(messages)], chat_template=template, return_assistant_tokens_mask=True, **variables
    )
    (marked,) = rendered[1]
    trained = [False] * len(encoded["input_ids"])
    for start, end in marked:
        positions = [
            position for position, (first, last) in enumerate(encoded["offset_mapping"]) if last > start and first < end
        ]
        if positions:
            trained[positions[0] : positions[-1] + 1] = [True] * (positions[-1] + 1 - positions[0])
    return _demonstration(encoded["input_ids"], trained)


def _by_prefixes(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> Demonstration:
    """Encodes a chat; finds each assistant's turn by rendering the chat up to the turn, without and with the turn.

    The template must render the beginning of a chat the same alone and within the whole chat, which is checked.
    """
    tokens = _tokens(tokenizer, messages, options)
    text = _text(tokenizer, messages, options)
    trained = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opening = _opening(tokenizer, messages[:turn], options)
        through_turn = messages[: turn + 1]
        if not (text.startswith(opening) and text.startswith(_text(tokenizer, through_turn, options))):
            last = len(messages) - 1
            answers = messages[-1]["role"] == "assistant" and last > 0
            _refuse_template(turn, may_train_last=answers and _begins_with(tokenizer, messages, last, options))
        start = _common_length(tokenizer.encode(opening, add_special_tokens=False), tokens)
        end = _common_length(_tokens(tokenizer, through_turn, options), tokens)
        trained[start:end] = [True] * (end - start)
    return _demonstration(tokens, trained)


def _opening(tokenizer: Any, before: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Returns the rendered messages `before` with the opening of the assistant's turn that follows."""
    if before:
        return _text(tokenizer, before, options, opens_answer=True)
    # Many templates refuse a chat without messages, so this takes the common beginning of two chats of one turn.
    first, second = (_text(tokenizer, [{"role": "assistant", "content": content}], options) for content in ("A", "B"))
    return first[: _common_length(first, second)]


def _begins_with(tokenizer: Any, messages: Sequence[Any], count: int, options: Mapping[str, Any]) -> bool:
    """Returns whether the template renders the first `count` messages the same alone and within the whole chat.

    Alone, the messages may be rendered with or without the opening of an answer. Some templates open an answer with a
    thinking part that a given answer does not have. Others append an end token to a chat without such an opening.
    """
    text = _text(tokenizer, messages, options)
    alone = (_text(tokenizer, messages[:count], options, opens_answer=opens) for opens in (True, False))
    return any(text.startswith(beginning) for beginning in alone)


def _refuse_template(turn: int, *, may_train_last: bool) -> NoReturn:
    raise ConfigError(
        f"the chat template writes the messages up to the assistant's turn at index {turn} otherwise than within the "
        "whole chat (some leave the thinking out of earlier turns, some write a system message into the last turn of "
        "the user), so the tokens of that turn are not known",
        field="data.train_on",
        hint=("set data.train_on=last_turn, " if may_train_last else "write the response as a text behind its prompt, ")
        + "or train on all_turns of `messages` with a chat template that marks the assistant's turns with "
        "{% generation %} and {% endgeneration %} (docs/sft.md)",
    )


def _text(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any], *, opens_answer: bool = False) -> str:
    text: str = templated(
        tokenizer, messages, "messages", add_generation_prompt=opens_answer, tokenize=False, **options
    )
    return text


def _tokens(
    tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any], *, opens_answer: bool = False
) -> list[int]:
    return list(
        templated(
            tokenizer, messages, "messages", add_generation_prompt=opens_answer, tokenize=True, return_dict=False,
            **options,
        )
    )  # fmt: skip


def _common_length(beginning: Sequence[Any], tokens: Sequence[Any]) -> int:
    """Returns the length of the common beginning of two sequences of tokens or characters.

    This is less than the length of `beginning` if the tokenizer merges the end of `beginning` with the next text.
    """
    pairs = zip(beginning, tokens, strict=False)
    return next(
        (position for position, (left, right) in enumerate(pairs) if left != right), min(len(beginning), len(tokens))
    )


# ---------------------------------------------------------------------- a side process


def encoded_demonstrations(
    model_path: Path, records: Sequence[Record], *, data: DataSettings, timeout_s: float
) -> list[Demonstration]:
    """Encodes each record as a demonstration of any length, in a side process.

    Raises:
        ConfigError, ModelError: as in `encode_demonstration`; the message names the record.
        ResourceError: the process took longer than `timeout_s`, or ended.
    """
    options = {"train_on": data.train_on, "template_kwargs": dict(data.chat_template_kwargs)}
    return _in_side_process(_demonstrations, model_path, records, options, timeout_s)


def prompt_lengths(model_path: Path, records: Sequence[Record], *, data: DataSettings, timeout_s: float) -> list[int]:
    """Returns the number of tokens of each prompt, counted in a side process.

    Raises:
        ConfigError, ModelError, ResourceError: as in `encoded_demonstrations`; also ModelError if engines cannot use
            the model's generation_config.json.
    """
    options = {"template_kwargs": dict(data.chat_template_kwargs)}
    return _in_side_process(_prompt_lengths, model_path, records, options, timeout_s)


def _in_side_process(
    function: Callable[..., list[T]],
    model_path: Path,
    records: Sequence[Record],
    options: Mapping[str, Any],
    timeout_s: float,
) -> list[T]:
    try:
        return side_process.call(function, str(model_path), records, options, timeout_s=timeout_s)
    except side_process.SideProcessError as error:
        raise error.reported(f"encoding {len(records)} records", "cluster.call_timeout_s", "data.train") from None


def _demonstrations(model_path: str, records: Sequence[Record], options: Mapping[str, Any]) -> list[Demonstration]:
    tokenizer = load_tokenizer(model_path)
    return list(_each(records, lambda record: encode_demonstration(tokenizer, record, **options)))


def _prompt_lengths(model_path: str, records: Sequence[Record], options: Mapping[str, Any]) -> list[int]:
    tokenizer = load_tokenizer(model_path)
    end_token_ids(model_path, tokenizer.eos_token_id)  # engines will ask for the tokens that end a response
    return list(_each(records, lambda record: len(encode_prompt(tokenizer, record["prompt"], **options))))


def _each(records: Sequence[Record], encode: Callable[[Record], T]) -> Iterator[T]:
    for record in records:
        try:
            yield encode(record)
        except ConfigError as error:
            error.message = f"{place_of(record)}: {error.message}"
            raise
