"""Lets several versions of adapters, or of whole weights, take turns in one model without copies."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.models.build import load_for_sampling
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.hf_folder import read_model_folder
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
    """Holds the tensors A and B of each adapted matrix, in the model's order, and the factor on B A x."""

    tensors: list[torch.Tensor]
    scale: float


class AdapterVersions:
    """Lets several versions of adapters take turns in one model, whose A and B become those of the current version.

    Every version has the shapes of the model's adapters; adapters of a smaller rank are padded with zeros, as in a
    trainer. A version therefore computes the same bits as its trainer, and all versions have the same size.

    Args:
        policy: a model with adapters and unsharded weights; its own A and B are freed.
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
        self._digest: str | None = None  # digest of the base model; computed when a folder first has one to compare
        self._empty()

    def read(self, folder: Path) -> AdapterVersion:
        """Reads the adapters of a PEFT folder; modules without an adapter there get zeros. Any thread may call this.

        Raises:
            ModelError: the folder is malformed or belongs to another model, its rank is too high, or it adapts modules
                that the model does not adapt.
        """
        try:
            return self._read(folder)
        except (ModelError, ConfigError) as error:
            error.field = "folder"
            raise

    @torch.no_grad()
    def _read(self, path: Path) -> AdapterVersion:
        folder = read_peft_folder(path)
        folder.check_room(self._rank, {matrix.name for matrix in self._matrices})
        check_is_of(folder, self._policy, self._base)
        check_base_weights(folder, self._dtype, self._base_digest, self._base)
        tensors = [torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in self._shapes]
        # files can be read only into contiguous tensors of the folder's rank, which are then copied into padded tensors
        read: list[AdaptedMatrix] = []
        rooms: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, matrix in enumerate(self._matrices):
            if matrix.name in folder.targets:
                a, b = tensors[2 * index : 2 * index + 2]
                rooms.append((a[..., : folder.rank, :], b[..., : folder.rank]))
                a, b = (nn.Parameter(torch.empty_like(part), requires_grad=False) for part in rooms[-1])
                read.append(matrix._replace(a=a, b=b))
        fill_matrices(folder, read, None, device=self._device)
        for (a, b), matrix in zip(rooms, read, strict=True):
            a.copy_(matrix.a)
            b.copy_(matrix.b)
        return AdapterVersion(tensors, folder.alpha / folder.rank)

    def take_turn(self, version: AdapterVersion | None) -> None:
        """Makes the model compute with these adapters; None means without adapters, bit-equal to the base model."""
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


class ModelVersions:
    """Lets several versions of whole weights take turns in one model.

    A version is a list of tensors in the model's order. A version that is read from an exported folder computes the
    same bits as the trainer that exported it. The weights of the base model stay in memory.

    Args:
        policy: a model without adapters, with the unsharded weights of the base model.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._parameters = [parameter for _, parameter in policy.named_weights()]
        self._base = [parameter.data for parameter in self._parameters]
        self._in_model = self._base
        self.version_bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._building = threading.Lock()  # `load_for_sampling` patches torch classes while it builds

    def read(self, folder: Path) -> list[torch.Tensor]:
        """Reads the weights of a Hugging Face folder. Any thread may call this.

        Raises:
            ModelError: the folder is malformed, or belongs to another model.
        """
        dtype, device = self._parameters[0].dtype, self._parameters[0].device
        try:
            model_folder = read_model_folder(folder)
            with self._building:
                policy = load_for_sampling(model_folder, dtype, device)
            if not policy.is_like(self._policy):
                raise ModelError(
                    f"{folder} is of another model than the one that is sampled",
                    hint="give a folder that was exported from it",
                )
        except ModelError as error:
            error.field = "folder"
            raise
        return [parameter.data for _, parameter in policy.named_weights()]

    def take_turn(self, version: list[torch.Tensor] | None) -> None:
        """Makes the model compute with these weights; None means the weights of the base model."""
        turn = self._base if version is None else version
        if turn is self._in_model:
            return
        for parameter, tensor in zip(self._parameters, turn, strict=True):
            parameter.data = tensor
        self._in_model = turn

    def forget(self, version: list[torch.Tensor]) -> None:
        if version is self._in_model:
            self.take_turn(None)


Versions = AdapterVersions | ModelVersions
"""Reads versions of weights from folders, and switches a model between them and the base (None)."""
