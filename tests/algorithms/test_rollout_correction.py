from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.algorithms.objective import (
    CORRECTIONS,
    CorrectionOptions,
    kept_by_opsm,
    kept_by_veto,
    mismatch_statistics,
)
from slimefsdp.algorithms.policy_losses import Sequences
from tests.support.tiers import examples

LOW, HIGH = 0.5, 2.0
BOUNDS = CorrectionOptions(low=LOW, high=HIGH)
every_method = pytest.mark.parametrize("method", CORRECTIONS)
# log rho of each token of each sequence of a batch
batches_st = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), min_size=1, max_size=6)


def pack(batch, dtype=torch.float64):
    """log_rho and sequences of a batch, tokens of different sequences in turn."""
    rows = [(value, number) for number, sequence in enumerate(batch) for value in sequence]
    rows = rows[::2] + rows[1::2]
    numbers = torch.tensor([number for _, number in rows], dtype=torch.int64)
    return torch.tensor([value for value, _ in rows], dtype=dtype), Sequences(numbers, len(batch) + 3)


def in_turn(of_tokens):
    """Values of the tokens of a batch, as `pack` orders them."""
    flat = [value for sequence in of_tokens for value in sequence]
    return flat[::2] + flat[1::2]


def product(sequence):
    return math.prod(math.exp(x) for x in sequence)


def geometric(sequence):
    return product(sequence) ** (1 / len(sequence))


def inside(value):
    return LOW <= value <= HIGH


def masked_tokens(sequence):
    return [math.exp(x) if inside(math.exp(x)) else 0.0 for x in sequence]


BY_A_LOOP = {
    "importance": lambda s: [math.exp(x) if math.exp(x) <= HIGH else 0.0 for x in s],
    "tis": lambda s: [min(math.exp(x), HIGH) for x in s],
    "mis": masked_tokens,
    "icepop": masked_tokens,
    "sequence_tis": lambda s: [min(product(s), HIGH)] * len(s),
    "sequence_mis": lambda s: [product(s) if inside(product(s)) else 0.0] * len(s),
    "geometric_mis": lambda s: [math.exp(x) if inside(geometric(s)) else 0.0 for x in s],
}
JUDGED = {"sequence_tis": product, "sequence_mis": product, "geometric_mis": geometric}


def options_of(method):
    return CorrectionOptions(high=HIGH) if method == "importance" else BOUNDS


@pytest.mark.parametrize("method", BY_A_LOOP)
@examples(50)
@given(batch=batches_st)
def test_weights_and_flags_are_those_of_a_loop_over_sequences(method, batch):
    log_rho, sequences = pack(batch)
    found = CORRECTIONS[method](log_rho, sequences, options_of(method))
    expected = in_turn([BY_A_LOOP[method](sequence) for sequence in batch])
    torch.testing.assert_close(found.weights.tolist(), expected, rtol=1e-12, atol=0.0)
    judge = JUDGED.get(method)
    judged = in_turn([[judge(s)] * len(s) if judge else [math.exp(x) for x in s] for s in batch])
    assert found.above.tolist() == [value > HIGH for value in judged]
    has_low = method in ("mis", "icepop", "sequence_mis", "geometric_mis")
    assert found.below.tolist() == [has_low and value < LOW for value in judged]


