"""Whether an engine is of use to a run: by what it says of itself, and by the log-probs of what it samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from actors.engines.protocol import EngineInfo
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError


def require_fit(config: RunConfig, index: int, info: EngineInfo, vocab_size: int) -> None:
    """Looks at what an engine says of itself, before it is given weights.

    Args:
        vocab_size: of the trainer's model.

    Raises:
        EngineError: the run cannot use such an engine.
    """
    for what, found, wanted, field in (
        ("a vocabulary", info.vocab_size, vocab_size, "model.path"),
        ("weights in", info.dtype, config.precision.compute_dtype, "precision.compute_dtype"),
    ):
        if found != wanted:
            raise EngineError(
                f"engine {index} ({info.name}) has {what} of {found}, and the trainer of {wanted}",
                field=field,
                hint="start the engine with the model and the dtype of the run",
                rank=index,
            )
    if info.max_tokens is not None and config.rollout.max_new_tokens >= info.max_tokens:
        raise EngineError(
            f"engine {index} ({info.name}) takes {info.max_tokens} tokens of prompt and response, and "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt",
            field="rollout.max_new_tokens",
            hint="lower it, or start the engine with a longer context",
            rank=index,
        )
    if config.rollout.placement == "colocated" and info.processes > 1:
        raise EngineError(
            f"engine {index} ({info.name}) has {info.processes} workers, and rollout.placement=colocated gives "
            "each engine the place of one rank",
            field="rollout.placement",
            hint="start it with one worker, or set rollout.placement=own",
            rank=index,
        )
    if config.rollout.transport not in info.transports:
        raise EngineError(
            f"engine {index} ({info.name}) takes weights by {' or '.join(info.transports)}, not by "
            f"{config.rollout.transport}",
            field="rollout.weight_transport",
            hint=f"set it to {info.transports[0]}",
            rank=index,
        )


def require_room(
    config: RunConfig, max_tokens: Mapping[int, int | None], longest: int, *, evaluates: bool = False
) -> None:
    """Checks that every engine takes the longest prompt of a run with its response.

    Args:
        max_tokens: of a prompt and its response, by engine.
        longest: tokens of that prompt.
        evaluates: the prompt is of a held-out set.

    Raises:
        EngineError: one takes fewer.
    """
    sampling = config.sampling(evaluates=evaluates)
    needed = longest + sampling.max_new_tokens
    for index, most in sorted(max_tokens.items()):
        if most is not None and most < needed:
            raise EngineError(
                f"engine {index} takes {most} tokens of prompt and response; the longest prompt has {longest}, and "
                f"{sampling.length_setting} is {sampling.max_new_tokens}",
                field=sampling.length_setting, rank=index,
                hint=f"start the engine with {needed} or more, lower it, or set data.max_prompt_tokens",
            )  # fmt: skip


def means_apart(config: RunConfig, owners: np.ndarray, apart: np.ndarray) -> list[float]:
    """Returns for each engine the mean difference between its log-probs of sampled tokens and the trainer's.

    Args:
        owners: [tokens], the engine that sampled each; every engine has some.
        apart: [tokens], not negative.

    Raises:
        EngineError: a mean is above rollout.engine_logprob_bound; it names the engine and the likely cause.
    """
    means = [float(apart[owners == index].mean()) for index in range(int(owners.max()) + 1)]
    is_float32 = config.precision.compute_dtype == "float32"
    bound = config.rollout.engine_logprob_bound or (0.001 if is_float32 else 0.05)
    worst = int(np.argmax(means))
    if not means[worst] <= bound:  # NaN is neither
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
