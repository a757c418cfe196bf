"""Tries the user's code on the first records before anything else starts.

It resets an environment on the first record of each file and encodes its prompt, or has a reward function score one
response. `python -m actors.rollout.environment_trial` does this in a separate process, since the user's code may hang
or end its process. It does not import Ray, and imports torch only if the user's module or the tokenizer does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from actors.engines.tokenizer import encode_prompt, load_tokenizer
from actors.rollout.environment import is_token_ids
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import Record, place_of
from actors.rollout.rewards import is_url
from actors.rollout.tokenizer import LONGEST_WAIT_S, end_with_parent, run_beside, stream_of_answer
from actors.rollout.user_code import CodeHost, EpisodeCall, UserCode
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, SlimeError


def try_environment(config: RunConfig, prompts: Prompts) -> None:
    """Begins an episode of the first training record, and one of the first record of each evaluated held-out set.

    Does nothing without an environment, or on another cluster, whose nodes alone may have what the environment needs.

    Raises:
        ConfigError: the environment raised, did not return in time, ended its process, or returned something that the
            tokenizer cannot encode as a prompt; the message names the record.
    """
    name = config.rollout.environment
    if name is None or not config.has_rollouts or config.cluster.address is not None:
        return
    sets = prompts.heldout.values() if config.evaluation.interval_steps is not None else ()
    first = list({id(records[0]): records[0] for records in (prompts.train, *sets)}.values())
    calls = [EpisodeCall((0, index, 0), record, config.run.seed, ()) for index, record in enumerate(first)]
    with stage(f"beginning {len(calls)} episode{'s' * (len(calls) > 1)} of {name}", is_short=True):
        _try(config, calls)


def try_reward(config: RunConfig, prompts: Prompts) -> None:
    """Has the reward function score one response to the first record: its answer, or an empty text if it has none.

    Does nothing for a function of this project, a URL, rollout.reward_failure=skip (a failure only leaves out a group),
    a function that the driver itself calls, or on another cluster.

    Raises:
        ConfigError: the function raised, did not return in time, ended its process, or returned something that is not a
            reward.
    """
    settings = config.rollout
    name = settings.reward
    if name is None or is_url(name) or name.startswith("actors.") or settings.reward_failure == "skip":
        return
    if settings.reward_workers == 0 or config.cluster.address is not None:
        return
    record = next(iter(prompts.train))
    answer = record.get("answer")
    response = ("" if answer is None else str(answer).strip(), True)
    with stage(f"scoring one response with {name}", is_short=True):
        _try(config, [EpisodeCall((0, 0, 0), record, config.run.seed, (response,), is_last=True)])


def _try(config: RunConfig, calls: Sequence[EpisodeCall]) -> None:
    """Runs the calls in a separate process of this module.

    Raises:
        ConfigError: one of them failed.
    """
    code = UserCode.of(config)
    request = {
        "code": asdict(code),
        "calls": [
            [call.key, dict(call.record), place_of(call.record), call.seed, call.responses, call.is_last]
            for call in calls
        ],
        "search_path": sys.path,
        "model_path": str(config.model.path),
        "template_kwargs": dict(config.data.chat_template_kwargs or {}),
    }
    try:
        whole_s = config.cluster.launch_timeout_s + code.timeout_s * len(calls)
        done = run_beside("actors.rollout.environment_trial", request, whole_s)
    except subprocess.TimeoutExpired:
        raise _as_config_error(code.overdue(calls[0], calls[0].turn)) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:  # the user's code ended the process before it could answer
        printed = " ".join(done.stderr.decode(errors="replace").split())[-500:] or "nothing"
        places = " or ".join(place_of(call.record) for call in calls)
        raise ConfigError(
            f"{code.name} ended its process with status {done.returncode} for {places}; it printed {printed}",
            field=code.field,
            hint=code.correct_it,
        ) from None
    if answer is not None:
        raise ConfigError(answer["error"], field=answer["field"], hint=answer["hint"])


def try_calls(
    code: UserCode,
    calls: Sequence[EpisodeCall],
    encode: Callable[[Any], object],
    timer: Callable[[EpisodeCall], threading.Timer],
) -> None:
    """Runs the calls in this process and encodes the prompts that they return.

    Args:
        encode: turns a prompt into tokens.
        timer: makes a timer that ends this process if it is not cancelled.

    Raises:
        ConfigError: as in `try_environment` and `try_reward`, except for the ends of the process.
    """
    host = CodeHost(code)
    for call in calls:
        late = timer(call)
        late.start()
        try:
            (outcome,) = host.run([call])
        finally:
            late.cancel()
        if isinstance(outcome, SlimeError):
            raise _as_config_error(outcome) from outcome
        if outcome.prompt is None or is_token_ids(outcome.prompt):
            continue
        try:
            encode(outcome.prompt)
        except SlimeError as error:
            problem = f"{code.name} returned what is no context: {error.message}"
            raise _as_config_error(code.failure(problem, call, 0, error.hint)) from error
    host.forget(calls[0].key[0])


def _as_config_error(error: SlimeError) -> ConfigError:
    return ConfigError(error.message, field=error.field, hint=error.hint)


def _call_of(fields: Sequence[Any]) -> EpisodeCall:
    key, record, place, seed, responses, is_last = fields
    pairs = tuple((text, finished) for text, finished in responses)
    return EpisodeCall(tuple(key), Record(record, place), seed, pairs, is_last=is_last)


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    request = json.load(sys.stdin.buffer)
    sys.path += [folder for folder in request["search_path"] if folder not in sys.path]
    code = UserCode(**request["code"])

    def answer(error: SlimeError | None) -> None:
        written = None if error is None else {"error": error.message, "field": error.field, "hint": error.hint}
        os.write(stream, json.dumps(written).encode())
        os._exit(0)  # does not wait for threads that the user's code left running

    def timer(call: EpisodeCall) -> threading.Timer:
        late = threading.Timer(min(code.timeout_s, LONGEST_WAIT_S), answer, (code.overdue(call, call.turn),))
        late.daemon = True
        return late

    tokenizer: list[Any] = []

    def encode(prompt: Any) -> None:
        if not tokenizer:
            tokenizer.append(load_tokenizer(request["model_path"]))
        encode_prompt(tokenizer[0], prompt, request["template_kwargs"])

    try:
        try_calls(code, [_call_of(fields) for fields in request["calls"]], encode, timer)
    except SlimeError as error:
        answer(error)
    answer(None)


if __name__ == "__main__":
    _main()
