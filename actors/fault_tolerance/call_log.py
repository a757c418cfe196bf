"""The log of a job's calls since a checkpoint; a recovery repeats these calls to give new ranks the lost ranks' state.

Older batches of the log are on the disk instead of in Ray's object store, in unnamed files in `run.dir`. The kernel
removes such a file when the driver ends, however the driver ends, or when no call refers to a batch in the file. Such a
batch is a pickle that this process wrote. Before it is loaded, its sha256 is compared with the sha256 in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.cluster.ray_errors import fetch
from actors.workers.futures import CallFuture
from actors.workers.group_calls import RankRequest
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, ResourceError, StateError
from slimefsdp.io.files import io_reported
from slimefsdp.rpc import ROLES, Role
from slimefsdp.training.prepare import PreparedBatch

TRAINING = {"train_step", "forward_backward", "optimizer_step", "zero_grad"}
"""Calls that gather, use or drop gradients."""
DROPS_GRADIENTS = {"train_step", "optimizer_step", "zero_grad", "load"}
"""Calls after which earlier gradients are gone."""
KEPT_IN_STORE = 4
"""The number of batches in Ray's object store, the newest of the log; older ones are on the disk."""


@dataclass(eq=False)
class LoggedCall:
    """A call that a user has made, with what is needed to repeat it on new ranks after a loss of ranks."""

    role: Role
    request: RankRequest  # as the ranks get it, but its batch may have moved to the disk
    has_batch: bool = False
    running: CallFuture | None = None  # the call's future on the ranks that ran it last
    launch: int = 0  # the number of the launch that started the ranks of `running`
    is_done: bool = False
    value: Any = None  # the result, if `is_done`
    restored: CallFuture | None = None  # for a load: the future of `restored`, which tells the loaded step

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def adapter(self) -> str | None:
        """Returns the adapter that the call is for; None means the run's own, or that there are no adapters."""
        return self.request.adapter

    @property
    def changes_state(self) -> bool:
        """Returns whether later calls depend on this call.

        A recovery repeats a call that changes no state only if the call has no result yet.
        """
        return self.request.call.changes_state

    @property
    def under_name(self) -> str | None:
        """Returns the name of the checkpoint of a save or load; None for a checkpoint that is numbered by its step."""
        return self.request.arguments.get("name") if self.name in ("save", "load") else None

    @property
    def step(self) -> int:
        return int(self.request.arguments["step"])


