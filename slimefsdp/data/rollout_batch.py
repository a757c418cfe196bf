"""RolloutBatch: one batch of sampled sequences, checked once when it is built and never changed afterwards.

Ragged fields are flat arrays plus lengths. B samples; T = sum of lengths; R = sum of response_lengths. The tokens of a
sample are its prompt followed by its response, so the response is always the last `response_length` of them; no value
of a token, id 0 included, means padding.

On disk a batch is one safetensors file: a tensor for each field it has, under the field's name and in its dtype. The
file's metadata holds a sha256 of the tensors' names, dtypes, shapes and bytes, which reading compares. A file that has
none, written by an earlier version or by another program, is read without that.
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
    FLOATS,
    LOG_PROBS,
    PER_RESPONSE_TOKEN,
    PER_SAMPLE,
    REQUIRED,
    SCALARS,
    as_array,
    as_scalar,
    fields_from_samples,
    fields_from_slime,
    refuse,
    refuse_unknown,
    samples_from_fields,
)
from slimefsdp.errors import BatchError, short_repr

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

LOG_PROB_SLACK = 1e-3  # an engine's own rounding may put the log-prob of a certain token slightly above 0
_STORED_DTYPES = {"int64": "I64", "float32": "F32", "float64": "F64", "bool": "BOOL"}  # numpy's name -> the format's
_HINT = "pass a file written by RolloutBatch.save"
_DIGEST = "sha256"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """Sampled sequences with everything that is known about them; the input of a trainer.

    Arrays may be given as lists or in another dtype that loses nothing (any float or int for float32, rounded to
    float32). An array that already fits is kept as a read-only view, not copied: do not write to it afterwards.
    Compare batches with `same_as`; `==` is identity.

    Raises:
        BatchError: a field breaks a rule; names the field, the sample, the value, the rule and the way out.
    """

    tokens: Int64  # [T] prompt + response of each sample, end to end
    lengths: Int64  # [B] tokens per sample
    response_lengths: Int64  # [B] trailing tokens that are response; 1 <= response_length < length
    rewards: Float32 | None = None  # [B]
    group_ids: Int64 | None = None  # [B] samples of one prompt share an id
    loss_mask: Bool | None = None  # [R] False where the policy did not choose the token; None is all True
    rollout_log_probs: Float32 | None = None  # [R] from the engine that sampled, at the sampling temperature
    advantages: Float32 | None = None  # [R]
    returns: Float32 | None = None  # [R]
    values: Float32 | None = None  # [R]
    old_log_probs: Float32 | None = None  # [R]
    ref_log_probs: Float32 | None = None  # [R]
    token_rewards: Float32 | None = None  # [R]
    baseline_rewards: Float32 | None = None  # [B] what each reward is measured against, e.g. a greedy response's
    weight_versions: Int64 | None = None  # [R] which weights drew each token, where they are not all the same
    loss_weights: Float32 | None = None  # [R] what the loss of a token is multiplied by, of any sign; None is all 1
    target_tokens: Int64 | None = None  # [R] tokens to score in place of the sampled ones; None: the sampled tokens
    temperature: float | None = None  # the sampling temperature
    weight_version: int | None = None  # which weights sampled it; the oldest, where tokens are of several

    def __new__(cls, *values: Any, **fields: Any) -> RolloutBatch:
        """Raises BatchError for arguments for which `__init__` could only raise TypeError."""
        for name in fields:
            if name not in DTYPES:
                refuse_unknown(name, DTYPES, "a field of RolloutBatch")
        names = [field.name for field in dataclasses.fields(cls)]
        given = [*names[: len(values)], *fields]
        if len(values) > len(names) or len(set(given)) < len(given):
            message = f"{len(values)} fields are given without a name, and {sorted(fields)} by name"
            refuse("RolloutBatch", message, "give each field once, by its name")
        for name in REQUIRED:
            if name not in given:
                refuse(name, f"{name} is missing", "give tokens, lengths and response_lengths")
        return object.__new__(cls)

    def __repr__(self) -> str:
        named = [field.name for field in dataclasses.fields(self) if field.name not in (*REQUIRED, *SCALARS)]
        given = [name for name in named if getattr(self, name) is not None]
        scalars = [f"{name}={value}" for name in SCALARS if (value := getattr(self, name)) is not None]
        samples = f"{self.num_samples} sample{'s' * (self.num_samples != 1)}"
        tokens = f"{len(self.tokens)} tokens, {self.num_response_tokens} of them in responses"
        return f"RolloutBatch({', '.join([samples, tokens, *given, *scalars])})"

    def __post_init__(self) -> None:
        self._normalise("lengths", None)
        if self.num_samples == 0:
            message = "lengths is empty; a batch has at least one sample"
            refuse("lengths", message, "skip the update when nothing was sampled")
        self._normalise("response_lengths", self.num_samples)
        self._require(
            "response_lengths",
            (self.response_lengths >= 1) & (self.response_lengths < self.lengths),
            lambda i: f"must be at least 1 and less than the sample's length, {self.lengths[i]}",
            "drop samples whose prompt or response is empty",
        )
        # summed as float: lengths from a damaged file could wrap an int64 sum round to a plausible number
        self._normalise("tokens", int(self.lengths.sum(dtype=np.float64)))
        for name in ("rewards", "group_ids", "baseline_rewards"):
            self._normalise(name, self.num_samples)
        for name in PER_RESPONSE_TOKEN:
            self._normalise(name, self.num_response_tokens)
        self._check_values()
        for name in SCALARS:
            object.__setattr__(self, name, as_scalar(name, getattr(self, name)))

    def _normalise(self, name: str, size: int | None) -> None:
        """Replaces the field `name` by a read-only array of its dtype with `size` entries; None sets no size."""
        value = getattr(self, name)
        if value is None and name not in REQUIRED:
            return
        view = as_array(name, value, label=name, place=lambda index: self._place(name, index), size=size).view()
        view.setflags(write=False)
        object.__setattr__(self, name, view)

    def _check_values(self) -> None:
        self._require(
            "tokens",
            self.tokens >= 0,
            lambda _: "must not be negative",
            "pass token ids, and unpad instead of marking padding",
        )
        if (targets := self.target_tokens) is not None:
            self._require("target_tokens", targets >= 0, lambda _: "must not be negative", "pass token ids")
        if self.weight_versions is not None:
            self._require("weight_versions", self.weight_versions >= 0, lambda i: "must be 0 or more", "pass versions")
        for name in FLOATS:
            if (value := getattr(self, name)) is not None:
                self._require(
                    name,
                    np.isfinite(value),
                    lambda _: "must be a finite float32",
                    "drop the sample, or mask the token and put 0 there",
                )
        for name in LOG_PROBS:
            if (value := getattr(self, name)) is not None:
                self._require(
                    name,
                    value <= LOG_PROB_SLACK,
                    lambda _: "must not be above 0, being the log of a probability",
                    "pass natural logs of probabilities, not probabilities or their negative logs",
                )
        if self.loss_mask is not None and not self.loss_mask.any():
            refuse(
                "loss_mask",
                f"loss_mask is False on all {self.num_response_tokens} response tokens of the batch; "
                "at least one must be trained",
                "skip the update, or check that the mask is 1 where the policy chose the token",
            )

    def _require(self, name: str, holds: npt.NDArray[Any], rule: Callable[[int], str], hint: str) -> None:
        if not holds.all():
            index = int(np.argmin(holds))
            message = f"{name} of {self._place(name, index)} is {getattr(self, name)[index]}; it {rule(index)}"
            refuse(name, message, hint)

    def _place(self, name: str, index: int) -> str:
        """Describes entry `index` of field `name`: its sample, and the position in it."""
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
        """[B + 1]; sample i is tokens[token_offsets[i] : token_offsets[i + 1]]."""
        return _offsets(self.lengths)

    @property
    def response_offsets(self) -> Int64:
        """[B + 1]; sample i owns entries response_offsets[i] : response_offsets[i + 1] of an [R] field."""
        return _offsets(self.response_lengths)

    @property
    def mask(self) -> Bool:
        """[R], True where the token is trained: `loss_mask`, or all True without one."""
        return np.ones(self.num_response_tokens, dtype=np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def sample_ids(self) -> Int64:
        """[R], the sample that each response token belongs to."""
        return np.repeat(np.arange(self.num_samples, dtype=np.int64), self.response_lengths)

    def any_token(self, values: Bool) -> Bool:
        """Returns for each sample whether any of its response tokens is True, [B]; values are [R]."""
        return np.logical_or.reduceat(values, self.response_offsets[:-1])  # every response has a token

    def trained_tokens(self, skipped: Int64 | int = 0) -> Int64:
        """Returns the trained tokens of each sample, [B], after the first `skipped` of its response ([B] or a
        number).
        """
        skipped = np.minimum(skipped, self.response_lengths)
        if self.loss_mask is None:
            return self.response_lengths - skipped
        offsets = self.response_offsets
        before = _offsets(self.loss_mask)
        return before[offsets[1:]] - before[offsets[:-1] + skipped]

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises BatchError naming sample, position and value of the first token id that is not below `vocab_size`."""
        for name in ("tokens", "target_tokens"):
            if (ids := getattr(self, name)) is not None:
                self._require(
                    name,
                    ids < vocab_size,
                    lambda _: f"must be below the model's vocabulary size, {vocab_size}",
                    "sample with the tokenizer of the model that is trained",
                )

    @classmethod
    def from_samples(
        cls,
        samples: Iterable[Mapping[str, Any] | object],
        *,
        temperature: float | None = None,
        weight_version: int | None = None,
    ) -> RolloutBatch:
        """Makes one batch from one mapping or object per sample.

        Needed: `tokens` (prompt + response) and `response_length`. Optional, on all samples or on none (None counts as
        absent): `reward`, `group_id`, `baseline_reward`, and `loss_mask`, `loss_weights`, `target_tokens`,
        `rollout_log_probs`, `advantages`, `returns`, `values`, `old_log_probs`, `ref_log_probs`, `token_rewards`, each
        with one entry per response token. Further keys of a mapping are refused, further attributes of an object are
        not looked at.
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
        """Makes one batch from slime's rollout dict, as its RolloutManager builds it before splitting over dp ranks.

        Args:
            data: lists with one entry per sample; `fields_from_slime` in slimefsdp/data/fields.py says which keys are
                taken, ignored and refused.
            samples_per_group: slime's n_samples_per_prompt: group_ids then count groups of so many consecutive samples.
                Without it they are the key `group_ids` or `group_index`; without any of these, None.
            reward_key: the list that becomes rewards; by default `raw_reward`, or `rewards` where that is missing.
                slime's `rewards` are already normalised within groups under its GRPO-like estimators, and would be so
                twice; take them if a custom post-processing makes them, and switch normalisation off here.
        """
        fields = fields_from_slime(data, samples_per_group, reward_key)
        return cls(**fields, temperature=temperature, weight_version=weight_version)

    def to_samples(self) -> list[dict[str, Any]]:
        """Returns one dict per sample, as `from_samples` takes them: arrays as views, Python numbers, no
        absent keys.
        """
        return samples_from_fields(self._present())

    def select(self, indices: npt.ArrayLike) -> RolloutBatch:
        """Returns the samples `indices` (integers from 0 to B - 1, repeats allowed), in that order, as a new batch."""
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
        rows["tokens"] = _ragged_rows(self.token_offsets, chosen)
        return self.replace(**{name: value[rows[name]] for name, value in self._present().items() if name in rows})

    def replace(self, **fields: Any) -> RolloutBatch:
        """Returns a new, validated batch with these fields replaced; None removes an optional field."""
        for name in fields.keys() - DTYPES.keys():
            refuse_unknown(name, DTYPES, "a field of RolloutBatch")
        return dataclasses.replace(self, **fields)

    def copy(self) -> RolloutBatch:
        """Returns the same batch in arrays of its own, which share no memory with this one's."""
        made = object.__new__(RolloutBatch)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = value.copy()
                value.setflags(write=False)
            object.__setattr__(made, field.name, value)
        return made

    def same_as(self, other: object) -> bool:
        """Returns whether `other` is a batch with the same fields present and equal values in them."""
        if not isinstance(other, RolloutBatch):
            return False
        mine, theirs = self._present(), other._present()
        return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, tensors named as the fields; `path` holds the old content or all of the new.

        Raises:
            BatchError: the file cannot be written; the OSError is its cause.
        """
        require_path(path)
        try:
            write_fields(Path(path), self._present())
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or a path without a name
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise BatchError(
                f"{os.fspath(path)!r} cannot be written: {reason}",
                field="path",
                hint="name a file in a folder that exists, that you may write to and that has free space",
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RolloutBatch:
        """Reads the batch in a file of `save`. BatchError names a file that is missing, damaged or of another kind."""
        require_path(path)
        fields = read_fields(path)
        try:
            return cls(**fields)
        except BatchError as error:
            message = f"{error.message} (in {os.fspath(path)})"
            raise BatchError(message, field=error.field, hint=error.hint) from error

    def _present(self) -> dict[str, Any]:
        return {name: value for name in DTYPES if (value := getattr(self, name)) is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        # what was validated once is not validated again in every process that unpickles it
        return (_restore, tuple(getattr(self, name) for name in DTYPES))


def _restore(*values: Any) -> RolloutBatch:
    batch = object.__new__(RolloutBatch)
    for name, value in zip(DTYPES, values, strict=True):
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
        object.__setattr__(batch, name, value)
    return batch


def _offsets(lengths: Int64 | Bool) -> Int64:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ragged_rows(offsets: Int64, chosen: Int64) -> Int64:
    """Returns the flat indices of the runs `chosen`, in that order, of an array cut at `offsets`."""
    lengths = np.diff(offsets)[chosen]
    return np.arange(lengths.sum(), dtype=np.int64) + np.repeat(offsets[chosen] - _offsets(lengths)[:-1], lengths)


# ---------------------------------------------------------------------- the file


def require_path(path: object) -> None:
    """Raises BatchError if `path` cannot name a file."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise BatchError(f"path={short_repr(path)} is not a path", field="path", hint="name a file")


