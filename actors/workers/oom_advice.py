"""An out-of-memory error as one to act on: what was asked for, what was expected, and which settings take less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from slimefsdp.config import RunConfig
from slimefsdp.distributed.memory_manager import free_bytes
from slimefsdp.errors import ResourceError
from slimefsdp.estimate.memory import MicroBatches, training_memory
from slimefsdp.estimate.setup import MeshShape, TrainingSetup, setup_of
from slimefsdp.model_spec import ModelSpec
from slimefsdp.rpc import Role
from slimefsdp.training.packs import TOKENS
from slimefsdp.training.plan import model_spec_of


def memory_error(
    error: Exception, config: RunConfig, role: Role, model_config: Mapping[str, Any] | None, device: torch.device
) -> ResourceError:
    """Returns the typed error of one that `is_out_of_memory`, on the rank that raised it.

    Args:
        config: with mesh.dp and fsdp.sharding as they are used; where one is auto, nothing is estimated.
        model_config: the role's config.json; None: it is not known.
    """
    tokens = getattr(error, TOKENS, None)
    in_update = tokens is not None  # elsewhere, such as in a launch or a save, no micro-batch takes part
    where = f" with a micro-batch of {tokens:,} tokens" if in_update else ""
    said = next(iter(str(error).splitlines()), type(error).__name__)
    message = f"out of memory{where}: {said}; {_megabytes(free_bytes(device))} are free for a rank"
    hint = f"{'lower batch.max_tokens_per_rank, or ' if in_update else ''}take more ranks or memory"
    model = model_spec_of(model_config)
    if model is not None and role != "ref" and "auto" not in (config.mesh.dp, config.fsdp.sharding):
        setup = _setup(config, role, model, on_cpu=device.type == "cpu")
        most = config.batch.max_tokens_per_rank
        tokens = most if tokens is None else min(tokens, most)
        # of an update with one micro-batch alone, gradients would take less
        batch = MicroBatches(tokens, rows=tokens, count=2)
        expected = training_memory(setup, batch)
        parts = {name: size for name, size in asdict(expected).items() if name != "host" and size}
        listed = ", ".join(f"{name} {_megabytes(size)}" for name, size in parts.items())
        update = "such an update" if in_update else "an update, for comparison,"
        message += f"; by the estimate of `slimefsdp plan` {update} takes {_megabytes(expected.total)}: {listed}"
        saved = {
            name: expected.total - training_memory(*way).total
            for name, way in _smaller(setup, batch, in_update=in_update).items()
        }
        ways = [
            f"{name} (-{_megabytes(size)})"
            for name, size in sorted(saved.items(), key=lambda way: way[1], reverse=True)
            if size > 0
        ]
        hint = f"what the estimate says helps, most first: {', '.join([*ways, 'more ranks or memory'])}"
    return ResourceError(message, field="batch.max_tokens_per_rank" if in_update else "mesh.dp", hint=hint)


def _setup(config: RunConfig, role: Role, model: ModelSpec, *, on_cpu: bool) -> TrainingSetup:
    """Returns the setup of a role's group. A reference and a critic in it are taken to be as large as the policy."""
    copies, dp = config.mesh_of(role)
    other = model if role == "actor" else None
    return setup_of(config, model, MeshShape(copies, dp, config.mesh.cp), on_cpu=on_cpu, reference=other, critic=other)


def _smaller(
    setup: TrainingSetup, batch: MicroBatches, *, in_update: bool
) -> dict[str, tuple[TrainingSetup, MicroBatches]]:
    """Returns setups and batches that may take less, by the setting that changes."""
    ways = {
        "fsdp.sharding=full": (replace(setup, sharding="full"), batch),
        "fsdp.cpu_offload=true": (replace(setup, cpu_offload=True), batch),
    }
    if in_update:
        tokens = max(2, batch.tokens // 2)
        ways[f"batch.max_tokens_per_rank={tokens}"] = (setup, replace(batch, tokens=tokens, rows=tokens))
        ways["model.activation_checkpointing=full"] = (replace(setup, recompute="full"), batch)
    return ways


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
