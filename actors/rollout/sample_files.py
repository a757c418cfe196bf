"""Writes responses as readable text: files for a step and for an evaluation, and one line for the terminal.

The texts of models and environments are untrusted, so their control characters are escaped. The middle of a long text
is cut out. Texts are indented, so that none of their lines looks like a heading.
"""

from __future__ import annotations

import json
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.rollout.groups import ScoredSample
from actors.rollout.records import Record, place_of
from slimefsdp.errors import printable
from slimefsdp.io.files import io_reported, write_synced

_SHOWN_GROUPS = 50  # limit on the groups of an evaluation in its text file
_SHOWN_RESPONSES = 8  # limit on the responses of a group in a text: those with the lowest and highest rewards
_MOST_OF_VALUE = 2000  # limit on the characters of a record's value, which is repeated for each response
_MOST_OF_TEXT = 4000  # limit on the characters of a prompt or a response in a file
_INDENT = "  "
_MOST_OF_EXAMPLE = 80  # limit on the characters of a prompt or a response in a line for the terminal


def write_samples(folder: Path, name: str, groups: Sequence[tuple[Record, Sequence[ScoredSample]]]) -> None:
    """Writes `name`.jsonl with a line for each scored response, and `name`.txt with the first groups as readable text.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    rows = [_row(record, sample) for record, samples in groups for sample in samples]
    text = "\n".join(_group_text(record, samples) for record, samples in groups[:_SHOWN_GROUPS])
    with io_reported(folder, "train"):
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_synced(folder / f"{name}.jsonl", lines.encode(errors="replace"))
        write_synced(folder / f"{name}.txt", text.encode())


def write_step_samples(folder: Path, step: int, groups: Sequence[tuple[Record, Sequence[ScoredSample], str]]) -> None:
    """Writes the text of groups of a training step; only warns if the folder cannot be written.

    Args:
        groups: (record, responses, reason why the group is not trained on) of each group; "" means that it is.
    """
    text = "\n".join(_group_text(record, samples, why_left_out) for record, samples, why_left_out in groups)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step_{step:08d}.txt").write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"samples of step {step} were not written to {folder}: {error.strerror or error}"
        warnings.warn(f"{problem}; the run goes on", stacklevel=2)


def example_line(step: int, record: Record, scored: ScoredSample) -> str:
    """Returns a response to a held-out prompt as one line for the terminal."""
    prompt = record["prompt"]
    question = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    prompt, response = (
        printable(shortened(text.strip(), _MOST_OF_EXAMPLE), kept="") for text in (question, scored.sample.text)
    )
    return f"step {step}, a held-out sample: {prompt} -> {response} ({_scores_text(scored)})"


def prompt_text(prompt: Any) -> str:
    """Returns a prompt as text: each message of a chat begins with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{message['role']}] {message.get('content', '')}" for message in prompt)


def shortened(text: str, most: int) -> str:
    """Cuts the middle out of a text that is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} .. ({len(text) - most:,} characters) .. {text[len(text) - most // 2 :]}"


def _group_text(record: Record, samples: Sequence[ScoredSample], why_left_out: str = "") -> str:
    by_reward = sorted(samples, key=lambda scored: scored.reward)
    half = _SHOWN_RESPONSES // 2
    shown = by_reward if len(samples) <= _SHOWN_RESPONSES else [*by_reward[:half], *by_reward[-half:]]
    head = f"=== {place_of(record)}: {len(shown)} of {len(samples)} responses"
    head += f"; not trained on: {why_left_out}" if why_left_out else ""
    parts = [head, _indented(prompt_text(record["prompt"]))]
    if "answer" in record:
        parts.append(f"--- answer: {_indented(str(_bounded(record['answer']))).lstrip()}")
    for scored in sorted(shown, key=lambda scored: scored.sample.number):
        trained = "" if scored.reward == scored.scores["reward"] else f", trained as {scored.reward:g}"
        tokens = scored.sample.response_length
        length = f"{tokens} token{'s' * (tokens != 1)}, {'ended' if scored.sample.finished else 'cut'}"
        parts.append(f"--- response {scored.sample.number}: {_scores_text(scored)}{trained}; {length}")
        parts.append(_indented(scored.sample.text))
    return "\n".join(parts) + "\n"


def _row(record: Record, scored: ScoredSample) -> dict[str, Any]:
    return {
        "place": place_of(record),
        "number": scored.sample.number,
        "prompt": record["prompt"],
        "response": scored.sample.text,
        "tokens": scored.sample.response_length,
        "finished": scored.sample.finished,
        "scores": scored.scores,
        "record": {key: _bounded(value) for key, value in record.items() if key != "prompt"},
    }


def _bounded(value: Any) -> Any:
    """Returns a value of a record; of a long value, the beginning of its JSON."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return value if len(text) <= _MOST_OF_VALUE else f"{text[:_MOST_OF_VALUE]} .. ({len(text):,} characters)"


def _indented(text: str) -> str:
    return textwrap.indent(printable(shortened(text, _MOST_OF_TEXT)), _INDENT)


def _scores_text(scored: ScoredSample) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in scored.scores.items())
