"""Training that repeats to the bit: kernels that add up in one order, and random numbers that follow from the step."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

_CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # those with which its products repeat


def make_deterministic() -> None:
    """From now on this process uses deterministic kernels alone; an operation that has none raises RuntimeError.

    For a rank's start: cuBLAS looks at its workspace setting when CUDA multiplies for the first time.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _CUBLAS_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)  # not warn_only: flash attention's backward would go on as before
    # nothing here reads what it has not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def seed_generators(seed: int, update: int, data_rank: int) -> None:
    """Seeds the global generators of this process, torch's (host and device), Python's and numpy's, for what follows.

    Args:
        data_rank: not the rank: cp ranks evaluate the loss of one pack together, and must draw the same numbers.
    """
    states = np.random.SeedSequence([seed, update, data_rank]).generate_state(3)
    torch.manual_seed(int(states[0]))
    random.seed(int(states[1]))
    np.random.seed(int(states[2]))
