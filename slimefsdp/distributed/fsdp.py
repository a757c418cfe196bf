"""Shards a model with FSDP2: chooses units, dtypes and placement, and switches off FSDP's averaging of gradients.

A unit's parameters are gathered only during its forward and backward, so a unit must be a module that the model calls.
The root unit has the parameters that are in no other unit: the final norm, the head, and an embedding tied to the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from slimefsdp.distributed.activation_checkpointing import Recompute, compile_layers, recompute_layers
from slimefsdp.distributed.mesh import Mesh
from slimefsdp.errors import ConfigError

if TYPE_CHECKING:  # slimefsdp.models imports this package
    from slimefsdp.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Holds how `parallelize` shards and computes a model: values of the sections `fsdp`, `precision` and `model`."""

    compute_dtype: torch.dtype
    master_dtype: torch.dtype  # dtype of parameters, gradients and optimiser state
    reduce_dtype: torch.dtype | None = None  # dtype in which gradients are summed over ranks; None: master_dtype
    keep_parameters: bool = False  # keep parameters gathered from forward to backward; see `gradients_summed_once`
    wrap: Sequence[str] | int | None = None  # see `choose_units`
    prefetch_layers: int | None = None  # units gathered ahead of their use; None: FSDP's own order
    cpu_offload: bool = False  # parameters, gradients and optimiser state live on the host
    pin_memory: bool = False
    recompute: Recompute = "none"
    recompute_every: int = 1  # recompute the first of every `recompute_every` layers
    compile: bool = False


def parallelize(policy: DecoderModel, mesh: Mesh, how: Parallelism) -> DecoderModel:
    """Compiles layers, makes them recompute activations, and shards the policy over the mesh, in place.

    Parameters may be on the meta device. The order matters: recomputation wraps the compiled forward, and sharding
    wraps both.

    Raises:
        ConfigError: see `choose_units`.
    """
    if how.compile:
        compile_layers(policy.decoder_layers())
    recompute_layers(policy.decoder_layers(), how.recompute, how.recompute_every, pin_memory=how.pin_memory)
    apply_fsdp(policy, mesh.fsdp, how)
    return policy


def apply_fsdp(policy: DecoderModel, mesh: DeviceMesh, how: Parallelism) -> None:
    """Shards the policy over a mesh (shard) or (replicate, shard), in place.

    The head's weight is in the root unit, so it is gathered only during the root's forward. Gradients are summed over
    all ranks, not averaged, because the weights of the loss already normalise it.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if how.compute_dtype == how.master_dtype else how.compute_dtype,
        reduce_dtype=how.reduce_dtype or how.master_dtype,
    )
    offload = CPUOffloadPolicy(pin_memory=how.pin_memory) if how.cpu_offload else OffloadPolicy()
    units = choose_units(policy, how.wrap)
    for unit in reversed(units):  # inner units first: an outer unit has the remaining parameters
        fully_shard(
            unit, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=not how.keep_parameters
        )
    # by default the root stays gathered from forward to backward, which begins with it
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if mesh.size() > 1:  # on one rank torch would divide all gradients by 1 in a separate pass
                module.set_gradient_divide_factor(1.0)
            # without this a divide factor of 1 becomes a pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)
    if how.prefetch_layers is not None:
        _prefetch(policy, units, how.prefetch_layers)


def _prefetch(root: nn.Module, units: Sequence[nn.Module], depth: int) -> None:
    """Makes each unit prefetch the next `depth` units in forward, and the previous ones in backward.

    With a depth of 0 each unit prefetches itself in backward, which does nothing as it is already gathered; an empty
    list would select FSDP's default order.
    """
    order: list[FSDPModule] = [module for module in (root, *units) if isinstance(module, FSDPModule)]
    for index, unit in enumerate(order):
        earlier = order[1:index] if index else order[1:]  # backward begins at the root and ends with the first unit
        unit.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + depth])
        unit.set_modules_to_backward_prefetch(earlier[::-1][:depth] or [unit])


@contextmanager
def gradients_summed_once(policy: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Collective: within the block, gradients are summed over ranks at the last micro-batch only.

    Until then they accumulate unsharded, so each rank holds all gradients in the reduce dtype. With `keep_parameters`
    parameters are also gathered only once, and stay gathered until then. All ranks run the same number of
    micro-batches, so the last one is the same everywhere. After an error call `abandon_update`.

    Yields:
        A function to call before each micro-batch; its argument is whether this is the last one.
    """
    modules = [module for module in policy.modules() if isinstance(module, FSDPModule)]

    def begin(is_last: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)

    try:
        yield begin
    finally:
        begin(True)


