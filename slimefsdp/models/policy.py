"""The module that is sharded: a Hugging Face causal LM whose forward returns log-probs instead of logits."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from transformers import PreTrainedModel

from slimefsdp.attention.choice import AttentionShape, Choice
from slimefsdp.attention.kernels import Scoring
from slimefsdp.attention.strategy import Attention, PackAttention
from slimefsdp.data.dimensions import windowed_layers
from slimefsdp.errors import ConfigError
from slimefsdp.models.head import token_log_probs

_NOT_OF_THE_FUNCTION = ("_name_or_path", "architectures", "dtype", "transformers_version")


class PolicyModel(nn.Module):
    """A causal LM from tokens to the log-probs of chosen targets.

    It is the root of the sharded units: embeddings, final norm and LM head are unsharded inside its forward and nowhere
    else, so the head's weight must not be touched from outside.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.softcap: float | None = getattr(hf.config, "final_logit_softcapping", None)
        self.attention = Attention(Choice("local", "until a mesh is known"))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        pack_attention: PackAttention,
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
            pack_attention: `self.attention` for the pack that the tokens are of.
            rows: [pairs] int64 among the local tokens.
            targets: [pairs] int64.
            temperature: divides the logits, for log-probs and entropy alike.
            with_entropy: compute entropies.
            entropy_grad: let gradients flow through them.
        """
        if not tokens.shape[0]:
            # no architecture can be called without tokens, but a rank that has none must join every collective and
            # have a gradient of every parameter: it computes one token that nothing attends to and no pair reads
            tokens, positions = tokens.new_zeros(1), positions.new_zeros(1)
            pack_attention = _without_the_only_token(pack_attention)
        decoded = self.hf.get_decoder()(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            pack_attention=pack_attention,
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

    def freeze(self, patterns: Sequence[str]) -> None:
        """Takes the parameters whose names match a shell-style pattern out of training; call it before sharding.

        A tensor with two names, a tied embedding, is frozen under either of them.

        Raises:
            ConfigError: a pattern matches no name, or nothing is left to train.
        """
        named = [(name.removeprefix("hf."), p) for name, p in self.named_parameters(remove_duplicate=False)]
        for pattern in patterns:
            matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
            if not matched:
                near = difflib.get_close_matches(pattern, [name for name, _ in named], n=3, cutoff=0.0)
                raise ConfigError(
                    f"model.frozen has {pattern!r}, which matches no parameter of this model",
                    field="model.frozen",
                    hint=f"the nearest names are {', '.join(near)}; * stands for any characters",
                )
            for parameter in matched:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ConfigError(
                f"model.frozen={list(patterns)} leaves nothing to train",
                field="model.frozen",
                hint="narrow the patterns, or remove one",
            )

    def decoder_layers(self) -> nn.ModuleList:
        """The stack of decoder layers."""
        decoder = self.hf.get_decoder()
        layers = decoder.h if hasattr(decoder, "h") else decoder.layers  # GPT-2's name, and everybody else's
        assert isinstance(layers, nn.ModuleList)
        return layers

    def attention_shape(self) -> AttentionShape:
        """What of this architecture decides how its attention can be shared between ranks."""
        config = self.hf.config
        heads = config.num_attention_heads
        return AttentionShape(
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            has_windows=windowed_layers(config.to_dict(), config.num_hidden_layers) > 0,
            has_sinks=any(name.endswith(".sinks") for name, _ in self.named_parameters()),
            has_softcap=bool(getattr(config, "attn_logit_softcapping", None)),
        )

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under the names that transformers gives them in memory, a tied one once.

        The experts of a layer are one parameter here; folders may split them (slimefsdp.models.hub_names).
        """
        return [(name.removeprefix("hf."), parameter) for name, parameter in self.named_parameters()]

    def trained_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named_weights` that have gradients: all but what `freeze` took out."""
        return [(name, parameter) for name, parameter in self.named_weights() if parameter.requires_grad]

    def is_like(self, other: PolicyModel) -> bool:
        """Whether another policy computes the same function of equal weights: same configuration, names and shapes."""
        configs = [
            {key: value for key, value in policy.hf.config.to_dict().items() if key not in _NOT_OF_THE_FUNCTION}
            for policy in (self, other)
        ]
        shapes = [[(name, weight.shape) for name, weight in policy.named_weights()] for policy in (self, other)]
        return configs[0] == configs[1] and shapes[0] == shapes[1]

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the LM head is the embedding."""
        return self.hf.get_output_embeddings().weight is self.hf.get_input_embeddings().weight


def _without_the_only_token(attend: PackAttention) -> PackAttention:
    """Hides a rank's one token from the pack's attention; what the token gets is 0."""

    def attend_to_nothing(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.cat([attend(q[:0], k[:0], v[:0], scoring, sinks), torch.zeros_like(q[..., : v.shape[-1]])])

    return attend_to_nothing
