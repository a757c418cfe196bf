"""The embedded engine's sampler serves every architecture that can be trained."""

from __future__ import annotations

import pytest
import torch

from actors.rollout.sampler import sample
from tests.support.tiny_models import ARCHITECTURES, tiny_model

PROMPTS = [[5, 6, 7], [9] * 12, [3, 4]]  # the windows of 8 are shorter than the longest


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sampled_log_probs_are_those_of_a_plain_forward_at_the_temperature(kind: str) -> None:
    model = tiny_model(kind)
    completions = sample(
        model,
        PROMPTS,
        samples_per_prompt=3,
        max_new_tokens=14,
        temperature=0.7,
        eos_token_ids={1, 2, 3},
        pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
    )
    assert len(completions) == 9
    for index, completion in enumerate(completions):
        prompt = PROMPTS[index // 3]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(completion.log_probs), atol=2e-5, rtol=0)
