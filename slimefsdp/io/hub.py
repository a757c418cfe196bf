"""Models and data sets of the Hugging Face hub: which names are ids, and the folders that their files are kept in.

A name is an id where it is written `owner/name`, with `@` and a branch, a tag or a commit behind it if not the newest
is meant, and nothing on this machine has that path. Files come through huggingface_hub into the user's own cache, whose
folders are named by commit: once there, they do not change. Importing this file costs no huggingface_hub.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

from slimefsdp.errors import ResourceError, SlimeError

Kind = Literal["model", "dataset"]

# the ending of a file is no id's
_ID = re.compile(
    r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?<!\.jsonl)(?<!\.json)(?<!\.parquet)(?:@(\w[\w./-]*))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# what a folder is read for; neither what other formats have below it, nor Mistral's own copy of the weights
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHT_FILES = ("*.safetensors",)
_OTHER_FORMATS = ("*/*", "consolidated*")
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow", "README.md")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model or data set, and the revision of it that is meant; None: the newest of its main branch."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """The id that a path reads like; None where it does not, or where something is at that path."""
        found = _ID.fullmatch(str(path))
        return cls(found[1], found[2]) if found and not os.path.lexists(path) else None

    @property
    def is_commit(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def reads_like_id(text: str) -> bool:
    """Whether a text has the form of an id, whatever is on this machine."""
    return _ID.fullmatch(text) is not None


def id_of_snapshot(folder: Path) -> HubId | None:
    """The id, with its commit, of the model that a folder of the user's cache has; None for any other folder."""
    repository = folder.parent.parent  # cache/models--owner--name/snapshots/commit
    kind, *owner_and_name = repository.name.split("--")
    if kind != "models" or len(owner_and_name) != 2 or folder.parent.name != "snapshots":
        return None
    found = HubId("/".join(owner_and_name), folder.name)
    return found if found.is_commit and repository.parent == _cache() else None


def bytes_there(hub_id: HubId, kind: Kind) -> int:
    """Returns how many bytes of a model or data set are in the user's cache, unfinished downloads included."""
    total = 0
    for file in (_cache() / f"{kind}s--{hub_id.name.replace('/', '--')}" / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # it came to its end and has another name now
            continue
    return total


def snapshot(
    hub_id: HubId,
    kind: Kind,
    *,
    field: str,
    error: type[SlimeError],
    with_weights: bool = True,
    shows_bars: bool = True,
) -> Path:
    """The folder with the files of a model or data set: those that are not in the user's cache come from the hub.

    Once in a process: asked again for the same, it answers without looking at the hub. Under HF_HUB_OFFLINE=1 it never
    does.

    Args:
        field: the setting that errors name.
        error: their class.
        with_weights: of a model; without, its configuration and tokenizer alone.
        shows_bars: huggingface_hub's own bars of progress.

    Raises:
        `error`: the hub has no such name or revision, or gives no access to it; it cannot be reached, and the cache has
            not all of it. ResourceError: the disk is full.
    """
    try:
        return _snapshot(hub_id, kind, with_weights, shows_bars, _cache())
    except Exception as refusal:  # huggingface_hub's own classes, and those of what it asks the network by
        if isinstance(refusal, OSError) and refusal.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"{field}={hub_id}: no room for it in {_cache()}",
                field=field,
                hint="make room there, or set HF_HOME to another disk",
            ) from refusal
        problem, hint = _in_words(refusal, hub_id, kind)
        raise error(f"{field}={hub_id}: {problem}", field=field, hint=hint) from refusal


@cache
def _snapshot(hub_id: HubId, kind: Kind, with_weights: bool, shows_bars: bool, folder: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    of_model = _MODEL_FILES + (_WEIGHT_FILES if with_weights else ())
    found = snapshot_download(
        hub_id.name,
        repo_type=kind,
        revision=hub_id.revision,
        cache_dir=folder,
        allow_patterns=list(of_model if kind == "model" else _DATA_FILES),
        ignore_patterns=list(_OTHER_FORMATS) if kind == "model" else None,
        tqdm_class=None if shows_bars else Silent,
    )
    return Path(found)


def is_out_of_reach(error: SlimeError) -> bool:
    """Whether an error of `snapshot` says that the hub could not be asked, which may be otherwise when a run starts."""
    from huggingface_hub import errors

    return isinstance(error.__cause__, errors.LocalEntryNotFoundError)


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def _in_words(refusal: Exception, hub_id: HubId, kind: Kind) -> tuple[str, str]:
    """Returns what is wrong, and the way out."""
    from huggingface_hub import constants, errors

    what = "model" if kind == "model" else "data set"
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    answers = (getattr(error, "response", None) for error in (refusal, refusal.__cause__))
    status = next((answer.status_code for answer in answers if answer is not None), None)
    if isinstance(refusal, errors.GatedRepoError):
        problem = f"this {what} is gated, and whoever asks has no access to it (status {status})"
        return problem, f"ask for access on its page of the hub, and {log_in}"
    if isinstance(refusal, errors.RepositoryNotFoundError):
        problem = f"neither is there such a path here, nor a {what} of this name on the hub"
        return problem, f"correct the name; for a private {what} {log_in}"
    if isinstance(refusal, errors.RevisionNotFoundError):
        return f"the {what} has no revision {hub_id.revision or 'main'}", "name one of its branches, tags or commits"
    if status in (401, 403):
        return f"the hub gives no access to it (status {status})", log_in
    if isinstance(refusal, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE=1" if constants.HF_HUB_OFFLINE else f"the hub cannot be reached ({_cause(refusal)})"
        is_part = isinstance(refusal, getattr(errors, "IncompleteSnapshotError", ()))  # which versions before 2 lack
        cut = "is not whole" if is_part else "is not"
        problem = f"there is no such path here, {why}, and it {cut} in the cache, {_cache()}"
        download = "hf download" if kind == "model" else "hf download --repo-type dataset"
        revision = f" --revision {hub_id.revision}" if hub_id.revision else ""
        way_out = f"correct the path, or run `{download} {hub_id.name}{revision}` where there is network"
        return problem, way_out
    return f"the hub's files cannot be had: {_said(refusal)}", "try again, or give a local folder"


def _cause(refusal: Exception) -> str:
    return _said(refusal.__cause__ if isinstance(refusal.__cause__, Exception) else refusal)


def _said(refusal: Exception) -> str:
    return f"{type(refusal).__name__}: {' '.join(str(refusal).split())[:300]}"
