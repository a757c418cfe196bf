"""Samples as vLLM draws them: what is asked of it, and what its answers must be before anybody trains on them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from actors.rollout.protocol import Request
from slimefsdp.errors import BatchError, EngineError, StateError
from slimefsdp.sampling.params import FinishReason, SamplingParams, VersionSpan

_ROUNDING = 1e-5  # by which a log-prob may be above 0
_NO_NUMBER = -9999.0  # what vLLM writes for one that is not finite
_TEMPERATURES = (0.01, 2.0)  # beyond them vLLM refuses, or samples at another one without a word


@dataclass(slots=True)
class Drawn:
    """What has been drawn of one sample so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def add(self, piece: Drawn) -> None:
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


def check_request(request: Request, most_tokens: int) -> None:
    """Whether vLLM can do what is asked.

    Args:
        most_tokens: of a prompt and its response.

    Raises:
        EngineError: it has no log-probs of that kind, or no such temperature. BatchError: no prompt, no samples, or
            more tokens than fit.
    """
    params = request.params
    low, high = _TEMPERATURES
    if not params.greedy and not low <= params.temperature <= high:
        raise EngineError(
            f"rollout.temperature={params.temperature:g}: vLLM samples from {low:g} to {high:g}",
            field="rollout.temperature", hint="set one of these, or rollout.engine=embedded",
        )  # fmt: skip
    # a server gives log-probs of what it draws from (--logprobs-mode); of the likeliest token, of softmax(logits)
    if params.temperature != 1 and params.tempered == params.greedy:
        kind = "greedy tokens at a temperature" if params.greedy else "logits without the temperature they are drawn at"
        raise EngineError(
            f"rollout.temperature={params.temperature:g}: vLLM has no log-probs of {kind}",
            field="rollout.temperature",
            hint=f"ask for tempered={not params.tempered}, or set rollout.temperature=1 or rollout.engine=embedded",
        )
    if not request.prompt:
        raise BatchError("a prompt has no tokens", field="prompts", hint="give it some")
    if request.samples < 1:
        raise BatchError(f"{request.samples} samples of a prompt are asked for", field="samples", hint="raise it")
    if len(request.prompt) + params.max_new_tokens > most_tokens:
        raise BatchError(
            f"a prompt of {len(request.prompt)} tokens and max_new_tokens={params.max_new_tokens} are more than the "
            f"{most_tokens} that the server takes",
            field="max_new_tokens", hint="lower it, leave out long prompts, or raise --max-model-len",
        )  # fmt: skip


def seed_of(params: SamplingParams, number: int, drawn: int) -> int:
    """63 bits for what is drawn of sample `number` after its first `drawn` tokens."""
    digest = hashlib.blake2b(repr((tuple(params.seed), number, drawn)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def body_of(request: Request, number: int, drawn: Drawn, request_id: str) -> dict[str, Any]:
    """The JSON that asks for the rest of a sample."""
    params = request.params
    asked: dict[str, Any] = {
        "n": 1,
        "max_tokens": params.max_new_tokens - len(drawn.tokens),
        "temperature": 0.0 if params.greedy else params.temperature,
        "seed": seed_of(params, number, len(drawn.tokens)),
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # what ends a sample is said by the request, not by files on the server's side
        "stop_token_ids": sorted(params.end_token_ids),
        "detokenize": bool(params.stop),
    }
    if params.stop:
        asked |= {"stop": list(params.stop), "include_stop_str_in_output": True}
    return {"request_id": request_id, "token_ids": [*request.prompt, *drawn.tokens], "sampling_params": asked}


def read_answer(
    answer: Any, asked: dict[str, Any], *, vocab_size: int, versions: Collection[int]
) -> tuple[Drawn, FinishReason]:
    """What a server has drawn, and why it ended there: "stop", "length" or "abort".

    Args:
        asked: as `body_of` made it.
        versions: of weights that it may have drawn from.

    Raises:
        EngineError: the answer is not what was asked for. StateError: the logits were not finite.
    """
    params = asked["sampling_params"]
    try:
        (choice,) = answer["choices"]
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        content = choice["logprobs"]["content"] or []
        log_probs = [one["logprob"] for one in content]
        of_tokens = [one["token_id"] for one in content]
        spans = [(str(one["version"]), one["start"], one["end"]) for one in choice["weight_versions"] or []]
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(f"an answer without what belongs to a sample: {type(error).__name__}: {error}") from error
    if len(tokens) > params["max_tokens"]:
        raise _wrong(f"{len(tokens)} tokens where at most {params['max_tokens']} were asked for")
    if of_tokens != tokens:
        raise _wrong(f"{len(log_probs)} log-probs that do not belong to the {len(tokens)} tokens beside them")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise _wrong(f"token {token!r}, outside the vocabulary of {vocab_size}")
    for value in log_probs:
        if value == _NO_NUMBER:
            raise StateError(
                "the logits of the committed weights are not finite", field="update_weights", hint="look at the weights"
            )
        if not isinstance(value, float | int) or not math.isfinite(value) or value > _ROUNDING:
            raise _wrong(f"the log-prob {value!r}")
    ends_itself = bool(tokens) and (tokens[-1] in params["stop_token_ids"] or "stop" in params)
    if reason not in get_args(FinishReason) or (reason == "stop" and not ends_itself):
        raise _wrong(f"a sample that ended by {reason!r} after {len(tokens)} tokens, without an end that was asked for")
    if reason == "length" and len(tokens) != params["max_tokens"]:
        raise _wrong(f"a sample cut after {len(tokens)} tokens, not {params['max_tokens']}")
    return Drawn(tokens, log_probs, _versions(spans, len(tokens), versions)), reason


def length_with_stop(tokens: Sequence[int], first: int, params: SamplingParams, decode: Any) -> int | None:
    """How many tokens there are up to the first, from place `first` on, that completes a stop text; None: none does.

    A server that goes on with a sample sees only what it draws itself, and a stop text may have begun before.
    """
    tail = 4 * max(map(len, params.stop), default=0) + 4
    for length in range(first + 1, len(tokens) + 1):
        text = decode(list(tokens[max(0, length - tail) : length]))
        if any(stop in text for stop in params.stop):
            return length
    return None


def _versions(spans: Sequence[tuple[str, int, int]], length: int, known: Collection[int]) -> list[VersionSpan]:
    found, at = [], 0
    for version, start, end in spans:
        if start != at or not start < end or version not in map(str, known):
            raise _wrong(f"tokens {start} to {end} from weights {version!r}, where {sorted(known)} were committed")
        found.append(VersionSpan(int(version), start, end))
        at = end
    if at != length:
        raise _wrong(f"the weights' version for {at} of {length} tokens")
    return found


def _wrong(what: str) -> EngineError:
    return EngineError(
        f"the server returned {what}", field="engine", hint="use a supported release of vLLM, as docs/engines.md says"
    )
