"""What clients send to be trained on, as a batch of this project, and what they get of it.

A datum is N input tokens and N targets, the input one further; its loss is a plain sum over tokens and datums, so that
gradients do not depend on how a request was cut. The batch has each datum as a prompt of one token and a response of N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from actors.service import schema
from slimefsdp.algorithms.registry import LossName
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, short_repr

Floats = npt.NDArray[np.float64]
LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
    "cispo": ("target_tokens", "logprobs", "advantages"),
    "dro": ("target_tokens", "logprobs", "advantages"),
    "gspo": ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask"),
}
"""Loss of a request -> what its datums have beside their tokens."""
_OPTIONAL = ("weights", "sequence_ratio_mask")  # all 1 where they are missing
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CONFIG: dict[str, dict[str, float | None]] = {
    "ppo": dict(_BOUNDS), "cispo": dict(_BOUNDS), "gspo": dict(_BOUNDS), "dro": {"beta": None},
}  # fmt: skip
_DTYPES: dict[int, Any] = {
    schema.DTYPE_FLOAT32: np.float32, schema.DTYPE_INT64: np.int64, schema.DTYPE_INT32: np.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """A request, as the trainer gets it.

    Args:
        batch: of its datums, in their order.
        loss: of `forward_backward`.
        settings: of the loss, for this call.
        name: of the loss, as the client calls it.
        config: its numbers.
        forward_only: no gradient is wanted.
    """

    batch: RolloutBatch
    loss: LossName
    settings: dict[str, Any]
    name: str
    config: dict[str, float]
    forward_only: bool


def work_of(message: Any, *, vocab_size: int, max_tokens: int) -> Work:
    """The work of a ForwardBackwardRequest.

    Args:
        max_tokens: the most that one datum may have, its last target included.

    Raises:
        BatchError: naming the datum and the input that cannot be honoured.
    """
    name, config = message.loss_fn, _config_of(message)
    if not message.data:
        _refuse("data", "the request has no datums", "send at least one")
    tokens: list[npt.NDArray[np.int64]] = []
    columns: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in LOSSES[name][1:]}
    for number, datum in enumerate(message.data):
        inputs, given = _inputs_of(datum, number, name)
        targets = given.pop("target_tokens").astype(np.int64)
        wrong = np.flatnonzero(targets[:-1] != inputs[1:])
        if wrong.size:
            at = int(wrong[0])
            _refuse(
                f"data[{number}].loss_fn_inputs.target_tokens",
                f"target {at} is {targets[at]}, and the input goes on with {inputs[at + 1]}",
                "give the input moved by one: other targets are not supported",
            )
        whole = np.append(inputs, targets[-1:])
        if whole.min() < 0 or whole.max() >= vocab_size:
            bad = whole[(whole < 0) | (whole >= vocab_size)][0]
            _refuse(f"data[{number}]", f"token {bad} is not in the vocabulary of {vocab_size}", "tokenize anew")
        if whole.size > max_tokens:
            _refuse(
                f"data[{number}]",
                f"{whole.size} tokens, and this server trains on at most {max_tokens} in one",
                "cut it, or raise batch.max_tokens_per_rank of the server",
            )
        tokens.append(whole)
        for key, values in columns.items():
            values.append(given[key])
    return _as_work(message, name, config, tokens, columns)


def _as_work(
    message: Any,
    name: str,
    config: dict[str, float],
    tokens: Sequence[npt.NDArray[np.int64]],
    columns: Mapping[str, Sequence[npt.NDArray[Any]]],
) -> Work:
    lengths = np.array([one.size for one in tokens])
    flat = {key: np.concatenate(values) for key, values in columns.items()}
    fields: dict[str, Any] = {"tokens": np.concatenate(tokens), "lengths": lengths, "response_lengths": lengths - 1}
    settings: dict[str, Any] = {"reduction": "token_mean"}
    if name == "cross_entropy":
        fields["loss_weights"] = flat["weights"]
        return Work(RolloutBatch(**fields), "sft", settings, name, config, message.forward_only)
    fields |= {"old_log_probs": flat["logprobs"], "advantages": flat["advantages"]}
    settings["policy"] = "gspo_token" if name == "gspo" else name
    if name == "gspo":
        mask = flat["sequence_ratio_mask"] != 0
        if (flat["advantages"][~mask] != 0).any():
            _refuse("sequence_ratio_mask", "a token outside of it has an advantage", "set that to 0")
        fields["loss_mask"] = mask
    if name == "dro":
        settings["dro_beta"] = config["beta"]
    elif name in _CONFIG:
        settings |= {"clip_low": 1 - config["clip_low_threshold"], "clip_high": config["clip_high_threshold"] - 1}
    return Work(RolloutBatch(**fields), "policy", settings, name, config, message.forward_only)


def _config_of(message: Any) -> dict[str, float]:
    """The numbers of a loss; those of the second version of the field win."""
    name = message.loss_fn
    if name not in LOSSES:
        _refuse("loss_fn", f"loss_fn={short_repr(name)} is not supported", f"use {', '.join(LOSSES)}")
    given: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            _refuse(f"loss_fn_config.{key}", f"{key} of {name} is no number", "give one")
        given[key] = value.number
    known = _CONFIG.get(name, {})
    for key in given:
        if key not in known:
            hint = f"it has {', '.join(known)}" if known else "it has none"
            _refuse(f"loss_fn_config.{key}", f"{name} has no {short_repr(key)}", hint)
    config: dict[str, float] = {}
    for key, default in known.items():
        value = given.get(key, default)
        if value is None:
            _refuse(f"loss_fn_config.{key}", f"{name} needs {key}", "give it in loss_fn_config")
        config[key] = value
    ranges = {"clip_low_threshold": (0, 1), "clip_high_threshold": (1, 1e6), "beta": (0, 1e6)}
    for key, value in config.items():
        low, high = ranges[key]
        if not low < value < high:
            _refuse(f"loss_fn_config.{key}", f"{key}={value} is not between {low} and {high:g}", "change it")
    return config


def _inputs_of(datum: Any, number: int, loss: str) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]:
    """Tokens of a datum [N], and what its loss reads, each [N]."""
    chunks = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            _refuse(f"data[{number}].model_input", f"a chunk of {kind or 'nothing'}", "send encoded_text alone")
        if len(chunk.encoded_text.tokens) % 4:
            _refuse(f"data[{number}].model_input", "a chunk is no array of int32", "encode it anew")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    inputs = np.concatenate(chunks).astype(np.int64) if chunks else np.empty(0, np.int64)
    if inputs.size == 0:
        _refuse(f"data[{number}].model_input", "it has no tokens", "send at least one")
    wanted = LOSSES[loss]
    found: dict[str, npt.NDArray[Any]] = {}
    for key, tensor in datum.loss_fn_inputs.items():
        place = f"data[{number}].loss_fn_inputs.{key}"
        if key not in wanted:
            _refuse(place, f"loss_fn={loss} has no input {short_repr(key)}", f"send {', '.join(wanted)}")
        found[key] = _array_of(tensor, place, inputs.size, of_tokens=key == "target_tokens")
    for key in wanted:
        if key not in found and key not in _OPTIONAL:
            _refuse(f"data[{number}].loss_fn_inputs", f"{key} is missing, and loss_fn={loss} reads it", "send it")
        found.setdefault(key, np.ones(inputs.size, np.float32))
    return inputs, found


def _array_of(tensor: Any, place: str, size: int, *, of_tokens: bool) -> npt.NDArray[Any]:
    """The values of a dense tensor [size]."""
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(shape) > 1:
        _refuse(place, f"its shape is {list(shape)}", f"one value for each of the {size} tokens is supported alone")
    if tensor.dtype not in _DTYPES:
        _refuse(place, f"its dtype is number {tensor.dtype}", "send float32, int64 or int32")
    dtype = np.dtype(_DTYPES[tensor.dtype]).newbyteorder("<")
    if len(tensor.dense) != size * dtype.itemsize or (shape and shape != (size,)):
        _refuse(place, f"{len(tensor.dense)} bytes of {dtype.name} and the shape {list(shape)}", f"send {size} values")
    values = np.frombuffer(tensor.dense, dtype)
    if of_tokens and dtype.kind != "i":
        _refuse(place, f"tokens of {dtype.name}", "send integers")
    if not np.isfinite(values).all():
        _refuse(place, f"value {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite", "leave it out")
    return values


def losses_of(work: Work, log_probs: npt.NDArray[Any]) -> Floats:
    """What each token adds to the loss, float64 [R], by the formulas of the API's documentation.

    Args:
        log_probs: [R] of the targets.
    """
    now, batch = log_probs.astype(np.float64), work.batch
    if work.name == "cross_entropy":
        assert batch.loss_weights is not None
        return -batch.loss_weights * now
    assert batch.old_log_probs is not None and batch.advantages is not None
    change, advantages = now - batch.old_log_probs, batch.advantages.astype(np.float64)
    if work.name == "dro":
        return -(now * advantages - work.config["beta"] / 2 * change**2)
    if work.name == "gspo":
        mask = batch.mask
        sums = np.bincount(batch.sample_ids[mask], change[mask], batch.num_samples)
        counts = np.bincount(batch.sample_ids[mask], minlength=batch.num_samples)
        change = (sums / np.maximum(counts, 1))[batch.sample_ids]
    ratio = np.exp(change)
    if work.name == "importance_sampling":
        return -ratio * advantages
    bounded = ratio.clip(work.config["clip_low_threshold"], work.config["clip_high_threshold"])
    if work.name == "cispo":
        return -bounded * now * advantages
    return -np.minimum(ratio * advantages, bounded * advantages) * batch.mask


def output_of(work: Work, log_probs: npt.NDArray[Any]) -> bytes:
    """The ForwardBackwardOutput of a request.

    Args:
        log_probs: [R] of the targets, in the order of the batch.
    """
    losses = losses_of(work, log_probs)
    output = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=work.batch.num_samples)
    offsets = 4 * np.concatenate([[0], np.cumsum(work.batch.response_lengths)])
    for name, values in (("logprobs", log_probs), ("elementwise_loss", losses)):
        field = record.fields[name]
        field.dtype = schema.DTYPE_FLOAT32
        field.data, field.offsets = values.astype("<f4").tobytes(), offsets.astype("<i8").tobytes()
    output.metrics["loss:sum"] = float(losses.sum())
    output.metrics["tokens:sum"] = float(work.batch.num_response_tokens)
    return bytes(output.SerializeToString())


def _refuse(field: str, problem: str, hint: str) -> NoReturn:
    raise BatchError(f"{field}: {problem}", field=field, hint=hint)
