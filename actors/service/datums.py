"""Converts the training requests of clients to batches, and the results to answers.

A datum has N input tokens and N targets, usually the inputs shifted by one. The loss is a plain sum over tokens and
datums, so gradients do not depend on how a client splits its datums into requests. In the batch, a datum is a sample
with a prompt of one token and a response of N tokens. A datum with K targets per token becomes K samples, which share
the computation of their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from actors.service import tinker_pb2
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
"""Loss of a request -> the inputs of its datums besides the tokens."""
_OPTIONAL = ("weights", "sequence_ratio_mask")  # a datum without one of these inputs gets all 1
_MOST_TARGETS = 256  # targets per token; without a limit, a sparse tensor could have any shape
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CONFIG: dict[str, dict[str, float | None]] = {
    "ppo": dict(_BOUNDS), "cispo": dict(_BOUNDS), "gspo": dict(_BOUNDS), "dro": {"beta": None},
}  # fmt: skip
_DTYPES: dict[int, Any] = {
    tinker_pb2.DTYPE_FLOAT32: np.float32, tinker_pb2.DTYPE_INT64: np.int64, tinker_pb2.DTYPE_INT32: np.int32,
}  # fmt: skip
_MAX_FIELDS = 2**20  # fields in a request, including nested messages; enough for 37,000 datums of three inputs
_BYTES_PER_FIELD = 64  # memory of an empty message, which has 2 bytes on the wire
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_CONTINUED = bytes(range(128, 256))  # the bytes of a varint before its last byte


@dataclass(frozen=True, slots=True)
class Work:
    """A training request in the form that the trainer takes.

    Args:
        batch: the datums in their order.
        loss: the argument `loss` of the call `forward_backward`.
        settings: the argument `settings` of the call `forward_backward`.
        name: the name of the loss in the client's API.
        config: the parameters of the loss in the client's API, such as clip thresholds.
        forward_only: whether the request needs no gradients.
        targets: K if the targets of a datum are [N, K], so that the batch has each datum K times; None if they are [N].
    """

    batch: RolloutBatch
    loss: LossName
    settings: dict[str, Any]
    name: str
    config: dict[str, float]
    forward_only: bool
    targets: int | None

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of all datums, including the last target of each datum."""
        return self.batch.num_tokens // (self.targets or 1)


def work_of(
    message: Any, *, vocab_size: int, max_tokens: int, max_targets: int, stable_reinforce: str | None = None
) -> Work:
    """Converts a ForwardBackwardRequest.

    Args:
        max_tokens: limit on the tokens of a datum, including its last target.
        max_targets: limit on the targets of all datums together; a sparse tensor has many targets in few bytes.
        stable_reinforce: the loss that replaces `stable_reinforce`, whose formula is unknown; None means it is refused.

    Raises:
        BatchError: an input cannot be used; the message names the datum and the input.
    """
    name = message.loss_fn
    if name == "stable_reinforce" and stable_reinforce is not None:
        name = stable_reinforce
    config = _config_of(message, name)
    if not message.data:
        _refuse("data", "the request has no datums", "send at least one")
    tokens: list[npt.NDArray[np.int64]] = []
    columns: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in LOSSES[name]}
    shapes: set[tuple[int, ...]] = set()
    num_targets = 0
    for number, datum in enumerate(message.data):
        inputs = _tokens_of(datum, number)
        if inputs.size >= max_tokens:
            _refuse(
                f"data[{number}]",
                f"{inputs.size + 1} tokens, and this server trains on at most {max_tokens} in one datum",
                "cut it, or raise batch.max_tokens_per_rank of the server",
            )
        loss_inputs = _inputs_of(datum, inputs.size, number, name)
        targets = loss_inputs["target_tokens"]
        num_targets += targets.size
        if num_targets > max_targets:
            _refuse(
                f"data[{number}].loss_fn_inputs.target_tokens",
                f"{num_targets} targets in this datum and the datums before, and a request may have {max_targets}",
                "send fewer datums at once",
            )
        shapes.add(targets.shape[1:])
        if len(shapes) > 1:
            problem = "its number of targets per token differs from that of the datums before"
            _refuse(f"data[{number}].loss_fn_inputs.target_tokens", problem, "send them in separate requests")
        whole = np.append(inputs, targets[-1:].flat[0])  # the inputs, and the last target
        for ids in (whole, targets):
            if ids.min() < 0 or ids.max() >= vocab_size:
                bad = ids[(ids < 0) | (ids >= vocab_size)][0]
                _refuse(f"data[{number}]", f"token {bad} is not in the vocabulary of {vocab_size}", "tokenize again")
        copies = 1 if targets.ndim == 1 else targets.shape[1]
        tokens += [whole] * copies
        for key, values in columns.items():
            values.extend(loss_inputs[key].reshape(inputs.size, copies).T)
    (shape,) = shapes
    return _as_work(message, name, config, tokens, columns, shape[0] if shape else None)


