"""The vLLM engine asks a server for what vLLM can do, believes no answer unseen, and has typed errors for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from actors.rollout import server_launch
from actors.rollout.protocol import Request, Sample, TensorInfo
from actors.rollout.vllm_engine import VllmEngine
from actors.rollout.vllm_launch import server_arguments
from actors.workers.weights_folder import write_weights
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, EngineError, StateError, SyncError, WorkerDied, WorkerHung
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams, VersionSpan
from slimefsdp.weight_sync.packed_bucket import digest_of, layout_of, pack
from slimefsdp.weight_sync.shared_buffer import SharedBuffer
from tests.support.refusals import refused
from tests.support.table_server import EMBEDDING, next_logits
from tests.support.vllm_server import Faults, ProtocolServer
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.weight_sender import WeightSender

HEAD = "lm_head.weight"
END = 2
PROMPT = (5, 6, 7)
MOST_TOKENS = 64
EMPTY = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": None}
Asked = Callable[..., Any]


@pytest.fixture(scope="module")
def tensors(example: Path) -> dict[str, torch.Tensor]:
    """Of the example's model, whose head is its embedding; that is large enough for some tokens to be likelier."""
    found = safetensors.torch.load_file(example / "model" / "model.safetensors")
    return {**found, EMBEDDING: found[EMBEDDING] * 8}


@pytest.fixture(scope="module")
def shared(make_config: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[ProtocolServer, VllmEngine]]:
    config = settings(make_config, "http://127.0.0.1:1")
    tokenizer_only = VllmEngine(config, 0)
    server = ProtocolServer(len(tensors[EMBEDDING]), "qwen3", lambda tokens: tokenizer_only.decode([tokens])[0])
    engine = VllmEngine(settings(make_config, server.url), 0)
    engine.info()
    yield server, engine
    engine.stop()
    server.close()


@pytest.fixture
def server(shared: tuple[ProtocolServer, VllmEngine]) -> ProtocolServer:
    """A server without faults."""
    shared[0].faults = Faults()
    return shared[0]


@pytest.fixture
def engine(shared: tuple[ProtocolServer, VllmEngine], server: ProtocolServer) -> VllmEngine:
    """An engine that speaks to it."""
    return shared[1]


@pytest.fixture(scope="module")
def one_sender(shared: tuple[ProtocolServer, VllmEngine], tensors: dict[str, torch.Tensor]) -> Iterator[WeightSender]:
    sender = WeightSender({name: tensor.clone() for name, tensor in tensors.items()}, bucket_bytes=2**19)
    sender.join(shared[1])
    yield sender
    sender.leave()


@pytest.fixture
def sender(one_sender: WeightSender, engine: VllmEngine) -> WeightSender:
    """What the engine has the weights of, in version 0."""
    one_sender.send(engine, 0)
    return one_sender


def settings(make_config: Any, url: str, **cluster: float) -> RunConfig:
    limits = {"call_timeout_s": 60.0, "sync_timeout_s": 30.0, **cluster}
    config: RunConfig = make_config(rollout={"engine": "vllm", "engines": 1, "engine_urls": [url]}, cluster=limits)
    return config


def params(max_new_tokens: int = 6, temperature: float = 0.8, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature, **{"end_token_ids": frozenset([END]), "seed": (3,), **others})


def drawn(engine: VllmEngine, *requests: Request) -> dict[tuple[int, int], Sample]:
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


def test_an_engine_says_what_its_server_is(engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> None:
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
        (Faults(said={"protocol": 7}), [7, 2]),
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
        VllmEngine(settings(make_config, server.url), 0).info()


def test_a_url_without_a_server_is_refused_at_once(make_config: Any) -> None:
    url = "http://127.0.0.1:1"
    with refused(EngineError, "rollout.engine_urls", url):
        VllmEngine(settings(make_config, url), 0).info()


def test_a_server_that_cannot_be_started_is_refused_with_its_log(make_config: Any, tmp_path: Path) -> None:
    rollout = {"engine": "vllm", "engines": 1, "engine_python": "/bin/false"}
    engine = VllmEngine(make_config(rollout=rollout, run={"dir": str(tmp_path)}), 0)
    with refused(EngineError, "rollout.engine_python") as caught:
        engine.info()
    assert str(tmp_path / "engine_logs") in str(caught.value)
    engine.stop()


# ---------------------------------------------------------------------- sampling


def test_without_committed_weights_nothing_is_sampled(server: ProtocolServer, make_config: Any) -> None:
    with refused(StateError, "update_weights"):
        drawn(VllmEngine(settings(make_config, server.url), 0), Request(PROMPT, 1, params()))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_of_the_weights_sent_at_the_temperature(
    engine: VllmEngine, sender: WeightSender, temperature: float
) -> None:
    samples = drawn(engine, Request(PROMPT, 4, params(temperature=temperature)))
    for sample in samples.values():
        expected = model_log_probs(sender.tensors[EMBEDDING], sample.tokens, temperature)
        assert sample.log_probs == pytest.approx(expected, abs=1e-5)
        assert sample.versions == (VersionSpan(0, 0, len(sample.tokens)),)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] == END else "length")
        assert sample.text == engine.decode([sample.tokens])[0]


