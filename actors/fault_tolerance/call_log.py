"""The calls of a job since a checkpoint: which of them made the state that its ranks have, and where to begin again.

Batches that calls may need again are on the disk instead of in Ray's object store, in files without a name in
`run.dir`: nothing stays behind, however the driver ends, and the disk has the space back as soon as no call refers to a
batch of a file any more. What is read is compared with a sha256 kept in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from actors.workers.futures import CallFuture
from actors.workers.group_calls import RankRequest
from slimefsdp.batching.plan import Plan
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import io_reported
from slimefsdp.rpc import Role
from slimefsdp.training.prepare import PreparedBatch

TRAINING = {"train_step", "forward_backward", "optimizer_step", "zero_grad"}
CHANGES_STATE = TRAINING | {"update_ref", "sleep", "wake_up", "save", "load", "create_adapter", "delete_adapter"}
"""Whatever else is called reads, and is not made again once its result is here."""


@dataclass(eq=False)
class Call:
    """One call of the caller's, over all the groups that had to work on it."""

    role: Role
    request: RankRequest  # as the ranks get it, but for a batch that is on the disk by now
    has_batch: bool = False  # as the first argument
    running: CallFuture | None = None
    launch: int = 0  # which group `running` is of
    is_done: bool = False
    value: Any = None
    restored: CallFuture | None = None  # of a load: asked right behind it, what it has loaded
    overwrites: bool = False  # of a save: there was a checkpoint of its step
    is_first_of_name: bool = False  # of a save under a name: there was no checkpoint of that name
    # of a save: what is under its step is what it wrote; not while it is to be made again behind an earlier checkpoint
    is_written: bool = False
    # of a save, with a reference group of its own, which no checkpoint holds: it equals the policy;
    # None: it is as launched, or there is none
    reference_is_current: bool | None = None

    @property
    def name(self) -> str:
        """Of Trainer's method."""
        return self.request.name

    @property
    def adapter(self) -> str | None:
        """That it is for; None: the run's own, or there are none."""
        return self.request.adapter

    @property
    def changes_state(self) -> bool:
        """Whether what comes behind it depends on it."""
        return self.name in CHANGES_STATE

    @property
    def under_name(self) -> str | None:
        """Of a save or a load: the name of a checkpoint that is kept beside the numbered ones."""
        behind = {"save": 2, "load": 1}.get(self.name, len(self.request.args))
        return next(iter(self.request.args[behind : behind + 1]), None)

    @property
    def step(self) -> int:
        """Of a save."""
        return int(self.request.args[0])


