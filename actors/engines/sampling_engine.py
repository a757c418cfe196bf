"""Sampling as a service: one process with a base, many versions of adapters beside it or of all weights, and many
requests at once.

The engine is an asynchronous Ray actor: its methods wait, and one thread computes. Whatever changes what is sampled
happens in that thread between two tokens, so that requests join and leave there. Files of versions are read beside it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from actors.cluster.allocator import ALLOCATOR
from actors.cluster.placement import gpus_per_rank
from actors.engines.sampling_thread import SamplingThread, settle, use_one_thread
from actors.engines.tokenizer import decoder_of
from actors.model_folders import with_model_folders
from actors.workers.watchdog import Watched, remote_class
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError, portable
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SampleAnswer, SampleRequest, SamplingStats

if TYPE_CHECKING:  # whoever only starts an engine needs no torch
    from slimefsdp.sampling.turns import Versions

Result = TypeVar("Result")
_CALLS = 4096  # that an engine answers at once; more of them wait in Ray
_CANCELLED_KEPT = 1000  # keys of requests, until they are forgotten: one may be cancelled before it has come


class SamplingEngine(Watched):
    """A process that samples; a Ray actor, as `start_sampling_engine` makes one.

    The base has the weights of model.path in precision.compute_dtype, to the bit those that a trainer of the same
    settings freezes or begins with. Versions have the adapters' layout of lora.rank and lora.targets; without lora.rank
    they are whole models.

    Args:
        config: its model.path is a folder.
        max_rows: the most samples drawn at once, over all versions.
        memory_bytes: the most that versions may have together.
        max_samples: of a request.

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
        policy = load_for_sampling(
            folder,
            compute_dtype(config),
            device,
            lora,
            random_seed=None if folder.has_weights else config.run.seed,
        )
        self._weights: Versions = ModelVersions(policy) if lora is None else AdapterVersions(policy, path)
        self._sampler = VersionedSampler(
            policy,
            self._weights,
            max_rows=max_rows,
            memory_bytes=memory_bytes,
            max_samples=max_samples,
            decode=decoder_of(str(path)),
        )
        # used by the sampling thread alone: answers by number of the sampler's request, and the numbers by their keys
        self._answers: dict[int, _Answer] = {}
        self._numbers: dict[str, int] = {}
        self._cancelled: deque[str] = deque(maxlen=_CANCELLED_KEPT)
        self._thread = SamplingThread(
            self._step, lambda: self._sampler.is_idle, activity="sample", is_on_cpu=self._is_on_cpu
        )

    async def load(self, version: str, folder: str) -> int:
        """Reads a version's folder and holds it under that name, for `sample`; returns its bytes.

        Args:
            folder: of PEFT; without lora.rank a model's.

        Raises:
            StateError: there is a version of this name.
            ResourceError: versions have all of `memory_bytes`; nothing is given up for a new one.
            ModelError: the folder is malformed, of another model or base, or of more than lora.rank.
        """
        reserved: list[str] = []  # by this call, and not by another one of that name

        def reserve() -> None:
            self._sampler.reserve(version)
            reserved.append(version)

        def release() -> None:
            for name in reserved:
                self._sampler.release(name)

        try:
            await self._do(reserve)
            read = await asyncio.to_thread(self._read, folder)
        except BaseException:  # a call that was cancelled, too
            with suppress(StateError):
                self._thread.do(release)
            raise
        return await self._do(partial(self._sampler.hold, version, read))

    async def drop(self, version: str) -> None:
        """Forgets a version and frees its memory; its requests end with a StateError.

        Raises:
            StateError: there is none of this name.
        """

        def drop() -> None:
            for number in self._sampler.drop(version):
                self._settle(
                    number,
                    StateError(
                        f"version {version!r} was dropped while it was sampled",
                        field="version",
                        hint="load it again, and drop it when its requests have been answered",
                    ),
                )

        await self._do(drop)

    async def versions(self) -> list[str]:
        """Names of those that are held, in the order in which they came."""
        return await self._do(lambda: self._sampler.versions)

    async def sample(self, request: SampleRequest, key: str | None = None) -> SampleAnswer:
        """Answers when all samples have ended; a call that is cancelled frees its rows.

        Args:
            key: of this request alone, for `cancel`.

        What a sample draws follows from its version, `params.seed` and its number. What else is sampled enters by the
        rounding of its probabilities alone.

        Raises:
            StateError: there is no such version, or it was dropped meanwhile; its logits are not finite; the request
                was cancelled by its key; or the engine has been shut down.
            BatchError: naming what of the request cannot be. ResourceError: there was no memory to sample with.
        """
        answer: Future[SampleAnswer] = Future()
        numbers: list[int] = []

        def add() -> None:
            if key is not None and key in self._numbers:
                raise StateError(f"there is a request {key!r}", field="key", hint="give each a key of its own")
            if key is not None and key in self._cancelled:
                raise _was_cancelled(key)
            numbers.append(self._sampler.add(request))
            self._answers[numbers[0]] = _Answer(answer, key)
            if key is not None:
                self._numbers[key] = numbers[0]

        def give_up() -> None:
            for number in numbers:
                if number in self._answers:
                    self._settle(number, _was_cancelled(key or ""))
                    self._sampler.cancel(number)

        try:
            await self._do(add)
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with suppress(StateError):
                self._thread.do(give_up)
            raise

    async def cancel(self, key: str) -> None:
        """Ends the request of this key, now or when it comes, with a StateError; nothing where it was answered.

        For callers that wait by Ray: `ray.cancel` of a call that has not left its caller holds up the ones behind it
        (Ray 2.60).
        """

        def cancel() -> None:
            self._cancelled.append(key)
            if (number := self._numbers.get(key)) is not None:
                self._settle(number, _was_cancelled(key))
                self._sampler.cancel(number)

        await self._do(cancel)

    async def stats(self) -> SamplingStats:
        """Returns how much is being sampled and held."""
        return await self._do(self._sampler.stats)

    async def shutdown(self) -> None:
        """Ends the sampling: what has no answer fails with a StateError, and so does what comes later; idempotent."""
        end = StateError("the engine has been shut down", field="engine", hint="start another one")
        await asyncio.to_thread(self._thread.stop, end)
        for number in list(self._answers):
            self._settle(number, end)

    # ------------------------------------------------------------------ inside

    async def _do(self, function: Callable[[], Result]) -> Result:
        """Returns what a function returns that the sampling thread calls between two tokens."""
        try:
            return await asyncio.wrap_future(self._thread.do(function))
        except Exception as error:
            raise portable(error) from None

    def _step(self) -> None:
        """Draws a token for all samples of one version; runs in the sampling thread."""
        try:
            for number, outcome in self._sampler.step():
                self._settle(number, outcome)
        except Exception as error:  # of this file or the sampler's own: the thread ends by it
            for number in list(self._answers):
                self._settle(number, error)
            raise

    def _settle(self, number: int, outcome: SampleAnswer | Exception) -> None:
        """Answers a request of the sampler."""
        answer = self._answers.pop(number)
        if answer.key is not None:
            del self._numbers[answer.key]
        settle(answer.future, portable(outcome) if isinstance(outcome, Exception) else outcome)

    def _read(self, folder: str) -> Any:
        if self._is_on_cpu:
            use_one_thread()
        return self._weights.read(Path(folder))


