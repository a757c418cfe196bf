"""An engine of one's own that loads no model: samples tell what was asked of it, and files say when it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.engines.protocol import ENGINE_TAGS, Engine, EngineInfo, EngineTag, Manifest, Request, Sample
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError
from slimefsdp.sampling.params import VersionSpan


class TellingEngine(Engine):
    """A sample's tokens are the number of its prompt's tokens, then its own number.

    In `run.dir` it writes a line for each start; one whose name is in the file `ends_at_start`, `ends_at_generate` or
    `ends_at_commit` takes itself from there, and ends; one in `raises_at_begin` raises.
    """

    def __init__(self, config: RunConfig, index: int) -> None:
        assert config.run.dir is not None
        self.folder: Path = config.run.dir
        self.name = f"engine {index}\n"
        self.version: int | None = None
        with (self.folder / "starts").open("a") as file:
            file.write(self.name)
        self.end_if_told("ends_at_start")
        heartbeat.enter(heartbeat.IDLE)

    def end_if_told(self, when: str) -> None:
        if self.is_told(when):
            os._exit(1)

    def is_told(self, when: str) -> bool:
        """Whether the file names it; takes one such line from there."""
        file = self.folder / when
        text = file.read_text() if file.exists() else ""
        if self.name in text:
            file.write_text(text.replace(self.name, "", 1))
            return True
        return False

    def info(self) -> EngineInfo:
        file = self.folder / "info"
        told = file.read_text() if file.exists() else ""
        if told == "says nothing":
            return None  # type: ignore[return-value]
        if told == "raises":
            raise ValueError("as it was told to")
        most = 300 if told else None
        return EngineInfo("telling", 320, "float32", most, ("object_store",))  # as the example's model

    def end_token_ids(self) -> frozenset[int]:
        return frozenset({0})

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        return [[5, 6, 7] for _ in prompts]

    def committed(self) -> int | None:
        return self.version

    def pid(self) -> int:
        return os.getpid()

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        for place, request in enumerate(requests):
            for number in range(request.samples):
                if self.version is None:
                    raise StateError("no weights", field="update_weights", hint="send some")
                tokens = [len(request.prompt), number]
                yield [Sample(place, number, tokens, [-0.5, -1.0], "stop", (VersionSpan(self.version, 0, 2),), "text")]
            self.end_if_told("ends_at_generate")

    def begin(self, version: int, manifest: Manifest) -> None:
        self.version = None
        if self.is_told("raises_at_begin"):
            raise KeyError("as it was told to")

    def receive(self, bucket: Any) -> None: ...

    def commit(self, version: int) -> None:
        self.end_if_told("ends_at_commit")
        self.version = version


class HalfEngine(Engine):
    """One that takes no weights."""

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        raise AssertionError("it was started")


class SleepingEngine(TellingEngine):
    """A `TellingEngine` that says what it holds of its device, and refuses what it could not do with that."""

    def __init__(self, config: RunConfig, index: int) -> None:
        self.held = set(ENGINE_TAGS)
        super().__init__(config, index)

    def holds(self) -> list[EngineTag]:
        return sorted(self.held)

    def sleep(self) -> None:
        self.held, self.version = set(), None

    def wake_up(self, tags: Sequence[EngineTag] = ENGINE_TAGS) -> None:
        self.held |= set(tags)

    def begin(self, version: int, manifest: Manifest) -> None:
        if "weights" not in self.held:
            raise StateError("asleep", field="update_weights", hint="wake it up")
        super().begin(version, manifest)

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        assert self.held == set(ENGINE_TAGS)
        yield from super().generate(requests)


class UnevenEngine(TellingEngine):
    """Engine 1 hangs, when it is told; engine 0 takes its time for each sample until another engine 1 has started.

    Each notes beside the starts when it has handed all over, or was ended before.
    """

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        if self.is_told("hangs_at_generate"):
            time.sleep(3600)
        for samples in super().generate(requests):
            if self.name == "engine 0\n" and (self.folder / "starts").read_text().count("engine 1\n") == 1:
                time.sleep(0.05)
            try:
                yield [replace(sample, tokens=[1, 2]) for sample in samples]
            except GeneratorExit:
                self.note("early ")
                raise
        self.note("")

    def note(self, when: str) -> None:
        with (self.folder / "starts").open("a") as file:
            file.write(f"{when}end of {self.name}")


LIES: dict[str, dict[str, Any]] = {
    "no tokens": {"tokens": [], "log_probs": [], "versions": ()},
    "surplus tokens": {"tokens": [1] * 9, "log_probs": [-1.0] * 9, "versions": (VersionSpan(7, 0, 9),)},
    "a token of no vocabulary": {"tokens": [1, 320]},
    "a token below 0": {"tokens": [-1, 2]},
    "half a token": {"tokens": [0.5, 2]},
    "too few log-probs": {"log_probs": [-1.0]},
    "a log-prob that is NaN": {"log_probs": [-1.0, float("nan")]},
    "a log-prob that is infinite": {"log_probs": [-float("inf"), -1.0]},
    "a log-prob above 0": {"log_probs": [0.5, -1.0]},
    "versions of fewer tokens": {"versions": (VersionSpan(7, 0, 1),)},
    "versions with a gap": {"versions": (VersionSpan(6, 0, 1), VersionSpan(7, 2, 2))},
    "no versions": {"versions": ()},
    "versions that are no numbers": {"versions": (VersionSpan("x", 0, 2),)},  # type: ignore[arg-type]
    "a version below 0": {"versions": (VersionSpan(-5, 0, 2),)},
    "a span that ends before it begins": {"versions": (VersionSpan(7, 0, 5), VersionSpan(7, 5, 2))},
    "spans as tuples": {"versions": ((7, 0, 2),)},
    "no tuple of versions": {"versions": None},
    "tokens in rows": {"tokens": [[1, 2], [3, 4]], "log_probs": [[-1.0, -1.0], [-1.0, -1.0]]},
    "tokens of several lengths": {"tokens": [[1], [2, 3]]},
    "tokens that are text": {"tokens": "ab"},
    "no tokens at all": {"tokens": None},
    "no log-probs at all": {"log_probs": None},
    "a log-prob that is none": {"log_probs": [None, -1.0]},
    "log-probs that are text": {"log_probs": ["a", "b"]},
    "complex log-probs": {"log_probs": [-1j, -1j]},
    "a log-prob below every float32": {"log_probs": [-1e300, -1.0]},
    "a reason of its own": {"finish_reason": "banana"},
    "no reason": {"finish_reason": None},
    "no text": {"text": None},
    "a request that is no number": {"request": "a"},
    "another request's": {"request": 6},
    "a surplus sample": {"number": 2},
}
"""By name, how a sample differs from one that was asked for."""


class LyingEngine(TellingEngine):
    """A `TellingEngine` whose samples are as the file `lie` in `run.dir` says, or what stands in their place."""

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Sample]]:
        lie = (self.folder / "lie").read_text()
        if lie == "a bug":
            raise KeyError("a bug")
        for samples in super().generate(requests):
            if lie == "a sample less":
                lie = ""
                continue
            if lie == "no list":
                yield samples[0]  # type: ignore[misc]
            if lie == "always aborted":
                samples = [replace(sample, finish_reason="abort") for sample in samples]
            yield [replace(sample, **LIES.get(lie, {})) for sample in samples]


OTHER_LIES = ("a sample less", "a bug", "no list", "always aborted")


class TwoWorkers(SleepingEngine):
    """A `SleepingEngine` that takes two places in a broadcast group, as a server on two GPUs does."""

    def info(self) -> EngineInfo:
        return super().info()._replace(processes=2)
