"""Attention kernels, ring plans, fused head and sleep on one device, against plain float64 computations.

    python benchmarks/gpu/smoke.py --json smoke.json
    python benchmarks/gpu/smoke.py --only 'attention/*' 'ring/*'
    python benchmarks/gpu/smoke.py --device cpu

Needs torch and transformers alone. Each check prints PASS, FAIL or SKIP with relative errors of the output and of every
gradient; the exit status is 1 if any failed. On CUDA inputs are bfloat16, on a CPU float32. Two ranks cannot share one
GPU under NCCL: for the ring they are threads of this process that pass messages over queues, while plans, kernels and
merges are those of a run.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Check, Finding, relative_error
from slimefsdp.attention.call_plan import AttentionParams, ring_plan
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from slimefsdp.attention.varlen import _RingAttention
from slimefsdp.batching.cp_sharding import zigzag_layout
from slimefsdp.distributed.memory_manager import StorageOffloader, prefer_expandable_segments
from slimefsdp.models.fused_log_probs import HeadInputs, token_log_probs, token_log_probs_and_kl

HEADS = 8
MESSAGE_TIMEOUT_S = 60.0
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    assert __doc__ is not None
    return checks.main(__doc__, checks_of, arguments)


def checks_of(device: torch.device) -> list[Check]:
    """Every check on this device, the small ones first."""
    prefer_expandable_segments(device)
    found = [Check(f"attention/{name}", partial(attention, pack, device)) for name, pack in PACKS.items()]
    for cp, name in ((2, "two_samples"), (4, "short_samples"), (2, "shared_prompt")):
        found.append(Check(f"ring/cp{cp}_{name}", partial(ring, RING_PACKS[name], cp, device)))
    found += [Check(f"head/{name}", partial(head, size, device)) for name, size in HEAD_SIZES.items()]
    found.append(Check("head/same_bits", partial(head_bits, device)))
    found.append(Check("head/host_syncs", partial(head_without_host_sync, device), needs_cuda=True))
    found.append(Check("sleep/storages", partial(sleep, device)))
    found.append(Check("large/head_chunks", partial(head_chunks, device), needs_cuda=True))
    found.append(Check("large/product_added_in_place", partial(product_added_in_place, device), needs_cuda=True))
    return found


def half_precision(device: torch.device) -> torch.dtype:
    """What a model computes in there; float32 on a CPU, whose errors show mistakes that bfloat16 would hide."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Of relative errors: a few roundings of bfloat16 or float32."""
    if dtype is torch.bfloat16:
        return 1.5e-2
    return 2e-5 if device.type == "cuda" else 1e-4


def elapsed_ms(device: torch.device, began: float) -> float:
    """Milliseconds since `began`, of `time.perf_counter`, when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began)


# ---------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Pack:
    """The nodes of a pack, and how attention scores them."""

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...] | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_heads: int = 2
    head_dim: int = 128
    dtype: torch.dtype | None = None  # None: the device's

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    @property
    def scoring(self) -> AttentionParams:
        return AttentionParams(self.head_dim**-0.5, self.window, self.softcap)


GROUP = (100, *[37] * 6)  # a prompt and six responses
GROUP_PARENTS = (None, *[0] * 6)
PACKS = {
    "plain": Pack((300, 1, 339)),
    "one_token_samples": Pack((1, 1, 1)),
    "window": Pack((300, 340), window=64),
    "sinks": Pack((300, 340), has_sinks=True),
    "shared_prompt": Pack(GROUP, GROUP_PARENTS),
    "shared_prompt_window": Pack(GROUP, GROUP_PARENTS, window=50),
    "tree": Pack((50, 40, 40, 1, 69), (None, 0, 1, 1, 0)),
    "head_dim_256": Pack((200, 133), head_dim=256),
    "one_key_head": Pack((200, 133), head_dim=64, kv_heads=1),
    "head_dim_72": Pack((200, 133), head_dim=72),
    # soft caps and float32: on CUDA the kernel in plain torch
    "softcap": Pack((200, 133), softcap=20.0),
    "softcap_shared_prompt": Pack(GROUP, GROUP_PARENTS, softcap=20.0),
    "float32": Pack((200, 133), dtype=torch.float32),
    "float32_many_samples": Pack(tuple(range(1, 41)), window=16, has_sinks=True, dtype=torch.float32),
}
RING_PACKS = {
    "two_samples": Pack((301, 339)),
    "short_samples": Pack((5, 296, 1, 338)),
    "shared_prompt": Pack(GROUP, GROUP_PARENTS),
}


def attention_inputs(pack: Pack, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Leaves q, k, v and where there are any sinks, and the gradient of the output."""
    torch.manual_seed(0)
    tokens, dtype = pack.cu_seqlens[-1], pack.dtype or half_precision(device)
    shapes: list[tuple[int, ...]] = [(tokens, heads, pack.head_dim) for heads in (HEADS, pack.kv_heads, pack.kv_heads)]
    if pack.has_sinks:
        shapes.append((HEADS,))
    leaves = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    return leaves, torch.randn(shapes[0], device=device, dtype=dtype)


