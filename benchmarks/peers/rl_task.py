"""Sums of single digits for a chat model: prompts of a wanted length, and rewards, the same for every trainer.

Pure Python: each trainer's environment can import it.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FILLER = " Digits without a meaning: "


def question(rng: random.Random) -> tuple[str, str]:
    """A sum or a difference of two digits, worded as reasoning-gym's `chain_sum`, and its answer."""
    first, second, sign = rng.randrange(10), rng.randrange(10), rng.choice("+-")
    text = f"State the final answer to the following arithmetic problem: {first} {sign} {second} =\n"
    return text + "Reply with the number only.", str(first + second if sign == "+" else first - second)


def records(
    count: int, seed: int, length_of: Callable[[list[dict[str, str]]], int], tokens: int | None = None
) -> list[dict[str, Any]]:
    """So many problems as chat messages with their answers.

    Args:
        length_of: tokens of a chat with the opening of the assistant's turn.
        tokens: of each prompt, which digits without a meaning make as long; None: as long as the problem is.

    Raises:
        ValueError: the problem alone is longer, or no number of digits gives that length.
    """
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        text, answer = question(rng)
        if tokens is not None:
            # a digit is a token of its own
            missing = tokens - length_of(chat(text + FILLER))
            if missing < 0:
                raise ValueError(f"a prompt of {tokens} tokens was wanted, the problem has {tokens - missing}")
            text += FILLER + "".join(rng.choice("0123456789") for _ in range(missing))
            if length_of(chat(text)) != tokens:
                raise ValueError(f"no number of digits makes a prompt of {tokens} tokens")
        found.append({"prompt": chat(text), "answer": answer})
    return found


def chat(text: str) -> list[dict[str, str]]:
    """The text as a user's only message."""
    return [{"role": "user", "content": text}]


def last_number(record: Mapping[str, Any], response: str, finished: bool) -> dict[str, float]:
    """1 where the response came to its end and its last number is the answer, else 0."""
    numbers = re.findall(r"-?\d+", response)
    right = float(finished and bool(numbers) and numbers[-1] == str(record["answer"]))
    return {"reward": right, "finished": float(finished)}


def different(record: Mapping[str, Any], response: str, finished: bool) -> dict[str, float]:
    """A number in [0, 1) that follows from the text: hardly any two are equal, so that every group trains."""
    return {"reward": zlib.crc32(response.encode()) / 2**32, "finished": float(finished)}


REWARDS: dict[str, Callable[[Mapping[str, Any], str, bool], dict[str, float]]] = {
    "last_number": last_number,
    "different": different,
}


def token_ids(encoded: Any) -> Sequence[int]:
    """What a tokenizer's `apply_chat_template` returned, whichever of its shapes this is."""
    ids: Sequence[int] = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
    return ids
