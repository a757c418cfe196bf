"""Limits the memory that a ForwardBackwardRequest needs, before protobuf parses it."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from actors.service.tinker_pb2 import ForwardBackwardRequest
from slimefsdp.errors import BatchError

_MAX_FIELDS = 2**20  # in a request, including nested messages; enough for 37,000 datums of three inputs
_MAX_PACKED = 8  # numbers in a packed field; the only packed field is a tensor's shape, which has at most 2 dimensions
_BYTES_PER_FIELD = 64  # memory of an empty message, which has 2 bytes on the wire
_BYTES_PER_PACKED = 16  # memory of a packed number, with the spare room of its array
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_PACKED = "packed"  # marks a packed field in `_REQUEST`
_CONTINUED = bytes(range(128, 256))  # every byte of a varint but its last


def scan_request(data: bytes) -> tuple[str, int]:
    """Returns the model_id of a ForwardBackwardRequest, and an upper bound on its size in memory once it is parsed.

    The bound is needed before parsing: 64 MiB of empty datums become 2 GB, and 64 MiB of one shape become 1 GB.

    Raises:
        BatchError: the bytes are not such a request, or have too many fields, or a shape has too many dimensions.
    """
    try:
        model_id, fields, packed = _scan(data)
        return model_id.decode(), len(data) + _BYTES_PER_FIELD * fields + _BYTES_PER_PACKED * packed
    except (DecodeError, IndexError, UnicodeDecodeError):
        raise _not_a_request() from None


def parse_request(data: bytes) -> Any:
    """Parses bytes that `scan_request` has accepted.

    Raises:
        BatchError: the bytes are not such a request.
    """
    message = ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise _not_a_request() from None
    return message


def _not_a_request() -> BatchError:
    problem = "the body is not a ForwardBackwardRequest"
    return BatchError(problem, field="body", hint="send what the client's package sends")


def _nested(descriptor: Any) -> dict[int, Any]:
    """Maps the number of each field of a message to a dict like this one, for messages, or `_PACKED`, for numbers.

    A number is a packed field if it has a length on the wire; otherwise its entry is not used.
    """
    inner: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            inner[field.number] = _nested(field.message_type)
        elif field.cpp_type != field.CPPTYPE_STRING:
            inner[field.number] = _PACKED
    return inner


_REQUEST = _nested(ForwardBackwardRequest.DESCRIPTOR)
_MODEL_ID = ForwardBackwardRequest.DESCRIPTOR.fields_by_name["model_id"].number


def _scan(data: bytes) -> tuple[bytes, int, int]:
    """Returns a request's model_id, the number of its fields at all depths, and the number of packed numbers.

    Raises:
        BatchError: there are too many fields or packed numbers.
        DecodeError, IndexError: the bytes are not a request.
    """
    model_id, fields, packed, at, end, nested = b"", 0, 0, 0, len(data), _REQUEST
    outer: list[tuple[int, dict[int, Any]]] = []  # the end and the fields of each enclosing message
    while at < end or outer:
        if at >= end:
            end, nested = outer.pop()
            continue
        fields += 1
        if fields > _MAX_FIELDS:
            raise BatchError(
                f"the request has more than {_MAX_FIELDS} fields", field="data", hint="send fewer datums at once"
            )
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _LENGTH:
            size, at = _varint(data, at)
            if at + size > end:
                raise DecodeError
            inner = nested.get(tag >> 3)
            if inner is _PACKED:
                packed += _count_packed(data[at : at + size])
            elif inner is not None:
                outer.append((end, nested))
                end, nested = at + size, inner
                continue
            elif not outer and tag >> 3 == _MODEL_ID:
                model_id = data[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if kind == _EIGHT_BYTES else 4
        else:  # a group, which no message of the API has
            raise DecodeError
    return model_id, fields, packed


def _count_packed(data: bytes) -> int:
    """Counts the varints of a packed field.

    Raises:
        BatchError: there are too many.
    """
    count = len(data.translate(None, _CONTINUED))
    if count > _MAX_PACKED:
        raise BatchError(
            f"a tensor's shape has {count} dimensions", field="data", hint="send tensors of one or two dimensions"
        )
    return count


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
