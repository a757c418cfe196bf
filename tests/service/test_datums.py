"""What a request is trained on: every loss is its formula, gradients included, and the sum of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.service import schema
from actors.service.datums import LOSSES, losses_of, output_of, work_of
from slimefsdp.config import RunConfig
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import settings
from tests.support.rank_pool import RankPool
from tests.support.service import message
from tests.support.tiny_models import plain_model

CPU = torch.device("cpu")
CONFIG: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
    "dro": {"beta": 0.3},
}
VOCABULARY = 96


def request(loss: str, count: int, seed: int = 0, *, targets: tuple[int, ...] | None = None, longest: int = 9) -> bytes:
    """Of ragged datums, of one token and more, whose log-probs are near those of a random model.

    Args:
        targets: K of random targets [N, K], of which some are 0; () of random ones [N]; None: the next tokens.
    """
    rng = np.random.default_rng(seed)
    made = schema.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn=loss)
    made.loss_fn_config.update(CONFIG.get(loss, {}))
    for number in range(count):
        size = 1 + (number * 3) % longest
        tokens = rng.integers(0, VOCABULARY, size + 1)
        shape = (size, *(targets or ()))
        inputs = {
            "target_tokens": tokens[1:] if targets is None else rng.integers(0, VOCABULARY, shape) * rng.integers(2),
            "weights": rng.normal(size=shape),
            "logprobs": -np.log(VOCABULARY) + rng.normal(0, 0.15, size),
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
            tensor.dtype = schema.DTYPE_INT64 if is_tokens else schema.DTYPE_FLOAT32
            tensor.shape.extend(inputs[name].shape)
    return bytes(made.SerializeToString())


def parts_of(data: bytes, at_most: int) -> list[bytes]:
    """A request cut as the client cuts one that is too long."""
    whole = schema.ForwardBackwardRequest.FromString(data)
    parts = []
    for start in range(0, len(whole.data), at_most):
        part = schema.ForwardBackwardRequest.FromString(data)
        del part.data[:]
        part.data.extend(whole.data[start : start + at_most])
        parts.append(bytes(part.SerializeToString()))
    return parts


def gradients(rank: int, config: RunConfig, requests: list[bytes]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Of requests that follow one another, and the log-probs that each said."""
    said = []
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        for data in requests:
            work = work_of(schema.ForwardBackwardRequest.FromString(data), vocab_size=VOCABULARY, max_tokens=64)
            found = trainer.forward_backward(work.batch, work.loss, 1.0, settings=work.settings, with_log_probs=True)
            said.append(found.log_probs.log_probs)
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}, said


