"""Reinforcement learning through `slimefsdp serve` with the `tinker` client: the reward is the share of even token ids.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/dense_reward.py BASE_MODEL
"""

from __future__ import annotations

import sys

import tinker
from tinker import types

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    print("usage: python examples/tinker/dense_reward.py BASE_MODEL [train_unembed=false]", file=sys.stderr)
    sys.exit(2)
client = tinker.ServiceClient()
training = client.create_lora_training_client(
    base_model=sys.argv[1], rank=8, seed=0, train_unembed="train_unembed=false" not in sys.argv
).result()
prompt, response = [5, 6, 7], 4
for step in range(16):
    sampler = training.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(max_tokens=response, stop=[], seed=step)
    samples = sampler.sample(types.ModelInput.from_ints(prompt), 32, asked).result().sequences
    rewards = [sum(token % 2 == 0 for token in one.tokens) / len(one.tokens) for one in samples]
    mean = sum(rewards) / len(rewards)
    data, before = [], len(prompt) - 1
    for one, reward in zip(samples, rewards, strict=True):
        tokens = [*prompt, *one.tokens]
        # the loss is a sum: what it is divided by stands in the advantages, which are 0 on the prompt
        advantage = 10 * (reward - mean) / (response * len(samples))
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": [0.0] * before + list(one.logprobs),
                    "advantages": [0.0] * before + [advantage] * len(one.tokens),
                },
            )
        )
    training.forward_backward(data, "importance_sampling")
    update = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    print(f"step {step + 1}: reward {mean:.3f}, gradient norm {update.metrics['grad_norm']:.3f}")
client.close("success").result()
