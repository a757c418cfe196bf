"""Fills a sharded model from safetensors files, or at random.

From files, either each rank reads its own rows, or rank 0 reads all files and broadcasts them.

A missing tensor, a surplus tensor or a NaN is an error on every rank. Files are read directly into the shards through a
small buffer. Files are not memory-mapped, as safetensors' `get_slice` would do: mapped pages count as resident memory,
and a file that is truncated during a read would kill the process by SIGBUS.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.collectives import run_together
from slimefsdp.distributed.mesh import local_block, local_shard
from slimefsdp.errors import ModelError
from slimefsdp.io.safetensors_file import TORCH_DTYPES, read_rows
from slimefsdp.io.safetensors_header import TensorEntry
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.hf_folder import ModelFolder, Part, is_no_weight, stored_parts

ReadBy = Literal["every_rank", "first_rank"]
TIED_HEAD = "lm_head.weight"
BUCKET_BYTES = 64 << 20  # bytes that rank 0 sends at once; a multiple of the alignment
_BUFFER_BYTES = 16 << 20
_ALIGNMENT = 8  # bytes of the widest dtype


def check_tensor_names(model: DecoderModel, folder: ModelFolder) -> None:
    """Compares the checkpoint's tensors with the model's parameters before anything is read.

    Raises:
        ModelError: a tensor is missing, surplus, or has another shape.
    """
    wanted = {part.name: part.shape for _, parts in _parts_by_parameter(model, folder) for part in parts}
    if _has_second_head(model, folder):  # a saved copy of the tied embedding; `read_weights` compares them
        wanted[TIED_HEAD] = tuple(model.hf.get_output_embeddings().weight.shape)
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
    known = wanted.keys() | model.unread(folder.tensors)
    surplus = sorted(name for name in folder.tensors if name not in known and not is_no_weight(folder.model_type, name))
    if surplus:
        raise _wrong_tensor(
            surplus[0],
            f"is in {folder.tensors[surplus[0]].file.name} but not in a {folder.model_type} model"
            + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            "check that config.json belongs to these weights",
        )


@torch.no_grad()
def read_weights(
    model: DecoderModel,
    folder: ModelFolder,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    read_by: ReadBy = "every_rank",
) -> None:
    """Collective: fills the local shards from the folder's safetensors files.

    Args:
        group: all ranks; None means a single process.
        device: device on which ranks exchange tensors.
        read_by: with "first_rank", only rank 0 opens files, and broadcasts their tensors in buckets of `BUCKET_BYTES`.

    Raises:
        ModelError: some rank met an unreadable file, a non-finite weight, or an `lm_head.weight` that differs from the
            embedding to which the config ties it; raised on every rank.
    """
    _fill(_shares(model, folder), folder.tensors, group, device, read_by)


@torch.no_grad()
def read_tensors(
    named: Sequence[tuple[str, nn.Parameter]],
    tensors: Mapping[str, TensorEntry],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    read_by: ReadBy = "every_rank",
) -> None:
    """Collective: fills parameters like `read_weights`, each from one tensor of the same shape.

    Args:
        named: (name of a tensor, parameter), in the same order on every rank.
    """
    shares = [_Share.of(name, parameter) for name, parameter in named]
    _fill(shares, tensors, group, device, read_by)


def _fill(
    shares: Sequence[_Share],
    tensors: Mapping[str, TensorEntry],
    group: dist.ProcessGroup | None,
    device: torch.device,
    read_by: ReadBy,
) -> None:
    with OpenTensors(tensors) as files:
        if group is None:
            _read_shares(files, shares)
        elif read_by == "every_rank":
            run_together(lambda: _read_shares(files, shares), group)
        else:
            _receive_shares(files, shares, group, device)


def _parts_by_parameter(model: DecoderModel, folder: ModelFolder) -> list[tuple[nn.Parameter, list[Part]]]:
    return [
        (parameter, stored_parts(folder.model_type, name, parameter.shape, folder.tensors))
        for name, parameter in model.weights_in(folder.tensors)
    ]


def _has_second_head(model: DecoderModel, folder: ModelFolder) -> bool:
    return model.has_tied_embeddings and TIED_HEAD in folder.tensors


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """Describes the part of a stored tensor that this rank keeps, and where its values go.

    The part is a run of the tensor's numbers in row-major order, or some columns of a run of whole rows.
    """

    name: str
    values: torch.Tensor  # a view of the shard: [numbers], or [rows, columns]; empty for an expert of another rank
    start: int  # index of the run's first number in the stored tensor
    column: int = 0  # index of the first column
    row_size: int = 1  # numbers of a stored row if the part is some columns of rows, otherwise 1
    is_second_head: bool = False  # the stored values are compared with `values` instead of written to them

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, *, is_second_head: bool = False) -> _Share:
        """Returns this rank's share of a tensor that is stored in the parameter's shape."""
        block, shard = local_block(parameter), local_shard(parameter)
        start = block.rows[0] * parameter.shape[1:].numel()
        if block.is_rows_of(parameter.shape):
            return cls(name, shard.view(-1), start, is_second_head=is_second_head)
        return cls(name, shard, start, block.start[1], parameter.shape[1], is_second_head)

    @property
    def count(self) -> int:
        """Returns the length of the run."""
        return len(self.values) * self.row_size

    def take(self, start: int, values: torch.Tensor) -> None:
        """Takes this rank's part of `values`, the numbers [start, start + len(values)) of the tensor, and checks it.

        If the part is some columns, `values` are whole rows.
        """
        first, end = max(start, self.start), min(start + len(values), self.start + self.count)
        if first >= end:
            return
        values = values[first - start : end - start]
        own = self.values[(first - self.start) // self.row_size : (end - self.start) // self.row_size]
        if self.row_size > 1:
            values = values.view(-1, self.row_size)[:, self.column : self.column + own.shape[1]]
        if not self.is_second_head:
            own.copy_(values)
            self.check(own)
            return
        most = _BUFFER_BYTES // _ALIGNMENT  # largest piece to convert to another dtype at once
        pieces = zip(values.split(most), own.split(most), strict=True)
        if not all(torch.equal(stored.to(tied.device, tied.dtype), tied) for stored, tied in pieces):
            raise _wrong_tensor(
                self.name,
                "differs from the embedding, but config.json says tie_word_embeddings=true",
                f"set tie_word_embeddings to false, or drop {TIED_HEAD}",
            )

    def whole_rows(self, most: int) -> int:
        """Returns the largest number of numbers, at most `most`, that are whole rows if the part is some columns."""
        return most // self.row_size * self.row_size

    def check(self, values: torch.Tensor) -> None:
        # minimum and maximum propagate NaN without extra memory; isfinite would allocate a tensor
        if not all(torch.isfinite(bound) for bound in values.aminmax()):
            raise _wrong_tensor(self.name, "holds NaN or infinity", "use a checkpoint with finite weights")


def _shares(model: DecoderModel, folder: ModelFolder) -> list[_Share]:
    """Returns this rank's share of every stored tensor, in the same order on every rank."""
    shares = []
    for parameter, parts in _parts_by_parameter(model, folder):
        (start, end), shard = local_block(parameter).rows, local_shard(parameter)
        for part in parts:
            if part.expert is None:
                shares.append(_Share.of(part.name, parameter))
            elif start <= part.expert < end:
                rows = shard[part.expert - start, part.start : part.end]
                shares.append(_Share(part.name, rows.view(-1), 0))
            else:
                shares.append(_Share(part.name, shard.new_empty(0), 0))
    if _has_second_head(model, folder):
        embedding = model.hf.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        shares.append(_Share.of(TIED_HEAD, embedding, is_second_head=True))
    return shares


