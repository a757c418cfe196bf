"""The head never holds more logits than its chunk allows, in forward and backward, with the exact KL or without."""

from __future__ import annotations

import pytest
import torch

from slimefsdp.models.fused_log_probs import HeadInputs, token_log_probs, token_log_probs_and_kl
from tests.support.head_cases import LargestTensor, random_case

ROWS, VOCABULARY, CHUNK_BYTES = 640, 2003, 2**19


@pytest.mark.parametrize("with_kl", [False, True], ids=["log-probs", "exact KL"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_larger_than_a_chunk(dtype: torch.dtype, with_kl: bool) -> None:
    hidden, weight, targets, _ = random_case(ROWS, 8, VOCABULARY, dtype)
    with LargestTensor() as recorder:
        if with_kl:
            reference = HeadInputs(hidden.detach().clone(), weight.detach().clone())
            found = token_log_probs_and_kl(HeadInputs(hidden, weight), targets, reference, chunk_bytes=CHUNK_BYTES)
            loss = found[0].sum() + found[2].sum()
        else:
            loss = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=CHUNK_BYTES)[
                0
            ].sum()
        loss.backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert CHUNK_BYTES / 32 < recorder.elements <= CHUNK_BYTES / 4 < ROWS * VOCABULARY / 9
