"""What a policy and a value model share: a Hugging Face decoder on packed tokens, as the root of the sharded units."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slimefsdp.attention.call_plan import AttentionParams, PackAttention
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import AttentionShape, Choice
from slimefsdp.errors import ConfigError
from slimefsdp.io.safetensors_header import TensorEntry
from slimefsdp.model_spec import windowed_layers


class DecoderModel(nn.Module):
    """A decoder and whatever head a subclass reads its hidden states with.

    It is the root of the sharded units: embeddings, final norm and head are unsharded inside its forward and nowhere
    else, so the head's weight must not be touched from outside.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.attention = Attention(Choice("local", "until a mesh is known"))

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the embedding is the head's weight, too."""
        raise NotImplementedError

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, pack_attention: PackAttention
    ) -> torch.Tensor:
        """[local_tokens, hidden_dim] after the final norm, one row where there is no token; for use in `forward`.

        Args:
            tokens: [local_tokens] int64.
            positions: [local_tokens] int64, restarting at 0 at each sample.
            pack_attention: `self.attention` for the pack that the tokens are of.
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
            return_dict=True,  # which a config.json may switch off
            pack_attention=pack_attention,
        )
        hidden: torch.Tensor = decoded.last_hidden_state[0]
        return hidden

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

        The experts of a layer are one parameter here; folders may split them (slimefsdp.models.hf_weight_names).
        """
        return [(name.removeprefix("hf."), parameter) for name, parameter in self.named_parameters()]

    def weights_in(self, stored: Mapping[str, TensorEntry]) -> list[tuple[str, nn.Parameter]]:
        """Those of `named_weights` that a folder with these tensors fills: all; a head may begin at 0 instead.

        Raises:
            ModelError: the folder is of another kind of model.
        """
        return self.named_weights()

    def unread(self, stored: Mapping[str, TensorEntry]) -> frozenset[str]:
        """Tensors that such a folder may hold, and that this model has no use for."""
        return frozenset()

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of a folder with these weights, from that of the folder they began with.

        Raises:
            ModelError: no folder can hold them.
        """
        return dict(config)

    def trained_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named_weights` that have gradients: all but what `freeze` took out."""
        return [(name, parameter) for name, parameter in self.named_weights() if parameter.requires_grad]


def _without_the_only_token(attend: PackAttention) -> PackAttention:
    """Hides a rank's one token from the pack's attention; what the token gets is 0."""

    def attend_to_nothing(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.cat([attend(q[:0], k[:0], v[:0], scoring, sinks), torch.zeros_like(q[..., : v.shape[-1]])])

    return attend_to_nothing
