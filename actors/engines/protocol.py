"""Defines the interface of rollout engines: requests, samples, and new weights.

An engine is a Ray actor of a subclass of `Engine`. `rollout.engine` names an engine of the project, or a user's class
as `module:Class`. Importing this file does not import torch.
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

if TYPE_CHECKING:
    from slimefsdp.weight_sync.broadcast import Rendezvous

_ROUNDING = 1e-5  # a log-prob may be above 0 by this much
_STREAMS_KEPT = 1000  # limit on the remembered names of ended streams; a stream may be ended before it begins

EngineTag = Literal["weights", "kv_cache"]
ENGINE_TAGS: tuple[EngineTag, ...] = ("weights", "kv_cache")
"""Kinds of memory that an engine takes on its device. The embedded engine takes cache memory only while it samples."""
GroupKind = Literal["slimefsdp", "torch"]
"""The code by which an engine's processes join a broadcast group: our `BroadcastGroup`, or torch.distributed itself."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for samples of one prompt.

    `params.seed` and a sample's number determine the draws of this sample, so each request of a run has its own seed.
    """

    prompt: Sequence[int]  # token ids
    samples: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a response; `log_probs[i]` belongs to `tokens[i]`, also for an end token."""

    request: int  # index of the sample's request in the call of `generate`
    number: int  # index of this sample among the samples of the request
    tokens: list[int]  # of the response, without the prompt
    log_probs: list[float]  # [tokens]; `tempered` and `renormalized` of the request's params define the distribution
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # consecutive spans that cover all tokens
    text: str  # the response without special tokens, stripped
    # int16 [prompt + tokens - 1, layers, experts of a token], the experts that computed each token; needed under
    # loss.routing_replay=rollout
    routed_experts: np.ndarray | None = None


class TensorInfo(NamedTuple):
    name: str  # as in the Hugging Face folder
    dtype: str  # such as "float32"
    shape: tuple[int, ...]


class EngineInfo(NamedTuple):
    """Describes an engine; the engine's pool reads this before it uses the engine."""

    name: str  # such as "vllm 0.32.0"
    vocab_size: int  # of the engine's model
    dtype: str  # of the engine's weights, such as "float32"
    max_tokens: int | None  # limit on the tokens of a prompt and its response; None means that memory is the limit
    transports: tuple[Transport, ...]  # supported transports of weights, the best first
    processes: int = 1  # number of processes that join a broadcast group
    group: GroupKind = "slimefsdp"


