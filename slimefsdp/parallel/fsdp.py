"""What is sharded as one unit, in which dtypes, and with FSDP's own averaging switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:  # a name for mypy only: models lie above this package
    from slimefsdp.models.policy import PolicyModel


def apply_fsdp(
    policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype, master_dtype: torch.dtype
) -> PolicyModel:
    """Shards the policy over all ranks of a one-axis mesh, in place.

    Units: each decoder layer, the embedding unless it is tied to the head, and the root with everything else (final
    norm, head), whose forward is the only place where the head's weight is whole. Gradients are summed over the ranks,
    in the master dtype: the loss's weights alone own normalisation.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype, reduce_dtype=master_dtype
    )
    for layer in policy.decoder_layers():
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    if not policy.has_tied_embeddings:
        fully_shard(policy.hf.get_input_embeddings(), mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # without this a divide factor of 1 becomes a pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)
    return policy
