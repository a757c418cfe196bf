"""An engine whose server is a protocol server, on threads of the engine's own process: for whole runs.

While it sleeps, the server has no weights, and refuses them and samples, as real ones cannot be relied on to do.
"""

from __future__ import annotations

from typing import Any

from actors.engines.served import ServedEngine
from actors.engines.tokenizer import load_tokenizer
from slimefsdp.config import RunConfig
from slimefsdp.models.hf_folder import read_model_folder
from tests.support.served import VLLM


class ServingVllm(ServedEngine):
    def __init__(self, config: RunConfig, index: int) -> None:
        tokenizer = load_tokenizer(str(config.model.path))
        vocab_size = read_model_folder(config.model.path, with_weights=False).vocab_size
        server: Any = VLLM.server(vocab_size, lambda tokens: tokenizer.decode([*tokens], skip_special_tokens=True))
        urls = {"engine": VLLM.name, "engine_urls": (server.url,) * config.rollout.engines}
        super().__init__(config.model_copy(update={"rollout": config.rollout.model_copy(update=urls)}), index)
