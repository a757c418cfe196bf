"""The sampling engine as a Ray actor: many requests of many versions at once, and what ends one of them alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from actors.engines.sampling_engine import SamplingEngine, start_sampling_engine
from actors.engines.tokenizer import load_tokenizer
from slimefsdp.errors import BatchError, ModelError, ResourceError, SlimeError, StateError
from slimefsdp.models.build import load_for_sampling
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.lora import adapted_matrices
from slimefsdp.training.build import lora_of
from tests.support.refusals import assert_refusal, refused
from tests.support.versions import answers_of, asked, holding, random_adapters
from tests.support.waiting import PATIENCE_S, wait_until

NAMES = ["v0", "v1", "v2", "v3"]


@pytest.fixture(scope="module")
def base(example: Path) -> Path:
    return example / "model"


@pytest.fixture(scope="module")
def config(make_config: Any) -> Any:
    return make_config(mesh={"dp": 1}, lora={"rank": 4})


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("versions")
    return {name: random_adapters(base, root / name, rank=1 + n, seed=n) for n, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def engine(cluster: None, config: Any, folders: dict[str, Path]) -> Iterator[Any]:
    """With four versions, and room for one more."""
    size = bytes_of_adapters(config)
    started = start_sampling_engine(config, max_rows=32, memory_bytes=5 * size, max_samples=64)
    sizes = ray.get([started.load.remote(name, str(folder)) for name, folder in folders.items()], timeout=PATIENCE_S)
    assert sizes == [size] * 4
    yield started
    ray.kill(started)


@contextmanager
def refused_remotely(kind: type[SlimeError], field: str, *values: object) -> Iterator[None]:
    """As `refused`, of what a call of an actor raises."""
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        yield
    assert_refusal(caught.value.cause, kind, field, *values)


def bytes_of_adapters(config: Any) -> int:
    """Of A and B in the example's model."""
    folder = read_model_folder(config.model.path)
    policy = load_for_sampling(folder, torch.float32, torch.device("cpu"), lora_of(config))
    return sum(matrix.a.nbytes + matrix.b.nbytes for matrix in adapted_matrices(policy))


def answered(refs: Any) -> Any:
    return ray.get(refs, timeout=PATIENCE_S)


def stats_of(engine: Any) -> Any:
    return answered(engine.stats.remote())


def test_two_hundred_requests_of_four_versions_and_the_base_are_each_answered_once(
    engine: Any, base: Path, folders: dict[str, Path]
) -> None:
    rng = np.random.default_rng(3)
    requests = [
        asked(
            [None, *NAMES][place % 5],
            rng.integers(0, 320, 1 + place % 13).tolist(),
            1 + place % 3,
            int(rng.integers(0, 2**63 - 1)),
            max_new_tokens=1 + place % 17,
            temperature=0.7 + 0.1 * (place % 5),
            top_k=(None, 5)[place % 2],
            top_p=(1.0, 0.9, 0.5)[place % 3],
            prompt_log_probs=place % 7 == 0,
        )
        for place in range(200)
    ]
    before = stats_of(engine).tokens_drawn
    answers = answered([engine.sample.remote(request) for request in requests])
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.samples) == request.num_samples
        for sample in answer.samples:
            assert len(sample.tokens) == len(sample.log_probs) == request.params.max_new_tokens
            assert sample.finish_reason == "length"
        assert (answer.prompt_log_probs is not None) == request.prompt_log_probs
    stats = stats_of(engine)
    drawn = sum(request.num_samples * request.params.max_new_tokens for request in requests)
    assert stats.tokens_drawn - before == drawn
    assert (stats.running_rows, stats.waiting_requests, stats.cache_bytes) == (0, 0, 0)
    assert sorted(stats.versions) == NAMES == sorted(answered(engine.versions.remote()))
    few = range(0, 200, 9)  # of all versions
    alone = answers_of(holding(base, folders, rank=4), [requests[place] for place in few])
    for place, expected in zip(few, alone, strict=True):
        for ours, theirs in zip(answers[place].samples, expected.samples, strict=True):  # type: ignore[union-attr]
            assert ours.tokens == theirs.tokens
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_stop_texts_and_end_tokens_end_samples(engine: Any, base: Path) -> None:
    (free,) = answered(engine.sample.remote(asked("v1", [5, 9], 1, 7, max_new_tokens=30))).samples
    request = asked("v1", [5, 9], 1, 7, max_new_tokens=30, end_token_ids=frozenset([free.tokens[4]]))
    (ended,) = answered(engine.sample.remote(request)).samples
    first = free.tokens.index(free.tokens[4]) + 1
    assert ended.tokens == free.tokens[:first] and ended.finish_reason == "stop"
    decode = load_tokenizer(str(base)).decode
    stop = decode(free.tokens[9:11])
    request = asked("v1", [5, 9], 1, 7, max_new_tokens=30, stop=(stop,))
    (stopped,) = answered(engine.sample.remote(request)).samples
    assert stopped.tokens == free.tokens[: len(stopped.tokens)] and stopped.finish_reason == "stop"
    assert stop in decode(stopped.tokens) and stop not in decode(stopped.tokens[:-1])


