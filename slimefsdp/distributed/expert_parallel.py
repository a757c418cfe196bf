"""Divides experts over expert-parallel ranks, and sends tokens to the ranks of their experts and back.

Nothing is dropped or padded: each rank gets exactly the rows that are routed to its experts, one for each pair of a
token and an expert. Transformers' module of experts computes these rows with this rank's part of the experts, as tokens
with one expert each. The weights of the routing are applied on the rank that has the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimefsdp.distributed.mesh import CutMesh
from slimefsdp.distributed.tensor_parallel import LocalPart, cut_parameter, local_parameters
from slimefsdp.errors import ConfigError

if TYPE_CHECKING:  # slimefsdp.models imports this package
    from slimefsdp.models.decoder import DecoderModel


def cut_experts(model: DecoderModel, mesh: CutMesh) -> None:
    """Divides the experts of every layer over ep ranks, in place; parameters may be on the meta device.

    Raises:
        ConfigError: the model has no experts, or ep does not divide their number.
    """
    modules = [module for module in model.modules() if hasattr(module, "is_transposed")]  # transformers' experts
    if not modules:
        problem = f"mesh.ep={mesh.size} divides experts, and a {model.hf.config.model_type} model has none"
        raise ConfigError(problem, field="mesh.ep", hint="set mesh.ep=1")
    for module in modules:
        if module.num_experts % mesh.size:  # type: ignore[operator]
            raise ConfigError(
                f"mesh.ep={mesh.size} does not divide {module.num_experts} experts",
                field="mesh.ep",
                hint="set it to a divisor of their number",
            )
        _cut(module, mesh)


def _cut(experts: nn.Module, mesh: CutMesh) -> None:
    own = int(experts.num_experts) // mesh.size  # type: ignore[arg-type]
    local: dict[tuple[nn.Module, str], LocalPart] = {
        (experts, name): cut_parameter(experts, name, parameter, 0, mesh)
        for name, parameter in list(experts.named_parameters(recurse=False))
    }
    experts.num_experts = own  # type: ignore[assignment]
    forward = experts.forward

    def compute(rows: Tensor, ids: Tensor) -> Tensor:
        """Returns the outputs of this rank's experts, [rows, features]."""
        # one more row of zeros, whose output is dropped: a rank without rows needs gradients for its experts too
        rows, ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), torch.cat([ids, ids.new_zeros(1)])
        with local_parameters(local):
            output: Tensor = forward(rows, ids[:, None], rows.new_ones(len(rows), 1))
        return output[:-1]

    @torch.compiler.disable
    def forward_of_all_experts(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, [tokens, features].

        Args:
            hidden: [tokens, features].
            ids, weights: [tokens, experts of a token], the experts chosen for each token, and their weights.
        """
        chosen, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=own * mesh.size).view(mesh.size, own)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=mesh.group)
        # the sizes must be known on the host: a synchronisation for each layer
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        rows = _exchange(hidden[order // ids.shape[1]], sent, received, mesh.group)
        expert_of_row = torch.arange(own, device=ids.device).repeat(mesh.size).repeat_interleave(theirs.flatten())
        back = _exchange(compute(rows, expert_of_row), received, sent, mesh.group)
        outputs = torch.empty_like(back).index_copy(0, order, back).view(*ids.shape, -1)
        return (outputs * weights[..., None]).sum(1)

    experts.forward = forward_of_all_experts


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _exchanged(gradients[0], received, sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Collective: sends the first sent[0] rows to rank 0 of the group, the next to rank 1, and so on.

    Returns:
        The rows from rank 0, then those from rank 1, and so on: [sum of received, features]. Backward sends the
        gradients the other way.
    """
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)
    return exchanged


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    exchanged = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(exchanged, rows.contiguous(), received, sent, group=group)
    return exchanged
