"""The calls of a job since a checkpoint: which of them made the state that its ranks have, and where to begin again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.workers.futures import CallFuture
from actors.workers.group_calls import Request
from slimefsdp.rpc import Role

TRAINING = {"train_step", "forward_backward", "optimizer_step", "zero_grad"}
_CHANGES_STATE = TRAINING | {"update_ref", "sleep", "wake_up", "save", "load"}
"""Whatever else is called reads, and is not made again once its result is here."""


@dataclass(eq=False)
class Call:
    """One call of the caller's, over all the groups that had to work on it."""

    role: Role
    request: Request  # as the ranks get it, but for a batch that is on the disk by now
    has_batch: bool = False  # as the first argument
    running: CallFuture | None = None
    launch: int = 0  # which group `running` is of
    is_done: bool = False
    value: Any = None
    restored: CallFuture | None = None  # of a load: asked right behind it, what it has loaded
    overwrites: bool = False  # of a save: there was a checkpoint of its step
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
    def changes_state(self) -> bool:
        """Whether what comes behind it depends on it."""
        return self.name in _CHANGES_STATE

    @property
    def step(self) -> int:
        """Of a save."""
        return int(self.request.args[0])


class CallLog:
    """Calls in the order in which the ranks got them: those that change their state, and reads without a result yet."""

    def __init__(self) -> None:
        self.reaches_launch = True  # nothing was forgotten yet
        self.has_critic = False
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

        Not one of a step that was begun again later: what of that step is on the disk may be either. Nor one between
        a forward_backward and its optimizer_step, whose gradients no checkpoint holds, nor one without the critic's.
        """
        steps: set[int] = set()
        for call in reversed(self._calls):
            if (call.name, call.role) != ("save", "actor"):
                continue
            is_whole = call.is_written and not self._has_gradients(call)
            if is_whole and call.step not in steps and (not self.has_critic or "critic" in self.starts(call)):
                yield call
            steps.add(call.step)

    def starts(self, mark: Call) -> dict[Role, Call]:
        """By role, the save of a mark's step behind which its calls count."""
        saves = [call for call in self._calls if (call.name, call.role) == ("save", "critic")]
        newest = next((call for call in reversed(saves) if call.step == mark.step), None)
        if newest is None or not newest.is_written or self._has_gradients(newest):
            return {"actor": mark}
        return {"actor": mark, "critic": newest}

    def behind(self, mark: Call | None) -> list[Call]:
        """The calls that are not in a mark's checkpoints; None: all."""
        starts = {} if mark is None else {role: self._calls.index(call) for role, call in self.starts(mark).items()}
        return [call for index, call in enumerate(self._calls) if index > starts.get(call.role, -1)]

    def forget(self, marks: int) -> bool:
        """Cuts what comes before so many marks; returns whether that was anything."""
        kept = list(self.marks())[:marks]
        if len(kept) == marks:
            first = min(self._calls.index(call) for call in self.starts(kept[-1]).values())
            if first > 0:
                self._calls, self.reaches_launch = self._calls[first:], False
                return True
        return False

    def _has_gradients(self, save: Call) -> bool:
        """Whether gradients of its role were waiting for their optimizer_step."""
        before = reversed(self._calls[: self._calls.index(save)])
        # a train_step that failed left them as they were: it refuses to begin with any, and leaves none of its own
        found = (
            call.name
            for call in before
            if call.role == save.role
            and call.name in TRAINING | {"load"}
            and (call.is_done or call.name != "train_step")
        )
        return next(found, None) == "forward_backward"
