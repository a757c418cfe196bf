"""Engines whose server is one of the protocol servers, on threads of the engine's own process: for whole runs.

While it sleeps, a server of these has no weights, and refuses them and samples, as real ones cannot be relied on to do.
"""

from __future__ import annotations

from typing import Any

from actors.engines.sglang_engine import SglangEngine
from actors.engines.vllm_engine import VllmEngine
from tests.support.sglang_server import SglangServer
from tests.support.vllm_server import ProtocolServer


class ServingVllm(VllmEngine):
    def _start_server(self) -> tuple[Any, str]:
        folder = self._folder
        server = ProtocolServer(folder.vocab_size, folder.model_type, lambda tokens: self.decode([tokens])[0])
        return None, server.url


class ServingSglang(SglangEngine):
    def _start_server(self) -> tuple[Any, str]:
        return None, SglangServer(self._folder.model_type, lambda tokens: self.decode([tokens])[0]).url
