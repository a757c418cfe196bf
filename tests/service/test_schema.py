"""The messages of tinker.proto are those of the client that the service is for."""

from __future__ import annotations

from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2

from actors.service import tinker_pb2


def messages_of(module: object) -> dict[str, str]:
    """Every message and enum of a generated module as text, without the name of the package."""
    descriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    return {
        kind.name: str(kind).replace(f".{descriptor.package}.", ".") for kind in [*file.message_type, *file.enum_type]
    }


def test_the_messages_are_those_of_the_clients_own_module() -> None:
    assert messages_of(tinker_pb2) == messages_of(tinker_public_pb2)
