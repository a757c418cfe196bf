"""Adds to an out-of-memory error an estimate of an update's memory, and the settings that need less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from slimefsdp.config import RunConfig
from slimefsdp.distributed.memory_manager import free_bytes
from slimefsdp.errors import ResourceError
from slimefsdp.estimate.memory import MicroBatches, training_memory
from slimefsdp.estimate.setup import MeshShape, setup_of
from slimefsdp.rpc import Role
from slimefsdp.training.packs import TOKENS
from slimefsdp.training.plan import model_spec_of


def memory_error(
    error: Exception, config: RunConfig, role: Role, model_config: Mapping[str, Any] | None, device: torch.device
) -> ResourceError:
    """Returns the typed error for an out-of-memory error, on the rank that raised the error.

    Args:
        config: the rank's settings. If mesh.dp or fsdp.sharding is auto, the error has no estimate.
        model_config: the role's config.json; None if it is not known.
    """
    tokens = getattr(error, TOKENS, None)
    in_update = tokens is not None  # a launch or a save, for example, has no micro-batch
    where = f" with a micro-batch of {tokens:,} tokens" if in_update else ""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    message = f"out of memory{where}: {reason}; {_megabytes(free_bytes(device))} are free for a rank"
    hint = f"{'lower batch.max_tokens_per_rank, or ' if in_update else ''}take more ranks or memory"
    model = model_spec_of(model_config)
    if model is not None and role != "ref" and "auto" not in (config.mesh.dp, config.fsdp.sharding):
        copies, dp = config.mesh_of(role)
        other_model = model if role == "actor" else None  # assumes a reference and a critic as large as the policy
        shape, on_cpu = MeshShape(copies, dp, config.mesh.cp), device.type == "cpu"
        setup = setup_of(config, model, shape, on_cpu=on_cpu, reference=other_model, critic=other_model)
        most = config.batch.max_tokens_per_rank
        tokens = most if tokens is None else min(tokens, most)
        # two micro-batches, as gradients need less memory with a single one
        batch = MicroBatches(tokens, rows=tokens, count=2)
        expected = training_memory(setup, batch)
        parts = {name: size for name, size in asdict(expected).items() if name != "host" and size}
        listed = ", ".join(f"{name} {_megabytes(size)}" for name, size in parts.items())
        update = "such an update" if in_update else "an update, for comparison,"
        message += f"; by the estimate of `slimefsdp plan` {update} takes {_megabytes(expected.total)}: {listed}"
        changes = {
            "fsdp.sharding=full": (replace(setup, sharding="full"), batch),
            "fsdp.cpu_offload=true": (replace(setup, cpu_offload=True), batch),
        }
        if in_update:
            half = max(2, tokens // 2)
            changes[f"batch.max_tokens_per_rank={half}"] = (setup, replace(batch, tokens=half, rows=half))
            changes["model.activation_checkpointing=full"] = (replace(setup, recompute="full"), batch)
        saved = {name: expected.total - training_memory(*change).total for name, change in changes.items()}
        most_first = sorted(saved, key=saved.__getitem__, reverse=True)
        advice = [f"{name} (-{_megabytes(saved[name])})" for name in most_first if saved[name] > 0]
        hint = f"what the estimate says helps, most first: {', '.join([*advice, 'more ranks or memory'])}"
    return ResourceError(message, field="batch.max_tokens_per_rank" if in_update else "mesh.dp", hint=hint)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
