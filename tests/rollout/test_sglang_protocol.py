"""The SGLang engine asks a server for what SGLang can do, believes no answer unseen, and has typed errors for the rest.

What it shares with the vLLM engine, tests/rollout/test_vllm_protocol.py looks at more closely.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from actors.rollout import server_launch
from actors.rollout.protocol import Request, Sample, TensorInfo
from actors.rollout.sglang_engine import SglangEngine
from actors.rollout.sglang_launch import server_arguments
from actors.workers.weights_folder import write_weights
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, EngineError, StateError, SyncError, WorkerDied
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams, VersionSpan
from tests.support.refusals import refused
from tests.support.sglang_server import Faults, SglangServer
from tests.support.table_server import EMBEDDING, next_logits
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.weight_sender import WeightSender

END = 2
PROMPT = (5, 6, 7)
MOST_TOKENS = 64
EMPTY: dict[str, Any] = {"output_token_logprobs": [], "weight_versions": []}
HALF = "model.norm.weight"  # in bfloat16 where a test asks for it


@pytest.fixture(scope="module")
def tensors(example: Path) -> dict[str, torch.Tensor]:
    """Of the example's model, whose head is its embedding; that is large enough for some tokens to be likelier."""
    found = safetensors.torch.load_file(example / "model" / "model.safetensors")
    return {**found, EMBEDDING: found[EMBEDDING] * 8}


@pytest.fixture(scope="module")
def shared(make_config: Any) -> Iterator[tuple[SglangServer, SglangEngine]]:
    tokenizer_only = SglangEngine(settings(make_config, "http://127.0.0.1:1"), 0)
    server = SglangServer("qwen3", lambda tokens: tokenizer_only.decode([tokens])[0])
    engine = SglangEngine(settings(make_config, server.url), 0)
    yield server, engine
    engine.stop()
    server.close()


@pytest.fixture
def server(shared: tuple[SglangServer, SglangEngine]) -> SglangServer:
    """A server without faults."""
    shared[0].faults = Faults()
    return shared[0]


@pytest.fixture
def engine(shared: tuple[SglangServer, SglangEngine], server: SglangServer) -> SglangEngine:
    """An engine that speaks to it."""
    return shared[1]


@pytest.fixture(scope="module")
def one_sender(shared: tuple[SglangServer, SglangEngine], tensors: dict[str, torch.Tensor]) -> Iterator[WeightSender]:
    sender = WeightSender({name: tensor.clone() for name, tensor in tensors.items()}, bucket_bytes=2**19)
    sender.join(shared[1])
    yield sender
    sender.leave()


@pytest.fixture
def sender(one_sender: WeightSender, engine: SglangEngine) -> WeightSender:
    """What the engine has the weights of, in version 0."""
    one_sender.send(engine, 0)
    return one_sender


def settings(make_config: Any, url: str, **cluster: float) -> RunConfig:
    limits = {"call_timeout_s": 60.0, "sync_timeout_s": 30.0, **cluster}
    config: RunConfig = make_config(rollout={"engine": "sglang", "engines": 1, "engine_urls": [url]}, cluster=limits)
    return config


def params(max_new_tokens: int = 6, temperature: float = 0.8, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature, **{"end_token_ids": frozenset([END]), "seed": (3,), **others})


def drawn(engine: SglangEngine, *requests: Request) -> dict[tuple[int, int], Sample]:
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


# ---------------------------------------------------------------------- who the server is


def test_an_engine_says_what_its_server_is_and_of_what_kind_its_group(
    engine: SglangEngine, tensors: dict[str, torch.Tensor]
) -> None:
    info = engine.info()
    assert info.name == "sglang 0.5.23" and info.dtype == "float32" and info.max_tokens == MOST_TOKENS
    assert info.vocab_size == len(tensors[EMBEDDING]) and info.transports == ("broadcast", "disk")
    assert (info.processes, info.group) == (1, "torch")


