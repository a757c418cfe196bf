"""The command line `slimefsdp`: ten commands, their arguments, and how an error is printed.

A command's module is imported when the command runs, so that `--help` and shell completion are quick. An error prints
as a few lines on stderr and sets the exit status of its class; `--debug` shows the traceback instead.
"""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import slimefsdp
from actors.cli import convert, groups
from actors.cli.arguments import AsJson, Config, Overrides, examples, one_of, path, path_as_written
from slimefsdp.errors import ConfigError, ResourceError, SlimeError, printable
from slimefsdp.estimate.hardware import DEVICES

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 1000  # limit on the characters printed of one message
# the base class of the parser's errors, for which typer has no public name
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, subcommand_metavar="COMMAND")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    return run_typer(app, "slimefsdp", arguments)


def run_typer(commands: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a typer program whose commands return exit statuses and raise typed errors; returns the exit status.

    Args:
        name: the name of the program in its help.
        arguments: the arguments of the command line; None means the arguments of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    shows_tracebacks = "--debug" in words
    words = [word for word in words if word != "--debug"]  # every command takes --debug, at any position
    command = typer.main.get_command(commands)
    if f"_{name.upper()}_COMPLETE" in os.environ:
        command.main(prog_name=name)  # answers the shell, and ends this process
    try:
        try:
            # the command's own `main` is not used, since it turns Ctrl-C and a closed pipe into other exit statuses
            with command.make_context(name, words or ["--help"]) as context:
                return int(command.invoke(context) or 0)
        except _USAGE_ERROR as error:
            raise _as_config_error(error) from error
        except OSError as error:
            if error.errno not in _FULL_DISK:
                raise
            problem = f"{error.filename or 'a file'}: {error.strerror}"
            hint = "make room there, or name another folder"
            raise ResourceError(problem, field="run.dir", hint=hint) from error
    except SlimeError as error:
        if shows_tracebacks:
            raise
        return report(error)
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed it; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def report(error: SlimeError) -> int:
    """Prints an error on a few lines of stderr; returns the exit status of its class."""
    print(f"error [{error.code}]: {_one_line(error.message)}", file=sys.stderr)
    if error.rank is not None or error.call is not None:
        where = f"rank {error.rank}" if error.rank is not None else "driver"
        print(f"  where: {where}{f', in {error.call}' if error.call else ''}", file=sys.stderr)
    if error.field:
        print(f"  field: {_one_line(error.field)}", file=sys.stderr)
    if error.hint:
        print(f"  hint:  {_one_line(error.hint)}", file=sys.stderr)
    for other in error.others:
        print(f"  also:  {_one_line(other)}", file=sys.stderr)
    return error.exit_code


def _one_line(text: str) -> str:
    """Returns a text as one line of bounded length, since messages of other libraries may have many or long lines."""
    text = printable(text)  # a message of another library may have been added to an error of ours
    line = textwrap.shorten(text, _LONGEST, placeholder=" .. (all of it: --debug)") if "\n" in text else text
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} .. {line[-_LONGEST // 4 :]}"


def _as_config_error(error: Exception) -> ConfigError:
    """Turns an error of the parser into a typed error that names the argument or option."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    field = getattr(error, "option_name", None)
    if parameter is not None:
        field = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name
    elif field is None:  # the name of a command is missing or unknown, or there is a word too many
        field = getattr(getattr(context, "command", None), "subcommand_metavar", None)
    command = getattr(context, "command_path", "slimefsdp")
    hint = f"`{command} --help` lists its arguments; settings are written as SECTION.NAME=VALUE, without dashes"
    return ConfigError(error.format_message(), field=field, hint=hint)  # type: ignore[attr-defined]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"slimefsdp {slimefsdp.__version__}")
        raise typer.Exit


@app.callback(epilog="Every command takes --debug, which shows the traceback of an error.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models with reinforcement learning: FSDP2 on Ray."""


@app.command(
    epilog=examples(
        "slimefsdp train configs/sort_digits_grpo.yaml",
        "slimefsdp train run.yaml optim.lr=1e-6 mesh.dp=2 --dry-run",
    )
)
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make all checks of a start, say what would start, and start nothing.")
    ] = False,
) -> int:
    """Run the training loop of a YAML file."""
    from actors.cli.train import dry_run_command, train_command

    return (dry_run_command if dry_run else train_command)(config, overrides or ())


@app.command(epilog=examples("slimefsdp serve configs/serve.yaml service.address=127.0.0.1:8001 lora.rank=32"))
def serve(config: Config, overrides: Overrides = None) -> int:
    """Serve the Tinker API over HTTP, for clients that train and sample."""
    from actors.cli.serve import serve_command

    return serve_command(config, overrides or ())