def _as_work(
    message: Any,
    name: str,
    config: dict[str, float],
    tokens: Sequence[npt.NDArray[np.int64]],
    columns: Mapping[str, Sequence[npt.NDArray[Any]]],
    targets: int | None,
) -> Work:
    lengths = np.array([sample.size for sample in tokens])
    flat = {key: np.concatenate(values) for key, values in columns.items()}
    fields: dict[str, Any] = {"tokens": np.concatenate(tokens), "lengths": lengths, "response_lengths": lengths - 1}
    following = np.concatenate([sample[1:] for sample in tokens])
    if not np.array_equal(flat["target_tokens"], following):
        fields["target_tokens"] = flat["target_tokens"].astype(np.int64)
    settings: dict[str, Any] = {"reduction": "token_mean"}
    if name == "cross_entropy":
        fields["loss_weights"] = flat["weights"]
        return Work(RolloutBatch(**fields), "sft", settings, name, config, message.forward_only, targets)
    fields |= {"old_log_probs": flat["logprobs"], "advantages": flat["advantages"]}
    settings["policy"] = "gspo_token" if name == "gspo" else name
    if name == "gspo":
        mask = flat["sequence_ratio_mask"] != 0
        if (flat["advantages"][~mask] != 0).any():
            _refuse("sequence_ratio_mask", "a token outside of it has an advantage", "set that to 0")
        fields["loss_mask"] = mask
    if name == "dro":
        settings["beta"] = config["beta"]
    elif name in _CONFIG:
        settings |= {"clip_low": 1 - config["clip_low_threshold"], "clip_high": config["clip_high_threshold"] - 1}
    return Work(RolloutBatch(**fields), "policy", settings, name, config, message.forward_only, targets)


def _config_of(message: Any, name: str) -> dict[str, float]:
    """Returns the parameters of a loss; loss_fn_config_v2 takes precedence over loss_fn_config."""
    if name not in LOSSES:
        hint = f"use {', '.join(LOSSES)}"
        if name == "stable_reinforce":
            hint += "; or set service.stable_reinforce of the server to a loss that replaces it"
        _refuse("loss_fn", f"loss_fn={short_repr(name)} is not supported", hint)
    numbers: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            _refuse(f"loss_fn_config.{key}", f"{key} of {name} is no number", "give one")
        numbers[key] = value.number
    known = _CONFIG.get(name, {})
    for key in numbers:
        if key not in known:
            hint = f"{name} has {', '.join(known) or 'none'}"
            _refuse(f"loss_fn_config.{key}", f"{message.loss_fn} has no {short_repr(key)} here", hint)
    config: dict[str, float] = {}
    for key, default in known.items():
        value = numbers.get(key, default)
        if value is None:
            _refuse(f"loss_fn_config.{key}", f"{name} needs {key}", "give it in loss_fn_config")
        config[key] = value
    ranges = {"clip_low_threshold": (0, 1), "clip_high_threshold": (1, 1e6), "beta": (0, 1e6)}
    for key, value in config.items():
        low, high = ranges[key]
        if not low < value < high:
            _refuse(f"loss_fn_config.{key}", f"{key}={value} is not between {low} and {high:g}", "change it")
    return config


def _tokens_of(datum: Any, number: int) -> npt.NDArray[np.int64]:
    """Returns the tokens of a datum, int64 [N]."""
    chunks = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            _refuse(f"data[{number}].model_input", f"a chunk of {kind or 'nothing'}", "send only encoded_text")
        if len(chunk.encoded_text.tokens) % 4:
            _refuse(f"data[{number}].model_input", "a chunk is no array of int32", "encode it as int32")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    inputs = np.concatenate(chunks).astype(np.int64) if chunks else np.empty(0, np.int64)
    if inputs.size == 0:
        _refuse(f"data[{number}].model_input", "it has no tokens", "send at least one")
    return inputs


