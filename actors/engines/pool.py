"""The rollout engines of a run, as the driver has them: requests are split over them, samples come as they end."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayError

from actors.cluster.placement import PlacementGroups, actor_options, gpus_per_rank
from actors.cluster.ray_errors import end_processes, require_cluster
from actors.engines.colocated import RanksBeside, ranks_beside
from actors.engines.handshake import means_apart, require_fit
from actors.engines.protocol import Engine, EngineTag, Request, Sample, VersionSpan, check_sample, is_info, is_whole
from actors.fault_tolerance.recovery import LOST
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.model_folders import with_model_folders
from actors.startup import answered, stage
from actors.workers.futures import SLICE_S, CallFuture, meaning_of
from actors.workers.group_calls import EndsWithBlock
from actors.workers.watchdog import Limits, Waiting, Watchdog, remote_class
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import load_function
from slimefsdp.config.rollout import SERVERS
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import (
    BatchError,
    ConfigError,
    EngineError,
    SlimeError,
    StateError,
    SyncError,
    WorkerDied,
    WorkerHung,
    short_repr,
)
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.results import FailedReceiver, SyncReport
from slimefsdp.sampling.params import SamplingParams

_HOMES = {
    "embedded": "actors.engines.embedded:EmbeddedEngine",
    **dict.fromkeys(SERVERS, "actors.engines.served:ServedEngine"),
}
_CHECK = 4  # first number of a seed: what is drawn for the check is drawn for nothing else
_CHECKED_SAMPLES, _CHECKED_TOKENS = 2, 16  # of each prompt and engine
_GET_S = 10.0  # for samples that Ray says are here
_MOST_IN_VAIN = 3  # rounds; of one an engine may have taken the requests before it heard of an abort
_LOOK_S = 1.0  # how often engines are looked after, while samples come


@dataclass(frozen=True, slots=True)
class SampledResponse:
    """One response to one prompt."""

    prompt: int  # the place of its prompt among those of the call
    number: int  # among the samples of that prompt
    tokens: list[int]  # prompt and response
    response_length: int
    log_probs: list[float]  # [response_length], at the sampling temperature; greedy ones at temperature 1
    text: str  # the response without special tokens, stripped
    finished: bool  # ended by an end token; an episode, by its environment
    versions: tuple[VersionSpan, ...] = ()  # of the weights that drew the response
    loss_mask: list[bool] | None = None  # [response_length], False where an environment spoke; None: all True
    turns: int = 1  # responses of an episode


class EnginePool(EndsWithBlock):
    """The driver's handle on the rollout engines of a run; `with` ends them.

    With rollout.placement=colocated the engines sleep unless they have a turn. It begins with `update_from` or
    `take_turn` and ends with `sleep`; the trainer's group sleeps from the first to the second.

    Args:
        beside: the actor's group in whose places the engines are, with rollout.placement=colocated.
    """

    def __init__(self, config: RunConfig, beside: Any = None) -> None:
        self._config = config
        self._class: Any = engine_class(config)
        self._beside: RanksBeside | None = ranks_beside(config, beside)
        self._are_asleep = False
        self._engines: list[Any] = []
        self._places = PlacementGroups() if self._beside is None else self._beside.places
        self._watchdog: Watchdog | None = None
        self._end_token_ids: frozenset[int] = frozenset()
        self._max_tokens: dict[int, int | None] = {}  # of a prompt and its response, by engine
        self._vocab_size = read_model_folder(config.model.path, with_weights=False).vocab_size
        self._is_shut_down = False
        self._starting = threading.Lock()  # or a thread that replaces an engine starts one after the end
        self._aborts = 0  # of all samples, so far
        self._may_ask = threading.Event()  # not, while what was aborted is to wait for new weights
        self._may_ask.set()

    def __repr__(self) -> str:
        rollout = self._config.rollout
        state = ", ended" if self._is_shut_down else ""
        count = f"{rollout.engines} engine{'s' * (rollout.engines != 1)}"
        return f"{type(self).__name__}({rollout.engine}, {count}, {self._config.model.path}{state})"

    @classmethod
    def launch(cls, config: RunConfig, beside: Any = None) -> EnginePool:
        """Starts `rollout.engines` engines; they hold no weights yet.

        Args:
            beside: the actor's group, with rollout.placement=colocated and with it alone.

        Raises:
            ResourceError: the cluster is too small. WorkerDied: an engine did not come up.
            EngineError: one is of no use to this run. StateError, ConfigError: no such group, or too small a one.
        """
        pool = cls(with_model_folders(config), beside)
        try:
            pool._start(range(config.rollout.engines))
            if isinstance(beside, SupervisedGroup):
                beside.before_relaunch(pool.sleep)
        except BaseException:  # Ctrl-C too: in a notebook the driver lives on
            pool.shutdown()
            raise
        return pool

    def _start(self, indices: Sequence[int]) -> None:
        """Starts the engines of these indices, in place of those that are there."""
        self._require_running("launch")
        require_cluster()
        config, began = self._config, time.monotonic()
        if self._beside is not None:
            self._beside.sleep()  # what is started measures what is free
            placement, gpus = self._places.reserve_for_ranks(self._beside.config, "actor")
        else:
            count, timeout_s = config.rollout.engines, config.cluster.launch_timeout_s
            each = 0 if config.rollout.engine_urls is not None else config.rollout.gpus_per_engine
            gpus = each * gpus_per_rank(config.mesh.device)
            placement = self._places.reserve("engine", count, gpus_per_rank=gpus, timeout_s=timeout_s)
        actor_class = remote_class(self._class)
        with self._starting:
            if self._is_shut_down:  # meanwhile, by another thread, which has given places back
                self._release_places()
            self._require_running("launch")
            engines = list(self._engines) or [None] * config.rollout.engines
            for index in indices:
                options = actor_options(placement, index, gpus)
                if config.rollout.engine not in _HOMES:  # a class that this process finds in a folder of its own
                    variables = {**options["runtime_env"].get("env_vars", {}), "PYTHONPATH": os.pathsep.join(sys.path)}
                    options["runtime_env"] = {"env_vars": variables}
                engines[index] = actor_class.options(**options).remote(config, index)
            self._engines = engines
        self._watchdog = Watchdog(engines, Limits.of(config), kind="engine")
        ready = [engines[index].keep_stacks.remote(config.run.dir, f"engine_{index}") for index in indices]
        infos = [engines[index].info.remote() for index in indices]
        with stage(f"starting {len(ready)} engine{'s' * (len(ready) != 1)}", answered(infos)):
            for index, *refs in zip(indices, ready, infos, strict=True):
                with _errors_of(index, "info"):
                    _, info = (
                        self._wait([ref], "launch", "launch_timeout_s", began, first_rank=index)[0] for ref in refs
                    )
                if not is_info(info):
                    problem = f"info of engine {index} is {short_repr(info)}"
                    hint = "return an EngineInfo, its fields of the types that actors/engines/protocol.py says"
                    raise EngineError(problem, field="rollout.engine", hint=hint, rank=index)
                require_fit(config, index, info, self._vocab_size)
                self._max_tokens[index] = info.max_tokens
        first = indices[0]  # of those that were just started: another one may be lost
        with _errors_of(first, "end_token_ids"):
            (self._end_token_ids,) = self._wait(
                [engines[first].end_token_ids.remote()], "launch", "launch_timeout_s", began, first_rank=first
            )
        if self._beside is not None:
            self._have_sleep(indices)
            self._are_asleep |= len(indices) == len(engines)

    def check_room(self, longest: int, *, evaluates: bool = False) -> None:
        """Whether every engine takes the longest prompt of a run with its response.

        Args:
            longest: tokens of that prompt.
            evaluates: the prompt is of a held-out set.

        Raises:
            EngineError: one takes fewer.
        """
        sampling = self._config.sampling(evaluates=evaluates)
        needed = longest + sampling.max_new_tokens
        for index, most in sorted(self._max_tokens.items()):
            if most is not None and most < needed:
                raise EngineError(
                    f"engine {index} takes {most} tokens of prompt and response; the longest prompt has {longest}, and "
                    f"{sampling.length_setting} is {sampling.max_new_tokens}",
                    field=sampling.length_setting, rank=index,
                    hint=f"start the engine with {needed} or more, lower it, or set data.max_prompt_tokens",
                )  # fmt: skip

    def check_log_probs(self, group: Any, prompts: Sequence[Any]) -> list[float]:
        """Compares log-probs of a few sampled tokens with the trainer's; by engine, the mean difference.

        Every engine samples for all prompts, from the weights that it has; they must be the trainer's present ones. It
        ends the turn of colocated engines.

        Args:
            group: the trainer's.
            prompts: as `generate`.

        Raises:
            EngineError: a mean is above rollout.engine_logprob_bound; it names the engine and the likely cause.
        """
        few = self.requests(prompts, samples_per_prompt=_CHECKED_SAMPLES, seed=(_CHECK,))
        few = [
            replace(one, params=replace(one.params, max_new_tokens=min(_CHECKED_TOKENS, one.params.max_new_tokens)))
            for one in few
        ]
        count = len(self._engines)
        shares = {index: list(range(index * len(few), (index + 1) * len(few))) for index in range(count)}
        found = sorted(self._stream(few * count, shares), key=lambda sample: (sample.request, sample.number))
        settings = self._config.rollout
        samples = [sampled(few[sample.request % len(few)], sample) for sample in found]
        drawn = np.concatenate([sample.log_probs for sample in samples])
        owners = np.concatenate([[one.request // len(few)] * len(one.tokens) for one in found]).astype(int)

        if self._beside is not None:
            self.sleep()
        batch = RolloutBatch.from_samples(
            [{"tokens": one.tokens, "response_length": one.response_length} for one in samples],
            temperature=settings.temperature,
        )
        return means_apart(self._config, owners, np.abs(group.compute_log_probs(batch).log_probs - drawn))

    def relaunch(self, indices: Sequence[int] | None = None) -> None:
        """Ends engines as they are and starts others in their places, or in new ones if those are gone.

        They hold no weights yet.

        Args:
            indices: of them; None: all.

        Raises:
            ResourceError: the cluster has become too small. WorkerDied, WorkerHung: one did not come up.
        """
        self._require_running("relaunch")
        count = len(self._engines)
        indices = range(count) if indices is None else indices
        if not indices or not all(0 <= index < count for index in indices):
            raise StateError(
                f"indices={list(indices)} of {count} engines", field="indices", hint=f"give some of 0 to {count - 1}"
            )
        end_processes([self._engines[index] for index in indices])
        self._start(indices)

    def dead(self) -> list[int]:
        """The indices of engines that are of no more use, once they have done what they were asked before."""
        self._require_running("dead")
        began, refs = time.monotonic(), [engine.health.remote() for engine in self._engines]
        found = []
        for index, ref in enumerate(refs):
            try:
                self._wait([ref], "check", "sync_timeout_s", began, first_rank=index)
            except (WorkerDied, WorkerHung):
                found.append(index)
        return found

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        """Takes the weights of a trainer group; returns their version. With colocated engines their turn begins.

        Args:
            aborts: what is being sampled is aborted, and drawn anew from the new weights; else it goes on with them.

        Raises:
            SyncError: an engine refused, died, or did not answer within cluster.sync_timeout_s. All others have the
                weights, where there are any; it samples nothing until it has been sent them.
        """
        self._require_running("update_from")
        if not hasattr(group, "update_weights"):
            problem = f"group is a {type(group).__name__}, which has no weights to send"
            raise StateError(problem, field="group", hint="give a WorkerGroup or a SupervisedGroup")
        if self._beside is not None:
            self._beside.keep_parameters_only()
        if not aborts:
            return self._update(group, range(len(self._engines)))
        self._may_ask.clear()
        try:
            with suppress(*LOST):  # the update finds out
                self.abort()
            return self._update(group, range(len(self._engines)))
        finally:
            self._may_ask.set()

    def _update(self, group: Any, indices: Sequence[int]) -> int:
        report = self._delivered(group, indices)
        for one in report.failed:
            raise one.error
        return report.version

    def _delivered(self, group: Any, indices: Sequence[int]) -> SyncReport:
        """An update of these engines, which may be asleep; failed ones are named by their index."""
        return self._sent(group, indices) if self._beside is None else self._sent_to_sleepers(group, indices)

    def _sent(self, group: Any, indices: Sequence[int]) -> SyncReport:
        report: SyncReport = group.update_weights([self._engines[index] for index in indices], drop_failed=True)
        failed = [FailedReceiver(indices[one.receiver], one.error) for one in report.failed]
        for one in failed:
            one.error.rank = one.receiver
        return replace(report, failed=tuple(failed))

    # ------------------------------------------------------------------ turns with the trainer

    def take_turn(self, seconds: dict[str, float]) -> None:
        """Before colocated engines are asked: has them awake with the group's present weights, and the group asleep.

        Nothing happens where they have their turn already.

        Args:
            seconds: what sending weights took is added here as `sync`, and the rest as `turn`.

        Raises:
            As `update_from`.
        """
        beside = self._ranks_beside("take_turn")
        if not self._are_asleep:
            return
        began, sent_before = time.perf_counter(), beside.sending_s
        self.update_from(beside.group)
        sending_s = beside.sending_s - sent_before
        seconds["sync"] = seconds.get("sync", 0.0) + sending_s
        seconds["turn"] = seconds.get("turn", 0.0) + time.perf_counter() - began - sending_s

    def sleep(self) -> None:
        """Has colocated engines free their devices; they lose their weights. Idempotent.

        One that is lost, or does not answer, is ended: the next update finds it gone.

        Raises:
            SyncError: one refused.
        """
        if self._is_shut_down:  # and a supervisor has them sleep before it starts ranks
            return
        self._ranks_beside("sleep")
        if not self._are_asleep:
            self._have_sleep(range(len(self._engines)))
            self._are_asleep = True

    def end_turn(self, seconds: dict[str, float], *, wakes_trainer: bool) -> None:
        """Colocated engines sleep, and the trainer may wake.

        Args:
            seconds: as `take_turn`.

        Raises:
            As `sleep`, and what the group raises.
        """
        beside = self._ranks_beside("end_turn")
        began = time.perf_counter()
        self.sleep()
        if wakes_trainer:
            beside.wake_up()
        seconds["turn"] = seconds.get("turn", 0.0) + time.perf_counter() - began

    def _ranks_beside(self, name: str) -> RanksBeside:
        self._require_running(name)
        if self._beside is None:
            problem = f"{name}() of engines that have devices of their own"
            raise StateError(problem, field=name, hint="set rollout.placement=colocated, or do not call it")
        return self._beside

    def _have_sleep(self, indices: Sequence[int]) -> None:
        began, refs = time.monotonic(), {index: self._engines[index].sleep.remote() for index in indices}
        for index, ref in refs.items():
            try:
                self._wait([ref], "sleep", "sync_timeout_s", began, first_rank=index)
            except LOST:
                # its memory is needed now, and it when engines have their turn again: who sends it weights finds out
                end_processes([self._engines[index]])

    def _have_awake(self, indices: Sequence[int], tags: Sequence[EngineTag]) -> None:
        """
        Raises:
            SyncError: an engine refused, or is no more.
        """
        began, refs = time.monotonic(), {index: self._engines[index].wake_up.remote(tags) for index in indices}
        for index, ref in refs.items():
            try:
                self._wait([ref], "wake_up", "sync_timeout_s", began, first_rank=index)
            except LOST as error:
                raise SyncError(
                    f"engine {index} was lost before it was sent weights: {error.message}",
                    field="update_weights", hint="restart it", rank=index,
                ) from error  # fmt: skip

    def _sent_to_sleepers(self, group: Any, indices: Sequence[int]) -> SyncReport:
        """As `_sent`, on devices that change hands; once all engines have the weights, they take the rest they need."""
        assert self._beside is not None
        while True:
            self._are_asleep = False
            try:
                self._have_awake(indices, ("weights",))
                with self._beside.sending():
                    report = self._sent(group, indices)
                self._beside.free_parameters()
            except SyncError:
                if not self._are_asleep:
                    raise
            if not self._are_asleep:
                if not report.failed:
                    self._have_awake(range(len(self._engines)), ("kv_cache",))
                return report
            # ranks were lost, and all engines sleep since others were started
            indices = range(len(self._engines))
            self._beside.keep_parameters_only()

    # ------------------------------------------------------------------ sampling

    @property
    def receivers(self) -> list[Any]:
        """What `WorkerGroup.update_weights` sends to."""
        return list(self._engines)

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of texts, lists of chat messages (also with tools), or token ids.

        Raises:
            ConfigError: as `actors.engines.tokenizer.encode_prompt`.
            BatchError: there is a token id that the model has not, or this is no list of prompts.
            EngineError: the engine's tokenizer failed, or returned no token ids.
        """
        return self._encoded("encode", prompts)

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        """Token ids of what follows a response's text, as of `Engine`; token ids are taken as they are.

        Raises:
            As `encode`.
        """
        return self._encoded("encode_observations", observations)

    def _encoded(self, method: Literal["encode", "encode_observations"], prompts: Sequence[Any]) -> list[list[int]]:
        self._require_running(method)
        if not isinstance(prompts, list | tuple):
            problem = f"prompts is a {type(prompts).__name__}"
            raise BatchError(problem, field="prompts", hint="give a list of texts, chats or lists of token ids")
        encoded = {place: list(prompt) for place, prompt in enumerate(prompts) if _is_encoded(prompt)}
        for place, tokens in encoded.items():
            self._require_known(tokens, place)
        others = [place for place in range(len(prompts)) if place not in encoded]
        if others:
            require_cluster()
            ref = getattr(self._engines[0], method).remote([prompts[place] for place in others])
            with _errors_of(0, method):
                (found,) = self._wait([ref], "generate", "call_timeout_s")
            if not isinstance(found, list) or len(found) != len(others) or not all(map(_is_encoded, found)):
                problem = f"engine 0 encoded {len(others)} prompts as {short_repr(found)}"
                raise EngineError(problem, field="rollout.engine", hint="return a list of token ids each", rank=0)
            encoded |= dict(zip(others, map(list, found), strict=True))
        return [encoded[place] for place in range(len(prompts))]

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        samples_per_prompt: int,
        seed: int | Sequence[int],
        greedy: bool = False,
        max_new_tokens: int | None = None,
        evaluates: bool = False,
        each: Callable[[SampledResponse], None] | None = None,
        may_mix: bool = False,
    ) -> tuple[int, list[SampledResponse]]:
        """Samples for all prompts, split evenly over the engines; prompt-major. What is aborted is drawn anew.

        Args:
            prompts: texts, lists of chat messages, or token ids.
            seed: what the draws depend on, e.g. (run seed, step); a number alone is that number in a list.
            greedy: take the likeliest token each time, whatever the seed.
            max_new_tokens: of a response; None: rollout.max_new_tokens.
            evaluates: sample as the settings of `evaluation` say, where they differ from those of `rollout`.
            each: called with a sample when it has ended, while others have not; again, if it has to be drawn again.
            may_mix: new weights may come meanwhile.

        Returns:
            The weight version that sampled, the oldest where there are several, and the samples.

        Raises:
            BatchError: no prompt, or no sample of one, is asked for.
            StateError: an engine has no committed weights, or engines hold different versions.
            EngineError: an engine cannot do this, or did not do it.
            WorkerDied, WorkerHung: an engine ended or did not answer.
        """
        requests = self.requests(
            prompts,
            samples_per_prompt=samples_per_prompt,
            seed=seed,
            greedy=greedy,
            max_new_tokens=max_new_tokens,
            evaluates=evaluates,
        )
        return self.draw(requests, each, may_mix=may_mix)

    def draw(
        self,
        requests: Sequence[Request],
        each: Callable[[SampledResponse], None] | None = None,
        *,
        may_mix: bool = False,
    ) -> tuple[int, list[SampledResponse]]:
        """As `generate`, of requests."""
        found: dict[tuple[int, int], SampledResponse] = {}
        left = list(range(len(requests)))
        in_vain, before = 0, (-1, 0)
        while left:
            now = len(found), self._aborts
            in_vain, before = in_vain + 1 if now == before else 0, now
            if in_vain > _MOST_IN_VAIN:
                raise EngineError(
                    f"engines aborted all that they were asked {in_vain} times, though nobody called abort()",
                    field="rollout.engine", hint='end only samples of abort() with finish_reason="abort"',
                )  # fmt: skip
            for sample in self.stream([requests[place] for place in left]):
                place = left[sample.request]
                if sample.finish_reason == "abort" or (place, sample.number) in found:
                    continue
                one = found[place, sample.number] = sampled(requests[place], replace(sample, request=place))
                if each is not None:
                    each(one)
            left = [place for place in left if not _is_complete(place, requests[place], found)]
        versions = {span.version for one in found.values() for span in one.versions}
        if len(versions) != 1 and not may_mix:
            raise StateError(
                f"engines hold different weights: versions {sorted(versions)}",
                field="update_weights",
                hint="call update_weights",
            )
        return min(versions), [found[place] for place in sorted(found)]

    def requests(
        self,
        prompts: Sequence[Any],
        *,
        samples_per_prompt: int,
        seed: int | Sequence[int],
        greedy: bool = False,
        max_new_tokens: int | None = None,
        evaluates: bool = False,
    ) -> list[Request]:
        """What `generate` has the engines asked for: one request a prompt, with the settings of the run.

        Raises:
            BatchError: no prompt, or no sample of one, is asked for.
        """
        self._require_running("generate")
        if isinstance(prompts, list | tuple) and not prompts:
            raise BatchError("there are no prompts to sample for", field="prompts", hint="give one or more")
        if not is_whole(samples_per_prompt) or samples_per_prompt < 1:
            raise BatchError(
                f"samples_per_prompt={samples_per_prompt!r}; it must be a whole number from 1",
                field="samples_per_prompt",
                hint="raise it",
            )
        seeds = (seed,) if is_whole(seed) else seed
        if not isinstance(seeds, list | tuple) or not all(map(is_whole, seeds)):
            problem = f"seed={short_repr(seed)}; it must be a whole number, or a list of them"
            raise BatchError(problem, field="seed", hint="give the run's seed and the step, e.g. (0, 17)")
        how: dict[str, Any] = {"greedy": greedy, "max_new_tokens": max_new_tokens, "evaluates": evaluates}
        return [
            Request(prompt, samples_per_prompt, self.params((*seeds, place), **how))
            for place, prompt in enumerate(self.encode(prompts))
        ]

    def params(
        self, seed: Sequence[int], *, greedy: bool = False, max_new_tokens: int | None = None, evaluates: bool = False
    ) -> SamplingParams:
        """How a request of the run samples.

        Args:
            max_new_tokens: fewer than the settings allow, where there is no room for so many.
            evaluates: as `generate`.
        """
        sampling = self._config.sampling(evaluates=evaluates)
        limits: dict[str, Any] = (
            {} if greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        )
        return SamplingParams(
            sampling.max_new_tokens if max_new_tokens is None else min(max_new_tokens, sampling.max_new_tokens),
            sampling.temperature,
            greedy=greedy,
            tempered=not greedy,  # as all engines can: no temperature takes part in their choice
            # the trainer's are over all tokens, too, so that the first ratio is 1; nobody reads an evaluation's
            renormalized=evaluates,
            end_token_ids=self._end_token_ids,
            stop=self._config.rollout.stop,
            seed=tuple(seed),
            **limits,
        )

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of prompt and response that every engine takes; None: as many as memory holds."""
        return min((most for most in self._max_tokens.values() if most is not None), default=None)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a response."""
        return self._end_token_ids

    def stream(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """The samples of all requests as they end, in no order; requests are split evenly over the engines.

        Raises:
            As `generate`.
        """
        self._require_running("stream")
        require_cluster()
        if not requests:
            raise BatchError("there are no requests", field="requests", hint="give one or more")
        for place, request in enumerate(requests):
            self._require_known(request.prompt, place)
        places = np.array_split(np.arange(len(requests)), len(self._engines))
        shares = {index: part.tolist() for index, part in enumerate(places) if len(part)}
        yield from self._stream(requests, shares)

    def _stream(self, requests: Sequence[Request], shares: dict[int, list[int]]) -> Iterator[Sample]:
        """As `stream`; `shares` are the places of requests by engine."""
        engines = list(self._engines)  # as they are before they are asked: another thread may replace one
        streams: dict[Any, tuple[int, str]] = {}  # the engine, and the stream's name there
        given: set[tuple[int, int]] = set()
        try:
            for index, places in shares.items():
                streams |= self._asked(index, [requests[place] for place in places])
            asked = looked = time.monotonic()
            heard = dict.fromkeys(shares, asked)  # when each engine was asked, or last handed samples over
            while streams:
                require_cluster()
                ready, _ = ray.wait(list(streams), num_returns=1, timeout=SLICE_S, fetch_local=False)
                lost: dict[int, SlimeError] = {}
                if not ready or time.monotonic() - looked > _LOOK_S:  # one may hang while others hand over
                    looked = time.monotonic()
                    here, _ = ray.wait(list(streams), num_returns=len(streams), timeout=0, fetch_local=False)
                    quiet = {index: heard[index] for stream, (index, _) in streams.items() if stream not in here}
                    lost = self._found_hanging(quiet, asked) if quiet else {}
                for stream in ready:
                    index, _ = streams[stream]
                    try:
                        samples = _next_item(stream, index)
                    except LOST as error:
                        lost[index] = error
                        continue
                    share = [requests[place] for place in shares[index]]
                    if samples is None:
                        del streams[stream]
                        _require_whole(index, share, shares[index], given)
                        continue
                    heard[index] = time.monotonic()
                    for sample in samples:
                        check_sample(sample, share, self._vocab_size, index)
                        place = shares[index][sample.request]
                        if (place, sample.number) not in given:
                            given.add((place, sample.number))
                            yield replace(sample, request=place)
                for index, loss in lost.items():
                    self._require_running("generate")  # as `shutdown` of another thread loses them
                    self._after_loss(index, engines[index], loss)
                    engines[index] = self._engines[index]
                    streams = {stream: one for stream, one in streams.items() if one[0] != index}
                    # the whole of what is not complete, since it is drawn as it was; what was given is not given twice
                    # none, where an engine hangs that was asked for nothing
                    places = shares.get(index, [])
                    shares[index] = left = [one for one in places if not _is_complete(one, requests[one], given)]
                    if left:
                        streams |= self._asked(index, [requests[place] for place in left])
                    asked = heard[index] = time.monotonic()
        finally:
            for index, name in streams.values():  # what else was asked for is of no use to anybody
                with suppress(RayError):
                    engines[index].end_stream.remote(name)

    def _asked(self, index: int, requests: Sequence[Request]) -> dict[Any, tuple[int, str]]:
        """The stream of what an engine hands over from now on, of these requests, with the engine and its name."""
        while not self._may_ask.wait(SLICE_S):  # an update, which has a deadline
            pass
        name = uuid.uuid4().hex
        return {self._engines[index].stream.remote(name, list(requests)): (index, name)}

    def _found_hanging(self, heard: Mapping[int, float], asked: float) -> dict[int, SlimeError]:
        """The engine that hangs, if one of these does.

        Args:
            heard: when they were asked, or last handed samples over.
            asked: when the last one was asked.
        """
        assert self._watchdog is not None
        timeout_s = self._config.cluster.call_timeout_s
        try:
            self._watchdog.look(Waiting("generate", sorted(heard), asked))
            late = [index for index, since in sorted(heard.items()) if time.monotonic() - since > timeout_s]
            if late:
                raise self._watchdog.overdue(Waiting("generate", late, asked), timeout_s)
        except WorkerHung as error:
            return {error.rank or 0: error}
        return {}

    def _after_loss(self, index: int, engine: Any, error: SlimeError) -> None:
        """Replaces an engine that was lost while it sampled, unless another stands in its place; here nothing does."""
        raise error

    def abort(self) -> None:
        """Has all samples end that are running or wait, as they are.

        Raises:
            WorkerDied, WorkerHung: an engine ended or did not answer; all others have done it.
        """
        self._require_running("abort")
        self._aborts += 1
        began = time.monotonic()
        refs = [engine.abort.options(concurrency_group="control").remote() for engine in self._engines]
        lost: list[SlimeError] = []
        for index, ref in enumerate(refs):
            try:
                with _errors_of(index, "abort"):
                    self._wait([ref], "abort", "call_timeout_s", began, first_rank=index)
            except LOST as error:
                lost.append(error)
        if lost:
            raise lost[0]

    def shutdown(self) -> None:
        """Ends the engines; idempotent."""
        with self._starting:
            self._is_shut_down = True
        end_processes(self._engines)  # the handles stay: another thread may be about to ask one
        self._release_places()

    def _release_places(self) -> None:
        if self._beside is None:
            self._places.release()

    def _require_running(self, name: str) -> None:
        if self._is_shut_down:
            raise StateError(f"{name}() after shutdown()", field=name, hint="launch other engines")

    def _require_known(self, prompt: Sequence[int], place: int) -> None:
        unknown = [token for token in prompt if not (is_whole(token) and 0 <= token < self._vocab_size)]
        if unknown:
            raise BatchError(
                f"prompt {place} has token id {short_repr(unknown[0])}, outside the vocabulary of {self._vocab_size}",
                field="prompts",
                hint="encode it with the tokenizer of model.path",
            )

    def _wait(
        self,
        refs: Sequence[Any],
        name: str,
        limit: Literal["launch_timeout_s", "sync_timeout_s", "call_timeout_s"],
        began: float | None = None,
        first_rank: int = 0,
    ) -> Any:
        return CallFuture(
            refs,
            name=name,
            timeout_s=getattr(self._config.cluster, limit),
            setting=f"cluster.{limit}",
            first_only=False,
            first_rank=first_rank,
            watchdog=self._watchdog,
            began=began,
        ).result()


def engine_class(config: RunConfig) -> type[Engine]:
    """The class that `rollout.engine` names.

    Raises:
        ConfigError: it cannot be imported, is no `Engine`, or is to sleep and cannot.
    """
    name = config.rollout.engine
    found: Any = load_function(_HOMES.get(name, name), field="rollout.engine", example="my_package.engines:MyEngine")
    if not (isinstance(found, type) and issubclass(found, Engine)) or found.generate is Engine.generate:
        hint = "name a class made from actors.engines.protocol.Engine"
        raise ConfigError(f"{name} is no engine", field="rollout.engine", hint=hint)
    for needed in ("info", "begin", "commit"):
        if getattr(found, needed) is getattr(Engine, needed):
            hint = "write it: docs/engines.md says what an engine of your own needs"
            raise ConfigError(f"{name} has no {needed}() of its own", field="rollout.engine", hint=hint)
    if config.rollout.placement == "colocated" and (found.sleep is Engine.sleep or found.wake_up is Engine.wake_up):
        raise ConfigError(
            f"{name} has no sleep() and wake_up(), by which rollout.placement=colocated has it share a device",
            field="rollout.engine", hint="write both, or set rollout.placement=own",
        )  # fmt: skip
    return found


def sampled(request: Request, sample: Sample) -> SampledResponse:
    """A sample with its prompt."""
    return SampledResponse(
        sample.request,
        sample.number,
        [*request.prompt, *sample.tokens],
        len(sample.tokens),
        sample.log_probs,
        sample.text,
        sample.finish_reason == "stop",
        sample.versions,
    )


def _next_item(stream: Any, index: int) -> list[Sample] | None:
    """What an engine hands over next, of a stream that has something; None at its end."""
    try:
        ref = next(stream)
    except StopIteration:
        return None
    with _errors_of(index, "generate"):
        try:
            samples: list[Sample] = ray.get(ref, timeout=_GET_S)
        except RayError as error:
            raise meaning_of(error, index, "generate") from error
    if not isinstance(samples, list | tuple):
        problem = f"engine {index} handed over {short_repr(samples)}"
        raise EngineError(problem, field="rollout.engine", hint="yield lists of samples", rank=index)
    return list(samples)


@contextmanager
def _errors_of(index: int, call: str) -> Iterator[None]:
    """What an engine's own code raises is an EngineError that names it."""
    try:
        yield
    except (SlimeError, RayError):
        raise
    except Exception as error:
        raise EngineError(
            f"{call} of engine {index} raised {type(error).__name__}: {short_repr(str(error))}",
            field="rollout.engine", hint="correct the engine: its log has the traceback", rank=index,
        ) from error  # fmt: skip


def _is_complete(place: int, request: Request, given: Collection[tuple[int, int]]) -> bool:
    return all((place, number) in given for number in range(request.samples))


def _require_whole(index: int, asked: Sequence[Request], places: Sequence[int], given: set[tuple[int, int]]) -> None:
    """
    Raises:
        EngineError: the engine has ended a call without all of its samples, and would do so again.
    """
    wanted = {(place, number) for place, one in zip(places, asked, strict=True) for number in range(one.samples)}
    if missing := wanted - given:
        raise EngineError(
            f"engine {index} ended a call without {len(missing)} of its {len(wanted)} samples",
            field="rollout.engine", hint="have it hand over each sample, aborted ones too", rank=index,
        )  # fmt: skip


def _is_encoded(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and all(map(is_whole, prompt))
