"""The service's engine with vLLM: an actor that has the methods of `SamplingEngine` and samples at a vLLM server.

Each version is an adapter in vLLM under a unique name. The base is sampled with an adapter of zeros, because vLLM 0.32
on CPU applies another request's adapter to a request without adapter if both are in one batch.

Once the server is lost, every call of the engine raises the loss. The engine's supervisor
(actors/service/supervised_engine.py) then starts another engine, which starts another server.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from actors.engines.dialect import facts_of, start_client
from actors.engines.served_sampling import ABORT_AGAIN_S, GIVE_UP_S, MOST_AT_ONCE, MOST_CUTS
from actors.engines.server_client import HEALTH_S, Refusal, ServerClient
from actors.engines.tokenizer import decoder_of
from actors.engines.vllm_service import (
    SamplingFacts,
    VllmServiceDialect,
    base_of,
    bodies_of,
    check_request,
    read_prompt,
    read_sample,
)
from actors.workers.watchdog import Watched
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import (
    EngineError,
    ModelError,
    ResourceError,
    SlimeError,
    StateError,
    WorkerDied,
    WorkerHung,
    byte_text,
    portable,
)
from slimefsdp.io.files import link_or_copy
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SampleAnswer, SampleRequest, SamplingStats, checked_prompt

_MOST_VERSIONS = 31  # limit on the versions in a started server: vLLM's kernels cost more with room for more adapters
_NOT_FOUND = 404  # status for an unknown adapter, which means that the server was restarted


@dataclass(slots=True, eq=False)
class _Call:
    """A call of `sample`, which sends one request to the server for each of its samples."""

    key: str | None
    waiting: set[str]  # ids of the requests that were not sent yet
    running: set[str] = field(default_factory=set)  # ids of the requests at the server
    over: StateError | None = None  # the reason why the samples are not needed any more; None means that they are


@dataclass(slots=True, eq=False)
class _Version:
    """An adapter in the server, and the calls that sample with it."""

    name: str  # the adapter's name at the server
    folder: Path  # the PEFT folder, kept as long as the server may read it
    calls: set[_Call] = field(default_factory=set)


class VllmSamplingEngine(Watched):
    """A Ray actor that samples at a server of vLLM, which it starts or finds at a URL.

    The methods and their errors are those of `actors.engines.sampling_engine.SamplingEngine`; log-probs are at
    temperature 1, too. A request for a feature that vLLM does not support raises a BatchError. A sample's draws depend
    on `params.seed` and the sample's number. The other requests in vLLM's batch change only the rounding.

    Args:
        config: the settings, with a folder as model.path.
        memory_bytes: limit on the bytes of all versions together.
        max_samples: limit on the samples of a request.

    Raises:
        ModelError: the folder is malformed. WorkerDied, WorkerHung: from every call once the server is lost.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 2}

    def __init__(self, config: RunConfig, *, memory_bytes: int = 2**30, max_samples: int = 1024) -> None:
        self._config = config
        self._memory_bytes, self._max_samples = memory_bytes, max_samples
        self._model = read_model_folder(Path(config.model.path), field="model.path")
        self._decode = decoder_of(str(config.model.path))
        assert config.run.dir is not None
        self._copies = config.run.dir.absolute() / "service" / "vllm"  # has copies of the versions' folders
        self._versions: dict[str | None, _Version] = {}  # the key of the base is None
        self._loading: set[str] = set()  # names of versions that are being loaded
        self._tokens_drawn = 0
        self._client: ServerClient | None = None
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._is_shut_down = False
        self._end: SlimeError | None = StateError("the engine has not begun", field="engine", hint="call begin() first")
        heartbeat.enter(heartbeat.IDLE)

    async def begin(self) -> None:
        """Starts the server, or finds it at its URL, and waits until it is ready. This must be the first call.

        Raises:
            ModelError, ConfigError: as `base_of`. EngineError, WorkerHung: the server cannot be used, or does not
                start. ResourceError: `memory_bytes` is too small for one version.
        """
        await asyncio.to_thread(self._begin)
        self._end = None

    async def load(self, version: str, folder: str) -> int:
        """Loads a version; afterwards the folder may be deleted.

        Raises:
            StateError, ResourceError, ModelError: as `SamplingEngine.load`. ModelError: also if vLLM refuses to load.
        """
        self._require_running()
        if version in self._versions or version in self._loading:
            raise StateError(f"there is a version {version!r}", field="version", hint="give another name")
        count = len(self._versions) - 1 + len(self._loading)
        if count >= self._room:
            raise ResourceError(
                f"{count} versions are held, and vLLM has room for {self._room}",
                field="memory_bytes", hint="drop one, or raise service.max_version_bytes and vLLM's --max-loras",
            )  # fmt: skip
        self._loading.add(version)
        loaded = _Version(f"version-{uuid.uuid4().hex}", self._copies / uuid.uuid4().hex)
        try:
            await asyncio.to_thread(self._load, loaded, Path(folder))
            self._versions[version] = loaded
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._forget, loaded))
            raise
        finally:
            self._loading.discard(version)
        return self._base.version_bytes

    async def drop(self, version: str) -> None:
        dropped = self._version(version)
        del self._versions[version]
        await asyncio.gather(*(self._give_up(call, "its version was dropped") for call in list(dropped.calls)))
        await asyncio.to_thread(self._forget, dropped)

    async def versions(self) -> list[str]:
        return [name for name in self._versions if name is not None]

    async def sample(self, request: SampleRequest, key: str | None = None) -> SampleAnswer:
        """Samples as `SamplingEngine.sample` does.

        Raises:
            StateError: as `SamplingEngine.sample`. BatchError: the request is invalid, or vLLM does not support it.
            EngineError: the server refuses the request, or its answer contradicts the request.
        """
        version = self._version(request.version)
        prompt = checked_prompt(request, self._model.vocab_size, self._max_samples)
        check_request(request, self._facts)
        if request.params.stop and self._decode is None:
            raise StateError("the model has no tokenizer, which stop texts need", field="stop", hint="name token ids")
        bodies = [
            {**body, "request_id": f"slimefsdp-{uuid.uuid4().hex}", "model": version.name}
            for body in bodies_of(request, prompt)
        ]
        call = _Call(key, {body["request_id"] for body in bodies})
        version.calls.add(call)
        assert self._client is not None
        started = [self._client.start(self._answer(call, body)) for body in bodies]
        drawing = asyncio.gather(*map(asyncio.wrap_future, started))
        try:
            return self._read(request, prompt, await asyncio.shield(drawing))
        except BaseException:
            # reads the error of `drawing`, which asyncio would otherwise print
            drawing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._give_up(call, "another sample failed, or it was cancelled,")
            raise
        finally:
            version.calls.discard(call)

    async def cancel(self, key: str) -> None:
        """Ends the request of this key with a StateError; does nothing if there is no such request."""
        for call in [call for version in self._versions.values() for call in version.calls if call.key == key]:
            await self._give_up(call, "it was cancelled")

    async def stats(self) -> SamplingStats:
        """Returns counts of samples and versions; `cache_bytes` is 0, as the size of vLLM's cache is not known."""
        self._require_running()
        calls = [call for version in self._versions.values() for call in version.calls]
        return SamplingStats(
            running_rows=sum(len(call.running) for call in calls),
            waiting_requests=sum(bool(call.waiting) for call in calls),
            waiting_rows=sum(len(call.waiting) for call in calls),
            tokens_drawn=self._tokens_drawn,
            cache_bytes=0,
            versions=dict.fromkeys(await self.versions(), self._base.version_bytes),
            memory_bytes=self._memory_bytes,
        )

    async def shutdown(self) -> None:
        """Ends the server if this engine has started it; open requests and later calls fail with a StateError."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._end = StateError("the engine has been shut down", field="engine", hint="start another one")
            for version in self._versions.values():
                for call in version.calls:
                    call.over = self._end
            if self._client is not None:
                await asyncio.to_thread(self._client.end)
            await asyncio.to_thread(shutil.rmtree, self._copies, ignore_errors=True)

    # ------------------------------------------------------------------ inside

    def _begin(self) -> None:
        config = self._config
        self._base = base_of(config, self._model)
        fitting = self._memory_bytes // self._base.version_bytes
        if not fitting:
            raise ResourceError(
                f"service.max_version_bytes={self._memory_bytes} holds no version, each of which has "
                f"{byte_text(self._base.version_bytes)} at lora.rank={self._base.rank}",
                field="service.max_version_bytes", hint="raise it, or lower lora.rank",
            )  # fmt: skip
        shutil.rmtree(self._copies, ignore_errors=True)
        zeros = _Version(f"base-{uuid.uuid4().hex}", self._copies / "base")
        self._base.write_empty(zeros.folder, self._model)
        adapters = min(_MOST_VERSIONS, fitting) + 1  # one more for the base's adapter of zeros
        self._dialect = VllmServiceDialect(config, self._model, adapters, self._base.modules)
        self._client = start_client(self._dialect, config, 0)
        self._facts: SamplingFacts = facts_of(self._dialect, self._client, config, 0)
        self._load_at_server(zeros)
        self._room = min(self._facts.adapters - 1, fitting)
        self._versions[None] = zeros

    def _version(self, name: str | None) -> _Version:
        self._require_running()
        version = self._versions.get(name)
        if version is None:
            raise StateError(f"there is no version {name!r}", field="version", hint="load it first")
        return version

    def _require_running(self) -> None:
        if self._end is not None:
            raise portable(self._end)

    def _load(self, version: _Version, folder: Path) -> None:
        """Loads a version from a copy of its folder, which the server may read again after dropping the adapter."""
        self._base.check(folder)
        try:
            shutil.copytree(folder, version.folder, copy_function=link_or_copy)
        except OSError as error:
            raise ModelError(f"{folder} cannot be read: {error}", field="folder", hint="save it again") from error
        self._load_at_server(version)

    def _load_at_server(self, version: _Version) -> None:
        """Has the server read an adapter.

        Raises:
            ModelError: vLLM refuses the adapter. WorkerDied, WorkerHung: the server is lost.
        """
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        try:
            self._post("/v1/load_lora_adapter", body)
        except Refusal as refusal:
            raise ModelError(
                f"vLLM cannot load the adapters of {version.folder}: {refusal}",
                field="folder", hint="train modules that vLLM has adapters of, or set rollout.engine=embedded",
            ) from refusal  # fmt: skip
        except (WorkerDied, WorkerHung) as error:
            self._lose(error)
            raise

    def _forget(self, version: _Version) -> None:
        with suppress(Refusal, SlimeError):  # a lost server has no adapters
            self._post("/v1/unload_lora_adapter", {"lora_name": version.name})
        shutil.rmtree(version.folder, ignore_errors=True)

    def _post(self, route: str, body: dict[str, str]) -> None:
        assert self._client is not None
        self._client.post(route, body, timeout_s=self._config.cluster.sync_timeout_s, is_json=False)

    async def _answer(self, call: _Call, body: dict[str, Any]) -> Any:
        """Returns the server's answer to the request for one sample; runs on the client's event loop."""
        name = body["request_id"]
        async with self._places:
            call.waiting.discard(name)
            call.running.add(name)
            try:
                answer = None if call.over is not None else await self._ask(body)
            except Exception as error:
                raise portable(call.over or error) from error
            finally:
                call.running.discard(name)
        if call.over is not None:
            raise portable(call.over)
        return answer

    async def _ask(self, body: dict[str, Any]) -> Any:
        """Asks the server for a sample; repeats the request if the connection was cut and the server is alive."""
        assert self._client is not None
        limit_s, cuts = self._config.cluster.call_timeout_s, 0
        while True:
            try:
                return await self._client.ask("POST", self._dialect.GENERATE, body, timeout_s=limit_s)
            except Refusal as refusal:
                if refusal.status != _NOT_FOUND:
                    raise EngineError(
                        f"the server refused a request: {refusal}", field="engine", hint="look at its log"
                    ) from refusal
                loss = await self._client.loss(str(refusal))
                await asyncio.to_thread(self._lose, loss)
                raise loss from refusal
            except (WorkerDied, WorkerHung) as error:
                cuts += 1
                if isinstance(error, WorkerHung) or cuts > MOST_CUTS or not await self._client.is_alive(HEALTH_S):
                    await asyncio.to_thread(self._lose, error)
                    raise

    def _lose(self, error: SlimeError) -> None:
        """Has all calls raise this loss, and ends the server's processes before another server can be started."""
        assert self._client is not None
        if self._end is None:
            self._end = error
        self._client.end()

    def _give_up(self, call: _Call, why: str) -> asyncio.Future[None]:
        """Ends a call with an error; the future is done when the server has aborted the call's requests."""
        if call.over is None:
            call.over = StateError(f"{why} while it was sampled", field="version", hint="load it again, and ask again")
        return asyncio.get_running_loop().run_in_executor(None, self._abort, call)

    def _abort(self, call: _Call) -> None:
        """Has the server abort a call's requests; returns when they have ended, or after `GIVE_UP_S`."""
        assert self._client is not None
        deadline = time.monotonic() + GIVE_UP_S
        while (names := list(call.running)) and time.monotonic() < deadline:
            with suppress(Refusal, SlimeError):  # a server that has ended has no requests
                self._dialect.end_requests(self._client, names, are_all=False)
            time.sleep(ABORT_AGAIN_S)  # repeat: a request may have been in transit

    def _read(self, request: SampleRequest, prompt: list[int], answers: list[Any]) -> SampleAnswer:
        log_probs, top = None, None
        if request.prompt_log_probs:
            log_probs, top = read_prompt(answers[0] if len(prompt) > 1 else None, prompt, request.prompt_top_k)
        samples = [
            read_sample(answer, request.params, self._decode, self._model.vocab_size)
            for answer in answers[: request.num_samples]
        ]
        if any(sample.finish_reason == "abort" for sample in samples):
            raise EngineError(
                "the server aborted a request that this engine did not abort",
                field="engine", hint="only this engine may pause the server or abort its requests",
            )  # fmt: skip
        self._tokens_drawn += sum(len(sample.tokens) for sample in samples)
        return SampleAnswer(samples, log_probs, top)
