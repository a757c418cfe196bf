"""What a server of vLLM 0.32 answers on the routes that an engine uses, as the real one was seen to; with faults.

Its model is a table of what follows each token: products of rows of the embedding that it has been sent. It takes
weights from a broadcast group, as vLLM's workers do. What real servers do, tests/engines/test_vllm.py asks one.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch

from slimefsdp.weight_sync.broadcast import BroadcastGroup, packed_bytes, unpack

EMBEDDING = "model.embed_tokens.weight"


@dataclass
class Faults:
    """How a server differs from one that works."""

    version: str = "0.32.0"
    has_dev_mode: bool = True
    has_plugin: bool = True
    has_scale_out: bool = True
    said: dict[str, Any] = field(default_factory=dict)  # of itself, what is otherwise right
    choice: dict[str, Any] = field(default_factory=dict)  # of each sample, laid over what was drawn
    log_prob: float | None = None  # instead of each one's
    weight_version: str | None = None  # instead of what was committed
    failing_bucket: int | None = None  # of an update
    answer_after_s: float = 0.0
    token_s: float = 0.0  # how long a token takes
    aborts_all: bool = False
    is_gone: bool = False  # cuts every connection


def next_logits(embedding: torch.Tensor, token: int) -> torch.Tensor:
    """The server's model, [vocab]."""
    return embedding[token] @ embedding.T


