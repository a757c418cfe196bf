"""Each dialect asks a server for what it can do, believes no answer unseen, and has typed errors for the rest.

What does not depend on the dialect is in tests/engines/test_served_engine.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Request
from actors.engines.served import ServedEngine
from actors.workers.disk_update import write_weights
from slimefsdp.errors import EngineError, StateError, SyncError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.weight_sync.buckets import SharedBuffer, digest_of, layout_of, pack
from tests.support import sglang_server, vllm_server
from tests.support.refusals import refused
from tests.support.served import END, MOST_TOKENS, PROMPT, SGLANG, VLLM, Kind, drawn, params
from tests.support.sglang_server import SglangServer
from tests.support.table_server import EMBEDDING
from tests.support.vllm_server import ProtocolServer
from tests.support.weight_sender import WeightSender

HEAD = "lm_head.weight"
HALF = "model.norm.weight"  # in bfloat16 where a test asks for it
Vllm, Sglang = vllm_server.Faults, sglang_server.Faults
NOTHING: dict[str, Any] = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": None}
NO_TOKENS: dict[str, Any] = {"output_token_logprobs": [], "weight_versions": []}

# by dialect: what makes a server useless, and what the error says of it
USELESS: dict[str, list[tuple[Any, list[object]]]] = {
    "vllm": [
        (Vllm(version="0.31.2"), ["0.31.2", "0.32"]),
        (Vllm(has_dev_mode=False), ["VLLM_SERVER_DEV_MODE=1"]),
        (Vllm(has_plugin=False), ["slimefsdp_worker"]),
        (Vllm(has_scale_out=False), [403]),
        (Vllm(said={"protocol": 7}), [7, 4]),
        (Vllm(said={"logprobs_mode": "raw_logprobs"}), ["raw_logprobs", "processed_logprobs"]),
        (Vllm(said={"dtype": "bfloat16"}), ["bfloat16", "float32"]),
        (Vllm(said={"vocab_size": 99}), [99]),
        (Vllm(said={"model_type": "llama"}), ["llama", "qwen3"]),
    ],
    "sglang": [
        (Sglang(server_info={"version": "0.5.22"}), ["0.5.22", "0.5.23"]),
        (Sglang(server_info={"version": None}), ["None", "0.5.23"]),
        (Sglang(server_info={"dtype": "auto"}), ["auto", "float32"]),
        (Sglang(server_info={"dp_size": 2}), ["dp_size", 2, 1]),
        (Sglang(server_info={"speculative_algorithm": "EAGLE"}), ["EAGLE"]),
        (Sglang(server_info={"quantization": "fp8"}), ["fp8"]),
        (Sglang(server_info={"preferred_sampling_params": {"top_p": 0.9}}), ["top_p"]),
        (Sglang(model_info={"model_type": "llama"}), ["llama", "qwen3"]),
        (Sglang(model_info={"is_generation": False}), ["is_generation"]),
    ],
}
# by dialect: answers that are not what was asked for, and what the error says of them
ANSWERS: dict[str, list[tuple[Any, object]]] = {
    "vllm": [
        (Vllm(choice={"token_ids": [3] * 9, "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}] * 9}}), 9),
        (Vllm(choice={"token_ids": [3, 4]}), 2),
        (Vllm(choice={"token_ids": [999], "logprobs": {"content": [{"token_id": 999, "logprob": -1.0}]}}), 999),
        (Vllm(choice={"logprobs": None}), "TypeError"),
        (Vllm(choice={"weight_versions": [{"version": "5", "start": 0, "end": 6}]}), "'5'"),
        (Vllm(choice={"finish_reason": "repetition"}), "repetition"),
        (Vllm(choice={**NOTHING, "finish_reason": "stop"}), 0),
        (Vllm(log_prob=float("nan")), "nan"),
        (Vllm(log_prob=0.5), 0.5),
        (Vllm(aborts_all=True), "abort"),
    ],
    "sglang": [
        (Sglang(answer={"output_ids": [3] * 9}, meta_info={"output_token_logprobs": [[-1.0, 3, None]] * 9}), 9),
        (Sglang(answer={"output_ids": [3, 4]}), 2),
        (Sglang(answer={"output_ids": [999]}, meta_info={"output_token_logprobs": [[-1.0, 999, None]]}), 999),
        (Sglang(meta_info={"output_token_logprobs": None}), "TypeError"),
        (Sglang(meta_info={"weight_versions": [{"version": "5", "start": 0, "end": 6}]}), "'5'"),
        (Sglang(meta_info={"finish_reason": {"type": "tool_calls"}}), "tool_calls"),
        (Sglang(answer={"output_ids": []}, meta_info={**NO_TOKENS, "finish_reason": {"type": "length"}}), 0),
        (Sglang(log_prob=float("-inf")), "inf"),
        (Sglang(log_prob=0.5), 0.5),
        (Sglang(aborts_all=True), "abort"),
    ],
}
# by dialect: how a server says that its weights are not finite
NOT_FINITE: dict[str, list[Any]] = {
    "vllm": [Vllm(log_prob=-9999.0)],
    "sglang": [
        Sglang(answer={"output_ids": [3]}, meta_info={"finish_reason": {"type": "stop", "matched": "NaN happened"}}),
        Sglang(answer={"output_ids": [3]}, meta_info={"output_token_logprobs": [[None, 3, None]]}),
    ],
}
INFO = {"vllm": ("vllm 0.32.0", ("broadcast", "disk", "ipc")), "sglang": ("sglang 0.5.23", ("broadcast", "disk"))}


@pytest.fixture(scope="module", params=[VLLM, SGLANG], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


of_vllm = pytest.mark.parametrize("kind", [VLLM], indirect=True, scope="module", ids=["vllm"])
of_sglang = pytest.mark.parametrize("kind", [SGLANG], indirect=True, scope="module", ids=["sglang"])


def test_an_engine_says_what_its_server_is(kind: Kind, engine: ServedEngine, tensors: dict[str, torch.Tensor]) -> None:
    info = engine.info()
    assert (info.name, info.transports) == INFO[kind.name]
    assert info.dtype == "float32" and info.max_tokens == MOST_TOKENS
    assert info.vocab_size == len(tensors[EMBEDDING]) and info.processes == 1


def test_a_server_of_no_use_is_refused(kind: Kind, server: Any, make_config: Any) -> None:
    for faults, named in USELESS[kind.name]:
        server.faults = faults
        with refused(EngineError, "rollout.engine_urls", *named):
            ServedEngine(kind.config(make_config, server.url), 0).info()


def test_an_answer_that_is_not_what_was_asked_for_is_refused(
    kind: Kind, engine: ServedEngine, sender: WeightSender, server: Any
) -> None:
    for faults, value in ANSWERS[kind.name]:
        server.faults = faults
        with refused(EngineError, "engine", value):
            drawn(engine, Request(PROMPT, 2, params(end_token_ids=frozenset())))
    server.faults = kind.faults()
    assert drawn(engine, Request(PROMPT, 2, params()))


def test_weights_that_are_not_finite_are_known_by_what_the_server_says(
    kind: Kind, engine: ServedEngine, sender: WeightSender, server: Any
) -> None:
    for faults in NOT_FINITE[kind.name]:
        server.faults = faults
        with refused(StateError, "update_weights"):
            drawn(engine, Request(PROMPT, 1, params()))


def require_weights(server: Any, sender: WeightSender) -> None:
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in sender.tensors.items())


def test_weights_come_as_a_folder_as_they_do_by_broadcast(
    kind: Kind, sender: WeightSender, server: Any, make_config: Any, tmp_path: Path
) -> None:
    config = kind.config(make_config, server.url)
    rollout = config.rollout.model_copy(update={"weight_transport": "disk"})
    engine = ServedEngine(config.model_copy(update={"rollout": rollout}), 0)
    try:
        sender.change(2)
        source = read_model_folder(config.model.path)
        write_weights(tmp_path / "weights", sender.manifest, sender.tensors.items(), source, torch.float32)
        engine.begin(7, sender.manifest)
        engine.receive_disk(str(tmp_path / "weights"))
        engine.commit(7)
        require_weights(server, sender)
        assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 7
    finally:
        engine.stop()


# ---------------------------------------------------------------------- what one of them alone has


@of_vllm
def test_a_head_that_is_the_embedding_travels_and_is_left_out(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    tensors, sender.tensors = sender.tensors, {**sender.tensors, HEAD: sender.tensors[EMBEDDING].clone()}
    try:
        sender.send(engine, 1)
    finally:
        sender.tensors = tensors
    assert set(server.tensors) == set(tensors)
    require_weights(server, sender)


@of_vllm
def test_weights_come_in_shared_memory_and_an_altered_bucket_is_not_committed(
    engine: ServedEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    sender.change(1)
    buffer = SharedBuffer(2**22, torch.device("cpu"))
    engine.begin(1, sender.manifest)
    for bucket in sender.buckets():
        flat = pack([tensor for _, tensor in bucket], into=buffer.data)
        engine.receive_ipc(buffer.handle, layout_of(bucket), digest_of(flat))
    engine.commit(1)
    require_weights(server, sender)
    bucket = next(sender.buckets())
    digest = digest_of(pack([tensor for _, tensor in bucket], into=buffer.data))
    buffer.data[9] ^= 1
    engine.begin(2, sender.manifest)
    with refused(SyncError, "update_weights", "altered on the way"):
        engine.receive_ipc(buffer.handle, layout_of(bucket), digest)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


@of_sglang
def test_each_worker_of_a_server_is_a_member_of_the_group(server: SglangServer, make_config: Any) -> None:
    server.faults = Sglang(server_info={"tp_size": 4, "version": "0.5.31.post1"})
    info = ServedEngine(SGLANG.config(make_config, server.url), 0).info()
    assert (info.processes, info.group, info.name) == (4, "torch", "sglang 0.5.31.post1")


@of_sglang
def test_end_tokens_end_samples_and_those_of_the_servers_files_do_not(
    engine: ServedEngine, sender: WeightSender, server: SglangServer
) -> None:
    greedy = {"temperature": 1.0, "greedy": True}
    (whole,) = drawn(engine, Request(PROMPT, 1, params(12, end_token_ids=frozenset(), **greedy))).values()
    (often,) = set(whole.tokens)  # what this model thinks likeliest after itself
    (sample,) = drawn(engine, Request(PROMPT, 1, params(12, end_token_ids=frozenset([often]), **greedy))).values()
    assert (sample.tokens, sample.finish_reason) == ([often], "stop")
    server.faults = Sglang(own_ends=frozenset([often]))
    (sample,) = drawn(engine, Request(PROMPT, 1, params(12, end_token_ids=frozenset([END]), **greedy))).values()
    assert (sample.tokens, sample.finish_reason) == (whole.tokens, "length")


@of_sglang
def test_tensors_of_several_dtypes_travel_in_one_bucket(
    engine: ServedEngine, sender: WeightSender, server: SglangServer
) -> None:
    tensors = sender.tensors
    odd = {name: one.bfloat16() if name == HALF else one for name, one in tensors.items()}
    sender.tensors, sender.bucket_bytes = {HALF: odd.pop(HALF), **odd}, 2**30
    try:
        sender.send(engine, 1)
        require_weights(server, sender)
        assert server.tensors[HALF].dtype == torch.bfloat16
    finally:
        sender.tensors, sender.bucket_bytes = tensors, 2**19
