"""Converts a client's sampling request for the engine, and the engine's answer for the client."""

from __future__ import annotations

import secrets

import numpy as np

from actors.service import tinker_pb2, wire
from slimefsdp.errors import BatchError
from slimefsdp.sampling.params import SampleAnswer, SampleRequest

_BOUNDS = "batch.max_tokens_per_rank of the server and the model's positions bound both together"
_NO_LOG_PROB = -99999.0  # with token 0, it marks a position without top tokens


def sample_request(
    body: wire.Sample, version: str | None, end_token_ids: frozenset[int], most_tokens: int
) -> SampleRequest:
    """Returns the engine's form of a sampling request.

    Args:
        version: the weights to sample from; None: the base model.
        end_token_ids: the model's end tokens, used if the client names no stop.
        most_tokens: limit on the tokens of a prompt with its response.

    Raises:
        BatchError: a value cannot be served; the message names it.
    """
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise BatchError(f"a chunk of {chunk.type}", field="prompt", hint="send encoded_text alone")
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    left = most_tokens - len(prompt)
    if left < 1:
        problem = f"a prompt of {len(prompt)} tokens, and this server reads at most {most_tokens - 1}"
        raise BatchError(problem, field="prompt", hint=f"cut it: {_BOUNDS}")
    params = body.params(end_token_ids, left, secrets.randbits(62))
    if params.max_new_tokens > left:
        problem = f"max_tokens={params.max_new_tokens} behind {len(prompt)} tokens, and there is room for {left}"
        hint = f"lower it: {_BOUNDS}"
        raise BatchError(problem, field="max_tokens", hint=hint)
    top_k = body.topk_prompt_logprobs
    return SampleRequest(version, prompt, body.num_samples, params, bool(body.prompt_logprobs or top_k), top_k)


def response_of(answer: SampleAnswer, last_n: int | None) -> bytes:
    """Returns the serialised SampleResponse of an answer.

    Args:
        last_n: number of last prompt tokens whose log-probs are wanted; None: all.
    """
    response = tinker_pb2.SampleResponse()
    if answer.prompt_log_probs is not None:
        values = np.array(answer.prompt_log_probs, "<f4")
        if last_n is not None:
            values[: max(0, values.size - last_n)] = np.nan
        response.prompt_logprobs = values.tobytes()
    if (top := answer.prompt_top_tokens) is not None:
        # the first token has no log-probs, and neither have tokens that were not asked for
        nothing = max(1, 0 if last_n is None else len(top.tokens) + 1 - last_n)
        k = top.tokens.shape[1]
        tokens = np.concatenate([np.zeros((nothing, k)), top.tokens[nothing - 1 :]]).astype("<i4")
        log_probs = np.concatenate([np.full((nothing, k), _NO_LOG_PROB), top.log_probs[nothing - 1 :]]).astype("<f4")
        response.topk_prompt_logprobs.CopyFrom(
            tinker_pb2.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=log_probs.tobytes(), k=k, length=len(tokens))
        )
    for sample in answer.samples:
        was_cut = sample.finish_reason == "length"
        response.sequences.add(
            stop_reason=tinker_pb2.STOP_REASON_LENGTH if was_cut else tinker_pb2.STOP_REASON_STOP,
            tokens=np.array(sample.tokens, "<i4").tobytes(),
            logprobs=np.array(sample.log_probs, "<f4").tobytes(),
        )
    return bytes(response.SerializeToString())
