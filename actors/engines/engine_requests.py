"""What the engines of a run are asked for: prompts as token ids, and how their responses are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from actors.cluster.ray_errors import require_cluster
from actors.engines.processes import EngineProcesses, errors_of
from actors.engines.protocol import Request, is_whole
from actors.fault_tolerance.recovery import LOST
from slimefsdp.errors import BatchError, EngineError, SlimeError, short_repr
from slimefsdp.sampling.params import SamplingParams


class EngineRequests:
    """Makes requests of prompts; the first engine encodes them.

    Args:
        replace_lost: as of `EngineStreams`.
    """

    def __init__(self, processes: EngineProcesses, replace_lost: Callable[[int, Any, SlimeError], None]) -> None:
        self._processes, self._replace_lost = processes, replace_lost
        self._config = processes.config

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of texts, lists of chat messages (also with tools), or token ids.

        Raises:
            ConfigError: as `actors.engines.tokenizer.encode_prompt`.
            BatchError: there is a token id that the model has not, or this is no list of prompts.
            EngineError: the engine's tokenizer failed, or returned no token ids.
        """
        return self._encoded_anew("encode", prompts)

    def encode_observations(self, observations: Sequence[Any]) -> list[list[int]]:
        """Token ids of what follows a response's text, as of `Engine`; token ids are taken as they are.

        Raises:
            As `encode`.
        """
        return self._encoded_anew("encode_observations", observations)

    def _encoded_anew(
        self, method: Literal["encode", "encode_observations"], prompts: Sequence[Any]
    ) -> list[list[int]]:
        """Asks the first engine, which is replaced where it is lost."""
        while True:
            engine = next(iter(self._processes.engines), None)
            try:
                return self._encoded(method, prompts)
            except LOST as error:
                self._replace_lost(0, engine, error)

    def _encoded(self, method: Literal["encode", "encode_observations"], prompts: Sequence[Any]) -> list[list[int]]:
        self._processes.require_running(method)
        if not isinstance(prompts, list | tuple):
            problem = f"prompts is a {type(prompts).__name__}"
            raise BatchError(problem, field="prompts", hint="give a list of texts, chats or lists of token ids")
        encoded = {place: list(prompt) for place, prompt in enumerate(prompts) if _is_encoded(prompt)}
        for place, tokens in encoded.items():
            self.require_known(tokens, place)
        others = [place for place in range(len(prompts)) if place not in encoded]
        if others:
            require_cluster()
            ref = getattr(self._processes.engines[0], method).remote([prompts[place] for place in others])
            with errors_of(0, method):
                (found,) = self._processes.wait([ref], "generate", "call_timeout_s")
            if not isinstance(found, list) or len(found) != len(others) or not all(map(_is_encoded, found)):
                problem = f"engine 0 encoded {len(others)} prompts as {short_repr(found)}"
                raise EngineError(problem, field="rollout.engine", hint="return a list of token ids each", rank=0)
            encoded |= dict(zip(others, map(list, found), strict=True))
        return [encoded[place] for place in range(len(prompts))]

    def requests(
        self,
        prompts: Sequence[Any],
        *,
        samples_per_prompt: int,
        seed: int | Sequence[int],
        greedy: bool = False,
        max_new_tokens: int | None = None,
        evaluates: bool = False,
    ) -> list[Request]:
        """Returns what `generate` has the engines asked for: one request a prompt, with the settings of the run.

        Raises:
            BatchError: no prompt, or no sample of one, is asked for.
        """
        self._processes.require_running("generate")
        if isinstance(prompts, list | tuple) and not prompts:
            raise BatchError("there are no prompts to sample for", field="prompts", hint="give one or more")
        if not is_whole(samples_per_prompt) or samples_per_prompt < 1:
            raise BatchError(
                f"samples_per_prompt={samples_per_prompt!r}; it must be a whole number from 1",
                field="samples_per_prompt",
                hint="raise it",
            )
        seeds = (seed,) if is_whole(seed) else seed
        if not isinstance(seeds, list | tuple) or not all(map(is_whole, seeds)):
            problem = f"seed={short_repr(seed)}; it must be a whole number, or a list of them"
            raise BatchError(problem, field="seed", hint="give the run's seed and the step, e.g. (0, 17)")
        how: dict[str, Any] = {"greedy": greedy, "max_new_tokens": max_new_tokens, "evaluates": evaluates}
        return [
            Request(prompt, samples_per_prompt, self.params((*seeds, place), **how))
            for place, prompt in enumerate(self.encode(prompts))
        ]

    def params(
        self, seed: Sequence[int], *, greedy: bool = False, max_new_tokens: int | None = None, evaluates: bool = False
    ) -> SamplingParams:
        """Returns how a request of the run samples.

        Args:
            max_new_tokens: fewer than the settings allow, where there is no room for so many.
            evaluates: as `generate`.
        """
        sampling = self._config.sampling(evaluates=evaluates)
        limits: dict[str, Any] = (
            {} if greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        )
        return SamplingParams(
            sampling.max_new_tokens if max_new_tokens is None else min(max_new_tokens, sampling.max_new_tokens),
            sampling.temperature,
            greedy=greedy,
            tempered=not greedy,  # as all engines can: no temperature takes part in their choice
            # the trainer's are over all tokens, too, so that the first ratio is 1; nobody reads an evaluation's
            renormalized=evaluates,
            end_token_ids=self._processes.end_token_ids,
            stop=self._config.rollout.stop,
            seed=tuple(seed),
            **limits,
        )

    def require_known(self, prompt: Sequence[int], place: int) -> None:
        """
        Raises:
            BatchError: a prompt, the `place`-th of a call, has a token id that the model has not.
        """
        size = self._processes.vocab_size
        unknown = [token for token in prompt if not (is_whole(token) and 0 <= token < size)]
        if unknown:
            raise BatchError(
                f"prompt {place} has token id {short_repr(unknown[0])}, outside the vocabulary of {size}",
                field="prompts",
                hint="encode it with the tokenizer of model.path",
            )


def _is_encoded(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and all(map(is_whole, prompt))
