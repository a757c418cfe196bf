"""An update that fails in the middle leaves weights of no update: whatever reads them is refused until a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError
from slimefsdp.optim import optimizer
from slimefsdp.rpc import DEFAULT_ADAPTER
from slimefsdp.trainer import Trainer
from tests.support.plain_critic import critic_batch, critic_settings
from tests.support.rank_pool import RankPool
from tests.support.trainers import error_of, fingerprint, fresh_batch, settings

CPU = torch.device("cpu")


def fail_halfway(update: Callable[[], object]) -> str:
    """Makes an update that finds no memory behind AdamW's first group of parameters; what it raises."""
    original = optimizer.adamw

    def failing(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer, "adamw", failing)
        try:
            update()
        except MemoryError as error:
            return str(error)
    return "nothing"


def reading(trainer: Trainer, folder: Path) -> dict[str, Callable[[], object]]:
    """The calls that read weights or moments, or change them."""
    return {
        "train_step": lambda: trainer.train_step(fresh_batch(1)),
        "forward_backward": lambda: trainer.forward_backward(fresh_batch(1)),
        "optimizer_step": lambda: trainer.optimizer_step(),
        "compute_log_probs": lambda: trainer.compute_log_probs(fresh_batch(1)),
        "update_weights": lambda: trainer.update_weights([]),
        "update_ref": lambda: trainer.update_ref(),
        "save": lambda: trainer.save(2),
        "export_hf": lambda: trainer.export_hf(folder / "exported"),
        "export_adapter": lambda: trainer.export_adapter(folder / "adapter"),
    }


def half_taken(rank: int, config: RunConfig, folder: Path, in_step: bool) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch(0))
    trainer.save(1)
    saved = fingerprint(trainer.policy)
    reference = trainer.compute_log_probs(fresh_batch(1), "ref").log_probs.tobytes()
    if in_step:
        failed = fail_halfway(lambda: trainer.train_step(fresh_batch(1)))
    else:
        trainer.forward_backward(fresh_batch(1))
        failed = fail_halfway(trainer.optimizer_step)
    at_failure = fingerprint(trainer.policy)
    refused = {call: error_of(make) for call, make in reading(trainer, folder).items()}
    trainer.zero_grad()
    trainer.sleep()
    trainer.wake_up()
    found = {
        "failed": failed,
        "in part": at_failure != saved,
        "refused": refused,
        "left alone": fingerprint(trainer.policy) == at_failure and trainer.updates_taken == 1,
        "reference": trainer.compute_log_probs(fresh_batch(1), "ref").log_probs.tobytes() == reference,
        "no such checkpoint": type(error_of(lambda: trainer.load(7))).__name__,
        "still refused": type(error_of(lambda: trainer.train_step(fresh_batch(1)))).__name__,
    }
    trainer.load("latest")
    found["loaded"] = fingerprint(trainer.policy) == saved
    trainer.train_step(fresh_batch(1))
    found["end"] = fingerprint(trainer.policy)
    return found


def straight(rank: int, config: RunConfig) -> str:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch(0))
    trainer.save(1)
    trainer.compute_log_probs(fresh_batch(1), "ref")
    trainer.train_step(fresh_batch(1))
    return fingerprint(trainer.policy)


@pytest.mark.parametrize("in_step", [True, False], ids=["train_step", "optimizer_step"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_calls_that_read_weights_are_refused_until_a_load_which_heals_to_the_bit(
    folder: Path, ranks: RankPool, tmp_path: Path, optim: str, in_step: bool
) -> None:
    config, undisturbed = (
        settings(folder, optim={"name": optim}, loss={"kl_coefficient": 0.1}, run={"dir": str(tmp_path / name)})
        for name in ("failed", "undisturbed")
    )
    (found,) = ranks.run(1, half_taken, config, tmp_path, in_step)
    assert found["failed"] == "no memory" and found["in part"]
    for call, error in found["refused"].items():
        assert isinstance(error, StateError) and error.field == call, call
        assert "halfway" in error.message and error.hint is not None and "load a checkpoint" in error.hint
    assert found["left alone"] and found["reference"]
    assert (found["no such checkpoint"], found["still refused"]) == ("CheckpointError", "StateError")
    assert found["loaded"] and [found["end"]] == ranks.run(1, straight, undisturbed)
    assert not (tmp_path / "exported").exists() and not (tmp_path / "failed" / "checkpoints" / "step_00000002").exists()


def values_of_a_critic(rank: int, config: RunConfig) -> list[Any]:
    trainer, batch = Trainer(config, "critic", device=CPU), critic_batch()
    failed = fail_halfway(lambda: trainer.train_step(batch))
    return [failed, error_of(lambda: trainer.compute_values(batch))]


def test_a_critics_values_are_refused_too(folder: Path, ranks: RankPool) -> None:
    config = critic_settings(folder, optim={"name": "adamw"})
    ((failed, error),) = ranks.run(1, values_of_a_critic, config)
    assert failed == "no memory" and isinstance(error, StateError) and error.field == "compute_values"


def other_adapters(rank: int, config: RunConfig) -> list[Any]:
    """Two adapters, of which one fails halfway; what the calls of both come to."""
    trainer = Trainer(config, device=CPU)
    trainer.create_adapter("other", seed=1)
    trainer.train_step(fresh_batch(0))
    before = fingerprint(trainer.policy)
    trainer.use_adapter(DEFAULT_ADAPTER)
    failed = fail_halfway(lambda: trainer.train_step(fresh_batch(1)))
    refused = [error_of(lambda: trainer.train_step(fresh_batch(1)))]
    trainer.use_adapter("other")
    kept = fingerprint(trainer.policy) == before and error_of(lambda: trainer.train_step(fresh_batch(2))) is None
    trainer.create_adapter("new", seed=2)
    trains = error_of(lambda: trainer.train_step(fresh_batch(3))) is None
    trainer.use_adapter(DEFAULT_ADAPTER)
    refused.append(error_of(lambda: trainer.train_step(fresh_batch(1))))
    return [failed, refused, kept, trains]


def test_other_adapters_go_on_beside_one_whose_update_failed(folder: Path, ranks: RankPool) -> None:
    config = settings(folder, lora={"rank": 2})
    ((failed, refused, kept, trains),) = ranks.run(1, other_adapters, config)
    assert failed == "no memory" and kept and trains
    assert [type(error) for error in refused] == [StateError, StateError]
