"""The vLLM engine: a Ray actor beside a server of vLLM, which it starts or finds at a URL, and speaks to by HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from actors.engines.child_server import ChildServer
from actors.engines.protocol import EngineTag, Request, TensorInfo, Transport
from actors.engines.served import TIED_HEAD, ServedEngine
from actors.engines.served_samples import PartialSample
from actors.engines.server_client import Refusal
from actors.engines.server_launch import ADAPTER, ServerFacts
from actors.engines.vllm_facts import check_server
from actors.engines.vllm_launch import HELD_ADAPTER, start_server
from actors.engines.vllm_samples import body_of, check_request, read_answer
from slimefsdp.models.hf_weight_names import hub_parts
from slimefsdp.models.peft_folder import MATRICES, tensor_name
from slimefsdp.sampling.params import FinishReason


class VllmEngine(ServedEngine):
    """See `ServedEngine`. The other end of the broadcast group is `slimefsdp.weight_sync.vllm_plugin`."""

    NAME: ClassVar[str] = "vLLM"
    GENERATE: ClassVar[str] = "/inference/v1/generate"
    TRANSPORTS: ClassVar[tuple[Transport, ...]] = ("broadcast", "disk", "ipc")

    def _start_server(self) -> tuple[ChildServer, str]:
        return start_server(self.config, self._folder, self.index)

    def _check_server(self) -> ServerFacts:
        return check_server(self._client, self.config, self._folder)

    # ------------------------------------------------------------------ sampling

    def _check_request(self, request: Request, most_tokens: int) -> None:
        check_request(request, most_tokens)

    def _body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        body = body_of(request, number, drawn, request_id)
        return body if self._adapter_scale is None else {**body, "model": ADAPTER}

    def _read(self, answer: Any, body: dict[str, Any], versions: set[int]) -> tuple[PartialSample, FinishReason | None]:
        return read_answer(answer, body, vocab_size=self._known().vocab_size, versions=versions)

    def _end_requests(self, ids: Sequence[str], *, are_all: bool) -> None:
        names = [f"generate-tokens-{one}" for one in ids]
        self._client.post("/inference/v1/abort_requests", {"request_ids": names}, timeout_s=60.0)

    # ------------------------------------------------------------------ weights

    def _join(
        self, address: str, port: int, rank: int, world_size: int, backend: str, *, group_timeout_s: float
    ) -> None:
        info = {
            "address": address,
            "port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "backend": backend,
            "timeout_s": group_timeout_s,
        }
        # the server's workers give up by themselves, and look for rank 0 a second time before
        self._update("/init_weight_transfer_engine", {"init_info": info}, timeout_s=3 * group_timeout_s + 30)

    def _open_update(self) -> None:
        self._update("/pause?mode=abort&clear_cache=true")
        try:
            self._client.post("/start_weight_update", timeout_s=self._sync_timeout_s)
        except Refusal:  # one that nobody has finished is open
            with suppress(Refusal):
                self._client.post("/finish_weight_update", timeout_s=self._sync_timeout_s)
            self._update("/start_weight_update")

    def _take_bucket(self, tensors: Sequence[TensorInfo], **how: Any) -> None:
        info = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "parts": [self._parts(tensor) for tensor in tensors],
            "adapter_scale": self._adapter_scale,
            **how,
        }
        self._update("/update_weights", {"update_info": info})

    def _take_folder(self, path: Path, *, has_weights: bool) -> None:
        info: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "parts": [], "folder": str(path)}
        info["adapter_scale"] = self._adapter_scale
        self._update("/update_weights", {"update_info": info})

    def _parts(self, tensor: TensorInfo) -> list[tuple[str, int | None, int, int]]:
        """As slimefsdp.weight_sync.vllm_plugin.UpdateInfo; a head that is the embedding has none.

        Matrices of adapters go by peft's names, which is how vLLM knows them.
        """
        if tensor.name.endswith(MATRICES):
            module, _, matrix = tensor.name.rpartition(".lora_")
            return [(tensor_name(module, matrix), None, 0, 0)]
        if tensor.name == TIED_HEAD and self._is_tied:
            return []
        parts = hub_parts(self._folder.model_type, tensor.name, tensor.shape)
        return [(part.name, part.expert, part.start, part.end) for part in parts]

    def _close_update(self, version: int) -> None:
        self._update("/finish_weight_update", {"weight_version": str(version)})
        if self._adapter_scale is not None:
            self._name_adapter()
        self._update("/reset_prefix_cache")
        self._update("/resume")

    def _name_adapter(self) -> None:
        """Has the server know the adapter by its name: once, since its workers find what it holds."""
        known = {one["id"] for one in self._asked("/v1/models")["data"]}
        if ADAPTER not in known:
            self._told("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": HELD_ADAPTER})

    def _server_version(self) -> str:
        return str(self._asked("/weight_info").get("weight_version"))

    def _end_waiting(self) -> None:
        # a request that came to the server while it was paused would wait there
        self._client.post("/abort_requests", {}, timeout_s=10.0)

    # ------------------------------------------------------------------ its life

    def _free_memory(self) -> None:
        # level 2 drops the weights, which come anew in any case
        self._update("/sleep?level=2")

    def _take_memory(self, tags: Sequence[EngineTag]) -> None:
        self._update("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))
