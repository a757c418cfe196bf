"""Versions of adapters by turns in one model, against peft in one plain process, and against each version alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ModelError, ResourceError, StateError
from slimefsdp.models.lora_modules import LoraExperts
from slimefsdp.sampling.params import SampleAnswer
from slimefsdp.trainer import Trainer
from tests.support.float64 import KeepFloat64
from tests.support.plain_lora import EXPERTS
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal, refused
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import settings
from tests.support.versions import (
    LAYERS,
    answers_of,
    asked,
    holding,
    opened,
    plain_log_probs,
    random_adapters,
    sampler_of,
)

PROMPTS = [[3, 9, 4, 1, 7, 12, 5], [8], [2, 30, 2], [11, 6, 19, 28, 1]]
MODELS: dict[str, tuple[str, list[str], Any]] = {
    "qwen3 with its head": ("qwen3", [*LAYERS, "head"], ["q_proj", "v_proj", "down_proj", "lm_head"]),
    "qwen3_moe": ("qwen3_moe", ["attention", "experts"], {**EXPERTS, "target_modules": ["q_proj", "o_proj"]}),
    "gemma2": ("gemma2", LAYERS, ["k_proj", "up_proj"]),
    "gpt_oss": ("gpt_oss", ["attention", "experts"], {**EXPERTS, "target_parameters": ["experts.down_proj"]}),
}


@pytest.fixture(scope="module")
def base(tiny_folder: TinyFolder) -> Path:
    return tiny_folder(vocab_size=97, intermediate_size=55)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three versions, of ranks 1 to 3."""
    root = tmp_path_factory.mktemp("versions")
    return {f"v{n}": random_adapters(base, root / f"v{n}", rank=n, alpha=4.0 + n, seed=n) for n in (1, 2, 3)}


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_of_samples_and_prompts_are_those_of_peft_in_float64(
    tiny_folder: TinyFolder, tmp_path: Path, model: str
) -> None:
    kind, ours, theirs = MODELS[model]
    base = tiny_folder(kind, vocab_size=97)
    folders = {
        name: random_adapters(base, tmp_path / name, rank=rank, alpha=alpha, seed=rank, targets=theirs)
        for name, rank, alpha in (("small", 1, 5.0), ("large", 3, 2.0))
    }
    requests = [
        asked(version, prompt, 2, seed, max_new_tokens=5, temperature=0.7, prompt_log_probs=True)
        for version in (None, *folders)
        for seed, prompt in enumerate(PROMPTS)
    ]
    with KeepFloat64():
        sampler = holding(base, folders, dtype=torch.float64, targets=ours, max_rows=7)
        answers = answers_of(sampler, requests)
    models = {None: opened(base, None), **{name: opened(base, folder) for name, folder in folders.items()}}
    largest = 0.0
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, SampleAnswer) and answer.prompt_log_probs is not None, answer
        assert np.isnan(answer.prompt_log_probs[0]) and len(answer.prompt_log_probs) == len(request.prompt)
        for sample in answer.samples:
            expected = plain_log_probs(models[request.version], [*request.prompt, *sample.tokens])
            found = [*answer.prompt_log_probs[1:], *sample.log_probs]
            largest = max(largest, (torch.tensor(found, dtype=torch.float64) - expected).abs().max().item())
    assert largest <= 1e-12
    firsts = {}
    for request, answer in zip(requests, answers, strict=True):
        firsts.setdefault(request.version, []).append(answer.samples[0].log_probs)  # type: ignore[union-attr]
    assert firsts[None] != firsts["small"] != firsts["large"]


