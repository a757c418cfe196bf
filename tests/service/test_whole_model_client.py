"""The unmodified client against a server that trains all weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import tinker
from tinker import types
from transformers import AutoModelForCausalLM

from tests.support.service import Served, datum, log_probs_of, tokens_of

ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-8)


@contextmanager
def training_client(served: Served, begun: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """The only one; what it was made by ends with it."""
    client = served.client()
    yield served.training_client(client, rank=0) if begun is None else begun(client)
    client.close("success").result()


def weighted(seed: int) -> types.Datum:
    tokens = tokens_of(seed)
    return datum(tokens, weights=np.random.default_rng(seed).normal(size=len(tokens) - 1).astype(np.float32).tolist())


def update(training: Any, seed: int) -> Any:
    training.forward_backward([weighted(seed), weighted(seed + 1)], "cross_entropy")
    return training.optim_step(ADAM)


def log_probs(training: Any, seed: int = 99) -> np.ndarray:
    return log_probs_of(training.forward([weighted(seed)], "cross_entropy").result())[0]


def prompt_log_probs(sampler: Any, seed: int = 99) -> np.ndarray:
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(tokens_of(seed))).result()[1:])


def test_each_version_of_the_whole_model_is_sampled_as_it_was_trained_while_others_are_there(
    served_whole: Served,
) -> None:
    with training_client(served_whole) as training:
        info = training.get_info()
        assert info.is_lora is False and info.lora_rank is None and info.model_name == "tiny/model"
        exact, samplers = [log_probs(training)], []
        for step in range(4):
            update(training, step).result()
            exact.append(log_probs(training))
            samplers.append(training.save_weights_and_get_sampling_client().result())
        base = served_whole.client().create_sampling_client(base_model="tiny/model").result()
        for _ in range(2):  # there is room for two of the four at once: those that were put out are read again
            for sampler, ours in zip([base, *samplers], exact, strict=True):
                assert np.abs(prompt_log_probs(sampler) - ours).max() < 5e-5
        assert all(np.abs(one - other).max() > 1e-3 for one, other in pairwise(exact))
        asked = types.SamplingParams(max_tokens=6, temperature=0.7, seed=3, stop=[])
        drawn = [one.sample(types.ModelInput.from_ints(tokens_of(0)), 2, asked) for one in (base, *samplers)]
        for one in drawn[-1].result().sequences:
            whole = log_probs_of(training.forward([datum([*tokens_of(0), *one.tokens])], "cross_entropy").result())[0]
            assert np.abs(whole[-6:] - np.array(one.logprobs)).max() < 5e-5
        assert all(len(one.result().sequences) == 2 for one in drawn)


def test_a_named_version_is_a_folder_that_transformers_opens_and_goes_when_it_is_deleted(served_whole: Served) -> None:
    with training_client(served_whole) as training:
        update(training, 1).result()
        ours = log_probs(training)
        path = training.save_weights_for_sampler("named").result().path
        state = training.save_state("state").result().path
        rest = tinker.RestClient(base_url=served_whole.url, api_key=served_whole.key)
        about = rest.get_weights_info_by_tinker_path(path).result()
        assert about.is_lora is False and about.lora_rank is None
        run = rest.get_training_run(training.model_id).result()
        assert run.is_lora is False and run.last_checkpoint.tinker_path == state
    run_dir = served_whole.config.run.dir
    assert run_dir is not None
    (folder,) = (run_dir / "service" / "sampler_weights").glob("*/named@*")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.dummy_inputs["input_ids"].new_tensor([tokens_of(99)])
    theirs = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].detach().numpy()
    assert np.abs(theirs - ours).max() < 5e-5
    sampler = served_whole.client().create_sampling_client(model_path=path).result()
    assert np.abs(prompt_log_probs(sampler) - ours).max() < 5e-5
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not folder.exists()
    unnamed = [one for one in (run_dir / "service" / "sampler_weights").rglob("_session-*") if one.is_dir()]
    assert unnamed == []
    with training_client(served_whole, lambda one: one.create_training_client_from_state(state).result()) as again:
        assert np.array_equal(log_probs(again), ours)