def test_a_sample_follows_from_its_seed_and_number_alone(engine: VllmEngine, sender: WeightSender) -> None:
    one, other = Request(PROMPT, 3, params(seed=(1, 2))), Request(PROMPT, 2, params(seed=(1, 3)))
    together, alone = drawn(engine, other, one), drawn(engine, one)
    assert [together[1, number].tokens for number in range(3)] == [alone[0, number].tokens for number in range(3)]
    every = [tuple(sample.tokens) for sample in together.values()]
    assert len(set(every)) == len(every), "samples repeat each other"


def test_greedy_samples_are_the_likeliest_tokens(engine: VllmEngine, sender: WeightSender) -> None:
    (sample,) = drawn(engine, Request(PROMPT, 1, params(temperature=0.7, greedy=True, tempered=False))).values()
    embedding, last = sender.tensors[EMBEDDING], PROMPT[-1]
    for token in sample.tokens:
        assert token == int(next_logits(embedding, last).argmax())
        last = token
    assert sample.log_probs == pytest.approx(model_log_probs(embedding, sample.tokens, 1.0), abs=1e-5)


def test_end_tokens_and_stop_texts_end_samples_and_belong_to_them(engine: VllmEngine, sender: WeightSender) -> None:
    (whole,) = drawn(engine, Request(PROMPT, 1, params(max_new_tokens=20, end_token_ids=frozenset()))).values()
    assert whole.finish_reason == "length" and len(whole.tokens) == 20
    place = 4
    ends = frozenset([whole.tokens[place]])
    (ended,) = drawn(engine, Request(PROMPT, 1, params(max_new_tokens=20, end_token_ids=ends))).values()
    assert ended.finish_reason == "stop" and ended.tokens == whole.tokens[: whole.tokens.index(whole.tokens[place]) + 1]
    stop = engine.decode([whole.tokens[:8]])[0][-2:]
    asked = params(max_new_tokens=20, end_token_ids=frozenset(), stop=(stop,))
    (stopped,) = drawn(engine, Request(PROMPT, 1, asked)).values()
    assert stopped.finish_reason == "stop" and stop in stopped.text
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert stop not in engine.decode([stopped.tokens[:-1]])[0]


