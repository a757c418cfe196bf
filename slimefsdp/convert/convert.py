"""Converts models between Hugging Face folders, torch.distributed.checkpoint folders and a run's checkpoints.

A conversion runs in one process without Ray or a process group. It compares all names and shapes with the model of a
config.json before it reads a tensor, holds one parameter in memory at a time, and writes the target folder atomically.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slimefsdp.checkpoint.export import EXPORT_DTYPES, AdapterFacts, write_model_folder, write_peft_folder
from slimefsdp.checkpoint.manifest import MANIFEST, architecture_of, check_identity, check_info
from slimefsdp.checkpoint.shards import SavedShards
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.convert.dcp import DcpFolder, SavedTensor, read_dcp_folder, read_saved, write_dcp_folder
from slimefsdp.errors import CheckpointError, byte_text
from slimefsdp.io.safetensors_file import TensorSpec
from slimefsdp.models.build import build_policy
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.hf_folder import ModelFolder, Part, is_no_weight, read_model_folder, stored_parts
from slimefsdp.models.load_weights import TIED_HEAD, OpenTensors, check_tensor_names

Note = Callable[[str], None]  # receives progress, one line at a time
# keys under which trainers save state that is not a weight of the model
_TRAINING_STATE = re.compile(
    r"(.*\.)?(optim\w*|\w*scheduler\w*|exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|step)(\..*)?"
)
_NOTED_EVERY_BYTES = 1 << 30
_MODEL, _REFERENCE = "model.", "reference."  # prefixes of tensor names in a checkpoint


def hugging_face_to_dcp(source: ModelFolder, target: Path, note: Note) -> list[TensorSpec]:
    """Writes a folder's weights for `torch.distributed.checkpoint.load`; returns the specs of the written tensors.

    The keys are those of the model's `state_dict()` in transformers: the experts of a layer are one tensor, and a head
    that is tied to the embedding has both names.

    Raises:
        ModelError: the folder's weights do not fit its config.json.
        CheckpointError: `target` is taken, or the disk is full or fails.
    """
    policy = build_policy(source, torch.float32)
    check_tensor_names(policy, source)
    parts = {
        name: stored_parts(source.model_type, name, parameter.shape, source.tensors)
        for name, parameter in policy.named_weights()
    }
    with OpenTensors(source.tensors) as files:
        specs = _specs(
            policy, parts, {part.name: files.dtype(part.name) for stored in parts.values() for part in stored}
        )

        def read(part: Part) -> torch.Tensor:
            tensor = torch.empty(part.shape, dtype=files.dtype(part.name))
            files.read(part.name, 0, tensor.view(-1))
            return tensor

        embedding = _embedding_name(policy)
        if embedding is not None:
            head = next(spec for spec in specs if spec.name == embedding)
            if TIED_HEAD in source.tensors:
                _require_tied(read(Part(TIED_HEAD, head.shape)), _assembled(head, parts[embedding], read), source.path)
            specs = [*specs, TensorSpec(TIED_HEAD, head.dtype, head.shape)]
            parts[TIED_HEAD] = parts[embedding]
        count, by_name = _progress(len(specs), note), {spec.name: spec for spec in specs}

        def tensor_of(name: str) -> torch.Tensor:
            count(by_name[name])
            return _assembled(by_name[name], parts[name], read)

        write_dcp_folder(target, specs, tensor_of)
    return specs


def dcp_to_hugging_face(
    source: Path, target: Path, like: ModelFolder, *, dtype: str | None, note: Note
) -> list[TensorSpec]:
    """Writes the model of a DCP folder as a Hugging Face folder; returns the specs of the read parameters.

    The keys in the DCP folder are the model's names, optionally all with one prefix. The experts of a layer may be one
    tensor or separate tensors.

    Args:
        like: the folder from which config.json and the tokenizer are copied; its weights are not used.
        dtype: a name in `EXPORT_DTYPES`; None keeps the dtype of each tensor.

    Raises:
        CheckpointError: the folder is damaged, its weights do not fit that config.json, or `target` is taken.
    """
    folder = read_dcp_folder(source)
    policy = build_policy(like, torch.float32)
    prefix = _prefix(folder, policy)
    stored = {key.removeprefix(prefix): saved for key, saved in folder.tensors.items() if key.startswith(prefix)}
    parts = {
        name: stored_parts(like.model_type, name, parameter.shape, stored) for name, parameter in policy.named_weights()
    }
    embedding = _embedding_name(policy)
    wanted = {part.name: part.shape for pieces in parts.values() for part in pieces}
    if embedding is not None and TIED_HEAD in stored:
        wanted[TIED_HEAD] = parts[embedding][0].shape
    _check_tensors(folder, prefix, stored, wanted, like.model_type)
    specs = _specs(policy, parts, {name: saved.dtype for name, saved in stored.items()})
    passed_over = len(folder.tensors) + len(folder.others) - len(wanted)
    if passed_over:
        note(f"passed over {passed_over} entries that are no weights of the model")

    def read(part: Part) -> torch.Tensor:
        return read_saved(stored[part.name])

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        count = _progress(len(specs), note)
        for spec in specs:
            count(spec)
            tensor = _assembled(spec, parts[spec.name], read)
            if spec.name == embedding and TIED_HEAD in stored:
                _require_tied(read_saved(stored[TIED_HEAD]), tensor, source)
            yield spec.name, tensor
            del tensor

    write_model_folder(target, specs, tensors(), like, dtype=dtype)
    return specs


def checkpoint_to_hugging_face(
    source: Path, target: Path, like: Path | None, *, dtype: str | None, note: Note
) -> list[TensorSpec]:
    """Writes a run's checkpoint as a Hugging Face or PEFT folder; returns the specs of the read parameters.

    Args:
        source: see `CheckpointStore.find`; the whole checkpoint is verified first. A checkpoint of adapters is written
            as a PEFT folder.
        like: the model folder from which config.json and the tokenizer are copied; None means the run's model.path. A
            PEFT folder gets no copies, and only names this folder as its base model.
        dtype: a name in `EXPORT_DTYPES`; None means the dtype of the master weights.

    Raises:
        CheckpointError: there is no whole checkpoint, the checkpoint belongs to another model than `like`, or `target`
            is taken.
        ModelError: `like` is not a model folder.
    """
    manifest, folder, skipped = CheckpointStore.find(source)
    for error in skipped:
        note(f"passed over: {error.message}")
    note(f"reading {folder}")
    is_given = like is not None
    if like is None:
        settings = manifest.info.get("config")
        path = settings.get("model", {}).get("path") if isinstance(settings, dict) else None
        if not isinstance(path, str):
            raise CheckpointError(f"{folder} does not say which model it is of", field="--like", hint="give --like")
        like = Path(path)
    check_info(manifest.info, folder / MANIFEST)
    identity = manifest.info["identity"]
    if "lora.rank" in identity and not is_given:
        return _write_adapters(folder, identity, target, like, dtype, note)
    model = read_model_folder(like, field="--like", with_weights=False)
    _require_same_model(identity.get("config.json", {}), model, folder / MANIFEST, note)
    if "lora.rank" in identity:
        return _write_adapters(folder, identity, target, like, dtype, note)
    policy, saved = build_policy(model, torch.float32), SavedShards(folder)
    wanted = {name: tuple(parameter.shape) for name, parameter in policy.named_weights()}
    saved_specs = _weight_specs(saved)
    saved_shapes = {name: spec.shape for name, spec in saved_specs.items()}
    _check_names(folder, wanted, saved_shapes, surplus=saved_shapes.keys() - wanted.keys())
    specs = [saved_specs[name] for name in wanted]
    write_model_folder(target, specs, _weights(saved, specs, note), model, dtype=dtype)
    return specs


def _write_adapters(
    folder: Path, identity: dict[str, Any], target: Path, base: Path, dtype: str | None, note: Note
) -> list[TensorSpec]:
    if "model.path" not in identity:
        raise CheckpointError(
            f"{folder} is of a critic, and a PEFT folder has no place for its head",
            field="path",
            hint="name the policy's checkpoint; export_hf of the critic's group writes the merged model with its head",
        )
    saved = SavedShards(folder)
    specs = list(_weight_specs(saved).values())
    # this text, written by `slimefsdp.training.checkpointing`, ends with the digest
    digest = identity["model.path"].rpartition(" ")[2]
    facts = AdapterFacts(
        identity.get("adapter.rank", identity["lora.rank"]),
        identity["lora.alpha"],
        base,
        digest,
        identity["precision.compute_dtype"],
    )
    to_dtype = None if dtype is None else EXPORT_DTYPES[dtype]
    write_peft_folder(target, specs, _weights(saved, specs, note), facts, dtype=to_dtype)
    return specs


def _weight_specs(saved: SavedShards) -> dict[str, TensorSpec]:
    """Returns the specs of the saved parameters by the model's names, without optimiser state and reference model."""
    return {
        name: replace(spec, name=name)
        for key, spec in saved.specs.items()
        if key.startswith(_MODEL) and not (name := key.removeprefix(_MODEL)).startswith(_REFERENCE)
    }


