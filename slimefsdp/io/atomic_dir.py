"""Creates folders atomically: a folder is written under a temporary name, flushed to disk, then renamed."""

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
    """Yields an empty folder to write files into, which becomes `path` at the end; missing parents are made.

    Raises:
        CheckpointError: `path` is taken, or the disk is full or fails. Neither `path` nor the temporary folder is left,
            also if the block raises.
    """
    target = _resolved(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        require_free_folder(target)
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.iterdir(), partial]:
            sync(file)
        partial.rename(target)  # fails if the target has been filled in the meantime; replaces an empty folder
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}", field="path", hint="check the space and the permissions there"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # does not exist after the rename


def require_free_folder(path: str | Path, *, field: str = "path") -> None:
    """Checks that `path` can be made, or is an empty folder, since existing files are never overwritten.

    Args:
        field: the setting or argument with this value, for the error.

    Raises:
        CheckpointError: it is taken, or no folder can be made there.
    """
    target = _resolved(path, field)
    if not can_keep_files(target):
        message = f"{target} is in a folder that keeps no files"
    elif target.is_dir():
        taken = next((child.name for child in target.iterdir()), None)
        if taken is not None:
            message = f"{target} is not empty (it holds {taken!r})"
        elif target.is_mount():  # such as a volume of a container; nothing can be renamed onto it
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
        target.exists()  # raises for a name that is too long
        return target
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a zero byte
        raise CheckpointError(f"{str(path)!r} is no path: {error}", field=field, hint="name a folder") from error