def test_the_likeliest_tokens_of_a_prompts_places_are_those_of_a_plain_model(
    base: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimefsdp.sampling.sampler._TOP_ROWS", 2)
    requests = [
        asked(version, prompt, int(k == 5), prompt_log_probs=True, prompt_top_k=k)
        for version in (None, "v2")
        for prompt in PROMPTS
        for k in (0, 1, 5, 97)
    ]
    with KeepFloat64():
        answers = answers_of(holding(base, folders, dtype=torch.float64), requests)
    models = {None: opened(base, None), "v2": opened(base, folders["v2"])}
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, SampleAnswer) and len(answer.samples) == request.num_samples
        top = answer.prompt_top_tokens
        assert (top is None) == (request.prompt_top_k == 0)
        if top is None:
            continue
        with torch.no_grad(), KeepFloat64():
            logits = models[request.version](input_ids=torch.tensor([list(request.prompt)])).logits[0, :-1]
        expected = logits.log_softmax(-1).topk(request.prompt_top_k)
        assert top.tokens.tolist() == expected.indices.tolist()
        assert np.abs(top.log_probs - expected.values.numpy()).max(initial=0.0) <= 1e-12


def test_versions_that_are_sampled_together_get_what_each_gets_alone(base: Path, folders: dict[str, Path]) -> None:
    requests = [
        asked(version, prompt, 1 + seed, seed, max_new_tokens=4 + seed, temperature=1.2, prompt_log_probs=seed == 1)
        for seed, prompt in enumerate(PROMPTS)
        for version in (None, *folders)
    ]
    sampler = holding(base, folders, max_rows=6)
    together = answers_of(sampler, requests)
    assert sampler.stats().running_rows == sampler.stats().cache_bytes == 0
    for request, answer in zip(requests, together, strict=True):
        held = {} if request.version is None else {request.version: folders[request.version]}
        (alone,) = answers_of(holding(base, held), [request])
        assert isinstance(answer, SampleAnswer) and isinstance(alone, SampleAnswer)
        for ours, theirs in zip(answer.samples, alone.samples, strict=True):
            assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        if request.prompt_log_probs:
            assert answer.prompt_log_probs == pytest.approx(alone.prompt_log_probs, abs=1e-5, nan_ok=True)
    drawn = sum(len(sample.tokens) for answer in together for sample in answer.samples)  # type: ignore[union-attr]
    assert sampler.stats().tokens_drawn == drawn


TOKENS = [5, 9, 33, 2, 71, 8, 8, 90, 14]


