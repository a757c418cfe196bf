"""A script: a job whose ranks are on a Ray node of their own loses that node; prints what came of it as JSON.

It runs in a process of its own, since a Ray cluster of several nodes on one machine cannot be beside another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback only, as actors.cluster.connect.connect does it

import numpy as np
import ray
from ray.cluster_utils import Cluster

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.tiny_models import save_tiny_model

STEPS, LOST_AT = 4, 2


def batch_of(step: int) -> RolloutBatch:
    rng = np.random.default_rng(step)
    return RolloutBatch.from_samples(
        [
            {"tokens": rng.integers(0, 97, 20), "response_length": 8, "reward": float(rng.random()), "group_id": i // 4}
            for i in range(8)
        ]
    )


def main(folder: Path) -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    doomed = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    config = config_from_dict(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"path": str(save_tiny_model(folder / "model", vocab_size=97))},
            "mesh": {"dp": 2, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"samples_per_update": 4},
            "optim": {"lr": 1e-3, "total_updates": 100},
            "cluster": {"address": cluster.address, "launch_timeout_s": 120.0, "call_timeout_s": 120.0},
        }
    )
    straight = WorkerGroup.launch(config)
    expected = [straight.train_step(batch_of(step))["grad_norm"].hex() for step in range(STEPS)]
    straight.shutdown()

    group = SupervisedGroup.launch(config)
    group.save(0)
    found = []
    for step in range(STEPS):
        if step == LOST_AT:
            cluster.add_node(num_cpus=2)
            cluster.remove_node(doomed, allow_graceful=False)
        found.append(group.train_step(batch_of(step))["grad_norm"].hex())
    recoveries = [[recovery.code, recovery.calls_repeated] for recovery in group.recoveries]
    group.shutdown()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps({"expected": expected, "found": found, "recoveries": recoveries}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
