"""The fields of a rollout batch: their names and dtypes, and how a given value becomes one of them or is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from slimefsdp.errors import BatchError, short_repr

REQUIRED = ("tokens", "lengths", "response_lengths")
INTEGERS = ("tokens", "lengths", "response_lengths", "group_ids", "weight_versions")
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")
PER_SAMPLE = ("lengths", "response_lengths", "rewards", "group_ids", "baseline_rewards")
PER_RESPONSE_TOKEN = (
    *("loss_mask", *LOG_PROBS, "advantages", "returns", "values", "token_rewards", "weight_versions"),
)
ARRAYS = ("tokens", *PER_SAMPLE, *PER_RESPONSE_TOKEN)
FLOATS = tuple(name for name in ARRAYS if name not in (*INTEGERS, "loss_mask"))
SCALARS = ("temperature", "weight_version")
DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(ARRAYS, np.dtype(np.float32)),
    **dict.fromkeys(INTEGERS, np.dtype(np.int64)),
    "loss_mask": np.dtype(np.bool_),
    "temperature": np.dtype(np.float64),
    "weight_version": np.dtype(np.int64),
}


def refuse(field: str, message: str, hint: str) -> NoReturn:
    """Raise the BatchError."""
    raise BatchError(message, field=field, hint=hint)


def refuse_unknown(name: object, known: Iterable[str], what: str, otherwise: str = "") -> NoReturn:
    """Raise the BatchError that `name` is not `what`, with the nearest of the `known` names as the way out."""
    nearest = difflib.get_close_matches(str(name)[:60], list(known), n=1, cutoff=0.0)[0]
    refuse(str(name)[:60], f"{short_repr(name)} is not {what}", f"write {nearest!r} if that is meant{otherwise}")


def as_array(
    field: str, value: Any, *, label: str, place: Callable[[int], str], size: int | None = None
) -> npt.NDArray[Any]:
    """`value` as a flat, contiguous array of the field's dtype; the same object where it is one already.

    Args:
        label: what an error calls the value.
        place: where an error says that the entry of an index is.
        size: the number of entries it must have; None is any.

    Raises:
        BatchError: it has another size or shape, or the dtype would lose something (rounding to float32 is no loss).
    """
    dtype = DTYPES[field]
    if np.ma.is_masked(value):
        refuse(field, f"{label} is masked in places, where it has no value", "fill or drop what is masked")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors on a device or in a gradient graph
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
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which construction refuses
        converted = array.astype(dtype)
    if dtype != np.float32 and not (same := converted == array).all():
        index = int(np.argmin(same))
        rule = "0 or 1" if dtype == np.bool_ else "fit int64"
        refuse(field, f"{field} of {place(index)} is {array[index]}; it must be {rule}", f"pass {dtype} values")
    return converted


def as_scalar(field: str, value: Any) -> float | int | None:
    """A temperature above 0 or a weight version from 0 as a Python number; None stays None."""
    if value is None:
        return None
    number = np.asarray(value)
    kinds, rule = ("iuf", "a finite number above 0") if field == "temperature" else ("iu", "a whole number from 0")
    if number.ndim == 0 and number.dtype.kind in kinds:
        if field == "temperature" and np.isfinite(number) and number > 0:
            return float(number)
        if field == "weight_version" and 0 <= number <= np.iinfo(np.int64).max:
            return int(number)
    refuse(field, f"{field} is {value!r}; it must be {rule}", f"pass {rule}, or None if it is not known")
