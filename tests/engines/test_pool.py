"""Engines sample from committed weights only, say exactly what they sampled, and cannot take the trainer down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.placement_group import remove_placement_group

from actors.cluster.placement import is_alive
from actors.engines.pool import EnginePool, SampledResponse, mean_differences
from actors.engines.tokenizer import encode_prompt, load_tokenizer
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import EngineError, StateError, SyncError
from tests.support.refusals import assert_refusal, names, refused
from tests.support.runs import bits
from tests.support.waiting import PATIENCE_S

PROMPTS = ["sort 31", "sort 2718", "sort 90210", "sort 5", "sort 777"]
SHAPES = {"weight": (2, 2)}


@pytest.fixture(scope="module")
def two_engines(cluster: None, make_config: Any) -> Iterator[tuple[EnginePool, StateError]]:
    """Two engines, and what they said when they were asked to sample before any update."""
    pool = EnginePool.launch(make_config(cluster={"sync_timeout_s": 15.0}))  # in which two tests wait for no commit
    with pytest.raises(StateError) as refusal:
        pool.generate(PROMPTS, samples_per_prompt=1, seed=(0,))
    yield pool, refusal.value
    pool.shutdown()


@pytest.fixture
def engines(two_engines: tuple[EnginePool, StateError], group: Any) -> EnginePool:
    """Two engines with the group's first weights."""
    group.update_weights(two_engines[0].receivers)
    return two_engines[0]


def test_engines_whose_places_are_gone_come_up_in_others(cluster: None, make_config: Any) -> None:
    pool = EnginePool.launch(make_config(rollout={"engines": 1}, cluster={"launch_timeout_s": PATIENCE_S}))
    try:
        (lost,) = pool._processes.places._groups.values()
        remove_placement_group(lost)
        pool._processes.restart([0])
        assert pool._processes.lost() == []
        (place,) = pool._processes.places._groups.values()
        assert is_alive(place) and not is_alive(lost)
    finally:
        pool.shutdown()
    assert not is_alive(place)


def contents(samples: list[SampledResponse]) -> list[tuple[int, list[int], list[float]]]:
    return [(sample.prompt, sample.tokens, sample.log_probs) for sample in samples]


def test_requests_sample_as_the_settings_of_training_or_of_evaluation_say(make_config: Any) -> None:
    rollout = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["</a>"], "max_new_tokens": 8}
    pool = EnginePool(make_config(rollout=rollout, evaluation={"temperature": 1.5, "top_p": 0.5, "max_new_tokens": 20}))
    trained, evaluated = (pool.params((1,), evaluates=one) for one in (False, True))
    assert (trained.temperature, trained.top_p, trained.max_new_tokens) == (0.7, 0.9, 8)
    assert (evaluated.temperature, evaluated.top_p, evaluated.max_new_tokens) == (1.5, 0.5, 20)
    assert not trained.renormalized, "the ratio of the first update is that of the trainer's log-probs over all tokens"
    for params in (trained, evaluated):
        assert (params.top_k, params.min_p, params.stop) == (5, 0.1, ("</a>",))
    assert pool.params((1,), evaluates=True, max_new_tokens=99).max_new_tokens == 20
    greedy = EnginePool(make_config(rollout=rollout, evaluation={"temperature": 0.0})).params((1,), evaluates=True)
    for likeliest in (pool.params((1,), greedy=True), greedy):
        assert likeliest.greedy and not likeliest.tempered and likeliest.temperature == 0.7
        assert not likeliest.is_limited and likeliest.stop == ("</a>",)


def test_an_engine_without_weights_refuses_to_sample(two_engines: tuple[EnginePool, StateError]) -> None:
    _, refusal = two_engines
    assert_refusal(refusal, StateError, "update_weights")
    assert "update_from" in str(refusal.hint)


def test_an_engine_between_two_versions_refuses_to_sample(engines: EnginePool, group: Any, small_batch: Any) -> None:
    manifest = {name: tuple(shape) for name, shape in weight_shapes(group).items()}
    ray.get(engines.receivers[1].begin.remote(9, manifest), timeout=PATIENCE_S)
    with refused(StateError, "update_weights"):
        engines.generate(PROMPTS, samples_per_prompt=1, seed=(0,))
    with pytest.raises(SyncError) as caught:  # as Ray raises it, of a class that is both
        ray.get(engines.receivers[1].commit.remote(9), timeout=PATIENCE_S)
    assert caught.value.field == "update_weights" and names(caught.value.message, len(manifest))
    assert engines.generate(PROMPTS[:1], samples_per_prompt=1, seed=(0,))[0] == 0, "the other engine still holds 0"
    group.train_step(small_batch)
    group.update_weights(engines.receivers[1:])
    with refused(StateError, "update_weights", [0, 1]):
        engines.generate(PROMPTS, samples_per_prompt=1, seed=(0,))
    group.update_weights(engines.receivers)
    assert engines.generate(PROMPTS, samples_per_prompt=1, seed=(0,))[0] == 1


def weight_shapes(group: Any) -> dict[str, Any]:
    """Names and shapes of the model's weights, as its folder has them."""
    from slimefsdp.models.hf_folder import read_model_folder

    return {name: entry.shape for name, entry in read_model_folder(group.config.model.path).tensors.items()}


