"""What the runs of a server train: an adapter each beside one base, or all weights of the model, one run at a time.

Both have the same methods. A rank of 0 stands for all weights, as it does for clients.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from actors.service import wire
from actors.service.catalogue import COPY, Catalogue, Saved, adapter_of, is_copy, whole_name
from actors.workers.group_calls import Future, GroupCalls, RankRequest
from slimefsdp.checkpoint.store import NAMED, CheckpointStore, remove
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, ConfigError, StateError
from slimefsdp.io.checksummed_files import disk_reported
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.rpc import Arguments, Call

_BEGINNING = "beginning"  # which no run's checkpoints are called
_PARTS = (("train_attn", "attention"), ("train_mlp", "mlp"), ("train_unembed", "head"))


class RunWeights(Protocol):
    """What runs train, on one group; a run is named by its id."""

    def check_asked(self, lora: wire.LoraConfig | None) -> int:
        """The rank of what a client asks for.

        Raises:
            ConfigError: this server does not train it.
        """
        ...

    def switches(self, rank: int) -> dict[str, bool]:
        """Returns which of a client's `train_*` are set for weights of this rank."""
        ...

    def check_rank(self, rank: int) -> None:
        """
        Raises:
            ConfigError: this server has nothing of this rank.
        """
        ...

    def check_free(self, running: Sequence[str]) -> None:
        """
        Args:
            running: what the runs that are not about to end are to be called.

        Raises:
            StateError: no further run can be beside them.
        """
        ...

    def calls(self, run: str) -> GroupCalls:
        """Returns the group's calls for a run."""
        ...

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        """Has a run at its beginning; `seed` is what adapters are drawn from, None: any."""
        ...

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Has a run begin from a checkpoint.

        Raises:
            CheckpointError: its files are not there, or damaged.
        """
        ...

    def reopen(self, run: str, rank: int) -> None:
        """Has a run of an earlier start, which is about to load one of its checkpoints.

        Raises:
            StateError: there can be no further one.
        """
        ...

    def end(self, run: str) -> None:
        """Forgets a run, but for what it saved under a name."""
        ...

    def load(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Reads a checkpoint, also another run's, into a run.

        Raises:
            CheckpointError: its files are not there, or damaged.
        """
        ...

    def export(self, run: str, folder: Path) -> None:
        """Writes a folder that the sampling engine loads."""
        ...


