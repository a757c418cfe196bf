"""How a decoder layer computes: compiled or not, its activations stored or recomputed in backward.

Both replace the layer's `forward` and nothing else, so parameters keep their names, and what hangs on the call of a
layer (FSDP's gathering and freeing) stays outside and is not repeated when the layer is recomputed.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slimefsdp.errors import ConfigError

Recompute = Literal["none", "full", "selective"]

_aten = torch.ops.aten
# matrix products with weights, and attention with what its backward reads: most of a layer's time, little of its memory
_SAVED_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
    _aten._grouped_mm.default,  # all experts of a layer
]


def recompute_layers(layers: Iterable[nn.Module], kind: Recompute, every: int) -> None:
    """Recomputes the activations of the first of every `every` layers in backward, in place.

    Args:
        kind: full: everything but the layer's input; selective: what is cheap to compute again, while matrix products
            and attention outputs are stored.
    """
    if kind == "none":
        return
    for layer in list(layers)[::every]:
        layer.forward = _recomputed(layer.forward, kind)


def require_compiler(device: torch.device) -> None:
    """Whether `compile_layers` can work on this machine.

    Raises:
        ConfigError: on a CPU without a C++ compiler, which torch needs to make its kernels.
    """
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"model.compile=true needs a C++ compiler on a CPU, and there is no {compiler}",
            field="model.compile",
            hint="install g++, name another compiler in CXX, or set model.compile=false",
        )


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compiles the computation of each layer for shapes that change from pack to pack, in place."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _recomputed(forward: Callable[..., Any], kind: Recompute) -> Callable[..., Any]:
    # no layer draws random numbers, so there are no generators to put back
    run = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if kind == "selective":
        run = functools.partial(
            run, context_fn=functools.partial(create_selective_checkpoint_contexts, _SAVED_BY_SELECTIVE)
        )

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return recomputed
