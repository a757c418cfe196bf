"""Episodes are what was sampled and said, token by token; they end when they must, and what fails is left out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import EnginePool
from actors.engines.tokenizer import load_tokenizer
from actors.rollout.collect import Collector
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import PromptStream
from actors.rollout.records import Record
from actors.rollout.user_code_workers import UserCodeWorkers
from slimefsdp import Environment, StepResult
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from tests.support.refusals import refused
from tests.support.runs import bits

HERE = __name__
NUM_PROMPTS, GROUP = 3, 4
RECORDS = [
    Record({"prompt": f"sort {place}{place + 1}", "number": place}, f"train.jsonl:{place}") for place in range(9)
]


def letters(record: Any, response: str, finished: bool) -> dict[str, float]:
    return {"reward": len(set(response)) / 10, "first": float(response[:1] == "s")}


class Letters(Environment):
    """That reward, in one turn."""

    def step(self, response: str, finished: bool) -> StepResult:
        scores = letters({}, response, finished)
        return StepResult(None, scores.pop("reward"), True, scores)


class Talks(Environment):
    """Says something to each response, of a length that follows from its seed, until it is done."""

    def __init__(self, last: int = 3, told: str = "") -> None:
        self.last, self.told = last, told

    def reset(self, record: Any, seed: int) -> Any:
        self.number, self.turn = record["number"], 0
        self.rng = np.random.default_rng(seed)
        if self.told == "long prompt" and self.number == 1:
            return "sort " * 40
        return f"{record['prompt']}{self.rng.integers(1000)}"

    def step(self, response: str, finished: bool) -> StepResult:
        self.turn += 1
        if self.told == "raise" and self.number == 1 and self.turn == 2:
            raise OSError("the world is full")
        if self.turn == self.last:
            return StepResult(None, 0.5, done=True, scores={"last": 1.0})
        text = "7" * int(self.rng.integers(1, 4))
        forms: list[Any] = [text, [{"role": "system", "content": text}, {"role": "user", "content": "31"}], [5, 6, 7]]
        return StepResult(forms[(self.number + self.turn) % 3], len(set(response)) / 10, scores={"last": 0.0})


@pytest.fixture(scope="module")
def pool(cluster: None, make_config: Any, ranks_of_two: Any) -> Iterator[EnginePool]:
    engines = EnginePool.launch(make_config())
    engines.update_from(ranks_of_two)
    yield engines
    engines.shutdown()


@pytest.fixture(scope="module")
def ranks_of_two(cluster: None, make_config: Any) -> Iterator[Any]:
    from actors.workers.worker_group import WorkerGroup

    group = WorkerGroup.launch(make_config())
    yield group
    group.shutdown()


@pytest.fixture
def collector(pool: EnginePool, make_config: Any) -> Iterator[Any]:
    started: list[UserCodeWorkers] = []

    def make(name: str, rollout: dict[str, Any] | None = None, **environment: Any) -> tuple[RunConfig, Collector]:
        is_environment = name != "letters"
        config = make_config(
            rollout={
                "prompts_per_step": NUM_PROMPTS, "samples_per_prompt": GROUP,
                "environment" if is_environment else "reward": f"{HERE}:{name}",
                **({"reward_workers": 2} if is_environment else {}), **(rollout or {}),
            },
            **({"environment": environment} if is_environment else {}),
            evaluation={"interval_steps": 1},
        )  # fmt: skip
        if is_environment:
            started.append(UserCodeWorkers.launch(config))
        prompts = Prompts(RECORDS, {"": RECORDS[:4]})
        return config, Collector(config, pool, None, prompts, started[-1] if is_environment else None)

    yield make
    for one in started:
        one.shutdown()


def test_an_episode_of_one_turn_is_what_a_reward_function_gives(collector: Any) -> None:
    (_, plain), (_, episodes) = collector("letters"), collector("Letters")
    for step in range(2):
        (expected, of_rewards), (found, metrics) = plain.collect(step, None, {}), episodes.collect(step, None, {})
        assert found.same_as(expected) and found.loss_mask is None
        of_episodes = {f"rollout/{name}" for name in ("turns", "ended_by_turns", "ended_by_room")}
        assert {name: value for name, value in bits(metrics).items() if name not in of_episodes} == bits(of_rewards)
        assert [metrics[name] for name in sorted(of_episodes)] == [0.0, 0.0, 1.0]


def responses_of(batch: RolloutBatch) -> list[tuple[list[int], list[bool], list[float]]]:
    """Tokens after the prompt, whether each was sampled, and its log-prob, of each sample."""
    found = []
    assert batch.rollout_log_probs is not None
    for sample in range(batch.num_samples):
        tokens = batch.tokens[batch.token_offsets[sample] : batch.token_offsets[sample + 1]].tolist()
        part = slice(batch.response_offsets[sample], batch.response_offsets[sample + 1])
        found.append(
            (tokens[-batch.response_lengths[sample] :], batch.mask[part].tolist(), batch.rollout_log_probs[part])
        )
    return found


def test_log_probs_of_every_turn_are_the_trainers_in_the_whole_episode(collector: Any, ranks_of_two: Any) -> None:
    config, episodes = collector("Talks")
    numbers = [record["number"] for record in PromptStream(RECORDS, config.run.seed).take(NUM_PROMPTS)]
    batch, metrics = episodes.collect(0, None, {})
    assert metrics["rollout/turns"] == 3 and metrics["rollout/last"] == 1
    assert batch.rewards.min() >= 0.5 and len(set(batch.rewards.tolist())) > 3
    trainers = ranks_of_two.compute_log_probs(batch).log_probs
    assert np.abs(trainers - batch.rollout_log_probs)[batch.mask].max() < 1e-4
    assert 0.1 < (~batch.mask).mean() < 0.9 and not batch.rollout_log_probs[~batch.mask].any()

    tokenizer = load_tokenizer(str(config.model.path))
    turn_ends = tokenizer.encode("<|im_end|>")
    for (tokens, mask, _), group in zip(responses_of(batch), batch.group_ids, strict=True):
        starts = [place for place in range(len(mask)) if mask[place] and (place == 0 or not mask[place - 1])]
        assert len(starts) == 3
        for turn, start in enumerate(starts[1:], start=1):
            begins = max(place for place in range(start) if mask[place]) + 1
            said, answer = tokens[:begins], tokens[begins:start]
            if (numbers[group] + turn) % 3 == 2:
                assert answer == [5, 6, 7]
                continue
            text = tokenizer.decode(([] if said[-1:] == turn_ends else turn_ends[:0]) + answer)
            assert text.endswith("<|im_start|>assistant\n") and text.count("7") >= 1
            assert text.startswith("\n") == (said[-1:] == turn_ends), "the end of a turn is there once"
            assert text.startswith("<|im_end|>\n") == (said[-1:] != turn_ends)
            assert ("system" in text) == ((numbers[group] + turn) % 3 == 1)


def test_episodes_repeat_and_those_of_a_group_begin_alike(collector: Any) -> None:
    first, _ = collector("Talks", rollout={"reward_workers": 1})[1].collect(3, None, {})
    again, _ = collector("Talks", rollout={"reward_workers": 2})[1].collect(3, None, {})
    assert first.same_as(again)
    prompts = [first.tokens[start : start + 12].tolist() for start in first.token_offsets[:-1]]
    for group in range(NUM_PROMPTS):
        assert len({tuple(prompt[:6]) for prompt in prompts[group * GROUP : (group + 1) * GROUP]}) == 1
    other, _ = collector("Talks")[1].collect(4, None, {})
    assert not first.same_as(other)


@pytest.mark.parametrize(
    ("told", "words"),
    [("raise", ["in turn 2 of episode 0 of train.jsonl:1", "the world is full"]), ("long prompt", ["64"])],
)
def test_an_environment_that_fails_ends_the_run_or_leaves_its_group_out(
    collector: Any, told: str, words: list[str]
) -> None:
    breaks = collector("Talks", arguments={"told": told})[1]
    with refused(BatchError, "rollout.environment", *words) as caught:
        for step in range(3):
            breaks.collect(step, None, {})
    assert str(caught.value.call).startswith("step")
    skips = collector("Talks", {"reward_failure": "skip"}, arguments={"told": told})[1]
    whole = collector("Talks")[1]
    lost = 0.0
    for step in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            batch, metrics = skips.collect(step, None, {})
        lost += metrics["rollout/reward_failures"]
        assert bool(metrics["rollout/reward_failures"]) == any(words[-1] in str(one.message) for one in said)
        expected, _ = whole.collect(step, None, {})
        if not metrics["rollout/reward_failures"]:
            assert batch.same_as(expected)
        else:
            assert batch.num_samples == (NUM_PROMPTS - 1) * GROUP
    assert lost == pytest.approx(1 / NUM_PROMPTS)
