"""Supervised training of an adapter through `slimefsdp serve`, with the `tinker` client.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/supervised.py BASE_MODEL
"""

from __future__ import annotations

import sys

import tinker
from tinker import types

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    print("usage: python examples/tinker/supervised.py BASE_MODEL [train_unembed=false]", file=sys.stderr)
    sys.exit(2)
client = tinker.ServiceClient()
training = client.create_lora_training_client(
    base_model=sys.argv[1], rank=8, seed=0, train_unembed="train_unembed=false" not in sys.argv
).result()
tokenizer = training.get_tokenizer()


def datum(prompt: str, answer: str) -> types.Datum:
    """A prompt whose answer is trained: each position scores the token after it."""
    first, second = tokenizer.encode(prompt), tokenizer.encode(answer)
    tokens = first + second
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(first) - 1) + [1.0] * len(second),
        },
    )


data = [datum("sort 52837 -> ", "23578"), datum("sort 90114 -> ", "01149")]
trained = sum(sum(one.loss_fn_inputs["weights"].tolist()) for one in data)
for step in range(20):
    gradients = training.forward_backward(data, "cross_entropy")
    update = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8))  # both are on their way at once
    loss = gradients.result().metrics["loss:sum"] / trained
    print(f"step {step + 1}: {loss:.3f} nats a token, gradient norm {update.result().metrics['grad_norm']:.3f}")
print("saved as", training.save_state("supervised").result().path)
sampler = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(tokenizer.encode("sort 52837 -> "))
answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0)).result().sequences[0]
print("sort 52837 ->", tokenizer.decode(answer.tokens))
client.close("success").result()