def write_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes the file; whatever fails, `path` holds the old content or all of the new. Raises OSError."""
    tensors = {name: np.asarray(value, dtype=DTYPES[name]) for name, value in fields.items()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            save_file(tensors, temporary, metadata={_DIGEST: _digest(tensors)})
        except SafetensorError as error:  # its word for what the disk refuses
            raise OSError(str(error)) from error
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # before the rename, or a power cut could leave the new name on an empty file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the tensors of a file of `write_fields` by name, with exactly the dtypes that were written.

    BatchError names the file if it is missing, is no safetensors file, was changed after it was written, or holds other
    tensors than the fields'. Sizes and values are not looked at.
    """
    where = os.fspath(path)
    try:
        if Path(where).exists() and not Path(where).is_file():  # a pipe would block
            raise BatchError(f"{where} cannot be read as a safetensors file: it is no plain file", hint=_HINT)
        with safe_open(path, framework="np") as file:
            names = sorted(file.keys())
            for name in names:
                if name not in DTYPES:
                    refuse_unknown(name, DTYPES, f"a field of RolloutBatch (in {where})")
            for name in REQUIRED:
                if name not in names:
                    refuse(name, f"tensor {name} is missing (in {where})", _HINT)
            for name in names:
                stored, wanted = file.get_slice(name).get_dtype(), _STORED_DTYPES[DTYPES[name].name]
                if stored != wanted:
                    refuse(name, f"tensor {name} is {stored}; it must be {wanted} (in {where})", _HINT)
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: half a character in the path
        raise BatchError(f"{where} cannot be read as a safetensors file: {error}", hint=_HINT) from error
    if _DIGEST in metadata:
        is_damaged = metadata[_DIGEST] != _digest(tensors)
    else:  # a name and a value as long as a digest's may be one, damaged; others are notes of other writers
        is_damaged = any((len(name), len(value)) == (len(_DIGEST), 64) for name, value in metadata.items())
    if is_damaged:
        raise BatchError(
            f"{where} was damaged or changed after it was written: its tensors are not those of its digest",
            hint="restore the file from a copy, or record the batch again",
        )
    return tensors


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns a digest of names, dtypes, shapes and bytes."""
    names = sorted(tensors)
    described = [[name, _STORED_DTYPES[tensors[name].dtype.name], list(tensors[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names:
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
