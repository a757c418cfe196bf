"""A script: trains on the cluster at an address, or on one of its own, and prints what came of it as JSON.

With LOSE, the driver waits after a step until a file is there, so that a test can take a node away meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import ray

from actors.cluster.connect import disconnect
from actors.fault_tolerance.supervisor import SupervisedGroup
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch

STEPS, LOST_AT = 4, 2
READY, GONE = "ready_to_lose_a_node", "node_is_gone"


def batch_of(step: int) -> RolloutBatch:
    rng = np.random.default_rng(step)
    return RolloutBatch.from_samples(
        [
            {"tokens": rng.integers(0, 97, 20), "response_length": 8, "reward": float(rng.random()), "group_id": i // 4}
            for i in range(8)
        ]
    )


def main(model: Path, folder: Path, address: str, mesh: str, loses: bool) -> None:
    config = config_from_dict(
        {
            "run": {"dir": str(folder)},
            "model": {"path": str(model)},
            "mesh": {"device": "cpu", **json.loads(mesh)},
            "precision": {"compute_dtype": "float32"},
            "batch": {"samples_per_update": 4},
            "optim": {"lr": 1e-3, "total_updates": 100},
            "cluster": {
                "address": address or None,
                "launch_timeout_s": 200.0,
                "call_timeout_s": 120.0,
                "environment": {"SEEN_BY_RANKS": "yes"},
            },
        }
    )
    group = SupervisedGroup.launch(config)
    group.save(0)
    found = []
    for step in range(STEPS):
        if loses and step == LOST_AT:
            (folder / READY).touch()
            while not (folder / GONE).exists():
                time.sleep(0.1)
        found.append(group.train_step(batch_of(step))["grad_norm"].hex())
    group.save(STEPS)
    nodes = len([node for node in ray.nodes() if node["Alive"]])
    recoveries = [recovery.code for recovery in group.recoveries]
    group.export_hf(folder / "exported")
    group.shutdown()
    disconnect()
    print(json.dumps({"found": found, "nodes": nodes, "recoveries": recoveries}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "loses")
