"""The embedded sampler against Hugging Face's generate, a plain full forward, and the exact distribution."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from actors.rollout.sampler import Completion, sample
from slimefsdp.errors import BatchError, ModelError, StateError
from tests.support.refusals import refused

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


def draw(model, prompts, *, seed=0, **changes) -> list[Completion]:
    settings = {
        "samples_per_prompt": 1,
        "max_new_tokens": 9,
        "temperature": 1.0,
        "eos_token_ids": set(),
        "pad_token_id": PAD,
        "max_batch": 64,
    }
    return sample(model, prompts, generator=torch.Generator().manual_seed(seed), **(settings | changes))


@torch.no_grad()
def full_forward_log_probs(model, prompt, response, temperature):
    """The same quantity with neither cache, nor padding, nor batch."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate_on_each_prompt_alone(family):
    model = tiny(family)
    ends = {4, 17}
    completions = draw(model, PROMPTS, greedy=True, eos_token_ids=ends)
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
def test_log_probs_are_those_of_a_full_forward_while_rows_leave_the_batch(family, temperature, greedy):
    model = tiny(family)
    ends = set(range(0, VOCAB, 6))  # rows end at many different steps
    completions = draw(
        model, PROMPTS, samples_per_prompt=4, temperature=temperature, eos_token_ids=ends, greedy=greedy, max_batch=9
    )
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
    completions = draw(
        model, [[3], prompt], samples_per_prompt=draws, max_new_tokens=2, temperature=1.5, seed=11, max_batch=1000
    )
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


def test_the_samples_of_one_prompt_differ_and_stand_together_in_prompt_order():
    model = tiny("qwen3")
    alone = [draw(model, [prompt], greedy=True)[0].tokens for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    together = draw(model, PROMPTS, samples_per_prompt=3, greedy=True)
    assert [completion.tokens for completion in together] == [tokens for tokens in alone for _ in range(3)]
    sampled = draw(model, PROMPTS, samples_per_prompt=3, temperature=2.0)
    assert len({tuple(completion.tokens) for completion in sampled}) > len(PROMPTS)


def test_an_end_token_is_kept_ends_its_row_and_says_finished():
    model, ends = tiny("qwen3"), tuple(range(0, VOCAB, 4))
    completions = draw(model, PROMPTS, samples_per_prompt=16, max_new_tokens=4, eos_token_ids=ends)
    for completion in completions:
        assert not set(completion.tokens[:-1]) & set(ends)
        assert completion.finished == (completion.tokens[-1] in ends)
        assert completion.finished or len(completion.tokens) == 4
        assert len(completion.log_probs) == len(completion.tokens)
    assert {completion.finished for completion in completions} == {True, False}
    # an end token in the last place counts as finished too
    assert any(completion.finished and len(completion.tokens) == 4 for completion in completions)


def test_without_end_tokens_every_row_has_the_full_length():
    completions = draw(tiny("qwen3"), PROMPTS, max_new_tokens=6)
    assert [(len(completion.tokens), completion.finished) for completion in completions] == [(6, False)] * len(PROMPTS)


def test_one_seed_gives_one_result_and_leaves_the_global_generator_alone():
    model = tiny("qwen3")
    before = torch.get_rng_state()
    first = draw(model, PROMPTS, seed=1, samples_per_prompt=2)
    torch.rand(7)
    torch.set_rng_state(before)
    assert draw(model, PROMPTS, seed=1, samples_per_prompt=2) == first
    assert draw(model, PROMPTS, seed=2, samples_per_prompt=2) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_goes_on_where_the_last_call_left_it():
    model, generator = tiny("qwen3"), torch.Generator().manual_seed(3)
    settings = {
        "samples_per_prompt": 1,
        "max_new_tokens": 9,
        "temperature": 1.0,
        "eos_token_ids": (),
        "pad_token_id": PAD,
        "generator": generator,
    }
    first = sample(model, PROMPTS, **settings)
    middle = generator.get_state()
    second = sample(model, PROMPTS, **settings)
    generator.set_state(middle)
    assert first != second == sample(model, PROMPTS, **settings)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 7, 8, 100])
def test_max_batch_bounds_the_rows_and_not_the_result(max_batch):
    model, seen = tiny("qwen3"), []

    def record(module, arguments, keywords):
        seen.append(tuple(keywords["input_ids"].shape))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        completions = draw(model, PROMPTS, samples_per_prompt=3, greedy=True, max_batch=max_batch)
    finally:
        hook.remove()
    assert [c.tokens for c in completions] == [
        c.tokens for c in draw(model, PROMPTS, samples_per_prompt=3, greedy=True)
    ]
    assert max(rows for rows, _ in seen) <= max_batch
    decoded = sum(rows for rows, width in seen if width == 1)
    if max_batch == 100:  # all at once: each prompt is read once, then one token a row and step
        assert seen[0] == (len(PROMPTS), max(map(len, PROMPTS))) and decoded == 3 * len(PROMPTS) * 8


def test_no_prompts_give_no_completions():
    assert draw(tiny("qwen3"), []) == []


def test_an_empty_prompt_is_refused_by_its_index():
    with refused(BatchError, "prompts", 1):
        draw(tiny("qwen3"), [[1], []])


def test_a_model_in_training_mode_is_refused():
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **SIZES)).train()
    with refused(StateError, "model") as caught:
        draw(model, PROMPTS)
    assert "model.eval()" in str(caught.value.hint)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_instead_of_sampled(value, greedy):
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **SIZES)).eval()
    with torch.no_grad():
        model.lm_head.weight[3] = value
    with refused(StateError, "logits", 4):
        draw(model, PROMPTS, greedy=greedy)


def test_a_model_with_a_recurrent_state_is_refused():
    layers = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(vocab_size=VOCAB, layer_types=layers, num_experts=0, **SIZES)
    with refused(ModelError, "model", "LinearAttentionLayer"):
        draw(Qwen3NextForCausalLM(config).eval(), PROMPTS)


def test_a_model_that_ignores_the_cache_is_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    with pytest.raises(ModelError):
        draw(model, PROMPTS)
