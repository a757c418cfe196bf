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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from slimefsdp.attention.register import register_attention
from slimefsdp.errors import ModelError
from slimefsdp.models.folder import ModelFolder
from slimefsdp.models.policy import PolicyModel

# model_type -> what its packing was verified against; an architecture is added here together with its test
SUPPORTED_MODELS = ("qwen3", "qwen2", "llama", "mistral", "gemma3_text")
# rotary frequencies that follow the longest position of a batch: a sample's log-probs would depend on its pack
_PACK_DEPENDENT_ROPE = ("dynamic", "longrope")


def build_policy(folder: ModelFolder, master_dtype: torch.dtype, *, activation_checkpointing: bool) -> PolicyModel:
    """The model of a folder, its parameters on the meta device in `master_dtype`, its buffers real.

    Raises:
        ModelError: an architecture or feature that cannot be trained faithfully here.
    """
    config = _supported_config(folder)
    with _parameters_on_meta():
        hf = AutoModelForCausalLM.from_config(config, dtype=master_dtype, attn_implementation=register_attention())
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
    spare = {"lm_head.weight"} if policy.has_tied_embeddings else set()
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
    surplus = sorted(set(folder.tensors) - set(wanted) - spare)
    if surplus:
        raise _wrong_tensor(
            surplus[0],
            f"is in {folder.tensors[surplus[0]].file.name} but not in a {folder.model_type} model"
            + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            "check that config.json belongs to these weights",
        )


def materialise(policy: PolicyModel, device: torch.device) -> None:
    """Gives every (sharded) parameter memory on `device`; buffers move there with their values; ties stay tied."""
    buffers = {name: buffer.to(device) for name, buffer in policy.named_buffers()}
    tied = policy.has_tied_embeddings
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    if tied:  # to_empty gives each of two names its own memory
        policy.hf.get_output_embeddings().weight = policy.hf.get_input_embeddings().weight


@torch.no_grad()
def read_weights(policy: PolicyModel, folder: ModelFolder, group: dist.ProcessGroup) -> None:
    """Fills the local shards from the folder's safetensors files, slices only; a collective call.

    Raises:
        ModelError: on every rank alike, when any rank met an unreadable file, a non-finite weight, or a separate
            `lm_head.weight` that differs from the embedding the config ties it to.
    """
    named = policy.named_weights()
    # one flag per parameter, agreed over all ranks: a rank-local error must never leave the others in a collective
    findings = torch.zeros(len(named) + 1, dtype=torch.int32, device=named[0][1].device)
    for index, (name, parameter) in enumerate(named):
        try:
            rows = _read_rows(folder, name, _local_rows(parameter))
        except Exception:
            findings[index] = 2
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(rows)
        findings[index] = int(not torch.isfinite(local).all())
        if name == _embedding_name(policy) and policy.has_tied_embeddings and "lm_head.weight" in folder.tensors:
            head = _read_rows(folder, "lm_head.weight", _local_rows(parameter))
            findings[-1] = int(not torch.equal(head, rows))
    dist.all_reduce(findings, op=dist.ReduceOp.MAX, group=group)
    bad = findings.tolist()
    for (name, _), finding in zip(named, bad[:-1], strict=True):
        if finding == 2:
            raise _wrong_tensor(name, f"cannot be read from {folder.tensors[name].file}", "copy the model folder again")
        if finding == 1:
            raise _wrong_tensor(
                name,
                f"holds NaN or infinity in {folder.tensors[name].file.name}",
                "use a checkpoint with finite weights",
            )
    if bad[-1]:
        raise _wrong_tensor(
            "lm_head.weight",
            "differs from the embedding, but config.json says tie_word_embeddings=true",
            "set tie_word_embeddings to false, or drop lm_head.weight",
        )


def _supported_config(folder: ModelFolder) -> PretrainedConfig:
    if folder.model_type not in SUPPORTED_MODELS:
        raise ModelError(
            f"model_type {folder.model_type!r} is not supported",
            field="model.path",
            hint=f"use one of {', '.join(SUPPORTED_MODELS)}, each verified against plain Hugging Face",
        )
    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {folder.path / 'config.json'}: {error}",
            field="model.path",
            hint="correct config.json, or export the model again",
        ) from None
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


def _read_rows(folder: ModelFolder, name: str, rows: tuple[int, int]) -> torch.Tensor:
    start, end = rows
    with safe_open(Path(folder.tensors[name].file), framework="pt") as file:
        return file.get_slice(name)[start:end]


def _embedding_name(policy: PolicyModel) -> str:
    embedding = policy.hf.get_input_embeddings().weight
    return next(name for name, parameter in policy.named_weights() if parameter is embedding)


def _wrong_tensor(name: str, problem: str, hint: str) -> ModelError:
    return ModelError(f"tensor {name!r} {problem}", field="model.path", hint=hint)
