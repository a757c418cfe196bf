"""Samples as SGLang draws them: what is asked of it, and how its answers are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from actors.engines import served_samples
from actors.engines.protocol import Request
from actors.engines.served_samples import PartialSample, check_end, checked, limits_of, not_finite, seed_of, wrong
from slimefsdp.config.rollout import TEMPERATURES
from slimefsdp.sampling.params import FinishReason

_NO_TOKEN = "NaN happened"  # what matched where a token is outside the vocabulary; SGLang puts an end token there


def check_request(request: Request, most_tokens: int) -> None:
    """As `served_samples.check_request`; log-probs are of what SGLang draws from by its own default."""
    served_samples.check_request(
        request, most_tokens, engine="SGLang", temperatures=TEMPERATURES["sglang"], length_option="--context-length"
    )


def body_of(request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
    """The JSON that asks for the rest of a sample.

    SGLang's ignore_eos is about stop_token_ids too. Where there are some, it ends at the end tokens of its own files
    besides; `read_answer` knows which were asked for.
    """
    params = request.params
    asked: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens - len(drawn.tokens),
        "temperature": 0.0 if params.greedy else params.temperature,
        **limits_of(params),
        "ignore_eos": not params.end_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": seed_of(params, number, len(drawn.tokens)),  # looked at by deterministic servers alone
    }
    if params.end_token_ids:
        asked["stop_token_ids"] = sorted(params.end_token_ids)
    if params.stop:
        asked["stop"] = list(params.stop)
    return {
        "rid": request_id,
        "input_ids": [*request.prompt, *drawn.tokens],
        "sampling_params": asked,
        "return_logprob": True,
        "logprob_start_len": -1,  # of what is drawn alone
        "stream": False,
    }


def read_answer(
    answer: Any, body: dict[str, Any], *, vocab_size: int, versions: Collection[int]
) -> tuple[PartialSample, FinishReason | None]:
    """What a server has drawn, and why it ended there; None: at an end that was not asked for.

    Args:
        body: as `body_of` made it.
        versions: of weights that it may have drawn from.

    Raises:
        EngineError: the answer is not what was asked for. StateError: the logits were not finite.
    """
    params = body["sampling_params"]
    try:
        tokens, meta = list(answer["output_ids"]), answer["meta_info"]
        reason, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
        pairs = [(one[0], one[1]) for one in meta["output_token_logprobs"]]
        spans = [(str(one["version"]), one["start"], one["end"]) for one in meta["weight_versions"] if tokens]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise wrong(f"an answer without what belongs to a sample: {type(error).__name__}: {error}") from error
    if matched == _NO_TOKEN:
        raise not_finite()
    most = params["max_new_tokens"]
    drawn = checked(
        tokens, [value for value, _ in pairs], [token for _, token in pairs], spans,
        most=most, vocab_size=vocab_size, versions=versions, no_number=None,
    )  # fmt: skip
    is_end = bool(tokens) and tokens[-1] in params.get("stop_token_ids", ())
    if reason == "stop" and tokens and type(matched) is int and matched == tokens[-1] and not is_end:
        if params["ignore_eos"]:
            raise wrong(f"a sample that ended by token {matched}, without an end that was asked for")
        return drawn, "length" if len(tokens) == most else None
    return drawn, check_end(reason, tokens, most, ends_itself=bool(tokens) and (is_end or "stop" in params))
