"""A rollout server on threads of the test, for engines to speak to by HTTP: its routes are methods, its model a table.

The model says what follows each token: products of rows of the embedding that the server has been sent.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file

EMBEDDING = "model.embed_tokens.weight"


@dataclass
class CommonFaults:
    """How a server differs from one that works, whichever it is."""

    log_prob: float | None = None  # instead of each one's
    weight_version: str | None = None  # instead of what was committed
    failing_bucket: int | None = None  # of an update
    answer_after_s: float = 0.0
    token_s: float = 0.0  # how long a token takes
    aborts_all: bool = False
    longer_start_after_s: float = 0.0  # those of more than one token, which cannot be aborted before
    is_gone: bool = False  # cuts every connection
    cuts: int = 0  # so many connections of those that sample
    may_start: threading.Event | None = None  # those of more than one token wait for it, and cannot be aborted before
    late_route: tuple[str, float] | None = None  # one that is answered so many seconds after it was done
    end_reason: str | None = None  # what it says of a sample that an end token has ended


def next_logits(embedding: torch.Tensor, token: int) -> torch.Tensor:
    """The server's model, [vocab]."""
    return embedding[token] @ embedding.T


@dataclass
class Piece:
    """What was drawn by one request."""

    tokens: list[int]
    log_probs: list[float]
    reason: str
    matched: int | str | None  # what ended it
    version: str | None  # of the weights, of the last token


class Adapter(NamedTuple):
    """What a server holds of one; it takes no part in what is drawn."""

    matrices: dict[str, torch.Tensor]  # as peft names them
    scale: float


def adapter_of_folder(folder: Path) -> Adapter:
    """One in peft's format."""
    facts = json.loads((folder / "adapter_config.json").read_text())
    matrices = load_file(folder / "adapter_model.safetensors")
    assert {len(one) for name, one in matrices.items() if ".lora_A." in name} == {facts["r"]}
    return Adapter(matrices, facts["lora_alpha"] / facts["r"])


class TableServer:
    """Serves until it is closed; /a/b is answered by `on_a_b(query, body)`.

    Args:
        decode: texts of token ids, for stop texts.
    """

    faults: Any

    def __init__(self, decode: Any) -> None:
        self.calls: list[str] = []  # routes, in order
        self.tensors: dict[str, torch.Tensor] = {}  # committed
        self.adapters: dict[str, Adapter] = {}  # by the names that requests may have
        self.asked: list[dict[str, Any]] = []  # to generate
        self.version = "default"
        self.when: dict[str, Callable[[], None]] = {}  # called after a route has done what it does
        self.is_raw = False  # log-probs are at temperature 1, whatever a token is drawn at
        self._decode = decode
        self._state = threading.Condition()
        self._is_paused = False
        self.asleep: set[str] = set()  # of weights and kv_cache, as a server on a GPU frees them
        self._running: set[str] = set()
        self._waiting: set[str] = set()  # of these, which came to a paused server
        self.aborted: set[str] = set()
        self._http = _Http(self)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        """Connections that are open are cut."""
        self._abort(None)
        self._http.shutdown()
        self._http.server_close()
        self._leave_group()

    def _leave_group(self) -> None:
        raise NotImplementedError

    def error(self, refused: Exception) -> Any:
        """The body of an answer with another status than 200."""
        raise NotImplementedError

    def answer(self, route: str, query: str, body: Any) -> tuple[int, Any]:
        self.calls.append(route)
        method = getattr(self, "on_" + route.strip("/").replace("/", "_"), None)
        if method is None:
            return 404, {"detail": "Not Found"}
        try:
            done = method(query, body)
            self.when.get(route, lambda: None)()
            return 200, done
        except Refused as refused:
            return refused.status, self.error(refused)
        except Exception as error:  # what a worker raised
            return 500, self.error(Exception(f"{type(error).__name__}: {error}"))

    def _fall_asleep(self) -> None:
        assert not self._running and not self.asleep, "it must be idle, and awake as a whole"
        self.asleep = {"weights", "kv_cache"}
        self.tensors.clear()

    def _awake(self, tags: Collection[str]) -> None:
        assert set(tags) <= self.asleep, "what is awake cannot wake up"
        self.asleep -= set(tags)

    def _drawn(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        most: int,
        temperature: float,
        seed: int,
        ends: Collection[int],
        stops: Sequence[str],
    ) -> Piece:
        """A sample under this name, until it ends or is aborted; greedy at temperature 0."""
        assert not self.asleep
        time.sleep(self.faults.longer_start_after_s if most > 1 else 0.0)
        if self.faults.may_start is not None and most > 1:
            self.faults.may_start.wait()
        with self._state:
            self._running.add(name)
        try:
            piece = self._draw(name, prompt, most, temperature, torch.Generator().manual_seed(seed), ends, stops)
        finally:
            with self._state:
                self._running.discard(name)
                self._state.notify_all()
        time.sleep(self.faults.answer_after_s)
        return piece

    def _draw(self, name, prompt, most, temperature, rng, ends, stops) -> Piece:  # type: ignore[no-untyped-def]
        piece = Piece([], [], "length", None, None)
        while len(piece.tokens) < most:
            with self._state:
                while self._is_paused and not piece.tokens and name not in self.aborted:
                    self._waiting.add(name)
                    self._state.notify_all()
                    self._state.wait()
                self._waiting.discard(name)
                if name in self.aborted or self.faults.aborts_all:
                    piece.reason = "abort"
                    return piece
                piece.version = self.version
            logits = next_logits(self.tensors[EMBEDDING], ([*prompt, *piece.tokens])[-1])
            if temperature == 0:
                log_probs = logits.log_softmax(-1)
                token = int(logits.argmax())
            else:
                log_probs = (logits / temperature).log_softmax(-1)
                token = int(torch.multinomial(log_probs.exp(), 1, generator=rng))
            if self.is_raw:
                log_probs = logits.log_softmax(-1)
            piece.tokens.append(token)
            piece.log_probs.append(float(log_probs[token]) if self.faults.log_prob is None else self.faults.log_prob)
            time.sleep(self.faults.token_s)
            text = self._decode(piece.tokens) if stops else ""
            matched: list[int | str] = [stop for stop in stops if stop in text] or [token] * (token in ends)
            if matched:
                piece.reason, piece.matched = "stop", matched[0]
                if self.faults.end_reason is not None and token in ends:
                    piece.reason = self.faults.end_reason
                return piece
        return piece

    def _abort(self, names: Collection[str] | None) -> None:
        with self._state:
            self.aborted.update(self._running if names is None else names)
            self._state.notify_all()


class Refused(Exception):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: TableServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(length)) if length else None)

    def _answer(self, body: Any) -> None:
        address = urlsplit(self.path)
        status, answer = self.server.owner.answer(address.path, address.query, body)
        faults = self.server.owner.faults
        if faults.late_route is not None and address.path == faults.late_route[0]:
            time.sleep(faults.late_route[1])
        is_cut = faults.cuts > 0 and bool(body) and "sampling_params" in body
        faults.cuts -= is_cut
        if faults.is_gone or is_cut:
            self.close_connection = True
            return
        said = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
        content = said.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # whoever asked is gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass
