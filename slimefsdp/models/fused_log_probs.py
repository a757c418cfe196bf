"""The fused log-prob head: log-probabilities and entropies of given targets, without ever holding [rows, vocab] logits.

Rows are worked through in chunks. Forward keeps two numbers per row, the largest logit and the sum of exponentials
relative to it; backward recomputes a chunk's logits and turns them, in place, into their own gradient. It begins with
the last chunk, whose logits are still in the buffer, so that a small head is computed once. With z the logits after
soft-cap and temperature, p = softmax(z), y the target, H = -sum_j p_j log p_j, and q the same of a reference,
K = sum_j p_j log(p_j / q_j):

    log_prob = z_y - logsumexp(z)          d log_prob / d z_j = [j == y] - p_j
                                           d H / d z_j        = -p_j (log p_j + H)
                                           d K / d z_j        = p_j (log(p_j / q_j) - K)

Logits are never rounded below float32: half-precision inputs go through products with float32 results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# On a CPU half-precision weights are widened in blocks of so many bytes of the vocabulary; larger ones fault in pages.
BLOCK_BYTES = 8 * 2**20

# Both logits-sized buffers of a chunk together, by type of device. Each chunk is another pass over the weight's float32
# gradient: on an H200, 14,336 rows of Qwen3-4B's head take 419 ms in chunks of 128 MiB, 176 ms in chunks of 1 GiB
# (benchmarks/results/gpu_smoke.json).
CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}


class HeadAdapter(NamedTuple):
    """What a head's adapter adds to the logits: low @ high.T."""

    low: Tensor  # [rows, rank]: hidden states through A, times the scale
    high: Tensor  # [vocab, rank]: B


class HeadInputs(NamedTuple):
    """What a model's logits are made of."""

    hidden: Tensor  # [rows, hidden_dim] in the compute dtype
    weight: Tensor  # [vocab, hidden_dim] of the same dtype
    softcap: float | None = None  # the final logit soft-cap of Gemma 2
    adapter: HeadAdapter | None = None  # of the same dtype


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_bytes: int | None = None,
    softcap: float | None = None,
    adapter: HeadAdapter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's target under softmax(softcapped(hidden @ weight.T) / temperature), and its entropy.

    The first result has the same bits with and without gradients, and with and without entropy. Runs without a
    host synchronisation. Gradients are first-order only.

    Args:
        hidden: [rows, hidden_dim] in the compute dtype; rows may be 0.
        weight: [vocab, hidden_dim] of the same dtype.
        targets: [rows] int64 in [0, vocab); the caller sees to the range, it is not checked here.
        temperature: divides the logits, for log-probs and entropy alike; > 0.
        with_entropy: also return the entropy in nats.
        entropy_grad: let gradients flow through the entropy; otherwise it carries no graph.
        chunk_bytes: bound on the two logits-sized buffers of one chunk; a chunk has at least two rows where there are
            two, and soft-cap together with entropy_grad takes a third buffer. None: that of CHUNK_BYTES.
        softcap: the final logit soft-cap of Gemma 2: logits = softcap * tanh(logits / softcap), before the temperature.
        adapter: adds low @ high.T to hidden @ weight.T; a weight that is frozen costs no gradient of its own.

    Returns:
        log_probs [rows], and entropy [rows] or None; both float32, or float64 for float64 inputs.
    """
    assert with_entropy or not entropy_grad, "entropy_grad needs with_entropy"
    model = HeadInputs(hidden, weight, softcap, adapter)
    return _apply(model, targets, None, temperature, with_entropy, entropy_grad, chunk_bytes)[:2]


def token_log_probs_and_kl(
    model: HeadInputs,
    targets: Tensor,
    reference: HeadInputs,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`token_log_probs` and entropy, and each row's KL(model || reference) over the whole vocabulary.

    Log-probs and entropy have the same bits as without a reference. The KL is exactly 0 where the logits of both are
    equal bit for bit; gradients flow through it to the model alone.

    Args:
        model: hidden, weight and adapter carry the gradient.
        targets: [rows] int64, as above.
        reference: of the same rows and vocabulary, with a hidden_dim and a soft-cap of its own, and no adapter.
        temperature: divides the logits of both.
        chunk_bytes: as above; the reference takes one buffer more.

    Returns:
        log_probs, entropy and KL in nats, [rows] each.
    """
    assert reference.hidden.shape[0] == model.hidden.shape[0], "model and reference have different rows"
    assert reference.weight.shape[0] == model.weight.shape[0], "model and reference have different vocabularies"
    assert reference.adapter is None, "a reference with an adapter"
    log_probs, entropy, kl = _apply(model, targets, reference, temperature, True, entropy_grad, chunk_bytes)
    assert entropy is not None and kl is not None
    return log_probs, entropy, kl


