"""Adapters on Ray workers: from a folder of peft and back to one; several of them, with clients at the same time."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.loop import train
from actors.workers.group_calls import submit
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.rpc import UpdateSettings
from tests.support.comparisons import largest_difference
from tests.support.peft_folders import adapters_in, farthest, merged_logits, opened_by_peft, trained_by_peft
from tests.support.plain_step import make_batch, settings
from tests.support.refusals import refused
from tests.support.runs import bits, rows_of
from tests.support.trainers import fresh_batch
from tests.support.trainers import settings as small_settings
from tests.support.waiting import PATIENCE_S, wait_until


def run_of_adapters(make_config: Any, example: Path, **sections: dict[str, Any]) -> RunConfig:
    """Settings of a short run on two ranks with one engine."""
    rollout = {
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "engines": 1,
        "reward": "tests.support.runs:variety",
    }
    data = {"train": str(example / "train.jsonl")}
    return make_config(data=data, rollout=rollout, checkpoint={"interval_steps": 1}, **sections)  # type: ignore[no-any-return]


def test_a_run_begins_from_adapters_and_leaves_them_beside_the_merged_model(
    cluster: None, make_config: Any, example: Path, tmp_path: Path
) -> None:
    base, batch = example / "model", make_batch(example / "model")
    gently = settings(base, lora={"rank": 3, "alpha": 7.0}, optim={"lr": 1e-4})
    adapters = trained_by_peft(base, gently, batch, tmp_path / "adapters", ["q_proj", "up_proj"])
    config = run_of_adapters(
        make_config,
        example,
        run={"dir": str(tmp_path / "run"), "steps": 2, "export_dir": str(tmp_path / "out")},
        lora={"path": str(adapters)},
        optim={"lr": 1e-2},
    )
    train(config)
    rows = [row for row in rows_of(config) if row["step"] > 0]
    assert len(rows) == 2 and all(row["rollout_mismatch_max"] < 1e-4 for row in rows)  # engines have them merged
    left = tmp_path / "out" / "adapter"
    assert largest_difference(adapters_in(left), adapters_in(adapters)) > 0
    assert farthest(opened_by_peft(base, left, batch), merged_logits(tmp_path / "out", batch)) < 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)


def test_a_group_writes_its_adapters_and_says_when_it_has_none(group: Any, cluster: None, tmp_path: Path) -> None:
    assert isinstance(group, WorkerGroup)
    with refused(StateError, "lora.rank", "export_adapter()"):
        group.export_adapter(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def life_of_one(group: Any, name: str, steps: int, saves: bool = False) -> list[Any]:
    """A client's loop for one adapter: what its calls said, in hex, and the log-probs at the end."""
    calls, said = group.adapter(name), []
    number = int(name[-1])
    for step in range(steps):
        batch = fresh_batch(10 * number + step)
        first = submit(calls.forward_backward, batch, with_log_probs=True)
        second = submit(calls.forward_backward, batch.replace(rewards=batch.rewards[::-1]))
        update = submit(calls.optimizer_step, UpdateSettings(lr=0.01 * (1 + number)))
        said.append((bits(first.result().metrics), bits(second.result()), bits(update.result())))
        if saves and step % 3 == 1:
            calls.save(step, {"step": step})
    return [*said, calls.compute_log_probs(fresh_batch(10 * number)).log_probs.tobytes()]


def lora_group(launch: Any, folder: Path, run: Path | None) -> Any:
    config = small_settings(
        folder,
        mesh={"dp": 2, "device": "cpu"},
        lora={"rank": 3, "alpha": 6.0},
        optim={"lr": 0.01, "total_updates": 100},
        run={} if run is None else {"dir": str(run)},
        checkpoint={"interval_steps": 1, "async_save": False},
    )
    return launch(config)


def test_clients_of_several_adapters_get_the_bits_of_a_client_alone(cluster: None, example: Path) -> None:
    names = ["client0", "client1", "client2"]
    alone = {}
    group = lora_group(WorkerGroup.launch, example / "model", None)
    try:
        for name in names:
            group.create_adapter(name, rank=1 + int(name[-1]), seed=int(name[-1]))
            alone[name] = life_of_one(group, name, 2)
            group.delete_adapter(name)
        for name in names:
            group.create_adapter(name, rank=1 + int(name[-1]), seed=int(name[-1]))
        with ThreadPoolExecutor(len(names)) as threads:
            together = dict(zip(names, threads.map(lambda name: life_of_one(group, name, 2), names), strict=True))
        assert together == alone
        listed = group.adapters()
        assert [(one.name, one.rank, one.updates_taken) for one in listed] == [
            ("default", 3, 0), *((name, 1 + index, 2) for index, name in enumerate(names)),
        ]  # fmt: skip
        with refused(StateError, "adapter", "nobody"):
            group.adapter("nobody").optimizer_step()
        with refused(ConfigError, "name", "client0"):
            group.delete_adapter(["client0"])
        with refused(StateError, "name", "client0"):
            group.create_adapter("client0")
        assert group.check_sync().is_in_sync
    finally:
        group.shutdown()


def test_a_killed_rank_costs_the_clients_of_several_adapters_no_bit(
    cluster: None, example: Path, tmp_path: Path
) -> None:
    names, found = ["client0", "client1"], []
    for name in ("straight", "struck"):
        group = lora_group(SupervisedGroup.launch, example / "model", tmp_path / name)
        try:
            for client in names:
                group.create_adapter(client, rank=1 + int(client[-1]), seed=int(client[-1]))
            group.train_step(fresh_batch(1))
            with ThreadPoolExecutor(len(names) + 1) as threads:
                lives = [threads.submit(life_of_one, group, client, 5, True) for client in names]
                if name == "struck":
                    wait_until(lambda: group.adapters()[1].updates_taken >= 3)  # noqa: B023
                    os.kill(group.health()[1].pid, signal.SIGKILL)
                found.append([life.result(timeout=PATIENCE_S) for life in lives])
            found[-1].append(bits(group.train_step(fresh_batch(2))))
            assert len(group.recoveries) == (name == "struck")
            assert all(not one.differences for one in group.recoveries)
        finally:
            group.shutdown()
    assert found[0] == found[1]


def test_a_run_sends_its_engines_adapters_alone_and_samples_from_the_trainers_own_bits(
    cluster: None, make_config: Any, example: Path, tmp_path: Path
) -> None:
    config = run_of_adapters(
        make_config,
        example,
        run={"dir": str(tmp_path / "run"), "steps": 3},
        lora={"rank": 2, "sync": "adapters"},
        precision={"compute_dtype": "bfloat16"},
        optim={"lr": 5e-2},
    )
    train(config)
    rows = [row for row in rows_of(config) if row["step"] > 0]
    assert len(rows) == 3 and rows[-1]["grad_norm"] > 0
    assert all(row["rollout_mismatch_max"] < 0.02 for row in rows)  # rounding of bfloat16, as without adapters
