"""Whole models of one architecture that take turns in it: whose turn it is, the model's own weights are those tensors.

A version has the base's parameters, in its dtype: read from an exported folder it computes the bits of the trainer that
exported it. The base's own weights stay beside them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from slimefsdp.errors import ModelError
from slimefsdp.models.build import load_for_sampling
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.hf_folder import read_model_folder


@dataclass(frozen=True, slots=True, eq=False)
class ModelVersion:
    """Every parameter, in the model's order."""

    tensors: list[torch.Tensor]


class ModelVersions:
    """Lets several versions of whole weights take turns in one model.

    Args:
        policy: without adapters, its weights whole; they are the base's.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._parameters = [parameter for _, parameter in policy.named_weights()]
        self._base = ModelVersion([parameter.data for parameter in self._parameters])
        self._in_model = self._base
        self.version_bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._building = threading.Lock()  # `load_for_sampling` changes torch's classes while it builds

    def read(self, folder: Path) -> ModelVersion:
        """Reads the weights of a Hugging Face folder. Safe in any thread.

        Raises:
            ModelError: the folder is malformed, or of another model.
        """
        dtype, device = self._parameters[0].dtype, self._parameters[0].device
        try:
            found = read_model_folder(folder)
            with self._building:
                policy = load_for_sampling(found, dtype, device)
            if not policy.is_like(self._policy):
                raise ModelError(
                    f"{folder} is of another model than the one that is sampled",
                    hint="give a folder that was exported from it",
                )
        except ModelError as error:
            error.field = "folder"
            raise
        return ModelVersion([parameter.data for _, parameter in policy.named_weights()])

    def take_turn(self, version: ModelVersion | None) -> None:
        """Makes the model compute with these weights; None: with the base's."""
        turn = version or self._base
        if turn is self._in_model:
            return
        for parameter, tensor in zip(self._parameters, turn.tensors, strict=True):
            parameter.data = tensor
        self._in_model = turn

    def forget(self, version: ModelVersion) -> None:
        if version is self._in_model:
            self.take_turn(None)
