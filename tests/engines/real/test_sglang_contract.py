"""SGLang's own routes, request types and weight updater take what the engine sends them.

Run with SLIMEFSDP_SGLANG_PYTHON naming an interpreter that imports sglang.srt.entrypoints.http_server, on a machine
with or without a GPU; takes a minute. Its scheduler and kernels have no part in it: tests/support/sglang_host.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from actors.engines.child_server import ChildServer
from actors.engines.dialect import free_port, longest_sample
from actors.engines.protocol import Request, Sample
from actors.engines.served import ServedEngine
from actors.engines.sglang import SglangDialect
from actors.workers.disk_update import write_adapter, write_weights
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError, SyncError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams
from tests.support.refusals import refused
from tests.support.table_server import EMBEDDING, next_logits
from tests.support.waiting import wait_until
from tests.support.weight_sender import WeightSender

PYTHON = os.environ.get("SLIMEFSDP_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="SLIMEFSDP_SGLANG_PYTHON names no interpreter with SGLang's files"),
    pytest.mark.slow,
]
END = 2
PROMPT = (5, 6, 7)
START_S = 300.0  # of imports on a busy machine
HOST = Path(__file__).parents[2] / "support" / "sglang_host.py"


def with_adapters(make_config: Any, rollout: dict[str, Any], folder: Path) -> RunConfig:
    config: RunConfig = make_config(
        run={"dir": str(folder)},
        lora={"rank": 4, "sync": "adapters"},
        rollout={**rollout, "weight_transport": "disk"},
        cluster={"call_timeout_s": 120.0, "sync_timeout_s": 60.0},
    )
    return config


@pytest.fixture(scope="module")
def engine(make_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    folder, port = tmp_path_factory.mktemp("sglang"), free_port()
    limits = {"call_timeout_s": 120.0, "sync_timeout_s": 60.0}
    rollout = {"engine": "sglang", "engines": 1, "engine_urls": [f"http://127.0.0.1:{port}"]}
    config = make_config(rollout=rollout, cluster=limits)
    served = with_adapters(make_config, rollout, folder)
    _, _, *arguments = SglangDialect(served, read_model_folder(config.model.path)).arguments()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PYTHON), str(HOST), str(port), json.dumps(arguments)]
    child = ChildServer(command, environment, folder / "log", folder)
    engine = ServedEngine(config, 0)
    try:
        is_up = wait_until(lambda: child.status() is not None or engine._client.answers(5.0), START_S)
        assert is_up and child.status() is None, "\n".join(child.last_lines(15))
        yield engine
    finally:
        engine.stop()
        child.end()


@pytest.fixture(scope="module")
def sender(engine: ServedEngine) -> Iterator[WeightSender]:
    tensors = safetensors.torch.load_file(Path(engine.config.model.path) / "model.safetensors")
    sender = WeightSender({**tensors, EMBEDDING: tensors[EMBEDDING] * 8}, bucket_bytes=2**19)
    sender.join(engine)
    yield sender
    sender.leave()


def params(max_new_tokens: int = 6, temperature: float = 0.8, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature, **{"end_token_ids": frozenset([END]), "seed": (3,), **others})


def drawn(engine: ServedEngine, asked: Request) -> list[Sample]:
    return [sample for some in engine.generate([asked]) for sample in some]


def model_log_probs(embedding: torch.Tensor, tokens: list[int], temperature: float) -> list[float]:
    before = [PROMPT[-1], *tokens[:-1]]
    return [
        float((next_logits(embedding, last) / temperature).log_softmax(-1)[token])
        for last, token in zip(before, tokens, strict=True)
    ]


def test_its_parser_takes_our_arguments_and_its_answer_says_what_they_are(engine: ServedEngine) -> None:
    info, config = engine.info(), engine.config
    assert info.name.startswith("sglang 0.5.") and (info.dtype, info.processes, info.group) == ("float32", 1, "torch")
    assert info.max_tokens == longest_sample(config, read_model_folder(config.model.path))


def test_samples_come_from_the_weights_that_its_updater_took_in_its_own_group(
    engine: ServedEngine, sender: WeightSender
) -> None:
    for version in (0, 1):
        sender.change(version)
        sender.send(engine, version)
        for asked, temperature in (
            (params(temperature=0.7), 0.7),
            (params(greedy=True, tempered=False), 1.0),
            (params(end_token_ids=frozenset()), 0.8),
            (params(stop=("no such text",)), 0.8),
        ):
            for sample in drawn(engine, Request(PROMPT, 2, asked)):
                expected = model_log_probs(sender.tensors[EMBEDDING], sample.tokens, temperature)
                assert sample.log_probs == pytest.approx(expected, abs=1e-5)
                assert {span.version for span in sample.versions} == {version}


def test_samples_go_on_across_an_update_that_aborts_them(engine: ServedEngine, sender: WeightSender) -> None:
    sender.send(engine, 2)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 3, params(50, end_token_ids=frozenset())))
        time.sleep(0.5)
        sender.send(engine, 3)
        samples = running.result(timeout=120)
    assert all([span.version for span in one.versions] == [2, 3] and len(one.tokens) == 50 for one in samples)


def test_a_sender_that_goes_is_an_error_and_another_group_forms(engine: ServedEngine, sender: WeightSender) -> None:
    engine.begin(4, sender.manifest)
    buckets = sender.buckets()
    sender.broadcast(engine, next(buckets))
    with ThreadPoolExecutor(1) as side:
        layout, _ = sender._group.packed(next(buckets))  # type: ignore[union-attr]
        receiving = side.submit(engine.receive_broadcast, layout)
        time.sleep(0.5)
        sender.leave()
        with refused(SyncError, "update_weights", "Failed to receive weights"):
            receiving.result(timeout=120)
    with refused(StateError, "update_weights"):
        drawn(engine, Request(PROMPT, 1, params()))
    sender.join(engine)
    sender.send(engine, 5)
    assert drawn(engine, Request(PROMPT, 1, params()))[0].versions[0].version == 5


def test_it_can_be_told_to_abort_and_to_sleep(engine: ServedEngine, sender: WeightSender) -> None:
    sender.send(engine, 6)
    with ThreadPoolExecutor(1) as side:
        running = side.submit(drawn, engine, Request(PROMPT, 2, params(60, end_token_ids=frozenset())))
        time.sleep(0.5)
        engine.abort()
        assert {sample.finish_reason for sample in running.result(timeout=120)} == {"abort"}
    engine.sleep()
    engine.wake_up()
    sender.send(engine, 7)
    assert drawn(engine, Request(PROMPT, 1, params()))[0].versions[0].version == 7


def test_it_reads_the_adapters_of_updates_and_takes_requests_that_name_them(
    engine: ServedEngine, sender: WeightSender, make_config: Any, tmp_path: Path
) -> None:
    rollout = {"engine": "sglang", "engines": 1, "engine_urls": [engine._client.url]}
    another = ServedEngine(with_adapters(make_config, rollout, tmp_path), 0)
    source, sizes = read_model_folder(another.config.model.path), sender.manifest
    matrices = {}
    for name, shape in sizes.items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            matrices |= {f"{module}.lora_A": torch.randn(4, shape[1]), f"{module}.lora_B": torch.randn(shape[0], 4)}
    manifest = {**sizes, **{name: tuple(one.shape) for name, one in matrices.items()}}
    try:
        for version in (8, 9, 10):
            has_frozen = another.has_frozen("base")
            assert has_frozen == (version > 8)
            another.begin(version, manifest, frozenset(sizes if has_frozen else ()), 2.5)
            folder = tmp_path / f"weights{version}"
            if not has_frozen:
                write_weights(folder, sizes, sender.tensors.items(), source, torch.float32)
            write_adapter(folder, list(matrices.items()), 2.5, source, torch.float32)
            another.receive_disk(str(folder))
            another.commit(version)
            assert drawn(another, Request(PROMPT, 1, params()))[0].versions[0].version == version
    finally:
        another.stop()
