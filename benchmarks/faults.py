"""The kill matrix: every rank x every moment x SIGKILL, and four more kinds of fault at three moments each.

    python benchmarks/faults.py --json benchmarks/results/kill_matrix.json
    python benchmarks/faults.py --ranks 4 --json benchmarks/results/kill_matrix_4.json
    python benchmarks/faults.py --tp 2 --json benchmarks/results/kill_matrix_tp.json
    python benchmarks/faults.py --device cuda    # on two GPUs, with deterministic kernels; not yet run on a GPU

A job of recorded batches runs undisturbed on a plain WorkerGroup, then once a case on a SupervisedGroup in which the
case's faults fire. Losses, log-probs, what a receiver was sent, the last checkpoint's tensors and the exported weights
must be the same to the last bit, and exactly the faults that were armed must have fired. One group serves all cases but
those of its launch. The record is written after each case; `--resume`, of the same commit, leaves out those that it
holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from actors.cluster.connect import connect, disconnect  # noqa: E402
from actors.fault_tolerance.recovery import Restarts  # noqa: E402
from actors.fault_tolerance.supervisor import SupervisedGroup  # noqa: E402
from actors.workers import worker_group  # noqa: E402
from benchmarks.record import commit, write_record  # noqa: E402
from slimefsdp.config import RunConfig  # noqa: E402
from slimefsdp.errors import SlimeError  # noqa: E402
from tests.support.faulty_worker import HANGS, MOMENTS, Fault, FaultPlan, faulty_worker  # noqa: E402
from tests.support.recorded_job import Outcome, begin, job, settings, start_receiver  # noqa: E402
from tests.support.tiny_models import save_tiny_model  # noqa: E402

PING_TIMEOUT_S = 5.0
CRASH_S, HANG_S, RECOVERY_S = 1.0, PING_TIMEOUT_S + 2.0, 15.0  # what must be met
FAULT_STEP = 4  # of 5, with checkpoints of steps 0 and 2 behind it and one at its own end
OTHER_KINDS = {
    "SIGSEGV": ("after forward", "save middle", "weight update"),
    "exit": ("reference log-probs", "after optimiser step", "wake"),
    "SIGSTOP": ("actor log-probs", "sleep", "save start"),
    "GIL": ("before forward", "after backward", "weight update"),
}
WHAT = (
    "Seconds from a fault until it was noticed, and from then until the group was where it had been, on a tiny Qwen3; "
    "identical: losses, log-probs, weights sent, checkpoint and exported weights equal those of an "
    f"undisturbed run to the last bit; a rank that is silent for {PING_TIMEOUT_S:g} s counts as hung"
)


def cases_of(ranks: int) -> Iterator[tuple[Fault, ...]]:
    """The faults of each case; in the last ones a second fault strikes while the first is made good."""
    for moment, rank in itertools.product(MOMENTS, range(ranks)):
        yield (Fault(rank, moment),)
    chosen = itertools.cycle(range(ranks))
    for kind, moments in OTHER_KINDS.items():
        for moment in moments:
            yield (Fault(next(chosen), moment, kind),)
    yield Fault(0, "after backward"), Fault(1, "init")
    yield Fault(1, "save middle"), Fault(0, "before forward")


@dataclass
class Arena:
    """Groups of one tiny model on one Ray cluster, whose ranks fail as `plan` says."""

    folder: Path
    ranks: int
    device: str = "cpu"
    tp: int = 1

    def __post_init__(self) -> None:
        self._model = save_tiny_model(self.folder / "model")
        (self.folder / "faults").mkdir()
        self.plan = FaultPlan(self.folder / "faults")
        connect(self.settings("undisturbed"))
        self.receiver = start_receiver()
        self._exports = itertools.count()

    def settings(self, run: str, **sections: dict[str, Any]) -> RunConfig:
        """Those of a run in a folder of this name."""
        dp = 1 if self.tp == self.ranks else 2
        mesh = {"dp": dp, "cp": self.ranks // dp // self.tp, "tp": self.tp, "device": self.device}
        cluster = {"ping_timeout_s": PING_TIMEOUT_S}
        return settings(self._model, self.folder / run, mesh=mesh, cluster=cluster, **sections)

    def undisturbed(self, **how: Any) -> Outcome:
        """What a job leaves on a group of plain ranks that nobody supervises."""
        group = worker_group.WorkerGroup.launch(self.settings("undisturbed"))
        begin(group)
        outcome = self.job(group, **how)
        group.shutdown()
        return outcome

    def supervised(self, run: str) -> SupervisedGroup:
        """A group whose ranks fail, also those that replace others; ready for jobs."""
        worker_group.TrainWorker = faulty_worker(self.plan.folder)  # type: ignore[misc]
        group = SupervisedGroup.launch(self.settings(run))
        begin(group)
        return group

    def job(self, group: Any, **how: Any) -> Outcome:
        """As `tests.support.recorded_job.job`."""
        return job(group, self.receiver, self.folder / f"exported_{next(self._exports)}", **how)


class Matrix:
    """Runs cases on a group that outlives them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._expected = arena.undisturbed()
        self._group: SupervisedGroup | None = None
        self._launches = 0

    def run(self, faults: tuple[Fault, ...]) -> dict[str, Any]:
        """What became of one case; raises what the group did not recover from, or AssertionError if nothing fired."""
        plan, start = self._arena.plan, time.perf_counter()
        if faults[0].moment == "init":
            noticed_s, recovered_s = self._lost_in_launch(faults)
            outcome, recoveries = self._arena.job(self._group), ()
        else:
            group = self._group or self._launch()
            before = len(group.recoveries)
            plan.arm()
            outcome = self._arena.job(group, at_step=lambda step: plan.arm(*faults) if step == FAULT_STEP else None)
            recoveries = group.recoveries[before:]
            fired = plan.fired()
            assert recoveries and fired, f"{len(recoveries)} recoveries, {len(fired)} faults fired"
            noticed_s = recoveries[0].noticed_at - min(fault.time for fault in fired)
            recovered_s = sum(recovery.seconds for recovery in recoveries)
        return {
            "case": " + ".join(map(str, faults)),
            "fired": [str(fired.fault) for fired in plan.fired()],
            "noticed_s": round(noticed_s, 3),
            "recovered_s": round(recovered_s, 2),
            "calls_repeated": sum(recovery.calls_repeated for recovery in recoveries),
            "identical": outcome == self._expected and not any(recovery.differences for recovery in recoveries),
            "wall_s": round(time.perf_counter() - start, 1),
        }

    def close(self) -> None:
        """Ends the processes; the next case has new ones."""
        if self._group is not None:
            self._group.shutdown()
        self._group = None

    def _launch(self) -> SupervisedGroup:
        self.close()
        self._launches += 1
        self._group = self._arena.supervised(f"supervised_{self._launches}")
        return self._group

    def _lost_in_launch(self, faults: tuple[Fault, ...]) -> tuple[float, float]:
        """Launches a group in which they fire: seconds until that was noticed, and until it stood."""
        self.close()
        noticed: list[float] = []
        spend = Restarts.spend

        def noting(restarts: Restarts, error: SlimeError) -> None:
            noticed.append(time.time())
            spend(restarts, error)

        Restarts.spend = noting  # type: ignore[method-assign]
        self._arena.plan.arm(*faults)
        try:
            self._launch()
        finally:
            Restarts.spend = spend  # type: ignore[method-assign]
        fired = self._arena.plan.fired()
        assert noticed and fired, f"{len(noticed)} losses, {len(fired)} faults fired"
        return noticed[0] - min(fault.time for fault in fired), time.time() - noticed[0]


