"""Plans from plain keywords, for tests that vary them one by one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from slimefsdp.batching.plan import PackLimits, Plan, PrefixSharing, UpdateCut, plan_batch


def plan_of(lengths: np.ndarray, *, together: np.ndarray | None = None, **settings: Any) -> Plan:
    """Plans samples of these lengths.

    Args:
        settings: fields of `PackLimits`, of `UpdateCut` and, where `shared` is given, of `PrefixSharing`.
    """
    chosen = [
        {field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings}
        for kind in (PackLimits, UpdateCut, PrefixSharing)
    ]
    assert not settings, f"no such fields: {sorted(settings)}"
    limits, cut, sharing = chosen
    return plan_batch(
        lengths,
        PackLimits(**limits),
        UpdateCut(**cut),
        together=together,
        sharing=PrefixSharing(**sharing) if sharing.get("shared") is not None else None,
    )