def _apply(
    model: HeadInputs,
    targets: Tensor,
    reference: HeadInputs | None,
    temperature: float,
    with_entropy: bool,
    entropy_grad: bool,
    chunk_bytes: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    hidden, weight, softcap, adapter = model
    low, high = adapter or (None, None)
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight is {weight.dtype}"
    assert targets.shape == hidden.shape[:1], f"{tuple(targets.shape)} targets for {hidden.shape[0]} rows"
    # the same chunks with and without a reference: another number of rows may take another path of the product
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"]
    rows_per_chunk = chunk_bytes // (weight.shape[0] * _logits_dtype(hidden).itemsize * 2)
    bounds = chunk_bounds(hidden.shape[0], rows_per_chunk)
    result: tuple[Tensor, Tensor | None, Tensor | None] = _TokenLogProbs.apply(
        hidden, weight, low, high, targets, reference, temperature, softcap, with_entropy, entropy_grad, bounds
    )
    return result


def chunk_bounds(rows: int, rows_per_chunk: int) -> list[tuple[int, int]]:
    """[start, end) of near-equal chunks over `rows`, of at most max(rows_per_chunk, 3) rows.

    No chunk has one row unless `rows` is 1: a matrix product with one row takes another path than the same row among
    others, so a lone row would differ in its last bits from what it is under another split.
    """
    if rows == 0:
        return []
    chunks = -(-rows // max(rows_per_chunk, 1))
    chunks = max(1, min(chunks, rows // 2))
    return [(rows * i // chunks, rows * (i + 1) // chunks) for i in range(chunks)]


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
        temperature: float,
        softcap: float | None,
        with_entropy: bool,
        entropy_grad: bool,
        bounds: list[tuple[int, int]],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        log_probs = hidden.new_empty(hidden.shape[0], dtype=_logits_dtype(hidden))
        largest, exp_sums = torch.empty_like(log_probs), torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        kl, mean_difference = torch.empty_like(log_probs), torch.empty_like(log_probs)
        logits_buffer = _chunk_buffer(log_probs, bounds, weight)
        exps_buffer = _chunk_buffer(log_probs, bounds, weight) if with_entropy else logits_buffer
        ref_buffer = logits_buffer if reference is None else _chunk_buffer(log_probs, bounds, weight)
        for start, end in bounds:
            logits, exps = logits_buffer[: end - start], exps_buffer[: end - start]  # [chunk, vocab]
            difference = ref_buffer[: end - start]
            _write_logits(hidden[start:end], weight, logits)
            if low is not None and high is not None:
                _add_product(low[start:end], high.t(), logits)
            _cap_and_scale(logits, temperature, softcap)
            torch.amax(logits, dim=1, out=largest[start:end])
            logits.sub_(largest[start:end, None])
            at_target = logits.gather(1, targets[start:end, None]).squeeze(1)
            if reference is not None:
                _write_shifted_logits(reference, start, end, temperature, difference)
                torch.sum(torch.exp(difference, out=exps), dim=1, out=kl[start:end]).log_()
                torch.sub(logits, difference, out=difference)
            torch.exp(logits, out=exps)
            torch.sum(exps, dim=1, out=exp_sums[start:end])
            log_sum = exp_sums[start:end].log()
            # subtracting from the shifted logit, not adding up a logsumexp first, keeps log-probs near 0 exact
            torch.sub(at_target, log_sum, out=log_probs[start:end])
            if reference is not None:
                # K = log S_q - log S + D with D = sum_j e_j (z_j - z_qj) / S
                torch.div(difference.mul_(exps).sum(1), exp_sums[start:end], out=mean_difference[start:end])
                kl[start:end].sub_(log_sum).add_(mean_difference[start:end])
            if entropy is not None:
                # H = log S - sum_j e_j z_j / S
                mean_logit = exps.mul_(logits).sum(1).div_(exp_sums[start:end])
                torch.sub(log_sum, mean_logit, out=entropy[start:end])
        if entropy is not None and not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ref_hidden, ref_weight, ctx.ref_softcap, _ = reference or (None, None, None, None)
        ctx.save_for_backward(
            hidden, weight, low, high, targets, largest, exp_sums, entropy if entropy_grad else None,
            ref_hidden, ref_weight, mean_difference,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.softcap, ctx.bounds = temperature, softcap, bounds
        # where nothing was written over them, and backward needs nothing else of them
        ctx.kept_logits = logits_buffer if with_entropy and softcap is None else None
        return log_probs, entropy, None if reference is None else kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None, kl_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, low, high, targets, largest, exp_sums, entropy, *of_reference = ctx.saved_tensors
        ref_hidden, ref_weight, mean_difference = of_reference
        if log_probs_grad is None:
            log_probs_grad = torch.zeros_like(largest)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=largest.dtype) if ctx.needs_input_grad[1] else None
        low_grad = torch.empty_like(low) if ctx.needs_input_grad[2] else None
        high_grad = torch.zeros_like(high, dtype=largest.dtype) if ctx.needs_input_grad[3] else None
        buffer, ctx.kept_logits = ctx.kept_logits, None  # another backward of this graph finds gradients in the buffer
        is_kept = buffer is not None
        if buffer is None:
            buffer = _chunk_buffer(largest, ctx.bounds, weight)
        exps_buffer = None if entropy_grad is None and kl_grad is None else torch.empty_like(buffer)
        ref_buffer = buffer if kl_grad is None else torch.empty_like(buffer)
        tanh_buffer = None if ctx.softcap is None else torch.empty_like(buffer)
        for start, end in reversed(ctx.bounds):
            logits = buffer[: end - start]  # [chunk, vocab]; becomes its own gradient below
            tanh = None if tanh_buffer is None else tanh_buffer[: end - start]
            if not (is_kept and end == len(hidden)):
                _write_logits(hidden[start:end], weight, logits)
                if low is not None:
                    _add_product(low[start:end], high.t(), logits)
                _cap_and_scale(logits, ctx.temperature, ctx.softcap, tanh)
                logits.sub_(largest[start:end, None])
            target_grad = log_probs_grad[start:end] / ctx.temperature
            scale = exp_sums[start:end].reciprocal()
            offset = -target_grad * scale
            if exps_buffer is None:
                logits.exp_().mul_(offset[:, None])
            else:
                exps = torch.exp(logits, out=exps_buffer[: end - start])
                slope = torch.zeros_like(offset)
                if entropy_grad is not None:
                    slope = -entropy_grad[start:end] * scale / ctx.temperature
                    offset += slope * (entropy[start:end] - exp_sums[start:end].log())
                offset = offset[:, None]
                if kl_grad is not None:
                    reference = HeadInputs(ref_hidden, ref_weight, ctx.ref_softcap)
                    difference = ref_buffer[: end - start]
                    _write_shifted_logits(reference, start, end, ctx.temperature, difference)
                    torch.sub(logits, difference, out=difference).sub_(mean_difference[start:end, None])
                    kl_slope = kl_grad[start:end] * scale / ctx.temperature
                    offset = torch.addcmul(offset, difference, kl_slope[:, None], out=difference)
                torch.addcmul(offset, logits, slope[:, None], out=logits).mul_(exps)
            logits.scatter_add_(1, targets[start:end, None], target_grad[:, None])
            if tanh is not None:
                logits.mul_(tanh.square_().neg_().add_(1))
            if hidden_grad is not None:
                _write_hidden_grad(logits, weight, hidden_grad[start:end])
            if weight_grad is not None:
                _add_product(logits.t(), hidden[start:end], weight_grad)
            if low_grad is not None:
                _write_hidden_grad(logits, high, low_grad[start:end])
            if high_grad is not None:
                _add_product(logits.t(), low[start:end], high_grad)
        weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        high_grad = None if high_grad is None else high_grad.to(high.dtype)
        return hidden_grad, weight_grad, low_grad, high_grad, None, None, None, None, None, None, None


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunk_buffer(like: Tensor, bounds: list[tuple[int, int]], weight: Tensor) -> Tensor:
    # allocated once for all chunks: fresh large buffers cost more in page faults than in arithmetic
    return like.new_empty(max((end - start for start, end in bounds), default=0), weight.shape[0])


def _cap_and_scale(logits: Tensor, temperature: float, softcap: float | None, tanh: Tensor | None = None) -> None:
    """Apply soft-cap and temperature to logits [chunk, vocab] in place; keep tanh(logits / softcap) where asked."""
    if softcap is not None:
        logits.div_(softcap).tanh_()
        if tanh is not None:
            tanh.copy_(logits)
        logits.mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)


def _write_shifted_logits(model: HeadInputs, start: int, end: int, temperature: float, out: Tensor) -> None:
    """out [chunk, vocab] = capped and scaled logits of rows [start, end), less the largest of each row."""
    _write_logits(model.hidden[start:end], model.weight, out)
    _cap_and_scale(out, temperature, model.softcap)
    out.sub_(out.amax(dim=1, keepdim=True))


def _vocab_blocks(weight: Tensor) -> list[slice]:
    """Slices of the vocabulary whose part of `weight` [vocab, hidden_dim] takes about the block's bytes in float32."""
    vocab, hidden_dim = weight.shape
    block = max(1, BLOCK_BYTES // (4 * hidden_dim))
    return [slice(start, min(start + block, vocab)) for start in range(0, vocab, block)]


def _write_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [chunk, vocab] = hidden [chunk, hidden_dim] @ weight.T, accumulated and stored in out's dtype."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        # only CUDA has a product of halves with a float32 result; float32 products are also the faster ones on a CPU
        wide = hidden.to(out.dtype)
        for block in _vocab_blocks(weight):
            torch.mm(wide, weight[block].to(out.dtype).t(), out=out[:, block])


def _write_hidden_grad(logits_grad: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [chunk, hidden_dim] = logits_grad [chunk, vocab] @ weight, accumulated in logits_grad's dtype."""
    if weight.dtype == logits_grad.dtype:
        torch.mm(logits_grad, weight, out=out)
    elif weight.is_cuda:
        torch.mm(logits_grad.to(weight.dtype), weight, out=out)
    else:
        total = torch.zeros_like(out, dtype=logits_grad.dtype)
        for block in _vocab_blocks(weight):
            total.addmm_(logits_grad[:, block], weight[block].to(total.dtype))
        out.copy_(total)


def _add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """total [rows, columns] += left @ right, in total's dtype, without a second tensor of total's size."""
    if right.is_cuda and right.dtype != total.dtype:
        torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
