"""Engines return the experts that computed each token, for loss.routing_replay=rollout."""

from __future__ import annotations

import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.pool import SampledResponse
from actors.engines.protocol import Request, Sample, check_sample
from actors.engines.served_samples import PartialSample
from actors.engines.sglang import SglangDialect
from actors.engines.vllm import VllmDialect
from actors.rollout.episodes import _Episode
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import EngineError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SampledTokens, SamplingParams, VersionSpan
from slimefsdp.sampling.sampler import Sampler
from tests.support.tiny_models import TinyFolder, tiny_model, to_sample_from

PARAMS = SamplingParams(max_new_tokens=6, seed=(1,))


def experts_of(model: Any, tokens: list[int]) -> np.ndarray:
    """The experts that a plain model's routers choose for each token, sorted: [tokens, layers, experts of a token]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *args: chosen.append(args[2][2])) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, 1).numpy())


def test_the_sampler_records_what_plain_routers_choose_and_keeps_it_when_weights_change() -> None:
    old, new = (tiny_model("qwen3_moe", num_experts=8, seed=seed) for seed in (0, 1))
    policy = to_sample_from(old)
    sampler = Sampler(policy, records_experts=True)
    prompts = [[3, 9, 4, 1], [8, 2], [7]]
    for prompt in prompts:
        sampler.add(prompt, 2, PARAMS)
    for _ in range(3):
        sampler.step()
    policy.hf.load_state_dict(new.state_dict())
    sampler.take_new_weights(1)
    done: list[tuple[int, int, SampledTokens]] = []
    while not sampler.is_idle:
        done += sampler.step()
    assert len(done) == 6
    for request, _, sample in done:
        tokens = [*prompts[request], *sample.tokens]
        before = len(prompts[request]) + 3  # computed before the update: the prompt and three of four drawn tokens
        assert sample.routed_experts is not None and sample.routed_experts.dtype == np.int16
        expected = np.concatenate([experts_of(old, tokens)[:before], experts_of(new, tokens)[before:-1]])
        assert np.array_equal(np.sort(sample.routed_experts), expected)


def a_run(path: Path, engine: str) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(path)},
            "mesh": {"device": "cpu"},
            "loss": {"routing_replay": "rollout"},
            "rollout": {"engine": engine, "engine_urls": ["http://127.0.0.1:9"], "engines": 1},
        }
    )


def vllm_answer(experts: np.ndarray | None) -> dict[str, Any]:
    file = BytesIO()
    if experts is not None:
        np.save(file, experts.astype(np.uint8))
    choice = {
        "token_ids": [4, 5],
        "logprobs": {"content": [{"logprob": -1.0, "token_id": token} for token in (4, 5)]},
        "finish_reason": "length",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "routed_experts": None if experts is None else base64.b64encode(file.getvalue()).decode(),
    }
    return {"choices": [choice]}


def sglang_answer(experts: np.ndarray | None) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, 4, None], [-1.0, 5, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "routed_experts": None
        if experts is None
        else base64.b64encode(experts.astype(np.int32).tobytes()).decode("utf-8"),
    }
    return {"output_ids": [4, 5], "meta_info": meta}


CASES = [("vllm", VllmDialect, vllm_answer), ("sglang", SglangDialect, sglang_answer)]


@pytest.mark.parametrize(("kind", "dialect", "answer"), CASES)
def test_servers_are_asked_for_experts_and_wrong_ones_are_refused(
    tiny_folder: TinyFolder, tmp_path: Path, kind: str, dialect: Any, answer: Any
) -> None:
    path = tiny_folder("qwen3_moe", num_experts=8)
    speaks = dialect(a_run(path, kind), read_model_folder(path))
    assert "--enable-return-routed-experts" in speaks.arguments()
    assert kind != "vllm" or speaks.environment(tmp_path)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    request = Request([1, 2, 3], 1, SamplingParams(max_new_tokens=2))
    body = speaks.body(request, 0, PartialSample(), "name")
    experts = np.random.default_rng(0).integers(
        0, 8, (4, 2, 2)
    )  # of three tokens of the prompt and one of the response

    def read(experts: np.ndarray | None) -> PartialSample:
        piece, reason = speaks.read(answer(experts), body, vocab_size=96, versions=[3])
        assert reason == "length"
        return piece

    first = read(experts)
    assert first.experts is not None and np.array_equal(first.experts, experts)
    for wrong in (None, experts[:3], experts[:, :1], np.full_like(experts, 8)):
        with pytest.raises(EngineError, match="experts") as error:
            read(wrong)
        assert ("--enable-return-routed-experts" in str(error.value)) == (wrong is None)
    # a sample that continues keeps what its first tokens were drawn with
    newer = np.random.default_rng(1).integers(0, 8, (6, 2, 2)).astype(np.int16)
    first.add(PartialSample([6, 7], [-1.0, -1.0], experts=newer))
    assert np.array_equal(first.experts, np.concatenate([experts, newer[4:]]))
    first.cut(3)
    assert np.array_equal(first.experts, np.concatenate([experts, newer[4:5]]))


def test_samples_without_experts_are_refused_only_if_these_are_needed() -> None:
    request = Request([1, 2, 3], 1, SamplingParams(max_new_tokens=2))
    sample = Sample(0, 0, [4, 5], [-1.0, -1.0], "length", (VersionSpan(3, 0, 2),), "ab")
    whole = replace(sample, routed_experts=np.zeros((4, 2, 2), np.int16))
    check_sample(sample, [request], 96, 0)
    check_sample(whole, [request], 96, 0, has_experts=True)
    for wrong in (sample, replace(sample, routed_experts=np.zeros((3, 2, 2), np.int16))):
        with pytest.raises(EngineError, match="experts"):
            check_sample(wrong, [request], 96, 0, has_experts=True)


def test_an_episode_keeps_the_experts_of_each_turn() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 8, (length, 2, 2)).astype(np.int16) for length in (4, 8))
    episode = _Episode((0, 0, 0), {}, 0)
    episode.add_response(SampledResponse(0, 0, [1, 2, 3, 4, 5], 2, [-1.0] * 2, "a", True, routed_experts=first))
    episode.add_observation([6, 7], "b")
    episode.add_response(SampledResponse(0, 0, list(range(1, 10)), 2, [-1.0] * 2, "c", True, routed_experts=second))
    episode.add_observation([6, 7], "d")
    experts = episode.sample().routed_experts
    unknown = np.full((3, 2, 2), -1)
    assert experts is not None and np.array_equal(experts, np.concatenate([first, second[4:], unknown]))
