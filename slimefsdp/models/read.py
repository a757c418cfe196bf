"""Fills a sharded model from safetensors files: each rank reads the slices it keeps, and of experts only its own.

Whatever a folder lacks, has too much of, or holds as NaN is an error on every rank, never a random weight.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.errors import ModelError
from slimefsdp.models.folder import ModelFolder
from slimefsdp.models.hub_names import Part, is_no_weight, stored_parts
from slimefsdp.models.policy import PolicyModel

TIED_HEAD = "lm_head.weight"
# the findings that ranks agree on; of several about one tensor the largest counts
_FINE, _NOT_FINITE, _NOT_TIED, _UNREADABLE = range(4)


def check_tensor_names(policy: PolicyModel, folder: ModelFolder) -> None:
    """Compares the checkpoint's tensors with the model's parameters before anything is read.

    Raises:
        ModelError: a tensor is missing, surplus, or of another shape.
    """
    wanted = {part.name: part.shape for _, parts in _parts_by_parameter(policy, folder) for part in parts}
    if _has_second_head(policy, folder):  # saved although it is the embedding: compared later
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
    surplus = sorted(
        name for name in folder.tensors if name not in wanted and not is_no_weight(folder.model_type, name)
    )
    if surplus:
        raise _wrong_tensor(
            surplus[0],
            f"is in {folder.tensors[surplus[0]].file.name} but not in a {folder.model_type} model"
            + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            "check that config.json belongs to these weights",
        )


@torch.no_grad()
def read_weights(policy: PolicyModel, folder: ModelFolder, group: dist.ProcessGroup) -> None:
    """Fills the local shards from the folder's safetensors files, slices only; a collective call.

    Raises:
        ModelError: on every rank alike, when any rank met an unreadable file, a non-finite weight, or a separate
            `lm_head.weight` that differs from the embedding the config ties it to.
    """
    names: list[str] = []
    # one finding per tensor, agreed over all ranks: a rank-local error must never leave the others in a collective
    findings: list[int] = []
    device = next(policy.parameters()).device
    with _OpenFiles(folder) as files:
        for parameter, parts in _parts_by_parameter(policy, folder):
            names.extend(part.name for part in parts)
            findings.extend(_fill(files, part, parameter) for part in parts)
        if _has_second_head(policy, folder):
            embedding = policy.hf.get_input_embeddings().weight
            assert isinstance(embedding, nn.Parameter)
            names.append(TIED_HEAD)
            findings.append(_compare_tied_head(files, embedding))
    agreed = torch.tensor(findings, dtype=torch.int32, device=device)
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


def local_rows(parameter: nn.Parameter) -> tuple[int, int]:
    """[start, end) of dim 0 that this rank keeps; empty, it starts where the parameter ends."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], offset[0] + shape[0]


def local_shard(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows of a parameter, or all of one that is not sharded; writing to them changes the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _parts_by_parameter(policy: PolicyModel, folder: ModelFolder) -> list[tuple[nn.Parameter, list[Part]]]:
    return [
        (parameter, stored_parts(folder.model_type, name, parameter.shape, folder.tensors))
        for name, parameter in policy.named_weights()
    ]


def _has_second_head(policy: PolicyModel, folder: ModelFolder) -> bool:
    return policy.has_tied_embeddings and TIED_HEAD in folder.tensors


def _fill(files: _OpenFiles, part: Part, parameter: nn.Parameter) -> int:
    """Fills this rank's share of one stored tensor; returns what is wrong with it."""
    start, end = local_rows(parameter)
    target = local_shard(parameter)
    if part.expert is not None:
        if not start <= part.expert < end:
            return _FINE  # another rank's expert
        target = target[part.expert - start, part.start : part.end]
        start, end = 0, part.shape[0]
    try:
        rows = files.rows(part.name, start, end)
    except Exception:
        return _UNREADABLE
    target.copy_(rows)
    return _FINE if torch.isfinite(target).all() else _NOT_FINITE


def _compare_tied_head(files: _OpenFiles, embedding: nn.Parameter) -> int:
    """A tied checkpoint may hold the head a second time: it must be what was loaded as the embedding."""
    try:
        rows = files.rows(TIED_HEAD, *local_rows(embedding))
    except Exception:
        return _UNREADABLE
    return _FINE if torch.equal(rows.to(embedding.device, embedding.dtype), local_shard(embedding)) else _NOT_TIED


class _OpenFiles:
    """The folder's files, each opened once: opening parses the header, and mixtures have thousands of tensors."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows [start, end) of a tensor, in its own dtype."""
        path = Path(self._folder.tensors[name].file)
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        rows: torch.Tensor = self._open[path].get_slice(name)[start:end]
        return rows


def _wrong_tensor(name: str, problem: str, hint: str) -> ModelError:
    return ModelError(f"tensor {name!r} {problem}", field="model.path", hint=hint)
