"""Hugging Face computes norms in float32 whatever the model's dtype; proofs of formulas need float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Inside, casting a float64 tensor to float32 leaves it as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.backward and args[0].ndim == 0:
            # a mode is off inside what it handles, but what backward recomputes must be cast as it was in forward
            with KeepFloat64():
                return _engine_run_backward(
                    (args[0],), (torch.ones_like(args[0]),), False, False, (), allow_unreachable=True,
                    accumulate_grad=True,
                )  # fmt: skip
        is_cast = function is torch.Tensor.float or (
            function is torch.Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values())
        )
        if is_cast and args[0].dtype == torch.float64:
            return args[0]
        if (kwargs or {}).get("dtype") == torch.float32 and args and getattr(args[0], "dtype", None) == torch.float64:
            kwargs = {**kwargs, "dtype": None}  # softmax(x, dtype=float32), as routers call it
        return function(*args, **(kwargs or {}))
