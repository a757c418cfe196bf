"""Running out of memory as an error to act on: what was asked for, what was expected, and which settings need less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from slimefsdp.config import RunConfig
from slimefsdp.distributed.memory_manager import free_bytes
from slimefsdp.errors import ResourceError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.from_config import byte_sizes_of, colocated_models_of, computing_of
from slimefsdp.perf_model.memory import Memory, MicroBatches, step_memory
from slimefsdp.perf_model.step_time import bytes_beside
from slimefsdp.rpc import Role
from slimefsdp.training.packs import TOKENS
from slimefsdp.training.plan import model_spec_of

_MICRO_BATCHES = 2  # of an update, or more: of one alone, gradients would take less


def memory_error(
    error: Exception, config: RunConfig, role: Role, model_config: Mapping[str, Any] | None, device: torch.device
) -> ResourceError:
    """The typed error of one that `is_out_of_memory`, on the rank that raised it.

    Args:
        config: with mesh.dp and fsdp.sharding as they are used; an estimate is made of no others.
        model_config: what the role's config.json holds; None: it is not known.
    """
    tokens = getattr(error, TOKENS, None)
    where = "" if tokens is None else f" with a micro-batch of {tokens:,} tokens"
    said = next(iter(str(error).splitlines()), type(error).__name__)
    message = f"out of memory{where}: {said}; {_megabytes(free_bytes(device))} are free for a rank"
    model_spec = model_spec_of(model_config)
    in_update = tokens is not None  # elsewhere, such as in a launch or a save, no micro-batch takes part
    hint = f"{'lower batch.max_tokens_per_rank, or ' if in_update else ''}take more ranks or memory"
    if model_spec is not None and role != "ref" and "auto" not in (config.mesh.dp, config.fsdp.sharding):
        expected = partial(_expected, model_spec, role, tokens, on_cpu=device.type == "cpu")
        held = expected(config)
        parts = {field.name: getattr(held, field.name) for field in fields(held) if field.name != "host"}
        listed = ", ".join(f"{name} {_megabytes(size)}" for name, size in parts.items() if size)
        update = "such an update" if in_update else "an update, for comparison,"
        message += f"; by the estimate of `slimefsdp plan` {update} takes {_megabytes(held.total)}: {listed}"
        saved = [(held.total - expected(changed).total, name) for name, changed in _smaller(config, tokens)]
        ways = [f"{name} (-{_megabytes(size)})" for size, name in sorted(saved, reverse=True) if size > 0]
        hint = f"what the estimate says helps, most first: {', '.join([*ways, 'more ranks or memory'])}"
    return ResourceError(message, field="batch.max_tokens_per_rank" if in_update else "mesh.dp", hint=hint)


def _expected(model_spec: ModelSpec, role: Role, tokens: int | None, config: RunConfig, *, on_cpu: bool) -> Memory:
    """The fullest moment of an update of the role's model, with what is beside it at rest.

    Args:
        tokens: of the micro-batch; None, or more than the settings allow: as many as they do.
    """
    (copies, dp), cp, sizes = config.mesh_of(role), config.mesh.cp, byte_sizes_of(config)
    computing = computing_of(config, model_spec, on_cpu=on_cpu)
    assert config.fsdp.sharding != "auto"
    most = config.batch.max_tokens_per_rank
    tokens = most if tokens is None else min(tokens, most)
    held = step_memory(
        model_spec,
        config.fsdp.sharding,
        MicroBatches(tokens, rows=tokens, count=_MICRO_BATCHES),
        shard_ranks=dp * cp,
        copies=copies,
        sizes=sizes,
        computing=computing,
    )
    if role != "actor":
        return held
    beside = colocated_models_of(config, model_spec, model_spec)  # taken to be as large
    others = bytes_beside(beside, config.fsdp.sharding, shard_ranks=dp * cp, sizes=sizes, computing=computing)
    return replace(held, others=others)


def _smaller(config: RunConfig, tokens: int | None) -> Iterator[tuple[str, RunConfig]]:
    """Settings that may take less, each named by what is changed; without a micro-batch none that is about one."""
    changes: list[tuple[str, str, object]] = [("fsdp", "sharding", "full"), ("fsdp", "cpu_offload", True)]
    if tokens is not None:
        changes += [
            ("batch", "max_tokens_per_rank", max(2, min(config.batch.max_tokens_per_rank, tokens) // 2)),
            ("model", "activation_checkpointing", "full"),
        ]
    for section, name, value in changes:
        settings = getattr(config, section)
        if getattr(settings, name) != value:
            changed = config.model_copy(update={section: settings.model_copy(update={name: value})})
            yield f"{section}.{name}={str(value).lower()}", changed


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
