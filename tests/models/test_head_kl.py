"""The exact KL to a reference, out of the head, against plain log_softmax: values, gradients, rounding, memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.models.fused_log_probs import HeadAdapter, HeadInputs, token_log_probs, token_log_probs_and_kl
from tests.support.head_cases import chunk_bytes_for, naive_log_probs, random_case, worst
from tests.support.tiers import examples

SETTINGS = [
    pytest.param(1.0, None, None, id="plain"),
    pytest.param(0.6, None, None, id="temperature"),
    pytest.param(1.0, 3.0, 2.0, id="soft-caps"),
    pytest.param(1.7, 3.0, None, id="temperature and a soft-cap of the policy"),
    pytest.param(1.7, None, 2.0, id="temperature and a soft-cap of the reference"),
]


def naive_kl(hidden, weight, reference, temperature=1.0, softcap=None):
    """Through [rows, vocab] tensors."""

    def log_softmax(hidden, weight, softcap):
        logits = hidden @ weight.t()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return (logits / temperature).log_softmax(-1)

    log_p, log_q = log_softmax(hidden, weight, softcap), log_softmax(*reference[:3])
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def naive_outputs(model, targets, reference, temperature=1.0):
    log_probs, entropy = naive_log_probs(model.hidden, model.weight, targets, temperature, model.softcap)
    return log_probs, entropy, naive_kl(model.hidden, model.weight, reference, temperature, model.softcap)


def random_reference(rows, hidden_dim, vocab, dtype=torch.float64, seed=1, softcap=None):
    hidden, weight, *_ = random_case(rows, hidden_dim, vocab, dtype, seed)
    return HeadInputs(hidden.detach(), weight.detach(), softcap)


def near(model, scale=1e-2, seed=3):
    """A reference a little off the model."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(model.weight.shape, generator=generator, dtype=torch.float64).to(model.weight.dtype)
    return HeadInputs(model.hidden.detach(), model.weight.detach() + scale * noise, model.softcap)


def gradients(outputs, loss_weights, leaves):
    loss = sum((weights * output).sum() for weights, output in zip(loss_weights, outputs, strict=True))
    return torch.autograd.grad(loss, leaves)


