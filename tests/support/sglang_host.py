"""SGLang's own HTTP routes, request types, sampler and weight updater, without its scheduler and kernels; a program.

An interpreter that has the package's files runs it, with `PORT ARGUMENTS` of a server of SGLang, a JSON list. What a
scheduler would do is done here: the model is a table, the products of rows of the embedding that was sent. So it shows
that SGLang takes what is sent to it, joins the group that it is told of, and what its log-probs are of; no more.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers.image_processing_utils
import transformers.processing_utils  # noqa: F401  # these look for torchvision, before it is a stand-in
import uvicorn
from safetensors.torch import load_file

EMBEDDING = "model.embed_tokens.weight"
TOKEN_S = 0.02


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes packages that SGLang imports and that do nothing here: whatever is asked of them is an empty class."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})

        module = Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        pass


class Manager:
    """Stands for SGLang's tokenizer manager and for all that is behind it."""

    def __init__(self, arguments: argparse.Namespace, updater: Any) -> None:
        from sglang.srt.managers.io_struct import FlushCacheReqOutput
        from sglang.srt.sampling.sampling_params import SamplingParams

        config = json.loads((Path(arguments.model_path) / "config.json").read_text())
        self._vocab_size = config["vocab_size"]
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(model_type=config["model_type"], architectures=config["architectures"]),
            is_image_understandable_model=False,
            is_audio_understandable_model=False,
        )
        self.model_path, self.served_model_name = arguments.model_path, arguments.served_model_name
        self.is_generation, self.startup_time = True, 0.0
        self.server_args = SimpleNamespace(
            resolved_dict=lambda: dict(vars(arguments)), launch_command="", **vars(arguments)
        )
        self._updater, self._flushed, self._params = updater, FlushCacheReqOutput(success=True), SamplingParams
        self._draw = bare_sampler()
        self._tensors: dict[str, torch.Tensor] = {}
        self._arguments, self._layers = arguments, config["num_hidden_layers"]
        self._adapters: dict[str, Any] = {}
        self._version = "default"
        self._is_open = self._is_paused = False
        self._aborted: set[str] = set()
        self._running: set[str] = set()

    def config_value(self, name: str) -> Any:
        return self._version if name == "weight_version" else None

    async def get_internal_state(self) -> list[Any]:
        return []

    # weights

    async def init_weights_update_group(self, obj: Any, request: Any) -> tuple[bool, str]:
        return await asyncio.to_thread(
            self._updater.init_weights_update_group, obj.master_address, obj.master_port, obj.rank_offset,
            obj.world_size, obj.group_name, obj.backend,
        )  # fmt: skip

    async def destroy_weights_update_group(self, obj: Any, request: Any) -> tuple[bool, str]:
        return self._updater.destroy_weights_update_group(obj.group_name)

    async def begin_weight_update(self, obj: Any, request: Any) -> tuple[bool, str]:
        assert obj.selector == "target"
        was_open, self._is_open = self._is_open, True
        return not was_open, "a weight-update session is already open" if was_open else "Success"

    async def update_weights_from_distributed(self, obj: Any, request: Any) -> tuple[bool, str]:
        if not self._is_open:
            return False, "no session"
        assert (obj.selector, obj.load_format, obj.flush_cache) == ("target", "flattened_bucket", False)
        try:
            weights = await asyncio.to_thread(
                self._updater.receive_weights_from_distributed, names=obj.names, dtypes=obj.dtypes, shapes=obj.shapes,
                group_name=obj.group_name, load_format=obj.load_format,
            )  # fmt: skip
        except Exception as error:
            return False, f"Failed to receive weights: {error}"
        self._tensors.update(weights)
        return True, "Succeeded to update parameter online."

    async def update_weights_from_disk(self, obj: Any, request: Any) -> tuple[bool, str, int]:
        assert (obj.load_format, obj.flush_cache, obj.abort_all_requests) == ("auto", False, False)
        for file in Path(obj.model_path).glob("*.safetensors"):
            self._tensors.update(load_file(file))
        return True, "Succeeded to update model weights.", 0

    async def load_lora_adapter(self, obj: Any, request: Any) -> Any:
        from sglang.srt.lora.lora import LoRAAdapter
        from sglang.srt.lora.lora_config import LoRAConfig
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

        assert self._is_paused and self._arguments.enable_lora and self._arguments.lora_target_modules == ["all"]
        if obj.lora_name in self._adapters:
            return LoadLoRAAdapterReqOutput(success=False, error_message="it is already loaded")
        config = LoRAConfig(obj.lora_path, base_vocab_size=self._vocab_size)
        assert config.r <= self._arguments.max_lora_rank and not config.use_dora and not config.lora_added_tokens_size
        layers = SimpleNamespace(num_hidden_layers=self._layers)
        adapter = LoRAAdapter(obj.lora_name, config, layers, None, None)
        adapter.initialize_weights_from_tensors(load_file(Path(obj.lora_path) / "adapter_model.safetensors"))
        for layer in adapter.layers:
            fused = {name.split(".")[-3] for name in layer.weights}
            assert fused == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, fused
        self._adapters[obj.lora_name] = adapter
        return LoadLoRAAdapterReqOutput(success=True)

    async def unload_lora_adapter(self, obj: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqOutput

        assert self._is_paused
        return UnloadLoRAAdapterReqOutput(success=self._adapters.pop(obj.lora_name, None) is not None)

    async def end_weight_update(self, obj: Any, request: Any) -> tuple[bool, str]:
        was_open, self._is_open = self._is_open, False
        return was_open, "Success"

    async def update_weight_version(self, obj: Any) -> None:
        assert not obj.abort_all_requests
        self._version = obj.new_version

    async def flush_cache(self, timeout_s: float | None) -> Any:
        assert not self._running
        return self._flushed

    async def pause_generation(self, obj: Any) -> None:
        assert obj.mode == "abort"
        self._is_paused = True
        self.abort_request(abort_all=True)
        while self._running:
            await asyncio.sleep(TOKEN_S)

    async def continue_generation(self, obj: Any) -> None:
        assert not obj.torch_empty_cache
        self._is_paused = False

    async def release_memory_occupation(self, obj: Any, request: Any) -> None:
        assert set(obj.tags) == {"weights", "kv_cache"} and not self._running

    async def resume_memory_occupation(self, obj: Any, request: Any) -> None:
        assert set(obj.tags) <= {"weights", "kv_cache"}

    # sampling

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self._aborted |= self._running if abort_all else {rid}

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        obj.normalize_batch_and_arguments()
        assert obj.is_single and obj.return_logprob and not obj.stream and obj.logprob_start_len == -1
        assert set(await request.json()) <= vars(obj).keys(), "SGLang itself passes over what it does not know"
        params = self._params(**obj.sampling_params)
        params.verify(self._vocab_size)
        params.normalize(SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode())))
        while self._is_paused:
            await asyncio.sleep(TOKEN_S)
        if obj.lora_path is not None and obj.lora_path not in self._adapters:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {obj.lora_path}")
        self._running.add(obj.rid)
        tokens: list[int] = []
        log_probs: list[Any] = []
        reason: dict[str, Any] = {"type": "length", "length": params.max_new_tokens}
        while len(tokens) < params.max_new_tokens:
            if obj.rid in self._aborted:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            table = self._tensors[EMBEDDING]
            logits = table[[*obj.input_ids, *tokens][-1]] @ table.T
            token, log_prob = self._draw(logits, params)
            tokens.append(token)
            log_probs.append((log_prob, token, None))
            await asyncio.sleep(TOKEN_S)
            if not params.ignore_eos and token in (params.stop_token_ids or ()):
                reason = {"type": "stop", "matched": token}
                break
        self._running.discard(obj.rid)
        yield {
            "text": "",
            "output_ids": tokens,
            "meta_info": {
                "id": obj.rid,
                "finish_reason": reason,
                "output_token_logprobs": log_probs,
                "weight_versions": [{"version": self._version, "start": 0, "end": len(tokens)}],
            },
        }


