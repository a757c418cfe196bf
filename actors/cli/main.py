"""The command line: `slimefsdp train`, `serve`, `eval`, `replay`, `plan`, `calibrate`, `check` and so on.

What can be answered without a model is answered before torch, ray or transformers are imported. Errors print as a few
lines and set the exit status of their class; `--debug` shows the traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import slimefsdp
from actors.cli.bench import add_bench_arguments, bench_command
from actors.cli.calibrate import add_calibrate_arguments, calibrate_command
from actors.cli.check import add_check_arguments, check_command
from actors.cli.convert import add_convert_arguments, convert_command
from actors.cli.curves import add_curves_arguments, curves_command
from actors.cli.dry_run import start_lines
from actors.cli.evaluate import (
    add_eval_arguments,
    check_before_evaluation,
    evaluated,
    evaluation_lines,
    keep_metrics,
    settings_of,
)
from actors.cli.groups import add_status_arguments, add_stop_arguments, status_command, stop_command
from actors.cli.plan import add_plan_arguments, plan_command
from actors.cli.preflight import check_before_launch, check_installed, check_models, cluster_line
from actors.cli.serve import add_serve_arguments, checked_to_serve
from actors.cli.torchrun import is_rank_of_torchrun, train_as_rank
from actors.cluster.connect import check_gpus, check_machine, connect, disconnect, start_progress
from actors.cluster.ray_log import RAY_LOG
from actors.model_folders import with_model_folders
from actors.signals import Interrupts
from actors.startup import reporting, stage
from slimefsdp.config import RunConfig, load_config
from slimefsdp.errors import BatchError, ConfigError, ResourceError, SlimeError, printable
from slimefsdp.io.atomic_dir import require_free_folder
from slimefsdp.io.user_files import path_argument
from slimefsdp.replay import add_arguments as add_replay_arguments
from slimefsdp.replay import json_text

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 1000  # characters of what is printed of a text
# what it is for; what gives its parser arguments, and may return further parsers; what runs it
_Command = tuple[
    str,
    Callable[[argparse.ArgumentParser], Sequence[argparse.ArgumentParser] | None],
    Callable[[argparse.Namespace], int],
]


class _Parser(argparse.ArgumentParser):
    """Mistakes are typed errors like all others, and options are written out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        field, problem, near, way_out = None, message, "", ""
        if about := re.match(r"argument ([^:]+): (.*)", message, re.DOTALL):
            field = about[1].split("/")[-1]
            said, _, way_out = about[2].partition("\n")
            problem = f"{field}: {said}"
        elif missing := re.match(r"the following arguments are required: (.*)", message):
            field = missing[1].split(", ")[0]
            problem = f"{field} is missing"
        if invalid := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            close = difflib.get_close_matches(invalid[1], re.findall(r"[\w-]+", invalid[2]), n=1, cutoff=0.7)
            near = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(problem, field=field, hint=way_out or f"{near}`{self.prog} --help` says what it takes")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"slimefsdp {slimefsdp.__version__}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    shows_tracebacks = "--debug" in (sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parsed(arguments)
        return int(options.run(options))
    except SlimeError as error:
        if shows_tracebacks:
            raise
        return _report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if shows_tracebacks or error.errno not in _FULL_DISK:
            raise
        problem = f"{error.filename or 'a file'}: {error.strerror}"
        return _report(ResourceError(problem, field="run.dir", hint="make room there, or name another folder"))


def _report(error: SlimeError) -> int:
    """Prints the error on a few lines; returns the exit status of its class."""
    print(f"error [{error.code}]: {_one_line(error.message)}", file=sys.stderr)
    if error.rank is not None or error.call is not None:
        place = f"rank {error.rank}" if error.rank is not None else "driver"
        print(f"  where: {place}{f', in {error.call}' if error.call else ''}", file=sys.stderr)
    if error.field:
        print(f"  field: {_one_line(error.field)}", file=sys.stderr)
    if error.hint:
        print(f"  hint:  {_one_line(error.hint)}", file=sys.stderr)
    for other in error.others:
        print(f"  also:  {_one_line(other)}", file=sys.stderr)
    return error.exit_code


