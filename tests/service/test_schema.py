"""The messages are those of the client that the service is for."""

from __future__ import annotations

from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2

from actors.service import schema


def test_the_messages_are_those_of_the_clients_own_module() -> None:
    theirs = descriptor_pb2.FileDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.CopyToProto(theirs)
    ours = schema.described()
    assert ours.package == theirs.package and ours.syntax == theirs.syntax
    for kind in ("message_type", "enum_type"):
        found = {one.name: plain(one) for one in getattr(ours, kind)}
        expected = {one.name: plain(one) for one in getattr(theirs, kind)}
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert found[name] == text, name


def plain(message: object) -> str:
    """Without the names that generators give for JSON."""
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    for inner in [copy, *getattr(copy, "nested_type", [])]:
        for field in getattr(inner, "field", []):
            field.ClearField("json_name")
            if not field.proto3_optional:
                field.ClearField("proto3_optional")
    return str(copy)
