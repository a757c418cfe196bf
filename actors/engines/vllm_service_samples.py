"""What a service asks a server of vLLM for, and how its answers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from actors.engines.served_samples import check_end, check_tokens, length_with_stop, not_finite, seed_of, wrong
from actors.engines.vllm_facts import SamplingFacts
from slimefsdp.config.rollout import TEMPERATURES
from slimefsdp.errors import BatchError
from slimefsdp.sampling.params import SamplingParams
from slimefsdp.sampling.requests import SampledTokens, SampleRequest, TopTokens

Decode = Callable[[list[int]], str]
_NO_NUMBER = -9999.0  # what vLLM writes for a log-prob that is not finite


def check_request(request: SampleRequest, *, vocab_size: int, facts: SamplingFacts, most_samples: int) -> None:
    """Whether vLLM answers a request as it is asked.

    Args:
        facts: of the server.

    Raises:
        BatchError: naming what it does not.
    """
    params, prompt = request.params, request.prompt
    low, high = TEMPERATURES["vllm"]
    least = 0 if request.prompt_log_probs else 1
    outside = next((place for place, token in enumerate(prompt) if not 0 <= token < vocab_size), None)
    others = "or have the service sample by rollout.engine=embedded"
    problem: tuple[str, str, str] | None = None
    if not least <= request.num_samples <= most_samples:
        must = f"it must be from 1 to {most_samples}, or 0 with prompt_log_probs"
        problem = "num_samples", f"num_samples={request.num_samples}; {must}", "ask for as many in several requests"
    elif not len(prompt):
        problem = "prompt", "the prompt has no tokens", "give it some"
    elif outside is not None:
        found = f"token {outside} of the prompt is {prompt[outside]}, and the vocabulary has {vocab_size}"
        problem = "prompt", found, "encode it with the model's tokenizer"
    elif len(prompt) + params.max_new_tokens > facts.max_model_len:
        both = f"a prompt of {len(prompt)} tokens and max_new_tokens={params.max_new_tokens}"
        problem = "max_new_tokens", f"{both} are more than the {facts.max_model_len} that vLLM takes", "lower it"
    elif not params.greedy and not low <= params.temperature <= high:
        given = f"temperature={params.temperature:g}: vLLM samples from {low:g} to {high:g}"
        problem = "temperature", given, f"choose one of these, {others}"
    elif params.tempered:
        problem = "tempered", "vLLM is asked for log-probs at temperature 1 alone", "set tempered=False"
    elif not 0 <= request.prompt_top_k <= (most_top := min(facts.prompt_top_k, vocab_size)) or (
        request.prompt_top_k and not request.prompt_log_probs
    ):
        of = f"prompt_top_k={request.prompt_top_k}; this server of vLLM tells of {most_top} at most (--max-logprobs)"
        problem = "prompt_top_k", f"{of}, and of none without prompt_log_probs", "ask for fewer tokens"
    elif request.prompt_log_probs and not facts.reads_prompts:
        why = "vLLM has no log-probs of prompts beside adapters of the head"
        problem = "prompt_log_probs", why, f"leave the head out of lora.targets, {others}"
    if problem is not None:
        field, text, hint = problem
        raise BatchError(text, field=field, hint=hint)


def bodies_of(request: SampleRequest) -> list[dict[str, Any]]:
    """The JSON that asks for each sample; the first one asks for log-probs of the prompt, too."""
    params = request.params
    asked: dict[str, Any] = {
        "n": 1,
        "max_tokens": params.max_new_tokens,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # what ends a sample is said by the request, not by files on the server's side
        "stop_token_ids": sorted(params.end_token_ids),
        "detokenize": bool(params.stop),
    }
    if params.stop:
        asked |= {"stop": list(params.stop), "include_stop_str_in_output": True}
    prompt = [int(token) for token in request.prompt]
    bodies: list[dict[str, Any]] = [
        {"token_ids": prompt, "sampling_params": {**asked, "seed": seed_of(params, number, 0)}}
        for number in range(request.num_samples)
    ]
    if request.prompt_log_probs and len(prompt) > 1:
        if not bodies:  # vLLM draws a token in any case
            bodies = [{"token_ids": prompt, "sampling_params": {**asked, "seed": 0, "max_tokens": 1}}]
        bodies[0]["sampling_params"]["prompt_logprobs"] = request.prompt_top_k
    return bodies


def read_sample(answer: Any, params: SamplingParams, decode: Decode | None, vocab_size: int) -> SampledTokens:
    """The sample of an answer, which ends where the request says, whatever vLLM made of its texts.

    Raises:
        EngineError: the answer is not what was asked for. StateError: the logits were not finite.
    """
    try:
        (choice,) = answer["choices"]
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        content = choice["logprobs"]["content"] or []
        log_probs = [one["logprob"] for one in content]
        of_tokens = [one["token_id"] for one in content]
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(f"an answer without what belongs to a sample: {type(error).__name__}: {error}") from error
    most = params.max_new_tokens
    check_tokens(tokens, log_probs, of_tokens, most=most, vocab_size=vocab_size, no_number=_NO_NUMBER)
    length = None if decode is None or not params.stop else length_with_stop(tokens, 0, params, decode)
    if length is not None:
        return SampledTokens(tokens[:length], log_probs[:length], "stop")
    ends_itself = bool(tokens) and tokens[-1] in params.end_token_ids
    return SampledTokens(tokens, log_probs, check_end(reason, tokens, most, ends_itself=ends_itself))


def read_prompt(answer: Any, prompt: list[int], k: int) -> tuple[np.ndarray, TopTokens | None]:
    """Float32 [prompt tokens]: log-probs of a prompt, NaN for its first token; and the k likeliest of each place.

    Args:
        answer: None, where the prompt has one token, of which there is nothing to say.
        k: None of them where it is 0.

    Raises:
        EngineError, StateError: as `read_sample`.
    """
    entries: list[dict[int, float]] = []
    try:
        said = answer["prompt_logprobs"][1:] if answer is not None else []
        if len(said) != len(prompt) - 1:
            raise ValueError(f"{len(said)} log-probs of {len(prompt) - 1} tokens")
        entries = [{int(token): float(one["logprob"]) for token, one in place.items()} for place in said]
        own = [entry[token] for token, entry in zip(prompt[1:], entries, strict=True)]
        likeliest = [sorted(entry.items(), key=lambda item: -item[1])[:k] for entry in entries]
        if any(len(place) != k for place in likeliest):
            raise ValueError(f"fewer than the {k} likeliest tokens")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wrong(f"an answer without the prompt's log-probs: {type(error).__name__}: {error}") from error
    if any(value == _NO_NUMBER or value != value for value in own):
        raise not_finite()
    log_probs = np.array([np.nan, *own], np.float32)
    if not k:
        return log_probs, None
    tokens = np.array([[token for token, _ in place] for place in likeliest], np.int64).reshape(-1, k)
    values = np.array([[value for _, value in place] for place in likeliest], np.float32).reshape(-1, k)
    return log_probs, TopTokens(tokens, values)
