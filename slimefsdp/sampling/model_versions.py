"""Lets several whole models of one architecture take turns in one module: its weights become the current version's.

A version has the parameters of the base in its dtype. Read from an exported folder, it computes the same bits as the
trainer that exported it. The base's own weights stay in memory.
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
    """The parameters of one version, in the model's order."""

    tensors: list[torch.Tensor]


class ModelVersions:
    """Lets several versions of whole weights take turns in one model.

    Args:
        policy: a model without adapters, with the whole weights of the base.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._parameters = [parameter for _, parameter in policy.named_weights()]
        self._base = ModelVersion([parameter.data for parameter in self._parameters])
        self._in_model = self._base
        self.version_bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._building = threading.Lock()  # `load_for_sampling` patches torch classes while it builds

    def read(self, folder: Path) -> ModelVersion:
        """Reads the weights of a Hugging Face folder. May be called from any thread.

        Raises:
            ModelError: the folder is malformed, or of another model.
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
        return ModelVersion([parameter.data for _, parameter in policy.named_weights()])

    def take_turn(self, version: ModelVersion | None) -> None:
        """Makes the model compute with these weights; None: with those of the base."""
        turn = version or self._base
        if turn is self._in_model:
            return
        for parameter, tensor in zip(self._parameters, turn.tensors, strict=True):
            parameter.data = tensor
        self._in_model = turn

    def forget(self, version: ModelVersion) -> None:
        if version is self._in_model:
            self.take_turn(None)
