"""What a step costs the driver, and what it costs a rank beside its model, from 8 to 1,024 ranks: simulated.

    python benchmarks/driver_scaling.py --json benchmarks/results/driver_scaling.json
    python benchmarks/driver_scaling.py --table     # prints the table of benchmarks/results/driver_scaling.json

The batch, its check, its plan and its bytes are real, for a mesh of so many data ranks; only the ranks are not there.
What a call costs is measured on a small group of Ray actors that do nothing, and what agreement costs on a few gloo
processes. Seconds are CPU seconds of the thread that does it, of a put of all threads, the least of some rounds. A step
then takes

    driver = copy + check + plan + pickle + bytes / put rate + ranks x (begin + answer)

and while it waits, in each second, ranks x question. Ray's own threads in the driver, which work beside, are measured
too and not in it. With `--before FILE` the record takes another record's results in, of an earlier commit, which the
table shows beside these.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.record import write_record  # noqa: E402
from slimefsdp.batching.cost import CostModel  # noqa: E402
from slimefsdp.config import RunConfig, config_from_dict  # noqa: E402
from slimefsdp.data.rollout_batch import RolloutBatch  # noqa: E402
from slimefsdp.model_spec import ModelSpec  # noqa: E402
from slimefsdp.training.metrics import Throughput  # noqa: E402
from slimefsdp.training.plan import batch_metrics, loss_weights  # noqa: E402
from slimefsdp.training.prepare import BatchPlanner, PreparedBatch  # noqa: E402

RANKS = (8, 32, 128, 512, 1024)
SAMPLES, GROUP, UPDATES = 100_000, 8, 4
MODEL = ModelSpec(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=151_936)
ACTORS, CALLS = 8, 50  # of the group that does nothing, and how often all of them are called
GLOO_RANKS = (2, 4, 8, 16)
PUT_BYTES = 256 * 2**20


def skewed_batch(samples: int = SAMPLES, *, shares: bool, seed: int = 0) -> RolloutBatch:
    """Groups of 8 responses with log-normal lengths, to prompts that their groups share, or to one each.

    Prompts have 100 tokens in the mean, responses 200 in the mean and up to 4,096.
    """
    rng = np.random.default_rng(seed)

    def drawn(mean: float, sigma: float, low: int, high: int, count: int) -> np.ndarray:
        return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), low, high).astype(np.int64)

    groups = samples // GROUP
    prompts, responses = np.repeat(drawn(100, 0.6, 24, 1024, groups), GROUP), drawn(200, 1.0, 8, 4096, samples)
    lengths = prompts + responses
    starts = np.cumsum(lengths) - lengths
    tokens = rng.integers(0, MODEL.vocab, int(lengths.sum()))
    if shares:
        first = np.repeat(starts[::GROUP], GROUP)
        offsets = np.arange(int(prompts.sum())) - np.repeat(np.cumsum(prompts) - prompts, prompts)
        tokens[np.repeat(starts, prompts) + offsets] = tokens[np.repeat(first, prompts) + offsets]
    return RolloutBatch(
        tokens=tokens,
        lengths=lengths,
        response_lengths=responses,
        rewards=rng.integers(0, 2, samples).astype(np.float32),
        group_ids=np.arange(samples) // GROUP,
        rollout_log_probs=-rng.random(int(responses.sum()), dtype=np.float32),
    )


def settings(ranks: int, samples: int = SAMPLES) -> RunConfig:
    """Of a group with so many data ranks: GRPO in four updates."""
    return config_from_dict(
        {
            "model": {"path": "anything"},
            "mesh": {"dp": ranks, "device": "cpu"},
            "batch": {"max_tokens_per_rank": 16_384, "samples_per_update": samples // UPDATES},
            "optim": {"total_updates": 1000},
        }
    )


def planner_of(config: RunConfig) -> BatchPlanner:
    """As a group of the model has it."""
    return BatchPlanner(config, "actor", MODEL.vocab, None, CostModel.of_model(MODEL))


def planned(batch: RolloutBatch, ranks: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of everything that is real, least of some rounds, and the bytes that would be put."""
    config = settings(ranks, batch.num_samples)
    planner, cost = planner_of(config), CostModel.of_model(MODEL)
    throughput = Throughput(ranks, MODEL)
    found: list[dict[str, float]] = []

    def one_round() -> tuple[dict[str, float], PreparedBatch, int, int]:
        timed = Stopwatch()
        own = timed("copy_s", batch.copy)
        planning = timed("check_s", lambda: planner.for_training(own))
        work: PreparedBatch = timed("plan_s", planning)
        buffers: list[pickle.PickleBuffer] = []
        data = timed("pickle_s", lambda: pickle.dumps(work, protocol=5, buffer_callback=buffers.append))
        timed("rank_load_s", lambda: pickle.loads(data, buffers=buffers))
        timed("rank_weights_s", lambda: [loss_weights(config, own, counted) for counted in counted_of(work)])
        timed("rank_metrics_s", lambda: metrics_of(work, own))
        return timed.seconds, work, len(data) + sum(len(buffer.raw()) for buffer in buffers), len(buffers)

    def metrics_of(work: PreparedBatch, own: RolloutBatch) -> None:
        batch_metrics(config, work.plan, own, cost, advantages=work.advantages)
        throughput.metrics(work.plan, own, 1.0, range(len(work.plan.updates)))

    for _ in range(rounds):
        seconds, work, put_bytes, put_buffers = one_round()
        found.append(seconds)
    return {
        "ranks": ranks,
        "tokens": batch.num_tokens,
        "packs": sum(len(of_rank) for update in work.plan.updates for of_rank in update),
        "put_bytes": put_bytes,
        "put_buffers": put_buffers,
        "imbalance": work.plan.imbalance(batch.lengths, cost),
        "plan": work.plan.digest(),
        **{name: min(one[name] for one in found) for name in found[0]},
    }


