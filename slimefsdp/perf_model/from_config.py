"""What settings are expected to take: from settings to the values that estimates are made of. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from slimefsdp.attention.select import Choice
from slimefsdp.batching.cost import ELEMENT_BYTES, CostModel
from slimefsdp.batching.plan import Plan
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.memory import ByteSizes, Computing, MicroBatches, Sharding, choose_sharding
from slimefsdp.perf_model.simulate import MeshShape, Simulation, simulate, simulate_plan
from slimefsdp.perf_model.step_time import HEADROOM, ColocatedModels, Workload, bytes_beside

AUTO_LEVELS: tuple[Sharding, ...] = ("full", "keep_parameters", "optimizer")
"""What `fsdp.sharding=auto` chooses from."""


def byte_sizes_of(config: RunConfig) -> ByteSizes:
    """Bytes per element under `precision` and `optim`."""
    precision = config.precision
    compute = ELEMENT_BYTES[precision.compute_dtype]
    master = max(4, compute)
    return ByteSizes(
        compute=compute,
        master=master,
        reduce=master if precision.reduce_dtype == "auto" else ELEMENT_BYTES[precision.reduce_dtype],
        optimizer_states=1 if config.optim.name == "sgd" else 2,
        matrix_states=1 if config.optim.name == "muon" else None,
        state={"auto": None, "bfloat16": 2, "8bit": 1 + 4 / 256}[config.optim.state_dtype],  # with blocks' scales
    )


def computing_of(config: RunConfig, model_spec: ModelSpec, *, on_cpu: bool) -> Computing:
    """How a rank computes, as far as estimates depend on it."""
    return Computing(
        recompute=config.model.activation_checkpointing,
        recompute_every=config.model.checkpoint_every_n_layers,
        offload_activations=config.model.offload_activations,
        is_optimizer_fused=config.optim.name != "sgd" and config.optim.implementation != "foreach",
        newton_schulz_steps=config.optim.ns_steps if config.optim.name == "muon" else 0,
        cpu_offload=config.fsdp.cpu_offload,
        trained_share=model_spec.trained_parameters(config.model.frozen or ()) / model_spec.parameters
        if config.lora.rank is None
        else 0.0,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
        entropy_grad=config.loss.entropy_coefficient != 0,
        full_kl=config.kl_estimator == "full",
        on_cpu=on_cpu,
    )


def colocated_models_of(config: RunConfig, reference: ModelSpec | None, critic: ModelSpec | None) -> ColocatedModels:
    """The models in the policy's processes."""
    has_reference = config.needs_reference and config.reference.placement == "colocated"
    has_reference = has_reference and not config.reference_is_policy
    has_critic = config.algorithm == "ppo" and config.critic.placement == "colocated"
    return ColocatedModels(
        reference=reference if has_reference else None,
        reference_rests_on_host=config.reference.offload != "none",
        reference_computes_from_host=config.reference.offload == "fsdp",
        reference_takes_policys_place=config.reference.offload == "swap",
        critic=critic if has_critic else None,
        critic_rests_on_host=config.critic.offload == "sleep",
    )


def with_chosen_sharding(
    config: RunConfig,
    model_spec: ModelSpec | None,
    mesh: MeshShape,
    *,
    beside: ColocatedModels,
    memory_bytes: int | None,
    on_cpu: bool,
) -> RunConfig:
    """Settings in which `fsdp.sharding` is a level: `auto` becomes the one that sends least of those that fit.

    Not `replicate`, which is a matter of the mesh and sends more than `optimizer`.

    Args:
        model_spec: None: its sizes are not known, and it is `full`.
        beside: models that will share the memory and are not in it yet.
        memory_bytes: free for a rank; None: more than enough.
    """
    if config.fsdp.sharding != "auto":
        return config
    tokens, level = config.batch.max_tokens_per_rank, "full"
    if model_spec is not None:
        shard_ranks, sizes = mesh.dp * mesh.cp, byte_sizes_of(config)
        computing = computing_of(config, model_spec, on_cpu=on_cpu)
        level = choose_sharding(
            model_spec,
            MicroBatches(tokens, rows=tokens, count=2),  # of one alone, gradients are summed once anyway
            memory_bytes=sys.maxsize if memory_bytes is None else int(HEADROOM * memory_bytes),
            dp_replicate=mesh.dp_replicate,
            shard_ranks=shard_ranks,
            sizes=sizes,
            computing=computing,
            # the levels to choose from hold equally much at rest
            others=bytes_beside(beside, "full", shard_ranks=shard_ranks, sizes=sizes, computing=computing),
            levels=AUTO_LEVELS,
        )
    return config.with_sharding(level)