def test_an_unknown_version_and_bad_requests_are_refused_by_name(engine: Any) -> None:
    for request, kind, field in [
        (asked("v9", [1]), StateError, "version"),
        (asked("v1", [320]), BatchError, "prompt"),
        (asked("v1", []), BatchError, "prompt"),
        (asked("v1", [1], 65), BatchError, "num_samples"),
    ]:
        with refused_remotely(kind, field):
            answered(engine.sample.remote(request))


def test_what_cannot_be_loaded_leaves_the_others_and_its_name_free(
    engine: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    with refused_remotely(StateError, "version"):
        answered(engine.load.remote("v1", str(folders["v2"])))
    with refused_remotely(ModelError, "folder"):
        answered(engine.load.remote("v4", str(tmp_path)))
    assert answered(engine.load.remote("v4", str(folders["v2"]))) > 0
    with refused_remotely(ResourceError, "memory_bytes"):
        answered(engine.load.remote("v5", str(folders["v2"])))
    same = [asked(name, [3, 4], 2, 9) for name in ("v2", "v4")]
    first, second = answered([engine.sample.remote(request) for request in same])
    assert [sample.tokens for sample in first.samples] == [sample.tokens for sample in second.samples]
    assert sorted(answered(engine.versions.remote())) == [*NAMES, "v4"]
    answered(engine.drop.remote("v4"))
    assert sorted(answered(engine.versions.remote())) == NAMES
    with refused_remotely(StateError, "version"):
        answered(engine.drop.remote("v4"))


def test_a_version_that_is_dropped_while_it_is_sampled_ends_its_requests_alone(
    engine: Any, folders: dict[str, Path]
) -> None:
    answered(engine.load.remote("short lived", str(folders["v3"])))
    others = [engine.sample.remote(asked(name, [8, 8], 2, 1, max_new_tokens=40)) for name in ("v0", None)]
    ours = [engine.sample.remote(asked("short lived", [8], 2, 1, max_new_tokens=200)) for _ in range(3)]
    wait_until(lambda: stats_of(engine).running_rows >= 6)
    answered(engine.drop.remote("short lived"))
    for ref in ours:
        with refused_remotely(StateError, "version"):
            answered(ref)
    assert [len(answer.samples[1].tokens) for answer in answered(others)] == [40, 40]


def test_a_request_can_be_cancelled_by_its_key_also_before_it_comes(engine: Any) -> None:
    running = engine.sample.remote(asked("v2", [8], 32, 1, max_new_tokens=250), "a")
    waiting = engine.sample.remote(asked("v2", [8], 2, 1, max_new_tokens=250), "b")
    wait_until(lambda: stats_of(engine).waiting_requests == 1)
    with refused_remotely(StateError, "key", "'a'"):
        answered(engine.sample.remote(asked(None, [8]), "a"))
    answered([engine.cancel.remote(key) for key in "abc"])
    for key, ref in {"a": running, "b": waiting, "c": engine.sample.remote(asked(None, [8]), "c")}.items():
        with refused_remotely(StateError, "key", f"'{key}'"):
            answered(ref)
    assert stats_of(engine).running_rows == stats_of(engine).waiting_rows == 0


def test_it_says_how_far_it_is_while_it_computes(engine: Any) -> None:
    assert answered(engine.progress.remote()).progress.activity == "idle"
    engine.sample.remote(asked("v2", [8], 16, 1, max_new_tokens=250), "long")
    wait_until(lambda: answered(engine.progress.remote()).progress.activity == "sample")
    answered(engine.cancel.remote("long"))
    wait_until(lambda: answered(engine.progress.remote()).progress.activity == "idle")


def test_an_engine_that_is_shut_down_answers_everybody(config: Any, base: Path, folders: dict[str, Path]) -> None:
    """Without Ray: the class is a plain one."""

    async def life() -> None:
        engine = SamplingEngine(config, max_rows=4)
        await engine.load("v1", str(folders["v1"]))
        request = asked("v1", [1], 2, max_new_tokens=250)
        waiting = [asyncio.create_task(engine.sample(request, key)) for key in "abcde"]
        while (await engine.stats()).running_rows < 4:
            await asyncio.sleep(0)
        await engine.cancel("a")
        while (await engine.stats()).waiting_requests > 2:
            await asyncio.sleep(0)
        await engine.shutdown()
        await engine.shutdown()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], StateError) and found[0].field == "key"
        for error in found[1:]:
            assert isinstance(error, StateError) and error.field == "engine"
        for call in (engine.sample(asked(None, [1])), engine.stats(), engine.load("x", "y"), engine.drop("v1")):
            with refused(StateError, "engine"):
                await call

    asyncio.run(life())
