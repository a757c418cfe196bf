"""What a request is trained on: every loss is its formula, gradients included, and the sum of its parts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.service import tinker_pb2
from actors.service.datums import LOSSES, Work, losses_of, output_of, work_of
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.datums import VOCABULARY, parts_of, plain, request
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.service import message, tensor

CPU = torch.device("cpu")


def made_of(data: bytes) -> Work:
    message = tinker_pb2.ForwardBackwardRequest.FromString(data)
    return work_of(message, vocab_size=VOCABULARY, max_tokens=64, max_targets=10**6)


def gradients(rank: int, config: RunConfig, requests: list[bytes]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Of requests that follow one another, and the log-probs that each said."""
    said = []
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        for data in requests:
            work = made_of(data)
            found = trainer.forward_backward(work.batch, work.loss, 1.0, settings=work.settings, with_log_probs=True)
            said.append(found.log_probs.log_probs)
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}, said


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
    work = made_of(data)
    trained = work.batch.mask
    assert np.abs(said - now)[trained].max() < 1e-6  # which are float32
    np.testing.assert_allclose(losses_of(work, np.array(now)), losses, rtol=1e-12, atol=1e-12)
    output = tinker_pb2.ForwardBackwardOutput.FromString(output_of(work, said))
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
    work = made_of(data)
    output = tinker_pb2.ForwardBackwardOutput.FromString(output_of(work, said))
    (record,) = output.loss_fn_outputs
    for name, values in (("logprobs", now), ("elementwise_loss", losses)):
        field = record.fields[name]
        np.testing.assert_allclose(np.frombuffer(field.data, "<f4"), values, rtol=1e-5, atol=1e-6)
        assert tuple(field.trailing_shape) == targets
        sizes = np.diff(np.frombuffer(field.offsets, "<i8")) // 4
        assert sizes.tolist() == [(1 + 3 * number % 40) * int(np.prod(targets)) for number in range(12)]
    assert output.metrics["tokens:sum"] == sum(1 + 3 * number % 40 for number in range(12))
    assert work.num_tokens == sum(2 + 3 * number % 40 for number in range(12))


def test_stable_reinforce_is_the_loss_that_the_server_has_for_it() -> None:
    given = {"logprobs": np.array([-1.0, -2.0, -3.0]), "advantages": np.array([0.0, 1.0, -1.0])}
    asked = message(loss="stable_reinforce", **given)
    for name, spans in ("a", asked.data[0].model_input_spans), ("a", asked.data[0].loss_fn_input_spans):
        spans.add(sampled_tokens={"sequence_id": name, "length": 3})
    sizes = {"vocab_size": VOCABULARY, "max_tokens": 64, "max_targets": 100}
    for loss in ("importance_sampling", "ppo", "cispo"):
        found = work_of(asked, **sizes, stable_reinforce=loss)
        same = work_of(message(loss=loss, **given), **sizes)
        assert found.batch.same_as(same.batch)
        assert (found.name, found.settings, found.config) == (loss, same.settings, same.config)
    with refused(BatchError, "loss_fn") as caught:
        work_of(asked, **sizes)
    assert "service.stable_reinforce" in str(caught.value.hint)
    asked.loss_fn_config["kl_coeff"] = 0.1
    with refused(BatchError, "loss_fn_config.kl_coeff", "stable_reinforce"):
        work_of(asked, **sizes, stable_reinforce="cispo")


def test_a_sparse_tensor_is_the_dense_one() -> None:
    dense = np.array([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.5, 0.0]])
    sparse = tinker_pb2.SparseCsr(
        values=np.array([2.0, -1.0, 0.5], "<f4").tobytes(),
        crow_indices=np.array([0, 1, 1, 3], "<i8").tobytes(),
        col_indices=np.array([1, 0, 1], "<i8").tobytes(),
    )
    tokens = np.arange(9).reshape(3, 3)
    works = [
        work_of(message(target_tokens=tokens, weights=weights), vocab_size=VOCABULARY, max_tokens=64, max_targets=10**6)
        for weights in (dense, tinker_pb2.Tensor(sparse_csr=sparse, dtype=tinker_pb2.DTYPE_FLOAT32, shape=[3, 3]))
    ]
    assert works[0].batch.same_as(works[1].batch) and works[0].targets == works[1].targets == 3
    assert works[0].batch.loss_weights is not None and works[0].batch.target_tokens is not None
    assert works[0].batch.loss_weights.tolist() == dense.T.ravel().tolist()
    assert works[0].batch.target_tokens.tolist() == tokens.T.ravel().tolist()


FAR = {"logprobs": np.array([-1.0, -1e4, -1.0])}


@pytest.mark.parametrize(
    ("loss", "inputs", "field"),
    [
        ("cross_entropy", {"weights": np.array([1.0, 3e38, 1.0])}, "weights"),
        ("cross_entropy", {"target_tokens": np.ones((3, 2), int), "weights": np.full((3, 2), -3e38)}, "weights"),
        ("importance_sampling", FAR | {"advantages": np.ones(3)}, "logprobs"),
        ("ppo", FAR | {"advantages": -np.ones(3)}, "logprobs"),
        ("ppo", FAR | {"advantages": np.zeros(3)}, "logprobs"),
        ("ppo", FAR | {"advantages": np.ones(3)}, None),  # the ratio is clipped, and the loss finite
    ],
)
def test_a_loss_that_float32_cannot_hold_is_refused_by_the_name_of_its_input(
    loss: str, inputs: dict[str, np.ndarray], field: str | None
) -> None:
    asked = message(loss=loss)
    asked.data.append(message(loss=loss, **{"logprobs": None, **inputs}).data[0])
    for name, values in inputs.items():  # the first datum is harmless
        asked.data[0].loss_fn_inputs[name].CopyFrom(
            tensor(values if name == "target_tokens" else -np.ones_like(values))
        )
    work = work_of(asked, vocab_size=VOCABULARY, max_tokens=64, max_targets=10**6)
    log_probs = np.full(work.batch.num_response_tokens, -2.0, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if field is None:
            output_of(work, log_probs)
            return
        with refused(BatchError, f"data[1].loss_fn_inputs.{field}", "float32"):
            output_of(work, log_probs)


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
