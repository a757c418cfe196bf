"""Where transformers meets our attention: what is accepted, what is refused, and what it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from slimefsdp.attention.call_plan import PackAttention
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from slimefsdp.errors import ModelError
from slimefsdp.models.decoder import ATTENTION_NAME, check_attention_interface, register_attention
from tests.support.refusals import refused


class Layer(nn.Module):
    is_causal = True


def pack_of(*lengths: int) -> PackAttention:
    attention = Attention(Choice("local", "test"))
    return attention.for_pack(
        attention.layout([sum(lengths[:i]) for i in range(len(lengths) + 1)]), torch.device("cpu")
    )


def call(layer: nn.Module | None = None, **changes: Any) -> torch.Tensor:
    """One call as an attention layer makes it, through the registered name."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 9, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )  # [1, heads, tokens, head_dim]
    arguments = {"query": q, "key": k, "value": v, "attention_mask": None, "pack_attention": pack_of(9)}
    function = AttentionInterface()[register_attention()]
    out, weights = function(layer or Layer(), **(arguments | changes))
    assert weights is None
    return out


def test_the_installed_transformers_is_accepted_and_registers_attention_but_no_mask() -> None:
    check_attention_interface(sdpa_attention_forward)
    assert register_attention() == ATTENTION_NAME
    assert ATTENTION_NAME in AttentionInterface()
    # a name known to the mask interface would make every model build a mask again
    assert ATTENTION_NAME not in AttentionMaskInterface()


def renamed(
    module: Any, q: Any, k: Any, v: Any, attention_mask: Any, dropout: Any, scaling: Any, **kwargs: Any
) -> None:
    """transformers' convention with other names."""


def reordered(
    module: Any, query: Any, value: Any, key: Any, attention_mask: Any, dropout: Any, scaling: Any, **kwargs: Any
) -> None:
    """transformers' convention in another order."""


def without_scaling(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: Any, **k: Any) -> None:
    """transformers' convention, the scale under another name."""


def without_keywords(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: Any, scaling: Any
) -> None:
    """transformers' convention without the keywords that carry the plan."""


@pytest.mark.parametrize("changed", [renamed, reordered, without_scaling, without_keywords])
def test_a_changed_calling_convention_is_refused_with_its_signature(changed: Callable[..., None]) -> None:
    with refused(ModelError, "transformers", transformers.__version__, tuple(inspect.signature(changed).parameters)):
        check_attention_interface(changed)


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("lengths", [(9,), (3, 1, 5)])
def test_a_segment_gets_what_transformers_own_attention_gives_it_alone(
    lengths: tuple[int, ...], scaling: float | None
) -> None:
    packed = call(pack_attention=pack_of(*lengths), scaling=scaling)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone, _ = sdpa_attention_forward(Layer(), q[:, :, part], k[:, :, part], v[:, :, part], None, scaling=scaling)
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)
        start += length


class BidirectionalLayer(nn.Module):
    is_causal = False


@pytest.mark.parametrize(
    ("layer", "changes", "named"),
    [
        (Layer(), {"pack_attention": None}, "pack"),
        (Layer(), {"attention_mask": torch.zeros(1, 1, 9, 9)}, "mask"),
        (Layer(), {"dropout": 0.1}, "dropout=0.1"),
        (Layer(), {"position_bias": torch.zeros(1, 4, 9, 9)}, "position"),
        (Layer(), {"is_causal": False}, "causal=False"),
        (BidirectionalLayer(), {}, "causal=False"),
    ],
)
def test_what_the_kernels_cannot_honour_is_refused_by_name(
    layer: nn.Module, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError) as caught:
        call(layer, **changes)
    assert caught.value.field == "model.path"
    assert type(layer).__name__ in caught.value.message and named in caught.value.message
