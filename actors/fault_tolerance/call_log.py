"""The calls of a job since a checkpoint: which of them made the state that its ranks have, and where to begin again.

Batches that calls may need again are on the disk instead of in Ray's object store, in files without a name in
`run.dir`: nothing stays behind, however the driver ends, and the disk has the space back as soon as no call refers to a
batch of a file any more. A batch is a pickle that this process wrote: it is compared with a sha256 kept in memory
before it is read.
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
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, ResourceError, StateError
from slimefsdp.io.checksummed_files import io_reported
from slimefsdp.rpc import Role
from slimefsdp.training.prepare import PreparedBatch

TRAINING = {"train_step", "forward_backward", "optimizer_step", "zero_grad"}
"""Calls that gather, use or drop gradients."""
KEPT_IN_STORE = 4
"""So many of the newest batches in the call log are in Ray's object store; older ones are on the disk."""


@dataclass(eq=False)
class Call:
    """One call, through all the groups that had to work on it."""

    role: Role
    request: RankRequest  # as the ranks get it, but for a batch that is on the disk by now
    has_batch: bool = False
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
        """The name of the call."""
        return self.request.name

    @property
    def adapter(self) -> str | None:
        """The adapter that the call is for; None: the run's own, or there are no adapters."""
        return self.request.adapter

    @property
    def changes_state(self) -> bool:
        """Whether later calls depend on it. Other calls read, and are not made again once their result is here."""
        return self.request.call.changes_state

    @property
    def under_name(self) -> str | None:
        """The name of the checkpoint that a save or a load names; None: it is a numbered one."""
        return self.request.arguments.get("name") if self.name in ("save", "load") else None

    @property
    def step(self) -> int:
        """The step of a save."""
        return int(self.request.arguments["step"])