class ProtocolServer:
    """Serves until it is closed, on threads of this process.

    Args:
        vocab_size: of the model that engines are told of.
        stops: texts of token ids, for stop texts.
    """

    def __init__(self, vocab_size: int, model_type: str, decode: Any, max_model_len: int = 64) -> None:
        self.faults = Faults()
        self.calls: list[str] = []  # routes, in order
        self.tensors: dict[str, torch.Tensor] = {}  # committed
        self.asked: list[dict[str, Any]] = []  # to generate
        self.vocab_size, self.max_model_len, self._decode = vocab_size, max_model_len, decode
        self._said = {
            "protocol": 1,
            "backend": "slimefsdp",
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": max_model_len,
            "vocab_size": vocab_size,
            "model_type": model_type,
        }
        self.version = "default"
        self._coming: dict[str, torch.Tensor] | None = None
        self._bucket = 0
        self._group: BroadcastGroup | None = None
        self._state = threading.Condition()
        self._is_paused = False
        self._running: set[str] = set()
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
        if self._group is not None:
            self._group.close()

    def answer(self, route: str, query: str, body: Any) -> tuple[int, Any]:
        self.calls.append(route)
        if route in DEV_ROUTES and not self.faults.has_dev_mode:
            return 404, {"detail": "Not Found"}
        method = getattr(self, "on_" + route.strip("/").replace("/", "_"), None)
        if method is None:
            return 404, {"detail": "Not Found"}
        try:
            return 200, method(query, body)
        except _Refused as refused:
            return refused.status, {"error": {"message": str(refused)}}
        except Exception as error:  # as vLLM answers what a worker raised
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}

    # ------------------------------------------------------------------ what it is

    def on_health(self, query: str, body: Any) -> None:
        return None

    def on_version(self, query: str, body: Any) -> Any:
        return {"version": self.faults.version}

    def on_get_world_size(self, query: str, body: Any) -> Any:
        return {"world_size": 1}

    def on_collective_rpc(self, query: str, body: Any) -> Any:
        if not self.faults.has_plugin:
            raise _Refused(500, "'CPUWorker' object has no attribute 'slimefsdp_worker'")
        assert body == {"method": "slimefsdp_worker"}
        return {"results": [{**self._said, **self.faults.said}]}

    # ------------------------------------------------------------------ weights

    def on_weight_info(self, query: str, body: Any) -> Any:
        return {"weight_version": self.faults.weight_version or self.version}

    def on_init_weight_transfer_engine(self, query: str, body: Any) -> Any:
        info = body["init_info"]
        if self._group is not None:
            self._group.close()
        self._group = BroadcastGroup(
            info["address"], info["port"], info["rank_offset"], info["world_size"], info["backend"], info["timeout_s"]
        )

    def on_start_weight_update(self, query: str, body: Any) -> Any:
        assert self._is_paused, "an update beside sampling"
        if self._coming is not None:
            raise _Refused(500, "start_weight_update called while a weight update is already active.")
        self._coming, self._bucket = {}, 0

    def on_update_weights(self, query: str, body: Any) -> Any:
        if self._coming is None:
            raise _Refused(500, "start_weight_update must be called before update_weights.")
        info = body["update_info"]
        layout = list(zip(info["names"], info["dtypes"], info["shapes"], strict=True))
        assert self._group is not None
        try:
            flat = self._group.broadcast(torch.empty(packed_bytes(layout), dtype=torch.uint8))
            if self._bucket == self.faults.failing_bucket:
                raise _Refused(500, f"bucket {self._bucket} cannot be loaded")
        except Exception:
            self._coming = None
            raise
        self._bucket += 1
        for (_, tensor), parts in zip(unpack(flat, layout), info["parts"], strict=True):
            for name, expert, start, end in parts:
                self._coming[name] = tensor if expert is None else tensor[expert, start:end]

    def on_finish_weight_update(self, query: str, body: Any) -> Any:
        if self._coming is None:
            raise _Refused(500, "finish_weight_update called without a matching start_weight_update.")
        self.tensors.update(self._coming)
        self._coming = None
        if body:
            self.version = body["weight_version"]

    def on_reset_prefix_cache(self, query: str, body: Any) -> Any:
        return {"success": True}

    def on_pause(self, query: str, body: Any) -> Any:
        assert query == "mode=abort&clear_cache=true"
        with self._state:
            self._is_paused = True
        self._abort(None)

    def on_resume(self, query: str, body: Any) -> Any:
        with self._state:
            self._is_paused = False
            self._state.notify_all()

    def on_sleep(self, query: str, body: Any) -> Any:
        assert query == "level=2"
        with self._state:
            self._is_paused = True

    def on_wake_up(self, query: str, body: Any) -> Any:
        self.on_resume(query, body)

    # ------------------------------------------------------------------ sampling

    def on_abort_requests(self, query: str, body: Any) -> Any:
        self._abort(body.get("request_ids") or None)

    def on_inference_v1_abort_requests(self, query: str, body: Any) -> Any:
        self._abort(body["request_ids"])

    def on_inference_v1_generate(self, query: str, body: Any) -> Any:
        if not self.faults.has_scale_out:
            raise _Refused(403, "This endpoint is disabled by default.")
        if "token_ids" not in body:
            raise _Refused(400, "validation errors: token_ids")
        self.asked.append(body)
        params, name = body["sampling_params"], f"generate-tokens-{body['request_id']}"
        if len(body["token_ids"]) + params["max_tokens"] > self.max_model_len:
            raise _Refused(400, "too long")
        with self._state:
            self._running.add(name)
        try:
            choice = self._draw(body["token_ids"], params, name)
        finally:
            with self._state:
                self._running.discard(name)
        time.sleep(self.faults.answer_after_s)
        return {"choices": [{**choice, **self.faults.choice}]}

    def _draw(self, prompt: list[int], params: dict[str, Any], name: str) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(params["seed"])
        tokens: list[int] = []
        log_probs: list[float] = []
        reason, version = "length", None
        while len(tokens) < params["max_tokens"]:
            with self._state:
                while self._is_paused and not tokens and name not in self.aborted:
                    self._state.wait()
                if name in self.aborted or self.faults.aborts_all:
                    reason = "abort"
                    break
                version = self.version
            logits = next_logits(self.tensors[EMBEDDING], ([*prompt, *tokens])[-1])
            if params["temperature"] == 0:
                all_log_probs = logits.log_softmax(-1)
                token = int(logits.argmax())
            else:
                all_log_probs = (logits / params["temperature"]).log_softmax(-1)
                token = int(torch.multinomial(all_log_probs.exp(), 1, generator=rng))
            tokens.append(token)
            log_probs.append(float(all_log_probs[token]) if self.faults.log_prob is None else self.faults.log_prob)
            time.sleep(self.faults.token_s)
            text = self._decode(tokens) if params.get("stop") else ""
            if token in params["stop_token_ids"] or any(stop in text for stop in params.get("stop", ())):
                reason = "stop"
                break
        content = [{"token_id": one, "logprob": value} for one, value in zip(tokens, log_probs, strict=True)]
        spans = [{"version": version, "start": 0, "end": len(tokens)}] if tokens else None
        return {
            "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans
        }  # fmt: skip

    def _abort(self, names: list[str] | None) -> None:
        with self._state:
            self.aborted.update(self._running if names is None else names)
            self._state.notify_all()


DEV_ROUTES = (
    "/weight_info", "/get_world_size", "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/sleep",
    "/wake_up",
)  # fmt: skip


class _Refused(Exception):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: ProtocolServer) -> None:
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
        if self.server.owner.faults.is_gone:
            self.close_connection = True
            return
        content = b"" if answer is None else json.dumps(answer).encode()
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
