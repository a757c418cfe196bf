"""Lets several adapters take turns in one model: the model's A and B become the tensors of the current one, uncopied.

Every version has the shapes of the model's adapters; a smaller rank is padded with zeros, as in a trainer with room for
more. A version therefore computes the same bits as its trainer, and all versions have the same size.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.lora import (
    AdaptedMatrix,
    adapted_matrices,
    adapted_modules,
    base_digest,
    check_base_weights,
    check_is_of,
    fill_matrices,
)
from slimefsdp.models.peft_folder import read_peft_folder


@dataclass(frozen=True, slots=True, eq=False)
class AdapterVersion:
    """The tensors A and B of each adapted matrix, in the model's order, and the factor on B A x."""

    tensors: list[torch.Tensor]
    scale: float


class AdapterVersions:
    """Lets several versions of adapters take turns in one model.

    Args:
        policy: a model with adapters and whole weights; its own A and B are freed.
        base: the folder of the base model, for errors.
    """

    def __init__(self, policy: PolicyModel, base: Path) -> None:
        self._policy, self._base = policy, base
        self._modules = list(adapted_modules(policy).values())
        self._matrices = adapted_matrices(policy)
        self._parameters = [parameter for matrix in self._matrices for parameter in (matrix.a, matrix.b)]
        self._rank = self._matrices[0].a.shape[-2] if self._matrices else 0
        self.version_bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._dtype, self._device = policy.named_weights()[0][1].dtype, policy.named_weights()[0][1].device
        self._in_model: AdapterVersion | None = None
        self._hashing = threading.Lock()
        self._digest: str | None = None  # digest of the base; computed when a folder has one to compare with
        self._empty()

    def read(self, folder: Path) -> AdapterVersion:
        """Reads the adapters of a PEFT folder; modules without one get zeros. May be called from any thread.

        Raises:
            ModelError: the folder is malformed or of another model, its rank is too high, or it has adapters of modules
                that have none here.
        """
        try:
            return self._read(folder)
        except (ModelError, ConfigError) as error:
            error.field = "folder"
            raise

    @torch.no_grad()
    def _read(self, path: Path) -> AdapterVersion:
        folder = read_peft_folder(path)
        if folder.rank > self._rank:
            raise ModelError(
                f"the adapters of {path} have rank {folder.rank}, and there is room for lora.rank={self._rank}",
                hint=f"set lora.rank={folder.rank}, or train adapters of a smaller rank",
            )
        known = {matrix.name for matrix in self._matrices}
        if surplus := [name for name in folder.targets if name not in known]:
            raise ModelError(
                f"{path} has an adapter of {surplus[0]}, which lora.targets does not choose",
                hint="choose it in lora.targets",
            )
        check_is_of(folder, self._policy, self._base)
        check_base_weights(folder, self._policy, self._base_digest, self._base)
        tensors = [torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in self._shapes]
        matrices: list[AdaptedMatrix] = []
        targets = set(folder.targets)
        for index, matrix in enumerate(self._matrices):
            if matrix.name not in targets:
                continue
            a, b = tensors[2 * index : 2 * index + 2]
            if folder.rank < self._rank:  # read into contiguous tensors, which are copied into the larger ones below
                a, b = (torch.empty_like(part) for part in _of_rank(folder.rank, a, b))
            matrices.append(
                matrix._replace(a=nn.Parameter(a, requires_grad=False), b=nn.Parameter(b, requires_grad=False))
            )
        fill_matrices(folder, matrices, None, device=self._device)
        if folder.rank < self._rank:
            indices = {matrix.name: index for index, matrix in enumerate(self._matrices)}
            for matrix in matrices:
                a, b = tensors[2 * indices[matrix.name] : 2 * indices[matrix.name] + 2]
                for part, read in zip(_of_rank(folder.rank, a, b), (matrix.a, matrix.b), strict=True):
                    part.copy_(read)
        return AdapterVersion(tensors, folder.alpha / folder.rank)

    def take_turn(self, version: AdapterVersion | None) -> None:
        """Makes the model compute with these adapters; None: without any, bit-equal to the base model."""
        for module in self._modules:
            module.is_on = version is not None
        if version is None or version is self._in_model:
            return
        for parameter, tensor in zip(self._parameters, version.tensors, strict=True):
            parameter.data = tensor
        for module in self._modules:
            module.scale = version.scale
        self._in_model = version

    def forget(self, version: AdapterVersion) -> None:
        if version is self._in_model:
            self._empty()

    def _empty(self) -> None:
        self._in_model = None
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)

    def _base_digest(self) -> str:
        with self._hashing:
            if self._digest is None:
                self._digest = base_digest(self._policy, None)
            return self._digest


def _of_rank(rank: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the parts of A, [(experts,) room, in], and of B, [(experts,) out, room], that adapters of a rank fill."""
    return a[..., :rank, :], b[..., :rank]
