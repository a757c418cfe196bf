"""Recomputed and compiled layers: which, how often, what is kept, and a clear error without a compiler."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed import fsdp
from slimefsdp.errors import ConfigError
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder(num_hidden_layers=3)


class CountOperations(TorchDispatchMode):
    """Counts the operations that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def work_of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Forward runs of each layer's MLP, operations, parameter names, and gradients of one micro-batch."""
    trainer = Trainer(config, device=CPU)
    runs = [0] * len(trainer.policy.decoder_layers())
    for index, layer in enumerate(trainer.policy.decoder_layers()):
        # before, not after: a recomputation ends as soon as it has what backward needs
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    with CountOperations() as counter:
        trainer.forward_backward(batch)
    with_grad = list(runs)
    trainer.compute_log_probs(batch)
    gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}
    without_grad = [after - before for after, before in zip(runs, with_grad, strict=True)]
    return {"runs": with_grad, "without grad": without_grad, "counts": counter.counts, "gradients": gradients}


def of_model(**model: Any) -> dict[str, Any]:
    return {"model": model, "batch": {"max_tokens_per_rank": 512}}  # one micro-batch


@pytest.fixture(scope="module")
def stored(folder: Path, ranks: RankPool) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(1, work_of_a_step, settings(folder, **of_model()), make_batch(folder))[0]
    assert found["runs"] == [1, 1, 1]
    return found


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_every_layer_is_recomputed_in_backward_alone(
    folder: Path, ranks: RankPool, stored: dict[str, Any], kind: str
) -> None:
    config = settings(folder, **of_model(activation_checkpointing=kind))
    found = ranks.run(1, work_of_a_step, config, make_batch(folder))[0]
    assert found["runs"] == [2, 2, 2] and found["without grad"] == [1, 1, 1]
    assert found["gradients"].keys() == stored["gradients"].keys()  # the names too
    assert largest_difference(found["gradients"], stored["gradients"]) == 0.0


def test_selective_keeps_products_and_attention_and_recomputes_the_rest(
    folder: Path, ranks: RankPool, stored: dict[str, Any]
) -> None:
    batch, counts = make_batch(folder), {"none": stored["counts"]}
    for kind in ("full", "selective"):
        config = settings(folder, **of_model(activation_checkpointing=kind))
        counts[kind] = ranks.run(1, work_of_a_step, config, batch)[0]["counts"]
    kept = ("mm", "_scaled_dot_product_flash_attention_for_cpu")
    for name in kept:
        assert counts["selective"][name] == counts["none"][name] < counts["full"][name], name
    for name in ("rsqrt", "silu"):
        assert counts["selective"][name] == counts["full"][name] > counts["none"][name], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "keeps"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_selective_keeps_the_products_of_experts_that_no_bias_is_added_to_in_place(
    tiny_folder: TinyFolder, ranks: RankPool, architecture: str, keeps: bool, dtype: str
) -> None:
    path = tiny_folder(architecture)
    batch, found = make_batch(path), {}
    for kind in ("none", "full", "selective"):
        config = settings(path, **of_model(activation_checkpointing=kind), precision={"compute_dtype": dtype})
        found[kind] = ranks.run(1, work_of_a_step, config, batch)[0]
        assert largest_difference(found[kind]["gradients"], found["none"]["gradients"]) == 0.0
    none, full, selective = (one["counts"]["_grouped_mm"] for one in found.values())
    assert none < full and selective == (none if keeps else full)


# ---------------------------------------------------------------------- compile


def compiled_step(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], np.ndarray, int]:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return gradients, trainer.compute_log_probs(batch).log_probs, graphs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_layers_that_are_recomputed_compute_the_same(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    folder = tiny_folder(num_hidden_layers=1)  # each is compiled for itself, and by every rank
    batch, world = make_batch(folder), 1
    sections: dict[str, dict[str, Any]] = {
        "mesh": {"dp": world},
        "precision": {"compute_dtype": "float32"},
        "model": {"activation_checkpointing": "full"},
    }
    plain, plain_log_probs, none = ranks.run(world, compiled_step, settings(folder, **sections), batch)[0]
    sections["model"] = {**sections["model"], "compile": True}
    ours, log_probs, graphs = ranks.run(world, compiled_step, settings(folder, **sections), batch)[0]
    assert none == 0 and graphs > 0
    largest = max(gradient.abs().max().item() for gradient in plain.values())
    assert largest_difference(ours, plain) <= 1e-5 * largest and abs(log_probs - plain_log_probs).max() <= 1e-5


def without_a_compiler(rank: int, config: RunConfig) -> None:
    """A trainer where the last rank's machine lacks the compiler."""
    import os

    if rank < torch.distributed.get_world_size() - 1:
        Trainer(config, device=CPU)
        return
    kept = os.environ.get("CXX")
    os.environ["CXX"] = "no-such-compiler"
    try:
        Trainer(config, device=CPU)
    finally:
        os.environ.pop("CXX") if kept is None else os.environ.__setitem__("CXX", kept)


def test_compiling_without_a_compiler_is_refused_at_launch(folder: Path, ranks: RankPool) -> None:
    with refused(ConfigError, "model.compile", "no-such-compiler") as caught:
        ranks.run(2, without_a_compiler, settings(folder, mesh={"dp": 2}, model={"compile": True}))
    assert "CXX" in str(caught.value.hint)
    ranks.run(1, without_a_compiler, settings(folder))


# ---------------------------------------------------------------------- inputs on the host


def inputs_of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Gradients of one micro-batch, and the inputs of layers: moved to the host, and still there after the forward.

    The host is the device here, so a copy stands for what is moved.
    """
    moved: list[StorageWeakRef] = []
    left: list[int] = []

    def copied(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
        assert not pin
        moved.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor.clone()

    original = fsdp.to_host
    fsdp.to_host = copied  # type: ignore[assignment]
    try:
        trainer = Trainer(config, device=CPU)
        trainer.policy.register_forward_hook(lambda *_: left.append(sum(not one.expired() for one in moved)))
        trainer.forward_backward(batch)
        in_training = len(moved)
        trainer.compute_log_probs(batch)
    finally:
        fsdp.to_host = original
    trained = [(name, p) for name, p in trainer.policy.named_parameters() if p.grad is not None]
    gradients = {name: p.grad.full_tensor() for name, p in trained}
    return {"moved": in_training, "without grad": len(moved) - in_training, "left": left[0], "gradients": gradients}


@pytest.mark.parametrize("parts", [{}, {"mesh": {"dp": 1, "cp": 2}, "lora": {"rank": 2}}], ids=["alone", "adapters"])
def test_inputs_of_recomputed_layers_leave_the_device_and_change_no_bit(
    folder: Path, ranks: RankPool, parts: dict[str, Any]
) -> None:
    number, batch = 2 if parts else 1, make_batch(folder)
    stored = ranks.run(number, inputs_of_a_step, settings(folder, **of_model(), **parts), batch)
    model = of_model(activation_checkpointing="offload")
    for found, without in zip(
        ranks.run(number, inputs_of_a_step, settings(folder, **model, **parts), batch), stored, strict=True
    ):
        assert (found["moved"], found["without grad"], found["left"]) == (3, 0, 0)
        assert (without["moved"], len(found["gradients"])) == (0, len(without["gradients"])) and found["gradients"]
        assert largest_difference(found["gradients"], without["gradients"]) == 0.0
