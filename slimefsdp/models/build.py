"""Builds a sharded model from a Hugging Face folder; each rank allocates only its own shards.

The model is built with parameters on the meta device, and sharded. Then memory is allocated for the local shards, and
they are filled from the safetensors files or drawn at random. Buffers (rotary frequencies, embedding scales) are never
on the meta device: they are computed when the model is built, and kept.
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
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import AttentionShape
from slimefsdp.distributed.collectives import run_together
from slimefsdp.distributed.float8 import require_float8
from slimefsdp.distributed.fsdp import Parallelism, parallelize, require_compiler
from slimefsdp.distributed.mesh import Mesh, local_shard
from slimefsdp.errors import ModelError
from slimefsdp.models.decoder import DecoderModel, PolicyModel, register_attention
from slimefsdp.models.hf_folder import ModelFolder, check_architecture, refuse_unpackable
from slimefsdp.models.load_weights import ReadBy, check_tensor_names, draw_weights, read_weights
from slimefsdp.models.lora import Lora, add_adapters, add_adapters_of, draw_adapters, read_adapters
from slimefsdp.models.peft_folder import PeftFolder

AnyModel = TypeVar("AnyModel", bound=DecoderModel)


@dataclass(frozen=True, slots=True)
class Trains:
    """Describes which parameters of a model are trained."""

    frozen: Sequence[str] = ()  # patterns for `DecoderModel.freeze`
    # adds these adapters and trains only them: all other weights are frozen and stored in the compute dtype
    lora: Lora | None = None
    adapters: PeftFolder | None = None  # initial values of the adapters; None means random ones


# settings of random noise in training: importance ratios would measure the noise instead of the policy's change
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
        attention_for: returns the attention for a model of this shape, or raises; None means attention within one rank.
        random_seed: seed of random weights, which are equal on every mesh; None means that the weights are read.
        trains: which parameters are trained; None means all.
        read_by: with "first_rank", only rank 0 opens files of the folder, and broadcasts their content.

    Raises:
        ModelError: the folder cannot be loaded faithfully; raised on every rank.
        ConfigError: see `parallelize`, `DecoderModel.freeze`, `add_adapters_of` and `require_float8`; or `how.compile`
            is set and some rank has no compiler.
    """
    chosen = trains or Trains()

    def build() -> AnyModel:  # ranks may read different copies of the folder, so any rank may fail
        if how.compile:
            require_compiler(mesh.device.type)
        if how.float8 != "none":
            require_float8(how.float8, mesh.device)
        model = build_model(kind, folder, how.master_dtype)
        if attention_for is not None:
            model.attention = attention_for(model.attention_shape())
        if random_seed is None:
            check_tensor_names(model, folder)
        choose_what_trains(model, folder, chosen, base_dtype=how.compute_dtype)
        return model

    model = run_together(build, mesh.group)
    parallelize(model, mesh, how)
    materialise(model, mesh.device, torch.device("cpu") if how.cpu_offload else None)
    if random_seed is None:
        read_weights(model, folder, mesh.group, device=mesh.device, read_by=read_by)
    else:
        draw_weights(model, build_model(kind, folder, torch.float32), random_seed)
    in_folder = {name for name, _ in model.weights_in(folder.tensors)}
    for name, parameter in model.named_weights():
        if name not in in_folder:  # a new critic's head
            local_shard(parameter.detach()).zero_()
    if chosen.adapters is not None:
        read_adapters(chosen.adapters, model, mesh, base=folder.path, read_by=read_by)
    elif chosen.lora is not None:
        draw_adapters(model, chosen.lora.seed)
    return model


load_policy = partial(load_model, PolicyModel)


def choose_what_trains(model: DecoderModel, folder: ModelFolder, trains: Trains, *, base_dtype: torch.dtype) -> None:
    """Freezes parameters and adds adapters to a model that is not sharded yet.

    Raises:
        ConfigError, ModelError: see `DecoderModel.freeze`, `add_adapters` and `add_adapters_of`.
    """
    model.freeze(trains.frozen)
    if trains.lora is None:
        return
    if trains.adapters is None:
        add_adapters(model, trains.lora, base_dtype=base_dtype)
    else:
        add_adapters_of(trains.adapters, model, trains.lora, base=folder.path, base_dtype=base_dtype)


