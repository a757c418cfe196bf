"""Errors by what callers may rely on: class, field and the values in the text, never its wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slimefsdp.errors import SlimeError


def names(text: str, value: object) -> bool:
    """Whether `text` holds `value`; a number counts only where it is not part of another one."""
    if isinstance(value, int | float):
        return re.search(rf"(?<![\d.]){re.escape(str(value))}(?!\.?\d)", text) is not None
    return str(value) in text


def assert_refusal(error: object, kind: type[SlimeError], field: str | None, *values: object) -> None:
    """`error` is of exactly the class `kind`, about `field`, says a way out, and its message names each of `values`."""
    assert type(error) is kind and isinstance(error, SlimeError), repr(error)
    assert error.field == field and error.hint, (error.field, error.hint, error)
    assert [value for value in values if not names(error.message, value)] == [], error.message


@contextmanager
def refused(kind: type[SlimeError], field: str | None, *values: object) -> Iterator[pytest.ExceptionInfo[SlimeError]]:
    """The block raises an error that `assert_refusal` accepts."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_refusal(caught.value, kind, field, *values)
