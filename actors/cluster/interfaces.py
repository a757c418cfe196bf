"""Has the processes of a node use the network interface by which the node is in the Ray cluster."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress

import ray

_GLOO = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def use_interface_of_node() -> None:
    """Has gloo in this process listen at this node's address for Ray, unless GLOO_SOCKET_IFNAME is set already.

    By default gloo listens at the address of the machine's host name, which on many machines is one of loopback, so
    that ranks on other nodes could not connect.
    """
    address = ray.util.get_node_ip_address()
    if _GLOO not in os.environ and not ipaddress.ip_address(address).is_loopback:
        name = interface_of(address)
        if name is not None:
            os.environ[_GLOO] = name


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has an IPv4 address; None if none has it."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
            answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
