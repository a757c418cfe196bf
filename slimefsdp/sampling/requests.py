"""Requests to a sampler of several versions, and its answers. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimefsdp.sampling.params import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for samples of a prompt by one version, and for log-probs of the prompt."""

    version: str | None  # None: the base model
    prompt: Sequence[int]  # token ids
    num_samples: int  # at least 1, or at least 0 with prompt_log_probs
    params: SamplingParams  # params.seed and a sample's number determine its draws
    prompt_log_probs: bool = False
    prompt_top_k: int = 0  # number of most likely tokens to return for each prompt position; needs prompt_log_probs
    client: str | None = None  # the sender; clients that wait for rows get equal shares of them


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Holds a response; `log_probs[i]` belongs to `tokens[i]`, also for an end token."""

    tokens: list[int]
    log_probs: list[float]  # as `SamplingParams.tempered` says
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at each prompt position but the first, given the tokens before it; most likely first."""

    tokens: np.ndarray  # int64 [prompt tokens - 1, k]
    log_probs: np.ndarray  # [prompt tokens - 1, k] log_softmax(logits), like the prompt's own


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    samples: list[SampledTokens]  # in the order of their numbers
    # [prompt tokens] log_softmax(logits) of each token given those before it, NaN for the first; float32, or float64 if
    # the model is; None: not requested
    prompt_log_probs: np.ndarray | None
    prompt_top_tokens: TopTokens | None = None  # None: not requested


@dataclass(frozen=True, slots=True)
class SamplingStats:
    running_rows: int  # samples that are being drawn
    waiting_requests: int  # requests with samples that wait for a row, or a prompt to be read
    waiting_rows: int  # samples of these requests; a prompt that is only to be read counts as one
    tokens_drawn: int  # since the start
    cache_bytes: int  # keys and values of the running samples
    versions: dict[str, int]  # bytes of each version
    memory_bytes: int  # limit on the bytes of all versions together
