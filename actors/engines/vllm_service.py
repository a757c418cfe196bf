"""The service's dialect of vLLM's server, with adapters, log-probs of prompts, and log-probs at temperature 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.engines.dialect import ServerFacts
from actors.engines.served_samples import check_end, check_tokens, length_with_stop, not_finite, seed_of, wrong
from actors.engines.server_client import ServerClient
from actors.engines.vllm import NEEDED, NO_NUMBER, VllmDialect, choice_of, room_for, sampling_params
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import SERVERS
from slimefsdp.errors import BatchError, ModelError
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.models.peft_folder import PeftFolder, read_peft_folder
from slimefsdp.sampling.params import SampledTokens, SampleRequest, SamplingParams, TopTokens

if TYPE_CHECKING:  # the process that starts an engine needs no torch
    import torch

Decode = Callable[[list[int]], str]
_NEEDED = (NEEDED[0], "--logprobs-mode=raw_logprobs", NEEDED[3])
"""Command-line arguments that the service's server needs."""


@dataclass(frozen=True, slots=True)
class SamplingFacts(ServerFacts):
    adapters: int  # limit on the loaded adapters
    prompt_top_k: int  # limit on the number of most likely tokens that are returned for a position of a prompt
    reads_prompts: bool  # whether the server has log-probs of prompts; vLLM has none if the head may have adapters


class VllmServiceDialect(VllmDialect):
    """Speaks to a server that has read the weights of the model's folder itself, and loads adapters on request.

    Args:
        adapters: limit on the loaded adapters, for a server that the service starts.
        modules: last parts of the names of the modules that may have adapters.
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
            *("--max-logprobs", "256"),  # as many likeliest tokens as clients of the service may ask for
            *("--enable-lora", *room, "--max-cpu-loras", self._adapters, "--lora-target-modules", *self._modules),
            *self.config.rollout.engine_args,
        ]

    def check(self, client: ServerClient) -> SamplingFacts:
        version, properties = self.checked_properties(client, takes_weights=False)
        self.check_adapters(client, properties["max_lora_rank"], "a service", "rollout.engine=embedded")
        own = properties["lora_modules"]
        missing = [] if own is None else sorted(set(self._modules) - set(own))
        if properties["max_loras"] < 2 or missing:
            has = f"no adapters of {missing[0]}" if missing else "room for one adapter alone, which the base takes"
            needed = f"--max-loras 9 --lora-target-modules {' '.join(self._modules)}"
            raise self.unusable(client, f"has {has}", f"start it with {needed}, to hold 8 versions at once")
        reads_prompts = own is not None and "lm_head" not in own
        vocab_size, most_top = properties["vocab_size"], properties["max_logprobs"]
        top_k = vocab_size if most_top == -1 else most_top
        common = version, properties["dtype"], vocab_size, properties["max_model_len"], 1
        return SamplingFacts(*common, properties["max_loras"], top_k, reads_prompts)


def check_request(request: SampleRequest, facts: SamplingFacts) -> None:
    """Checks that vLLM supports a request; the caller has checked the prompt and the number of samples.

    Raises:
        BatchError: vLLM does not support a parameter of the request; the error names the parameter.
    """
    params, length = request.params, len(request.prompt)
    low, high = SERVERS["vllm"].temperatures
    most_top = min(facts.prompt_top_k, facts.vocab_size)
    others = "or have the service sample by rollout.engine=embedded"
    problem: tuple[str, str, str] | None = None
    if length + params.max_new_tokens > facts.max_model_len:
        both = f"a prompt of {length} tokens and max_new_tokens={params.max_new_tokens}"
        problem = "max_new_tokens", f"{both} are more than the {facts.max_model_len} that vLLM takes", "lower it"
    elif not params.greedy and not low <= params.temperature <= high:
        given = f"temperature={params.temperature:g}: vLLM samples from {low:g} to {high:g}"
        problem = "temperature", given, f"choose one of these, {others}"
    elif params.tempered:
        problem = "tempered", "vLLM is asked for log-probs at temperature 1 alone", "set tempered=False"
    elif not 0 <= request.prompt_top_k <= most_top or (request.prompt_top_k and not request.prompt_log_probs):
        given = f"prompt_top_k={request.prompt_top_k}; this server of vLLM returns {most_top} at most (--max-logprobs)"
        problem = "prompt_top_k", f"{given}, and none without prompt_log_probs", "ask for fewer tokens"
    elif request.prompt_log_probs and not facts.reads_prompts:
        why = "vLLM has no log-probs of prompts if the head may have adapters"
        problem = "prompt_log_probs", why, f"leave the head out of lora.targets, {others}"
    if problem is not None:
        field, text, hint = problem
        raise BatchError(text, field=field, hint=hint)


def bodies_of(request: SampleRequest, prompt: list[int]) -> list[dict[str, Any]]:
    """Returns the JSON of a request for each sample; the first also asks for log-probs of the prompt if needed."""
    params = request.params
    bodies: list[dict[str, Any]] = [
        {"token_ids": prompt, "sampling_params": sampling_params(params, most=params.max_new_tokens, seed=seed)}
        for seed in (seed_of(params, number, 0) for number in range(request.num_samples))
    ]
    if request.prompt_log_probs and len(prompt) > 1:
        if not bodies:  # vLLM cannot draw fewer than one token
            bodies = [{"token_ids": prompt, "sampling_params": sampling_params(params, most=1, seed=0)}]
        bodies[0]["sampling_params"]["prompt_logprobs"] = request.prompt_top_k
    return bodies


def read_sample(answer: Any, params: SamplingParams, decode: Decode | None, vocab_size: int) -> SampledTokens:
    """Returns the sample of an answer.

    The sample is cut after the first stop text that `decode` finds, since vLLM may decode tokens differently.

    Raises:
        EngineError: the answer contradicts the request. StateError: the logits were not finite.
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
    """Returns a prompt's log-probs, float32 [tokens] with NaN for the first token, and each position's top k tokens.

    Args:
        answer: the server's answer; None means that the prompt has one token.
        k: number of the most likely tokens of each position; with 0, the second result is None.

    Raises:
        EngineError, StateError: as `read_sample`.
    """
    entries: list[dict[int, float]] = []
    try:
        positions = answer["prompt_logprobs"][1:] if answer is not None else []
        if len(positions) != len(prompt) - 1:
            raise ValueError(f"{len(positions)} log-probs of {len(prompt) - 1} tokens")
        entries = [{int(token): float(info["logprob"]) for token, info in each.items()} for each in positions]
        own = [entry[token] for token, entry in zip(prompt[1:], entries, strict=True)]
        likeliest = [sorted(entry.items(), key=lambda item: -item[1])[:k] for entry in entries]
        if any(len(top) != k for top in likeliest):
            raise ValueError(f"fewer than the {k} likeliest tokens")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wrong(f"an answer without the prompt's log-probs: {type(error).__name__}: {error}") from error
    if any(value == NO_NUMBER or value != value for value in own):
        raise not_finite()
    log_probs = np.array([np.nan, *own], np.float32)
    if not k:
        return log_probs, None
    tokens = np.array([[token for token, _ in top] for top in likeliest], np.int64).reshape(-1, k)
    values = np.array([[value for _, value in top] for top in likeliest], np.float32).reshape(-1, k)
    return log_probs, TopTokens(tokens, values)