def _weights(saved: SavedShards, specs: Sequence[TensorSpec], note: Note) -> Iterator[tuple[str, torch.Tensor]]:
    count = _progress(len(specs), note)
    for spec in specs:
        count(spec)
        yield spec.name, saved.read(_MODEL + spec.name)


def _require_same_model(saved: dict[str, Any], model: ModelFolder, file: Path, note: Note) -> None:
    """Compares the architectures, including rope_theta, norms and windows, which shapes do not show."""
    own = architecture_of(model.config)
    both = saved.keys() & own.keys()
    check_identity({name: saved[name] for name in both}, {name: own[name] for name in sorted(both)}, file)
    if one_sided := sorted(saved.keys() ^ own.keys()):  # releases of transformers write different default values
        note(f"not compared, since one of the two configurations lacks them: {', '.join(one_sided)}")


def _embedding_name(policy: PolicyModel) -> str | None:
    """Returns the name of the embedding if the head is tied to it; None if the head has its own parameter."""
    if not policy.has_tied_embeddings:
        return None
    embedding = policy.hf.get_input_embeddings().weight
    return next(name for name, parameter in policy.named_weights() if parameter is embedding)


def _specs(policy: PolicyModel, parts: dict[str, list[Part]], dtypes: dict[str, torch.dtype]) -> list[TensorSpec]:
    """Returns the specs of the model's parameters, each with a dtype that can hold all of the parameter's parts."""
    specs = []
    for name, parameter in policy.named_weights():
        dtype = dtypes[parts[name][0].name]
        for part in parts[name][1:]:
            dtype = torch.promote_types(dtype, dtypes[part.name])
        specs.append(TensorSpec(name, dtype, tuple(parameter.shape)))
    return specs


