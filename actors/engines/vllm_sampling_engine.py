"""Sampling as a service by a server of vLLM: one process beside it, with the calls of a `SamplingEngine`.

Each version is an adapter of vLLM's own, under a name that no other one ever has. The base is sampled from beside an
adapter of zeros: on CPU vLLM 0.32 computes a request without an adapter with one of the others' where both are in a
batch.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from actors.cluster.connect import gpus_of_engines
from actors.cluster.placement import gpus_per_rank
from actors.engines.sampling_engine import started_for_service
from actors.engines.tokenizer import decoder_of
from actors.engines.vllm_base import base_of
from actors.engines.vllm_server import Adapter, VllmServer
from actors.engines.vllm_service import bodies_of, check_request, read_prompt, read_sample
from actors.workers.watchdog import Watched
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, ModelError, ResourceError, StateError, byte_text, portable
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.requests import SampleAnswer, SampledTokens, SampleRequest, SamplingStats

MOST_VERSIONS = 31
"""That a server which is started here has room for, whatever their size: vLLM's kernels count all places."""
_MOST_AT_ONCE = 1024  # samples under way; vLLM queues what is more than it does at once
_GIVE_UP_S = 10.0  # for requests to end that nobody waits for


@dataclass(slots=True, eq=False)
class _Held:
    """A version that may be sampled from.

    Args:
        calls: that sample from it.
    """

    adapter: Adapter
    bytes: int
    calls: set[_Call] = field(default_factory=set)
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """A request, whose samples are asked for one by one.

    Args:
        waiting: names of those that the server has not been asked for.
        running: of those that it has.
    """

    waiting: set[str]
    running: set[str] = field(default_factory=set)
    is_over: bool = False
    key: str | None = None


