"""The sampling engine of the service: one process answers many requests, for a base model and many versions of it.

The engine is an asynchronous Ray actor: its methods are coroutines, and one thread draws all tokens. This thread adds
and removes requests and versions between two tokens. Other threads read versions from their files.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from actors.cluster.capacity import gpus_of_engines
from actors.cluster.placement import gpus_per_rank, runtime_environment
from actors.engines.sampling_thread import SamplingThread, settle, use_one_thread
from actors.engines.tokenizer import decoder_of
from actors.model_folders import with_model_folders
from actors.workers.watchdog import Watched, remote_class
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError, portable
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SampleAnswer, SampleRequest, SamplingStats

if TYPE_CHECKING:  # the process that starts an engine does not import torch
    from slimefsdp.sampling.turns import Versions

Result = TypeVar("Result")
_CALLS = 4096  # limit on concurrent calls of an engine; further calls wait in Ray
_CANCELLED_KEPT = 1000  # limit on the remembered keys of cancelled requests; a request may arrive after its `cancel`


class SamplingEngine(Watched):
    """A Ray actor that samples for the service; `start_sampling_engine` starts the actor.

    The base model has the weights of model.path in precision.compute_dtype. These weights are bit-equal to the first
    weights of a trainer with the same settings. A version is an adapter with the rank lora.rank for the modules
    lora.targets; without lora.rank, a version is a whole model.

    Args:
        config: the settings, with a folder as model.path.
        max_rows: limit on the samples drawn at once, over all versions.
        memory_bytes: limit on the bytes of all versions together.
        max_samples: limit on the samples of a request.

    Raises:
        ModelError, ConfigError: as `slimefsdp.models.build.load_for_sampling`.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 2}

    def __init__(
        self, config: RunConfig, *, max_rows: int = 256, memory_bytes: int = 2**30, max_samples: int = 1024
    ) -> None:
        from slimefsdp.distributed.mesh import choose_device
        from slimefsdp.models.build import load_for_sampling
        from slimefsdp.sampling.turns import VersionedSampler
        from slimefsdp.sampling.versions import AdapterVersions, ModelVersions
        from slimefsdp.training.build import compute_dtype, lora_of, set_numerics

        set_numerics(config)
        device = choose_device(config.mesh.device)
        self._is_on_cpu = device.type == "cpu"
        if self._is_on_cpu:
            use_one_thread()
        path = Path(config.model.path)
        folder = read_model_folder(path, field="model.path", with_weights=config.model.init == "folder")
        lora = lora_of(config)
        random_seed = None if folder.has_weights else config.run.seed
        policy = load_for_sampling(folder, compute_dtype(config), device, lora, random_seed=random_seed)
        self._weights: Versions = ModelVersions(policy) if lora is None else AdapterVersions(policy, path)
        limits = {"max_rows": max_rows, "memory_bytes": memory_bytes, "max_samples": max_samples}
        self._sampler = VersionedSampler(policy, self._weights, **limits, decode=decoder_of(str(path)))
        # Only the sampling thread uses the next three attributes.
        self._answers: dict[int, _Answer] = {}  # the sampler's number of a request -> its open answer
        self._numbers: dict[str, int] = {}  # key of a request -> the sampler's number
        self._cancelled: deque[str] = deque(maxlen=_CANCELLED_KEPT)
        self._thread = SamplingThread(
            self._step, lambda: self._sampler.is_idle, activity="sample", is_on_cpu=self._is_on_cpu
        )

    async def load(self, version: str, folder: str) -> int:
        """Reads a version from a folder, for requests that name `version`; returns the version's bytes of memory.

        Args:
            folder: a PEFT folder, or a model folder if lora.rank is not set.

        Raises:
            StateError: a version of this name exists already.
            ResourceError: the version does not fit into the rest of `memory_bytes`; no other version is dropped.
            ModelError: the folder is malformed, of another model or base, or of a larger rank than lora.rank.
        """
        await self._do(lambda: self._sampler.reserve(version))
        try:
            read = await asyncio.to_thread(self._read, folder)
        except BaseException:  # includes the cancellation of this call
            with suppress(StateError):
                self._thread.do(lambda: self._sampler.release(version))
            raise
        return await self._do(lambda: self._sampler.hold(version, read))

    async def drop(self, version: str) -> None:
        """Forgets a version and frees its memory; open requests for this version end with a StateError.

        Raises:
            StateError: there is no version of this name.
        """

        def drop() -> None:
            for number in self._sampler.drop(version):
                problem = f"version {version!r} was dropped while it was sampled"
                hint = "load it again, and drop it when its requests have been answered"
                self._settle(number, StateError(problem, field="version", hint=hint))

        await self._do(drop)

    async def versions(self) -> list[str]:
        """Returns the names of the versions in the order in which they were loaded."""
        return await self._do(lambda: self._sampler.versions)

    async def sample(self, request: SampleRequest, key: str | None = None) -> SampleAnswer:
        """Returns the answer when all samples of the request have ended.

        A sample's draws depend on the version, `params.seed` and the sample's number. Other samples that run at the
        same time change only the rounding of probabilities.

        Args:
            key: a unique name of the request, for `cancel`.

        Raises:
            StateError: the version does not exist, was dropped during the call, or has logits that are not finite; the
                request was cancelled, or an open request has the same key; or the engine has been shut down.
            BatchError: a value of the request is invalid. ResourceError: there was no memory to sample with.
        """
        answer: Future[SampleAnswer] = Future()

        def add() -> None:
            if key is not None and key in self._numbers:
                raise StateError(f"there is a request {key!r}", field="key", hint="give each a key of its own")
            if key is not None and key in self._cancelled:
                raise _was_cancelled(key)
            number = self._sampler.add(request)
            self._answers[number] = _Answer(answer, key)
            if key is not None:
                self._numbers[key] = number

        await self._do(add)
        return await asyncio.wrap_future(answer)

    async def cancel(self, key: str) -> None:
        """Ends the request of this key with a StateError, also if the request arrives later.

        Does nothing if the request was answered. `ray.cancel` is not used, since cancelling a call that has not left
        the caller's process delays all later calls (Ray 2.60).
        """

        def cancel() -> None:
            self._cancelled.append(key)
            if (number := self._numbers.get(key)) is not None:
                self._settle(number, _was_cancelled(key))
                self._sampler.cancel(number)

        await self._do(cancel)

    async def stats(self) -> SamplingStats:
        """Returns counts of running and waiting samples, and of versions."""
        return await self._do(self._sampler.stats)

    async def shutdown(self) -> None:
        """Ends the sampling: open requests and later calls fail with a StateError; idempotent."""
        end = StateError("the engine has been shut down", field="engine", hint="start another one")
        await asyncio.to_thread(self._thread.stop, end)
        for number in list(self._answers):
            self._settle(number, end)

    # ------------------------------------------------------------------ inside

    async def _do(self, function: Callable[[], Result]) -> Result:
        """Has the sampling thread call a function between two tokens, and returns its result."""
        try:
            return await asyncio.wrap_future(self._thread.do(function))
        except Exception as error:
            raise portable(error) from None

    def _step(self) -> None:
        """Draws a token for all samples of one version; runs in the sampling thread."""
        try:
            for number, outcome in self._sampler.step():
                self._settle(number, outcome)
        except Exception as error:  # a defect, which ends the sampling thread
            for number in list(self._answers):
                self._settle(number, error)
            raise

    def _settle(self, number: int, outcome: SampleAnswer | Exception) -> None:
        """Answers the request that has this number in the sampler."""
        answer = self._answers.pop(number)
        if answer.key is not None:
            del self._numbers[answer.key]
        settle(answer.future, portable(outcome) if isinstance(outcome, Exception) else outcome)

    def _read(self, folder: str) -> Any:
        if self._is_on_cpu:
            use_one_thread()
        return self._weights.read(Path(folder))


class _Answer(NamedTuple):
    future: Future[SampleAnswer]
    key: str | None


def start_sampling_engine(config: RunConfig, **limits: int) -> Any:
    """Starts an engine with these settings; returns the actor without waiting. `ray.kill` ends it and its server.

    Args:
        config: with rollout.engine=vllm the actor is a `VllmSamplingEngine`, whose `begin` must be called first.
        limits: further arguments of the engine's class.

    Raises:
        ModelError, ConfigError, ResourceError: as `with_model_folders`.
    """
    from actors.engines.vllm_sampling_engine import VllmSamplingEngine

    uses_vllm = config.rollout.engine == "vllm"
    gpus = gpus_per_rank(config.mesh.device) * (gpus_of_engines(config) if uses_vllm else 1)
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,  # an engine that Ray restarts would have no versions
        "max_concurrency": _CALLS,
        "runtime_env": runtime_environment(gpus, config.cluster.environment),
    }
    kind: Any = VllmSamplingEngine if uses_vllm else SamplingEngine
    return remote_class(kind).options(**options).remote(with_model_folders(config), **limits)


def _was_cancelled(key: str) -> StateError:
    return StateError(f"request {key!r} was cancelled", field="key", hint="send it again under another key")
