"""Whole models by turns in one, against plain models in one process, and against the trainer that exported them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ModelError, ResourceError
from slimefsdp.sampling.params import SampleAnswer
from slimefsdp.trainer import Trainer
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import settings
from tests.support.versions import answers_of, asked, holding, opened, plain_log_probs, random_model, sampler_of

PROMPTS = [[3, 9, 4, 1, 7, 12, 5], [8], [2, 30, 2], [11, 6, 19, 28, 1]]
TOKENS = [5, 9, 33, 2, 71, 8, 8, 90, 14]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gemma2", "gpt2"])
def test_log_probs_of_samples_and_prompts_are_those_of_plain_models_in_float64(
    tiny_folder: TinyFolder, tmp_path: Path, kind: str
) -> None:
    base = tiny_folder(kind, vocab_size=97)
    folders = {name: random_model(base, tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second"))}
    requests = [
        asked(version, prompt, 2, seed, max_new_tokens=5, temperature=0.7, prompt_log_probs=True)
        for seed, prompt in enumerate(PROMPTS)
        for version in (None, *folders)
    ]
    with KeepFloat64():
        sampler = holding(base, folders, dtype=torch.float64, rank=None, max_rows=7)
        answers = answers_of(sampler, requests)
    models = {None: opened(base, None), **{name: opened(folder, None) for name, folder in folders.items()}}
    largest, firsts = 0.0, {}
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, SampleAnswer) and answer.prompt_log_probs is not None, answer
        for sample in answer.samples:
            expected = plain_log_probs(models[request.version], [*request.prompt, *sample.tokens])
            found = torch.tensor([*answer.prompt_log_probs[1:], *sample.log_probs], dtype=torch.float64)
            largest = max(largest, (found - expected).abs().max().item())
        firsts.setdefault(request.version, answer.samples[0].log_probs)
    assert largest <= 1e-12
    assert firsts[None] != firsts["first"] != firsts["second"] != firsts[None]


def of_a_trainer(rank: int, config: Any, folder: Path, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of TOKENS at the beginning, and after two updates, whose weights are exported."""
    trainer = Trainer(config, device=torch.device("cpu"))
    samples = [
        {"tokens": TOKENS, "response_length": len(TOKENS) - 1, "reward": float(n), "group_id": 0} for n in range(2)
    ]
    batch = RolloutBatch.from_samples(samples)
    one = batch.select([0])
    before = trainer.compute_log_probs(one).log_probs
    trainer.train_step(batch)
    trainer.train_step(batch)
    trainer.export_hf(folder, dtype)
    return before, trainer.compute_log_probs(one).log_probs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_log_probs_have_the_bits_of_the_trainer_before_and_after_its_updates(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    base = tiny_folder(vocab_size=97, intermediate_size=55)
    config = settings(
        base,
        precision={"compute_dtype": dtype},
        optim={"lr": 0.05, "total_updates": 100},
        rollout={"temperature": 1.0},
    )
    before, after = ranks.run(1, of_a_trainer, config, tmp_path / "trained", dtype)[0]
    sampler = holding(base, {"trained": tmp_path / "trained"}, dtype=getattr(torch, dtype), rank=None)
    requests = [asked(version, TOKENS, 0, prompt_log_probs=True) for version in (None, "trained")]
    ours = [answer.prompt_log_probs for answer in answers_of(sampler, requests)]  # type: ignore[union-attr]
    for found, expected in zip(ours, (before, after), strict=True):
        assert found is not None and found[1:].tobytes() == expected.astype(np.float32).tobytes()
    assert not np.array_equal(before, after)


def test_as_many_models_as_there_is_room_for_are_held_and_one_that_is_dropped_leaves_the_base_as_it_was(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder(vocab_size=97)
    folder = random_model(base, tmp_path / "other", seed=1)
    size = sampler_of(base, rank=None)[1].version_bytes
    sampler = holding(base, {"a": folder}, rank=None, memory_bytes=2 * size - 1)
    with refused(ResourceError, "memory_bytes", "'b'", 1):
        sampler.reserve("b")
    request = asked(None, PROMPTS[0], prompt_log_probs=True)
    (before,) = answers_of(sampler, [request])
    (of_a,) = answers_of(sampler, [asked("a", PROMPTS[0], prompt_log_probs=True)])
    assert sampler.stats().versions == {"a": size} and sampler.drop("a") == []
    (after,) = answers_of(sampler, [request])
    assert isinstance(before, SampleAnswer) and isinstance(after, SampleAnswer) and isinstance(of_a, SampleAnswer)
    assert before.samples == after.samples and before.samples != of_a.samples
    assert np.array_equal(before.prompt_log_probs, after.prompt_log_probs, equal_nan=True)  # type: ignore[arg-type]


def test_folders_that_are_of_no_version_here_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    _, weights = sampler_of(tiny_folder(vocab_size=97), rank=None)
    for folder in (
        tmp_path / "none",
        tiny_folder(vocab_size=98),
        tiny_folder("gemma2", vocab_size=97),
        tiny_folder(vocab_size=97, rms_norm_eps=1e-3),  # the same tensors, and another function of them
    ):
        with refused(ModelError, "folder"):
            weights.read(folder)
