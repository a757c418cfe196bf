"""RolloutBatch: one batch of sampled sequences, checked once when it is built and never changed afterwards.

Ragged fields are flat arrays plus lengths. B samples; T = sum of lengths; R = sum of response_lengths. The tokens of a
sample are its prompt followed by its response, so the response is always the last `response_length` of them; no value
of a token, id 0 included, means padding.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slimefsdp.errors import BatchError

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

INTEGERS = ("tokens", "lengths", "response_lengths", "group_ids")
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")
PER_SAMPLE = ("lengths", "response_lengths", "rewards", "group_ids")
PER_RESPONSE_TOKEN = ("loss_mask", *LOG_PROBS, "advantages", "returns", "values", "token_rewards")
REQUIRED = ("tokens", "lengths", "response_lengths")
ARRAYS = ("tokens", *PER_SAMPLE, *PER_RESPONSE_TOKEN)
SCALARS = ("temperature", "weight_version")
DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(ARRAYS, np.dtype(np.float32)),
    **dict.fromkeys(INTEGERS, np.dtype(np.int64)),
    "loss_mask": np.dtype(np.bool_),
    "temperature": np.dtype(np.float64),
    "weight_version": np.dtype(np.int64),
}
SAFETENSORS_DTYPES = {"int64": "I64", "float32": "F32", "float64": "F64", "bool": "BOOL"}

LOG_PROB_SLACK = 1e-3  # an engine's own rounding may put the log-prob of a certain token slightly above 0

SAMPLE_KEYS = {  # key of one sample -> field of the batch
    "tokens": "tokens",
    "response_length": "response_lengths",
    "reward": "rewards",
    "group_id": "group_ids",
    **{name: name for name in PER_RESPONSE_TOKEN},
}

SLIME_KEYS = {  # key of slime's rollout dict -> field of the batch; of two keys for one field the later one counts
    "tokens": "tokens",
    "response_lengths": "response_lengths",
    "rewards": "rewards",
    "raw_reward": "rewards",
    "group_index": "group_ids",
    "group_ids": "group_ids",
    "loss_masks": "loss_mask",
    "log_probs": "old_log_probs",
    **{name: name for name in ("rollout_log_probs", "ref_log_probs", "values", "advantages", "returns")},
}
SLIME_IGNORED = (  # bookkeeping, and slime's own schedule and denominators
    *("total_lengths", "truncated", "sample_indices", "prompt", "round_number", "metadata", "weight_versions"),
    *("rollout_ids", "rollout_mask_sums", "max_seq_lens", "dynamic_global_batch_size", "global_batch_sizes"),
    *("num_microbatches", "micro_batch_indices"),
)
SLIME_REFUSED = {  # leaving these out in silence would train something else than was sampled
    "partition": "the dict is one rank's share, whose raw_reward is still that of all ranks",
    "pixel_values": "images are not supported",
    "multimodal_train_inputs": "inputs other than tokens are not supported",
    "teacher_log_probs": "distillation is not supported",
    "rollout_routed_experts": "routing replay is not supported",
    "rollout_indexer_topk": "indexer replay is not supported",
    "rollout_top_p_token_ids": "log-probs over a truncated vocabulary are not supported",
    "rollout_top_p_token_offsets": "log-probs over a truncated vocabulary are not supported",
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """Sampled sequences with what is known about them; the unit that a trainer is given.

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
    temperature: float | None = None  # the sampling temperature
    weight_version: int | None = None  # which weights sampled it

    def __post_init__(self) -> None:
        self._normalise("lengths", None)
        if self.num_samples == 0:
            _fail(
                "lengths",
                "lengths is empty; a batch has at least one sample",
                "skip the update when nothing was sampled",
            )
        self._normalise("response_lengths", self.num_samples)
        self._require(
            "response_lengths",
            (self.response_lengths >= 1) & (self.response_lengths < self.lengths),
            lambda i: f"must be at least 1 and less than the sample's length, {self.lengths[i]}",
            "drop samples whose prompt or response is empty",
        )
        # summed as float: lengths from a damaged file could wrap an int64 sum round to a plausible number
        self._normalise("tokens", int(self.lengths.sum(dtype=np.float64)))
        for name in PER_SAMPLE[2:]:
            self._normalise(name, self.num_samples)
        for name in PER_RESPONSE_TOKEN:
            self._normalise(name, self.num_response_tokens)
        self._check_values()
        for name in SCALARS:
            object.__setattr__(self, name, _scalar(name, getattr(self, name)))

    def _normalise(self, name: str, size: int | None) -> None:
        """Replace the field `name` by a read-only array of its dtype with `size` entries; None sets no size."""
        value = getattr(self, name)
        if value is None and name not in REQUIRED:
            return
        view = _as_array(name, value, size, name, lambda index: self._place(name, index)).view()
        view.setflags(write=False)
        object.__setattr__(self, name, view)

    def _check_values(self) -> None:
        self._require(
            "tokens",
            self.tokens >= 0,
            lambda _: "must not be negative",
            "pass token ids, and unpad instead of marking padding",
        )
        for name in ("rewards", *PER_RESPONSE_TOKEN[1:]):
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
            _fail(
                "loss_mask",
                f"loss_mask is False on all {self.num_response_tokens} response tokens of the batch; "
                "at least one must be trained",
                "skip the update, or check that the mask is 1 where the policy chose the token",
            )

    def _require(self, name: str, holds: npt.NDArray[Any], rule: Callable[[int], str], hint: str) -> None:
        if not holds.all():
            index = int(np.argmin(holds))
            _fail(name, f"{name} of {self._place(name, index)} is {getattr(self, name)[index]}; it {rule(index)}", hint)

    def _place(self, name: str, index: int) -> str:
        """Words for entry `index` of field `name`: its sample, and the position in it."""
        if name in PER_SAMPLE:
            return f"sample {index}"
        offsets, unit = (self.token_offsets, "token") if name == "tokens" else (self.response_offsets, "response token")
        sample = int(np.searchsorted(offsets, index, side="right")) - 1
        return f"sample {sample}, {unit} {index - int(offsets[sample])}"

    @property
    def num_samples(self) -> int:
        """B."""
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.size

    @property
    def num_response_tokens(self) -> int:
        """R."""
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

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise BatchError naming sample, position and value of the first token id that is not below `vocab_size`."""
        self._require(
            "tokens",
            self.tokens < vocab_size,
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
        """One batch from one mapping or object per sample.

        Needed: `tokens` (prompt + response) and `response_length`. Optional, on all samples or on none (None counts as
        absent): `reward`, `group_id`, and `loss_mask`, `rollout_log_probs`, `advantages`, `returns`, `values`,
        `old_log_probs`, `ref_log_probs`, `token_rewards`, each with one entry per response token. Further keys of a
        mapping are refused, further attributes of an object are not looked at.
        """
        rows = [s if isinstance(s, Mapping) else {key: getattr(s, key, None) for key in SAMPLE_KEYS} for s in samples]
        for i, row in enumerate(rows):
            for key in row.keys() - SAMPLE_KEYS.keys():
                _fail_unknown(key, SAMPLE_KEYS, f"a key of sample {i}")
        columns = {field: (key, [row.get(key) for row in rows]) for key, field in SAMPLE_KEYS.items()}
        return cls(**_joined(columns), temperature=temperature, weight_version=weight_version)

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
        """One batch from slime's rollout dict, as its RolloutManager builds it before splitting over dp ranks.

        Source: `_convert_samples_to_train_data` in slime/ray/rollout.py. Values are lists with one entry per sample.
        - As they are: `tokens`, `response_lengths`, `rollout_log_probs`, `ref_log_probs`, `values`, `advantages`,
          `returns`. Renamed: `loss_masks` to loss_mask, `log_probs` (of slime's trainer) to old_log_probs.
        - rewards: the list under `reward_key`; by default `raw_reward`, or `rewards` where that is missing. slime's
          `rewards` are already normalised within groups under its GRPO-like estimators, and would be so twice; take
          them (`reward_key="rewards"`) if a custom post-processing makes them, and switch normalisation off here.
        - group_ids: `samples_per_group` (slime's n_samples_per_prompt) consecutive samples each, if given; else the
          key `group_ids` or `group_index`; else None.
        - Ignored: `total_lengths`, `truncated`, `sample_indices`, `prompt`, `round_number`, `metadata`, `rollout_ids`,
          `weight_versions` (one list per sample: give `weight_version`), and slime's schedule and denominators.
        - Refused, since leaving them out would train something else: inputs that are not tokens, teacher log-probs,
          replay data of the engine, one rank's share (`partition`), and keys that are not known.
        """
        columns = _slime_columns(data, samples_per_group, reward_key)
        return cls(**_joined(columns), temperature=temperature, weight_version=weight_version)

    def to_samples(self) -> list[dict[str, Any]]:
        """One dict per sample, as `from_samples` takes them: arrays as views, numbers as Python's, no absent keys."""
        columns: dict[str, Sequence[Any]] = {}
        for key, field in SAMPLE_KEYS.items():
            if (value := getattr(self, field)) is None:
                continue
            cuts = (self.token_offsets if field == "tokens" else self.response_offsets)[1:-1]
            columns[key] = value.tolist() if field in PER_SAMPLE else np.split(value, cuts)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def select(self, indices: npt.ArrayLike) -> RolloutBatch:
        """The samples `indices` (integers from 0 to B - 1, repeats allowed), in that order, as a batch of their own."""
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and chosen.size):
            _fail("indices", f"indices is {chosen.dtype} of shape {chosen.shape}", "pass a flat list of sample numbers")
        chosen = chosen.astype(np.int64)
        outside = (chosen < 0) | (chosen >= self.num_samples)
        if outside.any():
            index = int(np.argmax(outside))
            _fail(
                "indices",
                f"indices[{index}]={chosen[index]} is not a sample of a batch of {self.num_samples}",
                f"pass numbers from 0 to {self.num_samples - 1}",
            )
        token_rows = _ragged_rows(self.token_offsets, chosen)
        response_rows = _ragged_rows(self.response_offsets, chosen)
        rows = {name: chosen if name in PER_SAMPLE else response_rows for name in ARRAYS} | {"tokens": token_rows}
        return self.replace(**{name: value[rows[name]] for name, value in self._arrays().items()})

    def replace(self, **fields: Any) -> RolloutBatch:
        """A new batch with these fields exchanged (None removes an optional one), validated like any other."""
        for name in fields.keys() - DTYPES.keys():
            _fail_unknown(name, DTYPES, "a field of RolloutBatch")
        return dataclasses.replace(self, **fields)

    def same_as(self, other: object) -> bool:
        """Whether `other` is a batch with the same fields present and equal values in them."""
        if not isinstance(other, RolloutBatch):
            return False
        mine, theirs = self._arrays(), other._arrays()
        return (
            mine.keys() == theirs.keys()
            and all(np.array_equal(mine[name], theirs[name]) for name in mine)
            and all(getattr(self, name) == getattr(other, name) for name in SCALARS)
        )

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, tensors named as the fields; `path` holds the old content or all of the new."""
        path = Path(path)
        tensors = self._arrays()
        for name in SCALARS:
            if (value := getattr(self, name)) is not None:
                tensors[name] = np.array(value, dtype=DTYPES[name])
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            save_file(tensors, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())  # before the rename, or a power cut could leave the new name on an empty file
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RolloutBatch:
        """The batch in a file of `save`. BatchError names the file if it is missing, damaged or not such a file."""
        try:
            return cls(**_read_fields(path))
        except BatchError as error:
            message = f"{error.message} (in {os.fspath(path)})"
            raise BatchError(message, field=error.field, hint=error.hint) from error
        except (OSError, SafetensorError) as error:
            raise BatchError(
                f"{os.fspath(path)} cannot be read as a safetensors file: {error}",
                hint="pass a file written by RolloutBatch.save",
            ) from error

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


def _fail(field: str, message: str, hint: str) -> NoReturn:
    raise BatchError(message, field=field, hint=hint)


def _fail_unknown(name: object, known: Iterable[str], what: str, otherwise: str = "") -> NoReturn:
    nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)[0]
    _fail(str(name), f"{name!r} is not {what}", f"write {nearest!r} if that is meant{otherwise}")


def _offsets(lengths: Int64) -> Int64:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ragged_rows(offsets: Int64, chosen: Int64) -> Int64:
    """The flat indices of the runs `chosen`, in that order, of an array cut at `offsets`."""
    lengths = np.diff(offsets)[chosen]
    return np.arange(lengths.sum(), dtype=np.int64) + np.repeat(offsets[chosen] - _offsets(lengths)[:-1], lengths)


def _as_array(field: str, value: Any, size: int | None, label: str, place: Callable[[int], str]) -> npt.NDArray[Any]:
    """`value` as a flat, contiguous array of the field's dtype; the same object where it is one already.

    `size` is the number of entries it must have (None: any), `label` what an error calls it, `place(index)` where an
    error says that an entry is.
    """
    dtype = DTYPES[field]
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors on a device or in a gradient graph
        _fail(field, f"{label} cannot be read as an array: {error}", "pass a flat list or array of numbers on the CPU")
    if array.ndim != 1:
        _fail(field, f"{label} has shape {array.shape}; it must be flat", "pass a flat list or array of numbers")
    if size is not None and array.size != size:
        per = "sample" if field in PER_SAMPLE else "token" if field == "tokens" else "response token"
        _fail(
            field,
            f"{label} has {array.size} entries; it must have {size}, one per {per}",
            "check it against the lengths",
        )
    if array.dtype == dtype or array.size == 0:
        return np.ascontiguousarray(array, dtype=dtype)
    if array.dtype.kind not in ("iu" if field in INTEGERS else "iufb"):
        _fail(
            field,
            f"{label} has dtype {array.dtype}, e.g. {array[0]} at {place(0)}; it must be {dtype}",
            f"pass {'whole numbers' if field in INTEGERS else 'numbers'}",
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which construction refuses
        converted = array.astype(dtype)
    if dtype != np.float32 and not (same := converted == array).all():
        index = int(np.argmin(same))
        rule = "0 or 1" if dtype == np.bool_ else "fit int64"
        _fail(field, f"{field} of {place(index)} is {array[index]}; it must be {rule}", f"pass {dtype} values")
    return converted


def _joined(columns: Mapping[str, tuple[str, Sequence[Any]]]) -> dict[str, Any]:
    """The array fields of a batch from, per field, the caller's name for it and a list with one entry per sample."""
    num_samples = len(columns["tokens"][1]) if "tokens" in columns else 0
    if num_samples == 0:
        _fail("tokens", "there are no samples; a batch has at least one", "skip the update when nothing was sampled")
    parts = {field: _parts(field, key, entries, num_samples) for field, (key, entries) in columns.items()}
    for field in ("tokens", "response_lengths"):
        if not parts.get(field):
            key = columns[field][0] if field in columns else field
            _fail(field, f"sample 0 has no {key}, nor has any other", f"give {key} on every sample")
    for field in PER_RESPONSE_TOKEN:
        for i, part in enumerate(parts.get(field, ())):
            needed = int(parts["response_lengths"][i][0])
            if part.size != needed:
                key = columns[field][0]
                _fail(
                    field,
                    f"{key} of sample {i} has {part.size} entries; its response has {needed} tokens",
                    "pass one each",
                )
    arrays = {field: np.concatenate(pieces) for field, pieces in parts.items() if pieces}
    return arrays | {"lengths": np.array([part.size for part in parts["tokens"]])}


def _slime_columns(
    data: Mapping[str, Any], samples_per_group: int | None, reward_key: str | None
) -> dict[str, tuple[str, Sequence[Any]]]:
    """What `_joined` takes, from slime's dict; refuses keys that are unknown or that may not be left out."""
    given = {key: value for key, value in data.items() if value is not None}
    for key, value in given.items():
        if key in SLIME_REFUSED and any(entry is not None for entry in value):
            _fail(key, f"{key} in slime's dict cannot be honoured: {SLIME_REFUSED[key]}", f"pass a dict without {key}")
        if key not in (*SLIME_KEYS, *SLIME_REFUSED, *SLIME_IGNORED):
            _fail_unknown(key, SLIME_KEYS, "a key of slime's dict", "; remove it if it can be ignored")
        if key in SLIME_KEYS and not hasattr(value, "__len__"):
            _fail(key, f"{key} in slime's dict is {value!r}; it must be a list", "pass one entry per sample")
    columns = {field: (key, given[key]) for key, field in SLIME_KEYS.items() if key in given}
    if reward_key is not None:
        if SLIME_KEYS.get(reward_key) != "rewards" or reward_key not in given:
            _fail("rewards", f"slime's dict has no rewards {reward_key!r}", "pass reward_key='raw_reward' or 'rewards'")
        columns["rewards"] = (reward_key, given[reward_key])
    if samples_per_group is not None:
        num_samples = len(given.get("tokens", ()))
        if samples_per_group < 1 or num_samples % samples_per_group:
            message = f"samples_per_group={samples_per_group} does not cut {num_samples} samples into whole groups"
            _fail("group_ids", message, "pass whole groups, or name each sample's group in a list group_index")
        columns["group_ids"] = ("samples_per_group", [i // samples_per_group for i in range(num_samples)])
    return columns


def _parts(field: str, key: str, entries: Sequence[Any], num_samples: int) -> list[npt.NDArray[Any]]:
    """One array per sample; empty when every entry is None."""
    if len(entries) != num_samples:
        _fail(field, f"{key} has {len(entries)} entries for {num_samples} samples", "pass one entry per sample")
    lacking = [i for i, entry in enumerate(entries) if entry is None]
    if len(lacking) == num_samples:
        return []
    if lacking:
        _fail(field, f"sample {lacking[0]} has no {key}, others have one", f"give {key} on every sample or on none")

    def array_of(i: int) -> npt.NDArray[Any]:
        if field in PER_SAMPLE:
            return _as_array(field, [entries[i]], None, f"{key} of sample {i}", lambda _: f"sample {i}")
        return _as_array(field, entries[i], None, f"{key} of sample {i}", lambda j: f"sample {i}, entry {j}")

    return [array_of(i) for i in range(num_samples)]


def _scalar(name: str, value: Any) -> float | int | None:
    """A temperature above 0 or a weight version from 0 as a Python number; None stays None."""
    if value is None:
        return None
    number = np.asarray(value)
    kinds, rule = ("iuf", "a finite number above 0") if name == "temperature" else ("iu", "a whole number from 0")
    if number.ndim == 0 and number.dtype.kind in kinds:
        if name == "temperature" and np.isfinite(number) and number > 0:
            return float(number)
        if name == "weight_version" and 0 <= number <= np.iinfo(np.int64).max:
            return int(number)
    _fail(name, f"{name} is {value!r}; it must be {rule}", f"pass {rule}, or None if it is not known")


def _read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of a file of `save` by name, with exactly the dtypes that it writes."""
    fields: dict[str, Any] = {}
    with safe_open(path, framework="np") as file:
        names = set(file.keys())
        for name in sorted(names - DTYPES.keys()):
            _fail_unknown(name, DTYPES, "a field of RolloutBatch")
        for name in REQUIRED:
            if name not in names:
                _fail(name, f"tensor {name} is missing", "pass a file written by RolloutBatch.save")
        for name in names:
            stored, wanted = file.get_slice(name).get_dtype(), SAFETENSORS_DTYPES[DTYPES[name].name]
            if stored != wanted:
                _fail(
                    name, f"tensor {name} is {stored}; it must be {wanted}", "pass a file written by RolloutBatch.save"
                )
            fields[name] = file.get_tensor(name)
    return fields
