"""The command line: `slimefsdp train`, `replay`, `plan`, `calibrate`, `check`, `convert` and `bench`.

What can be answered without a model is answered before torch, ray or transformers are imported. Errors print as a few
lines and set the exit status of their class; `--debug` shows the traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from actors.bench_command import add_bench_arguments, bench_command
from actors.calibrate_command import add_calibrate_arguments, calibrate_command
from actors.check_command import add_check_arguments, check_command, check_functions
from actors.cluster import check_machine, connect, disconnect
from actors.convert_command import add_convert_arguments, convert_command
from actors.interrupts import Interrupts
from actors.plan_command import add_plan_arguments, plan_command
from actors.rollout.prompts import check_answers, read_jsonl
from actors.run_folder import RunFolder
from slimefsdp.attention.choice import AttentionShape, choose_strategy
from slimefsdp.checkpoint.lock import FolderLock
from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.dimensions import ModelDimensions
from slimefsdp.errors import BatchError, ConfigError, ResourceError, SlimeError
from slimefsdp.models.folder import check_architecture, read_model_folder
from slimefsdp.replay import add_arguments, json_text
from slimefsdp.surface import ROLES

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 1000  # of what is printed of a text on several lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parsed(arguments)
    try:
        return int(options.run(options))
    except SlimeError as error:
        if options.debug:
            raise
        return _report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if options.debug or error.errno not in _FULL_DISK:
            raise
        problem = f"{error.filename or 'a file'}: {error.strerror}"
        return _report(ResourceError(problem, field="run.dir", hint="make room there, or name another folder"))


def _report(error: SlimeError) -> int:
    """Prints the error on a few lines; returns the exit status of its class."""
    print(f"error [{error.code}]: {_one_line(error.message)}", file=sys.stderr)
    if error.rank is not None or error.phase is not None:
        place = f"rank {error.rank}" if error.rank is not None else "driver"
        print(f"  where: {place}{f', in {error.phase}' if error.phase else ''}", file=sys.stderr)
    if error.field:
        print(f"  field: {error.field}", file=sys.stderr)
    if error.hint:
        print(f"  hint:  {_one_line(error.hint)}", file=sys.stderr)
    for other in error.others:
        print(f"  also:  {_one_line(other)}", file=sys.stderr)
    return error.exit_code


def _one_line(text: str) -> str:
    """Words of other libraries may come on many lines."""
    return textwrap.shorten(text, _LONGEST, placeholder=" .. (all of it: --debug)") if "\n" in text else text


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse ends a list of plain arguments at the first option: settings behind `--batch FILE` come back as unknown
    takes_settings = hasattr(options, "overrides")
    strays = [item for item in rest if item.startswith("-") or "=" not in item or not takes_settings]
    if strays:
        parser.error(f"unrecognized arguments: {' '.join(strays)}")
    if takes_settings:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slimefsdp", description="FSDP2 training backend for RL post-training")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run the training loop of a YAML file")
    train.add_argument("config", type=Path, help="YAML settings")
    train.add_argument("overrides", nargs="*", help="dotted settings, e.g. optim.lr=1e-6 mesh.dp=2")
    train.set_defaults(run=_train)
    replay = commands.add_parser("replay", help="run one recorded batch through train_step")
    add_arguments(replay)
    replay.set_defaults(run=_replay)
    plan = commands.add_parser("plan", help="schedule, balance, traffic and memory, without running anything")
    add_plan_arguments(plan)
    plan.set_defaults(run=plan_command)
    calibrate = commands.add_parser("calibrate", help="measure this machine's rates, for plan and batch.cost_model")
    add_calibrate_arguments(calibrate)
    calibrate.set_defaults(run=calibrate_command)
    check = commands.add_parser(
        "check", help="versions and devices, what there is to choose from, what settings choose"
    )
    add_check_arguments(check)
    check.set_defaults(run=check_command)
    convert = commands.add_parser("convert", help="models between Hugging Face, DCP and checkpoint folders, offline")
    add_convert_arguments(convert)
    convert.set_defaults(run=convert_command)
    bench = commands.add_parser("bench", help="the train step beside other trainers, measured here; from a checkout")
    add_bench_arguments(bench)
    bench.set_defaults(run=bench_command)
    return parser


def check_before_launch(config: RunConfig) -> None:
    """All that can be known to fail without starting anything.

    Raises:
        SlimeError: of the class that fits: settings, model folder, data files, functions of the user's own, machine.
    """
    config.check_ready_to_train()
    _check_models(config)
    assert config.data.train is not None and config.run.dir is not None
    records = read_jsonl(config.data.train, field="data.train")
    if config.algorithm == "sft":
        check_answers(records, config.data.train, field="data.train")
    if config.data.heldout is not None:
        read_jsonl(config.data.heldout, field="data.heldout")
    check_functions(config)
    check_machine(config)
    try:
        _check_folders(config)
    except OSError as error:
        raise ConfigError(
            f"cannot use {error.filename}: {error.strerror}", field="run.dir", hint="name folders that you may write to"
        ) from None


def _check_folders(config: RunConfig) -> None:
    run_dir, export_dir = config.run.dir, config.run.export_dir
    assert run_dir is not None
    for field, folder in (("run.dir", run_dir), ("run.export_dir", export_dir)):
        if folder is None:
            continue
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(
                f"{field}={folder} cannot be made in {existing}", field=field, hint="choose another folder"
            )
    if config.checkpoint.resume and not RunFolder(run_dir).checkpoint_steps:
        raise ConfigError(
            f"run.dir={run_dir} holds no checkpoint to resume from",
            field="run.dir",
            hint="name the folder of a run that wrote one (checkpoint.interval_steps), or set checkpoint.resume=false",
        )
    FolderLock(run_dir).acquire()  # held until this process ends: another one must not begin while Ray starts
    metrics = run_dir / "metrics.jsonl"
    # without a row nothing was trained: a run that ended while it started may start again
    if not config.checkpoint.resume and metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            f"run.dir={run_dir} holds an earlier run",
            field="run.dir",
            hint="choose another run.dir, remove it, or set checkpoint.resume=true if it has checkpoints",
        )
    if export_dir is None:
        return
    if export_dir.exists() and any(export_dir.iterdir()):
        raise ConfigError(
            f"run.export_dir={export_dir} is not empty",
            field="run.export_dir",
            hint="choose another folder"
            + (", and raise run.steps if the run has ended already" if config.checkpoint.resume else ""),
        )
    if export_dir.resolve() in (run_dir.resolve(), *run_dir.resolve().parents):
        raise ConfigError(
            f"run.export_dir={export_dir} would hold run.dir={run_dir}",
            field="run.export_dir",
            hint="use a folder of its own, such as model/ inside run.dir",
        )


def _check_models(config: RunConfig) -> None:
    for path, field in dict.fromkeys(config.folder_of(role) for role in ROLES):
        with_weights = field != "model.path" or config.model.init == "folder"
        folder = read_model_folder(path, field=field, with_weights=with_weights)
        check_architecture(folder, field=field)
        shape = AttentionShape.of_dimensions(ModelDimensions.from_config(folder.config))
        choice = choose_strategy(config.attention.strategy, shape, config.mesh.cp)
        if config.mesh.cp > 1:
            print(f"attention of {folder.path} over {config.mesh.cp} ranks by {choice}", file=sys.stderr)


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    check_before_launch(config)
    with Interrupts().listening(config.cluster.grace_s) as interrupts:
        connect(config)
        try:
            from actors.loop import train

            print(train(config, interrupts))
        finally:
            disconnect()
    return 0


def _replay(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    _check_models(config)
    check_machine(config)
    if not options.batch.exists():
        raise BatchError(f"{options.batch} does not exist", field="--batch", hint="name a file of RolloutBatch.save")
    from slimefsdp.data.rollout import RolloutBatch

    batch = RolloutBatch.load(options.batch)
    connect(config)
    try:
        from actors.worker_group import WorkerGroup

        group = WorkerGroup.launch(config)
        metrics = group.train_step(batch)
        if options.export is not None:
            group.export_hf(options.export)
        group.shutdown()
        print(json_text(metrics))
    finally:
        disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
