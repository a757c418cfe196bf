"""Requests of the service with ragged datums, and what their losses are by the formulas of the API."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from actors.service import tinker_pb2
from actors.service.datums import LOSSES
from tests.support.tiny_models import plain_model

CONFIG: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
    "dro": {"beta": 0.3},
}
VOCABULARY = 96


def request(
    loss: str,
    count: int,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    *,
    targets: tuple[int, ...] | None = None,
    longest: int = 9,
) -> bytes:
    """Of ragged datums, of one token and more, whose log-probs are near those of a random model.

    Args:
        targets: K of random targets [N, K], of which some are 0; () of random ones [N]; None: the next tokens.
    """
    rng = np.random.default_rng(seed)
    made = tinker_pb2.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn=loss)
    made.loss_fn_config.update(CONFIG.get(loss, {}))
    for number in range(count):
        size = 1 + (number * 3) % longest
        tokens = rng.integers(0, vocabulary, size + 1)
        shape = (size, *(targets or ()))
        inputs = {
            "target_tokens": tokens[1:] if targets is None else rng.integers(0, vocabulary, shape) * rng.integers(2),
            "weights": rng.normal(size=shape),
            "logprobs": -np.log(vocabulary) + rng.normal(0, 0.15, size),
            "advantages": rng.normal(size=size) * (rng.random(size) < 0.8),
            "sequence_ratio_mask": np.ones(size),
        }
        if loss == "gspo" and size > 2:
            inputs["sequence_ratio_mask"][0] = inputs["advantages"][0] = 0.0
        one = made.data.add()
        one.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        for name in LOSSES[loss]:
            tensor = one.loss_fn_inputs[name]
            is_tokens = name == "target_tokens"
            tensor.dense = inputs[name].astype("<i8" if is_tokens else "<f4").tobytes()
            tensor.dtype = tinker_pb2.DTYPE_INT64 if is_tokens else tinker_pb2.DTYPE_FLOAT32
            tensor.shape.extend(inputs[name].shape)
    return bytes(made.SerializeToString())


def parts_of(data: bytes, at_most: int) -> list[bytes]:
    """A request cut as the client cuts one that is too long."""
    whole = tinker_pb2.ForwardBackwardRequest.FromString(data)
    parts = []
    for start in range(0, len(whole.data), at_most):
        part = tinker_pb2.ForwardBackwardRequest.FromString(data)
        del part.data[:]
        part.data.extend(whole.data[start : start + at_most])
        parts.append(bytes(part.SerializeToString()))
    return parts


def plain(folder: Path, data: bytes) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """One datum after the other through a plain model: gradients, losses and log-probs of tokens, by the formulas."""
    message = tinker_pb2.ForwardBackwardRequest.FromString(data)
    loss, config = message.loss_fn, CONFIG.get(message.loss_fn, {})
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    model, losses, said = plain_model(folder, torch.float64), [], []
    for datum in message.data:
        tokens = torch.tensor(np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4").astype(np.int64))
        given = {
            name: torch.tensor(np.frombuffer(one.dense, "<f4" if one.dtype == tinker_pb2.DTYPE_FLOAT32 else "<i8"))
            for name, one in datum.loss_fn_inputs.items()
        }
        targets = given.pop("target_tokens").reshape(len(tokens), -1)
        now = model(input_ids=tokens[None]).logits[0].log_softmax(-1).gather(-1, targets).flatten()
        given = {name: value.double() for name, value in given.items()}
        if loss == "cross_entropy":
            each = -given["weights"] * now
        else:
            old, advantages = given["logprobs"], given["advantages"]
            ratio = (now - old).exp()
            if loss == "importance_sampling":
                each = -ratio * advantages
            elif loss == "ppo":
                each = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
            elif loss == "cispo":
                each = -ratio.clamp(low, high).detach() * now * advantages
            elif loss == "dro":
                each = -(now * advantages - config["beta"] / 2 * (now - old) ** 2)
            else:
                mask = given["sequence_ratio_mask"] != 0
                mean = (now.detach() - old)[mask].mean()
                ratio = (mean + now - now.detach()).exp()
                each = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages) * mask
        each.sum().backward()
        losses += each.tolist()
        said += now.tolist()
    return {name: p.grad for name, p in model.named_parameters()}, losses, said
