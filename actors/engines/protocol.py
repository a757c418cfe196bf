"""What a run and its rollout engines say to each other, whichever engine it is: requests, samples, and new weights.

An engine is a Ray actor of a class made from `Engine`. `rollout.engine` names one that comes with the project, or a
class of one's own as `module:Class`. Importing this file costs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import ray

from actors.engines.tokenizer import encode_observation, encode_prompt, end_token_ids, load_tokenizer
from actors.workers.watchdog import Watched
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import Transport as Transport
from slimefsdp.errors import EngineError, short_repr
from slimefsdp.sampling.params import FinishReason, SamplingParams, VersionSpan
from slimefsdp.weight_sync.progress import Manifest as Manifest

if TYPE_CHECKING:  # importing this file costs no torch
    from slimefsdp.weight_sync.broadcast import Rendezvous

_ROUNDING = 1e-5  # by which a log-prob may be above 0
_STREAMS_KEPT = 1000  # that were ended, until they are forgotten: one may be ended before it has begun

EngineTag = Literal["weights", "kv_cache"]
ENGINE_TAGS: tuple[EngineTag, ...] = ("weights", "kv_cache")
"""What an engine holds of its device. One that has a cache for what it samples alone has nothing to take for it."""
GroupKind = Literal["slimefsdp", "torch"]
"""What such a group is: a `BroadcastGroup`, or one that the engine's workers make by torch.distributed."""