def plain(folder: Path, data: bytes) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """One datum after the other through a plain model: gradients, losses and log-probs of tokens, by the formulas."""
    message = schema.ForwardBackwardRequest.FromString(data)
    loss, config = message.loss_fn, CONFIG.get(message.loss_fn, {})
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    model, losses, said = plain_model(folder, torch.float64), [], []
    for datum in message.data:
        tokens = torch.tensor(np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4").astype(np.int64))
        given = {
            name: torch.tensor(np.frombuffer(one.dense, "<f4" if one.dtype == schema.DTYPE_FLOAT32 else "<i8"))
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


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradient_are_the_formula_of_the_api_in_float64(
    folder: Path, ranks: RankPool, loss: str
) -> None:
    data = request(loss, 12)
    config = settings(folder, loss={"kl_coefficient": 0.0, "entropy_coefficient": 0.0}, rollout={"temperature": 1.0})
    with KeepFloat64():
        expected, losses, now = plain(folder, data)
    found, (said,) = ranks.run(1, gradients, config, [data])[0]
    assert largest_difference(found, expected) <= 1e-12
    work = work_of(schema.ForwardBackwardRequest.FromString(data), vocab_size=VOCABULARY, max_tokens=64)
    trained = work.batch.mask
    assert np.abs(said - now)[trained].max() < 1e-6  # which are float32
    np.testing.assert_allclose(losses_of(work, np.array(now)), losses, rtol=1e-12, atol=1e-12)
    output = schema.ForwardBackwardOutput.FromString(output_of(work, said))
    (record,) = output.loss_fn_outputs
    offsets = np.frombuffer(record.fields["logprobs"].offsets, "<i8") // 4
    assert np.diff(offsets).tolist() == work.batch.response_lengths.tolist() and record.num_datums == 12
    assert np.array_equal(np.frombuffer(record.fields["logprobs"].data, "<f4"), said.astype(np.float32))
    assert output.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("share", ["never", "always"])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [("importance_sampling", ()), ("cross_entropy", ()), ("cross_entropy", (1,)), ("cross_entropy", (3,))],
)
def test_targets_may_be_others_than_the_next_token_and_several_a_token(
    folder: Path, ranks: RankPool, loss: str, targets: tuple[int, ...], share: str
) -> None:
    data = request(loss, 12, targets=targets, longest=40)
    alone = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    batch = {"max_tokens_per_rank": 256, "share_prefixes": share}
    config = settings(folder, loss=alone, rollout={"temperature": 1.0}, batch=batch)
    with KeepFloat64():
        expected, losses, now = plain(folder, data)
    found, (said,) = ranks.run(1, gradients, config, [data])[0]
    assert largest_difference(found, expected) <= 1e-12 * max(1.0, max(float(g.abs().max()) for g in expected.values()))
    work = work_of(schema.ForwardBackwardRequest.FromString(data), vocab_size=VOCABULARY, max_tokens=64)
    output = schema.ForwardBackwardOutput.FromString(output_of(work, said))
    (record,) = output.loss_fn_outputs
    for name, values in (("logprobs", now), ("elementwise_loss", losses)):
        field = record.fields[name]
        np.testing.assert_allclose(np.frombuffer(field.data, "<f4"), values, rtol=1e-5, atol=1e-6)
        assert tuple(field.trailing_shape) == targets
        sizes = np.diff(np.frombuffer(field.offsets, "<i8")) // 4
        assert sizes.tolist() == [(1 + 3 * number % 40) * int(np.prod(targets)) for number in range(12)]
    assert output.metrics["tokens:sum"] == sum(1 + 3 * number % 40 for number in range(12))
    assert work.num_tokens == sum(2 + 3 * number % 40 for number in range(12))


def test_a_sparse_tensor_is_the_dense_one() -> None:
    dense = np.array([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.5, 0.0]])
    sparse = schema.SparseCsr(
        values=np.array([2.0, -1.0, 0.5], "<f4").tobytes(),
        crow_indices=np.array([0, 1, 1, 3], "<i8").tobytes(),
        col_indices=np.array([1, 0, 1], "<i8").tobytes(),
    )
    tokens = np.arange(9).reshape(3, 3)
    works = [
        work_of(message(target_tokens=tokens, weights=weights), vocab_size=VOCABULARY, max_tokens=64)
        for weights in (dense, schema.Tensor(sparse_csr=sparse, dtype=schema.DTYPE_FLOAT32, shape=[3, 3]))
    ]
    assert works[0].batch.same_as(works[1].batch) and works[0].targets == works[1].targets == 3
    assert works[0].batch.loss_weights is not None and works[0].batch.target_tokens is not None
    assert works[0].batch.loss_weights.tolist() == dense.T.ravel().tolist()
    assert works[0].batch.target_tokens.tolist() == tokens.T.ravel().tolist()


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_thousand_datums_in_several_requests_have_the_gradient_of_one(
    folder: Path, ranks: RankPool, dp: int
) -> None:
    data = request("cross_entropy", 2000)
    sections: dict[str, Any] = {"mesh": {"dp": dp}, "batch": {"max_tokens_per_rank": 2048}}
    alone = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    config = settings(folder, loss=alone, rollout={"temperature": 1.0}, **sections)
    whole, _ = ranks.run(dp, gradients, config, [data])[0]
    parts = parts_of(data, 1024)
    assert len(parts) == 2
    for cut in (parts, parts[::-1], parts_of(data, 300)):
        found, said = ranks.run(dp, gradients, config, cut)[0]
        assert largest_difference(found, whole) <= 1e-12 * max(1.0, max(float(g.abs().max()) for g in whole.values()))
        assert sum(len(one) for one in said) == sum(1 + (number * 3) % 9 for number in range(2000))
