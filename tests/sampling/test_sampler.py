"""The embedded sampler against Hugging Face's generate, a plain full forward, and the exact distribution."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slimefsdp.errors import BatchError, StateError
from slimefsdp.sampling.draw import draw
from slimefsdp.sampling.params import SampledTokens, SamplingParams, VersionSpan
from slimefsdp.sampling.sampler import Sampler, sample
from tests.support.float64 import KeepFloat64
from tests.support.refusals import refused
from tests.support.tiny_models import plain_model, save_tiny_model, to_sample_from

VOCAB = 32
PAD = 0
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,  # far from uniform, so that a wrong distribution shows
    "tie_word_embeddings": False,  # a tied random model only repeats its last token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
# longer and shorter than the sliding windows below
PROMPTS = [[3, 9, 4, 1, 7, 12, 5], [8], [2, 30, 2], [11, 6, 19, 28, 1]]
FAMILIES = ["qwen3", "mistral", "gemma3", "gpt2"]


@cache
def tiny(family: str, vocab: int = VOCAB):
    torch.manual_seed(5)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, **SIZES))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(vocab_size=vocab, sliding_window=4, **SIZES))
    elif family == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=vocab, sliding_window=4, layer_types=layers, **SIZES))
    else:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4, "tie_word_embeddings": False}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **sizes))
    return model.eval()


def drawn(model, prompts, samples=1, *, max_rows=64, **changes) -> list[SampledTokens]:
    params = SamplingParams(**({"max_new_tokens": 9} | changes))
    places = dict(enumerate(prompts))
    return [found for _, found in sample(to_sample_from(model), places, samples, params, max_rows=max_rows)]


@torch.no_grad()
def full_forward_log_probs(model, prompt, response, temperature):
    """The same quantity with neither cache, nor padding, nor batch."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate_on_each_prompt_alone(family):
    model = tiny(family)
    ends = frozenset({4, 17})
    completions = drawn(model, PROMPTS, greedy=True, end_token_ids=ends)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=9,
            eos_token_id=list(ends),
            pad_token_id=PAD,
        )
        assert completion.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_full_forward_while_rows_come_and_go(family, temperature, greedy):
    model = tiny(family)
    ends = frozenset(range(0, VOCAB, 6))  # rows end at many different steps
    completions = drawn(model, PROMPTS, 4, temperature=temperature, end_token_ids=ends, greedy=greedy, max_rows=5)
    for index, completion in enumerate(completions):
        expected = full_forward_log_probs(model, PROMPTS[index // 4], completion.tokens, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=1e-4, rtol=0)
    if not greedy:  # a mean log-prob near 0 would be a model that leaves nothing to draw
        assert len({len(completion.tokens) for completion in completions}) > 2
        assert sum(map(sum, (c.log_probs for c in completions))) / sum(len(c.tokens) for c in completions) < -0.3


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_two_sampled_tokens_follow_the_tempered_joint_distribution(family):
    # 5 x 5 pairs of tokens; 51.18 is the 99.9 % quantile of chi-square with 24 degrees of freedom
    model, vocab, prompt, draws, quantile = tiny(family, vocab=5), 5, [1, 4, 2], 8000, 51.18
    completions = drawn(model, [[3], prompt], draws, max_new_tokens=2, temperature=1.5, seed=(11,), max_rows=1000)
    seen = torch.zeros(vocab, vocab, dtype=torch.float64)
    for completion in completions[draws:]:
        seen[completion.tokens[0], completion.tokens[1]] += 1

    def chi_square(temperature):
        expected = torch.zeros_like(seen)
        for pair in itertools.product(range(vocab), repeat=2):
            expected[pair] = draws * full_forward_log_probs(model, prompt, list(pair), temperature).sum().exp()
        assert expected.min() > 1  # else the statistic is not chi-square
        return ((seen - expected) ** 2 / expected).sum().item()

    assert chi_square(1.5) < quantile
    assert chi_square(1.3) > 2 * quantile  # the test can tell a slightly wrong temperature


# top_k, top_p, min_p
LIMITS = [
    (None, 1.0, 0.0), (1, 1.0, 0.0), (3, 1.0, 0.0), (None, 0.6, 0.0), (None, 1e-9, 0.0), (5, 0.8, 0.0),
    (VOCAB + 9, 1.0, 0.0), (2, 0.999, 0.0), (None, 1.0, 0.15), (None, 0.7, 0.1), (3, 0.9, 0.3), (None, 1.0, 1 - 2e-16),
]  # fmt: skip


def truncated(logits, temperature, top_k, top_p, min_p):
    """By a loop over tokens: the log-probs that are left, minus infinity elsewhere."""
    probabilities = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))[:top_k]
    order = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]]]
    total, kept, summed = sum(probabilities[token] for token in order), [], 0.0
    for token in order:
        if top_p < 1.0 and summed >= top_p * total:
            break
        kept.append(token)
        summed += probabilities[token]
    found = torch.full((len(probabilities),), float("-inf"), dtype=torch.float64)
    for token in kept:
        found[token] = np.log(probabilities[token] / summed)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), LIMITS)
