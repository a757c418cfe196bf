"""Defines how the samples of a request are drawn, by any engine. Importing this file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from slimefsdp.errors import BatchError

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # divisors of float32 logits that cause no overflow
FinishReason = Literal["stop", "length", "abort"]
"""How a sample ended: an end token or a stop text, the limit max_new_tokens, or an abort of the engine."""


class VersionSpan(NamedTuple):
    """A range of a response's tokens, `start` to `end` (exclusive), that one version of the weights drew."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the samples of a request.

    Raises:
        BatchError: a value is invalid; the message names it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False  # always the most likely token; log-probs are the same as without it
    # True: log-probs are log_softmax(logits / temperature), over the tokens that `renormalized` says; False:
    # log_softmax(logits) over all tokens
    tempered: bool = True
    # True: over the tokens that min_p, top_k and top_p keep, from which the draw was made; False: over all tokens
    renormalized: bool = True
    end_token_ids: frozenset[int] = frozenset()  # tokens that end a sample; the sample includes them
    stop: tuple[str, ...] = ()  # texts that end a sample, with the token that completes one of them
    seed: tuple[int, ...] = ()  # integers from 0; with the number of the sample, the seed of its draws
    top_k: int | None = None  # draw from this many most likely tokens, ties by token id; None: from all
    # draw from the fewest most likely of these tokens with at least this total probability, after the temperature
    top_p: float = 1.0
    min_p: float = 0.0  # first of all, drop tokens with less than this share of the largest probability

    @property
    def is_limited(self) -> bool:
        """Returns whether some tokens are never drawn."""
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