def _read_shares(files: OpenTensors, shares: Sequence[_Share]) -> None:
    for share in shares:
        if not len(share.values):
            continue
        if not share.is_second_head and share.row_size == 1:
            files.read(share.name, share.start, share.values)
            share.check(share.values)
            continue
        dtype, end = files.dtype(share.name), share.start + share.count
        step = share.whole_rows(_BUFFER_BYTES // dtype.itemsize)
        for start in range(share.start, end, step):
            values = torch.empty(min(step, end - start), dtype=dtype)
            files.read(share.name, start, values)
            share.take(start, values)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Describes numbers [start, start + count) of a share's tensor and their position in a bucket."""

    share: int  # index of the share
    start: int
    count: int
    dtype: torch.dtype
    offset: int  # byte offset in the bucket

    @property
    def end(self) -> int:
        nbytes = self.count * self.dtype.itemsize
        return self.offset + nbytes + -nbytes % _ALIGNMENT

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Returns the numbers as a view of the bucket's bytes."""
        return bucket[self.offset : self.offset + self.count * self.dtype.itemsize].view(self.dtype)


def _receive_shares(
    files: OpenTensors, shares: Sequence[_Share], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Collective: rank 0 reads every tensor, and each rank takes its shares."""
    errors: list[Exception] = []  # raised only at the end, because this rank must join all broadcasts
    memory = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)
    for pieces in _buckets(files, shares):
        try:
            for piece in pieces if dist.get_rank(group) == 0 and not errors else ():
                files.read(shares[piece.share].name, piece.start, piece.of(memory))
        except Exception as error:
            errors.append(error)
        dist.broadcast(memory[: pieces[-1].end], group_src=0, group=group)
        try:
            for piece in pieces if not errors else ():
                shares[piece.share].take(piece.start, piece.of(memory))
        except Exception as error:
            errors.append(error)

    def raise_own_error() -> None:
        if errors:
            raise errors[0]

    run_together(raise_own_error, group)


def _buckets(files: OpenTensors, shares: Sequence[_Share]) -> Iterator[list[_Piece]]:
    """Yields buckets that contain every stored tensor once; equal on every rank."""
    bucket: list[_Piece] = []
    offset = 0
    for index, share in enumerate(shares):
        dtype, start, numbers = files.dtype(share.name), 0, files.numbers(share.name)
        while start < numbers:
            count = min(numbers - start, share.whole_rows((BUCKET_BYTES - offset) // dtype.itemsize))
            if count:
                bucket.append(_Piece(index, start, count, dtype, offset))
                start, offset = start + count, bucket[-1].end
            if offset == BUCKET_BYTES or not count:
                yield bucket
                bucket, offset = [], 0
    if bucket:
        yield bucket


class OpenTensors:
    """Reads tensors of a folder as flat sequences of numbers; each file is opened once, at its first read."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self._tensors = tensors
        self._stack = ExitStack()
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> OpenTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[self._tensors[name].dtype]

    def numbers(self, name: str) -> int:
        return math.prod(self._tensors[name].shape)

    def read(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fills `target`, [count], with elements [start, start + count) of a tensor in row-major order.

        Raises:
            ModelError: the file cannot be read.
        """
        entry = self._tensors[name]
        try:
            if entry.file not in self._open:
                self._open[entry.file] = self._stack.enter_context(entry.file.open("rb", buffering=0))
            flat = replace(entry, shape=(self.numbers(name),))
            read_rows(self._open[entry.file], flat, start, start + len(target), target, buffer_bytes=_BUFFER_BYTES)
        except OSError as error:
            problem = f"cannot be read from {entry.file} ({error.strerror or error})"
            raise _wrong_tensor(name, problem, "copy the model folder again") from error


def _wrong_tensor(name: str, problem: str, hint: str) -> ModelError:
    return ModelError(f"tensor {name!r} {problem}", field="model.path", hint=hint)


# ---------------------------------------------------------------------- random weights
#
# Weights are drawn by transformers' own initialisation rules, with the same bits on every mesh: every rank draws the
# whole model on the host, one decoder layer at a time, and keeps its own rows. The generator is seeded for every module
# from the run's seed and the module's name, so no draw depends on earlier ones. Values are drawn in float32.


@torch.no_grad()
def draw_weights(model: DecoderModel, template: DecoderModel, seed: int) -> None:
    """Fills the local shards of `model` at random; no communication.

    Args:
        model: a sharded or whole model whose parameters are allocated.
        template: the same model, unsharded, with parameters on the meta device before and after the call.
        seed: the same on every rank.

    Raises:
        ModelError: transformers has no rule for a parameter.
    """
    own_weights = dict(model.named_weights())
    saved_state = torch.default_generator.get_state()  # transformers' rules draw from this generator
    try:
        for unit in _units(template, own_weights.keys()):
            _place(unit, "cpu")
            for name, module in unit.items():
                torch.default_generator.manual_seed(seed_of_module(seed, name))
                template.hf._init_weights(module)
            for name, parameter in _own_parameters(unit):
                if not torch.isfinite(parameter).all():
                    raise ModelError(
                        f"transformers has no rule to draw parameter {name!r} by",
                        field="model.init",
                        hint="set model.init=folder, and give a folder with weights",
                    )
                local_shard(own_weights[name]).copy_(parameter[local_block(own_weights[name]).slices])
            _place(unit, "meta")
    finally:
        torch.default_generator.set_state(saved_state)


def _units(template: DecoderModel, wanted: Container[str]) -> list[dict[str, nn.Module]]:
    """Returns groups of modules that must be drawn together, as name -> module, children before parents.

    A group is a decoder layer or a single module outside of the layers. A layer is one group because the rule of a
    module may also initialise its children. A module outside of the layers is included only if a parameter of it is in
    `wanted`, so that a head that is tied to the embedding is not drawn twice.
    """
    layers = list(template.decoder_layers())
    units: list[dict[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in template.hf.named_modules():
        if module in layers:
            modules = [(f"{name}.{child}".rstrip("."), part) for child, part in module.named_modules()]
            units.append(dict(reversed(modules)))
            inside.update(module.modules())
        elif module not in inside and any(own in wanted for own, _ in _own_parameters({name: module})):
            units.append({name: module})
    return units


def _own_parameters(unit: dict[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{name}.{own_name}", parameter)
        for name, module in unit.items()
        for own_name, parameter in module.named_parameters(recurse=False)
    ]


def _place(unit: dict[str, nn.Module], device: str) -> None:
    """Gives a unit new parameters on a device, filled with NaN so that parameters without a rule are detected."""
    for module in unit.values():
        for own_name, parameter in module.named_parameters(recurse=False):
            blank = torch.full(parameter.shape, torch.nan, dtype=torch.float32, device=device)
            module._parameters[own_name] = nn.Parameter(blank, requires_grad=False)


def seed_of_module(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