@app.command(
    name="eval",
    epilog=examples(
        "slimefsdp eval runs/first/model --config run.yaml",
        "slimefsdp eval Qwen/Qwen3-0.6B data.heldout=held.jsonl rollout.reward=rewards.py:score --output results",
    ),
)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            parser=path_as_written, metavar="MODEL", help="Hugging Face folder, such as a run's export, or a hub id."
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(parser=path, metavar="YAML", help="Settings of a run, to evaluate as that run does.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, metavar="DIR", help="New folder for metrics.json and the responses.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say how a model answers held-out prompts: data.heldout, and rollout.reward or rollout.environment, are needed."""
    from actors.cli.evaluate import eval_command

    return eval_command(model, overrides or (), config, output, as_json=as_json)


@app.command(
    epilog=examples(
        "slimefsdp check",
        "slimefsdp check run.yaml loss.policy=gspo",
        "slimefsdp check run.yaml cluster.address=10.0.0.1:6379 --nodes 4",
    )
)
def check(
    config: Annotated[Path | None, typer.Argument(parser=path, metavar="CONFIG", help="YAML file of settings.")] = None,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also check the N nodes of the cluster at cluster.address (auto without CONFIG), and the network "
            "between them.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say what this machine can run, what settings can choose, and everything that is wrong with a YAML file."""
    from actors.cli.check import check_command

    return check_command(config, overrides or (), nodes=nodes, as_json=as_json)


@app.command(
    epilog=examples(
        "slimefsdp plan run.yaml --ranks 8 --device H100",
        "slimefsdp plan run.yaml --calibrate rates.json",
        "slimefsdp plan run.yaml batch.cost_model=rates.json",
        "slimefsdp plan run.yaml --longest-context --memory-gb 80",
    )
)
def plan(
    config: Config,
    overrides: Overrides = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Tokens per sample: fixed(n), uniform(min, max), lognormal(mean, sigma, min, max), a JSON list, or a "
            "file of RolloutBatch.save, which is planned as it would be trained. Default: a guess from the settings.",
        ),
    ] = None,
    longest_context: Annotated[
        bool,
        typer.Option("--longest-context", help="Print instead the longest sample that fits a rank's memory."),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Number of ranks; required if mesh.dp is auto.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            parser=one_of(DEVICES),
            metavar="|".join(DEVICES),
            help="Device whose nominal rates and memory are used. Default: CPU for mesh.device=cpu, otherwise H100.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="First measure this machine's rates with the mesh's ranks, at most one per GPU; write the rates to "
            "FILE, for batch.cost_model, and plan with them.",
        ),
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(metavar="GB", help="Memory of a rank's device, in 10^9 bytes.")
    ] = None,
    gbps: Annotated[
        float | None, typer.Option(metavar="RATE", help="Sending rate of a rank, in 10^9 bytes a second.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Estimate schedule, balance, traffic, memory and time of a YAML file without running it."""
    from actors.cli.plan import Flags, plan_command

    flags = Flags(lengths, ranks, device, calibrate, memory_gb, gbps)
    return plan_command(config, overrides or (), flags, longest_context=longest_context, as_json=as_json)


@app.command(
    epilog=examples("slimefsdp replay run.yaml --batch runs/first/batches/step_00000005/batch.safetensors mesh.dp=2")
)
def replay(
    config: Config,
    batch: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="File that RolloutBatch.save wrote.")],
    overrides: Overrides = None,
    export: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="New Hugging Face folder for the weights after the step."),
    ] = None,
) -> int:
    """Run one recorded batch through train_step on Ray workers; print its metrics as JSON."""
    from actors.cli.train import replay_command

    return replay_command(config, overrides or (), batch, export)


@app.command(epilog=examples("slimefsdp curves runs/first"))
def curves(
    run_dir: Annotated[Path, typer.Argument(parser=path, metavar="RUN_DIR", help="run.dir of a running or ended run.")],
) -> int:
    """Draw a run's curves.png from the metrics that it has written so far."""
    from slimefsdp.config import load_config
    from slimefsdp.io.files import io_reported
    from slimefsdp.monitoring.metrics_log import read_metrics

    rows = read_metrics(run_dir)
    if not rows:
        problem = f"{run_dir} has no metrics: no step is finished there yet, or it is no run.dir"
        raise ConfigError(problem, field="RUN_DIR", hint="wait for the first step, or name the run.dir of a run")
    title, heldout_sets = run_dir.resolve().name, tuple[str, ...]()
    try:
        config = load_config(run_dir / "settings.yaml")
        title, heldout_sets = f"{title}: {config.algorithm_title}", tuple(config.data.heldout_sets)
    except ConfigError as error:  # the file is of an earlier version or missing, but the metrics can still be drawn
        print(f"held-out sets share their panels, since settings.yaml is not read: {error.message}", file=sys.stderr)
    from slimefsdp.monitoring.curves import CURVES, draw_curves  # imports matplotlib

    target = run_dir / CURVES
    with io_reported(target, "curves"):
        draw_curves(rows, target, title=title, heldout_sets=heldout_sets)
    print(f"{target}: {len(rows)} rows, to step {max(int(row['step'] or 0) for row in rows)}")
    return 0


@app.command(
    name="report",
    epilog=examples(
        "slimefsdp report runs/first --watch 30", "slimefsdp report runs/first runs/second --output compared.html"
    ),
)
def report_of_runs(
    runs: Annotated[
        list[Path], typer.Argument(parser=path, metavar="RUN...", help="run.dir of running or ended runs.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="The page to write. Default: report.html in the only RUN."),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=1, max=86400, metavar="SECONDS", help="Write the page again and again, while a run goes on."),
    ] = None,
) -> int:
    """Write runs as one HTML page: findings, curves, held-out responses, events and settings."""
    from actors.cli.report import report_command

    return report_command(runs, output, watch)


app.add_typer(groups.commands, name="groups", subcommand_metavar="COMMAND")
app.add_typer(convert.commands, name="convert", subcommand_metavar="KIND")

if __name__ == "__main__":
    sys.exit(main())
