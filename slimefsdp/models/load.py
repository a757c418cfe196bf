"""From a Hugging Face folder to a sharded PolicyModel, each rank reading only the slices it keeps.

The model is built without memory for its parameters, sharded, given memory for the local shards, and filled straight
from the safetensors files. Buffers (rotary frequencies, embedding scales) are never built empty: they are computed for
real and survive. Whatever a checkpoint lacks, has too much of, or holds as NaN is an error, never a random weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimefsdp.attention.register import register_attention
from slimefsdp.errors import ModelError
from slimefsdp.models.folder import ModelFolder, check_architecture
from slimefsdp.models.policy import PolicyModel
from slimefsdp.parallel.agree import run_together
from slimefsdp.parallel.fsdp import apply_fsdp

# rotary frequencies that follow the longest position of a batch: a sample's log-probs would depend on its pack
_PACK_DEPENDENT_ROPE = ("dynamic", "longrope")
TIED_HEAD = "lm_head.weight"
# the findings that ranks agree on; of several about one tensor the largest counts
_FINE, _NOT_FINITE, _NOT_TIED, _UNREADABLE = range(4)


def load_policy(
    folder: ModelFolder,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    device: torch.device,
    activation_checkpointing: bool,
) -> PolicyModel:
    """Collective: the folder's model, sharded over the one-axis `mesh`, its weights loaded.

    Raises:
        ModelError: on every rank alike; the folder cannot be loaded faithfully.
    """
    built: list[PolicyModel] = []

    def build() -> None:  # every rank reads its own copy of the folder, and copies differ
        built.append(build_policy(folder, master_dtype, activation_checkpointing=activation_checkpointing))
        check_tensor_names(built[0], folder)

    run_together(build, mesh.get_group())
    (policy,) = built
    apply_fsdp(policy, mesh, compute_dtype, master_dtype)
    materialise(policy, device)
    read_weights(policy, folder, mesh.get_group())
    return policy


def build_policy(folder: ModelFolder, master_dtype: torch.dtype, *, activation_checkpointing: bool) -> PolicyModel:
    """The model of a folder, its parameters on the meta device in `master_dtype`, its buffers real.

    Raises:
        ModelError: an architecture or feature that cannot be trained faithfully here.
    """
    config = _supported_config(folder)
    attention = register_attention()
    try:
        with _parameters_on_meta():
            hf = AutoModelForCausalLM.from_config(config, dtype=master_dtype, attn_implementation=attention)
    except Exception as error:  # not every release checks the values when it reads them
        raise _unusable_config(folder, error) from error
    hf.tie_weights()
    if activation_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    hf.train()  # checkpointing is on in train mode only; there is no dropout that the mode could change
    return PolicyModel(hf)


def check_tensor_names(policy: PolicyModel, folder: ModelFolder) -> None:
    """Compares the checkpoint's tensors with the model's parameters before anything is read.

    Raises:
        ModelError: a tensor is missing, surplus, or of another shape.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in policy.named_weights()}
    if policy.has_tied_embeddings and TIED_HEAD in folder.tensors:  # saved although it is the embedding: compared later
        wanted[TIED_HEAD] = tuple(policy.hf.get_output_embeddings().weight.shape)
    for name, shape in wanted.items():
        entry = folder.tensors.get(name)
        if entry is None:
            raise _wrong_tensor(name, f"is missing from {folder.path}", "export the model again, with every weight")
        if entry.shape != shape:
            raise _wrong_tensor(
                name,
                f"has shape {list(entry.shape)}, config.json implies {list(shape)}",
                "use the config it was saved with",
            )
        if entry.dtype not in ("F64", "F32", "BF16", "F16"):
            raise _wrong_tensor(name, f"is {entry.dtype} in {entry.file.name}", "quantised weights cannot be trained")
    surplus = sorted(set(folder.tensors) - set(wanted))
    if surplus:
        raise _wrong_tensor(
            surplus[0],
            f"is in {folder.tensors[surplus[0]].file.name} but not in a {folder.model_type} model"
            + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            "check that config.json belongs to these weights",
        )


def materialise(policy: PolicyModel, device: torch.device) -> None:
    """Gives every (sharded) parameter memory on `device`; buffers move there with their values; ties stay tied."""
    # under every name, also where two share a tensor: to_empty parts them, as it does tied parameters
    buffers = {name: buffer.to(device) for name, buffer in policy.named_buffers(remove_duplicate=False)}
    tied = policy.has_tied_embeddings
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])
    if tied:
        policy.hf.get_output_embeddings().weight = policy.hf.get_input_embeddings().weight