def _inputs_of(datum: Any, size: int, number: int, loss: str) -> dict[str, npt.NDArray[Any]]:
    """Returns the inputs of the loss for a datum of `size` tokens, each [N] or [N, K]."""
    wanted = LOSSES[loss]
    arrays: dict[str, npt.NDArray[Any]] = {}
    for key, tensor in datum.loss_fn_inputs.items():
        path = f"data[{number}].loss_fn_inputs.{key}"
        if key not in wanted:
            _refuse(path, f"loss_fn={loss} has no input {short_repr(key)}", f"send {', '.join(wanted)}")
        arrays[key] = _array_of(tensor, path, size, of_tokens=key == "target_tokens")
    for key in wanted:
        path = f"data[{number}].loss_fn_inputs"
        if key not in arrays and key not in _OPTIONAL:
            _refuse(path, f"{key} is missing, and loss_fn={loss} reads it", "send it")
        shape = arrays["target_tokens"].shape
        arrays.setdefault(key, np.ones(shape, np.float32))
        if arrays[key].shape != shape:
            _refuse(f"{path}.{key}", f"its shape is {list(arrays[key].shape)}, and that of target_tokens {list(shape)}",
                    "send a value for each target")  # fmt: skip
        if len(shape) > 1 and loss != "cross_entropy":
            _refuse(f"{path}.{key}", f"its shape is {list(shape)}, and loss_fn={loss}",
                    "only cross_entropy takes several targets per token")  # fmt: skip
    return arrays


def _array_of(tensor: Any, path: str, size: int, *, of_tokens: bool) -> npt.NDArray[Any]:
    """Returns the values of a tensor, [size] or [size, K]."""
    if len(tensor.shape) > 2:
        _refuse(path, f"a tensor of {len(tensor.shape)} dimensions", f"send [{size}], or [{size}, K]")
    shape = tuple(tensor.shape) or (size,)
    if tensor.dtype not in _DTYPES:
        _refuse(path, f"its dtype is number {tensor.dtype}", "send float32, int64 or int32")
    dtype = np.dtype(_DTYPES[tensor.dtype]).newbyteorder("<")
    if of_tokens and dtype.kind != "i":
        _refuse(path, f"tokens of {dtype.name}", "send integers")
    if shape[0] != size or not 1 <= int(np.prod(shape[1:])) <= _MOST_TARGETS:
        hint = f"send [{size}], or [{size}, K] with K from 1 to {_MOST_TARGETS}"
        _refuse(path, f"its shape is {list(shape)}", hint)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        values = _from_sparse(tensor.sparse_csr, dtype, shape, path)
    elif len(tensor.dense) != int(np.prod(shape)) * dtype.itemsize:
        _refuse(path, f"{len(tensor.dense)} bytes of {dtype.name} and the shape {list(shape)}", "send as many values")
    else:
        values = np.frombuffer(tensor.dense, dtype).reshape(shape)
    if not np.isfinite(values).all():
        _refuse(path, f"value {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite", "leave it out")
    return values


