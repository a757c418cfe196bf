"""Defines how the samples of a request are drawn, by any engine. Importing this file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from slimefsdp.errors import BatchError

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # what float32 logits are divided by without an overflow
FinishReason = Literal["stop", "length", "abort"]
"""How a sample ended: by an end token or a stop text, cut at max_new_tokens, or since the engine was told to abort."""


class VersionSpan(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a response were drawn from this version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the samples of a request are drawn.

    Raises:
        BatchError: naming the value that none can have.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False  # the likeliest token each time; log-probs are as of any other
    # log-probs are of log_softmax(logits / temperature), over the tokens that `renormalized` says; else of
    # log_softmax(logits) over all tokens
    tempered: bool = True
    # over what min_p, top_k and top_p leave, which is what was drawn from; else over all tokens
    renormalized: bool = True
    end_token_ids: frozenset[int] = frozenset()  # one of these ends a sample, and belongs to it
    stop: tuple[str, ...] = ()  # so does the token that completes one of these texts in the response
    seed: tuple[int, ...] = ()  # with the number of the sample, the seed of its draws; integers from 0
    top_k: int | None = None  # of so many likeliest tokens, among equals the first; None: of all
    # of the fewest likeliest of these that have at least this probability together, after the temperature; 1: of all
    top_p: float = 1.0
    min_p: float = 0.0  # of tokens with at least this share of the likeliest one's probability, before the others

    @property
    def is_limited(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def __post_init__(self) -> None:
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise BatchError(
                f"temperature={self.temperature!r} cannot be sampled with",
                field="temperature",
                hint=f"give one from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, or have the likeliest tokens drawn",
            )
        for name, value, is_valid in (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1),
            ("top_p", self.top_p, 0 < self.top_p <= 1),
            ("min_p", self.min_p, 0 <= self.min_p < 1),
            ("stop", self.stop, all(self.stop)),
            ("seed", self.seed, all(number >= 0 for number in self.seed)),
        ):
            if not is_valid:
                raise BatchError(f"{name}={value!r} cannot be sampled with", field=name, hint="give a valid one")