def counted_of(work: PreparedBatch) -> list[np.ndarray]:
    """The samples in the denominators of every update."""
    return [work.plan.counted_of(update) for update in range(len(work.plan.updates))]


class Stopwatch:
    """CPU seconds by name, of this thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = action()
        self.seconds[name] = time.thread_time() - start
        return result


# ---------------------------------------------------------------------- what a call costs


def call_costs(rounds: int) -> dict[str, float]:
    """Of this process, per rank: to begin a call, to take an answer, to ask how far a rank is; and to put bytes."""
    import ray

    from actors.workers.watchdog import Watched, remote_class

    class Idle(Watched):
        def call(self, request: Any, role: str) -> None:
            return None

    ray.init("local", num_cpus=ACTORS, include_dashboard=False, object_store_memory=2 * 2**30, log_to_driver=False)
    try:
        actors = [remote_class(Idle).options(num_cpus=0).remote() for _ in range(ACTORS)]
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        found = [calls_of_a_round(actors) for _ in range(rounds + 1)][1:]  # the first one warms up
    finally:
        ray.shutdown()
    least = {name: min(one[name] for one in found) for name in found[0]}
    return {
        "begin_s": least["begin_s"] / CALLS / ACTORS,
        "answer_s": least["answer_s"] / CALLS / ACTORS,
        "question_s": least["question_s"] / CALLS / ACTORS,
        "ray_threads_s": least["ray_threads_s"] / CALLS / ACTORS,
        "put_bytes_per_s": PUT_BYTES / least["put_s"],
    }


def calls_of_a_round(actors: list[Any]) -> dict[str, float]:
    """Seconds of all actors' calls together."""
    from actors.cluster.ray_errors import store
    from actors.workers.futures import CallQueue
    from actors.workers.group_calls import RankRequest
    from actors.workers.watchdog import Limits, Waiting, Watchdog

    found = dict.fromkeys(("begin_s", "answer_s", "question_s"), 0.0)
    queue, watchdog = CallQueue(), Watchdog(actors, Limits(60, 600, 60))
    request = RankRequest("train_step", {"batch": store(np.zeros(10), "batch")})

    def begun() -> Any:
        calls = [actor.call.remote(request, "actor") for actor in actors]
        return queue.begin(lambda: calls, name="train_step", timeout_s=60, first_only=True)

    def asked() -> None:  # takes in the answers of the time before, and asks again
        for process in watchdog._processes:
            process.ask_next = 0.0
        watchdog.look(Waiting("train_step", [0], time.monotonic()))

    of_process = time.process_time() - time.thread_time()
    for _ in range(CALLS):
        timed = Stopwatch()
        future = timed("begin_s", begun)
        time.sleep(0.02)  # they have answered
        timed("answer_s", future.result)
        timed("question_s", asked)
        time.sleep(0.02)
        found = {name: seconds + timed.seconds[name] for name, seconds in found.items()}
    found["ray_threads_s"] = time.process_time() - time.thread_time() - of_process
    blob = np.zeros(PUT_BYTES, dtype=np.uint8)
    start = time.process_time()
    store(blob, "batch")
    return found | {"put_s": time.process_time() - start}


# ---------------------------------------------------------------------- what ranks agree on


