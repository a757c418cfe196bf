"""What ranks agree on before a step: all refuse a batch or none, whatever functions of the user's own do."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from slimefsdp.batching.cost import DEFAULT_COST_MODEL
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, StateError
from slimefsdp.training.plan import plan_training
from slimefsdp.training.prepare import BatchPlanner, PreparedBatch
from slimefsdp.training.step import prepared_together
from tests.support.rank_pool import RankPool
from tests.support.small_batches import VOCAB, make_batch, settings

OWN = """
import torch.distributed as dist
def fails_on_one_rank(inputs, options):
    if dist.get_rank() == 1:
        raise OSError("no such table")
    return inputs.scores
def differs(inputs, options):
    return inputs.scores + dist.get_rank()
def loss(tokens, options):
    raise NotImplementedError
"""


def checked_and_planned(check: Any, batch: RolloutBatch) -> PreparedBatch:
    return check(batch)()


def refusals(rank: int, folder: Path, cases: list[tuple[RunConfig, RolloutBatch, Any]]) -> list[Any]:
    """What each case raises on this rank; only rank 0 has the folder of the user's own module."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        sys.path.insert(0, str(folder))
    else:  # the module is here, its second function is not
        (folder / "elsewhere").mkdir(exist_ok=True)
        (folder / "elsewhere" / "own_inputs.py").write_text(OWN.split("def loss")[0])
        sys.path.insert(0, str(folder / "elsewhere"))
    found: list[Any] = []
    for config, batch, loss in cases:
        mine = batch.replace(weight_version=rank) if loss == "other batches" else batch
        rank_state: Any = SimpleNamespace(config=config, mesh=SimpleNamespace(group=group))
        planner = BatchPlanner(config, "actor", VOCAB, None, DEFAULT_COST_MODEL)
        check: Any = planner.for_gradients if loss == "policy" else planner.for_forward
        if loss == "other plans":
            plan = plan_training(settings(batch={"samples_per_update": 2 - rank}), mine)
            check = partial(planner.for_training, plan=plan)
        try:
            prepared_together(
                rank_state, mine, partial(checked_and_planned, check, mine), rank if loss == "other options" else None
            )
            found.append(None)
        except Exception as error:
            found.append((type(error), getattr(error, "field", None), str(error)))
    sys.path.pop(0)
    sys.modules.pop("own_inputs", None)
    return found


def test_what_one_rank_cannot_do_all_ranks_refuse(tmp_path: Path, ranks: RankPool) -> None:
    (tmp_path / "own_inputs.py").write_text(OWN)
    batch = make_batch([0.0, 1.0])
    estimator = settings(advantage={"estimator": "own_inputs:fails_on_one_rank"})
    differs = settings(advantage={"estimator": "own_inputs:differs"})
    policy = settings(loss={"policy": "own_inputs:loss"})
    given = batch.replace(advantages=np.ones(batch.num_response_tokens))
    cases: list[tuple[RunConfig, RolloutBatch, Any]] = [
        (estimator, batch, "policy"), (policy, batch, "policy"), (settings(), batch.replace(rewards=None), "policy"),
        (settings(), batch, "other batches"), (estimator, batch, None), (estimator, given, "policy"),
        (settings(), batch, "policy"), (differs, batch, "policy"), (settings(), batch, "other plans"),
        (settings(), batch, "other options"),
    ]  # fmt: skip
    first, second = ranks.run(2, refusals, tmp_path, cases)
    assert first == second
    assert [error and error[:2] for error in first] == [
        (BatchError, "advantages"), (ConfigError, "loss.policy"), (BatchError, "rewards"), (StateError, "batch"),
        None, None, None, (StateError, "advantage.estimator"), (StateError, "plan"), (StateError, "batch"),
    ]  # fmt: skip
    assert "OSError: no such table" in first[0][2] and "has no 'loss'" in first[1][2]
