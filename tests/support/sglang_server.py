"""What a server of SGLang 0.5.23 answers on the routes that an engine uses, as its source says; with faults.

It joins the group for weights as SGLang's workers do, with torch's functions for a named group that is no default one.
Nothing here was compared with a server that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from tests.support.table_server import CommonFaults, Refused, TableServer, adapter_of_folder

_WAITS = timedelta(seconds=60)  # SGLang leaves torch's default of 30 minutes


@dataclass
class Faults(CommonFaults):
    """How a server differs from one that works."""

    server_info: dict[str, Any] = field(default_factory=dict)  # laid over what it says of itself
    model_info: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)  # laid over each sample, as is what follows
    meta_info: dict[str, Any] = field(default_factory=dict)
    own_ends: frozenset[int] = frozenset()  # tokens that end a sample by the server's own files


class SglangServer(TableServer):
    """A `TableServer` that speaks as SGLang's does.

    Args:
        decode: texts of token ids, for stop texts.
    """

    def __init__(self, model_type: str, decode: Any, max_req_input_len: int = 64) -> None:
        self.faults = Faults()
        self._server_info = {
            "version": "0.5.23",
            "dtype": "float32",
            "dp_size": 1,
            "pp_size": 1,
            "tp_size": 1,
            "speculative_algorithm": None,
            "skip_tokenizer_init": False,
            "disaggregation_mode": "null",
            "quantization": None,
            "preferred_sampling_params": None,
            "max_req_input_len": max_req_input_len,
            "enable_lora": True,
            "max_lora_rank": 8,
        }
        self._model_type = model_type
        self._groups: dict[str, Any] = {}
        self._coming: dict[str, torch.Tensor] | None = None  # where an update is open
        self._bucket = 0
        super().__init__(decode)

    def _leave_group(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups = {}

    def error(self, refused: Exception) -> Any:
        return {"success": False, "message": str(refused)}

    # ------------------------------------------------------------------ what it is

    def on_server_info(self, query: str, body: Any) -> Any:
        return {**self._server_info, **self.faults.server_info}

    def on_model_info(self, query: str, body: Any) -> Any:
        version = self.faults.weight_version or self.version
        said = {"model_type": self._model_type, "is_generation": True, "weight_version": version}
        return {**said, **self.faults.model_info}

    # ------------------------------------------------------------------ weights

    def on_init_weights_update_group(self, query: str, body: Any) -> Any:
        name = body["group_name"]
        if name in self._groups:
            raise Refused(400, f"Failed to initialize custom process group: {name} has already been created")
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        try:
            self._groups[name] = _joined(address, body["rank_offset"], body["world_size"], body["backend"], name)
        except Exception as error:
            raise Refused(400, f"Failed to initialize custom process group: {error}.") from error
        return {"success": True, "message": ""}

    def on_destroy_weights_update_group(self, query: str, body: Any) -> Any:
        if body["group_name"] not in self._groups:
            raise Refused(400, "The group to be destroyed does not exist.")
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
        return {"success": True, "message": ""}

    def on_begin_weight_update(self, query: str, body: Any) -> Any:
        assert body == {"selector": "target"}
        assert self._is_paused, "an update beside sampling"
        if self._coming is not None:
            raise Refused(400, "a weight-update session is already open; call end_weight_update() first")
        self._coming, self._bucket = {}, 0
        return {"success": True, "message": "Success"}

    def on_update_weights_from_distributed(self, query: str, body: Any) -> Any:
        if self._coming is None:
            raise Refused(400, "must run between begin_weight_update() and end_weight_update()")
        assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", False)
        try:
            weights = _received(body, self._groups[body["group_name"]])
        except Exception as error:
            raise Refused(400, f"Failed to receive weights: {error}") from error
        if self._bucket == self.faults.failing_bucket:
            raise Refused(400, f"Failed to update parameter online: bucket {self._bucket}")
        self._bucket += 1
        self.tensors.update(weights)  # in place, as they come
        return {"success": True, "message": ""}

    def on_update_weights_from_disk(self, query: str, body: Any) -> Any:
        assert self._coming is None, "a folder in a weight-update session"
        assert (body["load_format"], body["flush_cache"]) == ("auto", False)
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.tensors.update(load_file(file))
        return {"success": True, "message": "Succeeded to update model weights."}

    def on_load_lora_adapter(self, query: str, body: Any) -> Any:
        assert self._is_paused and self._coming is None
        if body["lora_name"] in self.adapters:
            raise Refused(400, f"Failed to load LoRA adapter {body['lora_name']} because it is already loaded")
        self.adapters[body["lora_name"]] = adapter_of_folder(Path(body["lora_path"]))
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    def on_unload_lora_adapter(self, query: str, body: Any) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(400, f"LoRA with name {body['lora_name']} does not exist")
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    def on_end_weight_update(self, query: str, body: Any) -> Any:
        if self._coming is None:
            raise Refused(400, "no weight-update session is open; call begin_weight_update() first")
        self._coming = None
        return {"success": True, "message": "Success"}

    def on_flush_cache(self, query: str, body: Any) -> Any:
        assert not self._running, "Cache not flushed because there are pending requests."
        return "Cache flushed.\nPlease check backend logs for more details. \n"

    def on_update_weight_version(self, query: str, body: Any) -> Any:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.version}

    def on_pause_generation(self, query: str, body: Any) -> Any:
        assert body == {"mode": "abort"}
        with self._state:
            self._is_paused = True
        self._abort_running()
        with self._state:
            self._state.wait_for(lambda: self._waiting == self._running, timeout=30)
        return {"message": "Generation paused successfully.", "status": "ok"}

    def on_continue_generation(self, query: str, body: Any) -> Any:
        assert body == {"torch_empty_cache": False}
        with self._state:
            self._is_paused = False
            self._state.notify_all()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def on_release_memory_occupation(self, query: str, body: Any) -> None:
        assert set(body["tags"]) == {"kv_cache", "weights"}
        self._fall_asleep()

    def on_resume_memory_occupation(self, query: str, body: Any) -> None:
        self._awake(body["tags"])

    # ------------------------------------------------------------------ sampling

    def on_abort_request(self, query: str, body: Any) -> None:
        if body.get("abort_all"):
            self._abort_running()
        else:
            self._abort([body["rid"]] if body["rid"] in self._running - self._waiting else [])

    def on_generate(self, query: str, body: Any) -> Any:
        self.asked.append(body)
        params = body["sampling_params"]
        if len(body["input_ids"]) >= self._server_info["max_req_input_len"]:
            raise Refused(400, "Input length exceeds the maximum allowed length")
        if body.get("lora_path") is not None and body["lora_path"] not in self.adapters:
            raise Refused(400, f"Got LoRA adapter that has never been loaded: {body['lora_path']}")
        ends = () if params["ignore_eos"] else {*params.get("stop_token_ids", ()), *self.faults.own_ends}
        piece = self._drawn(
            body["rid"], body["input_ids"], most=params["max_new_tokens"], temperature=params["temperature"],
            seed=params["sampling_seed"], ends=ends, stops=params.get("stop", ()),
        )  # fmt: skip
        reason: dict[str, Any] = {"type": piece.reason}
        if piece.reason == "abort":
            reason |= {"message": "Aborted", "status_code": None, "err_type": None}
        elif piece.reason == "length":
            reason["length"] = params["max_new_tokens"]
        else:
            reason["matched"] = piece.matched
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(piece.log_probs, piece.tokens, strict=True)
            ],
            "completion_tokens": len(piece.tokens),
            "weight_version": piece.version or self.version,
            "weight_versions": [{"version": piece.version or self.version, "start": 0, "end": len(piece.tokens)}],
        }
        answer = {"text": "", "output_ids": piece.tokens, "meta_info": {**meta, **self.faults.meta_info}}
        return {**answer, **self.faults.answer}

    def _abort_running(self) -> None:
        """What the scheduler has; requests that came to a paused server are not there yet."""
        with self._state:
            names = self._running - self._waiting
        self._abort(names)


def _joined(address: str, rank: int, world_size: int, backend: str, name: str) -> Any:
    """A group as SGLang's init_custom_process_group makes it."""
    store, rank, world_size = next(dist.rendezvous(address, rank, world_size, timeout=_WAITS))
    store.set_timeout(_WAITS)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store),
        group_name=name, backend_options=None, timeout=_WAITS,
    )  # fmt: skip
    distributed_c10d._world.pg_group_ranks[group] = {place: place for place in range(world_size)}
    return group


def _received(body: dict[str, Any], group: Any) -> dict[str, torch.Tensor]:
    """The tensors of a flattened bucket: their bytes one after another, each at a multiple of its element's size."""
    dtypes = [getattr(torch, name) for name in body["dtypes"]]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    found, start = {}, 0
    for name, dtype, shape, size in zip(body["names"], dtypes, body["shapes"], sizes, strict=True):
        assert start % dtype.itemsize == 0, f"Unaligned received tensor {name}"
        found[name] = flat[start : start + size].view(dtype).reshape(shape)
        start += size
    return found
