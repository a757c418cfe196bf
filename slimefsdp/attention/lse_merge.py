"""Merges attention over several sets of keys by their log-sum-exps.

Given (out_i, lse_i) over disjoint sets of keys, lse = log(sum_i exp(lse_i)) and out = sum_i exp(lse_i - lse) out_i.
An attention sink is a key whose value is zero, so it only enters the log-sum-exp. The backward of each partial call is
exact if it uses the merged out and lse, sinks included.
"""

from __future__ import annotations

import torch

from slimefsdp.attention.call_plan import Rows


def merge_rows(out: torch.Tensor, lse: torch.Tensor, rows: Rows, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges a partial result into some rows, in place.

    Args:
        out: [tokens, heads, head_dim], at least float32.
        lse: [heads, tokens].
        rows: [part_tokens], the rows of `out`; each at most once.
        part: [part_tokens, heads, head_dim].
        part_lse: [heads, part_tokens].
    """
    rows_out, rows_lse = out[rows], lse[:, rows]
    merged = torch.logaddexp(rows_lse, part_lse)
    rows_out.mul_(_share(rows_lse, merged)).addcmul_(part.to(out.dtype), _share(part_lse, merged))
    lse[:, rows] = merged
    if isinstance(rows, torch.Tensor):
        out[rows] = rows_out  # a slice is a view, which has been written in place


def add_rows(total: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    """Adds `part` to some rows of `total`, in place; a row may occur several times.

    Args:
        total: [tokens, heads, head_dim].
        rows: [part_tokens].
        part: [part_tokens, heads, head_dim], of any dtype.
    """
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def absorb_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp after adding a key per head, whose value is 0 and whose logit is in `sinks`."""
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * _share(lse, merged), merged


def sinks_grad(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the sink logits, [heads]: -sum over rows of the sink's probability * rowsum(dO * O)."""
    pull = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()  # [heads, tokens]
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * pull).sum(1).to(sinks.dtype)


def _share(part_lse: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (part_lse - lse).exp().t().unsqueeze(-1)  # [tokens, heads, 1]
