"""Gives the runs of a server their weights: an adapter to each run, or all weights of the model to one run at a time.

An argument `run` is the id of a run. An argument `rank` is the LoRA rank of a run's adapter. Rank 0 means all weights
of the model, as in the clients' API.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.service import wire
from actors.service.catalogue import COPY, Catalogue, Checkpoint, Saved, adapter_of, is_copy, whole_name
from actors.service.state import SESSION_TIMEOUT_S
from actors.workers.group_calls import GroupCalls
from slimefsdp.checkpoint.store import NAMED, CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, ConfigError, StateError
from slimefsdp.io.files import disk_reported, link_or_copy, remove
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder

_BEGINNING = "beginning"  # name of the checkpoint with the initial weights; no run's checkpoint has this name
_PARTS = (("train_attn", "attention"), ("train_mlp", "mlp"), ("train_unembed", "head"))


class _RunWeights(ABC):
    """The base of both classes below; checks clients' requests and loads checkpoints.

    Args:
        group: the group after its launch, still with its initial weights.
    """

    trained: str  # what this server trains, for errors

    def __init__(self, config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> None:
        assert config.run.dir is not None
        self._run_dir = config.run.dir
        self._group, self._catalogue = group, catalogue

    def check_asked(self, lora: wire.LoraConfig | None) -> int:
        """Returns the LoRA rank that a client requests; 0 means all weights.

        Raises:
            ConfigError: this server does not train adapters of this rank, or these parts of the model.
        """
        rank = 0 if lora is None else lora.rank
        self.check_rank(rank)
        for name, has in self.switches(rank).items():
            if lora is not None and getattr(lora, name) != has:
                problem = f"{name}={not has}, and this server trains {self.trained}"
                raise ConfigError(problem, field=f"lora_config.{name}", hint=f"set it to {has}")
        return rank

    def switches(self, rank: int) -> dict[str, bool]:
        """Returns name -> value that a client's `train_*` fields must have, for adapters of `rank` (0: all weights)."""
        return {name: True for name, _ in _PARTS}

    @abstractmethod
    def check_rank(self, rank: int) -> None:
        """Raises ConfigError unless this server can train adapters of `rank` (0: all weights)."""

    @abstractmethod
    def calls(self, run: str) -> GroupCalls:
        """Returns the object whose calls on the group apply to the weights of a run."""

    @abstractmethod
    def reopen(self, run: str, rank: int) -> None:
        """Gives weights to a run, which must then load a checkpoint."""

    @abstractmethod
    def _store(self, run: str) -> CheckpointStore:
        """Returns the store of a run's checkpoints."""

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Gives a new run the weights of a checkpoint.

        Raises:
            CheckpointError: the checkpoint's files are missing or damaged.
        """
        self.reopen(run, saved.rank)
        self.load(run, saved, with_optimizer=with_optimizer)

    def load(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Loads a checkpoint of this or another run into a run.

        The checkpoint is first copied, by hard links, to the run's checkpoints. A recovery of ranks loads the copy,
        since a client may have deleted the checkpoint.

        Raises:
            CheckpointError: the checkpoint's files are missing or damaged.
        """
        target = self._store(run).named(_copy_name(saved)).root
        if not target.exists():
            _copy_folder(self._catalogue.folder(saved), target)
        self.calls(run).load(name=target.name, weights_only=not with_optimizer)


class AdapterPerRun(_RunWeights):
    """Gives each run an adapter of rank up to lora.rank."""

    def __init__(self, config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> None:
        super().__init__(config, group, catalogue)
        assert config.lora.rank is not None
        self._most, self._alpha = config.lora.rank, config.lora.alpha
        self.trained = f"adapters of lora.targets={list(config.lora.targets)}"
        folder = read_model_folder(config.model.path, with_weights=False)
        self._parts = ModelSpec.from_config(folder.config).adapted_parts(config.lora.targets)

    def switches(self, rank: int) -> dict[str, bool]:
        """Returns True for the parts that lora.targets adapts; if `rank` is 0 (all weights), for all parts."""
        return {name: rank == 0 or part in self._parts for name, part in _PARTS}

    def check_rank(self, rank: int) -> None:
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
        """Gives a new run an adapter with weights drawn from `seed`, or from a random seed if `seed` is None."""
        drawn_from = secrets.randbits(31) if seed is None else seed
        self._group.create_adapter(adapter_of(run), rank=rank, alpha=self._alpha, seed=drawn_from)

    def reopen(self, run: str, rank: int) -> None:
        self._group.create_adapter(adapter_of(run), rank=rank, alpha=self._alpha)

    def end(self, run: str) -> None:
        """Deletes the run's adapter, and files that no client can name: copies, and checkpoints without a name."""
        try:
            self._group.delete_adapter(adapter_of(run))
        finally:
            store = self._store(run)
            copies = (path for path in (store.root / NAMED).glob("*") if is_copy(path.name))
            unnamed = (path for path in store.root.glob("*") if path.name != NAMED)
            for path in [*copies, *unnamed]:
                with suppress(OSError):
                    remove(path)

    def save(self, run: str, step: int, loop_state: dict[str, Any], name: str | None, *, overwrite: bool) -> None:
        """Writes a checkpoint of a run: under a name, or under `step` if `name` is None.

        Raises:
            CheckpointError: the name is taken, or the checkpoint cannot be written.
        """
        self.calls(run).save(step, loop_state, name, overwrite)

    def load_own(self, run: str, checkpoint: Checkpoint) -> None:
        """Loads one of the run's own checkpoints; raises the errors of `load`."""
        if checkpoint.name is None:
            self.calls(run).load(checkpoint.step)
        else:
            self.calls(run).load(name=checkpoint.name)

    def export(self, run: str, folder: Path) -> None:
        """Writes the run's adapter as a PEFT folder."""
        self.calls(run).export_adapter(folder)

    def _store(self, run: str) -> CheckpointStore:
        return CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run))


