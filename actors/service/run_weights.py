"""Gives the runs of a server their weights: an adapter for each, or all weights of the model for one run at a time.

Both classes have the methods of `RunWeights`. A rank of 0 stands for all weights, as in the clients' API.
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
from actors.workers.futures import Future
from actors.workers.group_calls import GroupCalls, RankRequest
from slimefsdp.checkpoint.store import NAMED, CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, ConfigError, StateError
from slimefsdp.io.files import disk_reported, remove
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.rpc import Arguments, Call

_BEGINNING = "beginning"  # a checkpoint's name that no run's checkpoint has
_PARTS = (("train_attn", "attention"), ("train_mlp", "mlp"), ("train_unembed", "head"))


class RunWeights(Protocol):
    """Manages the weights of training runs on one group; runs are named by their ids."""

    def check_asked(self, lora: wire.LoraConfig | None) -> int:
        """Returns the rank that a client asks for.

        Raises:
            ConfigError: this server does not train such weights.
        """
        ...

    def switches(self, rank: int) -> dict[str, bool]:
        """Returns the values of a client's `train_*` fields for weights of this rank."""
        ...

    def check_rank(self, rank: int) -> None:
        """Checks that this server can train weights of this rank.

        Raises:
            ConfigError: it cannot.
        """
        ...

    def check_free(self, running: Sequence[str]) -> None:
        """Checks that another run can begin.

        Args:
            running: names of the runs that are not about to end.

        Raises:
            StateError: no further run can exist along with these.
        """
        ...

    def calls(self, run: str) -> GroupCalls:
        """Returns the group's calls for a run."""
        ...

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        """Gives a new run its initial weights; adapters are drawn from `seed`, None: from a random one."""
        ...

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Gives a new run the weights of a checkpoint.

        Raises:
            CheckpointError: its files are missing or damaged.
        """
        ...

    def reopen(self, run: str, rank: int) -> None:
        """Prepares a run of an earlier start, which will load one of its checkpoints next.

        Raises:
            StateError: no further run can exist.
        """
        ...

    def end(self, run: str) -> None:
        """Frees a run's weights; what it saved under a name stays."""
        ...

    def load(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Loads a checkpoint, also one of another run, into a run.

        Raises:
            CheckpointError: its files are missing or damaged.
        """
        ...

    def export(self, run: str, folder: Path) -> None:
        """Writes a folder from which the sampling engine can load the weights."""
        ...


def run_weights_of(config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> RunWeights:
    """Returns the weights manager of a server: one adapter per run if lora.rank is set, otherwise the whole model."""
    if config.lora.rank is None:
        return ModelByTurns(config, group, catalogue)
    return AdapterPerRun(config, group, catalogue)


class AdapterPerRun:
    """Gives each run an adapter of rank up to lora.rank.

    Args:
        group: a group with adapters.
    """

    def __init__(self, config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> None:
        assert config.lora.rank is not None and config.run.dir is not None
        self._run_dir = config.run.dir
        self._most, self._settings = config.lora.rank, config.lora
        folder = read_model_folder(config.model.path, with_weights=False)
        self._parts = ModelSpec.from_config(folder.config).adapted_parts(config.lora.targets)
        self._group, self._catalogue = group, catalogue

    def check_asked(self, lora: wire.LoraConfig | None) -> int:
        """Returns the rank; raises ConfigError if it is too high, or if the parts are not those of lora.targets."""
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
        """Returns True for each part that lora.targets adapts; all True for rank 0, a model of an earlier server."""
        return {name: rank == 0 or part in self._parts for name, part in _PARTS}

    def check_rank(self, rank: int) -> None:
        """Raises ConfigError unless the rank is 1 to lora.rank."""
        if not 1 <= rank <= self._most:
            raise ConfigError(
                f"rank={rank}, and this server trains adapters of rank 1 to {self._most}",
                field="lora_config.rank",
                hint="choose one of these, or "
                + ("start a server with lora.rank=null" if rank == 0 else "raise lora.rank of the server"),
            )

    def check_free(self, running: Sequence[str]) -> None:
        """Accepts any number of runs, since each has an adapter of its own."""

    def calls(self, run: str) -> GroupCalls:
        return self._group.adapter(adapter_of(run))

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        drawn_from = secrets.randbits(31) if seed is None else seed
        self._group.create_adapter(adapter_of(run), rank=rank, alpha=self._settings.alpha, seed=drawn_from)

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        self._group.create_adapter(adapter_of(run), rank=saved.rank, alpha=self._settings.alpha)
        self.load(run, saved, with_optimizer=with_optimizer)

    def reopen(self, run: str, rank: int) -> None:
        self._group.create_adapter(adapter_of(run), rank=rank, alpha=self._settings.alpha)

    def end(self, run: str) -> None:
        """Deletes the run's adapter, and its files that no client can name: unnamed checkpoints and copies."""
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
        """Loads a copy made of hard links: a recovery may load it again after a client has deleted the checkpoint."""
        target = self._catalogue.folder_of(run, saved.rank, _copy_name(saved))
        if not target.exists():
            _copied(self._catalogue.folder(saved), target)
        self.calls(run).load(name=target.name, weights_only=not with_optimizer)

    def export(self, run: str, folder: Path) -> None:
        self.calls(run).export_adapter(folder)


class ModelByTurns:
    """Gives all weights of the model to one run at a time, from its beginning to its end.

    The initial weights of the group are saved once, and every run begins with them. The numbered checkpoints of all
    runs form one sequence; each names its run in its loop state. Every run begins with a checkpoint that belongs to no
    run, so that a recovery of ranks never goes back to an earlier run.

    Args:
        group: a group without adapters, as it was launched.
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
        """Returns 0; raises ConfigError for another rank, or if a part of the weights is left out."""
        self.check_rank(0 if lora is None else lora.rank)
        for name in self.switches(0) if lora is not None else ():
            if not getattr(lora, name):
                problem = f"{name}=False, and this server trains all weights"
                raise ConfigError(problem, field=f"lora_config.{name}", hint="leave it out")
        return 0

    def switches(self, rank: int) -> dict[str, bool]:
        return {name: True for name, _ in _PARTS}

    def check_rank(self, rank: int) -> None:
        """Raises ConfigError unless the rank is 0."""
        if rank != 0:
            raise ConfigError(
                f"rank={rank}, and this server trains all weights of its model, which is rank=0",
                field="lora_config.rank",
                hint="ask for rank=0, or start a server with lora.rank",
            )

    def check_free(self, running: Sequence[str]) -> None:
        """Raises StateError if another run exists."""
        if running:
            raise StateError(
                f"{running[0]} trains all weights of this server's model, which one run does at a time",
                field="model_seq_id",
                hint=f"begin when it has ended; a client that says nothing for {self._patience} is taken for gone",
            )

    def calls(self, run: str) -> GroupCalls:
        """Returns the group's calls, with the run's own checkpoint names."""
        return _WholeCalls(self._group, run, self._next_number)

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        """Loads the group's initial weights with a new optimiser; the seed is not used."""
        self._take(run)
        self._group.load(name=_BEGINNING, weights_only=True)
        self._mark_beginning(None)

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Waits until the previous run has ended, and loads the checkpoint."""
        self._take(run)
        self.load(run, saved, with_optimizer=with_optimizer)
        self._mark_beginning(_copy_name(saved))

    def reopen(self, run: str, rank: int) -> None:
        """Gives the group to the run; raises StateError if another run has it."""
        if self._holder is not None:
            raise StateError(
                f"{self._holder} and {run} had not ended, and all weights of a model are one run's at a time",
                field="run.dir",
                hint="move the file of one of them out of service/runs there",
            )
        self._take(run)

    def end(self, run: str) -> None:
        """Frees the group for the next run."""
        with self._changed:
            if self._holder == run:
                self._holder = None
                self._changed.notify_all()

    def load(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Loads a copy of the checkpoint, made as for adapters."""
        target = self._store.named(_copy_name(saved)).root
        if not target.exists():
            _copied(self._catalogue.folder(saved), target)
        self._group.load(name=target.name, weights_only=not with_optimizer)

    def export(self, run: str, folder: Path) -> None:
        """Writes a Hugging Face folder in the compute dtype of the model."""
        self._group.export_hf(folder, self._dtype)

    def _take(self, run: str) -> None:
        """Waits until the previous run has ended, and marks the group as taken."""
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
    """A group's calls for a run that trains all weights; its checkpoints share a folder with those of other runs."""

    def __init__(self, group: GroupCalls, run: str, next_number: Callable[[], int]) -> None:
        self.role = group.role
        self._group, self._run, self._next_number = group, run, next_number

    def _start(self, request: RankRequest) -> Future[Any]:
        return self._group._start(request)

    def _submit(self, call: Call, arguments: Arguments) -> Future[Any]:
        """Adds the run's id to the name of a checkpoint; an unnamed one gets the next number of the sequence."""
        if call.name in ("save", "load") and arguments["name"] is not None:
            arguments = {**arguments, "name": whole_name(self._run, arguments["name"])}
        elif call.name == "save":
            arguments = {**arguments, "step": self._next_number()}
        return super()._submit(call, arguments)

    def _make(self, call: Call, arguments: Arguments) -> Any:
        result = super()._make(call, arguments)
        if call.name == "save":
            self._group.finish_save()  # clients expect it to be on disk
        return result


def _copy_name(saved: Saved) -> str:
    return f"{COPY}{hashlib.sha256(f'{saved.path}@{saved.time}'.encode()).hexdigest()}"


def _copied(source: Path, target: Path) -> None:
    """Copies a checkpoint's folder, with hard links if the file system has them.

    Raises:
        CheckpointError: the source is missing. ResourceError: the disk is full or fails.
    """
    part = target.with_name(f".{target.name}.part")
    with disk_reported(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        try:
            shutil.copytree(source, part, copy_function=_linked, ignore=shutil.ignore_patterns(".lock"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{source.name} is not there any more", field="path", hint="load another") from error
        except shutil.Error as error:  # has the errors of all files; the first one is enough
            raise OSError(error.args[0][0][2]) from error
        part.replace(target)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)
