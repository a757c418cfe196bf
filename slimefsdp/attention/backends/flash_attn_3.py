"""FlashAttention 3 in the place of torch's own flash kernels on Hopper GPUs (`attention.kernel: flash_attn_3`).

torch has a switch that replaces its operators in the whole process, so calls, shapes and what the backward is given
stay as `slimefsdp.attention.varlen` has them; the kernels are of the package `flash_attn_interface`. Not yet run on a
GPU.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.attention

from slimefsdp.errors import ConfigError

PACKAGE = "flash_attn_interface"
_NAME = "FA3"  # of torch's
_HOPPER = 9  # major compute capability


def switch(*, on: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Has this process compute flash attention by these kernels, or by torch's own again.

    Args:
        device, dtype: that attention is computed on and in.

    Raises:
        ConfigError: naming attention.kernel; they are asked for, and this torch has no such switch, the package is
            missing, or they compute nothing on this device or in this dtype.
    """
    if on:
        _require(device, dtype)
        torch.nn.attention.activate_flash_attention_impl(_NAME)
    elif _has_switch() and torch.nn.attention.current_flash_attention_impl() == _NAME:
        torch.nn.attention.restore_flash_attention_impl()


def _has_switch() -> bool:
    """torch 2.11 has none."""
    listed = getattr(torch.nn.attention, "list_flash_attention_impls", list)
    return _NAME in listed() and hasattr(torch.nn.attention, "restore_flash_attention_impl")


def _require(device: torch.device, dtype: torch.dtype) -> None:
    problem, hint = None, "leave attention.kernel at its default"
    if not _has_switch():
        problem = f"torch {torch.__version__} has no switch for them"
        hint = "use torch 2.13 or newer, or leave attention.kernel at its default"
    elif find_spec(PACKAGE) is None:
        problem = f"the package {PACKAGE} is not installed"
        hint = "install FlashAttention 3, or leave attention.kernel at its default, which needs no package"
    elif device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        problem = f"they compute bfloat16 and float16 on CUDA, not {dtype} on {device.type}"
    elif (capability := torch.cuda.get_device_capability(device))[0] != _HOPPER:
        problem = f"they are for compute capability {_HOPPER}.0, and {device} has {'.'.join(map(str, capability))}"
    if problem is not None:
        raise ConfigError(
            f"attention.kernel=flash_attn_3 asks for FlashAttention 3's kernels: {problem}",
            field="attention.kernel",
            hint=hint,
        )