def visible(pack: Pack) -> torch.Tensor:
    """[tokens, tokens] bool: a token sees what precedes it in its node, and its node's ancestors."""
    cu, parents = pack.cu_seqlens, pack.parents or (None,) * len(pack.lengths)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        before = [] if parent is None else paths[cu[parent + 1] - 1]
        paths += [[*before, *range(cu[node], token + 1)] for token in range(cu[node], cu[node + 1])]
    seen = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for token, path in enumerate(paths):
        seen[token, path[-pack.window :] if pack.window else path] = True
    return seen


def expected_attention(pack: Pack, leaves: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of q, k, v and sinks by softmax over an explicit mask, in float64."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    q, k, v, *sinks = wide
    k, v = (x.repeat_interleave(HEADS // pack.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * pack.scoring.scale  # [heads, tokens, tokens]
    if pack.softcap is not None:
        scores = pack.softcap * torch.tanh(scores / pack.softcap)
    scores = scores.masked_fill(~visible(pack).to(q.device), -torch.inf)
    if sinks:
        scores = torch.cat([scores, sinks[0][:, None, None].expand(-1, len(q), 1)], -1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)
    return [out, *torch.autograd.grad(out, wide, grad.double())]


def errors_of(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], names: str) -> dict[str, float]:
    """Relative errors by name."""
    return {name: relative_error(a, b) for name, a, b in zip(names.split(), found, expected, strict=True)}


def attention(pack: Pack, device: torch.device) -> Finding:
    """A pack on one rank, as a layer computes it."""
    leaves, grad = attention_inputs(pack, device)
    layer = Attention(Choice("local", "one rank"))
    attend = layer.for_pack(zigzag_layout(pack.cu_seqlens, 1), device, pack.parents)
    q, k, v, *sinks = leaves
    out = attend(q, k, v, pack.scoring, sinks[0] if sinks else None)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    names = "out dq dk dv dsinks" if sinks else "out dq dk dv"
    errors = errors_of(found, expected_attention(pack, leaves, grad), names)
    # a sink's gradient adds up over all tokens, and the roundings of the output with it
    bound = tolerance(q.dtype, device) * (3 if sinks else 1)
    return max(errors.values()) < bound, errors


# ---------------------------------------------------------------------- ring


class QueueTransfer:
    """A message on its way between two threads."""

    def __init__(self, messages: queue.Queue[torch.Tensor], rows: int) -> None:
        self._messages = messages
        self._rows = rows

    def wait(self) -> list[torch.Tensor]:
        """The tensor received, once it is there."""
        message = self._messages.get(timeout=MESSAGE_TIMEOUT_S)
        assert message.shape[1] == self._rows, f"{message.shape[1]} rows arrived, the plan has {self._rows}"
        return [message]


class QueueComm:
    """What the ring needs of `slimefsdp.attention.cp_comm.Comm`, between threads of one process.

    Args:
        queues: of every rank, what the rank before it sends.
    """

    def __init__(self, rank: int, queues: Sequence[queue.Queue[torch.Tensor]]) -> None:
        self.rank = rank
        self.size = len(queues)
        self._queues = queues

    def pass_on(self, held: torch.Tensor, rows: int) -> QueueTransfer:
        """Sends `held` to the next rank and receives so many rows from the previous one."""
        self._queues[(self.rank + 1) % self.size].put(held.clone())  # the sender goes on to write to its own
        return QueueTransfer(self._queues[self.rank], rows)


class Context:
    """Stands for autograd's: its engine has one thread for a GPU, on which ranks would wait for each other for ever."""

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keeps what backward asks for."""
        self.saved_tensors = tensors


def ring(pack: Pack, cp: int, device: torch.device) -> Finding:
    """A pack over `cp` ranks that are threads: every rank's output and gradients, put together again."""
    leaves, grad = attention_inputs(pack, device)
    layout = zigzag_layout(pack.cu_seqlens, cp)
    queues: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(cp)]
    found = [torch.full_like(x, torch.nan) for x in (leaves[0], *leaves)]

    def run_rank(rank: int) -> None:
        pieces = [torch.arange(piece.start, piece.end, device=device) for piece in layout[rank]]
        rows = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64, device=device)
        plan, comm, context = ring_plan(layout, rank, device, pack.parents), QueueComm(rank, queues), Context()
        with torch.no_grad():  # of this thread
            q, k, v = (leaf[rows] for leaf in leaves)
            out = _RingAttention.forward(context, q, k, v, None, plan, comm, pack.scoring)  # type: ignore[arg-type]
            grads = _RingAttention.backward(context, grad[rows])
            for whole, part in zip(found, (out, *grads), strict=False):
                assert part is not None
                whole[rows] = part

    with ThreadPoolExecutor(cp) as ranks:
        failures = [future.exception() for future in [ranks.submit(run_rank, rank) for rank in range(cp)]]
    # where one rank fails the others wait in vain: its error is the one to see
    for failure in sorted(filter(None, failures), key=lambda error: isinstance(error, queue.Empty)):
        raise failure
    errors = errors_of(found, expected_attention(pack, leaves, grad), "out dq dk dv")
    return max(errors.values()) < 2 * tolerance(found[0].dtype, device), errors


