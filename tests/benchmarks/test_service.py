"""The benchmark of the service: both sides count the same, what grows is seen, and HTTP brings the group's bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import service
from benchmarks.serving import load

COUNTED = {
    "updates and trained tokens of each run", "every sample was answered", "samples of the server are the clients'",
    "sampled tokens of the server are the clients'", "trained tokens of the server are the clients'",
    "no request failed", "the run of the killed client was freed", "the killed rank was replaced",
}  # fmt: skip


@pytest.mark.slow  # starts Ray, a rank, an engine and five clients, of which one ends; the rank is replaced
def test_no_request_is_lost_when_a_client_and_a_rank_are_killed(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    service.main(["load", "--minutes", "0.2", "--in-flight", "8", "--json", str(file)])
    record = json.loads(file.read_text())
    found = record["results"]
    assert {name for name, is_so in found["checks"].items() if is_so} >= COUNTED, found["checks"]
    assert found["problems"] == [] and min(found["updates"]) > 0 and found["samples"] > 0
    assert found["run_freed_s"] > 0 and found["rank_recovered_s"] > 0
    assert "/tmp" not in file.read_text() and str(tmp_path) not in json.dumps(found)


@pytest.mark.slow  # starts Ray, a rank and an engine, and another rank
def test_a_batch_has_the_same_bits_through_http_and_directly(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    arguments = ["http", "--shapes", "tiny", "--tokens", "1024", "--rounds", "2", "--json", str(file)]
    assert service.main(arguments) == 0
    (found,) = json.loads(file.read_text())["results"]["tokens"]["tiny"].values()
    assert found["is_equal"] and len(found["rounds"]) == 2 and found["rate_of_http"] > 0


def held(size: int) -> dict[str, Any]:
    return {kind: {"bytes": size, "files": 9, "threads": 9} for kind in (*load.OURS, "ray")}


def test_what_grows_from_the_first_third_to_the_last_is_seen() -> None:
    samples = [held(100 * number) for number in range(9)]
    del samples[7]["rank"]  # it was being replaced
    grown = load.grown(samples)
    assert grown["server"]["bytes"] == {"first_third": 100, "last_third": 700, "grown": 600, "most": 800}
    assert grown["server"]["files"]["grown"] == 0 and grown["rank"]["bytes"]["most"] == 800


@pytest.mark.parametrize(
    "arguments", [["http", "--rounds", "3"], ["http", "--tokens", "9"], ["load", "--in-flight", "3"]]
)
def test_a_measurement_that_cannot_be_made_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        service.main(arguments)
    assert ended.value.code == 2
