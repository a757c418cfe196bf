"""Computes log-probabilities and entropies of target tokens without storing all [rows, vocab] logits.

Logits are computed in tiles of rows and words, the entries of the vocabulary (slimefsdp.models.head_tiles). For each
row and part of the vocabulary, forward keeps the largest logit, and the sum of exponentials relative to it. Backward
replaces the logits of a tile by their gradient, in place. Backward starts with the last tiles of forward, whose logits
are kept, and recomputes the logits of all other tiles. With z the logits after soft-cap and temperature, p =
softmax(z), y the target, H = -sum_j p_j log p_j, q the softmax of a reference, and K = sum_j p_j log(p_j / q_j):

    log_prob = z_y - logsumexp(z)          d log_prob / d z_j = [j == y] - p_j
                                           d H / d z_j        = -p_j (log p_j + H)
                                           d K / d z_j        = p_j (log(p_j / q_j) - K)

Logits are at least float32: products of half-precision inputs have float32 results. On CUDA the fused kernels of
slimefsdp.models.head_kernels do the work of several torch operations in one pass over a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimefsdp.models import head_kernels
from slimefsdp.models.head_tiles import DeviceType, HeadTiles


class HeadAdapter(NamedTuple):
    """Holds the factors of what a head's adapter adds to the logits: low @ high.T."""

    low: Tensor  # [rows, rank]: hidden states times A, times the scale
    high: Tensor  # [vocab, rank]: B


class HeadInputs(NamedTuple):
    """Holds the inputs from which a model's logits are computed."""

    hidden: Tensor  # [rows, hidden_dim] in the compute dtype
    weight: Tensor  # [vocab, hidden_dim] in the same dtype
    softcap: float | None = None  # the final logit soft-cap of Gemma 2
    adapter: HeadAdapter | None = None  # in the same dtype
    # ranks with equal parts of the vocabulary, in order, and the same rows; weight and adapter are this rank's part
    group: dist.ProcessGroup | None = None