class _Answer(NamedTuple):
    """A request that waits for its answer."""

    future: Future[SampleAnswer]
    key: str | None


def start_sampling_engine(
    config: RunConfig, *, max_rows: int = 256, memory_bytes: int = 2**30, max_samples: int = 1024
) -> Any:
    """Returns the handle of a `SamplingEngine` that is being started; `ray.kill` ends its process.

    Raises:
        ModelError, ConfigError, ResourceError: as `with_model_folders`.
    """
    limits = {"max_rows": max_rows, "memory_bytes": memory_bytes, "max_samples": max_samples}
    return started_for_service(SamplingEngine, config, gpus_per_rank(config.mesh.device), limits)


def started_for_service(kind: Any, config: RunConfig, gpus: float, limits: dict[str, int]) -> Any:
    """Returns the handle of an engine of a service that is being started.

    Args:
        gpus: that it reserves.
        limits: further arguments of the engine.
    """
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,  # a restarted one would come back without its versions
        "max_concurrency": _CALLS,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **ALLOCATOR}} if gpus == 0 else {},
    }
    return remote_class(kind).options(**options).remote(with_model_folders(config), **limits)


def _was_cancelled(key: str) -> StateError:
    return StateError(f"request {key!r} was cancelled", field="key", hint="send it again under another key")