def weights_of_losses(rows, dtype=torch.float64):
    return torch.randn(3, rows, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("temperature, softcap, ref_softcap", SETTINGS)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_values_and_gradients_equal_log_softmax_in_float64(temperature, softcap, ref_softcap, entropy_grad):
    hidden, weight, targets, _ = random_case(29, 12, 83)
    model, reference = HeadInputs(hidden, weight, softcap), random_reference(29, 7, 83, softcap=ref_softcap)
    got = token_log_probs_and_kl(
        model,
        targets,
        reference,
        temperature=temperature,
        entropy_grad=entropy_grad,
        chunk_bytes=chunk_bytes_for(4, 83),
    )
    want = naive_outputs(model, targets, reference, temperature)
    assert want[2].min() > 0.1  # nats
    assert max(map(worst, got, want)) < 1e-12
    loss_weights = weights_of_losses(29)
    loss_weights[1] *= entropy_grad
    truths = gradients(want, loss_weights, (hidden, weight))
    for got_grad, want_grad in zip(gradients(got, loss_weights, (hidden, weight)), truths, strict=True):
        assert want_grad.abs().max() > 0.1
        assert worst(got_grad, want_grad) < 1e-12


@pytest.mark.parametrize("temperature, softcap, ref_softcap", SETTINGS)
@pytest.mark.parametrize("chunk", [4, 1000])
def test_an_adapter_is_as_good_as_its_product_in_the_weight(temperature, softcap, ref_softcap, chunk):
    hidden, weight, targets, _ = random_case(29, 12, 83)
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 12), (83, 3)))
    leaves = [hidden, a.requires_grad_(), b.requires_grad_()]
    reference = random_reference(29, 7, 83, softcap=ref_softcap)
    got = token_log_probs_and_kl(
        HeadInputs(hidden, weight.detach(), softcap, HeadAdapter(0.7 * hidden @ a.t(), b)),
        targets,
        reference,
        temperature=temperature,
        entropy_grad=True,
        chunk_bytes=chunk_bytes_for(chunk, 83),
    )
    merged = HeadInputs(hidden, weight.detach() + 0.7 * b @ a, softcap)
    want = naive_outputs(merged, targets, reference, temperature)
    assert max(map(worst, got, want)) < 1e-12
    loss_weights = weights_of_losses(29)
    truths = gradients(want, loss_weights, leaves)
    for got_grad, want_grad in zip(gradients(got, loss_weights, leaves), truths, strict=True):
        assert want_grad.abs().max() > 0.1
        assert worst(got_grad, want_grad) < 1e-12


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_requires_grad_gets_a_gradient_and_the_reference_never(frozen):
    hidden, weight, targets, _ = random_case(6, 4, 11)
    reference = HeadInputs(*(tensor.requires_grad_() for tensor in random_reference(6, 4, 11)[:2]))
    both = torch.autograd.grad(
        token_log_probs_and_kl(HeadInputs(hidden, weight), targets, reference)[2].sum(), (hidden, weight)
    )
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    token_log_probs_and_kl(HeadInputs(hidden, weight), targets, reference)[2].sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")
    assert torch.equal(weight.grad, both[1]) if frozen == "hidden" else torch.equal(hidden.grad, both[0])
    assert reference.hidden.grad is None and reference.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equal_models_have_a_kl_of_exactly_zero_and_no_gradient_of_it(dtype, softcap):
    hidden, weight, targets, _ = random_case(37, 24, 1237, dtype)
    model = HeadInputs(hidden, weight, softcap)
    reference = HeadInputs(hidden.detach().clone(), weight.detach().clone(), softcap)
    chunk_bytes = chunk_bytes_for(8, 1237, torch.promote_types(dtype, torch.float32))
    kl = token_log_probs_and_kl(model, targets, reference, temperature=0.7, chunk_bytes=chunk_bytes)[2]
    assert (kl == 0).all()
    assert not any(grad.any() for grad in torch.autograd.grad(kl.sum(), (hidden, weight)))
    assert (token_log_probs_and_kl(model, targets, near(model))[2] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_reference_changes_no_bit_of_log_probs_entropy_and_their_gradients(dtype):
    hidden, weight, targets, _ = random_case(37, 24, 1237, dtype)
    chunk_bytes = chunk_bytes_for(8, 1237, torch.promote_types(dtype, torch.float32))
    alone = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=chunk_bytes)
    beside = token_log_probs_and_kl(
        HeadInputs(hidden, weight), targets, random_reference(37, 20, 1237, dtype), chunk_bytes=chunk_bytes
    )
    assert torch.equal(alone[0], beside[0]) and torch.equal(alone[1], beside[1])
    assert beside[0].requires_grad and not beside[1].requires_grad and beside[2].requires_grad
    grads = [torch.autograd.grad(outputs[0].sum(), (hidden, weight)) for outputs in (alone, beside)]
    assert all(map(torch.equal, *grads))


@examples(40)
@given(rows=st.integers(0, 40), rows_per_chunk=st.integers(0, 45), seed=st.integers(0, 2**31))
def test_chunk_size_changes_nothing_in_float64(rows, rows_per_chunk, seed):
    hidden, weight, targets, _ = random_case(rows, 5, 17, seed=seed)
    reference = random_reference(rows, 6, 17, seed=seed + 1)
    results = []
    for chunk_bytes in (chunk_bytes_for(rows_per_chunk, 17), chunk_bytes_for(1000, 17)):
        outputs = token_log_probs_and_kl(
            HeadInputs(hidden, weight), targets, reference, entropy_grad=True, chunk_bytes=chunk_bytes
        )
        results.append((*outputs, *gradients(outputs, weights_of_losses(rows), (hidden, weight))))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)
