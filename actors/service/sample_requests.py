"""A request to sample, from the wire to what the engine is asked for, and the engine's answer back."""

from __future__ import annotations

import secrets

import numpy as np

from actors.service import schema, wire
from slimefsdp.errors import BatchError
from slimefsdp.sampling.requests import SampleAnswer, SampleRequest


def sample_request(
    body: wire.Sample, version: str | None, end_token_ids: frozenset[int], most_tokens: int
) -> SampleRequest:
    """What the engine is asked for.

    Args:
        version: to sample from; None: the base.
        end_token_ids: of the model, where the client names no stop.
        most_tokens: of a prompt with its response.

    Raises:
        BatchError: naming what cannot be served.
    """
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise BatchError(f"a chunk of {chunk.type}", field="prompt", hint="send encoded_text alone")
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    left = most_tokens - len(prompt)
    if left < 1:
        problem = f"a prompt of {len(prompt)} tokens, and this server reads at most {most_tokens - 1}"
        raise BatchError(problem, field="prompt", hint="cut it, or raise batch.max_tokens_per_rank of the server")
    params = body.params(end_token_ids, left, secrets.randbits(62))
    if params.max_new_tokens > left:
        problem = f"max_tokens={params.max_new_tokens} behind {len(prompt)} tokens, and there is room for {left}"
        hint = "lower it, or raise batch.max_tokens_per_rank of the server"
        raise BatchError(problem, field="max_tokens", hint=hint)
    return SampleRequest(version, prompt, body.num_samples, params, bool(body.prompt_logprobs))


def response_of(answer: SampleAnswer, last_n: int | None) -> bytes:
    """The SampleResponse of an answer.

    Args:
        last_n: of how many of the last prompt tokens log-probs are wanted; None: of all.
    """
    response = schema.SampleResponse()
    if answer.prompt_log_probs is not None:
        values = np.array(answer.prompt_log_probs, "<f4")
        if last_n is not None:
            values[: max(0, values.size - last_n)] = np.nan
        response.prompt_logprobs = values.tobytes()
    for sample in answer.samples:
        response.sequences.add(
            stop_reason=schema.STOP_REASON_LENGTH if sample.finish_reason == "length" else schema.STOP_REASON_STOP,
            tokens=np.array(sample.tokens, "<i4").tobytes(),
            logprobs=np.array(sample.log_probs, "<f4").tobytes(),
        )
    return bytes(response.SerializeToString())
