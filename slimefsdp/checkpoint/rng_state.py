"""The random generators of a process as JSON and back: torch's (host and device), Python's, numpy's."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimefsdp.errors import CheckpointError


def generator_states(device: torch.device) -> dict[str, Any]:
    """Where the global generators of this process stand, as JSON."""
    version, numbers, next_gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "cpu": _text(torch.get_rng_state().numpy()),
        "python": [version, _text(np.array(numbers, dtype=np.uint32)), next_gauss],
        "numpy": [name, _text(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device).numpy())
    return states


def restore_generators(states: Any, device: torch.device, source: Path) -> None:
    """Sets the global generators to where `generator_states` found them; one that was not saved stays.

    Raises:
        CheckpointError: naming `source`; this is nothing that `generator_states` gave.
    """
    try:
        torch.set_rng_state(torch.from_numpy(_array(states["cpu"], np.uint8)))
        if "python" in states:
            version, numbers, next_gauss = states["python"]
            random.setstate((version, tuple(_array(numbers, np.uint32).tolist()), next_gauss))
        if "numpy" in states:
            name, keys, position, has_gauss, cached = states["numpy"]
            np.random.set_state((name, _array(keys, np.uint32), position, has_gauss, cached))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(torch.from_numpy(_array(states["cuda"], np.uint8)), device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"generators in {source} cannot be understood: {error!r}",
            field="generators",
            hint="load another checkpoint",
            call="load",
        ) from error


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)
