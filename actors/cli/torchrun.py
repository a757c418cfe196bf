"""Runs supervised training (sft, dpo) in the processes of `torchrun -m actors.cli train FILE`, without Ray."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

from actors.cli.preflight import check_before_launch
from actors.side_process import end_with_parent
from actors.signals import Interrupts
from actors.startup import reporting
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, SlimeError

if TYPE_CHECKING:
    from actors.rollout.prompt_files import Prompts
    from actors.torchrun import TorchrunGroup


def is_rank_of_torchrun() -> bool:
    """Returns whether torchrun started this process; RANK alone is not enough, since other launchers set it, too."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def train_as_rank(config: RunConfig) -> int:
    """Trains in this process as one of torchrun's ranks; returns the exit status.

    Rank 0 checks the settings, runs the loop and reports how the run ends. The other ranks return 0 unless a call
    failed: torchrun ends all ranks once one rank has failed, and rank 0 still has to write the curves and its error.

    Raises:
        ConfigError: the algorithm samples from engines, the reference is a group of its own, or the mesh does not have
            as many ranks as torchrun started.
        SlimeError: on rank 0, as `actors.loop.train`; on another rank, an error that happened on that rank alone.
    """
    end_with_parent()  # the parent is torchrun's agent, which ends ranks whose peers are gone
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        return _follow(config, rank)
    if config.has_rollouts:
        raise ConfigError(
            f"algorithm={config.algorithm} samples from engines, which Ray starts, and torchrun started this process",
            field="algorithm",
            hint="run `slimefsdp train` without torchrun, which starts the ranks itself; or set algorithm=sft or dpo",
        )
    if not config.reference.is_colocated:
        raise ConfigError(
            f"reference.dp={config.reference.dp} is a group of processes of its own, which torchrun did not start",
            field="reference.dp",
            hint="remove it, or run `slimefsdp train` without torchrun",
        )
    config = config.with_ranks(ranks)
    if config.ranks != ranks:
        raise ConfigError(
            f"torchrun started {ranks} ranks, and the mesh has {config.ranks}",
            field="mesh.dp",
            hint=f"start {config.ranks} ranks, or set mesh.dp=auto",
        )
    with ExitStack() as stack:
        stack.enter_context(reporting())
        checked = check_before_launch(config, has_ranks=True)
        config, prompts = checked.config, checked.prompts
        interrupts = stack.enter_context(Interrupts().listening(config.cluster.grace_s))
        _join(config)
        print(_lead(config, interrupts, prompts))
    return 0


def _lead(config: RunConfig, interrupts: Interrupts, prompts: Prompts) -> str:
    """Runs the loop on rank 0 and returns the run's summary. Then all ranks leave the process group together.

    After a failed call, rank 0 does not wait for the other ranks.
    """
    from actors.loop import train
    from actors.torchrun import TorchrunGroup

    launched: list[TorchrunGroup] = []

    def launch(config: RunConfig) -> TorchrunGroup:
        launched.append(TorchrunGroup.launch(config))
        return launched[0]

    try:
        return train(config, interrupts, prompts, launch)
    finally:
        if launched and not launched[0].has_failed:
            _leave()


def _follow(config: RunConfig, rank: int) -> int:
    from actors.torchrun import follow

    try:
        _join(config)
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 receives them, too, and decides when the run ends
            signal.signal(number, signal.SIG_IGN)
        follow()
        _leave()
    except SlimeError as error:
        if error.rank not in (None, rank):  # the rank that the error names reports it
            return error.exit_code
        raise
    except RuntimeError as error:
        from slimefsdp.distributed.collectives import lost_a_peer, peer_failed

        if not lost_a_peer(error):
            raise
        raise peer_failed(error) from error
    return 0


def _join(config: RunConfig) -> None:
    import torch

    from slimefsdp.distributed.mesh import choose_device, start_process_group_from_environment

    device = choose_device(config.mesh.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # ranks share the cores, as under Ray
    start_process_group_from_environment(device, timeout_s=config.cluster.call_timeout_s)


def _leave() -> None:
    """Leaves the process group after every rank has reached this call; collective."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # a CPU tensor, so that gloo is used; on GPUs a barrier would use NCCL
    dist.destroy_process_group()
