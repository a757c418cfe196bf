"""Makes the routers of a mixture of experts repeat given choices of experts; also records and counts their choices.

Two computations of the same tokens differ slightly, for example if a rollout engine has another dtype or another
kernel. A slight difference can make a router choose other experts, and then a token's log-prob changes much. To avoid
this, a pass can repeat (replay) the choices of the earlier computation that sampled or evaluated the tokens (Zheng et
al. 2025, https://arxiv.org/abs/2507.18071; Ma et al. 2025, https://arxiv.org/abs/2510.11370). Only the ids of the
experts are replayed. The weights of the experts are computed from the router's own scores by the architecture's own
rule, so that the router has its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.data.fields import UNKNOWN_EXPERT
from slimefsdp.distributed.mesh import CutMesh
from slimefsdp.errors import ModelError


class _GivenExperts(TorchFunctionMode):
    """Within this mode `torch.topk` over a router's scores returns the scores of given experts and their ids.

    For a token whose experts are not known (UNKNOWN_EXPERT) or not distinct, the router's own choice is returned.
    """

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self._experts = experts  # [tokens, experts of a token] int64
        self.calls = 0  # number of calls of topk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        self.calls += 1
        scores = args[0] if args else kwargs["input"]
        ordered = self._experts.sort(-1).values
        is_choice = (ordered[:, :1] != UNKNOWN_EXPERT) & (ordered.diff() > 0).all(-1, keepdim=True)
        ids = torch.where(is_choice, self._experts, result.indices)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


class Routing:
    """Controls the routers of one model, by wrapping their `forward`.

    A pass is one forward pass of the model, after a call of `begin_pass`. The choices that a pass replays stay in use
    until the next pass begins, because backward may compute layers again.

    Args:
        layers: the decoder's layers; layers without a router are left as they are.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._replayed: Tensor | None = None  # [this rank's tokens, layers, experts of a token] int16
        self._chosen: dict[int, Tensor] | None = None  # layer -> [tokens, experts of a token]; None outside of a pass
        self._tp: CutMesh | None = None
        self._missing = 0
        self.num_layers = len(layers)
        self.num_experts = 0
        for index, layer in enumerate(layers):
            for module in layer.modules():
                if type(module).__name__.endswith("TopKRouter"):
                    self.num_experts = int(module.num_experts)  # type: ignore[arg-type]
                    self._wrap(module, index)

    def _wrap(self, router: nn.Module, layer: int) -> None:
        forward = router.forward

        @torch.compiler.disable
        def forward_with_experts(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if self._replayed is None:
                output: tuple[Tensor, Tensor, Tensor] = forward(hidden)
            else:
                with _GivenExperts(self._replayed[:, layer].long()) as mode:
                    output = forward(hidden)
                if mode.calls != 1:
                    problem = f"{type(router).__name__} calls topk {mode.calls} times, where one call chooses experts"
                    raise ModelError(problem, field="loss.routing_replay", hint="set loss.routing_replay=none")
            if self._chosen is not None:
                self._chosen[layer] = output[2].detach()
            return output

        router.forward = forward_with_experts

    def begin_pass(self, experts: Tensor | None, missing: int, tp: CutMesh | None) -> None:
        """Sets the choices to replay in the coming pass.

        Args:
            experts: [tokens, layers, experts of a token] int16, -1 where the routers choose; None if they choose all.
            missing: number of placeholder tokens that the pass has after these tokens.
            tp: the tp ranks, which divide the tokens and placeholders among them; None means that there is one rank.
        """
        self._missing, self._tp, self._chosen = missing, tp, {}
        self._replayed = None if experts is None else self._own(experts)

    def chosen(self, token_index: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Ends a pass; returns the indices of this tp rank's tokens, [n], and layer -> their experts, [n, k] int64.

        Placeholders are among these tokens, with the index -1. Layers without a router are left out.

        Args:
            token_index: [tokens] int64, a number of the caller's for each token of the pass, without placeholders.
        """
        assert self._chosen is not None
        chosen, self._chosen = self._chosen, None
        return self._own(token_index), chosen

    def _own(self, of_tokens: Tensor) -> Tensor:
        filled = F.pad(of_tokens, (*[0, 0] * (of_tokens.dim() - 1), 0, self._missing), value=UNKNOWN_EXPERT)
        return filled if self._tp is None else filled.chunk(self._tp.size)[self._tp.rank]


class ExpertLoad:
    """Counts how many tokens chose each expert in one update."""

    def __init__(self, routing: Routing, device: torch.device) -> None:
        # [layers, experts + 1]; the last column is for placeholders
        self._counts = torch.zeros(routing.num_layers, routing.num_experts + 1, device=device)

    def add(self, token_index: Tensor, experts: dict[int, Tensor]) -> None:
        """Adds the choices of a pass, as `Routing.chosen` returns them; does not wait for the device."""
        is_placeholder = (token_index < 0)[:, None]
        for layer, chosen in experts.items():
            ids = chosen.masked_fill(is_placeholder, self._counts.shape[1] - 1).flatten()
            self._counts[layer].index_add_(0, ids, self._counts.new_ones(()).expand(len(ids)))

    def metrics(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Collective: returns two metrics of the update, over the tokens of all ranks.

        - expert_max_violation: (tokens of a layer's busiest expert) / (mean over the layer's experts) - 1, averaged
          over layers (Wang et al. 2024, https://arxiv.org/abs/2408.15664).
        - idle_experts: number of experts, over all layers, that no token chose.
        """
        dist.all_reduce(self._counts, group=group)
        counts = self._counts[:, :-1].cpu()
        counts = counts[counts.sum(1) > 0]
        if not len(counts):  # the update has no tokens, or no layer has a router
            return {}
        violation = counts.amax(1) / counts.mean(1) - 1
        return {"expert_max_violation": float(violation.mean()), "idle_experts": float((counts == 0).sum())}


class RecordedExperts:
    """Collects the experts of all tokens of a batch from the ranks that compute the tokens.

    Args:
        tokens: number of the batch's tokens.
        layers: number of the model's layers, with and without routers.
    """

    def __init__(self, tokens: int, layers: int) -> None:
        self._tokens, self._layers = tokens, layers
        # int16 [tokens + 1, layers, k] on the CPU: id + 1, or 0 if another rank computes the token. The last row is for
        # placeholders
        self._experts: Tensor | None = None

    def add(self, token_index: Tensor, experts: dict[int, Tensor]) -> None:
        """Adds the choices of a pass, as `Routing.chosen` returns them."""
        rows = token_index.cpu()  # placeholders write to the last row
        for layer, chosen in experts.items():
            if self._experts is None:
                self._experts = torch.zeros(self._tokens + 1, self._layers, chosen.shape[1], dtype=torch.int16)
            self._experts[rows, layer] = (chosen + 1).to("cpu", torch.int16)

    def gathered(
        self, group: dist.ProcessGroup, device: torch.device, lengths: np.ndarray, shared: SharedPrefixes | None
    ) -> np.ndarray:
        """Collective: returns the experts of every token, int16 [tokens, layers, k], equal on every rank.

        -1 stands for tokens that no rank has computed.

        Args:
            lengths: int64 [B], tokens of each sample.
            shared: the prefixes that were computed once. The samples that share one all get its experts.
        """
        assert self._experts is not None, "every rank computes at least one pack"
        for layer in self._experts.unbind(1):  # one layer at a time, since all of them may not fit on the device
            total = layer.to(device, torch.int32)
            dist.all_reduce(total, group=group)
            layer.copy_(total)
        experts: np.ndarray = self._experts[:-1].numpy()
        experts -= 1
        if shared is not None:
            _fill_in_shared(experts, np.cumsum(lengths) - lengths, shared)
        return experts


def _fill_in_shared(experts: np.ndarray, starts: np.ndarray, shared: SharedPrefixes) -> None:
    """Copies the experts of shared prefixes to the samples whose own copy of the prefix was not computed, in place.

    Args:
        experts: int16 [tokens, layers, k]; a token that was not computed has -1.
        starts: int64 [B], index of each sample's first token.
    """
    order = np.argsort(shared.place)
    for position in np.flatnonzero(shared.shared).tolist():
        count = int(shared.shared[position])
        own, before = (experts[start : start + count] for start in starts[order[[position, position - 1]]])
        is_missing = (own == UNKNOWN_EXPERT).all((1, 2))
        own[is_missing] = before[is_missing]