class CallLog:
    """Calls in the order in which the ranks got them: those that change their state, and reads without a result yet.

    The newest batches are in Ray's object store, older ones on the disk of `run.dir`. Without a `run.dir` there is no
    checkpoint either, and all batches stay in the object store.
    """

    def __init__(self, config: RunConfig) -> None:
        self.reaches_launch = True  # nothing was forgotten yet
        self.has_critic = False
        self.made: dict[str, Call] = {}  # adapter -> the call that made it, once that has come to its end
        self._calls: list[Call] = []
        self._run_dir, self._has_reference_group = config.run.dir, config.reference.placement == "group"
        self._spilled = None if config.run.dir is None else SpilledBatches(config.run.dir)
        self._spills = True  # the disk has not refused the last one
        self._reference_is_current: bool | None = None  # see Call
        # role, adapter and name of each checkpoint that was saved under a name, or is about to be
        self._names: set[tuple[Role, str | None, str | None]] = set()

    def __contains__(self, call: Call) -> bool:
        return call in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def note(self, call: Call) -> None:
        """Adds to a call that is about to begin what a recovery must know of it besides its arguments.

        Raises:
            StateError: it would overwrite a checkpoint that a recovery may have to load again.
        """
        name = call.under_name
        store = None if self._run_dir is None else CheckpointStore.of_run(self._run_dir, call.role, call.adapter)
        if call.name == "save" and name is not None:
            self._refuse_to_overwrite_loaded(call)
            is_on_disk = store is not None and bool(store.named(name).steps())
            call.is_first_of_name = not is_on_disk and (call.role, call.adapter, name) not in self._names
            self._names.add((call.role, call.adapter, name))
        elif call.name == "save":
            call.overwrites = store is not None and call.step in store.steps()
        if call.role != "actor" or call.adapter is not None or not self._has_reference_group:
            return
        if call.name == "update_ref":
            self._reference_is_current = True
        elif (call.name in TRAINING or call.name == "load") and self._reference_is_current:
            self._reference_is_current = False
        call.reference_is_current = self._reference_is_current

    def note_failure(self, call: Call) -> None:
        """Takes back what `note` assumed of a call that has failed."""
        if call.name == "update_ref":
            self._reference_is_current = False
        if call.is_first_of_name:
            self._names.discard((call.role, call.adapter, call.under_name))

    def _refuse_to_overwrite_loaded(self, call: Call) -> None:
        saved = (call.role, call.adapter, call.under_name)
        if any(
            other.name == "load" and (other.role, other.adapter, other.under_name) == saved for other in self._calls
        ):
            raise StateError(
                f"save under the name {call.under_name!r}, which was loaded since the last checkpoint",
                field="name",
                hint="choose another name",
            )

    def append(self, call: Call) -> None:
        """Adds a call that has begun, and moves older batches from the object store to the disk.

        Batches that the disk refuses stay where they are, with a warning.
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
                if self._spills:
                    problem = f"batches for a recovery stay in Ray's object store, and more with each call: {error}"
                    warnings.warn(problem, stacklevel=5)
                self._spills = False
                return
            self._spills = True

    def remove(self, call: Call) -> None:
        """Removes a call that nothing depends on, unless it is forgotten already."""
        if call in self._calls:
            self._calls.remove(call)

    def replace(self, call: Call, other: Call) -> None:
        """Replaces a call by another, unless it is forgotten already."""
        if call in self._calls:
            self._calls[self._calls.index(call)] = other

    def marks(self) -> Iterator[Call]:
        """Yields the actor's saves at which a recovery can begin, newest first.

        Not one under a name, which a program may overwrite or remove when it likes. Not one of a step that was begun
        again later: what of that step is on the disk may be either. Nor one between a forward_backward and its
        optimizer_step, whose gradients no checkpoint holds, nor one without the critic's.
        """
        for call in self._whole_saves(None):
            if not self.has_critic or "critic" in self.starts(call):
                yield call

    def marks_of_adapter(self, name: str) -> Iterator[Call]:
        """Yields the saves of an adapter at which a recovery of it can begin, newest first."""
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
        """Returns for each role the save of a mark's step; the role's later calls are not in that checkpoint."""
        saves = [
            call for call in self._calls if (call.name, call.role) == ("save", "critic") and call.under_name is None
        ]
        newest = next((call for call in reversed(saves) if call.step == mark.step), None)
        if newest is None or not newest.is_written or self._has_gradients(newest):
            return {"actor": mark}
        return {"actor": mark, "critic": newest}

    def behind(self, mark: Call | None, of_adapters: Mapping[str, Call]) -> list[Call]:
        """Returns the calls that are not in the checkpoints of marks; all where the mark is None.

        Args:
            of_adapters: adapter -> its mark, or the call that made it; one that is not among them has all its calls.
        """
        starts: dict[tuple[Role, str | None], int] = {}
        if mark is not None:
            starts = {(role, None): self._calls.index(call) for role, call in self.starts(mark).items()}
        starts |= {("actor", name): self._calls.index(call) for name, call in of_adapters.items()}
        return [call for index, call in enumerate(self._calls) if index > starts.get((call.role, call.adapter), -1)]

    def forget(self, marks: int, adapter: str | None = None) -> None:
        """Forgets the calls before so many marks.

        Args:
            adapter: whose calls and marks these are.
        """
        kept = list(self.marks() if adapter is None else self.marks_of_adapter(adapter))[:marks]
        if len(kept) < marks:
            return
        saves = self.starts(kept[-1]).values() if adapter is None else [kept[-1]]
        first = min(map(self._calls.index, saves))
        left = [call for index, call in enumerate(self._calls) if index >= first or call.adapter != adapter]
        if len(left) < len(self._calls):
            self.reaches_launch &= adapter is not None
            if self._spilled is not None:
                self._spilled.begin_file()
        self._calls = left

    def forget_adapter(self, deleted: Call) -> None:
        """Removes a call that deleted an adapter, with all earlier calls for that adapter."""
        if deleted not in self._calls:
            return
        end, name = self._calls.index(deleted), deleted.adapter
        assert name is not None
        gone = [call for call in self._calls[: end + 1] if call.adapter == name]
        made = self.made.get(name)
        if made in gone or made not in self._calls:
            self.made.pop(name, None)
        self._calls = [call for call in self._calls if call not in gone]

    def _has_gradients(self, save: Call) -> bool:
        """Returns whether gradients waited for their optimizer_step when a save began."""
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


class _UnnamedFile:
    """A file without a name, which is gone with this object or with the process."""

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
        while left:  # the system takes 2 GiB at most at a time
            left = left[os.pwrite(self._descriptor, left, start + len(data) - len(left)) :]
        os.fsync(self._descriptor)
        self.end += len(data)
        return start

    def read(self, start: int, size: int) -> bytes:
        """Reads bytes at an offset; fewer where the file is shorter."""
        parts: list[bytes] = []
        while size and (part := os.pread(self._descriptor, size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class SpilledBatch:
    """A batch on the disk, which stays there as long as this object."""

    file: _UnnamedFile
    start: int
    size: int
    sha256: str

    def read(self) -> PreparedBatch:
        """Reads the batch back, equal to the bit.

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
        found: PreparedBatch = pickle.loads(data)  # this process wrote these very bytes
        return found


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
        data = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        if self._file is None:
            self._file = _UnnamedFile(self._folder)
        return SpilledBatch(self._file, self._file.append(data), len(data), hashlib.sha256(data).hexdigest())

    def begin_file(self) -> None:
        """Starts another file, so that the disk gets the space of older batches back."""
        self._file = None
