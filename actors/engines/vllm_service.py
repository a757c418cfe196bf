"""What a service asks a server of vLLM for, other than runs: adapters, log-probs at temperature 1, and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engines.dialect import ServerFacts
from actors.engines.served_samples import check_end, check_tokens, length_with_stop, not_finite, seed_of, wrong
from actors.engines.server_client import ServerClient
from actors.engines.vllm import (
    NEEDED,
    NO_NUMBER,
    VllmDialect,
    arguments_setting,
    check_adapters,
    check_generate,
    choice_of,
    room_for,
    said_by_worker,
    sampling_params,
    version_of,
)
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import SERVERS
from slimefsdp.errors import BatchError, EngineError
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.sampling.params import SampledTokens, SampleRequest, SamplingParams, TopTokens

Decode = Callable[[list[int]], str]
_NEEDED = (NEEDED[0], "--logprobs-mode=raw_logprobs", NEEDED[3])
"""Arguments without which a server is of no use to a service, whoever starts it."""


@dataclass(frozen=True, slots=True)
class SamplingFacts(ServerFacts):
    """Holds the answers about itself of a server that a service can sample with."""

    adapters: int  # that it has room for
    prompt_top_k: int  # likeliest tokens of a place in a prompt that it tells of at most
    reads_prompts: bool  # and has log-probs of several at once: vLLM fails beside adapters of the head


class VllmServiceDialect(VllmDialect):
    """A server that has read the weights of the model's folder itself, and is told of adapters.

    Args:
        adapters: that a server which is started has room for.
        modules: last parts of the names of those that adapters are of.
    """

    takes_adapters = True

    def __init__(self, config: RunConfig, folder: ModelFolder, adapters: int, modules: Sequence[str]) -> None:
        super().__init__(config, folder)
        self._adapters, self._modules = str(adapters), modules

    def arguments(self) -> list[str]:
        room = ["--max-lora-rank", str(room_for(self.config)), "--max-loras", self._adapters]
        return [
            *self.common_arguments(),
            *_NEEDED,
            *("--max-logprobs", "256"),  # of the likeliest tokens: as many as clients of the service may ask for
            *("--enable-lora", *room, "--max-cpu-loras", self._adapters, "--lora-target-modules", *self._modules),
            *self.config.rollout.engine_args,
        ]

    def check(self, client: ServerClient) -> SamplingFacts:
        config, modules, arguments = self.config, self._modules, arguments_setting(self.config)
        version = version_of(client, config)
        wanted = {"logprobs_mode": ("raw_logprobs", f"start it with {_NEEDED[1]}")}
        said = said_by_worker(client, config, self.folder, wanted)
        check_generate(client, arguments)
        check_adapters(client, arguments, config, said["max_lora_rank"], "a service", "rollout.engine=embedded")
        own = said["lora_modules"]
        missing = [] if own is None else sorted(set(modules) - set(own))
        if said["max_loras"] < 2 or missing:
            has = f"no adapters of {missing[0]}" if missing else "room for one adapter alone, which the base takes"
            needed = f"--max-loras 9 --lora-target-modules {' '.join(modules)}"
            raise EngineError(
                f"the server at {client.url} has {has}",
                field=arguments,
                hint=f"start it with {needed}, to hold 8 versions at once",
            )
        reads_prompts = own is not None and "lm_head" not in own
        top_k = said["vocab_size"] if said["max_logprobs"] == -1 else said["max_logprobs"]
        return SamplingFacts(
            version,
            said["dtype"],
            said["vocab_size"],
            said["max_model_len"],
            1,
            said["max_loras"],
            top_k,
            reads_prompts,
        )


def check_request(request: SampleRequest, *, vocab_size: int, facts: SamplingFacts, most_samples: int) -> None:
    """Whether vLLM answers a request as it is asked.

    Args:
        facts: of the server.

    Raises:
        BatchError: naming what it does not.
    """
    params, prompt = request.params, request.prompt
    low, high = SERVERS["vllm"].temperatures
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
    prompt = [int(token) for token in request.prompt]
    bodies: list[dict[str, Any]] = [
        {"token_ids": prompt, "sampling_params": sampling_params(params, most=params.max_new_tokens, seed=seed)}
        for seed in (seed_of(params, number, 0) for number in range(request.num_samples))
    ]
    if request.prompt_log_probs and len(prompt) > 1:
        if not bodies:  # vLLM draws a token in any case
            bodies = [{"token_ids": prompt, "sampling_params": sampling_params(params, most=1, seed=0)}]
        bodies[0]["sampling_params"]["prompt_logprobs"] = request.prompt_top_k
    return bodies


def read_sample(answer: Any, params: SamplingParams, decode: Decode | None, vocab_size: int) -> SampledTokens:
    """The sample of an answer, which ends where the request says, whatever vLLM made of its texts.

    Raises:
        EngineError: the answer is not what was asked for. StateError: the logits were not finite.
    """
    choice, log_probs, of_tokens = choice_of(answer)
    tokens, reason = choice["token_ids"], choice["finish_reason"]
    most = params.max_new_tokens
    check_tokens(tokens, log_probs, of_tokens, most=most, vocab_size=vocab_size, no_number=NO_NUMBER)
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
    if any(value == NO_NUMBER or value != value for value in own):
        raise not_finite()
    log_probs = np.array([np.nan, *own], np.float32)
    if not k:
        return log_probs, None
    tokens = np.array([[token for token, _ in place] for place in likeliest], np.int64).reshape(-1, k)
    values = np.array([[value for _, value in place] for place in likeliest], np.float32).reshape(-1, k)
    return log_probs, TopTokens(tokens, values)
