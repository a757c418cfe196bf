"""A script: ranks and engines on a Ray cluster that counts two GPUs, which there are not; prints who was given which.

It runs in a process of its own, beside whatever cluster the tests have. What takes a GPU from Ray computes on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback only, as actors.cluster.connect.connect does it

import ray

from actors.engines.pool import EnginePool
from actors.fault_tolerance.supervisor import SupervisedGroup
from slimefsdp.config import RunConfig, config_from_dict

GPUS = 2


def settings(model: str) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": model},
            "mesh": {"dp": GPUS},
            "precision": {"compute_dtype": "float32"},
            "optim": {"total_updates": 100},
            "rollout": {"engines": GPUS, "max_new_tokens": 4, "placement": "colocated"},
        }
    )


def gpus(self: Any) -> list[str]:
    """Of an actor: those that Ray gave it, and the one that CUDA would show it."""
    return [*map(str, ray.get_gpu_ids()), os.environ["CUDA_VISIBLE_DEVICES"]]


def given(actors: list[Any]) -> list[list[str]]:
    return ray.get([actor.__ray_call__.remote(gpus) for actor in actors], timeout=300)


def main(model: str) -> None:
    # its own: without an address Ray would join a cluster that a test beside this one has started
    ray.init(address="local", num_cpus=2 * GPUS, num_gpus=GPUS, include_dashboard=False, log_to_driver=False)
    colocated = settings(model)
    group = SupervisedGroup.launch(colocated)
    engines = EnginePool.launch(colocated, group, restarts=True)
    found = {"ranks": given(group.receivers), "engines": given(engines.receivers)}
    engines.update_from(group)
    ray.kill(engines.receivers[1])
    engines.generate([[5, 6]] * GPUS, samples_per_prompt=1, seed=(0,))
    found["engines, one new"] = given(engines.receivers)
    engines.shutdown()
    group.shutdown()
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
