"""Provides the rollout engines of a run, which get the trainer's weights and draw responses to prompts.

`EngineProcesses` starts and ends the engines, `EngineRequests` asks them for samples, and `EngineUpdates` sends them
weights and replaces lost engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.engines.processes import EngineProcesses
from actors.engines.protocol import Request, Sample, VersionSpan
from actors.engines.requests import is_complete
from actors.engines.updates import EngineUpdates
from actors.fault_tolerance.recovery import Restarts
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.model_folders import with_model_folders
from actors.workers.group_calls import EndsWithBlock
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import EngineError, StateError

_CHECK = 4  # first number of the seeds of `check_log_probs`; no other samples use it
_CHECKED_SAMPLES, _CHECKED_TOKENS = 2, 16  # samples of each prompt and engine, and the limit on their tokens
_MOST_IN_VAIN = 3  # limit on rounds without a sample; requests that arrive just before an abort cost one round


@dataclass(frozen=True, slots=True)
class SampledResponse:
    prompt: int  # index of the prompt in the call
    number: int  # index of this response among the samples of the prompt
    tokens: list[int]  # prompt and response
    response_length: int
    log_probs: list[float]  # [response_length], at the sampling temperature; if the sample is greedy, at temperature 1
    text: str  # the response without special tokens, stripped
    finished: bool  # whether an end token, or the environment of an episode, ended the response
    versions: tuple[VersionSpan, ...] = ()  # versions of the weights that drew the response
    loss_mask: list[bool] | None = None  # [response_length], False for an environment's tokens; None means all True
    turns: int = 1  # number of responses in an episode
    routed_experts: np.ndarray | None = None  # int16 [tokens, layers, experts of a token], or one token less

    @classmethod
    def of(cls, request: Request, sample: Sample) -> SampledResponse:
        tokens = [*request.prompt, *sample.tokens]
        return cls(
            sample.request, sample.number, tokens, len(sample.tokens), sample.log_probs, sample.text,
            sample.finish_reason == "stop", sample.versions, routed_experts=sample.routed_experts,
        )  # fmt: skip


class EnginePool(EngineUpdates, EndsWithBlock):
    """The driver's handle on the rollout engines of a run; the end of its `with` block ends the engines.

    With rollout.placement=colocated, engines and trainer use the devices in turn. The engines' turn begins with
    `update_from` or `take_turn` and ends with `sleep`. The trainer sleeps during this turn, and the engines otherwise.

    With `restarts`, lost engines are replaced: at most cluster.max_restarts times in all, and three times in a row.
    Samples follow from the seed and the weights, so a new engine draws the same samples as the lost one.

    Args:
        beside: the actor's group with which the engines share devices, with rollout.placement=colocated.
        restarts: whether lost engines are replaced. Before the first `update_from`, which names the group that sends
            weights, the loss of an engine is an error.
    """

    def __init__(self, config: RunConfig, beside: Any = None, *, restarts: bool = False) -> None:
        processes = EngineProcesses(config, beside)
        super().__init__(processes, Restarts(config.cluster.max_restarts, "engines") if restarts else None)

    def __repr__(self) -> str:
        rollout = self._config.rollout
        state = ", ended" if self._processes.is_ended else ""
        count = f"{rollout.engines} engine{'s' * (rollout.engines != 1)}"
        return f"{type(self).__name__}({rollout.engine}, {count}, {self._config.model.path}{state})"

    @classmethod
    def launch(cls, config: RunConfig, beside: Any = None, *, restarts: bool = False) -> EnginePool:
        """Starts `rollout.engines` engines, which have no weights yet.

        Args:
            beside, restarts: see `EnginePool`.

        Raises:
            ResourceError: the cluster is too small. WorkerDied: an engine did not start.
            EngineError: the run cannot use an engine. StateError, ConfigError: as in `EngineProcesses`.
        """
        pool = cls(with_model_folders(config), beside, restarts=restarts)
        try:
            pool._processes.start(range(config.rollout.engines))
            if isinstance(beside, SupervisedGroup):
                beside.before_relaunch(pool.sleep)
        except BaseException:  # includes Ctrl-C: in a notebook the driver's process continues
            pool.shutdown()
            raise
        return pool

    @property
    def receivers(self) -> list[Any]:
        """Returns the receivers for `WorkerGroup.update_weights`."""
        return list(self._processes.engines)

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._processes.end_token_ids

    def shutdown(self) -> None:
        """Ends the engines; idempotent."""
        self._processes.end()

    # ------------------------------------------------------------------ checks before a run

    def check_room(self, longest: int, *, evaluates: bool = False) -> None:
        """Checks that every engine accepts the longest prompt of a run together with the longest response.

        Args:
            longest: number of tokens of the longest prompt.
            evaluates: whether the prompt is sampled with the settings of evaluations.

        Raises:
            EngineError: an engine accepts fewer tokens.
        """
        sampling = self._config.sampling(evaluates=evaluates)
        needed = longest + sampling.max_new_tokens
        for index, most in sorted(self._processes.max_tokens.items()):
            if most is not None and most < needed:
                raise EngineError(
                    f"engine {index} takes {most} tokens of prompt and response; the longest prompt has {longest}, and "
                    f"{sampling.length_setting} is {sampling.max_new_tokens}",
                    field=sampling.length_setting, rank=index,
                    hint=f"start the engine with {needed} or more, lower it, or set data.max_prompt_tokens",
                )  # fmt: skip

    def check_log_probs(self, group: Any, prompts: Sequence[Any]) -> list[float]:
        """Compares engines' and trainer's log-probs of a few sampled tokens; returns each engine's mean difference.

        Every engine samples for all prompts. The engines must have the trainer's current weights. The call ends the
        turn of colocated engines.

        Args:
            group: the trainer's group, which computes the log-probs to compare with.
            prompts: as in `generate`.

        Raises:
            EngineError: as in `mean_differences`.
        """
        few = [
            replace(
                request,
                params=replace(request.params, max_new_tokens=min(_CHECKED_TOKENS, request.params.max_new_tokens)),
            )
            for request in self.requests(prompts, samples_per_prompt=_CHECKED_SAMPLES, seed=(_CHECK,))
        ]
        count = len(self._processes.engines)
        shares = {index: list(range(index * len(few), (index + 1) * len(few))) for index in range(count)}
        drawn = sorted(self._stream(few * count, shares), key=lambda sample: (sample.request, sample.number))
        responses = [SampledResponse.of(few[sample.request % len(few)], sample) for sample in drawn]
        log_probs = np.concatenate([response.log_probs for response in responses])
        owners = np.concatenate([[sample.request // len(few)] * len(sample.tokens) for sample in drawn]).astype(int)

        if self._processes.colocated is not None:
            self.sleep()
        batch = RolloutBatch.from_samples(
            [
                {
                    "tokens": response.tokens,
                    "response_length": response.response_length,
                    "routed_experts": response.routed_experts,
                }
                for response in responses
            ],
            temperature=self._config.rollout.temperature,
        )
        return mean_differences(self._config, owners, np.abs(group.compute_log_probs(batch).log_probs - log_probs))

    # ------------------------------------------------------------------ sampling

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        samples_per_prompt: int,
        seed: int | Sequence[int],
        each: Callable[[SampledResponse], None] | None = None,
        may_mix: bool = False,
        **sampling: Any,
    ) -> tuple[int, list[SampledResponse]]:
        """Draws samples for all prompts, which are split evenly over the engines; aborted samples are drawn again.

        Args:
            prompts: texts, lists of chat messages, or token ids.
            seed: determines the draws, e.g. (run seed, step); a number means a list with this number alone.
            each: is called with each sample as soon as the sample has ended; twice if the sample was drawn twice.
            may_mix: whether samples may be of different weight versions, as new weights may arrive during the call.
            sampling: the keyword arguments of `params`.

        Returns:
            The oldest version of the weights that sampled, and the samples in the order of prompt and number.

        Raises:
            BatchError: there are no prompts, or `samples_per_prompt` is below 1.
            StateError: an engine has no committed weights, or engines hold different versions.
            EngineError: an engine cannot do what a request needs, or its answer is wrong.
            WorkerDied, WorkerHung: an engine ended or did not answer.
        """
        requests = self.requests(prompts, samples_per_prompt=samples_per_prompt, seed=seed, **sampling)
        return self.draw(requests, each, may_mix=may_mix)

    def draw(
        self,
        requests: Sequence[Request],
        each: Callable[[SampledResponse], None] | None = None,
        *,
        may_mix: bool = False,
    ) -> tuple[int, list[SampledResponse]]:
        """Draws samples as `generate` does, for requests that the method `requests` returned."""
        while True:
            updates = self._updates
            try:
                result = self._draw_once(requests, each, may_mix=may_mix)
            except StateError:
                if self._restarts is None or not self._updated_since(updates):
                    raise
                continue  # the cause was an update during the call
            if self._restarts is not None:
                self._restarts.progress()
            return result

    def _draw_once(
        self, requests: Sequence[Request], each: Callable[[SampledResponse], None] | None, *, may_mix: bool
    ) -> tuple[int, list[SampledResponse]]:
        drawn: dict[tuple[int, int], SampledResponse] = {}
        left = list(range(len(requests)))
        in_vain, before = 0, (-1, 0)
        while left:
            now = len(drawn), self._aborts
            in_vain, before = in_vain + 1 if now == before else 0, now
            if in_vain > _MOST_IN_VAIN:
                raise EngineError(
                    f"engines aborted all that they were asked {in_vain} times, without a call of abort()",
                    field="rollout.engine", hint='end only samples of abort() with finish_reason="abort"',
                )  # fmt: skip
            for sample in self.stream([requests[index] for index in left]):
                index = left[sample.request]
                if sample.finish_reason == "abort" or (index, sample.number) in drawn:
                    continue
                response = SampledResponse.of(requests[index], replace(sample, request=index))
                drawn[index, sample.number] = response
                if each is not None:
                    each(response)
            left = [index for index in left if not is_complete(index, requests[index], drawn)]
        versions = {span.version for response in drawn.values() for span in response.versions}
        if len(versions) != 1 and not may_mix:
            raise StateError(
                f"engines hold different weights: versions {sorted(versions)}",
                field="update_weights",
                hint="call update_weights",
            )
        return min(versions), [drawn[key] for key in sorted(drawn)]


def mean_differences(config: RunConfig, owners: np.ndarray, differences: np.ndarray) -> list[float]:
    """Returns each engine's mean difference between its log-probs of sampled tokens and the trainer's.

    Args:
        owners: [tokens], the index of the engine that sampled each token; every engine sampled at least one.
        differences: [tokens], absolute differences of log-probs.

    Raises:
        EngineError: a mean is above rollout.engine_logprob_bound; the error names the engine and the likely cause.
    """
    means = [float(differences[owners == index].mean()) for index in range(int(owners.max()) + 1)]
    is_float32 = config.precision.compute_dtype == "float32"
    bound = config.rollout.engine_logprob_bound or (0.001 if is_float32 else 0.05)
    worst = int(np.argmax(means))
    if not means[worst] <= bound:  # NaN is not below the bound either
        cause = "its weights are not those that were sent, or it computes otherwise than the trainer"
        if config.rollout.temperature != 1:
            cause += ", or they are those without the temperature (vLLM: --logprobs-mode processed_logprobs; "
            cause += "SGLang: no SGLANG_RETURN_ORIGINAL_LOGPROB)"
        raise EngineError(
            f"log-probs of what engine {worst} sampled differ from the trainer's by {means[worst]:.3g} in the mean "
            f"of {int((owners == worst).sum())} tokens, more than {bound:g}: {cause}",
            field="rollout.engine_logprob_bound",
            hint="correct the engine, or raise the bound where its arithmetic is coarser",
            rank=worst,
        )
    return means
