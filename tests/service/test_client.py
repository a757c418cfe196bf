"""The unmodified client of the Tinker API against the service."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from slimefsdp.results import Health
from tests.support.service import Served, datum, log_probs_of, tokens_of

ADAM = types.AdamParams(learning_rate=2e-2, eps=1e-8)


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    made = served.client()
    yield made
    made.close("success").result()


def weighted(seed: int) -> types.Datum:
    tokens = tokens_of(seed)
    return datum(tokens, weights=np.random.default_rng(seed).normal(size=len(tokens) - 1).astype(np.float32).tolist())


def test_a_training_client_trains_saves_and_samples_what_it_trained(served: Served, client: Any) -> None:
    training = served.training_client(client)
    info = training.get_info()
    assert info.is_lora and info.lora_rank == 4 and info.model_data.model_name == "tiny/model"
    data = [datum(tokens_of(seed)) for seed in range(3)]
    losses = []
    for _ in range(6):
        both = training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)
        losses.append(both[0].result().metrics["loss:sum"])
        assert both[1].result().metrics["grad_norm"] > 0
    assert losses[-1] < losses[0] - 5
    said = training.forward(data, "cross_entropy").result()
    ours = log_probs_of(said)
    assert said.metrics["loss:sum"] == pytest.approx(-sum(one.sum() for one in ours), rel=1e-5)
    sampler = training.save_weights_and_get_sampling_client().result()
    for one, seed in zip(ours, range(3), strict=True):
        prompt = sampler.compute_logprobs(types.ModelInput.from_ints(tokens_of(seed))).result()
        assert prompt[0] is None and np.abs(np.array(prompt[1:]) - one).max() < 5e-5
    asked = types.SamplingParams(max_tokens=6, temperature=0.7, seed=3, stop=[])
    first = sampler.sample(types.ModelInput.from_ints(tokens_of(0)), 2, asked).result().sequences
    again = sampler.sample(types.ModelInput.from_ints(tokens_of(0)), 2, asked).result().sequences
    assert [one.tokens for one in first] == [one.tokens for one in again] and first[0].tokens != first[1].tokens
    for one in first:
        whole = [*tokens_of(0), *one.tokens]
        exact = log_probs_of(training.forward([datum(whole)], "cross_entropy").result())[0]
        assert np.abs(exact[-6:] - np.array(one.logprobs)).max() < 5e-5  # at temperature 1, whatever it was drawn at


def test_a_run_that_is_saved_and_resumed_goes_on_bit_for_bit_and_others_do_not_move_it(
    served: Served, client: Any
) -> None:
    data = [weighted(seed) for seed in range(4)]
    training, other = served.training_client(client), served.training_client(client, rank=2)
    before = log_probs_of(other.forward(data, "cross_entropy").result())
    training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM).result()
    path = training.save_state("half").result().path
    assert path == f"tinker://{training.model_id}/weights/half"
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    weights_alone = client.create_training_client_from_state(path).result()
    said = []
    for one in (training, resumed, weights_alone):
        one.forward_backward(data, "cross_entropy")
        one.optim_step(ADAM)
        said.append(np.concatenate(log_probs_of(one.forward(data, "cross_entropy").result())))
    assert np.array_equal(said[0], said[1]) and not np.array_equal(said[0], said[2])
    after = log_probs_of(other.forward(data, "cross_entropy").result())
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))
    with pytest.raises(tinker.TinkerError, match="half"):
        training.save_state("half").result()
    rest = tinker.RestClient(base_url=served.url, api_key=served.key)
    assert path in [one.tinker_path for one in rest.list_user_checkpoints(limit=100).result().checkpoints]
    other = served.client(served.other_key)
    rest = tinker.RestClient(base_url=served.url, api_key=served.other_key)
    assert rest.list_user_checkpoints().result().checkpoints == rest.list_training_runs().result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()
    own = served.training_client(other)
    (mine,) = rest.list_training_runs().result().training_runs
    assert mine.training_run_id == own.model_id
    other.close("success").result()


def test_a_teachers_likeliest_tokens_are_targets_of_which_a_student_learns(served: Served, client: Any) -> None:
    teacher = served.training_client(client)
    prompt = types.ModelInput.from_ints(tokens_of(0))
    teacher.forward_backward([weighted(1)], "cross_entropy")
    teacher.optim_step(ADAM).result()
    sampler = teacher.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(max_tokens=1)
    said = sampler.sample(prompt, 1, asked, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert said.topk_prompt_logprobs[0] is None and len(said.topk_prompt_logprobs) == prompt.length
    likeliest = [[token for token, _ in place] for place in said.topk_prompt_logprobs[1:]]
    log_probs = np.array([[log_prob for _, log_prob in place] for place in said.topk_prompt_logprobs[1:]])
    assert (np.diff(log_probs) <= 0).all()
    few = sampler.sample(
        prompt, 1, asked, include_prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=4
    ).result()
    assert few.topk_prompt_logprobs == [None] * (prompt.length - 4) + said.topk_prompt_logprobs[-4:]
    targets = types.TensorData.from_numpy(np.array(likeliest, np.int64))
    weights = np.exp(log_probs).astype(np.float32)
    weights[::2] = 0  # which the client sends as a sparse tensor
    inputs = {"target_tokens": targets, "weights": types.TensorData.from_numpy(weights)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(tokens_of(0)[:-1]), loss_fn_inputs=inputs)]
    (found,) = log_probs_of(teacher.forward(data, "cross_entropy").result())
    assert found.shape == log_probs.shape and np.abs(found - log_probs).max() < 5e-5
    student = served.training_client(client, seed=7)
    losses = []
    for _ in range(4):
        losses.append(student.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        student.optim_step(types.AdamParams(learning_rate=5e-3, eps=1e-8)).result()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


def test_a_loss_of_the_clients_own_is_differentiated_by_it(served: Served, client: Any) -> None:
    training = served.training_client(client)
    data = [datum(tokens_of(seed)) for seed in range(3)]

    def squares(batch: Any, log_probs: Any) -> Any:
        loss = sum((one**2).sum() for one in log_probs)
        return loss, {"squares": float(loss.detach())}

    first = training.forward_backward_custom(data, squares).result().metrics
    training.optim_step(ADAM).result()
    assert training.forward_backward_custom(data, squares).result().metrics["squares"] < first["squares"]


def test_a_killed_rank_costs_two_clients_a_wait_and_no_bit(served: Served, client: Any) -> None:
    def lives(kills_at: int | None) -> list[np.ndarray]:
        both = [served.training_client(client, seed=seed) for seed in (1, 2)]
        for step in range(4):
            for number, training in enumerate(both):
                training.forward_backward([weighted(10 * number + step)], "cross_entropy")
                update = training.optim_step(ADAM)
                if step == kills_at and number == 0:
                    (health, *_) = served.group.health()
                    assert isinstance(health, Health)
                    os.kill(health.pid, signal.SIGKILL)
                update.result()
        return [log_probs_of(one.forward([weighted(99)], "cross_entropy").result())[0] for one in both]

    expected, before = lives(None), len(served.group.recoveries)
    found = lives(2)
    assert len(served.group.recoveries) == before + 1
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))
