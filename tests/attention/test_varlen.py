"""The attention kernels against softmax over a dense mask, and the CUDA calls against the schemas torch declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slimefsdp.attention.backends import eager
from slimefsdp.attention.backends.eager import Blocking
from slimefsdp.attention.call_plan import AttentionParams, CallPlan, ring_plan
from slimefsdp.attention.varlen import (
    Saved,
    _kernel_for,
    _RingAttention,
    ring_attention,
    varlen_backward,
    varlen_forward,
)
from slimefsdp.batching.cp_sharding import Piece
from tests.support.tiers import examples

NO_TENSOR = torch.empty(0, dtype=torch.int32)  # CPU kernels take offsets as numbers
BLOCK = 64  # queries per band of a windowed segment, at least


def call_plan(q_lengths: Sequence[int], k_lengths: Sequence[int] | None = None) -> CallPlan:
    cu_q = (0, *accumulate(q_lengths))
    cu_k = cu_q if k_lengths is None else (0, *accumulate(k_lengths))
    return CallPlan(cu_q, cu_k, NO_TENSOR, NO_TENSOR)


def random_qkv(
    call: CallPlan, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((call.cu_q[-1], heads), (call.cu_k[-1], kv_heads), (call.cu_k[-1], kv_heads))
    q, k, v = (torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def visible(call: CallPlan, *, causal: bool, window: int | None) -> torch.Tensor:
    """[q_tokens, k_tokens] bool, written as the definition reads: one entry at a time per segment."""
    mask = torch.zeros(call.cu_q[-1], call.cu_k[-1], dtype=torch.bool)
    for segment in range(len(call.cu_q) - 1):
        for i, row in enumerate(range(call.cu_q[segment], call.cu_q[segment + 1])):
            more = (call.cu_k[segment + 1] - call.cu_k[segment]) - (call.cu_q[segment + 1] - call.cu_q[segment])
            last = i + more if causal else call.cu_k[segment + 1] - call.cu_k[segment] - 1
            first = max(0, last - window + 1) if causal and window is not None else 0
            mask[row, call.cu_k[segment] + first : call.cu_k[segment] + last + 1] = True
    return mask


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [q_tokens, heads, head_dim] and log-sum-exp [heads, q_tokens], from the whole score matrix."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@contextmanager
def blocking(joined_bytes: int | None) -> Iterator[None]:
    """Inside, the kernel in plain torch joins segments in blocks of so many bytes; None: it does as on this device."""
    with pytest.MonkeyPatch.context() as patch:
        if joined_bytes is not None:
            patch.setattr(eager, "blocking_on", lambda device: Blocking(joined_bytes, joins_segments=True))
        yield


def assert_equals_dense(
    call: CallPlan,
    *,
    causal: bool = True,
    window: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    scale: float | None = None,
    softcap: float | None = None,
    plainly: bool = False,
    joined_bytes: int | None = None,
) -> None:
    """
    Args:
        joined_bytes: have the kernel in plain torch join segments as on CUDA, in blocks of scores of so many bytes.
    """
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = (x.requires_grad_() for x in random_qkv(call, heads, kv_heads, head_dim))
    expected_out, expected_lse = dense_attention(q, k, v, visible(call, causal=causal, window=window), scale, softcap)
    grad_out = torch.randn_like(expected_out)
    expected = (expected_out, expected_lse, *torch.autograd.grad(expected_out, (q, k, v), grad_out))
    scoring = AttentionParams(scale, window=window, softcap=softcap)
    with torch.no_grad(), blocking(joined_bytes):
        if plainly:
            out, lse = eager.forward(q, k, v, call, scoring, causal=causal)
            grads = eager.backward(grad_out, (q, k, v), out, lse, call, scoring, causal=causal)
        else:
            out, saved = varlen_forward(q, k, v, call, scoring, causal=causal)
            grads = varlen_backward(grad_out, (q, k, v), out, saved, call, scoring, causal=causal)
            lse = saved.lse
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), expected, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 160),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 8, 20]),
    scale=st.none() | st.floats(0.05, 2.0),
    softcap=st.none() | st.floats(0.5, 30.0),
    plainly=st.booleans(),
    joined_bytes=st.sampled_from([None, 1, 2**16, 2**30]),
)
def test_any_lengths_window_scale_and_soft_cap_equal_dense_softmax(
    lengths: list[int],
    window: int | None,
    kv_heads: int,
    head_dim: int,
    scale: float | None,
    softcap: float | None,
    plainly: bool,
    joined_bytes: int | None,
) -> None:
    assert_equals_dense(
        call_plan(lengths),
        window=window,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        softcap=softcap,
        plainly=plainly,
        joined_bytes=joined_bytes,
    )


@examples(15)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80)), min_size=1, max_size=4),
    softcap=st.none() | st.just(2.0),
    plainly=st.booleans(),
    joined_bytes=st.sampled_from([None, 1, 2**16, 2**30]),
)
def test_non_causal_calls_over_keys_of_other_lengths_equal_dense_softmax(
    lengths: list[tuple[int, int]], softcap: float | None, plainly: bool, joined_bytes: int | None
) -> None:
    q_lengths, k_lengths = zip(*lengths, strict=True)
    call = call_plan(q_lengths, k_lengths)
    assert_equals_dense(call, causal=False, softcap=softcap, plainly=plainly, joined_bytes=joined_bytes)


@examples(30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 90)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 100),
    plainly=st.booleans(),
    joined_bytes=st.sampled_from([None, 1, 2**16, 2**30]),
)
def test_causal_calls_with_more_keys_than_queries_end_together(
    lengths: list[tuple[int, int]], window: int | None, plainly: bool, joined_bytes: int | None
) -> None:
    q_lengths = [queries for queries, _ in lengths]
    call = call_plan(q_lengths, [queries + more for queries, more in lengths])
    assert_equals_dense(call, window=window, plainly=plainly, joined_bytes=joined_bytes)


class CountOperations(TorchDispatchMode):
    """Counts what would be a launch on a GPU: operations that write something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 20])