def test_tokens_are_drawn_from_what_top_k_and_top_p_leave_renormalised(top_k, top_p, min_p, temperature):
    count = 4000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    logits[7] = logits[11]  # among equals the first comes first
    numbers = [(place + 0.5) / count for place in range(count)]  # every share of the unit interval alike
    limits = {"top_k": [top_k] * count, "top_p": [top_p] * count, "min_p": [min_p] * count}
    rows, temperatures = logits.expand(count, -1), [temperature] * count
    tokens, log_probs = draw(rows, temperature=temperatures, numbers=numbers, tempered=[True] * count, **limits)
    expected = truncated(logits, temperature, top_k, top_p, min_p)
    counted = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / count
    assert (counted - expected.exp()).abs().max() <= 1.01 / count
    assert torch.equal(counted[expected.isinf()], torch.zeros(int(expected.isinf().sum())))
    assert log_probs == pytest.approx(expected[tokens].tolist(), abs=1e-12)
    again, untempered = draw(rows, temperature=temperatures, numbers=numbers, tempered=[False] * count, **limits)
    assert again == tokens and untempered == pytest.approx(logits.log_softmax(-1)[tokens].tolist(), abs=1e-12)
    over_all = {"tempered": [True] * count, "renormalized": [False] * count}
    again, of_all = draw(rows, temperature=temperatures, numbers=numbers, **over_all, **limits)
    whole = (logits / temperature).log_softmax(-1)
    assert again == tokens and of_all == pytest.approx(whole[tokens].tolist(), abs=1e-12)