def test_each_worker_of_a_server_is_a_member_of_the_group(server: SglangServer, make_config: Any) -> None:
    server.faults = Faults(server_info={"tp_size": 4, "version": "0.5.31.post1"})
    info = SglangEngine(settings(make_config, server.url), 0).info()
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
        SglangEngine(settings(make_config, server.url), 0).info()


def test_a_server_that_cannot_be_started_is_refused_with_its_log(make_config: Any, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "engines": 1, "engine_python": "/bin/false"}
    engine = SglangEngine(make_config(rollout=rollout, run={"dir": str(tmp_path)}), 0)
    with refused(EngineError, "rollout.engine_python") as caught:
        engine.info()
    assert str(tmp_path / "engine_logs" / "sglang_0.log") in str(caught.value)
    engine.stop()


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.7, 1.0, 5.0])
def test_log_probs_are_of_the_weights_sent_at_the_temperature(
    engine: SglangEngine, sender: WeightSender, temperature: float
) -> None:
    samples = drawn(engine, Request(PROMPT, 4, params(temperature=temperature)))
    for sample in samples.values():
        expected = model_log_probs(sender.tensors[EMBEDDING], sample.tokens, temperature)
        assert sample.log_probs == pytest.approx(expected, abs=1e-5)
        assert sample.versions == (VersionSpan(0, 0, len(sample.tokens)),)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] == END else "length")
        assert sample.text == engine.decode([sample.tokens])[0]


def test_greedy_samples_are_the_likeliest_tokens_after_each_update(engine: SglangEngine, sender: WeightSender) -> None:
    for version in (1, 2):
        sender.change(version)
        sender.send(engine, version)
        asked = params(temperature=0.7, greedy=True, tempered=False, end_token_ids=frozenset())
        (sample,) = drawn(engine, Request(PROMPT, 1, asked)).values()
        embedding, last = sender.tensors[EMBEDDING], PROMPT[-1]
        for token in sample.tokens:
            assert token == int(next_logits(embedding, last).argmax())
            last = token
        assert sample.log_probs == pytest.approx(model_log_probs(embedding, sample.tokens, 1.0), abs=1e-5)
        assert sample.versions == (VersionSpan(version, 0, 6),)


def test_samples_have_seeds_of_their_own(engine: SglangEngine, sender: WeightSender, server: SglangServer) -> None:
    before = len(server.asked)
    drawn(engine, Request(PROMPT, 3, params()), Request(PROMPT, 2, params(seed=(4,))))
    assert len({one["sampling_params"]["sampling_seed"] for one in server.asked[before:]}) == 5