class CallLog:
    """Calls in the order in which the ranks got them: those that change their state, and reads without a result yet."""

    def __init__(self) -> None:
        self.reaches_launch = True  # nothing was forgotten yet
        self.has_critic = False
        self.made: dict[str, Call] = {}  # adapter -> the call that made it, once that has come to its end
        self._calls: list[Call] = []

    def __contains__(self, call: Call) -> bool:
        return call in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def append(self, call: Call) -> None:
        """Adds the newest call."""
        self._calls.append(call)

    def remove(self, call: Call) -> None:
        """Takes out a call that nothing depends on; nothing where it is forgotten already."""
        if call in self._calls:
            self._calls.remove(call)

    def replace(self, call: Call, other: Call) -> None:
        """Puts another call in the place of one; nothing where that is forgotten already."""
        if call in self._calls:
            self._calls[self._calls.index(call)] = other

    def marks(self) -> Iterator[Call]:
        """The actor's saves that one can begin again at, newest first.

        Not one under a name, which a program may overwrite or remove when it likes. Not one of a step that was begun
        again later: what of that step is on the disk may be either. Nor one between a forward_backward and its
        optimizer_step, whose gradients no checkpoint holds, nor one without the critic's.
        """
        for call in self._whole_saves(None):
            if not self.has_critic or "critic" in self.starts(call):
                yield call

    def marks_of_adapter(self, name: str) -> Iterator[Call]:
        """As `marks`, of an adapter, whose calls and saves are its own."""
        return self._whole_saves(name)

    def _whole_saves(self, adapter: str | None) -> Iterator[Call]:
        steps: set[int] = set()
        for call in reversed(self._calls):
            if adapter is not None and (call.name, call.adapter) == ("create_adapter", adapter):
                return  # what is before it was of another one of this name
            is_save = (call.name, call.role, call.adapter) == ("save", "actor", adapter)
            if not is_save or call.under_name is not None:
                continue
            if call.is_written and not self._has_gradients(call) and call.step not in steps:
                yield call
            steps.add(call.step)

    def starts(self, mark: Call) -> dict[Role, Call]:
        """By role, the save of a mark's step behind which its calls count."""
        saves = [
            call for call in self._calls if (call.name, call.role) == ("save", "critic") and call.under_name is None
        ]
        newest = next((call for call in reversed(saves) if call.step == mark.step), None)
        if newest is None or not newest.is_written or self._has_gradients(newest):
            return {"actor": mark}
        return {"actor": mark, "critic": newest}

    def behind(self, mark: Call | None, of_adapters: Mapping[str, Call]) -> list[Call]:
        """The calls that are not in the checkpoints of marks; None: all.

        Args:
            of_adapters: adapter -> its mark, or the call that made it; one that is not among them has all its calls.
        """
        starts: dict[tuple[Role, str | None], int] = {}
        if mark is not None:
            starts = {(role, None): self._calls.index(call) for role, call in self.starts(mark).items()}
        starts |= {("actor", name): self._calls.index(call) for name, call in of_adapters.items()}
        return [call for index, call in enumerate(self._calls) if index > starts.get((call.role, call.adapter), -1)]

    def forget(self, marks: int, adapter: str | None = None) -> bool:
        """Cuts what comes before so many marks; returns whether that was anything.

        Args:
            adapter: whose calls and marks these are.
        """
        found = self.marks() if adapter is None else self.marks_of_adapter(adapter)
        kept = list(found)[:marks]
        if len(kept) < marks:
            return False
        saves = self.starts(kept[-1]).values() if adapter is None else [kept[-1]]
        first = min(map(self._calls.index, saves))
        left = [call for index, call in enumerate(self._calls) if index >= first or call.adapter != adapter]
        is_cut = len(left) < len(self._calls)
        if is_cut and adapter is None:
            self.reaches_launch = False
        self._calls = left
        return is_cut

    def forget_adapter(self, deleted: Call) -> None:
        """Takes out a call that deleted an adapter and all of its calls before, which nothing depends on."""
        if deleted not in self._calls:
            return
        end, name = self._calls.index(deleted), deleted.request.args[0]
        gone = [call for call in self._calls[: end + 1] if call.adapter == name]
        made = self.made.get(name)
        if made in gone or made not in self._calls:
            self.made.pop(name, None)
        self._calls = [call for call in self._calls if call not in gone]

    def _has_gradients(self, save: Call) -> bool:
        """Whether gradients of its role were waiting for their optimizer_step."""
        before = reversed(self._calls[: self._calls.index(save)])
        # a train_step that failed left them as they were: it refuses to begin with any, and leaves none of its own
        found = (
            call.name
            for call in before
            if (call.role, call.adapter) == (save.role, save.adapter)
            and call.name in TRAINING | {"load"}
            and (call.is_done or call.name != "train_step")
        )
        return next(found, None) == "forward_backward"


# ---------------------------------------------------------------------- batches on the disk

_OF_PLAN = ("num_dropped", "num_skipped_updates", "num_first_epoch_updates", "max_pack_tokens")
_OF_CALL = ("loss", "gae_lambda", "kl_coefficient", "denominator", "loss_settings")