# ---------------------------------------------------------------------- head


@dataclass(frozen=True)
class HeadSize:
    """Log-probs of so many rows."""

    rows: int
    vocab: int
    hidden_dim: int
    softcap: float | None = None
    entropy_grad: bool = True


HEAD_SIZES = {
    "several_chunks": HeadSize(517, 5003, 256),
    "softcap": HeadSize(33, 4096, 64, softcap=30.0),
    "one_row": HeadSize(1, 1000, 64),
    "log_probs_alone": HeadSize(517, 5003, 256, entropy_grad=False),
    "whole_vocabulary": HeadSize(65, 151936, 128, entropy_grad=False),
}
LARGE_HEAD = HeadSize(14336, 151936, 2560)  # of Qwen3-4B
CHUNKS_MIB = (128, 256, 512, 1024, 2048, 4096)
TEMPERATURE = 0.7


def head_inputs(size: HeadSize, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leaves hidden and weight, and targets."""
    torch.manual_seed(0)
    dtype = half_precision(device)
    hidden = torch.randn(size.rows, size.hidden_dim, device=device, dtype=dtype)
    weight = torch.randn(size.vocab, size.hidden_dim, device=device, dtype=dtype).mul_(0.05)
    targets = torch.randint(size.vocab, (size.rows,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def head(size: HeadSize, device: torch.device) -> Finding:
    """Log-probs, entropies and the gradients of a sum over both."""
    hidden, weight, targets = head_inputs(size, device)
    slopes = torch.randn(size.rows, device=device)
    log_probs, entropy = token_log_probs(
        HeadInputs(hidden, weight, size.softcap), targets,
        with_entropy=True, entropy_grad=size.entropy_grad, temperature=TEMPERATURE,
        chunk_bytes=2 * MIB,
    )  # fmt: skip
    assert entropy is not None
    entropy_slope = 0.1 if size.entropy_grad else 0.0
    grads = torch.autograd.grad((log_probs * slopes).sum() + entropy_slope * entropy.sum(), (hidden, weight))
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    logits = wide[0] @ wide[1].t()
    if size.softcap is not None:
        logits = size.softcap * torch.tanh(logits / size.softcap)
    log_softmax = (logits / TEMPERATURE).log_softmax(-1)
    plain = log_softmax.gather(1, targets[:, None]).squeeze(1)
    plain_entropy = -(log_softmax.exp() * log_softmax).sum(1)
    plain_grads = torch.autograd.grad((plain * slopes).sum() + entropy_slope * plain_entropy.sum(), wide)
    values = errors_of((log_probs, entropy), (plain, plain_entropy), "log_probs entropy")
    gradients = errors_of(grads, plain_grads, "dhidden dweight")
    bound = tolerance(hidden.dtype, device)
    return max(values.values()) < 1e-4 and max(gradients.values()) < bound, values | gradients


def head_bits(device: torch.device) -> Finding:
    """Log-probs and entropies have the same bits without gradients, and beside a reference, of which an equal one is
    exactly as far away as nothing.
    """
    hidden, weight, targets = head_inputs(HEAD_SIZES["several_chunks"], device)
    alone = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=2 * MIB)
    with torch.no_grad():
        without = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=2 * MIB)
        bare, _ = token_log_probs(HeadInputs(hidden, weight), targets, chunk_bytes=2 * MIB)
    model, reference = HeadInputs(hidden, weight), HeadInputs(hidden.detach(), weight.detach())
    *beside, kl = token_log_probs_and_kl(model, targets, reference, chunk_bytes=2 * MIB)
    assert alone[1] is not None and without[1] is not None
    is_equal = all(torch.equal(alone[0], found) for found in (without[0], bare, beside[0]))
    is_equal = is_equal and torch.equal(alone[1], without[1]) and torch.equal(alone[1], beside[1])
    return is_equal and bool((kl == 0).all()), {"equal": is_equal, "largest_kl": float(kl.abs().max())}


def head_without_host_sync(device: torch.device) -> Finding:
    """Forward and backward wait for the device nowhere; torch raises where they do."""
    hidden, weight, targets = head_inputs(HEAD_SIZES["several_chunks"], device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        log_probs, _ = token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=2 * MIB)
        log_probs.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True, {}


def head_chunks(device: torch.device) -> Finding:
    """Time and peak memory of a 4B model's head by the size of its chunks, all of which say the same."""
    hidden, weight, targets = head_inputs(LARGE_HEAD, device)
    figures: dict[str, Any] = {}
    found = []
    for mib in CHUNKS_MIB:
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):  # the last one counts: the first allocates
            hidden.grad = weight.grad = None
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            log_probs, _ = token_log_probs(
                HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=mib * MIB
            )
            log_probs.sum().backward()
            figures[f"ms_at_{mib}_mib"] = elapsed_ms(device, began)
        figures[f"peak_gib_at_{mib}_mib"] = torch.cuda.max_memory_allocated(device) / 2**30
        found.append(log_probs.detach())
    figures["difference"] = max(float((each - found[0]).abs().max()) for each in found)
    return figures["difference"] < 1e-3, figures