def test_end_tokens_end_samples_and_those_of_the_servers_files_do_not(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
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


def test_stop_texts_end_samples_and_belong_to_them(engine: SglangEngine, sender: WeightSender) -> None:
    (whole,) = drawn(engine, Request(PROMPT, 1, params(max_new_tokens=20, end_token_ids=frozenset()))).values()
    stop = engine.decode([whole.tokens[:8]])[0][-2:]
    asked = params(max_new_tokens=20, end_token_ids=frozenset(), stop=(stop,))
    (stopped,) = drawn(engine, Request(PROMPT, 1, asked)).values()
    assert stopped.finish_reason == "stop" and stop in stopped.text
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert stop not in engine.decode([stopped.tokens[:-1]])[0]


@pytest.mark.parametrize(
    ("asked", "kind", "field", "values"),
    [
        (params(temperature=0.7, tempered=False), EngineError, "rollout.temperature", [0.7, "SGLang"]),
        (params(temperature=0.7, greedy=True), EngineError, "rollout.temperature", [0.7, "SGLang"]),
        (params(temperature=1e-7), EngineError, "rollout.temperature", [1e-7, 1e-6]),
        (params(max_new_tokens=62), BatchError, "max_new_tokens", [62, MOST_TOKENS]),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_is_asked(
    engine: SglangEngine, sender: WeightSender, server: SglangServer, asked: Any, kind: Any, field: str, values: Any
) -> None:
    before = len(server.asked)
    with refused(kind, field, *values):
        drawn(engine, Request(PROMPT, 1, params()), Request(PROMPT, 1, asked))
    assert len(server.asked) == before


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
    engine: SglangEngine, sender: WeightSender, server: SglangServer, faults: Faults, value: object
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
    engine: SglangEngine, sender: WeightSender, server: SglangServer, meta_info: dict[str, Any]
) -> None:
    server.faults = Faults(answer={"output_ids": [3]}, meta_info=meta_info)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_a_cut_connection_is_a_server_that_died(
    engine: SglangEngine, sender: WeightSender, server: SglangServer, make_config: Any
) -> None:
    other = SglangEngine(settings(make_config, server.url), 0)
    sender.join(other)
    sender.send(other, 0)
    server.faults = Faults(is_gone=True)
    with refused(WorkerDied, "rollout.engine_urls", server.url):
        drawn(other, Request(PROMPT, 1, params()))
    server.faults = Faults()
    other.stop()
    sender.join(engine)


def test_aborted_samples_end_as_they_are(engine: SglangEngine, sender: WeightSender, server: SglangServer) -> None:
    server.faults = Faults(token_s=0.05)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 3, params(60, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 3)
        time.sleep(0.2)
        engine.abort()
        samples = running.result(timeout=PATIENCE_S)
    assert {sample.finish_reason for sample in samples.values()} == {"abort"}
    assert all(0 < len(sample.tokens) == len(sample.log_probs) < 60 for sample in samples.values())


def test_what_nobody_waits_for_is_aborted_and_the_rest_is_not(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    server.faults = Faults(token_s=0.05)
    with ThreadPoolExecutor(1) as side:
        kept = side.submit(drawn, engine, Request(PROMPT, 1, params(40, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 1)
        stream = engine.generate(
            [Request(PROMPT, 1, params(1)), Request(PROMPT, 5, params(60, end_token_ids=frozenset()))]
        )
        assert len(next(stream)) == 1 and wait_until(lambda: server.running == 6)
        stream.close()
        assert wait_until(lambda: server.running == 1, 2.0), "60 tokens would have taken 3 s"
        assert len(kept.result(timeout=PATIENCE_S)[0, 0].tokens) == 40


# ---------------------------------------------------------------------- weights


def test_samples_go_on_across_an_update_with_the_version_of_each_token(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    old = sender.tensors[EMBEDDING].clone()
    server.faults = Faults(token_s=0.03)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 4, params(30, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 4)
        time.sleep(0.2)
        sender.change(1)
        sender.send(engine, 1)
        samples = running.result(timeout=PATIENCE_S)
    for sample in samples.values():
        first, second = sample.versions
        assert (first.version, second.version, second.end) == (0, 1, 30) and 0 < first.end == second.start
        before = model_log_probs(old, sample.tokens, 0.8)[: first.end]
        after = model_log_probs(sender.tensors[EMBEDDING], sample.tokens, 0.8)[first.end :]
        assert sample.log_probs == pytest.approx([*before, *after], abs=1e-5)
    assert {len(one["input_ids"]) for one in server.asked[-4:]} == {
        len(PROMPT) + sample.versions[0].end for sample in samples.values()
    }, "the context of what goes on is the prompt and what was drawn"


def test_the_server_is_told_what_its_routes_are_for(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
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
    engine: SglangEngine, sender: WeightSender, server: SglangServer
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


def test_tensors_of_another_model_are_refused_and_change_nothing(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    before = len(server.calls)
    with refused(SyncError, "update_weights", HALF, (7,)):
        engine.begin(1, {**sender.manifest, HALF: (7,)})
    with refused(SyncError, "update_weights", "model.extra"):  # of a name that it does not know SGLang only warns
        engine.begin(1, {**sender.manifest, "model.extra": (7,)})
    assert len(server.calls) == before
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 0


def test_weights_come_as_a_folder_too(
    sender: WeightSender, server: SglangServer, make_config: Any, tmp_path: Path
) -> None:
    config = settings(make_config, server.url)
    rollout = config.rollout.model_copy(update={"weight_transport": "disk"})
    engine = SglangEngine(config.model_copy(update={"rollout": rollout}), 0)
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


@pytest.mark.parametrize("failing", [0, 2])
def test_after_an_update_that_failed_nothing_is_sampled_until_a_whole_one(
    engine: SglangEngine, sender: WeightSender, server: SglangServer, failing: int
) -> None:
    server.faults = Faults(failing_bucket=failing)
    with refused(SyncError, "update_weights", 400):
        sender.send(engine, 1)
    server.faults = Faults()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    with refused(SyncError, "update_weights", 1):
        engine.commit(1)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_samples_across_an_update_that_fails_end_with_an_error(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    server.faults = Faults(token_s=0.05, failing_bucket=0)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 3, params(60, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 3)
        with refused(SyncError, "update_weights"):
            sender.send(engine, 1)
        with refused(StateError, "update_weights"):
            running.result(timeout=PATIENCE_S)
    server.faults = Faults()
    assert wait_until(lambda: server.running == 0)


def test_an_update_whose_sender_goes_in_the_middle_gives_way_to_the_next(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
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


def test_an_update_that_nobody_ended_gives_way_to_the_next(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    engine.begin(1, sender.manifest)
    sender.broadcast(engine, next(sender.buckets()))
    with refused(SyncError, "update_weights", 1, len(sender.manifest) - len(next(sender.buckets()))):
        engine.commit(1)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_a_server_with_another_version_after_commit_is_refused(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    server.faults = Faults(weight_version="41")
    with refused(SyncError, "update_weights", "'41'", 1):
        sender.send(engine, 1)
    server.faults = Faults()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_another_engine_at_the_same_server_joins_and_takes_over(
    engine: SglangEngine, sender: WeightSender, server: SglangServer, make_config: Any
) -> None:
    other = SglangEngine(settings(make_config, server.url), 0)
    sender.join(other)
    sender.send(other, 1)
    assert drawn(other, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 1
    other.stop()
    sender.join(engine)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_an_engine_that_slept_has_no_weights_until_it_is_sent_some(engine: SglangEngine, sender: WeightSender) -> None:
    engine.sleep()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    engine.wake_up()
    sender.send(engine, 1)
    assert drawn(engine, Request(PROMPT, 1, params()))


def test_an_engine_takes_its_cache_when_the_weights_are_there(
    engine: SglangEngine, sender: WeightSender, server: SglangServer
) -> None:
    for _ in range(2):
        engine.sleep()
        assert server.asleep == {"weights", "kv_cache"} and not server.tensors
        with refused(StateError, "update_weights", "weights"):
            sender.send(engine, 1)
        engine.wake_up(("weights",))  # and to sleep again, as when the sender is lost now
    engine.wake_up(("weights",))
    assert server.asleep == {"kv_cache"}
    sender.send(engine, 2)
    with refused(StateError, "update_weights", "kv_cache"):
        drawn(engine, Request(PROMPT, 1, params()))
    for _ in range(2):
        engine.wake_up()
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_a_server_in_the_place_of_a_rank_can_free_its_gpu(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, has_gpu, placement in product(("cuda", "cpu"), (True, False), ("own", "colocated")):
        monkeypatch.setattr(server_launch, "has_nvidia_driver", lambda has_gpu=has_gpu: has_gpu)
        settings = {"engine": "sglang", "engine_python": "python", "placement": placement, "engines": 1}
        config = make_config(mesh={"device": device}, rollout=settings)
        given = server_arguments(config, read_model_folder(config.model.path))
        is_needed = (device, has_gpu, placement) == ("cuda", True, "colocated")
        assert ("--enable-memory-saver" in given) is is_needed
