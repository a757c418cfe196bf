"""Samples as vLLM draws them: what is asked of it, and how its answers are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from actors.engines import served_samples
from actors.engines.protocol import Request
from actors.engines.served_samples import PartialSample, check_end, checked, limits_of, seed_of, wrong
from slimefsdp.config.rollout import TEMPERATURES
from slimefsdp.sampling.params import FinishReason

_NO_NUMBER = -9999.0  # what vLLM writes for a log-prob that is not finite


def check_request(request: Request, most_tokens: int) -> None:
    """As `served_samples.check_request`; log-probs are of what vLLM draws from by --logprobs-mode."""
    served_samples.check_request(
        request, most_tokens, engine="vLLM", temperatures=TEMPERATURES["vllm"], length_option="--max-model-len"
    )


def body_of(request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
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
    if params.is_limited:
        asked |= limits_of(params)
    if params.stop:
        asked |= {"stop": list(params.stop), "include_stop_str_in_output": True}
    return {"request_id": request_id, "token_ids": [*request.prompt, *drawn.tokens], "sampling_params": asked}


def read_answer(
    answer: Any, asked: dict[str, Any], *, vocab_size: int, versions: Collection[int]
) -> tuple[PartialSample, FinishReason]:
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
        raise wrong(f"an answer without what belongs to a sample: {type(error).__name__}: {error}") from error
    most = params["max_tokens"]
    drawn = checked(
        tokens, log_probs, of_tokens, spans, most=most, vocab_size=vocab_size, versions=versions, no_number=_NO_NUMBER
    )
    ends_itself = bool(tokens) and (tokens[-1] in params["stop_token_ids"] or "stop" in params)
    return drawn, check_end(reason, tokens, most, ends_itself=ends_itself)
