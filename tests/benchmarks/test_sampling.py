"""The comparison of samplers: its model counts down from the lengths that it is meant to have."""

from __future__ import annotations

import pytest
import torch

from benchmarks import sampling


@torch.no_grad()
def test_the_model_counts_down_from_a_length_that_is_log_normal() -> None:
    model = sampling.counting_model(sampling.SHAPES["demo"])
    numbers = torch.arange(1, sampling.LONGEST + 1)
    after = model(numbers[:, None]).logits[:, -1].softmax(-1)  # each as a prompt of its own
    assert torch.equal(after.argmax(-1), numbers - 1) and after.max(-1).values.min() > 0.999
    first = model(torch.tensor([[9, 3, sampling.LAST_OF_PROMPT]])).logits[0, -1].softmax(-1).double()
    lengths = torch.arange(1.0, sampling.LONGEST + 1, dtype=torch.float64)
    density = torch.exp(-((lengths / sampling.MEDIAN).log() ** 2) / (2 * sampling.SIGMA**2)) / lengths
    torch.testing.assert_close(first[1 : sampling.LONGEST + 1], density / density.sum(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("arguments", [["--samples", "9"], ["--rows", "0"], ["--prompt-tokens", "1"]])
def test_a_workload_that_cannot_be_drawn_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sampling.main(arguments)
    assert ended.value.code == 2