def build_model(kind: type[AnyModel], folder: ModelFolder, master_dtype: torch.dtype) -> AnyModel:
    """Builds the model of a folder with parameters on the meta device, in `master_dtype`, and real buffers.

    Args:
        kind: PolicyModel or ValueModel.

    Raises:
        ModelError: the architecture, or a feature that config.json asks for, is not supported.
    """
    check_architecture(folder)
    try:
        # config.json is written to a temporary folder because this rank may have no folder.path; transformers chooses
        # the class of the model by the file's content
        with TemporaryDirectory() as copy:
            (Path(copy) / "config.json").write_text(json.dumps(folder.config))
            config = _read_config(Path(copy))
        refuse_unpackable(config.to_dict(), folder.path / "config.json")  # includes transformers' default values
        for name, value in config.to_dict().items():
            if _NOISE.fullmatch(name) and isinstance(value, int | float):
                setattr(config, name, 0.0)  # the folder's config.json is not changed
        hf = _on_meta(config, master_dtype)
    except ModelError:
        raise
    except Exception as error:  # some releases of transformers check the configuration only when they build the model
        raise ModelError(
            f"transformers cannot make a model of {folder.path / 'config.json'}: {type(error).__name__}: {error}",
            field="model.path",
            hint="correct config.json, or export the model again",
        ) from error
    return kind(hf).train()


build_policy = partial(build_model, PolicyModel)


def _read_config(folder: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    attention = register_attention()
    with _parameters_on_meta():
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=False,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=_experts_implementation(config, dtype),
        )
    hf.tie_weights()
    return hf


def materialise(model: DecoderModel, device: torch.device, parameters_on: torch.device | None = None) -> None:
    """Allocates every parameter (or its local shard) on `device`, and moves buffers there; tied parameters stay tied.

    Args:
        parameters_on: the device of the parameters; None means `device`.
    """
    # to_empty replaces a tensor that has several names by separate tensors, so each name's buffer is kept
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers(remove_duplicate=False)}
    tied = model.has_tied_embeddings
    model.to_empty(device=parameters_on or device)
    for name, buffer in buffers.items():
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, buffer)
    if tied:
        model.hf.get_output_embeddings().weight = model.hf.get_input_embeddings().weight


def _experts_implementation(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """Returns the name of transformers' implementation of experts; None means its default, a grouped matrix product.

    Torch has no grouped product for float64, nor for rows that do not start at multiples of 16 bytes. The
    implementation is then "eager", which computes experts one after another. Under both implementations the weights of
    all experts are one parameter, so an expert without tokens has a gradient of zeros.
    """
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 0
    has_aligned_rows = all(size % 8 == 0 for size in (config.hidden_size, inner))  # 8 numbers of bfloat16 are 16 bytes
    return None if dtype != torch.float64 and has_aligned_rows else "eager"


def build_for_sampling(path: Path, dtype: torch.dtype, device: torch.device, lora: Lora | None = None) -> PolicyModel:
    """Builds the architecture of a folder with uninitialised weights, to be filled by weight updates.

    Args:
        lora: adapters to add, with uninitialised matrices; must be the trainer's.

    Raises:
        ModelError, ConfigError: see `register_attention` and `add_adapters`.
    """
    policy = PolicyModel(_on_meta(_read_config(path), dtype))
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
    random_seed: int | None = None,
) -> PolicyModel:
    """Loads the whole model of a folder into this process.

    The weights are bit-equal to the frozen base weights of a trainer with adapters.

    Args:
        dtype: dtype of weights and adapters, equal to the trainer's compute dtype.
        lora: adapters to add, with uninitialised matrices.
        random_seed: seed of random weights; None means that the weights are read.

    Raises:
        ModelError: the folder cannot be loaded faithfully.
        ConfigError: see `add_adapters`.
    """
    policy = build_policy(folder, dtype)
    if random_seed is None:
        check_tensor_names(policy, folder)
    if lora is not None:
        add_adapters(policy, lora, base_dtype=dtype)
    materialise(policy, device)
    if random_seed is None:
        read_weights(policy, folder, None, device=device)
    else:
        draw_weights(policy, build_policy(folder, torch.float32), random_seed)
    return policy.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the block, new parameters are on the meta device, and buffers are computed as usual.

    `torch.device("meta")` would also lose the values of buffers that no checkpoint stores (rotary frequencies).
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
