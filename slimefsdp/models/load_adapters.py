"""Adapters of a PEFT folder beside a model's weights: each rank fills the rows that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.mesh import Mesh, local_shard
from slimefsdp.errors import ConfigError, ModelError, short_text
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.load_weights import ReadBy, local_rows, read_tensors
from slimefsdp.models.lora import AdaptedMatrix, Lora, adapted_matrices, add_adapters, base_digest
from slimefsdp.models.lora_modules import stacks_of
from slimefsdp.models.peft_folder import (
    BASE_DIGEST,
    BASE_DTYPE,
    FIELD,
    PeftFolder,
    stack_modules,
    tensor_name,
    wrong_tensor,
)


def add_adapters_of(
    folder: PeftFolder, model: DecoderModel, lora: Lora, *, base: Path, base_dtype: torch.dtype
) -> None:
    """As `add_adapters`, for the tensors of a folder, which `read_adapters` fills in after sharding.

    Args:
        base: the model's folder, for errors.

    Raises:
        ModelError: a tensor is of no module of the model, or of another shape, or one that target_modules asks for is
            missing.
        ConfigError: as `add_adapters`; or lora.targets names other modules than the folder has tensors for.
    """
    check_is_of(folder, model, base)
    add_adapters(model, lora, base_dtype=base_dtype)
    held, chosen = set(folder.targets), {matrix.name for matrix in adapted_matrices(model)}
    if differing := sorted(held ^ chosen):
        does, has = ("names", "no") if differing[0] in chosen else ("does not name", "a")
        raise ConfigError(
            f"lora.targets={short_text(list(lora.targets))} {does} {differing[0]}, for which lora.path={folder.path} "
            f"has {has} tensor",
            field="lora.targets",
            hint="remove lora.targets: they are those of the folder",
        )


def check_is_of(folder: PeftFolder, model: DecoderModel, base: Path) -> None:
    """Whether a folder's adapters are of this model, with or without adapters of its own, and all of them are there.

    Args:
        base: the model's folder, for errors.

    Raises:
        ModelError: as `add_adapters_of`.
    """
    linears = {name: module for name, module in model.hf.named_modules() if isinstance(module, nn.Linear)}
    folder.check_base({f"{name}.weight": tuple(module.weight.shape) for name, module in linears.items()}, base)
    _check_stacks(folder, model, base)
    held = set(folder.targets)
    head = model.hf.get_output_embeddings()
    for name, module in linears.items():
        is_left_out = folder.chooses_all_linear and module is head
        if name not in held and not is_left_out and folder.chooses(name):
            targets = short_text(folder.config["target_modules"])
            raise wrong_tensor(
                tensor_name(name, "A"),
                f"is missing from {folder.path}, where target_modules={targets} chooses {name}",
                "save the adapters again, or name the model that they were trained on as model.path",
            )


def _check_stacks(folder: PeftFolder, model: DecoderModel, base: Path) -> None:
    """Whether the model has the stacks of experts that the folder has adapters of, and no others that it asks for."""
    own = {name: module for name, module in model.hf.named_modules() if stacks_of(module)}
    held = folder.stacks
    for owner in sorted(held.keys() | own.keys()):
        wanted, module = folder.parameters_of(owner), own.get(owner)
        # not by get_parameter, which finds the sum in its place while another thread has the module compute
        parameters = {} if module is None else dict(module.named_parameters(recurse=False))
        known = [] if module is None else stacks_of(module)
        chosen = [name for name in known if name in wanted]
        names = stack_modules(f"{owner}.{name}" for name in chosen)
        if owner in held and set(wanted) - set(known):
            raise wrong_tensor(
                tensor_name(owner, "A"),
                f"of {folder.path} is of experts, where target_parameters names {', '.join(wanted)}, and the model at "
                f"{base} has no such stacks of experts there",
                "name the model that the adapters were trained on as model.path",
            )
        for name in chosen:
            assert module is not None
            experts, rows, columns = parameters[name].shape
            if module.is_transposed:
                rows, columns = columns, rows
            shapes = {"A": (folder.rank * experts, columns), "B": (rows, folder.rank * experts)}
            for matrix, shape in shapes.items():
                tensor = tensor_name(names[f"{owner}.{name}"], matrix)
                entry = folder.tensors.get(tensor)
                if entry is None:
                    raise wrong_tensor(
                        tensor,
                        f"is missing from {folder.path}, where target_parameters chooses {owner}.{name}",
                        "save the adapters again, or name the model that they were trained on as model.path",
                    )
                if tuple(entry.shape) != shape:
                    raise wrong_tensor(
                        tensor,
                        f"of {folder.path} has shape {list(entry.shape)}, and {owner}.{name} of the model at {base} "
                        f"needs {list(shape)}",
                        "name the model that the adapters were trained on as model.path",
                    )


def read_adapters(
    folder: PeftFolder, model: DecoderModel, mesh: Mesh, *, base: Path, read_by: ReadBy = "every_rank"
) -> None:
    """Collective: fills the local shards of A and B from the folder's file.

    Args:
        base, read_by: the model's folder, and who opens files: as `slimefsdp.models.load_weights.read_weights`.

    Raises:
        ModelError: on every rank alike; a value is not finite, the file cannot be read, or the folder says that its
            adapters were trained beside other weights.
    """
    fill_matrices(folder, adapted_matrices(model), mesh.group, device=mesh.device, read_by=read_by)
    check_beside(folder, model, lambda: base_digest(model, mesh.shard_group), base)


def fill_matrices(
    folder: PeftFolder,
    matrices: Sequence[AdaptedMatrix],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    read_by: ReadBy = "every_rank",
) -> None:
    """Collective: fills this rank's rows of A and B, which have the folder's rank, from its file.

    Args:
        group, device, read_by: as `slimefsdp.models.load_weights.read_weights`.

    Raises:
        ModelError: on every rank alike; a value is not finite, or the file cannot be read.
    """
    inside = stack_modules(matrix.name for matrix in matrices if matrix.is_stack)
    named: list[tuple[str, nn.Parameter]] = []
    stacked: list[tuple[str, nn.Parameter]] = []
    for matrix in matrices:
        module = inside.get(matrix.name, matrix.name)
        named.append((tensor_name(module, "A"), matrix.a))  # that of a stack has its rows in the file's order, too
        (stacked if matrix.is_stack else named).append((tensor_name(module, "B"), matrix.b))
    try:
        read_tensors(named, folder.tensors, group, device=device, read_by=read_by)
        for name, b in stacked:
            experts, rows, rank = b.shape
            whole = nn.Parameter(torch.empty(rows, rank * experts, dtype=b.dtype, device=b.device), requires_grad=False)
            read_tensors([(name, whole)], folder.tensors, group, device=device, read_by=read_by)
            start, end = local_rows(b)
            local_shard(b).detach().copy_(whole.view(rows, rank, experts).permute(2, 0, 1)[start:end])
    except ModelError as error:
        error.field = FIELD
        raise


def check_beside(folder: PeftFolder, model: DecoderModel, digest: Callable[[], str], base: Path) -> None:
    """Whether a folder says that its adapters were trained beside other weights than the model's.

    Args:
        digest: the model's `base_digest`, which is asked for only where the folder has one to compare with.
        base: the model's folder, for errors.

    Raises:
        ModelError: it does.
    """
    dtype = str(model.named_weights()[0][1].dtype).removeprefix("torch.")
    recorded = folder.metadata.get(BASE_DIGEST)
    if recorded is None or folder.metadata.get(BASE_DTYPE) != dtype:  # of other bits for the same weights
        return
    if (found := digest()) != recorded:
        raise ModelError(
            f"the adapters of {folder.path} were trained beside weights {recorded} (in {dtype}), and the model at "
            f"{base} has weights {found}",
            field=FIELD,
            hint="name the model that they were trained on as model.path",
        )
