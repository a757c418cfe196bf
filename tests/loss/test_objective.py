"""The loss of one pack: each term against its formula, weights that add up over packs, and what is reported."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.loss.objective import Objective, TokenInputs

TOKENS = 12


class Recorder:
    """Stands where metrics are summed; keeps what was added."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.values: dict[str, torch.Tensor] = {}

    def add_total(self, name: str, value: torch.Tensor) -> None:
        self.totals[name] = float(value.detach())

    def add_mean(self, name: str, values: torch.Tensor) -> None:
        self.values[name] = values.detach()

    add_max = add_mean


def random_inputs(seed: int = 0, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, TokenInputs]:
    torch.manual_seed(seed)
    log_probs, entropy = (torch.rand(tokens, dtype=torch.float64) for _ in range(2))
    inputs = TokenInputs(
        weights=torch.rand(tokens, dtype=torch.float64),
        advantages=torch.randn(tokens, dtype=torch.float64),
        old_log_probs=-3 * torch.rand(tokens, dtype=torch.float64),
        ref_log_probs=-3 * torch.rand(tokens, dtype=torch.float64),
        rollout_log_probs=-3 * torch.rand(tokens, dtype=torch.float64),
    )
    return (-3 * log_probs).requires_grad_(), entropy.requires_grad_(), inputs


def plain_loss(objective: Objective, log_probs: torch.Tensor, entropy: torch.Tensor, i: TokenInputs) -> torch.Tensor:
    """Written token by token from the definitions."""
    total = log_probs.new_zeros(())
    for t in range(len(log_probs)):
        if objective.loss == "sft":
            token = -log_probs[t]
        else:
            assert i.advantages is not None and i.old_log_probs is not None
            ratio = torch.exp(log_probs[t] - i.old_log_probs[t])
            bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            token = -torch.minimum(ratio * i.advantages[t], bounded * i.advantages[t])
            if i.ref_log_probs is not None:
                log_r = i.ref_log_probs[t] - log_probs[t]
                kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[objective.kl_estimator]
                token = token + objective.kl_coefficient * kl
        total = total + i.weights[t] * (token - objective.entropy_coefficient * entropy[t])
    return total


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss", ["policy", "sft"])
def test_loss_and_gradients_equal_the_definitions(loss: str, kl_estimator: str) -> None:
    objective = Objective(loss, 0.1, 0.3, 0.5, kl_estimator, 0.2)  # type: ignore[arg-type]
    log_probs, entropy, inputs = random_inputs()
    ours = objective(log_probs, entropy, inputs, None)
    plain = plain_loss(objective, log_probs, entropy, inputs)
    assert ours.item() == pytest.approx(plain.item(), abs=1e-12)
    for a, b in zip(*(torch.autograd.grad(x, (log_probs, entropy)) for x in (ours, plain)), strict=True):
        assert a.abs().max() > 0 and (a - b).abs().max() <= 1e-12


@given(st.integers(0, 10**6), st.lists(st.integers(0, TOKENS), max_size=4))
def test_packs_of_any_cut_add_up_to_the_whole(seed: int, cuts: list[int]) -> None:
    objective = Objective("policy", kl_coefficient=0.1, entropy_coefficient=0.1)
    log_probs, entropy, inputs = random_inputs(seed)
    bounds = [0, *sorted(cuts), TOKENS]
    parts = [torch.arange(a, b) for a, b in pairwise(bounds)]  # some of them empty
    whole = objective(log_probs, entropy, inputs, None)
    pieces = torch.stack([objective(log_probs[part], entropy[part], inputs.at(part), None) for part in parts]).sum()
    assert pieces.item() == pytest.approx(whole.item(), abs=1e-12)
    (a,), (b,) = (torch.autograd.grad(x, log_probs) for x in (whole, pieces))
    assert (a - b).abs().max() <= 1e-12


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_the_policy_gradient() -> None:
    log_probs, entropy, inputs = random_inputs()
    inputs = TokenInputs(inputs.weights, inputs.advantages)
    recorder = Recorder()
    loss = Objective("policy")(log_probs, entropy, inputs, recorder)  # type: ignore[arg-type]
    assert inputs.advantages is not None
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert torch.equal(gradient, -inputs.weights * inputs.advantages)
    assert (recorder.values["ratio"] == 1.0).all() and (recorder.values["ratio_deviation_max"] == 0.0).all()
    assert not recorder.values["clip_fraction_low"].any() and not recorder.values["clip_fraction_high"].any()


def test_tokens_of_weight_zero_leave_no_trace_in_the_gradient() -> None:
    log_probs, entropy, inputs = random_inputs()
    inputs.weights[:5] = 0.0
    objective = Objective("policy", kl_coefficient=0.1, entropy_coefficient=0.1)
    for gradient in torch.autograd.grad(objective(log_probs, entropy, inputs, None), (log_probs, entropy)):
        assert not gradient[:5].any() and gradient[5:].any()


def test_what_is_reported_is_what_was_computed() -> None:
    objective = Objective("policy", 0.1, 0.3, 0.5)
    log_probs, entropy, inputs = random_inputs()
    assert inputs.old_log_probs is not None and inputs.rollout_log_probs is not None
    recorder = Recorder()
    loss = objective(log_probs, entropy, inputs, recorder)  # type: ignore[arg-type]
    ratio = (log_probs - inputs.old_log_probs).detach().exp()
    assert recorder.totals == {"loss": loss.item(), "tokens": TOKENS}
    assert torch.equal(recorder.values["ratio"], ratio)
    assert torch.equal(recorder.values["ratio_deviation_max"], (ratio - 1).abs())
    assert inputs.advantages is not None
    assert torch.equal(recorder.values["clip_fraction_low"], (ratio < 0.9) & (inputs.advantages < 0))
    assert torch.equal(recorder.values["clip_fraction_high"], (ratio > 1.3) & (inputs.advantages > 0))
    assert torch.equal(recorder.values["rollout_mismatch"], (inputs.old_log_probs - inputs.rollout_log_probs).abs())
    assert torch.equal(recorder.values["entropy"], entropy.detach())
    assert recorder.values["kl_ref"].min() >= 0
    silent = objective(log_probs, entropy, inputs, None)
    assert torch.equal(silent, loss)  # reporting changes nothing


def test_without_reference_and_rollout_nothing_is_reported_about_them() -> None:
    log_probs, entropy, inputs = random_inputs()
    policy, sft = Recorder(), Recorder()
    Objective("policy")(log_probs, entropy, TokenInputs(inputs.weights, inputs.advantages), policy)  # type: ignore[arg-type]
    Objective("sft")(log_probs, entropy, inputs, sft)  # type: ignore[arg-type]
    assert not {"kl_ref", "rollout_mismatch"} & policy.values.keys()
    assert sft.values.keys() == {"entropy"}


def test_inputs_are_picked_and_cast_and_absent_ones_stay_absent() -> None:
    *_, inputs = random_inputs()
    picked = TokenInputs(inputs.weights, ref_log_probs=inputs.ref_log_probs).at(torch.tensor([3, 1]))
    assert inputs.ref_log_probs is not None and picked.ref_log_probs is not None
    assert torch.equal(picked.weights, inputs.weights[[3, 1]])
    assert torch.equal(picked.ref_log_probs, inputs.ref_log_probs[[3, 1]])
    assert picked.advantages is None and picked.old_log_probs is None and picked.rollout_log_probs is None
    narrow = picked.to(torch.device("cpu"), torch.float32)
    assert narrow.weights.dtype == torch.float32 and narrow.advantages is None
