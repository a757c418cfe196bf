"""The SGLang engine asks a server for what SGLang can do, believes no answer unseen, and has typed errors for the rest.

What it shares with the vLLM engine is in tests/engines/test_served_engine.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Request, TensorInfo
from actors.engines.served import ServedEngine
from actors.workers.weights_folder import write_weights
from slimefsdp.errors import EngineError, StateError, SyncError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import VersionSpan
from tests.support.refusals import refused
from tests.support.served import END, MOST_TOKENS, PROMPT, SGLANG, Kind, drawn, params
from tests.support.sglang_server import Faults, SglangServer
from tests.support.table_server import EMBEDDING
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.weight_sender import WeightSender

EMPTY: dict[str, Any] = {"output_token_logprobs": [], "weight_versions": []}
HALF = "model.norm.weight"  # in bfloat16 where a test asks for it


@pytest.fixture(scope="module")
def kind() -> Kind:
    return SGLANG


# ---------------------------------------------------------------------- who the server is


def test_an_engine_says_what_its_server_is_and_of_what_kind_its_group(
    engine: ServedEngine, tensors: dict[str, torch.Tensor]
) -> None:
    info = engine.info()
    assert info.name == "sglang 0.5.23" and info.dtype == "float32" and info.max_tokens == MOST_TOKENS
    assert info.vocab_size == len(tensors[EMBEDDING]) and info.transports == ("broadcast", "disk")
    assert (info.processes, info.group) == (1, "torch")


def test_each_worker_of_a_server_is_a_member_of_the_group(server: SglangServer, make_config: Any) -> None:
    server.faults = Faults(server_info={"tp_size": 4, "version": "0.5.31.post1"})
    info = ServedEngine(SGLANG.config(make_config, server.url), 0).info()
    assert info.processes == 4 and info.name == "sglang 0.5.31.post1"


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        (Faults(server_info={"version": "0.5.22"}), ["0.5.22", "0.5.23"]),
        (Faults(server_info={"version": "0.6.0"}), ["0.6.0", "0.5.23"]),
        (Faults(server_info={"version": None}), ["None", "0.5.23"]),
        (Faults(server_info={"dtype": "auto"}), ["auto", "float32"]),
        (Faults(server_info={"dp_size": 2}), ["dp_size", 2, 1]),
        (Faults(server_info={"pp_size": 2}), ["pp_size", 2, 1]),
        (Faults(server_info={"speculative_algorithm": "EAGLE"}), ["EAGLE"]),
        (Faults(server_info={"quantization": "fp8"}), ["fp8"]),
        (Faults(server_info={"preferred_sampling_params": {"top_p": 0.9}}), ["top_p"]),
        (Faults(server_info={"max_req_input_len": None}), ["max_req_input_len"]),
        (Faults(model_info={"model_type": "llama"}), ["llama", "qwen3"]),
        (Faults(model_info={"is_generation": False}), ["is_generation"]),
    ],
)
def test_a_server_of_no_use_is_refused(
    server: SglangServer, make_config: Any, faults: Faults, named: list[object]
) -> None:
    server.faults = faults
    with refused(EngineError, "rollout.engine_urls", *named):
        ServedEngine(SGLANG.config(make_config, server.url), 0).info()


# ---------------------------------------------------------------------- sampling


def test_end_tokens_end_samples_and_those_of_the_servers_files_do_not(
    engine: ServedEngine, sender: WeightSender, server: SglangServer
) -> None:
    greedy = {"temperature": 1.0, "greedy": True}
    (whole,) = drawn(engine, Request(PROMPT, 1, params(12, end_token_ids=frozenset(), **greedy))).values()
    (often,) = set(whole.tokens)  # what this model thinks likeliest after itself
    (sample,) = drawn(engine, Request(PROMPT, 1, params(12, end_token_ids=frozenset([often]), **greedy))).values()
    assert (sample.tokens, sample.finish_reason) == ([often], "stop")
    server.faults = Faults(own_ends=frozenset([often]))
    for others in (frozenset([END]), frozenset()):
        (sample,) = drawn(engine, Request(PROMPT, 1, params(12, end_token_ids=others, **greedy))).values()
        assert (sample.tokens, sample.finish_reason) == (whole.tokens, "length")
        assert sample.versions == (VersionSpan(0, 0, 12),)


@pytest.mark.parametrize(
    ("faults", "value"),
    [
        (Faults(answer={"output_ids": [3] * 9}, meta_info={"output_token_logprobs": [[-1.0, 3, None]] * 9}), 9),
        (Faults(answer={"output_ids": [3, 4]}), 2),
        (Faults(answer={"output_ids": [999]}, meta_info={"output_token_logprobs": [[-1.0, 999, None]]}), 999),
        (Faults(meta_info={"output_token_logprobs": None}), "TypeError"),
        (Faults(meta_info={"weight_versions": [{"version": "5", "start": 0, "end": 6}]}), "'5'"),
        (Faults(meta_info={"weight_versions": []}), 0),
        (Faults(meta_info={"finish_reason": None}), "TypeError"),
        (Faults(meta_info={"finish_reason": {"type": "tool_calls"}}), "tool_calls"),
        (Faults(meta_info={"finish_reason": {"type": "stop", "matched": 3}}), "stop"),
        (Faults(answer={"output_ids": [3]}, meta_info={"output_token_logprobs": [[-1.0, 3, None]]}), 1),
        (Faults(answer={"output_ids": []}, meta_info={**EMPTY, "finish_reason": {"type": "stop", "matched": 3}}), 0),
        (Faults(answer={"output_ids": []}, meta_info={**EMPTY, "finish_reason": {"type": "length"}}), 0),
        (Faults(log_prob=float("-inf")), "inf"),
        (Faults(log_prob=0.5), 0.5),
        (Faults(aborts_all=True), "abort"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(
    engine: ServedEngine, sender: WeightSender, server: SglangServer, faults: Faults, value: object
) -> None:
    server.faults = faults
    with refused(EngineError, "engine", value):
        drawn(engine, Request(PROMPT, 2, params(end_token_ids=frozenset())))
    server.faults = Faults()
    assert drawn(engine, Request(PROMPT, 2, params()))


@pytest.mark.parametrize(
    "meta_info",
    [
        {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
        {"output_token_logprobs": [[None, 3, None]]},  # SGLang's JSON of NaN
    ],
)
def test_weights_that_are_not_finite_are_told(
    engine: ServedEngine, sender: WeightSender, server: SglangServer, meta_info: dict[str, Any]
) -> None:
    server.faults = Faults(answer={"output_ids": [3]}, meta_info=meta_info)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


# ---------------------------------------------------------------------- weights


def test_the_server_is_told_what_its_routes_are_for(
    engine: ServedEngine, sender: WeightSender, server: SglangServer
) -> None:
    before = len(server.calls)
    sender.send(engine, 1)
    buckets = len(list(sender.buckets()))
    assert buckets > 1 and server.calls[before:] == [
        "/pause_generation",
        "/begin_weight_update",
        *["/update_weights_from_distributed"] * buckets,
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
        "/continue_generation",
        "/model_info",
    ]
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in sender.tensors.items())


def test_tensors_of_several_dtypes_travel_in_one_bucket(
    engine: ServedEngine, sender: WeightSender, server: SglangServer
) -> None:
    tensors = sender.tensors
    odd = {name: one.bfloat16() if name == HALF else one for name, one in tensors.items()}
    sender.tensors, sender.bucket_bytes = {HALF: odd.pop(HALF), **odd}, 2**30
    try:
        sender.send(engine, 1)
        assert all(torch.equal(server.tensors[name], tensor) for name, tensor in sender.tensors.items())
        assert server.tensors[HALF].dtype == torch.bfloat16
    finally:
        sender.tensors, sender.bucket_bytes = tensors, 2**19


def test_weights_come_as_a_folder_too(
    sender: WeightSender, server: SglangServer, make_config: Any, tmp_path: Path
) -> None:
    config = SGLANG.config(make_config, server.url)
    rollout = config.rollout.model_copy(update={"weight_transport": "disk"})
    engine = ServedEngine(config.model_copy(update={"rollout": rollout}), 0)
    try:
        tensors = {name: tensor.clone() + 1 for name, tensor in sender.tensors.items()}
        manifest = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        source = read_model_folder(config.model.path)
        write_weights(tmp_path / "weights", manifest, tensors.items(), source, torch.float32)
        engine.begin(7, manifest)
        engine.receive_disk(str(tmp_path / "weights"))
        engine.commit(7)
        assert all(torch.equal(server.tensors[name], tensor) for name, tensor in tensors.items())
        assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 7
    finally:
        engine.stop()


def test_an_update_whose_sender_goes_in_the_middle_gives_way_to_the_next(
    engine: ServedEngine, sender: WeightSender, server: SglangServer
) -> None:
    engine.begin(1, sender.manifest)
    buckets = sender.buckets()
    sender.broadcast(engine, next(buckets))
    bucket = next(buckets)
    with ThreadPoolExecutor(1) as side:
        infos = [TensorInfo(name, "float32", tuple(one.shape)) for name, one in bucket]
        receiving = side.submit(engine.receive_broadcast, infos)
        assert wait_until(lambda: server.calls[-2:] == ["/update_weights_from_distributed"] * 2)
        sender.leave()
        with refused(SyncError, "update_weights", "Failed to receive weights"):
            receiving.result(timeout=PATIENCE_S)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    sender.join(engine)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2
