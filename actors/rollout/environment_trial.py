"""The user's code is tried before anything starts, on the first records.

An environment is made, and reset on the first record of each file; a reward function scores one response.
`python -m actors.rollout.environment_trial` is the process that does it, for the user's code may hang or end it. Costs
no ray, and torch only where the user's module or the tokenizer does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from actors.engines.tokenizer import encode_prompt, load_tokenizer
from actors.rollout.environment import EnvironmentFault, checked_prompt, is_token_ids, load_environment
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import Record, place_of
from actors.rollout.rewards import Response, RewardScorer, is_url, overdue
from actors.rollout.tokenizer import LONGEST_WAIT_S, end_with_parent, run_beside, stream_of_answer
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import failure_of
from slimefsdp.errors import ConfigError, SlimeError

_FIELD, _REWARD = "rollout.environment", "rollout.reward"
_CORRECT = {_FIELD: "correct the environment", _REWARD: "correct the function"}


def try_environment(config: RunConfig, prompts: Prompts) -> None:
    """Begins an episode of the first record to train on and of the first of each held-out set that is evaluated.

    Nothing is done without an environment, and none on another cluster, whose nodes may have what it needs.

    Raises:
        ConfigError: the environment raised, did not return in time, ended its process, or returned no prompt that the
            tokenizer encodes; the message names the record.
    """
    name = config.rollout.environment
    if name is None or not config.has_rollouts or config.cluster.address is not None:
        return
    sets = prompts.heldout.values() if config.evaluation.interval_steps is not None else ()
    first = {id(records[0]): records[0] for records in (prompts.train, *sets)}
    records, timeout_s = list(first.values()), config.environment.timeout_s
    asked = {
        "name": name,
        "arguments": dict(config.environment.arguments),
        "records": [[dict(record), place_of(record)] for record in records],
        "seed": config.run.seed,
        "timeout_s": timeout_s,
        "search_path": sys.path,
        "model_path": str(config.model.path),
        "template_kwargs": dict(config.data.chat_template_kwargs or {}),
    }
    whole_s = config.cluster.launch_timeout_s + timeout_s * len(records)
    with stage(f"beginning {len(records)} episode{'s' * (len(records) > 1)} of {name}", is_short=True):
        try:
            _try(asked, whole_s, f"when an episode of {place_of(records[0])} or a later record began", _FIELD)
        except subprocess.TimeoutExpired:
            raise _overdue(name, place_of(records[0]), whole_s) from None


def try_reward(config: RunConfig, prompts: Prompts) -> None:
    """Has the reward function score one response to the first record: its answer, or none where it has no answer.

    Nothing is done for a function of this project or a URL, where a failure is passed over
    (rollout.reward_failure=skip), where the driver calls the function itself, and on another cluster.

    Raises:
        ConfigError: the function raised, did not return in time, ended its process, or returned what is no reward.
    """
    settings = config.rollout
    name, timeout_s = settings.reward, settings.reward_timeout_s
    if name is None or is_url(name) or name.startswith("actors.") or settings.reward_failure == "skip":
        return
    if settings.reward_workers == 0 or config.cluster.address is not None:
        return
    record = next(iter(prompts.train))
    whole_s = config.cluster.launch_timeout_s + timeout_s
    asked = {
        "name": name,
        "records": [[dict(record), place_of(record)]],
        "timeout_s": timeout_s,
        "search_path": sys.path,
    }
    with stage(f"scoring one response with {name}", is_short=True):
        try:
            _try({**asked, "is_reward": True}, whole_s, f"for {place_of(record)}", _REWARD)
        except subprocess.TimeoutExpired:
            raise _reward_overdue(name, record, timeout_s) from None


def _try(asked: Mapping[str, Any], whole_s: float, when: str, field: str) -> None:
    """Runs this module beside, for so long.

    Raises:
        ConfigError: what it found. subprocess.TimeoutExpired: it took longer.
    """
    done = run_beside("actors.rollout.environment_trial", asked, whole_s)
    try:
        answer = json.loads(done.stdout)
    except ValueError:  # it ended in the user's code
        said = " ".join(done.stderr.decode(errors="replace").split())[-500:] or "nothing"
        raise ConfigError(
            f"{asked['name']} ended its process with status {done.returncode} {when}; it printed {said}",
            field=field,
            hint=_CORRECT[field],
        ) from None
    if answer is not None:
        raise ConfigError(answer["error"], field=answer["field"], hint=answer["hint"])


def _reward_overdue(name: str, record: Record, timeout_s: float) -> ConfigError:
    error = overdue(name, Response(record, "", True), timeout_s)
    return ConfigError(error.message, field=error.field, hint=error.hint)


def score_first(name: str, record: Record, timed: Callable[[Record], threading.Timer]) -> None:
    """Has a reward function score the record's answer.

    Args:
        timed: as `begin_episodes`.

    Raises:
        ConfigError: as `try_reward`, but for what ends this process.
    """
    answer = record.get("answer")
    response = Response(record, "" if answer is None else str(answer).strip(), finished=True)
    scorer = RewardScorer(name)
    timer = timed(record)
    timer.start()
    (outcome,) = scorer.score([response])
    timer.cancel()
    if isinstance(outcome, SlimeError):
        raise ConfigError(outcome.message, field=outcome.field, hint=outcome.hint) from outcome


def _overdue(name: str, place: str, timeout_s: float) -> ConfigError:
    return ConfigError(
        f"{name} did not return within {timeout_s:g} s when an episode of {place} began",
        field=_FIELD,
        hint=f"{_CORRECT[_FIELD]}, or raise environment.timeout_s",
    )


def begin_episodes(
    name: str,
    arguments: Mapping[str, Any],
    records: Sequence[Record],
    *,
    seed: int,
    encode: Callable[[Any], Any],
    timed: Callable[[Record], threading.Timer],
) -> None:
    """Makes an environment for each record and resets it.

    Args:
        encode: a prompt of the environment, into tokens.
        timed: a timer that ends this process if it is not cancelled.

    Raises:
        ConfigError: as `try_environment`, but for what ends this process.
    """
    found = load_environment(name, arguments)
    with asyncio.Runner() as runner:
        for record in records:
            timer = timed(record)
            timer.start()
            try:
                prompt = runner.run(_begun(found, arguments, record, seed))
            except Exception as error:
                raise ConfigError(
                    f"{failure_of(name, error)} when an episode of {place_of(record)} began",
                    field=_FIELD,
                    hint=_CORRECT[_FIELD],
                ) from error
            finally:
                timer.cancel()
            try:
                checked_prompt(prompt)
                if not is_token_ids(prompt):
                    encode(prompt)
            except SlimeError as error:
                raise ConfigError(
                    f"{name} begins an episode of {place_of(record)} with what is no context: {error.message}",
                    field=_FIELD,
                    hint=error.hint,
                ) from error
            except EnvironmentFault as fault:
                raise ConfigError(
                    f"{name} returned {fault} when an episode of {place_of(record)} began",
                    field=_FIELD,
                    hint=fault.hint,
                ) from fault


async def _begun(found: Any, arguments: Mapping[str, Any], record: Record, seed: int) -> Any:
    environment = found(**deepcopy(dict(arguments)))
    prompt = environment.reset(deepcopy(record), seed)
    prompt = await prompt if inspect.isawaitable(prompt) else prompt
    closed = environment.close()
    if inspect.isawaitable(closed):
        await closed
    return prompt


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    asked = json.load(sys.stdin.buffer)
    sys.path += [folder for folder in asked["search_path"] if folder not in sys.path]
    name, timeout_s, is_reward = asked["name"], asked["timeout_s"], asked.get("is_reward", False)

    def answer(error: SlimeError | None) -> None:
        said = None if error is None else {"error": error.message, "field": error.field, "hint": error.hint}
        os.write(stream, json.dumps(said).encode())
        os._exit(0)  # whatever threads the environment has left

    def timed(record: Record) -> threading.Timer:
        late = _reward_overdue(name, record, timeout_s) if is_reward else _overdue(name, place_of(record), timeout_s)
        timer = threading.Timer(min(timeout_s, LONGEST_WAIT_S), answer, (late,))
        timer.daemon = True
        return timer

    tokenizer: list[Any] = []

    def encode(prompt: Any) -> None:
        if not tokenizer:
            tokenizer.append(load_tokenizer(asked["model_path"]))
        encode_prompt(tokenizer[0], prompt, asked["template_kwargs"])

    records = [Record(fields, place) for fields, place in asked["records"]]
    try:
        if is_reward:
            score_first(name, records[0], timed)
        else:
            begin_episodes(name, asked["arguments"], records, seed=asked["seed"], encode=encode, timed=timed)
    except SlimeError as error:
        answer(error)
    answer(None)


if __name__ == "__main__":
    _main()
