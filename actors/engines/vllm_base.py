"""What a service with vLLM knows of its base without holding it: which adapters are beside it, and its bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slimefsdp.config import RunConfig
from slimefsdp.errors import ModelError
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.models.peft_folder import BASE_DIGEST, BASE_DTYPE, PeftFolder, read_peft_folder

if TYPE_CHECKING:  # whoever only starts an engine needs no torch
    import torch


@dataclass(frozen=True, slots=True)
class Base:
    """Facts of the model that a trainer of the same settings freezes.

    Args:
        path: its folder.
        dtype: of its weights.
        digest: of their bits, as a trainer records it beside adapters.
        rank: the largest of adapters.
        targets: names of the modules that adapters may be of -> the (rows, columns) of their weights.
        version_bytes: of adapters of that rank.
    """

    path: Path
    dtype: torch.dtype
    digest: str
    rank: int
    targets: Mapping[str, tuple[int, int]]
    version_bytes: int

    @property
    def modules(self) -> list[str]:
        """Last parts of the targets' names, by which vLLM is told of them."""
        return sorted({name.rpartition(".")[2] for name in self.targets})

    def check(self, path: Path) -> PeftFolder:
        """The adapters of a folder, which are of this base.

        Raises:
            ModelError: the folder is malformed, of another model or base, of more than the rank, or has adapters of a
                module that has none here.
        """
        try:
            folder = read_peft_folder(path)
            surplus = [name for name in folder.targets if name not in self.targets]
            if folder.rank > self.rank or surplus:
                has = f"an adapter of {surplus[0]}" if surplus else f"rank {folder.rank}"
                raise ModelError(
                    f"{path} has {has}, and the service has room for lora.rank={self.rank} of lora.targets",
                    hint="raise lora.rank, or choose the module in lora.targets",
                )
            folder.check_base({f"{name}.weight": shape for name, shape in self.targets.items()}, self.path)
            recorded = folder.metadata.get(BASE_DIGEST)
            same_dtype = folder.metadata.get(BASE_DTYPE) == str(self.dtype).removeprefix("torch.")
            if recorded is not None and same_dtype and recorded != self.digest:
                raise ModelError(
                    f"the adapters of {path} were trained beside weights {recorded}, and the model at {self.path} has "
                    f"weights {self.digest}",
                    hint="name the model that they were trained on as model.path",
                )
        except ModelError as error:
            error.field = "folder"
            raise
        return folder

    def write_empty(self, path: Path, source: ModelFolder) -> None:
        """Writes a folder at `path` with an adapter that changes nothing.

        Raises:
            CheckpointError: the disk refused.
        """
        import torch

        from slimefsdp.checkpoint.export import AdapterFacts, write_peft_folder
        from slimefsdp.io.safetensors_file import TensorSpec

        name, (rows, columns) = next(iter(self.targets.items()))
        matrices = [
            (f"{name}.lora_A", torch.zeros(1, columns, dtype=self.dtype)),
            (f"{name}.lora_B", torch.zeros(rows, 1, dtype=self.dtype)),
        ]
        specs = [TensorSpec(matrix, self.dtype, tuple(tensor.shape)) for matrix, tensor in matrices]
        facts = AdapterFacts(1, 1.0, source.path, None, str(self.dtype).removeprefix("torch."))
        write_peft_folder(path, specs, matrices, facts)


def base_of(config: RunConfig, folder: ModelFolder) -> Base:
    """Reads the model of the settings once, on the host, and forgets it.

    Raises:
        ModelError, ConfigError: as `slimefsdp.models.build.load_for_sampling`.
    """
    import torch

    from slimefsdp.models.build import load_for_sampling
    from slimefsdp.models.lora import adapted_matrices, base_digest
    from slimefsdp.training.build import compute_dtype, lora_of

    lora = lora_of(config)
    assert lora is not None
    policy = load_for_sampling(folder, compute_dtype(config), torch.device("cpu"), lora)
    matrices = adapted_matrices(policy)
    targets = {matrix.name: (len(matrix.b), matrix.a.shape[-1]) for matrix in matrices}
    size = sum(matrix.a.nbytes + matrix.b.nbytes for matrix in matrices)
    return Base(folder.path, compute_dtype(config), base_digest(policy, None), lora.rank, targets, size)