class ModelByTurns(_RunWeights):
    """Gives all weights of the model to one run at a time, from the run's beginning to its end.

    The initial weights of the group are saved once, and a new run begins with them or with a client's checkpoint. The
    numbered checkpoints of all runs form one sequence; the loop state of each has the id of its run. When a run has
    begun, a checkpoint without such an id is written, so that a recovery of ranks never loads an earlier run's state.
    """

    trained = "all weights of its model"

    def __init__(self, config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> None:
        super().__init__(config, group, catalogue)
        self._dtype = config.precision.compute_dtype
        self._newest = max(self._store("").steps(), default=-1)
        self._changed = threading.Condition()
        self._holder: str | None = None
        group.save(0, name=_BEGINNING, overwrite=True)
        self._remove_copies()

    def check_rank(self, rank: int) -> None:
        if rank != 0:
            raise ConfigError(
                f"rank={rank}, and this server trains {self.trained}, which is rank=0",
                field="lora_config.rank",
                hint="ask for rank=0, or start a server with lora.rank",
            )

    def check_free(self, running: Sequence[str]) -> None:
        """Raises StateError if `running`, the runs that are not about to end, is not empty."""
        if running:
            raise StateError(
                f"{running[0]} trains all weights of this server's model, which only one run can do at a time",
                field="model_seq_id",
                hint=f"begin when that run has ended; runs of a client that is silent for {SESSION_TIMEOUT_S:g} s end",
            )

    def calls(self, run: str) -> GroupCalls:
        return self._group

    def begin(self, run: str, rank: int, seed: int | None) -> None:
        """Waits until no run has the group, and loads the initial weights with a new optimiser; ignores `seed`."""
        self._take(run)
        self._group.load(name=_BEGINNING, weights_only=True)
        self._mark_beginning(None)

    def begin_from(self, run: str, saved: Saved, *, with_optimizer: bool) -> None:
        """Waits until the previous run has ended, and loads the checkpoint."""
        self._take(run)
        self.load(run, saved, with_optimizer=with_optimizer)
        self._mark_beginning(_copy_name(saved))

    def reopen(self, run: str, rank: int) -> None:
        """Gives the group to the run; raises StateError if another run has the group."""
        if self._holder is not None:
            raise StateError(
                f"{self._holder} and {run} have not ended, and only one run at a time can train all weights of a model",
                field="run.dir",
                hint="move the record of one of these runs out of run.dir/service/runs",
            )
        self._take(run)

    def end(self, run: str) -> None:
        """Frees the group for the next run."""
        with self._changed:
            if self._holder == run:
                self._holder = None
                self._changed.notify_all()

    def save(self, run: str, step: int, loop_state: dict[str, Any], name: str | None, *, overwrite: bool) -> None:
        """Writes a checkpoint under `name`; None means the next number in the sequence of all runs."""
        if name is None:
            self._group.save(self._next_number(), loop_state)
        else:
            self._group.save(step, loop_state, whole_name(run, name), overwrite)
        self._group.finish_save()  # clients expect the checkpoint to be on disk

    def load_own(self, run: str, checkpoint: Checkpoint) -> None:
        if checkpoint.name is None:
            self._group.load(checkpoint.step)
        else:
            self._group.load(name=whole_name(run, checkpoint.name))

    def export(self, run: str, folder: Path) -> None:
        """Writes the model as a Hugging Face folder in precision.compute_dtype."""
        self._group.export_hf(folder, self._dtype)

    def _store(self, run: str) -> CheckpointStore:
        return CheckpointStore.of_run(self._run_dir)

    def _take(self, run: str) -> None:
        """Waits until the previous run has ended, and marks the group as taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            self._holder = run

    def _next_number(self) -> int:
        self._newest += 1
        return self._newest

    def _mark_beginning(self, loaded_copy: str | None) -> None:
        self._group.save(self._next_number(), {})
        self._group.finish_save()
        self._remove_copies(but=loaded_copy)

    def _remove_copies(self, but: str | None = None) -> None:
        for folder in (self._store("").root / NAMED).glob(f"{COPY}*"):
            if folder.name != but:
                shutil.rmtree(folder, ignore_errors=True)


RunWeights = AdapterPerRun | ModelByTurns


def run_weights_of(config: RunConfig, group: GroupCalls, catalogue: Catalogue) -> RunWeights:
    """Returns an `AdapterPerRun` if lora.rank is set, otherwise a `ModelByTurns`."""
    return (ModelByTurns if config.lora.rank is None else AdapterPerRun)(config, group, catalogue)


def _copy_name(saved: Saved) -> str:
    return f"{COPY}{hashlib.sha256(f'{saved.path}@{saved.time}'.encode()).hexdigest()}"


def _copy_folder(source: Path, target: Path) -> None:
    """Copies a checkpoint's folder, with hard links if the file system has them.

    Raises:
        CheckpointError: the source is missing. ResourceError: the disk is full or fails.
    """
    part = target.with_name(f".{target.name}.part")
    with disk_reported(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        try:
            shutil.copytree(source, part, copy_function=link_or_copy, ignore=shutil.ignore_patterns(".lock"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{source.name} is not there any more", field="path", hint="load another") from error
        except shutil.Error as error:  # the error has the errors of all files; the first of them is enough
            raise OSError(error.args[0][0][2]) from error
        part.replace(target)
