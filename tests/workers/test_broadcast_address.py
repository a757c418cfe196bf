"""At which of its addresses a machine waits for servers that are to join its broadcasts."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from actors.workers import broadcast_update
from actors.workers.broadcast_update import address_for

NODE = "10.9.8.7"


class Routes(socket.socket):
    """A socket that finds the ways of a machine with two networks."""

    def connect(self, target: Any) -> None:
        if target[0].startswith("203."):
            raise OSError("no route to host")
        self.own = "127.0.0.1" if target[0] == "127.0.0.1" else "192.168.7.1"

    def getsockname(self) -> Any:
        return self.own, 1


@pytest.mark.parametrize(
    ("urls", "address"),
    [
        (None, NODE),
        (["http://127.0.0.1:8000"], NODE),
        (["http://192.168.7.9:8000"], "192.168.7.1"),
        (["http://127.0.0.1:8000", "http://192.168.7.9"], "192.168.7.1"),
        (["http://203.0.113.1:8000"], NODE),
    ],
)
def test_servers_elsewhere_are_waited_for_at_the_address_on_the_way_to_them(
    urls: list[str] | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast_update.socket, "socket", Routes)
    monkeypatch.setattr(broadcast_update.ray.util, "get_node_ip_address", lambda: NODE)
    assert address_for(urls) == address
