"""What the head asks of its kernels is what it computes without them, and Triton's, interpreted, say the same."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from slimefsdp.models import fused_log_probs, head_kernels
from slimefsdp.models.fused_log_probs import HeadAdapter, HeadInputs, token_log_probs, token_log_probs_and_kl
from tests.support.head_cases import chunk_bytes_for, random_case, worst

ROWS, HIDDEN_DIM, VOCAB = 23, 8, 1300  # two parts of the vocabulary on a CPU, and with a bound of 5 rows several tiles


def row_sums(logits, largest, exp_sums, exp_logits):
    largest.copy_(logits.amax(1))
    below = logits - largest[:, None]
    exp_sums.copy_(below.exp().sum(1))
    exp_logits.copy_((below.exp() * below).sum(1))


def logits_grad(logits, largest, factors, targets, target_grads, out):
    is_target = torch.arange(logits.shape[1]) == targets[:, None]
    out.copy_((logits - largest[:, None]).exp() * factors[:, None] + is_target * target_grads[:, None])


@pytest.fixture
def in_plain_torch(monkeypatch):
    """The kernels' places taken by plain torch; yields how often each was asked for."""
    asked = {"row_sums": 0, "logits_grad": 0}

    def counted(function):
        def count(*args):
            asked[function.__name__] += 1
            function(*args)

        return count

    def begin():
        monkeypatch.setattr(fused_log_probs, "_has_kernels", lambda _: True)
        monkeypatch.setattr(head_kernels, "row_sums", counted(row_sums))
        monkeypatch.setattr(head_kernels, "logits_grad", counted(logits_grad))
        return asked

    return begin


def outputs_and_grads(*, entropy_grad=False, with_kl=False, is_kl_trained=False, softcap=None, temperature=1.0, rank=0):
    hidden, weight, targets, *_ = random_case(ROWS, HIDDEN_DIM, VOCAB, torch.float64)
    generator = torch.Generator().manual_seed(2)
    leaves = [hidden, weight]
    adapter = None
    if rank:
        adapter = HeadAdapter(
            *(
                torch.randn(size, rank, generator=generator, dtype=torch.float64, requires_grad=True)
                for size in (ROWS, VOCAB)
            )
        )
        leaves += adapter
    bound = chunk_bytes_for(5, VOCAB, torch.float64)
    if with_kl:
        reference = HeadInputs(hidden.detach() + 0.01, weight.detach())
        outputs = token_log_probs_and_kl(
            HeadInputs(hidden, weight, softcap, adapter), targets, reference,
            temperature=temperature, entropy_grad=entropy_grad, chunk_bytes=bound,
        )  # fmt: skip
    else:
        outputs = token_log_probs(
            HeadInputs(hidden, weight, softcap, adapter), targets, temperature=temperature,
            with_entropy=True, entropy_grad=entropy_grad, chunk_bytes=bound,
        )  # fmt: skip
    trained = [True, entropy_grad, is_kl_trained]
    slopes = torch.randn(3, ROWS, generator=generator, dtype=torch.float64)
    loss = sum((slope * value).sum() for slope, value, is_in in zip(slopes, outputs, trained, strict=False) if is_in)
    return [output.detach() for output in outputs], torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("settings", "asks_for_gradients"),
    [
        pytest.param({}, True, id="plain"),
        pytest.param({"temperature": 0.7, "rank": 3}, True, id="temperature and adapter"),
        pytest.param({"with_kl": True}, True, id="KL measured"),
        pytest.param({"with_kl": True, "is_kl_trained": True}, False, id="KL trained"),
        pytest.param({"entropy_grad": True}, False, id="entropy trained"),
        pytest.param({"softcap": 3.0, "temperature": 1.3}, False, id="soft-cap"),
    ],
)
def test_a_head_with_kernels_is_one_without(settings, asks_for_gradients, in_plain_torch):
    expected, expected_grads = outputs_and_grads(**settings)
    asked = in_plain_torch()
    found, grads = outputs_and_grads(**settings)
    assert all(worst(*pair) < 1e-12 for pair in zip(found, expected, strict=True))
    assert all(worst(*pair) < 1e-12 for pair in zip(grads, expected_grads, strict=True))
    assert asked["row_sums"] > 0
    assert (asked["logits_grad"] > 0) == asks_for_gradients


def test_the_kl_to_equal_logits_is_exactly_0_with_kernels(in_plain_torch):
    in_plain_torch()
    hidden, weight, targets, *_ = random_case(ROWS, HIDDEN_DIM, VOCAB, torch.float64)
    kl = token_log_probs_and_kl(HeadInputs(hidden, weight), targets, HeadInputs(hidden.detach(), weight.detach()))[2]
    assert (kl == 0).all()


class Uncompilable:
    """A kernel that cannot be compiled on this machine."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            raise RuntimeError("Failed to find C compiler.\nSpecify via CC")

        return launch


def test_where_triton_cannot_compile_the_head_says_so_once_and_does_without(monkeypatch, caplog):
    monkeypatch.setattr(head_kernels, "triton", object())
    monkeypatch.setattr(head_kernels, "_row_sums", Uncompilable(), raising=False)
    head_kernels.can_launch.cache_clear()
    try:
        assert [head_kernels.can_launch(torch.device("cpu")) for _ in range(2)] == [False, False]
    finally:
        head_kernels.can_launch.cache_clear()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.endswith(
        "without its Triton kernels, which failed: RuntimeError: Failed to find C compiler. Specify via CC"
    )


INTERPRETED = """
import torch
from slimefsdp.models import head_kernels
from tests.models.test_head_kernels import logits_grad, row_sums
assert head_kernels.can_launch(torch.device("cpu"))
torch.manual_seed(0)
for rows, words in ((3, 5000), (1, 4096), (2, 100), (7, 12289)):
    logits = 5 * torch.randn(rows, words)
    sums, expected = ([torch.full((rows,), torch.nan) for _ in range(3)] for _ in range(2))
    head_kernels.row_sums(logits, *sums)
    row_sums(logits, *expected)
    assert torch.equal(sums[0], expected[0])
    assert all(torch.allclose(*pair, rtol=1e-5) for pair in zip(sums, expected))
    factors, target_grads, targets = torch.randn(rows), torch.randn(rows), torch.randint(words, (rows,))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        out, plain = (torch.full((rows, words), torch.nan, dtype=dtype) for _ in range(2))
        head_kernels.logits_grad(logits, sums[0], factors, targets, target_grads, out)
        logits_grad(logits, sums[0], factors, targets, target_grads, plain)
        assert torch.allclose(out.float(), plain.float(), rtol=tolerance, atol=1e-7), (rows, words, dtype)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which torch for a CPU comes without")
def test_triton_interpreted_says_what_plain_torch_does():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, cwd=root, check=True, timeout=600)
