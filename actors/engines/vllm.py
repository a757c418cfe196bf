"""The dialect of vLLM's server for runs; `actors.engines.vllm_service` has the dialect for the service."""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import slimefsdp
from actors.engines.dialect import (
    ADAPTER,
    ASK_S,
    SERVED_AS,
    TIED_HEAD,
    ServerDialect,
    ServerFacts,
    WeightRoutes,
    is_on_cpu,
    longest_sample,
    shares_a_gpu,
)
from actors.engines.protocol import EngineTag, Request, TensorInfo
from actors.engines.served_samples import PartialSample, check_end, checked, checked_experts, limits_of, seed_of, wrong
from actors.engines.server_client import Refusal, ServerClient
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import SERVERS
from slimefsdp.errors import EngineError, short_repr
from slimefsdp.models.hf_folder import hub_parts
from slimefsdp.models.peft_folder import MATRICES, tensor_name
from slimefsdp.sampling.params import FinishReason, SamplingParams

if TYPE_CHECKING:  # importing this file does not import torch
    from slimefsdp.weight_sync.broadcast import Rendezvous

SUPPORTED = "0.32"
PROTOCOL = 4  # as in slimefsdp.weight_sync.vllm_plugin
EXTENSION = "slimefsdp.weight_sync.vllm_plugin.WorkerExtension"
BACKEND = "slimefsdp"  # as slimefsdp.weight_sync.vllm_plugin registers it
HELD_ADAPTER = "slimefsdp:adapter"  # as in slimefsdp.weight_sync.vllm_plugin
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # environment variable of a server that loads adapters on request
GROUP = "the broadcast group"  # part of the text of errors of slimefsdp.weight_sync.broadcast
NO_NUMBER = -9999.0  # vLLM's value for a log-prob that is not finite
NEEDED = (
    f"--worker-extension-cls={EXTENSION}",
    f'--weight-transfer-config={{"backend": "{BACKEND}"}}',
    "--logprobs-mode=processed_logprobs",
    "--enable-scale-out",
)
"""Command-line arguments that a run's server needs."""
_ON_CPU = {
    # without this, vLLM binds its threads to cores that the trainer's threads use too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without this, vLLM takes a share of the machine's memory
}
_CONTROL_S = 10.0  # timeout of cleaning up after a failure