class CallLog:
    """Keeps calls that change state, and other calls until they have a result, in the order in which ranks got them.

    A recovery loads a checkpoint and repeats the calls since its save. The job (with its critic and reference group)
    and each further adapter have separate checkpoints, since their states are independent. In all methods,
    adapter=None means the job.

    The newest batches are in Ray's object store, older batches on the disk of `run.dir`. Without a `run.dir` there is
    no checkpoint either, and all batches stay in the object store.
    """

    def __init__(self, config: RunConfig) -> None:
        self.created: dict[str, LoggedCall] = {}  # adapter -> the finished call that created it
        self._calls: list[LoggedCall] = []
        self._reaches_launch = True  # whether the log has all calls of the job since the launch
        self._spilled = None if config.run.dir is None else SpilledBatches(config.run.dir)
        self._has_disk = True  # whether the last batch could be written to the disk

    def __contains__(self, call: LoggedCall) -> bool:
        return call in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LoggedCall]:
        return iter(self._calls)

    def check(self, call: LoggedCall) -> None:
        """Refuses a save that would overwrite a checkpoint which a recovery may have to load again.

        Raises:
            StateError: the call is such a save.
        """
        if call.name != "save" or call.under_name is None:
            return
        saved = (call.adapter, call.under_name)
        if any(other.name == "load" and (other.adapter, other.under_name) == saved for other in self._calls):
            raise StateError(
                f"save under the name {call.under_name!r}, which was loaded since the last checkpoint",
                field="name",
                hint="choose another name",
            )

    def append(self, call: LoggedCall) -> None:
        """Adds a call that has begun, and moves older batches from the object store to the disk.

        If the disk refuses a batch, the batch stays in the object store, with a warning.
        """
        self._calls.append(call)
        if self._spilled is None:
            return
        for older in [call for call in self._calls if call.has_batch][:-KEPT_IN_STORE]:
            stored = older.request.arguments["batch"]
            if isinstance(stored, SpilledBatch):
                continue
            try:
                older.request = older.request.having(batch=self._spilled.write(fetch(stored, "batch")))
            except (OSError, ResourceError) as error:
                if self._has_disk:
                    problem = f"batches for a recovery stay in Ray's object store, and more with each call: {error}"
                    warnings.warn(problem, stacklevel=5)
                self._has_disk = False
                return
            self._has_disk = True

    def remove(self, call: LoggedCall) -> None:
        """Removes a call on which no other call depends, if the call is in the log."""
        if call in self._calls:
            self._calls.remove(call)

    def replace(self, call: LoggedCall, other: LoggedCall) -> None:
        """Replaces a call by another call, if the first call is in the log."""
        if call in self._calls:
            self._calls[self._calls.index(call)] = other

    def reaches_beginning(self, adapter: str | None) -> bool:
        """Returns whether all calls since the launch, or since the creation of an adapter, are in the log."""
        return self._reaches_launch if adapter is None else self.created[adapter] in self._calls

    def saves(self, adapter: str | None) -> Iterator[LoggedCall]:
        """Yields the saves whose checkpoints a recovery can load, newest first.

        Checkpoints with a name are left out, since a program may overwrite or remove such checkpoints at any time.
        """
        for call in reversed(self._calls):
            if (call.name, call.adapter) == ("create_adapter", adapter):
                return  # earlier calls were for another adapter of this name
            is_save = (call.name, call.role, call.adapter) == ("save", "actor", adapter)
            if is_save and call.under_name is None and call.is_done:
                yield call

    def since(self, beginnings: Mapping[str | None, LoggedCall]) -> list[LoggedCall]:
        """Returns the calls to repeat on ranks that have loaded checkpoints.

        Args:
            beginnings: adapter (None for the job) -> the save of its checkpoint, or the call that created the adapter.
                For an adapter (or the job) without an entry, all its calls are returned.
        """
        needed = set[LoggedCall]().union(*map(self._not_in, beginnings.values()))
        return [call for call in self._calls if call.adapter not in beginnings or call in needed]

    def forget(self, checkpoints: int, adapter: str | None = None) -> None:
        """Removes the calls of the job or of an adapter that a recovery from its newest checkpoints would not need.

        Args:
            checkpoints: how many of the newest checkpoints, with different steps, must stay loadable. If the log has
                fewer, nothing is removed.
        """
        steps: set[int] = set()
        oldest: LoggedCall | None = None
        for save in self.saves(adapter):
            if len(steps | {save.step}) > checkpoints:
                break
            steps.add(save.step)
            oldest = save
        if oldest is None or len(steps) < checkpoints:
            return
        needed = self._not_in(oldest) | {oldest}
        left = [call for call in self._calls if call.adapter != adapter or call in needed]
        if len(left) < len(self._calls):
            self._reaches_launch &= adapter is not None
            if self._spilled is not None:
                self._spilled.begin_file()
        self._calls = left

    def forget_adapter(self, deleted: LoggedCall) -> None:
        """Removes from the log the call that deleted an adapter, and all earlier calls for this adapter."""
        if deleted not in self._calls:
            return
        end, name = self._calls.index(deleted), deleted.adapter
        assert name is not None
        gone = [call for call in self._calls[: end + 1] if call.adapter == name]
        created = self.created.get(name)
        if created in gone or created not in self._calls:
            self.created.pop(name, None)
        self._calls = [call for call in self._calls if call not in gone]

    def _not_in(self, beginning: LoggedCall) -> set[LoggedCall]:
        """Returns the calls whose effects a checkpoint lacks.

        These are all later calls, and earlier calls whose gradients no update had used at the time of the save.

        Args:
            beginning: the save of the checkpoint, or the call that created an adapter.
        """
        start = self._calls.index(beginning)
        lacking = {call for call in self._calls[start + 1 :] if call.adapter == beginning.adapter}
        settled: set[Role] = set() if beginning.name == "save" else set(ROLES)  # roles with no earlier gradients left
        for call in reversed(self._calls[:start]):
            if call.adapter != beginning.adapter or call.role in settled:
                continue
            if call.name == "forward_backward":
                lacking.add(call)
            # A failed train_step does not change gradients: it refuses to begin if there are any, and leaves none.
            elif call.name in DROPS_GRADIENTS and (call.is_done or call.name != "train_step"):
                settled |= set(ROLES) if (call.name, call.role) == ("load", "actor") else {call.role}
        return lacking


# ---------------------------------------------------------------------- batches on the disk


class _UnnamedFile:
    """A temporary file without a name; its disk space is freed when this object or the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.end = 0
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes) -> int:
        """Appends data and waits until the disk has it; returns its offset. After an OSError nothing was appended."""
        start, left = self.end, memoryview(data)
        while left:  # a single write has at most 2 GiB
            left = left[os.pwrite(self._descriptor, left, start + len(data) - len(left)) :]
        os.fsync(self._descriptor)
        self.end += len(data)
        return start

    def read(self, start: int, size: int) -> bytes:
        """Reads `size` bytes at an offset, or fewer if the file is shorter."""
        parts: list[bytes] = []
        while size and (part := os.pread(self._descriptor, size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class SpilledBatch:
    """A batch on the disk; its file exists as long as this object."""

    file: _UnnamedFile
    start: int
    size: int
    sha256: str

    def read(self) -> PreparedBatch:
        """Returns the batch, bit for bit as it was written.

        Raises:
            CheckpointError: the disk fails, or has changed the batch.
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
        batch: PreparedBatch = pickle.loads(data)  # safe, as this process wrote these bytes
        return batch


class SpilledBatches:
    """Writes batches into unnamed files in a folder, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: _UnnamedFile | None = None

    def write(self, batch: PreparedBatch) -> SpilledBatch:
        """Puts a batch on the disk, with its plan and advantages.

        Raises:
            OSError: the disk refuses; nothing was written.
        """
        data = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        if self._file is None:
            self._file = _UnnamedFile(self._folder)
        return SpilledBatch(self._file, self._file.append(data), len(data), hashlib.sha256(data).hexdigest())

    def begin_file(self) -> None:
        """Starts a new file, so that the space of older batches becomes free when no call refers to them."""
        self._file = None
