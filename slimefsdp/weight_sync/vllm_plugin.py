"""What runs inside vLLM: a weight-transfer backend called `slimefsdp`, and what a worker says of itself.

vLLM imports this by `--worker-extension-cls slimefsdp.weight_sync.vllm_plugin.WorkerExtension`, in an environment where
nothing but torch and vLLM can be counted on. Each call of vLLM's /update_weights takes one bucket from the group in
which the trainer broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slimefsdp.weight_sync.broadcast import BroadcastGroup
from slimefsdp.weight_sync.packed_bucket import check_digest, packed_bytes, unpack
from slimefsdp.weight_sync.shared_buffer import OpenedBuffers

BACKEND = "slimefsdp"
PROTOCOL = 2  # of the two classes below; both sides must have the same


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the group meets; `rank_offset` is the rank in it of this server's first worker."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, in the order in which its tensors are packed; or a folder of weights.

    `parts` says of each tensor which tensors of a Hugging Face folder it holds: (name, expert or None, first row, end),
    rows being those of the expert; a whole tensor is one part without an expert, and one to be left out has no part.
    The bytes come by broadcast, or lie in a `buffer` of `slimefsdp.weight_sync.shared_buffer`.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    parts: list[list[tuple[str, int | None, int, int]]]
    digest: str | None = None  # of the bytes
    buffer: dict[str, Any] | None = None
    folder: str | None = None


class BroadcastWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes buckets from a BroadcastGroup into a model that vLLM has already arranged for its kernels."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: BroadcastGroup | None = None
    _is_open = False  # an update has begun and not ended
    _buffers = OpenedBuffers()  # one engine a process

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the group, and leaves the one before."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = BroadcastGroup(
            init_info.address, init_info.port, rank, init_info.world_size, init_info.backend, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Makes the model ready to be loaded anew."""
        if self._is_open:
            # a layer that an update which failed has left half loaded counts that half, and some of its parameters have
            # no loader any more
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes one bucket; returns when the model has it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":  # of vLLM's own method; without an accelerator, its last line raises
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Takes one bucket, or a folder, and hands it to vLLM's loader.

        Raises:
            BroadcastError: as BroadcastGroup. OSError: the buffer or the folder is not on this machine.
            ValueError: a tensor of another dtype than the model's, or bytes that were altered on the way.
        """
        info = update_info
        if info.folder is not None:
            self.model.load_weights(self._of_folder(Path(info.folder)))
            return
        layout = list(zip(info.names, info.dtypes, info.shapes, strict=True))
        flat = self._bytes(packed_bytes(layout), info.buffer)
        check_digest(flat, info.digest)
        for name, dtype, _ in layout:
            self._require_dtype(name, dtype)
        self.model.load_weights(
            [
                (part, tensor if expert is None else tensor[expert, start:end])
                for (_, tensor), parts in zip(unpack(flat, layout), info.parts, strict=True)
                for part, expert, start, end in parts
            ]
        )

    def _bytes(self, count: int, buffer: dict[str, Any] | None) -> torch.Tensor:
        """Those of a bucket, in memory of their own: vLLM keeps views of it until a layer is complete."""
        if buffer is not None:
            return self._buffers.get(buffer)[:count].clone()
        if self._group is None:
            raise RuntimeError("update_weights before init_weight_transfer_engine")
        # before anything else can fail, or rank 0 and the other engines would wait for this one
        return self._group.broadcast(torch.empty(count, dtype=torch.uint8, device=self.device))

    def _of_folder(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file  # vLLM reads weights by it

        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                self._require_dtype(name, str(tensor.dtype).removeprefix("torch."))
                yield name, tensor

    def _require_dtype(self, name: str, dtype: str) -> None:
        own = str(self.model_config.dtype).removeprefix("torch.")
        if dtype != own:
            raise ValueError(f"tensor {name!r} came as {dtype}, and the model's weights are {own}")

    def finish_weight_update(self) -> None:
        """Arranges what came for the kernels."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_head()
        self._is_open = False

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _refresh_tied_head(self) -> None:
        """A head that is the embedding has a copy of it, arranged for the kernels, which vLLM leaves as it was."""
        head = getattr(self.model, "lm_head", None)
        if head is not None and getattr(self.model.config, "tie_word_embeddings", False):
            head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Its methods become those of vLLM's workers, for POST /collective_rpc."""

    def slimefsdp_worker(self) -> dict[str, Any]:
        """What an engine must know before it uses this server."""
        config = self.vllm_config  # type: ignore[attr-defined]
        model, transfer = config.model_config, config.weight_transfer_config
        return {
            "protocol": PROTOCOL,
            "version": vllm.__version__,
            "backend": None if transfer is None else transfer.backend,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "max_model_len": int(model.max_model_len),
            "vocab_size": int(model.hf_text_config.vocab_size),
            "model_type": str(model.hf_text_config.model_type),
        }


if BACKEND not in WeightTransferEngineFactory._registry:  # a worker may import this twice
    WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeights)
