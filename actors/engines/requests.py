"""Makes requests from prompts, splits the requests over engines, and asks again if an engine is replaced."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayError

from actors.cluster.ray_errors import require_cluster
from actors.engines.processes import EngineProcesses, errors_of
from actors.engines.protocol import Request, Sample, check_sample, is_whole
from actors.fault_tolerance.recovery import LOST
from actors.workers.futures import SLICE_S, meaning_of
from slimefsdp.errors import BatchError, EngineError, SlimeError, short_repr
from slimefsdp.sampling.params import SamplingParams

_GET_S = 10.0  # timeout of fetching samples that Ray reports as ready
_LOOK_S = 1.0  # interval of checking for engines that hang, while other engines hand samples over


class EngineRequests:
    """Encodes prompts, asks engines for samples, and receives samples as they end."""

    def __init__(self, processes: EngineProcesses) -> None:
        self._processes = processes
        self._config = processes.config
        self._aborts = 0  # number of calls of `abort`

    def _replace_lost(self, index: int, engine: Any, error: SlimeError) -> None:
        """Replaces `engine`, the lost engine of this index, or raises `error`, which reports the loss."""
        raise NotImplementedError

    @property
    def max_tokens(self) -> int | None:
        """Returns the engines' lowest limit on prompt plus response tokens; None means that memory is the limit."""
        return min((most for most in self._processes.max_tokens.values() if most is not None), default=None)

    # ------------------------------------------------------------------ requests

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Returns the token ids of prompts, which are texts, chats (lists of messages, also with tools) or token ids.

        Raises:
            ConfigError: as `actors.engines.tokenizer.encode_prompt`.
            BatchError: a token id is outside the vocabulary, or `prompts` is not a list.
            EngineError: the engine's tokenizer failed, or returned no token ids.
        """
        return self._encoded("encode", prompts)

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        """Returns the token ids of an environment's observations; raises the errors of `encode`."""
        return self._encoded("encode_observations", observations)

    def _encoded(self, method: Literal["encode", "encode_observations"], prompts: Sequence[Any]) -> list[list[int]]:
        """Has the first engine encode the prompts that are not token ids yet; the engine is replaced if it is lost."""
        self._processes.require_running(method)
        if not isinstance(prompts, list | tuple):
            problem = f"prompts is a {type(prompts).__name__}"
            raise BatchError(problem, field="prompts", hint="give a list of texts, chats or lists of token ids")
        encoded = {index: list(prompt) for index, prompt in enumerate(prompts) if _is_encoded(prompt)}
        for index, tokens in encoded.items():
            self._require_known(tokens, index)
        others = [index for index in range(len(prompts)) if index not in encoded]
        while others:
            require_cluster()
            engine = self._processes.engines[0]
            ref = getattr(engine, method).remote([prompts[index] for index in others])
            try:
                with errors_of(0, method):
                    (answer,) = self._processes.wait([ref], "generate", "call_timeout_s")
            except LOST as error:
                self._processes.require_running(method)
                self._replace_lost(0, engine, error)
                continue
            if not isinstance(answer, list) or len(answer) != len(others) or not all(map(_is_encoded, answer)):
                problem = f"engine 0 encoded {len(others)} prompts as {short_repr(answer)}"
                raise EngineError(problem, field="rollout.engine", hint="return a list of token ids each", rank=0)
            encoded |= dict(zip(others, map(list, answer), strict=True))
            break
        return [encoded[index] for index in range(len(prompts))]

    def requests(
        self, prompts: Sequence[Any], *, samples_per_prompt: int, seed: int | Sequence[int], **sampling: Any
    ) -> list[Request]:
        """Returns one request for each prompt; see `EnginePool.generate` for the arguments and `params` for `sampling`.

        Raises:
            BatchError: there are no prompts, or `samples_per_prompt` is below 1. Also the errors of `encode`.
        """
        self._processes.require_running("generate")
        if isinstance(prompts, list | tuple) and not prompts:
            raise BatchError("there are no prompts to sample for", field="prompts", hint="give one or more")
        if not is_whole(samples_per_prompt) or samples_per_prompt < 1:
            problem = f"samples_per_prompt={samples_per_prompt!r}; it must be a whole number from 1"
            raise BatchError(problem, field="samples_per_prompt", hint="raise it")
        seeds = (seed,) if is_whole(seed) else seed
        if not isinstance(seeds, list | tuple) or not all(map(is_whole, seeds)):
            problem = f"seed={short_repr(seed)}; it must be a whole number, or a list of them"
            raise BatchError(problem, field="seed", hint="give the run's seed and the step, e.g. (0, 17)")
        return [
            Request(prompt, samples_per_prompt, self.params((*seeds, index), **sampling))
            for index, prompt in enumerate(self.encode(prompts))
        ]

    def params(
        self, seed: Sequence[int], *, greedy: bool = False, max_new_tokens: int | None = None, evaluates: bool = False
    ) -> SamplingParams:
        """Returns the sampling parameters of the run's settings.

        Args:
            greedy: whether the most likely token is always drawn; evaluations at temperature 0 are always greedy.
            max_new_tokens: a lower limit than in the settings; None means the limit in the settings.
            evaluates: whether to use the settings of evaluations.
        """
        sampling = self._config.sampling(evaluates=evaluates)
        greedy = greedy or sampling.temperature == 0
        limits: dict[str, Any] = (
            {} if greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        )
        return SamplingParams(
            sampling.max_new_tokens if max_new_tokens is None else min(max_new_tokens, sampling.max_new_tokens),
            sampling.temperature or self._config.rollout.temperature,
            greedy=greedy,
            tempered=not greedy,  # all engines support this; a greedy choice does not use the temperature
            # For training, log-probs are over all tokens, as the trainer's are: the ratio is 1 before the first update.
            # Evaluations do not use log-probs, and no server has log-probs over all tokens with a limit such as top_k.
            renormalized=evaluates,
            end_token_ids=self._processes.end_token_ids,
            stop=self._config.rollout.stop,
            seed=tuple(seed),
            **limits,
        )

    def _require_known(self, prompt: Sequence[int], index: int) -> None:
        """Raises a BatchError if the prompt at this index of a call has a token id outside the vocabulary."""
        size = self._processes.vocab_size
        unknown = [token for token in prompt if not (is_whole(token) and 0 <= token < size)]
        if unknown:
            problem = f"prompt {index} has token id {short_repr(unknown[0])}, outside the vocabulary of {size}"
            raise BatchError(problem, field="prompts", hint="encode it with the tokenizer of model.path")

    # ------------------------------------------------------------------ samples

    def stream(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Yields each sample as soon as it has ended; the requests are split evenly over the engines.

        Raises:
            As `EnginePool.generate`.
        """
        self._processes.require_running("stream")
        require_cluster()
        if not requests:
            raise BatchError("there are no requests", field="requests", hint="give one or more")
        for index, request in enumerate(requests):
            self._require_known(request.prompt, index)
        parts = np.array_split(np.arange(len(requests)), len(self._processes.engines))
        yield from self._stream(requests, {index: part.tolist() for index, part in enumerate(parts) if len(part)})

    def _stream(self, requests: Sequence[Request], shares: dict[int, list[int]]) -> Iterator[Sample]:
        """Yields samples as `stream` does.

        Args:
            shares: index of an engine -> the indices of the requests that the engine answers.
        """
        has_experts = self._config.loss.routing_replay == "rollout"
        engines = list(self._processes.engines)  # a copy: another thread may replace an engine meanwhile
        streams: dict[Any, tuple[int, str]] = {}  # stream -> index of its engine, and its name at the engine
        given: set[tuple[int, int]] = set()  # (index of the request, number) of each yielded sample
        try:
            for index, numbers in shares.items():
                streams |= self._asked(index, [requests[number] for number in numbers])
            asked = looked = time.monotonic()
            heard = dict.fromkeys(shares, asked)  # when each engine was asked, or last handed samples over
            while streams:
                require_cluster()
                ready, _ = ray.wait(list(streams), num_returns=1, timeout=SLICE_S, fetch_local=False)
                lost: dict[int, SlimeError] = {}
                if not ready or time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    answering, _ = ray.wait(list(streams), num_returns=len(streams), timeout=0, fetch_local=False)
                    quiet = {index: heard[index] for stream, (index, _) in streams.items() if stream not in answering}
                    lost = self._processes.hanging(quiet, asked) if quiet else {}
                for stream in ready:
                    index, _ = streams[stream]
                    try:
                        samples = _next_item(stream, index)
                    except LOST as error:
                        lost[index] = error
                        continue
                    share = [requests[number] for number in shares[index]]
                    if samples is None:
                        del streams[stream]
                        _require_whole(index, share, shares[index], given)
                        continue
                    heard[index] = time.monotonic()
                    for sample in samples:
                        check_sample(sample, share, self._processes.vocab_size, index, has_experts=has_experts)
                        request = shares[index][sample.request]
                        if (request, sample.number) not in given:
                            given.add((request, sample.number))
                            experts = sample.routed_experts if has_experts else None  # an engine may always return them
                            yield replace(sample, request=request, routed_experts=experts)
                for index, loss in lost.items():
                    self._processes.require_running("generate")  # after a `shutdown` in another thread, do not replace
                    self._replace_lost(index, engines[index], loss)
                    engines[index] = self._processes.engines[index]
                    streams = {stream: owner for stream, owner in streams.items() if owner[0] != index}
                    # The new engine draws all samples of an incomplete request again. The samples are the same as
                    # before, and a sample is yielded only once. A hanging engine may have had no request.
                    before = shares.get(index, [])
                    shares[index] = left = [item for item in before if not is_complete(item, requests[item], given)]
                    if left:
                        streams |= self._asked(index, [requests[number] for number in left])
                    asked = heard[index] = time.monotonic()
        finally:
            for index, name in streams.values():  # the caller has stopped, and does not need the remaining samples
                with suppress(RayError):
                    engines[index].end_stream.remote(name)

    def _asked(self, index: int, requests: Sequence[Request]) -> dict[Any, tuple[int, str]]:
        """Asks an engine for samples; returns {stream: (index of the engine, the stream's name)}."""
        while not self._processes.may_ask.wait(SLICE_S):  # this ends: an update has a deadline
            pass
        name = uuid.uuid4().hex
        return {self._processes.engines[index].stream.remote(name, list(requests)): (index, name)}

    def abort(self) -> None:
        """Ends all running and waiting samples with the tokens drawn so far.

        Raises:
            WorkerDied, WorkerHung: an engine ended or did not answer; all other engines have aborted their samples.
        """
        self._processes.require_running("abort")
        self._aborts += 1
        began = time.monotonic()
        refs = [engine.abort.options(concurrency_group="control").remote() for engine in self._processes.engines]
        lost: list[SlimeError] = []
        for index, ref in enumerate(refs):
            try:
                with errors_of(index, "abort"):
                    self._processes.wait([ref], "abort", "call_timeout_s", began, first_rank=index)
            except LOST as error:
                lost.append(error)
        if lost:
            raise lost[0]


def is_complete(index: int, request: Request, given: Collection[tuple[int, int]]) -> bool:
    """Returns whether `given`, pairs of (index of a request, number of a sample), has all samples of this request."""
    return all((index, number) in given for number in range(request.samples))


def _is_encoded(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and all(map(is_whole, prompt))


def _next_item(stream: Any, index: int) -> list[Sample] | None:
    """Returns the next samples of a stream that Ray reports as ready; None means that the stream has ended."""
    try:
        ref = next(stream)
    except StopIteration:
        return None
    with errors_of(index, "generate"):
        try:
            samples: list[Sample] = ray.get(ref, timeout=_GET_S)
        except RayError as error:
            raise meaning_of(error, index, "generate") from error
    if not isinstance(samples, list | tuple):
        problem = f"engine {index} handed over {short_repr(samples)}"
        raise EngineError(problem, field="rollout.engine", hint="yield lists of samples", rank=index)
    return list(samples)


def _require_whole(index: int, share: Sequence[Request], indices: Sequence[int], given: set[tuple[int, int]]) -> None:
    """Raises an EngineError if engine `index` ended a stream without all samples of its share of the requests."""
    wanted = {(number, sample) for number, of in zip(indices, share, strict=True) for sample in range(of.samples)}
    if missing := wanted - given:
        raise EngineError(
            f"engine {index} ended a call without {len(missing)} of its {len(wanted)} samples",
            field="rollout.engine", hint="have it hand over each sample, aborted ones too", rank=index,
        )  # fmt: skip
