"""Updates leave nothing behind in rank, engine and server: a short form of the benchmark, and what was recorded."""

from __future__ import annotations

from pathlib import Path

from benchmarks import soak_engines

MEGABYTE = 2**20


def test_updates_leave_no_file_thread_or_memory_behind_on_either_side(cluster: None, tmp_path: Path) -> None:
    soak_engines.write_example(tmp_path)
    with soak_engines.protocol_server(True) as server:
        assert server is not None
        config = soak_engines.settings(tmp_path, {"engine_urls": [server.url]})
        with soak_engines.group_and_engine(config) as (group, engines):
            found = soak_engines.watched(group, engines, 60, server)
    assert found["updates"] == 60 and len(found["samples"]) == soak_engines.SAMPLES
    early, late = found["samples"][4], found["samples"][-1]
    assert early.keys() == {"rank", "engine", "server", "driver"}
    for process, held in late.items():
        # a file or thread left by every update would be 45, grpc's pools start one now and then
        assert held["files"] - early[process]["files"] < 15 and held["threads"] - early[process]["threads"] < 15
        # a copy of the weights left by every update would be 80; what the C library keeps of its threads' is less
        assert held["bytes"] - early[process]["bytes"] < 24 * MEGABYTE