# ---------------------------------------------------------------------- the base and its adapters


@dataclass(frozen=True, slots=True)
class Base:
    """Describes the frozen base model of the adapters, as a trainer with the same settings has it.

    Args:
        path: the model's folder.
        dtype: the dtype of the model's weights.
        digest: digest of the weights' bits, as a trainer records it in the folders of adapters.
        rank: limit on the rank of an adapter.
        targets: name of each module that may have adapters -> (rows, columns) of its weight.
        version_bytes: bytes of an adapter of the rank `rank`.
    """

    path: Path
    dtype: torch.dtype
    digest: str
    rank: int
    targets: Mapping[str, tuple[int, int]]
    version_bytes: int

    @property
    def modules(self) -> list[str]:
        """Returns the last parts of the targets' names, by which vLLM identifies modules."""
        return sorted({name.rpartition(".")[2] for name in self.targets})

    def check(self, path: Path) -> PeftFolder:
        """Reads the PEFT folder at `path`, and checks that its adapter fits this base.

        Raises:
            ModelError: the folder is malformed, of another model or base, of a larger rank, or has adapters of a module
                outside `targets`.
        """
        from slimefsdp.models.lora import check_base_weights

        try:
            folder = read_peft_folder(path)
            folder.check_room(self.rank, self.targets)
            folder.check_base({f"{name}.weight": shape for name, shape in self.targets.items()}, self.path)
            check_base_weights(folder, self.dtype, lambda: self.digest, self.path)
        except ModelError as error:
            error.field = "folder"
            raise
        return folder

    def write_empty(self, path: Path, source: ModelFolder) -> None:
        """Writes a folder at `path` with an adapter that changes nothing.

        Raises:
            CheckpointError: the disk refused.
        """
        import torch

        from slimefsdp.checkpoint.export import AdapterFacts, write_peft_folder
        from slimefsdp.io.safetensors_file import TensorSpec

        name, (rows, columns) = next(iter(self.targets.items()))
        matrices = [
            (f"{name}.lora_A", torch.zeros(1, columns, dtype=self.dtype)),
            (f"{name}.lora_B", torch.zeros(rows, 1, dtype=self.dtype)),
        ]
        specs = [TensorSpec(matrix, self.dtype, tuple(tensor.shape)) for matrix, tensor in matrices]
        facts = AdapterFacts(1, 1.0, source.path, None, str(self.dtype).removeprefix("torch."))
        write_peft_folder(path, specs, matrices, facts)


def base_of(config: RunConfig, folder: ModelFolder) -> Base:
    """Returns the properties of the model at model.path; loads the model on the host to compute them.

    Raises:
        ModelError, ConfigError: as `slimefsdp.models.build.load_for_sampling`.
    """
    import torch

    from slimefsdp.models.build import load_for_sampling
    from slimefsdp.models.lora import adapted_matrices, base_digest
    from slimefsdp.training.build import compute_dtype, lora_of

    lora = lora_of(config)
    assert lora is not None
    policy = load_for_sampling(folder, compute_dtype(config), torch.device("cpu"), lora)
    matrices = adapted_matrices(policy)
    targets = {matrix.name: (len(matrix.b), matrix.a.shape[-1]) for matrix in matrices}
    size = sum(matrix.a.nbytes + matrix.b.nbytes for matrix in matrices)
    return Base(folder.path, compute_dtype(config), base_digest(policy, None), lora.rank, targets, size)
