"""Hugging Face computes norms in float32 whatever the model's dtype; proofs of formulas need float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Inside, casting a float64 tensor to float32 leaves it as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = function is torch.Tensor.float or (
            function is torch.Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values())
        )
        if is_cast and args[0].dtype == torch.float64:
            return args[0]
        return function(*args, **(kwargs or {}))
