"""Has linear modules of the decoder layers compute in float8, by torchao's training recipe `rowwise_with_gw_hp`.

The recipe rounds inputs and output gradients to float8 with a scale for each token. It rounds a weight with a scale for
each row in forward, and with one scale for the whole weight in backward. It computes the gradients of weights in the
compute dtype. So a token's numbers do not depend on the other tokens of its pack. The other recipes of torchao have
scales over several tokens, so that packing would change the gradients; they are not offered.

Parameters keep their names, shapes and dtypes: float8 exists only inside of a module's forward and backward. On a CPU
the products of float8 numbers are emulated in float32. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from slimefsdp.errors import ConfigError

_OLDEST = (8, 9)  # lowest compute capability of GPUs that multiply float8 numbers


def convert_layers(layers: Iterable[nn.Module], recipe: str, device: torch.device) -> None:
    """Replaces linear modules by torchao's float8 modules with the same parameters, in place; must precede sharding.

    All modules of a mixture of experts stay as they are.

    Args:
        recipe: the recipe's name in torchao.
        device: the device that computes; on a CPU, products of float8 numbers are emulated.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu")
    for layer in layers:
        mixtures = tuple(f"{name}." for name, module in layer.named_modules() if hasattr(module, "experts"))
        convert_to_float8_training(
            layer, config=config, module_filter_fn=lambda _, name, outside=mixtures: not name.startswith(outside)
        )


def require_torchao(recipe: str) -> None:
    """Checks that torchao is installed, without importing it.

    Raises:
        ConfigError: torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            f"precision.float8={recipe} needs the package torchao, which is not installed",
            field="precision.float8",
            hint="install the `float8` extra (pip install -c constraints.txt -e '.[float8]'), or set it to none",
        )


def require_capability(recipe: str, capabilities: Sequence[str], where: object) -> None:
    """Checks that at least one of several GPUs can multiply float8 numbers.

    Args:
        capabilities: compute capabilities such as 9.0, of at least one GPU.
        where: the machine or device, for the error.

    Raises:
        ConfigError: no GPU can multiply float8 numbers.
    """
    if not any(tuple(map(int, capability.split("."))) >= _OLDEST for capability in capabilities):
        raise ConfigError(
            f"precision.float8={recipe} needs a GPU of compute capability 8.9 or higher, and {where} has "
            f"{', '.join(dict.fromkeys(capabilities))}",
            field="precision.float8",
            hint="set it to none",
        )


def require_float8(recipe: str, device: torch.device) -> None:
    """Checks that this process can compute in float8 on its device.

    Raises:
        ConfigError: see `require_torchao` and `require_capability`.
    """
    require_torchao(recipe)
    if device.type == "cuda":
        require_capability(recipe, [".".join(map(str, torch.cuda.get_device_capability(device)))], device)