def bare_sampler() -> Any:
    """Draws a token of logits, [vocab], and says its log-prob: SGLang's Sampler without what it needs of a server."""
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.layers.sampler import Sampler

    sampler = object.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = None
    sampler.enable_deterministic = sampler.use_log_softmax_logprob = sampler.use_ascend_backend = False
    sampler.output_logprob_processor = OutputLogprobProcessor()
    sampler._sync_token_ids_across_tp = lambda *args: None

    def draw(logits: torch.Tensor, params: Any) -> tuple[int, float]:
        batch = SimpleNamespace(
            is_all_greedy=params.top_k == 1,
            temperatures=torch.tensor([[params.temperature]]),
            has_custom_logit_processor=False,
            need_top_p_sampling=params.top_p != 1,
            need_top_k_sampling=params.top_k < len(logits),
            need_min_p_sampling=params.min_p > 0,
            sampling_seed=None,
            sampling_mask_batch_indices=None,
            sampling_support_logprobs_capture_indices=None,
        )
        output = SimpleNamespace(next_token_logits=logits[None].clone())
        (token,) = sampler.forward(output, batch, True, [0], [None], torch.zeros(1, dtype=torch.int64))
        return int(token), float(output.next_token_logprobs[0])

    return draw


def main(port: int, arguments: list[str]) -> None:
    sys.meta_path.append(StandIns({"IPython", "torchvision"}))
    importlib.import_module("sglang.srt.managers.io_struct")
    # of speech and chat; the import before goes another way where it finds the first
    sys.meta_path.append(StandIns({"soundfile", "partial_json_parser", "xgrammar"}))
    import sglang.srt.entrypoints.http_server as server
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args([*arguments, "--port", str(port)])
    store = f"file://{tempfile.mkdtemp()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    nothing = dict.fromkeys(("get_model", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    updater = WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders={}, **nothing
    )  # fmt: skip
    manager = Manager(parsed, updater)
    # as the scheduler computes it, of a cache that is large enough
    info = {"max_req_input_len": parsed.context_length - 6}
    server._global_state = SimpleNamespace(tokenizer_manager=manager, scheduler_info=info)
    server.get_serving = lambda: SimpleNamespace(tokenizer_path="", preferred_sampling_params=None)
    uvicorn.Server(uvicorn.Config(server.app, port=port, lifespan="off", log_level="warning")).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