def abandon_update(policy: nn.Module) -> None:
    """Drops all gradients after an error in a forward or backward pass, and resets FSDP for the next update.

    FSDP would otherwise consider itself inside the failed backward, and not reduce the next one's gradients.
    """
    assert isinstance(policy, FSDPModule)
    if hasattr(policy, "reset_iter_state"):  # from torch 2.13 on
        policy.reset_iter_state()
    else:
        policy._get_fsdp_state()._state_ctx.post_backward_final_callback_queued = False
    modules = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for parameter in (p for module in modules for group in parameter_groups(module) for p in group.fsdp_params):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    reshard(policy)
    for sharded in policy.parameters():
        sharded.grad = None


def reshard(policy: nn.Module) -> None:
    """Frees all gathered parameters and finishes pending gathers, so that the shards may be changed.

    Otherwise a unit that was prefetched but not called would use the old gathered parameters in its next forward.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                group.wait_for_unshard()
            module.reshard()


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Returns torch's parameter groups of a unit; torch 2.13 has a list, earlier versions at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def choose_units(policy: DecoderModel, wrap: Sequence[str] | int | None = None) -> list[nn.Module]:
    """Returns the FSDP units, outer before inner ones, otherwise in model order.

    The default units are the decoder layers, and the embedding unless it is tied to the head.

    Args:
        wrap: class names: all modules of these classes are units; or a number: a module is a unit if it has at least
            this many parameters that are in no smaller unit.

    Raises:
        ConfigError: a class in `wrap` has no module in this model.
    """
    candidates = _candidates(policy)
    if isinstance(wrap, int):
        chosen: set[nn.Module] = set()
        _choose_by_size(policy.hf.get_decoder(), set(candidates), wrap, chosen)
        return [module for module in candidates if module in chosen]
    if wrap is not None:
        known = {_class_name(module) for module in candidates}
        for name in wrap:
            if name not in known:
                raise ConfigError(
                    f"fsdp.wrap names {name}, and no module of this {policy.hf.config.model_type} model "
                    "that can be a unit is one",
                    field="fsdp.wrap",
                    hint=f"use some of {', '.join(sorted(known))}",
                )
        return [module for module in candidates if _class_name(module) in wrap]
    chosen = {*policy.decoder_layers(), policy.hf.get_input_embeddings()}
    return [module for module in candidates if module in chosen]


def _candidates(policy: DecoderModel) -> list[nn.Module]:
    """Returns the modules that can be units, in model order: they have parameters, and the decoder calls them."""
    decoder = policy.hf.get_decoder()
    in_root = {decoder, policy.hf.get_input_embeddings()} if policy.has_tied_embeddings else {decoder}
    return [
        module
        for module in decoder.modules()
        if module not in in_root
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        and any(True for _ in module.parameters())
    ]


def _choose_by_size(module: nn.Module, candidates: set[nn.Module], least: int, chosen: set[nn.Module]) -> int:
    """Adds units to `chosen` from the inside out, and returns the number of parameters of `module` in no unit yet."""
    rest = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    rest += sum(_choose_by_size(child, candidates, least, chosen) for child in module.children())
    if module in candidates and rest >= least:
        chosen.add(module)
        return 0
    return rest


def _class_name(module: nn.Module) -> str:
    # a linear module keeps its name when it has an adapter (slimefsdp.models.lora)
    return "Linear" if hasattr(module, "lora_A") else type(module).__name__