def token_log_probs(
    model: HeadInputs,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probability of each row's target under softmax(logits / temperature), and the row's entropy.

    The log-probabilities have the same bits with and without gradients, and with and without entropy. There is no
    synchronisation with the host. Gradients are first-order only.

    Args:
        model: the inputs of the head, of any number of rows. The gradient of a frozen weight is not computed. If it has
            a group, the call is collective, all ranks get the same results, and each rank's gradient of the hidden
            states is what its own words contribute.
        targets: [rows] int64 in [0, vocab); the range is not checked.
        temperature: divides the logits, for log-probs and entropy alike; > 0.
        with_entropy: also return the entropy in nats.
        entropy_grad: whether gradients flow through the entropy.
        chunk_bytes: bound on the memory for logits, see `HeadTiles.of`; a soft-cap, entropy_grad and a reference each
            need one more tile beyond this bound. None means the device's default.

    Returns:
        log_probs [rows], and entropy [rows] or None; both float32, or float64 for float64 inputs.
    """
    assert with_entropy or not entropy_grad, "entropy_grad needs with_entropy"
    return _apply(model, targets, None, _HeadPass(temperature, with_entropy, entropy_grad), chunk_bytes)[:2]


def token_log_probs_and_kl(
    model: HeadInputs,
    targets: Tensor,
    reference: HeadInputs,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the `token_log_probs`, the entropy, and each row's KL(model || reference) over the whole vocabulary.

    Log-probs and entropy have the same bits as in `token_log_probs`. The KL is exactly 0 where the logits of both
    models are bit-equal. Gradients flow only to the model, not to the reference.

    Args:
        model: hidden, weight and adapter receive gradients.
        targets, temperature, chunk_bytes: see `token_log_probs`; the temperature divides the logits of both models.
        reference: must have the same rows and vocabulary, and no adapter; hidden_dim and soft-cap may differ.

    Returns:
        log_probs, entropy and KL in nats, [rows] each.
    """
    assert reference.hidden.shape[0] == model.hidden.shape[0], "model and reference have different rows"
    assert reference.weight.shape[0] == model.weight.shape[0], "model and reference have different vocabularies"
    assert reference.adapter is None, "a reference with an adapter"
    options = _HeadPass(temperature, True, entropy_grad)
    log_probs, entropy, kl = _apply(model, targets, reference, options, chunk_bytes)
    assert entropy is not None and kl is not None
    return log_probs, entropy, kl


class _HeadPass(NamedTuple):
    temperature: float
    with_entropy: bool
    entropy_grad: bool


def _apply(
    model: HeadInputs, targets: Tensor, reference: HeadInputs | None, options: _HeadPass, chunk_bytes: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    hidden, weight, softcap, adapter, group = model
    low, high = adapter or (None, None)
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight is {weight.dtype}"
    assert targets.shape == hidden.shape[:1], f"{tuple(targets.shape)} targets for {hidden.shape[0]} rows"
    # tiles do not depend on the reference: a matrix product may round differently for another number of rows
    device: DeviceType = "cuda" if hidden.is_cuda else "cpu"
    tiles = HeadTiles.of(len(hidden), len(weight), _logits_dtype(hidden).itemsize, device, chunk_bytes)
    # logits are not kept if there is no backward, nor with a soft-cap, since backward then needs its tanh as well
    if softcap is not None or not torch.is_grad_enabled():
        tiles = replace(tiles, held=1)
    settings = (softcap, options, tiles, group)
    return _TokenLogProbs.apply(hidden, weight, low, high, targets, reference, settings)  # type: ignore[no-any-return]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        targets: Tensor,
        reference: HeadInputs | None,
        settings: tuple[float | None, _HeadPass, HeadTiles, dist.ProcessGroup | None],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        softcap, (temperature, with_entropy, entropy_grad), tiles, group = settings
        at_target = hidden.new_zeros(hidden.shape[0], dtype=_logits_dtype(hidden))
        targets = targets if group is None else targets - dist.get_rank(group) * len(weight)  # indices in the own part

        def by_tile() -> Tensor:
            return at_target.new_empty(len(tiles.words), hidden.shape[0])

        # one row for each part of the vocabulary; sums are relative to the largest logit of the part
        largest, exp_sums, exp_logits = by_tile(), by_tile(), by_tile()
        ref_largest, ref_exp_sums, differences = by_tile(), by_tile(), by_tile()
        held = _held_logits(tiles, at_target)
        has_kernels = _has_kernels(at_target)
        needs_exps = reference is not None or not has_kernels
        exps_buffer = at_target.new_empty(tiles.elements) if needs_exps else None
        ref_buffer = at_target.new_empty(tiles.elements) if reference is not None else None
        slots = _slots(tiles, held)
        for part, words in enumerate(tiles.words):
            head = _Words(weight, low, high, words, temperature, softcap, has_others=group is not None)
            ref_head = None if reference is None else _Words.of_reference(reference, words, temperature)
            for start, end in tiles.rows:
                rows = slice(start, end)
                logits = head.tile_of(next(slots), rows)
                exps = None if exps_buffer is None else head.tile_of(exps_buffer, rows)
                head.write_logits(hidden, rows, logits)
                head.read_targets(logits, targets[rows], at_target[rows])
                sums = _RowSums(largest[part, rows], exp_sums[part, rows], exp_logits[part, rows])
                sums.write(logits, exps, with_entropy=with_entropy, has_kernels=has_kernels)
                if reference is None or ref_head is None or ref_buffer is None or exps is None:
                    continue
                difference = ref_head.tile_of(ref_buffer, rows)
                ref_head.write_logits(reference.hidden, rows, difference)
                ref_sums = _RowSums(ref_largest[part, rows], ref_exp_sums[part, rows], differences[part, rows])
                ref_sums.write(difference, exps, with_entropy=False, has_kernels=has_kernels)
                shifted = logits
                if has_kernels:  # kernels do not change the logits, so they are not relative to the largest yet
                    shifted = torch.sub(logits, sums.largest[:, None], out=exps)
                    difference.sub_(ref_sums.largest[:, None])
                torch.sub(shifted, difference, out=difference)
                difference.mul_(torch.exp(shifted, out=exps))
                torch.sum(difference, dim=1, out=differences[part, rows])
        # combines the sums of all parts relative to the overall largest logit
        top = _total(largest.amax(0), group, dist.ReduceOp.MAX)
        below = largest - top
        share = below.exp()
        exp_sum = _total((exp_sums * share).sum(0), group)
        at_target = _total(at_target, group)
        log_sum = exp_sum.log()
        # log_sum is subtracted from the shifted logit: computing a logsumexp first would round log-probs near 0
        log_probs = (at_target - top).sub_(log_sum)
        kl = mean_difference = ref_top = None
        if reference is not None:
            # K = log S_q - log S + D with D = sum_j e_j (z_j - z_qj) / S
            ref_top = _total(ref_largest.amax(0), group, dist.ReduceOp.MAX)
            ref_below = ref_largest - ref_top
            mean_difference = (differences + exp_sums * (below - ref_below)).mul_(share).sum(0)
            mean_difference = _total(mean_difference, group).div_(exp_sum)
            kl = _total((ref_exp_sums * ref_below.exp()).sum(0), group).log_().sub_(log_sum).add_(mean_difference)
        entropy = None
        if with_entropy:
            # H = log S - sum_j e_j z_j / S
            entropy = log_sum - _total((exp_logits + exp_sums * below).mul_(share).sum(0), group).div_(exp_sum)
            if not entropy_grad:
                ctx.mark_non_differentiable(entropy)
        ref_hidden, ref_weight, ctx.ref_softcap, *_ = reference or (None, None, None)
        ctx.save_for_backward(
            hidden, weight, low, high, targets, largest, top, exp_sum, entropy if entropy_grad else None,
            ref_hidden, ref_weight, None if reference is None else ref_largest, ref_top, mean_difference,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.softcap, ctx.tiles, ctx.has_others = temperature, softcap, tiles, group is not None
        ctx.kept = None if softcap is not None else held
        ctx.has_kernels = has_kernels  # without kernels, kept logits are relative to their largest in the tile
        return log_probs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None, kl_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, low, high, targets, largest, top, exp_sums, entropy, *of_reference = ctx.saved_tensors
        ref_hidden, ref_weight, ref_largest, ref_top, mean_difference = of_reference
        tiles: HeadTiles = ctx.tiles
        # the largest logit of each part minus the overall largest
        has_parts = len(tiles.words) > 1 or ctx.has_others
        below = largest - top if has_parts else None
        ref_below = ref_largest - ref_top if has_parts and ref_largest is not None else None
        if log_probs_grad is None:
            log_probs_grad = torch.zeros_like(exp_sums)
        hidden_grad, low_grad = (
            _RowsGrad(rows, exp_sums.dtype, len(tiles.words) > 1) if needed else None
            for rows, needed in zip((hidden, low), (ctx.needs_input_grad[0], ctx.needs_input_grad[2]), strict=True)
        )
        weight_grad = torch.zeros_like(weight, dtype=exp_sums.dtype) if ctx.needs_input_grad[1] else None
        high_grad = torch.zeros_like(high, dtype=exp_sums.dtype) if ctx.needs_input_grad[3] else None

        def add_products(logits_grad: Tensor, head: _Words, rows: slice) -> None:
            own = slice(*head.words)
            if hidden_grad is not None:
                hidden_grad.add(rows, logits_grad, head.weight)
            if weight_grad is not None:
                _add_product(logits_grad.t(), hidden[rows], weight_grad[own])
            if low_grad is not None and head.high is not None:
                low_grad.add(rows, logits_grad, head.high)
            if high_grad is not None:
                _add_product(logits_grad.t(), low[rows], high_grad[own])

        kept, ctx.kept = ctx.kept, None  # overwritten by this backward, so a second backward must recompute all
        held = _held_logits(tiles, exp_sums) if kept is None else kept
        needs_buffer = (entropy_grad is not None or kl_grad is not None, kl_grad is not None, ctx.softcap is not None)
        work_buffers = [exp_sums.new_empty(tiles.elements) if is_needed else None for is_needed in needs_buffer]
        has_kernel = ctx.has_kernels and not any(needs_buffer)
        grads = grads_buffer = None
        if has_kernel and weight.is_cuda and weight.dtype != exp_sums.dtype:  # the products' dtype
            grads_buffer = weight.new_empty(tiles.elements)
        slots = reversed(list(enumerate(_slots(tiles, held))))
        first_kept = 0 if kept is None else len(tiles.words) * len(tiles.rows) - tiles.held
        for part, words in reversed(list(enumerate(tiles.words))):
            head = _Words(weight, low, high, words, ctx.temperature, ctx.softcap, has_others=ctx.has_others)
            ref_head = None
            if kl_grad is not None:
                reference = HeadInputs(ref_hidden, ref_weight, ctx.ref_softcap)
                ref_head = _Words.of_reference(reference, words, ctx.temperature)
            for start, end in reversed(tiles.rows):
                rows = slice(start, end)
                index, slot = next(slots)
                logits = head.tile_of(slot, rows)  # overwritten by its gradient below
                exps, difference, tanh = (None if b is None else head.tile_of(b, rows) for b in work_buffers)
                is_kept = kept is not None and index >= first_kept
                if not is_kept:
                    head.write_logits(hidden, rows, logits, tanh)
                target_grad = log_probs_grad[rows] / ctx.temperature
                scale = exp_sums[rows].reciprocal()
                offset = -target_grad * scale
                if has_kernel:
                    grads = logits if grads_buffer is None else head.tile_of(grads_buffer, rows)
                    target_columns = targets[rows] - words[0]
                    head_kernels.logits_grad(logits, top[rows], offset, target_columns, target_grad, grads)
                    add_products(grads, head, rows)
                    continue
                if ctx.has_kernels or not is_kept:
                    logits.sub_(largest[part, rows, None])
                if below is not None:
                    logits.add_(below[part, rows, None])
                slope = kl_slope = None
                if entropy_grad is not None:
                    slope = -entropy_grad[rows] * scale / ctx.temperature
                    offset += slope * (entropy[rows] - exp_sums[rows].log())
                if kl_grad is not None and ref_head is not None and difference is not None:
                    ref_head.write_logits(ref_hidden, rows, difference)
                    difference.sub_(ref_largest[part, rows, None])
                    if ref_below is not None:
                        difference.add_(ref_below[part, rows, None])
                    torch.sub(logits, difference, out=difference).sub_(mean_difference[rows, None])
                    kl_slope = kl_grad[rows] * scale / ctx.temperature
                _write_slopes(logits, exps, offset, slope, difference, kl_slope)
                head.add_at_targets(logits, targets[rows], target_grad)
                if tanh is not None:
                    logits.mul_(tanh.square_().neg_().add_(1))
                add_products(logits, head, rows)
        grads = grads_buffer = None  # freed before the weight's gradient is converted, which needs memory
        return (
            None if hidden_grad is None else hidden_grad.total(),
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if low_grad is None else low_grad.total(),
            None if high_grad is None else high_grad.to(high.dtype),
            *[None] * 3,
        )


class _Words:
    """Computes the logits of a part of the vocabulary, tile by tile.

    On a CPU half-precision weights are converted to float32, once for all tiles of the part: only CUDA has products of
    half-precision inputs with float32 results, and float32 products are faster on a CPU.
    """

    def __init__(
        self,
        weight: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        words: tuple[int, int],
        temperature: float,
        softcap: float | None,
        *,
        has_others: bool = False,
    ) -> None:
        start, end = words
        dtype = weight.dtype if weight.is_cuda else _logits_dtype(weight)
        self.weight = weight[start:end].to(dtype)
        self.high = None if high is None else high[start:end].to(dtype)
        self.words = words
        self._low, self._temperature, self._softcap = low, temperature, softcap
        self._start, self._size = start, end - start
        self._is_all = end - start == len(weight) and not has_others  # other ranks have other parts

    @classmethod
    def of_reference(cls, reference: HeadInputs, words: tuple[int, int], temperature: float) -> _Words:
        return cls(reference.weight, None, None, words, temperature, reference.softcap)

    def tile_of(self, buffer: Tensor, rows: slice) -> Tensor:
        """Returns the first elements of a buffer as a tile, [rows, words]."""
        count = rows.stop - rows.start
        return buffer[: count * self._size].view(count, self._size)

    def write_logits(self, hidden: Tensor, rows: slice, out: Tensor, tanh: Tensor | None = None) -> None:
        """Writes the soft-capped logits of some rows, divided by the temperature, to `out`.

        Args:
            hidden: [all rows, hidden_dim].
            tanh: receives tanh(logits / softcap).
        """
        if self.weight.dtype == out.dtype:
            torch.mm(hidden[rows].to(out.dtype), self.weight.t(), out=out)
        else:
            torch.mm(hidden[rows], self.weight.t(), out_dtype=out.dtype, out=out)
        if self._low is not None and self.high is not None:
            _add_product(self._low[rows], self.high.t(), out)
        if self._softcap is not None:
            out.div_(self._softcap).tanh_()
            if tanh is not None:
                tanh.copy_(out)
            out.mul_(self._softcap)
        if self._temperature != 1.0:
            out.div_(self._temperature)

    def read_targets(self, logits: Tensor, targets: Tensor, out: Tensor) -> None:
        """Writes each row's target logit to `out`, [rows], if this part of the vocabulary has the target."""
        columns, is_inside = self._places(targets)
        at_columns = logits.gather(1, columns).squeeze(1)
        out.copy_(at_columns if is_inside is None else torch.where(is_inside, at_columns, out))

    def add_at_targets(self, logits: Tensor, targets: Tensor, values: Tensor) -> None:
        """Adds values [rows] to the target logits of the rows whose target this part of the vocabulary has."""
        columns, is_inside = self._places(targets)
        logits.scatter_add_(1, columns, (values if is_inside is None else values.masked_fill(~is_inside, 0.0))[:, None])

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the clamped column of each target, [rows, 1], and whether the target is in this part.

        The second result is None if this part is the whole vocabulary.
        """
        if self._is_all:
            return targets[:, None], None
        columns = (targets - self._start)[:, None]
        clamped = columns.clamp(0, self._size - 1)
        return clamped, (clamped == columns).squeeze(1)


class _RowSums(NamedTuple):
    """Holds m = max z, sum e^(z - m) and sum (z - m) e^(z - m) for each row z of a tile; [rows] each."""

    largest: Tensor
    exp_sums: Tensor
    exp_logits: Tensor

    def write(self, logits: Tensor, exps: Tensor | None, *, with_entropy: bool, has_kernels: bool) -> None:
        """Computes the sums.

        Without kernels this subtracts each row's largest logit from `logits`, in place; kernels do not change `logits`.

        Args:
            exps: work buffer in the shape of the logits; kernels do not use it.
            with_entropy: whether `exp_logits` is needed.
        """
        if has_kernels:
            head_kernels.row_sums(logits, *self)
            return
        assert exps is not None
        torch.amax(logits, dim=1, out=self.largest)
        torch.exp(logits.sub_(self.largest[:, None]), out=exps)
        torch.sum(exps, dim=1, out=self.exp_sums)
        if with_entropy:
            torch.sum(exps.mul_(logits), dim=1, out=self.exp_logits)


def _write_slopes(
    logits: Tensor,
    exps: Tensor | None,
    offset: Tensor,
    slope: Tensor | None,
    difference: Tensor | None,
    kl_slope: Tensor | None,
) -> None:
    """Replaces logits z, relative to the overall largest, by e^z (offset + slope z + kl_slope difference).

    Args:
        exps: work buffer in the shape of the logits; None if `slope` and `kl_slope` are None.
        offset, slope, kl_slope: [rows].
        difference: log(p / q) - K; overwritten.
    """
    if exps is None:
        logits.exp_().mul_(offset[:, None])
        return
    torch.exp(logits, out=exps)
    offset = offset[:, None]
    slope = torch.zeros_like(offset) if slope is None else slope[:, None]
    if kl_slope is not None and difference is not None:
        offset = torch.addcmul(offset, difference, kl_slope[:, None], out=difference)
    torch.addcmul(offset, logits, slope, out=logits).mul_(exps)


class _RowsGrad:
    """Sums the gradient of hidden states, or of an adapter's `low`, over parts of the vocabulary; [rows, columns]."""

    def __init__(self, rows: Tensor, dtype: torch.dtype, has_parts: bool) -> None:
        self._is_summed = has_parts or (rows.dtype != dtype and not rows.is_cuda)
        self._grad = torch.zeros_like(rows, dtype=dtype) if self._is_summed else torch.empty_like(rows)
        self._dtype = rows.dtype

    def add(self, rows: slice, logits_grad: Tensor, weight: Tensor) -> None:
        """Adds logits_grad [rows, words] @ weight [words, columns]."""
        if self._is_summed:
            _add_product(logits_grad, weight, self._grad[rows])
        else:
            torch.mm(logits_grad.to(weight.dtype), weight, out=self._grad[rows])

    def total(self) -> Tensor:
        return self._grad.to(self._dtype)


def _total(values: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduces values over the ranks that share the vocabulary, in place."""
    if group is not None:
        dist.all_reduce(values, op, group=group)
    return values


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype is torch.float32 and head_kernels.can_launch(logits.device)


def _held_logits(tiles: HeadTiles, like: Tensor) -> Tensor:
    """Allocates [held, elements] once for all tiles: page faults of new large buffers cost more than the arithmetic."""
    return like.new_empty(tiles.held, tiles.elements)


def _slots(tiles: HeadTiles, held: Tensor) -> Iterator[Tensor]:
    """Yields the buffer for each tile's logits, in forward order; tiles that are not kept share the first buffer."""
    count = len(tiles.words) * len(tiles.rows)
    return (held[max(0, index - (count - tiles.held))] for index in range(count))


def _add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Computes total [rows, columns] += left @ right in total's dtype, without a temporary tensor of total's size."""
    if right.is_cuda and right.dtype != total.dtype:
        torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