class Engine(Watched):
    """The base class of engines, which are Ray actors.

    `generate`, `abort` and an update of the weights run at the same time, in different threads. An update calls
    `begin`, then the transport's method for each bucket (`receive`, `receive_broadcast` or `receive_ipc`; the transport
    `disk` instead calls `receive_disk` once), then `commit`. Between `begin` and `commit` nothing is sampled. Running
    samples continue after `commit`; their prompts and earlier tokens are then computed again with the new weights.
    `index` is the index of this engine, below `rollout.engines`.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 2, "generate": 16}
    _ended_streams: ClassVar[deque[str]] = deque(maxlen=_STREAMS_KEPT)  # not shared, as a process has only one engine

    def __init__(self, config: RunConfig, index: int) -> None:
        self.config = config
        self.index = index
        self.tokenizer = load_tokenizer(str(config.model.path))
        self._end_token_ids = frozenset(end_token_ids(str(config.model.path), self.tokenizer.eos_token_id))

    def info(self) -> EngineInfo:
        """Waits until the engine is ready for weights, and returns its properties.

        Raises:
            EngineError: the run cannot use the engine.
        """
        raise NotImplementedError

    def health(self) -> None:
        """Returns normally if the engine works.

        Raises:
            WorkerDied, WorkerHung: a process that the engine needs has ended, or does not answer.
        """

    def end_token_ids(self) -> frozenset[int]:
        """Returns the tokens that end a response, which the tokenizer and generation_config.json name."""
        return self._end_token_ids

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Returns the token ids of texts or lists of chat messages; raises the errors of `encode_prompt`."""
        return [encode_prompt(self.tokenizer, prompt, self.config.data.chat_template_kwargs) for prompt in prompts]

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        """Returns the token ids of an environment's observations; raises the errors of `encode_observation`."""
        kwargs = self.config.data.chat_template_kwargs
        return [encode_observation(self.tokenizer, observation, kwargs) for observation in observations]

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """Yields lists of ended samples, in any order; each sample of each request is yielded once.

        Raises:
            StateError: no weights are committed, or the committed weights give logits that are not finite.
            EngineError: the engine cannot do what a request needs, or failed.
        """
        raise NotImplementedError

    @ray.method(num_returns="streaming", concurrency_group="generate")
    def stream(self, name: str, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        """Runs `generate` as a stream with a unique `name`, by which `end_stream` can end the stream early.

        `ray.cancel` is not used, since cancelling a call that has not left the caller's process delays all later calls
        for 30 s or more, and then loses them (Ray 2.60).
        """
        if name in self._ended_streams:
            return
        for samples in self.generate(requests):
            yield samples
            if name in self._ended_streams:
                return

    @ray.method(concurrency_group="control")
    def end_stream(self, name: str) -> None:
        """Ends a stream at its next yield; a stream that has not begun ends when it begins."""
        self._ended_streams.append(name)

    def abort(self) -> None:
        """Ends all running and waiting samples with the tokens drawn so far, and `finish_reason` "abort"."""
        raise NotImplementedError

    def has_frozen(self, source: str) -> bool:
        """Returns whether a committed update has brought the frozen weights that `source` identifies.

        Called before `begin`. If every engine returns True, the update does not send these weights again.
        """
        return False

    def begin(self, version: int, manifest: Manifest) -> None:
        """Begins an update to `version`; `manifest` has the names and full shapes of all weights.

        If `has_frozen` may return True, this method needs a third parameter: the names of weights that are not sent
        again. In an engine with adapters, this method needs a fourth parameter: the adapters' scale.
        """
        raise NotImplementedError

    def receive(self, bucket: Any) -> None:
        """Receives a bucket from the object store."""
        raise NotImplementedError

    def join(self, meeting: Rendezvous) -> None:
        """Leaves the earlier broadcast group, joins the new group of rank 0, and waits until all members have joined.

        Raises:
            SyncError: other members did not join.
        """
        raise NotImplementedError

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """Receives a bucket that rank 0 broadcasts now as one tensor of bytes.

        Args:
            digest: the sha256 of these bytes; None means that the bytes are not checked.

        Raises:
            SyncError: the bytes were altered in transit, or the group broke. If the group broke, the error's
                `is_of_group` is True, since any member of the group may be the cause.
        """
        raise NotImplementedError

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        """Receives a bucket from the beginning of a shared buffer. Afterwards the sender may reuse the buffer.

        Args:
            handle: identifies the buffer (`slimefsdp.weight_sync.buckets`); a sender alternates between two buffers.
            digest: as in `receive_broadcast`.

        Raises:
            SyncError: the buffer is on another machine, or its bytes were altered.
        """
        raise NotImplementedError

    def receive_disk(self, path: str) -> None:
        """Receives all weights of an update from a folder that `actors.workers.disk_update` wrote.

        Raises:
            SyncError: the folder does not exist, is incomplete, or was altered.
        """
        raise NotImplementedError

    def commit(self, version: int) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Aborts all samples, drops the weights and frees the device until `wake_up`. Idempotent.

        An engine that sleeps refuses updates.
        """
        raise NotImplementedError

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        """Takes the device's memory again; idempotent.

        Args:
            tags: the kinds of memory. After `weights`, an update must follow before the engine samples. `kv_cache` may
                be taken after the new weights have arrived, when the sender has freed its own memory.
        """
        raise NotImplementedError

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Returns the texts of responses without special tokens, stripped, as reward functions get them."""
        texts = self.tokenizer.batch_decode([list(tokens) for tokens in responses], skip_special_tokens=True)
        return [text.strip() for text in texts]


def check_sample(
    sample: Sample, requests: Sequence[Request], vocab_size: int, engine: int, *, has_experts: bool = False
) -> None:
    """Raises an EngineError if `sample`, which an engine returned, cannot be a sample of these requests.

    An aborted sample may have any number of tokens up to the request's limit.

    Args:
        has_experts: whether a sample with tokens needs `routed_experts`.
    """
    if not isinstance(sample, Sample) or not (is_whole(sample.request) and is_whole(sample.number)):
        raise _wrong(engine, f"{short_repr(sample)}, which is not a Sample")
    if not 0 <= sample.request < len(requests) or not 0 <= sample.number < requests[sample.request].samples:
        raise _wrong(engine, f"sample {sample.number} of request {sample.request}, which was not requested")
    tokens, log_probs = (_row(engine, sample, name) for name in ("tokens", "log_probs"))
    most = requests[sample.request].params.max_new_tokens
    if sample.finish_reason != "abort" and not 0 < len(tokens) <= most:
        raise _wrong(engine, f"a response of {len(tokens)} tokens, where 1 to {most} were asked for")
    if log_probs.shape != tokens.shape:
        raise _wrong(engine, f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    if len(tokens) and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab_size):
        raise _wrong(engine, f"tokens that are not integers in its vocabulary of {vocab_size}")
    if len(tokens) and log_probs.dtype.kind not in "iuf":
        raise _wrong(engine, f"log-probs that are not numbers: {short_repr(sample.log_probs)}")
    if not np.all(log_probs <= _ROUNDING) or not np.all(log_probs >= np.finfo(np.float32).min):  # NaN is neither
        raise _wrong(engine, "log-probs that are not finite, or above 0")
    if sample.finish_reason not in get_args(FinishReason):
        raise _wrong(engine, f"finish_reason={short_repr(sample.finish_reason)}, not {get_args(FinishReason)}")
    if not isinstance(sample.text, str):
        raise _wrong(engine, f"{short_repr(sample.text)} instead of a text")
    if not (isinstance(sample.versions, tuple | list) and all(map(_is_span, sample.versions))):
        raise _wrong(engine, f"versions={short_repr(sample.versions)}, not spans of whole numbers from 0")
    experts, computed = sample.routed_experts, len(requests[sample.request].prompt) + len(tokens) - 1
    shape = () if experts is None else np.shape(experts)
    if has_experts and len(tokens) and (len(shape) != 3 or shape[0] != computed):
        found = "no experts" if experts is None else f"experts of shape {shape}"
        raise _wrong(engine, f"{found} for the {computed} tokens that it computed")
    ends = [0, *(span.end for span in sample.versions)]
    if [span.start for span in sample.versions] != ends[:-1] or ends[-1] != len(tokens):
        raise _wrong(engine, f"the weights' versions of other tokens than its {len(tokens)}: {sample.versions}")


def is_info(value: Any) -> bool:
    """Returns whether a value is an `EngineInfo` with fields of the right types."""
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
    """Returns whether a value is an integer of Python or numpy, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_span(span: Any) -> bool:
    if not isinstance(span, VersionSpan) or not all(map(is_whole, (span.version, span.start, span.end))):
        return False
    return span.version >= 0 and span.start <= span.end


def _row(engine: int, sample: Sample, name: str) -> np.ndarray:
    value = getattr(sample, name)
    try:
        row = np.asarray(value)
    except ValueError:  # ragged lists
        row = np.empty((0, 0))
    if row.ndim != 1:
        raise _wrong(engine, f"{name}={short_repr(value)}, not a list of numbers")
    return row


def _wrong(engine: int, what: str) -> EngineError:
    return EngineError(
        f"engine {engine} returned {what}", field="rollout.engine", hint="correct the engine", rank=engine
    )
