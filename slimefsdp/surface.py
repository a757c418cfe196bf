"""The calls that a whole group of ranks answers, written once: each is a method of Trainer.

`first`: every rank computes the same and rank 0's result is returned. `all`: a list with every rank's own result.
"""

from __future__ import annotations

from typing import Literal

RPCS: dict[str, Literal["first", "all"]] = {
    "compute_log_probs": "first",
    "train_step": "first",
    "forward_backward": "first",
    "optimizer_step": "first",
    "sleep": "all",
    "wake_up": "all",
    "memory": "all",
    "describe": "all",
    "check_sync": "first",
    "gradient_health": "first",
    "update_weights": "first",
    "update_ref": "first",
    "save": "first",
    "finish_save": "first",
    "load": "first",
    "restored": "first",
    "export_hf": "first",
}
