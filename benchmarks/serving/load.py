"""Training clients that sample, many requests at once, on one server: what is lost, what grows, who waits.

Each client is a process with the unmodified package `tinker`: a thread that does forward_backward and optim_step in a
loop and takes a new sampler now and then, and samples of the newest one, so many in flight all the time. A fifth client
is killed after a third of the time, and a rank of the server after two thirds.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from actors.service.state import SESSION_TIMEOUT_S
from benchmarks.serving.server import KEY, NAME, RANK, Server, serving, settings, write_model

SHAPE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
CLIENTS = 4
DATUMS, LENGTH = 8, 64  # of a batch
PROMPT, SHORTEST, LONGEST = 32, 16, 96  # tokens of a sample
UPDATES_A_SAMPLER = 10
LOOK_S = 1.0
PATIENCE_S = 600.0  # behind the end, for what both deaths cost
WARM_UP = 0.1  # of the time: versions and rows come
# the most that the mean of the last third may be above that of the first one
GROWTH = {"bytes": 32 * 2**20, "files": 8, "threads": 8}
OURS = ("server", "rank", "engine")  # processes that must not grow; Ray starts and ends others of its own
UPDATES, TOKENS, SENT, ANSWERED, SAMPLED, FAILED = range(6)  # a client's counts; TOKENS are of answered batches
STARTING, WORKING, ENDING, LEAVING = range(4)


class Client:
    """One client, in a process of its own.

    Args:
        counts: shared with the process that looks at them, also when this one is killed.
        phase: STARTING, WORKING, ENDING or LEAVING, as that process says. Like `counts` it has no lock, with which
            this one could be killed.
    """

    def __init__(self, url: str, number: int, in_flight: int, counts: Any, phase: Any) -> None:
        self.url, self.number, self.in_flight, self.counts, self.phase = url, number, in_flight, counts, phase
        self.problems: list[str] = []
        self.waits: list[float] = []

    def run(self, said: Any) -> None:
        """Everything; what it found goes into the queue `said`."""
        import tinker

        os.environ["TINKER_TELEMETRY"] = "0"
        service = tinker.ServiceClient(base_url=self.url, api_key=KEY)
        self.training = service.create_lora_training_client(base_model=NAME, rank=RANK, seed=self.number).result()
        self.sampler = self.training.save_weights_and_get_sampling_client().result()
        said.put((self.number, {"run": self.training.model_id}))
        self.wait_for(WORKING)
        trains = threading.Thread(target=self.train)
        trains.start()
        asyncio.run(self.sample())
        trains.join()
        said.put((self.number, {"waits": self.waits, "problems": self.problems}))
        self.wait_for(LEAVING)
        service.close("success").result()

    def wait_for(self, phase: int) -> None:
        """Returns when it is that or a later one."""
        while self.phase.value < phase:
            time.sleep(0.05)

    def train(self) -> None:
        """Updates until the end, each of a batch of its own."""
        from tinker import types

        rng = np.random.default_rng(self.number)
        adam = types.AdamParams(learning_rate=1e-4, eps=1e-8)
        try:
            while self.phase.value == WORKING:
                rows = rng.integers(3, SHAPE["vocab_size"], (DATUMS, LENGTH + 1)).tolist()
                data = [
                    types.Datum(
                        model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]}
                    )
                    for row in rows
                ]
                gradients = self.training.forward_backward(data, "cross_entropy")
                update = self.training.optim_step(adam)
                gradients.result()
                self.counts[TOKENS] += DATUMS * (LENGTH + 1)
                update.result()
                self.counts[UPDATES] += 1
                if self.counts[UPDATES] % UPDATES_A_SAMPLER == 0:
                    self.sampler = self.training.save_weights_and_get_sampling_client().result()
        except Exception as error:
            self.failed(error)

    async def sample(self) -> None:
        """So many samples in flight until the end; then those that are in flight are answered."""
        from tinker import types

        async def one_after_another(number: int) -> None:
            rng = random.Random(1000 * self.number + number)
            while self.phase.value == WORKING:
                prompt = [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT)]
                asked = types.SamplingParams(max_tokens=rng.randint(SHORTEST, LONGEST), stop=[])
                start = time.perf_counter()
                self.counts[SENT] += 1
                try:
                    answer = await self.sampler.sample(types.ModelInput.from_ints(prompt), 1, asked)
                except Exception as error:
                    self.failed(error)
                    continue
                self.waits.append(time.perf_counter() - start)
                self.counts[ANSWERED] += 1
                self.counts[SAMPLED] += len(answer.sequences[0].tokens)
                if len(answer.sequences) != 1 or len(answer.sequences[0].tokens) != asked.max_tokens:
                    self.failed(RuntimeError("an answer to another request"))

        await asyncio.gather(*(one_after_another(number) for number in range(self.in_flight)))

    def failed(self, error: Exception) -> None:
        """Counts it, and keeps the first ones."""
        self.counts[FAILED] += 1
        if len(self.problems) < 5:
            self.problems.append(f"{type(error).__name__}: {error}"[:300])


def run_client(said: Any, *given: Any) -> None:
    """What a client's process does."""
    Client(*given).run(said)


