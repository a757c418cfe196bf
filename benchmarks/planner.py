"""The planner under context parallelism: how even packs and layouts are, what they send, how long planning takes.

python benchmarks/planner.py --json benchmarks/results/planner.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import environment
from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.cp_sharding import hybrid_layout, layout_time, sent_rows, zigzag_layout
from slimefsdp.batching.plan import PackLimits, plan_batch
from slimefsdp.estimate.schedule import draw_lengths, measure_schedule
from slimefsdp.estimate.setup import MeshShape, TrainingSetup
from slimefsdp.model_spec import ModelSpec

SEEDS = 20
RANKS, CAP = 1024, 16_384  # of planning at scale
SAMPLES = 512
MESH = MeshShape(dp=4, cp=8)
MODELS = {
    "0.6 billion": ModelSpec(
        hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936, is_tied=True
    ),
    "8 billion": ModelSpec(
        hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=151_936
    ),
}
# lengths, max_tokens_per_rank
CASES = (
    ("lognormal(500, 1.2, 16, 16384)", 2048),
    ("lognormal(1000, 0.8, 16, 8192)", 8192),
    ("lognormal(2000, 1.0, 16, 32768)", 8192),
    ("lognormal(8000, 1.0, 16, 65536)", 8192),
)


def balance(lengths: str, max_tokens_per_rank: int, model_spec: ModelSpec) -> dict[str, Any]:
    """The worst of all seeds; against a layout that cuts everything also the mean of what is sent and of the time."""
    figures: list[dict[str, float]] = []
    for seed in range(SEEDS):
        drawn = draw_lengths(lengths, SAMPLES, seed=seed)
        cost = CostModel.of_model(model_spec)
        plan = plan_batch(drawn, PackLimits(MESH.dp, max_tokens_per_rank * MESH.cp, MESH.cp, cost))
        setup = TrainingSetup(model_spec, MESH)
        imbalance = measure_schedule(plan, drawn, setup, strategy="ring", cost=cost).imbalance
        figures.append(
            {
                "cp_tokens": imbalance.cp.tokens,
                "cp_work": imbalance.cp.work,
                "cp_work_in_the_worst_pack": imbalance.cp.worst_work,
                "cp_pairs": imbalance.cp.pairs,
                "zigzag_tokens": imbalance.zigzag.tokens,
                "zigzag_work": imbalance.zigzag.work,
                "zigzag_pairs": imbalance.zigzag.pairs,
                "data_ranks": imbalance.data_ranks,
                "data_ranks_in_every_micro_batch": imbalance.micro_batches,
            }
        )
    sent, estimated = against_zigzag(draw_lengths(lengths, SAMPLES), max_tokens_per_rank, model_spec)
    return {
        "lengths": lengths,
        "max_tokens_per_rank": max_tokens_per_rank,
        "imbalance_worst_of_seeds": {name: round(max(found[name] for found in figures), 4) for name in figures[0]},
        "rows_sent_over_zigzag": round(sent, 3),
        "estimated_time_over_zigzag": round(estimated, 3),
    }


def against_zigzag(lengths: np.ndarray, max_tokens_per_rank: int, model_spec: ModelSpec) -> tuple[float, float]:
    """(rows sent between ranks, estimated time) of the hybrid layout over those of cutting everything, for one plan."""
    cost = CostModel.of_model(model_spec)
    cp = MESH.cp
    plan = plan_batch(lengths, PackLimits(MESH.dp, max_tokens_per_rank * cp, cp, cost))
    rows, times = np.zeros(2), np.zeros(2)
    for pack in (pack for packs in plan.updates[0] for pack in packs if len(pack)):
        offsets = [0, *accumulate(lengths[pack].tolist())]
        layouts = [hybrid_layout(offsets, cp, cost), zigzag_layout(offsets, cp)]
        rows += [sum(sent_rows(layout)) for layout in layouts]
        times += [layout_time(layout, offsets, cost) for layout in layouts]
    return float(rows[0] / rows[1]), float(times[0] / times[1])


def cpu_seconds(action: Callable[[], Any], rounds: int) -> float:
    """Median CPU seconds of some rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def growth() -> dict[str, Any]:
    """Planning for 1,024 data ranks from a thousand samples to a million: how long, how even, and how full packs are.

    The exponent is that of CPU time over the last factor of ten, where what is paid once no longer shows; n log n has
    1.08 there.
    """
    rows = []
    for samples in (1_000, 10_000, 100_000, 1_000_000):
        drawn = draw_lengths("lognormal(1500, 0.8, 16, 16384)", samples)
        plan = plan_batch(drawn, PackLimits(RANKS, CAP))
        fullest = max(int(drawn[pack].sum()) for packs in plan.updates[0] for pack in packs if len(pack))
        assert fullest <= CAP, f"a pack of {fullest} tokens"
        seconds = cpu_seconds(lambda drawn=drawn: plan_batch(drawn, PackLimits(RANKS, CAP)), 3)  # type: ignore[misc]
        rows.append(
            {
                "samples": samples,
                "cpu_s": round(seconds, 4),
                "imbalance": round(plan.imbalance(drawn), 5),
                "fullest_pack_over_cap": round(fullest / CAP, 5),
            }
        )
    before, last = (float(row["cpu_s"]) for row in rows[-2:])
    return {"ranks": RANKS, "max_pack_tokens": CAP, "sizes": rows, "exponent": round(math.log10(last / before), 3)}


def speed() -> dict[str, float]:
    """CPU time of planning a million samples for 1,024 data ranks, and of laying out one pack."""
    million = draw_lengths("lognormal(1500, 0.8, 16, 16384)", 1_000_000)
    short = [0, *accumulate(draw_lengths("uniform(16, 128)", 1000).tolist())]
    mixed = [0, *accumulate(draw_lengths("lognormal(1500, 1.0, 16, 32768)", 44).tolist())]
    return {
        "plan_1m_samples_1024_ranks_s": round(cpu_seconds(lambda: plan_batch(million, PackLimits(1024, 16_384)), 3), 2),
        "plan_1m_samples_1024_ranks_cp_8_s": round(
            cpu_seconds(lambda: plan_batch(million, PackLimits(1024, 16_384 * 8, cp=8)), 3), 2
        ),
        "layout_1000_short_samples_cp_8_ms": round(1000 * cpu_seconds(lambda: hybrid_layout(short, 8), 9), 2),
        "layout_44_mixed_samples_cp_8_ms": round(1000 * cpu_seconds(lambda: hybrid_layout(mixed, 8), 9), 2),
        "zigzag_1000_short_samples_cp_8_ms": round(1000 * cpu_seconds(lambda: zigzag_layout(short, 8), 9), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = {
        "what": f"balance of {SAMPLES} samples on dp {MESH.dp} x cp {MESH.cp}, fullest over mean, over {SEEDS} seeds; "
        "CPU time of planning; work and time are estimates",
        **environment(1),
        "balance": {name: [balance(*case, model_spec) for case in CASES] for name, model_spec in MODELS.items()},
        "growth": growth(),
        "speed": speed(),
    }
    text = json.dumps(record, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