@dataclass(frozen=True, slots=True)
class Request:
    """Samples that are wanted of one prompt.

    `params.seed` and a sample's number decide what is drawn for it, so requests of one run have seeds of their own.
    """

    prompt: Sequence[int]  # token ids
    samples: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a response; `log_probs[i]` belongs to `tokens[i]`, the end token included when there is one."""

    request: int  # its place among the requests of the call
    number: int  # among the samples of the request
    tokens: list[int]  # of the response
    log_probs: list[float]  # as the request's `tempered` asks
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # one after another, over all tokens
    text: str  # of the response without special tokens, stripped


class TensorInfo(NamedTuple):
    """A tensor of a bucket."""

    name: str  # as in the Hugging Face folder
    dtype: str  # such as "float32"
    shape: tuple[int, ...]


class EngineInfo(NamedTuple):
    """Describes an engine to its pool before it is used."""

    name: str  # such as "vllm 0.32.0"
    vocab_size: int  # of its model
    dtype: str  # of its weights, such as "float32"
    max_tokens: int | None  # of a prompt and its response; None: as many as memory holds
    transports: tuple[Transport, ...]  # by which it takes weights, the one it takes best first
    processes: int = 1  # that join a group for the broadcast of weights
    group: GroupKind = "slimefsdp"


class Engine(Watched):
    """Base of the Ray actors that sample.

    Several calls of `generate` run at once, and `abort` and new weights come beside them, each on a thread of its own.
    Weights come by `begin`, `receive` as often as needed, and `commit`; whatever is being sampled at `begin`, or asked
    for until `commit`, goes on after it with the new weights, its context read anew. Without committed weights nothing
    is sampled.

    Args:
        config: of the run.
        index: of this engine among `rollout.engines`.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 2, "generate": 16}
    _ended_streams: ClassVar[deque[str]] = deque(maxlen=_STREAMS_KEPT)  # a process has one engine

    def __init__(self, config: RunConfig, index: int) -> None:
        self.config = config
        self.index = index
        self.tokenizer = load_tokenizer(str(config.model.path))
        self._end_token_ids = frozenset(end_token_ids(str(config.model.path), self.tokenizer.eos_token_id))

    def info(self) -> EngineInfo:
        """Returns what this engine is, once it is ready for weights.

        Raises:
            EngineError: it is not one that the run can use.
        """
        raise NotImplementedError

    def health(self) -> None:
        """Returns where the engine can be asked for more.

        Raises:
            WorkerDied, WorkerHung: what it needs beside its own process has ended, or does not answer.
        """

    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a response: the tokenizer's, and those of generation_config.json."""
        return self._end_token_ids

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of texts or lists of chat messages.

        Raises:
            ConfigError: as `encode_prompt`.
        """
        return [encode_prompt(self.tokenizer, prompt, self.config.data.chat_template_kwargs) for prompt in prompts]

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        """Token ids of what an environment answers to a response, with the end of the assistant's turn before it.

        Raises:
            ConfigError: as `encode_observation`.
        """
        template_kwargs = self.config.data.chat_template_kwargs
        return [encode_observation(self.tokenizer, one, template_kwargs) for one in observations]

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """Yields samples as they end, some at a time and in no order; each sample of each request once.

        Raises:
            StateError: no weights are committed, or their logits are not finite.
            EngineError: the engine cannot do what a request asks, or did not do what it was asked.
        """
        raise NotImplementedError

    @ray.method(num_returns="streaming", concurrency_group="generate")
    def stream(self, name: str, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """`generate`, which `end_stream` may end.

        It is not `ray.cancel` that ends it. That takes back a call that has not left its caller, whose place in the
        order of calls is then waited for: all later calls stand still (Ray 2.60: for 30 s or more, and are lost then).

        Args:
            name: of this stream alone.
        """
        if name in self._ended_streams:
            return
        for samples in self.generate(requests):
            yield samples
            if name in self._ended_streams:
                return

    @ray.method(concurrency_group="control")
    def end_stream(self, name: str) -> None:
        """Has a stream end where it hands over samples next, or before it begins."""
        self._ended_streams.append(name)

    def abort(self) -> None:
        """Ends all samples that are running or wait, as they are: their `finish_reason` is "abort"."""
        raise NotImplementedError

    def has_frozen(self, source: str) -> bool:
        """Asked before `begin`: whether the frozen weights of `source` are here, from an update that was committed.

        Where all engines have them, `begin` is told of those that are not sent. Engines that keep none say False.
        """
        return False

    def begin(self, version: int, manifest: Manifest) -> None:
        """Begins an update, as in `slimefsdp.weight_sync.receive.Receiver`.

        Where `has_frozen` may be True it has a third argument, the names of `WeightReceiver.begin`'s `kept`, and where
        the engine has adapters a fourth, what they are multiplied by.
        """
        raise NotImplementedError

    def receive(self, bucket: Any) -> None:
        """Takes one bucket from the object store."""
        raise NotImplementedError

    def join(self, meeting: Rendezvous) -> None:
        """Joins the group in which rank 0 broadcasts weights, and leaves the one before; returns when all are in it.

        Raises:
            SyncError: the others did not come.
        """
        raise NotImplementedError

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """Takes a bucket that rank 0 broadcasts now as one tensor of bytes, one after another.

        Args:
            digest: of these bytes, as `slimefsdp.weight_sync.buckets.digest_of`; None: they are not checked.

        Raises:
            SyncError: they were altered on the way. One with `is_of_group`: the group broke, for all that is known.
        """
        raise NotImplementedError

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """Takes a bucket whose bytes lie at the beginning of a shared buffer until this returns.

        Args:
            handle: of `slimefsdp.weight_sync.buckets`; one of few, that come again.

        Raises:
            SyncError: the buffer is on another machine, or what came is not what was sent.
        """
        raise NotImplementedError

    def receive_disk(self, path: str) -> None:
        """Takes all weights of an update from a folder that `actors.workers.disk_update` wrote.

        Raises:
            SyncError: it is not there, not whole, or was altered.
        """
        raise NotImplementedError

    def commit(self, version: int) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Frees the device until `wake_up`; what is being sampled is aborted, and the weights have to be sent again.

        Idempotent. Who sends weights to an engine that sleeps is refused.
        """
        raise NotImplementedError

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        """Takes the device's memory again; idempotent.

        Args:
            tags: `weights`, into which new ones have to be sent before anything is sampled; `kv_cache`, which may come
                after them, when the sender has freed its own memory.
        """
        raise NotImplementedError

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Texts of responses without special tokens, stripped: what reward functions are given."""
        texts = self.tokenizer.batch_decode([list(tokens) for tokens in responses], skip_special_tokens=True)
        return [text.strip() for text in texts]


def check_sample(sample: Sample, requests: Sequence[Request], vocab_size: int, engine: int) -> None:
    """Looks at what an engine handed over, before anybody trains on it; one that was aborted may be of any length.

    Raises:
        EngineError: it cannot be a sample of these requests.
    """
    if not isinstance(sample, Sample) or not (is_whole(sample.request) and is_whole(sample.number)):
        raise _wrong(engine, f"{short_repr(sample)}, which is no sample")
    if not 0 <= sample.request < len(requests) or not 0 <= sample.number < requests[sample.request].samples:
        raise _wrong(engine, f"sample {sample.number} of request {sample.request}, which nobody asked for")
    tokens, log_probs = (_row(engine, sample, name) for name in ("tokens", "log_probs"))
    most = requests[sample.request].params.max_new_tokens
    if sample.finish_reason != "abort" and not 0 < len(tokens) <= most:
        raise _wrong(engine, f"a response of {len(tokens)} tokens, where 1 to {most} were asked for")
    if log_probs.shape != tokens.shape:
        raise _wrong(engine, f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    if len(tokens) and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab_size):
        raise _wrong(engine, f"tokens that are no whole numbers in its vocabulary of {vocab_size}")
    if len(tokens) and log_probs.dtype.kind not in "iuf":
        raise _wrong(engine, f"log-probs that are no numbers: {short_repr(sample.log_probs)}")
    if not np.all(log_probs <= _ROUNDING) or not np.all(log_probs >= np.finfo(np.float32).min):  # NaN is neither
        raise _wrong(engine, "log-probs that are not finite, or above 0")
    if sample.finish_reason not in get_args(FinishReason):
        raise _wrong(engine, f"finish_reason={short_repr(sample.finish_reason)}, not {get_args(FinishReason)}")
    if not isinstance(sample.text, str):
        raise _wrong(engine, f"{short_repr(sample.text)} in the place of a text")
    if not (isinstance(sample.versions, tuple | list) and all(map(_is_span, sample.versions))):
        raise _wrong(engine, f"versions={short_repr(sample.versions)}, not spans of whole numbers from 0")
    ends = [0, *(span.end for span in sample.versions)]
    if [span.start for span in sample.versions] != ends[:-1] or ends[-1] != len(tokens):
        raise _wrong(engine, f"the weights' versions of other tokens than its {len(tokens)}: {sample.versions}")


def is_info(value: Any) -> bool:
    """Whether it is an `EngineInfo` whose fields can be compared with the run."""
    return (
        isinstance(value, EngineInfo)
        and all(isinstance(text, str) for text in (value.name, value.dtype, value.group))
        and all(is_whole(number) and number > 0 for number in (value.vocab_size, value.processes))
        and (value.max_tokens is None or is_whole(value.max_tokens))
        and isinstance(value.transports, tuple | list)
        and all(isinstance(name, str) for name in value.transports)
        and len(value.transports) > 0
    )


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy; a truth value is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_span(span: Any) -> bool:
    """Whether it may be one, of some tokens."""
    if not isinstance(span, VersionSpan) or not all(map(is_whole, (span.version, span.start, span.end))):
        return False
    return span.version >= 0 and span.start <= span.end


def _row(engine: int, sample: Sample, name: str) -> np.ndarray:
    given = getattr(sample, name)
    try:
        found = np.asarray(given)
    except ValueError:  # of lists of several lengths
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise _wrong(engine, f"{name}={short_repr(given)}, not a list of numbers")
    return found


def _wrong(engine: int, what: str) -> EngineError:
    return EngineError(
        f"engine {engine} returned {what}", field="rollout.engine", hint="correct the engine", rank=engine
    )
