"""Writes a report as one HTML page that loads nothing: its scripts, styles and data are in the file.

Texts of models, prompts and settings are untrusted. They are data of the page's script, which puts them into the page
as text only, and the page's policy lets a browser run no other script and send nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from actors.report.data import Report
from slimefsdp.errors import printable
from slimefsdp.io.files import io_reported, write_synced

_PARTS = {
    "charts": "uplot/uPlot.iife.min.js",
    "chart_style": "uplot/uPlot.min.css",
    "script": "page.js",
    "style": "page.css",
}


def write_page(report: Report, target: Path) -> None:
    """Writes the page, and replaces an existing file atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    with io_reported(target, "report"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_synced(temporary, page_of(report).encode())
        temporary.replace(target)


def page_of(report: Report) -> str:
    """Returns the page's HTML."""
    folder = files("actors.report")
    values = {name: (folder / path).read_text(encoding="utf-8") for name, path in _PARTS.items()}
    values["policy"] = (
        f"default-src 'none'; script-src {_hash(values['charts'])} {_hash(values['script'])}; "
        f"style-src {_hash(values['chart_style'])} {_hash(values['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    values["title"] = html.escape(printable(", ".join(run.name for run in report.runs), kept=""))
    # without `<` no text can end the element that holds the data
    values["data"] = json.dumps(_printable(asdict(report)), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _hash(text: str) -> str:
    """Returns the source expression by which a content security policy allows an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _printable(value: Any) -> Any:
    """Returns a plain value with the control characters of all its texts escaped."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
