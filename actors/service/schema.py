"""The protobuf messages of the Tinker API, built from a description of their fields.

The client's package ships its generated module and no .proto file; a test holds this description against it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from slimefsdp.errors import BatchError

PACKAGE = "tinker_public"
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
# fields by their numbers, from 1; `repeated`, `optional`, `oneof NAME` or a map stand before the type
_MESSAGES: dict[str, tuple[str, ...]] = {
    "SampleResponse": (
        "repeated SampledSequence sequences", "optional bytes prompt_logprobs",
        "optional TopkLogprobs topk_prompt_logprobs", "int32 prompt_cache_hit_tokens",
        "optional Tensor target_prompt_logprobs", "optional PromptAltTokens prompt_alt_tokens",
    ),
    "PromptAltTokens": ("Tensor tokens", "Tensor logprobs"),
    "SampledSequence": (
        "StopReason stop_reason", "bytes tokens", "optional bytes logprobs",
        "optional TopkLogprobs topk_sampled_logprobs",
    ),
    "TopkLogprobs": ("bytes token_ids", "bytes logprobs", "uint32 k", "uint32 length"),
    "SparseCsr": ("bytes values", "bytes crow_indices", "bytes col_indices"),
    "Tensor": (
        "oneof:encoding bytes dense", "oneof:encoding SparseCsr sparse_csr", "DType dtype", "repeated int64 shape",
    ),
    "BatchedTensor": ("bytes data", "bytes offsets", "DType dtype", "repeated int64 trailing_shape"),
    "ArrayRecord": ("string type_tag", "map:BatchedTensor fields", "int64 num_datums"),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type", "repeated ArrayRecord loss_fn_outputs", "map:double metrics",
    ),
    "ForwardBackwardRequest": (
        "string model_id", "int32 seq_id", "repeated Datum data", "string loss_fn", "map:double loss_fn_config",
        "bool forward_only", "map:LossConfigValue loss_fn_config_v2",
    ),
    "LossConfigValue": ("oneof:value double number", "oneof:value string text"),
    "Datum": (
        "repeated Chunk model_input", "map:Tensor loss_fn_inputs", "repeated ProvenanceSpan model_input_spans",
        "repeated ProvenanceSpan loss_fn_input_spans",
    ),
    "ProvenanceSpan": (
        "oneof:span PromptProvenanceSpan prompt_tokens", "oneof:span SampledProvenanceSpan sampled_tokens",
    ),
    "PromptProvenanceSpan": ("string sequence_id", "int64 offset", "int64 length"),
    "SampledProvenanceSpan": ("string sequence_id", "int64 offset", "int64 length"),
    "Chunk": (
        "oneof:chunk EncodedTextChunk encoded_text", "oneof:chunk ImageChunk image", "oneof:chunk DmelChunk dmel",
    ),
    "EncodedTextChunk": ("bytes tokens",),
    "ImageChunk": (
        "bytes data", "string format", "optional int32 expected_tokens",
        "optional ImageDimensions override_dimensions",
    ),
    "ImageDimensions": ("uint32 width", "uint32 height"),
    "DmelChunk": ("bytes dmel",),
    "SamplingParams": (
        "optional int32 max_tokens", "optional uint64 seed", "optional float temperature", "optional int32 top_k",
        "optional float top_p", "oneof:stop StopStrings stop_strs", "oneof:stop StopTokens stop_tokens",
    ),
    "StopStrings": ("repeated string values",),
    "StopTokens": ("repeated int32 values",),
}  # fmt: skip
_Field = descriptor_pb2.FieldDescriptorProto


def described() -> descriptor_pb2.FileDescriptorProto:
    """The whole schema."""
    file = descriptor_pb2.FileDescriptorProto(name="slimefsdp_tinker.proto", package=PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            _add_field(message, number, text)
        _add_presence(message)
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, text: str) -> None:
    *words, kind, name = text.split()
    how = words[0] if words else ""
    if kind.startswith("map:"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL, **_type(kind.removeprefix("map:")))
        given = {"type": _Field.TYPE_MESSAGE, "type_name": f".{PACKAGE}.{message.name}.{entry.name}"}
        message.field.add(name=name, number=number, label=_Field.LABEL_REPEATED, **given)
        return
    label = _Field.LABEL_REPEATED if how == "repeated" else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label, **_type(kind))
    if how.startswith("oneof:"):
        group = how.removeprefix("oneof:")
        known = [one.name for one in message.oneof_decl]
        if group not in known:
            message.oneof_decl.add(name=group)
            known.append(group)
        field.oneof_index = known.index(group)
    field.proto3_optional = how == "optional"


def _add_presence(message: descriptor_pb2.DescriptorProto) -> None:
    """A field that may be absent is the only one of a oneof of its own, which come last."""
    for field in message.field:
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")


def _type(kind: str) -> dict[str, Any]:
    if kind in _ENUMS:
        return {"type": _Field.TYPE_ENUM, "type_name": f".{PACKAGE}.{kind}"}
    if kind in _MESSAGES:
        return {"type": _Field.TYPE_MESSAGE, "type_name": f".{PACKAGE}.{kind}"}
    return {"type": getattr(_Field, f"TYPE_{kind.upper()}")}


_pool = descriptor_pool.DescriptorPool()  # of its own: the client's module may be in the same process
_pool.Add(described())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
Datum = _message("Datum")
Tensor = _message("Tensor")
SparseCsr = _message("SparseCsr")
TopkLogprobs = _message("TopkLogprobs")
DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32 = 1, 2, 3
STOP_REASON_STOP, STOP_REASON_LENGTH = 0, 1

_MOST_FIELDS = 2**20  # of a request with those of the messages in it: 37,000 datums of three inputs
_MOST_PACKED = 8  # numbers of a packed field: the only one is a shape, which has two dimensions at most
_BYTES_A_FIELD = 64  # what a message without content takes in memory, where it has 2 bytes on the wire
_BYTES_A_PACKED = 16  # what a number takes in memory, with the room that its array keeps for more of them
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_PACKED = "packed"  # stands for the fields of a packed field, which has none
_GO_ON = bytes(range(128, 256))  # bytes behind which a varint goes on


def scan_request(data: bytes) -> tuple[str, int]:
    """Returns the model_id of a ForwardBackwardRequest, and how many bytes the request takes in memory at most.

    The request is not parsed for this: 64 MiB of empty datums would take 2 GB, and as much of one shape 1 GB.

    Raises:
        BatchError: the bytes are no such request, or it has more fields, or longer shapes, than there may be.
    """
    try:
        model_id, fields, packed = _scan(data)
        return model_id.decode(), len(data) + _BYTES_A_FIELD * fields + _BYTES_A_PACKED * packed
    except (DecodeError, IndexError, UnicodeDecodeError):
        raise _no_request() from None


def parse_request(data: bytes) -> Any:
    """Returns the ForwardBackwardRequest of bytes that `scan_request` has taken.

    Raises:
        BatchError: the bytes are no such request.
    """
    message = ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise _no_request() from None
    return message


def _no_request() -> BatchError:
    problem = "the body is no ForwardBackwardRequest"
    return BatchError(problem, field="body", hint="send what the client's package sends")


def _nested(descriptor: Any) -> dict[int, Any]:
    """Returns what is in a message's fields by their numbers: the same of a message, `_PACKED` for numbers.

    A number that has a length on the wire is a packed field's.
    """
    inner: dict[int, Any] = {}
    for one in descriptor.fields:
        if one.message_type is not None:
            inner[one.number] = _nested(one.message_type)
        elif one.cpp_type != one.CPPTYPE_STRING:
            inner[one.number] = _PACKED
    return inner


_REQUEST = _nested(ForwardBackwardRequest.DESCRIPTOR)
_MODEL_ID = ForwardBackwardRequest.DESCRIPTOR.fields_by_name["model_id"].number


def _scan(data: bytes) -> tuple[bytes, int, int]:
    """Returns a request's model_id, its number of fields with those of the messages in it, and of packed numbers.

    Raises:
        BatchError: there are too many. DecodeError or IndexError: these bytes are no request.
    """
    model_id, fields, packed, at, end, nested = b"", 0, 0, 0, len(data), _REQUEST
    outer: list[tuple[int, dict[int, Any]]] = []  # ends of the messages around this one, and their `nested`
    while at < end or outer:
        if at >= end:
            end, nested = outer.pop()
            continue
        fields += 1
        if fields > _MOST_FIELDS:
            raise BatchError(
                f"the request has more than {_MOST_FIELDS} fields", field="data", hint="send fewer datums at once"
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
        else:  # a group, which no message here has
            raise DecodeError
    return model_id, fields, packed


def _count_packed(data: bytes) -> int:
    """Returns how many varints a packed field has; BatchError where they are too many."""
    count = len(data.translate(None, _GO_ON))
    if count > _MOST_PACKED:
        raise BatchError(
            f"a tensor's shape has {count} dimensions", field="data", hint="send tensors of one or two dimensions"
        )
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at this byte, and where the next field begins."""
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
