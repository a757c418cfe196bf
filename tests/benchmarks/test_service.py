"""The benchmark of the service sees what grows, and refuses measurements that cannot be made."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import service
from benchmarks.serving import load


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