def test_each_request_has_limits_of_its_own():
    model, sampler, found = tiny("qwen3"), Sampler(to_sample_from(tiny("qwen3"))), {}
    kinds = ({}, {"tempered": False}, {"renormalized": False})
    for top_k, top_p, min_p in LIMITS:
        params = SamplingParams(6, 1.3, top_k=top_k, top_p=top_p, min_p=min_p, seed=(4,))
        for kind in kinds:
            sampler.add(PROMPTS[0], 3, replace(params, **kind))
    while not sampler.is_idle:
        found |= {(request, number): completion for request, number, completion in sampler.step()}
    for (request, number), completion in found.items():
        limits, kind = LIMITS[request // 3], request % 3
        context = torch.tensor([PROMPTS[0] + completion.tokens])
        with torch.no_grad():
            logits = model(input_ids=context).logits[0, len(PROMPTS[0]) - 1 : -1]
        if kind == 0:
            rows = torch.stack([truncated(row, 1.3, *limits) for row in logits])
        elif kind == 1:
            rows = logits.log_softmax(-1)
        else:  # what the trainer computes, so that the ratio of a first update is 1
            rows = (logits / 1.3).log_softmax(-1)
        expected = rows[range(len(rows)), completion.tokens].tolist()
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)
        assert completion.tokens == found[request - kind, number].tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_log_probs_are_those_of_a_full_forward_with_samples_and_without(family):
    model, found, ended = tiny(family), {}, {}
    sampler = Sampler(to_sample_from(model), max_rows=2)
    for place, prompt in enumerate(PROMPTS):
        sampler.add(prompt, place, SamplingParams(4, 0.5, seed=(place,)), prompt_log_probs=place != 1)
    while not sampler.is_idle:
        ended |= {(request, number): completion for request, number, completion in sampler.step()}
        found |= {number: log_probs for number, log_probs, _ in sampler.take_prompts()}
    assert sorted(found) == [0, 2, 3] and sampler.take_prompts() == []
    assert sorted(ended) == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    for place, log_probs in found.items():
        prompt = PROMPTS[place]
        expected = full_forward_log_probs(model, prompt[:1], prompt[1:], 1.0)
        assert log_probs.dtype == np.float32 and len(log_probs) == len(prompt) and np.isnan(log_probs[0])
        assert log_probs[1:].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    for (place, number), completion in ended.items():
        alone = Sampler(to_sample_from(model))
        alone.add(PROMPTS[place], place, SamplingParams(4, 0.5, seed=(place,)))
        others = {}
        while not alone.is_idle:
            others |= {one: tokens for _, one, tokens in alone.step()}
        assert others[number].tokens == completion.tokens


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_float64_model_has_float64_log_probs(kind, tmp_path):
    with KeepFloat64():
        model = plain_model(save_tiny_model(tmp_path, kind, vocab_size=VOCAB), torch.float64)
        sampler, found = Sampler(to_sample_from(model), max_rows=3), {}
        for place, prompt in enumerate(PROMPTS):
            params = SamplingParams(5, 0.7, tempered=place % 2 == 0, seed=(place,))
            sampler.add(prompt, 2, params, prompt_log_probs=True)
        prompts = {}
        while not sampler.is_idle:
            found |= {(request, number): completion for request, number, completion in sampler.step()}
            prompts |= {number: log_probs for number, log_probs, _ in sampler.take_prompts()}
        for (place, _), completion in found.items():
            temperature = 0.7 if place % 2 == 0 else 1.0
            expected = full_forward_log_probs(model, PROMPTS[place], completion.tokens, temperature)
            assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-12, rel=0)
        for place, log_probs in prompts.items():
            expected = full_forward_log_probs(model, PROMPTS[place][:1], PROMPTS[place][1:], 1.0)
            assert log_probs.dtype == np.float64
            assert log_probs[1:].tolist() == pytest.approx(expected.tolist(), abs=1e-12, rel=0)


def test_the_cache_shrinks_with_the_rows():
    sampler = Sampler(to_sample_from(tiny("qwen3")), max_rows=64)
    sampler.add(PROMPTS[0], 63, SamplingParams(2))
    sampler.add(PROMPTS[0], 1, SamplingParams(9, seed=(3,)))
    sampler.step()
    assert sampler.running_rows == 1
    assert sampler.cache_bytes == 2 * 2 * (2 * 2 * 64 * 8) * 4  # layers, keys and values, rows x kv_heads x tokens
    (ended,) = [completion for _ in range(7) for _, _, completion in sampler.step()]
    alone = Sampler(to_sample_from(tiny("qwen3")))
    alone.add(PROMPTS[0], 1, SamplingParams(9, seed=(3,)))
    assert [completion.tokens for _ in range(8) for _, _, completion in alone.step()] == [ended.tokens]


def test_an_end_token_is_kept_ends_its_row_and_says_finished():
    model, ends = tiny("qwen3"), frozenset(range(0, VOCAB, 4))
    completions = drawn(model, PROMPTS, 16, max_new_tokens=4, end_token_ids=ends)
    for completion in completions:
        assert not set(completion.tokens[:-1]) & set(ends)
        assert completion.finished == (completion.tokens[-1] in ends)
        assert completion.finished or len(completion.tokens) == 4
        assert len(completion.log_probs) == len(completion.tokens)
    assert {completion.finished for completion in completions} == {True, False}
    # an end token in the last place counts as finished too
    assert any(completion.finished and len(completion.tokens) == 4 for completion in completions)


def test_a_stop_text_ends_a_sample_with_the_token_that_completes_it():
    model, places = tiny("qwen3"), dict(enumerate(PROMPTS))
    free = [found.tokens for _, found in sample(to_sample_from(model), places, 8, SamplingParams(30, seed=(4,)))]

    def text(tokens):  # a letter or two a token, so that texts begin and end inside of tokens
        return "".join(chr(97 + token % 5) + "xy"[: token % 3] for token in tokens)

    for stops in (("ab",), ("xbx", "dd", "q")):
        params = SamplingParams(30, seed=(4,), stop=stops)
        found = [c for _, c in sample(to_sample_from(model), places, 8, params, decode=text)]
        for tokens, completion in zip(free, found, strict=True):
            ends = [length for length in range(1, 31) if any(stop in text(tokens[:length]) for stop in stops)]
            assert completion.finished == bool(ends)
            assert completion.tokens == tokens[: ends[0] if ends else 30]
        assert {completion.finished for completion in found} == {True, False}


