"""The critic: a decoder whose forward returns a value for every chosen token.

Its head takes the place of the language model's, under the names of transformers' token classifiers (`score.weight`,
`score.bias`): a folder of one of those with one label is read whole, and an export is one. Out of a causal LM's folder
comes the decoder; the head then begins at zero, and so does every value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from slimefsdp.attention.call_plan import PackAttention
from slimefsdp.batching.packing import LocalShare
from slimefsdp.errors import ModelError
from slimefsdp.io.safetensors_header import TensorEntry
from slimefsdp.models.base import DecoderModel

_HEAD = "score.weight"
_HEADS = ("score.weight", "score.bias")
_LM_HEAD = "lm_head.weight"


class ValueModel(DecoderModel):
    """A decoder with a head of one number.

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
        """Values of the share's pairs, [1, pairs], float32, or float64 where the model is.

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
        """Never: the head has one row."""
        return False

    def weights_in(self, stored: Mapping[str, TensorEntry]) -> list[tuple[str, nn.Parameter]]:
        """The decoder's, out of the folder of a causal LM; all out of that of a token classifier.

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
        """The head of a causal LM."""
        return frozenset() if _HEAD in stored else frozenset([_LM_HEAD])

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """That of a token classifier with one label.

        Raises:
            ModelError: transformers has none of this architecture whose head has our names.
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
