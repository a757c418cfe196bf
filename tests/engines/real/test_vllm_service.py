"""`slimefsdp serve` with a real vLLM, and the unmodified client: versions side by side, exact, also after a kill.

Run with SLIMEFSDP_VLLM_PYTHON naming the interpreter of an environment that scripts/setup_vllm.sh made; takes minutes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import yaml
from tinker import types

from tests.support.service import Server, datum, log_probs_of, service_tree, tokens_of
from tests.support.versions import opened, plain_log_probs
from tests.support.waiting import PATIENCE_S

PYTHON = os.environ.get("SLIMEFSDP_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="SLIMEFSDP_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
]
CLOSE = 5e-5  # of log-probs in float32, as docs/service.md promises
ADAM = types.AdamParams(learning_rate=2e-2, eps=1e-8)
PROMPTS = [tokens_of(seed, 3 + seed % 5, vocab=320) for seed in range(8)]


@dataclass(frozen=True)
class Trained:
    """Two versions of a run and the base, with samplers of each.

    Args:
        folders: PEFT; None: the base.
    """

    model: Path
    run_dir: Path
    samplers: dict[str, tinker.SamplingClient]
    folders: dict[str, Path | None]
    trainer_says: dict[str, list[np.ndarray]]  # log-probs of each prompt with what follows it, by version
    followed: dict[str, list[list[int]]]  # by these tokens


@pytest.fixture(scope="module")
def trained(untied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("service")
    rollout = {"engine": "vllm", "engine_python": str(PYTHON)}
    cluster = {"launch_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S, "sync_timeout_s": 300.0}
    lora = {"targets": ["attention", "mlp"]}
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(service_tree(untied_folder, folder, rollout=rollout, cluster=cluster, lora=lora)))
    server = Server(file)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINKER_TELEMETRY", "0")
            client = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
            yield _trained(client, untied_folder, folder / "run")
        assert server.end() == 0
    finally:
        server.kill()


def _trained(client: tinker.ServiceClient, model: Path, run_dir: Path) -> Trained:
    training = client.create_lora_training_client(base_model=str(model), rank=4, seed=1, train_unembed=False).result()
    data = [datum(tokens_of(seed, vocab=320)) for seed in range(3)]
    samplers = {"base": client.create_sampling_client(base_model=str(model)).result()}
    folders: dict[str, Path | None] = {"base": None}
    says: dict[str, list[np.ndarray]] = {}
    followed: dict[str, list[list[int]]] = {}
    for name in ("first", "second"):
        for _ in range(4):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(ADAM).result()
        path = training.save_weights_for_sampler(name).result().path
        samplers[name] = client.create_sampling_client(model_path=path).result()
        (folders[name],) = (run_dir / "service/sampler_weights").glob(f"**/{name}@*")
        drawn = drawn_by(samplers[name])
        followed[name] = [one.tokens for answer in drawn for one in answer.sequences]
        whole = [
            [*prompt, *one.tokens] for prompt, answer in zip(PROMPTS, drawn, strict=True) for one in answer.sequences
        ]
        says[name] = log_probs_of(training.forward([datum(one) for one in whole], "cross_entropy").result())
    return Trained(model, run_dir, samplers, folders, says, followed)


def asked_for(sampler: tinker.SamplingClient, *, temperature: float = 0.7) -> list[Future[Any]]:
    params = types.SamplingParams(max_tokens=12, temperature=temperature, seed=5, stop=[])
    prompts = [types.ModelInput.from_ints(prompt) for prompt in PROMPTS]
    return [sampler.sample(prompt, 2, params, include_prompt_logprobs=True) for prompt in prompts]


def drawn_by(sampler: tinker.SamplingClient, **how: Any) -> list[Any]:
    return [one.result(timeout=PATIENCE_S) for one in asked_for(sampler, **how)]


def check_trainer_says(trained: Trained, name: str, answers: list[Any]) -> float:
    """Whether samples are those of before, with the trainer's log-probs; returns by how much these differ."""
    samples = [one for answer in answers for one in answer.sequences]
    assert [one.tokens for one in samples] == trained.followed[name]
    differences = [
        np.abs(exact[-len(one.tokens) :] - np.array(one.logprobs)).max()
        for exact, one in zip(trained.trainer_says[name], samples, strict=True)
    ]
    places = iter(trained.trainer_says[name])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        exact = next(places)[: len(prompt) - 1]
        next(places)  # of the second sample
        differences.append(np.abs(exact - np.array(answer.prompt_logprobs[1:])).max())
    return float(max(differences))


