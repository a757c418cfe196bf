"""The sections that a job on Ray has: the cluster and the service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimefsdp.config.base import (
    LONGEST_S,
    PositiveInt,
    Settings,
)


class ClusterSettings(Settings):
    """Ray, and how long to wait for it."""

    address: str | None = Field(None, min_length=1, description="a running cluster; null: a local one, loopback only")
    allow_without_token: bool = Field(
        False,
        description="join a cluster of other machines although RAY_AUTH_MODE is not `token`, as on KubeRay and "
        "Anyscale: whoever reaches its ports can run code in the run",
    )
    launch_timeout_s: float = Field(300.0, gt=0, le=LONGEST_S, description="all ranks ready")
    call_timeout_s: float = Field(
        3600.0, gt=0, le=LONGEST_S, description="one call on all ranks, from when it begins there"
    )
    sync_timeout_s: float = Field(120.0, gt=0, le=LONGEST_S, description="one transfer of weights to the engines")
    ping_timeout_s: float = Field(
        60.0,
        gt=0,
        le=LONGEST_S,
        description="while a call waits: a process that does not answer a ping for so long counts as hung, and so does "
        "one without progress for 10 times as long and for 10 times what is usual in that activity (at most 100 times "
        "this setting more); the first time of an activity, and the launch, have as long as the call",
    )
    grace_s: float = Field(
        120.0,
        gt=0,
        le=LONGEST_S,
        description="after SIGTERM or SIGINT, for the end of the step and a checkpoint; then `train` ends without one",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        description="how often lost ranks are replaced, and how often lost engines, which are counted apart; 0: a loss "
        "ends the run. `train` replaces ranks where checkpoint.interval_steps is set",
    )


class ServiceSettings(Settings):
    """The HTTP service of `slimefsdp serve`."""

    host: str = Field("127.0.0.1", min_length=1, description="where it listens; others than loopback need api_key_env")
    port: int = Field(8000, ge=0, le=65535, description="0: a free one, which is printed")
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="environment variable with the keys of which requests must bring one, separated by commas: each is "
        "a user with runs and checkpoints of their own, the first is the operator's; null: none is asked for",
    )
    model_name: str | None = Field(
        None, min_length=1, description="what clients call the base model, beside model.path; null: that alone"
    )
    session_timeout_s: float = Field(
        120.0, gt=0, description="a client that says nothing for so long is gone, and its runs end"
    )
    max_samplers: PositiveInt = Field(
        256, description="of a client, with weights that it gave no name; the oldest ones go, from the disk too"
    )
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo"] | None = Field(
        None,
        description="the loss that stands for `stable_reinforce`, whose formula is not published; null: that is "
        "refused",
    )
    max_version_bytes: int = Field(
        2**30, ge=1024, description="of what the sampling engine holds beside the base: adapters, or whole models"
    )
