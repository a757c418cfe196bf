"""`slimefsdp plan --calibrate FILE`: measures this machine's rates, for `plan --calibration` and `batch.cost_model`.

Starts its ranks as processes of its own, without Ray.
"""

from __future__ import annotations

import argparse
import os
import socket
import warnings
from pathlib import Path
from typing import Any

from actors.cluster.connect import check_cores
from slimefsdp.batching.hardware import read_calibration, write_calibration
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError
from slimefsdp.io.user_files import can_keep_files

_TIMEOUT_S = 600.0


def calibrate_command(options: argparse.Namespace) -> int:
    """Measures, writes the file and prints what is in it.

    Raises:
        ConfigError: an argument, or the file cannot be written. ResourceError: more ranks than the cores may run.
    """
    if options.ranks < 1:
        raise ConfigError(f"--ranks={options.ranks} is no number of processes", field="--ranks", hint="give at least 1")
    check_cores(
        options.ranks,
        options.device,
        RunConfig.model_fields["cluster"].default.max_ranks_per_core,  # no file of settings is read here
        asked=f"--ranks={options.ranks}",
        field="--ranks",
        hint="give fewer ranks",
    )
    if not 0.01 <= options.scale <= 4:
        raise ConfigError(
            f"--calibrate-scale={options.scale:g} is not in [0.01, 4]", field="--calibrate-scale", hint="leave it out"
        )
    _check_out(options.out)
    dtype = measure(options.out, options.ranks, device=options.device, dtype=options.dtype, scale=options.scale)
    rates = read_calibration(options.out, field="--calibrate")
    print(
        f"{rates.source}\n"
        f"  products   {rates.matrix_tflops:,.3g} TFLOP/s in {dtype}\n"
        f"  attention  {rates.attention_tflops:,.3g} TFLOP/s\n"
        f"  memory     {rates.memory_gbps:,.3g} GB/s read and written\n"
        f"  comm       {rates.comm_gbps:,.3g} GB/s sent by a rank\n"
        f"  host       {rates.host_gbps:,.3g} GB/s\n"
        f"written to {options.out}"
    )
    return 0


def _check_out(out: Path) -> None:
    """What would only show after minutes of measuring."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--calibrate={out} is in no folder that exists",
            field="--calibrate",
            hint="make the folder, or name another",
        )
    if out.is_dir():
        raise ConfigError(f"--calibrate={out} is a folder", field="--calibrate", hint="name a file in it")
    if (out.exists() and not out.is_file()) or not can_keep_files(out):
        raise ConfigError(f"--calibrate={out} is no plain file", field="--calibrate", hint="name another file")
    if not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
        raise ConfigError(f"--calibrate={out} cannot be written", field="--calibrate", hint="name another file")


def measure(out: Path, ranks: int, *, device: str = "auto", dtype: str | None = None, scale: float = 1.0) -> str:
    """Writes the rates of `ranks` processes that this starts, and the figures behind them; returns the dtype.

    Raises:
        ConfigError: there is no such device, or the file cannot be written.
    """
    import torch
    import torch.multiprocessing as mp

    from slimefsdp.distributed.mesh import choose_device

    place = choose_device(device).type
    if place == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"--ranks={ranks}, and torch sees {torch.cuda.device_count()} CUDA devices",
            field="--ranks",
            hint="give fewer, or --calibrate-device cpu",
        )
    chosen = dtype or ("bfloat16" if place == "cuda" else "float32")
    found: Any = mp.get_context("spawn").SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # rank 0 gets it as it is: nobody else can take its port
        mp.spawn(_rank, (ranks, listener, place, chosen, scale, found), nprocs=ranks)  # raises what a rank raised
    write_calibration(out, *found.get())
    return chosen


def _rank(rank: int, ranks: int, listener: socket.socket, place: str, dtype: str, scale: float, found: Any) -> None:
    import torch
    import torch.distributed as dist

    from slimefsdp.distributed.mesh import start_process_group
    from slimefsdp.perf_model.calibrate import measure_rates

    # torch 2.13 renames collectives that 2.11 has under their old names alone
    warnings.simplefilter("ignore", FutureWarning)
    device = torch.device(place, rank) if place == "cuda" else torch.device(place)
    if place == "cpu":
        torch.set_num_threads(1)  # as a worker computes
    port = listener.getsockname()[1]
    if rank > 0:
        listener.close()
    start_process_group(
        device, rank=rank, world_size=ranks, address="127.0.0.1", port=port, timeout_s=_TIMEOUT_S,
        listener=listener if rank == 0 else None,
    )  # fmt: skip
    rates, details = measure_rates(device, getattr(torch, dtype), dist.group.WORLD, scale=scale)
    if rank == 0:
        found.put((rates, details))  # a few kilobytes, which a pipe holds until somebody reads them
    dist.barrier()
    dist.destroy_process_group()
