"""Tries the user's code in side processes before anything else starts, since the code may hang or end its process.

The code's modules are imported. Then an environment begins an episode of the first record of each file, or a reward
function scores one response. Ray is not imported, and torch only if the user's module or the tokenizer imports it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors import side_process
from actors.engines.tokenizer import encode_prompt, load_tokenizer
from actors.rollout.environment import is_token_ids
from actors.rollout.prompt_files import Prompts
from actors.rollout.records import place_of
from actors.rollout.rewards import is_url
from actors.rollout.user_code import CodeHost, EpisodeCall, UserCode
from actors.side_process import LONGEST_WAIT_S, SideProcessError
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import imported
from slimefsdp.errors import ConfigError, SlimeError

_OURS = ("actors", "slimefsdp")
_USUAL_S = 60.0  # usual limit on imports; see `try_imports`


def try_imports(functions: Mapping[str, str], launch_timeout_s: float) -> None:
    """Imports the modules of `module:function` names, except our own and those that are imported already.

    Exceptions of the imports are ignored, since they are reported when the modules are imported for use.

    Args:
        functions: setting -> the setting's value; values that are no `module:function`, such as URLs, are skipped.
        launch_timeout_s: cluster.launch_timeout_s. All imports together may take a fifth of this time or 60 s,
            whichever is longer, but at most this time.

    Raises:
        ConfigError: an import did not return in time, or ended its process.
    """
    modules = {field: name.partition(":")[0] for field, name in functions.items() if ":" in name and "://" not in name}
    timeout_s = min(launch_timeout_s, max(_USUAL_S, launch_timeout_s / 5))
    deadline = time.monotonic() + timeout_s
    for field, name in modules.items():
        if name.split(".")[0] in _OURS or name in sys.modules:
            continue
        try:
            with stage(f"importing {Path(name).name if name.endswith('.py') else name}", is_short=True):
                side_process.call(_import, name, timeout_s=deadline - time.monotonic())
        except SideProcessError as error:
            reason, hint = f"ended its process, which {error.reason}", ""
            if error.is_overdue:
                reason = f"did not return within {timeout_s:g} s (cluster.launch_timeout_s={launch_timeout_s:g})"
                hint = ", or raise cluster.launch_timeout_s, of which imports have a fifth"
            raise ConfigError(
                f"the import of {name} {reason}; it printed {error.printed}",
                field=field,
                hint=f"keep what computes for long, or ends the program, out of the top level of {name}{hint}",
            ) from None


def _import(name: str) -> None:
    with suppress(Exception, SystemExit):
        imported(name)


def try_environment(config: RunConfig, prompts: Prompts) -> None:
    """Begins an episode of the first training record, and one of the first record of each evaluated held-out set.

    Does nothing without an environment, or with cluster.address: maybe only that cluster's nodes have what the
    environment needs.

    Raises:
        ConfigError: the environment raised, did not return in time, ended its process, or returned a value that the
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
    """Has the reward function score one response to the first record: the record's answer, or an empty text.

    Does nothing for a function of this project, a URL, a function that the driver itself calls, with cluster.address,
    and with rollout.reward_failure=skip, as a failure then only leaves out a group.

    Raises:
        ConfigError: the function raised, did not return in time, ended its process, or returned a value that is not a
            reward.
    """
    settings = config.rollout
    name = settings.reward
    if name is None or is_url(name) or name.startswith("actors.") or settings.reward_failure == "skip":
        return
    if settings.reward_workers == 0 or config.cluster.address is not None:
        return
    record = prompts.train[0]
    answer = record.get("answer")
    response = ("" if answer is None else str(answer).strip(), True)
    with stage(f"scoring one response with {name}", is_short=True):
        _try(config, [EpisodeCall((0, 0, 0), record, config.run.seed, (response,), is_last=True)])


def _try(config: RunConfig, calls: Sequence[EpisodeCall]) -> None:
    """Runs the calls in a side process; raises a ConfigError if a call failed."""
    code = UserCode.of(config)
    template_kwargs = dict(config.data.chat_template_kwargs or {})
    timeout_s = config.cluster.launch_timeout_s + code.timeout_s * len(calls)
    try:
        side_process.call(_try_here, code, calls, str(config.model.path), template_kwargs, timeout_s=timeout_s)
    except SideProcessError as error:
        if error.is_overdue:
            raise _as_config_error(code.overdue(calls[0], calls[0].turn)) from None
        places = " or ".join(place_of(call.record) for call in calls)
        raise ConfigError(
            f"the process of {code.name} {error.reason} for {places}; it printed {error.printed}",
            field=code.field,
            hint=code.correct_it,
        ) from None


def _try_here(code: UserCode, calls: Sequence[EpisodeCall], model_path: str, template_kwargs: dict[str, Any]) -> None:
    tokenizers: list[Any] = []  # loaded once it is needed

    def encode(prompt: Any) -> None:
        if not tokenizers:
            tokenizers.append(load_tokenizer(model_path))
        encode_prompt(tokenizers[0], prompt, template_kwargs)

    try_calls(code, calls, encode)


def try_calls(code: UserCode, calls: Sequence[EpisodeCall], encode: Callable[[Any], object]) -> None:
    """Runs the calls in this process, and encodes the prompts that they return.

    This process must be a side process, since it answers with the error and ends if a call takes too long.

    Args:
        encode: turns a prompt into tokens.

    Raises:
        ConfigError: as in `try_environment` and `try_reward`, except that the caller reports the end of the process.
    """
    host = CodeHost(code)
    for call in calls:
        overdue = (None, _as_config_error(code.overdue(call, call.turn)))
        late = threading.Timer(min(code.timeout_s, LONGEST_WAIT_S), side_process.answer, overdue)
        late.daemon = True
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
            problem = f"{code.name} returned an unusable prompt: {error.message}"
            raise _as_config_error(code.failure(problem, call, 0, error.hint)) from error
    host.forget(calls[0].key[0])


def _as_config_error(error: SlimeError) -> ConfigError:
    return ConfigError(error.message, field=error.field, hint=error.hint)