def agreement(rounds: int) -> list[dict[str, float]]:
    """On a few gloo ranks: seconds of one agreement that all went well, and of one exchange of digests."""
    import torch.multiprocessing as mp

    found = []
    for ranks in GLOO_RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(agree, args=(ranks, folder, rounds), nprocs=ranks)
            found.append({"ranks": ranks} | json.loads((Path(folder) / "seconds.json").read_text()))
    return found


def agree(rank: int, ranks: int, folder: str, rounds: int) -> None:
    import torch.distributed as dist

    from slimefsdp.distributed.collectives import all_equal, gathered, run_together

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    digest = "0" * 64
    actions: dict[str, Callable[[], object]] = {
        "all_went_well": lambda: run_together(lambda: None, group),
        "all_equal": lambda: all_equal(digest, group),
        "gathered": lambda: gathered((digest, None, [digest, digest]), group),
    }
    seconds = {}
    for name, action in actions.items():
        times = []
        for _ in range(20 * rounds):
            dist.barrier()
            start = time.process_time(), time.perf_counter()
            action()
            times.append((time.process_time() - start[0], time.perf_counter() - start[1]))
        cpu, wall = zip(*times, strict=True)
        seconds |= {f"{name}_cpu_s": statistics.median(cpu), f"{name}_wall_s": min(wall)}
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)  # gloo may abort at interpreter exit


# ---------------------------------------------------------------------- the step


def driver_seconds(row: dict[str, Any], calls: dict[str, float]) -> float:
    """CPU seconds of a step's driver, by the formula above."""
    real = sum(row[name] for name in ("copy_s", "check_s", "plan_s", "pickle_s"))
    return float(real + row["put_bytes"] / calls["put_bytes_per_s"] + row["ranks"] * per_rank(calls))


def per_rank(calls: dict[str, float]) -> float:
    """What a call costs the driver for each rank."""
    return calls["begin_s"] + calls["answer_s"]


def measured(rounds: int) -> dict[str, Any]:
    """Everything, for batches with shared prompts and without."""
    calls = call_costs(rounds)
    gloo = agreement(rounds)
    steps = []
    for shares in (False, True):
        batch = skewed_batch(shares=shares)
        for ranks in RANKS:
            row = {"shares_prompts": shares} | planned(batch, ranks, rounds)
            row["driver_s"] = driver_seconds(row, calls)
            steps.append(row)
            print(json.dumps(row), flush=True)
    return {"calls": calls, "agreement": gloo, "steps": steps}


def tables(results: dict[str, Any]) -> str:
    """The step by ranks, as Markdown."""
    before = {(row["shares_prompts"], row["ranks"]): row for row in results.get("before", {}).get("steps", [])}
    lines = [
        "| prompts | ranks | copy, check | plan | put | calls | driver | before | a rank | before |",
        "|---" * 10 + "|",
    ]
    for row in results["steps"]:
        old = before.get((row["shares_prompts"], row["ranks"]))
        lines.append(f"| {' | '.join(_cells(row, results['calls'], old))} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any], calls: dict[str, float], before: dict[str, Any] | None) -> list[str]:
    put = row["pickle_s"] + row["put_bytes"] / calls["put_bytes_per_s"]
    seconds = [row["copy_s"] + row["check_s"], row["plan_s"], put, row["ranks"] * per_rank(calls), row["driver_s"]]
    return [
        "shared" if row["shares_prompts"] else "of their own",
        f"{row['ranks']:,}",
        *(f"{value:.2f}" for value in seconds),
        "" if before is None else f"{before['driver_s']:.2f}",
        f"{rank_seconds(row):.2f}",
        "" if before is None else f"{rank_seconds(before):.2f}",
    ]


def rank_seconds(row: dict[str, Any]) -> float:
    """CPU seconds that a step costs a rank for what is of the whole batch."""
    return float(row["rank_load_s"] + row["rank_weights_s"] + row["rank_metrics_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--before", type=Path, help="a record of this benchmark at an earlier commit")
    parser.add_argument("--table", action="store_true", help="print the tables of the record and measure nothing")
    args = parser.parse_args()
    if args.table:
        record = json.loads((ROOT / "benchmarks/results/driver_scaling.json").read_text())
        print(tables(record["results"]))
        return
    results = measured(args.rounds)
    if args.before is not None:
        before = json.loads(args.before.read_text())
        results["before"] = {"commit": before["commit"], **before["results"]}
    print(tables(results))
    what = f"a step's driver, simulated: {SAMPLES:,} samples in {UPDATES} updates; CPU seconds, least of {args.rounds}"
    write_record(args.json, what, 1, results)


if __name__ == "__main__":
    main()
