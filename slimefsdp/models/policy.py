"""The module that is sharded: a Hugging Face causal LM whose forward returns log-probs instead of logits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from slimefsdp.attention.call_plan import PackAttention
from slimefsdp.batching.packing import LocalShare
from slimefsdp.models.base import DecoderModel
from slimefsdp.models.fused_log_probs import HeadInputs, token_log_probs, token_log_probs_and_kl

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
        """Log-probs of the share's targets, and the entropies they were drawn from, [2, pairs].

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
            inputs.hidden,
            inputs.weight,
            share.targets,
            temperature=temperature,
            with_entropy=True,
            entropy_grad=entropy_grad,
            softcap=inputs.softcap,
        )
        assert entropy is not None
        return torch.stack([log_probs, entropy])

    def head_inputs(self, share: LocalShare, pack_attention: PackAttention) -> HeadInputs:
        """What the share's logits are made of, [pairs, hidden_dim] and [vocab, hidden_dim].

        Of a sharded model it is called like `forward`, once it is known to FSDP (`register_fsdp_forward_method`); the
        weight is the gathered one, which lasts until the root is resharded.
        """
        hidden = self.hidden_states(share.tokens, share.positions, pack_attention)
        return HeadInputs(hidden[share.rows], self.hf.get_output_embeddings().weight, self.softcap)

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
