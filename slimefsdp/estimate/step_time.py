"""Estimates a lower bound on the seconds of an update on the slowest rank, without overlap of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from slimefsdp.estimate.flops import executed_flops
from slimefsdp.estimate.hardware import Rates
from slimefsdp.estimate.memory import LayerActivations, recomputed_head_share
from slimefsdp.estimate.schedule import Schedule
from slimefsdp.estimate.setup import TrainingSetup
from slimefsdp.estimate.traffic import gathered_parameters, sharding_traffic

# an optimiser reads each gradient, and reads and writes each parameter and each state
_PASSES_OVER_PARAMETERS = 3
_PASSES_OVER_STATES = 2
# activations are written in forward and read in backward, and so are their gradients
_PASSES_OVER_ACTIVATIONS = 4


@dataclass(frozen=True, slots=True)
class StepTime:
    """Holds the seconds of an update on a rank by activity."""

    products: float  # matrix products with weights, including the head's
    attention: float
    memory: float  # reading and writing of activations, parameters and optimiser state
    comm: float
    host: float  # copies between device and host

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.comm + self.host


def step_time(setup: TrainingSetup, schedule: Schedule, rates: Rates) -> StepTime:
    """Returns the lower bound on the time of an update.

    Under `full` recomputed layers are computed again as a whole, under `selective` without products and attention.
    """
    model, sizes, ranks = setup.model, setup.sizes, setup.mesh.ranks
    slowdown = schedule.imbalance.micro_batches  # time of the slowest rank / the mean
    micro_batches, tokens = schedule.largest.count, schedule.computed_tokens / len(schedule.updates) / ranks
    recomputed, layer = setup.recomputed_share, LayerActivations.of(setup)
    executed = executed_flops(
        schedule.needed_flops.over(ranks),
        schedule.forward_flops.over(ranks),
        recomputed_layers=recomputed if setup.recompute == "full" else 0.0,
        recomputed_head=recomputed_head_share(setup, schedule.largest.rows),
    )
    # Muon assigns matrices to all ranks; its iterations on adapters are negligible
    muon = model.newton_schulz_flops(setup.newton_schulz_steps) * setup.trained_share / ranks
    model_parameters, adapters = (
        model.parameters * setup.trained_share / setup.shards,
        setup.adapter_parameters / setup.shards,
    )
    trained, in_layers = model_parameters + adapters, model_parameters * model.share_in_layers + adapters
    states = sizes.state_bytes(trained - in_layers, in_layers)
    optimizer = _PASSES_OVER_PARAMETERS * trained * sizes.master + _PASSES_OVER_STATES * states
    sharding = sharding_traffic(setup, micro_batches)
    touched = layer.kept * model.layers * tokens * (_PASSES_OVER_ACTIVATIONS + recomputed) + sharding.copied
    to_host = 0.0
    if setup.cpu_offload:
        stored = sizes.master if setup.adapters is None else sizes.compute
        sums = 1 if setup.sharding == "optimizer" else micro_batches
        to_host = gathered_parameters(setup, micro_batches) / setup.shards * stored + trained * sizes.master * sums
        to_host += optimizer
    else:
        touched += optimizer
    if setup.inputs_on_host:  # to the host and back
        to_host += 2 * layer.stream * model.layers * tokens * recomputed
    return StepTime(
        products=(slowdown * (executed.layers + executed.head) + muon) / (1e12 * rates.matrix_tflops),
        attention=slowdown * executed.attention / (1e12 * rates.attention_tflops),
        memory=touched / (1e9 * rates.memory_gbps),
        comm=(sharding.total + schedule.attention_bytes_per_rank(setup)) / (1e9 * rates.comm_gbps),
        host=to_host / (1e9 * rates.host_gbps),
    )
