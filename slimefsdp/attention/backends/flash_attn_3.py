"""Switches torch's flash kernels to FlashAttention 3 on Hopper GPUs (`attention.kernel: flash_attn_3`).

torch has a switch that replaces its operators in the whole process, so `slimefsdp.attention.varlen` makes the same
calls. The kernels come from the package `flash_attn_interface`. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.attention

from slimefsdp.errors import ConfigError

PACKAGE = "flash_attn_interface"
_NAME = "FA3"  # torch's name of the implementation
_HOPPER = "9"  # major compute capability: torch refuses all others at each call
_DEFAULT = "leave attention.kernel at its default"


def switch(*, on: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Switches this process to FlashAttention 3's kernels, or back to torch's own.

    `slimefsdp.attention.select.check_kernel` checks whether these kernels support a model.

    Args:
        device, dtype: device and dtype of attention.

    Raises:
        ConfigError: `on` is True, and this torch has no such switch, the package is missing or cannot be imported, or
            the kernels do not support this device or dtype.
    """
    if on:
        require_installed()
        _require_device(device, dtype)
        try:
            torch.nn.attention.activate_flash_attention_impl(_NAME)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise _refusal(
                f"torch cannot take them from the package {PACKAGE}: {reason}",
                f"install a build of it for torch {torch.__version__}, with its backward, or {_DEFAULT}",
            ) from error
    elif _has_switch() and torch.nn.attention.current_flash_attention_impl() == _NAME:
        torch.nn.attention.restore_flash_attention_impl()


def require_installed() -> None:
    """Checks, without importing the package, that it is installed, and that this torch can switch its flash kernels.

    Raises:
        ConfigError: the package is not installed, or this torch has no such switch.
    """
    if not _has_switch():
        raise _refusal(f"torch {torch.__version__} has no switch for them", f"use torch 2.13 or newer, or {_DEFAULT}")
    if find_spec(PACKAGE) is None:
        raise _refusal(
            f"the package {PACKAGE} is not installed",
            f"install FlashAttention 3, or {_DEFAULT}, which needs no package",
        )


def require_capability(capabilities: Sequence[str], where: object) -> None:
    """Checks that the kernels support at least one of several GPUs.

    Args:
        capabilities: compute capabilities such as 9.0, of at least one GPU.
        where: the machine or device, for the error.

    Raises:
        ConfigError: the kernels support none of these GPUs.
    """
    if not any(capability.partition(".")[0] == _HOPPER for capability in capabilities):
        listed = ", ".join(dict.fromkeys(capabilities))
        raise _refusal(f"they are for compute capability {_HOPPER}.0, and {where} has {listed}", _DEFAULT)


def _has_switch() -> bool:
    """Returns whether this torch can switch its flash kernels; torch 2.11 cannot."""
    listed = getattr(torch.nn.attention, "list_flash_attention_impls", list)
    return _NAME in listed() and hasattr(torch.nn.attention, "restore_flash_attention_impl")


def _require_device(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise _refusal(f"they compute bfloat16 and float16 on CUDA, not {dtype} on {device.type}", _DEFAULT)
    require_capability([".".join(map(str, torch.cuda.get_device_capability(device)))], device)


def _refusal(problem: str, hint: str) -> ConfigError:
    return ConfigError(
        f"attention.kernel=flash_attn_3 asks for FlashAttention 3's kernels: {problem}",
        field="attention.kernel",
        hint=hint,
    )