def test_a_model_of_other_shapes_is_refused(engines: EnginePool) -> None:
    with pytest.raises(SyncError) as caught:
        ray.get(engines.receivers[0].begin.remote(1, SHAPES), timeout=PATIENCE_S)
    assert caught.value.field == "update_weights" and caught.value.hint
    assert engines.generate(PROMPTS[:1], samples_per_prompt=1, seed=(0,))[0] == 0


def test_sampled_log_probs_are_the_trainers(engines: EnginePool, group: Any, small_batch: Any) -> None:
    for expected_version in (0, 1):
        version, samples = engines.generate(PROMPTS, samples_per_prompt=4, seed=(1, expected_version))
        assert version == expected_version
        batch = RolloutBatch.from_samples(
            [
                {"tokens": s.tokens, "response_length": s.response_length, "rollout_log_probs": s.log_probs}
                for s in samples
            ],
            temperature=group.config.rollout.temperature,
        )
        assert batch.num_response_tokens > 40 and np.abs(batch.rollout_log_probs).mean() > 0.5
        trainers = group.compute_log_probs(batch).log_probs
        np.testing.assert_allclose(trainers, batch.rollout_log_probs, atol=1e-4)
        group.train_step(small_batch)
        assert np.abs(group.compute_log_probs(batch).log_probs - trainers).max() > 1e-3, "another version would show"
        group.update_weights(engines.receivers)


def test_equal_seeds_give_equal_samples_and_others_do_not(engines: EnginePool) -> None:
    seeds: tuple[Any, ...] = ((4, 1), (4, 1), (4, 2), (4,), 4)
    first, again, other, alone, number = (
        contents(engines.generate(PROMPTS, samples_per_prompt=3, seed=seed)[1]) for seed in seeds
    )
    assert first == again
    assert first != other
    assert alone == number != first


@pytest.mark.parametrize("count", [1, 5])
def test_prompts_are_split_over_engines_and_come_back_in_order(engines: EnginePool, group: Any, count: int) -> None:
    _, samples = engines.generate(PROMPTS[:count], samples_per_prompt=3, seed=(5,))
    assert [sample.prompt for sample in samples] == [index for index in range(count) for _ in range(3)]
    tokenizer = load_tokenizer(str(group.config.model.path))
    starts = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    for sample in samples:
        assert sample.tokens[: -sample.response_length] == starts[sample.prompt]
        assert len(sample.log_probs) == sample.response_length <= 8
    same_prompt = [tuple(sample.tokens) for sample in samples[:3]]
    assert len(set(same_prompt)) > 1, "samples of one prompt are drawn independently"


def test_two_engines_draw_differently_for_the_same_prompt(engines: EnginePool) -> None:
    _, samples = engines.generate([PROMPTS[2]] * 2, samples_per_prompt=2, seed=(6,))
    assert samples[0].tokens != samples[2].tokens or samples[1].tokens != samples[3].tokens


def test_a_dead_engine_is_a_sync_error_and_the_trainer_works_on(
    two_engines: tuple[EnginePool, StateError], group: Any, batch: RolloutBatch
) -> None:
    class Engine:  # nothing of an engine is left when it is dead, so it need not hold a model before
        def begin(self, version: int, manifest: Any) -> None: ...

        def receive(self, bucket: Any) -> None: ...

        def commit(self, version: int) -> None: ...

    expected = [bits(group.train_step(batch)) for _ in range(2)]
    group.load(0)
    assert bits(group.train_step(batch)) == expected[0]
    pids = [health.pid for health in group.health()]
    dead = ray.remote(Engine).options(num_cpus=0).remote()
    ray.get(dead.begin.remote(0, {}), timeout=PATIENCE_S)
    ray.kill(dead)
    with pytest.raises(SyncError) as failed:
        group.update_weights([*two_engines[0].receivers, dead])
    # not cluster.sync_timeout_s, as where an answer was waited for in vain
    assert failed.value.field == "update_weights" and failed.value.hint and "begin" in failed.value.message
    with refused(StateError, "update_weights"):
        two_engines[0].generate(PROMPTS, samples_per_prompt=1, seed=(0,))
    assert [health.pid for health in group.health()] == pids
    assert bits(group.train_step(batch)) == expected[1]
    group.update_weights(two_engines[0].receivers)
    assert two_engines[0].generate(PROMPTS, samples_per_prompt=1, seed=(0,))[0] > 0


def test_an_engine_whose_log_probs_differ_from_the_trainers_is_refused_by_its_index(make_config: Any) -> None:
    config, owners = make_config(rollout={"engine_logprob_bound": 0.5}), np.array([0, 0, 1, 1])
    assert mean_differences(config, owners, np.array([0.25, 0.75, 0.0, 0.25])) == [0.5, 0.125]
    for last in (0.76, float("nan"), float("inf")):
        with refused(EngineError, "rollout.engine_logprob_bound", "engine 1") as caught:
            mean_differences(config, owners, np.array([0.25, 0.75, 0.25, last]))
        assert caught.value.rank == 1
