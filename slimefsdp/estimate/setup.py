"""Describes a training run; memory, traffic and time are estimated from this description."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.config import TrainerConfig
from slimefsdp.config.sections import AdamWSettings
from slimefsdp.model_spec import NEWTON_SCHULZ_STEPS, Adapters, ModelSpec

Sharding = Literal["full", "keep_parameters", "optimizer", "replicate"]
SHARDINGS: tuple[Sharding, ...] = ("full", "keep_parameters", "optimizer", "replicate")
Recompute = Literal["none", "full", "selective", "offload"]


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Holds the number of ranks along each mesh axis; cp ranks share a pack, and dp x cp ranks a copy of the model.

    The ranks of a tensor-parallel group count as one rank here, since each computes its part of the same tokens.
    """

    dp_replicate: int = 1
    dp: int = 1
    cp: int = 1

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp

    @property
    def shard_ranks(self) -> int:
        return self.dp * self.cp

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp * self.cp


@dataclass(frozen=True, slots=True)
class ByteSizes:
    """Holds the bytes per element of the tensors that a rank stores and sends, and the number of optimiser states."""

    compute: int = 2  # parameters and activations in forward and backward
    master: int = 4  # parameters, gradients and optimiser state at rest
    reduce: int = 4  # gradients in reductions over ranks
    optimizer_states: int = 2  # states per parameter: 2 for AdamW, 1 for momentum alone
    matrix_states: int | None = None  # states per parameter of layer matrices and adapters; None means optimizer_states
    state: float | None = None  # optimiser state; None means `master`

    def state_bytes(self, others: float, matrices: float) -> float:
        """Returns the bytes of optimiser state.

        Args:
            others: number of trained parameters outside of the layers' matrices.
            matrices: number of trained parameters in the layers' matrices.
        """
        matrix_states = self.optimizer_states if self.matrix_states is None else self.matrix_states
        element = self.master if self.state is None else self.state
        return element * (others * self.optimizer_states + matrices * matrix_states)

    @property
    def wide(self) -> int:
        """Returns the bytes per element of norms, softmaxes and sums of attention's gradients."""
        return max(4, self.compute)


@dataclass(frozen=True, slots=True)
class ColocatedModels:
    """Holds the models that share the policy's processes and sharding, and says where the reference rests."""

    reference: ModelSpec | None = None
    reference_rests_on_host: bool = True
    reference_computes_from_host: bool = False  # reference.offload=fsdp
    reference_takes_policys_place: bool = False  # reference.offload=swap
    critic: ModelSpec | None = None


