"""Draws the next token of each row from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimefsdp.errors import StateError

_BELOW_ONE = 1 - 2.0**-40


def draw(
    logits: torch.Tensor,
    *,
    temperature: Sequence[float],
    numbers: Sequence[float],
    tempered: Sequence[bool],
    top_k: Sequence[int | None] | None = None,
    top_p: Sequence[float] | None = None,
    min_p: Sequence[float] | None = None,
    renormalized: Sequence[bool] | None = None,
) -> tuple[list[int], list[float]]:
    """Draws one token for each row; returns the tokens and their log-probs.

    Args:
        logits: [rows, vocab].
        temperature: [rows].
        numbers: [rows] uniform in [0, 1); chooses the token whose interval of cumulative probability has this number. A
            negative number chooses the most likely token.
        tempered: [rows], whether the returned log-prob is at the temperature; otherwise it is at temperature 1 over all
            tokens.
        top_k, top_p, min_p: [rows], which tokens can be drawn, as in `SamplingParams`; None means all.
        renormalized: [rows], whether a log-prob at the temperature is over the tokens that can be drawn; otherwise it
            is over all tokens. None means True in every row.

    Raises:
        StateError: logits are not finite.
    """
    untempered = logits
    if any(value != 1.0 for value in temperature):
        logits = logits / torch.tensor(temperature, dtype=logits.dtype, device=logits.device)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1)
    # a NaN or +inf makes the whole row of log_softmax NaN, whereas argmax would still return a token
    require_finite(int(log_probs[:, 0].isnan().sum()), len(logits))
    count = len(logits)
    limits = list(zip(top_k or [None] * count, top_p or [1.0] * count, min_p or [0.0] * count, strict=True))
    limited = [row for row, (k, p, least) in enumerate(limits) if k is not None or p < 1.0 or least > 0.0]
    if limited:
        rows = torch.tensor(limited, device=logits.device)
        all_log_probs = log_probs[rows]
        log_probs[rows] = _only_likeliest(all_log_probs, [limits[row] for row in limited])
    if all(number < 0 for number in numbers):
        chosen = log_probs.argmax(-1)
    else:
        summed = log_probs.exp().cumsum(-1, dtype=torch.float64)
        # scaled by the actual sum, which may not be 1, so that a number just below 1 cannot select a token without
        # probability
        wanted = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * summed[:, -1:] * _BELOW_ONE
        chosen = torch.searchsorted(summed, wanted, right=True)[:, 0]
        if any(number < 0 for number in numbers):
            greedy = torch.tensor([number < 0 for number in numbers], device=logits.device)
            chosen = torch.where(greedy, log_probs.argmax(-1), chosen)
    of_chosen = log_probs.gather(1, chosen[:, None])[:, 0]
    if limited and renormalized is not None:
        for index, row in enumerate(limited):
            if not renormalized[row]:
                of_chosen[row] = all_log_probs[index, chosen[row]]
    is_other = [value != 1.0 for value in temperature]
    for row in limited:
        is_other[row] = True
    others = [row for row, is_tempered in enumerate(tempered) if is_other[row] and not is_tempered]
    if others:
        rows = torch.tensor(others, device=logits.device)
        of_chosen[rows] = untempered[rows].log_softmax(-1).gather(1, chosen[rows, None])[:, 0]
    return chosen.tolist(), of_chosen.tolist()


def require_finite(broken: int, rows: int) -> None:
    """Raises a StateError if any of the rows has logits that are not finite.

    Args:
        broken: the number of such rows.
    """
    if broken:
        raise StateError(
            f"{broken} of {rows} rows have logits that are not finite",
            field="logits",
            hint="check the weights of the last update, e.g. its gradient norm",
        )


def _only_likeliest(log_probs: torch.Tensor, limits: Sequence[tuple[int | None, float, float]]) -> torch.Tensor:
    """Returns renormalised log-probs of the tokens that (top_k, top_p, min_p) keep, and -inf for all other tokens.

    As in vLLM, min_p is applied first, then top_k to the kept tokens, then top_p. The most likely token is always kept.

    Args:
        log_probs: [rows, vocab].
    """
    device, vocab = log_probs.device, log_probs.shape[1]
    ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
    least = torch.tensor([p for _, _, p in limits], dtype=ordered.dtype, device=device)[:, None].log()
    top_k = torch.tensor([min(k or vocab, vocab) for k, _, _ in limits], device=device)
    is_out = (torch.arange(vocab, device=device) >= top_k[:, None]) | (ordered < ordered[:, :1] + least)
    ordered = ordered.masked_fill(is_out, float("-inf"))
    top_p = torch.tensor([p for _, p, _ in limits], dtype=torch.float64, device=device)
    summed = ordered.exp().cumsum(-1, dtype=torch.float64)
    # a token is kept if the more likely tokens have less than top_p of the probability; a row may not sum to exactly 1
    enough = torch.where(top_p < 1.0, top_p * summed[:, -1], float("inf"))
    is_needed = torch.cat([summed.new_zeros(len(summed), 1), summed[:, :-1]], dim=-1) < enough[:, None]
    ordered = ordered.masked_fill(~is_needed, float("-inf")).log_softmax(-1)
    return torch.empty_like(log_probs).scatter_(1, order, ordered)
