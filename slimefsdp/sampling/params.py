"""Defines requests for samples, and the answers of engines. Importing this file does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from slimefsdp.errors import BatchError

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # temperatures by which float32 logits can be divided without overflow
FinishReason = Literal["stop", "length", "abort"]
"""How a sample ended: an end token or a stop text, the limit max_new_tokens, or an abort of the engine."""


class VersionSpan(NamedTuple):
    """Describes the tokens [start, end) of a response, which one version of the weights drew."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Holds the sampling parameters of a request.

    Raises:
        BatchError: a value is invalid; the message names it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False  # always draw the most likely token; log-probs are the same as without `greedy`
    # if True, log-probs are log_softmax(logits / temperature), over the tokens that `renormalized` chooses; if False,
    # they are log_softmax(logits) over all tokens
    tempered: bool = True
    # if True, over the tokens that min_p, top_k and top_p keep, which can be drawn; if False, over all tokens
    renormalized: bool = True
    end_token_ids: frozenset[int] = frozenset()  # tokens that end a sample; the sample includes them
    stop: tuple[str, ...] = ()  # texts that end a sample; the sample includes the token that completes the text
    seed: tuple[int, ...] = ()  # integers from 0; together with a sample's number, they seed its draws
    top_k: int | None = None  # draw from this many most likely tokens, ties by token id; None means all
    # draw from the smallest set of most likely tokens that has at least this probability, at the temperature
    top_p: float = 1.0
    min_p: float = 0.0  # before top_k and top_p, drop tokens with less than this share of the largest probability

    @property
    def is_limited(self) -> bool:
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


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Requests samples of a prompt from one version of the weights, or log-probs of the prompt, or both."""

    version: str | None  # None means the base model
    prompt: Sequence[int]  # token ids
    num_samples: int  # at least 1, or at least 0 with prompt_log_probs
    params: SamplingParams  # params.seed and the number of a sample determine the sample's draws
    prompt_log_probs: bool = False
    prompt_top_k: int = 0  # number of top tokens to return for each prompt position; needs prompt_log_probs
    client: str | None = None  # the sender; waiting clients get equal shares of the rows


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Holds a response; `log_probs[i]` belongs to `tokens[i]`, also for an end token."""

    tokens: list[int]
    log_probs: list[float]  # see `SamplingParams.tempered`; float64 for a float64 model, else float32
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = ()  # consecutive spans that cover all tokens; empty in requests for one version
    routed_experts: np.ndarray | None = None  # int16 [prompt + tokens - 1, layers, experts of a token], if recorded

    @property
    def finished(self) -> bool:
        """Returns whether an end token or a stop text ended the response."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Holds the most likely tokens at each prompt position but the first, in descending order of probability."""

    tokens: np.ndarray  # int64 [prompt tokens - 1, k]
    log_probs: np.ndarray  # [prompt tokens - 1, k] log_softmax(logits), as for the prompt's own tokens


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    samples: list[SampledTokens]  # in the order of their numbers
    # [prompt tokens] log_softmax(logits) of each token given all earlier tokens, NaN for the first token; float64 for a
    # float64 model, else float32; None if not requested
    prompt_log_probs: np.ndarray | None
    prompt_top_tokens: TopTokens | None = None  # None if not requested


@dataclass(frozen=True, slots=True)
class SamplingStats:
    running_rows: int  # samples that are being drawn
    waiting_requests: int  # requests with samples that wait for a row, or with a prompt to read
    waiting_rows: int  # samples of these requests; a prompt whose log-probs alone are requested counts as one
    tokens_drawn: int  # since the start
    cache_bytes: int  # keys and values of the running samples
    versions: dict[str, int]  # bytes of each version
    memory_bytes: int  # limit on the bytes of all versions together


def checked_prompt(request: SampleRequest, vocab_size: int, max_samples: int) -> list[int]:
    """Checks a request; returns its prompt's token ids.

    Args:
        max_samples: limit on the samples of a request.

    Raises:
        BatchError: the prompt is empty or has other token ids than this vocabulary, or there are too few or too many
            samples.
    """
    least = 0 if request.prompt_log_probs else 1
    if type(request.num_samples) is not int or not least <= request.num_samples <= max_samples:
        problem = f"num_samples={request.num_samples!r}; it must be from 1 to {max_samples}, or 0 with prompt_log_probs"
        hint = "ask for as many in several requests, or for at least one"
        raise BatchError(problem, field="num_samples", hint=hint)
    try:
        prompt = np.asarray(request.prompt)
    except ValueError:  # ragged lists
        prompt = np.asarray(None)
    if prompt.ndim != 1 or (prompt.size and not np.issubdtype(prompt.dtype, np.integer)):
        raise BatchError("the prompt is not a list of integers", field="prompt", hint="give token ids")
    if not prompt.size:
        raise BatchError("the prompt has no tokens", field="prompt", hint="give it some")
    outside = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    if outside.size:
        position = int(outside[0])
        problem = f"token {position} of the prompt is {int(prompt[position])}, and the vocabulary has {vocab_size}"
        raise BatchError(problem, field="prompt", hint="encode it with the model's tokenizer")
    return [int(token) for token in prompt]