def test_segments_that_are_joined_take_few_operations_however_many_they_are(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    call = call_plan(torch.randint(20, 90, (64,), generator=generator).tolist())
    q, k, v = random_qkv(call, 4, 2, 8)
    scoring = AttentionParams(0.3, window=window, softcap=5.0)
    counts = []
    for joined_bytes in (None, 2**24):
        with blocking(joined_bytes), CountOperations() as counted:
            for _ in range(2):  # as every layer: where the pieces lie is worked out once
                out, lse = eager.forward(q, k, v, call, scoring, causal=True)
                eager.backward(torch.ones_like(out), (q, k, v), out, lse, call, scoring, causal=True)
        counts.append(counted.count)
    assert counts[1] * 8 < counts[0], counts


@pytest.mark.parametrize("length", [127, 128, 129, 192, 300, 700, 1024, 1025])
def test_causal_segments_around_the_lengths_that_are_cut_into_bands_equal_dense_softmax(length: int) -> None:
    assert_equals_dense(call_plan((3, length, 70)), heads=2, kv_heads=1, head_dim=4)


@pytest.mark.parametrize("window", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 199, 200, 201, 1000])
def test_windows_at_the_edges_of_bands_and_lengths_equal_dense_softmax(window: int) -> None:
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 200)
    assert_equals_dense(call_plan(lengths), window=window, heads=2, kv_heads=1, head_dim=4)


def packed(call: CallPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams) -> torch.Tensor:
    """Through autograd, one rank holding every segment whole."""
    pieces = [Piece(node, start, end) for node, (start, end) in enumerate(pairwise(call.cu_q))]
    return ring_attention(q, k, v, ring_plan([pieces], 0, q.device), None, scoring)


@pytest.mark.parametrize("window", [None, 16])
def test_float32_stays_as_close_to_float64_as_dense_float32(window: int | None) -> None:
    call = call_plan((150, 33, 1, 70))
    exact = random_qkv(call, 4, 2, 16)
    mask, grad_out = visible(call, causal=True, window=window), torch.randn(call.cu_q[-1], 4, 16, dtype=torch.float64)

    def results(attend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in exact]
        out = attend(*leaves)
        return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype)))]

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, k, v, mask, 0.25)[0]

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed(call, q, k, v, AttentionParams(0.25, window=window))

    truth = results(dense, torch.float64)
    for got, dense_error, want in zip(results(ours, torch.float32), results(dense, torch.float32), truth, strict=True):
        assert (got - want).abs().max() <= 4 * (dense_error - want).abs().max() + 1e-6


def test_bfloat16_keeps_its_log_sum_exp_in_float32() -> None:
    call = call_plan((40, 3))
    q, k, v = random_qkv(call, 4, 2, 8, torch.bfloat16)
    out, saved = varlen_forward(q, k, v, call, AttentionParams(0.3), causal=True)
    _, lse = dense_attention(q.double(), k.double(), v.double(), visible(call, causal=True, window=None), 0.3)
    assert out.dtype == torch.bfloat16 and saved.lse.dtype == torch.float32
    assert (saved.lse.double() - lse).abs().max() < 1e-2 * lse.abs().max()


