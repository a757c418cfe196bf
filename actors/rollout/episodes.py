"""Episodes: policy and environment take turns, all episodes of a step at once, until each is done or cannot go on.

In each turn the engines draw a response for every episode that goes on, and environments answer those that are there
while others are still being drawn. The context of a response is the tokens of the turns before it, as they were
sampled; what the environment said is put between them and is not trained on.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.engines.pool import EnginePool, SampledResponse
from actors.engines.protocol import Request
from actors.rollout.call_workers import PendingCalls
from actors.rollout.environment import Prompt, is_token_ids
from actors.rollout.environment_workers import Answer, EnvironmentWorkers, EpisodeCall, EpisodeKey, failed_episode
from actors.rollout.prompt_files import most_sample_tokens
from actors.rollout.rewards import MOST, Scores
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, ConfigError, SlimeError
from slimefsdp.sampling.params import VersionSpan

Outcome = tuple[SampledResponse, Scores] | SlimeError
Encoded = list[tuple["_Episode", list[int]]]
End = Literal["done", "turns", "room"]
"""Why an episode ended: its environment said so, environment.max_turns, or environment.max_tokens (or what else bounds
a context)."""


@dataclass(slots=True, eq=False)
class _Episode:
    """One episode as it goes on."""

    key: EpisodeKey
    record: Mapping[str, Any]
    seed: int
    tokens: list[int] = field(default_factory=list)  # the context of the next response
    log_probs: list[float] = field(default_factory=list)  # of all tokens after the prompt; 0 where they are no choice
    loss_mask: list[bool] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    said: list[tuple[str, bool]] = field(default_factory=list)  # responses so far
    digests: list[str] = field(default_factory=list)  # of the answers of the environment
    transcript: list[str] = field(default_factory=list)
    reward: float = 0.0
    scores: Scores = field(default_factory=dict)
    end: End | None = None
    error: SlimeError | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the policy is asked for another response."""
        return self.end is None and self.error is None

    def call(self, said: Sequence[tuple[str, bool]], max_turns: int) -> EpisodeCall:
        """What its environment is asked, once so much was said."""
        return EpisodeCall(
            self.key, self.record, self.seed, tuple(said), tuple(self.digests), is_last=len(said) == max_turns
        )

    def add_response(self, sample: SampledResponse) -> None:
        """What the policy has said, as it was sampled."""
        shift, drawn = len(self.log_probs), sample.tokens[len(self.tokens) :]
        self.tokens += drawn
        self.log_probs += sample.log_probs
        self.loss_mask += [True] * len(drawn)
        self.versions += [VersionSpan(version, shift + start, shift + end) for version, start, end in sample.versions]
        self.said.append((sample.text, sample.finished))
        self.transcript.append(f"[policy] {sample.text}" if self.transcript else sample.text)

    def add_observation(self, tokens: Sequence[int], text: str) -> None:
        """What the environment has said; these tokens count as of the weights that the response before them is of."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.loss_mask += [False] * len(tokens)
        if self.versions:
            self.versions[-1] = self.versions[-1]._replace(end=len(self.log_probs))
        self.transcript.append(f"[environment] {text}")

    def sample(self) -> SampledResponse:
        """The whole of it, as one response to its prompt."""
        _, place, number = self.key
        mask = None if all(self.loss_mask) else self.loss_mask
        parts = self.transcript
        if len(parts) > 1:  # no line of a text looks like the beginning of another turn
            parts = [part.replace("\n", "\n  ") for part in parts]
        text, is_whole = "\n".join(parts), self.end == "done" and self.said[-1][1]
        return SampledResponse(
            place, number, self.tokens, len(self.log_probs), self.log_probs, text, is_whole,
            tuple(self.versions), mask, len(self.said),
        )  # fmt: skip


class EpisodeRunner:
    """Runs the episodes of a run's steps and evaluations.

    Args:
        workers: where the environments are.
    """

    def __init__(self, config: RunConfig, engines: EnginePool, workers: EnvironmentWorkers) -> None:
        self._engines, self._workers = engines, workers
        self._max_turns = config.environment.max_turns
        self._own_limit = config.environment.max_tokens
        self._limit = most_sample_tokens(config)
        self._calls = itertools.count()
        self.ended = 0  # episodes, so far
        self.responses_drawn = 0  # so far

    def run(
        self,
        records: Sequence[Mapping[str, Any]],
        per_prompt: int,
        seed: Sequence[int],
        environment_seeds: Sequence[int],
        seconds: dict[str, float],
        *,
        max_new_tokens: int | None = None,
        greedy: bool = False,
        evaluates: bool = False,
        may_mix: bool = False,
    ) -> tuple[int, dict[tuple[int, int], Outcome]]:
        """Runs `per_prompt` episodes of each record to their ends.

        Args:
            seed: what the draws depend on, as `EnginePool.generate`.
            environment_seeds: one a record, which its environments are given.
            seconds: what engines took is added here as `generate`, what they did not hide of environments as `reward`.
            max_new_tokens: of a response; None: rollout.max_new_tokens.
            greedy, evaluates: as `EnginePool.generate`.
            may_mix: new weights may come meanwhile.

        Returns:
            The weight version that sampled, the oldest where there are several; by place of the record and number of
            the episode what it came to, or the error of its environment.

        Raises:
            As `EnginePool.generate`, and as `EnvironmentWorkers.pending`.
        """
        while True:
            number = next(self._calls)
            episodes = [
                _Episode((number, place, index), record, one)
                for place, (record, one) in enumerate(zip(records, environment_seeds, strict=True))
                for index in range(per_prompt)
            ]
            try:
                versions = self._run(
                    episodes,
                    seed,
                    seconds,
                    {"max_new_tokens": max_new_tokens, "greedy": greedy, "evaluates": evaluates},
                    may_mix=may_mix,
                )
            finally:
                self._workers.forget(number)
            if len(versions) <= 1 or may_mix:
                break  # else an engine was replaced between two turns, by one with newer weights
        found: dict[tuple[int, int], Outcome] = {}
        for one in episodes:
            ends = {f"ended_by_{name}": float(one.end == name) for name in ("turns", "room")}
            scores = {"reward": one.reward, **one.scores, "turns": float(len(one.said)), **ends}
            found[one.key[1:]] = one.error or (one.sample(), scores)
        return min(versions, default=0), found

    def _run(
        self,
        episodes: Sequence[_Episode],
        seed: Sequence[int],
        seconds: dict[str, float],
        how: Mapping[str, Any],
        *,
        may_mix: bool,
    ) -> set[int]:
        """All turns of these episodes; the versions of the weights that sampled.

        Args:
            how: arguments of `EnginePool.params`.
        """
        self._begin(episodes, seconds)
        self.ended += sum(not one.goes_on for one in episodes)
        versions: set[int] = set()
        while going := [one for one in episodes if one.goes_on]:
            requests, owners = self._requests(going, seed, how)
            pending: PendingCalls[EpisodeCall, Answer] = self._workers.pending()
            places: dict[int, int] = {}  # of calls, by episode; one may have been drawn, and be asked for, again

            def ask(
                sample: SampledResponse, owners: Any = owners, pending: Any = pending, places: dict[int, int] = places
            ) -> None:
                one = owners[sample.prompt, sample.number]
                places[id(one)] = len(pending.calls)
                self.responses_drawn += 1
                pending.add(one.call([*one.said, (sample.text, sample.finished)], self._max_turns))

            began = time.perf_counter()
            _, samples = self._engines.draw(requests, ask, may_mix=may_mix)
            drawn = time.perf_counter()
            outcomes = pending.finish()
            for sample in samples:
                one = owners[sample.prompt, sample.number]
                one.add_response(sample)
                versions.update(span.version for span in sample.versions)
            self._answer(going, [outcomes[places[id(one)]] for one in going])
            self.ended += sum(not one.goes_on for one in going)
            _add(seconds, "generate", drawn - began)
            _add(seconds, "reward", time.perf_counter() - drawn)
        return versions

    def _begin(self, episodes: Sequence[_Episode], seconds: dict[str, float]) -> None:
        """Prompts of all environments, in tokens."""
        began = time.perf_counter()
        pending: PendingCalls[EpisodeCall, Answer] = self._workers.pending()
        for one in episodes:
            pending.add(one.call((), self._max_turns))
        prompts: list[tuple[_Episode, Prompt]] = []
        for one, outcome in zip(episodes, pending.finish(), strict=True):
            if isinstance(outcome, SlimeError):
                one.error = outcome
                continue
            assert outcome.prompt is not None
            one.digests.append(outcome.digest)
            prompts.append((one, outcome.prompt))
            if outcome.prompt != one.record["prompt"]:  # else it is known to whoever reads the episode
                one.transcript.append(f"[prompt] {_text_of(outcome.prompt)}")
        for one, tokens in self._encoded(self._engines.encode, prompts):
            one.tokens = tokens
            if self._room_of(one) < 1:
                problem = f"{self._workers.name} returned a prompt of {len(tokens)} tokens, and there is room for "
                one.error = self._failure(
                    one,
                    f"{problem}{self._most_tokens}",
                    "shorten it, or raise what bounds environment.max_tokens",
                )
        _add(seconds, "reward", time.perf_counter() - began)

    def _requests(
        self, going: Sequence[_Episode], seed: Sequence[int], how: Mapping[str, Any]
    ) -> tuple[list[Request], dict[tuple[int, int], _Episode]]:
        """What engines are asked, and whose each sample is, by request and number.

        In the first turn the episodes of a group are one request, with the seed that it has without an environment: one
        of a single turn trains on the samples that a reward function would. Later turns, and groups that lost an
        episode at the beginning, have a seed for each episode and turn.
        """
        shared: dict[Any, list[_Episode]] = defaultdict(list)
        for one in going:
            place = one.key[1]
            shared[(place, *one.tokens) if not one.said else (one,)].append(one)
        requests: list[Request] = []
        owners: dict[tuple[int, int], _Episode] = {}
        for group in shared.values():
            _, place, number = group[0].key
            is_whole = not group[0].said and [one.key[2] for one in group] == list(range(len(group)))
            purpose = (*seed, place) if is_whole else (*seed, place, number, len(group[0].said))
            room = self._room_of(group[0])
            wanted = how["max_new_tokens"]
            most = room if wanted is None else min(room, wanted)
            params = self._engines.params(purpose, **{**how, "max_new_tokens": most})
            for index, one in enumerate(group):
                owners[len(requests), index] = one
            requests.append(Request(list(group[0].tokens), len(group), params))
        return requests, owners

    def _answer(self, going: Sequence[_Episode], outcomes: Sequence[Answer | SlimeError]) -> None:
        """Takes in what environments have answered to the last responses."""
        observations: list[tuple[_Episode, Any]] = []
        for one, outcome in zip(going, outcomes, strict=True):
            if isinstance(outcome, SlimeError):
                one.error = outcome
                continue
            result = outcome.result
            assert result is not None
            one.digests.append(outcome.digest)
            one.reward += result.reward
            one.scores |= result.scores
            if abs(one.reward) > MOST:
                problem = f"the rewards of {self._workers.name} add up to {one.reward:g}, more than {MOST:g},"
                one.error = self._failure(one, problem, "scale them down")
                continue
            if result.done:
                one.end = "done"
            elif len(one.said) == self._max_turns:
                one.end = "turns"
            else:
                observations.append((one, result.observation))
        said = {id(one): observation for one, observation in observations}
        for one, tokens in self._encoded(self._engines.encode_observations, observations):
            observation = said[id(one)]
            if not is_token_ids(observation) and one.said[-1][1] and tokens[:1] == one.tokens[-1:]:
                tokens = tokens[1:]  # the end of the turn, which was sampled
            if self._room_of(one) - len(tokens) < 1:
                one.end = "room"
            else:
                one.add_observation(tokens, _text_of(observation))

    def _encoded(self, encode: Callable[..., list[list[int]]], given: Sequence[tuple[_Episode, Any]]) -> Encoded:
        """The tokens of what environments have said; one that cannot be encoded fails by itself."""
        if not given:
            return []
        try:
            return list(zip([one for one, _ in given], encode([said for _, said in given]), strict=True))
        except (ConfigError, BatchError) as error:
            if len(given) == 1:
                one = given[0][0]
                one.error = self._failure(
                    one, f"{self._workers.name} returned what is no context: {error.message}", error.hint
                )
                return []
        middle = len(given) // 2
        return [*self._encoded(encode, given[:middle]), *self._encoded(encode, given[middle:])]

    def _failure(self, one: _Episode, problem: str, hint: str | None) -> SlimeError:
        return failed_episode(problem, one.call(one.said, self._max_turns), len(one.said), hint or "correct it")

    @property
    def _most_tokens(self) -> int:
        limits = (self._own_limit, self._limit, self._engines.max_tokens)
        return min(limit for limit in limits if limit is not None)

    def _room_of(self, one: _Episode) -> int:
        """Tokens that its next response may have."""
        return self._most_tokens - len(one.tokens)


def _text_of(observation: Any) -> str:
    """For people."""
    if isinstance(observation, str):
        return observation
    if is_token_ids(observation):
        return f"({len(observation)} tokens)"
    if isinstance(observation, Mapping):
        return f"{_text_of(observation['messages'])}\n[tools] {json.dumps(observation['tools'], default=repr)}"
    return "\n".join(f"[{message['role']}] {message.get('content') or ''}" for message in observation)


def _add(seconds: dict[str, float], name: str, more: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + more
