"""The sort-digits example with adapters of several ranks beside the run of all weights, from one warm-up.

    python benchmarks/lora_ranks.py --json benchmarks/results/lora_ranks.json --picture docs/images/lora_ranks.png

Prints the Markdown table of docs/lora.md.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sort_digits_algorithms import GRPO, compare, table

RUNS: dict[str, list[str]] = {
    "all weights": [],
    "rank 1": ["lora.rank=1", "optim.lr=3e-3"],
    "rank 8": ["lora.rank=8", "optim.lr=3e-3"],
    "rank 32": ["lora.rank=32", "optim.lr=3e-3"],
    "rank 8, a third of the rate": ["lora.rank=8", "optim.lr=1e-3"],
    "rank 8, the rate of all weights": ["lora.rank=8"],
}
"""Name -> what is set otherwise than in the example."""


rank_table = partial(table, what="trained", settings="settings")
"""The rows of docs/lora.md."""


if __name__ == "__main__":
    compare(
        __doc__,
        {name: (GRPO, settings) for name, settings in RUNS.items()},
        title="GRPO on sort-digits: adapters and all weights, one seed",
        table_of=rank_table,
    )
