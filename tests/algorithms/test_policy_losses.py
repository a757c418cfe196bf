from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyOptions,
    PolicyTokens,
    Sequences,
    cross_entropy_loss,
    dro_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    ppo_loss,
)
from slimefsdp.algorithms.registry import PER_SEQUENCE
from tests.support.tiers import examples

OPTIONS = PolicyOptions(clip_low=0.2, clip_high=0.28, dual_clip=3.0, beta=0.3)
RATIO_LOSSES = {name: entry for name, entry in POLICY_LOSSES.items() if name not in ("dpo", "dro")}
every_ratio_loss = pytest.mark.parametrize("loss", RATIO_LOSSES.values(), ids=RATIO_LOSSES)
every_loss = pytest.mark.parametrize("entry", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
log_probs_st = st.floats(-12, 0)
# sequences of (log-prob, old log-prob, advantage of the token)
batches_st = st.lists(
    st.lists(st.tuples(log_probs_st, log_probs_st, st.floats(-3, 3, allow_subnormal=False)), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


def pack(batch, dtype=torch.float64):
    """The tokens of a batch of sequences, the last sequence's first and so on in turn: none lie together."""
    rows = [(i, *token) for i, sequence in enumerate(batch) for token in sequence]
    rows = rows[::-2] + rows[-2::-2]
    log_probs, old, advantages = (torch.tensor([row[k] for row in rows], dtype=dtype) for k in (1, 2, 3))
    sequences = Sequences(torch.tensor([row[0] for row in rows], dtype=torch.int64), len(batch) + 2)
    return PolicyTokens(log_probs.requires_grad_(), old, advantages, sequences)


def by_sequence_mean(tokens):
    """The weights of the reduction sequence_mean."""
    lengths = tokens.sequences.lengths().to(tokens.log_probs.dtype)
    return 1.0 / (tokens.sequences.occurs().sum() * tokens.sequences.spread(lengths))


def loss_and_gradient(loss, tokens, options=OPTIONS, weights=1.0):
    total = (weights * loss(tokens, options).loss).sum()
    return total.detach(), torch.autograd.grad(total, tokens.log_probs)[0]


def with_one_advantage(batch):
    return [[(log_prob, old, sequence[0][2]) for log_prob, old, _ in sequence] for sequence in batch]


def random_batch(seed=0, lengths=(5, 1, 4, 3), spread=0.5):
    """Sequences with one advantage each, two of either sign; no ratio near a bound of OPTIONS, by this seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(old + change, old, advantage) for old, change in zip(olds, changes, strict=True)]
        for olds, changes, advantage in zip(
            (torch.rand(n, generator=generator).mul(-6).tolist() for n in lengths),
            (torch.randn(n, generator=generator).mul(spread).tolist() for n in lengths),
            (1.5, -0.5, -2.0, 0.75),
            strict=True,
        )
    ]


# --- the papers' formulas: the loss of one sequence of 0-d log-probs p, with old log-probs and advantages ---


def mean(values):
    return sum(values) / len(values)


def ppo_of_one_sequence(p, old, advantages):
    def token(ratio, a):
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        return -(surrogate.clamp(min=3.0 * a) if a < 0 else surrogate)

    return mean([token(torch.exp(x) / torch.exp(o), a) for x, o, a in zip(p, old, advantages, strict=True)])


def gspo_of_one_sequence(p, old, advantages):
    ratio = math.prod(torch.exp(x) / torch.exp(o) for x, o in zip(p, old, strict=True)) ** (1 / len(p))
    return -torch.minimum(ratio * advantages[0], ratio.clamp(0.8, 1.28) * advantages[0])


def gspo_token_of_one_sequence(p, old, advantages):
    ratio = math.prod(torch.exp(x) / torch.exp(o) for x, o in zip(p, old, strict=True)).detach() ** (1 / len(p))
    ratios = [ratio * torch.exp(x) / torch.exp(x).detach() for x in p]
    return -mean([torch.minimum(r * a, r.clamp(0.8, 1.28) * a) for r, a in zip(ratios, advantages, strict=True)])


def cispo_of_one_sequence(p, old, advantages):
    weights = [(torch.exp(x) / torch.exp(o)).detach().clamp(0.8, 1.28) for x, o in zip(p, old, strict=True)]
    return -mean([w * a * x for w, a, x in zip(weights, advantages, p, strict=True)])


def sapo_of_one_sequence(p, old, advantages):
    def gate(ratio, tau):
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))

    taus = [1.0 if a > 0 else 1.05 for a in advantages]
    ratios = [torch.exp(x) / torch.exp(o) for x, o in zip(p, old, strict=True)]
    return -mean([gate(r, tau) * a for r, tau, a in zip(ratios, taus, advantages, strict=True)])


def gmpo_of_one_sequence(p, old, advantages):
    a = advantages[0]
    ratios = [torch.exp(x) / torch.exp(o) for x, o in zip(p, old, strict=True)]
    bounded = [r.clamp(math.exp(-0.2), math.exp(0.28)) for r in ratios]
    pessimistic = torch.minimum if a > 0 else torch.maximum
    return -a * math.prod(pessimistic(r, b) for r, b in zip(ratios, bounded, strict=True)) ** (1 / len(p))


def reinforce_of_one_sequence(p, old, advantages):
    return -mean([a * x for a, x in zip(advantages, p, strict=True)])


def importance_sampling_of_one_sequence(p, old, advantages):
    return -mean([a * torch.exp(x) / torch.exp(o) for a, x, o in zip(advantages, p, old, strict=True)])


OF_ONE_SEQUENCE = {name: globals()[f"{name}_of_one_sequence"] for name in RATIO_LOSSES}


@pytest.mark.parametrize("name", RATIO_LOSSES)
@examples(40)
@given(batch=batches_st)
def test_the_mean_over_sequences_is_the_papers_formula_with_its_gradient(name, batch):
    if name in PER_SEQUENCE:
        batch = with_one_advantage(batch)
    tokens = pack(batch)
    found = loss_and_gradient(RATIO_LOSSES[name], tokens, weights=by_sequence_mean(tokens))
    leaves = [[torch.tensor(token[0], dtype=torch.float64, requires_grad=True) for token in s] for s in batch]
    losses = [
        OF_ONE_SEQUENCE[name](p, [torch.tensor(t[1], dtype=torch.float64) for t in s], [t[2] for t in s])
        for p, s in zip(leaves, batch, strict=True)
    ]
    expected = mean(losses)
    flat = torch.autograd.grad(expected, [p for s in leaves for p in s])
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-12, atol=1e-12)
    gradient = torch.stack(flat)
    torch.testing.assert_close(
        found[1], torch.cat([gradient.flip(0)[::2], gradient.flip(0)[1::2]]), rtol=1e-12, atol=1e-12
    )


@settings(deadline=None)
@given(batches_st)
def test_ppos_flags_say_exactly_where_a_bound_made_the_loss_another_one(batch):
    tokens = pack(batch)
    loss, ratio, clipped_low, clipped_high = ppo_loss(tokens, OPTIONS)
    advantages = tokens.advantages
    assert torch.equal(ratio, torch.exp(tokens.log_probs - tokens.old_log_probs))
    assert torch.equal(clipped_low | clipped_high, loss != -ratio * advantages)
    assert torch.equal(clipped_low, (ratio < 0.8) & (advantages < 0))
    assert torch.equal(clipped_high, ((ratio > 1.28) & (advantages > 0)) | ((ratio > 3.0) & (advantages < 0)))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "is_open"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False), (2.0, -1.0, False)],
)
@pytest.mark.parametrize("loss", [ppo_loss, gspo_loss, gspo_token_loss, gmpo_loss])
def test_a_clip_stops_the_gradient_only_on_the_side_the_advantage_pushes_to(loss, log_ratio, advantage, is_open):
    tokens = pack([[(log_ratio - 2.0, -2.0, advantage)] * 3])
    result = loss(tokens, OPTIONS)
    result.loss.sum().backward()
    if log_ratio == 2.0 and loss is not ppo_loss:
        is_open = True  # the dual clip is PPO's
    assert (tokens.log_probs.grad != 0.0).tolist() == [is_open] * 3
    assert result.clipped_high.tolist() == [not is_open and log_ratio > 0] * 3
    assert result.clipped_low.tolist() == [not is_open and log_ratio < 0] * 3


def test_dual_clip_bounds_the_loss_of_negative_advantages_and_changes_nothing_else():
    tokens = pack([[(-10.0 + step / 2, -5.0, advantage) for step in range(20)] for advantage in (-2.0, 2.0)])
    plain, dual = (ppo_loss(tokens, replace(OPTIONS, dual_clip=bound)) for bound in (None, 3.0))
    is_bounded = (tokens.advantages < 0) & (plain.ratio > 3.0)
    assert is_bounded.any() and plain.loss[is_bounded].min() > 6.0
    assert dual.loss[is_bounded].eq(6.0).all() and torch.equal(dual.loss[~is_bounded], plain.loss[~is_bounded])
    assert torch.equal(dual.clipped_high, plain.clipped_high | is_bounded)


def test_dro_follows_the_advantage_and_draws_every_token_back_to_its_old_log_prob():
    tokens = pack([[(-1.0, -1.5, 2.0), (-2.0, -1.0, 0.0)], [(-0.5, -0.5, -1.0)]])
    now, old, advantages = tokens.log_probs.detach(), tokens.old_log_probs, tokens.advantages
    loss, gradient = loss_and_gradient(dro_loss, tokens)
    expected = -sum(a * x - 0.3 / 2 * (x - o) ** 2 for x, o, a in zip(now, old, advantages, strict=True))
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(gradient, -advantages + 0.3 * (now - old), rtol=1e-14, atol=0.0)
    assert gradient[(advantages == 0).nonzero()].item() == pytest.approx(-0.3)


# --- what holds for every loss ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_ratio_loss
def test_equal_log_probs_give_ratio_exactly_one_and_the_plain_policy_gradient(loss, dtype):
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(64, generator=generator, dtype=dtype) * 20
    of_sequence = torch.randn(8, generator=generator, dtype=dtype)
    index = torch.randint(8, (64,), generator=generator)
    tokens = PolicyTokens(old.clone().requires_grad_(), old, of_sequence[index], Sequences(index, 8))
    for options in (OPTIONS, PolicyOptions(clip_low=0.0, clip_high=0.0)):
        result = loss(tokens, options)
        _, gradient = loss_and_gradient(loss, tokens, options)
        assert result.loss.dtype == dtype and torch.equal(result.ratio, torch.ones_like(old))
        assert not (result.clipped_low | result.clipped_high).any()
        torch.testing.assert_close(gradient, -tokens.advantages)


@every_ratio_loss
def test_order_and_numbering_of_tokens_and_the_split_into_packs_change_nothing(loss):
    batch = random_batch()
    tokens = pack(batch)
    whole = loss(tokens, OPTIONS).loss
    _, gradient = loss_and_gradient(loss, tokens)

    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(2))
    numbers = torch.tensor([9, 0, 4, 2])
    shuffled = PolicyTokens(
        tokens.log_probs.detach()[order].requires_grad_(), tokens.old_log_probs[order], tokens.advantages[order],
        Sequences(numbers[tokens.sequences.index[order]], 11),
    )  # fmt: skip
    torch.testing.assert_close(loss(shuffled, OPTIONS).loss, whole[order], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(loss_and_gradient(loss, shuffled)[1], gradient[order], rtol=1e-12, atol=0.0)

    for i, sequence in enumerate(batch):
        alone, here = pack([sequence]), tokens.sequences.index == i
        total, of_alone = loss_and_gradient(loss, alone)
        torch.testing.assert_close(total, whole[here].sum().detach(), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(of_alone.sort()[0], gradient[here].sort()[0], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@every_ratio_loss
def test_no_gradient_is_nan_where_a_ratio_overflows_and_a_bounded_one_is_finite(loss, advantage, dtype):
    tokens = pack([[(-1.0, -900.0, advantage)], [(-1.0, -1.0, advantage)]], dtype)
    result = loss(tokens, OPTIONS)
    _, gradient = loss_and_gradient(loss, tokens)
    assert result.ratio.isinf().sum() == 1 and not result.loss.isnan().any() and not gradient.isnan().any()
    is_unbounded = advantage < 0 and loss in (gspo_loss, gspo_token_loss, gmpo_loss)
    if not is_unbounded and loss is not RATIO_LOSSES["importance_sampling"]:
        assert result.loss.isfinite().all() and gradient.isfinite().all()
        assert -advantage in gradient.tolist()


@every_loss
def test_only_the_loss_carries_a_graph_and_a_pack_without_tokens_is_legal(entry):
    for lengths in ((2, 2), ()):
        index = torch.arange(len(lengths)).repeat_interleave(2)
        log_probs = torch.zeros(len(index), requires_grad=True)
        values = torch.zeros(len(index))
        tokens = PolicyTokens(
            log_probs, values, torch.ones_like(values), Sequences(index, 3), Sequences(index // 2, 3), values
        )
        loss, *rest = entry(tokens, OPTIONS)
        assert loss.requires_grad and not any(tensor.requires_grad for tensor in rest)
        assert all(tensor.shape == values.shape for tensor in (loss, *rest))
        loss.sum().backward()
        assert log_probs.grad.shape == values.shape


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_losses_of_whole_sequences_look_beyond_a_token(name):
    tokens = pack(random_batch(spread=0.01))  # nothing is clipped
    log_probs = tokens.log_probs.detach().requires_grad_()
    ref = torch.zeros_like(log_probs)
    tokens = replace(tokens, log_probs=log_probs, groups=tokens.sequences, ref_log_probs=ref)
    (gradient,) = torch.autograd.grad(POLICY_LOSSES[name](tokens, OPTIONS).loss[0], log_probs)
    assert bool(gradient[1:].any()) == (name in PER_SEQUENCE)


def test_cross_entropy_of_log_softmax_is_torchs_cross_entropy():
    logits = torch.randn(6, 11, dtype=torch.float64)
    targets = torch.randint(11, (6,))
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(cross_entropy_loss(log_probs), expected)
