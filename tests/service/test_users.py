"""What the clients of one key make is no other key's: asked for by another one, it is answered as what never was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from actors.service.app import make_app
from actors.service.service import Service
from slimefsdp.config import config_from_dict
from tests.support.service import message, service_tree
from tests.support.service_standins import ADAM, LOCAL, Engine, Group, answer, new_run

KEYS = ("tml-operator", "tml-alice", "tml-bob")
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture
def service(untied: Path, tmp_path: Path) -> Service:
    config = config_from_dict(service_tree(untied, tmp_path, service={"model_name": "tiny/model"}))
    assert config.run.dir is not None
    config.run.dir.mkdir()
    return Service(config, cast(Any, Group(config.run.dir)), Engine(2))


def client(app: Any, key: str) -> TestClient:
    return TestClient(app, LOCAL, headers={"X-API-Key": key})


def made(http: TestClient) -> dict[str, str]:
    """A session, a run, its checkpoints, samplers, and a request of it, by what they are."""
    run = new_run(http)
    saved = {
        kind: answer(http, http.post(f"/api/v1/{call}", json={"model_id": run, "seq_id": number, **how}))
        for number, (kind, call, how) in enumerate(
            (
                ("weights", "save_weights", {"path": "ck"}),
                ("sampler_weights", "save_weights_for_sampler", {"path": "ck"}),
                ("sampler", "save_weights_for_sampler", {"sampling_session_seq_id": 3}),
            ),
            1,
        )
    }
    last = http.post("/api/v1/save_weights", json={"model_id": run, "seq_id": 4, "path": "again"})
    answer(http, last)
    return {
        "session": run.partition(":")[0], "run": run, "weights": saved["weights"]["path"],
        "sampler_weights": saved["sampler_weights"]["path"], "sampler": saved["sampler"]["sampling_session_id"],
        "future": last.json()["request_id"],
    }  # fmt: skip


def asked_of(http: TestClient, has: dict[str, str], own: str) -> dict[str, Any]:
    """The answers to everything that names what somebody else has, by what was asked.

    Args:
        own: a session of whoever asks.
    """
    run, number = has["run"], {"model_id": has["run"], "seq_id": 5}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
    new = {"session_id": own, "model_seq_id": 9, "base_model": "tiny/model"}
    posts: dict[str, Any] = {
        "forward_backward": message(run, 5).SerializeToString(),
        "optim_step": {**number, "adam_params": ADAM},
        "save_weights": {**number, "path": "x"},
        "save_weights_for_sampler": {**number, "path": "x"},
        "load_weights": {**number, "path": has["weights"], "optimizer": True},
        "load_weights of it into a new run": {**new, "path": has["weights"], "optimizer": True},
        "load_weights of samplers": {**new, "path": has["sampler_weights"], "optimizer": True},
        "get_info": {"model_id": run},
        "unload_model": {"model_id": run},
        "create_model": {**new, "session_id": has["session"], "lora_config": {"rank": 4}},
        "session_heartbeat": {"session_id": has["session"]},
        f"sessions/{has['session']}/finish": {},
        "create_sampling_session": {
            "session_id": own, "sampling_session_seq_id": 5, "model_path": has["sampler_weights"]
        },
        "create_sampling_session there": {
            "session_id": has["session"], "sampling_session_seq_id": 5, "base_model": "tiny/model"
        },
        "asample": {
            "sampling_session_id": has["sampler"], "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}
        },
        "retrieve_future": {"request_id": has["future"]},
        "weights_info": {"tinker_path": has["weights"]},
        "weights_info of samplers": {"tinker_path": has["sampler_weights"]},
    }  # fmt: skip
    answers = {}
    for name, body in posts.items():
        how: Any = {"content": body, "headers": PROTOBUF} if isinstance(body, bytes) else {"json": body}
        answers[name] = http.post(f"/api/v1/{name.partition(' ')[0]}", **how)
    for path in (f"training_runs/{run}", f"training_runs/{run}/checkpoints", f"samplers/{has['sampler']}"):
        answers[path] = http.get(f"/api/v1/{path}")
    for kind in ("weights", "sampler_weights"):
        answers[f"delete {kind}"] = http.delete(f"/api/v1/training_runs/{run}/checkpoints/{kind}/ck")

    def without_ids(text: str) -> str:
        for what, value in sorted(has.items(), key=lambda item: -len(item[1])):  # ids are parts of others
            text = text.replace(value, what)
        return text

    return {without_ids(name): (one.status_code, without_ids(one.text)) for name, one in answers.items()}


@pytest.mark.parametrize("asking", ["tml-bob", "tml-operator"])
def test_what_is_another_users_is_answered_as_what_never_was_and_stays_as_it_is(service: Service, asking: str) -> None:
    app = make_app(service, KEYS)
    with client(app, "tml-alice") as alice:
        other, has = client(app, asking), made(alice)
        before = {path: alice.get(f"/api/v1/{path}").json() for path in ("training_runs", "checkpoints")}
        own = other.post("/api/v1/create_session", json={}).json()["session_id"]
        never = {
            "session": "session-0", "run": "session-0:train:0", "weights": "tinker://session-0:train:0/weights/ck",
            "sampler_weights": "tinker://session-0:train:0/sampler_weights/ck", "sampler": "session-0:sample:3",
            "future": "0" * 32,
        }  # fmt: skip
        found = asked_of(other, has, own)
        assert found == asked_of(other, never, own)
        statuses = {name: status for name, (status, _) in found.items()}
        quiet = {"sessions/session/finish": 200, "training_runs/run/checkpoints": 200}
        assert {name: statuses.pop(name) for name in quiet} == quiet and set(statuses.values()) == {404, 410}
        for path in before:
            assert other.get(f"/api/v1/{path}").json()["cursor"]["total_count"] == 0
            assert alice.get(f"/api/v1/{path}").json()[path] == before[path][path]
        heartbeat = alice.post("/api/v1/session_heartbeat", json={"session_id": has["session"]})
        mine = asked_of(alice, has, has["session"])
        assert heartbeat.status_code == 200 and mine["forward_backward"][0] == mine["delete weights"][0] == 200


def test_the_first_key_alone_sees_the_whole_service(service: Service) -> None:
    app = make_app(service, KEYS)
    with client(app, "tml-alice") as alice:
        run, operator = new_run(alice), client(app, "tml-operator")
        assert [alice.get(path).status_code for path in ("/status.json", "/metrics", "/")] == [403, 403, 200]
        assert [one["run"] for one in operator.get("/status.json").json()["runs"]] == [run]
        assert "slimefsdp_training_runs 1.0" in operator.get("/metrics").text
        for key in ("", "tml-alic", "tml-alice2", "tml-operator,tml-alice", "é".encode(), b"tml-alice\xff"):
            refused = alice.get("/api/v1/training_runs", headers={"X-API-Key": key})
            assert (refused.status_code, key) == (401, key)


def test_who_has_what_holds_over_starts_and_no_key_is_written_or_said(service: Service, capfd: Any) -> None:
    with client(make_app(service, KEYS), "tml-alice") as alice:
        has = made(alice)
        texts = [alice.get(f"/api/v1/{path}").text for path in ("training_runs", "checkpoints")]
        texts.append(client(alice.app, "tml-operator").get("/status.json").text)
    for file in (one for one in service.config.run.dir.rglob("*") if one.is_file()):
        texts.append(file.read_bytes().decode("latin-1"))
    assert len(texts) > 6 and not [key for key in KEYS for text in (*texts, *capfd.readouterr()) if key in text]
    again = Service(service.config, service._group, Engine(2))
    again.continue_runs()
    app = make_app(again, ("tml-operator", "tml-bob", "tml-alice"))
    with client(app, "tml-bob") as bob, client(app, "tml-alice") as alice:
        assert bob.post("/api/v1/get_info", json={"model_id": has["run"]}).status_code == 404
        assert bob.post("/api/v1/weights_info", json={"tinker_path": has["weights"]}).status_code == 404
        session = alice.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "path": has["weights"], "optimizer": True}
        assert "error" not in answer(alice, alice.post("/api/v1/load_weights", json=body))  # in another session
        assert alice.post("/api/v1/get_info", json={"model_id": has["run"]}).status_code == 200
