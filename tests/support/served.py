"""The engines beside servers, each with a server of the tests that speaks as the real one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from actors.engines.protocol import Request, Sample
from actors.engines.served import ServedEngine
from actors.engines.sglang import SglangDialect
from actors.engines.vllm import VllmDialect
from slimefsdp.config import RunConfig
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams
from tests.support import sglang_server, vllm_server
from tests.support.table_server import next_logits

END = 2
PROMPT = (5, 6, 7)
MOST_TOKENS = 64


@dataclass(frozen=True)
class Kind:
    """An engine and its server.

    Args:
        server: makes one, of a vocabulary size and a function that decodes token ids.
        context: the field of a request's JSON that has the token ids before what is drawn.
        refusal: the status of a bucket that is not taken.
        frees_gpu: the argument with which a server is started whose GPU is to be free while it sleeps.
        spreads: that of the number of its GPUs.
        on_cpu: that of a server without a GPU.
        resumes: the route on which a paused server goes on.
    """

    name: str
    dialect: Any
    faults: Any
    server: Callable[[int, Any], Any]
    context: str
    refusal: int
    frees_gpu: str
    spreads: str
    on_cpu: str
    resumes: str

    def engine(self, config: RunConfig, index: int) -> ServedEngine:
        return ServedEngine(config, index)

    def server_arguments(self, config: RunConfig) -> list[str]:
        arguments: list[str] = self.dialect(config, read_model_folder(config.model.path)).arguments()
        return arguments

    def config(self, make_config: Any, url: str, **cluster: float) -> RunConfig:
        limits = {"call_timeout_s": 60.0, "sync_timeout_s": 30.0, **cluster}
        rollout = {"engine": self.name, "engines": 1, "engine_urls": [url]}
        config: RunConfig = make_config(rollout=rollout, cluster=limits)
        return config


VLLM = Kind(
    "vllm",
    VllmDialect,
    vllm_server.Faults,
    lambda vocab_size, decode: vllm_server.ProtocolServer(vocab_size, "qwen3", decode),
    "token_ids",
    500,
    "--enable-sleep-mode",
    "--tensor-parallel-size",
    "--enforce-eager",
    "/resume",
)
SGLANG = Kind(
    "sglang",
    SglangDialect,
    sglang_server.Faults,
    lambda _, decode: sglang_server.SglangServer("qwen3", decode),
    "input_ids",
    400,
    "--enable-memory-saver",
    "--tp-size",
    "--device",
    "/continue_generation",
)


def params(max_new_tokens: int = 6, temperature: float = 0.8, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature, **{"end_token_ids": frozenset([END]), "seed": (3,), **others})


def drawn(engine: Any, *requests: Request) -> dict[tuple[int, int], Sample]:
    """All samples of a call, by request and number."""
    samples = [sample for some in engine.generate(requests) for sample in some]
    found = {(sample.request, sample.number): sample for sample in samples}
    assert len(found) == len(samples) == sum(request.samples for request in requests)
    return found


def model_log_probs(embedding: torch.Tensor, tokens: list[int], temperature: float) -> list[float]:
    """Of each of these tokens after PROMPT."""
    before = [PROMPT[-1], *tokens[:-1]]
    return [
        float((next_logits(embedding, last) / temperature).log_softmax(-1)[token])
        for last, token in zip(before, tokens, strict=True)
    ]
