"""`slimefsdp train`, and its `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from actors.cli.dry_run import start_lines
from actors.cli.preflight import check_before_launch, cluster_line
from actors.cli.ray_session import ray_session
from actors.cli.torchrun import is_rank_of_torchrun, train_as_rank
from actors.signals import Interrupts
from actors.startup import reporting
from slimefsdp.config import load_config


def train_command(path: Path, overrides: Sequence[str]) -> int:
    """Checks the settings, then runs the training loop; under torchrun, as one of its ranks.

    Raises:
        SlimeError: what is wrong with the settings or the machine, before anything starts; or how the run failed.
    """
    config = load_config(path, overrides)
    if is_rank_of_torchrun():
        return train_as_rank(config)
    with ExitStack() as stack:
        stack.enter_context(reporting())
        checked = check_before_launch(config)
        interrupts = stack.enter_context(Interrupts().listening(checked.config.cluster.grace_s))
        stack.enter_context(ray_session(checked.config))
        from actors.loop import train

        print(train(checked.config, interrupts, checked.prompts))
    return 0


def dry_run_command(path: Path, overrides: Sequence[str]) -> int:
    """Prints what `train` would start. Starts and writes nothing; the cluster at cluster.address is asked what it has.

    Raises:
        SlimeError: as `train_command`, before anything would start.
    """
    config = load_config(path, overrides)
    with reporting():
        checked = check_before_launch(config, only_looks=True)
        cluster = cluster_line(config)
    verdict = "once that is here" if checked.absent else "now"
    lines = [*start_lines(checked), *([] if cluster is None else [cluster])]
    print("\n".join([*lines, f"these settings are fine: `slimefsdp train` would start {verdict}"]))
    return 0
