"""What engines beside a server have in common, whichever server it is; what differs is in the modules of each."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from actors.engines import dialect, served_sampling
from actors.engines.protocol import Request, TensorInfo
from slimefsdp.errors import BatchError, EngineError, StateError, SyncError, WorkerDied, WorkerHung
from slimefsdp.sampling.params import VersionSpan
from tests.support.refusals import refused
from tests.support.served import END, MOST_TOKENS, PROMPT, SGLANG, VLLM, Kind, drawn, model_log_probs, params
from tests.support.table_server import EMBEDDING, next_logits
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.weight_sender import WeightSender


@pytest.fixture(scope="module", params=[VLLM, SGLANG], ids=lambda kind: kind.name)
def kind(request: Any) -> Kind:
    return request.param  # type: ignore[no-any-return]


def test_a_url_without_a_server_is_refused_when_none_comes(
    kind: Kind, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialect, "BACK_S", 0.2)
    url = "http://127.0.0.1:1"
    with refused(EngineError, "rollout.engine_urls", url):
        kind.engine(kind.config(make_config, url), 0).info()


def test_a_server_that_is_on_its_way_back_to_its_url_is_waited_for(kind: Kind, server: Any, make_config: Any) -> None:
    server.faults = kind.faults(is_gone=True)
    engine = kind.engine(kind.config(make_config, server.url), 0)
    with ThreadPoolExecutor(1) as side:
        found = side.submit(engine.info)
        time.sleep(0.3)
        assert not found.done()
        server.faults = kind.faults()
        assert found.result(timeout=PATIENCE_S).processes == 1
    engine.stop()


def test_a_server_that_cannot_be_started_is_refused_with_its_log(kind: Kind, make_config: Any, tmp_path: Path) -> None:
    rollout = {"engine": kind.name, "engines": 1, "engine_python": "/bin/false"}
    engine = kind.engine(make_config(rollout=rollout, run={"dir": str(tmp_path)}), 0)
    with refused(EngineError, "rollout.engine_python") as caught:
        engine.info()
    assert str(tmp_path / "engine_logs") in str(caught.value)
    engine.stop()


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_of_the_weights_sent_at_the_temperature(
    engine: Any, sender: WeightSender, temperature: float
) -> None:
    samples = drawn(engine, Request(PROMPT, 4, params(temperature=temperature)))
    for sample in samples.values():
        expected = model_log_probs(sender.tensors[EMBEDDING], sample.tokens, temperature)
        assert sample.log_probs == pytest.approx(expected, abs=1e-5)
        assert sample.versions == (VersionSpan(0, 0, len(sample.tokens)),)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] == END else "length")
        assert sample.text == engine.decode([sample.tokens])[0]


def test_a_sample_follows_from_its_seed_and_number_alone(engine: Any, sender: WeightSender) -> None:
    one, other = Request(PROMPT, 3, params(seed=(1, 2))), Request(PROMPT, 2, params(seed=(1, 3)))
    together, alone = drawn(engine, other, one), drawn(engine, one)
    assert [together[1, number].tokens for number in range(3)] == [alone[0, number].tokens for number in range(3)]
    every = [tuple(sample.tokens) for sample in together.values()]
    assert len(set(every)) == len(every), "samples repeat each other"


def test_greedy_samples_are_the_likeliest_tokens_after_each_update(engine: Any, sender: WeightSender) -> None:
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


def test_limits_of_a_request_reach_the_server(engine: Any, server: Any, sender: WeightSender) -> None:
    for limits in ({"top_k": 7, "top_p": 0.25, "min_p": 0.125}, {"top_k": -1, "top_p": 0.25, "min_p": 0.0}):
        asked = {name: value for name, value in limits.items() if value != -1}
        drawn(engine, Request(PROMPT, 1, params(max_new_tokens=1, **asked)))
        said = server.asked[-1]["sampling_params"]
        assert {name: said[name] for name in limits} == limits


@pytest.mark.parametrize(
    ("asked", "error", "field", "values"),
    [
        ({"temperature": 0.7, "tempered": False}, EngineError, "rollout.temperature", [0.7]),
        ({"temperature": 0.7, "greedy": True}, EngineError, "rollout.temperature", [0.7]),
        ({"temperature": 1e-7}, EngineError, "rollout.temperature", [1e-7]),
        ({"top_k": 7, "renormalized": False}, EngineError, "top_k", [7]),
        ({"top_p": 0.25, "renormalized": False}, EngineError, "top_p", [0.25]),
        ({"min_p": 0.25, "renormalized": False}, EngineError, "min_p", [0.25]),
        ({"max_new_tokens": 62}, BatchError, "max_new_tokens", [62, MOST_TOKENS]),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_is_asked(
    engine: Any, sender: WeightSender, server: Any, asked: dict[str, Any], error: Any, field: str, values: list[Any]
) -> None:
    before = len(server.asked)
    with refused(error, field, *values):
        drawn(engine, Request(PROMPT, 1, params()), Request(PROMPT, 1, params(**asked)))
    with refused(BatchError, "prompts"):
        drawn(engine, Request((), 1, params()))
    with refused(BatchError, "samples", 0):
        drawn(engine, Request(PROMPT, 0, params()))
    assert len(server.asked) == before


def test_end_tokens_and_stop_texts_end_samples_and_belong_to_them(engine: Any, sender: WeightSender) -> None:
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


def test_a_late_answer_counts_as_hung_and_a_cut_connection_as_died(
    kind: Kind, engine: Any, server: Any, sender: WeightSender, make_config: Any
) -> None:
    impatient = kind.engine(kind.config(make_config, server.url, call_timeout_s=0.5), 0)
    sender.join(impatient)
    sender.send(impatient, 0)
    server.faults = kind.faults(answer_after_s=1.5)
    with refused(WorkerHung, "cluster.call_timeout_s", 0.5):
        drawn(impatient, Request(PROMPT, 1, params()))
    server.faults = kind.faults(is_gone=True)
    with refused(WorkerDied, "rollout.engine_urls", server.url):
        drawn(impatient, Request(PROMPT, 1, params()))
    server.faults = kind.faults()
    impatient.stop()
    sender.join(engine)


def test_a_connection_that_is_cut_is_not_a_server_that_has_ended(
    kind: Kind, engine: Any, server: Any, sender: WeightSender
) -> None:
    asked = Request(PROMPT, 4, params())
    whole = drawn(engine, asked)
    server.faults = kind.faults(cuts=3)
    assert drawn(engine, asked) == whole and server.faults.cuts == 0
    server.faults = kind.faults(cuts=100)
    with refused(WorkerDied, "rollout.engine_urls", server.url):
        drawn(engine, Request(PROMPT, 1, params()))


@pytest.mark.parametrize(("reason", "most"), [("abort", 30), ("length", None)])
def test_a_sample_whose_last_token_is_an_end_has_ended_whatever_the_server_says(
    kind: Kind, engine: Any, server: Any, sender: WeightSender, reason: str, most: int | None
) -> None:
    (whole,) = drawn(engine, Request(PROMPT, 1, params(20, end_token_ids=frozenset()))).values()
    ends = frozenset([whole.tokens[4]])
    length = whole.tokens.index(whole.tokens[4]) + 1
    server.faults = kind.faults(end_reason=reason)
    (ended,) = drawn(engine, Request(PROMPT, 1, params(most or length, end_token_ids=ends))).values()
    assert ended.finish_reason == "stop" and ended.tokens == whole.tokens[:length]


def test_a_long_response_is_progress_as_long_as_the_server_is_there(
    kind: Kind, engine: Any, server: Any, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_sampling, "_ALIVE_EVERY_S", 0.1)
    ticks: list[bool] = []
    monkeypatch.setattr(served_sampling.heartbeat, "tick", lambda: ticks.append(True))
    server.faults = kind.faults(answer_after_s=1.0)
    drawn(engine, Request(PROMPT, 1, params(1)))
    assert len(ticks) > 2


def test_what_nobody_waits_for_is_aborted_and_the_rest_is_not(
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    server.faults = kind.faults(token_s=0.05)
    with ThreadPoolExecutor(1) as side:
        kept = side.submit(drawn, engine, Request(PROMPT, 1, params(40, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 1)
        stream = engine.generate(
            [Request(PROMPT, 1, params(1)), Request(PROMPT, 5, params(60, end_token_ids=frozenset()))]
        )
        assert len(next(stream)) == 1 and wait_until(lambda: server.running == 6)
        before = set(server.aborted)
        stream.close()
        assert len(server.aborted - before) == 5 and wait_until(lambda: server.running == 1)
        assert len(kept.result(timeout=PATIENCE_S)[0, 0].tokens) == 40


def test_aborted_samples_end_as_they_are(kind: Kind, engine: Any, sender: WeightSender, server: Any) -> None:
    server.faults = kind.faults(token_s=0.05)
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
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    old = sender.tensors[EMBEDDING].clone()
    asked = Request(PROMPT, 4, params(30, end_token_ids=frozenset()))
    server.faults = kind.faults(token_s=0.03)
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
    assert {len(one[kind.context]) for one in server.asked[-4:]} == {
        len(PROMPT) + sample.versions[0].end for sample in samples.values()
    }, "the context of what goes on is the prompt and what was drawn"


def test_a_request_that_waits_through_one_update_may_end_in_the_next(
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    may_start = threading.Event()
    server.faults = kind.faults(token_s=0.03, may_start=may_start)
    before = len(server.calls)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 1, params(30, end_token_ids=frozenset())))
        assert wait_until(lambda: kind.dialect.GENERATE in server.calls[before:])
        sender.send(engine, 1)
        may_start.set()
        assert wait_until(lambda: server.running == 1)
        time.sleep(0.2)
        sender.send(engine, 2)
        (sample,) = running.result(timeout=PATIENCE_S).values()
    assert [span.version for span in sample.versions] == [1, 2] and sample.versions[-1].end == 30


def test_what_waits_at_the_server_may_be_answered_before_the_update_is_known_to_be_whole(
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    may_start = threading.Event()
    server.faults = kind.faults(may_start=may_start, late_route=(kind.resumes, 1.0))
    before = len(server.calls)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 1, params(2, end_token_ids=frozenset())))
        assert wait_until(lambda: kind.dialect.GENERATE in server.calls[before:])
        server.when[kind.resumes] = may_start.set
        sender.send(engine, 1)
        (sample,) = running.result(timeout=PATIENCE_S).values()
    server.when.clear()
    assert [span.version for span in sample.versions] == [1]


def test_a_stop_text_that_begins_before_an_update_ends_the_sample_after_it(
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    greedy = params(12, temperature=1.0, greedy=True, end_token_ids=frozenset())
    (whole,) = drawn(engine, Request(PROMPT, 1, greedy)).values()
    texts = [engine.decode([whole.tokens[:length]])[0] for length in range(13)]
    stop = texts[12]  # begins with the first token
    assert stop not in texts[:12] and stop
    server.faults = kind.faults(token_s=0.1)
    with ThreadPoolExecutor(1) as side:
        asked = params(30, temperature=1.0, greedy=True, end_token_ids=frozenset(), stop=(stop,))
        running = side.submit(drawn, engine, Request(PROMPT, 1, asked))
        assert wait_until(lambda: server.running == 1)
        time.sleep(0.3)
        sender.send(engine, 1)  # the same weights
        server.faults = kind.faults()
        (sample,) = running.result(timeout=PATIENCE_S).values()
    assert sample.tokens == whole.tokens and sample.finish_reason == "stop"
    assert [span.version for span in sample.versions] == [0, 1] and sample.versions[-1].end == 12


def test_calls_during_an_update_wait_for_its_end(engine: Any, sender: WeightSender) -> None:
    engine.begin(1, sender.manifest)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 2, params()))
        time.sleep(0.3)
        assert not running.done()
        for bucket in sender.buckets():
            sender.broadcast(engine, bucket)
        engine.commit(1)
        assert {sample.versions[0].version for sample in running.result(timeout=PATIENCE_S).values()} == {1}


def test_calls_do_not_wait_for_ever(kind: Kind, server: Any, sender: WeightSender, make_config: Any) -> None:
    impatient = kind.engine(kind.config(make_config, server.url, sync_timeout_s=0.5), 0)
    impatient.begin(1, sender.manifest)
    with refused(StateError, "cluster.sync_timeout_s", 0.5):
        drawn(impatient, Request(PROMPT, 1, params()))
    impatient.stop()


def test_tensors_of_another_model_are_refused_and_change_nothing(
    engine: Any, sender: WeightSender, server: Any
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


@pytest.mark.parametrize("failing", [0, 2])
def test_after_an_update_that_failed_nothing_is_sampled_until_a_whole_one(
    kind: Kind, engine: Any, sender: WeightSender, server: Any, failing: int
) -> None:
    server.faults = kind.faults(failing_bucket=failing)
    with refused(SyncError, "update_weights", kind.refusal):
        sender.send(engine, 1)
    server.faults = kind.faults()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    with refused(SyncError, "update_weights", 1):
        engine.commit(1)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_samples_across_an_update_that_fails_end_with_an_error(
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    server.faults = kind.faults(token_s=0.05, failing_bucket=0)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 3, params(60, end_token_ids=frozenset())))
        assert wait_until(lambda: server.running == 3)
        with refused(SyncError, "update_weights"):
            sender.send(engine, 1)
        with refused(StateError, "update_weights"):
            running.result(timeout=PATIENCE_S)
    server.faults = kind.faults()
    assert wait_until(lambda: server.running == 0)


def test_an_update_that_nobody_ended_gives_way_to_the_next(engine: Any, sender: WeightSender, server: Any) -> None:
    engine.begin(1, sender.manifest)
    sender.broadcast(engine, next(sender.buckets()))
    with refused(SyncError, "update_weights", 1, len(sender.manifest) - len(next(sender.buckets()))):
        engine.commit(1)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


def test_a_server_with_another_version_after_commit_is_refused(
    kind: Kind, engine: Any, sender: WeightSender, server: Any
) -> None:
    server.faults = kind.faults(weight_version="41")
    with refused(SyncError, "update_weights", "'41'", 1):
        sender.send(engine, 1)
    server.faults = kind.faults()
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))


def test_calls_out_of_order_are_refused(engine: Any, sender: WeightSender) -> None:
    with refused(StateError, "update_weights"):
        engine.receive_broadcast([TensorInfo(EMBEDDING, "float32", sender.manifest[EMBEDDING])])
    with refused(SyncError, "rollout.engine"):
        engine.receive([])
    with refused(SyncError, "update_weights", 3):
        engine.commit(3)
    assert drawn(engine, Request(PROMPT, 1, params())), "the weights of before are still there"


def test_another_engine_at_the_same_server_joins_and_takes_over(
    kind: Kind, engine: Any, sender: WeightSender, server: Any, make_config: Any
) -> None:
    other = kind.engine(kind.config(make_config, server.url), 0)
    sender.join(other)
    sender.send(other, 1)
    assert drawn(other, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 1
    other.stop()
    sender.join(engine)
    sender.send(engine, 2)
    assert drawn(engine, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 2


# ---------------------------------------------------------------------- its life


def test_an_engine_takes_its_cache_when_the_weights_are_there(engine: Any, sender: WeightSender, server: Any) -> None:
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


def test_a_server_in_the_place_of_a_rank_can_free_its_gpu(
    kind: Kind, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device, has_gpu, placement in product(("cuda", "auto", "cpu"), (True, False), ("own", "colocated")):
        monkeypatch.setattr(dialect, "has_nvidia_driver", lambda has_gpu=has_gpu: has_gpu)
        settings = {"engine": kind.name, "engine_python": "python", "placement": placement, "engines": 1}
        config = make_config(mesh={"device": device}, rollout=settings)
        given = kind.server_arguments(config)
        is_on_cpu = device == "cpu" or (device == "auto" and not has_gpu)
        assert (kind.frees_gpu in given) is (placement == "colocated" and not is_on_cpu)
        assert (kind.spreads in given) is not is_on_cpu and (kind.on_cpu in given) is is_on_cpu


def test_a_server_spreads_its_model_over_the_gpus_it_has(kind: Kind, make_config: Any) -> None:
    settings = {"engine": kind.name, "engine_python": "python", "engines": 2, "gpus_per_engine": 4}
    config = make_config(mesh={"device": "cuda"}, rollout=settings)
    given = kind.server_arguments(config)
    assert given[given.index(kind.spreads) + 1] == "4"


def test_a_model_without_weights_of_its_own_can_be_served(
    kind: Kind, server: Any, make_config: Any, sender: WeightSender, engine: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_config().model.path, tmp_path / "model"))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    rollout = {"engine": kind.name, "engines": 1, "engine_urls": [server.url]}
    other = kind.engine(make_config(model={"path": str(folder), "init": "random"}, rollout=rollout), 0)
    sender.join(other)
    sender.send(other, 1)
    assert drawn(other, Request(PROMPT, 1, params()))[0, 0].versions[0].version == 1
    other.stop()
    sender.join(engine)
