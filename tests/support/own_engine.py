"""An engine of one's own that loads no model: samples tell what was asked of it, and files say when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.rollout.protocol import Engine, EngineInfo, Manifest, Request, Sample
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
        return EngineInfo("telling", 320, "float32", None, ("object_store",))  # as the example's model

    def end_token_ids(self) -> frozenset[int]:
        return frozenset({0})

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
