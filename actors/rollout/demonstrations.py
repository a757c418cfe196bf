"""Encodes the records of supervised training: their tokens, and which of these are trained on.

`actors.rollout.supervised_records` reads the records. A record has a form, which follows from its keys, in this order:

    prompt and answer        the answer is trained, encoded by itself, and the tokenizer's end token behind it
    prompt and completion    both texts or both lists of chat messages; the completion is trained
    messages                 a chat, of which the assistant's turns are trained, or the last message alone
    conversations            the same, in ShareGPT's words: `from` and `value`
    text                     every token but the first is trained, and the end token behind the text

Where the loss is on several turns, the response of the demonstration begins with the first token that is trained, and
its loss mask is False on all that is not. `python -m actors.rollout.demonstrations` encodes records in a process of its
own, since a chat template can compute for long and the driver needs no transformers.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from actors.engines.tokenizer import encode_prompt, load_tokenizer, require_read, require_tools_written, templated
from actors.rollout.prompts import (
    Record,
    place_of,
)
from actors.rollout.tokenizer import answer_beside, end_with_parent, error_beside, stream_of_answer
from slimefsdp.config.rollout import DataSettings
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError, ModelError, SlimeError

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # of a chat template that says itself what the assistant wrote


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """The tokens of one record, or of a piece of it."""

    tokens: np.ndarray  # int64 [length]
    response_length: int  # trailing tokens, from the first that is trained on
    loss_mask: np.ndarray | None = None  # bool [response_length]; None: all are trained

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that is trained."""
        return len(self.tokens) - self.response_length

    def truncated(self, length: int) -> Demonstration | None:
        """Its first `length` tokens; None where nothing of them would be trained."""
        left = self.response_length - (len(self.tokens) - length)
        mask = None if self.loss_mask is None or left < 1 else self.loss_mask[:left]
        if left < 1 or (mask is not None and not mask.any()):
            return None
        return Demonstration(self.tokens[:length], left, mask)

    def split(self, length: int) -> list[Demonstration]:
        """Pieces of at most `length` tokens, of a text that is trained from its second token on.

        Each begins with the last token of the piece before, so that every token but the first is trained once.
        """
        starts = range(0, len(self.tokens) - 1, length - 1)
        pieces = [self.tokens[start : start + length] for start in starts]
        return [Demonstration(piece, len(piece) - 1) for piece in pieces]

    def as_sample(self) -> dict[str, Any]:
        """Returns the sample in the form of `RolloutBatch.from_samples`."""
        mask = np.ones(self.response_length, dtype=np.bool_) if self.loss_mask is None else self.loss_mask
        return {"tokens": self.tokens, "response_length": self.response_length, "loss_mask": mask}


def batch_of(demonstrations: Sequence[Demonstration]) -> RolloutBatch:
    """Makes one batch of demonstrations in their order; without a loss mask where all responses are trained whole."""
    samples = [one.as_sample() for one in demonstrations]
    if all(one.loss_mask is None for one in demonstrations):
        samples = [{**one, "loss_mask": None} for one in samples]
    return RolloutBatch.from_samples(samples)


def form_of(record: Mapping[str, Any]) -> str | None:
    """Returns the name of a record's form: answer, completion, messages or text; None if it has none of them."""
    if "prompt" in record:
        for key in ("answer", "completion"):
            if key in record:
                return key
    return next((key for key in ("messages", "text") if key in record), None)


# ---------------------------------------------------------------------- tokens


def encode_demonstration(
    tokenizer: Any,
    record: Mapping[str, Any],
    *,
    train_on: str = "all_turns",
    template_kwargs: Mapping[str, Any] | None = None,
) -> Demonstration:
    """The tokens of a record of any form, and which of them are trained.

    Args:
        train_on: as data.train_on.
        template_kwargs: as `actors.engines.tokenizer.encode_prompt`.

    Raises:
        ConfigError: the chat template refuses the record or does not tell its turns apart, or nothing of it would be
            trained. ModelError: the tokenizer has no end token, and the form needs one.
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
        start = _shared(prompt, tokens)
        return _demonstration(tokens, [place >= start for place in range(len(tokens))])
    return _encoded_chat(tokenizer, record, train_on, template_kwargs)


def _demonstration(tokens: Sequence[int], trained: Sequence[bool]) -> Demonstration:
    """A demonstration whose response begins with the first token that is trained; the very first cannot be."""
    first = next((place for place, is_trained in enumerate(trained) if is_trained and place), None)
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
    """Appends the end token unless it is there."""
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
    if first_trained:  # all behind the opening of the answer, as a prompt and its completion
        if not _begins_with(tokenizer, messages, first_trained, options):
            _refuse_template(first_trained, may_train_last=False)
        tokens = _tokens(tokenizer, messages, options)
        start = _shared(_tokens(tokenizer, messages[:first_trained], options, opens_answer=True), tokens)
        return _demonstration(tokens, [place >= start for place in range(len(tokens))])
    if _MARKERS.search(str(tokenizer.chat_template)):
        return _by_markers(tokenizer, messages, options)
    return _by_prefixes(tokenizer, messages, options)


def _tools_of(record: Mapping[str, Any]) -> Any:
    """The tools that a record offers, as a list; data sets keep them as JSON, too."""
    tools = record.get("tools")
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) or None
    except ValueError as error:
        raise ConfigError(f"'tools' is no JSON: {error}", field="tools", hint="write a list of tools") from None


def _by_markers(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> Demonstration:
    """The tokens of which a character stands between the template's own marks.

    transformers' `return_assistant_tokens_mask` goes on to the end of the chat where no token has the last character
    between two marks, as where a special token takes the space behind it.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    found = templated(
        tokenizer, messages, "messages", add_generation_prompt=False, tokenize=True, return_dict=True,
        tokenizer_kwargs={"return_offsets_mapping": True}, **options,
    )  # fmt: skip
    template = tokenizer.get_chat_template(tools=options["tools"])
    variables = {**tokenizer.special_tokens_map, **options}
    rendered: Any = render_jinja_template(  # texts, and of each where its marks stand
        [list(messages)], chat_template=template, return_assistant_tokens_mask=True, **variables
    )
    (marked,) = rendered[1]
    trained = [False] * len(found["input_ids"])
    for start, end in marked:
        places = [place for place, (first, last) in enumerate(found["offset_mapping"]) if last > start and first < end]
        if places:
            trained[places[0] : places[-1] + 1] = [True] * (places[-1] + 1 - places[0])
    return _demonstration(found["input_ids"], trained)