def product_added_in_place(device: torch.device) -> Finding:
    """Whether torch adds a product of halves to a float32 tensor in place; it may refuse to, but not be wrong."""
    left = torch.randn(6553, 110, device=device, dtype=torch.bfloat16)
    right = torch.randn(110, 2560, device=device, dtype=torch.bfloat16)
    total = torch.ones(6553, 2560, device=device)
    try:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as refusal:
        return True, {"refused": " ".join(str(refusal).split())[:100]}
    error = relative_error(total, 1 + left.double() @ right.double())
    return error < 1e-5, {"error": error}


# ---------------------------------------------------------------------- sleep


def sleep(device: torch.device) -> Finding:
    """Storages, one of them seen by two tensors, leave the device and come back to the bit, three times."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device) for shape in ((1_000_003,), (7, 5), (3 * MIB,))]
    tensors.append(tensors[0][10:20])
    before = [tensor.cpu().clone() for tensor in tensors]
    offloader = StorageOffloader(pin_memory=device.type == "cuda", chunk_bytes=MIB)
    is_free = is_equal = True
    for _ in range(3):
        asleep = offloader.sleep(tensors)
        is_free &= all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        awake = offloader.wake_up()
        is_equal &= all(torch.equal(tensor.cpu(), old) for tensor, old in zip(tensors, before, strict=True))
    rates = {"sleep_gb_per_s": asleep.bytes_per_s / 1e9, "wake_up_gb_per_s": awake.bytes_per_s / 1e9}
    return is_free and is_equal, {"freed": is_free, "equal": is_equal, **rates}


if __name__ == "__main__":
    sys.exit(main())
