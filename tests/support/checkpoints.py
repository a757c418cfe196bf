"""Checkpoints altered by somebody who writes the sums as well."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimefsdp.checkpoint.manifest import MANIFEST


def reseal(folder: Path) -> None:
    """Makes manifest.json vouch for the files as they are now."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["sha256"]
    for record in document["files"]:
        data = (folder / record["name"]).read_bytes()
        record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder, document)


def rewrite(folder: Path, document: dict[str, Any]) -> None:
    own = hashlib.sha256((json.dumps(document, indent=1) + "\n").encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(document | {"sha256": own}, indent=1) + "\n")


def forge_info(folder: Path, name: str, value: Any) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    del document["sha256"]
    document["info"].pop(name) if value is None else document["info"].update({name: value})
    rewrite(folder, document)


def forge_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "rank_00000.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    reseal(folder)
