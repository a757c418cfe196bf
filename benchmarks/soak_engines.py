"""What many weight updates leave behind, on both sides: the rank that sends, the engine's actor, the server behind it.

    python benchmarks/soak_engines.py --json benchmarks/results/soak_engines.json
    python benchmarks/soak_engines.py --engine-python .venv-vllm/bin/python --warm-up 3000 \\
        --json benchmarks/results/soak_vllm.json

One rank broadcasts the weights of the sort-digits model; after every tenth update a few samples are drawn from them and
trained on. Without an interpreter that has vLLM, the server is the tests' own, in a process of its own, which takes
weights as vLLM's workers do. The memory of a real one's worker approaches a bound that it is close to after some
thousand updates, so they come first. Watched are resident memory, open files and threads; a server's processes count
together.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402

from actors.cluster.connect import connect, disconnect  # noqa: E402
from actors.engines.pool import EnginePool  # noqa: E402
from actors.workers.worker_group import WorkerGroup  # noqa: E402
from benchmarks.faults import software  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from benchmarks.rpc_overhead import descendants  # noqa: E402
from benchmarks.soak import Held, grown, progress  # noqa: E402
from slimefsdp.config import RunConfig, config_from_dict  # noqa: E402
from slimefsdp.data.rollout_batch import RolloutBatch  # noqa: E402
from tests.support import process_resources  # noqa: E402
from tests.support.process_resources import held_by, held_by_the_process  # noqa: E402
from tests.support.vllm_server import ProtocolServer  # noqa: E402
from tests.support.waiting import PATIENCE_S  # noqa: E402

WHAT = "what rank, engine and server hold in the course of many weight updates by broadcast"
PROMPTS = ["sort 31942", "sort 5", "sort 90210", "sort 777"]
TRAINS_EVERY = 10  # updates
SAMPLES = 20  # of what processes hold, over a run
BLOCKS = 64  # of vLLM's cache: a few megabytes, so that what it holds can be seen beside it


def soak(folder: Path, updates: int, engine_python: Path | None, warm_up: int = 0) -> dict[str, Any]:
    """Sends weights so often, after a warm-up; connected to a Ray cluster only meanwhile."""
    write_example(folder)
    with protocol_server(engine_python is None) as server:
        started = {"engine_python": str(engine_python), "engine_args": [f"--num-gpu-blocks-override={BLOCKS}"]}
        engine: dict[str, Any] = {"engine_urls": [server.url]} if server else started
        config = settings(folder, engine)
        connect(config)
        try:
            with group_and_engine(config) as (group, engines):
                return watched(group, engines, updates, server, warm_up)
        finally:
            disconnect()


@contextmanager
def group_and_engine(config: RunConfig) -> Iterator[tuple[WorkerGroup, EnginePool]]:
    """A rank and what it sends to; they end with the block."""
    group = WorkerGroup.launch(config)
    try:
        engines = EnginePool.launch(config, restarts=True)
        try:
            yield group, engines
        finally:
            engines.shutdown()
    finally:
        group.shutdown()


def watched(group: Any, engines: Any, updates: int, server: Any, warm_up: int = 0) -> dict[str, Any]:
    """Sends weights so often, after a warm-up, and looks at who holds what."""
    ray.cloudpickle.register_pickle_by_value(process_resources)
    samples: list[dict[str, Held]] = []
    processes = set()
    began = time.perf_counter()
    for update in range(1 - warm_up, updates + 1):
        version = engines.update_from(group)
        if update % TRAINS_EVERY == 0:
            found, drawn = engines.generate(PROMPTS, samples_per_prompt=4, seed=(update + warm_up,))
            assert found == version
            group.train_step(batch_of(drawn))
        if update > 0 and update % max(1, updates // SAMPLES) == 0:
            (rank,) = _of_actors(group.receivers)
            (engine,) = _of_actors(engines.receivers)
            processes.add(engine.pop("pid"))
            rank.pop("pid")
            held = server.held() if server else held_by_a_server(engines)
            samples.append({"rank": rank, "engine": engine, "server": held, "driver": held_by_the_process()})
            progress(update, updates, samples[-1])
    seconds = time.perf_counter() - began
    apart = None
    if not server:  # a real one; the group has trained since the last update
        engines.update_from(group)
        apart = max(engines.check_log_probs(group, PROMPTS))
    found = grown(samples)
    passed = found["passed"] and len(processes) == 1
    record = {
        "updates": updates,
        "warm_up": warm_up,
        "seconds": round(seconds, 1),
        "log_probs_apart": apart,
        **software(),
    }
    return {**record, **found, "passed": passed, "samples": samples}


def _of_actors(actors: list[Any]) -> list[dict[str, int]]:
    held = [actor.__ray_call__.remote(lambda _: {**held_by_the_process(), "pid": os.getpid()}) for actor in actors]
    found: list[dict[str, int]] = ray.get(held, timeout=PATIENCE_S)
    return found


def held_by_a_server(engines: Any) -> Held:
    """By all processes of the server that the only engine has started."""
    (engine,) = engines.receivers
    pid = ray.get(engine.__ray_call__.remote(lambda self: self._client.child.pid), timeout=PATIENCE_S)
    parts = [held_by(one) for one in (pid, *descendants(pid))]
    return {what: sum(part[what] for part in parts) for what in parts[0]}


def batch_of(drawn: list[Any]) -> RolloutBatch:
    """Groups of samples with rewards that differ."""
    samples = [
        {
            "tokens": one.tokens,
            "response_length": one.response_length,
            "rollout_log_probs": one.log_probs,
            "reward": float(len(set(one.text))),
            "group_id": one.prompt,
        }
        for one in drawn
    ]
    return RolloutBatch.from_samples(samples)


def write_example(folder: Path) -> None:
    """The sort-digits example."""
    spec = importlib.util.spec_from_file_location("make_sort_digits", ROOT / "scripts" / "make_sort_digits.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_sort_digits(folder)


def settings(folder: Path, engine: dict[str, Any]) -> RunConfig:
    """One rank and one engine."""
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "mesh": {"dp": 1, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 512},
        "optim": {"lr": 1e-4, "total_updates": 1_000_000},
        "rollout": {"engine": "vllm", "engines": 1, "max_new_tokens": 8, **engine},
        "cluster": {"launch_timeout_s": PATIENCE_S},
    }
    return config_from_dict(tree)


class ServerProcess:
    """The protocol server, in a process that this one may ask what it holds."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.url: str = self._heard()

    def held(self) -> Held:
        """What the process holds, without the record of calls that the server keeps for tests."""
        self._connection.send("held")
        found: Held = self._heard()
        return found

    def _heard(self) -> Any:
        assert self._connection.poll(PATIENCE_S), "the server does not answer"
        return self._connection.recv()


