"""The section of the settings tree about Ray: its cluster, how long to wait for it, and what may be replaced."""

from __future__ import annotations

from pydantic import Field

from slimefsdp.config_sections import PositiveInt, Settings

LONGEST_S = 1e9  # thirty years; system calls take no wait that is much longer


class ClusterSettings(Settings):
    """Ray, and how long to wait for it."""

    address: str | None = Field(None, min_length=1, description="a running cluster; null: a local one, loopback only")
    max_ranks_per_core: PositiveInt = Field(4, description="cap on worker processes per core of a CPU machine")
    launch_timeout_s: float = Field(300.0, gt=0, le=LONGEST_S, description="all ranks ready")
    call_timeout_s: float = Field(
        3600.0, gt=0, le=LONGEST_S, description="one call on all ranks, from when it begins there"
    )
    sync_timeout_s: float = Field(120.0, gt=0, le=LONGEST_S, description="one transfer of weights to the engines")
    ping_timeout_s: float = Field(
        60.0,
        gt=0,
        le=LONGEST_S,
        description="while a call waits: a process that does not answer a ping for so long counts as hung",
    )
    hang_timeout_s: float = Field(
        600.0,
        gt=0,
        le=LONGEST_S,
        description="so does one without progress for so long and for 10 times what is usual in that phase (at most 10 "
        "times this setting more); the first time of a phase, and the launch, have as long as the call",
    )
    grace_s: float = Field(
        120.0,
        gt=0,
        le=LONGEST_S,
        description="after SIGTERM or SIGINT, for the end of the step and a checkpoint; then `train` ends without one. "
        "Where the run has to go on to a later step, each has as long",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        description="how often a run replaces lost ranks and goes on from its newest checkpoint, and how often lost "
        "engines, counted each for itself; 0: a loss ends it",
    )
