"""Extends vLLM's workers with a weight-transfer backend called `slimefsdp` and a description of the worker.

vLLM imports this by `--worker-extension-cls slimefsdp.weight_sync.vllm_plugin.WorkerExtension`, in an environment where
only torch and vLLM can be assumed. Each call of vLLM's /update_weights receives one bucket from the trainer's broadcast
group.

An adapter's matrices are received like weights and kept here. vLLM drops all adapters when an update ends, and loads an
adapter again for the next request that names it. The adapter with the path `HELD_ADAPTER` is loaded from the kept
matrices instead of a folder. Requests that arrive during an update are therefore sampled with the new adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slimefsdp.weight_sync.broadcast import BroadcastGroup
from slimefsdp.weight_sync.buckets import OpenedBuffers, check_digest, packed_bytes, unpack

BACKEND = "slimefsdp"
PROTOCOL = 4  # version of `InitInfo` and `UpdateInfo`; must be equal at trainer and server
HELD_ADAPTER = "slimefsdp:adapter"  # path that means the adapter received by updates
ADAPTER_FOLDER = "adapter"  # subfolder of a folder of weights, in peft's format
_FILES = "*.safetensors"
_MATRIX = (".lora_A.weight", ".lora_B.weight")  # ends of the names of an adapter's matrices


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Describes a broadcast group; `rank_offset` is the rank of this server's first worker."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Describes a bucket, with its tensors in the order in which they are packed, or a folder of weights.

    `parts` lists, for each tensor of the bucket, the Hugging Face tensors in it as (name, expert, first row, end row).
    Rows are those of the expert; if the expert is None, the part is the whole tensor. A tensor without parts is
    skipped. The bytes are broadcast, or are in the shared memory with the handle `buffer`
    (`slimefsdp.weight_sync.buckets`).
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    parts: list[list[tuple[str, int | None, int, int]]]
    digest: str | None = None  # sha256 of the bytes
    buffer: dict[str, Any] | None = None
    folder: str | None = None
    adapter_scale: float | None = None  # the factor on B A x, if the bucket has matrices of an adapter


@dataclass
class HeldAdapter:
    """Holds an adapter's matrices on the host, under peft's names, and the factor on B A x."""

    matrices: dict[str, torch.Tensor]
    scale: float

    def made_for(self, manager: Any, lora_id: int) -> LoRAModel:
        """Returns the adapter as vLLM's LoRAModel; `manager` is vLLM's LoRAModelManager.

        Raises:
            ValueError: vLLM does not support this rank, or adapters of some module.
        """
        rank = next(matrix.shape[0] for name, matrix in self.matrices.items() if name.endswith(_MATRIX[0]))
        facts = PEFTHelper(r=rank, lora_alpha=self.scale * rank, target_modules=[])  # type: ignore[arg-type]
        facts.validate_legal(manager.lora_config)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        model = LoRAModel.from_lora_tensors(
            lora_id,
            {name: matrix.clone() for name, matrix in self.matrices.items()},  # vLLM scales the matrices in place
            facts,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        if unknown := sorted(model.loras.keys() - known):
            raise ValueError(f"vLLM takes no adapter of {unknown[0]}, nor of {len(unknown) - 1} others")
        return model


class BroadcastWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets from a BroadcastGroup into a model whose weights vLLM has already processed for its kernels."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: BroadcastGroup | None = None
    _is_reloading = False  # whether an update has passed weights to vLLM's loader
    _adapter: HeldAdapter | None = None  # the matrices that the current update has brought so far
    _buffers = OpenedBuffers()  # shared by all instances, since a process has one engine

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = BroadcastGroup(
            init_info.address, init_info.port, rank, init_info.world_size, init_info.backend, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        self._adapter = None
        if self._is_reloading:
            # a failed update may have left a layer half loaded, without its parameters' loaders, which vLLM must finish
            # first
            finalize_layerwise_reload(self.model, self.model_config)
            self._is_reloading = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives one bucket; returns when the model has the weights."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":  # vLLM's own method would raise on a CPU
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives one bucket, or reads a folder, and passes the tensors to vLLM's loader.

        Raises:
            BroadcastError: see BroadcastGroup.
            OSError: the buffer or the folder is not on this machine.
            ValueError: a tensor has another dtype than the model, or the bytes were altered in transit.
        """
        info = update_info
        if info.folder is not None:
            folder = Path(info.folder)
            if any(folder.glob(_FILES)):  # otherwise the folder has only an adapter
                self._load(self._of_folder(folder))
            self._keep(self._of_folder(folder / ADAPTER_FOLDER), info.adapter_scale)
            return
        layout = list(zip(info.names, info.dtypes, info.shapes, strict=True))
        flat = self._bytes(packed_bytes(layout), info.buffer)
        check_digest(flat, info.digest)
        for name, dtype, _ in layout:
            self._require_dtype(name, dtype)
        named = [
            (part, tensor if expert is None else tensor[expert, start:end])
            for (_, tensor), parts in zip(unpack(flat, layout), info.parts, strict=True)
            for part, expert, start, end in parts
        ]
        if weights := [item for item in named if not item[0].endswith(_MATRIX)]:
            self._load(weights)
        self._keep([item for item in named if item[0].endswith(_MATRIX)], info.adapter_scale)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._is_reloading:
            self._is_reloading = True
            initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)

    def _keep(self, matrices: Iterable[tuple[str, torch.Tensor]], scale: float | None) -> None:
        """Stores matrices of an adapter until the update ends."""
        for name, tensor in matrices:
            if scale is None:
                raise ValueError(f"{name} came without the scale of its adapter")
            self._adapter = self._adapter or HeldAdapter({}, scale)
            self._adapter.matrices[name] = tensor.to("cpu", copy=True)

    def _bytes(self, count: int, buffer: dict[str, Any] | None) -> torch.Tensor:
        """Receives the bytes of a bucket into new memory, since vLLM keeps views of them until a layer is complete."""
        if buffer is not None:
            return self._buffers.get(buffer)[:count].clone()
        if self._group is None:
            raise RuntimeError("update_weights before init_weight_transfer_engine")
        # no operation that may fail comes before this broadcast, because rank 0 and the other engines wait for it
        return self._group.broadcast(torch.empty(count, dtype=torch.uint8, device=self.device))

    def _of_folder(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file  # a dependency of vLLM

        for file in sorted(folder.glob(_FILES)):
            for name, tensor in load_file(file).items():
                self._require_dtype(name, str(tensor.dtype).removeprefix("torch."))
                yield name, tensor

    def _require_dtype(self, name: str, dtype: str) -> None:
        own = str(self.model_config.dtype).removeprefix("torch.")
        if dtype != own:
            raise ValueError(f"tensor {name!r} came as {dtype}, and the model's weights are {own}")

    def finish_weight_update(self) -> None:
        """Processes new weights for vLLM's kernels, and lets later requests use a new adapter.

        Raises:
            ValueError: vLLM does not support this adapter.
        """
        if self._is_reloading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._refresh_tied_head()
            self._is_reloading = False
        if self._adapter is not None:
            manager = getattr(self.model, "lora_manager", None)
            if manager is None:
                raise ValueError("an adapter came, and the server was started without --enable-lora")
            self._adapter.made_for(manager, 1)  # so that a faulty adapter fails this update, and not later requests
            manager.slimefsdp_held, self._adapter = self._adapter, None

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _refresh_tied_head(self) -> None:
        """Updates the head's processed copy of a tied embedding, which vLLM does not do."""
        head = getattr(self.model, "lm_head", None)
        head = getattr(head, "base_layer", head)  # removes vLLM's wrapper for adapters
        if head is not None and getattr(self.model.config, "tie_word_embeddings", False):
            head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Adds methods to vLLM's workers, which POST /collective_rpc calls."""

    def slimefsdp_worker(self) -> dict[str, Any]:
        """Returns the properties of this server that an engine checks before using it."""
        config = self.vllm_config  # type: ignore[attr-defined]
        model, transfer, lora = config.model_config, config.weight_transfer_config, config.lora_config
        return {
            "protocol": PROTOCOL,
            "version": vllm.__version__,
            "backend": None if transfer is None else transfer.backend,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "max_logprobs": int(model.max_logprobs),
            "max_model_len": int(model.max_model_len),
            "vocab_size": int(model.hf_text_config.vocab_size),
            "model_type": str(model.hf_text_config.model_type),
            "max_lora_rank": None if lora is None else int(lora.max_lora_rank),
            "max_loras": None if lora is None else min(int(lora.max_loras), int(lora.max_cpu_loras)),
            "lora_modules": None if lora is None or lora.target_modules is None else list(lora.target_modules),
        }


_load_from_folder = WorkerLoRAManager._load_adapter


def _load_adapter(self: Any, request: LoRARequest) -> LoRAModel:
    """Loads the received adapter if the path is `HELD_ADAPTER`; otherwise loads a folder, as vLLM does."""
    if request.lora_path != HELD_ADAPTER:
        return _load_from_folder(self, request)
    manager = self._adapter_manager
    adapter: HeldAdapter | None = getattr(manager, "slimefsdp_held", None)
    if adapter is None:
        raise ValueError("no update has brought an adapter")
    return adapter.made_for(manager, request.lora_int_id)


if BACKEND not in WeightTransferEngineFactory._registry:  # a worker may import this module twice
    WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeights)
    WorkerLoRAManager._load_adapter = _load_adapter