def test_backward_uses_the_output_and_log_sum_exp_it_is_given() -> None:
    # two calls over halves of the keys, merged: what a ring does; recomputing inside a call would give half gradients
    halves = [call_plan((7, 30), (5, 20)), call_plan((7, 30), (9, 2))]
    q, k0, v0 = random_qkv(halves[0], 4, 2, 8)
    _, k1, v1 = random_qkv(halves[1], 4, 2, 8, seed=1)
    keys = [(k0, v0), (k1, v1)]
    parts = [
        varlen_forward(q, k, v, call, AttentionParams(0.3), causal=False)
        for call, (k, v) in zip(halves, keys, strict=True)
    ]
    lse = torch.logaddexp(parts[0][1].lse, parts[1][1].lse)
    out = sum(part * torch.exp(saved.lse - lse).T.unsqueeze(-1) for part, saved in parts)
    grad_out = torch.randn_like(q)
    grads = [
        varlen_backward(grad_out, (q, k, v), out, Saved(lse), call, AttentionParams(0.3), causal=False)
        for call, (k, v) in zip(halves, keys, strict=True)
    ]

    leaves = [x.clone().requires_grad_() for x in (q, k0, v0, k1, v1)]
    mask = torch.cat([visible(call, causal=False, window=None) for call in halves], 1)
    all_k, all_v = torch.cat([leaves[1], leaves[3]]), torch.cat([leaves[2], leaves[4]])
    expected_out, expected_lse = dense_attention(leaves[0], all_k, all_v, mask, 0.3)
    expected = torch.autograd.grad(expected_out, leaves, grad_out)
    got = (grads[0][0] + grads[1][0], *grads[0][1:], *grads[1][1:])
    for a, b in zip((out, lse, *got), (expected_out, expected_lse, *expected), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


def test_autograd_through_packed_attention_equals_dense_softmax() -> None:
    call = call_plan((70, 1, 12))
    leaves = [x.requires_grad_() for x in random_qkv(call, 4, 2, 8)]
    mask, weight = visible(call, causal=True, window=20), torch.randn(83, 4, 8, dtype=torch.float64)
    # an expanded gradient has stride 0: the kernels must still read it right
    for loss in (lambda out: (out * weight).sum(), lambda out: out.sum()):
        got = torch.autograd.grad(loss(packed(call, *leaves, AttentionParams(0.3, window=20))), leaves)
        want = torch.autograd.grad(loss(dense_attention(*leaves, mask, 0.3)[0]), leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cu_q", "cu_k"), [((0, 3, 3, 5), (0, 3, 4, 5)), ((0, 3, 5), (0, 5, 5)), ((0, 0), (0, 1)), ((0, 3), (0, 1, 3))]
)
def test_no_call_can_be_made_with_an_empty_segment(cu_q: tuple[int, ...], cu_k: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        CallPlan(cu_q, cu_k, NO_TENSOR, NO_TENSOR)  # the CPU kernel would end the process: it divides by the length


def test_a_plan_with_no_segments_makes_no_call() -> None:
    call = call_plan(())
    q, k, v = random_qkv(call, 4, 2, 8)
    out, saved = varlen_forward(q, k, v, call, AttentionParams(0.3), causal=True)
    grads = varlen_backward(out, (q, k, v), out, saved, call, AttentionParams(0.3), causal=True)
    assert [x.shape[0] for x in (out, *grads)] == [0, 0, 0, 0]


def test_causal_calls_over_fewer_keys_and_windows_without_causality_are_refused() -> None:
    call = call_plan((4,), (3,))
    q, k, v = random_qkv(call, 4, 2, 8)
    with pytest.raises(AssertionError):
        varlen_forward(q, k, v, call, AttentionParams(0.3), causal=True)
    with pytest.raises(AssertionError):
        varlen_forward(q, k, v, call, AttentionParams(0.3, window=2), causal=False)


class Largest(TorchDispatchMode):
    """Notes the most elements that any new tensor had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("window", [None, 1, 100])
def test_no_tensor_grows_with_the_square_of_the_length(window: int | None) -> None:
    def largest(length: int) -> int:
        call = call_plan((length,))
        q, k, v = random_qkv(call, 2, 1, 4, torch.float32)
        with Largest() as mode:
            out, saved = varlen_forward(q, k, v, call, AttentionParams(0.5, window=window), causal=True)
            varlen_backward(out, (q, k, v), out, saved, call, AttentionParams(0.5, window=window), causal=True)
        return mode.elements

    # a band's mask has a row per query; without a window it spans the keys
    rows = max(window or 0, BLOCK)
    for length in (1024, 4096):
        assert largest(length) <= max(2 * 4 * length, rows * (length + BLOCK if window is None else 2 * rows))


class RecordedCalls(TorchDispatchMode):
    """The arguments of every flash-attention call, by the names that the operator's own schema gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention" in str(func):
            names = [argument.name for argument in func._schema.arguments]
            self.calls[func._schema.name] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"), [(False, None, None, None), (True, None, None, None), (True, 4, 3, 0)]
)
def test_cuda_arguments_have_the_names_and_shapes_that_torch_declares(
    causal: bool, window: int | None, left: int | None, right: int | None
) -> None:
    # fake tensors run torch's own shape functions for CUDA, so no device is needed
    with FakeTensorMode():
        q = torch.empty(10, 4, 16, dtype=torch.bfloat16, device="cuda")
        k_tokens = 10 if causal else 12
        k, v = (torch.empty(k_tokens, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        cu_q, cu_k = (torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2))
        call = CallPlan((0, 4, 10), (0, 4 if causal else 5, k_tokens), cu_q, cu_k)
        with RecordedCalls() as recorded:
            out, saved = varlen_forward(q, k, v, call, AttentionParams(0.25, window=window), causal=causal)
            grads = varlen_backward(
                out, (q, k, v), out, saved, call, AttentionParams(0.25, window=window), causal=causal
            )
    assert out.shape == q.shape and saved.lse.shape == (4, 10) and saved.lse.dtype == torch.float32
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    shared = {
        "query": q, "key": k, "value": v, "cum_seq_q": cu_q, "cum_seq_k": cu_k, "max_q": 6, "max_k": 6 if causal else 7,
        "dropout_p": 0.0, "is_causal": causal, "scale": 0.25, "window_size_left": left, "window_size_right": right,
    }  # fmt: skip
    forward, backward = (recorded.calls[f"aten::_flash_attention_{name}"] for name in ("forward", "backward"))
    extra = {
        "grad_out": out, "out": out, "logsumexp": saved.lse, "rng_state": saved.rng_state, "unused": saved.unused,
    }  # fmt: skip
    assert_same_arguments(forward, shared | {"return_debug_mask": False})
    assert_same_arguments(backward, shared | extra)


def assert_same_arguments(got: dict[str, Any], want: dict[str, Any]) -> None:
    got = {name: value for name, value in got.items() if value is not None}
    want = {name: value for name, value in want.items() if value is not None}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] is value if isinstance(value, torch.Tensor) else got[name] == value, name


@pytest.fixture
def fake_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch copies nothing to a CUDA device, not even what is fake."""

    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if device.type == "cuda" else tensor

    monkeypatch.setattr("slimefsdp.attention.call_plan.on_device", copied)


@pytest.mark.usefixtures("fake_copies")
def test_autograd_of_cuda_hands_the_kernels_own_state_from_forward_to_backward() -> None:
    class Context(SimpleNamespace):  # torch's engine itself needs the device
        def save_for_backward(self, *tensors: torch.Tensor) -> None:
            self.saved_tensors = tensors

    ctx = Context()
    with FakeTensorMode(), RecordedCalls() as recorded:
        q, k, v = (torch.empty(10, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        plan = ring_plan([[Piece(0, 0, 4), Piece(1, 4, 10)]], 0, q.device)
        out = _RingAttention.forward(ctx, q, k, v, None, plan, None, AttentionParams(0.25, window=4))
        grads = _RingAttention.backward(ctx, torch.empty_like(out))
    backward = recorded.calls["aten::_flash_attention_backward"]
    assert backward["is_causal"] is True and backward["window_size_left"] == 3
    assert backward["rng_state"].shape == (2,) and backward["unused"].shape == ()
    assert [None if grad is None else grad.shape for grad in grads] == [
        q.shape,
        k.shape,
        v.shape,
        None,
        None,
        None,
        None,
    ]


@pytest.mark.usefixtures("fake_copies")
def test_a_plan_of_whole_sequences_has_one_segment_for_each() -> None:
    pieces = [Piece(0, 0, 4), Piece(1, 4, 5), Piece(2, 5, 12)]
    own = ring_plan([pieces], 0, torch.device("cpu")).own
    assert (
        own.cu_q == own.cu_k == (0, 4, 5, 12)
        and own.device_cu_q.tolist() == [0, 4, 5, 12]
        and (own.max_q, own.max_k) == (7, 7)
    )
    with FakeTensorMode():
        on_device = ring_plan([pieces], 0, torch.device("cuda")).own.device_cu_q
    assert on_device.dtype == torch.int32 and on_device.shape == (4,)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap"),
    [(torch.float32, 16, None), (torch.bfloat16, 512, None), (torch.bfloat16, 16, 5.0)],
)
def test_what_flash_on_cuda_lacks_goes_to_the_plain_kernel(
    dtype: torch.dtype, head_dim: int, softcap: float | None
) -> None:
    with FakeTensorMode():  # it would not go further: a CPU build of torch computes no values on a fake CUDA device
        q = torch.empty(10, 4, head_dim, dtype=dtype, device="cuda")
        assert _kernel_for(q, AttentionParams(0.25, softcap=softcap)) == "plain"
        assert _kernel_for(torch.empty(10, 4, 16, dtype=torch.bfloat16, device="cuda"), AttentionParams(0.25)) == "cuda"
