"""Compiles decoder layers, and makes them recompute or offload activations.

Both only replace a layer's `forward`. So parameters keep their names, and hooks on the call of a layer (with which FSDP
gathers and frees parameters) are not repeated when the layer is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "full", "selective", "offload"]

_aten = torch.ops.aten
# matrix products with weights, and attention: most of a layer's time, but little of its memory
_SAVED_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
]
_EXPERT_PRODUCTS = _aten._grouped_mm.default  # the product of all experts of a layer


def recompute_layers(layers: Iterable[nn.Module], kind: Recompute, every: int, *, pin_memory: bool = False) -> None:
    """Makes the first of every `every` layers recompute activations in backward, in place.

    Args:
        kind: full: recompute everything from the layer's input; selective: store matrix products and attention outputs
            and recompute the rest; offload: as `full`, with the layer's input in host memory until backward.
        pin_memory: page-lock this host memory.
    """
    if kind == "none":
        return
    for layer in list(layers)[::every]:
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
    """Holds a layer's input for one forward and its recomputation; in between, only the copy made by `store`."""

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

    Passes without gradients use the same graph as passes with gradients. It is compiled only once, and both passes
    round equally, so that the ratio to old log-probs is exactly 1 in the first update.
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
    """Wraps a layer's forward in a checkpoint that stores the results of the operations `saved`; None: of none."""
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