def run_weights_of(config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> RunWeights:
    """Returns what the runs of a server train: adapters if lora.rank is set, or the whole model."""
    if config.lora.rank is None:
        return ModelByTurns(config, group, catalogue)
    return AdapterPerRun(config, group, catalogue)


class AdapterPerRun:
    """Adapters of ranks up to lora.rank.

    Args:
        group: has adapters.
    """

    def __init__(self, config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> None:
        assert config.lora.rank is not None and config.run.dir is not None
        self._run_dir = config.run.dir
        self._most, self._settings = config.lora.rank, config.lora
        folder = read_model_folder(config.model.path, with_weights=False)
        self._parts = ModelSpec.from_config(folder.config).adapted_parts(config.lora.targets)
        self._group, self._catalogue = group, catalogue

    def check_asked(self, lora: wire.LoraConfig | None) -> int:
        """A rank with layers that lora.targets has; ConfigError of others."""
        rank = 0 if lora is None else lora.rank
        self.check_rank(rank)
        for name, has in self.switches(rank).items():
            if getattr(lora, name) != has:
                raise ConfigError(
                    f"{name}={not has}, and the adapters of this server have lora.targets="
                    f"{list(self._settings.targets)}",
                    field=f"lora_config.{name}",
                    hint=f"set it to {has}",
                )
        return rank

    def switches(self, rank: int) -> dict[str, bool]:
        """Returns True for each part that lora.targets adapts; for rank 0, an earlier server's whole model, for all."""
        return {name: rank == 0 or part in self._parts for name, part in _PARTS}

    def check_rank(self, rank: int) -> None:
        """ConfigError unless it is 1 to lora.rank."""
        if not 1 <= rank <= self._most:
            raise ConfigError(
                f"rank={rank}, and this server trains adapters of rank 1 to {self._most}",
                field="lora_config.rank",
                hint="choose one of these, or "
                + ("start a server with lora.rank=null" if rank == 0 else "raise lora.rank of the server"),
            )

    def check_free(self, running: Sequence[str]) -> None:
        """There is always room: each run has its own adapter."""

    def calls(self, run: str) -> GroupCalls:
        """Returns the calls for the run's adapter."""
        return self._group.adapter(adapter_of(run))

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        """Makes its adapter."""
        drawn_from = secrets.randbits(31) if seed is None else seed
        self._group.create_adapter(adapter_of(run), rank=rank, alpha=self._settings.alpha, seed=drawn_from)

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Makes its adapter and loads it."""
        self._group.create_adapter(adapter_of(run), rank=saved.rank, alpha=self._settings.alpha)
        self.load(run, saved, with_optimizer=with_optimizer)

    def reopen(self, run: str, rank: int) -> None:
        """Makes its adapter again."""
        self._group.create_adapter(adapter_of(run), rank=rank, alpha=self._settings.alpha)

    def end(self, run: str) -> None:
        """Deletes its adapter, and what nobody can ask for any more: checkpoints without a name, and copies."""
        try:
            self._group.delete_adapter(adapter_of(run))
        finally:
            store = CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run))
            copies = (path for path in (store.root / NAMED).glob("*") if is_copy(path.name))
            unnamed = (path for path in store.root.glob("*") if path.name != NAMED)
            for path in [*copies, *unnamed]:
                with suppress(OSError):
                    remove(path)

    def load(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """A copy of it, of hard links: a recovery may have to load it again, and a client may have deleted it."""
        target = self._catalogue.folder_of(run, saved.rank, _copy_name(saved))
        if not target.exists():
            _copied(self._catalogue.folder(saved), target)
        self.calls(run).load(name=target.name, weights_only=not with_optimizer)

    def export(self, run: str, folder: Path) -> None:
        """A PEFT folder."""
        self.calls(run).export_adapter(folder)


class ModelByTurns:
    """All weights of the model, of one run at a time: a run has them from its beginning to its end.

    What the group begins with is saved once, for every run to begin with. The numbered checkpoints of all runs are in
    one row, which only grows: each says in its loop state whose it is. Behind the beginning of a run there is one that
    is nobody's, so that a recovery of ranks repeats nothing of the runs before.

    Args:
        group: without adapters, as it was launched.
    """

    def __init__(self, config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> None:
        assert config.run.dir is not None
        self._group, self._catalogue, self._dtype = group, catalogue, config.precision.compute_dtype
        self._store = CheckpointStore.of_run(config.run.dir)
        self._patience = f"{config.service.session_timeout_s:g} s"
        self._newest = max(self._store.steps(), default=-1)
        self._changed = threading.Condition()
        self._holder: str | None = None
        group.save(0, name=_BEGINNING, overwrite=True)
        self._remove_copies()

    def check_asked(self, lora: wire.LoraConfig | None) -> int:
        """0; ConfigError of a rank, or where a part of the weights is left out."""
        self.check_rank(0 if lora is None else lora.rank)
        for name in self.switches(0) if lora is not None else ():
            if not getattr(lora, name):
                problem = f"{name}=False, and this server trains all weights"
                raise ConfigError(problem, field=f"lora_config.{name}", hint="leave it out")
        return 0

    def switches(self, rank: int) -> dict[str, bool]:
        """All of them."""
        return {name: True for name, _ in _PARTS}

    def check_rank(self, rank: int) -> None:
        """ConfigError unless it is 0."""
        if rank != 0:
            raise ConfigError(
                f"rank={rank}, and this server trains all weights of its model, which is rank=0",
                field="lora_config.rank",
                hint="ask for rank=0, or start a server with lora.rank",
            )

    def check_free(self, running: Sequence[str]) -> None:
        """StateError where any run is there."""
        if running:
            raise StateError(
                f"{running[0]} trains all weights of this server's model, which one run does at a time",
                field="model_seq_id",
                hint=f"begin when it has ended; a client that says nothing for {self._patience} is taken for gone",
            )

    def calls(self, run: str) -> GroupCalls:
        """The group's own, but for where checkpoints are."""
        return _WholeCalls(self._group, run, self._next_number)

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        """Loads what the group began with, with an optimiser that has taken no update; nothing is drawn."""
        self._take(run)
        self._group.load(name=_BEGINNING, weights_only=True)
        self._mark_beginning(None)

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Loads the checkpoint, once the run before has ended."""
        self._take(run)
        self.load(run, saved, with_optimizer=with_optimizer)
        self._mark_beginning(_copy_name(saved))

    def reopen(self, run: str, rank: int) -> None:
        """It has the group, unless another one has."""
        if self._holder is not None:
            raise StateError(
                f"{self._holder} and {run} had not ended, and all weights of a model are one run's at a time",
                field="run.dir",
                hint="move the file of one of them out of service/runs there",
            )
        self._take(run)

    def end(self, run: str) -> None:
        """Leaves the group to the next run."""
        with self._changed:
            if self._holder == run:
                self._holder = None
                self._changed.notify_all()

    def load(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """A copy of it, as of adapters."""
        target = self._store.named(_copy_name(saved)).root
        if not target.exists():
            _copied(self._catalogue.folder(saved), target)
        self._group.load(name=target.name, weights_only=not with_optimizer)

    def export(self, run: str, folder: Path) -> None:
        """A Hugging Face folder, in the dtype that the model computes in."""
        self._group.export_hf(folder, self._dtype)

    def _take(self, run: str) -> None:
        """Waits for the run before, which is about to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            self._holder = run

    def _next_number(self) -> int:
        self._newest += 1
        return self._newest

    def _mark_beginning(self, loaded: str | None) -> None:
        self._group.save(self._next_number(), {})
        self._group.finish_save()
        self._remove_copies(loaded)

    def _remove_copies(self, but: str | None = None) -> None:
        for folder in (self._store.root / NAMED).glob(f"{COPY}*"):
            if folder.name != but:
                shutil.rmtree(folder, ignore_errors=True)


class _WholeCalls(GroupCalls):
    """A group's calls for a run that trains all weights: its checkpoints are among those of other runs."""

    def __init__(self, group: GroupCalls, run: str, next_number: Callable[[], int]) -> None:
        self.role = group.role
        self._group, self._run, self._next_number = group, run, next_number

    def _start(self, request: RankRequest) -> Future[Any]:
        return self._group._start(request)

    def _submit(self, call: Call, arguments: Arguments) -> Future[Any]:
        """Names a checkpoint by the run's id and its name; one without a name gets the next number of the row."""
        if call.name in ("save", "load") and arguments["name"] is not None:
            arguments = {**arguments, "name": whole_name(self._run, arguments["name"])}
        elif call.name == "save":
            arguments = {**arguments, "step": self._next_number()}
        return super()._submit(call, arguments)

    def _make(self, call: Call, arguments: Arguments) -> Any:
        result = super()._make(call, arguments)
        if call.name == "save":
            self._group.finish_save()  # clients expect it on the disk
        return result


def _copy_name(saved: Saved) -> str:
    return f"{COPY}{hashlib.sha256(f'{saved.path}@{saved.time}'.encode()).hexdigest()}"


def _copied(source: Path, target: Path) -> None:
    """
    Raises:
        CheckpointError: the source is not there. ResourceError: the disk refuses.
    """
    part = target.with_name(f".{target.name}.part")
    with disk_reported(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        try:
            shutil.copytree(source, part, copy_function=_linked, ignore=shutil.ignore_patterns(".lock"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{source.name} is not there any more", field="path", hint="load another") from error
        except shutil.Error as error:  # of all files together: the first says why
            raise OSError(error.args[0][0][2]) from error
        part.replace(target)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # of a file system without hard links
        shutil.copy2(source, target)
