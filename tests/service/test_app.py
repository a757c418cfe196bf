"""Sessions, runs, samplers and what was saved, over HTTP, with stand-ins for ranks and engine."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import zstandard
from starlette.testclient import TestClient

import actors.service.app
import actors.service.catalogue
from actors.service import datums, tinker_pb2, wire
from actors.service.app import make_app
from actors.service.catalogue import Catalogue, Saved, adapter_of
from actors.service.samplers import SamplerSession, Version
from actors.service.serve import keys_of
from actors.service.service import Service
from actors.service.state import SESSION_TIMEOUT_S
from actors.service.users import ServiceLimits, User, Users
from slimefsdp.config import config_from_dict
from slimefsdp.errors import CheckpointError, ConfigError, ResourceError, StateError
from slimefsdp.sampling.params import SampleRequest, SamplingParams
from tests.support.refusals import refused
from tests.support.service import message, service_tree
from tests.support.service_standins import ADAM, ASKED, LOCAL, Engine, Group, answer, new_run, samplers_of
from tests.support.waiting import wait_until

HEAD, KEYS = {"X-API-Key": "tml-x"}, ("tml-a", "tml-b")
JSON, PROTOBUF = {"content-type": "application/json"}, {"content-type": "application/x-protobuf"}
ALL = cast(User, Users(()).of(""))


@pytest.fixture
def service(untied: Path, tmp_path: Path) -> Service:
    config = config_from_dict(service_tree(untied, tmp_path, service={"model_name": "tiny/model"}))
    assert config.run.dir is not None
    config.run.dir.mkdir()
    limits = ServiceLimits(sessions=2, runs=2, body_bytes=4096)
    return Service(config, cast(Any, Group(config.run.dir)), cast(Any, Engine(2)), limits)


@pytest.fixture
def http(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service, ["tml-x"]), headers=HEAD) as client:
        yield client


def test_a_run_is_made_trained_saved_and_ended_over_http(http: TestClient, service: Service) -> None:
    group = cast(Any, service._group)
    run = new_run(http)
    assert group.names == [run.replace(":", ".")]
    sent = http.post(
        "/api/v1/forward_backward",
        content=message(run, 1).SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    output = tinker_pb2.ForwardBackwardOutput()
    first = answer(http, sent)
    output.ParseFromString(first)
    assert output.metrics["loss:sum"] == 3.0 and answer(http, sent) == first  # as often as it is asked for
    (batch,) = group.batches
    assert batch.tokens.tolist() == [3, 4, 5, 6] and batch.response_lengths.tolist() == [3]
    adam = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-5, "grad_clip_norm": 2.0}
    step = http.post("/api/v1/optim_step", json={"model_id": run, "seq_id": 2, "adam_params": adam})
    assert answer(http, step)["metrics"]["lr"] == 0.1
    (update,) = group.updates
    assert (update.betas, update.eps, update.weight_decay, update.max_grad_norm) == ((0.8, 0.9), 1e-5, 0.0, 2.0)
    saved = answer(http, http.post("/api/v1/save_weights", json={"model_id": run, "seq_id": 3, "path": "a"}))
    assert saved["path"] == f"tinker://{run}/weights/a"
    (listed,) = http.get(f"/api/v1/training_runs/{run}/checkpoints").json()["checkpoints"]
    assert listed["checkpoint_id"] == "weights/a" and listed["size_bytes"] > len(adapter_of(run))
    assert http.get("/api/v1/training_runs").json()["cursor"]["total_count"] == 1
    assert http.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/a").status_code == 200
    assert http.post("/api/v1/weights_info", json={"tinker_path": saved["path"]}).status_code == 404
    ended = http.post("/api/v1/unload_model", json={"model_id": run})
    assert answer(http, ended)["model_id"] == run and group.names == []
    assert http.post("/api/v1/get_info", json={"model_id": run}).status_code == 404


@pytest.mark.parametrize(
    ("targets", "parts"), [(["all-linear"], {"attn", "mlp"}), (["q_proj", "lm_head"], {"attn", "unembed"})]
)
def test_clients_name_the_parts_that_lora_targets_chooses_and_are_told_of_them(
    untied: Path, tmp_path: Path, targets: list[str], parts: set[str]
) -> None:
    (tmp_path / "run").mkdir()
    limits = {"model_name": "tiny/model"}
    config = config_from_dict(service_tree(untied, tmp_path, service=limits, lora={"targets": targets}))
    served = Service(config, cast(Any, Group(tmp_path / "run")), cast(Any, Engine(2)))
    has = {f"train_{part}": part in parts for part in ("attn", "mlp", "unembed")}
    with TestClient(make_app(served, ["tml-x"]), headers=HEAD) as http:
        session = http.post("/api/v1/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        for name in has:
            wrong = {**ASKED["lora_config"], **has, name: not has[name]}
            refusal = http.post("/api/v1/create_model", json={**ASKED, "session_id": session, "lora_config": wrong})
            assert refusal.status_code == 400 and name in refusal.json()["error"]
        asked = {**ASKED, "session_id": session, "lora_config": {**ASKED["lora_config"], **has}}
        run = answer(http, http.post("/api/v1/create_model", json=asked))["model_id"]
        saved = answer(http, http.post("/api/v1/save_weights", json={"model_id": run, "seq_id": 1, "path": "a"}))
        about = http.post("/api/v1/weights_info", json={"tinker_path": saved["path"]}).json()
        assert {name: about[name] for name in has} == has


def test_a_client_that_is_silent_is_taken_for_gone_and_its_runs_and_samplers_end(
    http: TestClient, service: Service
) -> None:
    run = new_run(http)
    session = run.partition(":")[0]
    asked = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 7}
    sampler = answer(http, http.post("/api/v1/save_weights_for_sampler", json=asked))["sampling_session_id"]
    version = service.samplers.sessions[sampler].version
    assert version is not None and version.folder.is_dir() and service.overdue_sessions() == []
    service.sessions[session].seen = time.monotonic() - SESSION_TIMEOUT_S - 1
    assert wait_until(lambda: not service.runs and not service.samplers.sessions)
    assert cast(Any, service._group).names == [] and not version.folder.exists()
    assert http.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 410


def test_limits_and_keys_are_told_as_what_they_are(http: TestClient, service: Service) -> None:
    new_run(http)
    new_run(http)
    full = http.post("/api/v1/create_session", json={})
    assert full.status_code == 429 and full.headers["x-should-retry"] == "true"
    (first, _) = service.sessions
    asked = {"session_id": first, "model_seq_id": 5, "base_model": "tiny/model", "lora_config": {"rank": 4}}
    assert http.post("/api/v1/create_model", json=asked).status_code == 429
    assert http.post("/api/v1/telemetry", content=bytes(5000), headers=JSON).status_code == 413
    assert http.post("/api/v1/create_session", json={}, headers={"X-API-Key": "other"}).status_code == 401
    service.is_ending = True
    assert http.get("/api/v1/healthz").status_code == 503
    service.is_ending = False


def limited(service: Service, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Any:
    """An application with two users and other limits."""
    monkeypatch.setattr(service, "limits", replace(service.limits, **limits))
    return make_app(service, KEYS)


class Sender:
    """Sends requests in parts, and has the statuses of their answers by number."""

    def __init__(self, app: Any) -> None:
        self.app, self.statuses = app, dict[str, int]()

    async def post(self, name: str, key: str, *parts: Any, path: str = "telemetry") -> None:
        """Parts are bytes, numbers of zeros, or something that is awaited before the next one."""
        left = list(parts)

        async def receive() -> dict[str, Any]:
            while left and not isinstance(left[0], (int, bytes)):
                await left.pop(0)()
            part = left.pop(0)
            body = part if isinstance(part, bytes) else bytes(part)
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(event: Any) -> None:
            if event["type"] == "http.response.start":
                self.statuses[name] = event["status"]

        kind = (PROTOBUF if path == "forward_backward" else JSON)["content-type"]
        scope = {
            "type": "http", "method": "POST", "path": f"/api/v1/{path}", "query_string": b"",
            "headers": [(b"x-api-key", key.encode()), (b"content-type", kind.encode())],
        }  # fmt: skip
        await self.app(scope, receive, send)


def test_bodies_of_one_user_leave_room_for_others_and_are_no_hindrance_to_small_requests(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    kib = 1024
    app = limited(service, monkeypatch, waiting_bytes=100 * kib, body_bytes=512 * kib)
    sender, made = Sender(app), service.create_session(wire.CreateSession(), cast(User, Users(KEYS).of("tml-b")))
    heartbeat = json.dumps({"session_id": cast(Any, made)["session_id"]}).encode()

    async def others() -> None:  # 60 KiB count, of those that have come
        await sender.post("more of the same user's", "tml-a", 40 * kib)
        await sender.post("small", "tml-a", 16 * kib)
        await sender.post("another user's", "tml-b", 46 * kib)
        await sender.post("too much of another's", "tml-b", 52 * kib)
        await sender.post("heartbeat", "tml-b", heartbeat, path="session_heartbeat")

    asyncio.run(sender.post("slow", "tml-a", 38 * kib, 38 * kib, others, 1))
    refused_ones = {"more of the same user's", "too much of another's"}
    assert {name for name, status in sender.statuses.items() if status == 429} == refused_ones
    assert {sender.statuses[name] for name in sender.statuses.keys() - refused_ones} == {200}
    asyncio.run(sender.post("alone", "tml-a", 256 * kib, 256 * kib))  # nothing is held behind an answer
    assert sender.statuses["alone"] == 200


def test_a_body_that_stalls_is_refused_in_time_and_at_once_when_the_server_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stalls() -> None:
        await asyncio.Event().wait()

    sender = Sender(limited(service, monkeypatch, receive_s=0.01))
    asyncio.run(sender.post("late", "tml-a", 10, stalls, 10))
    ending = Sender(limited(service, monkeypatch, receive_s=3600.0))

    async def ends() -> None:
        result = service.results.new("", is_needed=True)
        poll = json.dumps({"request_id": result.id}).encode()
        waiting = [
            asyncio.create_task(ending.post("stalled", "tml-a", 10, stalls, 10)),
            asyncio.create_task(ending.post("poll", "tml-a", poll, path="retrieve_future")),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await ending.app.state.end()
        await asyncio.gather(*waiting)
        await ending.post("new", "tml-a", 10)

    asyncio.run(ends())
    assert sender.statuses == {"late": 408} and ending.statuses == {"stalled": 503, "poll": 408, "new": 503}


def test_pages_of_other_sites_are_refused_and_programs_are_not(service: Service) -> None:
    with TestClient(make_app(service), "http://127.0.0.1:8000") as http:

        def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in {**JSON, **headers}.items()}
            return http.post("/api/v1/create_session", content=b"{}", headers=named).status_code

        refusals = [
            {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:9"},
            {"host": "evil.example:8000"}, {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
            {"host": "[::1"}, {"origin": "http://["},
        ]  # fmt: skip
        assert [status(**one) for one in refusals] == [403] * len(refusals)
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            assert status(**{"content-type": kind}) == 415, kind
        served = [{}, {"origin": "http://127.0.0.1:8000"}, {"host": "localhost:9"}, {"host": "[::1]:8000"}]
        assert [status(**one) for one in served[:2]] == [200, 200]
        service.sessions.clear()
        assert [status(**one) for one in served[2:]] == [200, 200]
        assert http.get("/").status_code == http.get("/status.json").status_code == 200
    service.is_ending = False
    with_key = TestClient(make_app(service, ["tml-x"]), "http://named.example", headers=HEAD)  # behind a proxy
    assert with_key.get("/api/v1/healthz").status_code == 200


def test_a_sampler_asked_for_again_under_its_number_is_that_one_and_no_other(
    http: TestClient, service: Service
) -> None:
    run = new_run(http)
    session = service.runs[run].session
    paths = [
        answer(http, http.post("/api/v1/save_weights_for_sampler", json={"model_id": run, "seq_id": n, "path": name}))
        for n, name in ((1, "a"), (2, "b"))
    ]

    def made(number: int, **of: str) -> Any:
        asked = {"session_id": session, "sampling_session_seq_id": number, **of}
        return http.post("/api/v1/create_sampling_session", json=asked)

    kinds = [{"model_path": paths[0]["path"]}, {"model_path": paths[1]["path"]}, {"base_model": "tiny/model"}]
    for number, first in enumerate(kinds):
        assert [made(number, **first).status_code for _ in range(2)] == [200, 200]
        assert [made(number, **other).status_code for other in kinds if other != first] == [400, 400]


def test_a_length_beside_a_transfer_encoding_is_refused(http: TestClient) -> None:
    both = {"content-length": "2", "transfer-encoding": "chunked", **JSON}
    assert http.post("/api/v1/create_session", content=b"{}", headers=both).status_code == 400


def test_a_request_of_more_parts_than_there_may_be_is_refused_before_it_is_parsed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = TestClient(limited(service, monkeypatch, body_bytes=2**22), headers={"X-API-Key": "tml-a", **PROTOBUF})
    empty = b"\x1a\x00" * (2**20 + 1)  # datums
    in_one = b"\x1a\x80\x80\x80\x01" + b"\x0a\x00" * 2**20  # chunks of a datum
    for body in (empty, in_one):
        sent = zstandard.compress(body)
        assert len(sent) < 10_000
        found = http.post("/api/v1/forward_backward", content=sent, headers={"content-encoding": "zstd"})
        assert (found.status_code, found.headers["x-should-retry"]) == (400, "false")
        assert str(2**20) in found.json()["error"]


def test_a_request_is_parsed_where_its_shapes_are_short_and_its_run_is_known_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    parse = datums.parse_request

    def parsing(data: bytes) -> Any:
        parsed.append(data)
        return parse(data)

    monkeypatch.setattr(datums, "parse_request", parsing)
    http = TestClient(limited(service, monkeypatch, body_bytes=2**22), headers={"X-API-Key": "tml-a"})
    run = new_run(http)

    def status(model: str, **inputs: Any) -> int:
        body = zstandard.compress(message(model, 1, **inputs).SerializeToString())
        headers = {"content-encoding": "zstd", **PROTOBUF}
        return http.post("/api/v1/forward_backward", content=body, headers=headers).status_code

    shape = [1] * 2**20  # on the wire a number takes 1 byte, in memory 8
    assert status(run, weights=tinker_pb2.Tensor(dense=b"", dtype=tinker_pb2.DTYPE_FLOAT32, shape=shape)) == 400
    assert status("nobody's") == status(run.replace("0", "1")) == 404 and parsed == []
    assert status(run) == 200 and len(parsed) == 1
    model_id, size = datums.scan_request(parsed[0])
    assert model_id == run and size > len(parsed[0])


def test_zstd_that_is_cut_off_or_goes_on_behind_its_frame_is_refused(service: Service) -> None:
    http = TestClient(make_app(service), LOCAL, headers={"content-encoding": "zstd", **JSON})
    whole, half = zstandard.compress(b"{}" * 1000), zstandard.ZstdCompressor(write_content_size=False).compress(b"{}")
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**20))
    for sent, status in (
        (half, 200), (whole[:-1], 400), (half[:-1], 400), (half + half, 400), (half + b"x", 400), (b"", 400),
        (bomb, 413), (zstandard.compress(bytes(2**20)), 413),
    ):  # fmt: skip
        assert http.post("/api/v1/telemetry", content=sent).status_code == status, sent


def test_the_next_start_goes_on_with_every_run_where_it_was(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.service.app, "_FETCH_S", 0.0)  # nobody fetches what is failed at the end
    group, key = service._group, {"content-type": "application/x-protobuf"}
    adam = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-5}
    with TestClient(make_app(service), LOCAL) as http:
        runs = [new_run(http), new_run(http)]
        for run in runs:
            for number in (1, 3):
                body = message(run, number).SerializeToString()
                answer_of = http.post("/api/v1/forward_backward", content=body, headers=key)
                if number == 1:
                    answer(http, answer_of)
            step = {"model_id": run, "seq_id": 2, "adam_params": adam}
            if run == runs[0]:  # the other one has a gap, and what comes behind it is told that it is not done
                answer(http, http.post("/api/v1/optim_step", json=step))
    again = Service(service.config, group, cast(Any, Engine(2)))
    again.continue_runs()
    with refused(StateError, "model_seq_id", runs[0]):  # a late copy of the request that made it
        again.training.create_model(wire.CreateModel(session_id=again.runs[runs[0]].session, **ASKED), ALL)
    assert [again.runs[run].next_number for run in runs] == [4, 2]
    with TestClient(make_app(again), LOCAL) as http:
        steps = [
            answer(http, http.post("/api/v1/optim_step", json={"model_id": run, "seq_id": number, "adam_params": adam}))
            for run, number in ((runs[0], 4), (runs[1], 2))
        ]
    assert all("restarted" in one["error"] for one in steps) and cast(Any, group).dropped == 2


def test_a_run_that_cannot_be_saved_at_the_end_keeps_no_other_from_it(service: Service) -> None:
    group = cast(Any, service._group)
    with TestClient(make_app(service), LOCAL) as http:
        runs = [new_run(http), new_run(http)]
        group.broken.add(adapter_of(runs[0]))
    kept = {one.run: one.is_finished for one in service.catalogue.runs.all()}
    assert kept == {runs[0]: False, runs[1]: True}
    group.broken.clear()
    again = Service(service.config, group, cast(Any, Engine(2)))
    again.continue_runs()
    assert list(again.runs) == runs[1:] and [one.run for one in again.catalogue.runs.all()] == runs[1:]


def test_an_operator_sees_counts_and_ids_and_no_word_of_clients(http: TestClient, service: Service) -> None:
    run = new_run(http, user_metadata={"secret": "words of theirs"})
    sent = http.post(
        "/api/v1/forward_backward",
        content=message(run, 1).SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    answer(http, sent)
    page = http.get("/", headers={"X-API-Key": ""})
    assert (
        page.status_code == 200
        and "status.json" in page.text
        and "script-src" in page.headers["content-security-policy"]
    )
    assert http.get("/status.json", headers={"X-API-Key": ""}).status_code == 401
    shown = http.get("/status.json").json()
    (one,) = shown["runs"]
    assert (one["run"], one["tokens"], shown["trained_tokens"]) == (run, 4, 4)
    assert shown["counts"]["sampled_tokens"] == 50 and shown["counts"]["sessions"] == 1
    metrics = http.get("/metrics").text
    assert 'slimefsdp_requests_total{path="forward_backward",status="200"} 1.0' in metrics
    assert "slimefsdp_trained_tokens_total 4.0" in metrics and "slimefsdp_sampling_rows 3.0" in metrics
    text = (service.config.run.dir / "service" / "requests.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    (logged,) = [line for line in lines if line["path"] == "forward_backward"]
    assert logged["model_id"] == run and logged["request_id"] == sent.json()["request_id"]
    assert "words of theirs" not in text + metrics + str(shown) and {line["status"] for line in lines} == {200, 401}


def test_keys_are_read_from_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_of(service.config) == ()
    named = config_from_dict(service_tree(Path("m"), Path("r"), service={"api_key_env": "A_KEY"}))
    for value, keys in (("tml-1", ("tml-1",)), (" tml-1,tml-2 ", ("tml-1", "tml-2"))):
        monkeypatch.setenv("A_KEY", value)
        assert keys_of(named) == keys
    for value, words in (("", "not set"), ("tml-1,", "empty key"), ("tml-1,tml-2,tml-1", "twice")):
        monkeypatch.setenv("A_KEY", value)
        with refused(ConfigError, "service.api_key_env", words) as caught:
            keys_of(named)
        assert "tml-1" not in str(caught.value)


def test_the_version_that_was_longest_unused_makes_room_and_comes_back(tmp_path: Path) -> None:
    engine: Any = Engine(2)
    samplers = samplers_of(engine, 2)
    sessions = {}
    for name in "abc":
        (tmp_path / name).mkdir()
        version = Version(name, tmp_path / name, is_ephemeral=True)
        sessions[name] = samplers.sessions[name] = SamplerSession(name, "s", "", version)

    async def drawn(name: str) -> None:
        await samplers.sample(sessions[name], SampleRequest(name, [1], 1, SamplingParams(1)))

    async def life() -> None:
        for name, held in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
            await drawn(name)
            assert sorted(engine.held) == sorted(held)
        (tmp_path / "a").rmdir()
        with refused(StateError, "sampling_session_id", "not there any more"):
            await drawn("a")
        samplers._running.update("bc")
        with refused(StateError, "sampling_session_id"):
            await drawn("a")
        (tmp_path / "a").mkdir()
        await samplers.forget_oldest()  # one too many, and a alone is not sampled from
        assert list(samplers.sessions) == ["b", "c"] and not (tmp_path / "a").exists()
        (tmp_path / "a").mkdir()
        waiting = asyncio.create_task(drawn("a"))
        await asyncio.sleep(0.05)
        assert not waiting.done() and sorted(engine.held) == ["b", "c"]  # those that are sampled from stay
        behind = asyncio.create_task(drawn("c"))  # or it would never be idle
        await asyncio.sleep(0.05)
        assert not behind.done()
        del samplers._running["b"]
        samplers._idle.set()
        await waiting
        await behind
        assert sorted(engine.held) == ["a", "c"]
        engine.reads.clear()
        reading = asyncio.create_task(drawn("b"))
        await asyncio.sleep(0.05)
        await drawn("c")  # does not wait for a version that is being read
        assert not reading.done()
        engine.reads.set()
        await reading
        engine.room = 0
        samplers._running.clear()
        with refused(ResourceError, "memory_bytes"):
            await drawn("a")
        assert engine.held == []
        engine.room = 2
        await samplers.end("s")
        assert engine.held == [] and not (tmp_path / "b").exists()

    asyncio.run(life())


def test_what_was_saved_is_known_to_the_next_start_until_it_expires(tmp_path: Path) -> None:
    first, now = Catalogue(tmp_path), time.time()
    for name, expires in (("stays", None), ("goes", now - 1)):
        one = Saved("s:train:0", "s.train.0", "sampler_weights", name, 4, now, 10, expires)
        first.folder(one).mkdir(parents=True)
        first.add(one)
    again = Catalogue(tmp_path)
    assert again.get("tinker://s:train:0/sampler_weights/stays", ALL).rank == 4
    with refused(CheckpointError, "path", "no checkpoint"):
        again.get("tinker://s:train:0/sampler_weights/goes", ALL)
    again.remove_expired()
    assert [one.name for one in again.listed(ALL)] == ["stays"] == [one.name for one in Catalogue(tmp_path).listed(ALL)]


def test_runs_end_with_their_session_though_the_engine_is_lost(
    http: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(http)
    session = service.runs[run].session
    asked = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
    sampler = answer(http, http.post("/api/v1/save_weights_for_sampler", json=asked))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    assert isinstance(answer(http, http.post("/api/v1/asample", json=asked)), bytes)
    version = service.samplers.sessions[sampler].version

    async def lost(version: str) -> None:
        raise RuntimeError("the engine is lost")

    monkeypatch.setattr(service.engine, "drop", lost)
    http.post(f"/api/v1/sessions/{session}/finish", json={})
    assert wait_until(lambda: not service.runs)
    assert version is not None and not version.folder.exists()


@pytest.mark.parametrize(
    "unfit",
    [
        {"learning_rate": 1e30},
        {"eps": 1e-16},
        {"learning_rate": 0.5, "weight_decay": 3.0},
    ],
)
def test_no_update_is_made_that_could_leave_weights_that_are_not_finite(
    unfit: dict[str, float], http: TestClient, service: Service
) -> None:
    run = new_run(http)
    asked = {"model_id": run, "seq_id": 1, "adam_params": {**ADAM, **unfit}}
    found = answer(http, http.post("/api/v1/optim_step", json=asked))
    assert found["category"] == "user" and list(unfit)[-1] in found["error"]
    assert cast(Any, service._group).updates == [] and service.runs[run].updates == 0
    answer(http, http.post("/api/v1/optim_step", json={**asked, "seq_id": 2, "adam_params": ADAM}))
    assert service.runs[run].updates == 1


def test_a_full_disk_is_told_as_what_it_is_and_leaves_the_name_free(
    http: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(http)
    session = service.runs[run].session
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/model"}
    calls = {
        "save_weights": {"model_id": run, "seq_id": 1, "path": "a"},
        "save_weights_for_sampler": {"model_id": run, "seq_id": 2, "path": "a"},
        "create_model": {"session_id": session, **ASKED, "model_seq_id": 1},
    }

    def full(file: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(actors.service.catalogue, "write_synced", full)
        for call, body in calls.items():
            found = answer(http, http.post(f"/api/v1/{call}", json=body))
            assert found["category"] == "user" and "No space left" in found["error"], call
            assert "OSError" not in found["error"] and "make room" in found["error"]
        refused_at_once = http.post("/api/v1/create_sampling_session", json=sampler)
        assert refused_at_once.status_code == 429 and "No space left" in refused_at_once.text
    assert http.post("/api/v1/create_sampling_session", json=sampler).status_code == 200
    for number, call in enumerate(("save_weights", "save_weights_for_sampler"), 3):
        assert "path" in answer(http, http.post(f"/api/v1/{call}", json={**calls[call], "seq_id": number})), call


def test_what_is_sampled_for_a_session_ends_with_it(http: TestClient, service: Service) -> None:
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/model"}
    sampler = http.post("/api/v1/create_sampling_session", json=asked).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    cast(Any, service.engine).draws.clear()
    sent = http.post("/api/v1/asample", json=asked)
    assert wait_until(lambda: bool(service.samplers.sessions[sampler].running))
    http.post(f"/api/v1/sessions/{session}/finish", json={})
    found = answer(http, sent)
    assert found["category"] == "user" and session in found["error"] and service.results.waiting == 0


def test_health_and_status_are_told_while_there_is_no_engine_to_sample_with(
    http: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.get("/api/v1/healthz").json() == {"status": "ok"}
    for is_lost, status in ((False, 200), (True, 503)):
        monkeypatch.setattr(service.engine, "problem", "it was killed")
        monkeypatch.setattr(service.engine, "is_lost", is_lost)
        health = http.get("/api/v1/healthz")
        assert health.status_code == status and health.json()["status"] != "ok" and "it was killed" in health.text
        assert http.get("/status.json").json()["problem"] == "it was killed"
        assert "slimefsdp_sampling_is_up 0.0" in http.get("/metrics").text


def test_a_sampler_gets_no_other_weights_that_were_saved_under_its_name(http: TestClient, service: Service) -> None:
    run = new_run(http)
    session = service.runs[run].session
    engine = cast(Any, service.engine)

    def saved(number: int) -> str:
        body = {"model_id": run, "seq_id": number, "path": "x"}
        path = answer(http, http.post("/api/v1/save_weights_for_sampler", json=body))["path"]
        asked = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
        return str(http.post("/api/v1/create_sampling_session", json=asked).json()["sampling_session_id"])

    def sampled(sampler: str, number: int) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
        how = {"prompt": prompt, "sampling_params": {"max_tokens": 1}}
        asked = {"sampling_session_id": sampler, "seq_id": number, **how}
        return answer(http, http.post("/api/v1/asample", json=asked))

    first = saved(1)
    assert isinstance(sampled(first, 1), bytes)
    http.delete(f"/api/v1/training_runs/{run}/checkpoints/sampler_weights/x")
    second = saved(2)
    assert isinstance(sampled(first, 2), bytes)  # of what the engine holds
    engine.versions.clear()
    engine.held.clear()  # as if others had needed the room
    assert "not there any more" in sampled(first, 3)["error"] and isinstance(sampled(second, 1), bytes)
    body = {"model_id": run, "seq_id": 3, "path": "x"}
    assert "there are weights" in answer(http, http.post("/api/v1/save_weights_for_sampler", json=body))["error"]


def test_a_response_without_a_length_has_what_the_models_positions_leave_behind_its_prompt(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = json.loads((untied / "config.json").read_text())["max_position_embeddings"]
    batch = {"max_tokens_per_rank": 4 * positions}
    config = config_from_dict(service_tree(untied, tmp_path, service={"model_name": "m"}, batch=batch))
    engine, asked = Engine(2), list[SampleRequest]()
    sample = engine.sample

    async def sampled(request: SampleRequest) -> Any:
        asked.append(request)
        return await sample(request)

    monkeypatch.setattr(engine, "sample", sampled)
    with TestClient(make_app(Service(config, cast(Any, Group(tmp_path)), engine)), LOCAL) as http:
        (model,) = http.get("/api/v1/get_server_capabilities").json()["supported_models"]
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        given = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "m"}
        key = http.post("/api/v1/create_sampling_session", json=given).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}
        body = {"sampling_session_id": key, "seq_id": 0, "prompt": prompt, "sampling_params": {}}
        assert isinstance(answer(http, http.post("/api/v1/asample", json=body)), bytes)
    (request,) = asked
    assert model["max_context_length"] == positions == request.params.max_new_tokens + 3


def test_nobody_is_told_that_a_run_is_there_which_is_not_or_was_asked_for_otherwise(
    http: TestClient, service: Service
) -> None:
    run = new_run(http)
    session = service.runs[run].session
    path = answer(http, http.post("/api/v1/save_weights", json={"model_id": run, "seq_id": 1, "path": "a"}))["path"]
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    found = http.post("/api/v1/load_weights", json=load)  # under the number of a run that did not load it
    assert found.status_code == 400 and "load_weights" in found.text and cast(Any, service._group).loaded == []
    answer(http, http.post("/api/v1/unload_model", json={"model_id": run}))
    assert http.post("/api/v1/create_model", json={"session_id": session, **ASKED}).status_code == 410


def sampling(http: TestClient, session: str, number: int = 0, **weights: Any) -> Any:
    body = {"session_id": session, "sampling_session_seq_id": number, **weights}
    return http.post("/api/v1/create_sampling_session", json=body)


def test_sampling_clients_and_their_requests_are_refused_by_name(http: TestClient, service: Service) -> None:
    run = new_run(http)
    session = run.partition(":")[0]
    state = answer(http, http.post("/api/v1/save_weights", json={"model_id": run, "seq_id": 1, "path": "a"}))["path"]
    for weights, word in (
        ({"model_path": state}, "a state to train from"),
        ({"base_model": "another"}, "another"),
        ({}, "neither model_path nor base_model"),
    ):
        found = sampling(http, session, **weights)
        assert found.status_code == 400 and word in found.json()["error"]
    sampler = sampling(http, session, base_model="tiny/model").json()["sampling_session_id"]
    asked = {"sampling_session_id": sampler, "sampling_params": {"max_tokens": 4}}
    short, room = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}, service.most_context
    long = {"chunks": [{"type": "encoded_text", "tokens": [3] * room}]}
    for number, (more, words) in enumerate(
        (
            ({"prompt": long}, [f"a prompt of {room} tokens", str(room - 1)]),
            ({"prompt": short, "sampling_params": {"max_tokens": room - 1}}, [f"max_tokens={room - 1}", str(room - 2)]),
            ({"prompt": short, "record_stability_info": True}, ["record_stability_info"]),
        )
    ):
        found = http.post("/api/v1/asample", json={**asked, "seq_id": number, **more})
        assert found.status_code == 400 and all(word in found.json()["error"] for word in words), found.text
    rest = {**asked, "seq_id": 9, "prompt": short, "sampling_params": {"stop": ["a"], "temperature": 0}}
    assert isinstance(answer(http, http.post("/api/v1/asample", json=rest)), bytes)
    assert http.get(f"/api/v1/samplers/{sampler}").json()["base_model"] == "tiny/model"


def test_weights_that_were_deleted_fail_the_requests_of_their_sampler_alone(http: TestClient, service: Service) -> None:
    run = new_run(http)
    session = run.partition(":")[0]
    save = {"model_id": run, "seq_id": 1, "path": "a"}
    path = answer(http, http.post("/api/v1/save_weights_for_sampler", json=save))["path"]
    sampler = sampling(http, session, model_path=path).json()["sampling_session_id"]
    version = service.samplers.sessions[sampler].version
    assert version is not None
    shutil.rmtree(version.folder)
    asked = {"sampling_session_id": sampler, "prompt": {"chunks": []}, "sampling_params": {"max_tokens": 4}}
    asked["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    found = answer(http, http.post("/api/v1/asample", json={**asked, "seq_id": 0}))
    assert found["category"] == "user" and "not there any more" in found["error"]
    base = sampling(http, session, 1, base_model="tiny/model").json()["sampling_session_id"]
    asked["sampling_session_id"] = base
    assert isinstance(answer(http, http.post("/api/v1/asample", json={**asked, "seq_id": 0})), bytes)


def test_what_a_run_cannot_load_or_save_is_refused_and_it_goes_on(http: TestClient, service: Service) -> None:
    run = new_run(http)
    session = run.partition(":")[0]

    def posted(call: str, **body: Any) -> Any:
        return http.post(f"/api/v1/{call}", json=body)

    weights = answer(http, posted("save_weights_for_sampler", model_id=run, seq_id=1, path="w"))["path"]
    state = answer(http, posted("save_weights", model_id=run, seq_id=2, path="a"))["path"]
    for found, word in (
        (posted("load_weights", model_id=run, seq_id=3, path=weights, optimizer=True), "no state to train from"),
        (posted("load_weights", path=state, optimizer=True), "neither a run nor a session"),
        (
            posted("load_weights", path=state, optimizer=True, session_id=session, model_seq_id=7, base_model="x"),
            "'x'",
        ),
        (posted("save_weights_for_sampler", model_id=run, seq_id=3), "neither path nor sampling_session_seq_id"),
    ):
        assert found.status_code == 400 and word.strip("'") in found.json()["error"], found.text
    other = answer(
        http, posted("create_model", session_id=session, **{**ASKED, "model_seq_id": 1, "lora_config": {"rank": 8}})
    )
    wrong = posted("load_weights", model_id=other["model_id"], seq_id=1, path=state, optimizer=True)
    assert wrong.status_code == 400 and "has rank 4, and this run has rank 8" in wrong.json()["error"]
    taken = answer(http, posted("save_weights_for_sampler", model_id=run, seq_id=3, path="w"))
    assert taken["category"] == "user" and "with the name 'w'" in taken["error"]
    unnamed = {"model_id": run, "sampling_session_seq_id": 5}
    assert "sampling_session_id" in answer(http, posted("save_weights_for_sampler", seq_id=4, **unnamed))
    again = answer(http, posted("save_weights_for_sampler", seq_id=5, **unnamed))
    assert again["category"] == "user" and "keeps its weights" in again["error"]
    assert answer(http, posted("save_weights", model_id=run, seq_id=6, path="b"))["path"].endswith("/weights/b")
    answer(http, posted("unload_model", model_id=run))
    ended = posted("create_model", session_id=session, **ASKED)
    assert ended.status_code in (404, 410)