@dataclass(frozen=True)
class TrainingSetup:
    """Describes a model and how it is trained: all that memory and time depend on, except the batch.

    A field that comes from a setting has the setting's name.
    """

    model: ModelSpec  # the part of the model that a rank computes, if tensor-parallel ranks share it
    mesh: MeshShape = field(default_factory=MeshShape)
    sharding: Sharding = "full"
    sizes: ByteSizes = field(default_factory=ByteSizes)
    recompute: Recompute = "none"
    cpu_offload: bool = False
    trained_share: float = 1.0  # trained parameters / all parameters, not counting adapters
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ("attention", "mlp")
    is_optimizer_fused: bool = False
    newton_schulz_steps: int = 0  # iterations of Muon; 0 with other optimisers
    entropy_grad: bool = False  # the loss differentiates entropies
    full_kl: bool = False  # the loss differentiates the KL over the whole vocabulary
    on_cpu: bool = False  # device and host share their memory, and gloo makes copies of what it sends
    colocated: ColocatedModels = field(default_factory=ColocatedModels)
    tp: int = 1  # tensor-parallel ranks; `mesh` counts them as one
    ep: int = 1  # expert-parallel ranks
    whole: ModelSpec | None = None  # the model that tensor-parallel ranks share; None if tp is 1

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """Returns the levels that this setup may have; no rank can hold the whole model if tp or ep is above 1."""
        return SHARDINGS if self.tp == self.ep == 1 else SHARDINGS[:-1]

    @property
    def shards(self) -> int:
        return 1 if self.sharding == "replicate" else self.mesh.shard_ranks

    @property
    def keeps_parameters_gathered(self) -> bool:
        return self.sharding in ("keep_parameters", "optimizer")

    @property
    def states_on_host(self) -> bool:
        """Returns whether parameters, gradients and optimiser state are in host memory that is not the device's."""
        return self.cpu_offload and not self.on_cpu

    @property
    def inputs_on_host(self) -> bool:
        """Returns whether the inputs of recomputed layers are in host memory that is not the device's."""
        return self.recompute == "offload" and not self.on_cpu

    @cached_property
    def adapters(self) -> Adapters | None:
        return None if self.lora_rank is None else _adapters(self.model, self.lora_rank, self.lora_targets)

    @property
    def adapter_parameters(self) -> int:
        return 0 if self.adapters is None else self.adapters.parameters

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of all FSDP units; a rank gathers no more at a time."""
        return self.model.parameters + self.adapter_parameters + self.model.layers * self._other_experts

    @property
    def trained_parameters(self) -> int:
        weights = self.model.parameters + self.model.layers * self._other_experts
        return round(weights * self.trained_share) + self.adapter_parameters

    @property
    def layer_parameters(self) -> int:
        """Returns the number of parameters of one decoder layer and its adapters, which are one FSDP unit."""
        return self.model.layer_parameters + self._other_experts + self.adapter_parameters // self.model.layers

    @property
    def trained_layer_parameters(self) -> int:
        weights = self.model.layer_parameters + self._other_experts
        return round(weights * self.trained_share) + self.adapter_parameters // self.model.layers

    @property
    def _other_experts(self) -> int:
        """Returns the number of a layer's expert parameters that a rank gathers, minus the number in `model`.

        `model` counts 1 / tp of these parameters, and a rank gathers 1 / ep of them. The result is negative if ep > tp.
        """
        if self.model.experts == 1:
            return 0
        experts = self.model.experts * self.model.expert_parameters
        return experts * self.tp // self.ep - experts

    def recomputed_among(self, layers: int) -> int:
        """Returns how many of the first `layers` decoder layers are recomputed in backward."""
        return 0 if self.recompute == "none" else layers

    @property
    def recomputed_share(self) -> float:
        """Returns the share of the decoder layers whose forward, with its communication, runs again in backward."""
        return self.recomputed_among(self.model.layers) / self.model.layers

    @property
    def storage_settings(self) -> str:
        """Returns the settings for activations and states, as overrides on a command line."""
        text = f"model.activation_checkpointing={self.recompute}"
        return text + (" fsdp.cpu_offload=true" if self.cpu_offload else "")

    @property
    def settings(self) -> str:
        """Returns the settings for sharding, activations and states, as overrides on a command line."""
        return f"fsdp.sharding={self.sharding} {self.storage_settings}"

    @property
    def reference_setup(self) -> TrainingSetup | None:
        """Returns the setup of the colocated reference model, in which nothing is trained.

        Returns None without such a model.
        """
        model = self.colocated.reference
        return None if model is None else replace(self, model=model, trained_share=0.0, lora_rank=None)

    @property
    def critic_setup(self) -> TrainingSetup | None:
        """Returns the setup of the colocated critic; None without a critic.

        All parameters of the critic are trained, unless it has adapters. `is_tied` is set because a critic has no
        weight for a head over the vocabulary.
        """
        if (model := self.colocated.critic) is None:
            return None
        share = 1.0 if self.lora_rank is None else 0.0
        return replace(self, model=replace(model, is_tied=True), trained_share=share)


def setup_of(
    config: TrainerConfig,
    model: ModelSpec,
    mesh: MeshShape,
    *,
    on_cpu: bool,
    reference: ModelSpec | None = None,
    critic: ModelSpec | None = None,
) -> TrainingSetup:
    """Returns the setup that settings describe, with `full` sharding if fsdp.sharding is auto.

    Args:
        model: the whole model, like `reference` and `critic`.
        mesh: the actual mesh, because mesh.dp in the settings may be auto.
        reference, critic: included if the settings colocate this model with the policy.
    """
    precision, optim, lora = config.precision, config.optim, config.lora
    compute = ELEMENT_BYTES[precision.compute_dtype]
    master = max(4, compute)
    has_reference = config.needs_reference and config.reference.is_colocated
    has_critic = config.algorithm == "ppo" and config.critic.is_colocated
    trained = model.trained_parameters(config.model.frozen or ()) / model.parameters
    tp = config.mesh.tp
    return TrainingSetup(
        model=model.over(tp),
        mesh=mesh,
        tp=tp,
        ep=config.mesh.ep,
        whole=model if tp > 1 else None,
        sharding="full" if config.fsdp.sharding == "auto" else config.fsdp.sharding,
        sizes=ByteSizes(
            compute=compute,
            master=master,
            reduce=master if precision.reduce_dtype == "auto" else ELEMENT_BYTES[precision.reduce_dtype],
            optimizer_states=1 if optim.name == "sgd" else 2,
            matrix_states=1 if optim.name == "muon" else None,
            state={"auto": None, "bfloat16": 2, "8bit": 1 + 4 / 256}[  # includes the scales of blocks
                optim.state_dtype if isinstance(optim, AdamWSettings) else "auto"
            ],
        ),
        recompute=config.model.activation_checkpointing,
        cpu_offload=config.fsdp.cpu_offload,
        trained_share=trained if lora.rank is None else 0.0,
        lora_rank=lora.rank,
        lora_targets=tuple(lora.targets),
        is_optimizer_fused=optim.name != "sgd",
        newton_schulz_steps=NEWTON_SCHULZ_STEPS if optim.name == "muon" else 0,
        entropy_grad=config.loss.entropy_coefficient != 0,
        full_kl=config.kl_estimator == "full",
        on_cpu=on_cpu,
        colocated=ColocatedModels(
            reference=reference.over(tp) if reference and has_reference and not config.reference_is_policy else None,
            reference_rests_on_host=config.reference.offload != "none",
            reference_computes_from_host=config.reference.offload == "fsdp",
            reference_takes_policys_place=config.reference.offload == "swap",
            critic=critic.over(tp) if critic and has_critic else None,
        ),
    )


@lru_cache(maxsize=64)
def _adapters(model: ModelSpec, rank: int, targets: tuple[str, ...]) -> Adapters:
    return model.adapters(rank, targets)
