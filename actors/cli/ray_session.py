"""The Ray session of a command."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.cluster.connect import connect, disconnect, start_progress
from actors.cluster.ray_log import RAY_LOG
from actors.startup import stage
from slimefsdp.config import RunConfig


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Starts Ray or joins the cluster at cluster.address for the block, and leaves it afterwards.

    What Ray, ranks and engines print goes into a file, which is named on stderr.

    Raises:
        ResourceError, ConfigError: as `actors.cluster.connect.connect`.
    """
    path = (config.run.dir or Path(tempfile.mkdtemp(prefix="slimefsdp-"))) / RAY_LOG
    print(f"Ray's messages, and what ranks and engines print: {path}", file=sys.stderr, flush=True)
    with stage("starting Ray" if config.cluster.address is None else "joining the cluster", start_progress):
        connect(config, path)
    try:
        yield
    finally:
        disconnect()
