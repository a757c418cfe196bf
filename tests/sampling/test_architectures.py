"""The embedded engine's sampler serves every architecture that can be trained."""

from __future__ import annotations

import pytest
import torch

from slimefsdp.sampling.params import SamplingParams
from slimefsdp.sampling.sampler import sample
from tests.support.tiny_models import ARCHITECTURES, tiny_model, to_sample_from

PROMPTS = {0: [5, 6, 7], 1: [9] * 12, 2: [3, 4]}  # the windows of 8 are shorter than the longest


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sampled_log_probs_are_those_of_a_plain_forward_at_the_temperature(kind: str) -> None:
    model = tiny_model(kind)
    params = SamplingParams(14, 0.7, end_token_ids=frozenset({1, 2, 3}))
    found = sample(to_sample_from(model), PROMPTS, 3, params, max_rows=4)
    assert [place for place, _ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for place, completion in found:
        prompt = PROMPTS[place]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(completion.log_probs), atol=2e-5, rtol=0)
