"""Shards a model with FSDP2: chooses units, dtypes and placement, and switches off FSDP's averaging of gradients.

Also compiles decoder layers, and makes them recompute or offload activations.

A unit's parameters are gathered only during its forward and backward, so a unit must be a module that the model calls.
The root unit has the parameters that are in no other unit: the final norm, the head, and an embedding tied to the head.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slimefsdp.distributed.expert_parallel import cut_experts
from slimefsdp.distributed.float8 import convert_layers
from slimefsdp.distributed.mesh import CutMesh, Mesh
from slimefsdp.distributed.tensor_parallel import cut_over_tp
from slimefsdp.errors import ConfigError

if TYPE_CHECKING:  # slimefsdp.models imports this package
    from slimefsdp.models.decoder import DecoderModel


Recompute = Literal["none", "full", "selective", "offload"]


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Holds the options of `parallelize`, from the settings' sections `fsdp`, `precision` and `model`."""

    compute_dtype: torch.dtype
    master_dtype: torch.dtype  # dtype of parameters, gradients and optimiser state
    reduce_dtype: torch.dtype | None = None  # dtype in which gradients are summed over ranks; None means master_dtype
    keep_parameters: bool = False  # keep parameters gathered from forward to backward; see `gradients_summed_once`
    wrap: Sequence[str] | int | None = None  # see `choose_units`
    cpu_offload: bool = False  # parameters, gradients and optimiser state live on the host
    pin_memory: bool = False
    recompute: Recompute = "none"
    compile: bool = False
    float8: str = "none"  # torchao's recipe for the linear modules of the decoder layers


def parallelize(policy: DecoderModel, mesh: Mesh, how: Parallelism) -> DecoderModel:
    """Compiles layers, makes them recompute activations, and shards the policy over the mesh, in place.

    Parameters may be on the meta device. The order matters: linear modules are replaced by those of float8 first, then
    parameters are cut over tp ranks; recomputation wraps the compiled forward, and sharding wraps both. The head's
    weight is in the root unit, so it is gathered only during the root's forward. Gradients are summed over all ranks,
    not averaged, because the token weights already normalise the loss.

    Raises:
        ConfigError: see `choose_units`.
    """
    if how.float8 != "none":
        convert_layers(policy.decoder_layers(), how.float8, mesh.device)
    if mesh.tp is not None:
        cut_over_tp(policy, mesh.tp, compile_blocks=how.compile)
    if mesh.ep is not None:
        cut_experts(policy, mesh.ep)
    if how.compile:
        compile_layers(policy.decoder_layers())
    recompute_layers(policy.decoder_layers(), how.recompute, pin_memory=how.pin_memory)
    precision = MixedPrecisionPolicy(
        param_dtype=None if how.compute_dtype == how.master_dtype else how.compute_dtype,
        reduce_dtype=how.reduce_dtype or how.master_dtype,
    )
    offload = CPUOffloadPolicy(pin_memory=how.pin_memory) if how.cpu_offload else OffloadPolicy()
    cut = [part for part in (mesh.tp, mesh.ep) if part is not None]
    placement = _placement_by_parameter(mesh.fsdp, cut) if cut else None
    for unit in reversed(choose_units(policy, how.wrap)):  # inner first: an outer unit gets the other parameters
        fully_shard(
            unit,
            mesh=mesh.fsdp,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not how.keep_parameters,
            shard_placement_fn=placement,
        )
    # torch's default keeps the root gathered from forward to backward, which begins with the root
    fully_shard(policy, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload, shard_placement_fn=placement)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if mesh.fsdp.size() > 1:  # on one rank this would make torch divide all gradients by 1 in a separate pass
                module.set_gradient_divide_factor(1.0)
            # else torch would turn a divide factor of 1 into a pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)
    return policy


