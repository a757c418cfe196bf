"""A folder that appears whole or not at all: it is written beside its final place, flushed to disk, then renamed."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import sync
from slimefsdp.io.user_files import can_keep_files


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """An empty folder to write files into, which becomes `path` when the block ends; missing parents are made.

    Raises:
        CheckpointError: `path` is taken, or the disk refused. Nothing is left at `path` or beside it, also when the
            block raises.
    """
    target = _resolved(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        require_free_folder(target)
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.iterdir(), partial]:
            sync(file)
        partial.rename(target)  # fails if someone else filled the target meanwhile; replaces an empty folder
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}", field="path", hint="check the space and the permissions there"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename


def require_free_folder(path: str | Path, *, field: str = "path") -> None:
    """Whether `path` could be made, or is an empty folder: what is there is never overwritten.

    Args:
        field: whose value it is, for the error.

    Raises:
        CheckpointError: it is taken, or is where there can be no folder.
    """
    target = _resolved(path, field)
    if not can_keep_files(target):
        message = f"{target} is in a folder that keeps no files"
    elif target.is_dir():
        taken = next((child.name for child in target.iterdir()), None)
        if taken is not None:
            message = f"{target} is not empty (it holds {taken!r})"
        elif target.is_mount():  # a container's volume: nothing can be renamed onto it
            message = f"{target} is a mount point, which cannot be replaced"
        else:
            return
    elif target.exists():
        message = f"{target} is a file"
    elif not (existing := next(parent for parent in target.parents if parent.exists())).is_dir():
        message = f"{target} cannot be made in {existing}, which is a file"
    else:
        return
    raise CheckpointError(message, field=field, hint="choose another folder, or one inside it")


def _resolved(path: str | Path, field: str = "path") -> Path:
    try:
        target = Path(path).expanduser().resolve()
        target.exists()  # which a name that is too long has no answer to
        return target
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a link that leads to itself, a zero byte
        raise CheckpointError(f"{str(path)!r} is no path: {error}", field=field, hint="name a folder") from error
