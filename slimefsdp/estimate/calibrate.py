"""Measures the rates of this machine: matrix products, attention, memory, and communication between ranks.

Every rate is the best of several rounds, because other processes on the machine can only slow a round down. The ranks
are processes without Ray.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slimefsdp.attention.call_plan import AttentionParams
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from slimefsdp.distributed.mesh import start_process_group
from slimefsdp.estimate.hardware import Rates

_TIMEOUT_S = 600.0
_ROUNDS = 5
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 4, 64
_FORWARDS = 3.5  # FLOPs of attention's forward and backward / FLOPs of forward; backward has five products, forward two


def calibrate(device_type: str, dtype: str, ranks: int, *, scale: float = 1.0) -> tuple[Rates, dict[str, Any]]:
    """Starts `ranks` processes on this machine, and returns the result of `measure_rates` in them.

    Args:
        device_type: cpu or cuda; on CUDA each rank has its own device.
        dtype: dtype of matrix products and attention, such as bfloat16.
        scale: see `measure_rates`.
    """
    results: Any = mp.get_context("spawn").SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # stays open in rank 0, which reserves the port
        mp.spawn(_rank, (ranks, listener, device_type, dtype, scale, results), nprocs=ranks)  # raises a rank's error
    measured: tuple[Rates, dict[str, Any]] = results.get()
    return measured


def _rank(
    rank: int, ranks: int, listener: socket.socket, device_type: str, dtype: str, scale: float, results: Any
) -> None:
    # torch 2.13 warns of collectives by the names that torch 2.11 needs
    warnings.simplefilter("ignore", FutureWarning)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cpu":
        torch.set_num_threads(1)  # like a training worker
    port = listener.getsockname()[1]
    if rank > 0:
        listener.close()
    start_process_group(
        device, rank=rank, world_size=ranks, address="127.0.0.1", port=port, timeout_s=_TIMEOUT_S,
        listener=listener if rank == 0 else None,
    )  # fmt: skip
    measured = measure_rates(device, getattr(torch, dtype), dist.group.WORLD, scale=scale)
    if rank == 0:
        results.put(measured)  # does not block, since this fits the pipe's buffer
    dist.barrier()
    dist.destroy_process_group()


def measure_rates(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None, *, scale: float = 1.0
) -> tuple[Rates, dict[str, Any]]:
    """Collective: returns the rates of the slowest rank, which are equal on every rank, and this rank's measurements.

    Args:
        dtype: dtype of matrix products and attention.
        group: the ranks whose communication is measured; with None or a single rank, copies on the device are measured
            instead.
        scale: factor on the sizes of the measured operations; a factor below 1 is quicker and less accurate.
    """
    on_cuda = device.type == "cuda"
    sizes = [max(64, round(n * scale)) for n in ((2048, 4096, 8192) if on_cuda else (512, 1024, 2048))]
    products = {n: _product_tflops(n, device, dtype) for n in sizes}
    lengths = [max(64, round(n * scale)) for n in ((4096, 16384) if on_cuda else (1024, 4096))]
    attention = {n: _attention_tflops(n, device, dtype) for n in lengths}
    size = round((2**28 if on_cuda else 2**26) * scale)
    memory = _copy_gbps(size, device, device)
    host = _copy_gbps(size, torch.device("cpu"), device) / 2 if on_cuda else memory
    ranks = 1 if group is None else dist.get_world_size(group)
    sent = _comm_gbps(size // 4, device, group) if group is not None and ranks > 1 else {"copies": memory}
    comm = statistics.harmonic_mean(list(sent.values()))
    best = [max(products.values()), max(attention.values()), memory, comm, host]
    figures = torch.tensor(best, dtype=torch.float64, device=device)
    if group is not None and ranks > 1:  # a step waits for its slowest rank
        dist.all_reduce(figures, dist.ReduceOp.MIN, group)
    name = torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads a rank"
    source = f"a calibration of {name}, {ranks} ranks"
    rates = Rates(source, *figures.tolist())
    return replace(rates, dtype=str(dtype).removeprefix("torch.")), {
        "matrix_tflops_by_size": products,
        "attention_tflops_by_tokens": attention,
        "comm_gbps_by_collective": sent,
        "ranks": ranks,
        "device": name,
    }


def _product_tflops(n: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b, out=out), device) / 1e12


def _attention_tflops(tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the rate of attention in one causal sequence, forward and backward, computed as in training."""
    attention = Attention(Choice("local", "one rank"))
    attend = attention.for_pack(attention.layout([0, tokens]), device)
    q, k, v = (
        torch.randn(tokens, heads, _HEAD_DIM, device=device).to(dtype).requires_grad_()
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    gradient = torch.randn_like(q)

    def step() -> None:
        out = attend(q, k, v, AttentionParams(_HEAD_DIM**-0.5), None)
        torch.autograd.grad(out, (q, k, v), gradient)

    pairs = tokens * (tokens + 1) / 2
    return _FORWARDS * 4 * _HEADS * _HEAD_DIM * pairs / _best_seconds(step, device) / 1e12


def _copy_gbps(size: int, source: torch.device, target: torch.device) -> float:
    """Returns the rate of a copy in 10^9 bytes per second, counting bytes read and bytes written."""
    first = torch.ones(size // 4, device=source, pin_memory=source.type != target.type)
    second = torch.empty(size // 4, device=target)
    return 2 * size / _best_seconds(lambda: second.copy_(first), target) / 1e9


def _comm_gbps(size: int, device: torch.device, group: dist.ProcessGroup) -> dict[str, float]:
    """Returns the rate of each collective in 10^9 bytes sent per rank and second, assuming ring algorithms."""
    ranks = dist.get_world_size(group)
    shard = torch.ones(max(1, size // 4 // ranks), device=device)
    whole = torch.ones(shard.numel() * ranks, device=device)
    share = whole.nbytes * (ranks - 1) / ranks

    def seconds(collective: Callable[[], Any]) -> float:
        dist.barrier(group)
        return _best_seconds(collective, device)

    return {
        "all_gather": share / seconds(lambda: dist.all_gather_into_tensor(whole, shard, group)) / 1e9,
        "reduce_scatter": share / seconds(lambda: dist.reduce_scatter_tensor(shard, whole, group=group)) / 1e9,
        "all_reduce": 2 * share / seconds(lambda: dist.all_reduce(whole.zero_(), group=group)) / 1e9,
    }


def _best_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Returns the best of several rounds; every rank takes the same number of rounds."""
    best = math.inf
    for _ in range(_ROUNDS + 1):  # the first round is a warm-up
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
