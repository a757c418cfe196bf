"""The vLLM engine asks a server for what vLLM can do, believes no answer unseen, and has typed errors for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Request
from actors.engines.served import ServedEngine
from actors.workers.weights_folder import write_weights
from slimefsdp.errors import EngineError, StateError, SyncError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.weight_sync.packed_bucket import digest_of, layout_of, pack
from slimefsdp.weight_sync.shared_buffer import SharedBuffer
from tests.support.refusals import refused
from tests.support.served import MOST_TOKENS, PROMPT, VLLM, Kind, drawn, model_log_probs, params
from tests.support.table_server import EMBEDDING
from tests.support.vllm_server import Faults, ProtocolServer
from tests.support.waiting import wait_until
from tests.support.weight_sender import WeightSender

HEAD = "lm_head.weight"
EMPTY = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": None}


@pytest.fixture(scope="module")
def kind() -> Kind:
    return VLLM


# ---------------------------------------------------------------------- who the server is


def test_an_engine_says_what_its_server_is(engine: ServedEngine, tensors: dict[str, torch.Tensor]) -> None:
    info = engine.info()
    assert info.name == "vllm 0.32.0" and info.dtype == "float32" and info.max_tokens == MOST_TOKENS
    assert (
        info.vocab_size == len(tensors[EMBEDDING])
        and info.transports == ("broadcast", "disk", "ipc")
        and info.processes == 1
    )


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        (Faults(version="0.31.2"), ["0.31.2", "0.32"]),
        (Faults(has_dev_mode=False), ["VLLM_SERVER_DEV_MODE=1"]),
        (Faults(has_plugin=False), ["slimefsdp_worker"]),
        (Faults(has_scale_out=False), [403]),
        (Faults(said={"protocol": 7}), [7, 4]),
        (Faults(said={"backend": "nccl"}), ["nccl", "slimefsdp"]),
        (Faults(said={"logprobs_mode": "raw_logprobs"}), ["raw_logprobs", "processed_logprobs"]),
        (Faults(said={"dtype": "bfloat16"}), ["bfloat16", "float32"]),
        (Faults(said={"vocab_size": 99}), [99]),
        (Faults(said={"model_type": "llama"}), ["llama", "qwen3"]),
    ],
)
def test_a_server_of_no_use_is_refused(
    server: ProtocolServer, make_config: Any, faults: Faults, named: list[object]
) -> None:
    server.faults = faults
    with refused(EngineError, "rollout.engine_urls", *named):
        ServedEngine(VLLM.config(make_config, server.url), 0).info()


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("faults", "value"),
    [
        (Faults(choice={"token_ids": [3] * 9, "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}] * 9}}), 9),
        (Faults(choice={"token_ids": [3, 4]}), 2),
        (Faults(choice={"token_ids": [999], "logprobs": {"content": [{"token_id": 999, "logprob": -1.0}]}}), 999),
        (Faults(choice={"logprobs": None}), "TypeError"),
        (Faults(choice={"weight_versions": [{"version": "5", "start": 0, "end": 6}]}), "'5'"),
        (Faults(choice={"weight_versions": None}), 0),
        (Faults(choice={"finish_reason": "repetition"}), "repetition"),
        (Faults(choice={"token_ids": [3], "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}]}}), 1),
        (Faults(choice={**EMPTY, "finish_reason": "stop"}), 0),
        (Faults(choice={**EMPTY, "finish_reason": "length"}), 0),
        (Faults(log_prob=float("nan")), "nan"),
        (Faults(log_prob=float("-inf")), "inf"),
        (Faults(log_prob=0.5), 0.5),
        (Faults(aborts_all=True), "abort"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer, faults: Faults, value: object
) -> None:
    server.faults = faults
    with refused(EngineError, "engine", value):
        drawn(engine, Request(PROMPT, 2, params(end_token_ids=frozenset())))
    server.faults = Faults()
    assert drawn(engine, Request(PROMPT, 2, params()))


def test_weights_that_are_not_finite_are_told_by_their_mark(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    server.faults = Faults(log_prob=-9999.0)  # what vLLM writes for NaN
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_what_nobody_waits_for_any_more_is_aborted_also_where_it_was_on_its_way(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    server.faults, before = Faults(token_s=0.05, longer_start_after_s=1.0), len(server.asked)
    stream = engine.generate([Request(PROMPT, 1, params(1)), Request(PROMPT, 5, params(60, end_token_ids=frozenset()))])
    assert len(next(stream)) == 1
    assert wait_until(lambda: len(server.asked) > before + 1)
    stream.close()
    longer = [one for one in server.asked[before:] if one["sampling_params"]["max_tokens"] == 60]
    assert longer and {f"generate-tokens-{one['request_id']}" for one in longer} <= server.aborted


# ---------------------------------------------------------------------- weights


def test_a_head_that_is_the_embedding_travels_and_is_left_out(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    tensors, sender.tensors = sender.tensors, {**sender.tensors, HEAD: sender.tensors[EMBEDDING].clone()}
    try:
        sender.send(engine, 1)
    finally:
        sender.tensors = tensors
    assert HEAD not in server.tensors and set(server.tensors) == set(tensors)
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in tensors.items())


def test_weights_come_in_shared_memory_or_as_a_folder_as_they_do_by_broadcast(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer, tmp_path: Path
) -> None:
    sender.change(1)
    engine.begin(1, sender.manifest)
    buffer = SharedBuffer(2**22, torch.device("cpu"))
    for bucket in sender.buckets():
        flat = pack([tensor for _, tensor in bucket], into=buffer.data)
        engine.receive_ipc(buffer.handle, layout_of(bucket), digest_of(flat))
    engine.commit(1)
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in sender.tensors.items())

    sender.change(2)
    source = read_model_folder(engine.config.model.path)
    write_weights(tmp_path / "weights", sender.manifest, sender.tensors.items(), source, torch.float32)
    engine.begin(2, sender.manifest)
    engine.receive_disk(str(tmp_path / "weights"))
    engine.commit(2)
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in sender.tensors.items())
    sample = drawn(engine, Request(PROMPT, 1, params()))[0, 0]
    expected = model_log_probs(sender.tensors[EMBEDDING], sample.tokens, 0.8)
    assert sample.log_probs == pytest.approx(expected, abs=1e-5) and sample.versions[0].version == 2

    (tmp_path / "weights" / "model.safetensors").write_bytes(b"")
    engine.begin(3, sender.manifest)
    with refused(SyncError, "rollout.weight_transport", str(tmp_path)):
        engine.receive_disk(str(tmp_path / "weights"))
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_a_bucket_that_was_altered_is_an_error_and_is_not_committed(engine: ServedEngine, sender: WeightSender) -> None:
    bucket = next(sender.buckets())
    buffer = SharedBuffer(2**22, torch.device("cpu"))
    digest = digest_of(pack([tensor for _, tensor in bucket], into=buffer.data))
    buffer.data[9] ^= 1
    engine.begin(1, sender.manifest)
    with refused(SyncError, "update_weights", "altered on the way"):
        engine.receive_ipc(buffer.handle, layout_of(bucket), digest)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_a_group_that_nobody_else_joins_is_an_error(engine: ServedEngine, sender: WeightSender) -> None:
    try:
        with refused(SyncError, "update_weights", "BroadcastError"):
            engine.join("127.0.0.1", 1, 1, 2, "gloo", 0.5)
    finally:
        sender.join(engine)
