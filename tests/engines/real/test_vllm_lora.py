"""A real vLLM samples from weights that it was sent once and from an adapter that every later update brings alone.

Run with SLIMEFSDP_VLLM_PYTHON naming the interpreter of an environment that scripts/setup_vllm.sh made; takes minutes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transformers

from actors.engines.pool import EnginePool
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import SyncError
from slimefsdp.models.hf_folder import read_model_folder
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S

PYTHON = os.environ.get("SLIMEFSDP_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="SLIMEFSDP_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
]
PROMPTS = ["sort 31942", "sort 5", "sort 90210", "sort 777"]
CLUSTER = {"launch_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S, "sync_timeout_s": 300.0, "max_restarts": 3}
CLOSE = 1e-4  # of log-probs in float32
RATE = 0.02  # so that few updates make other tokens the likeliest


def settings(
    make_config: Any, run_dir: Path, *, rollout: dict[str, Any], lora: dict[str, Any], **more: Any
) -> RunConfig:
    own = {"engine": "vllm", "engines": 1, "max_new_tokens": 24, **rollout}
    if "engine_urls" not in own:
        own["engine_python"] = PYTHON
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "batch": {"max_tokens_per_rank": 512},
        "optim": {"lr": RATE},
        "lora": {"sync": "adapters", **lora},
        "rollout": own,
        "cluster": CLUSTER,
        **more,
    }
    config: RunConfig = make_config(**tree)
    return config


@contextmanager
def running(config: RunConfig) -> Iterator[tuple[WorkerGroup, EnginePool]]:
    group = WorkerGroup.launch(config)
    try:
        engines = EnginePool.launch(config, restarts=True)
        try:
            yield group, engines
        finally:
            engines.shutdown()
    finally:
        group.shutdown()


def greatest_difference(group: Any, samples: list[Any], temperature: float) -> float:
    """Of log-probs: what the server drew with, and what the trainer computes."""
    batch = RolloutBatch.from_samples(
        [{"tokens": one.tokens, "response_length": one.response_length} for one in samples], temperature=temperature
    )
    drawn = np.concatenate([one.log_probs for one in samples])
    return float(np.abs(group.compute_log_probs(batch).log_probs - drawn).max())


@torch.no_grad()
def difference_from_merged(folder: Path, samples: list[Any], temperature: float) -> float:
    """The same against Hugging Face with the merged weights, at any temperature."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = 0.0
    for one in samples:
        logits = model(torch.tensor([one.tokens])).logits[0, -one.response_length - 1 : -1] / temperature
        tokens = torch.tensor(one.tokens[-one.response_length :])
        exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        found = max(found, float((exact - torch.tensor(one.log_probs)).abs().max()))
    return found


def drawn_at(engines: EnginePool, temperature: float) -> list[Any]:
    requests = engines.requests(PROMPTS, samples_per_prompt=4, seed=(1,))
    asked = [
        dataclasses.replace(one, params=dataclasses.replace(one.params, temperature=temperature)) for one in requests
    ]
    return engines.draw(asked)[1]


def check_greedy(group: Any, engines: EnginePool, folder: Path) -> list[list[int]]:
    """Whether greedy tokens are those of Hugging Face with the merged weights; returns them."""
    group.export_hf(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    samples = engines.generate(PROMPTS, samples_per_prompt=1, seed=(0,), greedy=True)[1]
    for sample in samples:
        prompt = sample.tokens[: -sample.response_length]
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=24, eos_token_id=sorted(engines.end_token_ids), pad_token_id=0,
        )  # fmt: skip
        assert sample.tokens == expected[0].tolist()
    return [sample.tokens for sample in samples]


def servers(engines: EnginePool) -> list[int]:
    asked = [engine.__ray_call__.remote(lambda self: self._client.child.pid) for engine in engines.receivers]
    found: list[int] = ray.get(asked, timeout=PATIENCE_S)
    return found


