"""The loss of one pack: each term against its formula, weights that add up over packs, and what is reported."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.algorithms.objective import CorrectionOptions, Objective, TokenInputs
from slimefsdp.algorithms.policy_losses import PolicyLoss, PolicyOptions, PolicyTokens, gspo_loss, ppo_loss
from slimefsdp.config import config_from_dict
from slimefsdp.errors import ConfigError
from slimefsdp.training.packs import check_policy_loss, objective_for
from tests.support.refusals import refused

TOKENS = 12
LENGTHS = (4, 1, 5, 2)  # of the samples; their tokens lie together, in another order than their numbers
SAMPLES = torch.tensor([2] * 5 + [0] * 4 + [3] * 2 + [1])


class Recorder:
    """Stands where metrics are summed; keeps what was added."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add_total(self, name: str, value: torch.Tensor) -> None:
        self.totals[name] = float(value.detach())

    def add_mean(self, name: str, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        self.values[name] = values.detach() if counted is None else values.detach()[counted]

    def add_max(self, name: str, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        self.maxima[name] = values.detach() if counted is None else values.detach()[counted]


def random_inputs(seed: int = 0) -> tuple[torch.Tensor, TokenInputs]:
    """Log-probs, entropies and the exact KL, [3, tokens], as leaves; and what is known of their tokens."""
    torch.manual_seed(seed)
    outputs = torch.rand(3, TOKENS, dtype=torch.float64)
    outputs[0] *= -3
    advantages = torch.tensor([0.8, -1.3, -0.6, 1.1], dtype=torch.float64)  # one for each sample
    inputs = TokenInputs(
        weights=torch.rand(TOKENS, dtype=torch.float64),
        sample_ids=SAMPLES,
        num_samples=9,  # of the batch: most are in other packs
        group_ids=SAMPLES // 2,
        advantages=advantages[SAMPLES],
        old_log_probs=-3 * torch.rand(TOKENS, dtype=torch.float64),
        ref_log_probs=-3 * torch.rand(TOKENS, dtype=torch.float64),
        rollout_log_probs=-3 * torch.rand(TOKENS, dtype=torch.float64),
    )
    return outputs.requires_grad_(), inputs


def of(values: torch.Tensor | None, token: int) -> torch.Tensor:
    assert values is not None
    return values[token]


def plain_kl(objective: Objective, outputs: torch.Tensor, i: TokenInputs, t: int) -> torch.Tensor:
    if objective.kl_estimator == "full":
        return outputs[2, t]
    log_r = of(i.ref_log_probs, t) - outputs[0, t]
    kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r, "abs": log_r.abs()}[objective.kl_estimator]
    return torch.exp(outputs[0, t] - of(i.old_log_probs, t)) * kl if objective.kl_unbiased else kl


def plain_loss(
    objective: Objective, outputs: torch.Tensor, i: TokenInputs, corrections: list[float] | None = None
) -> torch.Tensor:
    """Written token by token from the definitions.

    Args:
        corrections: what each token's policy loss weighs; 1.
    """
    total = outputs.new_zeros(())
    for t in range(TOKENS):
        if objective.policy is None:
            token = -outputs[0, t]
        else:
            advantage = of(i.advantages, t)
            ratio = torch.exp(outputs[0, t] - of(i.old_log_probs, t))
            bounded = ratio.clamp(1 - objective.options.clip_low, 1 + objective.options.clip_high)
            token = -torch.minimum(ratio * advantage, bounded * advantage)
            token = token * (1.0 if corrections is None else corrections[t])
            if objective.kl_coefficient:
                token = token + objective.kl_coefficient * plain_kl(objective, outputs, i, t)
        total = total + i.weights[t] * (token - objective.entropy_coefficient * outputs[1, t])
    return total


def check_same(ours: torch.Tensor, plain: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Equal in value and gradient; returns the gradient."""
    assert ours.item() == pytest.approx(plain.item(), abs=1e-12)
    found, expected = (torch.autograd.grad(loss, outputs)[0] for loss in (ours, plain))
    assert (found - expected).abs().max() <= 1e-12
    return found


OPTIONS = PolicyOptions(clip_low=0.1, clip_high=0.3)


@pytest.mark.parametrize("kl_unbiased", [False, True])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3", "abs", "full"])
@pytest.mark.parametrize("policy", [ppo_loss, None])
def test_loss_and_gradients_equal_the_definitions(policy: Any, kl_estimator: str, kl_unbiased: bool) -> None:
    objective = Objective(
        policy, OPTIONS, kl_coefficient=0.5, kl_estimator=kl_estimator, entropy_coefficient=0.2,
        kl_unbiased=kl_unbiased and kl_estimator != "full",
    )  # fmt: skip
    outputs, inputs = random_inputs()
    if kl_estimator == "full":
        inputs = replace(inputs, ref_log_probs=None)
    given = outputs if kl_estimator == "full" else outputs[:2]
    gradient = check_same(objective(given, inputs), plain_loss(objective, outputs, inputs), outputs)
    assert gradient[:2].abs().min(dim=1).values.max() > 0
    assert gradient[2].any() == (kl_estimator == "full" and policy is not None)


@given(st.integers(0, 10**6), st.lists(st.sampled_from([5, 9, 11]), max_size=3))
def test_packs_of_whole_samples_add_up_to_the_whole(seed: int, cuts: list[int]) -> None:
    bounds = CorrectionOptions(high=1.5, low=0.7, veto_below=0.01, opsm_threshold=0.5)
    objective = Objective(
        ppo_loss, correction="geometric_mis", correction_options=bounds, kl_coefficient=0.1, entropy_coefficient=0.1
    )
    outputs, inputs = random_inputs(seed)
    parts = [torch.arange(a, b) for a, b in pairwise([0, *sorted(cuts), TOKENS])]  # some of them empty
    whole = objective(outputs[:2], inputs)
    pieces = torch.stack([objective(outputs[:2, part], inputs.at(part)) for part in parts]).sum()
    check_same(pieces, whole, outputs)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_the_policy_gradient() -> None:
    outputs, inputs = random_inputs()
    inputs = replace(inputs, old_log_probs=None, ref_log_probs=None, rollout_log_probs=None)
    recorder = Recorder()
    loss = Objective(ppo_loss)(outputs[:2], inputs, recorder)  # type: ignore[arg-type]
    assert inputs.advantages is not None
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert torch.equal(gradient[0], -inputs.weights * inputs.advantages) and not gradient[1:].any()
    assert (recorder.values["ratio"] == 1.0).all() and (recorder.maxima["ratio_deviation_max"] == 0.0).all()
    assert not recorder.values["clip_fraction_low"].any() and not recorder.values["clip_fraction_high"].any()
    assert not recorder.values["kl_old"].any()


def test_tokens_of_weight_zero_leave_no_trace_in_the_gradient() -> None:
    outputs, inputs = random_inputs()
    inputs.weights[:5] = 0.0
    objective = Objective(ppo_loss, kl_coefficient=0.1, entropy_coefficient=0.1)
    (gradient,) = torch.autograd.grad(objective(outputs[:2], inputs), outputs)
    assert not gradient[:, :5].any() and gradient[:2, 5:].any(dim=1).all()


# ---------------------------------------------------------------------- corrections


def log_rho(inputs: TokenInputs) -> list[float]:
    assert inputs.old_log_probs is not None and inputs.rollout_log_probs is not None
    return (inputs.old_log_probs - inputs.rollout_log_probs).tolist()


def veto(inputs: TokenInputs, below: float) -> list[float]:
    rho = [math.exp(x) for x in log_rho(inputs)]
    vetoed = {int(sample) for sample, r in zip(SAMPLES, rho, strict=True) if r < below}
    return [0.0 if int(sample) in vetoed else 1.0 for sample in SAMPLES]


def opsm(outputs: torch.Tensor, inputs: TokenInputs, threshold: float) -> list[float]:
    assert inputs.rollout_log_probs is not None and inputs.advantages is not None
    gap = (inputs.rollout_log_probs - outputs[0]).tolist()
    left = set()
    for sample in range(4):
        of_sample = [x for s, x in zip(SAMPLES.tolist(), gap, strict=True) if s == sample]
        if sum(of_sample) / len(of_sample) > threshold:
            left.add(sample)
    return [
        0.0 if int(sample) in left and advantage < 0 else 1.0
        for sample, advantage in zip(SAMPLES, inputs.advantages.tolist(), strict=True)
    ]


CORRECTED: dict[str, tuple[str, CorrectionOptions, Any]] = {
    "tis": ("tis", CorrectionOptions(high=1.2), lambda o, i: [min(math.exp(x), 1.2) for x in log_rho(i)]),
    "icepop": (
        "icepop", CorrectionOptions(low=0.5, high=2.0),
        lambda o, i: [math.exp(x) if 0.5 <= math.exp(x) <= 2.0 else 0.0 for x in log_rho(i)],
    ),
    "veto": ("none", CorrectionOptions(veto_below=0.2), lambda o, i: veto(i, 0.2)),
    "opsm": ("none", CorrectionOptions(opsm_threshold=0.0), lambda o, i: opsm(o, i, 0.0)),
    "all": (
        "tis", CorrectionOptions(high=1.2, veto_below=0.175, opsm_threshold=0.0),
        lambda o, i: [
            min(math.exp(x), 1.2) * a * b
            for x, a, b in zip(log_rho(i), veto(i, 0.175), opsm(o, i, 0.0), strict=True)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRECTED)
def test_a_correction_weighs_the_policy_term_and_neither_kl_nor_entropy(case: str) -> None:
    method, bounds, weights_of = CORRECTED[case]
    outputs, inputs = random_inputs(9)
    weights = weights_of(outputs, inputs)
    assert any(weights) and weights != [1.0] * TOKENS  # it does something, and leaves something
    for kl, entropy in ((0.0, 0.0), (0.5, 0.2)):
        objective = Objective(
            ppo_loss, OPTIONS, correction=method, correction_options=bounds, kl_coefficient=kl,
            entropy_coefficient=entropy,
        )  # fmt: skip
        recorder = Recorder()
        ours = objective(outputs[:2], inputs, recorder)  # type: ignore[arg-type]
        check_same(ours, plain_loss(objective, outputs, inputs, weights), outputs)
        assert recorder.values["correction_weight"].tolist() == pytest.approx(weights)
        assert recorder.values["correction_dropped"].tolist() == [weight == 0 for weight in weights]
        dropped = [not any(w for w, s in zip(weights, SAMPLES, strict=True) if s == sample) for sample in range(4)]
        assert recorder.values["correction_dropped_sequences"].tolist() == dropped


# ---------------------------------------------------------------------- metrics


def test_what_is_reported_is_what_was_computed() -> None:
    objective = Objective(ppo_loss, OPTIONS, kl_coefficient=0.5)
    outputs, inputs = random_inputs()
    assert inputs.old_log_probs is not None and inputs.rollout_log_probs is not None
    assert inputs.advantages is not None and inputs.ref_log_probs is not None
    recorder = Recorder()
    loss = objective(outputs[:2], inputs, recorder)  # type: ignore[arg-type]
    log_probs = outputs[0].detach()
    ratio = (log_probs - inputs.old_log_probs).exp()
    assert recorder.totals == {"loss": loss.item(), "tokens": TOKENS}
    assert torch.equal(recorder.values["ratio"], ratio)
    assert torch.equal(recorder.maxima["ratio_deviation_max"], (ratio - 1).abs())
    low, high = (ratio < 0.9) & (inputs.advantages < 0), (ratio > 1.3) & (inputs.advantages > 0)
    assert low.any() and high.any()
    assert torch.equal(recorder.values["clip_fraction_low"], low)
    assert torch.equal(recorder.values["clip_fraction_high"], high)
    mismatch = inputs.old_log_probs - inputs.rollout_log_probs
    assert torch.equal(recorder.values["rollout_mismatch"], mismatch.abs())
    torch.testing.assert_close(recorder.values["rollout_k1"], -mismatch)
    assert torch.equal(recorder.values["entropy"], outputs[1].detach())
    for name, (p, q) in {
        "kl_ref": (log_probs, inputs.ref_log_probs), "kl_old": (inputs.old_log_probs, log_probs)
    }.items():  # fmt: skip
        torch.testing.assert_close(recorder.values[name], (q - p).exp() - 1 - (q - p), rtol=1e-12, atol=1e-14)
    assert torch.equal(objective(outputs[:2], inputs), loss)  # reporting changes nothing


@pytest.mark.parametrize("kl_estimator", ["k2", "full"])
def test_the_kl_is_reported_as_it_is_estimated_though_no_term_has_it(kl_estimator: str) -> None:
    outputs, inputs = random_inputs()
    recorder, silent = Recorder(), Recorder()
    given = outputs if kl_estimator == "full" else outputs[:2]
    objective = Objective(ppo_loss, kl_estimator=kl_estimator)
    loss = objective(given, inputs, recorder)  # type: ignore[arg-type]
    bare = objective(outputs[:2], replace(inputs, ref_log_probs=None), silent)  # type: ignore[arg-type]
    assert torch.equal(loss, bare) and "kl_ref" not in silent.values
    expected = [plain_kl(objective, outputs.detach(), inputs, t).item() for t in range(TOKENS)]
    assert recorder.values["kl_ref"].tolist() == pytest.approx(expected)


def test_an_empty_pack_has_a_loss_of_zero_and_reports_every_name() -> None:
    outputs, inputs = random_inputs()
    nothing = torch.arange(0)
    bounds = CorrectionOptions(high=1.5, veto_below=0.01, opsm_threshold=0.5)
    objective = Objective(
        ppo_loss, correction="tis", correction_options=bounds, kl_coefficient=0.1, entropy_coefficient=0.1
    )
    full, empty = Recorder(), Recorder()
    objective(outputs[:2], inputs, full)  # type: ignore[arg-type]
    loss = objective(outputs[:2, nothing], inputs.at(nothing), empty)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert loss.item() == 0.0 and not gradient.any()
    # in one order, too: ranks reduce them by position
    assert list(full.values) == list(empty.values) and list(full.maxima) == list(empty.maxima)
    assert list(full.totals) == list(empty.totals) and all(not len(values) for values in empty.values.values())


# ---------------------------------------------------------------------- inputs and settings


def settings(**sections: Any) -> Any:
    return config_from_dict({"model": {"path": "m"}, "optim": {"total_updates": 10}, **sections})


@pytest.mark.parametrize("looks_at_sequences", [False, True])
def test_a_ratio_that_overflows_spoils_nothing_where_its_token_is_dropped(looks_at_sequences: bool) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -500.0, -1.0])  # exp(499) is infinite in float32
    rollout = torch.tensor([-1.0, -2.0, -520.0, -1.0])  # rho of exp(20): dropped
    samples = torch.tensor([0, 0, 1, 2])
    inputs = TokenInputs(
        torch.full((4,), 0.25), samples, 3, None, -torch.ones(4), old_log_probs=old, rollout_log_probs=rollout
    )
    bounds = CorrectionOptions(high=2.0)
    objective = Objective(ppo_loss, looks_at_sequences=looks_at_sequences, correction="mis", correction_options=bounds)
    loss = objective(torch.stack([log_probs, torch.zeros(4)]), inputs)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == [0.25, 0.25, 0.0, 0.25] and loss.item() == pytest.approx(0.75)


@pytest.mark.parametrize(("dtype", "mismatch"), [(torch.float32, 89.0), (torch.float64, 710.0)])
@pytest.mark.parametrize("correction", ["importance", "sequence_mis", "geometric_mis"])
@pytest.mark.parametrize("looks_at_sequences", [False, True])
def test_an_infinite_rho_spoils_nothing_where_the_advantage_is_zero(
    looks_at_sequences: bool, correction: str, dtype: torch.dtype, mismatch: float
) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -1.0, -1.0], dtype=dtype, requires_grad=True)
    rollout = log_probs.detach() - torch.tensor([0.0, 0.0, mismatch, 0.0], dtype=dtype)
    samples = torch.tensor([0, 0, 1, 2])
    advantages = torch.tensor([-1.0, -1.0, 0.0, -1.0], dtype=dtype)
    weights = torch.full((4,), 0.25, dtype=dtype)
    inputs = TokenInputs(weights, samples, 3, None, advantages, rollout_log_probs=rollout)
    assert torch.exp(log_probs.detach() - rollout).isinf().sum() == 1
    policy = gspo_loss if looks_at_sequences else ppo_loss
    objective = Objective(policy, looks_at_sequences=looks_at_sequences, correction=correction)
    loss = objective(torch.stack([log_probs, torch.zeros(4, dtype=dtype)]), inputs)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == [0.25, 0.25, 0.0, 0.25] and loss.item() == pytest.approx(0.75)


def loss_of_ones_own(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """-A (log-prob + clip_low), of whole sequences."""
    per_sequence = tokens.sequences.mean(tokens.log_probs + options.clip_low)
    none = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return PolicyLoss(-tokens.advantages * tokens.sequences.spread(per_sequence), none + 1.0, none, none)


def test_a_loss_of_ones_own_is_called_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_losses", sys.modules[__name__])
    loss = {
        "policy": "my_losses:loss_of_ones_own",
        "clip_low": 0.125,
        "kl_coefficient": 0.5,
        "entropy_coefficient": 0.2,
    }
    objective = objective_for(settings(loss=loss), "policy", 0.5)
    outputs, inputs = random_inputs()
    assert inputs.advantages is not None
    expected = outputs.new_zeros(())
    for t, sample in enumerate(SAMPLES.tolist()):
        mean = outputs[0][sample == SAMPLES].sum() / LENGTHS[sample] + 0.125
        token = -inputs.advantages[t] * mean + 0.5 * plain_kl(objective, outputs, inputs, t) - 0.2 * outputs[1, t]  # type: ignore[arg-type]
        expected = expected + inputs.weights[t] * token
    check_same(objective(outputs[:2], inputs), expected, outputs)


def _wide(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    found = ppo_loss(tokens, options)
    return found._replace(loss=found.loss[:, None])  # would broadcast to [tokens, tokens]


def _mean(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    found = ppo_loss(tokens, options)
    return found._replace(loss=found.loss.sum())


def _largest(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    return ppo_loss(replace(tokens, advantages=tokens.advantages / tokens.advantages.max()), options)


def _short(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    found = ppo_loss(tokens, options)
    return found._replace(loss=found.loss[:-1])


def _detached(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    found = ppo_loss(tokens, options)
    return found._replace(loss=found.loss.detach())


def _bare(tokens: PolicyTokens, options: PolicyOptions) -> Any:
    return ppo_loss(tokens, options).loss


def _raises(tokens: PolicyTokens, options: PolicyOptions) -> Any:
    raise KeyError("advantage")


def _ends(tokens: PolicyTokens, options: PolicyOptions) -> Any:
    sys.exit(3)


def _takes_one(tokens: PolicyTokens) -> Any:
    return tokens


BAD_LOSSES = {
    "_wide": "(0, 1)", "_mean": "()", "_largest": "test_objective.py:", "_detached": "log_probs",
    "_bare": "Tensor", "_raises": "KeyError", "_ends": "SystemExit", "_takes_one": "(tokens, options)",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_of_ones_own_is_tried_before_a_model_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_losses", sys.modules[__name__])
    check_policy_loss(settings(loss={"policy": "my_losses:loss_of_ones_own"}))
    with refused(ConfigError, "loss.policy", f"my_losses:{name}", BAD_LOSSES[name]):
        check_policy_loss(settings(loss={"policy": f"my_losses:{name}"}))


def test_a_loss_of_ones_own_of_the_wrong_length_never_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_losses", sys.modules[__name__])
    objective = objective_for(settings(loss={"policy": "my_losses:_short"}), "policy", 0.0)
    outputs, inputs = random_inputs()
    with pytest.raises(RuntimeError, match="my_losses:_short"):
        objective(outputs[:2], inputs)
