"""The module that is sharded: a Hugging Face causal LM whose forward returns log-probs instead of logits."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from slimefsdp.attention.plan import AttentionPlan
from slimefsdp.models.head import token_log_probs


class PolicyModel(nn.Module):
    """A causal LM from tokens to the log-probs of chosen targets.

    It is the root of the sharded units: embeddings, final norm and LM head are unsharded inside its forward and nowhere
    else, so the head's weight must not be touched from outside.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.softcap: float | None = getattr(hf.config, "final_logit_softcapping", None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_plan: AttentionPlan,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        with_entropy: bool = False,
        entropy_grad: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [pairs] of `targets` [pairs] read from `rows` [pairs], and the entropies [pairs] if asked for.

        Args:
            tokens: [local_tokens] int64.
            positions: [local_tokens] int64, restarting at 0 at each sample.
            attention_plan: who attends to whom among the tokens.
            rows: [pairs] int64 among the local tokens.
            targets: [pairs] int64.
            temperature: divides the logits, for log-probs and entropy alike.
            with_entropy: compute entropies.
            entropy_grad: let gradients flow through them.
        """
        decoded = self.hf.get_decoder()(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            attention_plan=attention_plan,
        )
        hidden = decoded.last_hidden_state[0]  # [local_tokens, hidden_dim]
        return token_log_probs(
            hidden[rows],
            self.hf.get_output_embeddings().weight,
            targets,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            softcap=self.softcap,
        )

    def decoder_layers(self) -> nn.ModuleList:
        """The stack of decoder layers."""
        layers = self.hf.get_decoder().layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, a tied one once."""
        return [(name.removeprefix("hf."), parameter) for name, parameter in self.named_parameters()]

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the LM head is the embedding."""
        return self.hf.get_output_embeddings().weight is self.hf.get_input_embeddings().weight