@pytest.mark.parametrize(
    ("head", "mesh", "transport", "own", "lora"),
    [
        ("tied", {"dp": 2}, "broadcast", 0.7, {"rank": 8}),
        ("untied", {"dp": 1}, "disk", 1.0, {"rank": 3, "alpha": 5.0, "targets": ["*.q_proj", "*.up_proj", "head"]}),
        ("untied", {"dp": 2}, "ipc", 1.3, {"rank": 4}),
    ],
    ids=["broadcast", "disk", "ipc"],
)
def test_after_a_first_update_each_brings_the_adapter_alone_and_decides_tokens_and_log_probs(
    cluster: None,
    make_config: Any,
    example: Path,
    untied_folder: Path,
    small_batch: RolloutBatch,
    tmp_path: Path,
    head: str,
    mesh: dict[str, int],
    transport: str,
    own: float,
    lora: dict[str, Any],
) -> None:
    folder = {"tied": example / "model", "untied": untied_folder}[head]
    config = settings(
        make_config, tmp_path / "run", mesh=mesh, model={"path": str(folder)}, lora=lora,
        rollout={"weight_transport": transport, "temperature": own},
    )  # fmt: skip
    with running(config) as (group, engines):
        whole = group.update_weights(engines.receivers)
        merged = 4 * sum(int(np.prod(one.shape)) for one in read_model_folder(folder).tensors.values())
        assert whole.bytes > merged  # and the adapter
        greedy = [check_greedy(group, engines, tmp_path / "model0")]
        for update in range(1, 4):
            group.train_step(small_batch)
            report = group.update_weights(engines.receivers)
            print(f"update {update} of {report.bytes} bytes, merged {merged}, took {report.seconds:.2f} s")
            assert report.version == update and report.bytes == whole.bytes - merged < merged / 3
            greedy.append(check_greedy(group, engines, tmp_path / f"model{update}"))
            assert greatest_difference(group, drawn_at(engines, own), own) < CLOSE
            for temperature in (0.7, 1.0, 1.3):
                samples = drawn_at(engines, temperature)
                difference = difference_from_merged(tmp_path / f"model{update}", samples, temperature)
                print(f"update {update}, temperature {temperature}: log-probs differ by {difference:.1e} at most")
                assert difference < CLOSE
        assert greedy[0] != greedy[-1], "training changed no token, so that this shows nothing"


def test_servers_that_are_killed_come_back_with_all_weights_and_the_adapter(
    cluster: None, make_config: Any, small_batch: RolloutBatch, tmp_path: Path
) -> None:
    config = settings(
        make_config, tmp_path / "run", lora={"rank": 8},
        rollout={"engines": 1, "max_new_tokens": 400, "temperature": 0.7},
    )  # fmt: skip
    with running(config) as (group, engines):
        engines.update_from(group)
        for _ in range(2):
            group.train_step(small_batch)
            version = engines.update_from(group)
        (first,) = servers(engines)
        with ThreadPoolExecutor(1) as thread:
            drawing = thread.submit(engines.generate, PROMPTS, samples_per_prompt=4, seed=(1,))
            time.sleep(1.0)
            assert not drawing.done()
            os.kill(first, signal.SIGKILL)
            found, samples = drawing.result(timeout=PATIENCE_S)
        assert found == version and servers(engines) != [first]
        assert greatest_difference(group, samples, 0.7) < CLOSE
        group.train_step(small_batch)
        report = group.update_weights(engines.receivers)
        assert report.bytes < 4 * 8 * 10_000, "the adapter alone"
        assert max(engines.check_log_probs(group, PROMPTS)) < CLOSE


def test_samples_go_on_across_an_update_of_the_adapter(
    cluster: None, make_config: Any, small_batch: RolloutBatch, tmp_path: Path
) -> None:
    config = settings(make_config, tmp_path / "run", lora={"rank": 8}, rollout={"max_new_tokens": 400})
    with running(config) as (group, engines):
        engines.update_from(group)
        for _ in range(6):
            group.train_step(small_batch)
            with ThreadPoolExecutor(1) as thread:
                drawing = thread.submit(engines.generate, PROMPTS, samples_per_prompt=4, seed=(1,), may_mix=True)
                time.sleep(1.5)
                version = engines.update_from(group)
                samples = drawing.result(timeout=PATIENCE_S)[1]
            split = [one for one in samples if len(one.versions) == 2]
            if not split:
                continue
            batch = RolloutBatch.from_samples(
                [{"tokens": one.tokens, "response_length": one.response_length} for one in split]
            )
            exact = iter(group.compute_log_probs(batch).log_probs)
            for one in split:
                own = np.array([next(exact) for _ in one.log_probs])
                apart = np.abs(own - one.log_probs)
                new = one.versions[1]
                assert new.version == version and apart[new.start :].max() < CLOSE
                assert apart[: new.start].max() > CLOSE, "the update changed nothing, so that this shows nothing"
            return
        pytest.fail("no update came while samples were drawn")


def test_an_adapter_that_vllm_has_no_place_for_ends_the_update_and_not_the_server(
    cluster: None, make_config: Any, small_batch: RolloutBatch, tmp_path: Path
) -> None:
    config = settings(
        make_config, tmp_path / "run", lora={"rank": 8},
        rollout={"engine_args": ["--lora-target-modules", "qkv_proj", "o_proj"]},
    )  # fmt: skip
    with running(config) as (group, engines):
        with refused(SyncError, "update_weights", "mlp.down_proj"):
            group.update_weights(engines.receivers)
        assert ray.get(engines.receivers[0].health.remote(), timeout=PATIENCE_S) is None
