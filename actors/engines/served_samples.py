"""What servers draw: what is there of a sample so far, and what an answer must be before anybody trains on it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from actors.engines.protocol import Request
from slimefsdp.errors import BatchError, EngineError, StateError, short_repr
from slimefsdp.sampling.params import FinishReason, SamplingParams, VersionSpan

_LOWEST = -3.4e38  # a log-prob that float32 holds
_ROUNDING = 1e-5  # by which a log-prob may be above 0


@dataclass(slots=True)
class PartialSample:
    """Holds the tokens of a sample that were drawn so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def add(self, piece: PartialSample) -> None:
        """Appends what was drawn later."""
        shift = len(self.tokens)
        for version, start, end in piece.versions:
            before = self.versions[-1] if self.versions else None
            if before is not None and before.version == version:
                self.versions[-1] = VersionSpan(version, before.start, shift + end)
            else:
                self.versions.append(VersionSpan(version, shift + start, shift + end))
        self.tokens += piece.tokens
        self.log_probs += piece.log_probs

    def cut(self, length: int) -> None:
        """Leaves the first `length` tokens."""
        del self.tokens[length:], self.log_probs[length:]
        self.versions = [
            VersionSpan(version, start, min(end, length)) for version, start, end in self.versions if start < length
        ]


def check_request(
    request: Request, most_tokens: int, *, engine: str, temperatures: tuple[float, float], length_option: str
) -> None:
    """Whether a server can do what is asked.

    Args:
        most_tokens: of a prompt and its response.
        engine: its name.
        temperatures: the lowest and the highest that it samples at.
        length_option: with which a server that takes longer ones is started.

    Raises:
        EngineError: it has no log-probs of that kind, or no such temperature. BatchError: no prompt, no samples, or
            more tokens than fit.
    """
    params = request.params
    low, high = temperatures
    if not params.greedy and not low <= params.temperature <= high:
        raise EngineError(
            f"rollout.temperature={params.temperature:g}: {engine} samples from {low:g} to {high:g}",
            field="rollout.temperature", hint="set one of these, or rollout.engine=embedded",
        )  # fmt: skip
    # a server gives log-probs of what it draws from; of the likeliest token, of softmax(logits)
    if params.temperature != 1 and params.tempered == params.greedy:
        kind = "greedy tokens at a temperature" if params.greedy else "logits without the temperature they are drawn at"
        raise EngineError(
            f"rollout.temperature={params.temperature:g}: {engine} has no log-probs of {kind}",
            field="rollout.temperature",
            hint=f"ask for tempered={not params.tempered}, or set rollout.temperature=1 or rollout.engine=embedded",
        )
    if params.is_limited and not params.renormalized:
        given = {"top_k": params.top_k is not None, "top_p": params.top_p < 1, "min_p": params.min_p > 0}
        name = next(name for name, is_given in given.items() if is_given)
        raise EngineError(
            f"{name}={getattr(params, name)!r}: of samples with such a limit {engine} has no log-probs over all tokens",
            field=name,
            hint="leave it out, ask for renormalized=True, or set rollout.engine=embedded",
        )
    if not request.prompt:
        raise BatchError("a prompt has no tokens", field="prompts", hint="give it some")
    if request.samples < 1:
        raise BatchError(f"{request.samples} samples of a prompt are asked for", field="samples", hint="raise it")
    if len(request.prompt) + params.max_new_tokens > most_tokens:
        raise BatchError(
            f"a prompt of {len(request.prompt)} tokens and max_new_tokens={params.max_new_tokens} are more than the "
            f"{most_tokens} that the server takes",
            field="max_new_tokens", hint=f"lower it, leave out long prompts, or raise {length_option}",
        )  # fmt: skip


def limits_of(params: SamplingParams) -> dict[str, float]:
    """Returns which tokens are drawn from, as vLLM and SGLang are asked."""
    return {"top_k": -1 if params.top_k is None else params.top_k, "top_p": params.top_p, "min_p": params.min_p}


