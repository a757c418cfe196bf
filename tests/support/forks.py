"""New processes that have imported everything: forked from a server, so that one costs milliseconds, not seconds.

A process has one such server, and what it imports was set by whoever spoke last: all tests take it from here.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "slimefsdp.trainer",
        "slimefsdp.weight_sync.broadcast",
        "transformers.models.qwen3.modeling_qwen3",
        "tests.support.trainers",
        "tests.support.fresh_ranks",
    ]
)