def misses(case: dict[str, Any], faults: tuple[Fault, ...]) -> list[str]:
    """What a case does not meet."""
    limit_s = HANG_S if faults[0].kind in HANGS else CRASH_S
    found = {
        f"noticed after {case['noticed_s']} s": case["noticed_s"] > limit_s,
        # with a second fault on the way it is two recoveries
        f"recovered after {case['recovered_s']} s": case["recovered_s"] > RECOVERY_S * len(faults),
        f"fired: {case['fired']}": case["fired"] != [str(fault) for fault in faults],
        "not identical": not case["identical"],
    }
    return [miss for miss, is_so in found.items() if is_so]


def software() -> dict[str, str]:
    """Ray's version, which `record.environment` leaves out, and the commit, by which `--resume` knows its own cases."""
    return {"ray": version("ray"), "commit": commit()}


def table(cases: list[dict[str, Any]]) -> str:
    """The rows of docs/recovery.md: by kind of fault, how many and how long."""
    lines = ["| fault | cases | noticed, s: median, most | recovered, s: median, most |", "|---|---|---|---|"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        name = "two at once" if " + " in case["case"] else case["case"].rpartition(", ")[2]
        kinds.setdefault(name, []).append(case)
    for name, found in kinds.items():
        columns = [sorted(case[key] for case in found) for key in ("noticed_s", "recovered_s")]
        numbers = " | ".join(f"{column[len(column) // 2]:.2f}, {column[-1]:.2f}" for column in columns)
        lines.append(f"| {name} | {len(found)} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="4: dp 2 x cp 2")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=1, help="tensor-parallel ranks among them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: as many GPUs as ranks")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--resume", action="store_true", help="leave out what the record holds already")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    done: list[dict[str, Any]] = []
    if args.resume and args.json and args.json.exists():
        done = json.loads(args.json.read_text())["results"]["cases"]
    failed = [f"{case['case']}: {miss}" for case in done for miss in case["misses"]]
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Arena(Path(folder), args.ranks, args.device, args.tp))
        for faults in cases_of(args.ranks):
            name = " + ".join(map(str, faults))
            if args.only not in name or name in [case["case"] for case in done]:
                continue
            try:
                case = matrix.run(faults)
            except (SlimeError, AssertionError) as error:
                failed.append(f"{name}: {error}")
                print(failed[-1], flush=True)
                matrix.close()
            else:
                case["misses"] = misses(case, faults)
                failed += [f"{name}: {miss}" for miss in case["misses"]]
                done.append(case)
                times = f"noticed {case['noticed_s']:6.3f} s  recovered {case['recovered_s']:5.2f} s"
                print(f"{name:48s} {times}  {', '.join(case['misses'])}", flush=True)
            write_record(
                args.json,
                WHAT,
                1,
                {"ranks": args.ranks, "device": args.device, **software(), "failed": failed, "cases": done},
            )
        matrix.close()
        disconnect()
    print(table(done))
    print(f"{len(done)} cases, {sum(len(case['fired']) for case in done)} faults fired, {len(failed)} misses")
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