def _by_prefixes(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> Demonstration:
    """Each turn of the assistant begins where the chat before it opens one, and ends where the chat with it does.

    That holds where the template writes the beginning of a chat as it writes it alone, which is looked at.
    """
    tokens = _tokens(tokenizer, messages, options)
    text = _text(tokenizer, messages, options)
    trained = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opening = _opening(tokenizer, messages[:turn], options)
        upto = messages[: turn + 1]
        if not (text.startswith(opening) and text.startswith(_text(tokenizer, upto, options))):
            last = len(messages) - 1
            answers = messages[-1]["role"] == "assistant" and last > 0
            _refuse_template(turn, may_train_last=answers and _begins_with(tokenizer, messages, last, options))
        start = _shared(tokenizer.encode(opening, add_special_tokens=False), tokens)
        end = _shared(_tokens(tokenizer, upto, options), tokens)
        trained[start:end] = [True] * (end - start)
    return _demonstration(tokens, trained)


def _opening(tokenizer: Any, before: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Returns what the template writes before the words of the assistant that follow these messages."""
    if before:
        return _text(tokenizer, before, options, opens_answer=True)
    # many templates refuse a chat without messages, so two chats of one turn are compared
    one, other = (_text(tokenizer, [{"role": "assistant", "content": said}], options) for said in ("A", "B"))
    return one[: _shared(one, other)]


def _begins_with(tokenizer: Any, messages: Sequence[Any], count: int, options: Mapping[str, Any]) -> bool:
    """Whether the template writes the first messages within the whole chat as it writes them alone.

    Both ways of writing them alone count. Some templates open an answer with thinking that a written answer does not
    have, and some end a chat that opens no answer with an end token.
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


def _shared(beginning: Sequence[Any], tokens: Sequence[Any]) -> int:
    """Returns how many tokens, or characters, both sequences begin with.

    Tokens are fewer than `beginning` has where the tokenizer merges its end with what follows.
    """
    pairs = zip(beginning, tokens, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(beginning), len(tokens)))


# ---------------------------------------------------------------------- a process of its own


def encoded_demonstrations(
    model_path: Path, records: Sequence[Record], *, data: DataSettings, timeout_s: float
) -> list[Demonstration]:
    """Encodes each record as a demonstration of any length, in a process of its own.

    Raises:
        ConfigError, ModelError: as `encode_demonstration`, naming the record. ResourceError: it took longer, or its
            process ended.
    """
    keys = ("prompt", "answer", "completion", "messages", "text", "tools")
    asked = {
        "model_path": str(model_path),
        "records": [[{key: one[key] for key in keys if key in one}, place_of(one)] for one in records],
        "train_on": data.train_on,
        "template_kwargs": dict(data.chat_template_kwargs),
    }
    answer = answer_beside("actors.rollout.demonstrations", asked, timeout_s, f"encoding {len(records)} records")
    if not answer.startswith(b"PK"):  # no archive of arrays
        raise error_beside(json.loads(answer))
    with np.load(io.BytesIO(answer), allow_pickle=False) as arrays:
        tokens = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        masks = np.split(arrays["loss_mask"], np.cumsum(arrays["response_lengths"])[:-1])
        lengths = arrays["response_lengths"].tolist()
    return [
        Demonstration(one, length, None if mask.all() else mask)
        for one, length, mask in zip(tokens, lengths, masks, strict=True)
    ]


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    asked = json.load(sys.stdin.buffer)
    try:
        answer = _archive(asked)
    except SlimeError as error:
        said = {"error": error.message, "code": error.code, "field": error.field, "hint": error.hint}
        answer = json.dumps(said).encode()
    with os.fdopen(stream, "wb") as file:
        file.write(answer)


def _archive(asked: Mapping[str, Any]) -> bytes:
    """The demonstrations of all records as arrays in one archive of numpy's."""
    tokenizer = load_tokenizer(asked["model_path"])
    options = {"train_on": asked["train_on"], "template_kwargs": asked["template_kwargs"]}
    samples = []
    for record, place in asked["records"]:
        try:
            samples.append(encode_demonstration(tokenizer, record, **options).as_sample())
        except ConfigError as error:
            error.message = f"{place}: {error.message}"
            raise
    file = io.BytesIO()
    np.savez(
        file,
        tokens=np.concatenate([one["tokens"] for one in samples]),
        lengths=np.array([len(one["tokens"]) for one in samples]),
        response_lengths=np.array([one["response_length"] for one in samples]),
        loss_mask=np.concatenate([one["loss_mask"] for one in samples]),
    )
    return file.getvalue()


if __name__ == "__main__":
    _main()
