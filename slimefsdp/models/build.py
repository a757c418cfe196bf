"""Builds a sharded model from a Hugging Face folder; each rank holds only the rows it keeps.

The model is built without memory for its parameters, sharded, given memory for the local shards, and filled straight
from the safetensors files, or drawn at random where that is asked for. Buffers (rotary frequencies, embedding scales)
are never built empty: they are computed for real and survive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.hf_interface import register_attention
from slimefsdp.attention.select import AttentionShape
from slimefsdp.distributed.compiler import require_compiler
from slimefsdp.distributed.consensus import run_together
from slimefsdp.distributed.fsdp import Parallelism, parallelize
from slimefsdp.distributed.mesh import Mesh, local_shard
from slimefsdp.errors import ModelError
from slimefsdp.models.decoder import DecoderModel, PolicyModel
from slimefsdp.models.hf_folder import ModelFolder, check_architecture, refuse_unpackable
from slimefsdp.models.load_weights import ReadBy, check_tensor_names, read_weights
from slimefsdp.models.lora import Lora, add_adapters, add_adapters_of, draw_adapters, read_adapters
from slimefsdp.models.peft_folder import PeftFolder
from slimefsdp.models.random_init import draw_weights

AnyModel = TypeVar("AnyModel", bound=DecoderModel)


@dataclass(frozen=True, slots=True)
class Trains:
    """Which parameters of a model are trained."""

    frozen: Sequence[str] = ()  # patterns of `DecoderModel.freeze`
    # adapters, which then are all that is trained: other weights are frozen, and stored in the dtype they compute in
    lora: Lora | None = None
    adapters: PeftFolder | None = None  # of `lora`, to begin with; None: they are drawn at random


# noise that training adds on purpose: a ratio of two policies would measure it
_NOISE = re.compile(r"\w*dropout\w*|\w*_pdrop|router_jitter_noise")


def load_model(
    kind: type[AnyModel],
    folder: ModelFolder,
    mesh: Mesh,
    how: Parallelism,
    *,
    attention_for: Callable[[AttentionShape], Attention] | None = None,
    random_seed: int | None = None,
    trains: Trains | None = None,
    read_by: ReadBy = "every_rank",
) -> AnyModel:
    """Collective: returns the folder's model, sharded over the mesh, with its weights loaded.

    Args:
        kind: PolicyModel, or ValueModel, whose head is 0 if the folder has none.
        how: dtypes, sharded units, placement and recomputation.
        attention_for: makes the model's attention, or refuses the model; None: attention within one rank.
        random_seed: draws the weights instead, the same on every mesh; None: they are read.
        trains: None: every parameter is trained.
        read_by: first_rank: only rank 0 opens files of the folder, and sends the others their rows.

    Raises:
        ModelError: on every rank alike; the folder cannot be loaded faithfully.
        ConfigError: as `parallelize`, `DecoderModel.freeze`, `add_adapters_of`; or what `how` asks for needs a compiler
            that some rank lacks.
    """
    chosen = trains or Trains()
    built: list[AnyModel] = []

    def build() -> None:  # every rank reads its own copy of the folder, and copies differ
        if how.compile:
            require_compiler(mesh.device.type)
        built.append(build_model(kind, folder, how.master_dtype))
        if attention_for is not None:
            built[0].attention = attention_for(built[0].attention_shape())
        if random_seed is None:
            check_tensor_names(built[0], folder)
        choose_what_trains(built[0], folder, chosen, base_dtype=how.compute_dtype)

    run_together(build, mesh.group)
    (model,) = built
    parallelize(model, mesh, how)
    host = torch.device("cpu")
    materialise(model, mesh.device, host if how.cpu_offload else None, buffer_dtype=how.buffer_dtype)
    if random_seed is None:
        read_weights(model, folder, mesh.group, device=mesh.device, read_by=read_by)
    else:
        draw_weights(model, build_model(kind, folder, torch.float32), random_seed)
    _zero_what_no_folder_holds(model, folder)
    if chosen.adapters is not None:
        read_adapters(chosen.adapters, model, mesh, base=folder.path, read_by=read_by)
    elif chosen.lora is not None:
        draw_adapters(model, chosen.lora.seed)
    return model


load_policy = partial(load_model, PolicyModel)


def choose_what_trains(model: DecoderModel, folder: ModelFolder, trains: Trains, *, base_dtype: torch.dtype) -> None:
    """Freezes parameters and adds adapters to a model that is not sharded yet.

    Raises:
        ConfigError, ModelError: as `DecoderModel.freeze`, `add_adapters` and `add_adapters_of`.
    """
    model.freeze(trains.frozen)
    if trains.lora is None:
        return
    if trains.adapters is None:
        add_adapters(model, trains.lora, base_dtype=base_dtype)
    else:
        add_adapters_of(trains.adapters, model, trains.lora, base=folder.path, base_dtype=base_dtype)


def build_model(kind: type[AnyModel], folder: ModelFolder, master_dtype: torch.dtype) -> AnyModel:
    """Builds the model of a folder, its parameters on the meta device in `master_dtype`, its buffers real.

    Args:
        kind: PolicyModel or ValueModel.

    Raises:
        ModelError: an architecture or feature that cannot be trained faithfully here.
    """
    config = _supported_config(folder)
    attention, experts = register_attention(), _experts_implementation(config, master_dtype)
    try:
        with _parameters_on_meta():
            hf = AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=False,
                dtype=master_dtype,
                attn_implementation=attention,
                experts_implementation=experts,
            )
    except Exception as error:  # not every release checks the values when it reads them
        raise _unusable_config(folder, error) from error
    hf.tie_weights()
    model = kind(hf)
    return model.train()  # there is no noise left that the mode could switch on


build_policy = partial(build_model, PolicyModel)


@torch.no_grad()
def _zero_what_no_folder_holds(model: DecoderModel, folder: ModelFolder) -> None:
    held = {name for name, _ in model.weights_in(folder.tensors)}
    for name, parameter in model.named_weights():
        if name not in held:
            local_shard(parameter).zero_()


def materialise(
    model: DecoderModel,
    device: torch.device,
    parameters_on: torch.device | None = None,
    *,
    buffer_dtype: torch.dtype | None = None,
) -> None:
    """Allocates every (sharded) parameter on `device`; buffers move there with their values; tied parameters stay tied.

    Args:
        parameters_on: another device for the parameters alone.
        buffer_dtype: of floating-point buffers; None: as the model made them.
    """
    # under every name, also where two share a tensor: to_empty parts them, as it does tied parameters
    buffers = {
        name: buffer.to(device, buffer_dtype if buffer.is_floating_point() else None)
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    tied = model.has_tied_embeddings
    model.to_empty(device=parameters_on or device)
    for name, buffer in buffers.items():
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, buffer)
    if tied:
        model.hf.get_output_embeddings().weight = model.hf.get_input_embeddings().weight


def _supported_config(folder: ModelFolder) -> PretrainedConfig:
    check_architecture(folder)
    try:
        # not from folder.path, which only rank 0 may have; and not by its class, which transformers decides on
        with TemporaryDirectory() as copy:
            (Path(copy) / "config.json").write_text(json.dumps(folder.config))
            config = AutoConfig.from_pretrained(copy, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _unusable_config(folder, error) from error
    refuse_unpackable(config.to_dict(), folder.path / "config.json")  # also what transformers filled in
    _switch_noise_off(config)
    return config


def _experts_implementation(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """Returns how transformers computes the experts of a layer; None is its default, one grouped matrix product.

    Torch has no such product for float64, nor for rows that do not begin at multiples of 16 bytes. Then the experts
    are computed one after the other. Either way their weights are one parameter, which has a gradient (of zeros) also
    for experts that no token visits.
    """
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 0
    has_aligned_rows = all(size % 8 == 0 for size in (config.hidden_size, inner))  # 8 numbers of bfloat16 are 16 bytes
    return None if dtype != torch.float64 and has_aligned_rows else "eager"


def _switch_noise_off(config: PretrainedConfig) -> None:
    """Sets dropout rates and router jitter of a built configuration to 0; the folder's config.json stays as it is."""
    for name, value in config.to_dict().items():
        if _NOISE.fullmatch(name) and isinstance(value, int | float):
            setattr(config, name, 0.0)