@every_method
def test_weights_of_exactly_one_are_inside_bounds_of_one(method):
    log_rho, sequences = torch.zeros(12), Sequences(torch.arange(12) // 5, 3)
    found = CORRECTIONS[method](log_rho, sequences, CorrectionOptions(low=1.0, high=1.0))
    assert found.weights.eq(1.0).all() and not (found.below | found.above).any()


@every_method
def test_order_and_numbering_of_tokens_and_the_split_into_packs_change_nothing(method):
    batch = [[0.1, -0.9, 0.3], [0.9, 0.2], [-0.2], [0.4, 0.4, -0.1, 0.2]]
    log_rho, sequences = pack(batch)
    whole = CORRECTIONS[method](log_rho, sequences, BOUNDS)
    order = torch.randperm(len(log_rho), generator=torch.Generator().manual_seed(0))
    elsewhere = Sequences(torch.tensor([8, 1, 5, 3])[sequences.index[order]], 9)
    for field, shuffled in zip(whole, CORRECTIONS[method](log_rho[order], elsewhere, BOUNDS), strict=True):
        torch.testing.assert_close(shuffled, field[order], rtol=1e-12, atol=0.0)
    for number, sequence in enumerate(batch):
        here = sequences.index == number
        alone = CORRECTIONS[method](*pack([sequence]), BOUNDS)
        torch.testing.assert_close(alone.weights.sort()[0], whole.weights[here].sort()[0], rtol=1e-12, atol=0.0)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infinite_rho_is_truncated_or_dropped_and_a_pack_without_tokens_is_legal(method, dtype):
    log_rho, sequences = pack([[1e3, 0.1], [-1e3, 0.1], [0.0]], dtype)
    found = CORRECTIONS[method](log_rho, sequences, options_of(method))
    assert found.weights.dtype == dtype and found.weights.isfinite().all() and found.weights.max() <= HIGH
    nothing = torch.zeros(0, dtype=dtype), Sequences(torch.zeros(0, dtype=torch.int64), 3)
    assert all(field.shape == (0,) for field in CORRECTIONS[method](*nothing, BOUNDS))


@settings(deadline=None)
@given(batches_st)
def test_a_veto_drops_exactly_the_sequences_with_a_token_below_it(batch):
    kept = kept_by_veto(*pack(batch), 0.4)
    assert kept.tolist() == in_turn([[all(math.exp(x) >= 0.4 for x in s)] * len(s) for s in batch])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=5), st.sampled_from([-1, 0, 1])
        ),
        min_size=1,
        max_size=5,
    )
)
def test_opsm_drops_exactly_the_bad_sequences_that_the_policy_has_left(batch):
    def is_kept(tokens, advantage):
        divergence = math.fsum(behaviour - current for current, behaviour in tokens) / len(tokens)
        return not (advantage < 0 and divergence > 0.4371)

    log_probs, sequences = pack([[current for current, _ in tokens] for tokens, _ in batch])
    behaviour, _ = pack([[behaviour for _, behaviour in tokens] for tokens, _ in batch])
    advantages, _ = pack([[advantage] * len(tokens) for tokens, advantage in batch])
    kept = kept_by_opsm(log_probs, behaviour, advantages, sequences, 0.4371)
    assert kept.tolist() == in_turn([[is_kept(*sequence)] * len(sequence[0]) for sequence in batch])


def counted_values(statistics):
    return {
        name: found.values if found.counted is None else found.values[found.counted]
        for name, found in statistics.items()
    }


def reduced(statistics):
    return {
        name: (values.double().mean() if statistics[name].kind == "mean" else values.max()).item()
        for name, values in counted_values(statistics).items()
    }


@settings(deadline=None)
@given(batches_st)
def test_mismatch_statistics_are_those_of_a_loop(batch):
    found = reduced(mismatch_statistics(*pack(batch)))
    flat = [x for sequence in batch for x in sequence]
    rho = [math.exp(x) for x in flat]
    log_ppl_diff = [-math.fsum(sequence) / len(sequence) for sequence in batch]
    expected = {
        "rollout_k1": -math.fsum(flat) / len(flat),
        "rollout_k3": math.fsum(r - 1 - x for r, x in zip(rho, flat, strict=True)) / len(flat),
        "rollout_rho": math.fsum(rho) / len(flat),
        "rollout_chi2": math.fsum(r**2 for r in rho) / len(flat) - 1,
        "rollout_log_ppl_diff": math.fsum(log_ppl_diff) / len(batch),
        "rollout_log_ppl_diff_max": max(abs(x) for x in log_ppl_diff),
    }
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_dropping_takes_an_infinite_weight_away_too_and_leaves_flags_alone():
    log_rho, sequences = pack([[1e3, 0.1], [0.2]])
    correction = CORRECTIONS["importance"](log_rho, sequences, CorrectionOptions())
    dropped = correction.dropping(sequences.index == 0)
    assert correction.weights.isinf().sum() == 1
    assert dropped.weights.tolist() == [0.0, math.exp(0.2), 0.0] and dropped[1:] == correction[1:]


def test_statistics_of_float32_do_not_overflow_where_a_square_of_rho_would():
    statistics = mismatch_statistics(torch.full((2,), 60.0), Sequences(torch.zeros(2, dtype=torch.int64), 1))
    assert all(values.isfinite().all() for values in counted_values(statistics).values())
