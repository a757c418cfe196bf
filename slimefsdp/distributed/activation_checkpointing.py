"""Compiles decoder layers, and stores or recomputes their activations.

Both replace the layer's `forward` and nothing else, so parameters keep their names, and what hangs on the call of a
layer (FSDP's gathering and freeing) stays outside and is not repeated when the layer is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "full", "selective"]

_aten = torch.ops.aten
# matrix products with weights, and attention with what its backward reads: most of a layer's time, little of its memory
_SAVED_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
]
_EXPERT_PRODUCTS = _aten._grouped_mm.default  # of all experts of a layer


def recompute_layers(
    layers: Iterable[nn.Module], kind: Recompute, every: int, *, offload: bool = False, pin_memory: bool = False
) -> None:
    """Recomputes the activations of the first of every `every` layers in backward, in place.

    Args:
        kind: full: everything but the layer's input; selective: what is cheap to compute again, while matrix products
            and attention outputs are stored.
        offload: under `full` that input waits in the host's memory from forward to backward.
        pin_memory: page-lock that memory.
    """
    if kind == "none":
        return
    for layer in list(layers)[::every]:
        if offload:
            layer.forward = _recomputed_from_host(layer.forward, functools.partial(to_host, pin=pin_memory))
        else:
            layer.forward = _recomputed(layer.forward, saved_operations(layer) if kind == "selective" else None)


def saved_operations(layer: nn.Module) -> list[Any]:
    """Returns the operations of a layer whose results `selective` stores; everything else is computed again.

    The grouped product of experts with biases is computed again, too: transformers adds the bias to its result in
    place, so that the stored result would have the bias twice.
    """
    adds_biases_in_place = any(getattr(module, "has_bias", False) is True for module in layer.modules())
    return _SAVED_BY_SELECTIVE if adds_biases_in_place else [*_SAVED_BY_SELECTIVE, _EXPERT_PRODUCTS]


def to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """Copies a tensor to the host; one that is there already is returned as it is.

    On CUDA the copy is in the current stream, as is whatever reads it back: what is queued behind it begins later by as
    long as it takes. This call returns at once where the memory is pinned. Otherwise it waits until the copy is done,
    with all that was queued before it.

    Args:
        pin: page-lock that memory.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return host.copy_(tensor, non_blocking=pin)


class _OffloadedInput:
    """Holds a layer's input for one forward pass and its recomputation; in between the input is where
    `store` puts it.
    """

    def __init__(self, hidden: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._hidden: torch.Tensor | None = hidden
        self._device, self._needs_gradient = hidden.device, hidden.requires_grad
        self._stored = store(hidden.detach())

    def restore(self) -> torch.Tensor:
        """Returns the input itself the first time, and afterwards the stored copy, moved back to its device."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:  # recomputing reads values; gradients go through the graph of the forward
            hidden = self._stored.to(self._device, non_blocking=True).detach().requires_grad_(self._needs_gradient)
        return hidden


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compiles the computation of each layer for shapes that change from pack to pack, in place.

    Passes without gradients run the graph of those with gradients: it is compiled once, and both round alike, so that
    the first ratio of old log-probs is 1.
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
        return tree_map_only(torch.Tensor, torch.Tensor.detach, out)  # what backward would read is freed with the graph

    return forward


def _recomputed(forward: Callable[..., Any], saved: list[Any] | None) -> Callable[..., Any]:
    """Wraps a layer. `saved` are the operations whose results are stored; None: no result is stored."""
    # no layer draws random numbers, so there are no generators to put back
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
        # what checkpoint is given it keeps: not the tensor
        given = _OffloadedInput(hidden, store)
        return checkpoint(from_restored, given, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed
