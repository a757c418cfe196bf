"""Checks sampling requests and servers' answers, and holds the tokens of a sample so far."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from actors.engines.protocol import Request
from slimefsdp.errors import BatchError, EngineError, StateError, short_repr
from slimefsdp.sampling.params import FinishReason, SamplingParams, VersionSpan

_LOWEST = -3.4e38  # smallest log-prob, as in float32
_ROUNDING = 1e-5  # a log-prob may be above 0 by this much


@dataclass(slots=True)
class PartialSample:
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    # int16 [computed tokens, layers, experts of a token]; all tokens, prompt included, but the last
    experts: np.ndarray | None = None

    def add(self, piece: PartialSample) -> None:
        """Appends `piece`, the tokens that were drawn next."""
        shift = len(self.tokens)
        for version, start, end in piece.versions:
            before = self.versions[-1] if self.versions else None
            if before is not None and before.version == version:
                self.versions[-1] = VersionSpan(version, before.start, shift + end)
            else:
                self.versions.append(VersionSpan(version, shift + start, shift + end))
        self.tokens += piece.tokens
        self.log_probs += piece.log_probs
        if piece.experts is not None:  # a later piece has the experts of all tokens again, with newer weights
            known = piece.experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate([known, piece.experts[len(known) :]])

    def cut(self, length: int) -> None:
        """Removes all tokens after the first `length`."""
        if self.experts is not None:
            self.experts = self.experts[: len(self.experts) - len(self.tokens) + length]
        del self.tokens[length:], self.log_probs[length:]
        self.versions = [
            VersionSpan(version, start, min(end, length)) for version, start, end in self.versions if start < length
        ]


def check_request(
    request: Request, most_tokens: int, *, engine: str, temperatures: tuple[float, float], length_option: str
) -> None:
    """Checks that a server can answer a request.

    Args:
        most_tokens: limit on the tokens of a prompt and its response.
        engine: the name of the kind of server, for errors.
        temperatures: lowest and highest temperature that the server samples at.
        length_option: the server's command-line option for longer samples.

    Raises:
        EngineError: the server does not support the temperature, or has no log-probs of the requested kind.
        BatchError: the prompt is empty, no samples are requested, or there are too many tokens.
    """
    params = request.params
    low, high = temperatures
    if not params.greedy and not low <= params.temperature <= high:
        problem = f"rollout.temperature={params.temperature:g}: {engine} samples from {low:g} to {high:g}"
        hint = "set one of these, or rollout.engine=embedded"
        raise EngineError(problem, field="rollout.temperature", hint=hint)
    # Servers return log-probs of the distribution that they draw from; for greedy tokens this is softmax(logits).
    if params.temperature != 1 and params.tempered == params.greedy:
        kind = "greedy tokens at a temperature" if params.greedy else "logits without the temperature they are drawn at"
        problem = f"rollout.temperature={params.temperature:g}: {engine} has no log-probs of {kind}"
        hint = f"ask for tempered={not params.tempered}, or set rollout.temperature=1 or rollout.engine=embedded"
        raise EngineError(problem, field="rollout.temperature", hint=hint)
    if params.is_limited and not params.renormalized:
        limits = {"top_k": params.top_k is not None, "top_p": params.top_p < 1, "min_p": params.min_p > 0}
        name = next(name for name, is_set in limits.items() if is_set)
        problem = f"{name}={getattr(params, name)!r}: {engine} has no log-probs over all tokens with such a limit"
        hint = "leave it out, ask for renormalized=True, or set rollout.engine=embedded"
        raise EngineError(problem, field=name, hint=hint)
    if not request.prompt:
        raise BatchError("a prompt has no tokens", field="prompts", hint="give it some")
    if request.samples < 1:
        raise BatchError(f"{request.samples} samples of a prompt are requested", field="samples", hint="raise it")
    if len(request.prompt) + params.max_new_tokens > most_tokens:
        problem = f"a prompt of {len(request.prompt)} tokens and max_new_tokens={params.max_new_tokens} are more than "
        problem += f"the {most_tokens} that the server takes"
        hint = f"lower it, leave out long prompts, or raise {length_option}"
        raise BatchError(problem, field="max_new_tokens", hint=hint)


def limits_of(params: SamplingParams) -> dict[str, float]:
    """Returns top_k, top_p and min_p in the form of vLLM and SGLang."""
    return {"top_k": -1 if params.top_k is None else params.top_k, "top_p": params.top_p, "min_p": params.min_p}


def seed_of(params: SamplingParams, number: int, drawn: int) -> int:
    """Returns a seed of 63 bits for drawing the tokens of sample `number` after its first `drawn` tokens."""
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
    """Checks the tokens of a server's answer and returns them.

    Args:
        of_tokens: for each log-prob, the token to which it belongs.
        spans: (version, start, end) of consecutive tokens that were drawn with one version of the weights.
        most: limit on the number of tokens.
        versions: the versions of the weights with which the server may have drawn the tokens.
        no_number: the value that the server returns for a log-prob that is not finite; None means JSON's null.

    Raises:
        EngineError: the answer contradicts the request. StateError: the logits were not finite.
    """
    check_tokens(tokens, log_probs, of_tokens, most=most, vocab_size=vocab_size, no_number=no_number)
    return PartialSample(tokens, list(log_probs), _versions(spans, len(tokens), versions))


def checked_experts(experts: Any, computed: int, routed: tuple[int, int, int]) -> np.ndarray:
    """Checks the experts of a server's answer, and returns them as int16 [computed, layers, experts of a token].

    Args:
        computed: number of tokens that the server has computed.
        routed: numbers of layers, experts, and experts of a token (`ModelSpec.routed_experts`).

    Raises:
        EngineError: the experts are not those of this model and this number of tokens.
    """
    layers, count, of_token = routed
    if not isinstance(experts, np.ndarray) or experts.shape != (computed, layers, of_token):
        found = f"of shape {experts.shape}" if isinstance(experts, np.ndarray) else short_repr(experts)
        raise wrong(f"experts {found}, where {(computed, layers, of_token)} were asked for")
    if experts.dtype.kind not in "iu" or (experts.size and not 0 <= experts.min() <= experts.max() < count):
        raise wrong(f"experts that are no numbers below {count}")
    return experts.astype(np.int16)


def check_tokens(
    tokens: Any,
    log_probs: Sequence[Any],
    of_tokens: Sequence[Any],
    *,
    most: int,
    vocab_size: int,
    no_number: float | None,
) -> None:
    """Checks tokens and log-probs; arguments and errors as in `checked`."""
    if not isinstance(tokens, list):
        raise wrong(f"{short_repr(tokens)} instead of tokens")
    if len(tokens) > most:
        raise wrong(f"{len(tokens)} tokens where at most {most} were asked for")
    if list(of_tokens) != tokens:
        raise wrong(f"{len(log_probs)} log-probs that do not belong to its {len(tokens)} tokens")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise wrong(f"token {token!r}, outside the vocabulary of {vocab_size}")
    for value in log_probs:
        if value == no_number:
            raise not_finite()
        if type(value) not in (float, int) or not _LOWEST <= value <= _ROUNDING:  # NaN is not in the range
            raise wrong(f"the log-prob {short_repr(value)}")


def check_end(reason: Any, tokens: Sequence[int], most: int, *, ends_itself: bool) -> FinishReason:
    """Checks the reason for which a server ended a sample, and returns it.

    Args:
        ends_itself: whether the last tokens may be an end token or stop text of the request.

    Raises:
        EngineError: the tokens contradict the reason; "length" requires exactly `most` tokens.
    """
    if reason not in get_args(FinishReason) or (reason == "stop" and not ends_itself):
        raise wrong(f"a sample that ended by {reason!r} after {len(tokens)} tokens, without an end that was asked for")
    if reason == "length" and len(tokens) != most:
        raise wrong(f"a sample cut after {len(tokens)} tokens, not {most}")
    finish_reason: FinishReason = reason
    return finish_reason


def length_with_stop(tokens: Sequence[int], first: int, params: SamplingParams, decode: Any) -> int | None:
    """Returns the number of tokens up to the first token that completes a stop text; None means that no token does.

    Only tokens from index `first` on are tested. A stop text may begin before them, in tokens that a server that
    continues a sample does not search.
    """
    tail = 4 * max(map(len, params.stop), default=0) + 4
    for length in range(first + 1, len(tokens) + 1):
        text = decode(list(tokens[max(0, length - tail) : length]))
        if any(stop in text for stop in params.stop):
            return length
    return None


def wrong(what: str) -> EngineError:
    return EngineError(
        f"the server returned {what}", field="engine", hint="use a supported release, as docs/engines.md says"
    )


def not_finite() -> StateError:
    return StateError(
        "the logits of the committed weights are not finite", field="update_weights", hint="look at the weights"
    )


def _versions(spans: Sequence[tuple[str, int, int]], length: int, known: Collection[int]) -> list[VersionSpan]:
    versions, covered = [], 0
    for version, start, end in spans:
        is_range = type(start) is type(end) is int and covered == start < end
        if not is_range or version not in map(str, known):
            raise wrong(f"tokens {start} to {end} from weights {version!r}, where {sorted(known)} were committed")
        versions.append(VersionSpan(int(version), start, end))
        covered = end
    if covered != length:
        raise wrong(f"the weights' version for {covered} of {length} tokens")
    return versions
