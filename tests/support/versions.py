"""Samplers of several versions, and folders for them: of adapters that peft writes, or of whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from slimefsdp.models.build import load_for_sampling
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.lora import Lora
from slimefsdp.sampling.params import SampleAnswer, SampleRequest, SamplingParams
from slimefsdp.sampling.turns import VersionedSampler, Versions
from slimefsdp.sampling.versions import AdapterVersions, ModelVersions
from tests.support.float64 import KeepFloat64
from tests.support.plain_lora import ALL
from tests.support.tiny_models import plain_model

LAYERS = ["attention", "mlp"]


def random_adapters(
    base: Path, folder: Path, *, rank: int = 2, alpha: float = 6.0, seed: int = 0, targets: Any = ALL, size: float = 0.3
) -> Path:
    """A folder that peft has saved, with A and B at random; `size` is the standard deviation of B."""
    chosen = targets if isinstance(targets, dict) else {"target_modules": targets}
    lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, **chosen)
    torch.manual_seed(seed)
    model = get_peft_model(plain_model(base, torch.float64), lora, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * size)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def random_model(base: Path, folder: Path, *, seed: int, size: float = 0.05) -> Path:
    """A folder of the same model with random weights, float64; `size` is their standard deviation about the base's."""
    torch.manual_seed(seed)
    model = plain_model(base, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    model.save_pretrained(folder)
    return folder


def sampler_of(
    base: Path,
    *,
    dtype: torch.dtype = torch.float32,
    rank: int | None = 3,
    targets: Sequence[str] = LAYERS,
    max_rows: int = 64,
    memory_bytes: int = 2**30,
    **others: Any,
) -> tuple[VersionedSampler, Any]:
    """A sampler, and what its versions are read by: adapters of up to `rank`; None: whole models."""
    lora = None if rank is None else Lora(rank, 32.0, targets, seed=0)
    policy = load_for_sampling(read_model_folder(base), dtype, torch.device("cpu"), lora)
    weights: Versions = ModelVersions(policy) if rank is None else AdapterVersions(policy, base)
    return VersionedSampler(policy, weights, max_rows=max_rows, memory_bytes=memory_bytes, **others), weights


def holding(base: Path, folders: dict[str, Path], **others: Any) -> VersionedSampler:
    """A sampler with these versions."""
    sampler, weights = sampler_of(base, **others)
    for name, folder in folders.items():
        sampler.reserve(name)
        sampler.hold(name, weights.read(folder))
    return sampler


def asked(version: str | None, prompt: Sequence[int], samples: int = 1, seed: int = 0, **changes: Any) -> SampleRequest:
    params: dict[str, Any] = {"max_new_tokens": 6, "tempered": False, "seed": (seed,), **changes}
    with_prompt, top_k = params.pop("prompt_log_probs", False), params.pop("prompt_top_k", 0)
    return SampleRequest(version, prompt, samples, SamplingParams(**params), with_prompt, top_k)


def answers_of(sampler: VersionedSampler, requests: Sequence[SampleRequest]) -> list[SampleAnswer | Exception]:
    """All that come to these requests, which are added at once."""
    numbers = [sampler.add(request) for request in requests]
    found: dict[int, SampleAnswer | Exception] = {}
    while not sampler.is_idle:
        for number, answer in sampler.step():
            assert number not in found, "it is answered once"
            found[number] = answer
    assert sorted(found) == sorted(numbers)
    return [found[number] for number in numbers]


def plain_log_probs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Float64 [tokens - 1] of a plain model: of each token but the first given those before it."""
    with torch.no_grad(), KeepFloat64():
        logits = model(input_ids=torch.tensor([list(tokens)])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def opened(base: Path, folder: Path | None) -> Any:
    """The base under the adapters of a folder, as peft computes it in float64."""
    with KeepFloat64():
        model = plain_model(base, torch.float64)
        if folder is None:
            return model
        return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
