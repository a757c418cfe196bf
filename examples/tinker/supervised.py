"""Supervised training of an adapter through `slimefsdp serve`, with the `tinker` client.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/supervised.py BASE_MODEL
"""

from __future__ import annotations

import os
import sys
from typing import Any
from urllib.request import Request, urlopen

import tinker
from tinker import types

PAIRS = {"sort 52837 -> ": "23578", "sort 90114 -> ": "01149"}


def datum(tokenizer: Any, prompt: str, answer: str) -> types.Datum:
    """Returns a prompt with a trained answer and end token; each position scores the token after it."""
    first, second = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id]
    tokens = first + second
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(first) - 1) + [1.0] * len(second),
        },
    )


def likeliest(sampler: tinker.SamplingClient, tokenizer: Any, prompt: str) -> str:
    """Returns the greedy response of a sampler to a prompt, without its end token."""
    params = types.SamplingParams(max_tokens=8, temperature=0)
    (answer,) = sampler.sample(types.ModelInput.from_ints(tokenizer.encode(prompt)), 1, params).result().sequences
    return str(tokenizer.decode(answer.tokens, skip_special_tokens=True))


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
    tokenizer = training.get_tokenizer()
    data = [datum(tokenizer, prompt, answer) for prompt, answer in PAIRS.items()]
    trained = sum(sum(example.loss_fn_inputs["weights"].tolist()) for example in data)
    for step in range(20):
        gradients = training.forward_backward(data, "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8))  # sent before the first answer
        loss = gradients.result().metrics["loss:sum"] / trained
        print(f"step {step + 1}: {loss:.3f} nats a token, gradient norm {update.result().metrics['grad_norm']:.3f}")
    print("saved as", training.save_state("supervised").result().path)
    before = client.create_sampling_client(base_model=base_model).result()
    after = training.save_weights_and_get_sampling_client().result()
    for prompt, answer in PAIRS.items():
        responses = [likeliest(sampler, tokenizer, prompt) for sampler in (before, after)]
        print(f"{prompt}{answer}: the base says {responses[0]!r}, the trained model {responses[1]!r}")
    client.close("success").result()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python examples/tinker/supervised.py BASE_MODEL [train_unembed=false]", file=sys.stderr)
        sys.exit(2)
    server_answers()
    try:
        main(sys.argv[1], train_unembed="train_unembed=false" not in sys.argv)
    except tinker.TinkerError as error:  # its traceback has 60 lines
        sys.exit(f"{type(error).__name__}: {error}")
