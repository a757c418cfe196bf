"""After an end without warning the next start has every run at its newest checkpoint, and says what was lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from actors.service.app import make_app
from actors.service.catalogue import adapter_of
from actors.service.service import Service
from actors.service.users import User, Users
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import config_from_dict
from tests.support.service import message, service_tree
from tests.support.service_standins import ADAM, ASKED, LOCAL, Engine, Group, answer, new_run
from tests.support.waiting import wait_until

Start = Callable[[], Service]
ALL = cast(User, Users(()).of(""))


@pytest.fixture
def start(untied: Path, tmp_path: Path) -> Start:
    """Starts a service in the same folder, with a checkpoint every other update; the one before was killed."""
    tree = service_tree(
        untied, tmp_path, service={"model_name": "tiny/model"}, checkpoint={"interval_steps": 2, "keep_last": 9}
    )
    config = config_from_dict(tree)
    assert config.run.dir is not None
    config.run.dir.mkdir()

    def started() -> Service:
        service = Service(config, cast(Any, Group(config.run.dir)), cast(Any, Engine(2)))
        service.continue_runs()
        return service

    return started


def client(service: Service) -> TestClient:
    """Without the life of an application, which would end the service in order."""
    return TestClient(make_app(service), LOCAL)


def gradient(http: TestClient, run: str, number: int) -> Any:
    body = message(run, number).SerializeToString()
    return http.post("/api/v1/forward_backward", content=body, headers={"content-type": "application/x-protobuf"})


def update(http: TestClient, run: str, number: int) -> Any:
    return http.post("/api/v1/optim_step", json={"model_id": run, "seq_id": number, "adam_params": ADAM})


def train(http: TestClient, run: str, *numbers: int) -> None:
    """An update each, of this request and the next one."""
    for number in numbers:
        gradient(http, run, number)
        assert "metrics" in answer(http, update(http, run, number + 1))


def posted(http: TestClient, call: str, /, **body: Any) -> Any:
    return answer(http, http.post(f"/api/v1/{call}", json=body))


def test_a_client_that_had_come_to_the_checkpoint_goes_on_and_parts_may_still_come_in_any_order(start: Start) -> None:
    http = client(start())
    run = new_run(http, user_metadata={"x": 1})
    train(http, run, 1, 3)
    service = start()
    http, found = client(service), service.runs[run]
    assert (found.next_number, found.updates, found.tokens, found.user_metadata) == (5, 2, 8, {"x": 1})
    parts = [gradient(http, run, number) for number in (6, 5)]
    assert all(isinstance(answer(http, part), bytes) for part in parts)
    assert posted(http, "optim_step", model_id=run, seq_id=7, adam_params=ADAM)["metrics"]["grad_norm"] == 1.0
    assert found.updates == 3 and found.lost is None and found.resumed_at is None
    assert http.post("/api/v1/session_heartbeat", json={"session_id": found.session}).status_code == 200


def test_a_client_that_was_further_is_told_until_it_loads_what_it_is_told_of(start: Start) -> None:
    http = client(start())
    run = new_run(http)
    train(http, run, 1, 3, 5)
    service = start()
    http = client(service)
    (listed,) = http.get("/api/v1/checkpoints").json()["checkpoints"]
    path = listed["tinker_path"]
    sent = [gradient(http, run, 7), update(http, run, 8), gradient(http, run, 9)]
    for one in (*sent, update(http, run, 10)):
        said = cast(dict[str, Any], answer(http, one))
        assert said["category"] == "user" and path in said["error"] and "after update 2" in said["error"]
    assert "requests 5 to 6" in answer(http, sent[1])["error"] and service.runs[run].updates == 2
    assert cast(Any, service._group).batches == cast(Any, service._group).updates == []
    bad = posted(http, "load_weights", model_id=run, seq_id=11, path=path, optimizer=True)
    assert "error" not in bad and cast(Any, service._group).loaded[-1] == adapter_of(run)
    train(http, run, 12)
    assert service.runs[run].updates == 3
    session = service.runs[run].session
    new = posted(http, "load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    assert new["model_id"] == f"{session}:train:1"


def test_what_a_client_saved_is_a_checkpoint_too_and_gradients_are_in_none(start: Start) -> None:
    http = client(start())
    run = new_run(http)
    train(http, run, 1, 3)
    gradient(http, run, 5)
    saved = posted(http, "save_weights", model_id=run, seq_id=6, path="mine", user_metadata={"a": "b"})["path"]
    service = start()
    http = client(service)
    (listed,) = http.get("/api/v1/checkpoints").json()["checkpoints"]
    assert listed["tinker_path"] == saved and listed["user_metadata"] == {"a": "b"}
    assert "no update was made" in cast(Any, answer(http, update(http, run, 7)))["error"]
    train(http, run, 8)
    assert service.runs[run].updates == 3
    shutil.rmtree(service.catalogue.folder_of(run, 4, "mine"))
    store = CheckpointStore.of_run(service.config.run.dir, "actor", adapter_of(run))
    (store.path_of(2) / "manifest.json").write_text("torn")
    assert run not in start().runs  # of step 2 there was this one alone


def test_a_checkpoint_that_is_damaged_is_passed_over_for_the_one_before(start: Start, capfd: Any) -> None:
    http = client(start())
    run = new_run(http)
    train(http, run, 1, 3, 5, 7)
    service = start()
    store = CheckpointStore.of_run(service.config.run.dir, "actor", adapter_of(run))
    assert (service.runs[run].updates, store.steps()) == (4, [2, 4])
    for one in (store, store.named("update-4-request-8")):
        (one.path_of(4) / "manifest.json").write_text("torn")
    assert start().runs[run].next_number == 5


def test_a_run_whose_checkpoints_cannot_be_read_is_not_begun_anew_under_its_name(start: Start, capfd: Any) -> None:
    service = start()
    http = client(service)
    run = new_run(http)
    asked = {"session_id": service.runs[run].session, **ASKED}
    answer(http, http.post("/api/v1/create_model", json={**asked, "model_seq_id": 1}))
    for one in (run, run.replace(":0", ":1")):
        train(http, one, 1, 3)
    store = CheckpointStore.of_run(service.config.run.dir, "actor", adapter_of(run))
    (store.path_of(2) / "weights").unlink()
    service = start()
    http = client(service)
    assert run not in service.runs
    found = http.post("/api/v1/create_model", json=asked)
    assert found.status_code == 400 and run in found.text
    assert http.post("/api/v1/create_model", json={**asked, "model_seq_id": 2}).status_code == 200


def test_runs_without_a_checkpoint_and_those_that_have_ended_do_not_come_back(start: Start, capfd: Any) -> None:
    service = start()
    http = client(service)
    runs = [new_run(http) for _ in range(4)]
    for run in runs[1:]:
        train(http, run, 1, 3)
    assert posted(http, "unload_model", model_id=runs[1])["model_id"] == runs[1]
    session = runs[2].partition(":")[0]
    http.post(f"/api/v1/sessions/{session}/finish", json={})
    assert wait_until(lambda: set(service.runs) == {runs[0], runs[3]})
    again = start()
    assert list(again.runs) == [runs[3]] and f"{runs[0]} had no checkpoint" in capfd.readouterr().err
    assert client(again).post("/api/v1/get_info", json={"model_id": runs[0]}).status_code == 404
    assert [one.run for one in again.catalogue.runs.all()] == [runs[3]]


def test_an_update_counts_though_its_checkpoint_fails_and_one_that_is_skipped_leaves_no_gradients(
    start: Start, capfd: Any
) -> None:
    service = start()
    http, group = client(service), cast(Any, service._group)
    run = new_run(http)
    group.broken.add(adapter_of(run))
    train(http, run, 1, 3)
    assert service.runs[run].updates == 2 and "the disk is full" in capfd.readouterr().err
    group.skips = True
    gradient(http, run, 5)
    assert "not finite" in cast(Any, answer(http, update(http, run, 6)))["error"]
    assert not service.runs[run].has_gradients and service.runs[run].updates == 2
    again = http.post("/api/v1/create_model", json={"session_id": service.runs[run].session, **ASKED})
    assert answer(http, again)["model_id"] == run


def test_what_a_run_has_loaded_a_recovery_can_load_again_though_its_client_has_deleted_it(start: Start) -> None:
    service = start()
    http, group = client(service), cast(Any, service._group)
    run = new_run(http)
    path = posted(http, "save_weights", model_id=run, seq_id=1, path="a")["path"]
    posted(http, "load_weights", model_id=run, seq_id=2, path=path, optimizer=True)
    assert http.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/a").status_code == 200
    group.adapter(adapter_of(run)).load(name=group.loaded_names[0])  # as the log of calls has it
    assert group.loaded == [adapter_of(run)] * 2
    posted(http, "save_weights", model_id=run, seq_id=3, path="b")
    again = start()
    assert cast(Any, again._group).loaded_names == ["b"]  # a copy is none of those that the run wrote
    (listed,) = client(again).get("/api/v1/checkpoints").json()["checkpoints"]
    assert listed["checkpoint_id"] == "weights/b"


def test_weights_to_sample_from_that_were_lost_with_a_start_are_saved_again_under_their_name(start: Start) -> None:
    service = start()
    http = client(service)
    run = new_run(http)
    train(http, run, 1, 3)  # with a checkpoint
    sampled = {"model_id": run, "path": "x"}
    path = posted(http, "save_weights_for_sampler", seq_id=5, **sampled)["path"]
    posted(http, "save_weights_for_sampler", seq_id=6, model_id=run, path="uncatalogued")
    posted(http, "save_weights_for_sampler", seq_id=7, model_id=run, sampling_session_seq_id=0)
    folders = service.config.run.dir / "service" / "sampler_weights" / adapter_of(run)
    (file,) = (service.config.run.dir / "service" / "saved").glob("*.uncatalogued.json")
    file.unlink()  # as if the service had ended before it was written
    assert len(list(folders.iterdir())) == 3
    service = start()
    http = client(service)
    (kept,) = folders.iterdir()
    assert kept.name.startswith("x@")
    (state,) = [one["tinker_path"] for one in http.get("/api/v1/checkpoints").json()["checkpoints"]
                if one["checkpoint_type"] == "training"]  # fmt: skip
    assert "error" not in posted(http, "load_weights", model_id=run, seq_id=8, path=state, optimizer=True)
    assert posted(http, "save_weights_for_sampler", seq_id=9, **sampled)["path"] == path
    (again,) = folders.iterdir()
    assert again != kept and again.name.startswith("x@")
    assert "there are weights" in posted(http, "save_weights_for_sampler", seq_id=10, **sampled)["error"]
    assert "path" in posted(http, "save_weights_for_sampler", seq_id=11, model_id=run, path="uncatalogued")


def test_sampling_clients_go_on_but_for_those_whose_weights_are_gone(start: Start) -> None:
    service = start()
    http = client(service)
    run = new_run(http)
    session = service.runs[run].session
    paths = {}
    for number, name in enumerate(("stays", "goes"), 1):
        paths[name] = posted(http, "save_weights_for_sampler", model_id=run, seq_id=number, path=name)["path"]
    unnamed = posted(http, "save_weights_for_sampler", model_id=run, seq_id=3, sampling_session_seq_id=0)
    made = {"unnamed": unnamed["sampling_session_id"]}

    def sampler(http: TestClient, number: int, **of: str) -> str:
        asked = {"session_id": session, "sampling_session_seq_id": number, **of}
        return str(http.post("/api/v1/create_sampling_session", json=asked).json()["sampling_session_id"])

    def sampled(http: TestClient, sampler: str) -> Any:
        how = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}, "sampling_params": {"max_tokens": 1}}
        return http.post("/api/v1/asample", json={"sampling_session_id": sampler, "seq_id": 0, **how})

    taken = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/model"}
    assert http.post("/api/v1/create_sampling_session", json=taken).status_code == 400  # of the unnamed weights
    made["base"] = sampler(http, 1, base_model="tiny/model")
    for number, (name, path) in enumerate(paths.items(), 2):
        made[name] = sampler(http, number, model_path=path)
    http.delete(f"/api/v1/training_runs/{run}/checkpoints/sampler_weights/goes")
    posted(http, "save_weights_for_sampler", model_id=run, seq_id=4, path="goes")
    service = start()
    assert run not in service.runs and list(service.sessions) == [session]
    with TestClient(make_app(service), LOCAL) as http:
        for name in ("base", "stays"):
            assert isinstance(answer(http, sampled(http, made[name])), bytes)
            assert http.get(f"/api/v1/samplers/{made[name]}").json()["model_path"] == paths.get(name)
        for name in ("unnamed", "goes"):
            assert sampled(http, made[name]).status_code == 404
        http.post(f"/api/v1/sessions/{session}/finish", json={})
    again = start()
    assert again.samplers.sessions == {} == again.sessions


def test_records_that_are_none_or_lead_elsewhere_are_passed_over_and_named(
    start: Start, tmp_path: Path, capfd: Any
) -> None:
    service = start()
    http = client(service)
    run = new_run(http)
    train(http, run, 1, 3)
    path = posted(http, "save_weights", model_id=run, seq_id=5, path="mine")["path"]
    folder, victim = service.config.run.dir / "service", tmp_path / "victim"
    victim.mkdir()
    record = json.loads(next((folder / "saved").iterdir()).read_text())
    bad = {
        "cut.json": json.dumps(record)[:40],
        "list.json": "[]",
        "deep.json": "[" * 100_000,
        "time.json": json.dumps(record | {"expires": "abc"}),
        "away.json": json.dumps(record | {"adapter": "../../../victim", "kind": "sampler_weights", "expires": 0}),
        "run.json": json.dumps(record | {"run": "../../victim", "expires": 0}),
    }
    for kind in ("saved", "runs", "samplers"):
        (folder / kind).mkdir(exist_ok=True)
        for name, text in bad.items():
            (folder / kind / name).write_text(text)
        os.mkfifo(folder / kind / "pipe.json")
    (folder / "sampler_weights").mkdir(exist_ok=True)
    (folder / "sampler_weights" / "link").symlink_to(tmp_path)
    (tmp_path / "victim@1").mkdir()
    capfd.readouterr()
    again = start()
    again.catalogue.remove_expired()
    again.catalogue.remove_unknown()
    assert victim.is_dir() and (tmp_path / "victim@1").is_dir()
    assert list(again.runs) == [run] and again.catalogue.get(path, ALL).name == "mine"
    said = capfd.readouterr().err
    assert [name for name in [*bad, "pipe.json"] if f"saved/{name} is no record" not in said] == []


@pytest.mark.parametrize("says_so", [True, False])
def test_of_what_starts_save_for_a_client_there_is_one_checkpoint_until_it_ends_its_run(
    start: Start, says_so: bool
) -> None:
    http = client(start())
    run = new_run(http)
    posted(http, "save_weights", model_id=run, seq_id=1, path="update-1-request-1")  # a client may call it so
    train(http, run, 2, 4)
    for number in (6, 11, 16):  # each behind the newest checkpoint
        service = start()
        http = client(service)
        listed = [one.name for one in service.catalogue.listed(ALL, run)]
        assert listed == ["update-1-request-1", f"update-{service.runs[run].updates}-request-{number - 1}"]
        named = {one.parent.name for one in service.config.run.dir.rglob("named/*/step_*")}
        assert {one for one in named if one.startswith("update-")} == set(listed)
        path = service.catalogue.listed(ALL, run)[-1].path
        posted(http, "load_weights", model_id=run, seq_id=number, path=path, optimizer=True)
        train(http, run, number + 1, number + 3)
    if says_so:
        posted(http, "unload_model", model_id=run)
    else:  # it may come back for it
        asyncio.run(service.end_session(service.runs[run].session, is_overdue=True))
        assert wait_until(lambda: run not in service.runs)
    assert [one.name for one in service.catalogue.listed(ALL, run)] == listed[: 2 - says_so]
