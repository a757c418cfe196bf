"""Defines the models that FSDP shards: a Hugging Face decoder, which gets packed tokens, with this project's own head.

`PolicyModel` returns log-probs of given target tokens instead of logits. `ValueModel`, the critic, returns a value for
each token.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from slimefsdp.attention.call_plan import AttentionParams, PackAttention
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import AttentionShape, Choice
from slimefsdp.batching.packing import LocalShare
from slimefsdp.distributed.mesh import CutMesh
from slimefsdp.distributed.token_shares import first_rank_trains, gather_tokens, local_part
from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.io.safetensors_header import TensorEntry
from slimefsdp.model_spec import has_attention_softcap, windowed_layers
from slimefsdp.models.fused_log_probs import HeadAdapter, HeadInputs, token_log_probs, token_log_probs_and_kl
from slimefsdp.models.lora_modules import LoraLinear
from slimefsdp.models.peft_folder import MATRICES
from slimefsdp.models.routing import Routing

ATTENTION_NAME = "slimefsdp"
_EXPECTED = ("module", "query", "key", "value", "attention_mask")
_UNSUPPORTED = {"position_bias": "a position bias", "cache_position_bias": "a position bias"}


class DecoderModel(nn.Module):
    """Wraps a decoder, to which subclasses add a head.

    This module is the root of the FSDP units: embeddings, final norm and head are unsharded only within `forward`, so
    other code must not use the head's weight.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.attention = Attention(Choice("local", "until a mesh is known"))
        self.tp: CutMesh | None = None  # the ranks over which the model is cut
        has_experts = getattr(hf.config, "num_experts_per_tok", None) is not None
        self.routing = Routing(list(self.decoder_layers())) if has_experts else None

    @property
    def tp_ranks(self) -> int:
        return 1 if self.tp is None else self.tp.size

    @property
    def has_tied_embeddings(self) -> bool:
        """Returns whether the embedding is also the head's weight."""
        raise NotImplementedError

    def hidden_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        pack_attention: PackAttention,
        routed_experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the hidden states after the final norm, [local_tokens, hidden_dim]; only `forward` may call it.

        The last rows are meaningless if placeholder tokens were added. Under tensor parallelism the result has the rows
        of all tp ranks' tokens.

        Args:
            tokens: [local_tokens] int64.
            positions: [local_tokens] int64, restarting at 0 at each sample.
            pack_attention: the attention for the pack of these tokens, from `self.attention`.
            routed_experts: see LocalShare; ignored by a model without experts.
        """
        # A rank without tokens must still join every collective and have a gradient for every parameter, but models
        # cannot be called without tokens; and tp ranks must have equally many tokens. So placeholder tokens are added.
        # No token attends to them, and the head does not read their rows.
        missing = max(1, -(-tokens.shape[0] // self.tp_ranks)) * self.tp_ranks - tokens.shape[0]
        if missing:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
            pack_attention = _without_placeholders(pack_attention, missing)
        if self.routing is not None:
            self.routing.begin_pass(routed_experts, missing, self.tp)
        decoded = self.hf.get_decoder()(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            return_dict=True,  # config.json may set it to False
            pack_attention=pack_attention,
        )
        hidden: torch.Tensor = decoded.last_hidden_state
        return hidden[0] if self.tp is None else gather_tokens(hidden, self.tp)[0]

    def freeze(self, patterns: Sequence[str]) -> None:
        """Excludes parameters whose names match a shell-style pattern from training; must be called before sharding.

        A tied embedding has two names, and is frozen if either name matches.

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
        layers = decoder.h if hasattr(decoder, "h") else decoder.layers  # GPT-2 has another name than all others
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
        """Returns all parameters except adapters, by their names in transformers; a tied parameter occurs once.

        The experts of a layer are one parameter here, and may be several tensors in a folder
        (slimefsdp.models.hf_folder).
        """
        return [(name, parameter) for name, parameter in self.all_parameters() if not name.endswith(MATRICES)]

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the `named_weights`, each followed by the matrices of its adapter."""
        return [(name.removeprefix("hf."), parameter) for name, parameter in self.named_parameters()]

    def saved_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the weights that a checkpoint holds.

        If the model has adapters, these are the trained weights only; otherwise all `named_weights`, including frozen
        ones.
        """
        has_adapters = any(name.endswith(MATRICES) for name, _ in self.all_parameters())
        return self.trained_weights() if has_adapters else self.named_weights()

    @property
    def trained_in_full(self) -> frozenset[str]:
        """Returns the names of the weights that are trained directly even if the model has adapters."""
        return frozenset()

    def weights_in(self, stored: Mapping[str, TensorEntry]) -> list[tuple[str, nn.Parameter]]:
        """Returns the `named_weights` that are read from a folder with these tensors.

        Only a critic's head may be missing from the folder; such a head starts at 0.

        Raises:
            ModelError: the folder holds a model of another kind.
        """
        return self.named_weights()

    def unread(self, stored: Mapping[str, TensorEntry]) -> frozenset[str]:
        """Returns the names of tensors that a folder may hold although this model does not read them."""
        return frozenset()

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of config.json for an exported folder, given the original's content.

        Raises:
            ModelError: transformers has no model class for these weights.
        """
        return dict(config)

    def trained_weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.all_parameters() if parameter.requires_grad]


def _without_placeholders(attend: PackAttention, count: int) -> PackAttention:
    """Returns `attend` for a pass whose last `count` tokens are hidden from it, and have an output of 0."""

    def attend_to_others(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        attended = attend(q[:-count], k[:-count], v[:-count], scoring, sinks)
        return torch.cat([attended, torch.zeros_like(q[-count:, :, : v.shape[-1]])])

    return attend_to_others


_NOT_OF_THE_FUNCTION = ("_name_or_path", "architectures", "dtype", "transformers_version")  # ignored by `is_like`


class PolicyModel(DecoderModel):
    """A causal LM that returns the log-probs of chosen target tokens."""

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
            pack_attention: the attention for this pack, from `self.attention`.
            temperature: divides the logits, for log-probs and entropy alike.
            entropy_grad: let gradients flow through the entropies.
            reference: head inputs of another model for the same share. If given, the result is [3, pairs]: the third
                row is the differentiable KL(self || reference) of each pair over the whole vocabulary.
        """
        # called through the class, because FSDP may have replaced the instance's method by one that runs FSDP's hooks
        inputs = PolicyModel.head_inputs(self, share, pack_attention)
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
        """Returns the inputs of the head: hidden states [pairs, hidden_dim], weight [vocab, hidden_dim] and adapter.

        The hidden states are those of the rows that predict a token.

        Before a call on a sharded model, register this method by FSDP2's `register_fsdp_forward_method`. The weight is
        then the gathered weight, which exists until the root is resharded.
        """
        hidden = self.hidden_states(share.tokens, share.positions, pack_attention, share.routed_experts)
        return self.head_inputs_of(hidden[share.rows])

    def head_inputs_of(self, hidden: torch.Tensor) -> HeadInputs:
        """Returns the inputs of the head for hidden states [rows, hidden_dim]; weights must be unsharded."""
        head = self.hf.get_output_embeddings()
        adapter = None
        if isinstance(head, LoraLinear) and head.is_on:
            adapter = HeadAdapter(head.low(hidden), local_part(head.lora_B))
        if self.tp is None:
            return HeadInputs(hidden, head.weight, self.softcap, adapter)
        return HeadInputs(hidden, local_part(head.weight), self.softcap, adapter, self.tp.group)

    def is_like(self, other: PolicyModel) -> bool:
        """Returns whether two policies with equal weights would compute the same function.

        Compares configurations, and names and shapes of weights.
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
    """A decoder with a head that outputs one number per token.

    The head replaces the LM head. Its parameters have the names that transformers' token classifiers use
    (`score.weight`, `score.bias`). An exported folder is a token classifier with one label, and can be loaded again.
    From the folder of a causal LM only the decoder is loaded; the head, and thus every value, is then zero at first.

    Args:
        hf: a causal LM; its head is removed.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        # if the head is tied to the embedding, this deletes only a reference
        del hf.lm_head
        embedding = hf.get_input_embeddings().weight
        hf.score = nn.Linear(hf.config.hidden_size, 1, device=embedding.device, dtype=embedding.dtype)

    def forward(self, share: LocalShare, pack_attention: PackAttention) -> torch.Tensor:
        """Returns the values of the share's pairs, [1, pairs], in float32, or float64 for a float64 model.

        The value of a response token is the expected reward to go before the token is chosen. It is therefore computed
        from the row before the token, like the token's log-prob.

        Args:
            share: this rank's part of a pack.
            pack_attention: the attention for this pack, from `self.attention`.
        """
        hidden = self.hidden_states(share.tokens, share.positions, pack_attention)[share.rows]
        dtype = torch.promote_types(hidden.dtype, torch.float32)  # half precision has only three digits
        score = self.hf.score
        assert isinstance(score, nn.Linear)
        values = F.linear(score.weight.to(dtype), hidden.to(dtype)) + score.bias.to(dtype).unsqueeze(1)
        return values if self.tp is None else first_rank_trains(values, self.tp)

    @property
    def has_tied_embeddings(self) -> bool:
        return False

    @property
    def trained_in_full(self) -> frozenset[str]:
        return frozenset(_HEADS)

    def weights_in(self, stored: Mapping[str, TensorEntry]) -> list[tuple[str, nn.Parameter]]:
        """Returns the decoder's weights for the folder of a causal LM, and all weights for a token classifier's folder.

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
        """Returns the name of a causal LM's head, unless the folder has a token classifier's head."""
        return frozenset() if _HEAD in stored else frozenset([_LM_HEAD])

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config.json of a token classifier with one label.

        Raises:
            ModelError: transformers has no token classifier of this architecture, or one whose head is not called
                `score`.
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


# ---------------------------------------------------------------------- the attention of the decoder's layers
#
# Every attention layer of transformers calls the registered function with its query, key and value, and with the
# keywords that the model was called with. This project adds the keyword `pack_attention`. `ATTENTION_NAME` is not
# registered as a mask function, so the model builds no mask.


def register_attention() -> str:
    """Registers this project's attention with transformers; returns its name, for `attn_implementation`.

    Raises:
        ModelError: see `check_attention_interface`.
    """
    check_attention_interface(sdpa_attention_forward)
    AttentionInterface.register(ATTENTION_NAME, _attention)
    return ATTENTION_NAME


def check_attention_interface(builtin: Any) -> None:
    """Checks that transformers' own attention function has the parameters that `_attention` relies on.

    Raises:
        ModelError: the leading parameters differ, or `scaling`, `dropout` or further keywords are not accepted.
    """
    parameters = inspect.signature(builtin).parameters
    leading = tuple(parameters)[: len(_EXPECTED)]
    takes_keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if leading != _EXPECTED or not {"scaling", "dropout"} <= set(parameters) or not takes_keywords:
        raise ModelError(
            f"transformers {transformers.__version__} calls attention with {tuple(parameters)}, "
            f"expected {(*_EXPECTED, 'dropout', 'scaling', '**kwargs')}",
            field="transformers",
            hint="install a transformers release this version was tested with (see constraints.txt)",
        )


# communication and custom kernels cannot be compiled, so a compiled layer has a graph break here
@torch.compiler.disable
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    pack_attention: PackAttention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the attention of a layer, [1, tokens, heads, head_dim].

    Args:
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
    """
    if pack_attention is None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} was called without a pack's attention, or with a mask of its own",
            field="model.path",
            hint="this architecture does not pass keywords on to its attention; use a supported one",
        )
    for name, feature in _UNSUPPORTED.items():
        if others.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {feature}, which the kernels lack", field="model.path")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as transformers' own functions do
    if dropout != 0.0 or not causal:
        raise ModelError(
            f"{type(module).__name__} asks for dropout={dropout}, causal={causal}",
            field="model.path",
            hint="only causal attention without dropout can be packed exactly",
        )
    assert query.shape[0] == 1, "a pack is one row"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [tokens, heads, head_dim]
    scoring = AttentionParams(
        scale=_scale_of(module, q.shape[-1]) if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    return pack_attention(q, k, v, scoring, s_aux).unsqueeze(0), None


def _scale_of(module: torch.nn.Module, head_dim: int) -> float:
    """Returns the scale of a layer that does not pass `scaling`, such as GPT-2's in transformers 5.0."""
    scale = head_dim**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= int(getattr(module, "layer_idx", 0)) + 1
    return scale
