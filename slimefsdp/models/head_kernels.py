"""Provides Triton kernels for a tile of logits on CUDA: the sums of each row, and the gradient of the logits.

Torch operations would read or write a tile nine times in forward and seven times in backward; the kernels read a tile
twice in forward and once in backward. One program computes the sums of a row, block by block in order, so that their
bits do not depend on other rows. slimefsdp.models.fused_log_probs has the same computations in plain torch, for the CPU
and for float64.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ModuleNotFoundError:  # not part of torch's CPU build
    triton = None

logger = logging.getLogger(__name__)

_BLOCK = 4096  # words that a program processes at once
_WARPS = 8


@cache
def can_launch(device: torch.device) -> bool:
    """Returns whether these kernels work on a device, by running both kernels on one row, once per process.

    Triton needs a C compiler, and a folder that Triton can write to and load libraries from. A failure is logged, and
    the head then uses plain torch.
    """
    if triton is None:
        return False
    row, index = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    try:
        row_sums(row[None], row.clone(), row.clone(), row.clone())
        logits_grad(row[None], row, row, index, row, torch.empty(1, 1, dtype=torch.bfloat16, device=device))
    except Exception as error:  # errors of a compiler, a linker or a driver
        problem = " ".join(str(error).split())[:300]
        logger.warning("the head works without its Triton kernels, which failed: %s: %s", type(error).__name__, problem)
        return False
    return True


def row_sums(logits: Tensor, largest: Tensor, exp_sums: Tensor, exp_logits: Tensor) -> None:
    """Computes m = max z, sum e^(z - m), and sum (z - m) e^(z - m) for each row z of logits.

    Args:
        logits: [rows, words] float32, contiguous.
        largest, exp_sums, exp_logits: [rows] float32, contiguous; receive the results.
    """
    rows, words = logits.shape
    if rows:
        with torch.cuda.device_of(logits):  # unlike torch's operations, Triton uses the current device
            _row_sums[(rows,)](logits, largest, exp_sums, exp_logits, words, BLOCK=_BLOCK, num_warps=_WARPS)


def logits_grad(
    logits: Tensor, largest: Tensor, factors: Tensor, targets: Tensor, target_grads: Tensor, out: Tensor
) -> None:
    """Computes out = factors e^(logits - largest), plus target_grads in the columns of targets.

    Args:
        logits: [rows, words] float32, contiguous; not changed.
        largest, factors, target_grads: [rows] float32, contiguous.
        targets: [rows] int64, contiguous.
        out: [rows, words], contiguous; results are rounded to its dtype once.
    """
    rows, words = logits.shape
    if rows:
        grid = (rows, triton.cdiv(words, _BLOCK))
        with torch.cuda.device_of(logits):
            _logits_grad[grid](
                logits, largest, factors, targets, target_grads, out, words, BLOCK=_BLOCK, num_warps=_WARPS
            )


if triton is not None:

    @triton.jit
    def _row_sums(logits, largest, exp_sums, exp_logits, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        start = logits + row * words
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, words, BLOCK):
            inside = first + columns < words
            top = tl.maximum(top, tl.load(start + first + columns, mask=inside, other=float("-inf")))
        most = tl.max(top, 0)
        sums = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for first in range(0, words, BLOCK):
            inside = first + columns < words
            # masked columns must add 0 to both sums; loading -inf would give 0 * -inf = nan
            below = tl.load(start + first + columns, mask=inside, other=0.0) - most
            exps = tl.where(inside, tl.exp(below), 0.0)
            sums += exps
            products += exps * below
        tl.store(largest + row, most)
        tl.store(exp_sums + row, tl.sum(sums, 0))
        tl.store(exp_logits + row, tl.sum(products, 0))

    @triton.jit
    def _logits_grad(  # type: ignore[no-untyped-def]
        logits, largest, factors, targets, target_grads, out, words, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < words
        below = tl.load(logits + row * words + columns, mask=inside, other=0.0) - tl.load(largest + row)
        grad = tl.exp(below) * tl.load(factors + row)
        grad += tl.where(columns == tl.load(targets + row), tl.load(target_grads + row), 0.0)
        tl.store(out + row * words + columns, grad.to(out.dtype.element_ty), mask=inside)