@torch.no_grad()
def read_weights(policy: PolicyModel, folder: ModelFolder, group: dist.ProcessGroup) -> None:
    """Fills the local shards from the folder's safetensors files, slices only; a collective call.

    Raises:
        ModelError: on every rank alike, when any rank met an unreadable file, a non-finite weight, or a separate
            `lm_head.weight` that differs from the embedding the config ties it to.
    """
    named = policy.named_weights()
    names = [name for name, _ in named]
    # one finding per tensor, agreed over all ranks: a rank-local error must never leave the others in a collective
    findings = [_fill(folder, name, parameter) for name, parameter in named]
    if policy.has_tied_embeddings and TIED_HEAD in folder.tensors:
        embedding = policy.hf.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        names.append(TIED_HEAD)
        findings.append(_compare_tied_head(folder, embedding))
    agreed = torch.tensor(findings, dtype=torch.int32, device=named[0][1].device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    for name, finding in zip(names, agreed.tolist(), strict=True):
        file = folder.tensors[name].file
        if finding == _UNREADABLE:
            raise _wrong_tensor(name, f"cannot be read from {file}", "copy the model folder again")
        if finding == _NOT_FINITE:
            raise _wrong_tensor(name, f"holds NaN or infinity in {file.name}", "use a checkpoint with finite weights")
        if finding == _NOT_TIED:
            raise _wrong_tensor(
                name,
                "differs from the embedding, but config.json says tie_word_embeddings=true",
                "set tie_word_embeddings to false, or drop lm_head.weight",
            )


def _fill(folder: ModelFolder, name: str, parameter: nn.Parameter) -> int:
    """Fills the local shard of one parameter; returns what is wrong with it."""
    try:
        rows = _read_rows(folder, name, _local_rows(parameter))
    except Exception:
        return _UNREADABLE
    local = _local(parameter)
    local.copy_(rows)
    return _FINE if torch.isfinite(local).all() else _NOT_FINITE


def _compare_tied_head(folder: ModelFolder, embedding: nn.Parameter) -> int:
    """A tied checkpoint may hold the head a second time: it must be what was loaded as the embedding."""
    try:
        rows = _read_rows(folder, TIED_HEAD, _local_rows(embedding))
    except Exception:
        return _UNREADABLE
    return _FINE if torch.equal(rows.to(embedding.device, embedding.dtype), _local(embedding)) else _NOT_TIED


def _supported_config(folder: ModelFolder) -> PretrainedConfig:
    check_architecture(folder)
    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _unusable_config(folder, error) from error
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {value.get("rope_type") for value in (rope, *rope.values()) if isinstance(value, dict)}
    refused = {
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "quantization_config": getattr(config, "quantization_config", None),
        "rope_type": next((kind for kind in _PACK_DEPENDENT_ROPE if kind in rope_types), None),
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", None),
    }
    for name, value in refused.items():
        if value:
            raise ModelError(
                f"{name}={value!r} in {folder.path / 'config.json'} cannot be computed exactly on packed sequences",
                field="model.path",
                hint=f"use a model without {name}",
            )
    return config


def build_for_sampling(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The architecture of a folder with transformers' own attention, its weights empty until somebody sends them."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    with _parameters_on_meta():
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    hf.tie_weights()
    policy = PolicyModel(hf)
    materialise(policy, device)
    return policy.hf.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, new parameters take no memory and no initialisation, while buffers are computed as always.

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


def _local_rows(parameter: nn.Parameter) -> tuple[int, int]:
    """[start, end) of dim 0 that this rank keeps."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], offset[0] + shape[0]


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _read_rows(folder: ModelFolder, name: str, rows: tuple[int, int]) -> torch.Tensor:
    start, end = rows
    with safe_open(Path(folder.tensors[name].file), framework="pt") as file:
        return file.get_slice(name)[start:end]


def _unusable_config(folder: ModelFolder, error: Exception) -> ModelError:
    return ModelError(
        f"transformers cannot make a model of {folder.path / 'config.json'}: {type(error).__name__}: {error}",
        field="model.path",
        hint="correct config.json, or export the model again",
    )


def _wrong_tensor(name: str, problem: str, hint: str) -> ModelError:
    return ModelError(f"tensor {name!r} {problem}", field="model.path", hint=hint)
