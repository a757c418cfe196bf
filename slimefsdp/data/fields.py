"""Defines the fields of a rollout batch, and converts or refuses what a caller passes for them.

A caller passes arrays, per-sample records or slime's rollout dict. Records and slime's dict are first converted to
columns: a column has the caller's name for the field, which errors show, and one entry per sample.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from slimefsdp.errors import BatchError, short_repr

REQUIRED = ("tokens", "lengths", "response_lengths")
INTEGERS = ("tokens", "lengths", "response_lengths", "group_ids", "weight_versions", "target_tokens")
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")
PER_SAMPLE = ("lengths", "response_lengths", "rewards", "group_ids", "baseline_rewards")
PER_RESPONSE_TOKEN = (
    *("loss_mask", "loss_weights", *LOG_PROBS, "advantages", "returns", "values", "token_rewards", "weight_versions"),
    "target_tokens",
)
ARRAYS = ("tokens", *PER_SAMPLE, *PER_RESPONSE_TOKEN)
FLOATS = tuple(name for name in ARRAYS if name not in (*INTEGERS, "loss_mask"))
EXPERTS = "routed_experts"
UNKNOWN_EXPERT = -1  # the router then chooses itself
SCALARS = ("temperature", "weight_version")
DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(ARRAYS, np.dtype(np.float32)),
    **dict.fromkeys(INTEGERS, np.dtype(np.int64)),
    "loss_mask": np.dtype(np.bool_),
    "temperature": np.dtype(np.float64),
    "weight_version": np.dtype(np.int64),
    EXPERTS: np.dtype(np.int16),
}


def refuse(field: str, message: str, hint: str) -> NoReturn:
    raise BatchError(message, field=field, hint=hint)


def refuse_unknown(name: object, known: Iterable[str], what: str, otherwise: str = "") -> NoReturn:
    """Raises a BatchError that says that `name` is not `what`; the hint is the most similar name in `known`."""
    nearest = difflib.get_close_matches(str(name)[:60], list(known), n=1, cutoff=0.0)[0]
    refuse(str(name)[:60], f"{short_repr(name)} is not {what}", f"write {nearest!r} if that is meant{otherwise}")


def as_array(
    field: str, value: Any, *, label: str, place: Callable[[int], str], size: int | None = None
) -> npt.NDArray[Any]:
    """Returns `value` as a flat, contiguous array of the field's dtype; if it already is one, returns the same object.

    Args:
        label: the name of the value in errors.
        place: returns the description of the entry at an index, for errors.
        size: the required number of entries; None means any number.

    Raises:
        BatchError: the size or shape is wrong, or the conversion would change a value by more than float32 rounding.
    """
    dtype = DTYPES[field]
    if np.ma.is_masked(value):
        refuse(field, f"{label} is masked in places, where it has no value", "fill or drop what is masked")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors on a device or that require grad
        refuse(field, f"{label} cannot be read as an array: {error}", "pass a flat list or array of numbers on the CPU")
    if array.ndim != 1:
        refuse(field, f"{label} has shape {array.shape}; it must be flat", "pass a flat list or array of numbers")
    if size is not None and array.size != size:
        per = "sample" if field in PER_SAMPLE else "token" if field == "tokens" else "response token"
        message = f"{label} has {array.size} entries; it must have {size}, one per {per}"
        refuse(field, message, "check it against the lengths")
    if array.dtype == dtype or array.size == 0:
        return np.ascontiguousarray(array, dtype=dtype)
    kinds, numbers = ("iu", "whole numbers") if field in INTEGERS else ("iufb", "numbers")
    if array.dtype.kind not in kinds:
        message = f"{label} has dtype {array.dtype}, e.g. {array[0]} at {place(0)}; it must be {dtype}"
        refuse(field, message, f"pass {numbers}")
    with np.errstate(over="ignore"):  # too large float64 become inf, which the batch's constructor refuses
        converted = array.astype(dtype)
    if dtype != np.float32 and not (same := converted == array).all():
        index = int(np.argmin(same))
        rule = "0 or 1" if dtype == np.bool_ else "fit int64"
        refuse(field, f"{field} of {place(index)} is {array[index]}; it must be {rule}", f"pass {dtype} values")
    return converted


def as_experts(value: Any, *, label: str, size: int | None = None) -> npt.NDArray[np.int16]:
    """Returns ids of experts as an int16 array [tokens, layers, experts of a token].

    Args:
        label: the name of the value in errors.
        size: the required number of tokens; None means any number.

    Raises:
        BatchError: the value is not an array of whole numbers of this shape, or an id is below -1 or does not fit.
    """
    rule = "an array of whole numbers [tokens, layers, experts of a token]"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        refuse(EXPERTS, f"{label} cannot be read as an array: {error}", f"pass {rule}")
    if array.ndim != 3 or array.dtype.kind not in "iu" or (size is not None and len(array) != size):
        wanted = "" if size is None else f" of {size} tokens"
        refuse(EXPERTS, f"{label} is {array.dtype} of shape {array.shape}; it must be {rule}{wanted}", f"pass {rule}")
    if array.size and not (array.min() >= UNKNOWN_EXPERT and array.max() <= np.iinfo(np.int16).max):
        problem = f"{label} has ids from {array.min()} to {array.max()}"
        refuse(EXPERTS, problem, "pass numbers of experts from 0, or -1 where they are not known")
    return np.ascontiguousarray(array, dtype=np.int16)


def as_scalar(field: str, value: Any) -> float | int | None:
    """Returns a temperature (above 0) or a weight version (at least 0) as a Python number; None stays None."""
    if value is None:
        return None
    try:
        number = np.asarray(value)
    except ValueError:  # ragged lists
        number = np.empty(0)
    kinds, rule = ("iuf", "a finite number above 0") if field == "temperature" else ("iu", "a whole number from 0")
    if number.ndim == 0 and number.dtype.kind in kinds:
        if field == "temperature" and 0 < float(number) < np.inf:  # a wider number may round to 0 or inf as a float
            return float(number)
        if field == "weight_version" and 0 <= number <= np.iinfo(np.int64).max:
            return int(number)
    refuse(field, f"{field} is {value!r}; it must be {rule}", f"pass {rule}, or None if it is not known")


# ---------------------------------------------------------------------- samples

Columns = Mapping[str, tuple[str, Sequence[Any]]]  # field -> (the caller's name of it, one entry per sample)

_SAMPLE_KEYS = {  # key of one sample -> field of the batch
    "tokens": "tokens",
    "response_length": "response_lengths",
    "reward": "rewards",
    "group_id": "group_ids",
    "baseline_reward": "baseline_rewards",
    EXPERTS: EXPERTS,
    **{name: name for name in PER_RESPONSE_TOKEN},
}

_SLIME_KEYS = {  # key of slime's rollout dict -> field of the batch; the later of two keys with one field is used
    "tokens": "tokens",
    "response_lengths": "response_lengths",
    "rewards": "rewards",
    "raw_reward": "rewards",
    "group_index": "group_ids",
    "group_ids": "group_ids",
    "loss_masks": "loss_mask",
    "log_probs": "old_log_probs",
    "rollout_routed_experts": EXPERTS,
    **{name: name for name in ("rollout_log_probs", "ref_log_probs", "values", "advantages", "returns")},
}
_SLIME_IGNORED = (  # keys for slime's bookkeeping, schedule and denominators
    *("total_lengths", "truncated", "sample_indices", "prompt", "round_number", "metadata", "weight_versions"),
    *("rollout_ids", "rollout_mask_sums", "max_seq_lens", "dynamic_global_batch_size", "global_batch_sizes"),
    *("num_microbatches", "micro_batch_indices"),
)
_SLIME_REFUSED = {  # ignoring these keys silently would train on other data than was sampled
    "partition": "the dict is one rank's share, whose raw_reward is still that of all ranks",
    "pixel_values": "images are not supported",
    "multimodal_train_inputs": "inputs other than tokens are not supported",
    "teacher_log_probs": "distillation is not supported",
    "rollout_indexer_topk": "indexer replay is not supported",
    "rollout_top_p_token_ids": "log-probs over a truncated vocabulary are not supported",
    "rollout_top_p_token_offsets": "log-probs over a truncated vocabulary are not supported",
}


def fields_from_samples(samples: Iterable[Mapping[str, Any] | object]) -> dict[str, npt.NDArray[Any]]:
    """Returns the array fields of a batch of these samples, as `RolloutBatch.from_samples` describes."""
    if not isinstance(samples, Iterable):
        refuse("samples", f"samples is a {type(samples).__name__}", "pass a list with one mapping or object per sample")
    rows = [s if isinstance(s, Mapping) else {key: getattr(s, key, None) for key in _SAMPLE_KEYS} for s in samples]
    for i, row in enumerate(rows):
        for key in row.keys() - _SAMPLE_KEYS.keys():
            refuse_unknown(key, _SAMPLE_KEYS, f"a key of sample {i}")
    return _joined({field: (key, [row.get(key) for row in rows]) for key, field in _SAMPLE_KEYS.items()})


def samples_from_fields(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one dict per sample with a key for each present field; the inverse of `fields_from_samples`."""
    columns: dict[str, Sequence[Any]] = {}
    for key, field in _SAMPLE_KEYS.items():
        if field in PER_SAMPLE and field in fields:
            columns[key] = fields[field].tolist()
        elif field in fields:
            sizes = fields["lengths" if field in ("tokens", EXPERTS) else "response_lengths"]
            columns[key] = np.split(fields[field], np.cumsum(sizes)[:-1])
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def fields_from_slime(
    data: Mapping[str, Any], samples_per_group: int | None, reward_key: str | None
) -> dict[str, npt.NDArray[Any]]:
    """Returns the array fields of a batch of slime's rollout dict, as `RolloutBatch.from_slime` describes.

    Source: `_convert_samples_to_train_data` in slime/ray/rollout.py. The tables above list the keys that are used,
    ignored and refused; unknown keys are refused. `log_probs` are log-probs that slime's trainer computed.
    `weight_versions` is ignored, since it is a list per sample; pass `weight_version` instead.
    """
    if not isinstance(data, Mapping):
        refuse("data", f"data is a {type(data).__name__}", "pass the dict that slime's RolloutManager builds")
    present = {key: value for key, value in data.items() if value is not None}
    for key, value in present.items():
        entries = value if isinstance(value, Iterable) else [value]
        if key in _SLIME_REFUSED and any(entry is not None for entry in entries):
            message = f"{key} in slime's dict cannot be honoured: {_SLIME_REFUSED[key]}"
            refuse(key, message, f"pass a dict without {key}")
        if key not in (*_SLIME_KEYS, *_SLIME_REFUSED, *_SLIME_IGNORED):
            refuse_unknown(key, _SLIME_KEYS, "a key of slime's dict", "; remove it if it can be ignored")
        if key in _SLIME_KEYS and not _is_list(value):
            message = f"{key} in slime's dict is {short_repr(value)}; it must be a list"
            refuse(key, message, "pass one entry per sample")
    columns = {field: (key, present[key]) for key, field in _SLIME_KEYS.items() if key in present}
    if reward_key is not None:
        if not isinstance(reward_key, str) or _SLIME_KEYS.get(reward_key) != "rewards" or reward_key not in present:
            refuse(
                "rewards", f"slime's dict has no rewards {reward_key!r}", "pass reward_key='raw_reward' or 'rewards'"
            )
        columns["rewards"] = (reward_key, present[reward_key])
    if samples_per_group is not None:
        num_samples = len(present.get("tokens", ()))
        if type(samples_per_group) is not int or samples_per_group < 1 or num_samples % samples_per_group:
            message = f"samples_per_group={samples_per_group} does not cut {num_samples} samples into whole groups"
            refuse("group_ids", message, "pass whole groups, or name each sample's group in a list group_index")
        columns["group_ids"] = ("samples_per_group", [i // samples_per_group for i in range(num_samples)])
    return _joined(columns)


def _is_list(value: Any) -> bool:
    """Returns whether the value can be indexed like a list, an array or a tensor; a 0-d array cannot."""
    if isinstance(value, Mapping | str | bytes) or not hasattr(value, "__getitem__"):
        return False
    try:
        return len(value) >= 0
    except TypeError:
        return False


def _joined(columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """Concatenates each column, drops columns of None, and adds `lengths`; returns the array fields of a batch."""
    num_samples = len(columns["tokens"][1]) if "tokens" in columns else 0
    if num_samples == 0:
        refuse("tokens", "there are no samples; a batch has at least one", "skip the update when nothing was sampled")
    parts = {field: _parts(field, key, entries, num_samples) for field, (key, entries) in columns.items()}
    for field in ("tokens", "response_lengths"):
        if not parts.get(field):
            key = columns[field][0] if field in columns else field
            refuse(field, f"sample 0 has no {key}, nor has any other", f"give {key} on every sample")
    for i, (tokens, (response,)) in enumerate(zip(parts["tokens"], parts["response_lengths"], strict=True)):
        if response >= tokens.size > 0:
            key = columns["response_lengths"][0]
            message = f"{key} of sample {i} is {response}, and it has {tokens.size} tokens, the prompt included"
            refuse("response_lengths", message, "give prompt and response in tokens, and the length of the response")
    for field in PER_RESPONSE_TOKEN:
        for i, part in enumerate(parts.get(field, ())):
            needed = int(parts["response_lengths"][i][0])
            if part.size != needed:
                message = f"{columns[field][0]} of sample {i} has {part.size} entries; its response has {needed} tokens"
                refuse(field, message, "pass one each")
    if parts.get(EXPERTS):
        parts[EXPERTS] = _filled_experts(columns[EXPERTS][0], parts[EXPERTS], parts["tokens"])
    fields = {field: np.concatenate(pieces) for field, pieces in parts.items() if pieces}
    return fields | {"lengths": np.array([part.size for part in parts["tokens"]])}


def _filled_experts(
    key: str, parts: Sequence[npt.NDArray[Any]], tokens: Sequence[npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    """Adds unknown experts for the last token of samples, which engines do not compute."""
    filled = []
    for i, (part, of_sample) in enumerate(zip(parts, tokens, strict=True)):
        if len(part) not in (len(of_sample) - 1, len(of_sample)) or part.shape[1:] != parts[0].shape[1:]:
            message = (
                f"{key} of sample {i} has shape {part.shape}; the sample has {len(of_sample)} tokens, and sample 0 "
            )
            message += f"has shape {parts[0].shape}"
            refuse(EXPERTS, message, "pass the experts of all tokens, or of all but the last")
        missing = len(of_sample) - len(part)
        filled.append(np.pad(part, ((0, missing), (0, 0), (0, 0)), constant_values=UNKNOWN_EXPERT))
    return filled


def _parts(field: str, key: str, entries: Sequence[Any], num_samples: int) -> list[npt.NDArray[Any]]:
    """Returns one array per sample, or an empty list if every entry is None."""
    if len(entries) != num_samples:
        refuse(field, f"{key} has {len(entries)} entries for {num_samples} samples", "pass one entry per sample")
    lacking = [i for i, entry in enumerate(entries) if entry is None]
    if len(lacking) == num_samples:
        return []
    if lacking:
        refuse(field, f"sample {lacking[0]} has no {key}, others have one", f"give {key} on every sample or on none")

    def array_of(i: int) -> npt.NDArray[Any]:
        if field == EXPERTS:
            return as_experts(entries[i], label=f"{key} of sample {i}")
        if field in PER_SAMPLE:
            return as_array(field, [entries[i]], label=f"{key} of sample {i}", place=lambda _: f"sample {i}")
        return as_array(field, entries[i], label=f"{key} of sample {i}", place=lambda j: f"sample {i}, entry {j}")

    return [array_of(i) for i in range(num_samples)]
