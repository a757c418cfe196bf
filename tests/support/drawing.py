"""Stand-ins for engines that draw all responses of a call at once, from the prompts as they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from actors.engines.pool import SampledResponse
from actors.engines.protocol import Request


class DrawsAtOnce:
    """Answers the requests of a turn by `generate(prompts, ...)`, which a subclass defines."""

    max_tokens = None
    generate: Callable[..., tuple[int, list[SampledResponse]]]

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Returns one number in the place of each prompt's tokens: the place where the prompt itself is kept."""
        kept = self.__dict__.setdefault("prompts_kept", [])
        kept += prompts
        return [[place] for place in range(len(kept) - len(prompts), len(kept))]

    def params(self, seed: Sequence[int], **sampling: Any) -> Any:
        return SimpleNamespace(seed=tuple(seed), sampling=sampling)

    def draw(
        self, requests: Sequence[Request], each: Callable[[SampledResponse], None], *, may_mix: bool = False
    ) -> tuple[int, list[SampledResponse]]:
        params: Any = requests[0].params
        prompts = [self.__dict__["prompts_kept"][request.prompt[0]] for request in requests]
        return self.generate(
            prompts, samples_per_prompt=requests[0].samples, seed=params.seed[:-1], each=each, may_mix=may_mix,
            **params.sampling,
        )  # fmt: skip
