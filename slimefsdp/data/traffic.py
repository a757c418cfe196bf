"""How many bytes context-parallel ranks send for attention, exactly: one layer, one pack, from its layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slimefsdp.data.cost import Strategy
from slimefsdp.data.layout import Layout, tokens_of, wire_rows
from slimefsdp.errors import ConfigError


def attention_wire_bytes(
    layout: Layout,
    strategy: Strategy,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_element: int,
    grad_bytes_per_element: int,
    parents: Sequence[int | None] | None = None,
) -> tuple[int, int]:
    """(forward, backward) bytes sent for one pack in one layer, summed over the cp ranks.

    Rows that travel are those of `wire_rows`. ring: K and V of each are passed on cp - 1 times, in backward again, and
    their gradients as often. all_gather: K and V of each go to cp - 1 ranks and are kept, gradients come back from as
    many. ulysses: every token's q, k, v and output go to the ranks that hold their heads, of which 1 / cp stays where
    it is; in backward so do their gradients.

    Args:
        bytes_per_element: of q, k, v and the output.
        grad_bytes_per_element: of the accumulators of dK and dV (ring, all_gather); Ulysses sends gradients in the
            compute dtype.
        parents: of every node of the pack, where samples share what they begin with.

    Raises:
        ConfigError: Ulysses, and heads that cp does not divide.
    """
    cp = len(layout)
    if cp == 1:
        return 0, 0
    if strategy == "ulysses":
        if heads % cp:
            raise ConfigError(
                f"Ulysses cannot divide {heads} attention heads over mesh.cp={cp} ranks",
                field="attention.strategy",
                hint="use ring or all_gather, or a mesh.cp that divides the heads",
            )
        sent_heads = 2 * heads + 2 * repeated_kv_heads(heads, kv_heads, cp)  # q and output, k and v
        forward = sum(tokens_of(layout)) * (sent_heads // cp) * head_dim * (cp - 1) * bytes_per_element
        return forward, forward
    elements = (cp - 1) * sum(wire_rows(layout, parents)) * 2 * kv_heads * head_dim
    again = bytes_per_element if strategy == "ring" else 0
    return elements * bytes_per_element, elements * (again + grad_bytes_per_element)


def repeated_kv_heads(heads: int, kv_heads: int, cp: int) -> int:
    """As many as ranks can share out evenly, each with its own query heads; at worst one for every query head."""
    repeated = math.lcm(kv_heads, cp)
    return repeated if heads % repeated == 0 else heads
