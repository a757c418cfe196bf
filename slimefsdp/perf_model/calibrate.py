"""The rates of this machine, measured: products, attention, memory, and what ranks send each other.

Every figure is the best of several rounds, so that whatever else the machine does takes no part in it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slimefsdp.attention.call_plan import AttentionParams
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from slimefsdp.batching.hardware import Rates

_ROUNDS = 5
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 4, 64
_FORWARDS = 3.5  # of attention: its own, and in backward queries with keys again and the gradients of both products


def measure_rates(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None, *, scale: float = 1.0
) -> tuple[Rates, dict[str, Any]]:
    """Collective: rates of this rank's device, and the figures behind them; the same on every rank, of the slowest.

    Args:
        dtype: of products and attention.
        group: whose ranks send; None, or one rank: copies on the device stand in for what is sent.
        scale: of the sizes that are measured with; below 1 for a quick look.
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
    figures = [
        max(products.values()),
        max(attention.values()),
        memory,
        statistics.harmonic_mean(list(sent.values())),
        host,
    ]
    if group is not None and ranks > 1:  # a step waits for its slowest rank
        slowest = torch.tensor(figures, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MIN, group)
        figures = slowest.tolist()
    name = torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads a rank"
    details = {
        "matrix_tflops_by_size": products,
        "attention_tflops_by_tokens": attention,
        "comm_gbps_by_collective": sent,
        "ranks": ranks,
        "device": name,
    }
    source, named = f"a calibration of {name}, {ranks} ranks", str(dtype).removeprefix("torch.")
    matrix_tflops, attention_tflops, memory_gbps, comm_gbps, host_gbps = figures
    return Rates(source, matrix_tflops, attention_tflops, memory_gbps, comm_gbps, host_gbps, named), details


def _product_tflops(n: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b, out=out), device) / 1e12


def _attention_tflops(tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Of one causal sequence, forward and backward, on the path that training takes."""
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
    """10^9 bytes read and written in a second."""
    pinned = source.type != target.type
    first = torch.ones(size // 4, device=source, pin_memory=pinned)
    second = torch.empty(size // 4, device=target)
    return 2 * size / _best_seconds(lambda: second.copy_(first), target) / 1e9


def _comm_gbps(size: int, device: torch.device, group: dist.ProcessGroup) -> dict[str, float]:
    """10^9 bytes that a rank sends in a second, by collective; of ring collectives."""
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
    """Of several rounds; the same number of rounds on every rank."""
    best = math.inf
    for _ in range(_ROUNDS + 1):  # the first one is warm-up, and cannot be the best by much
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