def _one_line(text: str) -> str:
    """Words of other libraries may come on many lines, and values that somebody typed may have no end."""
    text = printable(text)  # another library's may have been added to an error of ours
    line = textwrap.shorten(text, _LONGEST, placeholder=" .. (all of it: --debug)") if "\n" in text else text
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} .. {line[-_LONGEST // 4 :]}"


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    options, rest = _parser(next((word for word in words if not word.startswith("-")), None)).parse_known_args(words)
    # argparse ends a list of plain arguments at the first option: settings behind `--batch FILE` come back as unknown
    takes_settings = hasattr(options, "overrides")
    strays = [item for item in rest if item.startswith("-") or "=" not in item or not takes_settings]
    if strays:
        near = difflib.get_close_matches(strays[0], options.parser._option_string_actions, n=1)
        hint = f"{f'did you mean {near[0]}? ' if near else ''}`{options.parser.prog} --help` says what it takes"
        if takes_settings and (meant := _settings_like(strays[0], words)):
            hint = f"settings are written without dashes: write {' or '.join(meant)}"
        raise ConfigError(
            f"{strays[0]} is no argument of {options.parser.prog}",
            field=strays[0],
            hint=hint,
        )
    if takes_settings:
        options.overrides += rest
    return options


def _settings_like(option: str, words: Sequence[str]) -> list[str]:
    """The settings that may have been meant by `--steps 3`, `--run.steps=3` or the like, with their values."""
    name, equals, value = option.lstrip("-").partition("=")
    following = words[words.index(option) + 1 :][:1] if option in words and not equals else []
    value = value if equals else next((word for word in following if not word.startswith("-")), "..")
    name = name.replace("-", "_")
    known = [
        f"{section}.{field}"
        for section, info in RunConfig.model_fields.items()
        for field in getattr(info.annotation, "model_fields", ())
    ]
    return [f"{one}={value}" for one in known if name in (one, one.partition(".")[2])]


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of the command line, in which every command is known and the one that was named has its arguments."""
    parser = _Parser(prog="slimefsdp", description="FSDP2 training backend for RL post-training")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers: list[argparse.ArgumentParser] = [parser]
    for name, (purpose, add_arguments, run) in _commands().items():
        one = commands.add_parser(name, help=purpose)
        one.set_defaults(run=run)
        parsers.append(one)
        if name == command:
            parsers.extend(add_arguments(one) or ())
    for each in parsers:
        each.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        each.set_defaults(parser=each)
    return parser


def _commands() -> dict[str, _Command]:
    return {
        "train": ("run the training loop of a YAML file", _add_train_arguments, _train),
        "serve": ("the Tinker API over HTTP, for clients that train and sample", add_serve_arguments, _serve),
        "status": ("the named groups of a Ray cluster", add_status_arguments, status_command),
        "stop": ("end a named group", add_stop_arguments, stop_command),
        "eval": ("how a model folder answers held-out prompts", add_eval_arguments, _eval),
        "curves": ("draw a run's curves from what it has written so far", add_curves_arguments, curves_command),
        "replay": ("run one recorded batch through train_step", add_replay_arguments, _replay),
        "plan": ("schedule, balance, traffic and memory, without running anything", add_plan_arguments, plan_command),
        "calibrate": (
            "measure this machine's rates, for plan and batch.cost_model", add_calibrate_arguments, calibrate_command
        ),
        "check": (
            "versions and devices, what there is to choose from, what settings choose",
            add_check_arguments, check_command,
        ),
        "convert": (
            "models between Hugging Face, DCP and checkpoint folders, offline", add_convert_arguments, convert_command
        ),
        "bench": (
            "the train step beside other trainers, measured here; from a checkout", add_bench_arguments, bench_command
        ),
    }  # fmt: skip


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=path_argument, help="YAML settings")
    parser.add_argument("overrides", nargs="*", help="dotted settings, e.g. optim.lr=1e-6 mesh.dp=2")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all that is checked before a start, say what would be started"
    )


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    if options.dry_run:
        with reporting():
            checked = check_before_launch(config, only_looks=True)
            cluster = cluster_line(config)
        verdict = "once that is here" if checked.absent else "now"
        lines = [*start_lines(checked), *([] if cluster is None else [cluster])]
        print("\n".join([*lines, f"these settings are fine: `slimefsdp train` would start {verdict}"]))
        return 0
    if is_rank_of_torchrun():
        return train_as_rank(config)
    with ExitStack() as stack:
        stack.enter_context(reporting())
        checked = check_before_launch(config)
        config, prompts = checked.config, checked.prompts
        interrupts = stack.enter_context(Interrupts().listening(config.cluster.grace_s))
        _start_ray(config)
        try:
            from actors.loop import train

            print(train(config, interrupts, prompts))
        finally:
            disconnect()
    return 0


def _start_ray(config: RunConfig) -> None:
    """As `connect`; what Ray says goes into a file, which is named to whoever reads the terminal."""
    path = (config.run.dir or Path(tempfile.mkdtemp(prefix="slimefsdp-"))) / RAY_LOG
    print(f"Ray's messages, and what ranks and engines print: {path}", file=sys.stderr, flush=True)
    with stage("starting Ray" if config.cluster.address is None else "joining the cluster", start_progress):
        connect(config, path)


def _serve(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        stack.enter_context(reporting())
        config = checked_to_serve(load_config(options.config, options.overrides))
        _start_ray(config)
        try:
            from actors.service.serve import serve

            serve(config, lambda url, stop: print(f"serving {config.model.path} at {url}", flush=True))
        finally:
            disconnect()
    return 0


def _eval(options: argparse.Namespace) -> int:
    config = settings_of(options)
    with reporting():
        config, prompts = check_before_evaluation(config)
        _start_ray(config)
        try:
            metrics = evaluated(config, prompts)
        finally:
            disconnect()
    if options.output is not None:
        keep_metrics(metrics, options.output)
    print(json_text(metrics) if options.json else "\n".join(evaluation_lines(config, prompts, metrics)))
    return 0


def _replay(options: argparse.Namespace) -> int:
    with reporting():
        config = with_model_folders(load_config(options.config, options.overrides))
    check_models(config)
    check_installed(config)
    check_machine(config)
    check_gpus(config, engines=0)
    if not options.batch.exists():
        raise BatchError(f"{options.batch} does not exist", field="--batch", hint="name a file of RolloutBatch.save")
    if options.export is not None:
        require_free_folder(options.export, field="--export")
    from slimefsdp.data.rollout_batch import RolloutBatch

    try:
        batch = RolloutBatch.load(options.batch)
    except BatchError as error:
        error.field = error.field or "--batch"
        raise
    with reporting():
        _start_ray(config)
        try:
            from actors.workers.worker_group import WorkerGroup

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
