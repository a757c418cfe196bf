"""What is asked of a sampler of several versions, and what it answers. Importing it costs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimefsdp.sampling.params import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Asks for samples of a prompt by one version, and for log-probs of the prompt."""

    version: str | None  # None: the base
    prompt: Sequence[int]  # token ids
    num_samples: int  # from 1, or from 0 with prompt_log_probs
    params: SamplingParams  # params.seed and a sample's number decide what is drawn for it
    prompt_log_probs: bool = False
    prompt_top_k: int = 0  # of so many of the likeliest tokens in each place too; with prompt_log_probs
    client: str | None = None  # who asks: clients that wait for rows get equal shares of them


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One response; `log_probs[i]` belongs to `tokens[i]`, an end token included."""

    tokens: list[int]
    log_probs: list[float]  # as `SamplingParams.tempered` asks
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens at each prompt token but the first, given those before it; likeliest first."""

    tokens: np.ndarray  # int64 [prompt tokens - 1, k]
    log_probs: np.ndarray  # [prompt tokens - 1, k] log_softmax(logits), as the prompt's


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    samples: list[SampledTokens]  # in the order of their numbers
    # [prompt tokens] log_softmax(logits) of each token given those before it, NaN for the first; float32, or float64
    # where the model is; None: not asked for
    prompt_log_probs: np.ndarray | None
    prompt_top_tokens: TopTokens | None = None  # None: not asked for


@dataclass(frozen=True, slots=True)
class SamplingStats:
    """Statistics of a sampler of versions."""

    running_rows: int  # samples that are being drawn
    waiting_requests: int  # with samples that wait for a row, or a prompt that is to be read
    waiting_rows: int  # samples of these, a prompt that is only to be read as one
    tokens_drawn: int  # since it began
    cache_bytes: int  # keys and values of what is being drawn
    versions: dict[str, int]  # bytes of each
    memory_bytes: int  # that versions may have together
