"""The comparison of samplers: all of them draw the same lengths from the model that counts down."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.slow
def test_all_systems_sample_the_same_lengths_and_their_rates_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    arguments = ["--shapes", "demo", "--samples", "128", "--rounds", "1", "--before", "none", "--json", str(file)]
    assert sampling.main(arguments) == 0
    found = json.loads(file.read_text())["results"]["shapes"]["demo"]
    assert found.keys() == {"slimefsdp", "transformers"}
    mean = found["slimefsdp"]["mean_length"]
    assert mean == pytest.approx(found["transformers"]["mean_length"], rel=0.3) and 30 < mean < 130
    ratio = found["slimefsdp"]["tokens_per_cpu_second"] / found["transformers"]["tokens_per_cpu_second"]
    assert found["transformers"]["ratio"]["median"] == pytest.approx(ratio)


@pytest.mark.parametrize("arguments", [["--samples", "9"], ["--rows", "0"], ["--prompt-tokens", "1"]])
def test_a_workload_that_cannot_be_drawn_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sampling.main(arguments)
    assert ended.value.code == 2
