"""`slimefsdp eval MODEL` evaluates a model on held-out prompts, without any training."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.cli.preflight import check_functions, check_start
from actors.cluster.capacity import gpus_of_engines
from actors.cluster.connect import ray_session
from actors.rollout.data_sets import DataSource, require_reader
from actors.rollout.prompt_files import Prompts, read_heldout
from actors.rollout.record_sets import record_sets, warn_of_shared_prompts
from actors.rollout.trials import try_environment, try_reward
from actors.startup import reporting, stage
from slimefsdp.config import RunConfig
from slimefsdp.config.data import heldout_field
from slimefsdp.config.loader import apply_override, read_settings
from slimefsdp.config.run import config_from_dict
from slimefsdp.errors import ConfigError
from slimefsdp.io.files import FolderLock, io_reported, require_free_folder, write_synced
from slimefsdp.models.hf_folder import check_tokenizer
from slimefsdp.replay import json_text

if TYPE_CHECKING:
    from actors.rollout.groups import Metrics

METRICS = "metrics.json"
_CHECKED_PROMPTS = 4  # number of prompts for checking the log-probs of engines that do not run the trainer's code
# sections of a run's settings that its evaluations depend on
_SECTIONS = (
    "mesh",
    "fsdp",
    "attention",
    "precision",
    "batch",
    "data",
    "rollout",
    "environment",
    "evaluation",
    "cluster",
)


def eval_command(
    model: str, overrides: Sequence[str], run_settings: Path | None, output: Path | None, *, as_json: bool
) -> int:
    """Evaluates a model and prints its metrics.

    Args:
        run_settings: YAML file of a run, to evaluate as that run does.
        output: new folder for the metrics and the responses.

    Raises:
        SlimeError: the settings or the machine are wrong, which is found before anything starts; or a failure later.
    """
    config = settings_of(model, overrides, run_settings, output)
    with reporting():
        config, prompts = check_before_evaluation(config)
        with ray_session(config):
            metrics = evaluated(config, prompts)
    if output is not None:
        file = output / METRICS
        with io_reported(file, "eval"):
            temporary = output / f".{METRICS}.tmp"
            write_synced(temporary, (json.dumps(metrics, indent=2) + "\n").encode())
            temporary.replace(file)
    print(json_text(metrics) if as_json else "\n".join(evaluation_lines(config, prompts, metrics)))
    return 0


def settings_of(model: str, overrides: Sequence[str], run_settings: Path | None, output: Path | None) -> RunConfig:
    """Returns the settings of an evaluation; the arguments are those of `eval_command`.

    Raises:
        ConfigError: as `slimefsdp.load_config`; also if data.heldout or a source of rewards is not set, or if an
            override is not a setting of evaluations.
    """
    given = {} if run_settings is None else read_settings(run_settings)
    if unknown := sorted(given.keys() - RunConfig.model_fields.keys()):
        raise ConfigError(f"{unknown[0]} is not a setting", field=unknown[0], hint=f"correct it in {run_settings}")
    tree = {name: given[name] for name in _SECTIONS if name in given}
    for section, name in (("run", "seed"), ("model", "read")):
        if isinstance(given.get(section), dict) and name in given[section]:
            tree[section] = {name: given[section][name]}
    for override in overrides:
        name = override.partition("=")[0].strip()
        is_taken = name.partition(".")[0] in _SECTIONS or name in ("run.seed", "model.read")
        if not is_taken or name == "evaluation.interval_steps":
            hint = "remove it; the model and --output are arguments of their own"
            raise ConfigError(f"{name} says nothing about an evaluation", field=name, hint=hint)
        apply_override(tree, override)
    config = config_from_dict(
        {
            **tree,
            "model": {**(tree.get("model") or {}), "path": model},
            "optim": {"total_updates": 1},
            "evaluation": _with_pass_at(tree.get("evaluation")),
            "run": {**(tree.get("run") or {}), "dir": None if output is None else str(output)},
        }
    )
    for field in ("data.heldout", config.rewards_by):
        if config.value_of(field) is None:
            named = f"{field}=.. or rollout.environment=.." if field == "rollout.reward" else f"{field}=.."
            raise ConfigError(f"{field} is not set", field=field, hint=f"add {named}, or --config YAML of a run")
    return config


def _with_pass_at(evaluation: Any) -> Any:
    """Returns the section `evaluation` with interval_steps=1 and a default of pass_at: 1 and samples_per_prompt."""
    evaluation = {} if evaluation is None else evaluation
    if not isinstance(evaluation, dict):
        return evaluation  # `config_from_dict` refuses this
    given = evaluation.get("samples_per_prompt")
    samples = 1 if given is None else given
    return {"pass_at": sorted({1, max(1, samples)}) if type(samples) is int else [], **evaluation, "interval_steps": 1}


def check_before_evaluation(config: RunConfig) -> tuple[RunConfig, Prompts]:
    """Checks all that an evaluation needs before anything starts; returns settings with local folders, and prompts."""
    if config.run.dir is not None:
        require_free_folder(config.run.dir, field="--output")
    with stage("checking settings and data", is_short=True):
        for name, written in config.data.heldout_sets.items():
            require_reader(DataSource.of(written), heldout_field(name))
        config = check_start(config, engines=gpus_of_engines(config))
        check_tokenizer(config.model.path)
        check_functions(config)
    prompts = read_heldout(config)
    try_environment(config, prompts)
    try_reward(config, prompts)
    warn_of_shared_prompts(record_sets(config.data, prompts.heldout))
    if config.run.dir is not None:
        require_free_folder(config.run.dir, field="--output")
        FolderLock(config.run.dir).acquire()  # otherwise another process could begin before a file is written there
    return config, prompts


def evaluated(config: RunConfig, prompts: Prompts) -> Metrics:
    """Returns the model's metrics; a group of ranks reads the weights and sends them to the engines.

    Raises:
        SlimeError: any typed error; all processes are ended before the error is raised.
    """
    from actors.engines.pool import EnginePool
    from actors.rollout.collect import Collector
    from actors.rollout.evaluation import Evaluator
    from actors.rollout.user_code_workers import UserCodeWorkers
    from actors.workers.worker_group import WorkerGroup

    with ExitStack() as stack:
        group = WorkerGroup.launch(config)
        stack.callback(group.shutdown)
        config = group.config
        engines = EnginePool.launch(config, group if config.rollout.placement == "colocated" else None)
        stack.callback(engines.shutdown)
        engines.check_room(prompts.longest_heldout, evaluates=True)
        rewards = UserCodeWorkers.launch(config)
        stack.callback(rewards.shutdown)
        collector = Collector(config, engines, None, prompts, rewards)
        with stage("sending the weights to the engines"):
            version = engines.update_from(group)
        if config.rollout.engine != "embedded":  # embedded engines run the trainer's code
            with stage("comparing log-probs of engines and ranks", is_short=True):
                engines.check_log_probs(group, collector.first_prompts(_CHECKED_PROMPTS))
        evaluator = Evaluator(config, collector)
        with stage("evaluating", evaluator.progress):
            return evaluator.evaluate(0, version)


def evaluation_lines(config: RunConfig, prompts: Prompts, metrics: Metrics) -> list[str]:
    from actors.rollout.evaluation import metric_prefix

    sampling, samples = config.sampling(evaluates=True), config.evaluation.samples_per_prompt
    sets = config.data.heldout_sets
    sizes = {name: f"{len(prompts.heldout[name]):,} prompts of {path}" for name, path in sets.items()}
    drawn = f"{samples} response{'s' * (samples > 1)} to each at temperature {sampling.temperature:g}"
    drawn = drawn if sampling.temperature else "the likeliest response to each"
    lines = [
        f"{config.model.path}: {sizes.get('') or f'{len(sets)} held-out sets'}",
        f"{drawn}, of at most {sampling.max_new_tokens:,} tokens",
    ]
    for name, size in sizes.items():
        prefix = metric_prefix(name)
        lines += [f"{name}: {size}"] if name else []
        lines += _metric_lines({key.removeprefix(prefix): metrics[key] for key in metrics if key.startswith(prefix)})
    return lines


def _metric_lines(metrics: Metrics) -> list[str]:
    """Returns the lines of one held-out set, from its metrics without the set's prefix."""
    width, lines = max(map(len, metrics)), []
    shares = [name for name in metrics if re.fullmatch(r"pass@\d+", name)]
    ends = {f"{name}_{end}" for name in shares for end in ("low", "high")}
    for name, value in metrics.items():
        if name in ends:
            continue
        interval = ""
        if name in shares:
            interval = f"   95 % interval {metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f}"
        lines.append(f"  {name:<{width}}  {value:.3f}{interval}")
    return lines
