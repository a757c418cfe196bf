"""The Hugging Face hub as tests need it: a cache that is laid out by hand, and a hub on this machine's loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from slimefsdp.io import hub

COMMITS = tuple(digit * 40 for digit in "abcdef")
Files = Mapping[str, bytes]


def use_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, *, endpoint: str | None = None) -> None:
    """Has this process and those it starts use a cache of the test's own; without an endpoint, offline."""
    offline = endpoint is None
    for name, value in (("HF_HUB_CACHE", str(cache)), ("HF_HUB_OFFLINE", str(int(offline)))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    if endpoint is not None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub._snapshot.cache_clear()


def files_of(folder: Path) -> dict[str, bytes]:
    """What a folder holds, by path in it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def lay_out(
    cache: Path, name: str, commit: str, files: Files, *, kind: hub.Kind = "model", refs: tuple[str, ...] = ("main",)
) -> Path:
    """What huggingface_hub leaves of a download; returns the snapshot's folder."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for path, data in files.items():
        blob = repository / "blobs" / hashlib.sha256(data).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = snapshot / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (2 + path.count("/")), "blobs", blob.name))
    for ref in refs:
        file = repository / "refs" / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    return snapshot


@dataclass
class Repository:
    """What the hub has under one name."""

    commits: dict[str, Files]
    refs: dict[str, str]  # branch or tag -> commit
    refusal: tuple[int, str] | None = None  # status, and what the header X-Error-Code says; of files alone, if gated


@dataclass
class Hub:
    """Serves repositories, by (kind, name), until the block ends; `sent` lists the files that somebody fetched."""

    repositories: dict[tuple[hub.Kind, str], Repository] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    asked: int = 0

    def __enter__(self) -> Self:
        class Handler(_Handler):
            hub = self

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.asked += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[is_api:]
        kind: hub.Kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[parts[0] in ("models", "datasets") :]
        owner, name, route, revision, *path = [*parts, "revision", "main"] if len(parts) == 2 else parts
        repository = self.hub.repositories.get((kind, f"{owner}/{name}"))
        if repository is None:
            self._send(401, code="RepoNotFound")
        elif repository.refusal is not None and not (repository.refusal[1] == "GatedRepo" and is_api):
            self._send(repository.refusal[0], code=repository.refusal[1])
        elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
            self._send(404, code="RevisionNotFound")
        else:
            self._send_of(route, commit, repository.commits[commit], "/".join(path))

    def _send_of(self, route: str, commit: str, files: Files, path: str) -> None:
        if route == "revision":
            self._send(200, json.dumps({"_id": "1", "id": "any/name", "sha": commit, "siblings": []}).encode())
        elif route == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif path not in files:
            self._send(404, code="EntryNotFound")
        else:
            if self.command == "GET":
                self.hub.sent.append(path)
            etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
            self._send(200, files[path], headers={"ETag": etag, "X-Repo-Commit": commit})

    def _send(
        self, status: int, body: bytes = b"", *, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "Content-Length": str(len(body)), **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