def test_versions_that_are_sampled_at_the_same_time_have_each_the_trainers_log_probs(trained: Trained) -> None:
    asked = {name: asked_for(sampler) for name, sampler in trained.samplers.items()}  # all at once
    answers = {name: [one.result(timeout=PATIENCE_S) for one in found] for name, found in asked.items()}
    for name in ("first", "second"):
        difference = check_trainer_says(trained, name, answers[name])
        print(f"{name}: log-probs differ by {difference:.1e} at most from the trainer's")
        assert difference < CLOSE
    assert trained.followed["first"] != trained.followed["second"]
    model = opened(trained.model, None)
    for prompt, answer in zip(PROMPTS, answers["base"], strict=True):
        for one in answer.sequences:
            exact = plain_log_probs(model, [*prompt, *one.tokens])
            assert (exact[len(prompt) - 1 :] - torch.tensor(one.logprobs)).abs().max() < CLOSE
            assert (exact[: len(prompt) - 1] - torch.tensor(answer.prompt_logprobs[1:])).abs().max() < CLOSE


@torch.no_grad()
def test_greedy_tokens_and_the_likeliest_of_prompts_are_those_of_peft(trained: Trained) -> None:
    greedy = {name: drawn_by(sampler, temperature=0.0) for name, sampler in trained.samplers.items()}
    assert greedy["base"] != greedy["second"]
    for name, answers in greedy.items():
        model = opened(trained.model, trained.folders[name])
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens = list(prompt)
            for _ in range(12):
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            assert [one.tokens for one in answer.sequences] == [tokens[len(prompt) :]] * 2, name
        sampler, prompt = trained.samplers[name], PROMPTS[4]
        params = types.SamplingParams(max_tokens=1, stop=[])
        given = types.ModelInput.from_ints(prompt)
        found = sampler.sample(given, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=5)
        top = found.result(timeout=PATIENCE_S).topk_prompt_logprobs
        exact = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1).topk(5)
        for place, likeliest in enumerate(top[1:]):
            assert [token for token, _ in likeliest] == exact.indices[place].tolist()
            values = torch.tensor([value for _, value in likeliest])
            assert (values - exact.values[place]).abs().max() < CLOSE


def test_what_vllm_does_not_do_is_an_error_of_the_users(trained: Trained) -> None:
    params = types.SamplingParams(max_tokens=1, temperature=0.001)
    with pytest.raises(Exception, match=r"vLLM samples from 0\.01 to 2"):
        trained.samplers["first"].sample(types.ModelInput.from_ints([3]), 1, params).result(timeout=PATIENCE_S)


def test_a_server_that_is_killed_comes_back_with_the_versions_that_are_asked_for(trained: Trained) -> None:
    before = server_of(trained.model)
    os.killpg(before, signal.SIGKILL)
    asked = {name: asked_for(trained.samplers[name]) for name in ("second", "first")}
    for name, found in asked.items():
        answers = [one.result(timeout=PATIENCE_S) for one in found]
        assert check_trainer_says(trained, name, answers) < CLOSE
    assert server_of(trained.model) != before


def server_of(model: Path) -> int:
    """The process group of the server of this model."""
    groups = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"vllm.entrypoints.openai.api_server" in words and str(model).encode() in words and words[0] == PYTHON_WORD:
            groups.add(os.getpgid(int(process.name)))
    (group,) = groups
    return group


PYTHON_WORD = str(Path(PYTHON or "").absolute()).encode()
