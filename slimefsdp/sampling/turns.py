"""Samples from several versions of a model's weights in turn.

Each version in use has its own `Sampler`, with its own rows and cache; the limit on rows holds for all versions
together. A version may use more than its share of the rows only if no other version with waiting samples has less than
its share. The draws of a sample depend only on its version, seed and number; other samples only change the rounding of
its probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from slimefsdp.distributed.collectives import is_out_of_memory
from slimefsdp.errors import BatchError, ResourceError, StateError, byte_text
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.sampling.params import (
    SampleAnswer,
    SampledTokens,
    SampleRequest,
    SamplingStats,
    TopTokens,
    checked_prompt,
)
from slimefsdp.sampling.sampler import Sampler
from slimefsdp.sampling.versions import Versions


@dataclass(slots=True, eq=False)
class _Pending:
    samples: list[SampledTokens | None]
    left: int  # number of results that are missing: samples, and prompt log-probs as one
    prompt_log_probs: np.ndarray | None = None
    prompt_top_tokens: TopTokens | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """Holds a version in use, or None for the base model, with its sampler."""

    version: Any  # what `Versions.read` returned
    sampler: Sampler
    pending: dict[int, _Pending] = field(default_factory=dict)  # by the request's number


class VersionedSampler:
    """Samples from several versions of one model's weights in turn; only one thread may use it.

    Args:
        policy: a model in eval mode with unsharded weights, which no other code may change.
        weights: reads versions, and switches the model from one version to another.
        max_rows: limit on the samples that are drawn at once, for all versions together.
        memory_bytes: limit on the bytes of all versions together.
        max_samples: limit on the samples of a request.
        decode: converts token ids to text, for requests with stop texts.

    Raises:
        StateError: the model is in training mode.
    """

    def __init__(
        self,
        policy: PolicyModel,
        weights: Versions,
        *,
        max_rows: int,
        memory_bytes: int,
        max_samples: int = 1024,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._policy, self._weights, self._decode = policy, weights, decode
        self._max_rows, self._memory_bytes, self._max_samples = max_rows, memory_bytes, max_samples
        config = policy.hf.config
        self._vocab_size: int = config.vocab_size
        self._max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._numbers = count()  # numbers of requests, unique over all lanes
        self._base = _Lane(None, self._sampler())
        self._lanes: dict[str, _Lane] = {}
        self._reserved: set[str] = set()  # versions that are being read
        self._turns: deque[_Lane] = deque()  # lanes with requests, in the order of their turns
        self._lane_of: dict[int, _Lane] = {}  # by the request's number
        self._tokens_drawn = 0  # by versions that were dropped

    # ------------------------------------------------------------------ versions

    def reserve(self, name: str) -> None:
        """Reserves memory for a version that will be read.

        Raises:
            StateError: the name is taken. ResourceError: there is too little memory; other versions stay.
        """
        if name in self._lanes or name in self._reserved:
            raise StateError(
                f"there is a version {name!r}", field="version", hint="drop that one first, or choose another name"
            )
        count, each = len(self._lanes) + len(self._reserved), self._weights.version_bytes
        if (count + 1) * each > self._memory_bytes:
            raise ResourceError(
                f"version {name!r} needs {byte_text(each)}, and {count} others have {byte_text(count * each)} of "
                f"{byte_text(self._memory_bytes)}",
                field="memory_bytes",
                hint="drop versions that are of no more use, or give the engine more memory",
            )
        self._reserved.add(name)

    def release(self, name: str) -> None:
        """Releases the reservation of a version that could not be read."""
        self._reserved.discard(name)

    def hold(self, name: str, version: Any) -> int:
        """Adds a version whose memory was reserved, so that it can be sampled; returns its bytes."""
        self._reserved.remove(name)
        self._lanes[name] = _Lane(version, self._sampler())
        return self._weights.version_bytes

    def drop(self, name: str) -> list[int]:
        """Removes a version; returns the numbers of its unanswered requests, which will get no answer.

        Raises:
            StateError: there is no version of this name.
        """
        lane = self._lane(name)
        del self._lanes[name]
        numbers = list(lane.pending)
        for number in numbers:
            del self._lane_of[number]
        if lane in self._turns:
            self._turns.remove(lane)
        self._tokens_drawn += lane.sampler.tokens_drawn
        self._weights.forget(lane.version)
        return numbers

    @property
    def versions(self) -> list[str]:
        return list(self._lanes)

    # ------------------------------------------------------------------ requests

    def add(self, request: SampleRequest) -> int:
        """Queues a request; returns its number.

        Raises:
            StateError: the version does not exist. BatchError: a value is invalid; the message names it.
        """
        lane = self._lane(request.version)
        prompt = checked_prompt(request, self._vocab_size, self._max_samples)
        self._check_positions(request, len(prompt))
        most = self._policy.hf.config.get_text_config().vocab_size if request.prompt_log_probs else 0
        if type(request.prompt_top_k) is not int or not 0 <= request.prompt_top_k <= most:
            raise BatchError(
                f"prompt_top_k={request.prompt_top_k!r}; it must be from 0 to {most}, the vocabulary, and 0 without "
                "prompt_log_probs",
                field="prompt_top_k",
                hint="ask for fewer tokens",
            )
        was_idle = lane.sampler.is_idle
        number = lane.sampler.add(
            prompt,
            request.num_samples,
            request.params,
            prompt_log_probs=request.prompt_log_probs,
            prompt_top_k=request.prompt_top_k,
            client=request.client,
        )
        left = request.num_samples + request.prompt_log_probs
        lane.pending[number] = _Pending([None] * request.num_samples, left)
        self._lane_of[number] = lane
        if was_idle:
            self._turns.append(lane)
        return number

    def cancel(self, number: int) -> None:
        """Cancels a request and frees its rows; does nothing if it was answered already."""
        if number not in self._lane_of:
            return
        lane = self._lane_of.pop(number)
        del lane.pending[number]
        lane.sampler.abort({number})
        if lane.sampler.is_idle and lane in self._turns:
            self._turns.remove(lane)

    @property
    def is_idle(self) -> bool:
        return not self._turns

    def step(self) -> list[tuple[int, SampleAnswer | Exception]]:
        """Draws one token for each row of the version whose turn it is.

        Returns:
            (number of the request, its answer) for each completed request; if the turn fails, (number, error) for every
            request of the version.
        """
        if not self._turns:
            return []
        lane = self._turns.popleft()
        answers: list[tuple[int, SampleAnswer | Exception]] = []
        try:
            self._weights.take_turn(lane.version)
            answers += self._taken(lane, lane.sampler.step(self._may_begin(lane)))
        except Exception as error:  # the sampler has removed all samples of this version; other versions continue
            meant = _meant(error)
            lane.sampler.take_prompts()
            for number in lane.pending:
                del self._lane_of[number]
                answers.append((number, meant))
            lane.pending.clear()
        if not lane.sampler.is_idle:
            self._turns.append(lane)
        return answers

    def stats(self) -> SamplingStats:
        samplers = [lane.sampler for lane in (self._base, *self._lanes.values())]
        return SamplingStats(
            running_rows=sum(sampler.running_rows for sampler in samplers),
            waiting_requests=sum(sampler.waiting_requests for sampler in samplers),
            waiting_rows=sum(sampler.waiting_rows for sampler in samplers),
            tokens_drawn=self._tokens_drawn + sum(sampler.tokens_drawn for sampler in samplers),
            cache_bytes=sum(sampler.cache_bytes for sampler in samplers),
            versions=dict.fromkeys(self._lanes, self._weights.version_bytes),
            memory_bytes=self._memory_bytes,
        )

    def _sampler(self) -> Sampler:
        return Sampler(self._policy, max_rows=self._max_rows, decode=self._decode, numbers=self._numbers)

    def _lane(self, name: str | None) -> _Lane:
        if name is None:
            return self._base
        if name not in self._lanes:
            raise StateError(
                f"there is no version {name!r}" + (", it is being loaded" if name in self._reserved else ""),
                field="version",
                hint="load it, or sample one of those that `versions` lists",
            )
        return self._lanes[name]

    def _may_begin(self, lane: _Lane) -> int:
        """Returns how many waiting samples of a version may get a row, so that other versions can get their shares."""
        others = [other.sampler for other in self._turns]
        share = max(1, self._max_rows // (len(others) + 1))
        running = lane.sampler.running_rows
        free = self._max_rows - running - sum(sampler.running_rows for sampler in others)
        wanted = sum(max(0, min(share - sampler.running_rows, sampler.waiting_rows)) for sampler in others)
        return max(0, min(free, max(free - wanted, share - running)))

    def _taken(self, lane: _Lane, ended: Sequence[tuple[int, int, SampledTokens]]) -> list[tuple[int, SampleAnswer]]:
        """Adds new results to their requests; returns (number, answer) of the requests that are complete."""
        came: list[int] = []
        for number, log_probs, top in lane.sampler.take_prompts():
            if number in lane.pending:
                lane.pending[number].prompt_log_probs = log_probs
                lane.pending[number].prompt_top_tokens = top
                came.append(number)
        for number, index, sample in ended:
            lane.pending[number].samples[index] = sample
            came.append(number)
        answers = []
        for number in came:
            pending = lane.pending[number]
            pending.left -= 1
            if pending.left == 0:
                del lane.pending[number], self._lane_of[number]
                samples = [sample for sample in pending.samples if sample is not None]
                answers.append((number, SampleAnswer(samples, pending.prompt_log_probs, pending.prompt_top_tokens)))
        return answers

    def _check_positions(self, request: SampleRequest, length: int) -> None:
        drawn = request.params.max_new_tokens if request.num_samples else 0
        if self._max_positions is not None and length + drawn > self._max_positions:
            raise BatchError(
                f"a prompt of {length} tokens and max_new_tokens={drawn} are more than the model's "
                f"{self._max_positions} positions",
                field="max_new_tokens" if drawn and length < self._max_positions else "prompt",
                hint="lower it, or shorten the prompt",
            )


def _meant(error: Exception) -> Exception:
    if not is_out_of_memory(error):
        return error
    resource_error = ResourceError(
        f"there was no memory to sample with: {str(error).partition(chr(10))[0]}",
        field="max_rows",
        hint="sample fewer or shorter ones at once, or hold fewer versions",
    )
    resource_error.__cause__ = error
    return resource_error
