"""The rollout engines of a run, as the driver has them: requests are split over them, samples come as they end.

A pool replaces engines that are lost, where it was told to; `EngineProcesses` are the processes, `EngineStreams` how
they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.cluster.ray_errors import require_cluster
from actors.engines.engine_requests import EngineRequests
from actors.engines.handshake import means_apart, require_room
from actors.engines.processes import EngineProcesses
from actors.engines.protocol import Request, Sample, VersionSpan
from actors.engines.streams import EngineStreams, is_complete
from actors.engines.updates import EngineUpdates
from actors.fault_tolerance.recovery import Restarts
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.model_folders import with_model_folders
from actors.workers.group_calls import EndsWithBlock
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, EngineError, StateError
from slimefsdp.sampling.params import SamplingParams

_CHECK = 4  # first number of a seed: what is drawn for the check is drawn for nothing else
_CHECKED_SAMPLES, _CHECKED_TOKENS = 2, 16  # of each prompt and engine
_MOST_IN_VAIN = 3  # rounds; of one an engine may have taken the requests before it heard of an abort


@dataclass(frozen=True, slots=True)
class SampledResponse:
    """Holds a response to a prompt."""

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

    A pool that restarts engines starts another one when one is lost: at most cluster.max_restarts times in all, and
    three times in a row. What engines draw follows from the seed and the weights, so what was lost is drawn as it was.

    Args:
        beside: the actor's group in whose places the engines are, with rollout.placement=colocated.
        restarts: engines that are lost are replaced, once `update_from` has said where their weights come from.
    """

    def __init__(self, config: RunConfig, beside: Any = None, *, restarts: bool = False) -> None:
        self._config = config
        self._processes = EngineProcesses(config, beside)
        limit = Restarts(config.cluster.max_restarts, "engines") if restarts else None
        self._updates = EngineUpdates(self._processes, limit)
        self._streams = EngineStreams(self._processes, self._updates.replace_lost)
        self._asking = EngineRequests(self._processes, self._updates.replace_lost)

    def __repr__(self) -> str:
        rollout = self._config.rollout
        state = ", ended" if self._processes.is_ended else ""
        count = f"{rollout.engines} engine{'s' * (rollout.engines != 1)}"
        return f"{type(self).__name__}({rollout.engine}, {count}, {self._config.model.path}{state})"

    @classmethod
    def launch(cls, config: RunConfig, beside: Any = None, *, restarts: bool = False) -> EnginePool:
        """Starts `rollout.engines` engines; they hold no weights yet.

        Args:
            beside: the actor's group, with rollout.placement=colocated and with it alone.
            restarts: as of `EnginePool`.

        Raises:
            ResourceError: the cluster is too small. WorkerDied: an engine did not come up.
            EngineError: one is of no use to this run. StateError, ConfigError: no such group, or too small a one.
        """
        pool = cls(with_model_folders(config), beside, restarts=restarts)
        try:
            pool._processes.start(range(config.rollout.engines))
            if isinstance(beside, SupervisedGroup):
                beside.before_relaunch(pool.sleep)
        except BaseException:  # Ctrl-C too: in a notebook the driver lives on
            pool.shutdown()
            raise
        return pool

    def relaunch(self, indices: Sequence[int] | None = None) -> None:
        """Ends engines as they are and starts others in their places, or in new ones if those are gone.

        They hold no weights yet.

        Args:
            indices: the engines to restart; None: all.

        Raises:
            ResourceError: the cluster has become too small. WorkerDied, WorkerHung: one did not come up.
        """
        self._processes.relaunch(indices)

    def dead(self) -> list[int]:
        """Waits for the earlier requests of all engines; returns the indices of those that are dead."""
        return self._processes.dead()

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        """Takes the weights of a trainer group; returns their version. With colocated engines their turn begins.

        Args:
            aborts: what is being sampled is aborted, and drawn anew from the new weights; else it goes on with them.

        Raises:
            SyncError: an engine refused, died, or did not answer within cluster.sync_timeout_s. All others have the
                weights, where there are any; it samples nothing until it has been sent them.
        """
        return self._updates.update_from(group, self.abort if aborts else None)

    def take_turn(self, seconds: dict[str, float]) -> None:
        """Wakes colocated engines with the group's present weights, and puts the group to sleep.

        Nothing happens where they have their turn already.

        Args:
            seconds: what sending weights took is added here as `sync`, and the rest as `turn`.

        Raises:
            As `update_from`.
        """
        self._updates.take_turn(seconds)

    def sleep(self) -> None:
        """Has colocated engines free their devices; they lose their weights. Idempotent.

        One that is lost, or does not answer, is ended: the next update finds it gone.

        Raises:
            SyncError: one refused.
        """
        self._updates.sleep()

    def end_turn(self, seconds: dict[str, float], *, wakes_trainer: bool) -> None:
        """Colocated engines sleep, and the trainer may wake.

        Args:
            seconds: as `take_turn`.

        Raises:
            As `sleep`, and what the group raises.
        """
        self._updates.end_turn(seconds, wakes_trainer=wakes_trainer)

    def check_room(self, longest: int, *, evaluates: bool = False) -> None:
        """Checks that every engine takes the longest prompt of a run, of a held-out set if it evaluates.

        Raises:
            EngineError: one takes fewer tokens than this prompt and its response have.
        """
        require_room(self._config, self._processes.max_tokens, longest, evaluates=evaluates)

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
        count = len(self._processes.engines)
        shares = {index: list(range(index * len(few), (index + 1) * len(few))) for index in range(count)}
        found = sorted(self._streams.stream(few * count, shares), key=lambda sample: (sample.request, sample.number))
        settings = self._config.rollout
        samples = [sampled(few[sample.request % len(few)], sample) for sample in found]
        drawn = np.concatenate([sample.log_probs for sample in samples])
        owners = np.concatenate([[one.request // len(few)] * len(one.tokens) for one in found]).astype(int)

        if self._processes.beside is not None:
            self.sleep()
        batch = RolloutBatch.from_samples(
            [{"tokens": one.tokens, "response_length": one.response_length} for one in samples],
            temperature=settings.temperature,
        )
        return means_apart(self._config, owners, np.abs(group.compute_log_probs(batch).log_probs - drawn))

    # ------------------------------------------------------------------ sampling

    @property
    def receivers(self) -> list[Any]:
        """Returns what `WorkerGroup.update_weights` sends to."""
        return list(self._processes.engines)

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Returns the token ids of prompts, as `EngineRequests.encode`."""
        return self._asking.encode(prompts)

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        """Returns the token ids of what follows responses, as `EngineRequests.encode_observations`."""
        return self._asking.encode_observations(observations)

    def requests(self, prompts: Sequence[Any], **how: Any) -> list[Request]:
        """Returns what `generate` has the engines asked for, as `EngineRequests.requests`."""
        return self._asking.requests(prompts, **how)

    def params(self, seed: Sequence[int], **how: Any) -> SamplingParams:
        """Returns how a request of the run samples, as `EngineRequests.params`."""
        return self._asking.params(seed, **how)

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
        """Does as `generate`, of requests."""
        while True:
            updates = self._updates.count()
            try:
                drawn = self._drawn(requests, each, may_mix=may_mix)
            except StateError:
                if self._updates.restarts is None or not self._updates.came_since(updates):
                    raise
                continue  # other weights came meanwhile
            if self._updates.restarts is not None:
                self._updates.restarts.progress()
            return drawn

    def _drawn(
        self, requests: Sequence[Request], each: Callable[[SampledResponse], None] | None, *, may_mix: bool
    ) -> tuple[int, list[SampledResponse]]:
        found: dict[tuple[int, int], SampledResponse] = {}
        left = list(range(len(requests)))
        in_vain, before = 0, (-1, 0)
        while left:
            now = len(found), self._streams.aborts
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
            left = [place for place in left if not is_complete(place, requests[place], found)]
        versions = {span.version for one in found.values() for span in one.versions}
        if len(versions) != 1 and not may_mix:
            raise StateError(
                f"engines hold different weights: versions {sorted(versions)}",
                field="update_weights",
                hint="call update_weights",
            )
        return min(versions), [found[place] for place in sorted(found)]

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of prompt and response that every engine takes; None: as many as memory holds."""
        return min((most for most in self._processes.max_tokens.values() if most is not None), default=None)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a response."""
        return self._processes.end_token_ids

    def stream(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """The samples of all requests as they end, in no order; requests are split evenly over the engines.

        Raises:
            As `generate`.
        """
        self._processes.require_running("stream")
        require_cluster()
        if not requests:
            raise BatchError("there are no requests", field="requests", hint="give one or more")
        for place, request in enumerate(requests):
            self._asking.require_known(request.prompt, place)
        places = np.array_split(np.arange(len(requests)), len(self._processes.engines))
        shares = {index: part.tolist() for index, part in enumerate(places) if len(part)}
        yield from self._streams.stream(requests, shares)

    def abort(self) -> None:
        """Has all samples end that are running or wait, as they are.

        Raises:
            WorkerDied, WorkerHung: an engine ended or did not answer; all others have done it.
        """
        self._streams.abort()

    def shutdown(self) -> None:
        """Ends the engines; idempotent."""
        self._processes.end()


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
