"""The embedded rollout engine: Ray actors that sample from a Hugging Face model, fed like any other engine.

An engine loads the model's architecture and tokenizer from the folder, never its weights: those come through
`begin / receive / commit`, and without a committed version it refuses to sample.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.cluster.placement import PlacementGroups, actor_options, gpus_per_rank
from actors.cluster.ray_errors import end_processes, require_cluster
from actors.rollout.tokenizer import encode_records, end_token_ids, load_tokenizer
from actors.startup import answered, stage
from actors.workers.futures import CallFuture
from actors.workers.watchdog import Limits, Watchdog, Watched, remote_class
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, StateError, WorkerDied, WorkerHung


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response to one prompt."""

    prompt: int  # the place of its prompt among those of the call
    tokens: list[int]  # prompt and response
    response_length: int
    log_probs: list[float]  # [response_length], at the sampling temperature
    text: str  # the response without special tokens, stripped
    finished: bool  # ended by an end token


class EmbeddedEngine(Watched):
    """One engine process; a Ray actor."""

    def __init__(self, model_path: str, compute_dtype: str, device: str) -> None:
        import torch

        from slimefsdp.models.build import build_for_sampling
        from slimefsdp.weight_sync.receive import WeightReceiver

        on_cuda = device != "cpu" and torch.cuda.is_available()
        if not on_cuda:
            torch.set_num_threads(1)
        self._tokenizer = load_tokenizer(model_path)
        self._policy = build_for_sampling(
            Path(model_path), getattr(torch, compute_dtype), torch.device("cuda" if on_cuda else "cpu")
        )
        self._receiver = WeightReceiver(self._policy.named_weights())
        self._end_token_ids = frozenset(end_token_ids(model_path, self._tokenizer.eos_token_id))
        heartbeat.enter(heartbeat.IDLE)

    def begin(self, version: int, manifest: dict[str, tuple[int, ...]]) -> None:
        """As `slimefsdp.weight_sync.receive.Receiver`."""
        self._receiver.begin(version, manifest)

    def receive(self, bucket: Any) -> None:
        """As `slimefsdp.weight_sync.receive.Receiver`, from the object store."""
        from actors.workers.weight_transport import unpack_bucket

        self._receiver.receive(unpack_bucket(bucket))

    def commit(self, version: int) -> None:
        """As `slimefsdp.weight_sync.receive.Receiver`."""
        self._receiver.commit(version)

    @heartbeat.during("generate")
    def generate(
        self,
        prompts: dict[int, Any],
        samples_per_prompt: int,
        max_new_tokens: int,
        temperature: float,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> tuple[int, list[Sampled]]:
        """Samples from the committed weights; returns their version and the samples, prompt-major.

        Args:
            prompts: texts or lists of chat messages, by their places among all prompts of the call.
            seed: equal seeds, places and prompts give equal samples.
            greedy: take the likeliest token each time.

        Raises:
            StateError: no weights are committed.
        """
        import torch

        from actors.rollout.prompts import encode_prompt
        from slimefsdp.sampling.sampler import SamplingParams, sample

        version = self._receiver.version
        if version is None:
            raise StateError(
                "the engine has no committed weights", field="update_weights", hint="call update_weights first"
            )
        if next(self._policy.parameters()).device.type == "cpu":
            torch.set_num_threads(1)  # per thread, and Ray runs methods on threads of its own
        encoded = {place: encode_prompt(self._tokenizer, prompt) for place, prompt in prompts.items()}
        ends = self._end_token_ids
        params = SamplingParams(max_new_tokens, temperature, greedy=greedy, end_token_ids=ends, seed=seed)
        completions = sample(self._policy, encoded, samples_per_prompt, params)
        texts = self._tokenizer.batch_decode([c.tokens for _, c in completions], skip_special_tokens=True)
        return version, [
            Sampled(place, [*encoded[place], *c.tokens], len(c.tokens), c.log_probs, text.strip(), c.finished)
            for (place, c), text in zip(completions, texts, strict=True)
        ]


class EnginePool:
    """The driver's handle on the embedded engines of a run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._engines: list[Any] = []
        self._places = PlacementGroups()
        self._watchdog: Watchdog | None = None

    @classmethod
    def launch(cls, config: RunConfig) -> EnginePool:
        """Starts `rollout.engines` engines; they hold no weights yet.

        Raises:
            ResourceError: the cluster is too small. WorkerDied: an engine did not come up.
        """
        pool = cls(config)
        try:
            pool._start()
        except BaseException:  # Ctrl-C too: in a notebook the driver lives on
            pool.shutdown()
            raise
        return pool

    def _start(self) -> None:
        require_cluster()
        config, began = self._config, time.monotonic()
        timeout_s = config.cluster.launch_timeout_s
        gpus = gpus_per_rank(config.mesh.device)
        placement = self._places.reserve("engine", config.rollout.engines, gpus_per_rank=gpus, timeout_s=timeout_s)
        engine_class = remote_class(EmbeddedEngine)
        self._engines = [
            engine_class.options(**actor_options(placement, index, gpus)).remote(
                str(config.model.path), config.precision.compute_dtype, config.mesh.device
            )
            for index in range(config.rollout.engines)
        ]
        self._watchdog = Watchdog(self._engines, Limits.of(config), kind="engine")
        ready = [one.keep_stacks.remote(config.run.dir, f"engine_{i}") for i, one in enumerate(self._engines)]
        with stage(f"starting {len(ready)} engines", answered(ready)):
            self._wait(ready, "launch", timeout_s, began)

    def relaunch(self) -> None:
        """Ends all engines as they are and starts others in their places, or in new ones if those are gone.

        They hold no weights yet.

        Raises:
            ResourceError: the cluster has become too small. WorkerDied, WorkerHung: one did not come up.
        """
        end_processes(self._engines)
        self._start()

    def are_alive(self) -> bool:
        """Whether every engine answers, once it has done what it was asked before."""
        try:
            self._wait([e.__ray_ready__.remote() for e in self._engines], "check", self._config.cluster.sync_timeout_s)
        except (WorkerDied, WorkerHung):
            return False
        return True

    def update_from(self, group: Any) -> int:
        """Takes the weights of a trainer group; returns their version.

        Raises:
            SyncError: an engine refused, died, or did not answer within cluster.sync_timeout_s.
        """
        version: int = group.update_weights(self.receivers).version
        return version

    @property
    def receivers(self) -> list[Any]:
        """What `WorkerGroup.update_weights` sends to."""
        return list(self._engines)

    def generate(
        self, prompts: Sequence[Any], *, samples_per_prompt: int, seed: Sequence[int], greedy: bool = False
    ) -> tuple[int, list[Sampled]]:
        """Samples for all prompts, split evenly over the engines; prompt-major.

        Args:
            prompts: texts or lists of chat messages.
            seed: what the draws depend on, e.g. (run seed, step).
            greedy: take the likeliest token each time, whatever the seed.

        Returns:
            The weight version that sampled, and the samples.

        Raises:
            BatchError: no prompt, or no sample of one, is asked for.
            StateError: an engine has no committed weights, or engines hold different versions.
            WorkerDied, WorkerHung: an engine ended or did not answer.
        """
        if not prompts:
            raise BatchError("there are no prompts to sample for", field="prompts", hint="give one or more")
        if samples_per_prompt < 1:
            raise BatchError(
                f"samples_per_prompt={samples_per_prompt}; it must be 1 or more",
                field="samples_per_prompt",
                hint="raise it",
            )
        require_cluster()
        settings = self._config.rollout
        shares = [part.tolist() for part in np.array_split(np.arange(len(prompts)), len(self._engines))]
        refs = [
            engine.generate.remote(
                {place: prompts[place] for place in share},
                samples_per_prompt,
                settings.max_new_tokens,
                settings.temperature,
                tuple(seed),
                greedy,
            )
            for engine, share in zip(self._engines, shares, strict=True)
            if share
        ]
        answers = self._wait(refs, "generate", self._config.cluster.call_timeout_s)
        versions = {version for version, _ in answers}
        if len(versions) != 1:
            raise StateError(
                f"engines hold different weights: versions {sorted(versions)}",
                field="update_weights",
                hint="call update_weights",
            )
        return versions.pop(), [sample for _, samples in answers for sample in samples]

    def shutdown(self) -> None:
        """Ends the engines; idempotent."""
        end_processes(self._engines)
        self._engines = []
        self._places.release()

    def _wait(self, refs: Sequence[Any], name: str, timeout_s: float, began: float | None = None) -> Any:
        return CallFuture(
            refs, name=name, timeout_s=timeout_s, first_only=False, watchdog=self._watchdog, began=began
        ).result()


def encode_demonstrations(config: RunConfig, records: Sequence[dict[str, Any]]) -> list[tuple[list[int], int]]:
    """(tokens, response_length) of records with `prompt` and `answer`; the answer ends with the tokenizer's end token.

    Runs in a process of its own, so that the driver needs no transformers.
    """
    as_task: Any = ray.remote(num_cpus=1, max_retries=0)
    ref = as_task(encode_records).remote(str(config.model.path), list(records), with_answers=True)
    name, timeout_s = "encode_demonstrations", config.cluster.call_timeout_s
    encoded: list[tuple[list[int], int]] = CallFuture([ref], name=name, timeout_s=timeout_s, first_only=True).result()
    return encoded