def of_a_trainer(rank: int, config: Any, folder: Path) -> list[np.ndarray]:
    """Log-probs of TOKENS by the reference, and by an adapter of a smaller rank, which is exported."""
    trainer = Trainer(config, device=torch.device("cpu"))
    trainer.create_adapter("small", rank=2, alpha=5.0, seed=3)
    samples = [
        {"tokens": TOKENS, "response_length": len(TOKENS) - 1, "reward": float(n), "group_id": 0} for n in range(2)
    ]
    batch = RolloutBatch.from_samples(samples)
    trainer.train_step(batch)
    trainer.train_step(batch)
    trainer.export_adapter(folder)
    one = batch.select([0])
    return [trainer.compute_log_probs(one, role).log_probs for role in ("ref", "actor")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_log_probs_have_the_bits_of_the_trainer_and_of_its_reference(
    base: Path, ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    config = settings(
        base,
        precision={"compute_dtype": dtype},
        lora={"rank": 4, "targets": LAYERS},
        optim={"lr": 0.05, "total_updates": 100},
        loss={"kl_coefficient": 0.1},
        rollout={"temperature": 1.0},
    )
    reference, actor = ranks.run(1, of_a_trainer, config, tmp_path / "small")[0]
    sampler = holding(base, {"small": tmp_path / "small"}, dtype=getattr(torch, dtype), rank=4)
    requests = [asked(version, TOKENS, 0, prompt_log_probs=True) for version in (None, "small")]
    ours = [answer.prompt_log_probs for answer in answers_of(sampler, requests)]  # type: ignore[union-attr]
    for found, expected in zip(ours, (reference, actor), strict=True):
        assert found is not None and found.dtype == np.float32
        assert found[1:].tobytes() == expected.astype(np.float32).tobytes()
    assert not np.array_equal(reference, actor)


def test_rows_are_bounded_over_all_versions_and_free_ones_go_to_who_has_least(
    base: Path, folders: dict[str, Path]
) -> None:
    sampler = holding(base, folders, max_rows=4)
    first = [sampler.add(asked("v1", [seed], 2, seed, max_new_tokens=5 + seed)) for seed in range(6)]
    sampler.step()
    assert (sampler.stats().running_rows, sampler.stats().waiting_rows) == (4, 8), "nobody else wants one"
    later = {name: sampler.add(asked(name, [7], 3, max_new_tokens=3)) for name in ("v2", "v3")}
    ended: list[int] = []
    while not sampler.is_idle:
        ended += [number for number, _ in sampler.step()]
        stats = sampler.stats()
        assert stats.running_rows <= 4
    # the rows of the first two requests, as they end, go to the versions that have none
    assert set(ended) == {*first, *later.values()} and ended[0] == first[0]
    assert max(map(ended.index, later.values())) < ended.index(first[4])


def test_a_request_that_is_cancelled_frees_its_rows_and_others_do_not_notice(
    base: Path, folders: dict[str, Path]
) -> None:
    sampler = holding(base, folders, max_rows=5)
    kept = [asked("v1", PROMPTS[0], 2, 1), asked(None, PROMPTS[3], 1, 2)]
    gone = [asked("v1", PROMPTS[2], 3, 3, max_new_tokens=99), asked("v2", PROMPTS[1], 9, 4, max_new_tokens=99)]
    numbers = [sampler.add(request) for request in (*kept, *gone)]
    for _ in range(3):
        sampler.step()
    for number in (*numbers[2:], numbers[2], 99):
        sampler.cancel(number)
    found: dict[int, Any] = {}
    while not sampler.is_idle:
        found |= dict(sampler.step())
    assert sorted(found) == numbers[:2] and sampler.stats().running_rows == 0
    alone = answers_of(holding(base, folders), kept)
    assert [[s.tokens for s in found[n].samples] for n in numbers[:2]] == [[s.tokens for s in a.samples] for a in alone]


def test_a_version_that_is_dropped_ends_its_requests_and_another_of_that_name_has_its_own_weights(
    base: Path, folders: dict[str, Path]
) -> None:
    sampler, adapters = sampler_of(base)
    sampler.reserve("a")
    with refused(StateError, "version", "'a'"):
        sampler.add(asked("a", [1]))
    size = sampler.hold("a", adapters.read(folders["v1"]))
    assert size == adapters.version_bytes == sampler.stats().versions["a"] > 0
    numbers = [sampler.add(asked("a", [1], 2, max_new_tokens=99)) for _ in range(2)]
    other = sampler.add(asked(None, [1], 1))
    for _ in range(3):
        sampler.step()
    assert sampler.drop("a") == numbers and sampler.versions == []
    with refused(StateError, "version", "'a'"):
        sampler.drop("a")
    with refused(StateError, "version", "'a'"):
        sampler.add(asked("a", [1]))
    found = [number for _ in range(9) for number, _ in sampler.step()]
    assert found == [other] and sampler.stats().cache_bytes == 0 and sampler.is_idle
    sampler.reserve("a")
    sampler.hold("a", adapters.read(folders["v2"]))
    (again,) = answers_of(sampler, [asked("a", PROMPTS[0])])
    (expected,) = answers_of(holding(base, {"v2": folders["v2"]}), [asked("v2", PROMPTS[0])])
    assert again == expected


def test_a_version_that_does_not_fit_is_refused_and_nothing_is_given_up(base: Path, folders: dict[str, Path]) -> None:
    _, adapters = sampler_of(base)
    sampler = holding(base, {"v1": folders["v1"]}, memory_bytes=2 * adapters.version_bytes)
    with refused(StateError, "version", "'v1'"):
        sampler.reserve("v1")
    sampler.reserve("v2")
    with refused(StateError, "version", "'v2'"):
        sampler.reserve("v2")
    with refused(ResourceError, "memory_bytes", "'v3'", 2):
        sampler.reserve("v3")
    sampler.release("v2")
    sampler.reserve("v3")
    assert sampler.versions == ["v1"]
    (answer,) = answers_of(sampler, [asked("v1", [4])])
    assert isinstance(answer, SampleAnswer)


def test_logits_that_are_not_finite_end_the_requests_of_their_version_alone(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    broken = random_adapters(base, tmp_path / "broken", size=1e30)
    sampler = holding(base, {"good": folders["v2"], "broken": broken}, max_rows=8)
    requests = [asked(name, prompt, 2, 5) for prompt in PROMPTS for name in ("good", "broken", None)]
    requests.append(asked("broken", PROMPTS[0], 0, prompt_log_probs=True))
    answers = answers_of(sampler, requests)
    for request, answer in zip(requests, answers, strict=True):
        if request.version == "broken":
            assert_refusal(answer, StateError, "logits")
    fine = [request for request in requests if request.version != "broken"]
    alone = answers_of(holding(base, {"good": folders["v2"]}), fine)
    found = [answer for request, answer in zip(requests, answers, strict=True) if request.version != "broken"]
    assert [[s.tokens for s in one.samples] for one in found] == [[s.tokens for s in one.samples] for one in alone]  # type: ignore[union-attr]
    assert sampler.stats().cache_bytes == 0


def test_requests_that_cannot_be_are_refused_by_field(base: Path, folders: dict[str, Path]) -> None:
    sampler = holding(base, {"v1": folders["v1"]}, max_samples=9)
    for request, field, named in [
        (asked(None, []), "prompt", []),
        (asked(None, [3, 97]), "prompt", [1, 97]),
        (asked(None, [3, -1]), "prompt", [1, -1]),
        (asked(None, [2**70]), "prompt", []),
        (asked(None, [1.5]), "prompt", []),  # type: ignore[list-item]
        (asked(None, [True]), "prompt", []),
        (asked(None, [[1], [2, 3]]), "prompt", []),  # type: ignore[list-item]
        (asked(None, [1], 0), "num_samples", [0]),
        (asked(None, [1], -1, prompt_log_probs=True), "num_samples", [-1]),
        (asked(None, [1], 10), "num_samples", [10, 9]),
        (asked(None, [1], 1.0), "num_samples", [1.0]),  # type: ignore[arg-type]
        (asked(None, [1] * 500, max_new_tokens=13), "max_new_tokens", [500, 13, 512]),
        (asked(None, [1] * 513, 0, prompt_log_probs=True), "prompt", [513, 512]),
        (asked(None, [1], prompt_log_probs=True, prompt_top_k=98), "prompt_top_k", [98, 97]),
        (asked(None, [1], prompt_top_k=1), "prompt_top_k", [1]),
        (asked(None, [1], stop=("x",)), "stop", []),
    ]:
        with refused(BatchError, field, *named):
            sampler.add(request)
    with refused(StateError, "version", "'v2'"):
        sampler.add(asked("v2", [1]))
    assert sampler.is_idle and sampler.step() == []
    (answer,) = answers_of(sampler, [asked(None, [1] * 500, max_new_tokens=12)])
    assert isinstance(answer, SampleAnswer) and len(answer.samples[0].tokens) == 12


def test_a_version_of_experts_is_read_while_the_model_computes(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_folder("qwen3_moe", vocab_size=97)
    folder = random_adapters(base, tmp_path / "experts", targets={**EXPERTS, "target_modules": ["q_proj"]})
    sampler, adapters = sampler_of(base, targets=["attention", "experts"])
    sampler.reserve("first")
    sampler.hold("first", adapters.read(folder))
    kind = next(type(module) for module in adapters._modules if isinstance(module, LoraExperts)).__mro__[2]
    computed, read = kind.forward, []

    def computes(module: torch.nn.Module, *args: Any) -> Any:  # its stacks are the sums with the adapters' products
        read.append(adapters.read(folder))
        return computed(module, *args)

    monkeypatch.setattr(kind, "forward", computes)
    (answer,) = answers_of(sampler, [asked("first", PROMPTS[0], max_new_tokens=1)])
    assert isinstance(answer, SampleAnswer) and len(read) > 0


def test_adapters_that_were_trained_beside_other_weights_are_refused(
    base: Path, tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(base, lora={"rank": 4, "targets": LAYERS}, loss={"kl_coefficient": 0.1})
    ranks.run(1, of_a_trainer, config, tmp_path / "small")
    _, adapters = sampler_of(tiny_folder(vocab_size=97, intermediate_size=55, seed=1), rank=4)
    with refused(ModelError, "folder"):
        adapters.read(tmp_path / "small")
