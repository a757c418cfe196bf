"""Defines the module that is sharded: a Hugging Face decoder on packed tokens, with a head of our own.

`PolicyModel` returns log-probs instead of logits, `ValueModel`, the critic, a value for every chosen token.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from slimefsdp.attention.call_plan import AttentionParams, PackAttention
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import AttentionShape, Choice
from slimefsdp.batching.packing import LocalShare
from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.io.safetensors_header import TensorEntry
from slimefsdp.model_spec import has_attention_softcap, windowed_layers
from slimefsdp.models.fused_log_probs import HeadAdapter, HeadInputs, token_log_probs, token_log_probs_and_kl
from slimefsdp.models.lora_modules import LoraLinear
from slimefsdp.models.peft_folder import MATRICES


class DecoderModel(nn.Module):
    """A decoder, and the head that a subclass adds to its hidden states.

    It is the root of the sharded units: embeddings, final norm and head are unsharded inside its forward and nowhere
    else, so the head's weight must not be touched from outside.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.attention = Attention(Choice("local", "until a mesh is known"))

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the embedding is also the head's weight."""
        raise NotImplementedError

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, pack_attention: PackAttention
    ) -> torch.Tensor:
        """Returns [local_tokens, hidden_dim] after the final norm, one row if there is no token; for use in `forward`.

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
        """Excludes parameters whose names match a shell-style pattern from training; call it before sharding.

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
        decoder = self.hf.get_decoder()
        layers = decoder.h if hasattr(decoder, "h") else decoder.layers  # GPT-2's name, and everybody else's
        assert isinstance(layers, nn.ModuleList)
        return layers

    def attention_shape(self) -> AttentionShape:
        """Returns the properties that decide how the model's attention can be computed and split between ranks."""
        config = self.hf.config
        heads = config.num_attention_heads
        return AttentionShape(
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            has_windows=windowed_layers(config.to_dict(), config.num_hidden_layers) > 0,
            has_sinks=any(name.endswith(".sinks") for name, _ in self.named_parameters()),
            has_softcap=has_attention_softcap(config.to_dict()),
        )

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters under their names in transformers, a tied one once, without adapters.

        The experts of a layer are one parameter here; folders may split them (slimefsdp.models.hf_weight_names).
        """
        return [(name, parameter) for name, parameter in self.all_parameters() if not name.endswith(MATRICES)]

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the `named_weights` and the matrices of adapters, each after the weight that it adapts."""
        return [(name.removeprefix("hf."), parameter) for name, parameter in self.named_parameters()]

    def saved_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Returns what a checkpoint holds: the `named_weights`, or of a model with adapters the trained weights only.

        Where nothing has adapters, frozen weights are among them.
        """
        has_adapters = any(name.endswith(MATRICES) for name, _ in self.all_parameters())
        return self.trained_weights() if has_adapters else self.named_weights()

    @property
    def trained_in_full(self) -> frozenset[str]:
        """Names of the weights that are trained in full although the model has adapters."""
        return frozenset()

    def weights_in(self, stored: Mapping[str, TensorEntry]) -> list[tuple[str, nn.Parameter]]:
        """Returns the `named_weights` that a folder with these tensors fills: all, except a head that may begin at 0.

        Raises:
            ModelError: the folder is of another kind of model.
        """
        return self.named_weights()

    def unread(self, stored: Mapping[str, TensorEntry]) -> frozenset[str]:
        """Returns the tensors that such a folder may hold and this model does not read."""
        return frozenset()

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns config.json for a folder with these weights, from the config.json of the folder they began with.

        Raises:
            ModelError: no folder can hold them.
        """
        return dict(config)

    def trained_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters of `all_parameters` that have gradients."""
        return [(name, parameter) for name, parameter in self.all_parameters() if parameter.requires_grad]


def _without_the_only_token(attend: PackAttention) -> PackAttention:
    """Hides a rank's one placeholder token from the pack's attention; the token's output is 0."""

    def attend_to_nothing(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.cat([attend(q[:0], k[:0], v[:0], scoring, sinks), torch.zeros_like(q[..., : v.shape[-1]])])

    return attend_to_nothing


_NOT_OF_THE_FUNCTION = ("_name_or_path", "architectures", "dtype", "transformers_version")


class PolicyModel(DecoderModel):
    """A causal LM from tokens to the log-probs of chosen targets."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.softcap: float | None = getattr(hf.config, "final_logit_softcapping", None)

    def forward(
        self,
        share: LocalShare,
        pack_attention: PackAttention,
        *,
        temperature: float,
        entropy_grad: bool = False,
        reference: HeadInputs | None = None,
    ) -> torch.Tensor:
        """Returns log-probs of the share's targets, and the entropies of their distributions, [2, pairs].

        Args:
            share: this rank's part of a pack.
            pack_attention: `self.attention` for that pack.
            temperature: divides the logits, for log-probs and entropy alike.
            entropy_grad: let gradients flow through the entropies.
            reference: of another model for the same share: a third output is KL(self || reference) of each pair, over
                the whole vocabulary, with gradients.
        """
        inputs = PolicyModel.head_inputs(self, share, pack_attention)  # the instance's may be a forward to FSDP, too
        if reference is not None:
            return torch.stack(
                token_log_probs_and_kl(
                    inputs, share.targets, reference, temperature=temperature, entropy_grad=entropy_grad
                )
            )
        log_probs, entropy = token_log_probs(
            inputs, share.targets, temperature=temperature, with_entropy=True, entropy_grad=entropy_grad
        )
        assert entropy is not None
        return torch.stack([log_probs, entropy])

    def head_inputs(self, share: LocalShare, pack_attention: PackAttention) -> HeadInputs:
        """Returns what the share's logits are made of, [pairs, hidden_dim] and [vocab, hidden_dim], and the head's
        adapter.

        Of a sharded model it is called like `forward`, once it is known to FSDP (`register_fsdp_forward_method`); the
        weight is the gathered one, which lasts until the root is resharded.
        """
        return self.head_inputs_of(self.hidden_states(share.tokens, share.positions, pack_attention)[share.rows])

    def head_inputs_of(self, hidden: torch.Tensor) -> HeadInputs:
        """Returns what the logits of hidden states [rows, hidden_dim] are made of, for a model with
        unsharded weights.
        """
        head = self.hf.get_output_embeddings()
        adapter = None
        if isinstance(head, LoraLinear) and head.is_on:
            adapter = HeadAdapter(head.low(hidden), head.lora_B)
        return HeadInputs(hidden, head.weight, self.softcap, adapter)

    def is_like(self, other: PolicyModel) -> bool:
        """Returns whether two policies compute the same function of equal weights: same configuration, names and
        shapes.
        """
        configs = [
            {key: value for key, value in policy.hf.config.to_dict().items() if key not in _NOT_OF_THE_FUNCTION}
            for policy in (self, other)
        ]
        shapes = [[(name, weight.shape) for name, weight in policy.named_weights()] for policy in (self, other)]
        return configs[0] == configs[1] and shapes[0] == shapes[1]

    @property
    def has_tied_embeddings(self) -> bool:
        return self.hf.get_output_embeddings().weight is self.hf.get_input_embeddings().weight


_HEAD = "score.weight"
_HEADS = ("score.weight", "score.bias")
_LM_HEAD = "lm_head.weight"


class ValueModel(DecoderModel):
    """A decoder with a head that outputs one number.

    The head takes the place of the language model's, under the names of transformers' token classifiers
    (`score.weight`, `score.bias`): a folder of one of those with one label is read whole, and an export is one. Out of
    a causal LM's folder comes the decoder; the head then begins at zero, and so does every value.

    Args:
        hf: a causal LM, which is taken apart: its head goes.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        # an embedding tied to the head stays where it is
        del hf.lm_head
        embedding = hf.get_input_embeddings().weight
        hf.score = nn.Linear(hf.config.hidden_size, 1, device=embedding.device, dtype=embedding.dtype)

    def forward(self, share: LocalShare, pack_attention: PackAttention) -> torch.Tensor:
        """Returns the values of the share's pairs, [1, pairs], float32, or float64 for a float64 model.

        The row of a response token is the one before it, as for its log-prob: what is expected of the response from
        there on, before the token is chosen.

        Args:
            share: this rank's part of a pack.
            pack_attention: `self.attention` for that pack.
        """
        hidden = self.hidden_states(share.tokens, share.positions, pack_attention)[share.rows]
        dtype = torch.promote_types(hidden.dtype, torch.float32)  # halves hold a value to three digits only
        score = self.hf.score
        assert isinstance(score, nn.Linear)
        return F.linear(score.weight.to(dtype), hidden.to(dtype)) + score.bias.to(dtype).unsqueeze(1)

    @property
    def has_tied_embeddings(self) -> bool:
        """Always False: the head has one row."""
        return False

    @property
    def trained_in_full(self) -> frozenset[str]:
        return frozenset(_HEADS)

    def weights_in(self, stored: Mapping[str, TensorEntry]) -> list[tuple[str, nn.Parameter]]:
        """Returns the decoder's weights for the folder of a causal LM, and all weights for that of a token classifier.

        Raises:
            ModelError: the classifier has several labels.
        """
        head = stored.get(_HEAD)
        if head is not None and head.shape and head.shape[0] != 1:
            raise ModelError(
                f"{head.file} has a head of {head.shape[0]} labels, a value is one number",
                field="critic.path",
                hint="give a token classifier with one label, or a causal LM, which gets a head of zeros",
            )
        return [named for named in self.named_weights() if head is not None or named[0] not in _HEADS]

    def unread(self, stored: Mapping[str, TensorEntry]) -> frozenset[str]:
        """Returns the head of a causal LM."""
        return frozenset() if _HEAD in stored else frozenset([_LM_HEAD])

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config.json of a token classifier with one label.

        Raises:
            ModelError: transformers has no token classifier of this architecture with our names of the head.
        """
        model_type: str = self.hf.config.model_type
        name = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(model_type)
        if name is None or not issubclass(getattr(transformers, name), GenericForTokenClassification):
            raise ModelError(
                f"transformers has no token classifier of {model_type} to open a value model with",
                field="critic.path",
                hint="keep the critic's checkpoints, which hold it, or choose a critic of another architecture",
            )
        return {**config, "architectures": [name], "id2label": {"0": "value"}, "label2id": {"value": 0}}
