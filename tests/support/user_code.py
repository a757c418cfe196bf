"""Calls of a reward function, as the driver makes them, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.rollout.records import Record
from actors.rollout.user_code import CodeHost, EpisodeCall, UserCode
from slimefsdp.errors import SlimeError


def call_of(record: Any, text: str, finished: bool = True, number: int = 0) -> EpisodeCall:
    return EpisodeCall((0, number, 0), record, 0, ((text, finished),), is_last=True)


def calls_of(*texts: str) -> list[EpisodeCall]:
    """One call for each text, of a record with its `number` in train.jsonl."""
    return [
        call_of(Record({"prompt": "p", "number": number}, f"train.jsonl:{number}"), text, number=number)
        for number, text in enumerate(texts)
    ]


def reward_host(name: str, timeout_s: float = 60.0, concurrency: int = 1) -> CodeHost:
    return CodeHost(UserCode("rollout.reward", name, {}, 1, timeout_s, concurrency))


def scores_of(outcomes: Sequence[Any]) -> list[Any]:
    """The scores that each answer has; errors as they are."""
    return [
        one if isinstance(one, SlimeError) else {"reward": one.result.reward, **one.result.scores} for one in outcomes
    ]


def scored(workers: Any, calls: Sequence[EpisodeCall]) -> list[Any]:
    """What the processes answer to calls that are added one after another."""
    pending = workers.pending()
    for call in calls:
        pending.add(call)
    return scores_of(pending.finish())