def under_load(folder: Path, seconds: float, in_flight: int) -> dict[str, Any]:
    """The record of a server under load for so long."""
    write_model(folder / "model", SHAPE)
    tree = settings(
        folder / "model",
        folder,
        batch={"max_tokens_per_rank": 512},
        service={"max_samplers": 4},
    )
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tinker"])  # once for all: it takes seconds
    with serving(tree, folder) as server:
        said, phase = context.Queue(), context.RawValue("b", STARTING)
        counts = [context.RawArray("q", 6) for _ in range(CLIENTS + 1)]
        share = in_flight // CLIENTS
        processes = [
            context.Process(
                target=run_client, args=(said, server.url, number, share, counts[number], phase), daemon=True
            )
            for number in range(CLIENTS + 1)
        ]
        try:
            for process in processes:
                process.start()
            runs = {number: found["run"] for number, found in _said(said, len(processes))}
            phase.value = WORKING
            watched = _watched(server, seconds, counts, runs, processes[CLIENTS])
            phase.value = ENDING
            reports = dict(_said(said, CLIENTS))
            found = _found(server, counts, runs, reports, watched, share * CLIENTS)
            phase.value = LEAVING
            for process in processes[:CLIENTS]:
                process.join(60)
            return found
        finally:
            for process in processes:
                process.kill()


def _said(said: Any, number: int) -> list[tuple[int, Any]]:
    return [said.get(timeout=600) for _ in range(number)]


def _watched(server: Server, seconds: float, counts: Any, runs: dict[int, str], victim: Any) -> dict[str, Any]:
    """What was seen meanwhile: samples of what processes hold, and how long the two deaths took."""
    start, cpu = time.monotonic(), server.cpu_seconds()
    samples: list[dict[str, Any]] = []
    killed_client = killed_rank = 0.0
    before: list[int] = []
    found: dict[str, Any] = {"run_freed_s": None, "rank_recovered_s": None, "all_go_on_s": None}
    while (passed := time.monotonic() - start) < seconds + (PATIENCE_S if None in found.values() else 0):
        samples.append({"at_s": round(passed, 1), **server.held()})
        status = server.status()
        if not killed_client and passed > seconds / 3:
            os.kill(victim.pid, signal.SIGKILL)
            killed_client = time.monotonic()
        if not killed_rank and passed > 2 * seconds / 3:
            cpu = {name: round(value - cpu[name], 1) for name, value in server.cpu_seconds().items()}
            found["cpu_s"] = {"until_s": round(passed, 1), **cpu}
            os.kill(next(pid for pid, kind in server.processes().items() if kind == "rank"), signal.SIGKILL)
            killed_rank, before = time.monotonic(), [of_one[UPDATES] for of_one in counts]
        now = time.monotonic()
        there = [one["run"] for one in status["runs"]]
        if killed_client and found["run_freed_s"] is None and runs[CLIENTS] not in there:
            found["run_freed_s"] = round(now - killed_client, 1)
        if killed_rank and found["rank_recovered_s"] is None and status["counts"]["recoveries"]:
            found["rank_recovered_s"] = round(now - killed_rank, 1)
        # the second one from then on began behind the recovery
        if (
            killed_rank
            and found["all_go_on_s"] is None
            and all(counts[number][UPDATES] > before[number] + 1 for number in range(CLIENTS))
        ):
            found["all_go_on_s"] = round(now - killed_rank, 1)
        time.sleep(LOOK_S)
    at_end = [list(of_one) for of_one in counts]
    return {**found, "samples": samples, "at_end": at_end, "seconds": time.monotonic() - start}


