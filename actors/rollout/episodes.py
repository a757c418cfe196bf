"""Runs all episodes of a step at once; in each episode the policy and the user's code take turns until it has ended.

In each turn the engines draw a response for every active episode. Environments answer the first responses while the
rest are still being drawn. The context of a response has the sampled tokens of the earlier turns, and between them the
environment's text, which is not trained on. With a reward function an episode has one turn.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from actors.engines.pool import EnginePool, SampledResponse
from actors.engines.protocol import Request
from actors.rollout.environment import MOST, Prompt, is_token_ids
from actors.rollout.prompt_files import most_sample_tokens
from actors.rollout.rewards import Scores
from actors.rollout.user_code import Answer, EpisodeCall, EpisodeKey
from actors.rollout.user_code_workers import UserCodeWorkers
from slimefsdp.config import RunConfig
from slimefsdp.data.fields import UNKNOWN_EXPERT
from slimefsdp.errors import BatchError, ConfigError, SlimeError
from slimefsdp.sampling.params import VersionSpan

Outcome = tuple[SampledResponse, Scores] | SlimeError
Encoded = list[tuple["_Episode", list[int]]]
End = Literal["done", "turns", "room"]
"""The reason why an episode ended. "done" means that the environment ended it, "turns" that it had
environment.max_turns responses, and "room" that a limit on the context left no tokens for another response."""


@dataclass(slots=True, eq=False)
class _Episode:
    key: EpisodeKey
    record: Mapping[str, Any]
    seed: int
    tokens: list[int] = field(default_factory=list)  # the context of the next response
    log_probs: list[float] = field(default_factory=list)  # of all tokens after the prompt; 0 for observations
    loss_mask: list[bool] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    experts: np.ndarray | None = None  # of all tokens that an engine has computed, if engines return them
    responses: list[tuple[str, bool]] = field(default_factory=list)  # responses so far, and whether each was finished
    digests: list[str] = field(default_factory=list)  # digests of the environment's answers
    transcript: list[str] = field(default_factory=list)
    reward: float = 0.0
    scores: Scores = field(default_factory=dict)
    end: End | None = None
    error: SlimeError | None = None

    @property
    def is_active(self) -> bool:
        return self.end is None and self.error is None

    def call(self, responses: Sequence[tuple[str, bool]], max_turns: int) -> EpisodeCall:
        """Returns the call that asks the environment for its answer to the last of these responses."""
        return EpisodeCall(
            self.key, self.record, self.seed, tuple(responses), tuple(self.digests), is_last=len(responses) == max_turns
        )

    def add_response(self, sample: SampledResponse) -> None:
        """Appends a response of the policy, with its tokens as they were sampled."""
        shift, drawn = len(self.log_probs), sample.response_length
        self.tokens = list(sample.tokens)
        self.log_probs += sample.log_probs
        self.loss_mask += [True] * drawn
        self.versions += [VersionSpan(version, shift + start, shift + end) for version, start, end in sample.versions]
        if (experts := sample.routed_experts) is not None:  # the first computation of a token drew the next ones
            known = experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate([known, experts[len(known) :]])
        self.responses.append((sample.text, sample.finished))
        self.transcript.append(f"[policy] {sample.text}" if self.transcript else sample.text)

    def add_observation(self, tokens: Sequence[int], text: str) -> None:
        """Appends an observation; its tokens get the weight version of the response before them."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.loss_mask += [False] * len(tokens)
        if self.versions:
            self.versions[-1] = self.versions[-1]._replace(end=len(self.log_probs))
        self.transcript.append(f"[environment] {text}")

    def sample(self) -> SampledResponse:
        """Returns the whole episode as one response to its prompt."""
        _, record_index, number = self.key
        mask = None if all(self.loss_mask) else self.loss_mask
        parts = self.transcript
        if len(parts) > 1:  # texts are indented, so that none of their lines looks like the beginning of a turn
            parts = [part.replace("\n", "\n  ") for part in parts]
        text, is_whole = "\n".join(parts), self.end == "done" and self.responses[-1][1]
        return SampledResponse(
            record_index, number, self.tokens, len(self.log_probs), self.log_probs, text, is_whole,
            tuple(self.versions), mask, len(self.responses), self._all_experts(),
        )  # fmt: skip

    def _all_experts(self) -> np.ndarray | None:
        """Returns the experts of all tokens; those of observations that no response followed are unknown."""
        if self.experts is None:
            return None
        missing = len(self.tokens) - len(self.experts)
        return np.pad(self.experts, ((0, missing), (0, 0), (0, 0)), constant_values=UNKNOWN_EXPERT)


@dataclass(frozen=True, slots=True)
class Progress:
    """Holds the counts of episodes and responses of a run so far."""

    asked: int = 0  # episodes that were started
    ended: int = 0  # episodes that have ended
    responses: int = 0  # responses that were drawn


class EpisodeRunner:
    """Runs the episodes of a run's steps and evaluations; `workers` run the reward function or the environments."""

    def __init__(self, config: RunConfig, engines: EnginePool, workers: UserCodeWorkers) -> None:
        self._engines, self._workers, self._code = engines, workers, workers.code
        self._max_turns = 1 if self._code.is_reward else config.environment.max_turns
        # With a reward function there is room for rollout.max_new_tokens, as prompt lengths were checked before.
        self._limits = () if self._code.is_reward else (config.environment.max_tokens, most_sample_tokens(config))
        self._calls = itertools.count()
        self.counts = Progress()

    @property
    def done(self) -> int:
        """Returns the number of responses drawn so far; with an environment, the number of episodes that have ended."""
        return self.counts.responses if self._code.is_reward else self.counts.ended

    def progress(self, before: Progress) -> str:
        """Returns a text about the progress of the episodes that were started since the counts `before`."""
        started, ended = self.counts.asked - before.asked, self.counts.ended - before.ended
        responses = self.counts.responses - before.responses
        if not self._code.is_reward:
            return f"{ended} of {started} episodes have ended, {responses} responses drawn"
        return f"{responses} of {started} responses" + (", and rewards are awaited" if responses >= started > 0 else "")

    def run(
        self,
        records: Sequence[Mapping[str, Any]],
        per_prompt: int,
        seed: Sequence[int],
        environment_seeds: Sequence[int],
        seconds: dict[str, float],
        *,
        drawing: Callable[[dict[str, float]], AbstractContextManager[None]] = lambda _: nullcontext(),
        may_mix: bool = False,
        **sampling: Any,
    ) -> tuple[int, dict[tuple[int, int], Outcome]]:
        """Runs `per_prompt` episodes of each record to their ends.

        Args:
            seed: determines the draws, as in `EnginePool.generate`.
            environment_seeds: a seed for each record, passed to the environments of its episodes.
            seconds: the time of drawing is added to the entry `generate`. The time of waiting for the user's code after
                all responses were drawn is added to `reward`.
            drawing: is called with `seconds` and returns a context manager. Engines draw only inside of this context,
                which is left when only rewards are outstanding.
            may_mix: whether new weights may arrive during the episodes.
            sampling: `max_new_tokens`, `greedy` and `evaluates`, as in `EnginePool.params`.

        Returns:
            The oldest weight version that sampled, and (index of the record, number of the episode) -> outcome of the
            episode, which is an error if the user's code failed.

        Raises:
            As `EnginePool.generate` and `UserCodeWorkers.pending`.
        """
        self._count(asked=len(records) * per_prompt)
        while True:
            number = next(self._calls)
            episodes = [
                _Episode((number, record_index, index), record, environment_seed)
                for record_index, (record, environment_seed) in enumerate(zip(records, environment_seeds, strict=True))
                for index in range(per_prompt)
            ]
            try:
                with ExitStack() as engines:
                    engines.enter_context(drawing(seconds))
                    versions = self._run(episodes, seed, seconds, sampling, engines, may_mix=may_mix)
            finally:
                self._workers.forget(number)
            if len(versions) <= 1 or may_mix:
                break  # otherwise an engine was replaced between two turns and has newer weights: start again
        outcomes: dict[tuple[int, int], Outcome] = {}
        for episode in episodes:
            outcomes[episode.key[1:]] = episode.error or (episode.sample(), self._scores_of(episode))
        return min(versions, default=0), outcomes

    def _scores_of(self, episode: _Episode) -> Scores:
        scores = {"reward": episode.reward, **episode.scores}
        if self._code.is_reward:
            return scores
        ends = {f"ended_by_{name}": float(episode.end == name) for name in ("turns", "room")}
        return {**scores, "turns": float(len(episode.responses)), **ends}

    def _count(self, *, asked: int = 0, ended: int = 0, responses: int = 0) -> None:
        before = self.counts
        self.counts = Progress(before.asked + asked, before.ended + ended, before.responses + responses)

    def _run(
        self,
        episodes: Sequence[_Episode],
        seed: Sequence[int],
        seconds: dict[str, float],
        sampling: Mapping[str, Any],
        engines: ExitStack,
        *,
        may_mix: bool,
    ) -> set[int]:
        """Runs all turns of the episodes; returns the weight versions that sampled.

        Args:
            engines: a context that is closed once no more responses will be drawn.
        """
        self._begin(episodes, seconds)
        self._count(ended=sum(not episode.is_active for episode in episodes))
        versions: set[int] = set()
        for turn in range(1, self._max_turns + 1):
            active = [episode for episode in episodes if episode.is_active]
            if not active:
                break
            requests, owners = self._requests(active, seed, sampling)
            pending = self._workers.pending()
            call_of: dict[int, int] = {}  # id() of an episode -> index of its last call; a response may be drawn twice

            def ask(
                sample: SampledResponse, owners: Any = owners, pending: Any = pending, call_of: dict[int, int] = call_of
            ) -> None:
                episode = owners[sample.prompt, sample.number]
                call_of[id(episode)] = len(pending.calls)
                self._count(responses=1)
                pending.add(episode.call([*episode.responses, (sample.text, sample.finished)], self._max_turns))

            began = time.perf_counter()
            version, samples = self._engines.draw(requests, ask, may_mix=may_mix)
            drawn = time.perf_counter()
            if turn == self._max_turns:
                engines.close()
            outcomes = pending.finish()
            versions.add(version)
            for sample in samples:
                owners[sample.prompt, sample.number].add_response(sample)
                versions.update(span.version for span in sample.versions)
            self._answer(active, [outcomes[call_of[id(episode)]] for episode in active])
            self._count(ended=sum(not episode.is_active for episode in active))
            _add(seconds, "generate", drawn - began)
            _add(seconds, "reward", time.perf_counter() - drawn)
        return versions

    def _begin(self, episodes: Sequence[_Episode], seconds: dict[str, float]) -> None:
        """Sets the context of each episode to the tokens of its prompt."""
        began = time.perf_counter()
        if self._code.is_reward:
            records = {episode.key[1]: episode.record for episode in episodes}
            encoded = self._engines.encode([record["prompt"] for record in records.values()])
            tokens_of = dict(zip(records, encoded, strict=True))
            for episode in episodes:
                episode.tokens = list(tokens_of[episode.key[1]])
            _add(seconds, "generate", time.perf_counter() - began)
            return
        pending = self._workers.pending()
        for episode in episodes:
            pending.add(episode.call((), self._max_turns))
        prompts: list[tuple[_Episode, Prompt]] = []
        for episode, outcome in zip(episodes, pending.finish(), strict=True):
            if isinstance(outcome, SlimeError):
                episode.error = outcome
                continue
            assert outcome.prompt is not None
            episode.digests.append(outcome.digest)
            prompts.append((episode, outcome.prompt))
            if outcome.prompt != episode.record["prompt"]:  # the record's own prompt is shown with the transcript
                episode.transcript.append(f"[prompt] {_text_of(outcome.prompt)}")
        for episode, tokens in self._encoded(self._engines.encode, prompts):
            episode.tokens = tokens
            if self._room_of(episode) < 1:
                problem = f"{self._code.name} returned a prompt of {len(tokens)} tokens, and there is room for "
                hint = "shorten it, or raise what bounds environment.max_tokens"
                episode.error = self._failure(episode, f"{problem}{self._most_tokens}", hint)
        _add(seconds, "reward", time.perf_counter() - began)

    def _requests(
        self, active: Sequence[_Episode], seed: Sequence[int], sampling: Mapping[str, Any]
    ) -> tuple[list[Request], dict[tuple[int, int], _Episode]]:
        """Returns the requests of a turn, and the episode of each sample by (index of the request, sample number).

        In the first turn all episodes of a group are one request with one seed, so that an environment of one turn
        trains on the same samples as a reward function. In later turns, and in groups that lost an episode at the
        start, each episode and turn has its own seed.
        """
        shared: dict[Any, list[_Episode]] = defaultdict(list)
        for episode in active:
            prompt = episode.key[1]
            is_shared = not episode.responses
            key = (prompt, *(() if self._code.is_reward else episode.tokens)) if is_shared else (episode,)
            shared[key].append(episode)
        requests: list[Request] = []
        owners: dict[tuple[int, int], _Episode] = {}
        for group in shared.values():
            _, prompt, number = group[0].key
            is_whole = not group[0].responses and [episode.key[2] for episode in group] == list(range(len(group)))
            purpose = (*seed, prompt) if is_whole else (*seed, prompt, number, len(group[0].responses))
            most = sampling.get("max_new_tokens")
            if not self._code.is_reward:
                room = self._room_of(group[0])
                most = room if most is None else min(room, most)
            params = self._engines.params(purpose, **{**sampling, "max_new_tokens": most})
            for index, episode in enumerate(group):
                owners[len(requests), index] = episode
            requests.append(Request(list(group[0].tokens), len(group), params))
        return requests, owners

    def _answer(self, active: Sequence[_Episode], outcomes: Sequence[Answer | SlimeError]) -> None:
        """Applies the environments' answers to the last responses."""
        observations: list[tuple[_Episode, Any]] = []
        for episode, outcome in zip(active, outcomes, strict=True):
            if isinstance(outcome, SlimeError):
                episode.error = outcome
                continue
            result = outcome.result
            assert result is not None
            episode.digests.append(outcome.digest)
            episode.reward += result.reward
            episode.scores |= result.scores
            if abs(episode.reward) > MOST:
                problem = f"the rewards of {self._code.name} add up to {episode.reward:g}, more than {MOST:g},"
                episode.error = self._failure(episode, problem, "scale them down")
                continue
            if result.done:
                episode.end = "done"
            elif len(episode.responses) == self._max_turns:
                episode.end = "turns"
            else:
                observations.append((episode, result.observation))
        if not observations:
            return
        observation_of = {id(episode): observation for episode, observation in observations}
        for episode, tokens in self._encoded(self._engines.encode_observations, observations):
            observation = observation_of[id(episode)]
            if not is_token_ids(observation) and episode.responses[-1][1] and tokens[:1] == episode.tokens[-1:]:
                tokens = tokens[1:]  # the end-of-turn token was sampled already
            if self._room_of(episode) - len(tokens) < 1:
                episode.end = "room"
            else:
                episode.add_observation(tokens, _text_of(observation))

    def _encoded(self, encode: Callable[..., list[list[int]]], items: Sequence[tuple[_Episode, Any]]) -> Encoded:
        """Encodes prompts or observations of environments. If encoding an item fails, only its episode fails."""
        if not items:
            return []
        try:
            return list(zip([episode for episode, _ in items], encode([value for _, value in items]), strict=True))
        except (ConfigError, BatchError) as error:
            if len(items) == 1:
                episode = items[0][0]
                episode.error = self._failure(
                    episode, f"{self._code.name} returned what is no context: {error.message}", error.hint
                )
                return []
        middle = len(items) // 2
        return [*self._encoded(encode, items[:middle]), *self._encoded(encode, items[middle:])]

    def _failure(self, episode: _Episode, problem: str, hint: str | None) -> SlimeError:
        return self._code.failure(
            problem, episode.call(episode.responses, self._max_turns), len(episode.responses), hint
        )

    @property
    def _most_tokens(self) -> int:
        limits = (*self._limits, self._engines.max_tokens)
        return min(limit for limit in limits if limit is not None)

    def _room_of(self, episode: _Episode) -> int:
        """Returns the number of tokens that the next response of an episode may have."""
        return self._most_tokens - len(episode.tokens)


def _text_of(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if is_token_ids(observation):
        return f"({len(observation)} tokens)"
    if isinstance(observation, Mapping):
        return f"{_text_of(observation['messages'])}\n[tools] {json.dumps(observation['tools'], default=repr)}"
    return "\n".join(f"[{message['role']}] {message.get('content') or ''}" for message in observation)


def _add(seconds: dict[str, float], name: str, more: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + more