def test_equal_seeds_give_equal_samples_and_leave_the_global_generator_alone():
    model = tiny("qwen3")
    before = torch.get_rng_state()
    first = drawn(model, PROMPTS, 2, seed=(1,))
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn(model, PROMPTS, 2, seed=(1,)) == first
    for other in ((2,), (1, 0), ()):
        assert drawn(model, PROMPTS, 2, seed=other) != first


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 100])
def test_the_number_of_rows_bounds_the_batch_and_not_the_result(max_rows, greedy):
    model, seen = tiny("qwen3"), []
    policy = to_sample_from(model)
    ends = frozenset(range(0, VOCAB, 8))
    hook = policy.hf.model.embed_tokens.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    try:
        params = SamplingParams(9, greedy=greedy, end_token_ids=ends)
        found = sample(policy, dict(enumerate(PROMPTS)), 3, params, max_rows=max_rows)
    finally:
        hook.remove()
    expected = drawn(model, PROMPTS, 3, greedy=greedy, end_token_ids=ends)
    assert [c.tokens for _, c in found] == [c.tokens for c in expected]
    # every prompt is read once, and a token that was drawn is, unless it is a sample's last one
    assert sum(seen) == sum(map(len, PROMPTS)) + sum(len(c.tokens) - 1 for c in expected)
    assert max(seen) <= max(max_rows, sum(map(len, PROMPTS)))


def test_free_rows_are_shared_between_clients_and_each_keeps_its_order():
    policy, params = to_sample_from(tiny("qwen3")), SamplingParams(4, seed=(3,))
    sampler, found, order = Sampler(policy, max_rows=4), {}, []

    def step() -> None:
        for request, index, completion in sampler.step():
            order.append(request)
            found[request, index] = completion.tokens

    large = [sampler.add([1, 2, place], 8, params, client="a") for place in range(3)]
    step()
    small = [sampler.add([5, place], 1, params, client="b") for place in range(2)]
    # prompts take no rows, and however many there are, who samples is not behind all of them
    read = [sampler.add([6, 7], 0, params, prompt_log_probs=True, client="c") for _ in range(20)]
    many = sampler.add([8], 8, params, client="b")
    while len(order) < 12:  # three times the rows
        step()
    assert set(small) <= set(order) and order.count(many) >= 2 and order.count(large[0]) >= 6
    while not sampler.is_idle:
        step()
    assert sorted(number for number, _, _ in sampler.take_prompts()) == read
    assert [one for one in order if one in large] == [one for one in large for _ in range(8)]
    for request, prompt, count in ((large[1], [1, 2, 1], 8), (small[1], [5, 1], 1)):
        alone = Sampler(policy)
        alone.add(prompt, count, params)
        while not alone.is_idle:
            for _, index, completion in alone.step():
                assert found[request, index] == completion.tokens


def test_requests_that_come_while_others_are_sampled_change_nothing_about_them():
    model = tiny("qwen3")
    together = Sampler(to_sample_from(model), max_rows=8)
    params = [SamplingParams(3 + place, 0.5 + place, seed=(place,), greedy=place == 2) for place in range(4)]
    found = {}
    for place, prompt in enumerate(PROMPTS):
        assert together.add(prompt, 3, params[place]) == place
        found |= {(request, index): completion for request, index, completion in together.step()}
    while not together.is_idle:
        found |= {(request, index): completion for request, index, completion in together.step()}
    for place, prompt in enumerate(PROMPTS):
        alone = Sampler(to_sample_from(model))
        alone.add(prompt, 3, params[place])
        while not alone.is_idle:
            for _, index, completion in alone.step():
                assert found[place, index].tokens == completion.tokens
                assert found[place, index].log_probs == pytest.approx(completion.log_probs, abs=1e-5)