def _found(
    server: Server,
    counts: Any,
    runs: dict[int, str],
    reports: dict[int, Any],
    watched: dict[str, Any],
    in_flight: int,
) -> dict[str, Any]:
    status = server.status()
    of_server = {one["run"]: one for one in status["runs"]}
    others, victim = [list(of_one) for of_one in counts[:CLIENTS]], list(counts[CLIENTS])
    samples, sampled = server.counter("samples_total"), status["counts"]["sampled_tokens"]
    updates = [one[UPDATES] for one in watched["at_end"][:CLIENTS]]
    waits = np.concatenate([reports[number]["waits"] for number in range(CLIENTS)])
    mean = sum(updates) / CLIENTS
    unknown = victim[SENT] - victim[ANSWERED]
    checks = {
        "updates and trained tokens of each run": all(
            (of_server[runs[number]]["updates"], of_server[runs[number]]["tokens"]) == (one[UPDATES], one[TOKENS])
            for number, one in enumerate(others)
        ),
        "every sample was answered": all(one[SENT] == one[ANSWERED] for one in others),
        "samples of the server are the clients'": 0
        <= samples - sum(one[ANSWERED] for one in others) - victim[ANSWERED]
        <= unknown,
        "sampled tokens of the server are the clients'": 0
        <= sampled - sum(one[SAMPLED] for one in others) - victim[SAMPLED]
        <= unknown * LONGEST,
        "trained tokens of the server are the clients'": 0
        <= status["trained_tokens"] - sum(one[TOKENS] for one in others) - victim[TOKENS]
        <= DATUMS * (LENGTH + 1),
        "no request failed": not sum(one[FAILED] for one in counts),
        "updates of equal clients are within 10 %": max(updates) - min(updates) <= 0.1 * mean,
        "the run of the killed client was freed": watched["run_freed_s"] is not None,
        "the killed rank was replaced": watched["all_go_on_s"] is not None and status["counts"]["recoveries"] == 1,
    }
    memory = grown(watched["samples"])
    for kind in OURS:
        checks[f"{kind} does not grow"] = all(memory[kind][what]["grown"] <= most for what, most in GROWTH.items())
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "seconds": round(watched["seconds"], 1),
        "clients": CLIENTS,
        "in_flight": in_flight,
        "updates": updates,
        "updates_a_second": round(sum(updates) / watched["seconds"], 2),
        "updates_spread": round((max(updates) - min(updates)) / mean, 4),
        "samples": int(samples),
        "samples_a_second": round(sum(one[ANSWERED] for one in watched["at_end"]) / watched["seconds"], 1),
        "sampled_tokens_a_second": round(sum(one[SAMPLED] for one in watched["at_end"]) / watched["seconds"]),
        "sample_wait_s": {f"p{share}": round(float(np.percentile(waits, share)), 3) for share in (50, 99, 100)},
        "session_timeout_s": SESSION_TIMEOUT_S,
        **{name: watched[name] for name in ("run_freed_s", "rank_recovered_s", "all_go_on_s", "cpu_s")},
        "problems": [problem for report in reports.values() for problem in report["problems"]],
        "memory": memory,
        "held": watched["samples"],
    }  # fmt: skip


def grown(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind of process, what it held in the first and the last third behind the warm-up (means), and at most."""
    samples = samples[int(WARM_UP * len(samples)) :]
    third = max(1, len(samples) // 3)
    found: dict[str, Any] = {}
    for kind in (*OURS, "ray"):
        found[kind] = {}
        for what in GROWTH:
            values = [[one[kind][what] for one in some if kind in one] for some in (samples[:third], samples[-third:])]
            first, last = (float(np.mean(some)) for some in values)
            found[kind][what] = {
                "first_third": round(first), "last_third": round(last), "grown": round(last - first),
                "most": max(one[kind][what] for one in samples if kind in one),
            }  # fmt: skip
    return found