class VllmDialect(ServerDialect):
    """Speaks to vLLM 0.32, whose workers receive weights by `slimefsdp.weight_sync.vllm_plugin`."""

    NAME: ClassVar[str] = "vLLM"
    GENERATE: ClassVar[str] = "/inference/v1/generate"
    ADAPTER_FIELD: ClassVar[str] = "model"
    LENGTH_OPTION: ClassVar[str] = "--max-model-len"

    # ------------------------------------------------------------------ starting

    @property
    def takes_adapters(self) -> bool:
        """Returns whether the server loads adapters on request."""
        return self.config.lora.sync == "adapters"

    def arguments(self) -> list[str]:
        config = self.config
        arguments = [*self.common_arguments(), "--load-format", "dummy", *NEEDED]  # weights come from the trainer
        if shares_a_gpu(config):
            arguments.append("--enable-sleep-mode")
        if self.routed_experts is not None:
            arguments.append("--enable-return-routed-experts")
        if self.takes_adapters:
            arguments += ["--enable-lora", "--max-lora-rank", str(room_for(config)), "--max-loras", "1"]
        return [*arguments, *config.rollout.engine_args]

    def common_arguments(self) -> list[str]:
        """Returns the arguments that servers of runs and of services have in common."""
        config = self.config
        arguments = [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.folder.path)),
            *("--served-model-name", SERVED_AS),
            *("--dtype", config.precision.compute_dtype),
            *("--max-model-len", str(longest_sample(config, self.folder))),
            "--disable-uvicorn-access-log",
        ]
        if is_on_cpu(config):
            # Compiling takes minutes. With chunked prefill, vLLM resets the offsets of random generators; generators on
            # CPU do not support that, and the server would end.
            return [*arguments, "--enforce-eager", "--no-enable-chunked-prefill"]
        return [*arguments, "--tensor-parallel-size", str(config.rollout.gpus_per_engine)]

    def environment(self, logs: Path) -> dict[str, str]:
        """Returns the server's environment.

        PYTHONPATH is a folder in `logs` with only a link to the package slimefsdp, so that the server imports nothing
        else from this environment.
        """
        folder = logs / "importable"
        folder.mkdir(exist_ok=True)
        link, package = folder / "slimefsdp", Path(slimefsdp.__file__).resolve().parent
        if not link.is_symlink() or link.resolve() != package:
            new = folder / f"slimefsdp.{os.getpid()}"  # renamed below, as engines of one run start at the same time
            new.symlink_to(package, target_is_directory=True)
            new.replace(link)
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        own |= {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1"}
        if self.takes_adapters:
            own[RUNTIME_LORA] = "1"
        if self.routed_experts is not None:  # vLLM's other model runner does not return experts
            own["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        usual = {"VLLM_NO_USAGE_STATS": "1", **(_ON_CPU if is_on_cpu(self.config) else {})}
        return {**usual, **own}

    def check(self, client: ServerClient) -> ServerFacts:
        version, properties = self.checked_properties(client, takes_weights=True)
        if self.config.lora.sync == "adapters":
            self.check_adapters(client, properties["max_lora_rank"], "lora.sync=adapters", "lora.sync=merged")
        workers = self._asked(client, "/get_world_size")["world_size"]
        sizes = properties["vocab_size"], properties["max_model_len"]
        return ServerFacts(version, properties["dtype"], *sizes, workers)

    def checked_properties(self, client: ServerClient, *, takes_weights: bool) -> tuple[str, dict[str, Any]]:
        """Checks what a run and the service both need of a server; returns the release and a worker's properties.

        Args:
            takes_weights: whether a run sends weights to the server; log-probs are then at the sampling temperature.

        Raises:
            EngineError: the server cannot be used.
        """
        config = self.config
        version: str = self._asked(client, "/version")["version"]
        if version.split(".")[:2] != SUPPORTED.split("."):
            raise self.other_release(client, f"vLLM {version}", f"{SUPPORTED}.x", f"vllm=={SUPPORTED}.0")
        wanted: dict[str, tuple[Any, str]] = {
            "protocol": (PROTOCOL, "have server and trainer use the same release of slimefsdp")
        }
        if takes_weights:
            try:
                client.get("/weight_info", timeout_s=ASK_S)
            except Refusal as refusal:
                if refusal.status != 404:
                    raise _refused(refusal) from refusal
                problem = "takes no weights: it was started without VLLM_SERVER_DEV_MODE=1"
                hint = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
                raise self.unusable(client, problem, hint) from refusal
            wanted["backend"] = BACKEND, f"start it with {NEEDED[1]}"
        mode = "processed_logprobs" if takes_weights else "raw_logprobs"
        wanted |= {
            "logprobs_mode": (mode, f"start it with --logprobs-mode={mode}"),
            "dtype": (config.precision.compute_dtype, "start it with --dtype of precision.compute_dtype"),
            "model_type": (self.folder.model_type, "have it serve model.path"),
            "vocab_size": (self.folder.vocab_size, "have it serve model.path"),
        }
        try:
            answer = client.post("/collective_rpc", {"method": "slimefsdp_worker"}, timeout_s=ASK_S)
            properties = dict(answer["results"][0])
        except (Refusal, KeyError, IndexError, TypeError) as error:
            hint = f"start it with {NEEDED[0]} and this package in its PYTHONPATH"
            raise self.unusable(client, f"has workers that do not know slimefsdp: {error}", hint) from error
        self.require(client, properties, wanted)
        if (refusal_of_route := _refusal_of(client, self.GENERATE)) is not None:
            problem = f"does not generate from token ids: {refusal_of_route}"
            raise self.unusable(client, problem, f"start it with {NEEDED[3]}") from refusal_of_route
        return version, properties

    def check_adapters(self, client: ServerClient, room: int | None, user: str, alternative: str) -> None:
        """Raises an EngineError if a server has no room for adapters of lora.rank, or loads no adapters on request.

        Args:
            room: the server's max_lora_rank; None means that the server has no adapters.
            user: the setting or service that needs adapters, for the error.
            alternative: a setting that works without adapters, for the error.
        """
        needed = room_for(self.config)
        if room is None or room < needed:
            has = "no room for adapters" if room is None else f"room for adapters of rank {room} alone"
            problem = f"has {has}: {user} with adapters of rank {self.config.lora.rank} needs "
            problem += f"--enable-lora --max-lora-rank {needed}"
            raise self.unusable(client, problem, f"start it so, or set {alternative}")
        if (refusal := _refusal_of(client, "/v1/load_lora_adapter")) is not None:
            hint = f"start it with that in its environment, or set {alternative}"
            raise self.unusable(client, f"has no {RUNTIME_LORA}=1, which {user} needs: {refusal}", hint) from refusal

    def _asked(self, client: ServerClient, route: str) -> Any:
        try:
            return client.get(route, timeout_s=ASK_S)
        except Refusal as refusal:
            raise _refused(refusal) from refusal

    # ------------------------------------------------------------------ sampling

    def body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        params, length = request.params, len(drawn.tokens)
        asked = sampling_params(params, most=params.max_new_tokens - length, seed=seed_of(params, number, length))
        return {"request_id": request_id, "token_ids": [*request.prompt, *drawn.tokens], "sampling_params": asked}

    def read(
        self, answer: Any, body: dict[str, Any], *, vocab_size: int, versions: Collection[int]
    ) -> tuple[PartialSample, FinishReason | None]:
        """Reads an answer; no sample has to be continued, since vLLM ends samples only where the request says."""
        params = body["sampling_params"]
        choice, log_probs, of_tokens = choice_of(answer)
        tokens, most = choice["token_ids"], params["max_tokens"]
        try:
            spans = [(str(span["version"]), span["start"], span["end"]) for span in choice["weight_versions"] or []]
        except (KeyError, TypeError) as error:
            raise wrong(f"an answer without the weights' versions: {type(error).__name__}: {error}") from error
        drawn = checked(
            tokens, log_probs, of_tokens, spans,
            most=most, vocab_size=vocab_size, versions=versions, no_number=NO_NUMBER,
        )  # fmt: skip
        if self.routed_experts is not None and tokens:
            computed = len(body["token_ids"]) + len(tokens) - 1
            drawn.experts = checked_experts(_decoded(choice.get("routed_experts")), computed, self.routed_experts)
        ends_itself = bool(tokens) and (tokens[-1] in params["stop_token_ids"] or "stop" in params)
        return drawn, check_end(choice["finish_reason"], tokens, most, ends_itself=ends_itself)

    def end_requests(self, client: ServerClient, ids: Sequence[str], *, are_all: bool) -> None:
        names = [f"generate-tokens-{request_id}" for request_id in ids]
        client.post("/inference/v1/abort_requests", {"request_ids": names}, timeout_s=ASK_S)

    # ------------------------------------------------------------------ weights

    def join(self, routes: WeightRoutes, meeting: Rendezvous) -> None:
        info = meeting._asdict()
        info["rank_offset"] = info.pop("rank")
        # The server's workers have their own timeout, and try twice to reach rank 0: the server must outlast both.
        routes.post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=3 * meeting.timeout_s + 30)

    def open_update(self, routes: WeightRoutes) -> None:
        routes.post("/pause?mode=abort&clear_cache=true")
        if not routes.try_post("/start_weight_update"):  # an earlier update was not finished
            routes.try_post("/finish_weight_update")
            routes.post("/start_weight_update")

    def take_bucket(
        self, routes: WeightRoutes, tensors: Sequence[TensorInfo], adapter_scale: float | None, **options: Any
    ) -> None:
        """Posts a description of the bucket; `vllm_plugin.BroadcastWeights` takes the bytes in the server's workers."""
        info = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "parts": [self._parts(tensor) for tensor in tensors],
            "adapter_scale": adapter_scale,
            **options,
        }
        routes.post("/update_weights", {"update_info": info})

    def take_folder(self, routes: WeightRoutes, path: Path, adapter_scale: float | None, *, has_weights: bool) -> None:
        info: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "parts": [], "folder": str(path)}
        info["adapter_scale"] = adapter_scale
        routes.post("/update_weights", {"update_info": info})

    def _parts(self, tensor: TensorInfo) -> list[tuple[str, int | None, int, int]]:
        """Returns the field `parts` of `slimefsdp.weight_sync.vllm_plugin.UpdateInfo` for one tensor.

        A tied head has no parts. A matrix of an adapter has the name that peft gives it, as vLLM expects.
        """
        if tensor.name.endswith(MATRICES):
            module, _, matrix = tensor.name.rpartition(".lora_")
            return [(tensor_name(module, matrix), None, 0, 0)]
        if tensor.name == TIED_HEAD and self.head_is_tied:
            return []
        parts = hub_parts(self.folder.model_type, tensor.name, tensor.shape)
        return [(part.name, part.expert, part.start, part.end) for part in parts]

    def close_update(self, routes: WeightRoutes, version: int, *, has_adapter: bool) -> None:
        """Ends an update. The adapter is loaded only once, as later updates replace its matrices in the workers."""
        routes.post("/finish_weight_update", {"weight_version": str(version)})
        if has_adapter and ADAPTER not in {model["id"] for model in routes.get("/v1/models")["data"]}:
            body = {"lora_name": ADAPTER, "lora_path": HELD_ADAPTER}
            routes.post("/v1/load_lora_adapter", body, is_json=False)
        routes.post("/reset_prefix_cache")
        routes.post("/resume")

    def weight_version(self, routes: WeightRoutes) -> str:
        return str(routes.get("/weight_info").get("weight_version"))

    def end_waiting(self, client: ServerClient) -> None:
        """Aborts requests that arrived while the server was paused, and that would wait at the server."""
        client.post("/abort_requests", {}, timeout_s=_CONTROL_S)

    def is_of_group(self, route: str, refusal: Refusal) -> bool:
        return GROUP in str(refusal)

    # ------------------------------------------------------------------ memory

    def free_memory(self, routes: WeightRoutes) -> None:
        """Puts the server to sleep at level 2, which drops the weights; the next update sends all weights."""
        routes.post("/sleep?level=2")

    def take_memory(self, routes: WeightRoutes, tags: Sequence[EngineTag]) -> None:
        routes.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))