def _assembled(spec: TensorSpec, parts: Sequence[Part], read: Callable[[Part], torch.Tensor]) -> torch.Tensor:
    """Reads the parts of a parameter one after another and assembles them."""
    if parts[0].expert is None:
        return read(parts[0])
    whole = torch.empty(spec.shape, dtype=spec.dtype)
    for part in parts:
        whole[part.expert, part.start : part.end].copy_(read(part))
    return whole


def _require_tied(head: torch.Tensor, embedding: torch.Tensor, path: Path) -> None:
    if not torch.equal(head.to(embedding.dtype), embedding):
        raise CheckpointError(
            f"{path}: tensor {TIED_HEAD!r} differs from the embedding, but config.json says tie_word_embeddings=true",
            field="path",
            hint="use the config.json it was trained with",
        )


def _prefix(folder: DcpFolder, policy: PolicyModel) -> str:
    """Returns the prefix that the folder's keys have before the model's names; "" if they have none.

    Raises:
        CheckpointError: several prefixes are possible.
    """
    names = [name for name, _ in policy.named_weights() if ".experts." not in name]
    last = names[-1]
    prefixes = {
        key.removesuffix(last)
        for key in folder.tensors
        if (key == last or key.endswith(f".{last}")) and not _TRAINING_STATE.fullmatch(key)
    }
    prefixes = {prefix for prefix in prefixes if all(prefix + name in folder.tensors for name in names)} or prefixes
    if "" in prefixes or not prefixes:
        return ""
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{folder.path} holds several models, under {', '.join(map(repr, sorted(prefixes)))}",
            field="path",
            hint="save the one you want into a folder of its own",
        )
    return prefixes.pop()


def _check_tensors(
    folder: DcpFolder,
    prefix: str,
    stored: dict[str, SavedTensor],
    wanted: dict[str, tuple[int, ...]],
    model_type: str,
) -> None:
    """Checks that the folder has the wanted weights in valid dtypes, and no other weights under the prefix."""
    shapes = {name: saved.shape for name, saved in stored.items() if not _TRAINING_STATE.fullmatch(name)}
    surplus = {name for name in shapes if name not in wanted and not is_no_weight(model_type, name)}
    _check_names(folder.path, wanted, shapes, surplus, prefix)
    for name in wanted:
        if stored[name].dtype not in EXPORT_DTYPES.values():
            problem = f"{folder.path}: tensor {prefix + name!r} is {stored[name].dtype}"
            raise CheckpointError(problem, field="path", hint=f"convert it to one of {', '.join(EXPORT_DTYPES)}")


def _check_names(
    path: Path,
    wanted: dict[str, tuple[int, ...]],
    shapes: dict[str, tuple[int, ...]],
    surplus: set[str],
    prefix: str = "",
) -> None:
    missing = [name for name in wanted if name not in shapes]
    problems = [
        f"{what} {prefix + names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for what, names in (("lacks", missing), ("has, beyond the model,", sorted(surplus)))
        if names
    ]
    if misshapen := [name for name, shape in wanted.items() if shapes.get(name, shape) != shape]:
        name = misshapen[0]
        shape = f"shape {list(shapes[name])}, where config.json implies {list(wanted[name])}"
        problems.append(f"has {prefix + name!r} of {shape}")
    if problems:
        raise CheckpointError(
            f"{path} {'; '.join(problems)}",
            field="path",
            hint="check that config.json belongs to these weights; the keys are the model's names, or all have one "
            "prefix",
        )


def _progress(total: int, note: Note) -> Callable[[TensorSpec], None]:
    """Returns a function to call before each parameter is read; it counts them, and reports once per gigabyte."""
    tensors = nbytes = noted = 0

    def count(spec: TensorSpec) -> None:
        nonlocal tensors, nbytes, noted
        tensors, nbytes = tensors + 1, nbytes + spec.nbytes
        if nbytes - noted >= _NOTED_EVERY_BYTES:
            noted = nbytes
            note(f"{tensors} of {total} tensors, {byte_text(nbytes)}")

    return count
