"""The model's weights out of a checkpoint of a run, tensor by tensor, without the run: no group, no optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimefsdp.checkpoint.manifest import MANIFEST, Manifest
from slimefsdp.checkpoint.shards import writing_ranks
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.errors import CheckpointError, ModelError
from slimefsdp.io.checksummed_files import io_reported, read_json, whole
from slimefsdp.io.safetensors_file import TORCH_DTYPES, TensorSpec, read_rows
from slimefsdp.io.safetensors_header import TensorEntry, read_header, short

_PREFIX, _REFERENCE = "model.", "model.reference."


def find_checkpoint(source: Path) -> tuple[Path, Manifest, list[CheckpointError]]:
    """A checkpoint's folder, every byte of it verified, its manifest, and why newer ones were passed over.

    Args:
        source: the folder of a step, or a run.dir, or its checkpoints: then the newest whole one.

    Raises:
        CheckpointError: there is none, or the one asked for is torn or altered.
    """
    if (source / MANIFEST).exists():
        return source, CheckpointStore(source.parent).verify(source), []
    inside = source / "checkpoints"
    store = CheckpointStore(inside if inside.is_dir() else source)
    _, folder, skipped = store.newest_verified()
    return folder, store.manifest_of(folder), skipped


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows from `start` on of a tensor, in a rank's file."""

    start: int
    entry: TensorEntry

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + (self.entry.shape[0] if self.entry.shape else 1)


class SavedWeights:
    """The model's parameters in a verified checkpoint folder, under their names in memory.

    Raises:
        CheckpointError: naming tensor and file, where indices and files contradict each other or lack rows.
    """

    def __init__(self, folder: Path) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._rows: dict[str, list[_Rows]] = {}
        for rank in range(writing_ranks(folder)):
            self._add(folder / f"rank_{rank:05d}.json", folder / f"rank_{rank:05d}.safetensors")
        for name, spec in self.specs.items():
            self._rows[name] = _in_order(folder, spec, self._rows[name])

    def read(self, name: str) -> torch.Tensor:
        """One whole parameter; CheckpointError if the disk refuses."""
        spec = self.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        for rows in self._rows[name]:
            with io_reported(rows.entry.file, "load"), rows.entry.file.open("rb", buffering=0) as stream:
                target = whole[rows.start : rows.stop] if spec.shape else whole
                read_rows(stream, rows.entry, 0, rows.stop - rows.start, target)
        return whole

    def _add(self, index_file: Path, tensor_file: Path) -> None:
        index: Any = read_json(index_file)[0]
        with io_reported(tensor_file, "load"):
            try:
                entries = read_header(tensor_file)
                for key, piece in index["tensors"].items():
                    if not key.startswith(_PREFIX) or key.startswith(_REFERENCE):
                        continue
                    name, entry = key.removeprefix(_PREFIX), entries[key]
                    spec = TensorSpec(name, TORCH_DTYPES[piece["dtype"]], tuple(map(whole, piece["global_shape"])))
                    shape = (whole(piece["rows"]), *spec.shape[1:]) if spec.shape else ()
                    if (entry.dtype, entry.shape) != (piece["dtype"], shape) or spec != self.specs.get(name, spec):
                        raise _refused(f"tensor {short(key)} is not what {index_file.name} says", tensor_file)
                    self.specs[name] = spec
                    self._rows.setdefault(name, []).append(_Rows(whole(piece["start"]), entry))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _refused(f"contradicts {tensor_file.name}: {error!r}", index_file) from error
            except ModelError as error:
                raise _refused(error.message, tensor_file) from error


def _in_order(folder: Path, spec: TensorSpec, found: list[_Rows]) -> list[_Rows]:
    """Each row once: of several ranks that hold the same, the first."""
    chosen: list[_Rows] = []
    row, total = 0, spec.shape[0] if spec.shape else 1
    for rows in sorted(found, key=lambda rows: rows.start):
        if rows.start == row < rows.stop:
            chosen.append(rows)
            row = rows.stop
    if row != total:
        raise _refused(f"lacks row {row} of {total} of tensor {short(spec.name)}", folder)
    return chosen


def _refused(problem: str, path: Path) -> CheckpointError:
    return CheckpointError(f"{path} {problem}", field="path", hint="choose another checkpoint", call="load")
