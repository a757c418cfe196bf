"""The dialect of SGLang's server."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from actors.engines.dialect import (
    ADAPTER,
    ASK_S,
    SERVED_AS,
    ServerDialect,
    ServerFacts,
    WeightRoutes,
    is_on_cpu,
    longest_sample,
    shares_a_gpu,
)
from actors.engines.protocol import ENGINE_TAGS, EngineTag, GroupKind, Request, TensorInfo
from actors.engines.served_samples import (
    PartialSample,
    check_end,
    checked,
    checked_experts,
    limits_of,
    not_finite,
    seed_of,
    wrong,
)
from actors.engines.server_client import Refusal, ServerClient
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, short_repr
from slimefsdp.models.hf_folder import hub_parts
from slimefsdp.models.peft_folder import ADAPTER_FOLDER
from slimefsdp.sampling.params import FinishReason

if TYPE_CHECKING:  # importing this file does not import torch
    from slimefsdp.weight_sync.broadcast import Rendezvous

OLDEST = (0, 5, 23)  # of the releases 0.5.x
_NO_TOKEN = "NaN happened"  # SGLang's value of `matched` if the logits had NaN; SGLang then replaces the token
_KEPT_BACK = 6  # SGLang's max_req_input_len is smaller than its context by this many tokens
# With these variables, log-probs belong to other logits than the tokens are drawn from, or NaN is hidden.
_CHANGES_LOG_PROBS = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_SANITIZE_NAN_LOGITS")
_CONTROL_S = 10.0  # timeout of cleaning up after a failure


class SglangDialect(ServerDialect):
    """Speaks to SGLang 0.5, from 0.5.23 on, whose workers join the broadcast group by torch.distributed."""

    NAME: ClassVar[str] = "SGLang"
    ALIVE: ClassVar[str] = "/model_info"  # /health samples a token, which waits while weights come
    GENERATE: ClassVar[str] = "/generate"
    ADAPTER_FIELD: ClassVar[str] = "lora_path"
    GROUP: ClassVar[GroupKind] = "torch"
    LENGTH_OPTION: ClassVar[str] = "--context-length"
    ABORTS_ALL: ClassVar[bool] = True

    # ------------------------------------------------------------------ starting

    def arguments(self) -> list[str]:
        config = self.config
        arguments = [
            *("-m", "sglang.launch_server"),
            *("--model-path", str(self.folder.path)),
            *("--served-model-name", SERVED_AS),
            *("--dtype", config.precision.compute_dtype),
            *("--context-length", str(longest_sample(config, self.folder) + _KEPT_BACK)),
            *("--load-format", "dummy"),  # the weights come from the trainer
            "--skip-server-warmup",  # the server has no weights to warm up with
        ]
        if is_on_cpu(config):
            arguments += ["--device", "cpu"]
        else:
            arguments += ["--tp-size", str(config.rollout.gpus_per_engine)]
        if shares_a_gpu(config):
            arguments.append("--enable-memory-saver")
        if self.routed_experts is not None:
            arguments.append("--enable-return-routed-experts")
        if config.lora.sync == "adapters":
            arguments += _lora_arguments(config)
        return [*arguments, *config.rollout.engine_args]

    def environment(self, logs: Path) -> dict[str, str]:
        """Returns this process's environment without Python paths and without variables that change log-probs."""
        removed = ("PYTHONPATH", "PYTHONHOME", *_CHANGES_LOG_PROBS)
        own = {name: value for name, value in os.environ.items() if name not in removed}
        # The context may exceed the model's positions by `_KEPT_BACK` tokens, which are never used.
        return {**own, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

    def check(self, client: ServerClient) -> ServerFacts:
        config = self.config
        server, model = _asked(client, "/server_info"), _asked(client, "/model_info")
        version = str(server.get("version"))
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        release = tuple(map(int, numbers.groups())) if numbers else ()
        if release[:2] != OLDEST[:2] or release < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise self.other_release(client, f"SGLang {version}", f"0.5.x from {oldest} on", f"sglang=={oldest}")
        reported = {**server, "model_type": model.get("model_type"), "is_generation": model.get("is_generation")}
        wanted: dict[str, tuple[Any, str]] = {
            "dtype": (config.precision.compute_dtype, "start it with --dtype of precision.compute_dtype"),
            "dp_size": (1, "give each of rollout.engines a server of its own instead of --dp-size"),
            "pp_size": (1, "use --tp-size: stages of a pipeline would take the same rank in the broadcast"),
            "speculative_algorithm": (None, "start it without: drafts have weights that the run does not send"),
            "skip_tokenizer_init": (False, "start it with a tokenizer, for stop texts"),
            "disaggregation_mode": ("null", "start it without: prompts and samples come from one server"),
            "quantization": (None, "start it without: the trainer's log-probs are not of such weights"),
            "preferred_sampling_params": (None, "start it without: the run defines how to sample"),
            "model_type": (self.folder.model_type, "have it serve model.path"),
            "is_generation": (True, "have it serve model.path"),
        }
        self.require(client, reported, wanted)
        if config.lora.sync == "adapters":
            room, rank = reported.get("max_lora_rank"), config.lora.rank
            assert rank is not None
            if reported.get("enable_lora") is not True or not isinstance(room, int) or room < rank:
                problem = f"has enable_lora={reported.get('enable_lora')} and max_lora_rank={room}: lora.sync=adapters "
                problem += f"with adapters of rank {rank} needs {' '.join(_lora_arguments(config))}"
                raise self.unusable(client, problem, "start it so, or set lora.sync=merged")
        sizes: list[Any] = [reported.get("max_req_input_len"), reported.get("tp_size")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            problem = f"does not report max_req_input_len and tp_size, but {sizes}"
            raise self.unusable(client, problem, "use a supported release")
        # A prompt must be shorter than max_req_input_len. After an update, the prompt includes the tokens drawn before,
        # which can be all but the last token of a sample.
        return ServerFacts(version, reported["dtype"], self.folder.vocab_size, *sizes)

    # ------------------------------------------------------------------ sampling

    def body(self, request: Request, number: int, drawn: PartialSample, request_id: str) -> dict[str, Any]:
        """Implements `ServerDialect.body`.

        SGLang's ignore_eos also disables stop_token_ids, so ignore_eos is off if the request has end tokens. SGLang
        then also ends samples at the end tokens of the model's files; `read` has such samples continued.
        """
        params = request.params
        asked: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens - len(drawn.tokens),
            "temperature": 0.0 if params.greedy else params.temperature,
            **limits_of(params),
            "ignore_eos": not params.end_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": seed_of(params, number, len(drawn.tokens)),  # only used by deterministic servers
        }
        if params.end_token_ids:
            asked["stop_token_ids"] = sorted(params.end_token_ids)
        if params.stop:
            asked["stop"] = list(params.stop)
        return {
            "rid": request_id,
            "input_ids": [*request.prompt, *drawn.tokens],
            "sampling_params": asked,
            "return_logprob": True,
            "logprob_start_len": -1,  # only log-probs of drawn tokens
            "stream": False,
            **({} if self.routed_experts is None else {"return_routed_experts": True}),
        }

    def read(
        self, answer: Any, body: dict[str, Any], *, vocab_size: int, versions: Collection[int]
    ) -> tuple[PartialSample, FinishReason | None]:
        """Reads an answer; a sample that ended at an end token that the request does not name has to be continued."""
        params = body["sampling_params"]
        try:
            tokens, meta = list(answer["output_ids"]), answer["meta_info"]
            reason, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
            pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
            spans = [(str(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"] if tokens]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise wrong(f"an answer without what belongs to a sample: {type(error).__name__}: {error}") from error
        if matched == _NO_TOKEN:
            raise not_finite()
        most = params["max_new_tokens"]
        drawn = checked(
            tokens, [value for value, _ in pairs], [token for _, token in pairs], spans,
            most=most, vocab_size=vocab_size, versions=versions, no_number=None,
        )  # fmt: skip
        if self.routed_experts is not None and tokens:
            computed = len(body["input_ids"]) + len(tokens) - 1
            experts = _decoded(meta.get("routed_experts"), computed, self.routed_experts)
            drawn.experts = checked_experts(experts, computed, self.routed_experts)
        is_end = bool(tokens) and tokens[-1] in params.get("stop_token_ids", ())
        if reason == "stop" and tokens and type(matched) is int and matched == tokens[-1] and not is_end:
            if params["ignore_eos"]:
                raise wrong(f"a sample that ended by token {matched}, without an end that was asked for")
            return drawn, "length" if len(tokens) == most else None
        return drawn, check_end(reason, tokens, most, ends_itself=bool(tokens) and (is_end or "stop" in params))

    def end_requests(self, client: ServerClient, ids: Sequence[str], *, are_all: bool) -> None:
        for body in [{"abort_all": True}] if are_all else [{"rid": request_id} for request_id in ids]:
            client.post("/abort_request", body, timeout_s=ASK_S)

    # ------------------------------------------------------------------ weights

    def join(self, routes: WeightRoutes, meeting: Rendezvous) -> None:
        from slimefsdp.weight_sync.broadcast import torch_group_name

        name = torch_group_name(meeting.port)
        for old in {name, self.group_name} - {None}:  # an earlier engine may have left a group at this server
            routes.try_post("/destroy_weights_update_group", {"group_name": old})
        info = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": meeting.rank,
            "world_size": meeting.world_size,
            "group_name": name,
            "backend": meeting.backend,
        }
        routes.post("/init_weights_update_group", info, timeout_s=meeting.timeout_s)
        self.group_name = name

    @property
    def _comes_by_disk(self) -> bool:
        """Returns whether weights arrive as folders; SGLang treats the loading of a folder as a whole update."""
        return self.config.rollout.transport == "disk"

    def open_update(self, routes: WeightRoutes) -> None:
        routes.post("/pause_generation", {"mode": "abort"})
        if self._comes_by_disk or routes.try_post("/begin_weight_update", {"selector": "target"}):
            return
        routes.try_post("/end_weight_update", {})  # an earlier update was not finished
        routes.post("/begin_weight_update", {"selector": "target"})

    def take_folder(self, routes: WeightRoutes, path: Path, adapter_scale: float | None, *, has_weights: bool) -> None:
        body = {
            "model_path": str(path),
            "load_format": "auto",  # the default would be the server's load format, dummy
            "flush_cache": False,  # `close_update` flushes it once
            "abort_all_requests": False,
        }
        if has_weights:
            routes.post("/update_weights_from_disk", body)
        if adapter_scale is not None:
            # The name stays the same, so that requests that wait at the paused server use the new adapter.
            routes.try_post("/unload_lora_adapter", {"lora_name": ADAPTER})
            routes.post("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(path / ADAPTER_FOLDER)})

    def take_bucket(
        self, routes: WeightRoutes, tensors: Sequence[TensorInfo], adapter_scale: float | None, **options: Any
    ) -> None:
        assert not any(options.values()), "the settings refuse checksums, and its transports ipc"
        # A stacked parameter of experts contains SGLang's tensors of single experts in order. SGLang skips a tied head.
        kind = self.folder.model_type
        parts = [(part, info.dtype) for info in tensors for part in hub_parts(kind, info.name, info.shape)]
        body = {
            "names": [part.name for part, _ in parts],
            "dtypes": [dtype for _, dtype in parts],
            "shapes": [list(part.shape) for part, _ in parts],
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
            "selector": "target",
            "flush_cache": False,  # `close_update` flushes it once
            "abort_all_requests": False,
        }
        routes.post("/update_weights_from_distributed", body)

    def close_update(self, routes: WeightRoutes, version: int, *, has_adapter: bool) -> None:
        if not self._comes_by_disk:
            routes.post("/end_weight_update", {})
        routes.post("/flush_cache", is_json=False)
        routes.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        routes.post("/continue_generation", {"torch_empty_cache": False})

    def weight_version(self, routes: WeightRoutes) -> str:
        return str(routes.get("/model_info").get("weight_version"))

    def end_waiting(self, client: ServerClient) -> None:
        """Resumes the server and aborts all requests: a paused server cannot abort requests that wait."""
        client.post("/continue_generation", {"torch_empty_cache": False}, timeout_s=_CONTROL_S)
        client.post("/abort_request", {"abort_all": True}, timeout_s=_CONTROL_S)

    def is_of_group(self, route: str, refusal: Refusal) -> bool:
        """Returns True for every refusal of the two routes that use the group, as torch's messages name no cause."""
        return route in ("/init_weights_update_group", "/update_weights_from_distributed")

    # ------------------------------------------------------------------ memory

    def free_memory(self, routes: WeightRoutes) -> None:
        routes.post("/release_memory_occupation", {"tags": list(ENGINE_TAGS)})

    def take_memory(self, routes: WeightRoutes, tags: Sequence[EngineTag]) -> None:
        routes.post("/resume_memory_occupation", {"tags": list(tags)})


def _decoded(experts: Any, computed: int, routed: tuple[int, int, int]) -> np.ndarray:
    """Returns an array [computed, layers, experts of a token] that SGLang has encoded as int32 in base64."""
    try:
        ids = np.frombuffer(base64.b64decode(experts), np.int32)
    except (TypeError, ValueError) as error:
        problem = f"{short_repr(experts)} instead of a token's experts; a server at a URL needs "
        raise wrong(f"{problem}--enable-return-routed-experts") from error
    shape = (computed, routed[0], routed[2])
    if ids.size != np.prod(shape):
        raise wrong(f"{ids.size} experts, where {shape} were asked for")
    return ids.reshape(shape)


def _lora_arguments(config: RunConfig) -> list[str]:
    """Returns the arguments that give a server room for the run's adapter, in all modules that SGLang supports."""
    assert config.lora.rank is not None
    return ["--enable-lora", "--max-lora-rank", str(config.lora.rank), "--lora-target-modules", "all"]


def _asked(client: ServerClient, route: str) -> dict[str, Any]:
    try:
        return dict(client.get(route, timeout_s=ASK_S))
    except (Refusal, TypeError, ValueError) as error:
        raise EngineError(
            f"the server at {client.url} is not SGLang: {error}", field="rollout.engine_urls", hint="use one"
        ) from error
