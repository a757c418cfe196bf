"""The embedded engine in one process: calls that sample together, aborts, updates while it samples, sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engines.embedded import EmbeddedEngine
from actors.engines.protocol import Request, Sample
from actors.workers.weight_update import pack_bucket
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError
from slimefsdp.sampling.params import SamplingParams
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S, wait_until

PROMPTS = [[5, 9, 12], [7], [30, 31, 3, 8]]
ENDLESS = 100_000  # tokens: a call that something else has to end


@pytest.fixture
def config(make_config: Any) -> RunConfig:
    found: RunConfig = make_config(cluster={"sync_timeout_s": 5.0})
    return found


@pytest.fixture(scope="module")
def models(make_config: Any) -> list[Any]:
    """Three versions of the weights, by number."""
    torch.manual_seed(3)
    found = [AutoModelForCausalLM.from_pretrained(make_config().model.path).eval() for _ in range(3)]
    with torch.no_grad():
        for model in found[1:]:
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return found


def send(engine: EmbeddedEngine, model: Any, version: int) -> None:
    engine.begin(version, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    engine.receive(pack_bucket([(name, parameter.detach()) for name, parameter in model.named_parameters()]))
    engine.commit(version)


def requests(max_new_tokens: int, samples: int = 2, **changes: Any) -> list[Request]:
    return [
        Request(prompt, samples, SamplingParams(max_new_tokens, 0.8, seed=(place,), **changes))
        for place, prompt in enumerate(PROMPTS)
    ]


def all_of(engine: EmbeddedEngine, asked: Sequence[Request]) -> list[Sample]:
    found = [sample for samples in engine.generate(asked) for sample in samples]
    return sorted(found, key=lambda sample: (sample.request, sample.number))


def contents(samples: Sequence[Sample]) -> list[tuple[int, int, list[int], str]]:
    return [(sample.request, sample.number, sample.tokens, sample.finish_reason) for sample in samples]


def sampling(engine: EmbeddedEngine, asked: Sequence[Request]) -> tuple[Future[list[Sample]], Callable[[], bool]]:
    """A call on a thread of its own, which has drawn tokens when this returns; and whether it still draws."""
    future = ThreadPoolExecutor(1).submit(all_of, engine, asked)
    before = heartbeat.snapshot().ticks
    wait_until(lambda: future.done() or heartbeat.snapshot().ticks > before + 20)
    assert not future.done()
    return future, lambda: not future.done()


@torch.no_grad()
def log_probs_by(model: Any, sample: Sample) -> list[float]:
    tokens = [*PROMPTS[sample.request], *sample.tokens]
    logits = model(torch.tensor([tokens])).logits[0, -len(sample.tokens) - 1 : -1].double() / 0.8
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0].tolist()


def test_calls_that_sample_together_get_what_each_gets_alone(config: RunConfig, models: list[Any]) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 4)
    asked = [requests(length) for length in (60, 3, 20, 40)]
    alone = [all_of(engine, one) for one in asked]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda one: all_of(engine, one), asked))
    assert list(map(contents, together)) == list(map(contents, alone))
    for samples in together:
        for sample in samples:
            assert sample.versions == ((4, 0, len(sample.tokens)),)
            assert sample.log_probs == pytest.approx(log_probs_by(models[0], sample), abs=1e-4)
    assert wait_until(lambda: heartbeat.snapshot().activity == heartbeat.IDLE)


def test_samples_come_as_they_end(config: RunConfig, models: list[Any]) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 0)
    asked = [Request(PROMPTS[0], 1, SamplingParams(length)) for length in (40, 2, 20)]
    lengths = [len(sample.tokens) for samples in engine.generate(asked) for sample in samples]
    assert lengths == [2, 20, 40]


def test_what_runs_goes_on_with_the_weights_of_an_update(config: RunConfig, models: list[Any]) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 0)
    running, is_running = sampling(engine, requests(ENDLESS))
    for version in (1, 2):
        send(engine, models[version], version)
        ticks = heartbeat.snapshot().ticks
        wait_until(lambda ticks=ticks: not is_running() or heartbeat.snapshot().ticks > ticks + 30)  # type: ignore[misc]
        assert is_running()
    engine.abort()
    for sample in running.result(timeout=PATIENCE_S):
        assert [span.version for span in sample.versions] == [0, 1, 2]
        for version, start, end in sample.versions:
            expected = log_probs_by(models[version], sample)[start:end]
            assert sample.log_probs[start:end] == pytest.approx(expected, abs=1e-3)


def test_between_two_versions_nothing_is_sampled(config: RunConfig, models: list[Any]) -> None:
    engine = EmbeddedEngine(config, 0)
    with refused(StateError, "update_weights"):
        all_of(engine, requests(3))
    send(engine, models[0], 0)
    running, _ = sampling(engine, requests(ENDLESS))
    engine.begin(1, {name: tuple(parameter.shape) for name, parameter in models[1].named_parameters()})
    with refused(StateError, "update_weights"):
        all_of(engine, requests(3))
    with refused(StateError, "update_weights", "cluster.sync_timeout_s=5"):
        running.result(timeout=PATIENCE_S)
    send(engine, models[1], 1)
    assert {sample.versions for sample in all_of(engine, requests(3))} == {((1, 0, 3),)}, "what was given up is gone"


def test_an_abort_ends_all_calls_with_what_they_have(config: RunConfig, models: list[Any]) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 0)
    whole = contents(all_of(engine, requests(300)))
    first, _ = sampling(engine, requests(ENDLESS))
    second, _ = sampling(engine, requests(ENDLESS - 1))
    began = time.monotonic()
    engine.abort()
    for running in (first, second):
        found = contents(running.result(timeout=PATIENCE_S))
        assert [one[3] for one in found] == ["abort"] * 6
        for one, other in zip(found, whole, strict=True):
            both = min(len(one[2]), len(other[2]))
            assert both > 0 and one[2][:both] == other[2][:both]
    assert time.monotonic() - began < PATIENCE_S
    assert contents(all_of(engine, requests(300))) == whole


def test_a_call_that_nobody_waits_for_any_more_leaves_the_others_alone(config: RunConfig, models: list[Any]) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 0)
    whole = contents(all_of(engine, requests(200)))
    abandoned = engine.generate([Request(PROMPTS[0], 1, SamplingParams(2)), *requests(5000)])
    next(iter(abandoned))
    running = ThreadPoolExecutor(1).submit(all_of, engine, requests(200))
    closing = threading.Thread(target=abandoned.close)  # type: ignore[attr-defined]
    closing.start()
    assert contents(running.result(timeout=PATIENCE_S)) == whole
    closing.join(PATIENCE_S)
    assert wait_until(lambda: heartbeat.snapshot().activity == heartbeat.IDLE)


def test_an_error_of_the_model_reaches_every_call_and_leaves_an_engine_to_go_on_with(
    config: RunConfig, models: list[Any]
) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 0)
    first, _ = sampling(engine, requests(ENDLESS))
    second, _ = sampling(engine, requests(ENDLESS))
    broken = AutoModelForCausalLM.from_pretrained(config.model.path)
    with torch.no_grad():
        broken.get_input_embeddings().weight.fill_(float("nan"))
    send(engine, broken, 1)
    for running in (first, second):
        with refused(StateError, "logits"):
            running.result(timeout=PATIENCE_S)
    send(engine, models[2], 2)
    assert len(all_of(engine, requests(4))) == 6


def test_an_engine_that_sleeps_holds_no_weights_and_samples_again_after_new_ones(
    config: RunConfig, models: list[Any]
) -> None:
    engine = EmbeddedEngine(config, 0)
    send(engine, models[0], 0)
    whole = contents(all_of(engine, requests(20)))
    running, _ = sampling(engine, requests(ENDLESS))
    engine.sleep()
    engine.sleep()
    assert {sample.finish_reason for sample in running.result(timeout=PATIENCE_S)} == {"abort"}
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine._policy.parameters()) == 0
    with refused(StateError, "update_weights"):
        all_of(engine, requests(3))
    with refused(StateError, "update_weights"):
        send(engine, models[0], 1)
    engine.wake_up()
    with refused(StateError, "update_weights"):
        all_of(engine, requests(3))
    send(engine, models[0], 1)
    assert contents(all_of(engine, requests(20))) == whole