def _placement_by_parameter(whole: DeviceMesh, cut: Sequence[CutMesh]) -> Callable[[nn.Parameter], Any]:
    """Returns the function by which FSDP shards parameters that are cut over other ranks than whole ones.

    Raises:
        ConfigError: see `require_mesh_per_parameter`.
    """
    require_mesh_per_parameter()

    def info(mesh: DeviceMesh) -> Any:
        if mesh.ndim == 1:
            return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    # FSDP compares these objects by identity
    of_whole, of_cut = info(whole), {part.axis: info(part.fsdp) for part in cut}

    def place(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(
            Shard(0), of_cut[parameter.device_mesh] if isinstance(parameter, DTensor) else of_whole
        )

    return place


def require_mesh_per_parameter() -> None:
    """Checks that FSDP of this torch can shard each parameter of a unit over ranks of its own.

    Raises:
        ConfigError: this release of torch has one mesh for all parameters of a unit.
    """
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise ConfigError(
            "mesh.tp and mesh.ep need a torch whose FSDP takes a mesh for each parameter, and this is torch "
            f"{torch.__version__}",
            field="mesh.tp",
            hint="install torch 2.13, or set mesh.tp and mesh.ep to 1",
        )


@contextmanager
def gradients_summed_once(policy: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Collective: within the block, gradients are summed over ranks at the last micro-batch only.

    Before, gradients accumulate unsharded, so each rank holds all gradients in the reduce dtype. With `keep_parameters`
    parameters are also gathered only once, and stay gathered until the last micro-batch. All ranks run the same number
    of micro-batches. After an error call `abandon_update`.

    Yields:
        A function to call before each micro-batch; its argument says whether this micro-batch is the last.
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

    Otherwise FSDP would consider itself inside the failed backward, and would not reduce the next gradients.
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
    """Returns torch's parameter groups of a unit; before torch 2.13 a unit has at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def choose_units(policy: DecoderModel, wrap: Sequence[str] | int | None = None) -> list[nn.Module]:
    """Returns the FSDP units, outer before inner ones, otherwise in model order.

    The default units are the decoder layers, and the embedding unless it is tied to the head.

    Args:
        wrap: class names or a number. With class names, all modules of these classes are units. With a number, a module
            is a unit if it has at least this number of parameters outside of smaller units. None means the default.

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
    """Returns the modules with parameters that can be units, in model order; containers and a tied embedding cannot."""
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
    """Adds units to `chosen` from the inside out, and returns the number of parameters of `module` in no unit."""
    rest = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    rest += sum(_choose_by_size(child, candidates, least, chosen) for child in module.children())
    if module in candidates and rest >= least:
        chosen.add(module)
        return 0
    return rest


def _class_name(module: nn.Module) -> str:
    # a linear module keeps its name when it has an adapter (slimefsdp.models.lora) or computes in float8
    return "Linear" if isinstance(module, nn.Linear) else type(module).__name__


# ---------------------------------------------------------------------- compilation and recomputation of layers
#
# Compilation and recomputation only replace a layer's `forward`. So parameters keep their names, and recomputing does
# not repeat the hooks on the layer's call, with which FSDP gathers and frees parameters.

_aten = torch.ops.aten
# matrix products with weights, and attention: most of a layer's time, but little of its memory
_SAVED_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
]
_EXPERT_PRODUCTS = _aten._grouped_mm.default  # the product of all experts of a layer


def recompute_layers(layers: Iterable[nn.Module], kind: Recompute, *, pin_memory: bool = False) -> None:
    """Makes layers recompute activations in backward, in place.

    Args:
        kind: `full` recomputes everything from the layer's input. `selective` stores matrix products and attention
            outputs, and recomputes the rest. `offload` is `full` with the layer's input in host memory until backward.
        pin_memory: page-lock this host memory.
    """
    if kind == "none":
        return
    for layer in layers:
        if kind == "offload":
            layer.forward = _recomputed_from_host(layer.forward, functools.partial(to_host, pin=pin_memory))
        else:
            layer.forward = _recomputed(layer.forward, saved_operations(layer) if kind == "selective" else None)


def saved_operations(layer: nn.Module) -> list[Any]:
    """Returns the operations of a layer whose results `selective` stores.

    The grouped product of experts with biases is not stored: transformers adds the bias to its result in place, so the
    bias would be added twice.
    """
    adds_biases_in_place = any(getattr(module, "has_bias", False) is True for module in layer.modules())
    return _SAVED_BY_SELECTIVE if adds_biases_in_place else [*_SAVED_BY_SELECTIVE, _EXPERT_PRODUCTS]


def to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """Copies a tensor to the host; returns a tensor on the host unchanged.

    On CUDA the copy runs in the current stream, so it delays later work of this stream. With pinned memory the call
    returns at once; otherwise it waits until the stream has reached and finished the copy.

    Args:
        pin: page-lock the host memory.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return host.copy_(tensor, non_blocking=pin)


class _OffloadedInput:
    """Holds a layer's input until its forward, and from then on only the copy that `store` made, for recomputation."""

    def __init__(self, hidden: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._hidden: torch.Tensor | None = hidden
        self._device, self._needs_gradient = hidden.device, hidden.requires_grad
        self._stored = store(hidden.detach())

    def restore(self) -> torch.Tensor:
        """Returns the original input on the first call, and later the stored copy, moved back to its device."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:  # recomputation needs only values: gradients flow through the graph of the forward
            hidden = self._stored.to(self._device, non_blocking=True).detach().requires_grad_(self._needs_gradient)
        return hidden


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compiles the forward of each layer with dynamic shapes, in place.

    Passes without gradients use the same graph as passes with gradients. So the forward is compiled only once, and
    both kinds of passes round equally: the ratio to old log-probs is exactly 1 in the first update.
    """
    for layer in layers:
        layer.forward = _in_one_graph(torch.compile(layer.forward, dynamic=True))


def _in_one_graph(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return compiled(hidden_states, *args, **kwargs)
        with torch.enable_grad():
            out = compiled(hidden_states.detach().requires_grad_(), *args, **kwargs)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, out)  # frees the graph and its saved tensors

    return forward


def _recomputed(forward: Callable[..., Any], saved: list[Any] | None) -> Callable[..., Any]:
    """Wraps a layer's forward in a checkpoint that stores the results of the operations `saved`, if any."""
    # no layer draws random numbers, so the state of generators need not be preserved
    run = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if saved is not None:
        run = functools.partial(run, context_fn=functools.partial(create_selective_checkpoint_contexts, saved))

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return recomputed


def _recomputed_from_host(
    forward: Callable[..., Any], store: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    def from_restored(hidden: _OffloadedInput, *args: Any, **kwargs: Any) -> Any:
        return forward(hidden.restore(), *args, **kwargs)

    @functools.wraps(forward)
    def recomputed(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        # `checkpoint` keeps its arguments alive, so it must not get the tensor itself
        offloaded = _OffloadedInput(hidden, store)
        return checkpoint(from_restored, offloaded, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


def require_compiler(device_type: str) -> None:
    """Checks that torch can compile for a device type, cpu or cuda, on this machine.

    For CPUs torch compiles C++ extensions of Python. For CUDA it uses Triton, which compiles a C launcher at its first
    use in a process.

    Raises:
        ConfigError: there is no compiler, no Python.h, or on CUDA no Triton.
    """
    variable, usual = ("CXX", ("g++",)) if device_type == "cpu" else ("CC", ("gcc", "clang"))
    language = "C++" if device_type == "cpu" else "C"
    candidates = (os.environ[variable],) if os.environ.get(variable) else usual
    where = "a CPU" if device_type == "cpu" else "CUDA"
    problem = None
    if not any(shutil.which(name) for name in candidates):
        problem = f"a {language} compiler on {where}, and there is no {' or '.join(candidates)}"
        hint = f"install {usual[0]}, name another compiler in {variable}"
    elif not Path(sysconfig.get_path("include"), "Python.h").is_file():
        problem = f"Python's headers, and there is no {sysconfig.get_path('include')}/Python.h"
        hint = "install them (python3-dev)"
    elif device_type == "cuda" and find_spec("triton") is None:
        problem = "the package triton on CUDA, which is not installed"
        hint = "install torch for CUDA, which brings it"
    if problem is not None:
        raise ConfigError(
            f"model.compile=true needs {problem}", field="model.compile", hint=f"{hint}, or set model.compile=false"
        )