@pytest.mark.parametrize(
    ("asked", "kind", "field", "values"),
    [
        (params(temperature=0.7, tempered=False), EngineError, "rollout.temperature", [0.7]),
        (params(temperature=0.7, greedy=True), EngineError, "rollout.temperature", [0.7]),
        (params(temperature=2.5), EngineError, "rollout.temperature", [2.5]),
        (params(temperature=0.001), EngineError, "rollout.temperature", [0.001]),
        (params(max_new_tokens=62), BatchError, "max_new_tokens", [62, MOST_TOKENS]),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_is_asked(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer, asked: Any, kind: Any, field: str, values: Any
) -> None:
    before = len(server.asked)
    with refused(kind, field, *values):
        drawn(engine, Request(PROMPT, 1, params()), Request(PROMPT, 1, asked))
    with refused(BatchError, "prompts"):
        drawn(engine, Request((), 1, params()))
    with refused(BatchError, "samples", 0):
        drawn(engine, Request(PROMPT, 0, params()))
    assert len(server.asked) == before


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
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer, faults: Faults, value: object
) -> None:
    server.faults = faults
    with refused(EngineError, "engine", value):
        drawn(engine, Request(PROMPT, 2, params(end_token_ids=frozenset())))
    server.faults = Faults()
    assert drawn(engine, Request(PROMPT, 2, params()))


def test_weights_that_are_not_finite_are_told_by_their_mark(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    server.faults = Faults(log_prob=-9999.0)  # what vLLM writes for NaN
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_a_late_answer_counts_as_hung_and_a_cut_connection_as_died(
    server: ProtocolServer, sender: WeightSender, make_config: Any
) -> None:
    impatient = VllmEngine(settings(make_config, server.url, call_timeout_s=0.5), 0)
    sender.join(impatient)
    sender.send(impatient, 0)
    server.faults = Faults(answer_after_s=1.5)
    with refused(WorkerHung, "cluster.call_timeout_s", 0.5):
        drawn(impatient, Request(PROMPT, 1, params()))
    server.faults = Faults(is_gone=True)
    with refused(WorkerDied, "rollout.engine_urls", server.url):
        drawn(impatient, Request(PROMPT, 1, params()))
    server.faults = Faults()
    impatient.stop()


def test_what_nobody_waits_for_any_more_is_aborted(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    server.faults = Faults(token_s=0.05)
    stream = engine.generate([Request(PROMPT, 1, params(1)), Request(PROMPT, 5, params(60, end_token_ids=frozenset()))])
    assert len(next(stream)) == 1 and wait_until(lambda: server.running == 5)
    stream.close()
    assert wait_until(lambda: server.running == 0, 2.0), "60 tokens would have taken 3 s"


def test_what_nobody_waits_for_any_more_is_aborted_also_where_it_was_on_its_way(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    server.faults, before = Faults(token_s=0.05, longer_start_after_s=1.0), len(server.asked)
    stream = engine.generate([Request(PROMPT, 1, params(1)), Request(PROMPT, 5, params(60, end_token_ids=frozenset()))])
    assert len(next(stream)) == 1
    assert wait_until(lambda: len(server.asked) > before + 1)
    stream.close()
    longer = [one for one in server.asked[before:] if one["sampling_params"]["max_tokens"] == 60]
    assert longer and {f"generate-tokens-{one['request_id']}" for one in longer} <= server.aborted


def test_aborted_samples_end_as_they_are(engine: VllmEngine, sender: WeightSender, server: ProtocolServer) -> None:
    server.faults = Faults(token_s=0.05)
    with ThreadPoolExecutor(1) as side:
        asked = Request(PROMPT, 3, params(60, end_token_ids=frozenset()))
        running = side.submit(drawn, engine, asked)
        assert wait_until(lambda: server.running == 3)
        time.sleep(0.2)
        engine.abort()
        samples = running.result(timeout=PATIENCE_S)
    assert {sample.finish_reason for sample in samples.values()} == {"abort"}
    assert all(0 < len(sample.tokens) == len(sample.log_probs) < 60 for sample in samples.values())
    assert {sample.finish_reason for sample in drawn(engine, Request(PROMPT, 1, params())).values()} != {"abort"}


# ---------------------------------------------------------------------- weights


def test_samples_go_on_across_an_update_with_the_version_of_each_token(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    old = sender.tensors[EMBEDDING].clone()
    asked = Request(PROMPT, 4, params(30, end_token_ids=frozenset()))
    server.faults = Faults(token_s=0.03)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, asked)
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
    assert {len(one["token_ids"]) for one in server.asked[-4:]} == {
        len(PROMPT) + sample.versions[0].end for sample in samples.values()
    }, "the context of what goes on is the prompt and what was drawn"


def test_a_stop_text_that_begins_before_an_update_ends_the_sample_after_it(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    greedy = params(12, temperature=1.0, greedy=True, end_token_ids=frozenset())
    (whole,) = drawn(engine, Request(PROMPT, 1, greedy)).values()
    texts = [engine.decode([whole.tokens[:length]])[0] for length in range(13)]
    stop = texts[12]  # begins with the first token
    assert stop not in texts[:12] and stop
    server.faults = Faults(token_s=0.1)
    with ThreadPoolExecutor(1) as side:
        asked = params(30, temperature=1.0, greedy=True, end_token_ids=frozenset(), stop=(stop,))
        running = side.submit(drawn, engine, Request(PROMPT, 1, asked))
        assert wait_until(lambda: server.running == 1)
        time.sleep(0.3)
        sender.send(engine, 1)  # the same weights
        server.faults = Faults()
        (sample,) = running.result(timeout=PATIENCE_S).values()
    assert sample.tokens == whole.tokens and sample.finish_reason == "stop"
    assert [span.version for span in sample.versions] == [0, 1] and sample.versions[-1].end == 12


def test_calls_during_an_update_wait_for_its_end(engine: VllmEngine, sender: WeightSender) -> None:
    engine.begin(1, sender.manifest)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 2, params()))
        time.sleep(0.3)
        assert not running.done()
        for bucket in sender.buckets():
            sender.broadcast(engine, bucket)
        engine.commit(1)
        assert {sample.versions[0].version for sample in running.result(timeout=PATIENCE_S).values()} == {1}


def test_calls_do_not_wait_for_ever(server: ProtocolServer, sender: WeightSender, make_config: Any) -> None:
    impatient = VllmEngine(settings(make_config, server.url, sync_timeout_s=0.5), 0)
    impatient.begin(1, sender.manifest)
    with refused(StateError, "cluster.sync_timeout_s", 0.5):
        drawn(impatient, Request(PROMPT, 1, params()))
    impatient.stop()


def test_tensors_of_another_model_are_refused_and_change_nothing(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    name = "model.norm.weight"
    before = len(server.calls)
    with refused(SyncError, "update_weights", name, (7,)):
        engine.begin(1, {**sender.manifest, name: (7,)})
    with refused(SyncError, "update_weights", name):
        engine.begin(1, {other: shape for other, shape in sender.manifest.items() if other != name})
    with refused(SyncError, "update_weights", "model.extra"):
        engine.begin(1, {**sender.manifest, "model.extra": (7,)})
    assert len(server.calls) == before
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 0


def test_a_head_that_is_the_embedding_travels_and_is_left_out(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    tensors, sender.tensors = sender.tensors, {**sender.tensors, HEAD: sender.tensors[EMBEDDING].clone()}
    try:
        sender.send(engine, 1)
    finally:
        sender.tensors = tensors
    assert HEAD not in server.tensors and set(server.tensors) == set(tensors)
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("failing", [0, 2])
def test_after_an_update_that_failed_nothing_is_sampled_until_a_whole_one(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer, failing: int
) -> None:
    server.faults = Faults(failing_bucket=failing)
    with refused(SyncError, "update_weights", 500):
        sender.send(engine, 1)
    server.faults = Faults()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    with refused(SyncError, "update_weights", 1):
        engine.commit(1)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_an_update_that_nobody_ended_gives_way_to_the_next(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    engine.begin(1, sender.manifest)
    sender.broadcast(engine, next(sender.buckets()))
    with refused(SyncError, "update_weights", 1, len(sender.manifest) - len(next(sender.buckets()))):
        engine.commit(1)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_a_server_with_another_version_after_commit_is_refused(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
) -> None:
    server.faults = Faults(weight_version="41")
    with refused(SyncError, "update_weights", "'41'", 1):
        sender.send(engine, 1)
    server.faults = Faults()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_calls_out_of_order_are_refused(engine: VllmEngine, sender: WeightSender) -> None:
    with refused(StateError, "update_weights"):
        engine.receive_broadcast([TensorInfo(EMBEDDING, "float32", sender.manifest[EMBEDDING])])
    with refused(SyncError, "rollout.engine"):
        engine.receive([])
    with refused(SyncError, "update_weights", 3):
        engine.commit(3)
    assert drawn(engine, Request(PROMPT, 1, params())), "the weights of before are still there"


def test_weights_come_in_shared_memory_or_as_a_folder_as_they_do_by_broadcast(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer, tmp_path: Path
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


def test_a_bucket_that_was_altered_is_an_error_and_is_not_committed(engine: VllmEngine, sender: WeightSender) -> None:
    bucket = next(sender.buckets())
    buffer = SharedBuffer(2**22, torch.device("cpu"))
    digest = digest_of(pack([tensor for _, tensor in bucket], into=buffer.data))
    buffer.data[9] ^= 1
    engine.begin(1, sender.manifest)
    with refused(SyncError, "update_weights", "altered on the way"):
        engine.receive_ipc(buffer.handle, layout_of(bucket), digest)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_an_engine_that_joins_again_takes_weights_from_the_new_group(engine: VllmEngine, sender: WeightSender) -> None:
    sender.join(engine)
    sender.send(engine, 1)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 1


def test_a_group_that_nobody_else_joins_is_an_error(engine: VllmEngine, sender: WeightSender) -> None:
    try:
        with refused(SyncError, "update_weights", "BroadcastError"):
            engine.join("127.0.0.1", 1, 1, 2, "gloo", 0.5)
    finally:
        sender.join(engine)


def test_an_engine_that_slept_has_no_weights_until_it_is_sent_some(engine: VllmEngine, sender: WeightSender) -> None:
    engine.sleep()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    engine.wake_up()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    sender.send(engine, 1)
    assert drawn(engine, Request(PROMPT, 1, params()))


def test_an_engine_takes_its_cache_when_the_weights_are_there(
    engine: VllmEngine, sender: WeightSender, server: ProtocolServer
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
        settings = {"engine": "vllm", "engine_python": "python", "placement": placement, "engines": 1}
        config = make_config(mesh={"device": device}, rollout=settings)
        given = server_arguments(config, read_model_folder(config.model.path))
        is_needed = (device, has_gpu, placement) == ("cuda", True, "colocated")
        assert ("--enable-sleep-mode" in given) is is_needed


def test_calls_run_beside_each_other(engine: VllmEngine, sender: WeightSender, server: ProtocolServer) -> None:
    server.faults = Faults(token_s=0.05)
    with ThreadPoolExecutor(2) as side:
        long = side.submit(drawn, engine, Request(PROMPT, 1, params(40, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 1)
        short = side.submit(drawn, engine, Request(PROMPT, 2, params(2)))
        assert len(short.result(timeout=PATIENCE_S)) == 2 and not long.done()
        assert len(long.result(timeout=PATIENCE_S)[0, 0].tokens) == 40
