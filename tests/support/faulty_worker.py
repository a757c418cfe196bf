"""A rank that fails on purpose: at a chosen moment of its work, in a chosen way, exactly once.

The product knows nothing of this. A test puts `faulty_worker(folder)` in the place of `TrainWorker`, and
`FaultPlan.arm` writes what is to happen into that folder. In the rank's own process the functions at which a moment
begins or ends are wrapped. A fault leaves its file in the folder just before it strikes, and none strikes whose file is
there: it fires once over all processes that ever stand for the rank, and the test sees which did.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray.cloudpickle

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers.group_calls import RankRequest
from actors.workers.train_worker import TrainWorker
from tests.support import disk_points, process_resources
from tests.support.process_resources import held_by_the_process

MOMENTS = (
    "init",
    "reference log-probs",
    "actor log-probs",
    "before forward",
    "after forward",
    "after backward",
    "after optimiser step",
    "sleep",
    "wake",
    "save start",
    "save middle",
    "weight update",
)
"""Each is passed by every rank; so are, on rank 0, the points of `tests.support.disk_points`."""
CRASHES = ("SIGKILL", "SIGSEGV", "exit")
HANGS = ("SIGSTOP", "GIL")
SAVE_MIDDLE = "half of the tensors are written"


@dataclass(frozen=True)
class Fault:
    """What happens to a rank of the actor group, where, and at which pass through the moment in the same process."""

    rank: int
    moment: str
    kind: str = "SIGKILL"
    occurrence: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.moment}, {self.kind}"


@dataclass(frozen=True)
class Fired:
    """A fault that struck: in which process, and when (`time.time()`)."""

    fault: Fault
    pid: int
    time: float


class FaultPlan:
    """The faults of a folder, numbered as they were armed; the driver's end and the ranks' end of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plan = folder / "armed.json"

    def arm(self, *faults: Fault) -> None:
        """These are to fire from now on, instead of those armed before."""
        fresh = {str(self._next_number() + index): asdict(fault) for index, fault in enumerate(faults)}
        written = self.folder / "armed.json.tmp"
        written.write_text(json.dumps({"next": self._next_number() + len(faults), "faults": fresh}))
        written.replace(self._plan)

    def armed(self) -> Iterator[tuple[int, Fault]]:
        """Those that may still fire, and those that have."""
        if self._plan.exists():
            for number, fault in json.loads(self._plan.read_text())["faults"].items():
                yield int(number), Fault(**fault)

    def claim(self, number: int, fault: Fault) -> bool:
        """Whether the caller is the one process in which the fault fires; says so on the disk first."""
        try:
            file = os.open(self._fired(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        fired = Fired(fault, os.getpid(), time.time())
        os.write(file, json.dumps(asdict(fired)).encode())
        os.fsync(file)
        os.close(file)
        return True

    def fired(self) -> list[Fired]:
        """Those of the armed ones that struck, in the order in which they were armed."""
        found = [json.loads(self._fired(n).read_text()) for n, _ in self.armed() if self._fired(n).exists()]
        return [Fired(Fault(**each["fault"]), each["pid"], each["time"]) for each in found]

    def _fired(self, number: int) -> Path:
        return self.folder / f"fired_{number}.json"

    def _next_number(self) -> int:
        return int(json.loads(self._plan.read_text())["next"]) if self._plan.exists() else 0


class FaultyWorker(TrainWorker):
    """A `TrainWorker` whose faults are those of `folder`; ranks of reference and critic groups have none."""

    folder: Path
    current_call = ""

    def start(self, config: Any, role: str, *args: Any, **kwargs: Any) -> Any:
        if role == "actor":
            watch_moments(functools.partial(self._passed, FaultPlan(self.folder), Counter()), lambda: self.current_call)
        return super().start(config, role, *args, **kwargs)

    def call(self, request: RankRequest, role: str = "actor") -> Any:
        self.current_call = request.name
        return super().call(request, role)

    def held(self) -> dict[str, int]:
        """What this process holds of the machine."""
        return held_by_the_process()

    def _passed(self, plan: FaultPlan, passes: Counter[int], moment: str) -> None:
        for number, fault in plan.armed():
            if (fault.rank, fault.moment) == (self.rank, moment):
                passes[number] += 1
                if passes[number] >= fault.occurrence and plan.claim(number, fault):
                    strike(fault.kind)


def faulty_worker(folder: Path) -> type[TrainWorker]:
    """What stands for `actors.workers.worker_group.TrainWorker`, with faults; it travels by value."""
    for module in (sys.modules[__name__], process_resources, disk_points):
        ray.cloudpickle.register_pickle_by_value(module)
    return type("FaultyWorker", (FaultyWorker,), {"folder": folder, "__module__": __name__})


def watch_moments(passed: Callable[[str], None], current_call: Callable[[], str]) -> None:
    """Has this process call `passed(moment)` at every moment but those that another call than theirs goes through."""
    import torch

    from slimefsdp.distributed.memory_manager import StorageOffloader
    from slimefsdp.optim import optimizer_step as updates
    from slimefsdp.training import build, checkpointing, packs, step
    from slimefsdp.weight_sync import send

    def before(owner: Any, name: str, moment: str, when: Callable[[], bool] = lambda: True) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if when():
                passed(moment)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def after(owner: Any, name: str, moment: str, when: Callable[[], bool] = lambda: True) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if when():
                passed(moment)
            return result

        setattr(owner, name, wrapped)

    before(build, "model_for", "init")
    token_outputs = step.token_outputs

    def watched_outputs(state: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        passed("actor log-probs" if model is state.model else "reference log-probs")
        return token_outputs(state, model, *args, **kwargs)

    step.token_outputs = watched_outputs
    before(packs, "evaluate", "before forward", torch.is_grad_enabled)
    after(packs, "evaluate", "after forward", torch.is_grad_enabled)
    after(torch.Tensor, "backward", "after backward")
    after(updates, "update_shards", "after optimiser step")
    # the reference sleeps between its uses: only what was asked for counts
    after(StorageOffloader, "sleep", "sleep", lambda: current_call() == "sleep")
    after(StorageOffloader, "wake_up", "wake", lambda: current_call() == "wake_up")
    before(checkpointing.Checkpoints, "save", "save start")

    def at_point(point: str) -> None:
        passed(point)
        if point == SAVE_MIDDLE:
            passed("save middle")

    disk_points.watch_disk(at_point)
    full_weights = send.full_weights

    def watched_weights(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for bucket in full_weights(*args, **kwargs):
            yield bucket
            passed("weight update")  # on rank 0 the receivers have it, none has committed

    send.full_weights = watched_weights


def strike(kind: str) -> None:
    """Ends or stops this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kind == "exit":
        os._exit(3)
    if kind == "GIL":
        hold_the_gil()
    faulthandler.disable()
    os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(3600)  # this thread may run on until another one has taken the signal


def hold_the_gil() -> None:
    """Never returns, and lets no other Python thread run: waits for a mutex that this thread holds itself.

    A signal's handler in C runs all the same, which does not end the wait.
    """
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(256)  # zeros are what an unlocked one is made of
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@dataclass(frozen=True)
class Supervised:
    """A group under a supervisor, and the plan of its ranks' faults."""

    group: SupervisedGroup
    faults: FaultPlan