def build_for_sampling(path: Path, dtype: torch.dtype, device: torch.device, lora: Lora | None = None) -> PolicyModel:
    """Builds the architecture of a folder with uninitialised weights, to be filled by weight updates.

    Args:
        lora: adds adapters to the same modules as the trainer.

    Raises:
        ModelError: this transformers calls attention in another way than ours expects.
        ConfigError: as `add_adapters`.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    with _parameters_on_meta():
        hf = AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=False,
            dtype=dtype,
            attn_implementation=register_attention(),
            experts_implementation=_experts_implementation(config, dtype),
        )
    hf.tie_weights()
    policy = PolicyModel(hf)
    if lora is not None:
        add_adapters(policy, lora, base_dtype=dtype)
    materialise(policy, device)
    return policy.eval().requires_grad_(False)


def load_for_sampling(
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    lora: Lora | None = None,
    *,
    buffer_dtype: torch.dtype | None = None,
    random_seed: int | None = None,
) -> PolicyModel:
    """Loads the whole model of a folder in this process, with weights bit-equal to those that a trainer freezes under
    adapters.

    Args:
        dtype: of weights and adapters, what the trainer computes in.
        lora: adds adapters to these modules, uninitialised.
        buffer_dtype: of floating-point buffers; None: as the model made them.
        random_seed: draw the weights from it instead; None: read them.

    Raises:
        ModelError: the folder cannot be loaded faithfully. ConfigError: as `add_adapters`.
    """
    policy = build_policy(folder, dtype)
    if random_seed is None:
        check_tensor_names(policy, folder)
    if lora is not None:
        add_adapters(policy, lora, base_dtype=dtype)
    materialise(policy, device, buffer_dtype=buffer_dtype)
    if random_seed is None:
        read_weights(policy, folder, None, device=device)
    else:
        draw_weights(policy, build_policy(folder, torch.float32), random_seed)
    return policy.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, new parameters take no memory and are not initialised, while buffers are computed as always.

    `torch.device("meta")` would leave the buffers that no checkpoint stores (rotary frequencies) as garbage.
    """
    register: Callable[..., None] = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _unusable_config(folder: ModelFolder, error: Exception) -> ModelError:
    return ModelError(
        f"transformers cannot make a model of {folder.path / 'config.json'}: {type(error).__name__}: {error}",
        field="model.path",
        hint="correct config.json, or export the model again",
    )