def simulate_settings(
    config: RunConfig,
    model_spec: ModelSpec,
    choice: Choice,
    samples: np.ndarray | RolloutBatch,
    *,
    computing: Computing,
    counted_share: float | None = None,
    cost: CostModel | None = None,
    plan_batch: Callable[[RunConfig, RolloutBatch, CostModel], Plan] | None = None,
) -> Simulation:
    """What these settings, whose mesh.dp is a number, make of samples; of a batch the plan that training makes.

    Args:
        samples: int64 [B], tokens per sample; or a batch, of which the first epoch is looked at.
        counted_share: of the tokens, those whose log-probs are asked for; None: those that the batch trains, or all.
        plan_batch: plans a batch, as `slimefsdp.training.plan.plan_training` does; not called for lengths.

    Raises:
        BatchError: a sample is longer than `batch.max_tokens_per_rank` x `mesh.cp`, or nothing in the batch trains.
    """
    assert config.mesh.dp != "auto" and config.fsdp.sharding != "auto"
    mesh, sizes = MeshShape(config.mesh.dp_replicate, config.mesh.dp, config.mesh.cp), byte_sizes_of(config)
    cost = cost or CostModel.of_model(model_spec, strategy=choice.traffic, bytes_per_element=sizes.compute)
    shape: dict[str, Any] = {"strategy": choice.traffic, "sharding": config.fsdp.sharding, "sizes": sizes}
    if not isinstance(samples, RolloutBatch):
        return simulate(
            samples,
            model_spec,
            mesh,
            max_tokens_per_rank=config.batch.max_tokens_per_rank,
            samples_per_update=config.batch.samples_per_update,
            are_pairs=config.loss.policy == "dpo",
            computing=computing,
            counted_share=1.0 if counted_share is None else counted_share,
            cost=cost,
            **shape,
        )
    assert plan_batch is not None, "a batch needs a planner"
    plan = plan_batch(config, samples, cost)
    plan = replace(plan, updates=plan.updates[: plan.num_first_epoch_updates])
    if not plan.updates:
        problem = "nothing in this batch trains: its tokens are masked, or all rewards of each group are equal"
        raise BatchError(problem, field="rewards", hint="give another batch, or lengths")
    if counted_share is None:
        counted_share = int(samples.mask.sum()) / samples.num_tokens
    return simulate_plan(
        plan, samples.lengths, model_spec, mesh, computing=computing, counted_share=counted_share, cost=cost, **shape
    )


def workload_of(
    model_spec: ModelSpec, found: Simulation, sizes: ByteSizes, beside: ColocatedModels, recomputed: float
) -> Workload:
    """What a rank has to do in an update, as the simulation found it.

    Args:
        recomputed: share of the layers that the simulation took as recomputed.
    """
    mesh, ranks = found.mesh, found.mesh.ranks
    comm = found.comm[found.strategy]
    assert comm is not None
    once = comm.forward / (1 + recomputed)
    return Workload(
        model_spec=model_spec,
        dp_replicate=mesh.dp_replicate,
        shard_ranks=mesh.dp * mesh.cp,
        sizes=sizes,
        batch=found.largest,
        needed=found.needed_flops.over(ranks),
        forward=found.forward_flops.over(ranks),
        tokens=found.computed_tokens / len(found.updates) / ranks,
        repeats=found.tokens / found.computed_tokens,
        attention_bytes=round((once + comm.backward) * model_spec.layers / ranks),
        attention_bytes_again=round(once * model_spec.layers / ranks),
        beside=beside,
        longest=found.longest,
        slowdown=found.imbalance.micro_batches,
    )