def _decoded(experts: Any) -> np.ndarray:
    """Returns an array that vLLM has encoded as a .npy file in base64."""
    try:
        array: np.ndarray = np.load(BytesIO(base64.b64decode(experts)), allow_pickle=False)
    except (TypeError, ValueError, EOFError) as error:
        problem = f"{short_repr(experts)} instead of a token's experts; a server at a URL needs "
        raise wrong(f"{problem}--enable-return-routed-experts") from error
    return array


def sampling_params(params: SamplingParams, *, most: int, seed: int) -> dict[str, Any]:
    """Returns the JSON of vLLM's sampling parameters for one sample of at most `most` tokens."""
    asked: dict[str, Any] = {
        "n": 1,
        "max_tokens": most,
        "temperature": 0.0 if params.greedy else params.temperature,
        "seed": seed,
        "logprobs": 0,  # only the log-prob of the sampled token
        "ignore_eos": True,  # the request's end tokens count, not those of the server's files
        "stop_token_ids": sorted(params.end_token_ids),
        "detokenize": bool(params.stop),
    }
    if params.is_limited:
        asked |= limits_of(params)
    if params.stop:
        asked |= {"stop": list(params.stop), "include_stop_str_in_output": True}
    return asked


def choice_of(answer: Any) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Returns the only choice of an answer, the choice's log-probs, and the tokens to which the log-probs belong.

    Raises:
        EngineError: the answer has no such choice, or lacks one of its fields.
    """
    try:
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"] or []
        parts = dict(choice), [entry["logprob"] for entry in content], [entry["token_id"] for entry in content]
        choice["token_ids"], choice["finish_reason"]  # raises a KeyError here rather than in every caller
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(f"an answer without what belongs to a sample: {type(error).__name__}: {error}") from error
    return parts


def room_for(config: RunConfig) -> int:
    """Returns the smallest of vLLM's values of max_lora_rank that is at least lora.rank."""
    ranks = SERVERS["vllm"].adapter_ranks
    assert config.lora.rank is not None and ranks is not None
    return next(rank for rank in ranks if rank >= config.lora.rank)


def _refused(refusal: Refusal) -> EngineError:
    return EngineError(f"the server is not vLLM {SUPPORTED}: {refusal}", field="rollout.engine_urls", hint="use one")


def _refusal_of(client: ServerClient, route: str) -> Refusal | None:
    """Posts an empty request; returns the refusal of a server without this route; None means that it has the route."""
    try:
        client.post(route, {}, timeout_s=ASK_S)
    except Refusal as refusal:
        return None if refusal.status in (400, 422) else refusal  # with these, the server has read the request
    return None
