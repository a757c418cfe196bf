"""Trainer ranks and real vLLM servers together: updates on meshes, servers that are killed, a run ahead of training.

Run with SLIMEFSDP_VLLM_PYTHON naming the interpreter of an environment that scripts/setup_vllm.sh made; takes minutes.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transformers

from actors.engines.pool import EnginePool
from actors.loop import train
from actors.workers.worker_group import WorkerGroup
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.monitoring.metrics_log import read_metrics
from tests.support.waiting import PATIENCE_S

PYTHON = os.environ.get("SLIMEFSDP_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="SLIMEFSDP_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
]
PROMPTS = ["sort 31942", "sort 5", "sort 90210", "sort 777"]
CLUSTER = {"launch_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S, "sync_timeout_s": 300.0, "max_restarts": 3}
CLOSE = 1e-4  # of log-probs in float32


def servers(engines: EnginePool) -> list[int]:
    asked = [engine.__ray_call__.remote(lambda self: self._client.child.pid) for engine in engines.receivers]
    found: list[int] = ray.get(asked, timeout=PATIENCE_S)
    return found


def greatest_difference(group: Any, samples: list[Any]) -> float:
    batch = RolloutBatch.from_samples(
        [{"tokens": one.tokens, "response_length": one.response_length} for one in samples],
        temperature=group.config.rollout.temperature,
    )
    drawn = np.concatenate([one.log_probs for one in samples])
    return float(np.abs(group.compute_log_probs(batch).log_probs - drawn).max())


def test_servers_that_are_killed_cost_their_own_samples_and_come_back(
    cluster: None, make_config: Any, small_batch: RolloutBatch, tmp_path: Path
) -> None:
    config = make_config(
        run={"dir": str(tmp_path / "run")},
        mesh={"dp": 2},
        batch={"max_tokens_per_rank": 512},
        rollout={"engine": "vllm", "engine_python": PYTHON, "engines": 2, "max_new_tokens": 400, "temperature": 0.7},
        cluster=CLUSTER,
    )
    group = WorkerGroup.launch(config)
    engines = EnginePool.launch(config, restarts=True)
    try:
        version = engines.update_from(group)
        assert max(engines.check_log_probs(group, PROMPTS)) < CLOSE
        first, second = servers(engines)
        with ThreadPoolExecutor(1) as thread:
            drawing = thread.submit(engines.generate, PROMPTS, samples_per_prompt=4, seed=(1,))
            time.sleep(1.0)
            assert not drawing.done()
            os.kill(second, signal.SIGKILL)
            found, samples = drawing.result(timeout=PATIENCE_S)
        assert found == version and [one.prompt for one in samples] == [place for place in range(4) for _ in range(4)]
        assert greatest_difference(group, samples) < CLOSE
        assert servers(engines)[0] == first and servers(engines)[1] != second
        group.train_step(small_batch)
        os.kill(first, signal.SIGKILL)
        version = engines.update_from(group)
        assert servers(engines)[0] != first
        assert max(engines.check_log_probs(group, PROMPTS)) < CLOSE
        assert engines.generate(PROMPTS, samples_per_prompt=1, seed=(2,))[0] == version
    finally:
        engines.shutdown()
        group.shutdown()


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize(
    ("mesh", "transport"),
    [
        ({"dp": 1}, "broadcast"),
        ({"dp": 2}, "broadcast"),
        ({"dp": 1, "cp": 2}, "broadcast"),
        ({"dp": 2}, "disk"),
        ({"dp": 2}, "ipc"),
    ],
    ids=["1", "dp2", "cp2", "disk", "ipc"],
)
def test_after_every_update_greedy_tokens_are_those_of_the_exported_model(
    cluster: None,
    make_config: Any,
    example: Path,
    untied_folder: Path,
    small_batch: RolloutBatch,
    tmp_path: Path,
    mesh: dict[str, int],
    transport: str,
    head: str,
) -> None:
    folder = {"tied": example / "model", "untied": untied_folder}[head]
    assert read_model_folder(folder).config["tie_word_embeddings"] == (head == "tied")
    config = make_config(
        run={"dir": str(tmp_path / "run")},
        model={"path": str(folder)},
        mesh=mesh,
        batch={"max_tokens_per_rank": 256},
        rollout={
            "engine": "vllm", "engine_python": PYTHON, "engines": 1, "max_new_tokens": 24,
            "weight_transport": transport,
        },
        cluster=CLUSTER,
    )  # fmt: skip
    group = WorkerGroup.launch(config)
    engines = EnginePool.launch(config, restarts=True)
    try:
        for update in range(3):
            engines.update_from(group)
            group.export_hf(tmp_path / f"model{update}")
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"model{update}").eval()
            ends = sorted(engines.end_token_ids)
            for sample in engines.generate(PROMPTS, samples_per_prompt=1, seed=(0,), greedy=True)[1]:
                prompt = sample.tokens[: -sample.response_length]
                expected = model.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    do_sample=False, max_new_tokens=24, eos_token_id=ends, pad_token_id=0,
                )  # fmt: skip
                assert sample.tokens == expected[0].tolist()
            assert max(engines.check_log_probs(group, PROMPTS)) < CLOSE
            group.train_step(small_batch)
    finally:
        engines.shutdown()
        group.shutdown()


def parity(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    return {"reward": len(response) % 2 + len(set(response)) / 10}


@pytest.mark.parametrize("ahead", [{}, {"max_staleness": 2, "on_update": "continue"}], ids=["in turn", "ahead"])
def test_a_run_samples_from_a_server_what_it_trains_on(
    cluster: None, make_config: Any, example: Path, tmp_path: Path, ahead: dict[str, Any]
) -> None:
    config = make_config(
        run={"steps": 10, "dir": str(tmp_path / "run")},
        mesh={"dp": 1},
        batch={"samples_per_update": 16, "max_tokens_per_rank": 128},
        data={"train": str(example / "train.jsonl"), "heldout": str(example / "heldout.jsonl")},
        rollout={
            "engine": "vllm", "engine_python": PYTHON, "engines": 1, "prompts_per_step": 4, "samples_per_prompt": 4,
            "max_new_tokens": 8, "temperature": 1.3, "reward": f"{__name__}:parity", **ahead,
        },
        cluster=CLUSTER,
    )  # fmt: skip
    train(config)
    rows = read_metrics(config.run.dir)
    assert [row["weight_version"] for row in rows] == list(range(1, 11))
    if not ahead:
        assert max(row["rollout_mismatch_max"] for row in rows) < CLOSE
    else:
        assert 0 < max(row["rollout/staleness_max"] for row in rows) <= 2
        assert min(row["rollout_mismatch_max"] for row in rows) < CLOSE