def test_what_is_aborted_is_handed_over_as_far_as_it_came():
    sampler = Sampler(to_sample_from(tiny("qwen3")), max_rows=3)
    whole = {index: c.tokens for index, c in enumerate(drawn(tiny("qwen3"), PROMPTS[:1], 2, seed=(1,)))}
    sampler.add(PROMPTS[0], 2, SamplingParams(9, seed=(1, 0)))
    sampler.add(PROMPTS[1], 2, SamplingParams(9, seed=(2,)))
    sampler.add(PROMPTS[2], 1, SamplingParams(9, seed=(3,)))
    for _ in range(4):
        sampler.step()
    given_up = {(request, number): completion for request, number, completion in sampler.abort({1, 2})}
    assert sorted(given_up) == [(1, 0), (1, 1), (2, 0)] and len(given_up[1, 0].tokens) == 5
    assert given_up[1, 1].tokens == [] and given_up[1, 1].versions == (), "it waited for a row"
    ended = {(request, number): completion for request, number, completion in sampler.abort()}
    assert sampler.is_idle and sampler.cache_bytes == 0
    assert sorted(ended) == [(0, 0), (0, 1)]
    assert {completion.finish_reason for completion in ended.values()} == {"abort"}
    assert all(ended[0, number].tokens == whole[number][:5] for number in (0, 1)), "two in the first step"
    sampler.add(PROMPTS[0], 1, SamplingParams(9, seed=(1, 0)))
    completions = [completion for _ in range(9) for _, _, completion in sampler.step()]
    assert [completion.tokens for completion in completions] == [whole[0]]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_samples_go_on_with_new_weights_and_each_token_is_that_of_its_version(family):
    models = [copy.deepcopy(tiny(family)) for _ in range(3)]
    torch.manual_seed(9)
    with torch.no_grad():
        for model, scale in zip(models[1:], (0.05, 0.2), strict=True):
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    policy = to_sample_from(copy.deepcopy(models[0]))
    sampler, found = Sampler(policy, max_rows=5), {}
    sampler.take_new_weights(7)
    ends = frozenset(range(0, VOCAB, 9))
    for place, prompt in enumerate(PROMPTS):
        sampler.add(prompt, 3, SamplingParams(12, 0.8, seed=(place,), end_token_ids=ends))
    for step in itertools.count(1):
        found |= {(request, number): completion for request, number, completion in sampler.step()}
        if step in (3, 8):
            policy.hf.load_state_dict(models[1 if step == 3 else 2].state_dict())
            sampler.take_new_weights(7 + step)
        if sampler.is_idle:
            break
    of_version = {7: models[0], 10: models[1], 15: models[2]}
    assert {len(completion.versions) for completion in found.values()} >= {1, 2, 3} and len(found) == 12
    for (request, _), completion in found.items():
        assert [span.start for span in completion.versions] == [0, *(s.end for s in completion.versions[:-1])]
        assert completion.versions[-1].end == len(completion.tokens) == len(completion.log_probs)
        for version, start, end in completion.versions:
            expected = full_forward_log_probs(of_version[version], PROMPTS[request], completion.tokens, 0.8)
            assert completion.log_probs[start:end] == pytest.approx(expected[start:end].tolist(), abs=1e-4)
    assert found[0, 0].versions[0] == VersionSpan(7, 0, found[0, 0].versions[0].end)


def test_what_cannot_be_sampled_is_refused():
    with refused(BatchError, "prompts", 1):
        drawn(tiny("qwen3"), [[1], []])
    with refused(BatchError, "samples", 0):
        drawn(tiny("qwen3"), [[1]], 0)
    with refused(BatchError, "stop"):
        drawn(tiny("qwen3"), [[1]], stop=("x",))
    for name, value in [
        ("max_new_tokens", 0), ("temperature", 0.0), ("temperature", float("inf")), ("temperature", float("nan")),
        ("stop", ("",)), ("seed", (-1,)), ("top_k", 0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01),
        ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.0),
    ]:  # fmt: skip
        with refused(BatchError, name):
            SamplingParams(**{"max_new_tokens": 1, name: value})


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_instead_of_sampled_and_nothing_is_left(value, greedy):
    policy = to_sample_from(tiny("qwen3"))
    sampler = Sampler(policy)
    sampler.add(PROMPTS[0], 4, SamplingParams(5, greedy=greedy))
    sampler.step()
    with torch.no_grad():
        policy.hf.lm_head.weight[3] = value
    with refused(StateError, "logits", 4):
        sampler.step()
    assert sampler.is_idle
