"""`slimefsdp check`: whether this machine can run anything, what there is to choose from, and what settings choose.

With settings, they are validated and the functions they name are imported; nothing is started.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actors.cli.environment import Environment, Package, look_around
from actors.cli.preflight import check_before_launch
from actors.model_folders import NotHere
from actors.rollout.filters import FILTERS
from actors.rollout.record_sets import RecordSet
from actors.rollout.rewards import exact_match, final_number, sorted_digits
from actors.startup import reporting
from slimefsdp.algorithms.registry import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from slimefsdp.config import RunConfig, load_config
from slimefsdp.config.callables import load_function
from slimefsdp.config.launch import check_ready_to_train
from slimefsdp.errors import ConfigError, ResourceError, byte_text

_Choices = dict[str, dict[str, str]]  # setting -> what it may be -> a line about it

REGISTRY: _Choices = {
    "advantage.estimator": ESTIMATORS,
    "loss.policy": POLICY_LOSSES,
    "loss.reduction": REDUCTIONS,
    "loss.kl_estimator": KL_ESTIMATORS,
    "correction.method": CORRECTIONS,
    "rollout.filter": FILTERS,
    "rollout.reward": {
        f"{function.__module__}:{function.__name__}": str(inspect.getdoc(function)).partition("\n")[0]
        for function in (exact_match, final_number, sorted_digits)
    },
}
"""All that can be named in the settings without writing code."""
_TAKES_OWN = ("advantage.estimator", "loss.policy", "rollout.filter", "rollout.reward")  # as module:function


def check_command(path: Path | None, overrides: Sequence[str], *, as_json: bool) -> int:
    """Prints what was found, with settings a verdict in the end.

    Settings with data.train are checked as `slimefsdp train` would check them, others as those of your own loop.

    Raises:
        SlimeError: as `check_before_launch`. ResourceError: more processes than this machine takes, or, once all is
            printed, something without which nothing runs.
    """
    config = None if path is None else load_config(path, overrides)
    chosen: _Choices = {}
    refusal: str | None = None
    sets: list[RecordSet] = []
    absent: list[NotHere] = []
    if config is not None:
        with reporting():
            checked = check_before_launch(config, only_looks=True, is_own_loop=config.data.train is None)
        sets, absent = checked.sets, checked.absent
        chosen = chosen_functions(config)
        refusal = _refusal_of_train(config) if config.data.train is None else None
    found = look_around()
    if as_json:
        packages = [{**asdict(one), "is_supported": one.is_supported} for one in found.packages]
        record: dict[str, Any] = {"environment": {**asdict(found), "packages": packages}, "registry": REGISTRY}
        if config is not None:
            record |= {"chosen": chosen, "train": refusal, "data": [_json_of(one) for one in sets]}
            record |= {"not_here": [asdict(one) for one in absent]}
        print(json.dumps(record, indent=1))
    else:
        print("\n".join([*_environment_lines(found), *_registry_lines(chosen), *_data_lines(sets)]))
    if found.problems:
        raise ResourceError(
            "; ".join(found.problems), field="environment", hint="install what is missing: see README.md, Install"
        )
    if config is not None and not as_json:
        print("\n".join(["", *(f"not here  {one}" for one in absent)]))
        lacks_data = any(one.field.startswith("data.") for one in absent)
        rewards_by = config.rollout.reward or config.rollout.environment
        untried = config.rewards_by.partition(".")[2] if lacks_data and rewards_by else ""
        print(
            "these settings are fine"
            + (" once that is here" if absent else "")
            + (f" (the {untried} was not tried)" if untried else "")
            + ("" if refusal is None else f" for a loop of your own; `slimefsdp train` would refuse them: {refusal}")
        )
    return 0


def _data_lines(sets: Sequence[RecordSet]) -> list[str]:
    width = max((len(one.field) for one in sets), default=0)
    return [*([""] if sets else []), *(f"{one.field:{width}}  {one}" for one in sets)]


def _json_of(one: RecordSet) -> dict[str, Any]:
    return {**asdict(one), "source": str(one.source)}


def _refusal_of_train(config: RunConfig) -> str | None:
    """Why `slimefsdp train` would not take these settings, which a loop of one's own may; None: it would."""
    try:
        check_ready_to_train(config)
    except ConfigError as error:
        return f"{error.message}; {error.hint}"
    return None


def chosen_functions(config: RunConfig) -> _Choices:
    """Returns setting -> the function it chooses, with its line of `REGISTRY` or, for a user's own, its place."""
    names: dict[str, str] = {"loss.reduction": config.loss.reduction}
    if config.algorithm != "sft":
        names["loss.policy"] = config.loss.policy
    if config.has_rollouts:
        names["advantage.estimator"] = config.estimator
        if config.loss.kl_coefficient > 0:
            names["loss.kl_estimator"] = config.kl_estimator
        if config.correction.method != "none":
            names["correction.method"] = config.correction.method
        if config.rollout.filter is not None:
            names["rollout.filter"] = config.rollout.filter
        if config.rollout.reward is not None:
            names["rollout.reward"] = config.rollout.reward
        if config.rollout.environment is not None:
            names["rollout.environment"] = config.rollout.environment
    return {
        setting: {name: REGISTRY.get(setting, {}).get(name) or _place(name, setting)} for setting, name in names.items()
    }


def _place(name: str, field: str) -> str:
    """Returns the file and line of a function of the user."""
    function = load_function(name, field=field, example=name)
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):  # a builtin, an object with __call__
        return repr(function)


def _environment_lines(found: Environment) -> list[str]:
    needed = [one for one in found.packages if not one.is_optional]
    optional = [one for one in found.packages if one.is_optional]
    devices = [f"{name}, {byte_text(size)}" for name, size in found.gpus] or ["no CUDA device"]
    rows = [
        *((one.name, _version(one)) for one in needed),
        ("optional", "; ".join(f"{one.name} {_version(one)}" for one in optional)),
        ("devices", f"{found.cpu_cores} CPU cores, {byte_text(found.memory_bytes)}; {'; '.join(devices)}"),
        ("backends", ", ".join(found.backends) or "none"),
        ("loopback", "reachable" if found.has_loopback else "NOT reachable"),
        ("can run", found.can_run),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def _version(package: Package) -> str:
    if package.version is None:
        return "not installed" if package.is_optional else f"MISSING, {package.supported} is needed"
    return f"{package.version} ({'' if package.is_supported else 'NOT '}{package.supported})"


def _registry_lines(chosen: _Choices) -> list[str]:
    lines = []
    for setting, functions in REGISTRY.items():
        marked = chosen.get(setting, {})
        rows = {**functions, **marked}  # a function of the user's own comes last
        width = max(map(len, rows))
        lines += ["", f"{setting}, or module:function" if setting in _TAKES_OWN else setting]
        lines += [f" {'*' if name in marked else ' '} {name:{width}}  {text}" for name, text in rows.items()]
    return [*lines, *(["", "* chosen by these settings"] if chosen else [])]
