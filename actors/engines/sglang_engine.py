"""The SGLang engine: a Ray actor beside a server of SGLang, that it starts or finds at a URL, and speaks to by HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from actors.engines.child_server import ChildServer
from actors.engines.protocol import ENGINE_TAGS, EngineTag, GroupKind, Request, TensorInfo, Transport
from actors.engines.served import ServedEngine
from actors.engines.served_samples import PartialSample
from actors.engines.server_client import Refusal
from actors.engines.server_launch import ADAPTER, ServerFacts
from actors.engines.sglang_facts import check_server
from actors.engines.sglang_launch import start_server
from actors.engines.sglang_samples import body_of, check_request, read_answer
from slimefsdp.models.hf_weight_names import hub_parts
from slimefsdp.models.peft_folder import ADAPTER_FOLDER
from slimefsdp.sampling.params import FinishReason

_CONTROL_S = 10.0  # for what is tried after something else has failed


class SglangEngine(ServedEngine):
    """See `ServedEngine`. The server's workers make the broadcast group by torch.distributed."""

    NAME: ClassVar[str] = "SGLang"
    ALIVE: ClassVar[str] = "/model_info"  # /health samples a token, which waits while weights come
    GENERATE: ClassVar[str] = "/generate"
    GROUP: ClassVar[GroupKind] = "torch"
    TRANSPORTS: ClassVar[tuple[Transport, ...]] = ("broadcast", "disk")
    _group_name: str | None = None  # of the group that the server's workers are in

    def _start_server(self) -> tuple[ChildServer, str]:
        return start_server(self.config, self._folder, self.index)

    def _check_server(self) -> ServerFacts:
        return check_server(self._client, self.config, self._folder)

    # ------------------------------------------------------------------ sampling

    def _check_request(self, request: Request, most_tokens: int) -> None:
        check_request(request, most_tokens)

    def _body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        body = body_of(request, number, drawn, request_id)
        return body if self._adapter_scale is None else {**body, "lora_path": ADAPTER}

    def _read(self, answer: Any, body: dict[str, Any], versions: set[int]) -> tuple[PartialSample, FinishReason | None]:
        return read_answer(answer, body, vocab_size=self._known().vocab_size, versions=versions)

    def _end_requests(self, ids: Sequence[str], *, are_all: bool) -> None:
        if are_all:  # else of one that came meanwhile, it would not be known why it ended
            self._versions.interrupt()
            self._client.post("/abort_request", {"abort_all": True}, timeout_s=60.0)
            return
        for one in ids:
            self._client.post("/abort_request", {"rid": one}, timeout_s=60.0)

    # ------------------------------------------------------------------ weights

    def _join(
        self, address: str, port: int, rank: int, world_size: int, backend: str, *, group_timeout_s: float
    ) -> None:
        from slimefsdp.weight_sync.broadcast import torch_group_name

        name = torch_group_name(port)
        for old in {name, self._group_name} - {None}:  # of this engine, or of one before at the same server
            with suppress(Refusal):
                self._client.post(
                    "/destroy_weights_update_group", {"group_name": old}, timeout_s=self._sync_timeout_s
                )  # fmt: skip
        info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        self._update("/init_weights_update_group", info, timeout_s=group_timeout_s)
        self._group_name = name

    def _open_update(self) -> None:
        self._update("/pause_generation", {"mode": "abort"})
        if self._comes_by_disk:  # which is a whole update to SGLang
            return
        try:
            self._client.post("/begin_weight_update", {"selector": "target"}, timeout_s=self._sync_timeout_s)
        except Refusal:  # one that nobody has finished is open
            with suppress(Refusal):
                self._client.post("/end_weight_update", {}, timeout_s=self._sync_timeout_s)
            self._update("/begin_weight_update", {"selector": "target"})

    def _take_folder(self, path: Path, *, has_weights: bool) -> None:
        body = {
            "model_path": str(path),
            "load_format": "auto",  # else the server's own: dummy
            "flush_cache": False,  # once, at the end
            "abort_all_requests": False,
        }
        if has_weights:
            self._update("/update_weights_from_disk", body)
        if self._adapter_scale is not None:
            # the name stays: requests that wait at the paused server ask for what has it when they go on
            with suppress(Refusal):  # there was none yet
                self._client.post("/unload_lora_adapter", {"lora_name": ADAPTER}, timeout_s=self._sync_timeout_s)
            self._update("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(path / ADAPTER_FOLDER)})

    @property
    def _comes_by_disk(self) -> bool:
        return self.config.rollout.transport == "disk"

    def _take_bucket(self, tensors: Sequence[TensorInfo], **how: Any) -> None:
        assert not any(how.values()), "the settings refuse checksums, and its transports ipc"
        # a parameter of all experts holds what SGLang takes for each, one after another; it skips a head that is tied
        kind = self._folder.model_type
        named = [(part.name, one.dtype, part.shape) for one in tensors for part in hub_parts(kind, one.name, one.shape)]
        body = {
            "names": [name for name, _, _ in named],
            "dtypes": [dtype for _, dtype, _ in named],
            "shapes": [list(shape) for _, _, shape in named],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "selector": "target",
            "flush_cache": False,  # once, at the end
            "abort_all_requests": False,
        }
        self._update("/update_weights_from_distributed", body)

    def _close_update(self, version: int) -> None:
        if not self._comes_by_disk:
            self._update("/end_weight_update", {})
        self._synced("/flush_cache", lambda limit_s: self._client.tell("/flush_cache", timeout_s=limit_s), None)
        self._update("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._update("/continue_generation", {"torch_empty_cache": False})

    def _server_version(self) -> str:
        return str(self._asked("/model_info").get("weight_version"))

    def _end_waiting(self) -> None:
        # what waits at a paused server cannot be aborted there; what it draws now is thrown away
        self._client.post("/continue_generation", {"torch_empty_cache": False}, timeout_s=_CONTROL_S)
        self._client.post("/abort_request", {"abort_all": True}, timeout_s=_CONTROL_S)

    def _is_of_group(self, route: str, refusal: Refusal) -> bool:
        # torch's words in a server, which are many, do not tell whose fault it was
        return route in ("/init_weights_update_group", "/update_weights_from_distributed")

    # ------------------------------------------------------------------ its life

    def _free_memory(self) -> None:
        self._update("/release_memory_occupation", {"tags": list(ENGINE_TAGS)})

    def _take_memory(self, tags: Sequence[EngineTag]) -> None:
        self._update("/resume_memory_occupation", {"tags": list(tags)})