@contextmanager
def protocol_server(is_wanted: bool) -> Iterator[ServerProcess | None]:
    """One that ends with the block."""
    if not is_wanted:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield ServerProcess(here)
    finally:
        here.close()
        process.join()


def serve(connection: Connection) -> None:
    """The process of a protocol server; it ends when the other side is gone."""
    server = ProtocolServer(320, "qwen3", str)  # of scripts/make_sort_digits.py; nobody asks for stop texts
    connection.send(server.url)
    try:
        while connection.recv() == "held":
            for kept in (server.calls, server.asked, server.aborted):
                kept.clear()
            connection.send(held_by_the_process())
    except EOFError:
        server.close()


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of what each process holds early on and at the end."""
    every = found["updates"] // SAMPLES
    places = {2 * every: found["samples"][1], found["updates"]: found["samples"][-1]}
    lines = [f"| process |{''.join(f' at update {update:,} |' for update in places)}", "|---|---|---|"]
    for process in found["grown"]:
        held = [sample[process] for sample in places.values()]
        cells = [f"{one['bytes'] / 2**20:.1f} MiB, {one['files']} files, {one['threads']} threads" for one in held]
        lines.append(f"| {process} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=0, help="updates before those that are watched")
    parser.add_argument("--engine-python", type=Path, help="the interpreter of an environment with vLLM")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = soak(Path(folder), args.updates, args.engine_python, args.warm_up)
    write_record(args.json, WHAT, 1, results)
    print({name: value for name, value in results.items() if name != "samples"})
    print(table(results))
    sys.exit(0 if results["passed"] else 1)


if __name__ == "__main__":
    main()