class _UnnamedFile:
    """A file in a folder that is gone with this object, or with the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.end = 0
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes) -> int:
        """Writes behind what is there, waits until the disk has it, and returns where; after an OSError nothing is."""
        start, left = self.end, memoryview(data)
        while left:  # the system takes 2 GiB at most at a time
            left = left[os.pwrite(self._descriptor, left, start + len(data) - len(left)) :]
        os.fsync(self._descriptor)
        self.end += len(data)
        return start

    def read(self, start: int, size: int) -> bytes:
        """So many bytes from there on; fewer where the file is shorter."""
        parts: list[bytes] = []
        while size and (part := os.pread(self._descriptor, size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class SpilledBatch:
    """A batch on the disk; it stays there as long as this object."""

    file: _UnnamedFile
    start: int
    size: int
    sha256: str

    def read(self) -> PreparedBatch:
        """The batch as it was written, to the bit.

        Raises:
            CheckpointError: the disk does not give it back.
        """
        with io_reported(self.file.folder, "recovery"):
            data = self.file.read(self.start, self.size)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CheckpointError(
                f"a batch that was kept on the disk of {self.file.folder} for a recovery has changed there",
                field="run.dir",
                hint="look at the disk, and go on from the last checkpoint with checkpoint.resume=true",
                call="recovery",
            )
        return _from_bytes(data)


class SpilledBatches:
    """Writes batches into unnamed files in a folder, which is made where it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: _UnnamedFile | None = None

    def write(self, batch: PreparedBatch) -> SpilledBatch:
        """Puts a batch on the disk, with its plan and advantages.

        Raises:
            OSError: the disk refuses; nothing was written.
        """
        data = _to_bytes(batch)
        if self._file is None:
            self._file = _UnnamedFile(self._folder)
        return SpilledBatch(self._file, self._file.append(data), len(data), hashlib.sha256(data).hexdigest())

    def begin_file(self) -> None:
        """What is written from now on is in another file, so that the space of older batches can come back."""
        self._file = None


def _to_bytes(work: PreparedBatch) -> bytes:
    """As the content of a safetensors file: arrays under their names, and as `words` a JSON of all else."""
    plan = work.plan
    fields = {f"batch.{field.name}": getattr(work.batch, field.name) for field in dataclasses.fields(RolloutBatch)}
    packs = [pack for update in plan.updates for of_rank in update for pack in of_rank]
    arrays = {
        **fields,
        "advantages": work.advantages,
        "packs": np.concatenate([*packs, np.zeros(0, dtype=np.int64)]),
        "counted": None if plan.counted is None else np.concatenate([*plan.counted, np.zeros(0, dtype=np.int64)]),
        "place": None if plan.shared is None else plan.shared.place,
        "shared": None if plan.shared is None else plan.shared.shared,
    }
    words = {
        "plan": {name: getattr(plan, name) for name in _OF_PLAN},
        "packs": [[list(map(len, of_rank)) for of_rank in update] for update in plan.updates],
        "counted": None if plan.counted is None else list(map(len, plan.counted)),
        "call": {name: getattr(work, name) for name in _OF_CALL},
    }
    arrays["words"] = np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
    return safetensors.numpy.save({name: np.asarray(value) for name, value in arrays.items() if value is not None})


def _from_bytes(data: bytes) -> PreparedBatch:
    arrays = safetensors.numpy.load(data)
    words = json.loads(arrays.pop("words").tobytes())
    fields: dict[str, Any] = {
        name.removeprefix("batch."): array for name, array in arrays.items() if name.startswith("batch.")
    }
    packs = _cut(arrays["packs"], [size for update in words["packs"] for of_rank in update for size in of_rank])
    left = iter(packs)
    updates = tuple(tuple(tuple(next(left) for _ in of_rank) for of_rank in update) for update in words["packs"])
    shared = SharedPrefixes(arrays["place"], arrays["shared"]) if "place" in arrays else None
    counted = tuple(_cut(arrays["counted"], words["counted"])) if "counted" in arrays else None
    plan = Plan(updates, shared=shared, counted=counted, **words["plan"])
    return PreparedBatch(RolloutBatch(**fields), plan, advantages=arrays.get("advantages"), **words["call"])


def _cut(values: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1]) if sizes else []
