"""Recognises ids of models and data sets of the Hugging Face hub, and finds or downloads their files.

A name is an id if it has the form `owner/name`, optionally followed by `@` and a branch, tag or commit, and there is no
such path on this machine. huggingface_hub puts the files into the user's cache, in a folder for each commit, whose
content does not change. Importing this module does not import huggingface_hub.
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

# a name with the ending of a data file is not an id
_ID = re.compile(
    r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?<!\.jsonl)(?<!\.json)(?<!\.parquet)(?:@(\w[\w./-]*))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# patterns of the files to download; they exclude other formats in subfolders, and Mistral's own copy of the weights
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHT_FILES = ("*.safetensors",)
_OTHER_FORMATS = ("*/*", "consolidated*")
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow", "README.md")


@dataclass(frozen=True, slots=True)
class HubId:
    """Names a model or data set of the hub and a revision; None means the newest revision of the main branch."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Returns the id if the path has the form of an id and does not exist; otherwise None."""
        match = _ID.fullmatch(str(path))
        return cls(match[1], match[2]) if match and not os.path.lexists(path) else None

    @property
    def is_commit(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def reads_like_id(text: str) -> bool:
    """Returns whether a text has the form of an id, even if a path of this name exists."""
    return _ID.fullmatch(text) is not None


def id_of_snapshot(folder: Path) -> HubId | None:
    """Returns the id and commit of the model in a folder of the user's cache; None for other folders."""
    repository = folder.parent.parent  # cache/models--owner--name/snapshots/commit
    kind, *owner_and_name = repository.name.split("--")
    if kind != "models" or len(owner_and_name) != 2 or folder.parent.name != "snapshots":
        return None
    hub_id = HubId("/".join(owner_and_name), folder.name)
    return hub_id if hub_id.is_commit and repository.parent == _cache() else None


def bytes_there(hub_id: HubId, kind: Kind) -> int:
    """Returns the bytes of a model or data set in the user's cache, including unfinished downloads."""
    total = 0
    for file in (_cache() / f"{kind}s--{hub_id.name.replace('/', '--')}" / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # the file was renamed after its download
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
    """Returns the folder with the files of a model or data set; downloads those that are not in the user's cache.

    The result is cached per process, so a repeated call does not contact the hub. With HF_HUB_OFFLINE=1 the hub is
    never contacted.

    Args:
        field: the setting that errors name.
        error: the class of the errors.
        with_weights: whether to include a model's weights, in addition to its configuration and tokenizer.
        shows_bars: whether huggingface_hub shows its progress bars.

    Raises:
        `error`: the hub has no such name or revision, or denies access; or the hub cannot be reached and the cache is
            incomplete.
        ResourceError: the disk is full.
    """
    try:
        return _snapshot(hub_id, kind, with_weights, shows_bars, _cache())
    except Exception as refusal:  # errors of huggingface_hub and of its HTTP library
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
    snapshot_folder = snapshot_download(
        hub_id.name,
        repo_type=kind,
        revision=hub_id.revision,
        cache_dir=folder,
        allow_patterns=list(of_model if kind == "model" else _DATA_FILES),
        ignore_patterns=list(_OTHER_FORMATS) if kind == "model" else None,
        tqdm_class=None if shows_bars else Silent,
    )
    return Path(snapshot_folder)


def is_out_of_reach(error: SlimeError) -> bool:
    """Returns whether an error of `snapshot` says that the hub could not be reached, which may be temporary."""
    from huggingface_hub import errors

    return isinstance(error.__cause__, errors.LocalEntryNotFoundError)


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def _in_words(refusal: Exception, hub_id: HubId, kind: Kind) -> tuple[str, str]:
    """Returns texts that describe the problem and the way out."""
    from huggingface_hub import constants, errors

    what = "model" if kind == "model" else "data set"
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    answers = (getattr(error, "response", None) for error in (refusal, refusal.__cause__))
    status = next((answer.status_code for answer in answers if answer is not None), None)
    if isinstance(refusal, errors.GatedRepoError):
        problem = f"this {what} is gated, and you have no access to it (status {status})"
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
        is_part = isinstance(refusal, getattr(errors, "IncompleteSnapshotError", ()))  # missing before version 2
        cut = "is not whole" if is_part else "is not"
        problem = f"there is no such path here, {why}, and it {cut} in the cache, {_cache()}"
        download = "hf download" if kind == "model" else "hf download --repo-type dataset"
        revision = f" --revision {hub_id.revision}" if hub_id.revision else ""
        way_out = f"correct the path, or run `{download} {hub_id.name}{revision}` where there is network"
        return problem, way_out
    return f"the hub's files cannot be had: {_short_error(refusal)}", "try again, or give a local folder"


def _cause(refusal: Exception) -> str:
    return _short_error(refusal.__cause__ if isinstance(refusal.__cause__, Exception) else refusal)


def _short_error(refusal: Exception) -> str:
    return f"{type(refusal).__name__}: {' '.join(str(refusal).split())[:300]}"