def _from_sparse(sparse: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> npt.NDArray[Any]:
    """Converts a sparse CSR tensor, which has values, their columns, and the offset of each row's first value."""
    parts = (sparse.values, dtype), (sparse.col_indices, np.dtype("<i8")), (sparse.crow_indices, np.dtype("<i8"))
    if len(shape) != 2 or any(len(data) % kind.itemsize for data, kind in parts):
        _refuse(path, f"a sparse tensor of the shape {list(shape)} that is no array", "send it dense")
    values, columns, starts = (np.frombuffer(data, kind) for data, kind in parts)
    fits = starts.size == shape[0] + 1 and starts[0] == 0 and starts[-1] == values.size == columns.size
    # starts are compared, not subtracted, since differences of 64-bit numbers may wrap around
    if not fits or (starts[1:] < starts[:-1]).any() or (columns < 0).any() or (columns >= shape[1]).any():
        _refuse(path, f"a sparse tensor whose indices do not fit the shape {list(shape)}", "send it dense")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense


def losses_of(work: Work, log_probs: npt.NDArray[Any]) -> Floats:
    """Returns the loss of each token, float64 [R], by the formulas of the API's documentation.

    Args:
        log_probs: the log-probs of the targets, [R].
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
    return np.where(batch.mask, -np.minimum(ratio * advantages, bounded * advantages), 0.0)


@np.errstate(over="ignore", invalid="ignore")  # losses that are not finite are refused by name
def output_of(work: Work, log_probs: npt.NDArray[Any]) -> bytes:
    """Returns the serialised ForwardBackwardOutput of a request.

    Args:
        log_probs: the log-probs of the targets, [R] in the order of the batch.

    Raises:
        BatchError: the loss of a token is not finite in float32.
    """
    losses = losses_of(work, log_probs)
    _require_finite(work, losses.astype(np.float32))
    output = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    copies = work.targets or 1
    lengths = work.batch.response_lengths[::copies]
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=lengths.size)
    offsets = 4 * copies * np.concatenate([[0], np.cumsum(lengths)])
    ends = copies * np.cumsum(lengths)[:-1]
    for name, values in (("logprobs", log_probs), ("elementwise_loss", losses)):
        if copies > 1:  # the batch has the K columns of a datum one after the other
            values = np.concatenate([column.reshape(copies, -1).T.ravel() for column in np.split(values, ends)])
        field = record.fields[name]
        field.dtype = tinker_pb2.DTYPE_FLOAT32
        field.data, field.offsets = values.astype("<f4").tobytes(), offsets.astype("<i8").tobytes()
        if work.targets is not None:
            field.trailing_shape.append(work.targets)
    output.metrics["loss:sum"] = float(losses.sum())
    output.metrics["tokens:sum"] = float(lengths.sum())
    return bytes(output.SerializeToString())


def _require_finite(work: Work, losses: npt.NDArray[np.float32]) -> None:
    infinite = np.flatnonzero(~np.isfinite(losses))
    if infinite.size:
        number = int(work.batch.sample_ids[infinite[0]]) // (work.targets or 1)
        name, hint = "logprobs", "send log-probs that are nearer to the model's, or smaller advantages"
        if work.name == "cross_entropy":
            name, hint = "weights", "send smaller ones"
        problem = f"with them the loss of a token is {losses[infinite[0]]:g} in float32"
        _refuse(f"data[{number}].loss_fn_inputs.{name}", problem, hint)


def _refuse(field: str, problem: str, hint: str) -> NoReturn:
    raise BatchError(f"{field}: {problem}", field=field, hint=hint)


def scan_request(data: bytes) -> tuple[str, int]:
    """Returns the model_id of a ForwardBackwardRequest, and an upper bound on its size in memory once it is parsed.

    The bound is needed before parsing: 64 MiB of empty datums become 2 GB, and one shape of 64 MiB becomes 1 GB.

    Raises:
        BatchError: the bytes are not such a request, or have too many fields.
    """
    try:
        model_id, fields = _scan(data)
        return model_id.decode(), len(data) + _BYTES_PER_FIELD * fields
    except (DecodeError, IndexError, UnicodeDecodeError):
        raise _not_a_request() from None


def parse_request(data: bytes) -> Any:
    """Parses bytes that `scan_request` has accepted.

    Raises:
        BatchError: the bytes are not such a request.
    """
    message = tinker_pb2.ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise _not_a_request() from None
    return message


def _not_a_request() -> BatchError:
    problem = "the body is not a ForwardBackwardRequest"
    return BatchError(problem, field="body", hint="send what the client's package sends")


def _nested(descriptor: Any) -> dict[int, Any]:
    """Returns field number -> None for a field of numbers, or the same kind of dictionary for a field of messages.

    Fields of text or bytes have no entry. Numbers have a length on the wire only if they are packed.
    """
    return {
        field.number: None if field.message_type is None else _nested(field.message_type)
        for field in descriptor.fields
        if field.cpp_type != field.CPPTYPE_STRING
    }


_REQUEST = _nested(tinker_pb2.ForwardBackwardRequest.DESCRIPTOR)
_MODEL_ID = tinker_pb2.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["model_id"].number


def _scan(data: bytes) -> tuple[bytes, int]:
    """Returns a request's model_id, and the number of its fields at all depths; a packed number counts as a field.

    Raises:
        BatchError: there are too many fields.
        DecodeError, IndexError: the bytes are not a request.
    """
    model_id, fields, at, end, nested = b"", 0, 0, len(data), _REQUEST
    outer: list[tuple[int, dict[int, Any]]] = []  # the end and the fields of each enclosing message
    while at < end or outer:
        if at >= end:
            end, nested = outer.pop()
            continue
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        fields += 1
        if kind == _LENGTH:
            size, at = _varint(data, at)
            if at + size > end:
                raise DecodeError
            if isinstance(inner := nested.get(number), dict):
                outer.append((end, nested))
                end, nested, size = at + size, inner, 0
            elif number in nested:
                fields += len(data[at : at + size].translate(None, _CONTINUED))
            elif not outer and number == _MODEL_ID:
                model_id = data[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if kind == _EIGHT_BYTES else 4
        else:  # a group, which no message of the API has
            raise DecodeError
        if fields > _MAX_FIELDS:
            problem = f"the request has more than {_MAX_FIELDS} fields"
            raise BatchError(problem, field="data", hint="send fewer datums at once")
    return model_id, fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decodes the varint at an offset; returns its value and the offset after it."""
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value, shift = value & 127, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError
