"""What engines are asked for in each turn is what was sampled and said before, token by token, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.engines.pool import SampledResponse
from actors.engines.protocol import Request
from actors.rollout.episodes import EpisodeRunner
from actors.rollout.user_code_workers import UserCodeWorkers
from slimefsdp import Environment, StepResult
from slimefsdp.config import config_from_dict
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.sampling.params import SamplingParams, VersionSpan

HERE = __name__
END, START = 2, 3
RECORDS = [{"prompt": "ab"}, {"prompt": "c"}]
GROUP = 3


class Talks(Environment):
    """Repeats what it was told, and how often it was told something."""

    def __init__(self, turns: int = 3, says: Any = None) -> None:
        self.turns, self.says, self.turn = turns, says, 0

    def step(self, response: str, finished: bool) -> StepResult:
        self.turn += 1
        if self.turn == self.turns:
            return StepResult(reward=1.0, done=True, scores={"finished": finished})
        return StepResult(self.says or f"{self.turn}{response}", reward=0.25, scores={"finished": finished})


class Engines:
    """Draws what follows from the whole context; a response ends with the end token, or is cut."""

    def __init__(self, max_tokens: int | None = None, versions: Sequence[int] = (0,)) -> None:
        self.max_tokens = max_tokens
        self.asked: list[Request] = []
        self.versions, self.calls = list(versions), 0

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        return [[*map(ord, prompt), START] for prompt in prompts]

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        if "bad" in observations:
            raise ConfigError("the chat template failed", field="observation", hint="correct it")
        found = [list(one) if isinstance(one, list) else [END, *map(ord, one), START] for one in observations]
        return found

    def params(
        self, seed: Sequence[int], *, greedy: bool = False, max_new_tokens: int, evaluates: bool = False
    ) -> SamplingParams:
        return SamplingParams(max_new_tokens=min(4, max_new_tokens), seed=tuple(seed), greedy=greedy)

    def draw(self, requests: Sequence[Request], each: Any, *, may_mix: bool) -> tuple[int, list[SampledResponse]]:
        version = self.versions[min(self.calls, len(self.versions) - 1)]
        self.calls += 1
        found = []
        for place, request in enumerate(requests):
            self.asked.append(request)
            for number in range(request.samples):
                rng = np.random.default_rng([*request.params.seed, number, *request.prompt])
                length = int(rng.integers(1, request.params.max_new_tokens + 1))
                tokens = rng.integers(48, 58, length).tolist()
                finished = length < request.params.max_new_tokens or bool(rng.integers(2))
                tokens[-1] = END if finished else tokens[-1]
                text = "".join(chr(token) for token in tokens if token != END)
                log_probs = [-token / 100 for token in tokens]
                spans = (VersionSpan(version, 0, length),)
                whole = [*request.prompt, *tokens]
                found.append(SampledResponse(place, number, whole, length, log_probs, text, finished, spans))
        for sample in reversed(found):
            each(sample)
        return version, found


def runner(engines: Engines, tiny: Any, arguments: dict[str, Any] | None = None, **environment: Any) -> EpisodeRunner:
    config = config_from_dict(
        {
            "model": {"path": str(tiny)},
            "optim": {"total_updates": 1},
            "batch": {"max_tokens_per_rank": 256},
            "rollout": {"environment": f"{HERE}:Talks", "max_new_tokens": 4},
            "environment": {"arguments": arguments or {}, **environment},
        }
    )
    return EpisodeRunner(config, engines, UserCodeWorkers(config, in_driver=True))  # type: ignore[arg-type]


def played(one: EpisodeRunner, **options: Any) -> dict[tuple[int, int], Any]:
    return one.run(RECORDS, GROUP, (7,), [0, 0], {}, **options)[1]


def test_the_context_of_each_turn_is_what_was_sampled_and_said_before(folder: Any) -> None:
    engines = Engines()
    found = played(runner(engines, folder))
    assert sorted(found) == [(place, number) for place in range(2) for number in range(GROUP)]
    first, later = engines.asked[:2], engines.asked[2:]
    assert [(one.prompt, one.samples, one.params.seed) for one in first] == [
        ([97, 98, START], GROUP, (7, 0)), ([99, START], GROUP, (7, 1)),
    ]  # fmt: skip
    assert all(one.samples == 1 for one in later) and len({one.params.seed for one in later}) == len(later)
    contexts = {tuple(one.prompt) for one in later}
    ends = set()
    for (place, _), (sample, scores) in found.items():
        assert (sample.turns, scores["turns"], scores["reward"]) == (3, 3.0, 1.5)
        start = len(first[place].prompt)
        assert sample.response_length == len(sample.tokens) - start == len(sample.loss_mask) == len(sample.log_probs)
        expected, mask, turn = list(first[place].prompt), [], 0
        drawn = sample.tokens[start:]
        while True:  # through the whole of it, by hand
            said = []
            while drawn and sample.loss_mask[len(mask)]:
                said.append(drawn.pop(0))
                mask.append(True)
            expected += said
            turn += 1
            if not drawn:
                break
            ends.add(said[-1] == END)
            text = "".join(map(chr, (token for token in said if token != END)))
            answer = [END, *map(ord, f"{turn}{text}"), START][int(said[-1] == END) :]
            assert drawn[: len(answer)] == answer
            del drawn[: len(answer)]
            mask += [False] * len(answer)
            expected += answer
            assert tuple(expected) in contexts
        assert expected == sample.tokens and turn == 3 and mask == sample.loss_mask
        drawn = zip(expected[start:], mask, strict=True)
        assert sample.log_probs == [-token / 100 if is_drawn else 0 for token, is_drawn in drawn]
        assert sample.versions[-1].end == sample.response_length and {span.version for span in sample.versions} == {0}
    assert ends == {True, False}, "turns that ended and turns that were cut"
    assert len(contexts) == 2 * len(found)


def test_an_episode_ends_where_its_turns_or_its_tokens_do(folder: Any) -> None:
    found = played(runner(Engines(), folder, max_turns=2))
    assert {scores["ended_by_turns"] for _, scores in found.values()} == {1.0}
    for sample, _ in found.values():
        assert sample.turns == 2 and not sample.finished and sample.loss_mask[-1]
    for engines, environment in ((Engines(), {"max_tokens": 12}), (Engines(max_tokens=12), {})):
        found = played(runner(engines, folder, **environment))
        ended = {scores["ended_by_room"] for _, scores in found.values()}
        assert 1.0 in ended
        for sample, scores in found.values():
            assert (len(sample.tokens) <= 12 and sample.loss_mask is None) or sample.loss_mask[-1]
            assert sample.finished <= (scores["ended_by_room"] == 0)
        assert all(len(one.prompt) + one.params.max_new_tokens <= 12 for one in engines.asked)


def test_what_cannot_be_encoded_fails_by_itself(folder: Any) -> None:
    class Half(Engines):
        def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
            if "ab" in prompts:
                raise ConfigError("the chat template failed", field="prompt", hint="correct it")
            return super().encode(prompts)

    found = played(runner(Half(), folder))
    for (place, number), outcome in found.items():
        assert isinstance(outcome, BatchError) == (place == 0)
        if place == 0:
            assert f"at the beginning of episode {number}" in outcome.message and "template" in outcome.message
    found = played(runner(Engines(), folder, {"says": "bad"}))
    assert all("in turn 1 of episode" in outcome.message for outcome in found.values())


def test_where_weights_change_between_turns_episodes_begin_again_unless_they_may_mix(folder: Any) -> None:
    engines = Engines(versions=[4, 5, 5, 5, 5, 5])
    version, found = runner(engines, folder).run(RECORDS, GROUP, (7,), [0, 0], {})
    assert version == 5 and engines.calls == 6
    assert all(span.version == 5 for sample, _ in found.values() for span in sample.versions)
    engines = Engines(versions=[4, 5])
    version, found = runner(engines, folder).run(RECORDS, GROUP, (7,), [0, 0], {}, may_mix=True)
    assert version == 4 and engines.calls == 3
    for sample, _ in found.values():
        assert (sample.versions[0].version, sample.versions[-1].version) == (4, 5)
        ends = [0, *(span.end for span in sample.versions)]
        assert [span.start for span in sample.versions] == ends[:-1]
