"""Reinforcement learning through `slimefsdp serve` with the `tinker` client: the reward is the share of even token ids.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/dense_reward.py BASE_MODEL
"""

from __future__ import annotations

import os
import sys
from urllib.request import Request, urlopen

import tinker
from tinker import types


def server_answers() -> None:
    """Ends the program if no server answers; the client itself would try for five minutes."""
    url, key = os.environ.get("TINKER_BASE_URL", ""), os.environ.get("TINKER_API_KEY", "")
    try:
        urlopen(Request(f"{url}/api/v1/healthz", headers={"X-API-Key": key}), timeout=10).close()
    except (OSError, ValueError) as error:
        sys.exit(f"no server is ready at TINKER_BASE_URL={url!r} for this TINKER_API_KEY: {error}")


def main(base_model: str, *, train_unembed: bool) -> None:
    client = tinker.ServiceClient()
    training = client.create_lora_training_client(
        base_model=base_model, rank=8, seed=0, train_unembed=train_unembed
    ).result()
    prompt, response = [5, 6, 7], 4
    for step in range(16):
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=response, stop=[], seed=step)
        samples = sampler.sample(types.ModelInput.from_ints(prompt), 32, params).result().sequences
        rewards = [sum(token % 2 == 0 for token in sample.tokens) / len(sample.tokens) for sample in samples]
        mean = sum(rewards) / len(rewards)
        data, before = [], len(prompt) - 1
        for sample, reward in zip(samples, rewards, strict=True):
            tokens = [*prompt, *sample.tokens]
            # the loss is a sum, so the advantages contain its divisor; they are 0 on the prompt
            advantage = 10 * (reward - mean) / (response * len(samples))
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * before + list(sample.logprobs),
                        "advantages": [0.0] * before + [advantage] * len(sample.tokens),
                    },
                )
            )
        training.forward_backward(data, "importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
        print(f"step {step + 1}: reward {mean:.3f}, gradient norm {update.metrics['grad_norm']:.3f}")
    client.close("success").result()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python examples/tinker/dense_reward.py BASE_MODEL [train_unembed=false]", file=sys.stderr)
        sys.exit(2)
    server_answers()
    try:
        main(sys.argv[1], train_unembed="train_unembed=false" not in sys.argv)
    except tinker.TinkerError as error:  # its traceback has 60 lines
        sys.exit(f"{type(error).__name__}: {error}")