def seed_of(params: SamplingParams, number: int, drawn: int) -> int:
    """63 bits for what is drawn of sample `number` after its first `drawn` tokens."""
    digest = hashlib.blake2b(repr((tuple(params.seed), number, drawn)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def checked(
    tokens: list[int],
    log_probs: Sequence[Any],
    of_tokens: Sequence[Any],
    spans: Sequence[tuple[str, int, int]],
    *,
    most: int,
    vocab_size: int,
    versions: Collection[int],
    no_number: float | None,
) -> PartialSample:
    """Returns what a server says it has drawn.

    Args:
        of_tokens: which token each of the log-probs is of.
        spans: version, start and end of the tokens of each version of the weights.
        most: so many tokens were asked for.
        versions: of weights that it may have drawn from.
        no_number: what the server writes for a log-prob that is not finite.

    Raises:
        EngineError: it cannot be. StateError: the logits were not finite.
    """
    check_tokens(tokens, log_probs, of_tokens, most=most, vocab_size=vocab_size, no_number=no_number)
    return PartialSample(tokens, list(log_probs), _versions(spans, len(tokens), versions))


def check_tokens(
    tokens: Any,
    log_probs: Sequence[Any],
    of_tokens: Sequence[Any],
    *,
    most: int,
    vocab_size: int,
    no_number: float | None,
) -> None:
    """Checks what a server has drawn whose weights are those that it was started with.

    Raises:
        EngineError, StateError: as `checked`.
    """
    if not isinstance(tokens, list):
        raise wrong(f"{short_repr(tokens)} in the place of tokens")
    if len(tokens) > most:
        raise wrong(f"{len(tokens)} tokens where at most {most} were asked for")
    if list(of_tokens) != tokens:
        raise wrong(f"{len(log_probs)} log-probs that do not belong to the {len(tokens)} tokens beside them")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise wrong(f"token {token!r}, outside the vocabulary of {vocab_size}")
    for value in log_probs:
        if value == no_number:
            raise not_finite()
        if type(value) not in (float, int) or not _LOWEST <= value <= _ROUNDING:  # NaN is not either
            raise wrong(f"the log-prob {short_repr(value)}")


def check_end(reason: Any, tokens: Sequence[int], most: int, *, ends_itself: bool) -> FinishReason:
    """The reason for which a sample ended, which must be one that was asked for.

    Args:
        ends_itself: its last tokens may be an end that was asked for.

    Raises:
        EngineError: they are not, or it was cut elsewhere than after `most` tokens.
    """
    if reason not in get_args(FinishReason) or (reason == "stop" and not ends_itself):
        raise wrong(f"a sample that ended by {reason!r} after {len(tokens)} tokens, without an end that was asked for")
    if reason == "length" and len(tokens) != most:
        raise wrong(f"a sample cut after {len(tokens)} tokens, not {most}")
    found: FinishReason = reason
    return found


def length_with_stop(tokens: Sequence[int], first: int, params: SamplingParams, decode: Any) -> int | None:
    """Returns the number of tokens up to the one, from index `first` on, that completes a stop text, or None.

    A server that goes on with a sample sees only what it draws itself, and a stop text may have begun before.
    """
    tail = 4 * max(map(len, params.stop), default=0) + 4
    for length in range(first + 1, len(tokens) + 1):
        text = decode(list(tokens[max(0, length - tail) : length]))
        if any(stop in text for stop in params.stop):
            return length
    return None


def wrong(what: str) -> EngineError:
    """The error of an answer that is not what was asked for."""
    return EngineError(
        f"the server returned {what}", field="engine", hint="use a supported release, as docs/engines.md says"
    )


def not_finite() -> StateError:
    """The error of logits that are no numbers."""
    return StateError(
        "the logits of the committed weights are not finite", field="update_weights", hint="look at the weights"
    )


def _versions(spans: Sequence[tuple[str, int, int]], length: int, known: Collection[int]) -> list[VersionSpan]:
    found, at = [], 0
    for version, start, end in spans:
        if (
            type(start) is not int
            or type(end) is not int
            or start != at
            or not start < end
            or version not in map(str, known)
        ):
            raise wrong(f"tokens {start} to {end} from weights {version!r}, where {sorted(known)} were committed")
        found.append(VersionSpan(int(version), start, end))
        at = end
    if at != length:
        raise wrong(f"the weights' version for {at} of {length} tokens")
    return found
