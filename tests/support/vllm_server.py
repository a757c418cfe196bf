"""What a server of vLLM 0.32 answers on the routes that an engine uses, as the real one was seen to; with faults.

It takes weights from a broadcast group, as the workers of vLLM do. Real servers: tests/engines/real/test_vllm.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch
from safetensors.torch import load_file

from slimefsdp.weight_sync.broadcast import BroadcastGroup
from slimefsdp.weight_sync.buckets import OpenedBuffers, check_digest, packed_bytes, unpack
from tests.support.table_server import (
    EMBEDDING,
    Adapter,
    CommonFaults,
    Refused,
    TableServer,
    adapter_of_folder,
    next_logits,
)


@dataclass
class Faults(CommonFaults):
    """How a server differs from one that works."""

    version: str = "0.32.0"
    has_dev_mode: bool = True
    has_plugin: bool = True
    has_scale_out: bool = True
    has_runtime_lora: bool = True
    refuses_folders: bool = False  # of adapters
    said: dict[str, Any] = field(default_factory=dict)  # of itself, what is otherwise right
    choice: dict[str, Any] = field(default_factory=dict)  # of each sample, laid over what was drawn


class ProtocolServer(TableServer):
    """A `TableServer` that speaks as vLLM's does.

    Args:
        vocab_size: of the model that engines are told of.
        decode: texts of token ids, for stop texts.
    """

    def __init__(self, vocab_size: int, model_type: str, decode: Any, max_model_len: int = 64) -> None:
        self.faults = Faults()
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._said = {
            "protocol": 4,
            "backend": "slimefsdp",
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 20,
            "max_model_len": max_model_len,
            "vocab_size": vocab_size,
            "model_type": model_type,
            "max_lora_rank": 8,
            "max_loras": 4,
            "lora_modules": None,
        }
        self.folders: dict[str, Path] = {}  # of adapters, by the names that they had
        self._held: Adapter | None = None  # that updates brought
        self._scale: float | None = None  # of the one that comes
        self._coming: dict[str, torch.Tensor] | None = None
        self._bucket = 0
        self._group: BroadcastGroup | None = None
        self._buffers = OpenedBuffers()
        super().__init__(decode)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()

    def error(self, refused: Exception) -> Any:
        return {"error": {"message": str(refused)}}

    def answer(self, route: str, query: str, body: Any) -> tuple[int, Any]:
        if route in DEV_ROUTES and not self.faults.has_dev_mode:
            self.calls.append(route)
            return 404, {"detail": "Not Found"}
        return super().answer(route, query, body)

    # ------------------------------------------------------------------ what it is

    def on_health(self, query: str, body: Any) -> None:
        return None

    def on_version(self, query: str, body: Any) -> Any:
        return {"version": self.faults.version}

    def on_get_world_size(self, query: str, body: Any) -> Any:
        return {"world_size": 1}

    def on_collective_rpc(self, query: str, body: Any) -> Any:
        if not self.faults.has_plugin:
            raise Refused(500, "'CPUWorker' object has no attribute 'slimefsdp_worker'")
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
        assert self._is_paused and "weights" not in self.asleep, "an update beside sampling, or into nothing"
        if self._coming is not None:
            raise Refused(500, "start_weight_update called while a weight update is already active.")
        self._coming, self._bucket, self._scale = {}, 0, None

    def on_update_weights(self, query: str, body: Any) -> Any:
        if self._coming is None:
            raise Refused(500, "start_weight_update must be called before update_weights.")
        info = body["update_info"]
        self._scale = info.get("adapter_scale")
        if info.get("folder") is not None:
            for file in sorted(Path(info["folder"]).glob("*.safetensors")):
                self._coming.update(load_file(file))
            if self._scale is not None:
                found = adapter_of_folder(Path(info["folder"]) / "adapter")
                assert abs(found.scale - self._scale) < 1e-12
                self._coming.update(found.matrices)
            return
        layout = list(zip(info["names"], info["dtypes"], info["shapes"], strict=True))
        try:
            if info.get("buffer") is not None:
                flat = self._buffers.get(info["buffer"])[: packed_bytes(layout)].clone()
            else:
                assert self._group is not None
                flat = self._group.broadcast(torch.empty(packed_bytes(layout), dtype=torch.uint8))
            check_digest(flat, info.get("digest"))
            if self._bucket == self.faults.failing_bucket:
                raise Refused(500, f"bucket {self._bucket} cannot be loaded")
        except Exception:
            self._coming = None
            raise
        self._bucket += 1
        for (_, tensor), parts in zip(unpack(flat, layout), info["parts"], strict=True):
            for name, expert, start, end in parts:
                self._coming[name] = tensor if expert is None else tensor[expert, start:end]

    def on_finish_weight_update(self, query: str, body: Any) -> Any:
        if self._coming is None:
            raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
        matrices = {name: one for name, one in self._coming.items() if name.startswith("base_model.model.")}
        self.tensors.update({name: one for name, one in self._coming.items() if name not in matrices})
        if matrices:
            assert self._scale is not None
            self._held = Adapter(matrices, self._scale)
            self.adapters = dict.fromkeys(self.adapters, self._held)
        self._coming = None
        if body:
            self.version = body["weight_version"]

    def on_v1_models(self, query: str, body: Any) -> Any:
        return {"data": [{"id": name} for name in ("policy", *self.adapters)]}

    def on_v1_load_lora_adapter(self, query: str, body: Any) -> Any:
        if not self.faults.has_runtime_lora:
            raise Refused(404, "Not Found")
        if not body:
            raise Refused(400, "2 validation errors: lora_name, lora_path")
        if body["lora_name"] in self.adapters:
            raise Refused(400, f"The lora adapter {body['lora_name']!r} has already been loaded.")
        if body["lora_path"] == "slimefsdp:adapter":
            assert self._held is not None
            self.adapters[body["lora_name"]] = self._held
        elif self.faults.refuses_folders:
            raise Refused(500, "expected target modules, but received something else")
        else:
            self.adapters[body["lora_name"]] = adapter_of_folder(Path(body["lora_path"]))
            self.folders[body["lora_name"]] = Path(body["lora_path"])
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def on_v1_unload_lora_adapter(self, query: str, body: Any) -> Any:
        if body["lora_name"] not in self.adapters:
            raise Refused(404, f"The lora adapter {body['lora_name']!r} cannot be found.")
        del self.adapters[body["lora_name"]]
        return f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

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
        self._fall_asleep()
        with self._state:
            self._is_paused = True

    def on_wake_up(self, query: str, body: Any) -> Any:
        self._awake(parse_qs(query)["tags"])
        self.on_resume(query, body)

    # ------------------------------------------------------------------ sampling

    def on_abort_requests(self, query: str, body: Any) -> Any:
        self._abort(body.get("request_ids") or None)

    def on_inference_v1_abort_requests(self, query: str, body: Any) -> Any:
        self._abort(self._running & set(body["request_ids"]))  # others are unknown to it

    def on_inference_v1_generate(self, query: str, body: Any) -> Any:
        if not self.faults.has_scale_out:
            raise Refused(403, "This endpoint is disabled by default.")
        if "token_ids" not in body:
            raise Refused(400, "validation errors: token_ids")
        if body.get("model") is not None and body["model"] not in self.adapters:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        self.asked.append(body)
        params, name = body["sampling_params"], f"generate-tokens-{body['request_id']}"
        if len(body["token_ids"]) + params["max_tokens"] > self.max_model_len:
            raise Refused(400, "too long")
        piece = self._drawn(
            name, body["token_ids"], most=params["max_tokens"], temperature=params["temperature"], seed=params["seed"],
            ends=params["stop_token_ids"], stops=params.get("stop", ()),
        )  # fmt: skip
        content = [
            {"token_id": one, "logprob": value} for one, value in zip(piece.tokens, piece.log_probs, strict=True)
        ]
        spans = [{"version": piece.version, "start": 0, "end": len(piece.tokens)}] if piece.tokens else None
        choice = {
            "token_ids": piece.tokens,
            "logprobs": {"content": content},
            "finish_reason": piece.reason,
            "weight_versions": spans,
        }
        answer: dict[str, Any] = {"choices": [{**choice, **self.faults.choice}]}
        if params.get("prompt_logprobs") is not None:
            pairs = pairwise(body["token_ids"])
            answer["prompt_logprobs"] = [None, *(self._of_prompt(*pair, params["prompt_logprobs"]) for pair in pairs)]
        return answer

    def _of_prompt(self, before: int, token: int, k: int) -> Any:
        """The token's own log-prob first, then those of the k likeliest."""
        log_probs = next_logits(self.tensors[EMBEDDING], before).log_softmax(-1)
        chosen = dict.fromkeys([token, *log_probs.topk(k).indices.tolist()])
        return {str(one): {"logprob": float(log_probs[one]), "rank": 1, "decoded_token": None} for one in chosen}


DEV_ROUTES = (
    "/weight_info", "/get_world_size", "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/sleep",
    "/wake_up",
)  # fmt: skip
