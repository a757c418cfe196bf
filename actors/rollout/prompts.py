"""Prompts: read from JSONL with errors that name the line, encoded for a model, and handed out in a resumable order.

Importing this file costs no torch and no transformers, so that the command line can check data files at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimefsdp.errors import CheckpointError, ConfigError
from slimefsdp.strict_json import parse_json

Record = dict[str, Any]


def read_jsonl(path: str | Path, *, field: str) -> list[Record]:
    """The records of a JSONL file, in file order; blank lines are skipped, other keys than `prompt` kept as they are.

    A record is an object whose `prompt` is a text or a list of chat messages, each with `role` and `content`.

    Args:
        field: the setting that named the file, e.g. `rollout.prompts`.

    Raises:
        ConfigError: the file is missing, unreadable or holds no record, or a line is not such a record; the message
            names file:line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", field=field, hint="name an existing JSONL file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", field=field, hint="name a readable UTF-8 JSONL file") from error
    # split on newlines only: splitlines() also breaks at U+2028, which JSON allows inside a string
    records = [
        _record(line, f"{path}:{number}", field) for number, line in enumerate(text.split("\n"), 1) if line.strip()
    ]
    if not records:
        raise ConfigError(f"{path} holds no records", field=field, hint="give it one JSON object per line")
    return records


def _record(line: str, place: str, field: str) -> Record:
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not JSON: {error.msg} at column {error.colno}",
            field=field,
            hint="write one JSON object per line",
        ) from error
    except ValueError as error:  # a key twice, a number of thousands of digits, a tower of brackets
        raise ConfigError(
            f"{place}: not usable JSON: {error}", field=field, hint="write one plain JSON object per line"
        ) from error
    if not isinstance(record, dict):
        raise ConfigError(
            f"{place}: a {type(record).__name__}, not an object", field=field, hint="write one JSON object per line"
        )
    if "prompt" not in record:
        raise ConfigError(
            f"{place}: no 'prompt' among the keys {sorted(record)}", field=field, hint="give each record a 'prompt'"
        )
    fault = _prompt_fault(record["prompt"])
    if fault:
        raise ConfigError(
            f"{place}: 'prompt' {fault}",
            field=field,
            hint="make it a text, or a list of chat messages with 'role' and 'content'",
        )
    return record


def _prompt_fault(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return _text_fault(prompt) or (None if prompt.strip() else "is empty")
    if not isinstance(prompt, list):
        return f"is a {type(prompt).__name__}"
    if not prompt:
        return "is empty"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"has no chat message at index {index}"
        content = message["content"]
        if content is None and "tool_calls" in message:  # which take the place of words
            continue
        if not isinstance(content, str):
            return f"has a {type(content).__name__} for the content of message {index}"
        if fault := _text_fault(message["role"] + content):
            return f"{fault}, in message {index}"
    return None


def _text_fault(text: str) -> str | None:
    is_broken = any("\ud800" <= character <= "\udfff" for character in text)
    return "holds half of a surrogate pair, which is no text" if is_broken else None


def check_answers(records: Sequence[Record], path: Path, *, field: str) -> None:
    """Supervised records need an `answer`.

    Raises:
        ConfigError: naming the file and the first record without one.
    """
    for number, record in enumerate(records, 1):
        answer = "" if record.get("answer") is None else str(record["answer"])
        if not answer.strip() or _text_fault(answer):
            problem = f"{path}: record {number} has no answer that is text"
            raise ConfigError(problem, field=field, hint="give each record an `answer`")


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt, up to where the response begins.

    With a chat template, a text becomes one user message, and the opening of the assistant's turn is included. Without
    one, a text is encoded as the tokenizer does by itself, its own special tokens included.

    Raises:
        ConfigError: chat messages for a tokenizer without chat template or for one that refuses them, or a prompt that
            encodes to no token.
    """
    tokens: list[int]
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            # a dictionary is transformers' default
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template can refuse a prompt, and do anything that its sandbox lets it do
            raise ConfigError(
                f"the chat template failed on the prompt {prompt!r:.200}: {type(error).__name__}: {error!s:.300}",
                field="prompt",
                hint="correct the prompt's messages, or the chat template of the model folder",
            ) from error
    elif isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    else:
        raise ConfigError(
            "the prompt is a list of chat messages, but the tokenizer has no chat template",
            field="prompt",
            hint="use a chat model's tokenizer, or write the prompts as text",
        )
    if not tokens:
        raise ConfigError(f"the prompt {prompt!r} encodes to no token", field="prompt", hint="drop it or give it text")
    return tokens


class PromptStream:
    """Records without end, each once per epoch, in an order that depends on the seed and the epoch only.

    The order of epoch e is a permutation by numpy's Philox with the key (seed, e), so that a place in the stream is two
    numbers and needs no generator state.
    """

    def __init__(self, records: list[Record], seed: int) -> None:
        assert records
        self._records = records
        self._seed = seed
        self._start_epoch(0)

    def take(self, count: int) -> list[Record]:
        """The next `count` records; crosses into the next epoch where this one ends."""
        taken: list[Record] = []
        while len(taken) < count:
            if self._offset == len(self._records):
                self._start_epoch(self._epoch + 1)
            part = self._order[self._offset : self._offset + count - len(taken)]
            taken += [self._records[index] for index in part]
            self._offset += len(part)
        return taken

    def state(self) -> dict[str, int]:
        """Where the stream stands, as JSON-able numbers; `offset` counts the records of `epoch` already taken."""
        return {"seed": self._seed, "records": len(self._records), "epoch": self._epoch, "offset": self._offset}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a `state()` of a stream with the same records and seed.

        Raises:
            CheckpointError: the state is of another seed or number of records, where it would name other prompts.
        """
        place = [state.get(key) for key in ("seed", "records", "epoch", "offset")]
        if not all(type(value) is int and value >= 0 for value in place) or state["offset"] > state["records"]:
            raise CheckpointError(
                f"{state!r:.200} is no place in the prompts",
                field="prompts",
                hint="resume from a checkpoint of this loop",
            )
        for key in ("seed", "records"):
            if state[key] != self.state()[key]:
                raise CheckpointError(
                    f"the place in the prompts was saved with {key}={state[key]}, but this run has {self.state()[key]}",
                    field=f"prompts.{key}",
                    hint="resume with the settings and the prompt file the run began with, or begin a new run",
                )
        self._start_epoch(state["epoch"])
        self._offset = state["offset"]

    def _start_epoch(self, epoch: int) -> None:
        import numpy as np  # here, so that reading a file needs the standard library only

        generator = np.random.Generator(np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)))
        self._order: list[int] = generator.permutation(len(self._records)).tolist()
        self._epoch = epoch
        self._offset = 0
