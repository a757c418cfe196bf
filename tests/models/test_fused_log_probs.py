"""The fused head against plain log_softmax: values, gradients, rounding, memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slimefsdp.models import head_tiles
from slimefsdp.models.fused_log_probs import HeadAdapter, HeadInputs, token_log_probs
from slimefsdp.models.head_tiles import HeadTiles
from tests.support.head_cases import LargestTensor, chunk_bytes_for, naive_log_probs, random_case, worst
from tests.support.tiers import examples

SETTINGS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.6}, id="temperature"),
    pytest.param({"softcap": 3.0}, id="softcap"),
    pytest.param({"temperature": 1.7, "softcap": 3.0}, id="temperature and softcap"),
]


def as_float64(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("kwargs", SETTINGS)
def test_values_and_gradients_equal_log_softmax_in_float64(kwargs):
    hidden, weight, targets, (w_log_prob, w_entropy) = random_case(29, 12, 83)
    want = naive_log_probs(hidden, weight, targets, **kwargs)
    got = token_log_probs(
        HeadInputs(hidden, weight, kwargs.get("softcap")),
        targets,
        with_entropy=True,
        entropy_grad=True,
        chunk_bytes=chunk_bytes_for(4, 83),
        temperature=kwargs.get("temperature", 1.0),
    )
    assert worst(got[0], want[0]) < 1e-12 and worst(got[1], want[1]) < 1e-12
    losses = [(w_log_prob * log_probs + w_entropy * entropy).sum() for log_probs, entropy in (got, want)]
    got_grads, want_grads = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        assert want_grad.abs().max() > 0.1  # a comparison of zeros would prove nothing
        assert worst(got_grad, want_grad) < 1e-12


def test_entropy_carries_no_graph_unless_asked():
    hidden, weight, targets, _ = random_case(6, 4, 11)
    log_probs, entropy = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True)
    assert log_probs.requires_grad and not entropy.requires_grad
    with_term = torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))
    alone = torch.autograd.grad(token_log_probs(HeadInputs(hidden, weight), targets)[0].sum(), (hidden, weight))
    assert all(map(torch.equal, with_term, alone))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_requires_grad_gets_a_gradient(frozen):
    hidden, weight, targets, _ = random_case(6, 4, 11)
    both = torch.autograd.grad(token_log_probs(HeadInputs(hidden, weight), targets)[0].sum(), (hidden, weight))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    token_log_probs(HeadInputs(hidden, weight), targets)[0].sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")
    assert torch.equal(weight.grad, both[1]) if frozen == "hidden" else torch.equal(hidden.grad, both[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_frozen_weight_costs_no_tensor_of_its_size(has_adapter, dtype, monkeypatch):
    monkeypatch.setattr(head_tiles, "TILE_WORDS", 3)  # halves are widened a little at a time
    hidden, weight, targets, _ = random_case(6, 40, 11, dtype)
    adapter = HeadAdapter(hidden[:, :2], weight.detach()[:, :2].clone().requires_grad_()) if has_adapter else None
    with LargestTensor() as recorder:
        token_log_probs(HeadInputs(hidden, weight.detach(), adapter=adapter), targets)[0].sum().backward()
    assert hidden.grad is not None and 0 < recorder.elements < weight.numel()


@examples(60)
@given(rows=st.integers(0, 40), rows_per_chunk=st.integers(0, 45), seed=st.integers(0, 2**31))
def test_chunk_size_changes_nothing_in_float64(rows, rows_per_chunk, seed):
    hidden, weight, targets, (w_log_prob, w_entropy) = random_case(rows, 5, 17, seed=seed)
    results = []
    for chunk_bytes in (chunk_bytes_for(rows_per_chunk, 17), chunk_bytes_for(1000, 17)):
        log_probs, entropy = token_log_probs(
            HeadInputs(hidden, weight), targets, with_entropy=True, entropy_grad=True, chunk_bytes=chunk_bytes
        )
        grads = torch.autograd.grad((w_log_prob * log_probs + w_entropy * entropy).sum(), (hidden, weight))
        results.append((log_probs, entropy, *grads))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, targets, _ = random_case(0, 4, 11, torch.bfloat16)
    log_probs, entropy = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, 4) and torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kwargs", SETTINGS)
def test_forward_bits_do_not_depend_on_grad_mode_or_entropy(dtype, kwargs):
    # an odd vocabulary: every row but the first starts off any vector boundary
    hidden, weight, targets, _ = random_case(37, 24, 1237, dtype)
    chunk_bytes = chunk_bytes_for(8, 1237, torch.promote_types(dtype, torch.float32))
    entropies, log_probs = [], []
    for grad_mode in (True, False):
        for with_entropy, entropy_grad in ((False, False), (True, False), (True, True)):
            with torch.set_grad_enabled(grad_mode):
                log_prob, entropy = token_log_probs(
                    HeadInputs(hidden, weight, kwargs.get("softcap")),
                    targets,
                    with_entropy=with_entropy,
                    entropy_grad=entropy_grad,
                    chunk_bytes=chunk_bytes,
                    temperature=kwargs.get("temperature", 1.0),
                )
            assert log_prob.requires_grad == grad_mode and (entropy is not None) == with_entropy
            log_probs.append(log_prob.detach())
            entropies += [entropy.detach()] if with_entropy else []
    assert all(torch.equal(log_probs[0], other) for other in log_probs)
    assert all(torch.equal(entropies[0], other) for other in entropies)


@pytest.mark.parametrize("scale", [0.2, 1.0], ids=["flat", "confident"])
def test_float32_is_as_close_to_float64_as_plain_float32(scale):
    errors = {"fused": torch.zeros(4), "naive": torch.zeros(4)}
    for seed in range(4):
        hidden, weight, targets, loss_weights = random_case(120, 48, 3001, torch.float32, seed, scale)
        # half of the rows get the likeliest token, as sampling would: there log-probs are near 0
        targets[::2] = (hidden @ weight.t()).argmax(-1)[::2]
        exact_inputs = as_float64(hidden, weight)
        truth = outputs_and_grads(naive_log_probs, *exact_inputs, targets, loss_weights)
        for name, function in (("fused", fused_with_entropy_grad), ("naive", naive_log_probs)):
            results = outputs_and_grads(function, hidden, weight, targets, loss_weights)
            errors[name] += torch.tensor([worst(got, want) for got, want in zip(results, truth, strict=True)])
    assert (errors["naive"] > 0).all()
    assert (errors["fused"] <= 1.5 * errors["naive"]).all(), errors


def test_log_probs_near_zero_keep_absolute_float32_precision():
    hidden, weight, _, _ = random_case(400, 48, 301, torch.float32, scale=3.0)
    targets = (hidden @ weight.t()).argmax(-1)  # logits are about 60, where float32 has steps of 4e-6
    got = token_log_probs(HeadInputs(hidden, weight), targets)[0]
    want = naive_log_probs(*as_float64(hidden, weight), targets)[0]
    confident = want > -1e-2
    assert confident.sum() > 100
    assert worst(got[confident], want[confident]) < 5e-7


def fused_with_entropy_grad(hidden, weight, targets):
    chunk_bytes = chunk_bytes_for(16, weight.shape[0], torch.float32)
    return token_log_probs(
        HeadInputs(hidden, weight), targets, with_entropy=True, entropy_grad=True, chunk_bytes=chunk_bytes
    )


def outputs_and_grads(function, hidden, weight, targets, loss_weights):
    log_probs, entropy = function(hidden, weight, targets)
    w_log_prob, w_entropy = loss_weights.to(log_probs.dtype)
    grads = torch.autograd.grad((w_log_prob * log_probs + w_entropy * entropy).sum(), (hidden, weight))
    return log_probs.detach(), entropy.detach(), *grads


class CountedLogits(TorchDispatchMode):
    """Counts the products that give [_, words]."""

    def __init__(self, words):
        super().__init__()
        self.words, self.count = words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten.mm.out and result.shape[-1] in self.words
        return result


@pytest.mark.parametrize("chunks, products", [(1, 1), (3, 5)])
def test_the_last_chunks_logits_are_computed_once(chunks, products):
    hidden, weight, targets, _ = random_case(12, 5, 83)
    with CountedLogits({83}) as counted:
        chunk_bytes = chunk_bytes_for(12 // chunks, 83)
        token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=chunk_bytes)[
            0
        ].sum().backward()
    assert counted.count == products


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("held", [1, 5, 12, 13])
def test_the_logits_of_as_many_tiles_as_are_held_are_computed_once(held, with_entropy, monkeypatch):
    monkeypatch.setattr(head_tiles, "TILE_WORDS", 30)  # parts of 27, 28 and 28 words
    monkeypatch.setattr(head_tiles, "TILE_BYTES", 3 * 28 * 8)  # by four parts of three rows
    hidden, weight, targets, loss_weights = random_case(12, 5, 83)
    chunk_bytes = (held + 1) * 3 * 28 * 8
    tiles = HeadTiles.of(12, 83, 8, "cpu", chunk_bytes)
    assert (len(tiles.words), len(tiles.rows), tiles.held) == (3, 4, min(held, 12))
    with CountedLogits({27, 28}) as counted:
        got = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=with_entropy, chunk_bytes=chunk_bytes)[
            0
        ]
        grads = torch.autograd.grad((loss_weights[0] * got).sum(), (hidden, weight))
    assert counted.count == 12 + 12 - tiles.held
    want = naive_log_probs(hidden, weight, targets)[0]
    for grad, exact in zip(grads, torch.autograd.grad((loss_weights[0] * want).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(grad, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("words", [83, 30])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_a_second_backward_of_the_same_graph_gives_the_same_gradients(entropy_grad, words, monkeypatch):
    monkeypatch.setattr(head_tiles, "TILE_WORDS", words)
    hidden, weight, targets, _ = random_case(12, 5, 83)
    outputs = token_log_probs(
        HeadInputs(hidden, weight), targets, with_entropy=True, entropy_grad=entropy_grad, chunk_bytes=4000
    )
    loss = outputs[0].square().sum() + (outputs[1].square().sum() if entropy_grad else 0)
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and first[0].abs().max() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_agrees_with_cpu_without_a_host_synchronisation(dtype):
    hidden, weight, targets, loss_weights = random_case(70, 64, 2003, dtype, scale=0.3)
    want = outputs_and_grads(fused_with_entropy_grad, hidden, weight, targets, loss_weights)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in (hidden, weight)]
    gpu_targets, gpu_loss_weights = targets.cuda(), loss_weights.cuda()
    outputs_and_grads(fused_with_entropy_grad, *on_gpu, gpu_targets, gpu_loss_weights)  # libraries load here
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = outputs_and_grads(fused_with_entropy_grad, *on_gpu, gpu_targets, gpu_loss_weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # halves: the logits' gradient is rounded before its products
    for got_tensor, want_tensor in zip(got, want, strict=True):
        scale = want_tensor.float().abs().max().item()
        assert worst(got_tensor.cpu(), want_tensor) < tolerance * scale