class VllmSamplingEngine(Watched):
    """A process that samples by a server of vLLM, which it starts or finds at a URL; a Ray actor.

    Its calls are those of `actors.engines.sampling_engine.SamplingEngine`, and so are what they raise and that
    log-probs are at temperature 1. What vLLM does not do exactly is a BatchError that names it. What is drawn follows
    from `params.seed` and a sample's number, but for rounding, which depends on what else vLLM computes beside it.

    Args:
        config: its model.path is a folder.
        memory_bytes: the most that versions may have together.
        max_samples: of a request.

    Raises:
        ModelError: the folder is malformed.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 2}

    def __init__(self, config: RunConfig, *, memory_bytes: int = 2**30, max_samples: int = 1024) -> None:
        self._config = config
        self._memory_bytes, self._max_samples = memory_bytes, max_samples
        self._model = read_model_folder(Path(config.model.path), field="model.path")
        self._decode = decoder_of(str(config.model.path))
        assert config.run.dir is not None
        self._copies = config.run.dir.absolute() / "service" / "vllm"  # of the versions' folders, as long as it lives
        self._held: dict[str | None, _Held] = {}
        self._coming: set[str] = set()
        self._drawn = 0
        self._server: VllmServer | None = None
        self._is_shut_down = False
        self._end: Exception | None = StateError("the engine has not begun", field="engine", hint="call begin() first")
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, "sample")
        heartbeat.enter(heartbeat.IDLE)

    async def begin(self) -> None:
        """Starts the server, or finds it, and waits for it. Call it once, before anything else.

        Raises:
            ModelError, ConfigError: as `base_of`. EngineError, WorkerHung: the server cannot be used, or does not
                start. ResourceError: not one version fits into `memory_bytes`.
        """
        await asyncio.to_thread(self._begin)
        self._end = None

    async def load(self, version: str, folder: str) -> int:
        """Loads a version; the folder may be deleted when this returns.

        Raises:
            StateError, ResourceError, ModelError: as `SamplingEngine`; also what vLLM refuses is a ModelError.
        """
        self._require_running()
        if version in self._held or version in self._coming:
            raise StateError(f"there is a version {version!r}", field="version", hint="give another name")
        held = len(self._held) - 1 + len(self._coming)
        if held >= self._room:
            raise ResourceError(
                f"{held} versions are held, and vLLM has room for {self._room}",
                field="memory_bytes", hint="drop one, or raise service.max_version_bytes and vLLM's --max-loras",
            )  # fmt: skip
        self._coming.add(version)
        adapter = Adapter(f"version-{uuid.uuid4().hex}", self._copies / uuid.uuid4().hex)
        try:
            await asyncio.to_thread(self._load, adapter, Path(folder))
            self._held[version] = _Held(adapter, self._base.version_bytes)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._forget, adapter))
            raise
        finally:
            self._coming.discard(version)
        return self._base.version_bytes

    async def drop(self, version: str) -> None:
        """As `SamplingEngine`.

        Raises:
            StateError: there is none of this name.
        """
        held = self._of(version)
        del self._held[version]
        held.is_dropped = True
        calls = list(held.calls)
        for call in calls:
            call.is_over = True
        await asyncio.gather(*(asyncio.to_thread(self._abort, call) for call in calls))
        await asyncio.to_thread(self._forget, held.adapter)

    async def versions(self) -> list[str]:
        """Names of those that are held, in the order in which they came."""
        return [name for name in self._held if name is not None]

    async def sample(self, request: SampleRequest, key: str | None = None) -> SampleAnswer:
        """As `SamplingEngine`.

        Args:
            key: of this request alone, for `cancel`.

        Raises:
            StateError: there is no such version, or it was dropped meanwhile; its logits are not finite; or the engine
                has been shut down. BatchError: naming what of the request vLLM does not do.
            EngineError, WorkerDied, WorkerHung: the server answers something else, or is lost and does not come back.
        """
        held = self._of(request.version)
        check_request(
            request,
            vocab_size=self._model.vocab_size,
            facts=self._facts,
            most_samples=self._max_samples,
        )
        if request.params.stop and self._decode is None:
            raise StateError("the model has no tokenizer, which stop texts need", field="stop", hint="name token ids")
        bodies = [{**body, "request_id": f"slimefsdp-{uuid.uuid4().hex}"} for body in bodies_of(request)]
        call = _Call({body["request_id"] for body in bodies}, key=key)
        held.calls.add(call)
        loop = asyncio.get_running_loop()
        drawing = [loop.run_in_executor(self._threads, self._answer, held, call, body) for body in bodies]
        try:
            answers = await asyncio.gather(*drawing)
            return self._read(request, answers)
        except BaseException:
            call.is_over = True
            for one in drawing:
                one.add_done_callback(_look_at)
            if call.running:
                loop.run_in_executor(None, self._abort, call)
            raise
        finally:
            held.calls.discard(call)

    async def cancel(self, key: str) -> None:
        """Ends the request of this key with a StateError; nothing where there is none."""
        for call in [one for held in self._held.values() for one in held.calls if one.key == key]:
            call.is_over = True
            await asyncio.to_thread(self._abort, call)

    async def stats(self) -> SamplingStats:
        """Returns counts of what is sampled and held; vLLM's cache is not known, and counts as 0."""
        self._require_running()
        calls = [call for held in self._held.values() for call in held.calls]
        return SamplingStats(
            running_rows=sum(len(call.running) for call in calls),
            waiting_requests=sum(bool(call.waiting) for call in calls),
            waiting_rows=sum(len(call.waiting) for call in calls),
            tokens_drawn=self._drawn,
            cache_bytes=0,
            versions={name: held.bytes for name, held in self._held.items() if name is not None},
            memory_bytes=self._memory_bytes,
        )

    async def shutdown(self) -> None:
        """Ends the server where it was started here; what has no answer fails, and so does what comes later."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._end = StateError("the engine has been shut down", field="engine", hint="start another one")
            for held in self._held.values():
                for call in held.calls:
                    call.is_over = True
            await asyncio.to_thread(self._finish)

    # ------------------------------------------------------------------ inside

    def _begin(self) -> None:
        self._base = base_of(self._config, self._model)
        fitting = self._memory_bytes // self._base.version_bytes
        if not fitting:
            raise ResourceError(
                f"service.max_version_bytes={self._memory_bytes} holds no version, each of which has "
                f"{byte_text(self._base.version_bytes)} at lora.rank={self._base.rank}",
                field="service.max_version_bytes", hint="raise it, or lower lora.rank",
            )  # fmt: skip
        shutil.rmtree(self._copies, ignore_errors=True)
        zeros = Adapter(f"base-{uuid.uuid4().hex}", self._copies / "base")
        self._base.write_empty(zeros.folder, self._model)
        places = min(MOST_VERSIONS, fitting) + 1
        self._server = VllmServer(self._config, self._model, places, self._base.modules)
        self._facts = self._server.facts()
        self._server.load(zeros)
        self._room = min(self._facts.adapters - 1, fitting)
        self._held[None] = _Held(zeros, 0)

    def _of(self, version: str | None) -> _Held:
        self._require_running()
        held = self._held.get(version)
        if held is None:
            raise StateError(f"there is no version {version!r}", field="version", hint="load it first")
        return held

    def _require_running(self) -> None:
        if self._end is not None:
            raise portable(self._end)

    def _load(self, adapter: Adapter, folder: Path) -> None:
        """A folder of the engine's own, since the server may be asked to read it again, and then vLLM's own load."""
        self._base.check(folder)
        try:
            shutil.copytree(folder, adapter.folder, copy_function=_linked)
        except OSError as error:
            raise ModelError(f"{folder} cannot be read: {error}", field="folder", hint="save it again") from error
        assert self._server is not None
        self._server.load(adapter)

    def _forget(self, adapter: Adapter) -> None:
        assert self._server is not None
        self._server.unload(adapter)
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def _answer(self, held: _Held, call: _Call, body: dict[str, Any]) -> Any:
        """Returns what the server answers; in a thread."""
        assert self._server is not None
        name = body["request_id"]
        call.running.add(name)
        call.waiting.discard(name)
        try:
            answer = None if call.is_over else self._server.generate(held.adapter, body)
        except Exception as error:
            raise self._why_over(held) if call.is_over else portable(error) from error
        finally:
            call.running.discard(name)
        if call.is_over:
            raise self._why_over(held)
        return answer

    def _abort(self, call: _Call) -> None:
        assert self._server is not None
        self._server.abort(call.running, _GIVE_UP_S)

    def _why_over(self, held: _Held) -> Exception:
        if self._end is not None:
            return portable(self._end)
        what = "its version was dropped" if held.is_dropped else "another sample failed, or it was cancelled,"
        return StateError(f"{what} while it was sampled", field="version", hint="load it again, and ask again")

    def _read(self, request: SampleRequest, answers: list[Any]) -> SampleAnswer:
        prompt = [int(token) for token in request.prompt]
        log_probs, top = None, None
        if request.prompt_log_probs:
            log_probs, top = read_prompt(answers[0] if len(prompt) > 1 else None, prompt, request.prompt_top_k)
        read: Callable[[Any], SampledTokens] = partial(
            read_sample, params=request.params, decode=self._decode, vocab_size=self._model.vocab_size
        )
        samples = [read(answer) for answer in answers[: request.num_samples]]
        if any(sample.finish_reason == "abort" for sample in samples):
            raise EngineError(
                "the server aborted a request that this engine did not abort",
                field="engine", hint="let nobody else pause or abort what this server does",
            )  # fmt: skip
        self._drawn += sum(len(sample.tokens) for sample in samples)
        return SampleAnswer(samples, log_probs, top)

    def _finish(self) -> None:
        if self._server is not None:
            self._server.end()
        shutil.rmtree(self._copies, ignore_errors=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


def start_vllm_sampling_engine(config: RunConfig, *, memory_bytes: int = 2**30, max_samples: int = 1024) -> Any:
    """The handle of a `VllmSamplingEngine` that is being started; `ray.kill` ends its process, and with it the server.

    Raises:
        ModelError, ConfigError, ResourceError: as `with_model_folders`.
    """
    limits = {"memory_bytes": memory_bytes, "max_samples": max_samples}
    gpus = gpus_per_rank(config.mesh.device) * gpus_of_engines(config)
    return started_for_service(VllmSamplingEngine, config, gpus, limits)


def _linked(source: str, target: str) -> None:
    """A second name of a file, or a copy where there is none: whoever wrote it writes it once."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _look_at(drawing: asyncio.Future[Any]) -> None:
    with suppress(BaseException):  # of a request that has failed; asyncio prints what nobody has looked at
        drawing.exception()
