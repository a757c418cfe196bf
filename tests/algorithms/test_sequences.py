from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.algorithms.policy_losses import Sequences

COUNT = 7
tokens_st = st.lists(st.tuples(st.integers(0, COUNT - 1), st.floats(-8, 8)), max_size=40)


def columns(tokens):
    numbers = torch.tensor([number for number, _ in tokens], dtype=torch.int64)
    values = torch.tensor([value for _, value in tokens], dtype=torch.float64)
    return Sequences(numbers, COUNT), values.requires_grad_()


def of_each(tokens):
    return [[value for number, value in tokens if number == wanted] for wanted in range(COUNT)]


@settings(deadline=None)
@given(tokens_st)
def test_sum_mean_lengths_and_occurs_are_those_of_a_loop_over_sequences(tokens):
    sequences, values = columns(tokens)
    lists = of_each(tokens)
    sums = [math.fsum(values) for values in lists]
    means = [math.fsum(values) / len(values) if values else 0.0 for values in lists]
    torch.testing.assert_close(sequences.sum(values).tolist(), sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sequences.mean(values).tolist(), means, rtol=1e-12, atol=1e-12)
    assert sequences.lengths().tolist() == [len(values) for values in lists]
    assert sequences.occurs().tolist() == [bool(values) for values in lists]


@settings(deadline=None)
@given(tokens_st)
def test_gradients_of_sum_mean_and_spread_are_one_one_over_length_and_the_tokens_own(tokens):
    sequences, values = columns(tokens)
    factors = torch.arange(1.0, COUNT + 1, dtype=torch.float64)
    lengths = [len(values) for values in of_each(tokens)]
    (of_sum,) = torch.autograd.grad((factors * sequences.sum(values)).sum(), values)
    (of_mean,) = torch.autograd.grad((factors * sequences.mean(values)).sum(), values)
    assert of_sum.tolist() == [number + 1.0 for number, _ in tokens]
    expected = [(number + 1.0) / lengths[number] for number, _ in tokens]
    torch.testing.assert_close(of_mean.tolist(), expected, rtol=1e-12, atol=0.0)
    per_sequence = factors.clone().requires_grad_()
    (of_spread,) = torch.autograd.grad(sequences.spread(per_sequence).sum(), per_sequence)
    assert of_spread.tolist() == lengths


def test_sums_of_float32_are_rounded_once_so_that_the_order_of_tokens_does_not_show():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator)
    index = torch.randint(3, (20_000,), generator=generator)
    shuffle = torch.randperm(20_000, generator=generator)
    sums = Sequences(index, 3).sum(values)
    assert sums.dtype == torch.float32
    assert torch.equal(sums, Sequences(index[shuffle], 3).sum(values[shuffle]))
    exact = [math.fsum(values[index == number].double().tolist()) for number in range(3)]
    assert torch.equal(sums, torch.tensor(exact, dtype=torch.float64).float())
