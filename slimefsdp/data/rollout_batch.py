"""Defines RolloutBatch, an immutable batch of sampled sequences that its constructor validates.

Ragged fields are flat arrays with lengths: B samples, T = sum of lengths, R = sum of response_lengths. The tokens of a
sample are its prompt followed by its response, so the response is always its last `response_length` tokens. There is no
padding, and no token id is reserved for padding.

On disk a batch is one safetensors file with a tensor for each present field; names and dtypes are those of the fields.
The metadata has a sha256 of the tensors' names, dtypes, shapes and bytes, which is checked when the file is read. A
file without a sha256, from an earlier version or another program, is read without this check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slimefsdp.data.fields import (
    DTYPES,
    EXPERTS,
    FLOATS,
    LOG_PROBS,
    PER_RESPONSE_TOKEN,
    PER_SAMPLE,
    REQUIRED,
    SCALARS,
    as_array,
    as_experts,
    as_scalar,
    fields_from_samples,
    fields_from_slime,
    refuse,
    refuse_unknown,
    samples_from_fields,
)
from slimefsdp.errors import BatchError, short_repr

Int64 = npt.NDArray[np.int64]
Int16 = npt.NDArray[np.int16]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

LOG_PROB_SLACK = 1e-3  # an engine's rounding may put the log-prob of a certain token slightly above 0
# numpy name -> safetensors name
_STORED_DTYPES = {"int64": "I64", "int16": "I16", "float32": "F32", "float64": "F64", "bool": "BOOL"}
_HINT = "pass a file written by RolloutBatch.save"
_DIGEST = "sha256"


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """Holds one sampled sequence, for `RolloutBatch.from_samples`.

    A field that is None is absent; it must then be None in all samples. Fields of response tokens have one entry for
    each of the last `response_length` tokens.
    """

    tokens: npt.ArrayLike  # prompt + response
    response_length: int
    reward: float | None = None
    group_id: int | None = None  # samples of one prompt share an id
    baseline_reward: float | None = None
    loss_mask: npt.ArrayLike | None = None  # response tokens; False for tokens that the policy did not choose
    rollout_log_probs: npt.ArrayLike | None = None  # response tokens; by the sampling engine, at its temperature
    weight_versions: npt.ArrayLike | None = None  # response tokens; the weight version that drew each token
    advantages: npt.ArrayLike | None = None  # response tokens; so are all fields below
    returns: npt.ArrayLike | None = None
    values: npt.ArrayLike | None = None
    old_log_probs: npt.ArrayLike | None = None
    ref_log_probs: npt.ArrayLike | None = None
    token_rewards: npt.ArrayLike | None = None
    loss_weights: npt.ArrayLike | None = None
    target_tokens: npt.ArrayLike | None = None
    # [tokens, layers, experts of a token] or one token less; prompt and response; by the sampling engine
    routed_experts: npt.ArrayLike | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """Holds a batch of sampled sequences, the input of a trainer.

    Arrays may be passed as lists, or in another dtype if the conversion loses nothing but float32 rounding. An array of
    the right dtype is kept as a read-only view without a copy: do not write to it afterwards. Compare batches with
    `same_as`, since `==` compares identity.

    Raises:
        BatchError: a field breaks a rule; the error names the field, the sample, the value, the rule, and a way to
            correct it.
    """

    tokens: Int64  # [T] prompt + response of each sample, one after another
    lengths: Int64  # [B] tokens per sample
    response_lengths: Int64  # [B] number of trailing response tokens; 1 <= response_length < length
    rewards: Float32 | None = None  # [B]
    group_ids: Int64 | None = None  # [B] samples of the same prompt have the same id
    loss_mask: Bool | None = None  # [R] False for tokens that the policy did not choose; None: all True
    rollout_log_probs: Float32 | None = None  # [R] by the sampling engine, at its temperature
    advantages: Float32 | None = None  # [R]
    returns: Float32 | None = None  # [R]
    values: Float32 | None = None  # [R]
    old_log_probs: Float32 | None = None  # [R]
    ref_log_probs: Float32 | None = None  # [R]
    token_rewards: Float32 | None = None  # [R]
    baseline_rewards: Float32 | None = None  # [B] baseline of each reward, e.g. the reward of a greedy response
    weight_versions: Int64 | None = None  # [R] the weight version that drew each token, if there are several
    loss_weights: Float32 | None = None  # [R] factor on the loss of each token, of any sign; None means 1
    target_tokens: Int64 | None = None  # [R] tokens whose log-probs are computed; None means the sampled tokens
    temperature: float | None = None  # the sampling temperature
    weight_version: int | None = None  # the weight version that sampled; if there are several, the oldest
    # int16 [T, layers, experts of a token] experts that the policy's routers must choose (loss.routing_replay); -1: any
    routed_experts: Int16 | None = None

    def __new__(cls, *values: Any, **fields: Any) -> RolloutBatch:
        """Raises a BatchError for missing, surplus or unknown arguments, instead of the TypeError of `__init__`."""
        for name in fields:
            if name not in DTYPES:
                refuse_unknown(name, DTYPES, "a field of RolloutBatch")
        names = [field.name for field in dataclasses.fields(cls)]
        passed = [*names[: len(values)], *fields]
        if len(values) > len(names) or len(set(passed)) < len(passed):
            message = f"{len(values)} fields are given without a name, and {sorted(fields)} by name"
            refuse("RolloutBatch", message, "give each field once, by its name")
        for name in REQUIRED:
            if name not in passed:
                refuse(name, f"{name} is missing", "give tokens, lengths and response_lengths")
        return object.__new__(cls)

    def __repr__(self) -> str:
        named = [field.name for field in dataclasses.fields(self) if field.name not in (*REQUIRED, *SCALARS)]
        present = [name for name in named if getattr(self, name) is not None]
        scalars = [f"{name}={value}" for name in SCALARS if (value := getattr(self, name)) is not None]
        samples = f"{self.num_samples} sample{'s' * (self.num_samples != 1)}"
        tokens = f"{len(self.tokens)} tokens, {self.num_response_tokens} of them in responses"
        return f"RolloutBatch({', '.join([samples, tokens, *present, *scalars])})"

    def __post_init__(self) -> None:
        self._normalise("lengths", None)
        if self.num_samples == 0:
            message = "lengths is empty; a batch has at least one sample"
            refuse("lengths", message, "skip the update when nothing was sampled")
        self._normalise("response_lengths", self.num_samples)
        fits = (self.response_lengths >= 1) & (self.response_lengths < self.lengths)
        rule = f"must be at least 1 and less than the sample's length, {self.lengths[np.argmin(fits)]}"
        self._require("response_lengths", fits, rule, "drop samples whose prompt or response is empty")
        # summed as floats, because an int64 sum of damaged lengths could overflow to a plausible number
        self._normalise("tokens", int(self.lengths.sum(dtype=np.float64)))
        for name in ("rewards", "group_ids", "baseline_rewards"):
            self._normalise(name, self.num_samples)
        for name in PER_RESPONSE_TOKEN:
            self._normalise(name, self.num_response_tokens)
        if self.routed_experts is not None:
            experts = as_experts(self.routed_experts, label=EXPERTS, size=self.num_tokens).view()
            experts.setflags(write=False)
            object.__setattr__(self, EXPERTS, experts)
        self._check_values()
        for name in SCALARS:
            object.__setattr__(self, name, as_scalar(name, getattr(self, name)))

    def _normalise(self, name: str, size: int | None) -> None:
        """Replaces a field by a read-only array of the field's dtype. Its size must be `size`, unless that is None."""
        value = getattr(self, name)
        if value is None and name not in REQUIRED:
            return
        view = as_array(name, value, label=name, place=lambda index: self._place(name, index), size=size).view()
        view.setflags(write=False)
        object.__setattr__(self, name, view)

    def _check_values(self) -> None:
        versions, finite = "must be 0 or more", "must be a finite float32"
        log_prob = "must not be above 0, being the log of a probability"
        rules: list[tuple[Iterable[str], Callable[[npt.NDArray[Any]], npt.NDArray[Any]], str, str]] = [
            (["tokens"], _not_negative, "must not be negative", "pass token ids, and unpad instead of marking padding"),
            (["target_tokens"], _not_negative, "must not be negative", "pass token ids"),
            (["weight_versions"], _not_negative, versions, "pass versions"),
            (FLOATS, np.isfinite, finite, "drop the sample, or mask the token and put 0 there"),
            (LOG_PROBS, _is_log_prob, log_prob, "pass natural logs of probabilities, not probabilities"),
        ]
        for names, holds, rule, hint in rules:
            for name in names:
                if (value := getattr(self, name)) is not None:
                    self._require(name, holds(value), rule, hint)
        if self.loss_mask is not None and not self.loss_mask.any():
            refuse(
                "loss_mask",
                f"loss_mask is False on all {self.num_response_tokens} response tokens of the batch; "
                "at least one must be trained",
                "skip the update, or check that the mask is 1 where the policy chose the token",
            )

    def _require(self, name: str, holds: npt.NDArray[Any], rule: str, hint: str) -> None:
        if not holds.all():
            index = int(np.argmin(holds))
            message = f"{name} of {self._place(name, index)} is {getattr(self, name)[index]}; it {rule}"
            refuse(name, message, hint)

    def _place(self, name: str, index: int) -> str:
        """Returns a description of a field's entry: its sample, and its position in the sample."""
        if name in PER_SAMPLE:
            return f"sample {index}"
        offsets, unit = (self.token_offsets, "token") if name == "tokens" else (self.response_offsets, "response token")
        sample = int(np.searchsorted(offsets, index, side="right")) - 1
        return f"sample {sample}, {unit} {index - int(offsets[sample])}"

    @property
    def num_samples(self) -> int:
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_lengths.sum())

    @property
    def token_offsets(self) -> Int64:
        """Returns [B + 1] offsets; sample i is tokens[token_offsets[i] : token_offsets[i + 1]]."""
        return _offsets(self.lengths)

    @property
    def response_offsets(self) -> Int64:
        """Returns [B + 1] offsets; sample i of an [R] field is response_offsets[i] : response_offsets[i + 1]."""
        return _offsets(self.response_lengths)

    @property
    def mask(self) -> Bool:
        """Returns `loss_mask`, [R], True for tokens that are trained; all True if `loss_mask` is None."""
        return np.ones(self.num_response_tokens, dtype=np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def sample_ids(self) -> Int64:
        """Returns [R], the index of the sample that each response token belongs to."""
        return np.repeat(np.arange(self.num_samples, dtype=np.int64), self.response_lengths)

    def any_token(self, values: Bool) -> Bool:
        """Returns [B], whether any response token of a sample is True in `values`, [R]."""
        return np.logical_or.reduceat(values, self.response_offsets[:-1])  # every response has a token

    def trained_tokens(self, skipped: Int64 | int = 0) -> Int64:
        """Returns the number of trained tokens of each response, not counting its first `skipped` tokens; [B]."""
        skipped = np.minimum(skipped, self.response_lengths)
        if self.loss_mask is None:
            return self.response_lengths - skipped
        offsets = self.response_offsets
        before = _offsets(self.loss_mask)
        return before[offsets[1:]] - before[offsets[:-1] + skipped]

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises a BatchError if a token id is at least `vocab_size`; the error names sample, position and value."""
        for name in ("tokens", "target_tokens"):
            if (ids := getattr(self, name)) is not None:
                rule = f"must be below the model's vocabulary size, {vocab_size}"
                self._require(name, ids < vocab_size, rule, "sample with the tokenizer of the model that is trained")

    @classmethod
    def from_samples(
        cls,
        samples: Iterable[Mapping[str, Any] | object],
        *,
        temperature: float | None = None,
        weight_version: int | None = None,
    ) -> RolloutBatch:
        """Returns a batch of the given samples, each a `Sample`.

        A sample may also be a mapping whose keys are fields of `Sample`, or another object with these fields as
        attributes. Other keys of a mapping are refused, other attributes of an object are ignored.
        """
        return cls(**fields_from_samples(samples), temperature=temperature, weight_version=weight_version)

    @classmethod
    def from_slime(
        cls,
        data: Mapping[str, Any],
        *,
        samples_per_group: int | None = None,
        reward_key: Literal["raw_reward", "rewards"] | None = None,
        temperature: float | None = None,
        weight_version: int | None = None,
    ) -> RolloutBatch:
        """Returns a batch of slime's rollout dict, as slime's RolloutManager builds it before splitting over dp ranks.

        Args:
            data: lists with one entry per sample; `fields_from_slime` in slimefsdp/data/fields.py says which keys are
                used, ignored and refused.
            samples_per_group: slime's n_samples_per_prompt; group_ids are then made for groups of this many consecutive
                samples. None means that group_ids are read from the key `group_ids` or `group_index`, if present.
            reward_key: the key of the rewards; None means `raw_reward`, or `rewards` if that is missing. slime's
                `rewards` are already normalised within groups under its GRPO-like estimators, and would be normalised
                twice here. Choose `rewards` if slime post-processes them, and switch normalisation off here.
        """
        fields = fields_from_slime(data, samples_per_group, reward_key)
        return cls(**fields, temperature=temperature, weight_version=weight_version)

    def to_samples(self) -> list[dict[str, Any]]:
        """Returns one dict per sample, as `from_samples` takes; arrays are views, and absent fields have no key."""
        return samples_from_fields(self._present())

    def select(self, indices: npt.ArrayLike) -> RolloutBatch:
        """Returns a new batch with the samples at `indices` (0 to B - 1, repeats allowed), in this order."""
        try:
            chosen = np.asarray(indices)
        except (TypeError, ValueError) as error:  # ragged lists
            refuse("indices", f"indices cannot be read as an array: {error}", "pass a flat list of sample numbers")
        if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and chosen.size):
            message = f"indices is {chosen.dtype} of shape {chosen.shape}"
            refuse("indices", message, "pass a flat list of sample numbers")
        chosen = chosen.astype(np.int64)
        outside = (chosen < 0) | (chosen >= self.num_samples)
        if outside.any():
            index = int(np.argmax(outside))
            message = f"indices[{index}]={chosen[index]} is not a sample of a batch of {self.num_samples}"
            refuse("indices", message, f"pass numbers from 0 to {self.num_samples - 1}")
        response_rows = _ragged_rows(self.response_offsets, chosen)
        rows = {**dict.fromkeys(PER_SAMPLE, chosen), **dict.fromkeys(PER_RESPONSE_TOKEN, response_rows)}
        rows["tokens"] = rows[EXPERTS] = _ragged_rows(self.token_offsets, chosen)
        return self.replace(**{name: value[rows[name]] for name, value in self._present().items() if name in rows})

    def replace(self, **fields: Any) -> RolloutBatch:
        """Returns a new, validated batch in which the given fields are replaced; None removes an optional field."""
        for name in fields.keys() - DTYPES.keys():
            refuse_unknown(name, DTYPES, "a field of RolloutBatch")
        return dataclasses.replace(self, **fields)

    def copy(self) -> RolloutBatch:
        """Returns a copy of the batch that shares no memory with it."""
        batch = object.__new__(RolloutBatch)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = value.copy()
                value.setflags(write=False)
            object.__setattr__(batch, field.name, value)
        return batch

    def same_as(self, other: object) -> bool:
        """Returns whether `other` is a batch with the same present fields and equal values."""
        if not isinstance(other, RolloutBatch):
            return False
        own, others = self._present(), other._present()
        return own.keys() == others.keys() and all(np.array_equal(own[name], others[name]) for name in own)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the batch as one safetensors file, atomically.

        Raises:
            BatchError: the file cannot be written; the error's cause is the OSError.
        """
        _require_path(path)
        tensors = {name: np.asarray(value, dtype=DTYPES[name]) for name, value in self._present().items()}
        try:
            target = Path(path)
            temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
            try:
                save_file(tensors, temporary, metadata={_DIGEST: _digest(tensors)})
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())  # before the rename, so that a power cut cannot leave an empty file
                temporary.replace(target)
            except SafetensorError as error:  # also raised for a full disk
                raise OSError(str(error)) from error
            finally:
                temporary.unlink(missing_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or a path without a name
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise BatchError(
                f"{os.fspath(path)!r} cannot be written: {reason}",
                field="path",
                hint="name a file in a folder that exists, that you may write to and that has free space",
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RolloutBatch:
        """Reads a batch that `save` wrote; raises a BatchError if the file is missing, damaged or something else."""
        _require_path(path)
        fields = _read_fields(os.fspath(path))
        try:
            return cls(**fields)
        except BatchError as error:
            message = f"{error.message} (in {os.fspath(path)})"
            raise BatchError(message, field=error.field, hint=error.hint) from error

    def _present(self) -> dict[str, Any]:
        return {name: value for name in DTYPES if (value := getattr(self, name)) is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        # unpickling skips the validation, which the sending process has done
        return (_restore, tuple(getattr(self, name) for name in DTYPES))


def _restore(*values: Any) -> RolloutBatch:
    batch = object.__new__(RolloutBatch)
    for name, value in zip(DTYPES, values, strict=True):
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
        object.__setattr__(batch, name, value)
    return batch


def _not_negative(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values >= 0


def _is_log_prob(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values <= LOG_PROB_SLACK


def _offsets(lengths: Int64 | Bool) -> Int64:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ragged_rows(offsets: Int64, chosen: Int64) -> Int64:
    """Returns the flat indices of the samples `chosen`, in this order, in an array whose samples start at `offsets`."""
    lengths = np.diff(offsets)[chosen]
    return np.arange(lengths.sum(), dtype=np.int64) + np.repeat(offsets[chosen] - _offsets(lengths)[:-1], lengths)


# ---------------------------------------------------------------------- the file


def _require_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise BatchError(f"path={short_repr(path)} is not a path", field="path", hint="name a file")


def _read_fields(path: str) -> dict[str, Any]:
    """Reads the fields in their stored dtypes, and checks the digest; sizes and values are not checked.

    Raises:
        BatchError: the file is missing, is not a safetensors file, was altered, or has tensors other than the fields;
            the error names the file.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would block
            raise BatchError(f"{path} cannot be read as a safetensors file: it is no plain file", hint=_HINT)
        with safe_open(path, framework="np") as file:
            names = sorted(file.keys())
            for name in names:
                if name not in DTYPES:
                    refuse_unknown(name, DTYPES, f"a field of RolloutBatch (in {path})")
                stored, wanted = file.get_slice(name).get_dtype(), _STORED_DTYPES[DTYPES[name].name]
                if stored != wanted:
                    refuse(name, f"tensor {name} is {stored}; it must be {wanted} (in {path})", _HINT)
            if missing := [name for name in REQUIRED if name not in names]:
                refuse(missing[0], f"tensor {missing[0]} is missing (in {path})", _HINT)
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: the path has half a surrogate pair
        raise BatchError(f"{path} cannot be read as a safetensors file: {error}", hint=_HINT) from error
    if _DIGEST in metadata:
        is_damaged = metadata[_DIGEST] != _digest(tensors)
    else:  # an entry with the lengths of a digest's name and value is a damaged digest; others are allowed
        is_damaged = any((len(name), len(value)) == (len(_DIGEST), 64) for name, value in metadata.items())
    if is_damaged:
        raise BatchError(
            f"{path} was damaged or changed after it was written: its tensors are not those of its digest",
            hint="restore the file from a copy, or record the batch again",
        )
    return tensors


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    names = sorted(tensors)
    described = [[name, _STORED_DTYPES[tensors[name].dtype.name], list(tensors[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names:
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
