"""Defines the Trainer, which holds one rank's model, optimiser and mesh, and runs the calls of slimefsdp/calls.

Every rank calls the same method with the same batch and gets the same result, under torchrun, under Ray, or alone.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from slimefsdp import heartbeat
from slimefsdp.batching.plan import Plan
from slimefsdp.calls.state import InspectionCalls, StateCalls
from slimefsdp.calls.training import TrainingCalls
from slimefsdp.config import TrainerConfig
from slimefsdp.distributed.collectives import run_together
from slimefsdp.distributed.memory_manager import MemoryManager, memory_in_use, prefer_expandable_segments
from slimefsdp.distributed.mesh import Mesh
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.models.decoder import DecoderModel, PolicyModel, ValueModel
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.optim.optimizer_step import OptimizerStep
from slimefsdp.results import Description, Health, Memory, MemoryReport
from slimefsdp.rpc import ROLES, Arguments, Call, Role, require_name
from slimefsdp.training import build, step
from slimefsdp.training.adapters import make_adapters
from slimefsdp.training.checkpointing import Checkpoints
from slimefsdp.training.metrics import throughput_for
from slimefsdp.training.packs import check_policy_loss
from slimefsdp.training.plan import model_spec_of, routed_experts_of
from slimefsdp.training.prepare import BatchPlanner, PreparedBatch
from slimefsdp.weight_sync.receive import WeightReceiver


class Trainer(TrainingCalls, InspectionCalls[MemoryReport, Memory, Description], StateCalls):
    """Trains on one rank. The process group must exist (`slimefsdp.distributed.mesh.start_process_group*`).

    Raises:
        ConfigError: the mesh does not fit the ranks, or there is no such role.
        ModelError: the model folder cannot be loaded faithfully.
    """

    def __init__(self, config: TrainerConfig, role: Role = "actor", *, device: torch.device) -> None:
        if not isinstance(config, TrainerConfig):
            problem = f"config is a {type(config).__name__}, not settings"
            raise ConfigError(problem, field="config", hint="give the settings of load_config or config_from_dict")
        if role not in ROLES:
            raise ConfigError(f"role={role!r} is no role", field="role", hint=f"use {', '.join(ROLES)}")
        prefer_expandable_segments(device)
        torch.manual_seed(config.run.seed + dist.get_rank())
        build.set_numerics(config)
        if role == "actor" or (role == "critic" and config.critic.dp is None):
            config = config.with_ranks(dist.get_world_size())
        self._lock = threading.Lock()
        self._running = ""  # the name of the call that has the lock
        mesh = build.mesh_for(config, role, device)
        if (threads := build.host_threads(config, mesh)) is not None:
            torch.set_num_threads(threads)
        run_together(lambda: check_policy_loss(config), mesh.group)
        config, folder, adapters = build.resolve_model(config, role, mesh.group)
        config = build.with_sharding(config, role, folder, mesh)
        kind: type[DecoderModel] = ValueModel if role == "critic" else PolicyModel
        model: DecoderModel = build.model_for(kind, config, role, folder, mesh, adapters=adapters)
        memory_manager = MemoryManager(device, mesh.group, pin_memory=build.is_host_memory_pinned(config, device))
        memory_manager.models["parameters"] = model
        reference = build.reference_for(config, folder, model, mesh, memory_manager)
        self._state = step.RankState(
            config, role, folder, mesh, model, memory_manager, reference, config.loss.kl_coefficient
        )
        self._frozen_source = uuid.uuid4().hex
        self._adapters = None
        self.receiver = WeightReceiver(model.named_weights())  # in a reference group, receives the actor's weights
        self._state.checkpoints = Checkpoints(config, role, folder, mesh, model)
        if role == "ref":
            return
        self._state.updater = build.updater_for(config, role, model)
        memory_manager.optimizer = self.updater.optimizer
        self._state.throughput = throughput_for(
            model,
            model_spec_of(folder.config),
            mesh,
            compute_dtype=build.compute_dtype(config),
            stated_tflops=config.profile.peak_tflops,
        )
        self._state.profiler = build.profiler_for(config, role, mesh)
        if role == "actor" and config.lora.rank is not None:
            self._adapters = make_adapters(
                config, model, mesh, self.updater, self._state.checkpoints, self._state.kl_coefficient
            )
        if role == "actor" and config.needs_reference and config.reference.is_colocated:
            reference.load()

    @property
    def config(self) -> TrainerConfig:
        """Returns the settings, in which `auto` values are replaced by the chosen ones."""
        return self._state.config

    @property
    def role(self) -> Role:
        return self._state.role

    @property
    def mesh(self) -> Mesh:
        return self._state.mesh

    @property
    def folder(self) -> ModelFolder:
        return self._state.folder

    @property
    def policy(self) -> DecoderModel:
        """Returns the role's model: a policy, or a critic's value model."""
        return self._state.model

    @property
    def updater(self) -> OptimizerStep:
        """Returns the optimiser step; a reference group has none."""
        return self._state.updater

    @property
    def reference(self) -> PolicyModel | None:
        """Returns the colocated reference model; None if it is not loaded."""
        return self._state.reference.model

    @property
    def updates_taken(self) -> int:
        """Returns the number of optimiser updates of the run, which is the version of the weights."""
        return 0 if self.role == "ref" else self.updater.updates_taken

    def health(self) -> Health:
        """Returns this rank's progress and memory; takes no lock and joins no collective."""
        return Health(dist.get_rank(), os.getpid(), self.updates_taken, *memory_in_use(self.mesh.device))

    def use_adapter(self, name: str) -> None:
        """Puts an adapter into the model; calls apply to this adapter until another adapter is selected or created.

        Raises:
            StateError: there is no adapter of this name.
            ConfigError: the run has no adapters, or the name is invalid.
            ResourceError: there is no memory for two adapters at once.
        """
        with self._exclusively("use_adapter"):
            require_name(name, "an adapter")
            adapters = self._require_adapters("use_adapter")
            adapters.require(name)
            if name != adapters.current.name:
                self._state.memory_manager.wake_up(("parameters", "optimizer"))
                with self._state.exchanging(adapters):
                    adapters.select(name)

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[None]:
        """Refuses a call with StateError while another call is running in another thread."""
        if not self._lock.acquire(blocking=False):
            problem = f"{name}() while {self._running}() is running in another thread"
            raise StateError(problem, field=name, hint="call it when that call has returned")
        self._running = name
        try:
            yield
        finally:
            self._lock.release()

    def _make(self, call: Call, arguments: Arguments) -> Any:
        with self._exclusively(call.name) if call.is_exclusive else nullcontext():
            call.require(self.role, arguments)
            with heartbeat.during(call.name) if call.is_exclusive else nullcontext():
                if call.needs_whole_weights and self.role != "ref":
                    self.updater.require_whole(call.name)
                # a driver has already prepared the batches that it sends
                if call.prepare is not None and not isinstance(arguments["batch"], PreparedBatch):
                    arguments = {**arguments, "batch": self._prepared(call, arguments)}
                return call.method(self, **arguments)

    def _prepared(self, call: Call, arguments: Arguments) -> PreparedBatch:
        """Collective: plans the batch of a call, and checks that all ranks have the same arguments and plan."""
        state, folder = self._state, self._state.folder
        cost = state.model.attention.cost
        experts = routed_experts_of(folder.config)
        planner = BatchPlanner(
            state.config, state.role, folder.vocab_size, folder.max_sample_tokens, cost, experts=experts
        )
        # `prepared_together` compares plans by their digests
        other_arguments = {
            name: value for name, value in arguments.items() if name != "batch" and not isinstance(value, Plan)
        }
        has_gradients = state.role != "ref" and state.updater.has_gradients
        return step.prepared_together(
            state,
            arguments["batch"],
            lambda: call.planning(planner, arguments)(),
            (call.name, other_arguments, has_gradients),
        )
