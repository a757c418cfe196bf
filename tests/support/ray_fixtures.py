"""What the tests with real processes share: a local Ray cluster, the sort-digits example, a trainer group of two."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.cluster.connect import connect, disconnect
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.forked_workers import forked_workers
from tests.support.ragged import ragged_batch
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 320  # of the example's model
MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that scripts/make_sort_digits.py writes: model, demonstrations, prompts."""
    spec = importlib.util.spec_from_file_location("make_sort_digits", ROOT / "scripts" / "make_sort_digits.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("sort_digits")
    script.write_sort_digits(folder)
    return folder


@pytest.fixture(scope="session")
def make_config(example: Path) -> MakeConfig:
    """Settings for the example's model on two float32 CPU ranks; sections given are laid over them."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        tree: dict[str, Any] = {
            "model": {"path": str(example / "model")},
            "mesh": {"dp": 2, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": 64},
            "optim": {"lr": 1e-3, "total_updates": 1000},
            "rollout": {"temperature": 0.8, "max_new_tokens": 8, "engines": 2},
            "cluster": {"call_timeout_s": 120.0, "sync_timeout_s": 60.0},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        return config_from_dict(tree)

    return make


@pytest.fixture(scope="session")
def cluster(make_config: MakeConfig) -> Iterator[None]:
    """A local Ray cluster with room for every group of the session."""
    with forked_workers():
        connect(make_config(mesh={"dp": 24}))
        yield
        disconnect()


@pytest.fixture(scope="session")
def actor_config(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The settings of `actor_group`: several updates a step, a colocated reference model."""
    return make_config(
        run={"dir": str(tmp_path_factory.mktemp("run"))}, batch={"samples_per_update": 6}, loss={"kl_coefficient": 0.2}
    )


@pytest.fixture(scope="session")
def actor_group(cluster: None, actor_config: RunConfig) -> Iterator[Any]:
    from actors.workers.worker_group import WorkerGroup

    group = WorkerGroup.launch(actor_config)
    group.save(0, {"cursor": 17})
    yield group
    group.shutdown()


@pytest.fixture
def group(actor_group: Any) -> Any:
    """Two ranks as they were when they were launched."""
    actor_group.wake_up()
    actor_group.load(0)
    actor_group.update_ref()
    return actor_group


@pytest.fixture(scope="session")
def batch() -> RolloutBatch:
    """Ragged samples in groups of four, with holes in their masks; one group without variance."""
    return ragged_batch(np.random.default_rng(3), longest=40, tokens=(0, VOCAB_SIZE), without_variance=4)


@pytest.fixture(scope="session")
def small_batch(batch: RolloutBatch) -> RolloutBatch:
    """Few enough samples for one update."""
    return batch.select([4, 5, 6, 7])


def end_actor(actor: Any) -> None:
    """Kills an actor, and returns when calls of it fail: `ray.kill` alone returns before."""
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote(), timeout=PATIENCE_S)
